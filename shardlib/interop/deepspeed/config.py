"""A DeepSpeed config as values for a train step."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib.errors import ConfigError, MeshError
from shardlib.interop.deepspeed.calls import Call, Name, call, value
from shardlib.interop.deepspeed.optimizers import MATRICES, matrices, optimizer
from shardlib.interop.deepspeed.read import Settings, Source, read
from shardlib.mesh import current_mesh
from shardlib.monitor import Monitor
from shardlib.optim.base import Optimizer
from shardlib.optim.schedules import Schedule
from shardlib.precision import Precision
from shardlib.zero import Layout


@dataclass(frozen=True)
class Config:
    """What `load` returns. A step takes `batch` rows: on each of `dp` ranks `accumulate` micro-batches of `microbatch`.

    `mesh`: its data-parallel axes, for `make_mesh`. `clip`: the largest gradient norm. `every`: how many steps lie
    between two reports. `notes`: keys that are left out, and why. `calls`: the rest as calls of the library.
    """

    batch: int
    microbatch: int
    accumulate: int
    dp: int
    mesh: dict[str, Any]
    clip: float | None
    every: int | None
    notes: Mapping[str, str]
    calls: Mapping[str, Any]

    def _value(self, name: str, **scope: Any) -> Any:
        return value(self.calls[name], {MATRICES.name: matrices, **scope})

    @property
    def schedule(self) -> Schedule | None:
        """The learning rate by the count of updates; None where the config has no scheduler."""
        return self._value("schedule")

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, with its schedule; None where the config has none."""
        return self._value("optimizer", schedule=self.schedule)

    @property
    def precision(self) -> Precision | None:
        """Dtypes and the scale of the loss; None where all stays as it is."""
        return self._value("precision")

    def layout(self, specs: Any) -> Layout:
        """Where the ZeRO stage cuts parameters, gradients and optimizer state, for a spec tree or a pytree class."""
        return self._value("layout", specs=specs)

    def monitors(self) -> list[Monitor]:
        """What notes the metrics: call each with a step and its metrics, on all ranks."""
        return self._value("monitors")

    def step(self, specs: Any, **changed: Any) -> dict[str, Any]:
        """The arguments of `step`: `sl.step(loss, **config.step(specs))`; `changed` replaces some, or adds to them."""
        found = {
            "optimizer": self.optimizer,
            "layout": self.layout(specs),
            "accumulate": self.accumulate,
            "precision": self.precision,
            "clip": self.clip,
        } | changed
        if found["optimizer"] is None:
            raise ConfigError("the DeepSpeed config has no optimizer: give one, config.step(specs, optimizer=...)")
        return found


def load(
    config: Source, *, dp: int | None = None, auto: Mapping[str, Any] | None = None, without: str | Sequence[str] = ()
) -> Config:
    """A DeepSpeed 0.19.8 config, a file's path or a dict, as layout, precision, optimizer, schedule and the rest.

    `dp`: the number of data-parallel ranks; by default that of the current mesh's `dp`, or what the batch sizes say.
    `auto`: what "auto" stands for: `lr`, `betas`, `eps`, `weight_decay`, `warmup`, `steps`, `batch`, `microbatch`,
    `accumulate`, `clip`, `fp16`, `bf16`, or whole paths of keys. `without`: globs over paths of keys to leave out,
    though DeepSpeed would honour them: `without="zero_optimization.offload_*"`.
    Raises `ConfigError` with all keys that are unknown, have a wrong value, contradict each other or cannot be
    honoured. docs/deepspeed.md says what becomes of each key.
    """
    settings = read(config, auto or {}, [without] if isinstance(without, str) else without)
    made, schedule = optimizer(settings)
    rows = _batch(settings, dp)
    mesh, layout = _zero(settings, rows["dp"])
    calls = {
        "optimizer": made,
        "schedule": schedule,
        "precision": _precision(settings),
        "layout": layout,
        "monitors": _monitors(settings),
    }
    settings.check()
    clip, every = settings.get("gradient_clipping", 1.0), settings.get("steps_per_print")
    if "gradient_clipping" not in settings.given:
        settings.notes["gradient_clipping"] = "not given, so 1.0, as DeepSpeed has it"
    found = Config(
        **rows, mesh=mesh, clip=float(clip) or None, every=every and int(every), notes=settings.notes, calls=calls
    )
    try:
        _ = found.optimizer, found.precision
    except ValueError as e:  # numbers that fit each key, and not each other
        raise ConfigError(f"this DeepSpeed config cannot be honoured:\n  {e}") from None
    return found


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _batch(settings: Settings, dp: int | None) -> dict[str, int]:
    """Batch, micro-batch, accumulation and ranks; what is not given follows from the others."""
    found = [settings.get(name) for name in SIZES]
    batch, micro, accumulate = (None if n is None else int(n) for n in found)
    if dp is None:
        with suppress(MeshError):
            dp = current_mesh().size("dp")
    if dp is None and batch and micro and accumulate:
        dp = max(1, batch // (micro * accumulate))
    problem = ""
    if batch is None and micro is None:
        problem = (
            'one of `train_batch_size` and `train_micro_batch_size_per_gpu` is needed; what is "auto" is given '
            "as auto=dict(batch=..., microbatch=..., accumulate=...)"
        )
    elif dp is None:
        problem = "the number of data-parallel ranks is not known: load(..., dp=8), --dp 8, or load within `with mesh:`"
    elif dp < 1:
        problem = f"dp={dp}: at least one rank is needed"
    elif batch is None:
        accumulate = accumulate or 1
        batch = (micro or 0) * accumulate * dp
    elif micro is None:
        accumulate = accumulate or 1
        micro = batch // (accumulate * dp)
    elif accumulate is None:
        accumulate = batch // (micro * dp)
    if not problem and (known := (micro or 0) * (accumulate or 0) * (dp or 0)) != batch:
        given = [f"`{name}` = {int(n)}" for name, n in zip(SIZES, found, strict=True) if n is not None]
        problem = (
            f"{', '.join(given)} on {dp} ranks: {batch} is not micro-batch x accumulation x ranks = "
            f"{micro} x {accumulate} x {dp} = {known}"
        )
    if problem:
        settings.problems.append(problem)
    return {"batch": batch or 0, "microbatch": micro or 0, "accumulate": accumulate or 0, "dp": dp or 1}


def _precision(settings: Settings) -> Call | None:
    """Dtypes and the scale of the loss."""
    half = settings.get("fp16.enabled", False)
    section = "bfloat16" if not any(path.startswith("bf16.") for path in settings.given) else "bf16"
    brain = settings.get(f"{section}.enabled", False)
    if half and brain:
        settings.problems.append(f"`fp16.enabled` and `{section}.enabled` are both true: one of them is possible")
    own = "f16" if half else "bf16" if brain else "f32"
    sent = settings.get("communication_data_type", own).lower().replace("fp", "f")
    if not half and not brain:
        return None if sent == "f32" else call("precision", compute="f32", params="f32", reduce=sent)
    scale: Any = 1.0 if brain and settings.get(f"{section}.check_grad_overflow", True) else None
    if half:
        scale = float(settings.get("fp16.loss_scale", 0)) or call(
            "dynamic_scale",
            2.0 ** min(settings.get("fp16.initial_scale_power", 16), 1000),  # no scale, and yet a number
            window=int(settings.get("fp16.loss_scale_window", 1000)),
            hysteresis=int(settings.get("fp16.hysteresis", 2)) if settings.get("zero_optimization.stage") else 1,
            minimum=float(settings.get("fp16.min_loss_scale", 1)),
            consecutive=settings.get("fp16.consecutive_hysteresis", False),
        )
    return call("precision", compute=own, params=own, reduce=sent, scale=scale)


SPECS = Name("specs")
PERSISTENT = ("stage3_param_persistence_threshold", "param_persistence_threshold")


def _zero(settings: Settings, dp: int) -> tuple[dict[str, Any], Call]:
    """The mesh's data-parallel axes, and the layout."""
    stage = int(settings.get("zero_optimization.stage", 0))
    group = int(settings.get("zero_optimization.zero_hpz_partition_size", 1))
    whole = [int(n) for name in PERSISTENT if (n := settings.get(f"zero_optimization.{name}"))]
    if stage == 3 and group > 1:
        if dp % group:
            settings.problems.append(
                f"`zero_optimization.zero_hpz_partition_size` = {group} does not divide the {dp} data-parallel ranks"
            )
        inside, all_ = call("split", SPECS, "gpu"), call("split", SPECS, "gpu", "node")
        layout = call("Layout", compute=inside, params=all_, grads=inside, opt=all_)
        for name in PERSISTENT:
            if whole and f"zero_optimization.{name}" in settings.given:
                settings.notes[f"zero_optimization.{name}"] = "with `zero_hpz_partition_size` every leaf is cut"
        return {"dp": {"node": dp // group, "gpu": group}}, layout
    mesh = {"dp": dp}
    if stage != 3 or not whole:
        return mesh, call("zero", SPECS, axis="dp", stage=stage)
    cut, small = {"axis": "dp", "stage": 3}, {"axis": "dp", "stage": 3, "min_size": whole[0] + 1}
    return mesh, call(
        "Layout",
        compute=call("zero", SPECS, **small, field="compute"),
        params=call("zero", SPECS, **small, field="params"),
        grads=call("zero", SPECS, **cut, field="grads"),
        opt=call("zero", SPECS, **cut, field="opt"),
    )


def _monitors(settings: Settings) -> list[Call]:
    """One for each folder."""
    folders: dict[str, list[str]] = {}
    for section, kind in (("tensorboard", "tensorboard"), ("csv_monitor", "csv")):
        if settings.get(f"{section}.enabled", False):
            job = settings.get(f"{section}.job_name", "DeepSpeedJobName")
            folder = Path(settings.get(f"{section}.output_path", "")) / job
            folders.setdefault(folder.as_posix(), []).append(kind)
    return [call("monitor", folder, kinds) for folder, kinds in folders.items()]
