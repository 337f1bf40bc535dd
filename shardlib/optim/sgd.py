"""Stochastic gradient descent."""

from typing import Any

from torch import Tensor

from shardlib import tree
from shardlib.optim.base import Optimizer, counter, in_full, masters, rounded, zeros32
from shardlib.optim.options import check
from shardlib.optim.schedules import Schedule, as_schedule
from shardlib.tree import pytree


@pytree
class SgdState:
    """`count` of updates, the momentum (None without), float32 masters of 16-bit leaves, the last learning rate."""

    count: Tensor
    trace: Any
    master: Any
    lr: Tensor


def sgd(lr: float | Schedule, momentum: float | Schedule = 0.0, nesterov: bool = False) -> Optimizer:
    """SGD: `-lr v` with `v = g + momentum v`, no dampening; nesterov: `-lr (g + momentum v)`. As torch and optax.

    `momentum` may be a schedule, too (`one_cycle_momentum`).
    """
    rate = as_schedule(lr, "sgd")
    momentum = as_schedule(momentum, "sgd: momentum") if callable(momentum) else momentum
    check("sgd", 0, momentum=0 if callable(momentum) else momentum)
    if nesterov and not momentum:
        raise ValueError("sgd: nesterov=True looks ahead along the momentum: give momentum=")

    def init(params: Any) -> SgdState:
        zero = counter()
        trace = tree.map_(zeros32, params) if momentum else None
        return SgdState(count=zero, trace=trace, master=masters(params), lr=rate(zero))

    def update(grads: Any, state: SgdState, params: Any) -> tuple[Any, SgdState]:
        step, own = rate(state.count), in_full(params, state.master)
        updates = tree.map_(lambda g, p: g.to(p.dtype), grads, own)
        trace = state.trace
        if momentum:
            mass = momentum(state.count) if callable(momentum) else momentum

            def added(g: Tensor, v: Tensor) -> Tensor:
                return g + (mass.to(v.dtype) if isinstance(mass, Tensor) else mass) * v

            trace = tree.map_(added, updates, trace)
            updates = tree.map_(added, updates, trace) if nesterov else trace
        updates = tree.map_(lambda u: -step.to(u.dtype) * u, updates)  # a 0-d leaf would take the rate's float64
        updates, master = rounded(params, own, updates)
        return updates, SgdState(count=state.count + 1, trace=trace, master=master, lr=step)

    return Optimizer(init, update)
