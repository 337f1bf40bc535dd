"""Options of optimizers and schedules: what makes no sense is refused where it is given."""

import math
from numbers import Real
from typing import Any


def check(
    what: str, least: float = -math.inf, below: float = math.inf, above: float = -math.inf, **options: Any
) -> None:
    """Raise `ValueError` where an option is no finite number, below `least`, not below `below` or not above `above`."""
    for name, x in options.items():
        number = isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)
        if not number or not least <= float(x) < below or float(x) <= above:
            bounds = {"of at least": least, "above": above, "below": below}
            said = " and ".join(f"{how} {bound:g}" for how, bound in bounds.items() if math.isfinite(bound))
            raise ValueError(f"{what}: {name} is a number{said and ' ' + said}, not {x!r}")
