"""The train step: norms, clipping, decay, dtypes, errors. C.. are cases with known right values."""

import ast
import inspect
from typing import Any

import pytest
import torch
from ranks import on_ranks
from stepped import BATCH, F64, W, entered, f64, linear, mesh, updated
from torch import Tensor

import shardlib as sl
from shardlib import tree

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


# ---- the first steps


@pytest.mark.parametrize("stage, stacked", [(0, False), (1, True), (2, False), (3, True)])
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


@pytest.mark.parametrize("stage", [0, 3])
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


@pytest.mark.parametrize("params", [{}, {"a": None}, []])
@pytest.mark.parametrize("optimizer", [sl.optim.sgd(0.1, momentum=0.9), sl.optim.adamw(0.1)])
def test_no_parameters(params, optimizer):
    with mesh(dp=2):
        step = sl.step(lambda p, b: sl.Mean.of("batch/dp", b["x"]), optimizer, clip=1.0, accumulate=2)
        state, metrics = step(step.init(params), entered(BATCH))
    assert state.params == params and (metrics["loss"].item(), metrics["grad_norm"].item()) == (3.0, 0.0)


def test_arguments_are_checked():
    for clip in (0.0, -1.0):
        with pytest.raises(sl.SpecError, match="a clip above 0"):
            sl.step(linear, sl.optim.sgd(1.0), clip=clip)
    with pytest.raises(sl.SpecError, match=r"step takes an sl.optim.Optimizer\(init, update\)"):
        sl.step(linear, torch.optim.SGD)  # type: ignore[arg-type]
    with mesh(dp=2), pytest.raises(sl.SpecError, match=r"step.init: a key is what sl.random.key"):
        sl.step(linear, sl.optim.sgd(1.0)).init(entered(W), key=0)


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
