"""Parts of trees: the leaves that a step trains, each once however many places it stands at.

A leaf that stands at several places of a tree is one object there: it is *tied*, and known by the first of its paths.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardlib import tree
from shardlib.errors import located


class Memo(dict[Any, Any]):
    """What a function remembers of earlier calls: no part of what it is (`identity`)."""


def firsts(keys: Iterable[Hashable]) -> tuple[int, ...]:
    """For each key the position at which it first appears."""
    seen: dict[Hashable, int] = {}
    return tuple(seen.setdefault(key, i) for i, key in enumerate(keys))


def places(flat: Iterable[Any]) -> tuple[int, ...]:
    """For each leaf the position at which it first stands: tensors by identity; what is no tensor is never tied."""
    return firsts(id(x) if isinstance(x, Tensor) else i for i, x in enumerate(flat))


def once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, called once for the same tensors (by identity) and other arguments: what was one object stays one."""
    made: dict[Any, tuple[Any, Any]] = {}

    def run(*args: Any) -> Any:
        key = tuple(id(x) if isinstance(x, Tensor) else x for x in args)
        if key not in made:
            made[key] = fn(*args), args  # which keeps their ids from being used again
        return made[key][0]

    return run


@dataclass(frozen=True)
class Part:
    """Some leaves of a tree. `sources`: for every place the position of the leaf of the part that stands there (its
    own, or an earlier one for a tied leaf), None for a leaf that does not belong."""

    sources: tuple[int | None, ...]

    def take(self, whole: Any) -> Any:
        """`whole` with its leaves that belong, each once; None, an empty subtree, stands for the others."""
        flat, treedef = tree.flatten(whole)
        places = enumerate(zip(flat, self.sources, strict=True))
        return tree.unflatten(treedef, [x if at == i else None for i, (x, at) in places])

    def put(self, part: Any, whole: Any) -> Any:
        """The inverse: the leaves of `part` at all their places, the others from `whole`."""
        flat, treedef = tree.flatten(whole)
        own = [i for i, at in enumerate(self.sources) if at == i]
        made = dict(zip(own, tree.leaves(part), strict=True))
        places = zip(flat, self.sources, strict=True)
        return tree.unflatten(treedef, [x if at is None else made[at] for x, at in places])


def part_of(whole: Any, chooser: tree.Chooser | None = None, what: str = "chooser") -> Part:
    """The leaves of `whole` that a chooser picks (None: all); a tied leaf where it picks any of its places.

    Errors say `what` the chooser is.
    """
    flat = tree.leaves(whole)
    specs = [getattr(x, "spec", None) for x in flat]
    with located(what):
        picked = [True] * len(flat) if chooser is None else tree.choose(chooser, tree.paths(whole), specs)
    at = places(flat)
    own = {i for i, yes in zip(at, picked, strict=True) if yes}
    return Part(tuple(i if i in own else None for i in at))
