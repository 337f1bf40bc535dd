"""The schedule of a step under a stated model, against numbers by hand and torch's own count of operations."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import shardlib as sl
from shardlib.graph.timeline import HARDWARE, flops

F64 = torch.float64
SLOW = sl.Hardware(flops=100.0, memory=1e9, link=100.0, latency=0.5)  # seconds are numbers to reckon with


def summed(x: Tensor, y: Tensor) -> Tensor:
    total = sl.psum(sl.pending(x, "dp"), "dp")
    return total + (y @ y).sum()


def lowered(f: Any, specs: Any, out: Any, *args: Tensor, passes: Any = sl.passes.default) -> Any:
    with sl.make_mesh(dp=2, simulate=True):
        arrays = [sl.shard(x, s) for x, s in zip(args, specs, strict=True)]
        return sl.jit(sl.shard_map(f, in_specs=specs, out_specs=out), passes=passes).lower(*arrays)


@pytest.mark.parametrize("n, exposed", [(5, 0.0), (2, 0.74 - 0.16)])
def test_by_hand(n: int, exposed: float):
    args = torch.ones(6, dtype=F64), torch.ones(n, 2 * n, dtype=F64)
    late, early = (lowered(summed, ("n/dp", "a b/dp"), "n/dp", *args, passes=p) for p in ([], sl.passes.default))
    wire, product = 0.5 + 3 * 8 / 100, 2 * n**3 / 100  # a rank sends 2 (n-1)/n of 24 bytes
    for program, waits in ((late, wire), (early, exposed)):
        found = program.timeline(SLOW)
        (sent,) = found.collectives
        assert (sent.op, sent.axis, sent.bytes, sent.times) == ("psum", "dp", 24, 1)
        assert found.exposed == sent.exposed == pytest.approx(waits, abs=1e-5)
        assert sent.end - sent.start == pytest.approx(wire) == pytest.approx(found.exposed + found.hidden)
        assert found.compute == pytest.approx(product, abs=1e-5)
        assert found.total == pytest.approx(product + waits, abs=1e-5)
        assert sent.line.startswith(__file__)
    assert late.collectives() == early.collectives(), "the list of collectives knows no model"


def test_the_wire_takes_one_at_a_time():
    def both(x: Tensor, y: Tensor) -> Any:
        return sl.psum(sl.pending(x, "dp"), "dp"), sl.psum(sl.pending(y, "dp"), "dp")

    found = lowered(both, ("n/dp", "n/dp"), ("n", "n"), torch.ones(6, dtype=F64), torch.ones(10)).timeline(SLOW)
    first, second = found.collectives
    assert second.start == pytest.approx(first.end) and second.end == pytest.approx(first.end + 0.5 + 20 / 100)
    assert found.exposed == pytest.approx(second.end, abs=1e-5), "nothing to hide behind"


def test_ppermute_comes_back_when_it_is_done():
    def turned(x: Tensor) -> Tensor:
        return sl.ppermute(x, "dp", shift=1) @ x.T

    found = lowered(turned, ("n/dp m",), "n/dp k", torch.ones(6, 5, dtype=F64)).timeline(SLOW)
    (sent,) = found.collectives
    assert sent.exposed == pytest.approx(0.5 + 3 * 5 * 8 / 100) == pytest.approx(sent.end - sent.start)
    assert found.total == pytest.approx(sent.exposed + 2 * 3 * 5 * 3 / 100, abs=1e-5)


def loss(params: Any, batch: Tensor) -> sl.Mean:
    w = sl.gather(params, "dp")
    return sl.Mean.of("batch/dp out", torch.tanh(batch @ w["a"]) @ w["b"])


def step_of(accumulate: int, **axes: int) -> Any:
    with sl.make_mesh(axes, simulate=True):
        step = sl.step(loss, sl.optim.sgd(0.1), accumulate=accumulate)
        params = {
            "a": sl.shard(torch.ones(6, 10), "model/dp hidden"),
            "b": sl.shard(torch.ones(10, 2), "hidden/dp out"),
        }
        return sl.jit(step).lower(step.init(params), sl.shard(torch.ones(12, 6), "batch/dp model"))


def test_called_graphs_count_at_each_call(tmp_path):
    program = step_of(3, dp=2)
    found = program.timeline("cpu")
    assert program.collectives("cpu") == found.collectives
    assert len(found.collectives) == sum(c.times for c in program.collectives())
    assert sum(c.bytes for c in found.collectives) == sum(c.bytes * c.times for c in program.collectives())
    found.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"X", "M"} and len(spans) == len(found.spans)
    for row in (0, 1):
        ends = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == row]
        assert all(start >= end - 1e-6 for (_, end), (start, _) in pairwise(ends)), "one at a time"
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(found.total * 1e6)
    gathers = [e["args"] for e in spans if e["name"] == "all_gather"]
    assert len(gathers) >= 3 and all(g["axis"] == "dp" and g["graph"] == "microbatch" for g in gathers)
    assert "params.a" in gathers[0]["leaf"] and gathers[0]["part"] == "forward" and "sl.gather" in gathers[0]["line"]
    said = str(found)
    assert said.startswith(f"{found.total * 1e3:.3g} ms a step: compute") and "waits for" in said and ".py:" in said


def test_operations_are_those_that_torch_counts():
    program = step_of(1, dp=1)
    a, b, x = (torch.ones(n, m, requires_grad=n != 12) for n, m in ((6, 10), (10, 2), (12, 6)))
    with FlopCounterMode(display=False) as counter:
        (torch.tanh(x @ a) @ b).sum().backward()
    assert sum(flops(n) for n in program.module.graph.nodes) == counter.get_total_flops() == 2 * 12 * 10 * (6 + 6 + 6)


def test_attention_counts_on_the_cpu_too():
    def attend(q: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    with sl.make_mesh(dp=1, simulate=True):
        program = sl.jit(sl.shard_map(attend, in_specs=None, out_specs="...")).lower(torch.ones(2, 3, 5, 8))
    assert sum(flops(n) for n in program.module.graph.nodes) == 2 * (2 * 2 * 3 * 5 * 5 * 8)


def test_faster_machines_are_faster():
    program = step_of(2, dp=2)
    times = {name: program.timeline(name).total for name in HARDWARE}
    assert times["b200"] <= times["h200"] <= times["h100"] <= times["a100"] < times["cpu"]


def test_errors():
    program = step_of(1, dp=1)
    with pytest.raises(sl.SpecError, match=r"unknown hardware `h10` \(did you mean `h100`\?\); there are `b200`"):
        program.timeline("h10")
    with pytest.raises(sl.SpecError, match="Hardware: `flops` and `latency` of Hardware"):
        sl.Hardware(flops=0, memory=1e9, link=1e9, latency=-1)
