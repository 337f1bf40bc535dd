"""Programs as users write them, in a typed region: each gives the number of one process, or a clear SpecError."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from programs import RIGHT, W1, W2, WRONG, K, N, Product, X, square
from torch import Tensor
from torch.func import grad, grad_and_value

import shardlib as sl


def one_process(f: Callable[..., Any]) -> tuple[Any, Any]:
    def total(p):
        return sum(f(p, a, b) for a, b in zip(X.chunk(N), K.chunk(N), strict=True))

    return grad_and_value(total)((W1, W2))


def typed(f: Callable[..., Any]) -> list[tuple[Any, Any]]:
    """The same on 4 ranks: (gradients, value) by torch's transform and by ours, or what it raises."""

    def body(p, x, k):
        def summed(p):
            return sl.psum(sl.pending(f(p, x, k), "dp"), "dp")

        value, grads = sl.value_and_grad(lambda p, x, k: sl.pending(f(p, x, k), "dp"))(p, x, k)
        return [grad_and_value(summed)(p), (grads, value)]

    with sl.make_mesh(dp=N, simulate=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Python decision")
        args = sl.shard((W1, W2), "..."), sl.shard(X, "rows/dp in"), sl.shard(K, "rows/dp")
        return sl.gather(sl.shard_map(body, in_specs=None, out_specs="...")(*args))


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    wanted, value = one_process(RIGHT[name])
    scale = max(w.abs().max() for w in wanted)
    for found, got in typed(RIGHT[name]):
        assert abs(got - value) <= 1e-12 * abs(value)
        for g, w in zip(found, wanted, strict=True):
            assert (g - w).abs().max() <= 1e-12 * scale


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    f, message = WRONG[name]
    with pytest.raises(sl.SpecError, match=f"(?s){message}"):
        typed(f)


def test_gradient_within_of_an_invariant_is_summed() -> None:
    """The inner gradient is that of the rows of all ranks; each rank then uses it with its own."""

    def program(p, x, k):
        inner = grad(lambda w: square(torch.tanh(x @ w) @ p[1]))(p[0])
        return (inner * x.sum()).sum()

    def total(p):
        inner = grad(lambda w: square(torch.tanh(X @ w) @ p[1]))(p[0])
        return sum((inner * x.sum()).sum() for x in X.chunk(N))

    wanted, value = grad_and_value(total)((W1, W2))
    for found, got in typed(program):
        torch.testing.assert_close((*found, got), (*wanted, value), rtol=1e-12, atol=1e-12)


def test_without_insertion_the_check_at_exit_raises() -> None:
    """C14: a column-then-row split network, whose invariant input meets split weights."""

    def body(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            h = sl.einsum("b d, d f/tp -> b f/tp", x, w1)
            return square(sl.psum("b d +tp -> b d", sl.einsum("b f/tp, f/tp d -> b d +tp", h.tanh(), w2)))

        with torch._C.DisableTorchFunction() if off else nullcontext():
            return sl.grad(loss)(x)

    wanted = grad(lambda x: square((x @ W1[:, :4]).tanh() @ W1.t()[:4]))(X)
    with sl.make_mesh(tp=N, simulate=True):
        args = (
            sl.shard(X, "..."),
            sl.shard(W1[:, :4].contiguous(), "d f/tp"),
            sl.shard(W1.t()[:4].contiguous(), "f/tp d"),
        )
        run, off = sl.shard_map(body, in_specs=("b d", "d f/tp", "f/tp d"), out_specs="b d"), False
        torch.testing.assert_close(sl.gather(run(*args)), wanted, rtol=1e-12, atol=1e-12)
        run, off = sl.shard_map(body, in_specs=("b d", "d f/tp", "f/tp d"), out_specs="b d"), True
        with pytest.raises(
            sl.SpecError,
            match=r"the gradient of .* should be invariant, its parts differ by rank: a reduction was lost",
        ):
            run(*args)


@pytest.mark.parametrize("op", (lambda x, w: x @ w, Product.apply), ids=("op", "user function"))
@pytest.mark.parametrize("backward", (False, True), ids=("autograd.grad", "backward"))
def test_plain_autograd_is_refused(op: Any, backward: bool) -> None:
    """Below a user's Function nothing would insert the sum (prototype bw.py: wrong by 40 %)."""

    def body(w: Tensor, x: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        loss = sl.psum(square(op(x, w).tanh()), "dp")
        if backward:
            loss.backward()
        return torch.autograd.grad(loss, w)[0]

    with (
        sl.make_mesh(dp=N, simulate=True),
        pytest.raises(sl.SpecError, match=r"plain autograd .* use sl.grad or torch.func.grad"),
    ):
        sl.shard_map(body, in_specs=("i j", "r/dp i"), out_specs="i j")(W1, sl.shard(X, "r/dp i"))


def test_forgotten_gather() -> None:
    """A sequence-parallel block without the all_gather before its first matmul: the shapes fit, the numbers do not."""

    def body(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        h = sl.all_gather("batch seq/tp model -> batch seq model", x) if gathers else x
        h = sl.einsum("batch seq model, model hidden/tp -> batch seq hidden/tp", h, w_in).tanh()
        o = sl.einsum("batch seq hidden/tp, hidden/tp model -> batch seq model +tp", h, w_out)
        y = x + sl.psum_scatter("batch seq model +tp -> batch seq/tp model", o)
        return sl.psum(square(y), "tp")

    def check() -> None:
        specs = ("batch seq/tp model", "model hidden/tp", "hidden/tp model")
        whole = lambda x, w_in, w_out: square(x + torch.tanh(x @ w_in) @ w_out)  # noqa: E731
        sl.testing.check(body, whole, mesh=dict(tp=2), in_specs=specs, out_specs="")

    gathers = True
    check()
    gathers = False
    with pytest.raises(sl.SpecError, match="`seq` is written whole, but this rank holds 5 of its 10") as e:
        check()
    assert "  pattern: batch seq model, model hidden/tp -> batch seq hidden/tp\n" in str(e.value)
    assert " ^^^ write `seq/tp` wherever it stands, or sl.gather(x, 'tp') first" in str(e.value)
