"""grad, value_and_grad, scan: derivatives of every order, of trees, with auxiliary results; errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bodies import assert_close, on
from torch import Tensor
from torch.func import grad, jacrev, vjp

import shardlib as sl
from shardlib.types import region

R = torch.Generator().manual_seed(2)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=R, dtype=torch.float64)


X, W, V = draw(4, 3), draw(3, 5), draw(5, 3)


def test_gradients_of_trees_and_arguments() -> None:
    def loss(p: dict[str, Any], x: Tensor, q: list[Tensor]) -> sl.Mean:
        return sl.Mean.of("b/dp d", (x @ p["w"]).tanh() @ q[0] + p["inner"][0])

    def plain(p: dict[str, Any], x: Tensor, q: list[Tensor]) -> Tensor:
        return ((x @ p["w"]).tanh() @ q[0] + p["inner"][0]).mean()

    p, q = {"w": W, "inner": (V[0],)}, [V]

    def body(p: Any, x: Tensor, q: Any) -> Any:
        value, first = sl.value_and_grad(loss)(p, x, q)
        same, both = sl.value_and_grad(loss, argnums=(0, 2))(p, x, q)
        assert sl.value_and_grad(sl.value_and_grad(loss)) is not None
        return value, same, first, both, sl.grad(loss, argnums=2)(p, x, q)

    value, same, first, both, second = on(body, (p, "..."), (X, "b/dp d"), (q, "..."))
    wanted = torch.func.grad(plain, argnums=(0, 2))(p, X, q)
    assert_close(value, plain(p, X, q))
    assert_close(same, value)
    assert_close(first, wanted[0])
    assert_close(tuple(both), wanted)
    assert_close(second, wanted[1])


def test_auxiliary_results() -> None:
    def loss(w: Tensor, x: Tensor, key: Any, extra: Any) -> Any:
        y = x @ w * key
        mean = sl.Mean.of("b/dp e", y)
        return mean, sl.Aux(
            metrics={"top": sl.pmax(y.detach().amax(), "dp"), "mean": 2 * mean}, extra={"count": extra + 1}
        )

    def body(w: Tensor, x: Tensor) -> Any:
        (value, aux), g = sl.value_and_grad(loss)(w, x, key=2.0, extra=torch.tensor(3))
        assert aux.extra["count"].dtype == torch.int64
        return value, aux.metrics["top"], aux.metrics["mean"].value, aux.extra, g

    value, top, mean, extra, g = on(body, (W, "d e"), (X, "b/dp d"))
    assert_close(value, (X @ W * 2).mean())
    assert_close((top, mean), ((X @ W * 2).amax(), 2 * value))
    assert_close(g, torch.func.grad(lambda w: (X @ w * 2).mean())(W))
    assert extra["count"] == 4


def test_gradients_that_are_one_tensor_keep_their_own_types() -> None:
    """The backward of a sum gives both operands one cotangent; one leaf is split, the other replicated."""

    def body(a: Tensor, b: Tensor) -> Any:
        b = sl.pvary(b, "dp")
        ga, gb = sl.grad(lambda a, b: sl.psum((a + b).sum(), "dp"), argnums=(0, 1))(a, b)
        assert (region().type_of(ga), region().type_of(gb)) == ("VI", "PI")
        leaf = region().leaves.get(ga)
        assert leaf is not None and leaf.spec.split == ("dp",)
        return ga, sl.psum(gb, "dp")

    ga, gb = on(body, (X, "b/dp d"), (X[:2], "q d"), out=("b/dp d", "q d"))
    assert ga.eq(1).all() and gb.eq(2).all()


def test_types_of_gradients_are_dual() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        here = region()
        values = [w, sl.pvary(w, "dp"), x, sl.pending(x, "dp")]
        for value, dual in zip(values, "IPVR", strict=True):
            g = sl.grad(lambda v, d=dual: sl.psum(v.sum() if d == "R" else v.sum() * x.sum(), "dp"))
            assert here.over(g(value), "dp") == dual
        return w

    on(body, (W, "d e"), (X, "b/dp d"))


# ---- second and higher orders through collectives


def nets() -> dict[str, tuple[Callable[..., Tensor], str]]:
    """tanh(x w) v, its square summed: x split over dp by rows, or w and v over tp by columns and rows."""

    def rows(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return sl.psum(((x @ w).tanh() @ v).square().sum(), "dp")

    def gathered(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return ((sl.all_gather("b/dp d -> b d", x, invariant=True) @ w).tanh() @ v).square().sum()

    def scattered(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = sl.einsum("b/dp e, b/dp d -> e d +dp", (x @ w).tanh(), (x @ w).tanh() @ v)
        y = sl.psum_scatter("e f +dp -> e f/dp", F.pad(y, (0, 1)))
        return sl.psum(y.square().sum(), "dp")

    return dict(rows=rows, gathered=gathered, scattered=scattered)  # type: ignore[return-value]


def plain_net(name: str, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = (x @ w).tanh()
    return (h.t() @ (h @ v)).square().sum() if name == "scattered" else (h @ v).square().sum()


@pytest.mark.parametrize("rematted", (False, True), ids=("", "remat"))
@pytest.mark.parametrize("name", ("rows", "gathered", "scattered"))
def test_higher_orders(name: str, rematted: bool) -> None:
    f: Any = nets()[name]

    def orders(f: Callable[..., Tensor], x: Tensor, w: Tensor, v: Tensor) -> Any:
        def first(w: Tensor, v: Tensor) -> Tensor:
            return grad(f, 1)(x, w, v).square().sum()

        def second(w: Tensor) -> Tensor:
            return grad(first, 1)(w, v).square().sum()

        u = torch.arange(15.0, dtype=torch.float64).view(3, 5).sin()
        product = vjp(lambda w: grad(f, 1)(x, w, v), w)[1](u)[0]
        return grad(f, (1, 2))(x, w, v), grad(first, (0, 1))(w, v), grad(second)(w), product

    def body(x: Tensor, w: Tensor, v: Tensor) -> Any:
        return orders(sl.remat(f) if rematted else f, x, w, v)

    assert_close(on(body, (X, "b/dp d"), (W, "d e"), (V, "e d")), orders(lambda *a: plain_net(name, *a), X, W, V))


def test_hessian_and_jacobian() -> None:
    """jacrev maps the backward over a basis: collectives in it are mapped too."""

    def body(x: Tensor, w: Tensor, v: Tensor) -> Any:
        f: Any = nets()["rows"]
        hessian = jacrev(jacrev(lambda v: f(x, w, v)))(v)
        assert region().type_of(hessian) == "II"
        return hessian, jacrev(lambda w: sl.all_gather("b/dp e -> b e", (x @ w).tanh(), invariant=True))(w)

    hessian, jacobian = on(body, (X, "b/dp d"), (W, "d e"), (V, "e d"))
    assert_close(hessian, jacrev(jacrev(lambda v: plain_net("rows", X, W, v)))(V))
    assert_close(jacobian, jacrev(lambda w: (X @ w).tanh())(W))


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, on the first jvp
def test_forward_mode_under_jit() -> None:
    """One thread runs all ranks there; the first run is on shapes, also in one."""

    def body(x: Tensor, w: Tensor, v: Tensor) -> Any:
        f: Any = nets()["rows"]
        value, tangent = torch.func.jvp(lambda w: f(x, w, v), (w,), (w,))  # type: ignore[misc]
        assert region().type_of(tangent) == region().type_of(value) == "II"
        ahead = torch.func.jvp(lambda v: sl.grad(lambda v: f(x, w, v))(v), (v,), (v,))[1]  # type: ignore[misc]
        return value, tangent, torch.func.hessian(lambda v: f(x, w, v))(v), ahead

    with sl.make_mesh(dp=2, tp=1, simulate=True):
        args = sl.shard(X, "b/dp d"), sl.shard(W, "d e"), sl.shard(V, "e d")
        value, tangent, hessian, ahead = sl.gather(sl.jit(sl.shard_map(body, in_specs=None, out_specs="..."))(*args))
    assert_close((value, tangent), torch.func.jvp(lambda w: plain_net("rows", X, w, V), (W,), (W,)))
    assert_close(ahead, torch.einsum("abcd,cd->ab", hessian, V))
    assert_close(hessian, torch.func.hessian(lambda v: plain_net("rows", X, W, v))(V))


def test_column_then_row_split_network() -> None:
    """C14: gradients of the replicated input, equal to one process on all ranks, with and without remat."""

    def block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = sl.einsum("b d, d e/tp -> b e/tp", x, w).tanh()
        return x + sl.psum("b d +tp -> b d", sl.einsum("b e/tp, e/tp d -> b d +tp", h, v))

    def body(x: Tensor, w: Tensor, v: Tensor) -> Any:
        def loss(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda x, w, v: f(f(x, w, v), w, v).square().sum()

        return [grad(loss(f), (0, 1, 2))(x, w, v) for f in (block, sl.remat(block))]

    w, v = draw(3, 4), draw(4, 3)
    specs = ("b d", "d e/tp", "e/tp d")
    plain = torch.func.grad(lambda x, w, v: net2(net2(x, w, v), w, v).square().sum(), (0, 1, 2))(X, w, v)
    for found in on(body, *zip((X, w, v), specs, strict=True), out=[specs, specs], mesh=dict(tp=2)):
        assert_close(tuple(found), plain)


def net2(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x + (x @ w).tanh() @ v


# ---- scan


def test_scan() -> None:
    def step(c: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        c = (c @ p["w"]).tanh()
        return c, {"sum": c.sum(), "row": c[0]}

    ws = draw(3, 3, 3)

    def body(x: Tensor, p: dict[str, Tensor]) -> Any:
        def loss(p: dict[str, Tensor]) -> Tensor:
            last, ys = sl.scan(sl.remat(step), x, p)
            return sl.psum(last.sum() + ys["sum"].square().sum(), "dp")

        last, ys = sl.scan(step, x, p)
        counted, none = sl.scan(lambda c, _: (c + 1, None), torch.tensor(0), None, length=4)
        assert none is None
        return last, ys, counted, sl.grad(loss)(p)

    specs = ("b/dp d", {"sum": "layers/dp", "row": "layers/dp d"}, "", "...")
    last, ys, counted, g = on(body, (X, "b/dp d"), ({"w": ws}, "layers d e"), out=specs)
    c, sums, per_rank = X, [], []
    for w in ws:
        c = (c @ w).tanh()
        sums.append([part.sum() for part in c.chunk(2)])
        per_rank.append(c)
    assert_close(last, c)
    assert_close(ys["sum"], torch.tensor(sums).T.flatten().double())
    assert counted == 4

    def plain(ws: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for x in X.chunk(2):
            for w in ws:
                x = (x @ w).tanh()
                total = total + x.sum().square()
            total = total + x.sum()
        return total

    assert_close(g["w"], torch.func.grad(plain)(ws))


def test_scan_over_split_leaves_gathers_each() -> None:
    def body(x: Tensor, ws: Tensor) -> Tensor:
        def layer(x: Tensor, w: Tensor) -> tuple[Tensor, None]:
            return (x @ sl.gather(w, "dp")).tanh(), None

        return sl.grad(lambda ws: sl.psum(sl.scan(layer, x, ws)[0].sum(), "dp"))(ws)

    ws = draw(2, 3, 3)
    found = on(body, (X, "b/dp d"), (ws, "layers d e/dp"), out="layers d e/dp")
    assert_close(found, torch.func.grad(lambda ws: ((X @ ws[0]).tanh() @ ws[1]).tanh().sum())(ws))


# ---- errors

ERRORS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "integers": (
        lambda w, x: sl.grad(lambda k: sl.psum(x, "dp").sum())(torch.tensor([1])),
        "^grad: argument 0 is torch.int64; only floating-point tensors have",
    ),
    "no tensors": (
        lambda w, x: sl.grad(lambda k: sl.psum(x, "dp").sum())({"a": 3.0}),
        "^grad: argument 0, leaf `a`, is float; only floating-point tensors",
    ),
    "scan of nothing": (lambda w, x: sl.scan(lambda c, x: (c, x), w, None), "scan needs xs, or length="),
    "scan of two lengths": (
        lambda w, x: sl.scan(lambda c, x: (c, x), w, (w, w[0])),
        r"the leading dimensions differ: \[3, 5\]",
    ),
    "scan of another length": (
        lambda w, x: sl.scan(lambda c, x: (c, x), w, w, length=4),
        r"the leading dimensions differ: \[3\], length=4",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    body, message = ERRORS[name]
    with pytest.raises(sl.SpecError, match=message):
        on(body, (W, "d e"), (X, "b/dp d"))
