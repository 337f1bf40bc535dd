"""Weights gathered and gradients reduced by actions of a schedule, as the layout says."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from piped import batch, error, first, last, model, specs, stage, weights

import shardlib as sl
from shardlib import schedules
from shardlib.graph.memory import alive
from shardlib.pipeline.schedule import Schedule

SPECS = specs(False, 1)
CUT, WHOLE = sl.zero(SPECS, "dp", 3), sl.zero(SPECS, "dp", 0)


def gathering(every: bool, m: int = 4) -> Any:
    """1F1B whose weights are gathered before the first action of a stage, or before every forward and backward."""

    def on(p: int) -> Schedule:
        lists = []
        for rank, actions in enumerate(schedules.one_f_one_b(m)(p).lists):
            each = [[f"G{a.kind}{a.stage}.{a.microbatch}", a] if a.kind in "FB" else [a] for a in actions]
            lists.append([a for pair in each for a in pair] if every else [f"GF{rank}.0", *actions])
        return Schedule(lists, "gathering")

    return on


def lowered(layout: Any, schedule: Any, **options: Any) -> Any:
    loss = sl.pipeline(first, stage, last, schedule)
    step = sl.jit(sl.step(loss, sl.optim.sgd(0.1), layout=layout, **options), donate_argnums=0)
    with sl.make_mesh(dp=2, tp=1, pp=2, simulate=True):
        state = step.init(sl.shard(model(weights(4, False), 1), SPECS))
        return step.lower(state, sl.shard(batch(8, 0), "batch/dp seq"))


def sent(program: Any, op: str) -> Counter[str]:
    """The bytes of a rank of the first stage over dp, by graph."""
    out = Counter[str]()
    for c in program.collectives():
        if (c.op, c.axis) == (op, "dp"):
            out[c.graph] += c.times * c.bytes
    return out


BLOCKS = 2 * 2 * 4 * 6 * 8  # bytes of the two layers of a stage
EMBED = 7 * 4 * 8


@pytest.mark.parametrize(("reduce", "wanted"), [("microbatch", {"reduce": 4 * (BLOCKS + EMBED) // 2}), ("step", {})])
def test_gradients_are_scattered_as_often_as_the_layout_says(reduce: str, wanted: dict[str, int]) -> None:
    """ZeRO-2: for every micro-batch half of the bytes of the stage's gradients goes to the other rank; or once."""
    program = lowered(sl.zero(SPECS, "dp", 2, reduce=reduce), schedules.one_f_one_b(4))
    found = sent(program, "psum_scatter")
    assert {k: n for k, n in found.items() if k != "step"} == wanted
    assert ("step" in found) == (reduce == "step")
    assert str(schedules.one_f_one_b(1)(1).reducing.lists[0][-1]) == "R0.0"


def test_gradients_that_are_scattered_stay_so() -> None:
    """Where the last forward begins, the sums of what came before are pieces: half of whole ones is not there."""

    def at_last_forward(reduce: str) -> int:
        module = lowered(sl.zero(SPECS, "dp", 2, reduce=reduce), schedules.one_f_one_b(4)).module
        points = [p for p in alive(module) if p.graph == "pipeline" and p.node.startswith("stage")]
        forwards = [p for p in points if "backward" not in p.node]
        return forwards[-1].total

    assert at_last_forward("step") - at_last_forward("microbatch") >= (BLOCKS + EMBED) // 2


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_weights_gathered_by_actions(every: bool, jit: bool) -> None:
    """Once, or for every action anew: what comes out is the same, on gradients that are cut or whole."""
    once = replace(CUT, compute=WHOLE.compute)
    for layout in (once, replace(once, grads=WHOLE.grads)):
        assert error(gathering(every), pp=2, dp=2, tied=False, layout=layout, jit=jit, steps=1) < 1e-12


@pytest.mark.parametrize("zero", [1, 2])
def test_weights_that_are_cut_between_steps_alone(zero: int) -> None:
    """Gathered before the first action, by `step` or by the schedule, and not after the update."""
    layout = sl.zero(SPECS, "dp", zero, gather="forward")
    for schedule, graph in ((schedules.zero_bubble(4), "step"), (gathering(False), "stage_gather")):
        assert error(schedule, pp=2, dp=2, tied=False, layout=layout) < 1e-12
        assert sent(lowered(layout, schedule), "all_gather")[graph] >= BLOCKS // 2


def test_weights_are_gathered_as_often_as_actions_say() -> None:
    once = replace(CUT, compute=WHOLE.compute)
    assert sent(lowered(once, gathering(False)), "all_gather")["stage_gather"] == BLOCKS // 2
    assert sent(lowered(once, gathering(True)), "all_gather")["stage_gather"] == 8 * BLOCKS // 2
    assert sent(lowered(once, schedules.one_f_one_b(4)), "all_gather").keys() == {"step"}


def test_actions_that_the_layout_has_no_use_for_do_nothing() -> None:
    assert error(gathering(True, 2), pp=2, dp=2, zero=0, rows=4, steps=1) < 1e-12
    table = schedules.one_f_one_b(2)(2).reducing
    assert error(table, pp=2, dp=2, zero=1, rows=4, steps=1) < 1e-12


@pytest.mark.parametrize(("zero", "graph"), [(2, "reduce"), (3, "layer_backward")])
def test_gradients_are_summed_over_ranks_in_the_dtype_that_is_asked(zero: int, graph: str) -> None:
    """By the schedule, and inside the functions that gather."""
    layout = sl.zero(SPECS, "dp", zero)
    program = lowered(layout, schedules.one_f_one_b(4), precision=sl.precision("f64", "f64", "bf16"))
    found = [c for c in program.collectives() if (c.op, c.axis) == ("psum_scatter", "dp") and c.graph == graph]
    assert found and {c.dtype for c in found} == {torch.bfloat16}
