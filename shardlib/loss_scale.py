"""Loss scaling: a factor on the loss that keeps 16-bit gradients in range; steps are skipped where it does not.

All of it is state and arithmetic on 0-d tensors, the same on all ranks: it traces, and the host waits for nothing.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from shardlib import tree
from shardlib.errors import RankError, SpecError
from shardlib.norms import not_finite
from shardlib.sharding import leaf_of, settle
from shardlib.tree import pytree
from shardlib.types import padding_allowed


@pytree
class LossScale:
    """`scale` (float32) and counters (int64): `good`, finite steps since the scale last changed or overflowed;
    `forgiven`, overflows from here on before the scale falls, with the one that makes it; `row`, steps skipped in a
    row; `skipped`, in all."""

    scale: Tensor
    good: Tensor
    forgiven: Tensor
    row: Tensor
    skipped: Tensor


@dataclass(frozen=True)
class Scaling:
    """How the scale of the loss starts and follows overflows: what `dynamic_scale` and `static_scale` return."""

    initial: float
    factor: float
    window: int
    hysteresis: int
    minimum: float
    consecutive: bool
    max_skips: int | None

    def init(self) -> LossScale:
        """The state before the first step, plain tensors."""
        zero, scale = torch.zeros((), dtype=torch.int64), torch.full((), self.initial, dtype=torch.float32)
        forgiven = torch.full_like(zero, self.hysteresis)
        return LossScale(scale=scale, good=zero - 1, forgiven=forgiven, row=zero.clone(), skipped=zero.clone())

    def after(self, old: LossScale, finite: Tensor) -> LossScale:
        """The state after a step whose gradients were finite, or were not (`finite`, 0-d bool)."""
        zero, full = torch.zeros_like(old.good), torch.full_like(old.good, self.hysteresis)
        good = torch.where(finite, old.good + 1, zero - 1)
        grows, falls = good >= self.window, ~finite & (old.forgiven <= 1)
        up = (old.scale * self.factor).clamp(max=LARGEST)
        down = (old.scale / self.factor).clamp(min=self.minimum)
        left = torch.where(finite | falls, old.forgiven, old.forgiven - 1)
        skip = (~finite).to(torch.int64)
        return LossScale(
            scale=torch.where(grows, up, torch.where(falls, torch.minimum(down, old.scale), old.scale)),
            good=torch.where(grows, zero, good),
            forgiven=torch.where(finite if self.consecutive else grows, full, left),
            row=torch.where(finite, zero, old.row + 1),
            skipped=old.skipped + skip,
        )


LARGEST = 2.0**126  # beyond, a scale or its inverse would be no normal float32


def dynamic_scale(
    initial: float = 2.0**16,
    *,
    window: int = 1000,
    hysteresis: int = 2,
    minimum: float = 1.0,
    consecutive: bool = False,
    factor: float = 2.0,
    max_skips: int | None = 50,
) -> Scaling:
    """A scale that falls by `factor` when gradients overflow and rises after `window` finite steps in a row, to which
    the first one and the first after an overflow do not count.

    A step whose gradients are not finite on some rank is skipped by all: nothing changes but the scale and the counts
    of skips. The first `hysteresis` - 1 overflows leave the scale; they are forgiven anew when it has risen, with
    `consecutive` after every finite step. It never falls below `minimum`. After `max_skips` skipped steps in a row
    (None: never) the step raises `RankError`, which names the first leaf whose gradient was not finite.

    Defaults and rules are DeepSpeed's (`initial_scale_power` 16, `loss_scale_window`, `hysteresis`, `min_loss_scale`,
    `consecutive_hysteresis`), but for the end: it raises at the first overflow at the minimum.
    """
    return _checked(Scaling(initial, factor, window, hysteresis, minimum, consecutive, max_skips), "dynamic_scale")


def static_scale(scale: float, max_skips: int | None = 50) -> Scaling:
    """A scale that stays; steps that are not finite are skipped as under `dynamic_scale`."""
    return _checked(Scaling(scale, 1.0, 1, 1, 0.0, False, max_skips), "precision: scale=")


def _checked(made: Scaling, what: str) -> Scaling:
    numbers = all(isinstance(x, int | float) for x in (made.initial, made.factor, made.minimum))
    counts = [made.window, made.hysteresis, 1 if made.max_skips is None else made.max_skips]
    if not numbers or not 0 < made.initial <= LARGEST or not made.factor >= 1 or not 0 <= made.minimum <= made.initial:
        raise SpecError(
            f"{what}: 0 <= minimum <= initial <= 2**126, initial above 0 and factor at least 1; found {made}"
        )
    if any(not isinstance(n, int) or n < 1 for n in counts):
        raise SpecError(f"{what}: window, hysteresis and max_skips are whole numbers of at least 1; found {made}")
    return made


# ---- in a step: what follows takes and gives None where the loss is not scaled


def scaled(seeds: list[Tensor], state: LossScale | None) -> list[Tensor]:
    """The seeds of a backward pass, times the scale."""
    return seeds if state is None else [s * state.scale.to(s.dtype) for s in seeds]


def unscaled(grads: Any, state: LossScale | None) -> Any:
    """Gradients divided by the scale, in float32 or wider: exact where it is a power of two."""
    if state is None:
        return grads
    inverse = 1 / state.scale

    def one(g: Tensor) -> Tensor:
        wide = torch.promote_types(g.dtype, torch.float32)
        return settle(g.to(wide) * inverse.to(wide), leaf_of(g, "a gradient"))

    with padding_allowed():
        return tree.map_(one, grads)


def judged(grads: Any, state: LossScale | None, scaling: Scaling | None) -> tuple[Tensor | None, LossScale | None]:
    """Whether gradients are finite everywhere (0-d bool), and the scale after the step.

    All ranks of all axes decide at once: for every leaf they add up how many of them hold a value that is not finite.
    Raises `RankError` where too many steps in a row are skipped.
    """
    if state is None or scaling is None or not tree.leaves(grads):
        return None, state
    bad = not_finite(grads)
    finite = bad.sum() == 0
    new = scaling.after(state, finite)
    if scaling.max_skips is not None:
        first = (bad > 0).to(torch.int64).argmax()
        torch.ops.shardlib.refuse_skips(new.row, first, new.scale, scaling.max_skips, tree.paths(grads))
    return finite, new


def scale_metrics(finite: Tensor | None, state: LossScale | None) -> dict[str, Tensor]:
    """`skipped` (1 where the step was, else 0) and `scale` (that the step used)."""
    return {} if state is None or finite is None else {"skipped": (~finite).to(torch.int64), "scale": state.scale}


# ---- too many skips

_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("refuse_skips(Tensor row, Tensor first, Tensor scale, int most, str[] paths) -> ()")


def _refuse(row: Tensor, first: Tensor, scale: Tensor, most: int, paths: list[str]) -> None:
    if row.item() >= most:
        raise RankError(
            f"{int(row)} steps in a row were skipped, their gradients being infinite or NaN; in the last one that of "
            f"`{paths[int(first)]}` was the first, the scale is now {scale.item():g}.\n"
            "  passes.check_finite says which line made it; dynamic_scale(max_skips=) allows more"
        )


class _Later:
    """The same where reading a value would make the host wait for the device: it reads what the call before sent.

    So the host runs at most one step ahead, the device never waits, and all ranks raise in the same step, one late.
    """

    def __init__(self) -> None:
        self.sent: deque[tuple[Any, ...]] = deque()

    def __call__(self, row: Tensor, first: Tensor, scale: Tensor, most: int, paths: list[str]) -> None:
        host = [x.to("cpu", non_blocking=True) for x in (row, first, scale)]
        event = torch.cuda.Event()
        event.record()
        self.sent.append((event, host, most, paths))
        if len(self.sent) > 1:
            event, (row, first, scale), most, paths = self.sent.popleft()
            event.synchronize()
            _refuse(row, first, scale, most, paths)


_lib.impl("refuse_skips", _refuse, "CPU")
_lib.impl("refuse_skips", _Later(), "CUDA")
_lib.impl("refuse_skips", lambda *_: None, "Meta")
REFUSE = has_side_effect(torch.ops.shardlib.refuse_skips.default)
