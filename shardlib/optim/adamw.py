"""AdamW."""

from typing import Any

from torch import Tensor

from shardlib import fused, tree
from shardlib.optim.base import Optimizer, chosen, counter, in_full, masters, rounded, zeros32
from shardlib.optim.options import check
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

    No decay by default (torch: 1e-2, optax: 1e-4). `mask` (globs over paths, or `(path, spec) -> bool`) chooses the
    leaves that decay; `optim.matrices` is the usual rule. 16-bit leaves have a float32 master in the state; moments are
    at least float32. Where `b1` is a schedule (`one_cycle_momentum`), the bias is corrected for its value at the time,
    as torch.optim and DeepSpeed do.
    """
    rate, b1 = as_schedule(lr, "adamw"), as_schedule(b1, "adamw: b1") if callable(b1) else b1
    check("adamw", 0, 1, b1=0 if callable(b1) else b1, b2=b2)
    check("adamw", 0, eps=eps, weight_decay=weight_decay)

    def update(grads: Any, state: MomentsState, params: Any) -> tuple[Any, MomentsState]:
        step, count, own = rate(state.count), state.count + 1, in_full(params, state.master)
        first = b1(state.count) if callable(b1) else b1

        def one(p: Tensor, g: Tensor, m: Tensor, v: Tensor, decays: bool) -> tuple[Tensor, Tensor, Tensor]:
            decay = weight_decay if decays else 0.0
            return fused.adamw(p, g, m, v, lr=step, count=count, b1=first, b2=b2, eps=eps, weight_decay=decay)

        flat, treedef = tree.flatten(own)
        each = map(tree.leaves, (grads, state.mu, state.nu, chosen(mask, params)))
        made = [one(*of) for of in zip(flat, *each, strict=True)]
        updates, mu, nu = (tree.unflatten(treedef, [of[i] for of in made]) for i in range(3))
        updates, master = rounded(params, own, updates)
        return updates, MomentsState(count=count, mu=mu, nu=nu, master=master, lr=step)

    return Optimizer(lambda params: moments(params, rate), update)
