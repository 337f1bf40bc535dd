"""What optimizers share: the pair, decay masks, 32-bit masters, and state that stays a leaf."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib import tree
from shardlib.errors import located
from shardlib.sharding import leaf_of, settle
from shardlib.spec import Spec
from shardlib.types import Leaf, inside, padding_allowed, region


class _Pair(NamedTuple):
    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


class Optimizer(_Pair):
    """`init(params) -> state`, `update(grads, state, params) -> (updates, state)`; new parameters: params + updates.

    Both run inside any per-device function, on shards as a layout cuts them, padded ones too. Updates are leaves as the
    parameters are, the new state's as the old one's.
    """

    def __new__(cls, init: Callable[[Any], Any], update: Callable[[Any, Any, Any], tuple[Any, Any]]) -> "Optimizer":
        def padded(params: Any) -> Any:
            with padding_allowed():
                return init(params)

        def settled(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            with padding_allowed():
                updates, new = update(grads, state, params)
                return _as_leaves(updates, params), _as_leaves(new, state)

        return super().__new__(cls, padded, settled)


def _as_leaves(values: Any, like: Any) -> Any:
    """`values`, each the leaf that the one in its place is; unchanged where the trees differ, which `step` refuses."""
    (flat, treedef), (others, structure), here = tree.flatten(values), tree.flatten(like), region()
    if treedef != structure:
        return values

    def one(x: Any, y: Any) -> Any:
        leaf = here.leaves.get(y) if isinstance(y, Tensor) and isinstance(x, Tensor) else None
        return x if leaf is None or x.shape != y.shape else settle(x, leaf)

    return tree.unflatten(treedef, map(one, flat, others))


def refuse_others(what: str, *found: Any) -> None:
    """Raise `TypeError` for what is no optimizer, such as a function that would make one."""
    for each in found:
        if not isinstance(each, Optimizer):
            known = "such as optim.adamw(1e-3) or an optim.Optimizer(init, update)"
            raise TypeError(f"{what} takes optimizers, {known}, not {each!r}")


def matrices(path: str, spec: Spec) -> bool:
    """A mask that chooses leaves of two and more dimensions, a stacked leaf counting as its layers do."""
    return len(spec.dims) - spec.stacked >= 2


def chosen(mask: tree.Chooser | None, params: Any, what: str = "an optimizer's mask") -> Any:
    """The tree of booleans that a mask gives for `params`; None chooses all. Decided by path and global shape.

    Errors say `what` chooses.
    """
    flat, treedef = tree.flatten(params)
    if mask is None:
        return tree.unflatten(treedef, [True] * len(flat))
    specs = [leaf_of(x, what).spec for x in flat] if callable(mask) and inside() else flat
    with located(what):
        return tree.unflatten(treedef, tree.choose(mask, tree.paths(params), specs))


def leaves_of(params: Any, what: str) -> list[Leaf]:
    """What is known of each parameter; `what` needs it."""
    return [leaf_of(p, f"{what}: `{path}`") for p, path in zip(tree.leaves(params), tree.paths(params), strict=True)]


def counter() -> Tensor:
    """A count of no updates yet."""
    return torch.zeros((), dtype=torch.int64, device=region().mesh.device)


def zeros32(x: Tensor) -> Tensor:
    """Zeros like `x`, in 32 bits where `x` has 16."""
    return torch.zeros_like(x, dtype=wide(x.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a leaf's optimizer state is kept: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def masters(params: Any) -> Any:
    """float32 copies of 16-bit leaves; a 0-size placeholder where the leaf is its own master."""
    return tree.map_(lambda p: p.to(torch.float32) if needs_master(p) else None, params)


def in_full(params: Any, master: Any) -> Any:
    """The parameters, 16-bit leaves as their float32 masters."""
    held = iter(tree.leaves(master))
    return tree.map_(lambda p: next(held) if needs_master(p) else p, params)


def rounded(params: Any, own: Any, updates: Any) -> tuple[Any, Any]:
    """From updates of `own` (what `in_full` gave): those of `params`, which round to the new masters, and these."""
    master = tree.map_(lambda p, o, u: o + u if needs_master(p) else None, params, own, updates)
    held = iter(tree.leaves(master))
    return tree.map_(lambda p, u: next(held) - p.to(u.dtype) if needs_master(p) else u, params, updates), master


def bias_correction(decay: float, count: Tensor) -> Tensor:
    """`1 - decay^count`, 0-d float64: the weights that an average over `count` updates has given in all."""
    return 1 - decay ** count.to(torch.float64)


def needs_master(p: Tensor) -> bool:
    """Whether updates would be lost in the leaf's own precision."""
    return p.is_floating_point() and p.dtype.itemsize < 4


def kept(state: Any, name: str) -> list[Any]:
    """What an optimizer's state has under `name`; what each has of several (`chain`, `by_path`), or the one inside."""
    if type(state) in (tuple, list):
        return [x for s in state for x in kept(s, name)]
    fields = state if isinstance(state, dict) else vars(state) if tree.is_pytree_class(type(state)) else {}
    if fields.get(name) is not None:
        return [fields[name]]
    return kept(fields["inner"], name) if "inner" in fields else []


def learning_rate(state: Any) -> Tensor | None:
    """The rate that the last update used, from an optimizer's state: the first that there is, else None."""
    return next(iter(kept(state, "lr")), None)


def selected(which: Tensor | None, new: Any, old: Any) -> Any:
    """`new` where `which` (0-d bool) says so or is None, else `old`, trees of the same leaves: skipped steps."""
    if which is None:
        return new
    here = region()

    def one(x: Tensor, y: Tensor) -> Tensor:
        leaf, out = here.leaves.get(y), torch.where(which, x, y)
        return out if leaf is None else settle(out, leaf)

    with padding_allowed():
        return tree.map_(one, new, old)


def apply_updates(params: Any, updates: Any) -> Any:
    """`params + updates`, added in the wider dtype and rounded to the leaf's own."""

    def one(p: Tensor, u: Tensor) -> Tensor:
        return settle((p + u).to(p.dtype), leaf_of(p, "apply_updates"))

    with padding_allowed():
        return tree.map_(one, params, updates)
