"""Vocabularies: lookups, positions and cross-entropy against plain torch on one process, values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from patterned import MESHES, check, run
from torch import Tensor

import shardlib as sl

R = torch.Generator().manual_seed(1)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=R, dtype=torch.float64)


def ids(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=R)


def loss(x: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
    """Cross-entropy by torch, negative targets left out."""
    each = F.cross_entropy(x.flatten(0, -2), y.clamp(min=0).flatten(), reduction="none").view(y.shape) * (y >= 0)
    return each if w is None else each * w


def per_token(pattern: str) -> Callable[..., Tensor]:
    return lambda x, y: sl.token_loss(pattern, x, y, per_token=True)


LOGITS, TARGETS, WEIGHTS = draw(4, 3, 8) * 3, ids(8, 4, 3, low=-3), draw(4, 3).abs()
TABLE, TOKENS = draw(8, 5), ids(8, 4, 3)

RIGHT: dict[str, Any] = {
    "embed": (
        lambda t, i: sl.embed("v m, b/dp s -> b/dp s m", t, i),
        lambda t, i: t[i],
        [(TABLE, "v m"), (TOKENS, "b/dp s")],
        "b/dp s m",
    ),
    "embed, split": (
        lambda t, i: sl.embed("v/tp m, b/dp s -> b/dp s m +tp", t, i),
        lambda t, i: t[i],
        [(TABLE, "v/tp m"), (TOKENS, "b/dp s")],
        "b/dp s m +tp",
    ),
    "embed, split over a chain": (
        lambda t, i: sl.embed("v/tp/dp m, b s -> b s m +dp +tp", t, i),
        lambda t, i: t[i],
        [(TABLE, "v/tp/dp m"), (TOKENS, "b s")],
        "b s m +dp +tp",
    ),
    "embed, rows split": (
        lambda t, i: sl.embed("v m/tp, b/dp s -> b/dp s m/tp", t, i),
        lambda t, i: t[i],
        [(draw(8, 4), "v m/tp"), (TOKENS, "b/dp s")],
        "b/dp s m/tp",
    ),
    "token_loss": (per_token("b/dp s v, b/dp s"), loss, [(LOGITS, "b/dp s v"), (TARGETS, "b/dp s")], "b/dp s"),
    "token_loss, vocabulary split": (
        per_token("b/dp s v/tp, b/dp s"),
        loss,
        [(LOGITS, "b/dp s v/tp"), (TARGETS, "b/dp s")],
        "b/dp s",
    ),
    "token_loss, vocabulary split over a chain": (
        per_token("b s v/tp/dp, b s"),
        loss,
        [(LOGITS, "b s v/tp/dp"), (TARGETS, "b s")],
        "b s",
    ),
    "token_loss, weighted": (
        lambda x, y, w: sl.token_loss("b/dp s v/tp, b/dp s", x, y, weight=w, per_token=True),
        loss,
        [(LOGITS, "b/dp s v/tp"), (TARGETS, "b/dp s"), (WEIGHTS, "b/dp s")],
        "b/dp s",
    ),
    "token_loss, a mean": (
        lambda x, y, w: sl.token_loss("b/dp s v/tp, b/dp s", x, y, weight=w.detach()).value,
        lambda x, y, w: loss(x, y, w.detach()).sum() / (w.detach() * (y >= 0)).sum(),
        [(LOGITS, "b/dp s v/tp"), (TARGETS, "b/dp s"), (WEIGHTS, "b/dp s")],
        "",
    ),
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_against_one_process(name: str, mesh: dict[str, int]) -> None:
    check(RIGHT[name], mesh)


def test_iota() -> None:
    def body(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return sl.iota("s/dp", 3), sl.iota("s/tp/dp", 1), sl.iota("s", 4)

    out = run(body, ("s/dp", "s/tp/dp", "s"))
    assert [x.tolist() for x in out] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_softmax_over_a_split_vocabulary() -> None:
    """C16: the gradient of sum(c * log_softmax(x)), c = arange(8), is c - softmax * sum(c)."""
    x, c = draw(1, 8), torch.arange(8)

    def body(x: Tensor) -> Tensor:
        def total(x: Tensor) -> Tensor:
            each = [i * sl.token_loss("t v/tp, t", x, torch.full((1,), i), per_token=True) for i in range(8)]
            return -torch.stack(each).sum()

        return sl.grad(total)(x)

    with sl.make_mesh(tp=4, simulate=True):
        found = sl.gather(sl.shard_map(body, in_specs="t v/tp", out_specs="t v/tp")(sl.shard(x, "t v/tp")))
    torch.testing.assert_close(found, c - x.softmax(-1) * c.sum(), rtol=1e-12, atol=1e-12)


def log_softmax(x: Tensor) -> Tensor:
    """As a user writes it over a vocabulary that is split."""
    x = x - sl.pmax(x.detach().amax(-1, keepdim=True), "tp")
    return x - sl.psum(x.exp().sum(-1, keepdim=True), "tp").log()


def over_split(kind: str, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """A loss for each token of logits `"t/dp v/tp"`, the targets being the distribution of `y`, or `ids`."""
    if kind == "token_loss":
        return sl.token_loss("t/dp v/tp, t/dp", x, ids, per_token=True)
    at = sl.iota("v/tp", x.shape[-1])
    if kind == "z-loss":
        peak = sl.pmax(x.detach().amax(-1), "tp")
        return (sl.psum((x - peak[:, None]).exp().sum(-1), "tp").log() + peak) ** 2
    weight = {
        "dot": at.to(x.dtype),
        "KL": log_softmax(y).exp(),
        "smooth": 0.9 * (ids[:, None] == at).to(x.dtype) + 0.1 / (x.shape[-1] * sl.axis_size("tp")),
    }[kind]
    entropy = (weight * log_softmax(y)).sum(-1) if kind == "KL" else 0
    return -sl.psum((weight * log_softmax(x)).sum(-1) - entropy, "tp")


def in_one(kind: str, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    return {
        "token_loss": lambda: F.cross_entropy(x, ids, reduction="none"),
        "z-loss": lambda: x.logsumexp(-1) ** 2,
        "dot": lambda: -(torch.arange(8) * x.log_softmax(-1)).sum(-1),
        "KL": lambda: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), reduction="none", log_target=True).sum(-1),
        "smooth": lambda: F.cross_entropy(x, ids, reduction="none", label_smoothing=0.1),
    }[kind]()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", ["token_loss", "dot", "KL", "smooth", "z-loss"])
def test_c16_losses_over_a_split_vocabulary(kind: str, dtype: torch.dtype, bound: float) -> None:
    """C16: ours and users' own, the mean over tokens that dp splits, and the gradient of the logits (and of `y`)."""
    x, y, ids = (5 * draw(6, 8)).to(dtype), draw(6, 8).to(dtype), torch.tensor([0, 3, 7, 7, 2, 5])

    def body(x: Tensor, y: Tensor, ids: Tensor) -> Any:
        return sl.value_and_grad(lambda x, y: sl.Mean.of("t/dp", over_split(kind, x, y, ids)), (0, 1))(x, y)

    wanted = torch.func.grad_and_value(lambda x, y: in_one(kind, x, y, ids).mean(), (0, 1))(x.double(), y.double())
    with sl.make_mesh(dp=2, tp=4, simulate=True):
        f = sl.shard_map(body, in_specs=None, out_specs=("", ("t/dp v/tp", "t/dp v/tp")))
        value, grads = sl.gather(f(*sl.shard((x, y), "t/dp v/tp"), sl.shard(ids, "t/dp")))
    for found, want in zip((*grads, value), (*wanted[0], wanted[1]), strict=True):
        assert found.dtype == dtype and (found.double() - want).abs().max() <= bound * max(1, want.abs().max())


def test_16_bit_logits_are_computed_in_float32() -> None:
    def body(x: Tensor) -> Tensor:
        return sl.token_loss("t v/tp, t", x, torch.tensor([1, -1, 7]), per_token=True)

    x = draw(3, 8).bfloat16()
    with sl.make_mesh(tp=2, simulate=True):
        found = sl.gather(sl.shard_map(body, in_specs="t v/tp", out_specs="t")(sl.shard(x, "t v/tp")))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, loss(x.float(), torch.tensor([1, -1, 7])))


def extreme() -> tuple[Tensor, Tensor]:
    """Logits "t v" and targets: large ones, some of -inf, negative targets; a piece of row 3 is -inf whole."""
    logits, targets = 5 * draw(8, 6), torch.tensor([0, 5, -1, 2, 3, -7, 4, 1])
    logits[0, 3], logits[1] = 1e4, 1e4 * logits[1]
    logits[3, 3:], logits[4, 0], logits[6, :4] = -torch.inf, -torch.inf, -torch.inf
    return logits, targets


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_any_split_is_the_whole(tp: int, jitted: bool) -> None:
    """Losses, the gradient of their squares, and that of its square, over `t/dp v/tp`."""
    x, y = extreme()

    def body(x: Tensor, y: Tensor) -> Any:
        def square(x: Tensor) -> Tensor:
            return sl.pending(sl.token_loss("t/dp v/tp, t/dp", x, y, per_token=True).square().sum(), "dp")

        return sl.token_loss("t/dp v/tp, t/dp", x, y, per_token=True), sl.grad(square)(x)

    wanted, each = torch.func.grad_and_value(lambda x: loss(x, y).square().sum())(x)[0], loss(x, y)
    with sl.make_mesh(dp=2, tp=tp, simulate=True):
        f = sl.shard_map(body, in_specs=("t/dp v/tp", "t/dp"), out_specs=("t/dp", "t/dp v/tp"))
        found, dx = sl.gather((sl.jit(f) if jitted else f)(sl.shard(x, "t/dp v/tp"), sl.shard(y, "t/dp")))
    torch.testing.assert_close(found, each, rtol=1e-12, atol=1e-12)
    assert (dx - wanted).abs().max() <= 1e-12 * wanted.abs().max()


@pytest.mark.parametrize("tp", [1, 3])
def test_second_order_over_a_split_vocabulary(tp: int) -> None:
    x, y = 3 * draw(4, 6), torch.tensor([0, 5, -1, 2])

    def body(x: Tensor, y: Tensor) -> Tensor:
        def square(x: Tensor) -> Tensor:
            return sl.token_loss("t v/tp, t", x, y, per_token=True).pow(2).sum()

        return sl.grad(lambda x: sl.psum(sl.grad(square)(x).pow(3).sum(), "tp"))(x)

    plain = torch.func.grad(lambda x: torch.func.grad(lambda x: loss(x, y).pow(2).sum())(x).pow(3).sum())
    with sl.make_mesh(tp=tp, simulate=True):
        f = sl.shard_map(body, in_specs=("t v/tp", "t"), out_specs="t v/tp")
        found = sl.gather(f(sl.shard(x, "t v/tp"), sl.shard(y, "t")))
    torch.testing.assert_close(found, plain(x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("tp", [1, 2])
def test_types(tp: int) -> None:
    """Invariant over the axes that split the vocabulary, and over others; the gradient is typed as the logits."""
    seen = []

    def body(x: Tensor, y: Tensor) -> Tensor:
        def total(x: Tensor) -> Tensor:
            each = sl.token_loss("t/dp v/tp, t/dp", x, y, per_token=True)
            seen.append(sl.typeof(each))
            return sl.pending(each.sum(), "dp")

        dx = sl.grad(total)(x)
        seen.append(sl.typeof(dx))
        return dx

    with sl.make_mesh(dp=2, tp=tp, ep=2, simulate=True):
        f = sl.shard_map(body, in_specs=("t/dp v/tp", "t/dp"), out_specs="t/dp v/tp")
        f(sl.shard(draw(8, 6), "t/dp v/tp"), sl.shard(ids(6, 8), "t/dp"))
    assert seen[:2] == ["f64[4] varying over dp", f"f64[4, {6 // tp}] varying over dp, tp (`t/dp v/tp`)"]


def test_a_target_beyond_a_whole_vocabulary() -> None:
    with sl.make_mesh(dp=1), pytest.raises(IndexError, match="Target 6 is out of bounds"):
        f = sl.shard_map(lambda x: sl.token_loss("t v, t", x, torch.tensor([1, 6])), in_specs="t v", out_specs="")
        f(sl.shard(draw(2, 6), "t v"))


def test_a_step_keeps_one_copy_of_the_logits() -> None:
    """In bfloat16: no wider copy, and the gradient is written over them; values are those without passes."""

    def mean(w: Tensor, y: Tensor) -> Any:
        x = y.unsqueeze(-1).expand(*y.shape, 7).to(w.dtype)
        z = sl.einsum("b/dp s m, m v/tp -> b/dp s v/tp", x, w)
        return sl.token_loss("b/dp s v/tp, b/dp s", z, y)

    w, y = draw(7, 10).bfloat16(), ids(10, 4, 3, low=-3)
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        step = sl.step(mean, sl.optim.sgd(1.0))
        state, batch = step.init(sl.shard(w, "m v/tp")), sl.shard(y, "b/dp s")
        plain, made = sl.jit(step, passes=[]), sl.jit(step)
        (kept, said), (new, found) = plain(state, batch), made(state, batch)
        assert torch.equal(sl.gather(new.params), sl.gather(kept.params)) and found["loss"] == said["loss"]
        nodes = [n for n in made.traces[0].module.graph.nodes if n.op == "call_function"]
    assert "shardlib.token_scores_backward_.default" in {str(n.target) for n in nodes}
    large = [
        n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), Tensor) and n.meta["val"].numel() == 2 * 3 * 5
    ]
    assert large and {x.dtype for x in large} == {torch.bfloat16}


ERRORS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "embed": (
        lambda x, w: sl.embed("d e, b/dp s -> b/dp e s", w, x[..., 0].long()),
        "says equal|embed gives the dimensions of the tokens, then those of a row\n.*write `b/dp s e`",
    ),
    "embed, sum left out": (
        lambda x, w: sl.embed("v/dp q, t -> t q", x[:, 0], torch.zeros(3, dtype=torch.int64)),
        "embed gives the dimensions .*write `t q .dp`",
    ),
    "token_loss, targets": (
        lambda x, w: sl.token_loss("b/dp s d/tp, s", x, torch.zeros(6, dtype=torch.int64)),
        "the targets have the dimensions of the logits but for the last",
    ),
    "token_loss, one spec": (
        lambda x, w: sl.token_loss("b/dp s d/tp", x, x),
        "2 specs expected, separated by commas, found 1",
    ),
    "token_loss, narrow targets": (
        lambda x, w: sl.token_loss("d e, d", w, torch.zeros(8, dtype=torch.int32)),
        "token_loss takes int64 targets, found i32.8.",
    ),
    "token_loss, integers": (
        lambda x, w: sl.token_loss("d e, d", w.long(), torch.zeros(8, dtype=torch.int64)),
        "token_loss takes logits .*, floats with n > 0; found i64.8, 5.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    body, message = ERRORS[name]
    with pytest.raises(sl.SpecError, match=f"(?s){message}"):
        run(body)
