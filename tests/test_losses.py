"""What a loss may take and return: means, metrics, extra state, keys; evaluate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepped import BATCH, W, entered, f64, linear, mesh, scaled, updated
from torch import Tensor

import shardlib as sl

# ---- what a loss may return


def losses() -> dict[str, tuple[Callable[..., Any], str]]:
    return {
        "varying": (lambda p, b: (p["w"] * b["x"]).sum(), "the total of the loss is .* varying over dp"),
        "a varying weight": (lambda p, b: sl.Mean(p["w"], b["x"].sum()), "weight of the loss is .* varying over dp"),
        "not a scalar": (lambda p, b: p["w"] * b["x"], r"found a tensor of shape \(2,\)"),
        "a varying metric": (
            lambda p, b: (linear(p, b), sl.Aux({"seen": b["x"].sum()})),
            r"metric `seen` is f64\[\] varying over dp; a metric is a Mean(?s:.*)sl.pending\(seen, 'dp'\)",
        ),
        "a metric of two numbers": (lambda p, b: (linear(p, b), sl.Aux({"x": b["x"]})), r"metric `x` is f64\[2\]"),
        "a number as metric": (lambda p, b: (linear(p, b), sl.Aux({"acc": 0.5})), "metric `acc` is 0.5"),
        "a metric of step's": (lambda p, b: (linear(p, b), sl.Aux({"lr": p["w"]})), "metric `lr`: step gives one"),
        "extra that is not there": (lambda p, b, extra: linear(p, b), "takes `extra=`, which was not given: step.init"),
        "a number": (lambda p, b: 1.0, "a loss is one number, found float"),
        "nothing": (lambda p, b: None, "a loss is one number, found NoneType"),
        "weight of parameters": (
            lambda p, b: sl.Mean.of("batch/dp", b["x"], weight=p["w"] * b["x"]),
            "the weight of the loss depends on parameters \\(`w`\\)",
        ),
        "weight of one of two terms": (
            lambda p, b: linear(p, b) + sl.Mean(p["w"], p["w"] * 2),
            "the weight of the loss depends on parameters \\(`w`\\)",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("what", losses())
@pytest.mark.parametrize("jit", [False, True])
def test_losses_that_are_refused(what, jit):
    loss, said = losses()[what]
    with mesh(dp=2):
        step = sl.step(loss, sl.optim.sgd(1.0))
        step = sl.jit(step) if jit else step
        with pytest.raises(sl.SpecError, match=said):
            step(step.init(entered(W)), entered(BATCH))


@pytest.mark.parametrize(
    "loss",
    [lambda p, b: linear(p, b), lambda p, b: linear(p, b).value, lambda p, b: sl.pmean((p["w"] * b["x"]).mean(), "dp")],
)
def test_means_and_scalars_are_losses(loss):
    new, metrics = updated(mesh(dp=2), loss, W, BATCH)
    assert metrics["loss"].item() == 3.0 and new["w"].item() == -2.0


# ---- metrics, extra, keys


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("jit", [False, True])
def test_own_metrics_and_extra(count, jit):
    def loss(p, batch, extra):
        x = batch["x"]
        seen = sl.psum("+dp -> ", sl.reduce("batch/dp -> +dp", x, "sum"))
        metrics = {
            "mean": sl.Mean.of("batch/dp", x, x),
            "pending": sl.reduce("batch/dp -> +dp", x, "sum"),
            "invariant": seen,
        }
        return linear(p, batch), sl.Aux(metrics=metrics, extra={"seen": extra["seen"] + seen})

    with mesh(dp=2):
        step = sl.step(loss, sl.optim.sgd(1.0), accumulate=count)
        step = sl.jit(step) if jit else step
        state = step.init(entered(W), extra=entered({"seen": (f64(100)[0], "")}))
        state, metrics = step(state, entered(BATCH))
        assert sorted(metrics) == sorted(["loss", "grad_norm", "tokens", "lr", "mean", "pending", "invariant"])
        assert all(type(x) is Tensor and x.dim() == 0 for x in metrics.values())
        assert metrics["mean"].item() == pytest.approx(50 / 12, rel=1e-15)
        assert metrics["pending"].item() == metrics["invariant"].item() == 12 / count  # scalars are averaged
        assert sl.gather(state.extra)["seen"].item() == 112
        state, _ = step(state, entered(BATCH))
        assert sl.gather(state.extra)["seen"].item() == 124 and state.step.item() == 2


@pytest.mark.parametrize("jit", [False, True])
def test_extra_may_be_split(jit):
    def loss(p, batch, extra):
        return linear(p, batch), sl.Aux(extra=extra * 0.5 + sl.psum(batch["x"].sum(), "dp"))

    with mesh(dp=2, tp=2):
        step = sl.step(loss, sl.optim.sgd(1.0), accumulate=2)
        step = sl.jit(step) if jit else step
        state = step.init(entered(W), extra=sl.shard(f64(0, 8), "n/tp"))
        state, _ = step(state, entered(BATCH))  # micro-batches add 1 + 3 and 2 + 6
        assert str(state.extra.spec) == "n/tp" and torch.equal(sl.gather(state.extra), f64(10, 12))
        assert not jit or list(step.traces[0].program) == ["step", "microbatch"]


def test_extra_keeps_its_structure():
    def loss(p, batch, extra):
        return linear(p, batch), sl.Aux(extra=batch["x"].sum() if extra is None else extra.float())

    def without(p, batch, extra=None):
        return loss(p, batch, extra)

    for f, extra, said in (
        (without, None, "the state that the loss returns"),
        (loss, f64(1), r"the loss made `` of its state f32\[1\]"),
    ):
        with mesh(dp=1), pytest.raises(sl.ShardError, match=said):
            step = sl.step(f, sl.optim.sgd(1.0))
            step(step.init(entered(W), extra=None if extra is None else sl.shard(extra, "n")), entered(BATCH))


def test_batches_are_tensors():
    with mesh(dp=1), pytest.raises(sl.SpecError, match=r"step: `batch.how` is str; state and batch are tensors"):
        step = sl.step(linear, sl.optim.sgd(1.0))
        step(step.init(entered(W)), entered(BATCH) | {"how": "x"})


def test_the_key_of_a_step():
    def loss(p, batch, key):
        return linear(p, batch), sl.Aux(metrics={"bits": sl.random.bits(key, ()).double()})

    with mesh(dp=2):
        step = sl.step(loss, sl.optim.sgd(1.0), accumulate=2)
        state, seen = step.init(entered(W), key=sl.random.key(7)), []
        for _ in range(3):
            state, metrics = step(state, entered(BATCH))
            seen.append(metrics["bits"].item())
    keys = [sl.random.fold_in(sl.random.key(7), torch.tensor(i)) for i in range(3)]
    assert seen == [sl.random.bits(k, ()).item() for k in keys]


def test_a_grad_fn_is_a_loss():
    new, metrics = updated(mesh(dp=2), sl.value_and_grad(linear), W, BATCH)
    assert metrics["loss"].item() == 3.0 and new["w"].item() == -2.0


def test_evaluate_asks_for_a_key():
    def loss(p, batch, key):
        return linear(p, batch)

    with mesh(dp=2), pytest.raises(sl.SpecError, match="loss takes `key=`, which was not given: evaluate"):
        sl.evaluate(loss)(entered(W), entered(BATCH))


def test_evaluate_adds_up_over_batches():
    def loss(p, batch):
        mean = scaled(p, batch, "batch/dp")
        return mean, sl.Aux(metrics={"largest": sl.pmax(batch["x"].amax(), "dp"), "again": mean})

    with mesh(dp=2):
        valid, params = sl.evaluate(loss), entered(W)
        batches = [
            {"x": (f64(1, 2), "batch/dp"), "weight": (f64(1, 0), "batch/dp")},
            {"x": (f64(3, 6), "batch/dp"), "weight": (f64(1, 2), "batch/dp")},
        ]
        found = [valid(params, entered(b)) for b in batches]
        total: Any = sum(m for m, _ in found)
        assert total.value.item() == 4.0
        assert [x["largest"].item() for _, x in found] == [2.0, 6.0]
        again: Any = sum(x["again"] for _, x in found)
        assert again.value.item() == 4.0
