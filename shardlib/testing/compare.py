"""Where an array differs from the global tensor it should be: by how much, at which index, on which rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib import layout
from shardlib.array import Array
from shardlib.errors import listing
from shardlib.mesh import Mesh, make_mesh
from shardlib.processes import Processes
from shardlib.state import reshard

TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6}


def as_mesh(mesh: Mesh | Mapping[str, Any]) -> Mesh:
    """A mesh as it is; axes and sizes as a simulated one."""
    return mesh if isinstance(mesh, Mesh) else make_mesh(mesh, simulate=True)


def tolerance(dtype: torch.dtype) -> float:
    """The difference, as a part of the largest value of a leaf, that rounding explains; 0 for what is not rounded."""
    return TOLERANCES.get(dtype, 4 * torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def largest(values: Any) -> float:
    """The largest absolute value of some tensors, 1.0 where there is none but zeros."""
    floats = [x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    return max((x.abs().nan_to_num().max().item() for x in floats), default=0.0) or 1.0


@dataclass(frozen=True, order=True)
class _Worst:
    """The largest difference in some shards: its size, where it is, the ranks that hold it, what they hold."""

    by: float = 0.0
    index: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    found: float = 0.0


def difference(found: Any, want: Any, floor: float = 0.0, rounding: float | None = None) -> str | None:
    """How `found`, an array, differs from the global tensor `want` (constants are compared by ==); None: it does not.

    Every rank's shard is compared; sums still to be made are made. `rounding`: what is allowed of the largest value of
    `want` (default: `tolerance` of its dtype), which counts as at least a millionth of `floor`. On real ranks all of
    them call it and get the same answer.
    """
    if not isinstance(want, Tensor) or not isinstance(found, Array):
        return None if not isinstance(want, Tensor) and found == want else f"it is {found!r}, not {want!r}"
    if (found.shape, found.dtype) != (want.shape, want.dtype):
        return f"it has shape {tuple(found.shape)} and {found.dtype}, not {tuple(want.shape)} and {want.dtype}"
    if found.spec.pending:
        found = reshard(found, found.spec.without(found.spec.pending))
    worst = max(Processes(found.mesh).all(lambda: _worst(found, want.detach().cpu())))
    top = want.detach().to(torch.float64).abs().nan_to_num().max().item() if want.numel() else 0.0
    allowed = tolerance(want.dtype) if rounding is None else rounding
    if worst.by <= allowed * max(top, 1e-6 * floor):
        return None
    at, held = f" at {list(worst.index)}" * bool(worst.index), "rank" if len(worst.ranks) == 1 else "ranks"
    return (
        f"largest difference {worst.by:.3g} (of values up to {top:.3g}){at}, held by {held} "
        f"{listing(worst.ranks).replace('`', '')}: {worst.found:.6g}, not {want[worst.index].item():.6g}"
    )


def _worst(found: Array, want: Tensor) -> _Worst:
    mesh, out = found.mesh, _Worst()
    for rank in range(mesh.total) if mesh.simulate else (mesh.rank,):
        at = layout.slices(found.spec, found.shape, mesh.shape, mesh.coordinates(rank))
        part = found.local(rank).cpu()
        if part.numel():
            off = _distance(part, want[at])
            place = int(off.argmax())
            by = off.reshape(-1)[place].item()
            index = torch.unravel_index(torch.tensor(place), part.shape) if part.dim() else ()
            where = tuple(s.start + int(i) for s, i in zip(at, index, strict=True))
            if by > out.by:
                out = _Worst(by, where, (rank,), part.reshape(-1)[place].item())
            elif by and (by, where) == (out.by, out.index):
                out = _Worst(by, where, (*out.ranks, rank), out.found)
    return out


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| by element; 0 where both are the same infinity or NaN, infinite where one of them is not finite."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return off.nan_to_num(nan=math.inf)
