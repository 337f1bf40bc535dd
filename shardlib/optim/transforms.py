"""Changes of gradients and updates, to `chain` with optimizers."""

from typing import Any

from shardlib import tree
from shardlib.norms import clips, global_norm, scaled_to
from shardlib.optim.base import Optimizer, chosen
from shardlib.optim.options import check


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Gradients scaled so that their global norm is at most `max_norm`, as optax; as `step(clip=)` does."""
    if max_norm is None or not clips(max_norm):
        raise ValueError(f"clip_by_global_norm: a norm above 0 is needed, found {max_norm!r}")

    def update(grads: Any, state: tuple[()], params: Any) -> tuple[Any, tuple[()]]:
        return scaled_to(grads, global_norm(grads), max_norm), state

    return Optimizer(lambda params: (), update)


def add_decayed_weights(weight_decay: float, mask: tree.Chooser | None = None) -> Optimizer:
    """`g + weight_decay p`, for the leaves that `mask` chooses, as optax.

    Before an optimizer, L2 regularization: `chain(add_decayed_weights(1e-4), sgd(0.1, momentum=0.9))` is torch's
    `SGD(weight_decay=1e-4)`. Of 16-bit leaves it sees the parameter, not its float32 master.
    """
    check("add_decayed_weights", weight_decay=weight_decay)

    def update(grads: Any, state: tuple[()], params: Any) -> tuple[Any, tuple[()]]:
        added = tree.map_(lambda g, p, d: g + weight_decay * p if d else g, grads, params, chosen(mask, params))
        return added, state

    return Optimizer(lambda params: (), update)


def scale(factor: float) -> Optimizer:
    """Updates times `factor`, as optax: `chain(adam(1.0), scale(-0.1))` goes up."""
    check("scale", factor=factor)
    return Optimizer(lambda params: (), lambda grads, state, params: (tree.map_(lambda g: factor * g, grads), state))


def clip(max_delta: float) -> Optimizer:
    """Every element of the gradients brought into -`max_delta`..`max_delta`, as optax."""
    check("clip", 0, max_delta=max_delta)

    def update(grads: Any, state: tuple[()], params: Any) -> tuple[Any, tuple[()]]:
        return tree.map_(lambda g: g.clamp(-max_delta, max_delta), grads), state

    return Optimizer(lambda params: (), update)
