"""Learning rates as functions of the count of finished updates (0 at the first)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Schedule = Callable[[Tensor], Tensor]


def as_schedule(rate: float | Schedule) -> Schedule:
    """A number as a constant schedule."""
    if not callable(rate) and not isinstance(rate, (int, float)):
        raise TypeError(f"a learning rate is a number or a schedule (count -> rate), not {rate!r}")
    return rate if callable(rate) else constant(rate)


def constant(rate: float) -> Schedule:
    """Always `rate`."""
    return lambda count: torch.full((), rate, dtype=torch.float64, device=count.device)


def warmup_cosine(peak: float, *, warmup: int, steps: int, start: float = 0.0, end: float = 0.0) -> Schedule:
    """Linear from `start` to `peak` over `warmup` updates, then half a cosine down to `end` at update `steps`.

    `steps` includes the warm-up, as in optax's `warmup_cosine_decay_schedule`.
    """
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup_cosine: 0 <= warmup < steps is needed, found warmup={warmup}, steps={steps}")

    def rate(count: Tensor) -> Tensor:
        t = count.to(torch.float64)
        rising = start + (peak - start) * t / max(warmup, 1)
        done = ((t - warmup) / (steps - warmup)).clamp(0.0, 1.0)
        falling = end + (peak - end) * 0.5 * (1.0 + torch.cos(math.pi * done))
        return torch.where(t < warmup, rising, falling)

    return rate
