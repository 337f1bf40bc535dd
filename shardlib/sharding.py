"""Moving values between specs inside a per-device function: `reshard` and `gather` turn the difference of two specs
into collectives.

A dimension's chain of axes changes at its end: what the new chain lacks is gathered, innermost first; what it adds is
scattered (where a sum over that axis is pending) or sliced, outermost first. Sums left over are made on the smallest value.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardlib import collectives as c
from shardlib import layout, tree
from shardlib.errors import SpecError, listing
from shardlib.mesh import Axes, Mesh
from shardlib.spec import Dim, Spec, as_spec
from shardlib.types import Leaf, Region, padding_allowed, region


@dataclass(frozen=True)
class Move:
    """One collective of a plan: `op` over `axes`, on dimension `dim` (for `exchange`, from `dim` to `to`)."""

    op: str
    axes: tuple[str, ...]
    dim: int = -1
    to: int = -1


def plan(src: Spec, dst: Spec, shape: tuple[int, ...], mesh: Mesh) -> list[Move]:
    """The collectives that turn a value of spec `src` into one of spec `dst`; sends nothing, so it can be shown."""
    extra = [a for a in dst.pending if a not in src.pending]
    if extra:
        raise SpecError(f"`{src}` -> `{dst}`: nothing is pending over {listing(extra)} on the left, so it cannot be on the right")
    removed: dict[int, tuple[str, ...]] = {}
    added: dict[int, tuple[str, ...]] = {}
    for i, (a, b) in enumerate(zip(src.dims, dst.dims, strict=True)):
        k = 0
        while k < min(len(a.axes), len(b.axes)) and a.axes[k] == b.axes[k]:
            k += 1
        if a.axes[k:]:
            removed[i] = a.axes[k:]
        if b.axes[k:]:
            added[i] = b.axes[k:]
    exchanges, moves = [], []
    even = layout.is_even(src, shape, mesh.shape) and layout.is_even(dst, shape, mesh.shape)
    for i, axes in list(removed.items()):
        j = next((j for j, other in added.items() if other == axes and j not in removed and i not in added), None)
        if j is not None and even:
            exchanges.append(Move("exchange", axes, i, j))
            del removed[i], added[j]

    freed = {a for axes in removed.values() for a in axes}

    def add(i: int) -> list[Move]:
        return [Move("scatter" if a in src.pending else "slice", (a,), i) for a in added[i]]

    early = [i for i in added if i not in removed and not freed & set(added[i])]
    for i in early:
        moves += add(i)
    scattered = {a for axes in added.values() for a in axes}
    sums = tuple(a for a in src.pending if a not in dst.pending and a not in scattered)
    moves += [Move("sum", mesh.ordered(sums))] * bool(sums)
    moves += exchanges
    moves += [Move("gather", axes, i) for i, axes in removed.items()]
    for i in added:
        if i not in early:
            moves += add(i)
    return _merged(moves, shape, src, mesh)


def _merged(moves: list[Move], shape: tuple[int, ...], src: Spec, mesh: Mesh) -> list[Move]:
    """Adjacent scatters or slices of one dimension as one collective, where the dimension divides."""
    out: list[Move] = []
    for m in moves:
        last = out[-1] if out else None
        if last and m.op == last.op in ("scatter", "slice") and m.dim == last.dim:
            axes = src.dims[m.dim].axes + last.axes + m.axes
            if shape[m.dim] % mesh.size(axes) == 0:
                out[-1] = replace(last, axes=last.axes + m.axes)
                continue
        out.append(m)
    return out


def _fit(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` cut or zero-padded to `length` along `dim`."""
    n = x.shape[dim]
    if n == length:
        return x
    if n > length:
        return x.narrow(dim, 0, length)
    zeros = [0, 0] * (x.dim() - 1 - dim) + [0, length - n]
    return torch.nn.functional.pad(x, zeros)


def _chain(spec: Spec, dim: int, axes: tuple[str, ...]) -> Spec:
    dims = tuple(replace(d, axes=axes) if i == dim else d for i, d in enumerate(spec.dims))
    return replace(spec, dims=dims)


def _perform(here: Region, x: Tensor, spec: Spec, move: Move, shape: tuple[int, ...], invariant: bool) -> tuple[Tensor, Spec]:
    sizes, dim = here.mesh.shape, move.dim
    if move.op == "sum":
        return c._psum(x, move.axes), spec.without(move.axes)
    if move.op == "exchange":
        x = c._all_to_all(x, move.axes, move.to, dim)
        spec = _chain(spec, dim, spec.dims[dim].axes[: -len(move.axes)])
        return x, _chain(spec, move.to, spec.dims[move.to].axes + move.axes)
    held = spec.dims[dim].axes
    if move.op == "gather":
        keep = held[: len(held) - len(move.axes)]
        even = layout.padded_length(shape[dim], keep, sizes) == x.shape[dim] * here.mesh.size(move.axes)
        for axes in [move.axes] if even else [(a,) for a in reversed(move.axes)]:
            held = held[: len(held) - len(axes)]
            x = _fit(c._all_gather(x, axes, dim, invariant), dim, layout.padded_length(shape[dim], held, sizes))
        return x, _chain(spec, dim, held)
    held += move.axes
    x = _fit(x, dim, layout.padded_length(shape[dim], held, sizes) * here.mesh.size(move.axes))
    if move.op == "scatter":
        x, spec = c._psum_scatter(x, move.axes, dim), spec.without(move.axes)
    else:
        x = _slice(here, x, move.axes, dim)
    return x, _chain(spec, dim, held)


def _slice(here: Region, x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
    if all(here.over(x, a) == "I" for a in axes):
        return c._own_slice(x, axes, dim)
    pieces = x.unflatten(dim, (here.mesh.size(axes), -1))  # equal, but differently used: its gradient is pending
    return pieces.index_select(dim, c.axis_index(axes).reshape(1)).squeeze(dim)


def leaf_of(x: Any, what: str) -> Leaf:
    """The leaf that `x` is, or an error that says how it lost its spec."""
    found = region().leaves.get(x) if isinstance(x, Tensor) else None
    if found is None:
        said = region().describe(x) if isinstance(x, Tensor) else type(x).__name__
        raise SpecError(
            f"{what}: {said} is not a leaf that entered here (torch ops keep types, not specs): "
            "gather before computing with it, or use a pattern such as all_gather('a/x b -> a b', x)"
        )
    return found


def move(x: Tensor, dst: Spec, *, invariant: bool = True, what: str = "reshard") -> Tensor:
    """One leaf inside a per-device function, brought from its spec to `dst`. Sums and gathers give invariant values,
    with `invariant=False` replicated ones (whose gradient is scattered back)."""
    here, leaf = region(), leaf_of(x, what)
    src = leaf.spec
    if len(src.dims) != len(dst.dims):
        raise SpecError(f"{what}: `{src}` -> `{dst}`: the number of dimensions differs")
    if src.axes == dst.axes and all(a.axes == b.axes for a, b in zip(src.dims, dst.dims)):
        return x
    with padding_allowed():
        spec = src
        for m in plan(src, dst, leaf.shape, here.mesh):
            x, spec = _perform(here, x, spec, m, leaf.shape, invariant)
    final = replace(dst, dims=tuple(Dim(a.name, b.axes) for a, b in zip(src.dims, dst.dims)), stacked=src.stacked)
    return settle(x, Leaf(final, leaf.shape))


def settle(x: Tensor, leaf: Leaf) -> Tensor:
    """Note on `x` which leaf it is now."""
    here = region()
    here.padded.discard(x)
    return here.mark(x, leaf, not layout.is_even(leaf.spec, leaf.shape, here.mesh.shape))


def gather_local(x: Any, axes: Axes | None) -> Any:
    """`gather` inside a per-device function: the axes removed from the leaves that are split over them; others as they are."""
    mesh = region().mesh
    drop = tuple(mesh.shape) if axes is None else mesh.expand(axes)

    def one(leaf: Any) -> Any:
        spec = leaf_of(leaf, "gather").spec
        gone = [a for a in spec.split if a in drop]
        return move(leaf, _dims_without(spec, gone), invariant=False, what="gather") if gone else leaf

    return tree.map_(one, x)


def _dims_without(spec: Spec, axes: Iterable[str]) -> Spec:
    pending = spec.pending
    return replace(spec.without(axes), pending=pending)


def reshard_local(x: Any, specs: Any) -> Any:
    """`reshard` inside a per-device function."""
    flat, treedef = tree.flatten(x)
    wanted = tree.broadcast(specs, x, "reshard")
    mesh = region().mesh
    return tree.unflatten(
        treedef, [move(t, as_spec(s).expand(t.dim()).resolve(lambda a: mesh.expand(a))) for t, s in zip(flat, wanted)]
    )
