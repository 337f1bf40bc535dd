"""Pipelines on real ranks: values there, compiled or not, and what is said when a rank fails in the middle."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from piped import batch, error, first, last, model, specs, weights
from ranks import on_ranks
from torch import Tensor
from torch.fx import GraphModule

import shardlib as sl
from shardlib import schedules, tree, watch
from shardlib.errors import amount
from shardlib.graph.memory import Point, alive


def two_steps() -> float:
    return error(schedules.gpipe(2), pp=2, simulate=False, jit=False)


def two_steps_of_one_trace(folder: str) -> float:
    return error(schedules.zbv(4), v=2, pp=2, dp=2, zero=2, simulate=False, cache=folder)


def stages_both_ways() -> float:
    return error(schedules.dualpipe_v(3), v=2, pp=2, rows=6, simulate=False)


def test_processes_do_as_one(tmp_path: Path) -> None:
    """Line by line; and jitted, where the first rank traces for all, whatever their place in the pipeline."""
    assert max(on_ranks(2, two_steps)) < 1e-12 and max(on_ranks(2, stages_both_ways)) < 1e-12
    assert max(on_ranks(4, two_steps_of_one_trace, str(tmp_path))) < 1e-12
    assert [f.suffix for f in tmp_path.iterdir()] == [".jsonl"]


def a_scan(options: dict[str, Any] | None) -> list[float]:
    """Loss and gradient of small layers in a loop, two on each rank: few things to compile."""

    def each(blocks: Any, x: Tensor, mb: Tensor) -> Tensor:
        return sl.scan(lambda x, w: (x + torch.tanh(x @ w["w"] + w["b"]), None), x, blocks)[0]

    def end(p: Any, x: Tensor, mb: Tensor) -> sl.Mean:
        return sl.Mean.of("batch/dp model", x * x)

    loss = sl.pipeline(lambda p, mb: mb, each, end, schedules.one_f_one_b(2))
    f = sl.shard_map(lambda p, mb: sl.value_and_grad(loss)(p, mb), in_specs=None, out_specs=None)
    f = f if options is None else sl.jit(f, **options)
    w, b, x = (
        torch.linspace(-1, 1, n, dtype=torch.float64).view(4, *s) for n, s in ((100, (5, 5)), (20, [5]), (20, [5]))
    )
    with sl.make_mesh(dp=1, pp=2, simulate=options is None):
        value, grads = f(
            sl.shard({"w": w, "b": b}, sl.stack({"w": "model out", "b": "model"}, "layers/pp")),
            sl.shard(x, "batch/dp model"),
        )
        return [sl.gather(value).item(), *(x for g in tree.leaves(sl.gather(grads)) for x in g.flatten().tolist())]


@pytest.mark.parametrize("options", [dict(backend="regional"), dict(passes=[])], ids=["regional", "no passes"])
def test_a_scan_inside_a_stage(options: dict[str, Any]) -> None:
    """Compiled in regions, and as it was traced."""
    wanted = a_scan(None)
    for found in on_ranks(2, a_scan, options, seconds=120):
        assert found == pytest.approx(wanted, abs=1e-12)


# ---- failures


def plainly(blocks: Any, x: Any, mb: Any) -> Any:
    h = torch.tanh(x["x"] @ blocks["w_in"][0]) @ blocks["w_out"][0]
    return x | {"x": sl.psum("batch/dp seq model +tp -> batch/dp seq model", h)}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "TICK", 0.05)
    monkeypatch.setattr(watch, "PATIENCE", 0.3)
    monkeypatch.setattr(watch, "ANSWER", 1.0)


def looked_up(p: Any, x: Any, mb: Any) -> Any:
    """Raises where a token is none of the four numbers of `x`."""
    return sl.Mean.of("batch/dp seq", x["x"].gather(-1, mb["targets"].unsqueeze(-1)).squeeze(-1))


def with_a_token(token: int, simulate: bool, jit: bool) -> None:
    """A step that is well, then one whose second micro-batch holds this token, which ends in time."""
    step = sl.step(sl.pipeline(first, plainly, looked_up, schedules.gpipe(2)), sl.optim.sgd(0.1))
    step = sl.jit(step) if jit else step
    with sl.make_mesh(dp=1, tp=1, pp=2, simulate=simulate, timeout=20):
        state = step.init(sl.shard(model(weights(2, True), 1), specs(True, 1)))
        for tokens in (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[0, 1, 2], [0, token, 2]])):
            began = time.monotonic()
            try:
                state, _ = step(state, sl.shard({"tokens": tokens, "targets": tokens}, "batch/dp seq"))
            finally:
                assert tokens.max() == 0 or time.monotonic() - began < 20


WHERE = "stage 1, micro-batch 1, forward (F1.1): RuntimeError: index 5 is out of bounds"


@pytest.mark.parametrize("jit", [False, True])
def test_a_stage_that_raises_ends_all_ranks_with_its_message(quick: None, jit: bool) -> None:
    def body() -> None:
        try:
            with_a_token(5, simulate=False, jit=jit)
        except sl.RankError as e:
            raise RuntimeError(f"<{e}>") from None

    with pytest.raises(AssertionError) as failed:
        on_ranks(2, body)
    said = str(failed.value)
    assert f"RuntimeError: <{WHERE}" in said and f"RuntimeError: <rank 1 failed: RankError: {WHERE}" in said


def test_a_rank_killed_in_the_middle_is_named(quick: None, tmp_path: Path) -> None:
    """Rank 1 in the second forward of its stage."""
    noted = tmp_path / "time"

    def body() -> None:
        mesh, runs = sl.make_mesh(dp=1, tp=1, pp=2, timeout=20), list[int]()

        def stop() -> None:
            runs.append(1)
            if mesh.rank == 1 and len(runs) == 2:
                noted.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        def stopping(module: GraphModule) -> GraphModule:
            for node in [n for n in module.graph.nodes if n.target is torch.ops.aten.tanh.default]:
                with module.graph.inserting_before(node):
                    module.graph.call_function(stop, ())
            return module

        loss = sl.pipeline(first, plainly, last, schedules.one_f_one_b(3))
        step = sl.jit(sl.step(loss, sl.optim.sgd(0.1)), passes=[stopping])
        try:
            with mesh:
                state = step.init(sl.shard(model(weights(2, True), 1), specs(True, 1)))
                step(state, sl.shard(batch(6, 0), "batch/dp seq"))
        except sl.RankError as e:
            assert time.time() - float(noted.read_text()) < 20
            raise RuntimeError(f"<rank {mesh.rank}>{e}") from None

    with pytest.raises(AssertionError, match="rank 1 of 2 died with exit code -9") as failed:
        on_ranks(2, body, seconds=60)
    said = "rank 1 did not answer: killed, frozen, or cut off with the host; rank 0 waited for "
    assert f"RuntimeError: <rank 0>{said}" in str(failed.value)


def test_a_simulated_rank_that_raises_names_its_action() -> None:
    with_a_token(3, simulate=True, jit=False)
    with pytest.raises(sl.RankError, match=re.escape(WHERE)) as e:
        with_a_token(5, simulate=True, jit=False)
    assert any("rank 1" in x for x in [str(e.value), *getattr(e.value, "__notes__", [])])


def greedy(module: GraphModule) -> GraphModule:
    for node in [n for n in module.graph.nodes if n.target is torch.ops.aten.tanh.default]:
        node.target = exhausted
    return module


def exhausted(x: Tensor) -> Tensor:
    if x.abs().max() > 100:
        raise torch.OutOfMemoryError("not enough memory")
    return x


def running_out(simulate: bool) -> tuple[str, list[Point]]:
    """What is told where memory runs out in the stage of the second of two ranks, and what each has alive there."""
    step = sl.jit(sl.step(sl.pipeline(first, plainly, last, schedules.gpipe(2)), sl.optim.sgd(0.1)), passes=[greedy])
    params = weights(2, True)
    params["w_in"][1] *= 1e6
    with pytest.raises(sl.RankError) as e, sl.make_mesh(dp=1, tp=1, pp=2, simulate=simulate, timeout=20):
        state, mb = step.init(sl.shard(model(params, 1), specs(True, 1))), sl.shard(batch(4, 0), "batch/dp seq")
        points = [alive(step.lower(state, mb).module, turn=turn) for turn in range(2)]
        step(state, mb)
    said = "\n".join([str(e.value), *getattr(e.value, "__notes__", [])])
    return said, [next(p for p in each if (p.graph, p.node) == ("stage", "tanh")) for each in points]


def test_memory_that_runs_out_in_a_stage_is_told_of_the_rank_that_failed(quick: None) -> None:
    """The table of what is alive at the node of the stage's graph, which both ranks call."""
    simulated, real = running_out(True), on_ranks(2, running_out, False)[1]
    assert "rank 1, node `pipeline.stage.tanh`" in simulated[0]
    assert "stage 1, micro-batch 0, forward (F1.0): OutOfMemoryError: not enough memory" in real[0]
    for said, (other, here) in (simulated, real):
        assert "  where it ran out: `tanh` of stage at " in said and "  at the peak:" in said
        assert amount(other.total) != amount(here.total) and f"\n  {'all':<18}{amount(here.total):<18}" in said
