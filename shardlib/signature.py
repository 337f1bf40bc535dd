"""Signatures: what a program was traced for, what of it ranks compare, and what the key of a file says."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib import tree
from shardlib.array import Array
from shardlib.graph.trace import strides
from shardlib.mesh import Mesh
from shardlib.shard_map import shards_of


def signature_of(x: Any) -> Any:
    """What a program depends on of a leaf of its arguments."""
    if not isinstance(x, Tensor):
        return type(x), x, repr(x) if isinstance(x, float) else None  # -0.0 equals 0.0
    local = shards_of(x)[0]
    spec = x.spec if isinstance(x, Array) else None
    return (spec, tuple(x.shape), strides(local), x.dtype, x.device)


def described(x: Any) -> Any:
    """A leaf for the key of a file: the same on all ranks, and in every process."""
    if not isinstance(x, Tensor):
        return x
    local, spec = shards_of(x)[0], x.spec if isinstance(x, Array) else None
    said = (str(spec), spec.stacked, spec.matrix) if spec is not None else None
    return said, tuple(x.shape), tuple(local.shape), strides(local), x.dtype, x.device.type


def mesh_key(mesh: Mesh) -> Any:
    """What a program depends on of a mesh."""
    return mesh.name, tuple(mesh.groups.items()), mesh.simulate


def settings() -> tuple[Any, ...]:
    """What it depends on of torch's settings."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def argument_paths(treedef: Any) -> list[str]:
    """`argument 0, `blocks.w``, for every leaf of the tuple of arguments."""
    split = [p.partition(".") for p in tree.paths(tree.unflatten(treedef, range(treedef.num_leaves)))]
    return [f"argument {i}, `{path}`," if path else f"argument {i}" for i, _, path in split]


class Signature(NamedTuple):
    """What a program was traced for."""

    structure: Any
    static: tuple[Any, ...]
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    mesh: Any
    settings: Any

    def lines(self, mesh: Mesh) -> list[str]:
        """What must be the same on all ranks, in lines."""
        said = [f"the mesh is {mesh.name}", f"SHARDLIB_DEBUG is {'on' if mesh.debug else 'off'}"]
        said += [
            f"{path} is {_said(x, exact=True)}"
            for path, x in zip(argument_paths(self.structure), self.leaves, strict=True)
        ]
        said += [f"static argument number {i} is {_plain(x)}" for i, x in enumerate(self.static)]
        where = argument_paths(self.structure)
        return said + [f"{where[i]} is the array of {where[at]}" for i, at in enumerate(self.places) if at != i]

    def changed(self, old: "Signature") -> str:
        """What differs from another key, in a line."""
        if self.mesh != old.mesh:
            return f"the mesh is {self.mesh[0]}, it was {old.mesh[0]}"
        if self.static != old.static:
            return f"static arguments are {self.static}, they were {old.static}"
        if self.structure != old.structure:
            return "the arguments have another structure"
        pairs = zip(argument_paths(self.structure), self.leaves, old.leaves, strict=True)
        said = [f"{path} is {_said(new)}, it was {_said(was)}" for path, new, was in pairs if new != was]
        more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
        if not said and self.places != old.places:
            return "other arguments are one and the same array"
        return said[0] + more if said else "torch's settings differ"


def _said(signature: Any, exact: bool = False) -> str:
    """A leaf's signature in words; `exact`: strides of arrays, too, where they are not in the order of the dims."""
    if len(signature) == 3:
        return _plain(signature[1]) if exact else repr(signature[1])
    spec, shape, stride, dtype, _ = signature
    told = f"{str(dtype).removeprefix('torch.')}{list(shape)}" + (f" `{spec}`" if spec is not None else "")
    shown = spec is None or (exact and list(stride) != sorted(stride, reverse=True))
    return f"{told} of strides {list(stride)}" if shown else told


def _plain(x: Any) -> str:
    """A constant in words that are the same on all ranks."""
    return repr(x) if x is None or isinstance(x, (bool, int, float, str)) else f"a {type(x).__name__}"
