"""What a traced program keeps alive, and the table of benchmarks/zero_memory.py where it is quick to make."""

import pytest
import torch

import shardlib as sl
from benchmarks.zero_memory import SHAPES, formula, points
from shardlib.graph.memory import alive

F64 = torch.float64


def test_bytes_by_hand():
    state = {"params": {"w": torch.zeros(3, 3, dtype=F64)}, "opt": torch.zeros(5, dtype=F64)}  # 72 and 40 bytes
    x = torch.zeros(4, 4, dtype=F64)  # 128 bytes

    def f(state, x):
        a = x * 2
        view = a.t()  # keeps `a` alive
        y = view @ (x + 1)
        return {"params": {"w": state["params"]["w"] + 1}, "opt": state["opt"]}, y

    with sl.make_mesh(dp=1, simulate=True):
        module = sl.jit(f).lower(state, x).module
    names = ["mul", "t", "add", "mm", "add_1", "output"]
    for donated, weights in (((), (72, 144, 144)), ((0,), (72, 144, 72))):
        found = alive(module, donated)
        assert [p.node for p in found] == names and {p.bytes["optimizer"] for p in found} == {40}
        assert [p.bytes["other"] for p in found] == [256, 256, 384, 512, 256, 256]
        assert [p.bytes["parameters"] for p in found[3:]] == list(weights)
        assert found[3].total == 512 + 72 + 40 and found[3].state == 112


def test_a_called_graph_counts_within_its_caller():
    def loss(w, batch):
        return sl.Mean.of("batch/dp n", torch.tanh(batch["x"] @ sl.gather(w["w"], "dp")))

    with sl.make_mesh(dp=2, simulate=True):
        train = sl.step(loss, sl.optim.sgd(0.1), layout=sl.zero({"w": "m/dp n"}, stage=2), accumulate=3)
        w = sl.shard({"w": torch.zeros(6, 5, dtype=F64)}, "m/dp n")
        batch = sl.shard({"x": torch.zeros(12, 6, dtype=F64)}, "batch/dp m")
        found = alive(sl.jit(train).lower(train.init(w), batch).module, donated=(0,))
    inner = [p for p in found if p.graph == "microbatch"]
    assert len(inner) == 3 * len({p.node for p in inner})  # at each of three calls
    whole, cut = 6 * 5 * 8, 3 * 5 * 8
    assert {p.bytes["parameters"] for p in inner} == {whole}
    assert max(p.bytes["gradients"] for p in found) == 2 * cut  # new sums beside the old
    assert min(p.bytes["gradients"] for p in inner) == cut


def test_gathered_and_reduced():
    def loss(w, batch):
        return sl.Mean.of("batch/dp n", torch.tanh(batch["x"] @ sl.gather(w["w"], "dp")))

    def most(stage: int) -> dict[str, int]:
        train = sl.step(loss, sl.optim.sgd(0.1), layout=sl.zero({"w": "m/dp n"}, stage=stage))
        found = alive(sl.jit(train).lower(train.init(w), batch).module, donated=(0,))
        return {k: max(p.bytes[k] for p in found) for k in ("parameters", "copies", "gradients")}

    with sl.make_mesh(dp=2, simulate=True):
        w = sl.shard({"w": torch.zeros(6, 5, dtype=F64)}, "m/dp n")
        batch = sl.shard({"x": torch.zeros(12, 6, dtype=F64)}, "batch/dp m")
        whole, cut = 6 * 5 * 8, 3 * 5 * 8
        assert most(1) == dict(parameters=whole, copies=cut, gradients=whole + cut)  # while it is scattered
        assert most(3) == dict(parameters=2 * cut, copies=whole, gradients=cut)  # the new beside the old


@pytest.mark.parametrize("stage, count", [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_state_per_rank_is_that_of_the_paper(stage: int, count: int):
    found = points("7.5B", 4, stage, count)
    state, wanted = max(p.state for p in found), formula("7.5B", 4, stage, count)
    assert abs(state / wanted - 1) < 0.01
    assert formula("7.5B", 64, stage) == SHAPES["7.5B"][0] * {1: 4 + 12 / 64, 2: 2 + 14 / 64, 3: 16 / 64}[stage]
    if stage == 2 and count == 1:  # a gradient is scattered as soon as it is there: never are all of them whole
        assert max(p.total for p in found) < wanted + 0.25 * 2 * SHAPES["7.5B"][0]
