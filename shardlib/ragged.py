"""`ragged_all_to_all`: to every rank as many rows as a tensor says, in shapes that are the same on all ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib import collectives as c
from shardlib import tree
from shardlib.errors import SpecError, listing
from shardlib.mesh import Axes
from shardlib.types import refuse, region, short


def ragged_all_to_all(
    x: Any,
    axes: Axes,
    send_sizes: Tensor,
    *,
    capacity: int,
    input_offsets: Tensor | None = None,
    output_offsets: Tensor | None = None,
    limit: int | None = None,
) -> tuple[Any, Tensor]:
    """Rows to every rank: `y, sizes = ragged_all_to_all(x, "ep", send_sizes, capacity=64)`; gives `(y, recv_sizes)`.

    `x`: a tree of tensors (rows, ...), whose rows from `input_offsets[i]` on, `send_sizes[i]` of them, go to the rank
    at index i of n along `axes`, where they stand from `output_offsets[i]` on. By default pieces follow each other,
    in rank order, in `x` and in `y`. `y`: (capacity, ...), zero in rows that nobody sends; `recv_sizes[i]`: how many
    rows rank i sent. So `ragged_all_to_all(y, axes, recv_sizes, capacity=len(x))` sends them back. As
    `jax.lax.ragged_all_to_all`, whose offsets these are; `recv_sizes` is exchanged, not given.

    varying -> varying; transpose: the same, back. Sizes and offsets: int64 or int32 (n,), which may differ by rank;
    rows that lie outside `x` count as zeros, rows beyond `capacity` are dropped, pieces may not overlap in `y`. Shapes
    are fixed, so every piece travels as `limit` rows (by default the smaller of `len(x)` and `capacity`), and rows of a
    piece beyond are dropped: (n-1) times `limit` rows are sent by each rank, those of an all_gather without `limit`.
    Raises `SpecError` for other shapes and dtypes and for a pending operand.
    """
    here = region()
    plain, n = here.mesh.expand(axes), here.mesh.size(axes)
    rows = [y.shape[0] if isinstance(y, Tensor) and y.dim() else "no tensor with rows" for y in tree.leaves(x)]
    length = next(iter(rows), "no tensor")
    if not isinstance(length, int) or set(rows) != {length}:
        found = listing(map(str, dict.fromkeys(rows)))
        raise SpecError(f"ragged_all_to_all takes tensors of as many rows each; found {found}")
    for what, k in (("capacity", capacity), ("limit", length if limit is None else limit)):
        if not isinstance(k, int) or k < 0:
            raise SpecError(f"ragged_all_to_all: {what}= is a number of rows, known before it runs, not {k!r}")
    most = min(length, capacity, length if limit is None else limit)
    sizes = _counts("send_sizes", send_sizes, n, plain)
    starts = _before(sizes) if input_offsets is None else _counts("input_offsets", input_offsets, n, plain)
    goals = sizes if output_offsets is None else _counts("output_offsets", output_offsets, n, plain)
    sizes = sizes.clamp(0, most)
    received, goals = c._all_to_all(torch.stack([sizes, goals], 1), plain, 0, 0).unbind(1)
    goals = _before(received) if output_offsets is None else goals
    wide = max(1, most)
    take = _places(starts, sizes, wide, length)
    put = _places(goals, received, wide, capacity)
    nothing = torch.full((capacity + 1,), n * wide, device=put.device)
    source = nothing.scatter(0, put.flatten(), torch.arange(n * wide, device=put.device))[:capacity]

    def one(y: Tensor) -> Tensor:
        refuse("ragged_all_to_all", y, plain, "P", "psum it first")
        pieces = _with_zero_row(c.pvary(y, plain))[take]
        return _with_zero_row(c._all_to_all(pieces, plain, 0, 0).flatten(0, 1))[source]

    return tree.map_(one, x), received


def _counts(what: str, x: Tensor, n: int, axes: tuple[str, ...]) -> Tensor:
    """Sizes or offsets, checked, as what may differ by rank."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32) or x.shape != (n,):
        said = short(x) if isinstance(x, Tensor) else repr(x)
        raise SpecError(
            f"ragged_all_to_all: {what} holds a number for each of the {n} ranks of {listing(axes)}, int64 or int32 of "
            f"shape ({n},); found {said}"
        )
    refuse(f"ragged_all_to_all: {what}", x, axes, "P", "psum it first")
    return c.pvary(x.long(), axes)


def _before(sizes: Tensor) -> Tensor:
    """Where pieces start that follow each other."""
    return sizes.cumsum(0) - sizes


def _places(starts: Tensor, sizes: Tensor, most: int, end: int) -> Tensor:
    """The row of each of `most` rows of each piece; `end`, one beyond the last, for rows that are not there."""
    step = torch.arange(most, device=starts.device)
    at = starts[:, None] + step
    return torch.where((step < sizes[:, None]) & (at >= 0) & (at < end), at, end)


def _with_zero_row(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))  # not a cat with zeros: a pending sum stays one
