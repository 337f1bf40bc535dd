"""`Mean`: every token counts once, however unevenly tokens fall on ranks and micro-batches."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.types import region


def on(mesh: dict[str, int], body: Any, *args: tuple[Tensor, str], out: Any = "...") -> Any:
    with sl.make_mesh(mesh, simulate=True):
        f = sl.shard_map(body, in_specs=None, out_specs=out)
        return sl.gather(f(*(sl.shard(x, spec) for x, spec in args)))


def added(*means: Any) -> Any:
    return sum(means)


LOSSES = torch.tensor([[4.0, 9.0, 9.0], [1.0, 0.5, 0.0]], dtype=torch.float64)
WEIGHTS = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("spec", ("b/dp s", "b s/dp", "b s"))
def test_uneven_tokens(spec: str) -> None:
    """C06: one valid token of loss 4 on rank 0, three on rank 1: the mean over tokens, with its gradients."""
    x, w = LOSSES.clone(), WEIGHTS
    if "s/dp" in spec:
        x, w = torch.cat([x, x], 1), torch.cat([w, 0 * w], 1)

    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return sl.value_and_grad(lambda x: sl.Mean.of(spec, x * x, w))(x)

    value, grads = on(dict(dp=2), body, (x, spec), (w, spec), out=("", spec))
    torch.testing.assert_close(value, (x * x * w).sum() / w.sum())
    torch.testing.assert_close(grads, 2 * x * w / w.sum())


def test_no_tokens_on_a_rank_and_none_at_all() -> None:
    def body(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        some, none = sl.Mean.of("b/dp", x, w), sl.Mean.of("b/dp", x, 0 * w)
        return some.value, none.value, sl.grad(lambda x: sl.Mean.of("b/dp", x, 0 * w))(x)

    x, w = torch.tensor([5.0, 7.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 1.0, 3.0])
    some, none, grads = on(dict(dp=2), body, (x, "b/dp"), (w, "b/dp"), out=("", "", "b/dp"))
    assert some == 7 / 4 and none == 0 and grads.tolist() == [0, 0, 0, 0]


def test_the_last_micro_batch_is_reduced_too() -> None:
    """C09: gradients [1, 2] on rank 0 and [3, 6] on rank 1, over ranks and micro-batches: 3 everywhere."""
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]])

    def loss(w: Tensor, x: Tensor) -> sl.Mean:
        return sl.Mean.of("b/dp s", x * w)

    w = torch.ones((), dtype=torch.float64)
    with sl.make_mesh(dp=2, simulate=True):
        for count in (None, 2):
            train = sl.step(lambda p, b: loss(p["w"], b["x"]), sl.optim.sgd(1.0), accumulate=count)
            state = train.init(sl.shard({"w": w}, ""))
            batch = rows.double().reshape(4, 1)
            new, metrics = train(state, sl.shard({"x": batch}, "b/dp s"))
            assert sl.gather(new.params)["w"] == 1 - 3.0 and metrics["tokens"] == 4


def test_the_same_tokens_over_dp_and_cp() -> None:
    """C11: 2 x 16 tokens weigh 32 on (dp=2, cp=1) and on (dp=1, cp=2)."""
    x = torch.arange(32.0, dtype=torch.float64).view(2, 16)
    for mesh in (dict(dp=2, cp=1), dict(dp=1, cp=2), dict(dp=2, cp=2)):

        def body(x: Tensor) -> tuple[Tensor, ...]:
            mean = sl.Mean.of("b/dp s/cp", x).summed()
            return mean.terms[0].total, mean.terms[0].weight, mean.value

        total, weight, value = on(mesh, body, (x, "b/dp s/cp"))
        assert (total, weight, value) == (x.sum(), 32, x.mean())


def test_arithmetic() -> None:
    """Means add with their own weights; at rest batches of one loss merge."""

    def body(x: Tensor, w: Tensor) -> Any:
        a, b = sl.Mean.of("b/dp s", x, w), sl.Mean.of("b/dp s", x)
        return [m.value for m in (a + b, 2 * a, a * 3 + 0.5 * b, added(a, b), a / 2, a - b, -a)], (
            a + 0.5 * b
        ).summed().terms

    values, terms = on(dict(dp=2), body, (LOSSES, "b/dp s"), (WEIGHTS, "b/dp s"))
    a, b = (LOSSES * WEIGHTS).sum() / 4, LOSSES.mean()
    for got, wanted in zip(values, (a + b, 2 * a, 3 * a + b / 2, a + b, a / 2, a - b, -a), strict=True):
        torch.testing.assert_close(got, wanted)
    mean = sl.Mean._of_terms(terms)
    torch.testing.assert_close((mean + mean).value, a + b / 2)
    assert added(mean, mean).terms[0].weight == 8 and (mean + mean).terms[1].weight == 12
    assert repr(mean) == "Mean(1.0 * 5.5 / 4.0, 0.5 * 23.5 / 6.0)"
    with pytest.raises(sl.SpecError, match="add up where they are of the same loss"):
        added(mean, 2 * mean)


def test_16_bit_values_are_summed_in_float32() -> None:
    """C30, C22: 256 + 1 + 1 + 1 in bfloat16 would be 256."""
    x = torch.tensor([256.0, 1, 1, 1]).bfloat16()

    def body(x: Tensor) -> Any:
        mean = sl.Mean.of("b/dp", x).summed()
        return mean.terms[0].total, sl.Mean.of("b/dp", x, torch.ones_like(x)).summed().terms[0].total

    one, two = on(dict(dp=2), body, (x, "b/dp"))
    assert one == two == 259 and one.dtype == two.dtype == torch.float32


def test_types_of_totals_and_weights() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        here = region()
        plain, weighted = sl.Mean.of("b/dp s", x).terms[0], sl.Mean.of("b/dp s", x, w).terms[0]
        assert [here.type_of(t) for t in (plain.total, plain.weight, weighted.total, weighted.weight)] == ["PI"] * 4
        scalar = sl.Mean(sl.psum(x.sum(), "dp"), 2)
        assert here.type_of(scalar.terms[0].weight) == "II" and scalar.terms[0].weight.dtype == x.dtype
        half = sl.Mean.of("row s", sl.psum(x, "dp")).terms[0]
        assert here.type_of(half.total) == here.type_of(half.weight) == "II"
        return scalar.value

    assert on(dict(dp=2, tp=2), body, (LOSSES, "b/dp s"), (WEIGHTS, "b/dp s")) == LOSSES.sum() / 2


ERRORS: dict[str, tuple[Any, str]] = {
    "not a scalar": (lambda x: sl.Mean(x, 1.0), r"Mean takes a 0-d total, found \(1, 3\)"),
    "weight not a scalar": (lambda x: sl.Mean(x.sum(), x), r"Mean takes a 0-d weight, found \(1, 3\)"),
    "not a tensor": (lambda x: sl.Mean(*[3, 1.0]), "Mean takes a 0-d total, found 3"),
    "scaled by a tensor": (lambda x: sl.Mean.of("b/dp s", x) * x.sum(), "a Mean is scaled by a Python number"),
    "added to a number": (lambda x: sl.Mean.of("b/dp s", x) + 1, r"give 1 a weight: Mean\(total, weight\)"),
    "axis left out": (
        lambda x: sl.grad(lambda x: sl.Mean.of("q s", x * 1))(x),
        r"`q s` says equal over `dp`, the value is .* varying over dp\n.*terms of a sum, left by a plain torch op",
    ),
    "a split dimension": (
        lambda x: sl.Mean.of("b s", x * 1),
        r"varying over dp\n.*\^ `b` is 1 of 2: write `b/dp`, or all_gather it over `dp` first",
    ),
    "an argument that is split": (
        lambda x: sl.Mean.of("q s", x),
        r"holds 1 of its 2: the value is a piece of `b/dp s`\n.*\n +\^ write `q/dp` wherever it stands",
    ),
    "wrong axis of a result": (
        lambda x: sl.Mean.of("b/tp s", sl.psum(x, "dp")),
        "`b/tp` says split over `tp`, the value is .* equal on all ranks",
    ),
    "wrong axis": (
        lambda x: sl.Mean.of("b/tp s", x),
        "`b/tp` is split otherwise: .* a piece of `b/dp s`\n.*\n.*write `b/dp` wherever",
    ),
    "a varying total": (
        lambda x: sl.grad(lambda x: x.sum())(x),
        r"the total of the loss is f64\[\] varying over dp: say how the ranks of `dp` combine.*sl.pending",
    ),
    "a varying weight": (
        lambda x: sl.grad(lambda y: sl.Mean(sl.pending(y.sum(), "dp"), x.sum()))(x),
        "the weight of the loss is f64.. varying over dp",
    ),
    "a weight that is differentiated": (
        lambda x: sl.grad(lambda x: sl.Mean.of("b/dp s", x * x, x))(x),
        "the weight of the loss depends on what is differentiated.*detach the weight",
    ),
    "no loss": (
        lambda x: sl.grad(lambda x: (x.sum(), x.sum()))(x),
        "a loss is one number, found tuple",
    ),
    "a vector": (lambda x: sl.grad(lambda x: sl.psum(x, "dp"))(x), r"found a tensor of shape \(1, 3\)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    body, message = ERRORS[name]
    with pytest.raises(sl.SpecError) as e:
        on(dict(dp=2, tp=1), body, (LOSSES, "b/dp s"))
    assert re.search(f"(?s){message}", str(e.value))  # the note shows the line, which may hold the message
