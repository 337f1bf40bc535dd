"""The four types of a value per mesh axis, and the region in which a per-device function is typed.

A type is a string with one letter per axis of the mesh, in mesh order:

    I invariant    equal on all ranks of the axis; its cotangent is invariant
    R replicated   equal, but each rank may use it differently; its cotangent is pending
    V varying      each rank has its own
    P pending      a sum over the axis still to be made; its cotangent is replicated

Types live in a table keyed by the innermost tensor (functorch wrappers removed), never on the tensor. `Flow` (flow.py)
sits below functorch and autograd, so it sees forward and backward alike and computes every type by data flow. `Insert`
(insert.py) sees whole functions above autograd: it puts `pvary` in and refuses what a pending value does not allow.
An operand without a type is an error, never a guess.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor  # types belong to the innermost tensor
from torch._subclasses.fake_tensor import FakeTensor  # what a first run and a trace compute with
from torch.multiprocessing.reductions import StorageWeakRef  # no public way to hold a storage weakly

from shardlib.errors import SpecError, listing
from shardlib.mesh import Mesh
from shardlib.spec import Dim, Spec

T = TypeVar("T")
NO_TENSOR = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
WORDS = {"I": "invariant", "R": "replicated", "V": "varying", "P": "pending"}


def base(x: Tensor) -> Tensor:
    """The innermost tensor: wrappers of grad and vmap removed."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def valueless(x: Tensor) -> bool:
    """Whether `x` has a shape and no values: in the first run of a function, or while it is traced."""
    return isinstance(base(x), FakeTensor)


def shapes_alone() -> bool:
    """Whether what is made here has no values: under `sl.abstract`, say."""
    return valueless(torch.empty(0))


class TensorTable(Generic[T]):
    """A weak mapping from tensors, by identity; `entries[id(x)]` is `(weak reference, value)`."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def get(self, x: Tensor) -> T | None:
        found = self.entries.get(id(base(x)))
        return None if found is None else found[1]

    def set(self, x: Tensor, value: T) -> None:
        self.put(base(x), value)

    def put(self, x: Tensor, value: T) -> None:
        """`set` for what is no wrapper."""
        key, entries = id(x), self.entries
        entries[key] = (weakref.ref(x, lambda _: entries.pop(key, None)), value)

    def discard(self, x: Tensor) -> None:
        self.entries.pop(id(base(x)), None)


class Leaf(NamedTuple):
    """What a value that entered at a border brings along: its spec and its global shape."""

    spec: Spec
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """The micro-batch that runs: number `at` (0-d int64) of `count`, which cut the batch along `dim`."""

    dim: Dim
    at: Tensor
    count: int


@dataclass
class Region:
    """One per-device function while it runs or is traced: the mesh, the types, the sizes that names are bound to."""

    mesh: Mesh
    typed: bool = True  # False: one rank alone, in code whose types were checked before; everything counts as invariant

    def __post_init__(self) -> None:
        self.types: TensorTable[str] = TensorTable()
        self.leaves: TensorTable[Leaf] = TensorTable()
        self.padded: TensorTable[bool] = TensorTable()
        self.zeros: TensorTable[bool] = TensorTable()  # what is zero whatever the values of others are
        self.sizes: dict[str, int] = {}
        self.bound_by: dict[str, str] = {}
        self.said: dict[tuple[int, str], tuple[FrameType, int, str]] = {}  # by call of a user's function, and name
        self.position = {a: i for i, a in enumerate(self.mesh.shape)}
        self.invariant = "I" * len(self.mesh.shape)
        self.entered: set[int] = set()
        self.received: dict[int, StorageWeakRef] = {}  # which also keep the keys, addresses, from being used again
        self.padding_allowed = 0
        self.paused = False
        self.reentered = ""  # the transform whose Function is running user code
        self.hidden = range(0)  # levels of transforms that are off meanwhile, where others of these levels are on
        self.piece: Piece | None = None
        self.reduce: torch.dtype | None = None  # in which gradients of leaves are summed over ranks; None: their own
        self.where = "shard_map"
        self.asked = False  # whether the code looks at types itself
        self.insert: Any = None

    def type_of(self, x: Tensor) -> str:
        """The type of `x`; an error where it is unknown."""
        if not self.typed:
            return self.invariant
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
        return tuple(a for a, k in zip(self.mesh.shape, kind, strict=True) if k in letters)

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

    def refuse_padded(self, what: str, x: Tensor) -> None:
        """Raise where `x` is a padded leaf, but for norms and optimizers."""
        if self.padded.get(x) and not self.padding_allowed:
            leaf, why, fits = self.leaves.get(x), "a dimension does not divide over its axes", "a size that divides"
            for d, n in zip(leaf.spec.dims, leaf.shape, strict=True) if leaf else ():
                ways = self.mesh.size(d.axes)
                if n % ways:
                    over = " ".join(f"{a}={self.mesh.shape[a]}" for a in d.axes)
                    why, fits = f"`{d.name}` is {n}, which does not divide over {over}", str(-(-n // ways) * ways)
            raise SpecError(
                f"{what} of an argument that is padded to {short(x)}"
                f"{f' (`{leaf.spec}` of shape {leaf.shape})' if leaf else ''}: {why}.\n"
                f"  It can be stored and updated, not computed with: sl.gather it first, or make the size {fits} "
                "(rows added to a batch need a weight of 0, or targets of -1)"
            )

    def receive(self, x: Tensor) -> None:
        """Note that `x` is the result of a collective."""
        storage = base(x).untyped_storage()
        self.received[storage._cdata] = StorageWeakRef(storage)

    def refuse_written(self, what: str, x: Tensor) -> None:
        """Raise where `x` shares memory with what is not the function's own to write into."""
        storage = base(x).untyped_storage()._cdata
        if storage in self.entered:
            raise SpecError(f"{what} writes in place into an argument of the per-device function: clone it first")
        if storage in self.received:
            raise SpecError(
                f"{what} writes in place into the result of a collective, which over an axis of size 1 shares memory "
                "with its operand.\n  Make a new value instead (`y = y + b`), or clone it first"
            )

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
        """A scope of names: inside, they are bound by the leaves among `values` and by the patterns that run.

        A name that only patterns use is bound within one call of one function: another call may have other sizes.
        """
        held, self.sizes, self.bound_by, self.said = (self.sizes, self.bound_by, self.said), {}, {}, {}
        for x in values:
            leaf = self.leaves.get(x) if isinstance(x, Tensor) else None
            if leaf is not None:
                self.bind(leaf)
        try:
            yield
        finally:
            self.sizes, self.bound_by, self.said = held

    @contextmanager
    def running(
        self, dim: Dim | None, at: Tensor | None, count: int, reduce: torch.dtype | None = None
    ) -> Iterator[None]:
        """Inside, a micro-batch runs (none where `dim` is None): what counts rows of the whole batch asks which.
        `reduce`: the dtype in which gradients of leaves are summed over ranks."""
        held = self.piece, self.reduce
        self.piece, self.reduce = Piece(dim, at, count) if dim and at is not None else None, reduce
        try:
            yield
        finally:
            self.piece, self.reduce = held

    def describe(self, x: Tensor, equal: str = "equal on all ranks") -> str:
        """`f64[8, 4] varying over dp, pending over tp`, with the spec where the value still has one. `equal`: what is
        said of an invariant value."""
        leaf = self.leaves.get(x)
        kind = self.types.get(x)
        said = "of unknown type" if kind is None else words(self, kind, equal)
        return f"{short(x)} {said}" + (f" (`{leaf.spec}`)" if leaf else "")


def words(region: Region, kind: str, equal: str = "equal on all ranks") -> str:
    """A type in words: `varying over dp, pending over tp`."""
    said = [f"{WORDS[k]} over {', '.join(region.axes_of(kind, k))}" for k in "VPR" if k in kind]
    return ", ".join(said) or equal


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
def entered(made: Region) -> Iterator[Region]:
    """Run in a region."""
    if _state.region is not None:
        raise SpecError(
            "a per-device function is already running: shard_map and step do not nest; call the function itself"
        )
    _state.region = made
    try:
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


class paused:
    """Inside: nothing is typed; the caller sets the types of the results."""

    def __enter__(self) -> None:
        self.here = region()
        self.held, self.here.paused = self.here.paused, True

    def __exit__(self, *_: object) -> None:
        self.here.paused = self.held


def typeof(x: Tensor) -> str:
    """Shape, dtype and type per axis of a value inside a per-device function: `f32[8, 512] varying over dp`."""
    here = region()
    here.asked = True
    return here.describe(x, WORDS["I"])


def check_known(trees: Callable[[], Sequence[Tensor]]) -> None:
    """Raise for the first tensor without a type."""
    for x in trees():
        region().type_of(x)


def refuse(what: str, x: Tensor, axes: Sequence[str], letters: str, mend: str) -> None:
    """Raise `SpecError` where `x` is, over one of `axes`, of a type in `letters`."""
    here = region()
    bad = [a for a in axes if here.over(x, a) in letters] if here.typed else ()
    if bad:
        raise SpecError(f"{what} over {listing(bad)}: the value is {here.describe(x)}.\n  {mend}")
