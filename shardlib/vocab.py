"""Vocabularies that may be split: positions, rows looked up, cross-entropy."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib import collectives as c
from shardlib.fused import token_scores
from shardlib.mean import Mean, summed_later
from shardlib.patterns import axes_named, check_operand, failure, resolve
from shardlib.spec import Spec, parse_list, parse_pattern
from shardlib.types import region


def iota(spec: str, n: int) -> Tensor:
    """The global positions of this rank's piece of a dimension, `n` on each rank: `iota("seq/cp", n)`; int64."""
    here = region()
    dim = resolve(parse_list(spec, 1)[0], here).dims[0]
    positions = torch.arange(n, device=here.mesh.device)
    return positions + n * c.axis_index(dim.axes) if dim.axes else positions


def embed(pattern: str, table: Tensor, tokens: Tensor) -> Tensor:
    """Look rows up: `embed("vocab/tp model, batch/dp seq -> batch/dp seq model +tp", table, tokens)`.

    The first dimension of the table may be split; each rank then looks up what it holds and the result is pending.
    Token ids outside 0..vocab-1 give zeros where the table is split, and are an error of torch where it is not.
    """
    p, here, local = parse_pattern(pattern, 2), region(), dict[str, int]()
    axes = axes_named(p.inputs + p.outputs, here)
    pairs = zip(p.inputs, (table, tokens), strict=True)
    rows, ids = (check_operand(s, x, pattern, axes, local) for s, x in pairs)
    out, split = resolve(p.outputs[0], here), rows.dims[0].axes
    want = Spec(ids.dims + rows.dims[1:], split)
    if (out.names, out.chains, set(out.pending)) != (want.names, want.chains, set(split)):
        span = (pattern.index("->") + 2, len(pattern))
        what = "embed gives the dimensions of the tokens, then those of a row"
        raise failure(pattern, span, what, f"write `{want}`")
    if not split:
        return F.embedding(tokens, table)
    at = _own(tokens, table.shape[0], split)
    found = F.embedding(at.clamp(min=0), table)
    mine = (at >= 0).unsqueeze(-1)
    return c._pending(torch.where(mine, found, torch.zeros_like(found)), here.mesh.ordered(split))


def token_loss(
    pattern: str, logits: Tensor, targets: Tensor, *, weight: Tensor | None = None, per_token: bool = False
) -> Any:
    """Cross-entropy in nats over the last dimension: `token_loss("batch/dp vocab/tp, batch/dp", logits, targets)`.

    The vocabulary may be split. Negative targets weigh nothing. A `Mean` over tokens (each weighing `weight`, default
    1), pending over the axes of the targets; with `per_token=True` the losses themselves, zeros where the target is
    negative. 16-bit logits are computed in float32. A target beyond the vocabulary gives NaN where that is split, and
    is an error of torch where it is not. Costs no copy of the logits and memory for their gradient alone, which a
    compiled step writes over them. Where the vocabulary is split, ranks reduce three numbers per token.
    """
    specs, here, local = parse_list(pattern, 2), region(), dict[str, int]()
    axes = axes_named(specs, here)
    pairs = zip(specs, (logits, targets), strict=True)
    scores, ids = (check_operand(s, x, pattern, axes, local) for s, x in pairs)
    if (scores.names[:-1], scores.chains[:-1]) != (ids.names, ids.chains):
        span = specs[1].dims[0].span if specs[1].dims else (0, 1)
        raise failure(pattern, span, "the targets have the dimensions of the logits but for the last")
    if split := scores.dims[-1].axes:
        loss = _minus_log_softmax(logits, targets, split)
    else:
        loss = -token_scores(logits, targets.clamp(min=-1))[0]
    valid = targets >= 0
    if per_token:
        return loss if weight is None else loss * weight
    weights = valid.to(loss.dtype) if weight is None else torch.where(valid, weight.to(loss.dtype), 0.0)
    over = here.mesh.ordered(ids.split)
    total = loss.sum() if weight is None else (loss * weights).sum()
    return Mean(summed_later(total, over), summed_later(weights.sum(), over))


def _minus_log_softmax(logits: Tensor, targets: Tensor, axes: Sequence[str]) -> Tensor:
    """Of each token's target, 0 where that is negative; each rank holds a piece of the last dimension."""
    over, n = region().mesh.ordered(axes), logits.shape[-1]
    at = _own(targets, n, axes)
    picked, lse = token_scores(logits, at)
    shifted = lse - c.pmax(lse.detach(), over)  # of this piece against the largest
    norm = c._psum(shifted.exp(), over).log()
    loss = norm - c._psum((picked + shifted).masked_fill(at < 0, 0), over)
    return loss.masked_fill(targets >= n * region().mesh.size(axes), torch.nan).masked_fill(targets < 0, 0)


def _own(ids: Tensor, n: int, axes: Sequence[str]) -> Tensor:
    """Where in this rank's `n` entries of a split vocabulary ids stand; -1 where they do not."""
    at = ids - n * c.axis_index(axes)
    return at.masked_fill((at < 0) | (at >= n), -1)
