"""Every collective of wire.py on a mesh, and a small loss over them, beside their plain references."""

import threading
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _python_dispatch

from shardlib import wire
from shardlib.mesh import Mesh, make_mesh

CPU = torch.device("cpu")
OPS = torch.ops._c10d_functional
MESHES = [dict(dp=2, tp=2), dict(dp=8), dict(dp=1, tp=1), dict(dp=2, cp=1, tp=2), dict(a=2, b=3, c=1)]


def simulated(**axes: int) -> Mesh:
    return make_mesh(axes, simulate=True)


def subsets(mesh: Mesh) -> list[tuple[str, ...]]:
    """All tuples of axes, in mesh order."""
    return [a for n in range(1, len(mesh.shape) + 1) for a in combinations(mesh.axis_names, n)]


@pytest.fixture(autouse=True)
def nothing_left():
    """No test may leave a thread, or torch's global flag that a mode is on. One thread per op: others run here too."""
    before, threads = threading.active_count(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert threading.active_count() == before
    assert not _python_dispatch.is_in_torch_dispatch_mode()


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
