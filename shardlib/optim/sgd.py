"""Stochastic gradient descent."""

from typing import Any

from torch import Tensor

from shardlib import tree
from shardlib.optim.base import Optimizer, counter, masters, wide, zeros32
from shardlib.optim.schedules import Schedule, as_schedule
from shardlib.tree import pytree


@pytree
class SgdState:
    """`count` of updates, the momentum (None without), float32 masters of 16-bit leaves, the last learning rate."""

    count: Tensor
    trace: Any
    master: Any
    lr: Tensor


def sgd(lr: float | Schedule, momentum: float = 0.0, nesterov: bool = False) -> Optimizer:
    """SGD: `-lr v` with `v = g + momentum v`, no dampening; nesterov: `-lr (g + momentum v)`. As torch and optax."""
    rate = as_schedule(lr)

    def init(params: Any) -> SgdState:
        zero = counter()
        trace = tree.map_(zeros32, params) if momentum else None
        return SgdState(count=zero, trace=trace, master=masters(params), lr=rate(zero))

    def update(grads: Any, state: SgdState, params: Any) -> tuple[Any, SgdState]:
        step = rate(state.count)
        flat, treedef = tree.flatten(params)
        held, traces = iter(tree.leaves(state.master)), iter(tree.leaves(state.trace))
        updates, kept, vs = [], [], []
        for p, g in zip(flat, tree.leaves(grads), strict=True):
            g = g.to(wide(p.dtype))
            if momentum:
                vs.append(g + momentum * next(traces))
                g = g + momentum * vs[-1] if nesterov else vs[-1]
            u = -step.to(g.dtype) * g  # a 0-d leaf would take the rate's float64
            if p.dtype != wide(p.dtype):
                kept.append(next(held) + u)
                u = kept[-1] - p.to(u.dtype)
            updates.append(u)
        trace = tree.unflatten(treedef, vs) if momentum else None
        master = tree.unflatten(tree.flatten(state.master)[1], kept)
        return tree.unflatten(treedef, updates), SgdState(count=state.count + 1, trace=trace, master=master, lr=step)

    return Optimizer(init, update)
