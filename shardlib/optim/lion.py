"""Lion."""

from typing import Any

from torch import Tensor

from shardlib import tree
from shardlib.optim.base import Optimizer, chosen, counter, in_full, masters, rounded, zeros32
from shardlib.optim.options import check
from shardlib.optim.schedules import Schedule, as_schedule
from shardlib.tree import pytree


@pytree
class LionState:
    """`count` of updates, the momentum, float32 masters of 16-bit leaves, the last learning rate."""

    count: Tensor
    mu: Any
    master: Any
    lr: Tensor


def lion(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    mask: tree.Chooser | None = None,
) -> Optimizer:
    """Lion (Chen et al. 2023): `-lr (sign(b1 m + (1 - b1) g) + weight_decay p)`, then `m = b2 m + (1 - b2) g`.

    As optax, whose default `weight_decay` is 1e-3. `mask` chooses the leaves that decay. 16-bit leaves have a float32
    master in the state.
    """
    rate = as_schedule(lr, "lion")
    check("lion", 0, 1, b1=b1, b2=b2)
    check("lion", 0, weight_decay=weight_decay)

    def init(params: Any) -> LionState:
        zero = counter()
        return LionState(count=zero, mu=tree.map_(zeros32, params), master=masters(params), lr=rate(zero))

    def update(grads: Any, state: LionState, params: Any) -> tuple[Any, LionState]:
        step, own = rate(state.count), in_full(params, state.master)
        grads = tree.map_(lambda g, m: g.to(m.dtype), grads, state.mu)

        def one(p: Tensor, g: Tensor, m: Tensor, decay: bool) -> Tensor:
            u = (b1 * m + (1 - b1) * g).sign()
            return -step.to(m.dtype) * (u + weight_decay * p if decay else u)

        updates = tree.map_(one, own, grads, state.mu, chosen(mask, params))
        mu = tree.map_(lambda g, m: b2 * m + (1 - b2) * g, grads, state.mu)
        updates, master = rounded(params, own, updates)
        return updates, LionState(count=state.count + 1, mu=mu, master=master, lr=step)

    return Optimizer(init, update)
