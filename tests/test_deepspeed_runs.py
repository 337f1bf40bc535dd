"""DeepSpeed configs: the numbers of schedules and of runs, and the code that is printed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import BASE, OFFLOAD, THREE, TWO, explain, load, merged
from torch import Tensor

import shardlib as sl

GOLDEN = Path(__file__).parent / "golden"
RUN = json.loads((GOLDEN / "deepspeed_run.json").read_text())
WARM = [0.0, 0.0, 0.025, 0.05 * 0.7924812503605781, 0.05, 0.05, 0.05, 0.05]  # log(n) / log(4) for n = 1, 2, 3, 4


@pytest.mark.parametrize(
    "case", json.loads((GOLDEN / "deepspeed_schedules.json").read_text())["schedules"], ids=lambda case: case["type"]
)
def test_rates_are_those_of_deepspeed(case):
    """Those that its own schedulers gave the optimizer, update by update."""
    scheduler = {k: case[k] for k in ("type", "params")}
    schedule = load(
        BASE | {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}, "scheduler": scheduler}, dp=1
    ).schedule
    assert schedule is not None
    rates = [schedule(torch.tensor(n)).item() for n in range(len(case["rates"]))]
    assert rates == pytest.approx(case["rates"], rel=1e-12, abs=1e-18)


@sl.pytree
class Mlp:
    w_in: Tensor = sl.spec("model/dp hidden")
    bias: Tensor = sl.spec("hidden/dp")
    w_out: Tensor = sl.spec("hidden/dp out")


def loss(w: Mlp, batch: dict[str, Tensor]) -> sl.Mean:
    w = sl.gather(w, "dp")
    y = torch.tanh(batch["x"].to(w.w_in.dtype) @ w.w_in + w.bias) @ w.w_out
    return sl.Mean.of("batch/dp out", (y.float() if y.dtype == torch.float16 else y).sub(batch["y"]) ** 2)


def start(dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((5, 7), (7,), (7, 3))]


def batches(dtype: torch.dtype, n: int, rows: int, spike: float = 1.0) -> list[dict[str, Tensor]]:
    """The same for all, but that the fourth asks for `spike` times as much."""
    g = torch.Generator().manual_seed(1)
    sides = [[torch.randn(rows, k, generator=g, dtype=torch.float64).to(dtype) for k in (5, 3)] for _ in range(n)]
    for _, y in sides[3:4]:
        y *= spike
    return [dict(zip("xy", pair, strict=True)) for pair in sides]


def trained(
    config: Any, mesh: Any, dtype: torch.dtype, n: int = 8, spike: float = 1.0, **changed: Any
) -> tuple[list[Any], Any]:
    """Losses, the scales they had, and the parameters, on simulated ranks."""
    found = []
    with sl.make_mesh(mesh, simulate=True):
        train = sl.jit(sl.step(loss, **config.step(sl.specs(Mlp), **changed)), donate_argnums=0)
        state = train.init(sl.shard(Mlp(*start(dtype))))
        for batch in batches(dtype, n, config.batch, spike):
            state, metrics = train(state, sl.shard(batch, "batch/dp n"))
            found.append((metrics["loss"].item(), metrics["scale"].item() if "scale" in metrics else 1.0))
        params = sl.gather(state.params)
    return found, [params.w_in, params.bias, params.w_out]


def plainly(
    dtype: torch.dtype,
    n: int,
    rows: int,
    *,
    rates: list[float],
    decay: float,
    clip: float,
    scale: float,
    power: bool,
    spike: float = 1.0,
) -> tuple[list[Any], list[Tensor]]:
    """The same by hand in one process: masters, AdamW, clipping, a scale that halves at every overflow."""
    half = dtype == torch.float32  # what the config then computes in float16
    master = [(p.half() if half else p).to(dtype).requires_grad_() for p in start(dtype)]
    adam = torch.optim.AdamW(master, lr=1.0, betas=(0.8, 0.95), eps=1e-8, weight_decay=decay)
    found, good = [], 0
    for batch in batches(dtype, n, rows, spike):
        w = [(p.half() if half else p).detach().requires_grad_() for p in master]
        y = torch.tanh(batch["x"].to(w[0].dtype) @ w[0] + w[1]) @ w[2]
        value = ((y.to(dtype) - batch["y"]) ** 2).mean()
        grads = [g.to(dtype) / scale for g in torch.autograd.grad(value * scale, w)]
        finite = all(bool(g.isfinite().all()) for g in grads)
        found.append((value.item(), scale))
        if not finite:
            scale = scale / 2 if power else scale
            continue
        norm = torch.stack([g.norm() for g in grads]).norm()
        for p, g in zip(master, grads, strict=True):
            p.grad = g * min(1.0, clip / norm.item())
        adam.param_groups[0]["lr"] = rates[good]
        adam.step()
        good += 1
    return found, [p.detach() for p in master]


@pytest.mark.parametrize(
    ("config", "options", "plain"),
    [
        (TWO, {}, dict(rates=WARM, decay=0.0, scale=2.0**10, power=True)),
        (THREE, {"without": OFFLOAD}, dict(rates=[0.02] * 8, decay=0.1, scale=128.0, power=False)),
    ],
    ids=["fp16, WarmupLR, stage 2", "static scale, decay, stage 3"],
)
def test_usual_configs_train_as_one_process_does(config, options, plain):
    """In float64 without rounding; then in float16, as the config has it, with gradients once that float16 has not."""
    cfg = load(config, dp=3, **options)
    wanted, params = plainly(torch.float64, 8, 24, **plain | {"scale": 1.0}, clip=0.3)
    found, got = trained(cfg, cfg.mesh, torch.float64, precision=None)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in wanted], rel=1e-9)
    for a, b in zip(got, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)

    wanted, params = plainly(torch.float32, 8, 24, **plain, clip=0.3, spike=1e6)
    found, got = trained(cfg, cfg.mesh, torch.float32, spike=1e6)
    assert [scale for _, scale in found] == [scale for _, scale in wanted]
    assert [x for x, _ in found] == pytest.approx([x for x, _ in wanted], rel=5e-3)
    assert [a.dtype for a in got] == [torch.float16] * 3
    for a, b in zip(got, params, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("run", RUN["runs"], ids=lambda run: run["config"]["optimizer"]["type"])
def test_losses_are_those_of_deepspeed(run):
    """Those that DeepSpeed itself had, in float32 on one rank."""
    found, _ = trained(load(run["config"], dp=3, without="train_micro_batch_size_per_gpu"), {"dp": 3}, torch.float32)
    assert [x for x, _ in found] == pytest.approx(run["losses"], rel=2e-5)


def test_without_an_optimizer_the_caller_gives_one():
    config = load(BASE, dp=1)
    with pytest.raises(sl.ConfigError, match=r"has no optimizer: give one, config.step\(specs, optimizer=...\)"):
        config.step({"w": "n/dp"})
    assert config.step({"w": "n/dp"}, optimizer=sl.optim.sgd(1.0), clip=None)["clip"] is None
    assert config.optimizer is config.schedule is config.precision is None
    scope: dict[str, Any] = {}
    exec(explain(config), scope)
    assert scope["train_step"](loss, sl.specs(Mlp), sl.optim.sgd(1.0)).init


def test_persistent_parameters_and_groups_of_ranks():
    """Small leaves stay whole, but for their optimizer state; hpZ's mesh and layout give the numbers of ZeRO-3."""
    three = merged(TWO, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20}})
    cfg = load(three, dp=2)
    with sl.make_mesh(cfg.mesh, simulate=True):
        layout = cfg.layout(sl.specs(Mlp)).resolve(sl.shard(Mlp(*start(torch.float64))))
    whole = {name: getattr(layout, name).bias.split for name in ("compute", "params", "grads", "opt")}
    assert whole == {"compute": (), "params": (), "grads": ("dp",), "opt": ("dp",)}
    assert layout.params.w_out.split == ("dp",), "21 elements are more than 20"
    wanted, _ = trained(cfg, cfg.mesh, torch.float64, n=3, precision=None)
    nodes = load(merged(TWO, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}), dp=6)
    assert nodes.mesh == {"dp": {"node": 2, "gpu": 3}}
    found, _ = trained(nodes, nodes.mesh, torch.float64, n=3, precision=None)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in wanted], rel=1e-9)


@pytest.mark.parametrize("name", ["Adam", "Lamb", "Lion", "Muon", "SGD"])
def test_every_optimizer_runs_in_the_code_that_is_printed(name):
    config = merged(TWO, {"optimizer": {"type": name, "params": {}}})
    params = ["lr", *(["momentum"] if name in ("Muon", "SGD") else ["betas"])]
    config["optimizer"]["params"] = {p: {"lr": 0.01, "momentum": 0.5, "betas": [0.8, 0.95]}[p] for p in params}
    config.pop("fp16")
    cfg, scope = load(config, dp=2), dict[str, Any]()
    exec(explain(cfg), scope)
    with sl.make_mesh(scope["MESH"], simulate=True):
        train, state = scope["train_step"](loss, sl.specs(Mlp)), None
        state = train.init(sl.shard(Mlp(*start(torch.float64))))
        found = []
        for batch in batches(torch.float64, 4, scope["BATCH"]):
            state, metrics = train(state, sl.shard(batch, "batch/dp n"))
            found.append(metrics["loss"].item())
    wanted, params = trained(cfg, cfg.mesh, torch.float64, n=4)
    assert found == [x for x, _ in wanted]
    assert not torch.equal(params[1], start(torch.float64)[1])
