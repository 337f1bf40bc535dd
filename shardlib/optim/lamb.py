"""LAMB."""

import math
from typing import Any

import torch
from torch import Tensor

from shardlib import tree
from shardlib.optim.base import Optimizer, bias_correction, chosen, counter, in_full, masters, rounded, zeros32
from shardlib.optim.layers import rms
from shardlib.optim.schedules import Schedule, as_schedule
from shardlib.sharding import leaf_of
from shardlib.tree import pytree
from shardlib.types import Leaf


@pytree
class LambState:
    """`count` of updates, first and second moments, float32 masters of 16-bit leaves, the last learning rate."""

    count: Tensor
    mu: Any
    nu: Any
    master: Any
    lr: Tensor


def lamb(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: tree.Chooser | None = None,
    *,
    min_coeff: float = 0.0,
    max_coeff: float = math.inf,
) -> Optimizer:
    """LAMB (You et al. 2020): `-lr |p| / |r| r` with Adam's `r = mhat / (sqrt(vhat) + eps) + weight_decay p`, as optax.

    The norms are those of the global leaf, of each layer where it is stacked; where one is 0 the ratio is 1. `mask`
    chooses the leaves that decay. `min_coeff`, `max_coeff` bound the ratio: DeepSpeed's FusedLamb has 0.01 and 10. (It
    also leaves both bias corrections out of `r`, so it is not this rule with other bounds.) 16-bit leaves have a
    float32 master in the state.
    """
    if not 0 <= min_coeff <= max_coeff:
        raise ValueError(f"lamb: 0 <= min_coeff <= max_coeff is needed, found {min_coeff} and {max_coeff}")
    rate = as_schedule(lr)

    def init(params: Any) -> LambState:
        zero = counter()
        mu, nu = (tree.map_(zeros32, params) for _ in range(2))
        return LambState(count=zero, mu=mu, nu=nu, master=masters(params), lr=rate(zero))

    def trust(p: Tensor, r: Tensor, leaf: Leaf) -> Tensor:
        above, below = rms(p, leaf), rms(r, leaf)  # their ratio is that of the norms
        ratio = (above / below).clamp(min_coeff, max_coeff)
        return torch.where((above > 0) & (below > 0), ratio, torch.ones_like(ratio))

    def update(grads: Any, state: LambState, params: Any) -> tuple[Any, LambState]:
        step, count, own = rate(state.count), state.count + 1, in_full(params, state.master)
        first, second = bias_correction(b1, count), bias_correction(b2, count)
        grads = tree.map_(lambda g, m: g.to(m.dtype), grads, state.mu)
        mu = tree.map_(lambda g, m: b1 * m + (1 - b1) * g, grads, state.mu)
        nu = tree.map_(lambda g, v: b2 * v + (1 - b2) * g * g, grads, state.nu)

        def one(p: Tensor, m: Tensor, v: Tensor, decay: bool, leaf: Leaf) -> Tensor:
            r = m / first.to(m.dtype) / ((v / second.to(v.dtype)).sqrt() + eps)
            r = r + weight_decay * p if decay else r
            return -step.to(m.dtype) * trust(p, r, leaf) * r

        flat, treedef = tree.flatten(params)
        each = (own, mu, nu, chosen(mask, params))
        leaves = [leaf_of(p, f"lamb: `{path}`") for p, path in zip(flat, tree.paths(params), strict=True)]
        updates = tree.unflatten(treedef, map(one, *map(tree.leaves, each), leaves))
        updates, master = rounded(params, own, updates)
        return updates, LambState(count=count, mu=mu, nu=nu, master=master, lr=step)

    return Optimizer(init, update)
