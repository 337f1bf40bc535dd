"""Signatures: what a program was traced for, what of it ranks compare, and what the key of a file says."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib import tree
from shardlib.array import Array
from shardlib.errors import SpecError
from shardlib.graph.trace import strides
from shardlib.mesh import Mesh
from shardlib.shard_map import shards_of
from shardlib.types import valueless


@dataclass(frozen=True)
class Constant:
    """An argument that is no tensor. Two are equal where one program serves both: NaN equals itself; 1, 1.0 and True,
    and 0.0 and -0.0, are four and two."""

    value: Any = field(compare=False)
    key: Any

    @classmethod
    def of(cls, x: Any) -> "Constant":
        if isinstance(x, tuple):
            return cls(x, (type(x), tuple(map(Constant.of, x))))
        return cls(x, (type(x), repr(x) if isinstance(x, (float, complex)) else x))


def constants(args: Sequence[Any], numbers: Sequence[int], name: str) -> tuple[Constant, ...]:
    """The static arguments among some, of which a call may leave the last ones out."""
    for i in numbers:
        if i < len(args) and any(isinstance(x, Tensor) for x in tree.leaves(args[i])):
            raise SpecError(
                f"{name}: the static argument {i} holds a tensor, whose values no signature knows: leave it out of "
                "static_argnums"
            )
    return tuple(Constant.of(args[i]) for i in numbers if i < len(args))


def refuse_odd(name: str, does: str, where: Sequence[str], values: Sequence[Any]) -> None:
    """Raise for the first of some values, static arguments left out at their end, that is neither a tensor nor a
    constant: what has no hash, and objects that hold tensors."""
    for path, x in zip(where, values, strict=False):
        if not isinstance(x, Tensor) and type(x).__hash__ is None:
            raise SpecError(
                f"{name}: {path} is a {type(x).__name__}; jit {does} tensors, arrays and hashable constants"
            )
        if not isinstance(x, (Tensor, type)) and any(
            isinstance(y, Tensor) for y in getattr(x, "__dict__", {}).values()
        ):
            raise SpecError(f"{name}: {path} is a {type(x).__name__} that holds tensors: make its class an sl.pytree")


def refuse_valueless(name: str, treedef: Any, flat: Sequence[Any]) -> None:
    """Raise for an argument that has a shape alone."""
    for i, x in enumerate(flat):
        if isinstance(x, Tensor) and valueless(shards_of(x)[0]):
            raise SpecError(
                f"{name}: {argument_paths(treedef)[i]} has no values: it is abstract (which .lower takes), or was kept "
                "from a trace, where it stood for the values of any call"
            )


def signature_of(x: Any) -> Any:
    """What a program depends on of a leaf of its arguments."""
    if not isinstance(x, Tensor):
        return Constant.of(x)
    if x.layout is not torch.strided:
        raise SpecError(f"a tensor of layout {x.layout} goes into jit, which takes strided ones: x.to_dense() first")
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


def name_of(f: Any) -> str:
    """What messages call a function: its name, that of what a partial calls, the class of an object."""
    while isinstance(f, partial):
        f = f.func
    return getattr(f, "__name__", type(f).__name__)


def argument_numbers(f: Callable[..., Any], what: str, said: int | Sequence[int]) -> tuple[int, ...]:
    """Numbers of arguments of `f`, counted from the front. Raises where `f` takes no such argument."""
    given = (said,) if isinstance(said, int) else tuple(sorted({*said}))
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # builtins, whose signature nothing knows
        return given
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for i in given:
        if (i < -count) or (i >= count and not many) or (i < 0 and many):
            takes = "any number of arguments: count from the front" if many else f"arguments 0 to {count - 1}"
            raise SpecError(f"{what}={said}: the function takes {takes}")
    return tuple(sorted({i % count if i < 0 else i for i in given}))  # a call may leave out the last


def by_position(f: Callable[..., Any], args: tuple[Any, ...], words: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """All arguments of a call by position; what stands before one given by keyword takes its default."""
    if not words:
        return args
    bound = inspect.signature(f).bind(*args, **words)
    if bound.kwargs:
        bound.apply_defaults()
    if alone := [word for word in bound.kwargs if word in words]:
        raise SpecError(
            f"{name}: jit takes arguments that have a position, and `{alone[0]}` is taken by keyword "
            "alone: bind it with functools.partial"
        )
    return bound.args


def argument_paths(treedef: Any) -> list[str]:
    """`argument 0, `blocks.w``, for every leaf of the tuple of arguments."""
    split = [p.partition(".") for p in tree.paths(tree.unflatten(treedef, range(treedef.num_leaves)))]
    return [f"argument {i}, `{path}`," if path else f"argument {i}" for i, _, path in split]


class Signature(NamedTuple):
    """What a program was traced for."""

    structure: Any
    static: tuple[Constant, ...]
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
        said += [f"static argument number {i} is {_plain(x.value)}" for i, x in enumerate(self.static)]
        where = argument_paths(self.structure)
        return said + [f"{where[i]} is the array of {where[at]}" for i, at in enumerate(self.places) if at != i]

    def changed(self, old: "Signature") -> str:
        """What differs from another key, in a line."""
        if self.mesh != old.mesh:
            return f"the mesh is {self.mesh[0]}, it was {old.mesh[0]}"
        if self.static != old.static:
            new, was = (tuple(x.value for x in key.static) for key in (self, old))
            return f"static arguments are {new}, they were {was}"
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
    if isinstance(signature, Constant):
        return _plain(signature.value) if exact else repr(signature.value)
    spec, shape, stride, dtype, _ = signature
    told = f"{str(dtype).removeprefix('torch.')}{list(shape)}" + (f" `{spec}`" if spec is not None else "")
    shown = spec is None or (exact and list(stride) != sorted(stride, reverse=True))
    return f"{told} of strides {list(stride)}" if shown else told


def _plain(x: Any) -> str:
    """A constant in words that are the same on all ranks."""
    return repr(x) if x is None or isinstance(x, (bool, int, float, str)) else f"a {type(x).__name__}"
