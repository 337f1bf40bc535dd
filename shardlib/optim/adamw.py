"""AdamW."""

from typing import Any

import torch
from torch import Tensor

from shardlib import tree
from shardlib.optim.base import Optimizer, chosen, counter, masters, wide, zeros32
from shardlib.optim.schedules import Schedule, as_schedule
from shardlib.tree import pytree


@pytree
class AdamWState:
    """`count` of updates, first and second moments, float32 masters of 16-bit leaves, the last learning rate."""

    count: Tensor
    mu: Any
    nu: Any
    master: Any
    lr: Tensor


def adamw(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: tree.Chooser | None = None,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019): `-lr (mhat / (sqrt(vhat) + eps) + weight_decay p)`, as torch.optim and optax.

    `mask` (globs over paths, or `(path, spec) -> bool`) chooses the leaves that decay; `optim.matrices` is the usual
    rule. 16-bit leaves have a float32 master in the state; moments are at least float32.
    """
    rate = as_schedule(lr)

    def init(params: Any) -> AdamWState:
        zero = counter()
        mu, nu = (tree.map_(zeros32, params) for _ in range(2))
        return AdamWState(count=zero, mu=mu, nu=nu, master=masters(params), lr=rate(zero))

    def update(grads: Any, state: AdamWState, params: Any) -> tuple[Any, AdamWState]:
        step, t = rate(state.count), (state.count + 1).to(torch.float64)
        scalars = (step, 1 - b1**t, 1 - b2**t)
        flat, treedef = tree.flatten(params)
        mu_flat = tree.leaves(state.mu)
        by_dtype = {d: [x.to(d) for x in scalars] for d in dict.fromkeys(m.dtype for m in mu_flat)}
        decays = tree.leaves(chosen(mask, params))
        held = iter(tree.leaves(state.master))
        updates, mus, nus, kept = [], [], [], []
        for p, g, m, v, decay in zip(flat, tree.leaves(grads), mu_flat, tree.leaves(state.nu), decays, strict=True):
            alpha, fix1, fix2 = by_dtype[m.dtype]  # a 0-d leaf would take the scalars' float64
            g = g.to(m.dtype)
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            u = (m / fix1) / ((v / fix2).sqrt() + eps)
            own = next(held) if p.dtype != wide(p.dtype) else p
            u = -alpha * (u + weight_decay * own if decay and weight_decay else u)
            if own is not p:
                kept.append(own + u)
                u = kept[-1] - p.to(own.dtype)
            updates.append(u)
            mus.append(m)
            nus.append(v)
        new = AdamWState(
            count=state.count + 1,
            mu=tree.unflatten(treedef, mus),
            nu=tree.unflatten(treedef, nus),
            master=tree.unflatten(tree.flatten(state.master)[1], kept),
            lr=step,
        )
        return tree.unflatten(treedef, updates), new

    return Optimizer(init, update)
