"""Precision: dtypes at rest, in the loss, on the wire and of what comes out. C.. are cases with known right values."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import tree
from shardlib.precision import DTYPES

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SUMS = ("psum", "psum_scatter")


def mesh(**axes: Any) -> sl.Mesh:
    return sl.make_mesh(axes, simulate=True)


def linear(p: dict[str, Tensor], batch: dict[str, Tensor]) -> sl.Mean:
    return sl.Mean.of("batch/dp", sl.gather(p["w"], "dp").sum() * batch["x"].to(p["w"].dtype), batch.get("weight"))


# ---- what is cast


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("jit", [False, True])
def test_c23_what_is_no_parameter_is_never_cast(stage: int, jit: bool, tmp_path: Any) -> None:
    """Integers, booleans, kept and frozen leaves, batch and extra, through shard, step, gather, save and restore."""
    seen: dict[str, torch.dtype] = {}

    def loss(p: Any, batch: Any, extra: Any) -> Any:
        whole = sl.gather(p, "dp")
        found = {**p, "x": batch["x"], "weight": batch["weight"], "mean": extra["mean"]}
        seen.update({k: v.dtype for k, v in found.items()})
        turned = torch.cos(whole["at"][:, None] * whole["bands"]).sum(1)
        y = batch["x"].to(p["w"].dtype) @ (whole["w"] * whole["mask"]) * turned.mean().to(p["w"].dtype)
        return sl.Mean.of("batch/dp", y, batch["weight"]), sl.Aux(extra={"mean": extra["mean"] + 1})

    params = {
        "w": torch.linspace(-1, 1, 6),
        "at": torch.tensor([0, 4097, 2]),
        "mask": torch.tensor([True, False, True, True, True, True]),
        "bands": torch.linspace(0.1, 1.1, 5),
    }
    specs = {"w": "n/dp", "at": "seq", "mask": "n", "bands": "half"}
    dtypes = {"w": F32, "at": torch.int64, "mask": torch.bool, "bands": F32}
    how = sl.precision("bf16", keep="bands")
    step = sl.step(
        loss, sl.optim.adamw(0.1), layout=sl.zero(specs, stage=stage), trainable="w", precision=how, accumulate=2
    )
    valid = sl.evaluate(loss, layout=sl.zero(specs, stage=stage), precision=how)
    run = sl.jit(step) if jit else step
    batch = {"x": torch.arange(24.0).reshape(4, 6) / 24, "weight": torch.tensor([1.0, 257, 0, 3])}
    with mesh(dp=2):
        state = step.init(
            {k: sl.shard(x, specs[k]) for k, x in params.items()}, extra={"mean": sl.shard(torch.ones(()), "")}
        )
        rows = {"x": sl.shard(batch["x"], "batch/dp n"), "weight": sl.shard(batch["weight"], "batch/dp")}
        for _ in range(2):
            state, metrics = run(state, rows)
        mean, _ = valid(state.params, rows, extra=state.extra)
        again = sl.restore(sl.save(tmp_path, state, step=1), like=state)
        for each in (state, again):
            found = sl.gather(each.params)
            assert {k: x.dtype for k, x in found.items()} == dtypes
            assert found["at"].tolist() == [0, 4097, 2] and torch.equal(found["bands"], params["bands"])
        assert not torch.equal(sl.gather(state.params)["w"], params["w"])
        assert metrics["tokens"].item() == 261 and metrics["loss"].dtype == mean.value.dtype == F32
        assert state.extra["mean"].item() == 5 and state.extra["mean"].dtype == F32
    assert seen == {**dtypes, "w": BF16, "x": F32, "weight": F32, "mean": F32}


def test_parameters_at_rest_and_masters() -> None:
    """16-bit parameters have float32 masters, so that updates below their precision add up; frozen leaves stay."""
    params = {"w": (torch.ones(3), "n/dp"), "frozen": (torch.ones(2, dtype=F64), "m")}
    step = sl.step(
        linear,
        sl.optim.sgd(2.0**-12),
        precision=sl.precision("bf16", params="bf16"),
        trainable="w",
    )
    with mesh(dp=2):
        state = step.init({k: sl.shard(x, spec) for k, (x, spec) in params.items()})
        assert {k: x.dtype for k, x in state.params.items()} == {"w": BF16, "frozen": F64}
        assert {x.dtype for x in tree.leaves(state.opt.master)} == {F32}
        for _ in range(16):
            state, _ = step(state, {"x": sl.shard(torch.ones(4), "batch/dp")})
        assert sl.gather(state.params)["w"].tolist() == [1 - 2.0**-8] * 3  # 1 - 2^-12 alone would be 1 in bf16


@pytest.mark.parametrize("params", [BF16, F16])
@pytest.mark.parametrize("make", [sl.optim.adamw, lambda lr: sl.optim.skip_nonfinite(sl.optim.lion(lr))])
def test_c23_16_bits_are_exported_in_float32(params: torch.dtype, make: Any, tmp_path: Any) -> None:
    """The masters of what is trained, what is frozen cast, integers and float64 as they are; tied leaves stay one."""
    tied = sl.make_mesh(dp=2, simulate=True)
    with tied:
        w = sl.shard(torch.linspace(1, 2, 5), "n/dp")
        rest = {
            "frozen": (torch.tensor([1.5]), "m"),
            "at": (torch.tensor([4097]), "k"),
            "wide": (torch.ones(1).double(), "j"),
        }
        leaves = {"w": w, "again": w} | {
            k: sl.shard(x.to(params) if k == "frozen" else x, s) for k, (x, s) in rest.items()
        }
        step = sl.step(linear, make(2.0**-12), precision=sl.precision("bf16", params=params), trainable=["w", "again"])
        state = step.init(leaves)
        for _ in range(3):
            state, _ = step(state, {"x": sl.shard(torch.ones(4), "batch/dp")})
        whole = sl.optim.float32(state)
        again = sl.restore(sl.save(tmp_path, whole, step=3), like=whole)
        for found in (sl.gather(whole), sl.gather(again)):
            assert {k: x.dtype for k, x in found.items()} == dict.fromkeys(("w", "again", "frozen"), F32) | dict(
                at=torch.int64, wide=F64
            )
            assert found["at"].item() == 4097 and torch.equal(found["w"], found["again"])
            assert torch.equal(found["w"].to(params), sl.gather(state.params)["w"])
            assert not torch.equal(found["w"], found["w"].to(params).to(F32))


@pytest.mark.parametrize("name", DTYPES)
def test_names_of_dtypes(name: str) -> None:
    seen: list[torch.dtype] = []

    def loss(p: Any, batch: Any) -> sl.Mean:
        seen.append(p["w"].dtype)
        return linear(p, batch)

    with mesh(dp=2):
        for said in (name, DTYPES[name]):
            valid = sl.evaluate(loss, precision=sl.precision(said, output="f64"))
            found = valid({"w": sl.shard(torch.tensor(2.0), "")}, {"x": sl.shard(torch.ones(4), "batch/dp")})
            assert found[0].value.item() == 2 and found[0].value.dtype == F64
    assert set(seen) == {DTYPES[name]}


def test_sums_of_what_a_loss_gives_are_made_in_output() -> None:
    """A loss of its own total and weight in 16 bits: 300 ranks' worth of ones would stay 256 in bf16."""

    def loss(p: Any, batch: Any) -> Any:
        one = sl.pending((p["w"] * batch["x"].to(BF16)).sum(), "dp")
        metrics = {"ones": sl.pending(batch["x"].to(BF16).sum(), "dp")}
        return sl.Mean(one, sl.pending(batch["x"].to(BF16).sum(), "dp")), sl.Aux(metrics=metrics)

    with mesh(dp=2):
        batch = {"x": sl.shard(torch.tensor([256.0, 1.0]), "batch/dp")}
        for output, total in (("f32", 257), ("bf16", 256)):
            how = sl.precision("bf16", output=output)
            step = sl.step(loss, sl.optim.sgd(0.0), precision=how)
            metrics = step(step.init({"w": sl.shard(torch.ones(()), "")}), batch)[1]
            assert (metrics["tokens"].item(), metrics["ones"].item()) == (total, total)
            assert metrics["loss"].dtype == DTYPES[output]


# ---- the dtype of every collective


def mlp(p: dict[str, Tensor], x: Tensor) -> Tensor:
    p = sl.gather(p, "dp")
    h = sl.einsum("batch/dp m, m h/tp -> batch/dp h/tp", x, p["up"])
    y = sl.einsum("batch/dp h/tp, h/tp m -> batch/dp m +tp", torch.tanh(h), p["down"])
    return x + sl.psum("batch/dp m +tp -> batch/dp m", y)


def one_layer(p: Any, batch: Any) -> sl.Mean:
    return sl.Mean.of("batch/dp m", mlp(p, batch.to(p["up"].dtype)) ** 2)


def two_layers(p: Any, batch: Any) -> sl.Mean:
    x, _ = sl.scan(lambda x, w: (sl.remat(mlp)(w, x), None), batch.to(p["up"].dtype), p)
    return sl.Mean.of("batch/dp m", x**2)


@pytest.mark.parametrize("loss, stage, count, params, reduce", [
    (one_layer, 0, 1, "f32", "f32"), (one_layer, 1, 1, "bf16", "f32"), (one_layer, 2, 1, "f32", "bf16"),
    (one_layer, 2, 2, "f32", "f32"), (two_layers, 3, 2, "bf16", "bf16"), (two_layers, 3, 1, "f32", "f32"),
])  # fmt: skip
def test_c21_the_dtype_of_every_collective(loss: Any, stage: int, count: int, params: str, reduce: str) -> None:
    specs = {"up": "m/dp h/tp", "down": "h/tp m/dp"}
    specs = specs if loss is one_layer else sl.stack(specs, "layers")
    how, layout = sl.precision("bf16", params=params, reduce=reduce), sl.zero(specs, stage=stage)
    step = sl.step(loss, sl.optim.adamw(0.1), layout=layout, precision=how, accumulate=count, clip=1.0)
    with mesh(dp=2, tp=2):
        w = torch.ones(4, 4) if loss is one_layer else torch.ones(2, 4, 4)
        state = step.init(sl.shard({"up": w, "down": w.clone()}, specs))
        found = sl.jit(step).lower(state, sl.shard(torch.ones(8, 4), "batch/dp m")).collectives()
    matrices = {c for c in found if not c.scalar and "dp" in c.axis}
    sums = {c.dtype for c in matrices if c.op in SUMS}
    assert sums == {DTYPES[reduce]}, "gradients over dp"
    before = {c.dtype for c in matrices if c.op == "all_gather" and c.part}
    assert before == ({BF16} if stage == 3 else set()), "weights in the loss"
    after = {c.dtype for c in matrices if c.op == "all_gather" and not c.part}
    assert after == ({DTYPES[params]} if stage in (1, 2) else set()), "new weights"
    over_tp = [c for c in found if c.axis == "tp" and not c.scalar]
    assert {c.dtype for c in over_tp} == {BF16}, "activations"
    assert {c.dtype for c in found if c.scalar} == {F32}, "norms and means"


def test_a_gathered_leaf_is_gathered_again_and_ahead_after_its_cast() -> None:
    """The passes see through the cast: as many gathers in each part as without precision, of half the bytes."""

    def loss(p: Any, batch: Any) -> sl.Mean:
        x = batch["x"].to(p["b"].dtype)
        for name in "abc":
            x = torch.tanh(x @ sl.gather(p[name], "dp"))
        return sl.Mean.of("batch/dp n", x**2)

    found = []
    for how in (None, sl.precision("bf16")):
        step = sl.jit(sl.step(loss, sl.optim.sgd(0.1), precision=how))
        with mesh(dp=2):
            state = step.init({n: sl.shard(torch.eye(4), "m/dp n") for n in "abc"})
            lowered = step.lower(state, {"x": sl.shard(torch.ones(4, 4), "batch/dp m")})
            found.append(sorted((c.part, c.bytes) for c in lowered.collectives() if c.op == "all_gather"))
    assert found[1] == [(part, size // 2) for part, size in found[0]]
    assert {part for part, _ in found[0]} == {"forward", "backward"}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("reduce, wanted", [("f32", 99840.0), ("f16", torch.inf)])
def test_c21_large_gradients(stage: int, reduce: str, wanted: float) -> None:
    how = sl.precision("bf16", params="bf16", reduce=reduce)
    step = sl.jit(
        sl.step(
            linear,
            sl.optim.sgd(1.0, momentum=0.5),
            layout=sl.zero({"w": "n/dp"}, stage=stage),
            precision=how,
        )
    )
    with mesh(dp=2):
        state, metrics = step(
            step.init({"w": sl.shard(torch.zeros(2), "n")}), {"x": sl.shard(torch.full((2,), 1e5), "batch/dp")}
        )
        assert sl.gather(state.opt.trace)["w"].tolist() == [wanted] * 2
    assert metrics["grad_norm"].item() == pytest.approx(wanted * 2**0.5)


# ---- micro-batches


def test_c22_gradients_add_up_in_float32() -> None:
    """A first gradient of 1, then 256 of 2^-8: 2 (1 in bf16). Weights add up to 512, the rate undoes them."""
    step = sl.jit(sl.step(linear, sl.optim.sgd(512.0), accumulate=258, precision=sl.precision("bf16")))
    x, weight = torch.full((258,), 2.0**-8), torch.ones(258)
    x[0], x[-1], weight[-1] = 1, 0, 255
    with mesh(dp=1):
        batch = {"x": sl.shard(x, "batch/dp"), "weight": sl.shard(weight, "batch/dp")}
        state, _ = step(step.init({"w": sl.shard(torch.zeros(()), "")}), batch)
        assert state.params["w"].item() == -2


@pytest.mark.parametrize("compute", ["bf16", "f16", "f64"])
def test_c08_one_division_by_the_weight_of_the_whole_batch(compute: str) -> None:
    """2 steps of 4 micro-batches, every micro-gradient 1: 1 each; by jit one graph for all micro-batches."""
    how = sl.precision(compute, scale=4.0)
    step = sl.jit(sl.step(linear, sl.optim.sgd(1.0), accumulate=4, precision=how))
    with mesh(dp=2):
        state = step.init({"w": sl.shard(torch.zeros(()), "")})
        for i in (1, 2):
            state, metrics = step(state, {"x": sl.shard(torch.ones(8), "batch/dp")})
            assert state.params["w"].item() == -i and metrics["grad_norm"].item() == 1


@pytest.mark.parametrize("compute, stage", [("bf16", 0), ("f16", 2), ("f16", 3)])
def test_c09_the_last_micro_batch_is_reduced_too(compute: str, stage: int) -> None:
    """Rank 0 has gradients 1 and 2, rank 1 has 3 and 6: their mean is 3 on both (2 and 4 where one is missed)."""
    layout = sl.zero({"w": "n/dp"}, stage=stage)
    step = sl.step(
        linear,
        sl.optim.sgd(1.0), layout=layout, accumulate=2, precision=sl.precision(compute, scale=4.0),
    )  # fmt: skip
    with mesh(dp=2):
        state = step.init({"w": sl.shard(torch.zeros(2), "n")})
        state, _ = step(state, {"x": sl.shard(torch.tensor([1.0, 2, 3, 6]), "batch/dp")})
        assert sl.gather(state.params)["w"].tolist() == [-3.0, -3.0]


# ---- what is refused


def test_what_is_no_precision() -> None:
    with pytest.raises(sl.SpecError, match=r"precision: compute= is one of 'bf16', .* not 'int8'"):
        sl.precision("int8")
    with pytest.raises(sl.SpecError, match=r"precision: reduce= .* not torch.int64"):
        sl.precision(reduce=torch.int64)
    for make in (lambda p: sl.step(linear, sl.optim.sgd(1.0), precision=p), lambda p: sl.evaluate(linear, precision=p)):
        with pytest.raises(sl.SpecError, match=r"(step|evaluate): precision= is what sl.precision.* not 'bf16'"):
            make("bf16")
    step = sl.step(linear, sl.optim.sgd(1.0), precision=sl.precision(keep="router"))
    with mesh(dp=2), pytest.raises(sl.TreeError, match=r"precision: keep: `router` matches no path.*there are `w`"):
        step.init({"w": sl.shard(torch.zeros(()), "")})


def test_keep_by_spec_and_tied_leaves() -> None:
    """`keep` by path and spec; a leaf at two places stays one, kept or cast."""

    def loss(p: Any, batch: Any) -> sl.Mean:
        assert (p["a"].dtype, p["router"].dtype) == (BF16, F32)
        return sl.Mean.of("batch/dp", batch["x"] * p["router"].sum() * p["a"].float().sum())

    how = sl.precision("bf16", keep=lambda path, spec: spec.names == ("model", "experts"))
    with mesh(dp=2):
        a, router = sl.shard(torch.ones(3), "n"), sl.shard(torch.ones(2, 2), "model experts")
        step = sl.step(loss, sl.optim.sgd(0.5), precision=how)
        for run in (step, sl.jit(step)):
            state, _ = run(step.init({"a": a, "b": a, "router": router}), {"x": sl.shard(torch.ones(2), "batch/dp")})
            assert state.params["a"] is state.params["b"] and state.params["a"].dtype == F32
            assert sl.gather(state.params)["a"].tolist() == [-1.0] * 3
