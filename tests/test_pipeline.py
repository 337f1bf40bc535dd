"""Pipelines: on any schedule, mesh and layout a step does as one process, and what cannot run is told first."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from piped import NAMES, batch, error, first, last, made, model, plain, specs, stage, weights
from torch import Tensor

import shardlib as sl
from shardlib import schedules, tree
from shardlib.errors import ShardError
from shardlib.graph.nodes import op_name

# ---- values

CASES: dict[str, dict[str, Any]] = {
    "1f1b, uneven layers": dict(schedule=schedules.one_f_one_b(2), pp=3, dp=2, layers=7, zero=3, tied=False),
    "interleaved, odd": dict(schedule=schedules.interleaved(3, 2), v=2, pp=2, layers=4, rows=3),
    "zero bubble, 3d": dict(schedule=schedules.zero_bubble(4), pp=2, dp=2, tp=2, zero=3, clip=0.1),
    "zbv, accumulated": dict(schedule=schedules.zbv(2), v=2, pp=2, dp=2, zero=2, accumulate=2),
    "dualpipe_v": dict(schedule=schedules.dualpipe_v(1), v=2, pp=3, layers=6, tied=False, zero=1),
    "zbv, uneven layers": dict(schedule=schedules.zbv(4), v=2, pp=2, layers=6, jit=False),
    "one rank": dict(schedule=schedules.zbv(4), v=2, pp=1, jit=False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_does_as_one_process(case: str) -> None:
    """C05 (the norm), C07 and C08 (every micro-batch once), weights that differ by micro-batch."""
    assert error(**CASES[case]) < 1e-12


PP, MICROBATCHES = (1, 2, 3, 4), (1, 2, 4, 7)


def covering() -> Iterator[tuple[str, int, int, int, bool]]:
    """Schedule, ranks, micro-batches, ZeRO stage, tied or not, such that any two of them meet in all combinations: sums
    and multiples in the field of four elements."""
    times = (0, 2, 3, 1)
    for s, name in enumerate(NAMES):
        for p in range(4):
            yield name, PP[p], MICROBATCHES[p ^ s % 4], p ^ times[s % 4], (s + p // 2) % 2 == 0


def test_any_two_meet() -> None:
    for i, j in itertools.combinations(range(5), 2):
        values = [{case[k] for case in covering()} for k in (i, j)]
        assert {(case[i], case[j]) for case in covering()} == set(itertools.product(*values))


@pytest.mark.parametrize("pp", PP)
def test_schedules_meshes_micro_batches_and_stages(pp: int) -> None:
    for name, _, m, zero, tied in (case for case in covering() if case[1] == pp):
        v, loss = NAMES[name], sl.pipeline(first, stage, last, made(name, m))
        case: dict[str, Any] = dict(v=v, layers=v * pp, rows=2 * m, zero=zero, tied=tied, jit=False, steps=1)
        assert error(None, pp=pp, dp=2, loss=loss, **case) < 1e-12, (name, m, zero, tied)


TRACED: dict[int, Any] = {}  # by stages on a rank, the functions, which all schedules share


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pp", PP)
def test_all_of_them(pp: int, name: str) -> None:
    """Their product: gradients (as SGD applies them), loss, norm and state, stages of two layers. Nearly all of the
    time is that of tracing what each rank does, which differs."""
    v = NAMES[name]
    for m, tied in itertools.product(MICROBATCHES, (True, False)):
        loss = sl.pipeline(first, stage, last, made(name, m))
        loss.traced = TRACED.setdefault(v, loss.traced)
        case: dict[str, Any] = dict(v=v, layers=2 * v * pp, rows=2 * m, tied=tied, jit=False, steps=1, loss=loss)
        for zero in range(4):
            assert error(None, pp=pp, dp=2, zero=zero, **case) < 1e-12, (m, tied, zero)


def dropped(p: Any, mb: Any, key: Tensor) -> Any:
    x = first(p, mb)
    return x | {"x": sl.dropout("batch/dp seq model", x["x"], key, 0.3)}


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
    graphs = {name for name in program.program if not name.startswith("layer")}
    functions = {f"{f}{way}" for f in ("first", "stage", "last") for way in ("", "_backward", "_backward_anew")}
    assert graphs == {"step", "pipeline", "weights"} | functions
    sent = program.collectives()
    assert [(c.op, c.axis) for c in sent if c.graph == "pipeline"] == [("send", "pp")] * 8  # x and whole, of 4
    tied = [c for c in sent if "embed" in c.name and len(c.shape) == 2]
    assert [(c.op, c.axis) for c in tied] == [("all_gather", "pp"), ("psum_scatter", "pp")]
    assert "isend(" in program.as_text() and program.memory().total > 0


def test_what_is_recomputed_is_so_in_the_first_half_of_a_backward() -> None:
    """Of a function of a user's: `I` makes again what `remat` did not keep, `W` has matrix products alone, which are
    added up; the first are the sums themselves, which nothing clears before."""
    step = sl.jit(sl.step(sl.pipeline(first, stage, last, schedules.zero_bubble(2)), sl.optim.sgd(0.1)))
    with sl.make_mesh(dp=1, tp=1, pp=2, simulate=True):
        state = step.init(sl.shard(model(weights(2, True), 1), specs(True, 1)))
        program = step.lower(state, sl.shard(batch(4, 0), "batch/dp seq")).program
    halves = ("input", "weight", "weight_anew")
    ops = {half: [op_name(n) for n in program[f"stage_{half}"].graph.nodes] for half in halves}
    assert ops["input"].count("tanh") == 1 and ops["input"].count("mm") == 3
    assert "tanh" not in ops["weight"] and ops["weight"].count("addmm") == 2
    assert "addmm" not in ops["weight_anew"] and ops["weight_anew"].count("mm") == 2


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
        (
            (first, stage, last),
            GPIPE,
            {"layers": 1},
            "rank 1, step 2: F1.0 is of a stage without layers: .* has 1 layers, which are",
        ),
        (
            (first, stage, last),
            schedules.zbv(2),
            {},
            r'2 on each of 2 ranks: stack .*\("v layers/pp"',
        ),
        ((first, stage, last), GPIPE, {"v": 2}, r'1 on each of 2 ranks: stack blocks by sl.stack\("layers/pp"\)'),
        ((first, stage, last), GPIPE(3), {}, "the schedule is for 3 ranks, `pp` has 2"),
        ((first, stage, last), schedules.gpipe, {}, r"with the 2 ranks, gives gpipe\(microbatches=2\) and no Schedule"),
        (
            (first, stage, last),
            schedules.gpipe(3),
            {},
            "has 3 micro-batches, `targets` of the batch has 4",
        ),
        ((first, stage, by_stages), GPIPE, {}, "the weight of the loss depends on what the stages computed"),
        ((first, stage, with_extra), GPIPE, {}, "the state that the last function returns does not match"),
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
