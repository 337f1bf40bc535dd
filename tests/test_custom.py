"""custom_vjp: gradients of one's own, of every order and under every transform; their types; ring attention (C17)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor
from torch.func import grad, vjp, vmap

import ring_attention
import shardlib as sl
from shardlib.types import region
from ulysses import ulysses

F64 = torch.float64
X, W = torch.arange(24, dtype=F64).view(6, 4).sin(), torch.tensor([0.3, 0.8, -0.4, 0.5], dtype=F64)


def on(body: Callable[..., Any], out: Any = "...", jitted: bool = False) -> Any:
    """`body(w, x)` on 3 x 2 ranks: w invariant, the rows of x split over dp."""
    with sl.make_mesh(dp=3, tp=2, simulate=True):
        f = sl.shard_map(body, in_specs=("d", "b/dp d"), out_specs=out)
        return sl.gather((sl.jit(f) if jitted else f)(sl.shard(W, "d"), sl.shard(X, "b/dp d")))


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def scaled_exp(factor: float = 1.0) -> Callable[..., Any]:
    """exp of a product, whose gradient is `factor` times the true one; the residual is the result itself."""

    def forward(p: dict[str, Any], x: Tensor) -> tuple[Tensor, Any]:
        y = (p["w"] * x).exp()
        return y, {"y": y, "w": p["w"], "x": x}

    def backward(kept: Any, g: Tensor) -> tuple[Any, Tensor]:
        inner = factor * g * kept["y"]
        return {"w": sl.psum((inner * kept["x"]).sum(0), "dp"), "n": None}, inner * kept["w"]

    return sl.custom_vjp(lambda p, x: (p["w"] * x).exp(), forward, backward)


def orders(f: Callable[..., Tensor], deep: bool) -> Callable[[Tensor, Tensor], Any]:
    """The value, and derivatives of first, second and third order."""

    def run(w: Tensor, x: Tensor) -> Any:
        def first(w: Tensor) -> Tensor:
            return grad(f, (0, 1))(w, x)[0].square().sum()

        second = grad(first)(w)
        third = grad(lambda w: grad(first)(w).square().sum())(w) if deep else second
        return f(w, x), grad(f)(w, x), second, third

    return run


def total(g: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda w, x: sl.psum(g({"w": w, "n": 2}, x).square().sum(), "dp")


@pytest.mark.parametrize("how", ["plain", "remat", "scan", "jit"])
def test_every_order(how: str) -> None:
    f = scaled_exp()
    g = {
        "remat": sl.remat(f),
        "scan": lambda p, x: sl.scan(lambda c, _: (f(p, x) + c, None), x * 0, None, length=1)[0],
    }.get(how, f)
    found = on(orders(total(g), how == "plain"), jitted=how == "jit")
    close(found, orders(lambda w, x: (w * x).exp().square().sum(), how == "plain")(W, X))


def test_the_gradient_is_that_of_bwd() -> None:
    """And without a gradient f runs, not fwd."""

    def refuse(*_: Any) -> Any:
        raise AssertionError

    assert on(lambda w, x: sl.custom_vjp(lambda w: 2 * w, refuse, refuse)(w)).tolist() == (2 * W).tolist()
    found = on(lambda w, x: (sl.grad(total(scaled_exp(3.0)))(w, x), grad(total(scaled_exp(3.0)))(w, x)))
    wanted = 3 * grad(lambda w: (w * X).exp().square().sum())(W)
    close(found, (wanted, wanted))


def test_mapped() -> None:
    """vmap of it, of its gradient, along several dims; what is not mapped gets the sum."""
    f = scaled_exp()

    def sums(x: Tensor, w: Tensor) -> Tensor:
        return sl.psum(f({"w": w, "n": 2}, x).square().sum(), "dp")

    def body(w: Tensor, x: Tensor) -> Any:
        rows = vmap(grad(sums, 1), in_dims=(0, None))(torch.stack([x, 2 * x]), w)
        outer = grad(lambda w: vmap(sums, in_dims=(1, None))(torch.stack([x, 2 * x], 1), w).sum())(w)
        both = grad(lambda w: vmap(sums, in_dims=(2, 1))(torch.stack([x, x], 2), torch.stack([w, 2 * w], 1)).sum())(w)
        return rows, outer, both, grad(lambda w: grad(lambda w: vmap(lambda w: sums(x, w))(w[None])[0])(w).sum())(w)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return (w * x).exp().square().sum()

    one, two = grad(plain, 1)(X, W), grad(plain, 1)(2 * X, W)
    twice = grad(lambda w: grad(plain, 1)(X, w).sum())(W)
    close(on(body), (torch.stack([one, two]), one + two, one + 2 * grad(plain, 1)(X, 2 * W), twice))


def test_trees_integers_and_what_is_no_tensor() -> None:
    def forward(p: dict[str, Any], k: Tensor, power: int) -> tuple[Any, Any]:
        top, at = (p["a"][0] ** power).max(0)
        return {"top": top, "at": at, "k": k + 1, "none": None, "name": "f"}, (p["a"][0], at, power)

    def backward(kept: Any, g: Any) -> Any:
        a, at, power = kept
        assert g["at"] is None and g["k"] is None and g["name"] is None
        return {"a": [F.one_hot(at, len(a)) * g["top"] * power * a ** (power - 1)], "b": None}, None, None

    def body(w: Tensor, x: Tensor) -> Tensor:
        f = sl.custom_vjp(lambda *a: forward(*a)[0], forward, backward)

        def loss(w: Tensor) -> Tensor:
            out = f({"a": [w], "b": w}, torch.tensor([1, 2]), 3)
            assert out["name"] == "f" and out["k"].dtype == out["at"].dtype == torch.int64
            return 5 * out["top"] + out["k"].sum()

        return sl.grad(loss)(w)

    close(on(body), grad(lambda w: 5 * (w**3).max())(W))


def test_without_a_gradient_for_anything() -> None:
    f = sl.custom_vjp(lambda w: w.round(), lambda w: (w.round(), None), lambda kept, g: (None,))
    assert not on(lambda w, x: sl.grad(lambda w: f(w).sum())(w)).any()


# ---- types


def identity(dual: Callable[[Tensor], Any], made: Callable[[Tensor], Tensor] = lambda x: x) -> Callable[..., Tensor]:
    return sl.custom_vjp(made, lambda x: (made(x), None), lambda _, g: (dual(g),))


def test_types_of_cotangents() -> None:
    """A varying cotangent of a replicated argument is this rank's term; of a result `bwd` gets the dual."""
    seen: list[str] = []

    def noted(g: Tensor) -> Tensor:
        seen.append(region().type_of(g))
        return g

    def body(w: Tensor, x: Tensor) -> Any:
        def summed(y: Tensor) -> Tensor:
            return sl.psum((y * x).sum(), "dp")

        def vary(w: Tensor) -> Tensor:
            return sl.pvary(w, "dp")

        own = sl.grad(lambda r: summed(identity(noted)(r)))(vary(w))
        term = sl.grad(lambda r: summed(identity(lambda g: x.sum(0))(r)))(vary(w))
        assert region().type_of(own)[0] == region().type_of(term)[0] == "P"
        whole = sl.grad(lambda w: summed(identity(lambda g: sl.psum(noted(g), "dp"), vary)(w)))(w)
        sums = sl.grad(lambda x: identity(noted, lambda x: sl.psum(x, "dp"))(x).sum())(x)
        late = sl.grad(lambda x: sl.psum(identity(noted, lambda x: sl.pending(x, "dp"))(x), "dp").sum())(x)
        return sl.psum(own, "dp"), sl.psum(term, "dp"), whole, sl.psum(sums + late, "dp")

    *found, ones = on(body)
    close(tuple(found), (X.sum(0),) * 3)
    assert ones.eq(6).all() and {k[0] for k in seen} == {"P", "I", "R"}


def without_insertion(y: Tensor, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return (y * x).sum()


ERRORS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "no sum for what is equal": (
        lambda w, x: grad(lambda w: identity(lambda g: g * x[0])(w).sum())(w),
        "argument `0` is .* varying over dp; over `dp` the argument is invariant, so it must be invariant.\n"
        "  psum it over `dp` in bwd",
    ),
    "a sum that would be made again": (
        lambda w, x: grad(lambda r: sl.psum((identity(lambda g: sl.psum(g, "dp"))(r) * x).sum(), "dp"))(
            sl.pvary(w, "dp")
        ),
        "so it must be pending.\n  Return this rank's term",
    ),
    "a sum not made": (
        lambda w, x: grad(lambda x: sl.psum((identity(lambda g: sl.pending(g, "dp"))(x) * x).sum(), "dp"))(x),
        "pending over dp; over `dp` the argument is varying, so it must be varying.\n  psum_scatter it",
    ),
    "shape": (
        lambda w, x: grad(lambda w: identity(lambda g: g.sum())(w).sum())(w),
        r"argument `0` is f64\[\]; the argument is f64\[4\]",
    ),
    "dtype": (lambda w, x: grad(lambda w: identity(lambda g: g.float())(w).sum())(w), r"is f32\[4\]; the argument is"),
    "no tensor": (lambda w, x: grad(lambda w: identity(lambda g: 2.0)(w).sum())(w), "is float; the argument is"),
    "too few": (
        lambda w, x: grad(
            lambda w: sl.custom_vjp(torch.mul, lambda a, b: (a * b, a), lambda a, g: (g * a,))(w, w).sum()
        )(w),
        "mul: bwd gives a tuple, one cotangent for each of 2 arguments; found 1",
    ),
    "no tuple": (
        lambda w, x: grad(lambda w: sl.custom_vjp(torch.sin, lambda w: (w, w), lambda w, g: g)(w).sum())(w),
        "sin: bwd gives a tuple, .*; found a tensor",
    ),
    "no residuals": (
        lambda w, x: grad(lambda w: sl.custom_vjp(torch.sin, lambda w: w.sin(), lambda w, g: (g,))(w).sum())(w),
        r"sin: fwd gives \(out, residuals\), found a tensor",
    ),
    "another structure": (
        lambda w, x: grad(
            lambda w: sl.custom_vjp(lambda p: p["a"], lambda p: (p["a"], None), lambda _, g: ([g],))({"a": w}).sum()
        )(w),
        "what bwd gives does not match",
    ),
    "a leaf for a subtree": (
        lambda w, x: grad(
            lambda w: sl.custom_vjp(lambda p: p["a"], lambda p: (p["a"], None), lambda _, g: (g,))(
                {"a": w, "b": w}
            ).sum()
        )(w),
        "a leaf stands for a subtree",
    ),
    "lost before bwd": (
        lambda w, x: grad(lambda w: sl.psum(without_insertion(identity(lambda g: g)(w), x), "dp"))(w),
        "the cotangent of its result, which is invariant over `dp`, differs by rank: a reduction was lost",
    ),
    "captured": (
        lambda w, x: grad(
            lambda w: sl.custom_vjp(lambda x: x * w, lambda x: (x * w, w), lambda w, g: (g * w,))(2 * w).sum()
        )(w),
        "custom_vjp captured a value that is being differentiated",
    ),
    "pending into what is not linear": (
        lambda w, x: grad(
            lambda w: sl.psum((identity(lambda g: g.exp(), lambda w: sl.pvary(w, "dp"))(w) * x).sum(), "dp")
        )(w),
        "exp of a value that still waits for a sum over `dp`",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    body, message = ERRORS[name]
    with pytest.raises(sl.ShardError, match=f"(?s){message}"):
        on(body)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, on the first jvp
def test_no_forward_mode() -> None:
    with pytest.raises(sl.SpecError, match="sin: custom_vjp has no forward mode"):
        f = sl.custom_vjp(torch.sin, lambda w: (w.sin(), w), lambda w, g: (g * w.cos(),))
        on(lambda w, x: torch.func.jvp(lambda w: f(w).sum(), (w,), (w,))[1], jitted=True)


# ---- C17: attention over a sequence that is split


CUT = "batch/dp heads seq/cp head"
Q, K, V, G = torch.arange(4 * 2 * 2 * 16 * 3, dtype=F64).view(4, 2, 2, 16, 3).sin() * 2
POS, DOC = torch.arange(16), torch.repeat_interleave(torch.arange(3), torch.tensor([3, 5, 8]))
ORDERS = {"in order": POS, "zigzag": torch.tensor([0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9])}
assert torch.equal(ORDERS["zigzag"], ring_attention.zigzag(16, 4))


def attended(f: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any) -> Any:
    out, pull = vjp(lambda q, k, v: f(q, k, v, *rest), q, k, v)  # type: ignore[misc]
    return out, *pull(g)


def cut_attended(f: Callable[..., Tensor], mesh: sl.Mesh, causal: bool, order: Tensor, jitted: bool = False) -> Any:
    """Result and gradients, in the order of positions, of tokens that lie over ranks in `order`."""

    def body(q: Tensor, k: Tensor, v: Tensor, g: Tensor, pos: Tensor, doc: Tensor) -> Any:
        return attended(f, q, k, v, g, pos, doc, causal)

    with mesh:
        args = *sl.shard([x[:, :, order] for x in (Q, K, V, G)], CUT), *sl.shard((POS[order], DOC[order]), "seq/cp")
        run = sl.shard_map(body, in_specs=None, out_specs=CUT)
        return [x[:, :, order.argsort()] for x in sl.gather((sl.jit(run) if jitted else run)(*args))]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize(
    ("f", "dp", "cp", "order"),
    [
        (ring_attention.ring, 1, 2, "in order"),
        (ring_attention.ring, 2, 2, "zigzag"),
        (ring_attention.ring, 1, 4, "in order"),
        (ring_attention.ring, 1, 4, "zigzag"),
        (ring_attention.ring, 1, 1, "in order"),
        (ulysses, 1, 2, "in order"),
        (ulysses, 2, 2, "zigzag"),
        (ulysses, 1, 1, "in order"),
    ],
)
def test_c17_attention(f: Callable[..., Tensor], dp: int, cp: int, order: str, causal: bool) -> None:
    wanted = attended(ring_attention.plain, Q, K, V, G, POS, DOC, causal)
    masked = (DOC[:, None] == DOC) & ((POS[:, None] >= POS) if causal else True)
    close(wanted[0], F.scaled_dot_product_attention(Q, K, V, attn_mask=masked))
    mesh = sl.make_mesh(dp=dp, cp=cp, simulate=True)
    for x, y in zip(cut_attended(f, mesh, causal, ORDERS[order], jitted=cp == 2), wanted, strict=True):
        close(x, y)


@pytest.mark.parametrize("f", [ring_attention.ring, ulysses])
def test_c17_on_processes(f: Callable[..., Tensor]) -> None:
    wanted = attended(ring_attention.plain, Q, K, V, G, POS, DOC, True)
    for found in on_ranks(2, lambda: cut_attended(f, sl.make_mesh(dp=1, cp=2), True, ORDERS["zigzag"])):
        close(tuple(found), wanted)


def test_ring_sends_keys_and_values_again() -> None:
    """3 ranks: twice 4 tensors forward, the same backward, and 3 times the gradients of keys and values."""

    def body(q: Tensor, k: Tensor, v: Tensor, g: Tensor, pos: Tensor, doc: Tensor) -> Any:
        return attended(ring_attention.ring, q, k, v, g, pos, doc)

    mesh = sl.make_mesh(dp=1, cp=3, simulate=True)
    with mesh:
        args = *sl.shard([x[:, :, :15] for x in (Q, K, V, G)], CUT), *sl.shard((POS[:15], DOC[:15]), "seq/cp")
        f = sl.shard_map(body, in_specs=None, out_specs=CUT)
        assert sl.testing.collectives(f, *args, mesh=mesh) == {"ppermute:cp": 2 * 4 * 2 + 3 * 2}


@pytest.mark.parametrize("cp", [2, 4])
def test_c17_ulysses_with_heads_that_divide(cp: int) -> None:
    """4 heads, two or one on each rank. (Torch's attention has no second derivative on CPUs.)"""
    specs = (CUT, CUT, CUT, "seq/cp", "seq/cp")
    q = torch.arange(2 * 4 * 16 * 3, dtype=F64).view(2, 4, 16, 3).sin()
    options: Any = dict(in_specs=specs, out_specs=CUT, args=(q, q.cos(), q.flip(0), POS, DOC), adjoint=False)
    sl.testing.check(ulysses, ring_attention.plain, mesh=dict(dp=2, cp=cp), **options)


def test_c17_ulysses_with_heads_that_do_not_divide() -> None:
    x = torch.zeros(1, 6, 16, 3)
    with sl.make_mesh(dp=1, cp=4, simulate=True), pytest.raises(sl.SpecError) as e:
        f = sl.shard_map(ulysses, in_specs=None, out_specs=CUT)
        f(*sl.shard((x, x, x), CUT), *sl.shard((POS, DOC), "seq/cp"))
    assert "`heads` is 6 here, which does not divide by 4, the size of cp" in str(e.value)
    assert "batch/dp heads seq/cp head -> batch/dp heads/cp seq head" in str(e.value)
