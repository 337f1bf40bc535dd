"""The train step: averages, norms, clipping, micro-batches, errors, metrics. C.. are cases with known right values."""

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import tree
from shardlib.accumulate import cut
from shardlib.types import region

F64 = torch.float64


def mesh(**axes: Any) -> sl.Mesh:
    return sl.make_mesh(axes, simulate=True)


def f64(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


def updated(
    m: sl.Mesh,
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    optimizer: sl.optim.Optimizer | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """Parameters and metrics after one step, SGD of rate 1 by default; `params` and `batch`: name -> (tensor, spec)."""
    with m:
        step = sl.step(loss, optimizer or sl.optim.sgd(1.0), **options)
        state, metrics = step(step.init(entered(params)), entered(batch))
        return sl.gather(state.params), metrics


def entered(leaves: dict[str, tuple[Tensor, str]]) -> Any:
    return {name: sl.shard(x, spec) for name, (x, spec) in leaves.items()}


# ---- norms and clipping


def weighed(p: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Gradient 1 for half of `w`, which is split over tp, and 2 for `b`, which is on every rank."""
    return sl.psum("+tp -> ", sl.reduce("w/tp -> +tp", p["w"] * batch["x"], "sum")) + 2 * p["b"].sum()


@pytest.mark.parametrize("clip", [None, 1.0, 5.0])
def test_c01_a_replicated_leaf_counts_once(clip):
    params = {"w": (torch.zeros(8, dtype=F64), "w/tp"), "b": (torch.zeros(3, dtype=F64), "b")}
    batch = {"x": (f64(1, 0, 1, 0, 1, 0, 0, 1), "w/tp")}
    new, metrics = updated(mesh(tp=4), weighed, params, batch, clip=clip)
    assert metrics["grad_norm"].item() == 4.0  # 7.211 if the bias counts four times
    factor = 0.25 if clip == 1.0 else 1.0
    assert torch.equal(new["b"], -factor * f64(2, 2, 2))
    assert torch.equal(new["w"], -factor * batch["x"][0])


def test_c02_a_copied_shard_counts_once():
    def loss(p, batch):
        return sl.psum("+fs -> ", sl.reduce("w/fs -> +fs", p["w"], "sum"))

    _, metrics = updated(mesh(rep=2, fs=2), loss, {"w": (torch.ones(16, dtype=F64), "w/fs")}, {})
    assert metrics["grad_norm"].item() == 4.0  # 5.657 when summed over rep too


def ones(p: dict[str, Tensor], batch: dict[str, Tensor]) -> sl.Mean:
    return sl.Mean.of("batch/dp n", sl.gather(p["w"], "dp") * batch["x"]) * 64


def of_ones(m: sl.Mesh) -> dict[str, float]:
    _, metrics = updated(
        m, ones, {"w": (torch.ones(16, dtype=F64), "n/dp")}, {"x": (torch.ones(4, 16, dtype=F64), "batch/dp n")}
    )
    assert all(type(x) is Tensor and x.dim() == 0 for x in metrics.values())
    return {k: x.item() for k, x in metrics.items()}


def test_c03_metrics_are_plain_and_equal_on_all_ranks():
    assert of_ones(mesh(dp=4)) == {"loss": 64.0, "grad_norm": 16.0, "tokens": 64.0, "lr": 1.0}
    found = on_ranks(4, lambda: of_ones(sl.make_mesh(dp=4)))
    assert found == [{"loss": 64.0, "grad_norm": 16.0, "tokens": 64.0, "lr": 1.0}] * 4


@pytest.mark.parametrize("ord, value", [(float("inf"), 7.0), (1, 15.0), (2, 83**0.5), (3, 495 ** (1 / 3))])
def test_c04_norms_with_an_empty_shard(ord, value):
    def norm(t: Any) -> Tensor:
        return sl.global_norm(t, ord)

    with mesh(tp=4):
        leaves = {"a": sl.shard(f64(3, -7, 5), "n/tp"), "none": sl.shard(torch.zeros(0, dtype=F64), "n/tp")}
        found = sl.jit(sl.shard_map(norm, in_specs=None, out_specs=""))
        assert sl.gather(found(leaves)).item() == pytest.approx(value, rel=1e-15)
        assert len(found.lower(leaves).collectives()) == 1  # the one program of all ranks
        assert sl.gather(sl.shard_map(norm, in_specs=None, out_specs="")(leaves)).item() == pytest.approx(
            value, rel=1e-15
        )
        assert sl.gather(sl.shard_map(norm, in_specs=None, out_specs="")({})).item() == 0


# ---- averages


def scaled(p: dict[str, Tensor], batch: dict[str, Tensor], spec: str = "batch/dp seq/cp") -> sl.Mean:
    return sl.Mean.of(spec, p["w"] * batch["x"], batch["weight"])


@pytest.mark.parametrize("axes, count", [((2, 1), 1), ((1, 1), 2), ((1, 3), 1), ((2, 3), 1), ((1, 1), 1), ((1, 3), 2)])
def test_c06_every_token_counts_once(axes, count):
    x = f64([4, 7, 9], [0, 0, 0])
    weight = f64([1, 0, 0], [1, 1, 1])
    batch = {"x": (x, "batch/dp seq/cp"), "weight": (weight, "batch/dp seq/cp")}
    new, metrics = updated(mesh(dp=axes[0], cp=axes[1]), scaled, {"w": (f64(1)[0], "")}, batch, accumulate=count)
    assert (metrics["loss"].item(), metrics["tokens"].item(), new["w"].item()) == (
        1.0,
        4.0,
        0.0,
    )  # a mean of means: 2.0


@pytest.mark.parametrize("rows", [[[0, 0, 0], [1, 1, 1]], [[0, 0, 0], [0, 0, 0]]])
@pytest.mark.parametrize("count", [1, 2])
def test_ranks_and_batches_without_tokens(rows, count):
    m, x, weight = (
        mesh(dp=2, cp=1),
        f64([4, 7, 9], [1, 2, 3]).repeat_interleave(count, 0),
        f64(*rows).repeat_interleave(count, 0),
    )
    batch = {"x": (x, "batch/dp seq/cp"), "weight": (weight, "batch/dp seq/cp")}
    new, metrics = updated(m, scaled, {"w": (f64(1)[0], "")}, batch, accumulate=count)
    assert metrics["loss"].item() == metrics["grad_norm"].item() == (2.0 if weight.any() else 0.0)
    assert new["w"].item() == 1 - metrics["loss"].item()


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"microbatch": 1}])
def test_c09_the_last_microbatch_is_reduced_too(options):
    def loss(p, batch):
        return sl.Mean.of("batch/dp", p["w"] * batch["x"])

    new, metrics = updated(mesh(dp=2), loss, {"w": (f64(0)[0], "")}, {"x": (f64(1, 2, 3, 6), "batch/dp")}, **options)
    assert new["w"].item() == -3.0  # rank 0 alone has 2 or 4 when a reduction is missed
    assert metrics["loss"].item() == 0


def test_terms_have_weights_of_their_own():
    def loss(p, batch):
        w = p["w"]
        return sl.Mean.of("batch/dp", w * batch["x"], batch["weight"]) + 0.5 * sl.Mean.of(
            "batch/dp", w * w * batch["x"]
        )

    batch = {"x": (f64(1, 2, 3, 6), "batch/dp"), "weight": (f64(0, 1, 0, 3), "batch/dp")}
    for count in (1, 2):
        new, metrics = updated(mesh(dp=2), loss, {"w": (f64(2)[0], "")}, batch, accumulate=count)
        assert metrics["loss"].item() == 2 * 20 / 4 + 0.5 * 4 * 12 / 4
        assert metrics["tokens"].item() == 4
        assert new["w"].item() == 2 - (20 / 4 + 0.5 * 4 * 12 / 4)


# ---- decay and the first step


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("stacked", [False, True])
def test_c33_what_decays_is_decided_by_global_shape(stage, stacked):
    def loss(p, batch):
        w, scale = sl.gather((p["w"], p["scale"]), "dp")
        return sl.Mean.of("batch/dp", batch["x"]) + 0.0 * sl.Mean.of("batch/dp", batch["x"] * (w.sum() + scale.sum()))

    w: Any = {"w": torch.ones(4, 4, dtype=F64), "scale": torch.ones(4, dtype=F64)}
    specs: Any = {"w": "a/dp b", "scale": "a/dp"}
    if stacked:
        w, specs = tree.map_(lambda x: x.expand(3, *x.shape), w), sl.stack(specs, "layers")
    with mesh(dp=4):
        step = sl.step(
            loss, sl.optim.adamw(0.1, weight_decay=0.5, mask=sl.optim.matrices), layout=sl.zero(specs, stage=stage)
        )
        state, _ = step(step.init(sl.shard(w, specs)), {"x": sl.shard(torch.arange(4.0, dtype=F64), "batch/dp")})
        new = sl.gather(state.params)
    assert torch.equal(new["w"], 0.95 * w["w"])
    assert torch.equal(new["scale"], w["scale"])


def test_c35_the_first_step_of_adam():
    def loss(p, batch):
        return sl.Mean.of("batch/dp", p["w"] * batch["x"])

    params, batch = {"w": (f64(1)[0], "")}, {"x": (f64(1, 1), "batch/dp")}
    for decay, value in ((0.0, 0.9), (0.5, 0.85)):
        new, _ = updated(mesh(dp=2), loss, params, batch, sl.optim.adamw(0.1, weight_decay=decay))
        assert new["w"].item() == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize("stage", [0, 3])
def test_init_leaves_what_it_is_given(stage):
    specs = {"w": "n/dp", "v": "n"}
    with mesh(dp=2):
        given = sl.shard({"w": torch.arange(4.0), "v": torch.arange(3.0)}, specs)
        before = [s.clone() for x in tree.leaves(given) for s in x.shards]

        def loss(p, batch):
            w, v = sl.gather((p["w"], p["v"]), "dp")
            return sl.Mean.of("batch/dp", batch * (w.square().sum() + v.square().sum()))

        step = sl.jit(
            sl.step(loss, sl.optim.adamw(0.1, weight_decay=0.1), layout=sl.zero(specs, stage=stage)), donate_argnums=0
        )
        state = step.init(given)
        assert state.step.item() == state.opt.count.item() == 0
        assert all(not x.any() for x in tree.leaves(sl.gather((state.opt.mu, state.opt.nu))))
        assert all(
            torch.equal(a, b)
            for a, b in zip(tree.leaves(sl.gather(state.params)), tree.leaves(sl.gather(given)), strict=True)
        )
        for _ in range(2):
            state, _ = step(state, sl.shard(torch.ones(2), "batch/dp"))
        after = [s for x in tree.leaves(given) for s in x.shards]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert step.init(given).step.item() == 0


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dp", [1, 2])
def test_what_was_made_in_inference_mode_is_trained_outside(dp, jit):
    """torch would neither differentiate its tensors nor write into them."""

    def loss(p, batch):
        return sl.Mean.of("batch/dp", batch["x"] * (sl.gather(p["w"], "dp") ** 2).sum())

    found = []
    for inference in (True, False):
        step = sl.step(loss, sl.optim.adamw(0.1))
        run = sl.jit(step, donate_argnums=0) if jit else step
        with mesh(dp=dp):
            with torch.inference_mode(inference):
                state = step.init(entered({"w": (torch.arange(4.0), "n/dp")}))
                batch = entered({"x": (torch.arange(2.0), "batch/dp")})
                value = sl.evaluate(loss)(state.params, batch)[0].value.item()
            for _ in range(2):
                state, metrics = run(state, batch)
            found.append([sl.gather(state.params)["w"].tolist(), value, metrics["loss"].item()])
    assert found[0] == found[1] and found[0][1] != found[0][2]


def test_sixteen_bit_parameters_have_masters():
    def loss(p, batch):
        w, v = p["w"], p["v"]
        return sl.Mean.of("batch/dp", batch["x"] * w.float()) + sl.Mean.of("batch/dp", batch["x"].bfloat16() * v)

    for optimizer in (
        sl.optim.sgd(2.0**-10),
        sl.optim.sgd(2.0**-10, momentum=1e-30),
        sl.optim.adamw(2.0**-10, eps=0.0),
    ):
        with mesh(dp=2):
            step = sl.step(loss, optimizer)
            params = {"w": (torch.ones((), dtype=torch.bfloat16), ""), "v": (torch.ones((), dtype=torch.bfloat16), "")}
            state = step.init(entered(params))
            seen = []
            for _ in range(8):
                state, _ = step(state, entered({"x": (torch.ones(2), "batch/dp")}))
                seen.append(state.params["w"].local(0).item())
            assert state.params["w"].dtype == torch.bfloat16 and state.opt.master["w"].dtype == torch.float32
            assert state.opt.master["w"].local(1).item() == pytest.approx(1 - 8 * 2.0**-10, abs=1e-6)
            assert seen[0] == 1.0 and seen[-1] == 1 - 2.0**-7  # in bfloat16 alone it would stay 1
            assert state.params["v"].local(0).item() == seen[-1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("count, dtype", [(1, torch.bfloat16), (2, torch.float32)])
def test_gradients_of_one_micro_batch_keep_the_dtype_of_the_parameters(stage: int, count: int, dtype: torch.dtype):
    seen = []

    def update(grads, state, params):
        seen.append(grads["w"].dtype)
        return tree.map_(torch.zeros_like, grads), state

    def loss(w, batch):
        return sl.Mean.of("batch/dp n", (batch["x"] * sl.gather(w["w"], "dp")).float() ** 2)

    x, w = torch.arange(1, 81.0).view(8, 10).bfloat16(), torch.linspace(0.1, 1, 10).bfloat16()
    with mesh(dp=2):
        optimizer = sl.optim.Optimizer(lambda params: None, update)
        step = sl.step(loss, optimizer, layout=sl.zero({"w": "n/dp"}, stage=stage), accumulate=count)
        _, metrics = step(step.init(entered({"w": (w, "n/dp")})), entered({"x": (x, "batch/dp n")}))
    g = 2 * w.float() * (x.float() ** 2).mean(0) / 10
    assert metrics["grad_norm"] == pytest.approx(g.norm().item(), rel=1e-2)
    assert set(seen) == {dtype}


def test_updates_that_were_written_into_through_a_view_are_applied_as_written():
    """Parameters are updated leaf by leaf in a program, as soon as an update is there: not before it is complete."""

    def update(grads, state, params):
        updates = tree.map_(lambda g: g * -1.0, grads)
        for u in tree.leaves(updates):
            u.view(-1).mul_(3.0)
        return updates, state

    def loss(w, batch):
        return sl.Mean.of("batch/dp n", batch["x"] * sl.gather(w["w"], "dp"))

    with mesh(dp=2):
        step = sl.step(loss, sl.optim.Optimizer(lambda params: None, update), layout=sl.zero({"w": "n/dp"}, stage=3))
        state, batch = (
            step.init(entered({"w": (torch.zeros(4), "n/dp")})),
            entered({"x": (torch.ones(2, 4), "batch/dp n")}),
        )
        for run in (step, sl.jit(step)):
            assert sl.gather(run(state, batch)[0].params)["w"].tolist() == [-0.75] * 4


# ---- micro-batches


def test_micro_batches_are_contiguous_runs_of_local_rows():
    def pieces(batch: Any) -> Any:
        for p in cut(batch, "batch", 2):
            shapes = {name: region().leaves.get(x).shape for name, x in p.items()}  # type: ignore[union-attr]
            assert shapes == {"x": (4, 3), "late": (3, 4), "table": (5,)}
        return tuple((p["x"], p["late"]) for p in cut(batch, "batch", 2))

    x = torch.arange(24).view(8, 3)
    with mesh(dp=2):
        batch = entered({"x": (x, "batch/dp seq"), "late": (x.T, "seq batch/dp"), "table": (torch.arange(5), "n")})
        (a, late_a), (b, late_b) = sl.shard_map(pieces, in_specs=None, out_specs=None)(batch)
        assert torch.equal(sl.gather(a), x[[0, 1, 4, 5]]) and torch.equal(sl.gather(b), x[[2, 3, 6, 7]])
        assert torch.equal(sl.gather(late_a), x[[0, 1, 4, 5]].T) and torch.equal(sl.gather(late_b), x[[2, 3, 6, 7]].T)


def linear(p: dict[str, Tensor], batch: dict[str, Tensor]) -> sl.Mean:
    return sl.Mean.of("batch/dp", p["w"] * batch["x"])


BATCH = {"x": (f64(1, 2, 3, 6), "batch/dp")}
W = {"w": (f64(1)[0], "")}


@pytest.mark.parametrize(
    "options, said",
    [
        (
            dict(accumulate=3),
            "into 3 equal parts, but `batch.x` (`batch/dp`) has 4 rows, 2 on each rank of dp.\n"
            "  Take accumulate=1 or 2, or a number of rows that is a multiple of 6",
        ),
        (dict(accumulate=4), "step: accumulate=4 cuts the rows of each rank into 4 equal parts, but"),
        (dict(accumulate=0), "step: accumulate=0 cuts"),
        (
            dict(microbatch=3),
            "into parts of 3, but `batch.x` (`batch/dp`) has 4 rows, 2 on each rank of dp.\n"
            "  Take microbatch=1 or 2, or a number of rows that is a multiple of 6",
        ),
        (dict(microbatch=0), "step: microbatch=0 cuts"),
        (dict(microbatch=1, accumulate=2), "not both"),
    ],
)
def test_micro_batches_that_do_not_fit(options, said):
    with pytest.raises(sl.SpecError, match=re.escape(said)):
        updated(mesh(dp=2), linear, W, BATCH, **options)


def test_leaves_that_do_not_fit():
    for leaf, said in ((f64(1, 2, 3, 4, 5, 6), "6 rows, 3 on each rank"), (f64(1, 2, 3), "3 rows over 2 ranks")):
        with pytest.raises(sl.SpecError, match=rf"accumulate=2 cuts .*but `batch\.y` \(`batch/dp`\) has {said}"):
            updated(mesh(dp=2), linear, W, BATCH | {"y": (leaf, "batch/dp")}, accumulate=2)


def test_micro_batches_need_a_named_dimension():
    def loss(p, batch):
        return sl.Mean.of("batch", p["w"] * batch)

    with mesh(dp=2):
        step = sl.step(loss, sl.optim.sgd(1.0), accumulate=2)
        state = step.init(entered(W))
        for batch in (f64(1, 2), sl.shard(f64(1, 2), "...")):
            with pytest.raises(sl.SpecError, match=r"cut along the first dimension.*sl.shard\(batch, 'batch/dp ...'\)"):
                step(state, batch)


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


def test_the_layout_must_fit():
    layout = sl.zero({"v": "n"}, stage=1)
    with mesh(dp=2):
        step = sl.step(linear, sl.optim.sgd(1.0), layout=layout)
        with pytest.raises(sl.TreeError, match=r"layout\.compute does not match the tree"):
            step.init(entered(W))
        with pytest.raises(sl.SpecError, match="names 1 dimension"):
            sl.step(linear, sl.optim.sgd(1.0), layout=sl.zero({"w": "n"}, stage=1)).init(entered(W))


def test_integer_parameters_have_no_gradient():
    with pytest.raises(sl.SpecError, match=r"step: parameter `n` is torch\.int64; only floating.*trainable="):
        updated(mesh(dp=2), linear, W | {"n": (torch.tensor(3), "")}, BATCH)


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


@pytest.mark.parametrize("params", [{}, {"a": None}, []])
@pytest.mark.parametrize("optimizer", [sl.optim.sgd(0.1, momentum=0.9), sl.optim.adamw(0.1)])
def test_no_parameters(params, optimizer):
    with mesh(dp=2):
        step = sl.step(lambda p, b: sl.Mean.of("batch/dp", b["x"]), optimizer, clip=1.0, accumulate=2)
        state, metrics = step(step.init(params), entered(BATCH))
    assert state.params == params and (metrics["loss"].item(), metrics["grad_norm"].item()) == (3.0, 0.0)


def test_a_grad_fn_is_a_loss():
    new, metrics = updated(mesh(dp=2), sl.value_and_grad(linear), W, BATCH)
    assert metrics["loss"].item() == 3.0 and new["w"].item() == -2.0


def test_arguments_are_checked():
    for clip in (0.0, -1.0):
        with pytest.raises(sl.SpecError, match="a clip above 0"):
            sl.step(linear, sl.optim.sgd(1.0), clip=clip)
    with pytest.raises(sl.SpecError, match=r"step takes one of sl.optim's optimizers"):
        sl.step(linear, torch.optim.SGD)  # type: ignore[arg-type]
    with mesh(dp=2), pytest.raises(sl.SpecError, match=r"step.init: a key is what sl.random.key"):
        sl.step(linear, sl.optim.sgd(1.0)).init(entered(W), key=0)


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


def test_step_is_short():
    """It is printed in the docs, and copied for loops that it does not fit: under 60 lines, of public calls."""
    (function,) = ast.parse(inspect.getsource(sl.step)).body
    assert isinstance(function, ast.FunctionDef) and function.end_lineno
    lines = function.end_lineno - function.body[1].lineno + 1
    names = {
        n.attr if isinstance(n, ast.Attribute) else n.id
        for n in ast.walk(function)
        if isinstance(n, ast.Attribute | ast.Name)
    }
    assert lines < 60 and {n for n in names if n.startswith("_")} == {"__name__"}
