"""profile: what ranks compute and wait for, and that the function still does what it does."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import tree

F64 = torch.float64
NAP = 0.1


def napping() -> Callable[[Tensor, Tensor], Tensor]:
    """An op that gives its first operand, late on ranks that come later; made in the process that runs it."""

    @torch.library.custom_op("shardlib_test::nap", mutates_args=())
    def nap(x: Tensor, index: Tensor) -> Tensor:
        time.sleep(NAP * index.item())
        return x.clone()

    nap.register_fake(lambda x, index: torch.empty_like(x))
    return nap


def loss(params: Any, batch: Tensor) -> sl.Mean:
    return sl.Mean.of("batch/dp n", torch.tanh(batch @ sl.gather(params["w"], "dp")))


def started(accumulate: int = 1) -> Any:
    step = sl.step(loss, sl.optim.adamw(0.1), accumulate=accumulate)
    w = {"w": sl.shard(torch.arange(30, dtype=F64).view(6, 5) / 30, "m/dp n")}
    return step, step.init(w), sl.shard(torch.arange(72, dtype=F64).view(12, 6) / 72, "batch/dp m")


@pytest.mark.parametrize("donate, axes", [((), dict(dp=1)), (0, dict(dp=2)), (0, dict(dp=3, tp=2))])
def test_the_steps_are_those_of_the_function(donate: Any, axes: Any, tmp_path: Path):
    with sl.make_mesh(axes, simulate=True) as mesh:
        step, state, batch = started(2)
        want = state
        for _ in range(3 if donate == 0 else 1):
            want, metrics = sl.jit(step)(want, batch)
        found = sl.profile(sl.jit(step, donate_argnums=donate), state, batch, steps=2, dir=tmp_path / "traces")
        for a, b in zip(*(tree.leaves(sl.gather(s)) for s in (found.result[0], want)), strict=True):
            assert torch.equal(a, b)
        assert metrics["loss"] == found.result[1]["loss"]
    assert [s.rank for s in found.ranks] == list(range(mesh.total))
    assert all(s.compute > 0 and s.other > 0 and (s.exposed > 0) == (mesh.total > 1) for s in found.ranks)
    assert found.file is not None and found.file == tmp_path / "traces" / "ranks.json"
    spans = [e for e in json.loads(found.file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == set(range(mesh.total))
    products = [e for e in spans if e["name"] == "mm"]
    assert len(products) == 2 * mesh.total * 2 * 2  # steps, ranks, micro-batches, forward and backward
    assert all(e["args"]["graph"] == "microbatch" and "batch @ sl.gather" in e["args"]["line"] for e in products)
    rows = str(found).splitlines()
    assert rows[0].split()[:5] == ["rank", "compute", "exposed", "other", "step"] and "mean of 2 steps" in rows[0]
    assert [int(row.split()[0]) for row in rows[1 : 1 + mesh.total]] == list(range(mesh.total))
    assert any("all_gather over dp of 0.params.w, test_profile.py:" in r for r in rows) == (mesh.shape["dp"] > 1)


def test_processes_wait_for_the_late_one(tmp_path: Path):
    def body() -> Any:
        nap = napping()

        def late(x: Tensor) -> Tensor:
            return sl.psum(sl.pending(nap(x, sl.axis_index("dp")).sum(), "dp"), "dp")

        with sl.make_mesh(dp=2) as mesh:
            f = sl.jit(sl.shard_map(late, in_specs=None, out_specs=""))
            found = sl.profile(f, sl.shard(torch.ones(4, dtype=F64), "n/dp"), steps=2, dir=tmp_path)
            assert found.result.local().item() == 4 and found.file == tmp_path / f"rank{mesh.rank}.json"
        return [(s.rank, s.compute, s.exposed, s.total) for s in found.ranks], found.waits, str(found)

    first, second = on_ranks(2, body)
    assert first == second, "all ranks know all"
    (zero, compute0, exposed0, _), (one, compute1, exposed1, total1) = first[0]
    assert (zero, one) == (0, 1) and total1 > NAP
    assert exposed0 > 0.8 * NAP > 3 * compute0 and compute1 > 0.8 * NAP > 3 * exposed1
    ((what, seconds),) = first[1].items()
    assert what.startswith("psum over dp of ") and seconds == pytest.approx((exposed0 + exposed1) / 2)
    for rank in range(2):
        events = json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        naps = [e for e in events if e["name"] == "nap"]
        assert len(naps) == 2 and all(e["pid"] == rank and (e["dur"] > 0.9e6 * NAP) == (rank == 1) for e in naps)


def test_processes_take_the_program_that_runs(tmp_path):
    def body() -> Any:
        with sl.make_mesh(dp=2):
            step, state, batch = started()
            found = sl.profile(sl.jit(step, donate_argnums=0), state, batch, dir=tmp_path, steps=1)
            again, state, _ = started()
            for _ in range(2):
                state, metrics = sl.jit(again)(state, batch)
        return [k.split(" over")[0] for k in found.waits], float(found.result[1]["loss"]), float(metrics["loss"])

    for rank, (waits, found, want) in enumerate(on_ranks(2, body)):
        assert "psum_scatter" in waits and found == want
        events = json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        assert any("posted_scatter" in e["args"].get("node", "") for e in events), "how gloo scatters"


def test_errors():
    with sl.make_mesh(dp=1, simulate=True):
        step, state, batch = started()
        with pytest.raises(sl.SpecError, match=r"profile takes what sl.jit returns; found <function"):
            sl.profile(step, state, batch)
        with pytest.raises(sl.SpecError, match=r"profile: loss donates arguments \(1,\), steps=3"):
            sl.profile(sl.jit(step, donate_argnums=1), state, batch)
        with pytest.raises(sl.SpecError, match="donates argument 0, so it must return the next one"):
            sl.profile(sl.jit(lambda s, b: step(s, b)[1], donate_argnums=0), state, batch)
