"""Collectives by axis, each next to its exact transpose, with the types they take and give.

| collective                  | type     | transpose       | bytes sent per rank (n ranks, input b bytes) |
|-----------------------------|----------|-----------------|----------------------------------------------|
| pvary                       | I -> R   | psum            | 0                                            |
| psum                        | P -> I   | pvary           | 2 b (n-1)/n                                  |
| all_gather                  | V -> R   | psum_scatter    | b (n-1)                                      |
| psum_scatter                | P -> V   | all_gather      | b (n-1)/n                                    |
| all_gather(invariant=True)  | V -> I   | own_slice       | b (n-1)                                      |
| own_slice                   | I -> V   | all_gather(...) | 0                                            |
| all_to_all                  | V -> V   | all_to_all      | b (n-1)/n                                    |
| ppermute                    | V -> V   | ppermute        | b                                            |
| pbroadcast (broadcast.py)   | V -> R   | psum_to         | b                                            |
| psum_to                     | P -> V   | pbroadcast      | 2 b (n-1)/n                                  |
| pending                     | V -> P   | (identity)      | 0                                            |
| pmax                        | V -> I   | none            | 2 b (n-1)/n                                  |

Functions with a leading underscore work on one tensor and plain axes and refuse nothing: they are what transposes call,
since the cotangent of a replicated value is pending by definition. Those without check the types first.
Over an axis of size 1 nothing is sent, but types are the same as on any mesh.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._functorch import (
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_level,
)  # what is differentiated
from torch.autograd import forward_ad

from shardlib import tree, wire
from shardlib.errors import SpecError, listing
from shardlib.mesh import Axes, Mesh
from shardlib.phases import phase
from shardlib.types import Region, paused, refuse, region, valueless

_plain = torch._C.DisableTorchFunction  # a Function below Insert: what it does inside is not user code


class _Linear(torch.autograd.Function):
    """A linear Function of one tensor, the axes and static arguments. `letter`: the type it gives over the axes."""

    letter: ClassVar[str]
    value: ClassVar[Callable[..., Tensor]]
    transpose: ClassVar[Callable[..., Tensor]]
    generate_vmap_rule = False


def _function(name: str, letter: str, value: Callable[..., Tensor], transpose: Callable[..., Tensor]) -> type[_Linear]:
    """The Function of a collective, from the type it gives, its value and its transpose."""

    class Linear(_Linear):
        @staticmethod
        def forward(x: Tensor, *static: Any) -> Tensor:  # type: ignore[override]
            return value(x, *static)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.static = inputs[1:]

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            return transpose(g, *ctx.static), *(None for _ in ctx.static)

        @staticmethod
        def jvp(ctx: Any, t: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
            return _apply(Linear, t, *ctx.static)

        @staticmethod
        def vmap(
            info: Any, in_dims: tuple[int | None, ...], x: Tensor, axes: tuple[str, ...], *dims: Any
        ) -> tuple[Tensor, int]:
            x = x.movedim(in_dims[0] or 0, 0)
            return _apply(Linear, x, axes, *(d + 1 if isinstance(d, int) else d for d in dims)), 0

    Linear.letter, Linear.value, Linear.transpose = letter, value, transpose
    Linear.__name__ = Linear.__qualname__ = name
    return Linear


def _apply(function: type[_Linear], x: Tensor, axes: tuple[str, ...], *static: Any) -> Tensor:
    """One collective, typed. Where nothing is being differentiated, its value alone."""
    here = region()
    if not axes or not here.typed:
        return x
    if here.reentered:
        refuse_captured(function.__name__, [x])
    if here.padded.entries:
        here.refuse_padded(function.__name__, x)
    kind = here.type_of(x)
    if is_functorch_wrapped_tensor(x) or x.requires_grad or forward_ad._current_level >= 0:
        _refuse_forward_mode(here, function.__name__, x)
        with _plain():
            out: Tensor = function.apply(x, axes, *static)  # type: ignore[assignment]
    else:
        with _plain(), paused():
            out = function.value(x, axes, *static)
    if function is not _PVary:
        here.receive(out)
    return here.retype(out, kind, axes, function.letter)


def _refuse_forward_mode(here: Region, name: str, x: Tensor) -> None:
    if forward_ad._current_level >= 0 and here.mesh.simulate and here.mesh.total > 1 and not valueless(x):
        raise SpecError(
            f"{name} in forward mode (jvp, jacfwd, hessian) while ranks take turns: torch keeps one forward-mode level "
            "for all threads.\n  Run it under sl.jit, or use jacrev (hessian is jacrev of jacrev)"
        )


def refuse_captured(name: str, tensors: Sequence[Tensor]) -> None:
    """Inside remat or custom_vjp: raise for a value of an outer transform, whose gradient would be lost."""
    level, hidden = maybe_current_level() or 0, region().hidden
    levels = [maybe_get_level(x) for x in tensors if is_functorch_wrapped_tensor(x)]
    if any(n > level or n in hidden for n in levels):
        raise SpecError(
            f"{name}: {region().reentered} captured a value that is being differentiated (or mapped); its gradient "
            "would be lost.\n  Pass it as an argument: f(w, x)"
        )


def _wired(axes: Sequence[str]) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh, and those of `axes` along which anything moves."""
    mesh = region().mesh
    return mesh, tuple(a for a in axes if mesh.shape[a] > 1)


def _runs(mesh: Mesh, axes: Sequence[str]) -> list[tuple[str, ...]]:
    """`axes` cut into runs that stand in mesh order: one collective each, since groups order their ranks so."""
    runs: list[tuple[str, ...]] = []
    for a in axes:
        if runs and mesh.ordered((*runs[-1], a)) == (*runs[-1], a):
            runs[-1] = (*runs[-1], a)
        else:
            runs.append((a,))
    return runs


def _reduce(x: Tensor, axes: tuple[str, ...], op: str = "sum") -> Tensor:
    mesh, axes = _wired(axes)
    return wire.all_reduce(x, mesh.group(mesh.ordered(axes)), op) if axes else x.view_as(x)


def _gather_pieces(x: Tensor, axes: tuple[str, ...], dim: int, *_: Any) -> Tensor:
    mesh, axes = _wired(axes)
    for run in reversed(_runs(mesh, axes)):
        x = wire.all_gather(x, dim, mesh.size(run), mesh.group(run))
    return x if axes else x.view_as(x)


def _scatter_sum(x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
    mesh, axes = _wired(axes)
    for run in _runs(mesh, axes):
        x = wire.reduce_scatter(x, dim, mesh.size(run), mesh.group(run))
    return x if axes else x.view_as(x)


def _cut(x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
    mesh, axes = _wired(axes)
    for run in _runs(mesh, axes):
        x = wire.own_slice(x, dim, mesh.size(run), mesh.group(run))
    return x if axes else x.view_as(x)


def _exchange(x: Tensor, axes: tuple[str, ...], split: int, concat: int) -> Tensor:
    mesh, axes = _wired(axes)
    runs = _runs(mesh, axes)
    if len(runs) > 1:
        raise SpecError(f"all_to_all over {listing(axes)}: name them in mesh order, {listing(mesh.ordered(axes))}")
    return wire.all_to_all(x, split, concat, mesh.size(axes), mesh.group(axes)) if axes else x.view_as(x)


def _move(x: Tensor, axes: tuple[str, ...], source: tuple[int, ...]) -> Tensor:
    mesh = region().mesh
    if mesh.size(axes) == 1:
        return x.view_as(x) if source[0] == 0 else torch.zeros_like(x)
    return wire.permute(x, list(source), mesh.group(axes))


def _inverse(source: tuple[int, ...]) -> tuple[int, ...]:
    """Who reads from whom, turned round."""
    out = [-1] * len(source)
    for d, s in enumerate(source):
        if s >= 0:
            out[s] = d
    return tuple(out)


def _identity(x: Tensor, *_: Any) -> Tensor:
    return x.view_as(x)


def _equal(g: Tensor, axes: tuple[str, ...]) -> Tensor:
    """The cotangent of an invariant value, which must be equal on all ranks, too."""
    here = region()
    bad = [a for a in axes if here.typed and here.over(g, a) in "VP"]
    if bad:
        raise SpecError(
            f"the gradient of what a psum over {listing(bad)} gave differs by rank: a reduction was lost (in a custom "
            "backward, or a function that types do not see into, such as one of torch.jit).\n"
            f"  pvary the value over {listing(bad)} before it is used there"
        )
    return g


def _no_gradient(g: Tensor, *_: Any) -> Tensor:
    raise SpecError("pmax has no gradient: detach its operand, or use a sum")


def _in_dtype(sum_: Callable[..., Tensor], g: Tensor, dtype: torch.dtype | None, *static: Any) -> Tensor:
    """A cotangent's sum over ranks, made in `dtype` (None: its own) and rounded back once, as soon as it can be."""
    with phase("early"):
        return sum_(g, *static) if dtype is None else sum_(g.to(dtype), *static).to(g.dtype)


_PVary = _function("pvary", "R", _identity, lambda g, axes, dtype: _in_dtype(_psum, g, dtype, axes))
_PSum = _function("psum", "I", _reduce, lambda g, axes: _pvary(_equal(g, axes), axes))
_AllGather = _function(
    "all_gather", "R", _gather_pieces, lambda g, axes, dim, dtype: _in_dtype(_psum_scatter, g, dtype, axes, dim)
)
_PSumScatter = _function("psum_scatter", "V", _scatter_sum, lambda g, axes, dim: _all_gather(g, axes, dim))
_AllGatherInvariant = _function(
    "all_gather_invariant", "I", _gather_pieces, lambda g, axes, dim: _own_slice(_equal(g, axes), axes, dim)
)
_OwnSlice = _function("own_slice", "V", _cut, lambda g, axes, dim: _all_gather(g, axes, dim, True))
_AllToAll = _function("all_to_all", "V", _exchange, lambda g, axes, split, concat: _all_to_all(g, axes, concat, split))
_PPermute = _function("ppermute", "V", _move, lambda g, axes, source: _ppermute(g, axes, _inverse(source)))
_Pending = _function("pending", "P", _identity, lambda g, axes: g)
_PMax = _function("pmax", "I", lambda x, axes: _reduce(x, axes, "max"), _no_gradient)


def _pvary(x: Tensor, axes: tuple[str, ...], dtype: torch.dtype | None = None) -> Tensor:
    """`dtype`: in which the cotangent is summed."""
    return _apply(_PVary, x, axes, dtype)


def _psum(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    return _apply(_PSum, x, axes)


def _all_gather(
    x: Tensor, axes: tuple[str, ...], dim: int, invariant: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """`dtype`: in which the cotangent is summed, where it is."""
    return _apply(_AllGatherInvariant, x, axes, dim) if invariant else _apply(_AllGather, x, axes, dim, dtype)


def _psum_scatter(x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
    return _apply(_PSumScatter, x, axes, dim)


def _own_slice(x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
    return _apply(_OwnSlice, x, axes, dim)


def _all_to_all(x: Tensor, axes: tuple[str, ...], split: int, concat: int) -> Tensor:
    return _apply(_AllToAll, x, axes, split, concat)


def _ppermute(x: Tensor, axes: tuple[str, ...], source: tuple[int, ...]) -> Tensor:
    if not region().typed:
        return x if source[0] == 0 else torch.zeros_like(x)
    return _apply(_PPermute, x, axes, source)


def _pending(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    return _apply(_Pending, x, axes)


# ---- public, by axis: a tree first, then axes


def _each(op: str, x: Any, axes: Axes, fn: Callable[[Tensor, tuple[str, ...]], Tensor]) -> Any:
    plain = region().mesh.expand(axes)

    def one(leaf: Any) -> Tensor:
        if not isinstance(leaf, Tensor):
            raise SpecError(f"{op} takes tensors, found {type(leaf).__name__}")
        return fn(leaf, plain)

    return tree.map_(one, x)


def sum_over(x: Tensor, axes: tuple[str, ...], op: str = "psum") -> Tensor:
    """`psum` of one tensor over plain axes, types checked."""
    if x.dtype == torch.bool:
        raise SpecError(f"{op} of a bool tensor would be an `or`: cast it to an integer first")
    of, n = axes[0] if len(axes) == 1 else axes, region().mesh.size(axes)
    times = f"; if {n} times the value is meant: x * sl.axis_size({of!r})" * (op == "psum")
    refuse(op, x, axes, "IR", f"What is equal on all ranks has no sum to make: leave the {op} out{times}")
    return _psum(x, axes)


def psum(x: Any, axes: Axes) -> Any:
    """The sum over `axes`: pending (or varying, which states the sum) -> invariant. Transpose: `pvary`.

    Raises `SpecError` for a value that is already equal on all ranks.
    """
    return _each("psum", x, axes, sum_over)


def pmean(x: Any, axes: Axes) -> Any:
    """The mean over `axes`: varying or pending -> invariant."""
    size = region().mesh.size(axes)
    return tree.map_(lambda y: y / size, _each("pmean", x, axes, lambda y, a: sum_over(y, a, "pmean")))


def pmax(x: Any, axes: Axes) -> Any:
    """The maximum over `axes`: varying -> invariant. It has no gradient: `detach` the operand."""

    def one(y: Tensor, plain: tuple[str, ...]) -> Tensor:
        refuse("pmax", y, tuple(region().mesh.shape), "P", "psum it first: a maximum is not linear")
        return _apply(_PMax, y, plain)

    return _each("pmax", x, axes, one)


def pvary(x: Any, axes: Axes) -> Any:
    """State that ranks may use an equal value differently: invariant -> replicated. Transpose: `psum`.

    Inserted by itself wherever an invariant value meets one that is not; written only to choose where the sum is made.
    """
    here = region()
    return _each("pvary", x, axes, lambda y, a: _pvary(y, tuple(b for b in a if here.over(y, b) == "I")))


def pending(x: Any, axes: Axes) -> Any:
    """State that a varying value is a term of a sum still to be made: varying -> pending."""

    def one(y: Tensor, plain: tuple[str, ...]) -> Tensor:
        refuse("pending", y, plain, "IR", "It is equal on all ranks; the sum would count it once per rank")
        here = region()
        return _pending(y, tuple(a for a in plain if here.over(y, a) == "V"))

    return _each("pending", x, axes, one)


def ppermute(x: Any, axes: Axes, perm: Sequence[tuple[int, int]] | None = None, *, shift: int | None = None) -> Any:
    """Send along `axes`: `perm` is a list of (source, destination) indices, `shift=k` sends from i to i+k cyclically.

    varying -> varying; a rank that nobody sends to gets zeros. Over several axes the index is row-major in the order
    given. Transpose: the inverse permutation. Raises `SpecError` when an index stands twice on one side.
    """
    mesh = region().mesh
    plain, n = mesh.expand(axes), mesh.size(axes)
    if (perm is None) == (shift is None):
        raise SpecError("ppermute takes either a list of (source, destination) or shift=")
    pairs = [(i, (i + shift) % n) for i in range(n)] if shift is not None else list(perm or ())
    source = [-1] * n
    for s, d in pairs:
        if not (0 <= s < n and 0 <= d < n):
            raise SpecError(f"ppermute over {listing(plain)}: ({s}, {d}) is outside 0..{n - 1}")
        if source[d] >= 0 or s in source:
            raise SpecError(
                f"ppermute over {listing(plain)}: {d if source[d] >= 0 else s} stands twice on one side of {pairs}"
            )
        source[d] = s
    ordered = mesh.ordered(plain)
    if ordered != plain:  # the group counts its ranks in mesh order
        ranks, theirs = mesh.members(0, ordered), [0] * n
        place = [mesh.index_of(r, plain) for r in ranks]
        back = {p: i for i, p in enumerate(place)}
        for i, p in enumerate(place):
            theirs[i] = back[source[p]] if source[p] >= 0 else -1
        source = theirs

    def one(y: Tensor, _: tuple[str, ...]) -> Tensor:
        refuse("ppermute", y, plain, "P", "psum it first")
        return _ppermute(pvary(y, ordered), ordered, tuple(source))  # what is equal goes different ways from here

    return _each("ppermute", x, axes, one)


def axis_size(axes: Axes) -> int:
    """The number of ranks along `axes`, a Python int."""
    return region().mesh.size(axes)


def axis_index(axes: Axes) -> Tensor:
    """The rank's index along `axes`, row-major in the order given: a varying 0-d int64 tensor, so that ranks share
    graphs."""
    here = region()
    mesh, out = here.mesh, None
    plain = mesh.expand(axes)
    with _plain():
        for a in plain:
            one = (
                wire.axis_index(mesh.group((a,)), mesh.device)
                if mesh.shape[a] > 1
                else torch.zeros((), dtype=torch.int64, device=mesh.device)
            )
            out = one if out is None else out * mesh.shape[a] + one
    if out is None:
        raise SpecError("axis_index needs an axis")
    return here.set_type(out, here.make(V=plain))
