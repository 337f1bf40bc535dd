"""What ranks of a pipeline hold between actions, counted from storages while it runs: what its schedule says."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from piped import NAMES, batch, made, model, specs, weights
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import schedules
from shardlib.graph.memory import Point, alive
from shardlib.pipeline.actions import Action
from shardlib.pipeline.schedule import Schedule

SPECS = {1: specs(False, 1), 2: specs(False, 2)}  # by the stages of a rank


def first(p: Any, mb: Any) -> Tensor:
    return F.embedding(mb["tokens"], sl.gather(p["embed"], "dp"))


def stage(blocks: Any, x: Tensor, mb: Any) -> Tensor:
    """Without `remat`: what a layer keeps is more than what it is handed."""

    def block(h: Tensor, w: Any) -> Tensor:
        w = sl.gather(w, "dp")
        a = torch.tanh(sl.einsum("batch/dp seq model, model hidden/tp -> batch/dp seq hidden/tp", h, w["w_in"]))
        y = sl.einsum("batch/dp seq hidden/tp, hidden/tp model -> batch/dp seq model +tp", a, w["w_out"])
        return h + sl.psum("batch/dp seq model +tp -> batch/dp seq model", y)

    return sl.scan(lambda h, w: (block(h, w), None), x, blocks)[0]


def last(p: Any, x: Tensor, mb: Any) -> sl.Mean:
    logits = sl.einsum(
        "batch/dp seq model, vocab model -> batch/dp seq vocab", x * p["norm"], sl.gather(p["head"], "dp")
    )
    return sl.token_loss("batch/dp seq vocab, batch/dp seq", logits, mb["targets"])


def prepared(schedule: Schedule) -> tuple[Any, Any, Any]:
    """A jitted step with its arguments on the current mesh, stages of two layers, micro-batches of two rows."""
    v = schedule.stages // schedule.ranks
    step = sl.jit(sl.step(sl.pipeline(first, stage, last, schedule), sl.optim.sgd(0.1)), donate_argnums=0)
    state = step.init(sl.shard(model(weights(2 * schedule.stages, False), v), SPECS[v]))
    return step, state, sl.shard(batch(2 * schedule.microbatches, 0), "batch/dp seq")


def held(schedule: Schedule) -> list[dict[Action, int]]:
    """By rank the bytes of activations after each action, from storages; the graphs say the same of every node."""
    out, said = [], list[Point]()
    with sl.make_mesh(dp=1, tp=1, pp=schedule.ranks, simulate=True):
        for rank, actions in enumerate(schedule.lists):
            step, state, mb = prepared(schedule)
            program = step.lower(state, mb)
            found, known = sl.testing.memory(step, state, mb, rank=rank), alive(program.running(), turn=rank)
            assert [(p.node, p.bytes["activations"]) for p in found] == [
                (p.node, p.bytes["activations"]) for p in known
            ]
            doing = {n.name: n.meta.get("doing") for n in program.program["pipeline"].turn(rank).graph.nodes}
            after = {doing[p.node]: p.bytes["activations"] for p in found if p.graph == "pipeline" and p.node in doing}
            out.append({a: after[a.words] for a in actions if a.words in after})
            said += known
        assert program.memory() == max(said, key=lambda p: p.total)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_alive_as_the_schedule_says(name: str) -> None:
    """Every action adds and frees what it does for one micro-batch alone; where backwards are whole, and stages alike,
    so many stages' at once as `live` says, and room for a message."""
    schedule = made(name, 4)(2)
    alone, whole = held(made(name, 1)(2)), held(schedule)
    for rank, live in enumerate(schedule.live()):
        added: dict[tuple[str, int], set[int]] = {}
        for a, n in [*changes(alone[rank]).items(), *changes(whole[rank]).items()]:
            added.setdefault((a.kind, a.stage), set()).add(n)
        assert all(len(n) == 1 for n in added.values()), added
        computing = {(a.kind, a.stage) for a in schedule.lists[rank] if a.kind in "FBIW"}
        assert computing and computing <= added.keys()
        if name in ("gpipe", "one_f_one_b"):
            one, peak = max(alone[rank].values()), max(whole[rank].values())
            assert live * one <= peak < live * one + one


def changes(after: dict[Action, int]) -> dict[Action, int]:
    """By how much each action changes what is alive."""
    return {a: n - before for (a, n), before in zip(after.items(), [0, *after.values()], strict=False)}


def test_processes_hold_what_is_said() -> None:
    def body() -> int:
        with sl.make_mesh(dp=1, tp=1, pp=2) as mesh:
            step, state, mb = prepared(schedules.zero_bubble(3)(2))
            program = step.lower(state, mb)
            found = sl.testing.memory(step, state, mb)
            assert found == alive(program.running(), turn=mesh.rank)
            return max(p.total for p in found)

    a, b = on_ranks(2, body)
    assert a != b
