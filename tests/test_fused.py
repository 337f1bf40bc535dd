"""Fused functions: rms_norm against torch's in every transform, typed, on ranks; adamw against its formula."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import shardlib as sl
from shardlib import fused
from shardlib.errors import SpecError
from shardlib.kernels import adamw as kernel

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, on the first jvp
F64 = torch.float64
X = torch.arange(105, dtype=F64).view(3, 5, 7).sin()
SCALE = torch.linspace(0.5, 1.7, 7, dtype=F64)
WEIGHT = torch.arange(7, dtype=F64).cos()


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def loss(x: Tensor, scale: Tensor) -> Tensor:
    return (sl.rms_norm(x, scale, 1e-5).square() * torch.arange(7, dtype=F64).cos()).sum()


def plain(x: Tensor, scale: Tensor) -> Tensor:
    return (F.rms_norm(x, x.shape[-1:], scale, 1e-5).square() * torch.arange(7, dtype=F64).cos()).sum()


def third(f: Callable[..., Tensor]) -> Tensor:
    first = grad(lambda x: grad(f)(x, SCALE).pow(3).sum())
    return grad(lambda x: first(x).square().sum())(X[0])


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f(X, SCALE),
    "grad": lambda f: grad(f, (0, 1))(X, SCALE),
    "jacrev twice": lambda f: jacrev(jacrev(f, (0, 1)), (0, 1))(X[0, :2], SCALE),
    "hessian": lambda f: hessian(f, (0, 1))(X[0, :2], SCALE),
    "jvp": lambda f: jvp(f, (X, SCALE), (X.cos(), WEIGHT)),
    "jvp of x": lambda f: jvp(lambda x: f(x, SCALE), (X,), (X.cos(),)),
    "third": third,
    "per sample": lambda f: vmap(grad(f, (0, 1)), (1, None))(X, SCALE),
    "mapped scale": lambda f: vmap(grad(f, (0, 1)), (None, 0))(X, torch.stack((SCALE, WEIGHT))),
    "both mapped": lambda f: vmap(f, (0, 1))(X, torch.stack((SCALE, WEIGHT, WEIGHT), 1)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_rms_norm_in_transforms(name):
    close(TRANSFORMS[name](loss), TRANSFORMS[name](plain))


def test_rms_norm_under_plain_autograd():
    x, scale = X.clone().requires_grad_(), SCALE.clone().requires_grad_()
    close(torch.autograd.grad(loss(x, scale), (x, scale)), grad(plain, (0, 1))(X, SCALE))


def test_nested_forward_mode_is_refused():
    with pytest.raises(SpecError, match="forward mode is nested; use jacrev for one"):
        jacfwd(jacfwd(loss))(X[0, :2], SCALE)


def on_ranks(jitted: bool, remat: bool) -> Any:
    """Value and gradients on ranks; x is split over dp, both are invariant over tp."""
    f = sl.remat(loss) if remat else loss

    def body(x: Tensor, scale: Tensor) -> Any:
        return sl.value_and_grad(lambda x, s: sl.pending(f(x, s), "dp"), (0, 1))(x, scale)

    with sl.make_mesh(dp=3, tp=2, simulate=True):
        run = sl.shard_map(body, in_specs=("b/dp s d", "d"), out_specs=("", ("b/dp s d", "d")))
        return sl.gather((sl.jit(run) if jitted else run)(sl.shard(X, "b/dp s d"), sl.shard(SCALE, "d")))


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
def test_rms_norm_on_ranks(jitted, remat):
    """The gradient of the invariant scale is summed over dp, where x differs, and not over tp."""
    close(on_ranks(jitted, remat), (plain(X, SCALE), grad(plain, (0, 1))(X, SCALE)))


def test_second_order_on_ranks():
    def body(x: Tensor, scale: Tensor) -> Tensor:
        def first(s: Tensor) -> Tensor:
            return sl.grad(lambda s: sl.pending(loss(x, s), "dp"))(s).square().sum()

        return sl.grad(first)(scale)

    with sl.make_mesh(dp=3, simulate=True):
        f = sl.shard_map(body, in_specs=("b/dp s d", "d"), out_specs="d")
        found = sl.gather(f(sl.shard(X, "b/dp s d"), sl.shard(SCALE, "d")))
    close(found, grad(lambda s: grad(plain, 1)(X, s).square().sum())(SCALE))


def test_types_of_rms_norm():
    seen = []

    def body(x: Tensor, scale: Tensor) -> Tensor:
        several = scale, sl.pvary(scale, "tp")
        seen.extend(map(sl.typeof, (*(sl.rms_norm(s, several[0]) for s in several), sl.rms_norm(x, several[1]))))
        return sl.rms_norm(x, scale)

    with sl.make_mesh(dp=3, tp=2, simulate=True):
        f = sl.shard_map(body, in_specs=("b/dp s d", "d"), out_specs="b/dp s d")
        close(sl.gather(f(sl.shard(X, "b/dp s d"), sl.shard(SCALE, "d"))), F.rms_norm(X, (7,), SCALE, 1e-6))
    both = "f64[1, 5, 7] varying over dp, replicated over tp"
    assert seen[:3] == ["f64[7] invariant", "f64[7] replicated over tp", both]


@pytest.mark.parametrize("which", ["x", "scale"])
def test_pending_operand_names_the_missing_sum(which):
    def body(x: Tensor, scale: Tensor) -> Tensor:
        part = sl.pending(x, "dp")
        return sl.rms_norm(part, scale) if which == "x" else sl.rms_norm(x, part[0, 0])

    with sl.make_mesh(dp=3, simulate=True):
        f = sl.shard_map(body, in_specs=("b/dp s d", "d"), out_specs="b/dp s d")
        with pytest.raises(SpecError, match=r"(?s)rms_norm of a value that still waits for a sum over `dp`.*psum"):
            f(sl.shard(X, "b/dp s d"), sl.shard(SCALE, "d"))


def test_captured_by_remat():
    def body(scale: Tensor) -> Tensor:
        return sl.grad(lambda s: sl.remat(lambda x: sl.rms_norm(x, s).sum())(scale))(scale)

    with sl.make_mesh(dp=1, simulate=True), pytest.raises(SpecError, match="rms_norm: remat captured a value"):
        sl.shard_map(body, in_specs="d", out_specs="d")(sl.shard(SCALE, "d"))


@pytest.mark.parametrize(
    ("x", "scale"),
    [(X, SCALE[:3]), (X[0, 0, 0], SCALE), (X[..., :0], SCALE[:0]), (X.long(), SCALE), (X, SCALE[None])],
    ids=["size", "0-d", "empty", "integers", "2-d"],
)
def test_bad_operands(x, scale):
    with pytest.raises(SpecError, match=r"rms_norm takes x \(..., n\) and scale \(n\), floats with n > 0; found"):
        sl.rms_norm(x, scale)


def test_rms_norm_on_shapes_alone():
    y = sl.rms_norm(X.to("meta"), SCALE.to("meta"))
    assert y.shape == X.shape and y.is_meta


# ---- token_scores

LOGITS, AT = 3 * X.cos(), torch.arange(15).view(3, 5) % 8 - 1


def scores(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    return fused.token_scores(x, at)


def plain_scores(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    found = x.log_softmax(-1).gather(-1, at.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(at < 0, 0, found), x.logsumexp(-1)


def mixed(f: Callable[..., Any], x: Tensor, at: Tensor = AT) -> Tensor:
    """A number that depends on both results."""
    picked, lse = f(x, at)
    return (picked.sin() * lse.square()).sum()


SCORES: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f(LOGITS, AT),
    "grad": lambda f: grad(lambda x: mixed(f, x))(LOGITS),
    "grad of one": lambda f: [grad(lambda x, i=i: f(x, AT)[i].square().sum())(LOGITS) for i in (0, 1)],
    "jacrev twice": lambda f: jacrev(jacrev(lambda x: mixed(f, x, AT[0])))(LOGITS[0]),
    "hessian": lambda f: hessian(lambda x: mixed(f, x, AT[0]))(LOGITS[0]),
    "jvp": lambda f: jvp(lambda x: f(x, AT), (LOGITS,), (X,)),
    "third": lambda f: grad(lambda x: grad(lambda y: grad(lambda z: mixed(f, z))(y).pow(3).sum())(x).pow(2).sum())(
        LOGITS
    ),
    "per sample": lambda f: vmap(grad(lambda x, at: mixed(f, x, at)), (1, 1))(LOGITS, AT),
    "mapped logits": lambda f: vmap(grad(lambda x: mixed(f, x, AT[:, 0])), 1)(LOGITS),
    "mapped targets": lambda f: vmap(grad(lambda x, at: mixed(f, x, at)), (None, 0))(
        LOGITS, torch.stack((AT, AT.flip(0)))
    ),
    "transposed": lambda f: grad(lambda x: mixed(f, x.transpose(0, 1), AT.T))(LOGITS),
}


@pytest.mark.parametrize("name", SCORES)
def test_token_scores_in_transforms(name):
    close(SCORES[name](scores), SCORES[name](plain_scores))


def test_token_scores_under_plain_autograd():
    x = LOGITS.clone().requires_grad_()
    close(torch.autograd.grad(mixed(scores, x), x)[0], grad(lambda x: mixed(plain_scores, x))(LOGITS))


def test_token_scores_in_nested_forward_mode_are_refused():
    with pytest.raises(SpecError, match="token_loss: torch loses terms of Functions where forward mode is nested"):
        jacfwd(jacfwd(lambda x: mixed(scores, x, AT[0])))(LOGITS[0])


def test_bad_logits():
    for x, at in ((LOGITS, AT[0]), (LOGITS[..., :0], AT), (LOGITS.long(), AT), (LOGITS[0, 0, 0], AT)):
        with pytest.raises(SpecError, match=r"token_loss takes logits \(..., n\), floats with n > 0; found .* for i64"):
            scores(x, at)
    with pytest.raises(SpecError, match=r"token_loss takes int64 targets, found i32\[3, 5\]"):
        scores(LOGITS, AT.int())


# ---- adamw

RATE, COUNT = torch.tensor(0.02, dtype=F64), torch.tensor(3)
OPTIONS = dict(lr=RATE, count=COUNT, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1)


def buffers(shape: tuple[int, ...], p: torch.dtype = F64, g: torch.dtype = F64, m: torch.dtype = F64) -> list[Tensor]:
    make = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=make, dtype=F64) for _ in range(3)]
    return [x.to(d) for x, d in zip((*values, values[0].square()), (p, g, m, m), strict=True)]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(37,), (), (0,), (3, 5)], ids=str)
def test_adamw_equals_its_formula_and_torch(shape, decay):
    p, g, m, v = buffers(shape)
    options = OPTIONS | dict(weight_decay=decay)
    found = fused.adamw(p, g, m, v, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(
        found, kernel.reference(p, g, m, v, RATE, COUNT, 0.8, 0.95, 1e-6, decay), rtol=1e-14, atol=1e-15
    )
    theirs = torch.optim.AdamW([p.clone()], lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
    own = theirs.param_groups[0]["params"][0]
    theirs.state[own] = dict(step=torch.tensor(2.0), exp_avg=m.clone(), exp_avg_sq=v.clone())
    own.grad = g
    theirs.step()
    torch.testing.assert_close(p + found[0], own, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("p", [F64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("g", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_in_place_is_the_other(p, g):
    wide = F64 if p == F64 else torch.float32
    old = buffers((6, 7), p, g, wide)
    update, m, v = fused.adamw(*old, **OPTIONS)  # type: ignore[arg-type]
    assert (update.dtype, m.dtype, v.dtype) == (wide,) * 3
    exact = kernel.reference(*(x.double() for x in old), RATE, COUNT, 0.8, 0.95, 1e-6, 0.1)  # type: ignore[arg-type]
    torch.testing.assert_close((update, m, v), tuple(x.to(wide) for x in exact), rtol=1e-5, atol=1e-7)
    own = [x.clone() for x in old]
    fused.adamw_(*own, **OPTIONS)  # type: ignore[arg-type]
    assert torch.equal(own[1], old[1])
    for found, wanted in zip(own, ((old[0].to(wide) + update).to(p), old[1], m, v), strict=True):
        torch.testing.assert_close(found, wanted, rtol=4 * torch.finfo(p).eps, atol=0)


def test_adamw_takes_any_strides():
    old = buffers((6, 7))
    turned = [x.T.contiguous().T if i % 2 else x for i, x in enumerate(old)]
    close(fused.adamw(*turned, **OPTIONS), fused.adamw(*old, **OPTIONS))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="make them contiguous"):
        fused.adamw_(*turned, **OPTIONS)  # type: ignore[arg-type]


def test_adamw_is_one_node_whatever_rate_and_count():
    def update(p, g, m, v, lr, count):
        return fused.adamw(p, g, m, v, lr=lr, count=count)

    old = buffers((5,))
    graph = make_fx(update, tracing_mode="fake")(*old, RATE, COUNT)
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "getitem" not in str(n.target)]
    assert targets == ["shardlib.adamw.default"]
    close(graph(*old, RATE / 2, COUNT + 9), fused.adamw(*old, lr=RATE / 2, count=COUNT + 9))


def test_bad_buffers():
    p, g, m, v = buffers((4,))
    for wrong in ((p, g[:3], m, v), (p, g, m, v.float()), (p, g, m.half(), v.half()), (p.long(), g, m, v)):
        with pytest.raises(SpecError, match=r"takes p, g, m, v of one shape, floats, m and v both .* found "):
            fused.adamw(*wrong, **OPTIONS)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="lr, a float, and count, an integer, as 0-d tensors"):
        fused.adamw(p, g, m, v, lr=RATE[None], count=COUNT)
