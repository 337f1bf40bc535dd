"""Optimizers around an optimizer: updates that are left out, or made once in a while."""

from typing import Any

import torch
from torch import Tensor

from shardlib import tree
from shardlib.norms import not_finite
from shardlib.optim.base import Optimizer, counter, selected, zeros32
from shardlib.sharding import leaf_of, settle
from shardlib.tree import pytree


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
