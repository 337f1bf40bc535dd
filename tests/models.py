"""A family of small language models for tests: the loss with patterns, and the same arithmetic in plain torch."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import tree
from shardlib.policy import Policy


@dataclass(frozen=True)
class Net:
    """One model of the family: its switches and sizes.

    Batches are split over `dp` (an axis or a group), with `cp` sequences over `cp`, hidden sizes and heads over `tp`.
    `seq_parallel`: between blocks activations are split over tp too, along the sequence. `split_vocab`: embedding and
    logits are split over tp. `second_term`: the loss adds a mean over activations to the one over tokens. `remat`: the
    policy for a block, or None. `dropout`: of the embeddings and of what a block adds, where the loss gets a key.
    """

    layers: int = 1
    attention: bool = False
    listed: bool = False
    tied: bool = True
    seq_parallel: bool = False
    split_vocab: bool = False
    remat: Policy | None = None
    dropout: float = 0.0
    cp: bool = False
    second_term: bool = False
    vocab: int = 7
    model: int = 5
    hidden: int = 6
    heads: int = 2
    head: int = 3

    @property
    def data(self) -> tuple[str, ...]:
        """The axes that cut the batch and not the weights: a leaf may be split over them as a layout likes."""
        return ("dp", "cp") if self.cp else ("dp",)

    def shapes(self) -> dict[str, Any]:
        """Name -> (global shape, how the model wants it split); blocks without their leading dimension."""
        table = ("vocab/tp model" if self.split_vocab else "vocab model", (self.vocab, self.model))
        block: dict[str, Any] = {"scale": ("model", (self.model,)), "b_out": ("model", (self.model,))}
        if self.attention:
            block["w_qkv"] = ("qkv model heads/tp head", (3, self.model, self.heads, self.head))
            block["w_out"] = ("heads/tp head model", (self.heads, self.head, self.model))
        else:
            block["w_in"] = ("model hidden/tp", (self.model, self.hidden))
            block["b_in"] = ("hidden/tp", (self.hidden,))
            block["w_out"] = ("hidden/tp model", (self.hidden, self.model))
        head = {} if self.tied else {"head": table}
        rest = {"temperature": ("", ()), "nothing": ("four none", (4, 0)), "unused": ("odd", (3,))}
        return {"embed": table, **head, "block": block, **rest}

    def params(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
        """Global parameters, seeded."""
        g = torch.Generator().manual_seed(seed)

        def draw(shape: tuple[int, ...]) -> Tensor:
            x = torch.randn(shape, generator=g, dtype=torch.float64) / 2
            return (x + 1 if len(shape) < 2 else x).to(dtype)

        shapes = self.shapes()
        block = shapes.pop("block")
        out = {name: draw(shape) for name, (_, shape) in shapes.items()}
        layers = [{name: draw(shape) for name, (_, shape) in block.items()} for _ in range(self.layers)]
        return out | {"blocks": layers if self.listed else tree.map_(lambda *xs: torch.stack(xs), *layers)}

    def batch(self, rows: int, seq: int, seed: int = 0) -> dict[str, Tensor]:
        """Tokens, targets (some negative) and a weight for each token."""
        g = torch.Generator().manual_seed(1000 + seed)
        return {
            "tokens": torch.randint(0, self.vocab, (rows, seq), generator=g),
            "targets": torch.randint(-2, self.vocab, (rows, seq), generator=g),
            "weight": torch.randint(0, 4, (rows, seq), generator=g).double() / 2,
        }

    @property
    def batch_spec(self) -> str:
        """How the leaves of a batch are split."""
        return f"batch/dp {self._tokens}"

    @property
    def _seq(self) -> str:
        return "seq/cp" if self.cp else "seq"

    @property
    def _between(self) -> str:
        return f"{self._seq}/tp" if self.seq_parallel else self._seq

    @property
    def _tokens(self) -> str:
        return self._seq if self.split_vocab else self._between

    # ---- with patterns, on any mesh

    def loss(self, p: dict[str, Any], batch: dict[str, Tensor], key: Tensor | None = None) -> sl.Mean:
        """The per-device loss."""
        every = (*self.data, "tp") if self.seq_parallel else self.data
        embed, head = (
            sl.gather(p[n], self.data if self.split_vocab else every)
            for n in ("embed", "embed" if self.tied else "head")
        )
        s, between, tokens = self._seq, self._between, self._tokens
        if self.split_vocab:
            x = sl.embed(f"vocab/tp model, batch/dp {s} -> batch/dp {s} model +tp", embed, batch["tokens"])
            x = self._summed(x)
        else:
            x = F.embedding(batch["tokens"], embed)
        keys = self._keys(key)

        def dropped(x: Tensor, key: Tensor | None) -> Tensor:
            return sl.dropout(f"batch/dp {between} model", x, key, self.dropout)

        def block(w: dict[str, Tensor], key: Tensor | None, x: Tensor) -> Tensor:
            scale, b_out = sl.gather((w["scale"], w["b_out"]), every)
            w = sl.gather(w, self.data)
            h = F.rms_norm(x, (self.model,)) * scale
            if self.seq_parallel:
                h = sl.all_gather(f"batch/dp {between} model -> batch/dp {s} model", h)
            h = self._summed(self._attend(w, h) if self.attention else self._widen(w, h))
            return x + dropped(sl.save_name(h, "mixed") + b_out, key)

        block = block if self.remat is None else sl.remat(block, self.remat)
        x = dropped(x, None if keys is None else keys[-1])
        if self.listed:
            for i, w in enumerate(p["blocks"]):
                x = block(w, None if keys is None else keys[i], x)
        elif keys is None:
            x, _ = sl.scan(lambda x, w: (block(w, None, x), None), x, p["blocks"])
        else:
            x, _ = sl.scan(lambda x, each: (block(each[0], each[1], x), None), x, (p["blocks"], keys[:-1]))
        mean = sl.Mean.of(f"batch/dp {between} model", x * x) if self.second_term else 0
        vocab = "vocab/tp" if self.split_vocab else "vocab"
        if self.split_vocab and self.seq_parallel:
            x = sl.all_gather(f"batch/dp {between} model -> batch/dp {s} model", x)
        logits = sl.einsum(f"batch/dp {tokens} model, {vocab} model -> batch/dp {tokens} {vocab}", x, head)
        logits = logits * sl.gather(p["temperature"], every) + sl.gather(p["nothing"], every).sum()
        pattern = f"batch/dp {tokens} {vocab}, batch/dp {tokens}"
        nll = sl.token_loss(pattern, logits, batch["targets"], weight=batch.get("weight"))
        return nll + 0.1 * mean

    def _keys(self, key: Tensor | None) -> Tensor | None:
        """A key for each layer, and one for the embeddings; None where nothing is dropped."""
        return sl.random.split(key, self.layers + 1) if key is not None and self.dropout else None

    def _summed(self, x: Tensor) -> Tensor:
        s = self._seq
        if self.seq_parallel:
            return sl.psum_scatter(f"batch/dp {s} model +tp -> batch/dp {s}/tp model", x)
        return sl.psum(f"batch/dp {s} model +tp -> batch/dp {s} model", x)

    def _widen(self, w: dict[str, Tensor], h: Tensor) -> Tensor:
        s = self._seq
        h = sl.einsum(f"batch/dp {s} model, model hidden/tp -> batch/dp {s} hidden/tp", h, w["w_in"])
        h = torch.tanh(h + w["b_in"])
        return sl.einsum(f"batch/dp {s} hidden/tp, hidden/tp model -> batch/dp {s} model +tp", h, w["w_out"])

    def _attend(self, w: dict[str, Tensor], h: Tensor) -> Tensor:
        s = self._seq
        qkv = sl.einsum(f"batch/dp {s} model, qkv model heads/tp head -> qkv batch/dp heads/tp {s} head", h, w["w_qkv"])
        q, k, v = qkv
        if self.cp:
            k, v = sl.all_gather("batch/dp heads/tp seq/cp head -> batch/dp heads/tp seq head", (k, v))
        one, both = "batch/dp heads/tp keys head", f"batch/dp heads/tp {s} keys"
        scores = sl.einsum(f"batch/dp heads/tp {s} head, {one} -> {both}", q, k)
        later = torch.arange(k.shape[2]) > sl.iota(s, q.shape[2])[:, None]
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1)
        o = sl.einsum(f"{both}, {one} -> batch/dp heads/tp {s} head", mixed, v)
        return sl.einsum(f"batch/dp heads/tp {s} head, heads/tp head model -> batch/dp {s} model +tp", o, w["w_out"])

    # ---- in one process

    def plain(self, p: dict[str, Any], batch: dict[str, Tensor], key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss of the whole batch, and the weight of its tokens."""
        keys = self._keys(key)

        def dropped(x: Tensor, number: int) -> Tensor:
            if keys is None:
                return x
            return torch.where(sl.random.bernoulli(keys[number], 1 - self.dropout, x.shape), x / (1 - self.dropout), 0)

        x = dropped(p["embed"][batch["tokens"]], -1)
        for i in range(self.layers):
            w = p["blocks"][i] if self.listed else {k: v[i] for k, v in p["blocks"].items()}
            h = F.rms_norm(x, (self.model,)) * w["scale"]
            if self.attention:
                q, k, v = torch.einsum("bsm,qmhd->qbhsd", h, w["w_qkv"])
                later = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
                mixed = (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1)
                o = torch.einsum("bhsd,hdm->bsm", mixed @ v, w["w_out"])
            else:
                o = torch.tanh(h @ w["w_in"] + w["b_in"]) @ w["w_out"]
            x = x + dropped(o + w["b_out"], i)
        logits = x @ p["embed" if self.tied else "head"].mT * p["temperature"]
        targets = batch["targets"]
        nll = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        weight = (targets >= 0) * batch.get("weight", torch.ones_like(nll)).to(nll.dtype)
        tokens = weight.sum()
        loss = (nll * weight).sum() / torch.where(tokens == 0, torch.ones_like(tokens), tokens)
        return loss + 0.1 * (x * x).mean() if self.second_term else loss, tokens
