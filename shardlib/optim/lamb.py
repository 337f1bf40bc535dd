"""LAMB."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from shardlib import tree
from shardlib.errors import listing
from shardlib.optim.adamw import MomentsState, moments
from shardlib.optim.base import Optimizer, bias_correction, chosen, in_full, leaves_of, rounded
from shardlib.optim.layers import rms
from shardlib.optim.options import check
from shardlib.optim.schedules import Schedule, as_schedule
from shardlib.types import Leaf


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
    correct: Literal["moments", "rate"] = "moments",
) -> Optimizer:
    """LAMB (You et al. 2020): `-lr |p| / |r| r` with Adam's `r = mhat / (sqrt(vhat) + eps) + weight_decay p`, as optax.

    The norms are those of the global leaf, of each layer where it is stacked; where one is 0 the ratio is 1. `mask`
    chooses the leaves that decay. `min_coeff`, `max_coeff` bound the ratio. `correct`: what the bias corrections apply
    to; `"rate"` leaves them out of `r` and multiplies `lr` by `sqrt(1 - b2^t) / (1 - b1^t)`, as DeepSpeed 0.19.8 does,
    with bounds of 0.01 and 10. 16-bit leaves have a float32 master in the state.
    """
    if correct not in (known := ("moments", "rate")):
        raise ValueError(f"lamb: correct={correct!r} is none of {listing(known)}")
    check("lamb", 0, 1, b1=b1, b2=b2)
    check("lamb", 0, eps=eps, weight_decay=weight_decay)
    check("lamb", 0, min_coeff=min_coeff, max_coeff=0 if max_coeff == math.inf else max_coeff)
    if min_coeff > max_coeff:
        raise ValueError(f"lamb: 0 <= min_coeff <= max_coeff is needed, found {min_coeff} and {max_coeff}")
    rate = as_schedule(lr, "lamb")

    def trust(p: Tensor, r: Tensor, leaf: Leaf) -> Tensor:
        above, below = rms(p, leaf), rms(r, leaf)  # their ratio is that of the norms
        ratio = (above / below).clamp(min_coeff, max_coeff)
        return torch.where((above > 0) & (below > 0), ratio, torch.ones_like(ratio))

    def update(grads: Any, state: MomentsState, params: Any) -> tuple[Any, MomentsState]:
        step, count, own = rate(state.count), state.count + 1, in_full(params, state.master)
        first, second = bias_correction(b1, count), bias_correction(b2, count)
        used = step
        if correct == "rate":
            used, first, second = step * second.sqrt() / first, torch.ones_like(first), torch.ones_like(second)
        grads = tree.map_(lambda g, m: g.to(m.dtype), grads, state.mu)
        mu = tree.map_(lambda g, m: b1 * m + (1 - b1) * g, grads, state.mu)
        nu = tree.map_(lambda g, v: b2 * v + (1 - b2) * g * g, grads, state.nu)

        def one(p: Tensor, m: Tensor, v: Tensor, decay: bool, leaf: Leaf) -> Tensor:
            r = m / first.to(m.dtype) / ((v / second.to(v.dtype)).sqrt() + eps)
            r = r + weight_decay * p if decay else r
            return -used.to(m.dtype) * trust(p, r, leaf) * r

        each = (own, mu, nu, chosen(mask, params))
        updates = map(one, *map(tree.leaves, each), leaves_of(params, "lamb"))
        updates = tree.unflatten(tree.flatten(params)[1], updates)
        updates, master = rounded(params, own, updates)
        return updates, MomentsState(count=count, mu=mu, nu=nu, master=master, lr=step)

    return Optimizer(lambda params: moments(params, rate), update)
