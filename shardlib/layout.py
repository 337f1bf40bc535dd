"""Spec x mesh -> local shapes and slices. Plain integers: `sizes` maps axis to size, `index` axis to coordinate.

A dimension of length n split over a chain `a/b` is cut by ceilings, nested: pieces of ceil(n/a), each cut again into
pieces of ceil(ceil(n/a)/b). The last pieces may be short or empty; in memory every piece is padded to the nested
ceiling, so that all ranks hold equal shapes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardlib.errors import dimensions
from shardlib.spec import Dim, Spec

Sizes = Mapping[str, int]


def padded_length(n: int, axes: Sequence[str], sizes: Sizes) -> int:
    """The nested ceiling: how long each rank's padded piece of a dimension of length `n` is."""
    for axis in axes:
        n = -(-n // sizes[axis])
    return n


def bounds(n: int, axes: Sequence[str], sizes: Sizes, index: Sizes) -> tuple[int, int]:
    """Start and stop of the rank's piece of a dimension of length `n` (stop == start when it is empty)."""
    start, stop = 0, n
    for axis in axes:
        n = -(-n // sizes[axis])
        start += n * index[axis]
        stop = min(stop, start + n)
    start = min(start, stop)
    return start, stop


def padded_shape(spec: Spec, shape: Sequence[int], sizes: Sizes) -> tuple[int, ...]:
    """The shape each rank keeps in memory of a tensor of global `shape`."""
    return tuple(padded_length(n, d.axes, sizes) for d, n in zip(spec.dims, shape, strict=True))


def slices(spec: Spec, shape: Sequence[int], sizes: Sizes, index: Sizes) -> tuple[slice, ...]:
    """The rank's slices of the global tensor."""
    return tuple(slice(*bounds(n, d.axes, sizes, index)) for d, n in zip(spec.dims, shape, strict=True))


def local_shape(spec: Spec, shape: Sequence[int], sizes: Sizes, index: Sizes) -> tuple[int, ...]:
    """The true shape of the rank's shard, without padding."""
    return tuple(s.stop - s.start for s in slices(spec, shape, sizes, index))


def parts(dim: Dim, sizes: Sizes) -> int:
    """Into how many pieces a dimension is cut."""
    n = 1
    for axis in dim.axes:
        n *= sizes[axis]
    return n


def is_even(spec: Spec, shape: Sequence[int], sizes: Sizes) -> bool:
    """Whether every split dimension divides, so that no rank's shard is padded."""
    return all(n % parts(d, sizes) == 0 for d, n in zip(spec.dims, shape, strict=True))


def global_shape(spec: Spec, local: Sequence[int], sizes: Sizes) -> tuple[int, ...]:
    """The global shape of a tensor whose every rank holds `local` (even split)."""
    return tuple(n * parts(d, sizes) for d, n in zip(spec.dims, local, strict=True))


def check_rank(spec: Spec, shape: Sequence[int], what: str = "the tensor") -> Spec:
    """`spec` expanded to the dimensions of `shape`, or an error."""
    spec = spec.expand(len(shape))
    if len(spec.dims) != len(shape):
        said = f"`{spec}` names {dimensions(len(spec.dims))}, {what} has {len(shape)}: {tuple(shape)}"
        raise spec.error(said, note="one name for each dimension")
    return spec


def cut(spec: Spec, shape: Sequence[int], axes: Sequence[str], sizes: Sizes) -> Spec:
    """`spec` with `axes` appended to the largest dimension that they divide evenly; unchanged where none does.

    A leading `stack` dimension is not a candidate: its slices are gathered one by one.
    """
    ways = 1
    for axis in axes:
        ways *= sizes[axis]
    best, length = None, 0
    for i, (d, n) in enumerate(zip(spec.dims, shape, strict=True)):
        fits = n > 0 and n % (parts(d, sizes) * ways) == 0
        if i >= spec.stacked and fits and n > length:
            best, length = i, n
    if best is None:
        return spec
    dims = tuple(replace(d, axes=d.axes + tuple(axes)) if i == best else d for i, d in enumerate(spec.dims))
    return replace(spec, dims=dims)
