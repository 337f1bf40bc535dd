"""Optimizers made of optimizers."""

from collections.abc import Mapping
from typing import Any

from shardlib import tree
from shardlib.errors import TreeError, listing
from shardlib.optim.base import Optimizer, chosen, refuse_others
from shardlib.parts import Part


def chain(*optimizers: Optimizer) -> Optimizer:
    """One after the other: each gets the updates of the one before as its gradients (optax's `chain`).

    The state is the tuple of their states.
    """
    refuse_others("chain", *optimizers)

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(o.init(params) for o in optimizers)

    def update(grads: Any, state: tuple[Any, ...], params: Any) -> tuple[Any, tuple[Any, ...]]:
        updates, states = grads, []
        for o, s in zip(optimizers, state, strict=True):
            updates, new = o.update(updates, s, params)
            states.append(new)
        return updates, tuple(states)

    return Optimizer(init, update)


def masked(optimizer: Optimizer, mask: tree.Chooser) -> Optimizer:
    """An optimizer for the leaves that `mask` chooses; the gradients of others pass as they are (optax's `masked`).

    For a part of a chain: `chain(masked(clip_by_global_norm(1.0), "embed"), adamw(3e-4))`. To leave leaves alone,
    `step(trainable=)`; to give each part an optimizer, `by_path`. Raises `TreeError` where the mask chooses none.
    """
    refuse_others("masked", optimizer)

    def part_of(params: Any) -> Part:
        picks = tree.leaves(chosen(mask, params, "masked"))
        if not any(picks):
            raise TreeError(f"masked: `{mask}` chooses no leaf")
        return Part(tuple(i if yes else None for i, yes in enumerate(picks)))

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        part = part_of(params)
        own, state = optimizer.update(part.take(grads), state, part.take(params))
        return part.put(own, grads), state

    return Optimizer(lambda params: optimizer.init(part_of(params).take(params)), update)


def by_path(optimizers: Mapping[Any, Optimizer]) -> Optimizer:
    """An optimizer for each part of the parameters: `{"lora.**.b": adamw(2e-3), "lora.**": adamw(2e-4)}`.

    A key is a glob, a tuple of globs or `(path, spec) -> bool`; a leaf belongs to the first that chooses it. Each
    optimizer sees its own leaves alone, by their whole paths. The state is the tuple of their states, in the order of
    the mapping; the metric `lr` is the rate of the first that has one, the others are in the state (`state.opt[1].lr`).
    Raises `TreeError` for a leaf that no key chooses, and for a key that gets none.
    """
    if not isinstance(optimizers, Mapping):
        raise TypeError(f"by_path takes a mapping, {{'**': optim.adamw(1e-3)}}, not {optimizers!r}")
    refuse_others("by_path", *optimizers.values())

    def update(grads: Any, state: tuple[Any, ...], params: Any) -> tuple[Any, tuple[Any, ...]]:
        updates, states = grads, []
        for part, o, s in zip(_parts(list(optimizers), params), optimizers.values(), state, strict=True):
            own, new = o.update(part.take(grads), s, part.take(params))
            updates = part.put(own, updates)
            states.append(new)
        return updates, tuple(states)

    def init(params: Any) -> tuple[Any, ...]:
        pairs = zip(_parts(list(optimizers), params), optimizers.values(), strict=True)
        return tuple(o.init(part.take(params)) for part, o in pairs)

    return Optimizer(init, update)


def _parts(choosers: list[Any], params: Any) -> list[Part]:
    """The leaves that each chooser is the first to choose."""
    picks = [tree.leaves(chosen(c, params, "by_path")) for c in choosers]
    paths = tree.paths(params)
    owner = [next((i for i, pick in enumerate(picks) if pick[at]), None) for at in range(len(paths))]
    lost = [path for path, own in zip(paths, owner, strict=True) if own is None]
    if lost:
        raise TreeError(f"by_path: no key chooses {listing(lost)}; there are {listing(choosers)}")
    for i, chooser in enumerate(choosers):
        if i not in owner:
            raise TreeError(f"by_path: `{chooser}` gets no leaf: keys before it choose all that it matches")
    return [Part(tuple(at if own == i else None for at, own in enumerate(owner))) for i in range(len(choosers))]
