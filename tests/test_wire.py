"""wire.py: each collective against a plain reference, on threads, in lockstep and on real gloo processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from wired import (
    CPU,
    MESHES,
    OPS,
    everything,
    expected,
    operand,
    problem,
    rank_grads,
    same,
    simulated,
    subsets,
    trace_everything,
    trace_grads,
    uneven_exchange,
)
from wired import nothing_left as nothing_left

from shardlib import wire
from shardlib.errors import RankError
from shardlib.mesh import Mesh
from shardlib.simulate import combine, run_lockstep, run_threads


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_collectives_by_threads_and_in_lockstep_are_the_reference(axes):
    mesh = simulated(**axes)
    for over in subsets(mesh):
        xs = [operand(mesh, over, r) for r in range(mesh.total)]
        groups = [mesh.members(r, over) for r in range(mesh.total)]
        want = [expected([xs[q] for q in g], g.index(r)) for r, g in enumerate(groups)]
        got = run_threads(mesh, everything, [(mesh, over, x) for x in xs])
        assert all(map(same, got, want)), over
        if over in (subsets(mesh)[0], mesh.axis_names):
            got = run_lockstep(mesh, trace_everything(mesh, over), [[x] for x in xs])
            assert all(map(same, got, want)), over


def test_empty_tensors():
    mesh = simulated(dp=2)
    g = mesh.group(("dp",))

    def fn(x: Tensor) -> list[tuple[int, ...]]:
        out = [wire.all_reduce(x, g), wire.all_gather(x, 0, 2, g), wire.all_gather(x, 1, 2, g)]
        out += [wire.permute(x, [1, 0], g), wire.reduce_scatter(x, 0, 2, g), wire.reduce_scatter(x, 1, 2, g)]
        out += [wire.own_slice(x, 1, 2, g), wire.all_to_all(x, 0, 1, 2, g), wire.all_to_all(x, 1, 0, 2, g)]
        return [tuple(y.shape) for y in out]

    want = [(0, 4), (0, 4), (0, 8), (0, 4), (0, 4), (0, 2), (0, 2), (0, 8), (0, 2)]
    assert run_threads(mesh, fn, [(torch.zeros(0, 4),)] * 2) == [want] * 2


def reductions() -> list[tuple[str, torch.dtype]]:
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    whole = (torch.int64, torch.uint8, torch.bool)
    ops = ("sum", "product", "max", "min")
    return [*((op, dtype) for dtype in floats + whole for op in ops), *(("avg", dtype) for dtype in floats)]


def values(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([3, 2, 0, 1 - rank % 2]).to(dtype)


def reduce_all(mesh: Mesh) -> list[Tensor]:
    """All reductions of small whole numbers, in all dtypes."""
    g = mesh.group(mesh.axis_names)
    return [wire.all_reduce(values(mesh.rank, dtype), g, op) for op, dtype in reductions()]


@pytest.mark.parametrize(("op", "dtype"), reductions(), ids=str)
def test_reductions_keep_the_dtype(op, dtype):
    wide = torch.stack([values(r, dtype).double() for r in range(3)])
    by_op = dict(sum=wide.sum(0), avg=wide.mean(0), product=wide.prod(0), max=wide.amax(0), min=wide.amin(0))
    for got in combine(OPS.all_reduce.default, [(values(r, dtype), op, "dp=3/dp") for r in range(3)]):
        assert got.dtype == dtype and torch.equal(got, by_op[op].to(dtype))


def test_sums_run_in_rank_order_and_all_members_hold_the_same_bits():
    xs = [torch.randn(1000) * 10.0**r for r in range(8)]
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    for got in combine(OPS.all_reduce.default, [(x, "sum", "dp=8/dp") for x in xs]):
        assert torch.equal(got, total)
    assert not torch.equal(total, torch.stack(xs[::-1]).sum(0))  # another order does give other bits
    pieces = combine(OPS.reduce_scatter_tensor.default, [(x, "sum", 8, "dp=8/dp") for x in xs])
    assert torch.equal(torch.cat(pieces), total)


@pytest.mark.parametrize("n", [1, 3])
def test_results_share_no_storage(n):
    xs = [torch.zeros(n, 2) for _ in range(n)]
    calls = {
        OPS.all_reduce.default: ("sum",),
        OPS.all_gather_into_tensor.default: (n,),
        OPS.reduce_scatter_tensor.default: ("sum", n),
        OPS.all_to_all_single.default: ([1] * n, [1] * n),
        OPS.broadcast.default: (0,),
        torch.ops.shardlib.permute.default: ([0] * n,),
        torch.ops.shardlib.own_slice.default: (0, n),
    }
    assert {*calls, torch.ops.shardlib.axis_index.default} == {*wire.MEET, *wire.OWN}
    for op, args in calls.items():
        out = combine(op, [(x, *args, f"dp={n}/dp") for x in xs])
        assert len({t.untyped_storage().data_ptr() for t in (*xs, *out)}) == 2 * n, op
    assert all(a is b for a, b in zip(combine(OPS.wait_tensor.default, [(x,) for x in xs]), xs, strict=True))


def one_rank(mesh: Mesh, rank: int) -> list[Tensor]:
    """What one rank computes, real or played."""
    collectives = [y for over in subsets(mesh) for y in everything(mesh, over, operand(mesh, over, rank))]
    return [*collectives, uneven_exchange(mesh, rank), *rank_grads(mesh, *problem(mesh)[1][rank])]


@pytest.mark.parametrize("axes", [dict(dp=2, tp=2), dict(dp=3, tp=1)], ids=str)
def test_equals_real_processes(axes):
    mesh = simulated(**axes)

    def real() -> list[Any]:
        m = Mesh(axes, rank=dist.get_rank())
        return [one_rank(m, m.rank), reduce_all(m), trace_grads(m)(*problem(m)[1][m.rank])]

    played = run_threads(mesh, lambda r: one_rank(mesh, r), [(r,) for r in range(mesh.total)])
    steps = run_lockstep(mesh, trace_grads(mesh), problem(mesh)[1])
    for r, (ranks, reduced, grads) in enumerate(on_ranks(mesh.total, real)):
        assert same(played[r][:-2], ranks[:-2])  # whole numbers: the same bits
        for got in (played[r][-2:], ranks[-2:], steps[r]):
            for a, b in zip(got, grads, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
        for (op, dtype), got in zip(reductions(), reduced, strict=True):
            want = combine(OPS.all_reduce.default, [(values(q, dtype), op, "g/dp") for q in range(mesh.total)])[r]
            assert got.dtype == dtype and torch.equal(got, want), (op, dtype)


def test_own_ops_trace_to_one_node_without_process_groups():
    mesh = simulated(dp=2, tp=2)
    traced = trace_everything(mesh, ("dp",))
    names = [n.target._schema.name for n in traced.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    count = {n.split("::")[1]: names.count(n) for n in names if not n.startswith("aten::")}
    assert count["axis_index"] == count["own_slice"] == 1 and count["permute"] == 3
    assert {n.args[-1] for n in traced.graph.nodes if n.target in wire.MEET} == {"dp=2,tp=2/dp"}


def test_fake_results_have_the_shapes_strides_and_dtypes_of_real_ones():
    mesh = simulated(dp=2)
    real = run_threads(mesh, lambda x: everything(mesh, ("dp",), x), [(torch.zeros(4, 6),)] * 2)[0]
    with FakeTensorMode():
        fake = everything(mesh, ("dp",), torch.zeros(4, 6))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_without_a_process_group_eager_ops_say_so():
    for call in (lambda: wire.axis_index("dp=2/dp", CPU), lambda: wire.own_slice(torch.zeros(2), 0, 2, "dp=2/dp")):
        with pytest.raises(RuntimeError, match="process group"):
            call()


@pytest.mark.parametrize(
    ("op", "args", "text"),
    [
        (OPS.all_reduce.default, ("xor",), "`xor` is no reduction"),
        (OPS.all_gather_into_tensor.default, (3,), "group of 2 says that it has 3 members"),
        (OPS.reduce_scatter_tensor.default, ("sum", 3), "group of 2 says that it has 3 members"),
        (OPS.reduce_scatter_tensor.default, ("sum", 2), r"cannot cut \[3\] in 2"),
        (OPS.all_to_all_single.default, ([1, 1], [2, 1]), "the members send"),
        (OPS.broadcast.default, (2,), "broadcast from member 2 of 2"),
        (torch.ops.shardlib.permute.default, ([0],), "does not name a source"),
        (torch.ops.aten.sin.default, (), "not `aten.sin.default`"),
    ],
)
def test_what_is_no_collective_is_refused(op, args, text):
    with pytest.raises(RankError, match=text):
        combine(op, [(torch.zeros(3), *args, "dp=2/dp")] * 2)


def test_members_that_disagree_are_named():
    calls = [(torch.zeros(2), "sum", "dp=3/dp"), (torch.zeros(3), "sum", "dp=3/dp"), (torch.zeros(2), "sum", "dp=3/dp")]
    with pytest.raises(RankError) as e:
        combine(OPS.all_reduce.default, calls, [0, 2, 4])
    assert str(e.value) == (
        "ranks disagree on a collective:\n"
        "  ranks 0, 4: all_reduce(float32[2], 'sum') over `dp`\n"
        "  rank 2: all_reduce(float32[3], 'sum') over `dp`"
    )
