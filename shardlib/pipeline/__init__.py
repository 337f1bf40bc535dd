"""Pipeline parallelism: schedules as data (`schedule`, `schedules`), and what runs them (`run`)."""
