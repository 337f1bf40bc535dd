"""Learning rates as functions of the count of finished updates (0 at the first): 0-d tensors, so that they trace.

From optax: constant, polynomial, exponential, cosine, piecewise, join, warmup_cosine. From DeepSpeed: warmup,
warmup_decay, one_cycle, lr_range_test, and warmup_cosine with `kind="log", last_at_end=True`. `count` is the iteration
of DeepSpeed's formulas; its engine moves warm-ups on after an update, so that its second update has the rate of count 0
once more.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from shardlib.optim.options import check
from shardlib.types import short

Schedule = Callable[[Any], Tensor]


def as_schedule(rate: float | Callable[[Any], Any], what: str) -> Schedule:
    """The rate of `what`: a number as a constant schedule; a function of the count that gives a number or a 0-d float
    tensor."""
    if not callable(rate):
        check(what, 0, **{"a rate (or a schedule, count -> rate)": rate})
        return constant(rate)

    def given(count: Tensor) -> Tensor:
        found = rate(count)
        if isinstance(found, Real):
            return torch.full((), float(found), dtype=torch.float64, device=count.device)
        if not isinstance(found, Tensor) or found.dim() or not found.is_floating_point():
            said = short(found) if isinstance(found, Tensor) else repr(found)
            raise TypeError(f"{what}: a schedule gives a number or a 0-d float tensor for a count, not {said}")
        return found

    return given


def _schedule(rate: Callable[[Tensor], Tensor]) -> Schedule:
    """`rate`, also of a Python int."""
    return lambda count: rate(count if isinstance(count, Tensor) else torch.tensor(count))


def constant(rate: float) -> Schedule:
    """Always `rate`."""
    check("constant", rate=rate)
    return _schedule(lambda count: torch.full((), rate, dtype=torch.float64, device=count.device))


def polynomial(start: float, end: float, *, steps: int, power: float = 1.0, begin: int = 0) -> Schedule:
    """`end + (start - end) (1 - t / steps)^power` for t = count - `begin`, which is kept in 0..`steps`.

    Linear by default. As optax's `polynomial_schedule`; `linear_schedule` is power 1.
    """
    check("polynomial", start=start, end=end)
    check("polynomial", 0, begin=begin)
    check("polynomial", above=0, steps=steps, power=power)

    @_schedule
    def rate(count: Tensor) -> Tensor:
        left = 1 - ((_float(count) - begin) / steps).clamp(0.0, 1.0)
        return end + (start - end) * left**power

    return rate


def exponential(
    start: float, *, steps: int, rate: float, begin: int = 0, staircase: bool = False, end: float | None = None
) -> Schedule:
    """`start rate^(t / steps)` for t = count - `begin` (at least 0); `staircase`: of the whole part of `t / steps`.

    `end`: the bound that it does not pass. As optax's `exponential_decay`.
    """
    check("exponential", start=start, end=0 if end is None else end)
    check("exponential", 0, begin=begin)
    check("exponential", above=0, steps=steps, rate=rate)

    @_schedule
    def value(count: Tensor) -> Tensor:
        t = (_float(count) - begin).clamp(min=0.0) / steps
        found = start * rate ** (t.floor() if staircase else t)
        if end is None:
            return found
        return found.clamp(min=end) if rate < 1 else found.clamp(max=end)

    return value


def cosine(start: float, *, steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine from `start` down to `end` at update `steps`, as optax's `cosine_decay_schedule`."""
    check("cosine", start=start, end=end)
    check("cosine", above=0, steps=steps)
    return _schedule(lambda count: _cosine(start, end, _float(count) / steps))


def piecewise(start: float, factors: Mapping[int, float]) -> Schedule:
    """`start`, times each factor from the count on that is its key: `piecewise(0.1, {100: 0.5, 200: 0.1})`.

    As optax's `piecewise_constant_schedule`.
    """
    check("piecewise", start=start, **{f"the factor at {at}": x for at, x in factors.items()})
    check("piecewise", 0, **{f"the count {at}": at for at in factors})

    @_schedule
    def rate(count: Tensor) -> Tensor:
        found = constant(start)(count)
        for at, factor in factors.items():
            found = torch.where(count < at, found, found * factor)
        return found

    return rate


def join(schedules: Sequence[float | Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after another: the next begins, with count 0, at each boundary. As optax's `join_schedules`."""
    made, ends = [as_schedule(s, "join") for s in schedules], list(boundaries)
    check("join", above=0, **{f"boundary {i}": n for i, n in enumerate(ends)})
    if len(made) != len(ends) + 1 or ends != sorted(set(ends)):
        raise ValueError(f"join: one boundary between each two schedules, ascending; found {ends} for {len(made)}")

    @_schedule
    def rate(count: Tensor) -> Tensor:
        found = made[0](count)
        for schedule, at in zip(made[1:], ends, strict=True):
            found = torch.where(count < at, found, schedule((count - at).clamp(min=0)))
        return found

    return rate


def warmup(peak: float, *, warmup: int, start: float = 0.0, kind: str = "linear") -> Schedule:
    """From `start` to `peak` over `warmup` updates, then constant: DeepSpeed's WarmupLR.

    `kind`: `"linear"`, the part `count / warmup` of the way, or `"log"` (DeepSpeed's default),
    `log(count + 1) / log(warmup)`.
    """
    return _rising("warmup", start, peak, warmup, kind)


def warmup_decay(peak: float, *, warmup: int, steps: int, start: float = 0.0, kind: str = "linear") -> Schedule:
    """`warmup`, then linearly back down to `start` at update `steps`: DeepSpeed's WarmupDecayLR.

    `steps` includes the warm-up.
    """

    def falling(t: Tensor) -> Tensor:
        return start + (peak - start) * ((steps - t) / (steps - warmup)).clamp(min=0.0)

    return _rising("warmup_decay", start, peak, warmup, kind, falling, steps)


def warmup_cosine(
    peak: float,
    *,
    warmup: int,
    steps: int,
    start: float = 0.0,
    end: float = 0.0,
    kind: str = "linear",
    last_at_end: bool = False,
) -> Schedule:
    """From `start` to `peak` over `warmup` updates, then half a cosine down to `end` at update `steps`.

    `steps` includes the warm-up, as in optax's `warmup_cosine_decay_schedule`. `kind`: as for `warmup`. `last_at_end`:
    the last of the `steps` updates has the rate `end`, not the one after it: with `kind="log"` DeepSpeed's
    WarmupCosineLR, whose ratios are `start / peak` and `end / peak`.
    """
    check("warmup_cosine", end=end)

    def falling(t: Tensor) -> Tensor:
        return _cosine(peak, end, (t - warmup + last_at_end) / (steps - warmup))

    return _rising("warmup_cosine", start, peak, warmup, kind, falling, steps)


def warmup_stable_decay(
    peak: float,
    *,
    warmup: int,
    steps: int,
    decay: int,
    start: float = 0.0,
    end: float = 0.0,
    kind: str = "linear",
    shape: str = "linear",
) -> Schedule:
    """From `start` to `peak` over `warmup` updates, constant, then over the last `decay` down to `end` at `steps`.

    `kind`: of the warm-up, as for `warmup`. `shape` of the decay: `"linear"`, `"cosine"`, or `"sqrt"`, `1 - sqrt(x)` of
    the part x that is done (Hägele et al. 2024). Source: Hu et al. 2024 (MiniCPM), as WSD.
    """
    check("warmup_stable_decay", end=end, warmup=warmup, steps=steps)
    check("warmup_stable_decay", above=0, decay=decay)
    if decay > steps - warmup:
        found = f"found decay={decay}, warmup={warmup}, steps={steps}"
        raise ValueError(f"warmup_stable_decay: warmup + decay <= steps is needed, {found}")
    if shape not in ("linear", "cosine", "sqrt"):
        raise ValueError(f"warmup_stable_decay: shape is 'linear', 'cosine' or 'sqrt', not {shape!r}")

    def falling(t: Tensor) -> Tensor:
        done = ((t - (steps - decay)) / decay).clamp(0.0, 1.0)
        if shape == "cosine":
            return _cosine(peak, end, done)
        return peak + (end - peak) * (done.sqrt() if shape == "sqrt" else done)

    return _rising("warmup_stable_decay", start, peak, warmup, kind, falling, steps)


def one_cycle(
    peak: float,
    *,
    start: float,
    up: int,
    down: int | None = None,
    up_stairs: int = 0,
    down_stairs: int | None = None,
    decay_rate: float = 0.0,
    decay_steps: int = 0,
) -> Schedule:
    """Linear from `start` to `peak` over `up` updates and back over `down` (None: as many): DeepSpeed's OneCycle.

    `up_stairs`, `down_stairs` (None: the same): rise and fall in so many stairs, 0 smoothly. After the cycle the rate
    is `start / (1 + decay_rate t / decay_steps)`, t updates later; constant where either is 0. DeepSpeed also moves
    Adam's `b1` the other way by default: `one_cycle_momentum`. Smith 2018.
    """
    check("one_cycle", peak=peak, start=start)
    part = _cycle("one_cycle", up, down, up_stairs, down_stairs, decay_rate, decay_steps)

    @_schedule
    def rate(count: Tensor) -> Tensor:
        done, later = part(count)
        return (start + (peak - start) * done) / (1 + later)

    return rate


def one_cycle_momentum(
    low: float = 0.8,
    high: float = 0.9,
    *,
    up: int,
    down: int | None = None,
    up_stairs: int = 0,
    down_stairs: int | None = None,
    decay_rate: float = 0.0,
    decay_steps: int = 0,
) -> Schedule:
    """For `sgd(momentum=)` and `adamw(b1=)`: from `high` to `low` while `one_cycle` rises, and back while it falls.

    DeepSpeed's `cycle_momentum`, its bounds by default; it then has 0.99 for `b2`. `up` to `down_stairs` as there;
    after the cycle the momentum is `high (1 + decay_rate t / decay_steps)`, t updates later (`decay_mom_rate`).
    """
    check("one_cycle_momentum", 0, 1, low=low, high=high)
    part = _cycle("one_cycle_momentum", up, down, up_stairs, down_stairs, decay_rate, decay_steps)

    @_schedule
    def momentum(count: Tensor) -> Tensor:
        done, later = part(count)
        return (high - (high - low) * done) * (1 + later)

    return momentum


def _cycle(
    name: str, up: int, down: int | None, up_stairs: int, down_stairs: int | None, decay_rate: float, decay_steps: int
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """At a count: how far a cycle is from its ends, 0 to 1, and what has grown since it was over."""
    down = up if down is None else down
    stairs = up_stairs, up_stairs if down_stairs is None else down_stairs
    check(name, above=0, up=up, down=down)
    check(name, 0, up_stairs=stairs[0], down_stairs=stairs[1], decay_rate=decay_rate, decay_steps=decay_steps)

    def part(position: Tensor, length: int, steps: int) -> Tensor:
        return (position * steps / length).floor() / steps if steps else position / length

    def at(count: Tensor) -> tuple[Tensor, Tensor]:
        t, total = _float(count), up + down
        rises, falls = part(t, up, stairs[0]), part((total - t).clamp(min=0.0), down, stairs[1])
        later = decay_rate * (t - total).clamp(min=0.0) / decay_steps if decay_steps else torch.zeros_like(t)
        return torch.where(t <= up, rises, falls), later

    return at


def lr_range_test(start: float, *, steps: int, rate: float = 1.0, staircase: bool = False) -> Schedule:
    """`start (1 + rate count / steps)`, to find where training breaks: DeepSpeed's LRRangeTest. Smith 2018.

    `staircase`: with the whole part of `count / steps`.
    """
    check("lr_range_test", start=start)
    check("lr_range_test", 0, rate=rate)
    check("lr_range_test", above=0, steps=steps)

    @_schedule
    def value(count: Tensor) -> Tensor:
        t = _float(count) / steps
        return start * (1 + rate * (t.floor() if staircase else t))

    return value


def _float(count: Tensor) -> Tensor:
    return count.to(torch.float64)


def _cosine(start: float, end: float, done: Tensor) -> Tensor:
    """Half a cosine, of which the part `done` lies behind."""
    return end + (start - end) * 0.5 * (1.0 + torch.cos(math.pi * done.clamp(0.0, 1.0)))


def _rising(
    name: str, start: float, peak: float, warmup: int, kind: str, then: Schedule | None = None, steps: int = 0
) -> Schedule:
    """A warm-up, then constant, or `then` of the count, which ends at `steps`."""
    check(name, start=start, peak=peak, warmup=warmup, steps=steps)
    if kind not in ("linear", "log"):
        raise ValueError(f"{name}: kind is 'linear' or 'log', not {kind!r}")
    if then and not 0 <= warmup < steps:
        raise ValueError(f"{name}: 0 <= warmup < steps is needed, found warmup={warmup}, steps={steps}")
    least = 2 if kind == "log" else 0
    if warmup < least:
        raise ValueError(f"{name}: a {kind} warm-up takes at least {least} updates, found {warmup}")

    @_schedule
    def rate(count: Tensor) -> Tensor:
        t = _float(count)
        done = torch.log(t + 1) / math.log(warmup) if kind == "log" else t / warmup if warmup else torch.ones_like(t)
        rise = start + (peak - start) * done.clamp(max=1.0)
        return torch.where(t < warmup, rise, then(t)) if then else rise

    return rate
