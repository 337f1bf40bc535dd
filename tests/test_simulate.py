"""simulate.py and wire.py: each collective against a plain reference and real gloo processes, errors, memory, time."""

import contextvars
import gc
import operator
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacrev, vjp, vmap
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from shardlib import simulate, wire
from shardlib.errors import MeshError, RankError, SpecError
from shardlib.mesh import Mesh, make_mesh
from shardlib.simulate import combine, current_rank, run_lockstep, run_threads

CPU = torch.device("cpu")
OPS = torch.ops._c10d_functional
MESHES = [dict(dp=2, tp=2), dict(dp=8), dict(dp=1, tp=1), dict(dp=2, cp=1, tp=2), dict(a=2, b=3, c=1)]


def simulated(**axes: int) -> Mesh:
    return make_mesh(axes, simulate=True)


def subsets(mesh: Mesh) -> list[tuple[str, ...]]:
    """All tuples of axes, in mesh order."""
    return [a for n in range(1, len(mesh.shape) + 1) for a in combinations(mesh.axis_names, n)]


def line_of(marker: str) -> str:
    """`file:line` of the line of this file that ends in `# marker`."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# {marker}'))}"


@pytest.fixture(autouse=True)
def nothing_left():
    """No test may leave a thread, or torch's global flag that a mode is on. One thread per op: others run here too."""
    before, threads = threading.active_count(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert threading.active_count() == before
    assert not _python_dispatch.is_in_torch_dispatch_mode()


# ---- the collectives, played and real


def everything(mesh: Mesh, axes: tuple[str, ...], x: Tensor) -> list[Tensor]:
    """Every collective of wire.py once, over `axes`; `x` is (2n, 3n) for a group of n."""
    g, n = mesh.group(axes), mesh.size(axes)
    rotate = [(i + 1) % n for i in range(n)]
    return [
        *(wire.all_reduce(x, g, op) for op in ("sum", "avg", "product", "max", "min")),
        wire.all_gather(x, 0, n, g),
        wire.all_gather(x, 1, n, g),
        wire.all_gather(x.sum(), 0, n, g),
        wire.reduce_scatter(x, 0, n, g),
        wire.reduce_scatter(x.t(), 1, n, g),
        wire.all_to_all(x, 0, 1, n, g),
        wire.all_to_all(x, 1, 0, n, g),
        wire.permute(x, rotate, g),
        wire.permute(x.t(), [-1, *rotate[1:]], g),
        wire.permute(x[0, 0], [0] * n, g),
        wire.own_slice(x, 1, n, g),
        wire.axis_index(g, CPU),
        wire.wait(OPS.broadcast(x, n - 1, g)),
        wire.wait(OPS.reduce_scatter_tensor(x, "max", n, g)),
    ]


def expected(xs: list[Tensor], i: int) -> list[Tensor]:
    """What `everything` gives to member `i` of a group that holds `xs`, the plain way."""
    n, all_ = len(xs), torch.stack(xs)
    product = all_[0]
    for x in xs[1:]:
        product = product * x
    return [
        all_.sum(0), all_.sum(0) / n, product, all_.amax(0), all_.amin(0),
        torch.cat(xs), torch.cat(xs, 1), torch.stack([x.sum() for x in xs]),
        all_.sum(0).chunk(n)[i], all_.sum(0).t().chunk(n, 1)[i],
        torch.cat([x.chunk(n)[i] for x in xs], 1), torch.cat([x.chunk(n, 1)[i] for x in xs]),
        xs[(i + 1) % n], xs[(i + 1) % n].t() if i else torch.zeros_like(xs[0].t()), xs[0][0, 0],
        xs[i].chunk(n, 1)[i], torch.tensor(i), xs[-1], all_.amax(0).chunk(n)[i],
    ]  # fmt: skip


def operand(mesh: Mesh, axes: tuple[str, ...], rank: int) -> Tensor:
    """Whole numbers, so that sums are exact in any order, different on every rank."""
    n = mesh.size(axes)
    x = torch.arange(6 * n * n, dtype=torch.float64).reshape(2 * n, 3 * n)
    return (x * 7 + rank * 5) % 11 - 3


def trace_everything(mesh: Mesh, axes: tuple[str, ...]) -> GraphModule:
    return make_fx(lambda x: everything(mesh, axes, x), tracing_mode="fake")(operand(mesh, axes, 0))


def same(got: Any, want: Any) -> bool:
    """Equal bits and dtypes, one by one."""
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


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


def uneven_exchange(mesh: Mesh, rank: int) -> Tensor:
    """Rank r sends j + 1 rows of value r to rank j."""
    n = mesh.total
    rows = torch.full((n * (n + 1) // 2, 2), float(rank))
    return wire.wait(OPS.all_to_all_single(rows, [rank + 1] * n, list(range(1, n + 1)), mesh.group(mesh.axis_names)))


class PSum(torch.autograd.Function):
    """Pending to invariant; its transpose is the identity."""

    @staticmethod
    def forward(x, g):
        return wire.all_reduce(x, g)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, c):
        return c, None

    @staticmethod
    def vmap(info, in_dims, x, g):
        return PSum.apply(x.movedim(in_dims[0], 0), g), 0


class PVary(PSum):
    """Invariant to replicated: the identity, whose transpose sums."""

    @staticmethod
    def forward(x, g):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.g = inputs[1]

    @staticmethod
    def backward(ctx, c):
        return PSum.apply(c, ctx.g), None

    @staticmethod
    def vmap(info, in_dims, x, g):
        return PVary.apply(x.movedim(in_dims[0], 0), g), 0


class Gather(torch.autograd.Function):
    """Varying to replicated along dim 0; its transpose scatters the sum."""

    @staticmethod
    def forward(x, n, g):
        return wire.all_gather(x, 0, n, g)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.n, ctx.g = inputs

    @staticmethod
    def backward(ctx, c):
        return Scatter.apply(c, ctx.n, ctx.g), None, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(x, n, g):
        return wire.reduce_scatter(x, 0, n, g)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.n, ctx.g = inputs

    @staticmethod
    def backward(ctx, c):
        return Gather.apply(c, ctx.n, ctx.g), None, None


def whole_loss(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return (torch.tanh(x @ w) @ v).pow(2).sum()


def rank_loss(mesh: Mesh, w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """`whole_loss` with w (rows) and x (batch) split over dp, w (columns) and v (rows) over tp."""
    dp, tp = mesh.group(("dp",)), mesh.group(("tp",))
    w = Gather.apply(w, mesh.shape["dp"], dp)
    h = torch.tanh(PVary.apply(x, tp) @ w)
    return PSum.apply(PSum.apply(h @ PVary.apply(v, dp), tp).pow(2).sum(), dp)


def problem(mesh: Mesh) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Whole operands, and each rank's pieces."""
    torch.manual_seed(0)
    w, v, x = (torch.randn(*s, dtype=torch.float64) for s in ((6, 8), (8, 3), (12, 6)))
    d, t = mesh.shape["dp"], mesh.shape["tp"]
    pieces = []
    for r in range(mesh.total):
        at = mesh.coordinates(r)
        own = (w.chunk(d, 0)[at["dp"]].chunk(t, 1)[at["tp"]], v.chunk(t)[at["tp"]], x.chunk(d)[at["dp"]])
        pieces.append([p.contiguous() for p in own])
    return [w, v, x], pieces


def rank_grads(mesh: Mesh, *pieces: Tensor) -> tuple[Tensor, ...]:
    return grad(lambda w, v, x: rank_loss(mesh, w, v, x), argnums=(0, 1))(*pieces)


def trace_grads(mesh: Mesh) -> GraphModule:
    return make_fx(lambda *p: rank_grads(mesh, *p), tracing_mode="fake")(*problem(mesh)[1][0])


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


# ---- threads


def test_gradients_of_functions_over_wire_ops():
    mesh = simulated(dp=2, tp=2)
    (w, v, x), pieces = problem(mesh)
    dw, dv = grad(whole_loss, argnums=(0, 1))(w, v, x)
    want = [(dw.chunk(2)[d].chunk(2, 1)[t], dv.chunk(2)[t]) for d in range(2) for t in range(2)]

    def plain(*p: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in p]
        rank_loss(mesh, *leaves).backward()
        return tuple(t.grad for t in leaves[:2] if t.grad is not None)

    def pulled(*p: Tensor) -> tuple[Tensor, ...]:
        value, pull, *_ = vjp(lambda w, v, x: rank_loss(mesh, w, v, x), *p)
        return pull(torch.ones_like(value))[:2]

    for way in (lambda *p: rank_grads(mesh, *p), plain, pulled):
        for got, ref in zip(run_threads(mesh, way, pieces), want, strict=True):
            torch.testing.assert_close(got, ref, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch.func imports it
def test_transforms_nest():
    mesh = simulated(dp=2, tp=2)
    g = mesh.group(("dp", "tp"))
    torch.manual_seed(0)
    xs, w = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def whole(w: Tensor) -> Tensor:
        return torch.tanh(xs @ w).pow(3).sum()

    def mine(w: Tensor, x: Tensor) -> Tensor:
        return PSum.apply(torch.tanh(x @ PVary.apply(w, g)).pow(3).sum(), g)

    def run(f: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        return run_threads(mesh, f, [(w, x) for x in xs])

    def twice(w: Tensor, x: Tensor) -> Tensor:
        return grad(lambda w: grad(mine)(w, x).sin().sum())(w)

    def per_row(w: Tensor, x: Tensor) -> Tensor:
        rows = vmap(lambda y: torch.tanh(y @ PVary.apply(w, g)).pow(3))(x)
        return PSum.apply(rows.sum(), g)

    many = torch.stack([w, 2 * w])
    rows = torch.stack([grad(whole)(w), grad(whole)(2 * w)])
    cases = {
        "grad of grad": (run(twice), grad(lambda w: grad(whole)(w).sin().sum())(w)),
        "hessian": (run(lambda w, x: jacrev(grad(mine))(w, x)), hessian(whole)(w)),
        "vmap of grad": (run(lambda w, x: vmap(grad(mine), (0, None))(many, x)), rows),
        "grad of vmap": (run(grad(per_row)), grad(whole)(w)),
    }
    for case, (got, want) in cases.items():
        for y in got:
            torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12, msg=case)


def test_ranks_may_take_their_own_branches_and_shapes():
    mesh = simulated(dp=4)
    g = mesh.group(("dp",))

    def fn(rows: Tensor) -> Tensor:
        total = rows.sum(0) * 10 if current_rank() == 0 else rows.mean(0)
        return wire.all_reduce(total, g)

    rows = [torch.full((r + 1, 2), float(r + 1)) for r in range(4)]
    assert all(torch.equal(y, torch.full((2,), 10.0 + 2 + 3 + 4)) for y in run_threads(mesh, fn, [(x,) for x in rows]))
    pieces = run_threads(mesh, lambda r: uneven_exchange(mesh, r), [(r,) for r in range(4)])
    assert all(torch.equal(y[:, 0], torch.arange(4.0).repeat_interleave(r + 1)) for r, y in enumerate(pieces))


def test_an_own_slice_waits_for_nobody():
    mesh = simulated(dp=2, tp=2)
    g = mesh.group(("dp", "tp"))
    got = run_threads(mesh, lambda: wire.own_slice(torch.arange(4), 0, 4, g) if current_rank() == 2 else None, [()] * 4)
    assert got[2].item() == 2 and got[3] is None


def test_current_rank_also_in_nested_runs():
    outer, inner = simulated(dp=2), simulated(tp=3)

    def fn(x: Tensor) -> tuple[Any, ...]:
        def nested() -> tuple[Any, ...]:
            return current_rank(), wire.all_reduce(x, inner.group(("tp",))).item()

        below = run_threads(inner, nested, [()] * 3)
        return current_rank(), below, wire.all_reduce(x, outer.group(("dp",))).item()

    assert current_rank() is None
    got = run_threads(outer, fn, [(torch.tensor(1.0),), (torch.tensor(2.0),)])
    assert got == [(r, [(i, 3.0 * (r + 1)) for i in range(3)], 3.0) for r in range(2)]
    assert current_rank() is None


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_of_the_function_see_plain_collectives():
    mesh = simulated(dp=2)

    def fn(x: Tensor) -> tuple[list[str], Tensor]:
        with Log() as log:
            y = wire.all_reduce(x, mesh.group(("dp",)))
        return log.seen, y

    for seen, y in run_threads(mesh, fn, [(torch.ones(2),)] * 2):
        assert seen == ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
        assert y.tolist() == [2, 2]


def test_a_fake_run_inside_one_rank_sends_nothing():
    mesh = simulated(dp=2)

    def fn() -> Any:
        if current_rank() == 0:
            with FakeTensorMode():
                return wire.all_gather(torch.zeros(3), 0, 2, mesh.group(("dp",))).shape
        return None

    assert run_threads(mesh, fn, [(), ()]) == [(6,), None]


def test_torchs_global_flag_is_restored_whatever_the_order_of_ranks():
    mesh = simulated(dp=2)

    def fn(x: Tensor) -> Tensor:
        with Log():
            return wire.all_reduce(wire.all_reduce(x, mesh.group(("dp",))), mesh.group(("dp",)))

    for _ in range(2):
        run_threads(mesh, fn, [(torch.ones(2),)] * 2)
    assert not _python_dispatch.is_in_torch_dispatch_mode()


name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")


def test_threads_have_the_callers_state():
    mesh = simulated(dp=2)

    def fn() -> tuple[Any, ...]:
        token = name.set(name.get() + "!")  # on the first rank; the second must not see it
        wire.all_reduce(torch.ones(1, device="cpu"), mesh.group(("dp",)))
        name.reset(token)
        return (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.get_num_threads(), torch.empty(1).device.type, name.get(),
        )  # fmt: skip

    state = run_threads(mesh, fn, [(), ()])
    assert state == [(True, False, torch.float32, torch.get_num_threads(), "cpu", "none")] * 2
    token = name.set("mine")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    try:
        with torch.no_grad(), torch.device("meta"):
            assert run_threads(mesh, fn, [(), ()]) == [(False, False, torch.float64, 3, "meta", "mine")] * 2
        with torch.inference_mode():
            assert run_threads(mesh, fn, [(), ()]) == [(False, True, torch.float64, 3, "cpu", "mine")] * 2
    finally:
        torch.set_default_dtype(torch.float32)
        name.reset(token)


# ---- threads: errors


def fails_on(rank: int, error: BaseException, mesh: Mesh, cleaned: list[Any]) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        try:
            x = wire.all_reduce(x, mesh.group(("dp",)))
            if current_rank() == rank:
                raise error
            return grad(lambda x: PSum.apply(PVary.apply(x, mesh.group(("dp",))).sum(), mesh.group(("dp",))))(x)
        except Exception as e:
            cleaned.append(e)  # must not see the stop of the others
            raise
        finally:
            cleaned.append(current_rank())

    return fn


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failing_rank_is_named_and_stops_the_others(rank):
    mesh, error, cleaned = simulated(dp=3), ValueError("boom"), []
    with pytest.raises(RankError, match=rf"^rank {rank} raised ValueError: boom$") as e:
        run_threads(mesh, fails_on(rank, error, mesh, cleaned), [(torch.ones(2),)] * 3)
    assert e.value.__cause__ is error
    assert set(cleaned) == {error, 0, 1, 2}


def test_an_error_of_the_library_keeps_its_type():
    mesh, error = simulated(dp=3), SpecError("bad spec")
    with pytest.raises(SpecError) as e:
        run_threads(mesh, fails_on(1, error, mesh, []), [(torch.ones(2),)] * 3)
    assert e.value is error and e.value.__notes__ == ["on rank 1"]


def test_exit_goes_through():
    mesh = simulated(dp=3)
    with pytest.raises(SystemExit) as e:
        run_threads(mesh, fails_on(1, SystemExit(3), mesh, []), [(torch.ones(2),)] * 3)
    assert e.value.code == 3


def test_ranks_not_started_never_are():
    started = []

    def fn() -> None:
        started.append(current_rank())
        raise ValueError("at once")

    with pytest.raises(RankError, match="rank 0 raised ValueError: at once"):
        run_threads(simulated(dp=8), fn, [()] * 8)
    assert started == [0]


def disagree(kind: str, g: str, x: Tensor) -> Any:
    if current_rank() != 1:
        return wire.all_reduce(x, g)  # first
    if kind == "op":
        return wire.all_gather(x, 0, 3, g)  # op
    if kind == "reduction":
        return wire.all_reduce(x, g, "max")  # reduction
    return wire.all_reduce(x[:1] if kind == "shape" else x.double(), g)  # tensor


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("op", "all_gather_into_tensor(float32[2], 3)"),
        ("reduction", "all_reduce(float32[2], 'max')"),
        ("shape", "all_reduce(float32[1], 'sum')"),
        ("dtype", "all_reduce(float64[2], 'sum')"),
    ],
)
def test_ranks_that_disagree_are_listed_with_their_lines(kind, told):
    mesh = simulated(dp=3)
    with pytest.raises(RankError) as e:
        run_threads(mesh, lambda x: disagree(kind, mesh.group(("dp",)), x), [(torch.ones(2),)] * 3)
    assert str(e.value).splitlines() == [
        "ranks disagree on a collective:",
        f"  rank 0: all_reduce(float32[2], 'sum') over `dp` at {line_of('first')}",
        f"  rank 1: {told} over `dp` at {line_of(kind if kind in ('op', 'reduction') else 'tensor')}",
    ]


def test_a_deadlock_is_seen_at_once():
    mesh = simulated(dp=2, tp=2)
    dp, tp = mesh.group(("dp",)), mesh.group(("tp",))

    def fn(x: Tensor) -> Any:
        if current_rank() == 3:
            return x
        if current_rank() == 1:
            return grad(lambda x: PSum.apply(x.sum(), dp))(x)  # alone
        return wire.all_reduce(wire.all_reduce(x, dp), tp)  # pair

    start = time.perf_counter()
    with pytest.raises(RankError) as e:
        run_threads(mesh, fn, [(torch.ones(4),)] * 4)
    assert time.perf_counter() - start < 2
    assert str(e.value).splitlines() == [
        "deadlock: no rank can go on",
        f"  rank 0: all_reduce(float32[4], 'sum') over `tp` at {line_of('pair')}, waits for rank 1",
        f"  rank 1: all_reduce(float32[], 'sum') over `dp` at {__file__}:{psum_line()}, waits for rank 3",
        f"  rank 2: all_reduce(float32[4], 'sum') over `tp` at {line_of('pair')}, waits for rank 3",
        "  rank 3: finished",
    ]


def psum_line() -> int:
    """Where PSum, which is code of the user here, calls the wire."""
    return PSum.forward.__code__.co_firstlineno + 2


def test_a_deadlock_across_groups():
    mesh = simulated(dp=2, tp=2)
    order = [("dp", "tp"), ("tp", "dp"), ("tp", "dp"), ("dp", "tp")]

    def fn(x: Tensor) -> Tensor:
        for a in order[current_rank() or 0]:
            x = wire.all_reduce(x, mesh.group((a,)))
        return x

    with pytest.raises(RankError, match=r"deadlock: no rank can go on\n  rank 0: .* over `dp` .* waits for rank 2\n"):
        run_threads(mesh, fn, [(torch.ones(1),)] * 4)


def test_a_group_of_another_mesh_is_refused():
    other = simulated(dp=4).group(("dp",))
    with pytest.raises(MeshError, match=r"the group `dp=4/dp`, which is none of Mesh\(dp=2, simulated\)"):
        run_threads(simulated(dp=2), lambda x: wire.all_reduce(x, other), [(torch.ones(1),)] * 2)
    with pytest.raises(MeshError, match="arguments for 1 ranks"):
        run_threads(simulated(dp=2), lambda x: x, [(1,)])


@pytest.mark.parametrize("where", ["computing", "waiting"])
def test_an_interrupt_stops_all(where):
    mesh, cleaned = simulated(dp=3), []

    def fn(x: Tensor) -> None:
        try:
            if current_rank() == 1:
                os.kill(os.getpid(), signal.SIGINT)
                end = time.monotonic() + 20
                while time.monotonic() < end:
                    x = x + 1 if where == "computing" else wire.all_reduce(x, mesh.group(()))
            wire.all_reduce(x, mesh.group(("dp",)))
        finally:
            cleaned.append(current_rank())

    start = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
    with pytest.raises(KeyboardInterrupt):
        run_threads(mesh, fn, [(torch.ones(1),)] * 3)
    assert time.monotonic() - start < 10 and {0, 1} <= set(cleaned)


# ---- lockstep


def test_lockstep_equals_threads_over_the_same_graph():
    mesh = simulated(dp=2, tp=2)
    traced = trace_grads(mesh)
    inputs = problem(mesh)[1]
    by_threads = run_threads(mesh, lambda *p: traced(*p), inputs)
    for _ in range(2):
        assert all(map(same, run_lockstep(mesh, traced, [list(p) for p in inputs]), by_threads))


def test_lockstep_runs_every_kind_of_node():
    mesh = simulated(dp=2)

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.tensor([1.0, 2.0]))

    inner = Graph()
    x, _, y = (inner.placeholder(n) for n in "xuy")
    added = inner.call_function(operator.add, (x, y))
    gathered = inner.call_function(OPS.all_gather_into_tensor.default, (added, 2, "dp=2/dp"))
    inner.output((inner.call_function(OPS.wait_tensor.default, (gathered,)), inner.get_attr("shift")))
    holder = Inner()
    quiet = Graph()
    quiet.output(quiet.call_function(torch.neg, (quiet.placeholder("x"),)))

    outer = Graph()
    a, b = outer.placeholder("a"), outer.placeholder("b")
    sub = outer.call_module("sub", (a, b, a))
    total = outer.call_function(torch.add, (outer.call_function(operator.getitem, (sub, 1)), a), {"alpha": 2.5})
    outer.call_function(torch.ops.aten.copy_.default, (b, total))
    top = outer.call_function(torch.ops.aten.topk.default, (outer.call_function(operator.getitem, (sub, 0)), 2))
    largest = outer.call_function(operator.getitem, (top, 0))
    tail = outer.call_function(operator.getitem, (largest, slice(1, None)))
    index = outer.call_function(torch.ops.shardlib.axis_index.default, ("dp=2/dp", CPU))
    cat = outer.call_function(torch.cat, ([largest, tail],))
    neg = outer.call_module("quiet", (total,))
    outer.output([cat, b, None, {"index": index, "half": 0.5}, neg])
    root = torch.nn.Module()
    root.add_module("sub", GraphModule(holder, inner))
    root.add_module("quiet", GraphModule(torch.nn.Module(), quiet))
    module = GraphModule(root, outer)

    bs = [torch.zeros(2), torch.zeros(2)]
    got = run_lockstep(mesh, module, [[torch.tensor([1.0, 2.0]), bs[0]], (torch.tensor([3.0, 4.0]), bs[1])])
    for r, (cat_, b_, none, named, neg_) in enumerate(got):
        a_ = torch.tensor([1.0, 2.0]) + 2 * r
        assert cat_.tolist() == [8, 6, 6] and none is None and named["index"].item() == r and named["half"] == 0.5
        assert torch.equal(b_, torch.tensor([1.0, 2.0]) + 2.5 * a_) and b_ is bs[r] and torch.equal(neg_, -b_)


def test_lockstep_drops_each_value_after_its_last_use():
    mesh = simulated(dp=2)
    g = mesh.group(("dp",))
    held: list[tuple[str, weakref.ref[Tensor]]] = []
    alive: list[str] = []

    def keep(label: str, x: Tensor) -> None:
        held.append((label, weakref.ref(x)))

    def probe() -> None:
        alive.append("".join(sorted(label for label, ref in held if ref() is not None)))

    graph = Graph()
    a, b, _ = (graph.placeholder(n) for n in "abu")
    c = graph.call_function(torch.neg, (a,))
    graph.call_function(keep, ("c", c))
    graph.call_function(probe)
    d = graph.call_function(OPS.wait_tensor.default, (graph.call_function(OPS.all_reduce.default, (c, "sum", g)),))
    graph.call_function(keep, ("d", d))
    graph.call_function(probe)
    e = graph.call_function(torch.add, (d, b))
    graph.call_function(keep, ("e", e))
    graph.call_function(probe)
    graph.call_function(OPS.all_reduce.default, (e, "sum", g))  # dead
    graph.call_function(probe)
    f = graph.call_function(OPS.all_gather_into_tensor.default, (e, 2, g))
    graph.call_function(probe)
    graph.output((f,))
    inputs = [[torch.ones(3), torch.ones(3), torch.ones(3)] for _ in range(2)]
    for given in inputs:
        for label, x in zip("abu", given, strict=True):
            keep(label, x)
        del x
    got = run_lockstep(mesh, GraphModule(torch.nn.Module(), graph), inputs)
    assert inputs == [[], []] and got[1][0].tolist() == [-1] * 6
    # what lives of both ranks, at each probe: rank 0 runs up to a collective, then rank 1
    assert alive == ["abbcu", "bbcc", "bbd", "be", "bde", "ee", "ee", "ee", "", ""]


class Failing(Exception):
    pass


def three_nodes(node: Callable[..., Any], g: str) -> GraphModule:
    """neg, all_reduce, `node`; the last with a user's line."""
    graph = Graph()
    x = graph.placeholder("x")
    total = graph.call_function(OPS.all_reduce.default, (graph.call_function(torch.neg, (x,)), "sum", g))
    total.stack_trace = f'File "/home/me/model.py", line 7, in f\n  psum(x)\nFile "{wire.__file__}", line 1, in g\n'
    last = graph.call_function(node, (graph.call_function(OPS.wait_tensor.default, (total,)),))
    last.stack_trace = 'File "/home/me/model.py", line 9, in loss\n  sin(x)\n'
    graph.output((last, x))
    return GraphModule(torch.nn.Module(), graph)


def test_a_node_that_fails_is_named_with_rank_and_line():
    mesh = simulated(dp=2)
    count = iter(range(9))

    def node(x: Tensor) -> Tensor:
        if next(count) == 1:
            raise Failing("no")
        return x

    module = three_nodes(node, mesh.group(("dp",)))
    with pytest.raises(RankError) as e:
        run_lockstep(mesh, module, [[torch.ones(2)], [torch.ones(2)]])
    assert str(e.value) == "rank 1, node `node` at /home/me/model.py:9 raised Failing: no"
    assert isinstance(e.value.__cause__, Failing)
    with pytest.raises(RankError) as e:
        run_lockstep(mesh, module, [[torch.ones(2)], [torch.ones(3)]])
    assert str(e.value).splitlines()[:2] == [
        "ranks disagree on a collective:",
        "  rank 0: all_reduce(float32[2], 'sum') over `dp`",
    ]
    assert e.value.__notes__ == ["on rank 0, node `all_reduce_default` at /home/me/model.py:7"]
    with pytest.raises(RankError, match="rank 1, the inputs raised ValueError: not enough values"):
        run_lockstep(mesh, module, [[torch.ones(2)], []])
    with pytest.raises(MeshError, match="inputs for 1 ranks"):
        run_lockstep(mesh, module, [[torch.ones(2)]])


def test_lockstep_refuses_what_it_does_not_run():
    graph = Graph()
    graph.output(graph.call_method("sin", (graph.placeholder("x"),)))
    with pytest.raises(NotImplementedError, match="does not run the call_method node `sin`"):
        run_lockstep(simulated(dp=1), GraphModule(torch.nn.Module(), graph), [[torch.ones(1)]])


def ways(x: Tensor) -> dict[str, Tensor]:
    nan, other = x.clone(), x.clone()
    nan[0] = float("nan")
    other.view(torch.int32)[0] = nan.view(torch.int32)[0] ^ 1
    return {"same": x, "one": x + torch.tensor([0.0, 0.25, 0.0]), "nan": nan, "other nan": other, "zero": x * -0.0}


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ("same", "same", None),
        ("nan", "nan", None),
        ("nan", "other nan", None),
        ("same", "one", "differs by up to 0.25 in 1 of 3 elements from rank 0"),
        ("nan", "one", "differs by up to nan in 2 of 3 elements from rank 0"),
        ("zero", "same", "differs by up to 2 in 3 of 3 elements from rank 0"),
    ],
)
def test_outputs_that_must_be_equal(a, b, told):
    mesh = simulated(dp=2, tp=2)
    module = three_nodes(torch.neg, mesh.group(("dp",)))
    xs = ways(torch.ones(3) * 2)
    inputs = [xs[a].clone(), xs[a].clone(), xs[b].clone(), xs[a].clone()]
    ok = {0: ("dp",)}  # the sum over dp
    run_lockstep(mesh, module, [[x.clone()] for x in inputs], equal=ok)
    if told is None:
        run_lockstep(mesh, module, [[x] for x in inputs], equal={**ok, 1: ("dp",)})
        return
    with pytest.raises(RankError) as e:
        run_lockstep(mesh, module, [[x] for x in inputs], equal={**ok, 1: ("dp",)})
    assert str(e.value) == f"output 1 must be equal over `dp`, but is not:\n  rank 2: {told}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float64])
def test_equality_is_of_bits_in_every_dtype(dtype):
    mesh = simulated(dp=2)
    a, b = torch.tensor([[1, 0]]).to(dtype), torch.tensor([[1, 1]]).to(dtype)
    module = make_fx(lambda x: (x.t().clone(), x[:0]))(a)
    run_lockstep(mesh, module, [[a], [a.clone()]], equal={0: ("dp",), 1: ("dp",)})
    with pytest.raises(RankError, match="rank 1: differs by up to 1 in 1 of 2 elements from rank 0"):
        run_lockstep(mesh, module, [[a], [b]], equal={0: ("dp",)})


def test_negative_zero_is_another_value():
    module = make_fx(torch.clone)(torch.ones(1))
    with pytest.raises(RankError, match=r"(?s)output 0 .* differs by up to 0 in 1 of 1 elements"):
        run_lockstep(simulated(dp=2), module, [[torch.zeros(1)], [-torch.zeros(1)]], {0: ("dp",)})


def test_programs_are_kept_per_mesh_until_the_graph_changes(monkeypatch):
    written: list[str] = []
    write = simulate._Writer.graph

    def spy(self: Any, module: Any, path: str = "") -> str:
        written.append(self.mesh.name)
        return write(self, module, path)

    monkeypatch.setattr(simulate._Writer, "graph", spy)
    module = make_fx(torch.sin)(torch.ones(1))
    for axes in (dict(dp=2), dict(dp=2), dict(dp=3)):
        mesh = simulated(**axes)
        assert run_lockstep(mesh, module, [[torch.ones(1)] for _ in range(mesh.total)])[0] == torch.ones(1).sin()
    assert written == ["dp=2", "dp=3"]
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    node.target = torch.ops.aten.cos.default
    module.recompile()
    assert run_lockstep(simulated(dp=2), module, [[torch.ones(1)], [torch.ones(1)]])[0] == torch.ones(1).cos()
    ref = weakref.ref(module)
    del module, node
    gc.collect()
    assert ref() is None


def test_lockstep_records_no_gradient():
    x = torch.ones(2, requires_grad=True)
    assert not run_lockstep(simulated(dp=1), make_fx(torch.sin)(torch.ones(2)), [[x]])[0].requires_grad


# ---- time


def best_ms(f: Callable[[], Any], n: int = 3) -> float:
    times = []
    for _ in range(n):
        start = time.perf_counter()
        f()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def test_time():
    mesh = simulated(dp=2, tp=4)
    both, tp, dp = (mesh.group(a) for a in (("dp", "tp"), ("tp",), ("dp",)))

    def loss(ws: list[tuple[Tensor, ...]], x: Tensor) -> Tensor:
        for a, b in ws:
            x = PSum.apply(torch.tanh(PVary.apply(x, tp) @ a) @ b, tp)
        return PSum.apply(x.pow(2).sum(), dp)

    def step(x: Tensor, *flat: Tensor) -> list[Tensor]:
        g = grad(loss)([flat[:2], flat[2:]], x)
        return [w - 0.1 * wire.all_reduce(d, dp) for w, d in zip(flat, [d for pair in g for d in pair], strict=True)]

    inputs = [[torch.randn(8, 64)] + [torch.randn(64, 16), torch.randn(16, 64)] * 2 for _ in range(8)]
    traced = make_fx(step, tracing_mode="fake")(*inputs[0])

    def many(x: Tensor) -> Tensor:
        for _ in range(50):
            x = wire.all_reduce(x, both, "max")
        return x

    lockstep = best_ms(lambda: run_lockstep(mesh, traced, [list(p) for p in inputs]))
    eager = best_ms(lambda: run_threads(mesh, step, inputs))
    each = best_ms(lambda: run_threads(mesh, many, [(torch.ones(4),)] * 8)) * 20
    print(f"\n8 ranks: MLP step {lockstep:.2f} ms in lockstep, {eager:.1f} in threads; {each:.0f} us per collective")
    assert lockstep < 500 and eager < 5000 and each < 50000
