"""Adam."""

from typing import Any

from shardlib import tree
from shardlib.optim.adamw import MomentsState, adamw
from shardlib.optim.base import Optimizer, chosen, in_full
from shardlib.optim.options import check
from shardlib.optim.schedules import Schedule, as_schedule


def adam(
    lr: float | Schedule,
    b1: float | Schedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: tree.Chooser | None = None,
) -> Optimizer:
    """Adam (Kingma and Ba 2015): `-lr mhat / (sqrt(vhat) + eps)` of `g + weight_decay p`, as torch.optim.Adam.

    Its decay is L2 regularization, seen by the moments (DeepSpeed's `adam_w_mode=False`); optax's `adam` has none.
    `mask` chooses the leaves that decay. 16-bit leaves have a float32 master in the state.
    """
    check("adam", 0, 1, b1=0 if callable(b1) else b1, b2=b2)
    check("adam", 0, eps=eps, weight_decay=weight_decay)
    decoupled = adamw(as_schedule(lr, "adam"), b1, b2, eps)

    def update(grads: Any, state: MomentsState, params: Any) -> tuple[Any, MomentsState]:
        if weight_decay:
            own = in_full(params, state.master)
            grads = tree.map_(
                lambda g, p, decay: g.to(p.dtype) + weight_decay * p if decay else g, grads, own, chosen(mask, params)
            )
        return decoupled.update(grads, state, params)

    return Optimizer(decoupled.init, update)
