"""Exact attention over a sequence that is split over ranks: ring attention (Liu et al. 2023), its own gradient.

Every rank keeps its queries; keys and values travel round the ring. Autodiff would keep every block of them that came
by; `custom_vjp` keeps the rank's own and sends them again in backward, where their gradients travel along.
"""

import math
from typing import Any

import torch
from torch import Tensor

import shardlib as sl

Block = tuple[Tensor, Tensor, Tensor, Tensor]  # keys, values, their positions and documents


def scores(q: Tensor, at: tuple[Tensor, Tensor], block: Block, causal: bool) -> Tensor:
    """Scaled products of queries and keys, -inf where a query may not look: (..., queries, keys)."""
    (pos, doc), (k, _, kpos, kdoc) = at, block
    seen = doc[:, None] == kdoc
    if causal:
        seen = seen & (pos[:, None] >= kpos)
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, doc: Tensor, causal: bool) -> tuple[Tensor, Any]:
    """The weighted mean of values that softmax gives, block by block: each with its log-sum-exp."""
    block, out, lse = (k, v, pos, doc), torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    for step in range(sl.axis_size("cp")):
        if step:
            block = sl.ppermute(block, "cp", shift=1)
        s = scores(q, (pos, doc), block, causal)
        new = torch.logaddexp(lse, s.logsumexp(-1))  # finite from the first block on: a token sees itself
        out = out * (lse - new).exp()[..., None] + (s - new[..., None]).exp() @ block[1]
        lse = new
    return out, (q, k, v, pos, doc, causal, out, lse)


def backward(kept: Any, g: Tensor) -> tuple[Any, ...]:
    """The gradients of q, k and v; those of k and v go round with their block, and home at the end."""
    q, k, v, pos, doc, causal, out, lse = kept
    block, dk, dv, dq = (k, v, pos, doc), torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(q)
    mean = (g * out).sum(-1, keepdim=True)
    for step in range(sl.axis_size("cp")):
        if step:
            block = sl.ppermute(block, "cp", shift=1)
        weight = (scores(q, (pos, doc), block, causal) - lse[..., None]).exp()
        inner = weight * (g @ block[1].mT - mean) / math.sqrt(q.shape[-1])
        dq = dq + inner @ block[0]
        dk, dv = sl.ppermute((dk + inner.mT @ q, dv + weight.mT @ g), "cp", shift=1)
    return dq, dk, dv, None, None, None


def ring(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, doc: Tensor, causal: bool = True) -> Tensor:
    """Attention of `"batch heads seq/cp head"` queries to keys and values of the same documents.

    pos and doc: `"seq/cp"`, the position and document of every token, so that tokens may lie in any order over ranks.
    """
    return sl.custom_vjp(lambda *args: forward(*args)[0], forward, backward)(q, k, v, pos, doc, causal)


def plain(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, doc: Tensor, causal: bool = True) -> Tensor:
    """The same in one process."""
    return scores(q, (pos, doc), (k, v, pos, doc), causal).softmax(-1) @ v


def zigzag(n: int, ranks: int) -> Tensor:
    """The order of `n` positions in which every rank gets a piece and its mirror image: equal work under causality."""
    pieces = torch.arange(n).chunk(2 * ranks)
    return torch.cat([p for i in range(ranks) for p in (pieces[i], pieces[-1 - i])])


def main() -> None:
    """Four ranks in this process against one, in the order of zigzag."""
    q, k, v = torch.randn(3, 2, 2, 16, 4, dtype=torch.float64)
    pos, doc = torch.arange(16), torch.repeat_interleave(torch.arange(3), torch.tensor([3, 5, 8]))
    order = zigzag(16, 4)

    def device(*args: Tensor) -> Any:
        return sl.grad(lambda *args: sl.psum(ring(*args).square().sum(), "cp"), (0, 1, 2))(*args)

    def one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v, pos, doc).square().sum()

    wanted = torch.func.grad(one_process, (0, 1, 2))(q, k, v)
    cut = "batch heads seq/cp head"
    with sl.make_mesh(cp=4, simulate=True):
        args = *sl.shard([x[:, :, order] for x in (q, k, v)], cut), *sl.shard((pos[order], doc[order]), "seq/cp")
        found = sl.gather(sl.shard_map(device, in_specs=None, out_specs=cut)(*args))
    for name, a, b in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        a = a[:, :, order.argsort()]
        print(f"{name}: largest difference to one process {(a - b).abs().max():.1e}")


if __name__ == "__main__":
    main()
