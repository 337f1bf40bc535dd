"""Optimizers around an optimizer: updates left out, made once in a while, with other numbers, rounded at random."""

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib import collectives as c
from shardlib import layout, random, tree
from shardlib.norms import not_finite
from shardlib.optim.base import Optimizer, counter, leaves_of, refuse_others, selected, zeros32
from shardlib.optim.options import check
from shardlib.sharding import leaf_of, settle
from shardlib.tree import pytree
from shardlib.types import Leaf, region


@pytree
class SkipState:
    """The optimizer's state; the number of updates that were left out."""

    inner: Any
    skipped: Tensor


def skip_nonfinite(optimizer: Optimizer) -> Optimizer:
    """Leaves an update out, on all ranks, where any element of any gradient is not finite on any of them.

    Then no parameter and nothing of the optimizer's state changes, its count and schedule included: only `skipped`,
    which `optim.get(state, "skipped")` gives, goes up. As optax's `apply_if_finite` without its limit.
    """
    refuse_others("skip_nonfinite", optimizer)

    def init(params: Any) -> SkipState:
        return SkipState(inner=optimizer.init(params), skipped=counter())

    def update(grads: Any, state: SkipState, params: Any) -> tuple[Any, SkipState]:
        finite = not_finite(grads).sum() == 0
        updates, inner = optimizer.update(grads, state.inner, params)
        updates = tree.map_(lambda u: torch.where(finite, u, torch.zeros_like(u)), updates)
        skipped = state.skipped + (~finite).to(torch.int64)
        return updates, SkipState(inner=selected(finite, inner, state.inner), skipped=skipped)

    return Optimizer(init, update)


@pytree
class AccumulateState:
    """The optimizer's state; the number of gradients since its last update, and their mean."""

    inner: Any
    since: Tensor
    mean: Any


def accumulate(optimizer: Optimizer, every: int) -> Optimizer:
    """One update for the mean of `every` gradients; in between parameters stay. As optax's `MultiSteps`.

    The gradients weigh the same, whatever the tokens in their batches, and every call reduces its own; `step(
    accumulate=)`, for micro-batches of one batch, weighs by tokens and reduces once. A program has no branches: the
    update is computed each time, and kept when it is due. The mean is kept in float32 or wider.
    """
    refuse_others("accumulate", optimizer)
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"accumulate: every is a number of gradients, at least 1, not {every!r}")

    def init(params: Any) -> AccumulateState:
        return AccumulateState(inner=optimizer.init(params), since=counter(), mean=tree.map_(zeros32, params))

    def update(grads: Any, state: AccumulateState, params: Any) -> tuple[Any, AccumulateState]:
        since = state.since + 1
        due = since == every

        def averaged(m: Tensor, g: Tensor, p: Tensor) -> Tensor:
            return settle(m + (g.to(m.dtype) - m) / since.to(m.dtype), leaf_of(p, "accumulate"))

        mean = tree.map_(averaged, state.mean, grads, params)
        updates, inner = optimizer.update(mean, state.inner, params)
        zeros = tree.map_(torch.zeros_like, mean)
        new = AccumulateState(
            inner=selected(due, inner, state.inner),
            since=torch.where(due, torch.zeros_like(since), since),
            mean=selected(due, zeros, mean),
        )
        return tree.map_(lambda u: torch.where(due, u, torch.zeros_like(u)), updates), new

    return Optimizer(init, update)


@pytree
class InjectState:
    """The optimizer's state; the numbers that it is made with, 0-d float64."""

    inner: Any
    hyper: dict[str, Tensor]


def inject(make: Callable[..., Optimizer], **numbers: float) -> Optimizer:
    """`make(**numbers)`, the numbers lying in the state, where they may be changed between steps without a new trace.

    For arguments that may be schedules (`lr`, `b1`, `momentum`), others stand in `make`: `inject(lambda lr: adamw(lr,
    weight_decay=0.1), lr=3e-4)`. Then `state.opt.hyper["lr"]` is the rate of all updates to come. As optax's
    `inject_hyperparams`, which takes any number.
    """
    check("inject", **numbers)

    def made(hyper: dict[str, Tensor]) -> Optimizer:
        found = make(**{name: lambda count, x=x: x.to(torch.float64, copy=True) for name, x in hyper.items()})
        refuse_others("inject", found)
        return found

    made({name: torch.tensor(x) for name, x in numbers.items()})  # what cannot be made is refused now

    def init(params: Any) -> InjectState:
        device = region().mesh.device
        hyper = {name: torch.full((), x, dtype=torch.float64, device=device) for name, x in numbers.items()}
        return InjectState(inner=made(hyper).init(params), hyper=hyper)

    def update(grads: Any, state: InjectState, params: Any) -> tuple[Any, InjectState]:
        updates, inner = made(state.hyper).update(grads, state.inner, params)
        return updates, InjectState(inner=inner, hyper=state.hyper)

    return Optimizer(init, update)


@pytree
class RoundingState:
    """The optimizer's state; the number of updates; the root of the random keys."""

    inner: Any
    count: Tensor
    key: Tensor


def stochastic_rounding(optimizer: Optimizer, seed: int = 0) -> Optimizer:
    """bfloat16 parameters without float32 masters: each update rounds them up or down at random, right in the mean.

    So updates that are too small for a parameter's precision are not lost, and a parameter takes 2 bytes where it takes
    6 with a master. The optimizer sees parameters in float32, and keeps its other state so. Elements draw by `seed`,
    count, path and global index: the same on every mesh, and in stacked and listed layers. Other leaves are as ever.
    `random.stochastic_round`; Zamirai et al. 2020 (arXiv:2010.06192).
    """
    refuse_others("stochastic_rounding", optimizer)

    def widened(params: Any) -> Any:
        def one(p: Tensor) -> Tensor:
            return settle(p.to(torch.float32), leaf_of(p, "stochastic_rounding")) if _short(p) else p

        return tree.map_(one, params)

    def init(params: Any) -> RoundingState:
        count = counter()
        return RoundingState(inner=optimizer.init(widened(params)), count=count, key=random.key(seed, count.device))

    def update(grads: Any, state: RoundingState, params: Any) -> tuple[Any, RoundingState]:
        updates, inner = optimizer.update(grads, state.inner, widened(params))
        root = random.fold_in(state.key, state.count)

        def one(p: Tensor, u: Tensor, leaf: Leaf, path: str) -> Tensor:
            if not _short(p):
                return u
            wide, (key, index) = p.to(torch.float32), _drawn(root, leaf, path, p)
            return random.stochastic_round(key, wide + u, index=index).to(torch.float32) - wide

        flat, treedef = tree.flatten(params)
        each = flat, tree.leaves(updates), leaves_of(params, "stochastic_rounding"), tree.paths(params)
        new = RoundingState(inner=inner, count=state.count + 1, key=state.key)
        return tree.unflatten(treedef, map(one, *each)), new

    return Optimizer(init, update)


def _short(p: Tensor) -> bool:
    return p.dtype == torch.bfloat16


def _drawn(root: Tensor, leaf: Leaf, path: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The key of a leaf, and the number of each element of the rank's piece `x` in it. The layers of a list are
    numbered as those of a stack are; padding has numbers, too."""
    names = path.split(".")
    *levels, layer = [0, *(int(n) for n in names if n.isdigit())]
    own = ".".join(n for n in names if not n.isdigit() and n != "*")  # layers of one shape share a key
    key = random.fold_in(root, zlib.crc32(f"{own} {tuple(leaf.shape[leaf.spec.stacked :])}".encode()))
    for number in levels[1:]:
        key = random.fold_in(key, number)
    starts: list[int | Tensor] = []
    for dim, n in zip(leaf.spec.dims, leaf.shape, strict=True):
        start: int | Tensor = 0
        for i, axis in enumerate(dim.axes, 1):
            start = start + c.axis_index(axis) * layout.padded_length(n, dim.axes[:i], region().mesh.shape)
        starts.append(start)
    index = random.global_index(leaf.shape, starts, x.shape, x.device)
    return key, index + layer * math.prod(leaf.shape)
