"""Pipelines on real ranks: values there, compiled or not, and what is said when a rank fails in the middle."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from piped import batch, error, first, last, model, specs, stage, weights
from ranks import on_ranks
from torch import Tensor
from torch.fx import GraphModule

import shardlib as sl
from shardlib import schedules, watch


def two_steps() -> float:
    return error(schedules.gpipe(2), pp=2, simulate=False, jit=False)


def two_steps_of_one_trace(folder: str) -> float:
    return error(schedules.zbv(4), v=2, pp=2, dp=2, zero=2, simulate=False, cache=folder)


def test_processes_do_as_one(tmp_path: Path) -> None:
    """Line by line; and jitted, where the first rank traces for all, whatever their place in the pipeline."""
    assert max(on_ranks(2, two_steps)) < 1e-12
    assert max(on_ranks(4, two_steps_of_one_trace, str(tmp_path))) < 1e-12
    assert [f.suffix for f in tmp_path.iterdir()] == [".jsonl"]


@pytest.mark.parametrize("options", [dict(backend="regional"), dict(passes=[])], ids=["regional", "no passes"])
def test_a_scan_inside_a_stage(options: dict[str, Any]) -> None:
    """Compiled in regions, and as it was traced: two layers in a loop on either rank."""

    def body() -> tuple[float, float]:
        step = sl.jit(sl.step(sl.pipeline(first, stage, last, schedules.one_f_one_b(2)), sl.optim.sgd(0.1)), **options)
        with sl.make_mesh(dp=1, tp=1, pp=2):
            state = step.init(sl.shard(model(weights(4, True), 1), specs(True, 1)))
            _, metrics = step(state, sl.shard(batch(4, 0), "batch/dp seq"))
            return metrics["loss"].item(), metrics["grad_norm"].item()

    with sl.make_mesh(dp=1, tp=1, pp=2, simulate=True):
        step = sl.step(sl.pipeline(first, stage, last, schedules.one_f_one_b(2)), sl.optim.sgd(0.1))
        state = step.init(sl.shard(model(weights(4, True), 1), specs(True, 1)))
        _, metrics = step(state, sl.shard(batch(4, 0), "batch/dp seq"))
    wanted = metrics["loss"].item(), metrics["grad_norm"].item()
    for found in on_ranks(2, body, seconds=120):
        assert found == pytest.approx(wanted, abs=1e-12)


# ---- failures


def plainly(blocks: Any, x: Any, mb: Any) -> Any:
    h = torch.tanh(x["x"] @ blocks["w_in"][0]) @ blocks["w_out"][0]
    return x | {"x": sl.psum("batch/dp seq model +tp -> batch/dp seq model", h)}


def told(at: Callable[[], None], noted: Path, timeout: float = 20) -> tuple[dict[int, str], str]:
    """What each of two ranks raises where rank 1 does `at()` in the second forward of its stage, and all that is said.
    `noted`: a file for the time at which it does."""

    def body() -> None:
        mesh, runs = sl.make_mesh(dp=1, tp=1, pp=2, timeout=timeout), list[int]()

        def stop() -> None:
            runs.append(1)
            if mesh.rank == 1 and len(runs) == 2:
                noted.write_text(str(time.time()))
                at()

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
            assert time.time() - float(noted.read_text()) < timeout
            raise RuntimeError(f"<rank {mesh.rank}>{e}<end>") from None

    with pytest.raises(AssertionError) as failed:
        on_ranks(2, body, seconds=60)
    said = str(failed.value)
    return {int(r): x for r, x in re.findall(r"RuntimeError: <rank (\d)>(.*?)<end>", said, re.DOTALL)}, said


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "TICK", 0.05)
    monkeypatch.setattr(watch, "PATIENCE", 0.3)
    monkeypatch.setattr(watch, "ANSWER", 1.0)


def test_a_stage_that_raises_ends_all_ranks_with_its_message(quick: None, tmp_path: Path) -> None:
    def raises() -> None:
        raise ValueError("bad row 17")

    said, _ = told(raises, tmp_path / "time")
    own = "stage 1, micro-batch 1, forward (F1.1): ValueError: bad row 17"
    assert said[1] == own and said[0].splitlines()[0] == f"rank 1 failed: RankError: {own}"


def test_a_rank_killed_in_the_middle_is_named(quick: None, tmp_path: Path) -> None:
    said, whole = told(lambda: os.kill(os.getpid(), signal.SIGKILL), tmp_path / "time")
    assert said.keys() == {0} and "rank 1 of 2 died with exit code -9" in whole
    assert said[0].startswith("rank 1 did not answer: killed, frozen, or cut off with the host; rank 0 waited for ")


def test_a_simulated_rank_that_raises_names_its_action() -> None:
    def bad(p: Any, x: Any, mb: Any) -> Any:
        return sl.Mean.of("batch/dp seq", x["x"].gather(-1, mb["targets"].unsqueeze(-1)).squeeze(-1))

    def run(tokens: Tensor) -> None:
        loss = sl.pipeline(first, plainly, bad, schedules.gpipe(2))
        step = sl.step(loss, sl.optim.sgd(0.1))
        with sl.make_mesh(dp=1, tp=1, pp=2, simulate=True):
            state = step.init(sl.shard(model(weights(2, True), 1), specs(True, 1)))
            step(state, sl.shard({"tokens": tokens, "targets": tokens}, "batch/dp seq"))

    run(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(sl.RankError, match=r"stage 1, micro-batch 1, forward \(F1.1\): RuntimeError: index 5") as e:
        run(torch.tensor([[0, 1, 2], [0, 5, 2]]))
    assert any("rank 1" in x for x in [str(e.value), *getattr(e.value, "__notes__", [])])


def test_memory_that_runs_out_in_a_stage_is_told_with_its_node() -> None:
    """The table of what is alive, at the node of the stage's graph."""

    def greedy(module: GraphModule) -> GraphModule:
        for node in [n for n in module.graph.nodes if n.target is torch.ops.aten.tanh.default]:
            node.target = exhausted
        return module

    def exhausted(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("not enough memory")

    def body() -> str:
        step = sl.jit(
            sl.step(sl.pipeline(first, plainly, last, schedules.gpipe(2)), sl.optim.sgd(0.1)), passes=[greedy]
        )
        with sl.make_mesh(dp=1, tp=1, pp=1):
            state = step.init(sl.shard(model(weights(1, True), 1), specs(True, 1)))
            with pytest.raises(sl.RankError, match=r"stage 0, micro-batch 0, forward \(F0.0\): OutOfMemoryError") as e:
                step(state, sl.shard(batch(2, 0), "batch/dp seq"))
        return "\n".join(e.value.__notes__)

    (said,) = on_ranks(1, body)
    assert "where it ran out: `tanh` of stage" in said and "at the peak:" in said
