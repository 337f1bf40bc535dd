"""Exact attention over a sequence that is split over ranks: Ulysses (Jacobs et al. 2023), two all_to_alls.

Around attention a rank trades its piece of the sequence, with all heads, for whole sequences of some heads. So the
number of heads is a multiple of that of ranks; `ring_attention.py` has no such limit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from ring_attention import plain, zigzag


def ulysses(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, doc: Tensor, causal: bool = True) -> Tensor:
    """Attention of `"batch/dp heads seq/cp head"` queries to keys and values of the same documents.

    pos and doc: `"seq/cp"`, the position and document of every token.
    """
    q, k, v = sl.all_to_all("batch/dp heads seq/cp head -> batch/dp heads/cp seq head", (q, k, v))
    pos, doc = sl.all_gather("seq/cp -> seq", (pos, doc))
    seen = doc[:, None] == doc
    if causal:
        seen = seen & (pos[:, None] >= pos)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return sl.all_to_all("batch/dp heads/cp seq head -> batch/dp heads seq/cp head", out)


def main() -> None:
    """Two by two ranks in this process against one, in the order of zigzag."""
    q, k, v = torch.randn(3, 2, 4, 16, 3, dtype=torch.float64)
    order = zigzag(16, 2)
    pos, doc = torch.arange(16), torch.repeat_interleave(torch.arange(3), torch.tensor([3, 5, 8]))
    cut = "batch/dp heads seq/cp head"
    with sl.make_mesh(dp=2, cp=2, simulate=True):
        args = *sl.shard([x[:, :, order] for x in (q, k, v)], cut), *sl.shard((pos[order], doc[order]), "seq/cp")
        out = sl.gather(sl.shard_map(ulysses, in_specs=None, out_specs=cut)(*args))[:, :, order.argsort()]
    print(f"largest difference to one process {(out - plain(q, k, v, pos, doc)).abs().max():.1e}")


if __name__ == "__main__":
    main()
