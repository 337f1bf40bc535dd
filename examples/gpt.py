"""A decoder-only transformer in which every split, every sum and every byte sent can be read.

Axis `dp` cuts the batch and, where the layout says so (ZeRO), the weights. Axis `tp` cuts heads, hidden units, the
vocabulary and, between matrices, the sequence. Every function here runs on one rank, on plain tensors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl


@sl.pytree
class Block:
    norm1: Tensor = sl.spec("model/dp")
    w_qkv: Tensor = sl.spec("model/dp 3 heads/tp head")
    w_o: Tensor = sl.spec("model/dp heads/tp head")
    norm2: Tensor = sl.spec("model/dp")
    w_in: Tensor = sl.spec("model/dp 2 hidden/tp")
    w_out: Tensor = sl.spec("hidden/tp model/dp")


@sl.pytree
class GPT:
    embed: Tensor = sl.spec("vocab/tp model/dp")
    blocks: Block = sl.stack("layers")
    norm: Tensor = sl.spec("model/dp")
    head: Tensor = sl.spec("model/dp vocab/tp")


@sl.pytree
class Batch:
    tokens: Tensor = sl.spec("batch/dp seq")
    targets: Tensor = sl.spec("batch/dp seq")  # negative: not counted


def sizes(*, vocab: int, layers: int, model: int, heads: int) -> dict[str, int]:
    """Every dimension of `GPT`. `hidden` is 8/3 of `model`, as many weights as a plain MLP of 4 has, in steps of 32."""
    hidden = -(-model * 8 // 3 // 32) * 32
    return dict(vocab=vocab, layers=layers, model=model, heads=heads, head=model // heads, hidden=hidden)


def norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:]) * scale


def rotary(seq: int, head: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles by which positions turn pairs of features (Su et al. 2021): "seq head/2"."""
    frequency = 10_000.0 ** -torch.linspace(0, 1, head // 2, device=device)
    angle = torch.arange(seq, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    (cos, sin), (a, b) = rope, x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def block(w: Block, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Attention and SwiGLU, each added to the stream `x`: "batch/dp seq/tp model"."""
    w = sl.gather(w, "dp")  # ZeRO-3: whole over dp only in here; leaves that the layout does not cut pass through
    h = sl.all_gather("batch/dp seq/tp model -> batch/dp seq model", norm(x, w.norm1))
    q, k, v = sl.einsum("batch/dp seq model, model 3 heads/tp head -> 3 batch/dp heads/tp seq head", h, w.w_qkv)
    o = F.scaled_dot_product_attention(rotate(q, rope), rotate(k, rope), v, is_causal=True)
    o = sl.einsum("batch/dp heads/tp seq head, model heads/tp head -> batch/dp seq model +tp", o, w.w_o)
    x = x + sl.psum_scatter("batch/dp seq model +tp -> batch/dp seq/tp model", o)
    h = sl.all_gather("batch/dp seq/tp model -> batch/dp seq model", norm(x, w.norm2))
    gate, up = sl.einsum("batch/dp seq model, model 2 hidden/tp -> 2 batch/dp seq hidden/tp", h, w.w_in)
    o = sl.einsum("batch/dp seq hidden/tp, hidden/tp model -> batch/dp seq model +tp", F.silu(gate) * up, w.w_out)
    return x + sl.psum_scatter("batch/dp seq model +tp -> batch/dp seq/tp model", o)


def logits(w: GPT, tokens: Tensor) -> Tensor:
    """Scores of the token that comes next: "batch/dp seq" -> "batch/dp seq vocab/tp"."""
    x = sl.embed("vocab/tp model, batch/dp seq -> batch/dp seq model +tp", sl.gather(w.embed, "dp"), tokens)
    x = sl.psum_scatter("batch/dp seq model +tp -> batch/dp seq/tp model", x)
    rope = rotary(tokens.shape[1], w.blocks.w_qkv.shape[-1], x.device)
    x, _ = sl.scan(lambda x, w: (sl.remat(block)(w, x, rope), None), x, w.blocks)
    h = sl.all_gather("batch/dp seq/tp model -> batch/dp seq model", norm(x, sl.gather(w.norm, "dp")))
    return sl.einsum("batch/dp seq model, model vocab/tp -> batch/dp seq vocab/tp", h, sl.gather(w.head, "dp"))


def loss(w: GPT, batch: Batch) -> sl.Mean:
    return sl.token_loss("batch/dp seq vocab/tp, batch/dp seq", logits(w, batch.tokens), batch.targets)
