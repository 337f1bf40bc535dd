"""`attention`: torch's fused kernels, or with the log-sum-exp that joins blocks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.errors import SpecError
from shardlib.fused import forward_modes
from shardlib.types import short


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The mean of `v` weighted by `softmax(q @ k.mT * scale)` (Vaswani et al. 2017), on what this rank holds.

    q (..., heads, queries, head), k (..., heads, keys, head), v (..., heads, keys, width) -> (..., heads, queries,
    width), in the dtype of q. k and v may have fewer heads, each for as many of q in a row (grouped queries, Ainslie
    et al. 2023). `causal`: query i sees keys 0 to i. `mask`: broadcast to (..., heads, queries, keys); bool, True
    where a query sees a key, or floats added to the scores. A query that sees no key gives 0. `scale`: 1/sqrt(head) by
    default. No operand may be pending, or split along what is summed over: keys and head.

    `lse=True` also gives log(sum(exp(scores))), (..., heads, queries), float32 or wider and -inf where nothing is
    seen: with it the results over two blocks of keys are joined, as in ring attention. It runs on plain ops that keep
    the scores, with derivatives of every order; so does forward mode (`torch.func.jvp`). Otherwise torch's kernels
    run, which have the first derivative. Raises `SpecError`.
    """
    grouped, plain = _check(q, k, v, mask), lse or forward_modes() > 0
    if causal and (plain or mask is not None):
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        floats = mask is not None and mask.is_floating_point()
        mask = seen if mask is None else mask.masked_fill(~seen, -torch.inf) if floats else mask & seen
        causal = False
    if not plain:
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    if grouped:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.to(wide).mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(wide)
    some = (scores > -torch.inf).any(-1, keepdim=True)
    total = torch.where(some, scores, 0.0).logsumexp(-1, keepdim=True)  # never of nothing, which has no derivative
    out = ((torch.where(some, scores, -torch.inf) - total).exp() @ v.to(wide)).to(q.dtype)
    return (out, torch.where(some, total, -torch.inf).squeeze(-1)) if lse else out


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether heads are grouped; raise where the operands do not fit."""

    def refuse(what: str) -> SpecError:
        return SpecError(f"attention: {what}; found q {short(q)}, k {short(k)}, v {short(v)}")

    if not all(x.is_floating_point() and x.dim() >= 3 and x.dtype == q.dtype for x in (q, k, v)):
        raise refuse("q, k and v are floats of one dtype, (..., heads, length, head)")
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        raise refuse("q and k have one length of a head, k and v the same keys, all the same batch")
    if not k.shape[-3] or q.shape[-3] % k.shape[-3]:
        raise refuse(f"{q.shape[-3]} heads of q cannot share {k.shape[-3]} of k evenly")
    whole = (*q.shape[:-1], k.shape[-2])
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise SpecError(f"attention: mask is bool (True: seen) or floats added to the scores, not {short(mask)}")
        if mask.dim() > len(whole) or any(n not in (1, m) for n, m in zip(mask.shape[::-1], whole[::-1], strict=False)):
            raise SpecError(f"attention: mask {tuple(mask.shape)} does not broadcast to the scores, {whole}")
    return q.shape[-3] != k.shape[-3]
