"""What a traced program keeps alive, and the table of benchmarks/zero_memory.py where it is quick to make."""

import re
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.zero_memory import SHAPES, formula, points
from shardlib.graph.memory import alive, explained

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
        found = alive(sl.jit(train, donate_argnums=0).lower(train.init(w), batch).module, donated=(0,))
    inner = [p for p in found if p.graph == "microbatch"]
    assert len(inner) == 3 * len({p.node for p in inner})  # at each of three calls
    whole, cut = 6 * 5 * 8, 3 * 5 * 8
    assert {p.bytes["parameters"] for p in inner} == {whole}
    assert max(p.bytes["gradients"] for p in found) == cut  # sums are written into
    assert min(p.bytes["gradients"] for p in inner) == cut


def test_gathered_and_reduced():
    def loss(w, batch):
        return sl.Mean.of("batch/dp n", torch.tanh(batch["x"] @ sl.gather(w["w"], "dp")))

    def most(stage: int) -> dict[str, int]:
        train = sl.step(loss, sl.optim.sgd(0.1), layout=sl.zero({"w": "m/dp n"}, stage=stage))
        found = alive(sl.jit(train, donate_argnums=0).lower(train.init(w), batch).module, donated=(0,))
        return {k: max(p.bytes[k] for p in found) for k in ("parameters", "copies", "gradients")}

    with sl.make_mesh(dp=2, simulate=True):
        w = sl.shard({"w": torch.zeros(6, 5, dtype=F64)}, "m/dp n")
        batch = sl.shard({"x": torch.zeros(12, 6, dtype=F64)}, "batch/dp m")
        whole, cut = 6 * 5 * 8, 3 * 5 * 8
        assert most(1) == dict(parameters=whole, copies=cut, gradients=cut)  # once it is scattered
        assert most(3) == dict(parameters=cut, copies=whole, gradients=cut)  # written in place


@pytest.mark.parametrize("stage, count", [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
def test_state_per_rank_is_that_of_the_paper(stage: int, count: int):
    found = points("7.5B", 4, stage, count)
    state, wanted = max(p.state for p in found), formula("7.5B", 4, stage, count)
    assert abs(state / wanted - 1) < 0.01
    assert formula("7.5B", 64, stage) == SHAPES["7.5B"][0] * {1: 2 + 14 / 64, 2: 2 + 14 / 64, 3: 16 / 64}[stage]
    if stage < 3 and count == 1:  # never are all gradients whole: one is made while that before is on the wire
        total, width = SHAPES["7.5B"]
        assert max(p.total for p in found) < wanted + 2 * (
            total / 2 - 4 * width**2
        )  # of the largest leaf, 2 bytes each


def test_asking_makes_no_process_groups():
    """One rank may ask alone: groups are made by all of their ranks, before the program first runs."""

    def body() -> list[int]:
        new, made = dist.new_group, []
        dist.new_group = lambda *args, **options: made.append(1) or new(*args, **options)
        with sl.make_mesh(dp=2) as mesh:
            program = sl.jit(sl.shard_map(lambda x: sl.psum(x, "dp"), in_specs="n/dp", out_specs="n")).lower(
                sl.shard(torch.ones(4), "n/dp")
            )
            counts = [len(made)]
            if mesh.rank == 1:
                assert program.memory().total > 0 and program.collectives() and program.as_text()
            counts.append(len(made))
            program.compile()
        return [*counts, len(made)]

    assert sl.testing.ranks(2)(body)() == [[0, 0, 1]] * 2


# ---- running out of it


def outer(params, batch):
    h = torch.tanh(batch @ sl.gather(params, "dp"))
    return sl.Mean.of("batch/dp n k", (h[:, :, None] * h[:, None, :]) ** 2)


def hungry(mesh: sl.Mesh, accumulate: int, size: int, room: int | None) -> str:
    """What is said when a step that squares matrices of `size` has only `room` bytes of address space left."""
    with mesh:
        train = sl.jit(sl.step(outer, sl.optim.adamw(1e-3), accumulate=accumulate), donate_argnums=0)
        state = train.init(sl.shard(torch.ones(4, size), "m/dp n"))
        batch = sl.shard(torch.ones(16 * mesh.total, 4), "batch/dp m")
        train.lower(state, batch).compile()
        if room is not None:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
        try:
            train(state, batch)
        except Exception as e:
            return "\n".join([type(e).__name__, *getattr(e, "__notes__", ())])
        return "enough"


SIZE = 8000  # whose squares are gigabytes: more than this process has freed, which malloc may keep


@pytest.mark.parametrize("simulate, accumulate", [(False, 1), (False, 2), (True, 2)])
def test_running_out_of_memory_says_where(simulate: bool, accumulate: int):
    def body() -> str:
        mesh = sl.make_mesh(dp=2, simulate=True) if simulate else sl.make_mesh(dp=1)
        return hungry(mesh, accumulate, SIZE, 100 << 20)

    (said,) = sl.testing.ranks(1)(body)()
    error, here, peak, head, *kinds = said.splitlines()
    assert error == ("RankError" if simulate else "RuntimeError")
    graph = "step" if accumulate == 1 else "microbatch"
    assert re.fullmatch(rf"  where it ran out: `mul\w*` of {graph} at .*test_memory.py:\d+: return sl.Mean.*", here)
    assert re.match(rf"  at the peak: `\w+` of {graph} at .*test_memory.py", peak)
    assert head.split("  ")[1] == "alive on a rank"
    table = {row.split()[0]: row.split()[1:] for row in kinds}
    rows = 16 // accumulate
    assert float(table["all"][0]) == pytest.approx(rows * SIZE**2 * 4 / 1e9, rel=0.01), "GB of the result wanted"
    assert table["all"][1] == "GB" and {"parameters", "optimizer", "other"} <= set(table)


def test_other_errors_have_no_table():
    mesh = sl.make_mesh(dp=2, simulate=True)
    assert hungry(mesh, 1, 3, None) == "enough"
    with pytest.raises(ZeroDivisionError) as error, explained(torch.fx.symbolic_trace(torch.nn.Identity()), mesh):
        raise ZeroDivisionError
    assert not hasattr(error.value, "__notes__")


def test_a_gpu_says_it_too():
    with sl.make_mesh(dp=1, simulate=True) as mesh:
        module = sl.jit(lambda x: x * 2).lower(torch.zeros(4, 4)).module
    with pytest.raises(torch.OutOfMemoryError) as error, explained(module, mesh):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    assert error.value.__notes__[0].splitlines()[0].startswith("  at the peak: `mul` of step at ")
    assert error.value.__notes__[0].splitlines()[-1].split() == ["all", "128", "B"]


def test_a_kind_that_there_is_not():
    with sl.make_mesh(dp=2, simulate=True):
        program = sl.jit(sl.shard_map(lambda x: x + 1, in_specs="n/dp", out_specs="n/dp")).lower(
            sl.shard(torch.ones(4), "n/dp")
        )
        with pytest.raises(sl.SpecError, match="no kind `copy`; there are `parameters`, `copies`"):
            program.memory("copy")
