"""remat: values and gradients of every order, what runs again under which policy; closures; names and their errors."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bodies import assert_close, on
from ranks import on_ranks
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from shardlib import tree
from shardlib.graph.nodes import op_name

R = torch.Generator().manual_seed(2)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=R, dtype=torch.float64)


X, W = draw(4, 3), draw(3, 5)


def assert_same(found: Any, wanted: Any) -> None:
    """Bit for bit."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class Ops(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def test_remat_runs_again_collectives_included() -> None:
    def block(w: Tensor, x: Tensor) -> Tensor:
        return (x @ sl.all_gather("d e/dp -> d e", w)).tanh()

    def body(w: Tensor, x: Tensor) -> Any:
        counts = []
        for f in (block, sl.remat(block), sl.remat(sl.remat(block))):
            with Ops() as ops:
                g = grad(lambda w, f=f: sl.psum(f(w, x).square().sum(), "dp"))(w)
            counts.append((ops.counts["tanh"], ops.counts["all_gather_into_tensor"]))
        assert counts == [(1, 1), (2, 2), (3, 3)], counts
        return g

    w = draw(3, 4)
    found = on(body, (w, "d e/dp"), (X, "b/dp d"), out="d e/dp")
    assert_close(found, torch.func.grad(lambda w: (X @ w).tanh().square().sum())(w))


def test_remat_takes_and_gives_trees() -> None:
    def f(p: dict[str, Any], x: Tensor, *, scale: float, k: Tensor) -> Any:
        y = x @ p["w"] * scale
        return {"y": y, "same": p["w"], "twice": (y, y), "k": k + 1, "none": None, "n": 3, "top": y.topk(2)[1]}

    def loss(f: Any, w: Tensor, x: Tensor) -> Tensor:
        out = f({"w": w, "unused": w}, x, scale=2.0, k=torch.tensor([1, 2]))
        assert out["n"] == 3 and out["none"] is None and out["k"].dtype == out["top"].dtype == torch.int64
        total = out["y"].sin().sum() + (out["twice"][0] * out["twice"][1]).sum() + (out["top"] * out["k"]).sum()
        return total + out["same"].sum()

    def body(w: Tensor, x: Tensor) -> Any:
        w, out = sl.pvary(w, "dp"), []
        for g in (f, sl.remat(f)):
            out.append(sl.psum(grad(lambda w, g=g: loss(g, w, x))(w), "dp"))
        return out

    a, b = on(body, (W, "d e"), (X, "b/dp d"))
    assert_close(a, b)


def test_remat_without_derivatives_and_mapped() -> None:
    def f(r: Tensor, w: Tensor) -> Tensor:
        return (r @ w).tanh()

    def body(w: Tensor, x: Tensor) -> Any:
        plain = sl.remat(f)(x, w)
        mapped = vmap(sl.remat(f), in_dims=(0, None))(x, w)
        rows = vmap(grad(lambda w, r: sl.remat(f)(r, w).sum()), in_dims=(None, 0))(sl.pvary(w, "dp"), x)
        outer = grad(lambda w: sl.psum(vmap(sl.remat(f), in_dims=(0, None))(x, w).sum(), "dp"))(w)
        return plain, mapped, rows, outer

    specs = ("b/dp e", "b/dp e", "b/dp d e", "d e")
    plain, mapped, rows, outer = on(body, (W, "d e"), (X, "b/dp d"), out=specs)
    assert_close((plain, mapped), (f(X, W), f(X, W)))
    wanted = vmap(torch.func.grad(lambda w, r: f(r, w).sum()), in_dims=(None, 0))(W, X)
    assert_close((rows, outer), (wanted, wanted.sum(0)))


CLOSURES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "used by an op": lambda w, x: sl.remat(lambda x: x @ w)(x),
    "used by a collective": lambda w, x: sl.remat(lambda x: x @ sl.pvary(w, "dp"))(x),
    "used by a pattern": lambda w, x: sl.remat(lambda x: sl.einsum("b/dp d, d e -> b/dp e", x, w))(x),
    "in a derivative within": lambda w, x: grad(lambda x: sl.remat(lambda x: x @ w)(x).sum())(x),
    "of an outer derivative": lambda w, x: grad(lambda y: sl.remat(lambda y: (y @ w).sum())(y))(x) @ w,
    "in remat within remat": lambda w, x: sl.remat(lambda x: sl.remat(lambda x: x @ w)(x))(x),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_remat_refuses_what_is_captured_and_differentiated(name: str) -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        return grad(lambda w: sl.psum(CLOSURES[name](w, x).sum(), "dp"))(w)

    with pytest.raises(
        sl.SpecError, match=r"remat captured a value that is being differentiated .*\n  Pass it as an argument"
    ):
        on(body, (W, "d e"), (X, "b/dp d"))


def test_remat_may_capture_constants() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        return grad(lambda w: sl.psum(sl.remat(lambda w: x @ w * w.shape[0])(w).square().sum(), "dp"))(w)

    assert_close(on(body, (W, "d e"), (X, "b/dp d")), torch.func.grad(lambda w: (X @ w * 3).square().sum())(W))


# ---- policies

POLICIES: tuple[Any, ...] = ("nothing", ["out"], {"dots", "act"})


def layer(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    h = sl.save_name(torch.tanh(x @ sl.all_gather("d e/dp -> d e", w)), "act")
    y = h @ v
    y += 1  # into what `dots` keeps
    return x + sl.save_name(torch.sin(y), "out").exp()


def orders(f: Callable[..., Tensor], p: Any, x: Tensor) -> Any:
    def loss(p: Any, x: Tensor) -> Tensor:
        return sl.psum(f(*p, f(*p, x)).square().sum(), "dp")

    def first(p: Any) -> Tensor:
        a, b = grad(loss)(p, x)
        return sl.psum(a.square().sum(), "dp") + b.square().sum()

    rows = vmap(grad(lambda p, r: f(*p, r).square().sum()), in_dims=(None, 0))
    many = vmap(lambda s: grad(loss)(tree.map_(lambda t: t * s, p), x))(torch.tensor([0.5, 2.0], dtype=torch.float64))
    return dict(
        first=grad(loss)(p, x),
        second=grad(first)(p),
        rows=rows((p[0], sl.pvary(p[1], "dp")), x),
        outer=grad(lambda p: sl.psum(vmap(lambda r: f(*p, r))(x).sum(), "dp"))(p),
        many=many,
        jacobian=jacrev(lambda v: sl.psum(f(p[0], v, x).sum(0), "dp"))(p[1]),
    )


SPECS: Any = dict.fromkeys(("first", "second", "outer"), ("d e/dp", "e d")) | dict(
    rows=("b/dp d e", "b/dp e d"), many=("n d e/dp", "n e d"), jacobian="i e d"
)


def test_every_policy_under_every_transform() -> None:
    """Bit for bit; second derivatives, whose terms come in another order with remat, as those of remat are."""
    wraps: list[Callable[..., Any]] = [lambda f: f, *(lambda f, p=p: sl.remat(f, p) for p in POLICIES)]
    wraps += [lambda f: sl.remat(sl.remat(f, "dots"), ("act",))]

    def body(w: Tensor, v: Tensor, x: Tensor) -> Any:
        return [orders(wrap(layer), (w, v), x) for wrap in wraps]

    with sl.make_mesh(dp=1, tp=1):
        f = sl.shard_map(body, in_specs=("d e/dp", "e d", "b/dp d"), out_specs=[SPECS] * len(wraps))
        args = sl.shard(draw(3, 4), "d e/dp"), sl.shard(draw(4, 3), "e d"), sl.shard(X, "b/dp d")
        plain, *found = sl.gather(f(*args))
    assert_close(found[0]["second"], plain["second"])
    for one in found:
        assert_same({**one, "second": None}, {**plain, "second": None})
        assert_close(one["second"], found[0]["second"])


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, on the first jvp
def test_forward_mode() -> None:
    """Under every policy; over, and under, a gradient; nested it is refused."""
    wraps: list[Callable[..., Any]] = [lambda f, p=p: sl.remat(f, p) for p in POLICIES]
    wraps += [lambda f: sl.remat(sl.remat(f), ("act",))]

    def orders(f: Callable[..., Tensor], w: Tensor, v: Tensor, x: Tensor) -> Any:
        def loss(v: Tensor) -> Tensor:
            return sl.psum(f(w, v, x).square().sum(), "dp")

        def slope(v: Tensor) -> Tensor:
            return jvp(loss, (v,), (v.sin(),))[1]  # type: ignore[misc]

        return slope(v), grad(slope)(v), jvp(grad(loss), (v,), (v.sin(),))[1], hessian(loss)(v)  # type: ignore[misc]

    def body(w: Tensor, v: Tensor, x: Tensor) -> Any:
        return [orders(wrap(layer), w, v, x) for wrap in (lambda f: f, *wraps)]

    def nested(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return jvp(lambda v: jvp(lambda v: sl.remat(layer)(w, v, x), (v,), (v,))[1], (v,), (v,))[1]  # type: ignore[misc]

    with sl.make_mesh(dp=2, tp=1, simulate=True):
        args = sl.shard(draw(3, 4), "d e/dp"), sl.shard(draw(4, 3), "e d"), sl.shard(X, "b/dp d")
        plain, *found = sl.gather(sl.jit(sl.shard_map(body, in_specs=None, out_specs="..."))(*args))
        with pytest.raises(sl.SpecError, match="remat of layer: torch loses terms of Functions where forward mode is"):
            sl.jit(sl.shard_map(nested, in_specs=None, out_specs="b/dp d"))(*args)
    for one in found:
        assert_close(one, plain)


COUNTS = {  # mm, tanh, sin, all_gather of one layer forward and backward; mm, tanh, sin of a second derivative
    "everything": (6, 1, 1, 1, 8, 1, 2),
    "nothing": (8, 2, 2, 2, 18, 4, 5),
    "dots": (6, 2, 2, 2, 12, 4, 5),
    ("act",): (8, 1, 2, 2, 18, 1, 5),
    ("out",): (8, 2, 1, 2, 18, 4, 2),
    ("out", "dots", "act"): (6, 1, 1, 2, 12, 1, 2),
}


@pytest.mark.parametrize("policy", COUNTS, ids=str)
def test_what_is_kept_is_not_run_again(policy: Any) -> None:
    """In eager code, on shapes and on two ranks; in the second derivative the layer itself runs four times."""

    def body(w: Tensor, v: Tensor, x: Tensor) -> Any:
        def loss(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
            return sl.psum(sl.remat(layer, policy)(w, v, x).square().sum(), "dp")

        with Ops() as first:
            g = grad(loss, (0, 1, 2))(w, v, x)
        with Ops() as second:
            h = grad(lambda x: sl.psum(grad(loss, 2)(w, v, x).square().sum(), "dp"))(x)
        names = "mm tanh sin all_gather_into_tensor".split()
        told.add((*(first.counts[k] for k in names), *(second.counts[k] for k in names[:3])))
        return g, h

    told = set[Any]()
    on(body, (draw(3, 4), "d e/dp"), (draw(4, 3), "e d"), (X, "b/dp d"), out=(("d e/dp", "e d", "b/dp d"), "b/dp d"))
    assert told == {COUNTS[policy]}


# ---- in a train step


@sl.pytree
class Layer:
    w: Tensor = sl.spec("model/dp hidden/tp")
    v: Tensor = sl.spec("hidden/tp model/dp")


def mixed(w: Layer, x: Tensor, key: Tensor | None) -> Tensor:
    w = sl.gather(w, "dp")
    h = sl.einsum("batch/dp seq model, model hidden/tp -> batch/dp seq hidden/tp", x, w.w)
    q = h.unflatten(-1, (2, -1)).transpose(1, 2)
    a = sl.save_name(F.scaled_dot_product_attention(q, q, q, is_causal=True), "attention")
    h = sl.dropout("batch/dp seq hidden/tp", torch.tanh(a.transpose(1, 2).flatten(2)), key, 0.3)
    y = sl.einsum("batch/dp seq hidden/tp, hidden/tp model -> batch/dp seq model +tp", h, w.v)
    return x + sl.save_name(sl.psum("batch/dp seq model +tp -> batch/dp seq model", y), "out").sin()


def loss_of(policy: Any, scanned: bool) -> Callable[..., sl.Mean]:
    block = sl.remat(mixed, policy)

    def loss(layers: Any, batch: Tensor, key: Tensor) -> sl.Mean:
        if scanned:
            keys = sl.random.split(key, 2)
            x, _ = sl.scan(lambda x, wk: (block(wk[0], x, wk[1]), None), batch * 1, (layers, keys))
        else:
            x = block(layers[1], block(layers[0], batch * 1, None), None)
        return sl.Mean.of("batch/dp seq model", x**2)

    return loss


def trained(policy: Any, scanned: bool, jitted: bool = True, use: Any = sl.passes.default) -> Any:
    """New parameters and loss; the program, where there is one. Dropout in the loop, which is traced once."""
    specs = sl.stack(sl.specs(Layer), "layers") if scanned else [sl.specs(Layer)] * 2
    g = torch.Generator().manual_seed(3)
    layers = [Layer(*(torch.randn(*s, generator=g, dtype=torch.float64) / 3 for s in ((6, 8), (8, 6)))) for _ in "ab"]
    params = tree.map_(lambda *x: torch.stack(x), *layers) if scanned else layers
    step = sl.step(loss_of(policy, scanned), sl.optim.sgd(0.1), layout=sl.zero(specs, stage=3))
    state = step.init(sl.shard(params, specs), key=sl.random.key(5))
    batch = sl.shard(torch.randn(8, 5, 6, generator=g, dtype=torch.float64), "batch/dp seq model")
    run = sl.jit(step, passes=use) if jitted else step
    program = run.lower(state, batch) if jitted else None
    state, metrics = run(state, batch)
    return [*tree.leaves(sl.gather(state.params)), metrics["loss"]], program


def counted(program: Any) -> tuple[int, ...]:
    """How often a step runs products, attention and its derivative, collectives over tp."""
    graphs = program.program
    calls = Counter(n.target for n in graphs["step"].graph.nodes if n.op == "call_module")
    found: Counter[str] = Counter()
    for name, module in graphs.items():
        for n in module.graph.nodes:
            found[op_name(n)] += calls[name] if name != "step" else 1
    sums = sum(c.times for c in program.collectives() if c.axis == "tp")
    attention = sum(v for k, v in found.items() if k.startswith("_scaled_dot") and "backward" not in k)
    return found["mm"] + found["bmm"], attention, sums


@pytest.mark.parametrize("scanned", (False, True), ids=("", "scan"))
def test_steps_under_policies(scanned: bool) -> None:
    """Each layer has two products, attention and a sum; what backward does not need is not made again in a program."""
    policies = ("everything", "nothing", "dots", ("attention", "out"))
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        (plain, program), *others = [trained(p, scanned) for p in policies]
    (products, attention, sums), most = counted(program), program.memory().total
    for found, _ in others:
        assert_same(found, plain)
    assert [counted(p) for _, p in others] == [
        (products + 4, attention + 2, sums + 2),
        (products, attention, sums + 2),
        (products + 2, attention, sums),
    ]
    nothing, dots, names = (p.memory().total for _, p in others)
    assert nothing < names < most and nothing < dots < most


def test_on_processes() -> None:
    def body() -> Any:
        with sl.make_mesh(dp=2, tp=1):
            return [trained(("attention", "out"), *how)[0] for how in ((True, True), (False, False))]

    with sl.make_mesh(dp=2, tp=1, simulate=True):
        wanted = [trained("everything", scanned)[0] for scanned in (True, False)]
    for found in on_ranks(2, body):
        assert_close(found, wanted)


# ---- errors


def refused(policy: Any) -> str:
    with pytest.raises(sl.SpecError) as e:
        on(
            lambda w, v, x: grad(lambda w: sl.psum(sl.remat(layer, policy)(w, v, x).sum(), "dp"))(w),
            (draw(3, 4), "d e/dp"), (draw(4, 3), "e d"), (X, "b/dp d"),
        )  # fmt: skip
    return str(e.value)


def test_errors() -> None:
    assert "remat of layer: unknown policy 'act'; there are `nothing`, `everything` and `dots`" in refused("act")
    assert "Names given by sl.save_name stand in a tuple: ('act',)" in refused("act")
    assert "unknown policy ('everything', 'act')" in refused(("everything", "act"))
    assert "unknown policy (3,)" in refused((3,)) and "unknown policy None; there" in refused(None)
    assert "keeps `atc`, a name that no sl.save_name gives there; it names `act` and `out`" in refused(("atc", "out"))
    for name in ("dots", "", 3):
        with pytest.raises(
            sl.SpecError, match="save_name takes a name other than `nothing`, `everything` and `dots`; fo"
        ):
            sl.save_name(X, name)  # type: ignore[arg-type]
    with pytest.raises(sl.SpecError, match="remat captured a value that is being differentiated"):
        on(lambda w: grad(lambda w: sl.remat(lambda x: x @ w, "dots")(w.T.exp()).sum())(w), (W, "d e"))
