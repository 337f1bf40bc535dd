"""Messages whose receivers are ready, beside the collectives that they stand for."""

import importlib
import math
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import shardlib as sl
from shardlib import neighbours, tree
from shardlib.graph.buckets import PACK
from shardlib.graph.gloo import for_gloo
from shardlib.graph.program import copied
from shardlib.passes import applied, bucket, default, for_processes
from tests.ranks import on_ranks

RANKS = 3
OPS, MINE = torch.ops._c10d_functional, torch.ops.shardlib
wait = OPS.wait_tensor


SHAPES = [(0,), (1,), (5, 3), (200_001, 2)]  # none, one, few, several messages
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape).mul(rank + 1).remainder(97).to(dtype)


def gathered() -> Any:
    """Several at once, and each alone."""
    with sl.make_mesh(dp=RANKS) as mesh:
        group = mesh.group(("dp",))
        for dtype in DTYPES:
            xs = [numbers(shape, dtype, mesh.rank) for shape in SHAPES]
            wanted = [wait(OPS.all_gather_into_tensor(x, RANKS, group)) for x in xs]
            flat = wait(MINE.posted_gather(xs, RANKS, group))
            yield torch.equal(flat, torch.cat([y.view(-1) for y in wanted]))
            yield from (
                torch.equal(wait(MINE.posted_gather([x], RANKS, group)), y) for x, y in zip(xs, wanted, strict=True)
            )


def exchanged() -> Any:
    """Pieces of unequal sizes."""
    gives = [[1, 2, 3], [2, 0, 4], [3, 1, 400_000]]  # by rank, the rows for each
    with sl.make_mesh(dp=RANKS) as mesh:
        takes, group = [rows[mesh.rank] for rows in gives], mesh.group(("dp",))
        for dtype in DTYPES:
            x = numbers((sum(gives[mesh.rank]), 3), dtype, mesh.rank)
            how = takes, gives[mesh.rank], group
            yield torch.equal(wait(MINE.posted_exchange(x, *how)), wait(OPS.all_to_all_single(x, *how)))


def scattered() -> Any:
    """Bit for bit as adding the pieces in the order of ranks, of 16 bits in float32."""
    with sl.make_mesh(dp=RANKS) as mesh:
        group = mesh.group(("dp",))
        keys = [torch.Generator().manual_seed(r) for r in range(RANKS)]
        every = [[torch.randn(RANKS, *shape, generator=key) for shape in SHAPES] for key in keys]
        for dtype in (torch.float32, torch.bfloat16):
            mine = [x.to(dtype) for x in every[mesh.rank]]
            found = MINE.posted_sum(wait(MINE.posted_scatter(mine, RANKS, group)), mine, RANKS, group)
            rows = [[x.to(dtype).to(torch.float32)[mesh.rank].view(-1) for x in xs] for xs in every]
            yield torch.equal(found, torch.cat([(a + b) + c for a, b, c in zip(*rows, strict=True)]).to(dtype))


def crossing() -> Any:
    """Several are begun before the first is waited for, in another order."""
    with sl.make_mesh(dp=RANKS) as mesh:
        group, ones, ranks = mesh.group(("dp",)), [1] * RANKS, torch.arange(float(RANKS)).view(RANKS, 1)
        xs = [torch.full((RANKS, 3), 10.0 * i + mesh.rank) for i in range(4)]
        begun = [(MINE.posted_gather([x], RANKS, group), MINE.posted_exchange(x, ones, ones, group)) for x in xs]
        for i, (a, b) in reversed([*enumerate(begun)]):
            wanted = (10.0 * i + ranks).expand(RANKS, 3)
            yield torch.equal(wait(b), wanted)
            yield torch.equal(wait(a), wanted.repeat_interleave(RANKS, 0))


@pytest.mark.parametrize("body", [gathered, exchanged, scattered, crossing])
@pytest.mark.parametrize("memory", "01")
def test_the_same_as_the_collective(body, memory):
    """By messages, and through memory that ranks share."""
    for rank in on_ranks(RANKS, ran, body.__name__, memory):
        assert rank and all(rank)


def ran(name: str, memory: str) -> list[bool]:
    os.environ["SHARDLIB_SHARED_MEMORY"] = memory
    return list(globals()[name]())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("limit", [None, 0])
def test_a_step_is_the_same_bit_for_bit(stage, limit):
    """Beside the collectives of gloo; with buckets of large and small leaves, and without buckets."""
    for memory, messages, theirs in on_ranks(2, stepped, stage, limit):
        assert all(torch.equal(a, b) for a, b in zip(memory, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(messages, theirs, strict=True))


@sl.pytree
class Net:
    up: Tensor = sl.spec("model/dp hidden")
    scale: Tensor = sl.spec("hidden")
    down: Tensor = sl.spec("hidden model/dp")
    out: Tensor = sl.spec("model/dp hidden")


def loss(w: Net, batch: Tensor) -> sl.Mean:
    w = sl.gather(w, "dp")
    x = sl.einsum("batch/dp model, model hidden -> batch/dp hidden", batch, w.up)
    x = sl.rms_norm(x, w.scale)
    x = sl.einsum("batch/dp hidden, hidden model -> batch/dp model", x, w.down)
    x = sl.einsum("batch/dp model, model hidden -> batch/dp hidden", torch.tanh(x), w.out)
    return sl.Mean.of("batch/dp hidden", x**2)


def alone(target: Any, module: GraphModule) -> list[list[bool]]:
    """For each node of an op, which of the tensors that it sends are not packed."""
    return [[x.target is not PACK for x in n.args[0]] for n in module.graph.nodes if n.target is target]


def test_large_tensors_are_sent_from_where_they_are():
    """But for those whose dims change places, and those that the step returns."""
    with sl.make_mesh(dp=2, simulate=True):
        found = {}
        for stage in (1, 3):
            train = sl.step(loss, sl.optim.adamw(0.1), layout=sl.zero(sl.specs(Net), stage=stage))
            state = train.init(sl.init(Net, sizes=dict(model=640, hidden=260), key=sl.random.key(0)))
            batch = sl.shard(torch.ones(16, 640), "batch/dp model")
            module = applied(for_processes("cpu", "graph"), copied(sl.jit(train).lower(state, batch).module))
            found[stage] = alone(MINE.posted_gather.default, module), alone(MINE.posted_scatter.default, module)
    assert found[1] == ([[False]], [[True, False, True]])
    assert found[3] == ([[True, False, True], [False]], [[True, False, True]])  # again: `down` alone


def overwritten() -> bool:
    """An operand that is written into while its bucket is on the wire; the sums are as they were without passes."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        a, b = 2 * x, 3 * x
        one, two = (sl.psum_scatter("n m +dp -> n/dp m", y) for y in (a, b))
        return one, two, torch.exp(a)

    with sl.make_mesh(dp=2) as mesh:
        x = sl.from_local(torch.arange(4.0 * 40_000).view(4, 40_000).remainder(3) + mesh.rank, "k/dp m")
        run = sl.shard_map(f, in_specs="k/dp m", out_specs=("n/dp m", "n/dp m", "k/dp m"))
        plain, other = sl.jit(run, passes=[]), sl.jit(run)
        module = other.lower(x).running()
        writes = any(n.target is torch.ops.aten.exp.out for n in module.graph.nodes)
        same = [torch.equal(a.shards[0], b.shards[0]) for a, b in zip(plain(x), other(x), strict=True)]
        return writes and all(same) and alone(MINE.posted_scatter.default, module) == [[False, True]]


def test_what_is_written_into_is_packed():
    assert all(on_ranks(2, overwritten))


def stepped(stage: int, limit: int | None) -> list[list[Tensor]]:
    """Parameters after three steps: through shared memory, with messages, and with the collectives of gloo."""
    jit: Any = importlib.import_module("shardlib.jit")  # the attribute of that name is the function
    passes = [partial(bucket, limit=limit) if one is bucket else one for one in default]
    found = []
    for memory, backend_of in (("1", for_processes), ("0", for_processes), ("0", lambda *_: (for_gloo,))):
        os.environ["SHARDLIB_SHARED_MEMORY"], jit.for_processes = memory, backend_of
        neighbours._met.clear()
        with sl.make_mesh(dp=2) as mesh:
            train = sl.step(loss, sl.optim.adamw(0.1), layout=sl.zero(sl.specs(Net), stage=stage))
            state = train.init(sl.init(Net, sizes=dict(model=640, hidden=260), key=sl.random.key(0)))
            step = sl.jit(train, donate_argnums=0, passes=passes)
            for i in range(3):
                x = torch.randn(8, 640, generator=torch.Generator().manual_seed(i + 10 * mesh.rank))
                state, _ = step(state, sl.from_local(x, "batch/dp model"))
            found.append([sl.gather(x) for x in tree.leaves(state.params)])
    return found


@pytest.mark.parametrize("backend, mine", [("graph", True), ("regional", True), ("inductor", False)])
def test_programs_of_processes_use_them(backend, mine):
    """But one that is compiled as a whole, where a message's operand would be taken to be free."""

    def body(x):
        return sl.all_to_all("a/dp b -> a b/dp", x), x * sl.gather(x, "dp").sum()

    with sl.make_mesh(dp=2, simulate=True):
        f = sl.jit(sl.shard_map(body, in_specs="a/dp b", out_specs=("a b/dp", "a/dp b")))
        module = f.lower(sl.shard(torch.ones(4, 4), "a/dp b")).module
    found = {n.target for n in applied(for_processes("cpu", backend), copied(module)).graph.nodes}
    ours = {MINE.posted_exchange.default, MINE.posted_gather.default}
    theirs = {OPS.all_to_all_single.default, OPS.all_gather_into_tensor.default}
    assert found >= (ours if mine else theirs) and found.isdisjoint(theirs if mine else ours)
