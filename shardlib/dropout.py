"""`dropout`: zeros by key and global index, the same on every mesh and in any number of micro-batches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib import collectives as c
from shardlib import layout, random
from shardlib.errors import SpecError
from shardlib.patterns import check_operand, state_sum
from shardlib.spec import Dim, Spec, parse_list
from shardlib.types import Region, refuse, region


def dropout(pattern: str, x: Tensor, key: Tensor | None, p: float) -> Tensor:
    """Zeros with probability `p`, the rest over `1 - p`: `dropout("batch/dp seq model", x, key, 0.1)`.

    Element n of the global array is kept where `random.bernoulli(key, 1 - p, global_shape)[n]` is, so the mask is that
    of one process. An axis that the pattern does not name means equal there. `(batch seq)/dp` is a flattened dimension.
    Inside `step` rows count in the whole batch, whatever the number of micro-batches: along the dimension that has the
    name of the batch's, or is split over its axes. One mask per key: `random.fold_in(key, layer)`, or `split`.

    x: floating-point, of the pattern's local shape; key: int64 (2,), equal on all ranks, or None, which drops nothing
    (a loss with `key=None` gets one from `step` and none from `evaluate`); `0 <= p <= 1`. Raises `SpecError`.
    """
    here = region()
    spec = check_operand(parse_list(pattern, 1)[0], x, pattern, here.mesh.shape, groups=True)
    if not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise SpecError(f"dropout: p is the probability of a zero, a number from 0 to 1, not {p!r}")
    if not x.is_floating_point():
        raise SpecError(f"dropout scales what it keeps; found {here.describe(x)}")
    if key is None:
        return state_sum(spec, x)
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.shape != (2,):
        said = here.describe(key) if isinstance(key, Tensor) else repr(key)
        raise SpecError(
            f"dropout takes one key, int64 of shape (2,), as sl.random.split and fold_in give; found {said}"
        )
    refuse("dropout", key, tuple(here.mesh.shape), "VP", "A key is equal on all ranks: masks differ by global index")
    x = state_sum(spec, x)
    if p == 0:
        return x
    shape, starts = _place(here, spec, x.shape)
    lead = (1,) * (len(shape) - x.dim())
    index = random.global_index(shape, starts, (*lead, *x.shape), x.device).view(x.shape)
    kept = random.bernoulli(key, 1 - p, (), index=index)
    return (x / (1 - p) if p < 1 else x).masked_fill(~kept, 0)  # linear, so that a pending sum stays one


def _place(here: Region, spec: Spec, sizes: Sequence[int]) -> tuple[list[int], list[int | Tensor]]:
    """The shape of the whole array and where in it this rank's piece starts. A micro-batch whose rows cannot be told
    (experts' slots, say) is a slice of an array with one dimension more."""
    piece = here.piece
    rows = None if piece is None else _rows(spec, piece.dim)
    shape: list[int] = []
    starts: list[int | Tensor] = []
    if piece is not None and rows is None and {*spec.split} & {*piece.dim.axes}:
        shape, starts = [piece.count], [piece.at]
    for i, (dim, n) in enumerate(zip(spec.dims, sizes, strict=True)):
        start = c.axis_index(dim.axes) * n if dim.axes else 0
        if piece is not None and i == rows:
            start, n = start * piece.count + piece.at * n, n * piece.count
        shape.append(n * layout.parts(dim, here.mesh.shape))
        starts.append(start)
    return shape, starts


def _rows(spec: Spec, batch: Dim) -> int | None:
    """Which dimension counts the rows of the batch: the one of that name (alone, or first in a group), else the one
    that is split as the batch is."""
    named = [i for i, d in enumerate(spec.dims) if (d.parts or (d.name,))[:1] == (batch.name,)]
    split = [i for i, d in enumerate(spec.dims) if batch.axes and d.axes == batch.axes]
    return next(iter(named + split), None)
