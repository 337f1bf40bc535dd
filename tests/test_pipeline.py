"""Pipelines: on any schedule, mesh and layout a step does as one process, and what cannot run is told first."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import schedules, tree
from shardlib.errors import ShardError

VOCAB, MODEL, HIDDEN, SEQ = 7, 4, 6, 3


BLOCK = {"w_in": "model/dp hidden/tp", "w_out": "hidden/tp model/dp"}


def specs(tied: bool, v: int) -> dict[str, Any]:
    """The embedding lies split over pp; so does the head where that is it."""
    rest = {"embed": "vocab/pp model/dp", "norm": "model"} | ({} if tied else {"head": "vocab model/dp"})
    return rest | {"blocks": sl.stack(BLOCK, "layers/pp" if v == 1 else "v layers/pp")}


def first(p: Any, mb: Any) -> Any:
    return {"x": F.embedding(mb["tokens"], sl.gather(p["embed"], "dp")), "whole": mb["tokens"] > 0}


def dropped(p: Any, mb: Any, key: Tensor) -> Any:
    x = first(p, mb)
    return x | {"x": sl.dropout("batch/dp seq model", x["x"], key, 0.3)}


def stage(blocks: Any, x: Any, mb: Any) -> Any:
    def block(h: Tensor, w: Any) -> Tensor:
        w = sl.gather(w, "dp")
        a = torch.tanh(sl.einsum("batch/dp seq model, model hidden/tp -> batch/dp seq hidden/tp", h, w["w_in"]))
        y = sl.einsum("batch/dp seq hidden/tp, hidden/tp model -> batch/dp seq model +tp", a, w["w_out"])
        return h + sl.psum("batch/dp seq model +tp -> batch/dp seq model", y)

    h, _ = sl.scan(lambda h, w: (sl.remat(block)(h, w), None), x["x"], blocks)
    return x | {"x": h}


def last(p: Any, x: Any, mb: Any) -> Any:
    scale = sl.gather(p["norm"], "dp") * torch.where(x["whole"], 1.0, 0.5).double().unsqueeze(-1)
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
    **axes: int,
) -> float:
    """How far loss, metric, norm and parameters are from one process after two steps, and the loss of `evaluate`."""
    p = weights(layers, tied)
    layout = sl.zero(specs(tied, v), "dp", zero)
    loss = sl.pipeline(first, stage, last, schedule)
    step = sl.step(loss, sl.optim.sgd(0.1), layout=layout, accumulate=accumulate, clip=clip)
    step = sl.jit(step, donate_argnums=0, cache=cache) if jit else step
    leaves = {k: x.clone().requires_grad_() for k, x in p.items()}
    worst = 0.0
    with sl.make_mesh({"dp": 1, "tp": 1} | axes, simulate=simulate):
        state = step.init(sl.shard(model(p, v), specs(tied, v)))
        for i in range(2):
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
        if simulate:
            mean, metrics = sl.evaluate(loss, layout=layout)(state.params, sl.shard(mb, "batch/dp seq"))
            pairs = zip((mean.value, metrics["logit"].value), plain(leaves, mb), strict=True)
            worst = max(worst, *(abs(a - b).item() for a, b in pairs))
    return worst


# ---- values

CASES: dict[str, dict[str, Any]] = {
    "1f1b, uneven layers": dict(schedule=schedules.one_f_one_b(2), pp=3, dp=2, layers=7, zero=3, tied=False),
    "interleaved, odd": dict(schedule=schedules.interleaved(3, 2), v=2, pp=2, layers=4, rows=3, jit=False),
    "zero bubble, 3d": dict(schedule=schedules.zero_bubble(4), pp=2, dp=2, tp=2, zero=3, clip=0.1),
    "zbv, accumulated": dict(schedule=schedules.zbv(2), v=2, pp=2, dp=2, zero=2, accumulate=2),
    "dualpipe_v": dict(schedule=schedules.dualpipe_v(1), v=2, pp=3, layers=6, tied=False, zero=1, jit=False),
    "one rank": dict(schedule=schedules.zbv(4), v=2, pp=1, jit=False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_does_as_one_process(case: str) -> None:
    """C05 (the norm), C07 and C08 (every micro-batch once), weights that differ by micro-batch."""
    assert error(**CASES[case]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zbv", "dualpipe_v"])
def test_every_schedule_on_every_mesh(name: str, pp: int) -> None:
    v = 1 if name in ("gpipe", "one_f_one_b", "zero_bubble") else 2
    for m in (1, 2, 4, 7):
        made = schedules.interleaved(m, 2) if name == "interleaved" else getattr(schedules, name)(m)
        for zero in range(4):
            case: dict[str, Any] = dict(v=v, layers=2 * v * pp, rows=2 * m, zero=zero, tied=zero % 2 == 0)
            assert error(made, pp=pp, dp=2, **case) < 1e-12, (m, zero)


def two_steps() -> float:
    return error(schedules.gpipe(2), pp=2, simulate=False, jit=False)


def two_steps_of_one_trace(folder: str) -> float:
    return error(schedules.zbv(4), v=2, pp=2, dp=2, zero=3, simulate=False, cache=folder)


def test_processes_do_as_one(tmp_path: Path) -> None:
    """Line by line; and jitted, where the first rank traces for all, whatever their place in the pipeline."""
    assert max(on_ranks(2, two_steps)) < 1e-12
    assert max(on_ranks(4, two_steps_of_one_trace, str(tmp_path))) < 1e-12
    assert [f.suffix for f in tmp_path.iterdir()] == [".jsonl"]


def test_dropout_does_not_know_of_stages_or_micro_batches() -> None:
    """The mask of a row is that of the whole batch."""
    p, mb = weights(4, True), batch(8, 0)
    losses = []
    for pp, m, accumulate in ((1, 1, None), (2, 2, 2)):
        loss = sl.pipeline(dropped, stage, last, schedules.gpipe(m))
        step = sl.step(loss, sl.optim.sgd(0.1), accumulate=accumulate, layout=sl.zero(specs(True, 1), "dp", 0))
        with sl.make_mesh(dp=1, tp=1, pp=pp, simulate=True):
            state = step.init(sl.shard(model(p, 1), specs(True, 1)), key=sl.random.key(3))
            _, metrics = step(state, sl.shard(mb, "batch/dp seq"))
            losses.append(metrics["loss"].item())
    assert losses == pytest.approx([losses[0]] * 2, abs=1e-12) and abs(losses[0] - plain(p, mb)[0].item()) > 1e-3


def test_value_and_grad_by_itself_gives_whole_gradients() -> None:
    loss = sl.pipeline(first, stage, last, schedules.zero_bubble(2))
    p, mb = weights(4, True), batch(4, 0)
    whole = specs(True, 1) | {"embed": "vocab model"}
    with sl.make_mesh(dp=1, tp=1, pp=2, simulate=True):
        run = sl.shard_map(lambda p, b: sl.value_and_grad(loss)(p, b)[1], in_specs=None, out_specs=None)
        grads = sl.gather(run(sl.shard(model(p, 1), whole), sl.shard(mb, "batch/dp seq")))
    leaves = {k: x.requires_grad_() for k, x in p.items()}
    wanted = dict(zip(leaves, torch.autograd.grad(plain(leaves, mb)[0], list(leaves.values())), strict=True))
    for a, b in zip(tree.leaves(grads), tree.leaves(model(wanted, 1)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# ---- what a program is


def test_a_program_calls_each_function_once_traced() -> None:
    """Stages share graphs; what is tied is gathered and summed over pp once; weights go to no wire between stages."""
    loss = sl.pipeline(first, stage, last, schedules.one_f_one_b(4))
    step = sl.jit(sl.step(loss, sl.optim.sgd(0.1), layout=sl.zero(specs(True, 1), "dp", 0)))
    with sl.make_mesh(dp=1, tp=1, pp=2, simulate=True):
        state = step.init(sl.shard(model(weights(4, True), 1), specs(True, 1)))
        program = step.lower(state, sl.shard(batch(8, 0), "batch/dp seq"))
        with pytest.raises(sl.SpecError, match=r"testing\.memory: ranks of the pipeline \w+ run different graphs"):
            sl.testing.memory(step, state, sl.shard(batch(8, 0), "batch/dp seq"))
    graphs = {name for name in program.program if not name.startswith("layer")}
    functions = {f"{f}{way}" for f in ("first", "stage", "last") for way in ("", "_backward")}
    assert graphs == {"step", "pipeline", "weights"} | functions
    sent = program.collectives()
    assert [(c.op, c.axis) for c in sent if c.graph == "pipeline"] == [("send", "pp")] * 8  # x and whole, of 4
    tied = [c for c in sent if "embed" in c.name and len(c.shape) == 2]
    assert [(c.op, c.axis) for c in tied] == [("all_gather", "pp"), ("psum_scatter", "pp")]
    assert "isend(" in program.as_text() and program.memory().total > 0


def test_weights_are_gathered_as_often_as_the_layout_says() -> None:
    """ZeRO-3: by stages for every micro-batch, or once before the first."""
    whole, cut = (sl.zero(specs(False, 1), "dp", stage) for stage in (0, 3))
    sent, norms = [], []
    for layout in (cut, replace(cut, compute=whole.compute)):
        step = sl.jit(
            sl.step(sl.pipeline(first, stage, last, schedules.one_f_one_b(2)), sl.optim.sgd(0.1), layout=layout)
        )
        with sl.make_mesh(dp=2, tp=1, pp=2, simulate=True):
            state = step.init(sl.shard(model(weights(2, False), 1), specs(False, 1)))
            mb = sl.shard(batch(4, 0), "batch/dp seq")
            found = [c for c in step.lower(state, mb).collectives() if (c.op, c.axis) == ("all_gather", "dp")]
            sent.append({c.graph for c in found})
            norms.append(step(state, mb)[1]["grad_norm"].item())
    assert "step" not in sent[0] and {"first", "stage"} <= sent[0] and sent[1] == {"step"}
    assert norms[0] == pytest.approx(norms[1], abs=1e-12)


# ---- errors


def over_pp(blocks: Any, x: Any, mb: Any) -> Any:
    return sl.psum(x, "pp")


def by_stages(p: Any, x: Any, mb: Any) -> Any:
    return sl.Mean.of("batch/dp seq model", x["x"], weight=x["x"].abs())


def with_extra(p: Any, x: Any, mb: Any) -> Any:
    return last(p, x, mb)[0], sl.Aux(extra=torch.zeros(()))


GPIPE = schedules.gpipe(2)


@pytest.mark.parametrize(
    ("functions", "schedule", "options", "said"),
    [
        ((first, over_pp, last), GPIPE, {}, "`pp`: inside a function of the pipeline over `pp` nothing runs over that"),
        ((first, stage, last), GPIPE, {"layers": 1}, r"has 1 layers, which are \[1, 0\] on the 2 ranks of `pp`: every"),
        (
            (first, stage, last),
            schedules.zbv(2),
            {},
            r'2 on each of 2 ranks: stack .*\("v layers/pp"',
        ),
        ((first, stage, last), GPIPE, {"v": 2}, r'1 on each of 2 ranks: stack blocks by sl.stack\("layers/pp"\)'),
        ((first, stage, last), GPIPE(3), {}, "the schedule is for 3 ranks, `pp` has 2"),
        (
            (first, stage, last),
            schedules.gpipe(3),
            {},
            "has 3 micro-batches, `targets` of the batch has 4",
        ),
        ((first, stage, by_stages), GPIPE, {}, "the weight of the loss depends on what the stages computed"),
        ((first, stage, with_extra), GPIPE, {}, "the last function returns `extra`"),
        ((lambda p, mb: 3, stage, last), GPIPE, {}, "returns is of type int; stages hand on trees of tensors"),
    ],
)
def test_what_cannot_run_is_told_before_it_does(
    functions: tuple[Any, Any, Any], schedule: Any, options: Any, said: str
) -> None:
    v, layers = options.get("v", 1), options.get("layers", 4)
    step = sl.step(sl.pipeline(*functions, schedule), sl.optim.sgd(0.1))
    with sl.make_mesh(dp=1, tp=1, pp=2, simulate=True):
        state = step.init(sl.shard(model(weights(layers, True), v), specs(True, v)))
        with pytest.raises(ShardError, match=said):
            step(state, sl.shard(batch(4, 0), "batch/dp seq"))


def test_what_is_no_pipeline() -> None:
    with pytest.raises(ShardError, match="takes three functions and a schedule; found 'gpipe'"):
        sl.pipeline(first, stage, last, "gpipe")  # type: ignore[arg-type]
    step = sl.step(sl.pipeline(first, stage, last, GPIPE), sl.optim.sgd(0.1))
    flat = {"w": "model hidden"}
    with sl.make_mesh(dp=1, tp=1, pp=2, simulate=True):
        state = step.init(sl.shard({"w": torch.ones(4, 6)}, flat))
        with pytest.raises(ShardError, match="no parameter is stacked along `pp`, the axis of the"):
            step(state, sl.shard(batch(4, 0), "batch/dp seq"))
        split = sl.shard(batch(4, 0), "batch/pp seq")
        with pytest.raises(ShardError, match=r"of the batch is .* varying over pp .*every rank of `pp`"):
            step(step.init(sl.shard(model(weights(4, True), 1), specs(True, 1))), split)
    with sl.make_mesh(dp=2, simulate=True), pytest.raises(ShardError, match="runs over `pp`, which is no axis"):
        step(step.init(sl.shard({"w": torch.ones(4, 6)}, flat)), sl.shard(batch(4, 0), "batch/dp seq"))
