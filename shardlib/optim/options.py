"""Options of optimizers and schedules: what makes no sense is refused where it is given."""

import math
from numbers import Real
from typing import Any


def check(what: str, least: float = -math.inf, below: float = math.inf, **options: Any) -> None:
    """Raise `ValueError` where an option of `what` is no finite number, or not in `least` <= x < `below`."""
    for name, x in options.items():
        number = isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)
        if not number or not least <= float(x) < below:
            bounds = [f"at least {least:g}"] * (least > -math.inf) + [f"below {below:g}"] * (below < math.inf)
            of = f" of {' and '.join(bounds)}" if bounds else ""
            raise ValueError(f"{what}: {name} is a number{of}, not {x!r}")
