"""The four types of a value per mesh axis, and `Flow`, which computes them by data flow.

A type is a string with one letter per axis of the mesh, in mesh order:

    I invariant    equal on all ranks of the axis; its cotangent is invariant
    R replicated   equal, but each rank may use it differently; its cotangent is pending
    V varying      each rank has its own
    P pending      a sum over the axis still to be made; its cotangent is replicated

Types live in a table keyed by the innermost tensor (functorch wrappers removed), never on the tensor. `Flow` sits below
functorch and autograd, so it sees forward and backward alike: equal operands give equal results, anything that touches a
varying value varies. It knows nothing of linearity: a pending operand counts as varying, and `Insert` (insert.py), which
sees whole functions, marks what stays pending. An operand without a type is an error, never a guess.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor  # types belong to the innermost tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardlib.errors import SpecError, listing
from shardlib.mesh import Mesh
from shardlib.spec import Spec

T = TypeVar("T")
WORDS = {"I": "invariant", "R": "replicated", "V": "varying", "P": "pending"}


def base(x: Tensor) -> Tensor:
    """The innermost tensor: wrappers of grad and vmap removed."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


class TensorTable(Generic[T]):
    """A weak mapping from tensors, by identity; `entries[id(x)]` is `(weak reference, value)`."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def get(self, x: Tensor) -> T | None:
        found = self.entries.get(id(base(x)))
        return None if found is None else found[1]

    def set(self, x: Tensor, value: T) -> None:
        x, entries = base(x), self.entries
        key = id(x)
        entries[key] = (weakref.ref(x, lambda _: entries.pop(key, None)), value)

    def discard(self, x: Tensor) -> None:
        self.entries.pop(id(base(x)), None)


class Leaf(NamedTuple):
    """What a value that entered at a border brings along: its spec and its global shape."""

    spec: Spec
    shape: tuple[int, ...]


@dataclass
class Region:
    """One per-device function while it runs or is traced: the mesh, the types, and the sizes that names are bound to."""

    mesh: Mesh

    def __post_init__(self) -> None:
        self.types: TensorTable[str] = TensorTable()
        self.leaves: TensorTable[Leaf] = TensorTable()
        self.padded: TensorTable[bool] = TensorTable()
        self.sizes: dict[str, int] = {}
        self.bound_by: dict[str, str] = {}
        self.position = {a: i for i, a in enumerate(self.mesh.shape)}
        self.invariant = "I" * len(self.mesh.shape)
        self.entered: set[int] = set()
        self.padding_allowed = 0
        self.paused = False
        self.where = "shard_map"
        self.insert: Any = None

    def type_of(self, x: Tensor) -> str:
        """The type of `x`; an error where it is unknown."""
        found = self.types.get(x)
        if found is None:
            raise unknown("this operation", x)
        return found

    def over(self, x: Tensor, axis: str) -> str:
        """The letter of `x` over one axis."""
        return self.type_of(x)[self.position[axis]]

    def with_letter(self, kind: str, axes: Sequence[str], letter: str) -> str:
        """`kind` with `letter` over `axes`."""
        if not axes:
            return kind
        letters = list(kind)
        for a in axes:
            letters[self.position[a]] = letter
        return "".join(letters)

    def make(self, **axes: Sequence[str]) -> str:
        """A type from letters: `make(V=("dp",), P=("tp",))`; invariant elsewhere."""
        kind = self.invariant
        for letter, names in axes.items():
            kind = self.with_letter(kind, names, letter)
        return kind

    def set_type(self, x: Tensor, kind: str) -> Tensor:
        self.types.set(x, kind)
        return x

    def retype(self, x: Tensor, like: str, axes: Sequence[str], letter: str) -> Tensor:
        """Set the type of `x` to `like` with `letter` over `axes`."""
        return self.set_type(x, self.with_letter(like, axes, letter))

    def axes_of(self, kind: str, letters: str) -> tuple[str, ...]:
        """The axes over which `kind` has one of `letters`."""
        return tuple(a for a, k in zip(self.mesh.shape, kind) if k in letters)

    def enter(self, x: Tensor, leaf: Leaf, padded: bool = False) -> Tensor:
        """A leaf as the function sees it: typed by its spec (split: varying, pending, else invariant)."""
        self.entered.add(x.untyped_storage()._cdata)
        with paused():
            x = x.detach()
        self.types.set(x, self.make(V=leaf.spec.split, P=leaf.spec.pending))
        return self.mark(x, leaf, padded)

    def mark(self, x: Tensor, leaf: Leaf, padded: bool = False) -> Tensor:
        """Note which leaf `x` is."""
        self.leaves.set(x, leaf)
        if padded:
            self.padded.set(x, True)
        return x

    def bind(self, leaf: Leaf) -> None:
        """Bind the names of a leaf to its sizes; a name that leaves bind to several sizes is left to each pattern."""
        for dim, n in zip(leaf.spec.dims, leaf.shape, strict=True):
            if dim.name != "_" and not dim.name.isdigit():
                known = self.sizes.setdefault(dim.name, n)
                self.bound_by.setdefault(dim.name, "an argument")
                if known != n:
                    self.sizes[dim.name] = -1

    @contextmanager
    def names(self, values: Sequence[Any]) -> Iterator[None]:
        """A scope of names: inside, they are bound by the leaves among `values` and by the patterns that run."""
        held, self.sizes, self.bound_by = (self.sizes, self.bound_by), {}, {}
        for x in values:
            leaf = self.leaves.get(x) if isinstance(x, Tensor) else None
            if leaf is not None:
                self.bind(leaf)
        try:
            yield
        finally:
            self.sizes, self.bound_by = held

    def describe(self, x: Tensor) -> str:
        """`f64[8, 4] varying over dp, pending over tp`, with the spec where the value still has one."""
        leaf = self.leaves.get(x)
        kind = self.types.get(x)
        said = "of unknown type" if kind is None else words(self, kind)
        return f"{short(x)} {said}" + (f" (`{leaf.spec}`)" if leaf else "")


def words(region: Region, kind: str) -> str:
    """A type in words: `varying over dp, pending over tp`."""
    said = [f"{WORDS[k]} over {', '.join(region.axes_of(kind, k))}" for k in "VPR" if k in kind]
    return ", ".join(said) or "invariant"


def short(x: Tensor) -> str:
    """`f64[8, 4]`."""
    name = str(x.dtype).removeprefix("torch.")
    for long, brief in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            name = brief + name.removeprefix(long)
            break
    return f"{name}{list(x.shape)}"


def unknown(what: str, x: Tensor) -> SpecError:
    return SpecError(
        f"{what}: an operand {short(x)} has no type: it was made outside the per-device function and captured.\n"
        "  Pass it as an argument, or declare it with sl.assume(spec, x)"
    )


class _State(threading.local):
    region: Region | None = None


_state = _State()


def region() -> Region:
    """The region of the per-device function that is running; an error outside one."""
    if _state.region is None:
        raise SpecError("this runs only inside a per-device function: sl.shard_map, or a loss given to sl.step")
    return _state.region


def inside() -> bool:
    """Whether a per-device function is running."""
    return _state.region is not None


@contextmanager
def outside() -> Iterator[None]:
    """Leave the region for a while."""
    held, _state.region = _state.region, None
    try:
        yield
    finally:
        _state.region = held


@contextmanager
def flowing(mesh: Mesh) -> Iterator[Region]:
    """Run a per-device function with `Flow` on."""
    if _state.region is not None:
        raise SpecError("a per-device function is already running: shard_map and step do not nest; call the function itself")
    made = Region(mesh)
    _state.region = made
    try:
        with Flow(made):
            yield made
    finally:
        _state.region = None


@contextmanager
def padding_allowed() -> Iterator[None]:
    """Inside: ops may work on padded leaves (norms and optimizers); same-shape results count as padded."""
    here = region()
    here.padding_allowed += 1
    try:
        yield
    finally:
        here.padding_allowed -= 1


@contextmanager
def paused() -> Iterator[None]:
    """Inside: `Flow` computes no types; the caller sets those of the results."""
    here = region()
    held, here.paused = here.paused, True
    try:
        yield
    finally:
        here.paused = held


# ---- Flow

_LIKE = {"ones_like", "zeros_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_full", "new_empty",
         "new_empty_strided", "_efficientzerotensor"}  # fmt: skip
_KEEPS_LEAF = {"zeros_like", "ones_like", "empty_like", "full_like", "_to_copy", "clone", "detach", "alias", "view_as"}
_ITEM = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2"}
_LIFT = {"lift_fresh", "lift_fresh_copy"}
_PLAIN, _FACTORY, _FROM_VALUE, _LIFTED, _MUTATES, _RANDOM = range(6)


def _rule(func: Any) -> tuple[int, bool]:
    """How `Flow` treats an op, and whether its result is still the same leaf (a copy, a cast, zeros like it)."""
    name, keeps = func._schema.name.split("::")[1], False
    keeps = name in _KEEPS_LEAF
    ours = func.namespace in ("shardlib", "profiler", "_c10d_functional")
    if torch.Tag.nondeterministic_seeded in func.tags and not ours and not name.startswith("_scaled_dot"):
        return _RANDOM, keeps
    if name in _LIKE:
        return _FACTORY, keeps
    if name in _ITEM:
        return _FROM_VALUE, keeps
    if name in _LIFT:
        return _LIFTED, keeps
    return (_MUTATES if func._schema.is_mutable else _PLAIN), keeps


_ORDER = {"I": 0, "R": 1, "V": 2, "P": 2}


def join(a: str, b: str) -> str:
    """What data flow gives for operands of types `a` and `b`: I < R < V, and pending counts as varying."""
    return "".join("V" if max(_ORDER[x], _ORDER[y]) == 2 else "R" if "R" in (x, y) else "I" for x, y in zip(a, b))


class _Joins(dict[tuple[str, str], str]):
    def __missing__(self, key: tuple[str, str]) -> str:
        self[key] = join(*key)
        return self[key]


_joined = _Joins()
_rules: dict[Any, tuple[int, bool]] = {}


class Flow(TorchDispatchMode):
    """Types of every tensor by data flow, below functorch and autograd."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo never meets it, and the guard would cost some microseconds per op

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        here = self.region
        if here.paused:
            return func(*args, **(kwargs or {}))
        rule = _rules.get(func)
        if rule is None:
            rule = _rules[func] = _rule(func)
        kind, keeps = rule
        entries, joined = here.types.entries, here.invariant
        operands: list[Tensor] = []
        for a in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(a, Tensor):
                operands.append(a)
            elif isinstance(a, (list, tuple)):
                operands.extend(b for b in a if isinstance(b, Tensor))
        for a in operands:
            entry = entries.get(id(a))
            if entry is None:
                if kind == _LIFTED:
                    continue
                raise unknown(_name(func), a)
            if entry[1] != joined:
                joined = _joined[joined, entry[1]]
        if kind != _PLAIN:
            joined = self._special(func, kind, joined, args, operands)
        padded = self._padding(func, operands) if here.padded.entries else ()
        out = func(*args, **(kwargs or {}))
        for o in (out,) if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else ():
            if isinstance(o, Tensor):
                if not any(o is a for a in operands):
                    here.types.set(o, joined)
                if padded and o.shape in padded:
                    here.padded.set(o, True)
        if keeps and operands and isinstance(out, Tensor) and out.shape == operands[0].shape:
            leaf = here.leaves.entries.get(id(operands[0]))
            if leaf is not None:
                here.leaves.set(out, leaf[1])
        return out

    def _special(self, func: Any, kind: int, joined: str, args: tuple[Any, ...], operands: list[Tensor]) -> str:
        here, name = self.region, _name(func)
        if kind == _FACTORY:
            return here.invariant
        if kind == _RANDOM:
            raise SpecError(f"{name} draws from torch's generator, which differs by rank and layout; use sl.random with a key")
        if kind == _FROM_VALUE and joined.strip("IR"):
            raise SpecError(
                f"{name} (.item(), bool(), a data-dependent shape) of a value that is {words(here, joined)}: ranks would "
                "go different ways. Reduce it first (psum, pmax), or keep it a tensor (torch.where)"
            )
        if kind == _MUTATES:
            for a, declared in zip(args, func._schema.arguments):
                info = declared.alias_info
                if info is not None and info.is_write and isinstance(a, Tensor):
                    self._written(name, a, joined)
        return joined

    def _written(self, name: str, target: Tensor, joined: str) -> None:
        """An in-place write widens the type of its target, and of the base if the target is a view."""
        if target.untyped_storage()._cdata in self.region.entered:
            raise SpecError(f"{name} writes in place into an argument of the per-device function: clone it first")
        for x in (target, target._base):
            if x is not None:
                held = self.region.types.entries.get(id(x))
                self.region.types.set(x, joined if held is None else _joined[held[1], joined])

    def _padding(self, func: Any, operands: list[Tensor]) -> tuple[torch.Size, ...]:
        here = self.region
        padded = [a for a in operands if id(a) in here.padded.entries]
        if padded and not here.padding_allowed and not here.paused:
            name = _name(func)
            if name in ("detach", "alias", "view_as", "wait_tensor", "_to_copy", "clone") or name in _LIKE:
                return tuple(a.shape for a in padded)
            leaf = here.leaves.get(padded[0])
            what = f"`{leaf.spec}` of global shape {leaf.shape}" if leaf else short(padded[0])
            raise SpecError(
                f"{name} on a leaf that does not divide over its axes ({what}; padded to {short(padded[0])} here).\n"
                "  Such a leaf can be stored and updated, not computed with: sl.gather it first"
            )
        return tuple(a.shape for a in padded)


def _name(func: Any) -> str:
    return func._schema.name.split("::")[1]


def typeof(x: Tensor) -> str:
    """Shape, dtype and type per axis of a value inside a per-device function: `f32[8, 512] varying over dp`."""
    return region().describe(x)


def check_known(trees: Callable[[], Sequence[Tensor]]) -> None:
    """Raise for the first tensor without a type."""
    for x in trees():
        region().type_of(x)


def refuse(what: str, x: Tensor, axes: Sequence[str], letters: str, mend: str) -> None:
    """Raise `SpecError` where `x` is, over one of `axes`, of a type in `letters`."""
    here = region()
    bad = [a for a in axes if here.over(x, a) in letters]
    if bad:
        raise SpecError(f"{what}: the value is {here.describe(x)}; over {listing(bad)} that is not allowed.\n  {mend}")
