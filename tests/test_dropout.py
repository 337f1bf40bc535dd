"""dropout: the mask is that of one process, on every mesh, in every number of micro-batches, again under remat."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib.types import region

F64 = torch.float64
KEY = sl.random.key(5)


def kept(shape: tuple[int, ...], p: float = 0.5, key: Tensor = KEY) -> Tensor:
    """What one process keeps."""
    return sl.random.bernoulli(key, 1 - p, shape)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=F64)


def dropped(mesh: sl.Mesh, pattern: str, x: Tensor, p: float = 0.5, plain: str | None = None) -> Tensor:
    """`dropout(pattern, x)` on a mesh, gathered; `plain`: how `x` is cut and the result is."""
    spec = plain or pattern
    with mesh:
        f = sl.shard_map(lambda x, key: sl.dropout(pattern, x, key, p), in_specs=(spec, "k"), out_specs=spec)
        args = sl.shard(x, spec), sl.shard(KEY, "k")
        found = sl.gather(f(*args))
        assert torch.equal(found, sl.gather(sl.jit(f)(*args)))
    return found


@pytest.mark.parametrize("pattern", ["b/dp s m", "b/dp s/tp m", "b s/tp/dp m", "b/tp s m/dp", "b s m", "b/dp ..."])
def test_c36_the_mask_is_that_of_one_process(pattern: str) -> None:
    mask = kept((4, 8, 6))
    assert 70 < mask.sum() < 122
    assert torch.equal(dropped(sl.make_mesh(dp=2, tp=2, simulate=True), pattern, ones(4, 8, 6)), 2 * mask.double())


def test_c36_on_processes() -> None:
    found = on_ranks(4, lambda: dropped(sl.make_mesh(dp=2, tp=2), "b/dp s/tp m", ones(4, 2, 3)))
    assert all(torch.equal(x, 2 * kept((4, 2, 3)).double()) for x in found)


def test_groups_of_axes_and_of_dimensions() -> None:
    mesh = sl.make_mesh(dp=dict(r=2, f=2), tp=1, simulate=True)
    assert torch.equal(dropped(mesh, "b/dp m/tp", ones(8, 3)), 2 * kept((8, 3)).double())
    flat = dropped(mesh, "(b s)/dp m", ones(8, 3), plain="rows/dp m")
    assert torch.equal(flat, 2 * kept((8, 3)).double())


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_scale_and_gradient(p: float) -> None:
    """x / (1 - p) where it is kept, and its gradient; p=0 is the identity, p=1 all zeros."""
    x = torch.arange(48, dtype=F64).view(8, 6).sin()
    factor = kept((8, 6), p).double() / max(1 - p, 1e-9)

    def body(x: Tensor, key: Tensor) -> Any:
        def loss(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: sl.psum(f(x, key).square().sum(), "dp")

        def drop(x: Tensor, key: Tensor) -> Tensor:
            return sl.dropout("b/dp m", x, key, p)

        y = drop(x, key)
        assert p or y is x
        many = torch.func.vmap(lambda x: drop(x, key))(torch.stack([x, 3 * x]))
        return y, sl.grad(loss(drop))(x), sl.grad(loss(sl.remat(drop)))(x), many[1]

    with sl.make_mesh(dp=2, tp=2, simulate=True):
        f = sl.shard_map(body, in_specs=("b/dp m", "k"), out_specs="b/dp m")
        y, g, again, many = sl.gather(f(sl.shard(x, "b/dp m"), sl.shard(KEY, "k")))
    torch.testing.assert_close(y, x * factor, rtol=1e-15, atol=0)
    torch.testing.assert_close(g, 2 * x * factor**2, rtol=1e-15, atol=0)
    assert torch.equal(again, g)
    torch.testing.assert_close(many, 3 * y, rtol=1e-15, atol=0)


def test_a_pending_sum_stays_one() -> None:
    def body(x: Tensor, key: Tensor) -> Tensor:
        y = sl.dropout("b/dp m +tp", x, key, 0.5)
        assert region().type_of(y) == "VP"
        return sl.psum("b/dp m +tp -> b/dp m", y)

    x = torch.arange(32, dtype=F64).view(2, 4, 4)
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        f = sl.shard_map(lambda x, k: body(x[0], k), in_specs=("one/tp b/dp m", "k"), out_specs="b/dp m")
        found = sl.gather(f(sl.shard(x, "one/tp b/dp m"), sl.shard(KEY, "k")))
    assert torch.equal(found, 2 * x.sum(0) * kept((4, 4)))


def test_without_a_key_nothing_is_dropped() -> None:
    """A loss with `key=None` gets a key from `step`, none from `evaluate`, which may be given one."""

    def loss(w: Tensor, x: Tensor, key: Tensor | None = None) -> sl.Mean:
        return sl.Mean.of("b/dp m", w * sl.dropout("b/dp m", x, key, 0.5))

    x, w = torch.arange(1.0, 25, dtype=F64).view(4, 6), torch.ones((), dtype=F64)
    with sl.make_mesh(dp=2, tp=1, simulate=True):
        step, valid, batch = sl.step(loss, sl.optim.sgd(0.0)), sl.evaluate(loss), sl.shard(x, "b/dp m")
        state, metrics = step(step.init(sl.shard(w, ""), key=KEY), batch)
        assert valid(state.params, batch)[0].value == x.mean()
        assert valid(state.params, batch, key=KEY)[0].value == (2 * x * kept((4, 6))).mean() != x.mean()
    assert metrics["loss"] == (2 * x * kept((4, 6), key=sl.random.fold_in(KEY, 0))).mean()


# ---- inside step


def net(flat: bool, rematted: bool) -> Callable[..., sl.Mean]:
    """Two layers with dropout on activations, on a flattened dimension, on a weight, and on the weights of tokens."""

    def layer(w: Tensor, x: Tensor, key: Tensor) -> Tensor:
        w = sl.dropout("m n", w, sl.random.fold_in(key, 7), 0.3)
        if flat:
            return sl.dropout("(batch seq)/dp n", (x @ w).flatten(0, 1), key, 0.5).unflatten(0, x.shape[:2])
        return sl.dropout("batch/dp seq n", x @ w, key, 0.5)

    def loss(p: dict[str, Tensor], batch: dict[str, Tensor], key: Tensor) -> sl.Mean:
        x = batch["x"]
        for i, w in enumerate((p["a"], p["b"])):
            x = (sl.remat(layer) if rematted else layer)(w, x, sl.random.fold_in(key, i)).tanh()
        weight = sl.dropout("batch/dp seq", batch["weight"], sl.random.fold_in(key, 9), 0.4)
        return sl.Mean.of("batch/dp seq", x.sum(-1), weight)

    return loss


def plain(p: dict[str, Tensor], x: Tensor, key: Tensor) -> Tensor:
    def drop(x: Tensor, key: Tensor, p: float) -> Tensor:
        return x / (1 - p) * kept(tuple(x.shape), p, key)

    for i, w in enumerate((p["a"], p["b"])):
        k = sl.random.fold_in(key, i)
        x = drop(x @ drop(w, sl.random.fold_in(k, 7), 0.3), k, 0.5).tanh()
    weight = drop(torch.ones_like(x[..., 0]), sl.random.fold_in(key, 9), 0.4)
    return (x.sum(-1) * weight).sum() / weight.sum()


PARAMS = {"a": torch.arange(9, dtype=F64).view(3, 3).cos(), "b": torch.arange(9, dtype=F64).view(3, 3).sin()}
X = torch.arange(120, dtype=F64).view(8, 5, 3).sin()


def entered() -> Any:
    return {"x": sl.shard(X, "batch/dp seq m"), "weight": sl.shard(torch.ones_like(X[..., 0]), "batch/dp seq")}


def trained(mesh: sl.Mesh, loss: Callable[..., sl.Mean], jitted: bool, **options: Any) -> Any:
    with mesh:
        step = sl.step(loss, sl.optim.sgd(1.0), **options)
        state = step.init(sl.shard(PARAMS, "m n"), key=KEY)
        state, metrics = (sl.jit(step) if jitted else step)(state, entered())
        return metrics["loss"], sl.gather(state.params)


@pytest.mark.parametrize(
    ("count", "flat", "rematted", "jitted"),
    [(1, 0, 0, 0), (2, 0, 1, 0), (2, 1, 0, 1), (4, 1, 1, 0), (4, 0, 0, 1)],
)
def test_c36_micro_batches_are_masked_as_the_whole_batch(count: int, flat: bool, rematted: bool, jitted: bool) -> None:
    grads, value = torch.func.grad_and_value(plain)(PARAMS, X, sl.random.fold_in(KEY, 0))
    mesh = sl.make_mesh(dp=2, tp=2, simulate=True)
    loss, new = trained(mesh, net(flat, rematted), jitted, accumulate=count)
    torch.testing.assert_close(loss, value, rtol=1e-14, atol=0)
    for k, g in grads.items():
        torch.testing.assert_close(PARAMS[k] - new[k], g, rtol=0, atol=1e-14)


def test_micro_batches_share_a_graph() -> None:
    with sl.make_mesh(dp=2, simulate=True):
        step = sl.step(net(False, False), sl.optim.sgd(1.0), accumulate=4)
        state, batch = step.init(sl.shard(PARAMS, "m n")), entered()
        program = sl.jit(step).lower(state, batch).program
    assert list(program) == ["step", "microbatch"]


def test_slots_of_experts_are_masked_anew_in_every_micro_batch() -> None:
    """Their rows are none of the batch's: the mask is no one-process mask, but differs from piece to piece."""

    def loss(p: dict[str, Tensor], batch: dict[str, Tensor], key: Tensor) -> Any:
        y = sl.dropout("experts/ep slots", sl.psum(batch["x"].view(1, -1), "edp") * p["w"], key, 0.5)
        return sl.Mean.of("experts/ep slots", y)

    def gradient(count: int) -> float:
        with sl.make_mesh(dp=dict(edp=2, ep=2), simulate=True):
            step = sl.step(loss, sl.optim.sgd(1.0), accumulate=count)
            state = step.init(sl.shard({"w": torch.zeros((), dtype=F64)}, ""), key=KEY)
            state, _ = step(state, sl.shard({"x": ones(64)}, "batch/dp"))
            return sl.gather(state.params)["w"].item()

    key = sl.random.fold_in(KEY, 0)
    assert gradient(2) == pytest.approx(-4 * kept((2, 2, 8), key=key).double().mean().item())
    assert gradient(1) == pytest.approx(-4 * kept((2, 16), key=key).double().mean().item())


ERRORS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "axis left out": (lambda x, k: sl.dropout("b m", x, k, 0.1), "`b` is written whole, but .* a piece"),
    "axis too many": (lambda x, k: sl.dropout("b/dp m/tp", x, k, 0.1), "`m/tp` says split over `tp`, the value is"),
    "pending": (lambda x, k: sl.dropout("b m", sl.pending(x, "dp"), k, 0.1), "says equal over `dp`, .*pending over dp"),
    "probability": (lambda x, k: sl.dropout("b/dp m", x, k, 1.5), "a number from 0 to 1, not 1.5"),
    "integers": (lambda x, k: sl.dropout("b/dp m", x.long(), k, 0.1), r"scales what it keeps; found i64\[4, 3\]"),
    "several keys": (
        lambda x, k: sl.dropout("b/dp m", x, sl.random.split(k), 0.1),
        r"takes one key, int64 of shape \(2,\), .* found i64\[2, 2\]",
    ),
    "a key of its own on every rank": (
        lambda x, k: sl.dropout("b/dp m", x, sl.random.fold_in(k, sl.axis_index("dp")), 0.1),
        "dropout over `dp`: the value is i64.*varying over dp.*masks differ by global index",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    body, message = ERRORS[name]
    with sl.make_mesh(dp=2, tp=2, simulate=True), pytest.raises(sl.SpecError, match=f"(?s){message}"):
        sl.shard_map(body, in_specs=("b/dp m", "k"), out_specs=None)(sl.shard(ones(8, 3), "b/dp m"), sl.shard(KEY, "k"))
