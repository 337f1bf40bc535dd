"""Optimizers and schedules against what optax computes, through the train step on several meshes and ZeRO stages."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import optim, tree

GOLDEN = json.loads((Path(__file__).parent / "golden" / "optimizers.json").read_text())
SPECS = {"w": "a/dp b", "b": "n/dp", "s": "", "e": "x y/tp z/dp"}
WHOLE = {"w": "a b", "b": "n", "s": "", "e": "x y/tp z"}
F64 = torch.float64


def golden(leaves: dict[str, list[float]]) -> dict[str, Tensor]:
    return {k: torch.tensor(v, dtype=F64).reshape(GOLDEN["shapes"][k]) for k, v in leaves.items()}


def optimizer(name: str) -> tuple[optim.Optimizer, float | None]:
    """Ours for one of optax, and the norm that gradients are clipped to."""
    hyper = dict(GOLDEN["optimizers"][name]["hyper"])
    lr, clip, mask = hyper.pop("learning_rate"), hyper.pop("max_norm", None), hyper.pop("mask", None)
    if mask:
        assert mask == {"w": True, "b": False, "s": False, "e": True}
        hyper["mask"] = optim.matrices
    return (optim.sgd if name.startswith("sgd") else optim.adamw)(lr, **hyper), clip


def loss(p: Any, batch: Any) -> sl.Mean:
    """Its gradient is the batch's `values`; `rows` has mean one and differs by rank."""
    p, g = sl.gather(p, "dp"), batch["values"]
    e = sl.psum("+tp -> ", sl.reduce("x y/tp z -> +tp", p["e"] * g["e"], "sum"))
    return sl.Mean.of("batch/dp", batch["rows"] * (e + sum((p[k] * g[k]).sum() for k in "wbs")))


CASES = [(name, (1, 1), 0) for name in GOLDEN["optimizers"]] + [
    (name, (2, 2), stage) for name in ("sgd_nesterov", "clip_by_global_norm_adamw") for stage in range(4)
]


@pytest.mark.parametrize("name, axes, stage", CASES)
def test_optimizers_are_those_of_optax(name, axes, stage):
    ours, clip = optimizer(name)
    batch_specs = {"rows": "batch/dp", "values": WHOLE}
    with sl.make_mesh(dp=axes[0], tp=axes[1], simulate=True):
        step = sl.jit(
            sl.step(loss, ours, layout=sl.zero(SPECS, stage=stage), clip=clip, accumulate=2), donate_argnums=0
        )
        state = step.init(sl.shard(golden(GOLDEN["initial_params"]), SPECS))
        for t, g in enumerate(GOLDEN["grads"], 1):
            batch = {"rows": torch.tensor([0.5, 1.0, 0.25, 2.25], dtype=F64), "values": golden(g)}
            state, metrics = step(state, sl.shard(batch, batch_specs))
            if str(t) in GOLDEN["optimizers"][name]["params"]:
                for k, want in golden(GOLDEN["optimizers"][name]["params"][str(t)]).items():
                    assert torch.allclose(sl.gather(state.params[k]), want, rtol=0, atol=1e-14), (k, t)
        assert metrics["lr"].item() == GOLDEN["optimizers"][name]["hyper"]["learning_rate"]
        assert len(step.traces) == 1


def test_warmup_cosine_is_that_of_optax():
    said = GOLDEN["schedules"]["warmup_cosine_decay"]
    h = said["hyper"]
    rate = optim.warmup_cosine(
        h["peak_value"], warmup=h["warmup_steps"], steps=h["decay_steps"], start=h["init_value"], end=h["end_value"]
    )
    found = torch.stack([rate(torch.tensor(t)) for t in range(len(said["values"]))])
    assert torch.allclose(found, torch.tensor(said["values"], dtype=F64), rtol=0, atol=1e-14)
    assert optim.warmup_cosine(1.0, warmup=0, steps=4)(torch.tensor(0)).item() == 1.0
    with pytest.raises(ValueError, match="0 <= warmup < steps"):
        optim.warmup_cosine(1.0, warmup=4, steps=4)


def test_the_first_update_uses_the_rate_of_count_zero():
    rate = optim.warmup_cosine(0.5, warmup=2, steps=4, start=0.1)
    with sl.make_mesh(dp=2, simulate=True):
        step = sl.step(lambda p, b: sl.Mean.of("batch/dp", p * b), optim.sgd(rate))
        state, seen = step.init(sl.shard(torch.ones((), dtype=F64), "")), []
        for _ in range(3):
            state, metrics = step(state, sl.shard(torch.ones(2, dtype=F64), "batch/dp"))
            seen.append(metrics["lr"].item())
        assert seen == pytest.approx([0.1, 0.3, 0.5], rel=1e-15)
        assert sl.gather(state.params).item() == pytest.approx(1 - 0.9, rel=1e-14)


OURS = [optim.sgd(0.1), optim.sgd(0.1, momentum=0.9, nesterov=True), optim.adamw(0.1, weight_decay=0.1)]


@pytest.mark.parametrize("ours", OURS)
def test_the_contract_of_optimizers(ours):
    sl.testing.check_optimizer(ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("ours", OURS)
def test_state_keeps_its_dtypes(ours, dtype):
    """0-d leaves included: two 0-d tensors promote to the wider dtype."""

    def total(p: Any, b: Tensor) -> sl.Mean:
        return sl.Mean.of("batch/dp", b * (p["zero"].float() + p["two"].float().sum()))

    with sl.make_mesh(dp=2, simulate=True):
        step = sl.step(total, ours)
        old = step.init(
            sl.shard(
                {"zero": torch.ones((), dtype=dtype), "two": torch.ones(2, 2, dtype=dtype)}, {"zero": "", "two": "a b"}
            )
        )
        new, _ = step(old, sl.shard(torch.ones(2), "batch/dp"))
        assert [x.dtype for x in tree.leaves(new)] == [x.dtype for x in tree.leaves(old)]
        assert new.params["zero"].dtype == dtype
        wide = torch.promote_types(dtype, torch.float32)
        assert {x.dtype for x in tree.leaves(new.opt) if x.is_floating_point()} <= {wide, F64}


def test_an_optimizer_that_changes_its_state_is_refused():
    bad = optim.Optimizer(lambda p: {"m": torch.zeros_like(p)}, lambda g, s, p: (-g, {"m": s["m"].half()}))
    with sl.make_mesh(dp=2, simulate=True):
        step = sl.step(lambda p, b: sl.Mean.of("batch/dp", p * b), bad)
        with pytest.raises(sl.SpecError, match=r"the optimizer made `m` of its state f16\[\]; it was f32\[\]"):
            step(step.init(sl.shard(torch.ones(()), "")), sl.shard(torch.ones(2), "batch/dp"))
