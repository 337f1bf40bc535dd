"""`pbroadcast`, and its transpose: what one rank holds, on all ranks; what all ranks hold, summed on one."""

from typing import Any

import torch
from torch import Tensor

from shardlib import collectives as c
from shardlib import wire
from shardlib.errors import SpecError, listing
from shardlib.mesh import Axes
from shardlib.types import refuse, region


def _spread(x: Tensor, axes: tuple[str, ...], source: tuple[int]) -> Tensor:
    mesh, axes = c._wired(axes)
    return wire.broadcast(x, source[0], mesh.group(axes)) if axes else x.view_as(x)


def _collect(x: Tensor, axes: tuple[str, ...], source: tuple[int]) -> Tensor:
    mesh, axes = c._wired(axes)
    if not axes:
        return x.view_as(x)
    mine = wire.axis_index(mesh.group(axes), x.device) == source[0]
    return torch.where(mine, wire.all_reduce(x, mesh.group(axes)), 0)


_PBroadcast = c._function("pbroadcast", "R", _spread, lambda g, axes, source: c._apply(_PSumTo, g, axes, source))
_PSumTo = c._function("psum_to", "V", _collect, lambda g, axes, source: c._apply(_PBroadcast, g, axes, source))


def pbroadcast(x: Any, axes: Axes, *, source: int) -> Any:
    """What the rank at index `source` along `axes` holds, on all of them: `pbroadcast(panel, "row", source=2)`.

    varying -> replicated (what is equal is taken, too); transpose: the sum, on the source, zeros elsewhere. `x`: a tree
    of tensors. Over several axes the index is row-major in the order given. Bytes sent per rank: the operand's; twice
    (n-1)/n of it in the transpose. Raises `SpecError` for an index that is not there.
    """
    mesh = region().mesh
    plain, n = mesh.expand(axes), mesh.size(axes)
    if not isinstance(source, int) or not 0 <= source < n:
        raise SpecError(f"pbroadcast over {listing(plain)}: there is no source {source!r} in 0..{n - 1}")
    ordered = mesh.ordered(plain)
    ranks = mesh.members(0, ordered)  # the group counts its ranks in mesh order
    at = next(i for i, r in enumerate(ranks) if mesh.index_of(r, plain) == source)

    def one(y: Tensor, _: tuple[str, ...]) -> Tensor:
        refuse("pbroadcast", y, plain, "P", "psum it first")
        return c._apply(_PBroadcast, c.pvary(y, ordered), ordered, (at,))

    return c._each("pbroadcast", x, axes, one)
