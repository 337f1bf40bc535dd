"""AdamW."""

from typing import Any

from torch import Tensor

from shardlib import fused, tree
from shardlib.optim.base import Optimizer, chosen, counter, masters, wide, zeros32
from shardlib.optim.schedules import Schedule, as_schedule
from shardlib.tree import pytree


@pytree
class MomentsState:
    """`count` of updates, first and second moments, float32 masters of 16-bit leaves, the last learning rate."""

    count: Tensor
    mu: Any
    nu: Any
    master: Any
    lr: Tensor


def moments(params: Any, rate: Schedule) -> MomentsState:
    """The state before the first update."""
    zero = counter()
    mu, nu = (tree.map_(zeros32, params) for _ in range(2))
    return MomentsState(count=zero, mu=mu, nu=nu, master=masters(params), lr=rate(zero))


def adamw(
    lr: float | Schedule,
    b1: float | Schedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: tree.Chooser | None = None,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019): `-lr (mhat / (sqrt(vhat) + eps) + weight_decay p)`, as torch.optim and optax.

    `mask` (globs over paths, or `(path, spec) -> bool`) chooses the leaves that decay; `optim.matrices` is the usual
    rule. 16-bit leaves have a float32 master in the state; moments are at least float32. Where `b1` is a schedule
    (`one_cycle_momentum`), the bias is corrected for its value at the time, as torch.optim and DeepSpeed do.
    """
    rate = as_schedule(lr)

    def update(grads: Any, state: MomentsState, params: Any) -> tuple[Any, MomentsState]:
        step, count = rate(state.count), state.count + 1
        first = b1(state.count) if callable(b1) else b1
        flat, treedef = tree.flatten(params)
        leaves = zip(flat, *map(tree.leaves, (grads, state.mu, state.nu, chosen(mask, params))), strict=True)
        held = iter(tree.leaves(state.master))
        updates, mus, nus, kept = [], [], [], []
        for p, g, m, v, decay in leaves:
            own = next(held) if p.dtype != wide(p.dtype) else p
            rate_of_decay = weight_decay if decay else 0.0
            u, m, v = fused.adamw(
                own, g, m, v, lr=step, count=count, b1=first, b2=b2, eps=eps, weight_decay=rate_of_decay
            )
            if own is not p:
                kept.append(own + u)
                u = kept[-1] - p.to(own.dtype)
            updates.append(u)
            mus.append(m)
            nus.append(v)
        new = MomentsState(
            count=count,
            mu=tree.unflatten(treedef, mus),
            nu=tree.unflatten(treedef, nus),
            master=tree.unflatten(tree.flatten(state.master)[1], kept),
            lr=step,
        )
        return tree.unflatten(treedef, updates), new

    return Optimizer(lambda params: moments(params, rate), update)
