"""The GPT that the benchmarks train, once in shardlib and once as a torch module, from the same weights and batches.

Pre-norm, RMSNorm, rotary positions, SwiGLU, untied head; causal attention over 256 tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib import tree

EPS = 1e-6
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


@dataclass(frozen=True)
class Size:
    """`rows`: sequences of a batch on one rank."""

    model: int
    layers: int
    heads: int
    vocab: int
    seq: int = 256
    rows: int = 4

    @property
    def sizes(self) -> dict[str, int]:
        """As `sl.init` takes them."""
        return dict(
            vocab=self.vocab,
            model=self.model,
            layers=self.layers,
            heads=self.heads,
            head=self.model // self.heads,
            hidden=4 * self.model,
        )


SIZES = {
    "tiny": Size(model=32, layers=2, heads=2, vocab=64, seq=16, rows=2),
    "small": Size(model=256, layers=6, heads=4, vocab=8192),  # 10.5 million parameters
    "mid": Size(model=512, layers=8, heads=8, vocab=16384),  # 50.4 million
}


@sl.pytree
class Block:
    norm1: Tensor = sl.spec("model", init="ones")
    w_q: Tensor = sl.spec("model/dp heads/tp head", init=0.02)
    w_k: Tensor = sl.spec("model/dp heads/tp head", init=0.02)
    w_v: Tensor = sl.spec("model/dp heads/tp head", init=0.02)
    w_o: Tensor = sl.spec("heads/tp head model/dp", init=0.02)
    norm2: Tensor = sl.spec("model", init="ones")
    w_gate: Tensor = sl.spec("model/dp hidden/tp", init=0.02)
    w_up: Tensor = sl.spec("model/dp hidden/tp", init=0.02)
    w_down: Tensor = sl.spec("hidden/tp model/dp", init=0.02)


@sl.pytree
class Gpt:
    embed: Tensor = sl.spec("vocab/tp model/dp", init=0.02)
    blocks: list[Block] = sl.stack("layers")
    norm: Tensor = sl.spec("model", init="ones")
    head: Tensor = sl.spec("model/dp vocab/tp", init=0.02)


@sl.pytree
class Batch:
    tokens: Tensor = sl.spec("batch/dp seq")
    targets: Tensor = sl.spec("batch/dp seq")
    cos: Tensor = sl.spec("seq half")
    sin: Tensor = sl.spec("seq half")


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def block(w: Block, x: Tensor, b: Batch) -> Tensor:
    w = sl.gather(w, "dp")
    h = sl.rms_norm(x, w.norm1, EPS)
    into = "batch/dp seq model, model heads/tp head -> batch/dp heads/tp seq head"
    q, k, v = (sl.einsum(into, h, m) for m in (w.w_q, w.w_k, w.w_v))
    o = F.scaled_dot_product_attention(rotated(q, b.cos, b.sin), rotated(k, b.cos, b.sin), v, is_causal=True)
    o = sl.einsum("batch/dp heads/tp seq head, heads/tp head model -> batch/dp seq model +tp", o, w.w_o)
    x = x + sl.psum("batch/dp seq model +tp -> batch/dp seq model", o)
    h = sl.rms_norm(x, w.norm2, EPS)
    into = "batch/dp seq model, model hidden/tp -> batch/dp seq hidden/tp"
    gate, up = sl.einsum(into, h, w.w_gate), sl.einsum(into, h, w.w_up)
    o = sl.einsum("batch/dp seq hidden/tp, hidden/tp model -> batch/dp seq model +tp", F.silu(gate) * up, w.w_down)
    return x + sl.psum("batch/dp seq model +tp -> batch/dp seq model", o)


def loss(w: Gpt, b: Batch) -> sl.Mean:
    """Nats per token."""
    embed, norm, head = sl.gather((w.embed, w.norm, w.head), "dp")
    x = sl.embed("vocab/tp model, batch/dp seq -> batch/dp seq model +tp", embed, b.tokens)
    x = sl.psum("batch/dp seq model +tp -> batch/dp seq model", x)
    for layer in w.blocks:
        x = block(layer, x, b)
    logits = sl.einsum("batch/dp seq model, model vocab/tp -> batch/dp seq vocab/tp", sl.rms_norm(x, norm, EPS), head)
    return sl.token_loss("batch/dp seq vocab/tp, batch/dp seq", logits, b.targets)


def weights(size: Size) -> Gpt:
    """The first weights, as plain tensors, the same in every process."""
    with sl.make_mesh(dp=1, tp=1, simulate=True):
        return sl.gather(sl.init(Gpt, sizes=size.sizes, key=sl.random.key(0)))


def tokens(size: Size, step: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step on all ranks, (ranks * rows, seq): skewed, so that there is something to learn."""
    u = torch.rand(ranks * size.rows, size.seq + 1, generator=torch.Generator().manual_seed(1000 + step))
    t = (size.vocab * u**3).long().clamp(max=size.vocab - 1)
    return t[:, :-1].contiguous(), t[:, 1:].contiguous()


def angles(size: Size) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary positions, (seq, head / 2)."""
    half = size.model // size.heads // 2
    at = torch.arange(size.seq)[:, None] / 10000 ** (torch.arange(half) / half)[None]
    return at.cos(), at.sin()


# ---- the same in torch


class Norm(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, EPS)


def linear(w: Tensor) -> nn.Linear:
    """A layer of the matrix (in, out)."""
    made = nn.Linear(w.shape[0], w.shape[1], bias=False, device="meta")
    made.weight = nn.Parameter(w.T.contiguous().clone())
    return made


class TorchBlock(nn.Module):
    def __init__(self, w: Block) -> None:
        super().__init__()
        self.heads = w.w_q.shape[1]
        self.norm1, self.norm2 = Norm(w.norm1), Norm(w.norm2)
        self.q, self.k, self.v = (linear(m.flatten(1)) for m in (w.w_q, w.w_k, w.w_v))
        self.o = linear(w.w_o.flatten(0, 1))
        self.gate, self.up, self.down = map(linear, (w.w_gate, w.w_up, w.w_down))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (m(h).unflatten(-1, (-1, 2 * cos.shape[-1])).transpose(1, 2) for m in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + self.o(o.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class TorchGpt(nn.Module):
    """The loss of a batch, from the weights of `weights`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        w = weights(size)
        self.embed = nn.Embedding.from_pretrained(w.embed.clone(), freeze=False)
        self.blocks = nn.ModuleList(map(TorchBlock, w.blocks))
        self.norm, self.head = Norm(w.norm), linear(w.head)
        for name, x in zip(("cos", "sin"), angles(size), strict=True):
            self.register_buffer(name, x, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for each in self.blocks:
            x = each(x, self.cos, self.sin)
        return self.head(self.norm(x))


def torch_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parameters(size: Size) -> int:
    """How many parameters there are."""
    return sum(x.numel() for x in tree.leaves(weights(size)))
