"""The model with which pipelines are tested: as three functions, and in plain torch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import schedules, tree

VOCAB, MODEL, HIDDEN, SEQ = 7, 4, 6, 3


BLOCK = {"w_in": "model/dp hidden/tp", "w_out": "hidden/tp model/dp"}


def specs(tied: bool, v: int) -> dict[str, Any]:
    """The embedding lies split over pp; so does the head where that is it."""
    rest = {"embed": "vocab/pp model/dp", "norm": "model"} | ({} if tied else {"head": "vocab model/dp"})
    return rest | {"blocks": sl.stack(BLOCK, "layers/pp" if v == 1 else "v layers/pp")}


def first(p: Any, mb: Any) -> Any:
    return {"x": F.embedding(mb["tokens"], sl.gather(p["embed"], "dp")), "whole": mb["tokens"] > 0}


def stage(blocks: Any, x: Any, mb: Any) -> Any:
    def block(h: Tensor, w: Any) -> Tensor:
        w = sl.gather(w, "dp")
        a = torch.tanh(sl.einsum("batch/dp seq model, model hidden/tp -> batch/dp seq hidden/tp", h, w["w_in"]))
        y = sl.einsum("batch/dp seq hidden/tp, hidden/tp model -> batch/dp seq model +tp", a, w["w_out"])
        return h + sl.psum("batch/dp seq model +tp -> batch/dp seq model", y)

    h, _ = sl.scan(lambda h, w: (sl.remat(block)(h, w), None), x["x"], blocks)
    return x | {"x": h}


def last(p: Any, x: Any, mb: Any) -> Any:
    scale = sl.gather(p["norm"], "dp") * torch.where(x["whole"], 1.0, 0.5).to(p["norm"].dtype).unsqueeze(-1)
    head = sl.gather(p.get("head", p["embed"]), "dp")
    logits = sl.einsum("batch/dp seq model, vocab model -> batch/dp seq vocab", x["x"] * scale, head)
    loss = sl.token_loss("batch/dp seq vocab, batch/dp seq", logits, mb["targets"])
    return loss, sl.Aux({"logit": sl.Mean.of("batch/dp seq", logits.amax(-1))})


def plain(p: dict[str, Tensor], mb: Any) -> tuple[Tensor, Tensor]:
    """The loss and the metric in plain torch."""
    x = p["embed"][mb["tokens"]]
    for a, b in zip(p["w_in"], p["w_out"], strict=True):
        x = x + torch.tanh(x @ a) @ b
    x = x * p["norm"] * torch.where(mb["tokens"] > 0, 1.0, 0.5).double().unsqueeze(-1)
    logits, targets = x @ p.get("head", p["embed"]).t(), mb["targets"]
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
    return (each * (targets.flatten() >= 0)).sum() / (targets >= 0).sum(), logits.amax(-1).mean()


def weights(layers: int, tied: bool) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    block = {"w_in": (layers, MODEL, HIDDEN), "w_out": (layers, HIDDEN, MODEL)}
    shapes = {"embed": (VOCAB, MODEL), **block, "norm": (MODEL,)} | ({} if tied else {"head": (VOCAB, MODEL)})
    return {k: torch.randn(s, generator=g, dtype=torch.float64) * 0.5 + (k == "norm") for k, s in shapes.items()}


def model(p: dict[str, Tensor], v: int) -> dict[str, Any]:
    """The parameters as the pipeline has them."""
    blocks = {k: p[k] if v == 1 else p[k].unflatten(0, (v, -1)) for k in BLOCK}
    return {k: x for k, x in p.items() if k not in BLOCK} | {"blocks": blocks}


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    """Targets of the first row are all without weight, so micro-batches and ranks weigh unequally, some nothing."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, SEQ), generator=g)
    targets = torch.randint(-2, VOCAB, (rows, SEQ), generator=g)
    targets[0] = -1
    return {"tokens": tokens, "targets": targets}


def made(name: str, microbatches: int) -> Any:
    """A schedule by its name, with two stages on a rank where it has several."""
    return schedules.interleaved(microbatches, 2) if name == "interleaved" else getattr(schedules, name)(microbatches)


NAMES = {
    "gpipe": 1,
    "one_f_one_b": 1,
    "interleaved": 2,
    "zero_bubble": 1,
    "zbv": 2,
    "dualpipe_v": 2,
}  # stages on a rank


def error(
    schedule: Any,
    v: int = 1,
    layers: int = 4,
    rows: int = 8,
    zero: int = 0,
    tied: bool = True,
    jit: bool = True,
    accumulate: int | None = None,
    clip: float | None = None,
    simulate: bool = True,
    cache: str | None = None,
    layout: Any = None,
    loss: Any = None,
    steps: int = 2,
    **axes: int,
) -> float:
    """How far loss, metric, norm and parameters are from one process after some steps, and the loss of `evaluate`.

    `loss`: the pipeline, where several cases share what it has traced.
    """
    p = weights(layers, tied)
    layout = layout or sl.zero(specs(tied, v), "dp", zero)
    evaluated = simulate and loss is None
    loss = loss or sl.pipeline(first, stage, last, schedule)
    step = sl.step(loss, sl.optim.sgd(0.1), layout=layout, accumulate=accumulate, clip=clip)
    step = sl.jit(step, donate_argnums=0, cache=cache) if jit else step
    leaves = {k: x.clone().requires_grad_() for k, x in p.items()}
    worst = 0.0
    with sl.make_mesh({"dp": 1, "tp": 1} | axes, simulate=simulate):
        state = step.init(sl.shard(model(p, v), specs(tied, v)))
        for i in range(steps):
            mb = batch(rows, i)
            state, metrics = step(state, sl.shard(mb, "batch/dp seq"))
            value, logit = plain(leaves, mb)
            grads = torch.autograd.grad(value, list(leaves.values()))
            norm = torch.stack([g.norm() for g in grads]).norm()
            pairs = ((metrics["loss"], value), (metrics["grad_norm"], norm), (metrics["logit"], logit))
            worst = max(worst, *(abs(a - b).item() for a, b in pairs))
            with torch.no_grad():
                for x, g in zip(leaves.values(), grads, strict=True):
                    x -= 0.1 * g * (1.0 if clip is None else min(1.0, clip / norm.item()))
        got = sl.gather(state.params)
        for a, b in zip(tree.leaves(got), tree.leaves(model(leaves, v)), strict=True):
            worst = max(worst, (a - b).abs().max().item())
        if evaluated:
            mean, metrics = sl.evaluate(loss, layout=layout)(state.params, sl.shard(mb, "batch/dp seq"))
            pairs = zip((mean.value, metrics["logit"].value), plain(leaves, mb), strict=True)
            worst = max(worst, *(abs(a - b).item() for a, b in pairs))
    return worst
