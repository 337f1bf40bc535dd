"""Leaves as the files of a save see them: global tensors and plain values by name, a stacked leaf as one per layer."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # what `abstract` makes leaves of

from shardlib import layout
from shardlib.array import Array
from shardlib.errors import TreeError, listing
from shardlib.parts import places

if TYPE_CHECKING:
    from shardlib.chunks import Piece  # `chunks` loads torch.distributed.checkpoint, which takes a second: at first use

_PLAIN = (bool, int, float, complex, str, bytes)


@dataclass
class Entry:
    """A leaf and its names in files: its path or, of a stacked leaf, one per layer. `first`: the same, at the first of
    several places."""

    path: str
    value: Any
    rename: Mapping[str, str]
    first: "Entry | None" = None

    @cached_property
    def stacked(self) -> int:
        """How many leading dimensions count layers."""
        return self.value.spec.stacked if isinstance(self.value, Array) and "*" in self.path.split(".") else 0

    @property
    def tied(self) -> "Entry | None":
        """The leaf that stands for this one in files: `first`, unless that is there layer by layer, and this is not."""
        return self.first if self.first and self.first.stacked == self.stacked else None

    @cached_property
    def names(self) -> list[str]:
        """In row-major order of layers. Each `*` counts along one stacked dimension, the last along all the others."""
        if not self.stacked:
            return [self.path]
        parts, layers = self.path.split("."), self.value.shape[: self.stacked]
        stars = [i for i, p in enumerate(parts) if p == "*"][: self.stacked]
        lengths = [*layers[: len(stars) - 1], math.prod(layers[len(stars) - 1 :])]
        out = []
        for place in product(*map(range, lengths)):
            numbers = dict(zip(stars, map(str, place), strict=True))
            out.append(".".join(numbers.get(i, p) for i, p in enumerate(parts)))
        return out

    @cached_property
    def saved(self) -> list[str]:
        """What files call them: the same, but for `rename`."""
        return [_renamed(n, self.rename) for n in self.names]

    @cached_property
    def what(self) -> dict[str, Any]:
        """The dtype and shape of each, or the Python type."""
        if not isinstance(self.value, Tensor):
            return {"type": type(self.value).__name__}
        return {"dtype": str(self.value.dtype).removeprefix("torch."), "shape": list(self.value.shape[self.stacked :])}

    @property
    def spec(self) -> str:
        """That of each; empty for what is no array."""
        if not isinstance(self.value, Array):
            return ""
        return " ".join(map(str, self.value.spec.dims[self.stacked :]))

    @property
    def line(self) -> str:
        """What all ranks must agree on."""
        value = "" if isinstance(self.value, Tensor) else f" {self.value!r}"
        value += f" tied to `{self.first.path}`" if self.first else ""
        return f"`{self.path}` ({say(self.what)}{value}{f' x {len(self.names)}' if self.stacked else ''})"

    def check(self) -> None:
        """Refuse what cannot be saved."""
        x = self.value
        if isinstance(x, Array) and x.spec.pending:
            waits = f"waits for a sum over {listing(x.spec.pending)}; sl.reshard it first"
            raise TreeError(f"save: `{self.path}` (`{x.spec}`) {waits}")
        if isinstance(x, Array):
            _ = x.shards  # raises where it was donated
        if is_abstract(x):
            raise TreeError(f"save: `{self.path}` is abstract: it has no values")
        if not isinstance(x, Tensor) and type(x) not in _PLAIN:
            kinds = listing(t.__name__ for t in _PLAIN)
            raise TreeError(f"save: `{self.path}` is {type(x).__name__}; files hold tensors and {kinds}")

    def pieces(self, names: Sequence[str]) -> "Iterator[Piece]":
        """What this process holds of it, layer by layer, which the files call `names`; nothing where it is tied."""
        from shardlib.chunks import Piece

        x, k = self.value, self.stacked
        if self.tied:
            return
        if not isinstance(x, Tensor):
            yield Piece(names[0], x)
            return
        for at, piece in (x.pieces() if isinstance(x, Array) else {(0,) * x.dim(): x.detach()}).items():
            for place in product(*map(range, piece.shape[:k])):
                number = 0
                for n, start, i in zip(x.shape[:k], at[:k], place, strict=True):
                    number = number * n + start + i
                yield Piece(names[number], piece[place], at[k:], tuple(x.shape[k:]))


def entries(paths: Sequence[str], values: Sequence[Any], rename: Mapping[str, str] | None = None) -> list[Entry]:
    """Those of a tree's leaves. Raises `TreeError` where two have one name, or `rename` fits none."""
    leaves: list[Entry] = []
    for i, (path, x, at) in enumerate(zip(paths, values, places(values), strict=True)):
        leaves.append(Entry(path, x, rename or {}, leaves[at] if at < i else None))
    owner: dict[str, str] = {}
    for leaf in leaves:
        for name in leaf.names:
            if name in owner:
                raise TreeError(f"`{owner[name]}` and `{leaf.path}` both have the path `{name}`")
            owner[name] = leaf.path
    for new, old in (rename or {}).items():
        if new.count("*") != old.count("*"):
            raise TreeError(f"rename: `{new}` and `{old}` must have as many `*`")
        if not any(_match(new, name) for name in owner):
            raise TreeError(f"rename: `{new}` matches no path; there are {listing(list(owner)[:12])}")
    return leaves


def _match(pattern: str, name: str) -> re.Match[str] | None:
    """`pattern` as the first names of `name`; a `*` stands for one of them."""
    parts = ["([^.]+)" if p == "*" else re.escape(p) for p in pattern.split(".")]
    return re.match(r"\.".join(parts) + r"(?=\.|$)", name)


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    for new, old in rename.items():
        if match := _match(new, name):
            stars = iter(match.groups())
            return ".".join(next(stars) if p == "*" else p for p in old.split(".")) + name[match.end() :]
    return name


def is_abstract(x: Any) -> bool:
    """Whether a leaf has no values."""
    shards = x._shards or () if isinstance(x, Array) else (x,)
    return any(isinstance(s, FakeTensor) for s in shards)


def say(what: Mapping[str, Any]) -> str:
    """`float32 (4, 3)`, or the Python type."""
    return what.get("type") or f"{what['dtype']} {tuple(what['shape'])}"


def empty(x: Any) -> Any:
    """New storage for what `x` describes, zero where there is padding, because padding is."""
    if not isinstance(x, Array):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device) if isinstance(x, Tensor) else x
    new = torch.zeros if x.padded else torch.empty
    mesh, made, shards = x.mesh, {}, []
    for rank in range(mesh.total) if mesh.simulate else (mesh.rank,):
        at = layout.slices(x.spec, x.shape, mesh.shape, mesh.coordinates(rank))
        key = tuple((s.start, s.stop) for s in at)
        if key not in made:
            made[key] = new(layout.padded_shape(x.spec, x.shape, mesh.shape), dtype=x.dtype, device=x.device)
        shards.append(made[key])
    return Array(shards, x.spec, x.shape, mesh)
