"""Optimizers and schedules against what optax computes, through the train step on several meshes and ZeRO stages."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS
from torch import Tensor

import shardlib as sl
from shardlib import optim, tree
from shardlib.optim.schedules import Schedule

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
    made = getattr(optim, next(part for part in name.split("_") if part in OPTIMIZERS))(lr, **hyper)
    return (optim.by_path({"w": made, "*": optim.adamw(lr)}) if name == "muon" else made), clip


def loss(p: Any, batch: Any) -> sl.Mean:
    """Its gradient is the batch's `values`; `rows` has mean one and differs by rank."""
    p, g = sl.gather(p, "dp"), batch["values"]
    e = sl.psum("+tp -> ", sl.reduce("x y/tp z -> +tp", p["e"] * g["e"], "sum"))
    return sl.Mean.of("batch/dp", batch["rows"] * (e + sum((p[k] * g[k]).sum() for k in "wbs")))


CASES = [(name, (1, 1), 0) for name in GOLDEN["optimizers"]]
CASES += [("clip_by_global_norm_adamw", (2, 2), stage) for stage in range(4)]
CASES += [
    ("sgd_nesterov", (2, 2), 3),
    ("adam", (2, 2), 1),
    ("lion", (2, 2), 3),
    ("lamb", (2, 2), 2),
    ("adafactor_factored", (2, 2), 1),
]
CASES += [("muon", (2, 2), 1), ("muon", (2, 2), 3)]
EVERY = [(name, (2, 2), stage) for name in GOLDEN["optimizers"] for stage in range(4)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in CASES]


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
                close = 1e-6 if name == "adafactor_factored" else 1e-13  # whose decay optax computes in float32
                for k, want in golden(GOLDEN["optimizers"][name]["params"][str(t)]).items():
                    assert torch.allclose(sl.gather(state.params[k]), want, rtol=0, atol=close), (k, t)
        assert metrics["lr"].item() == GOLDEN["optimizers"][name]["hyper"]["learning_rate"]
        assert len(step.traces) == 1


def one_cycle(h: dict[str, Any]) -> Schedule:
    """optax's, and torch's OneCycleLR, of two half cosines."""
    low, up = h["peak_value"] / h["div_factor"], int(h["pct_start"] * h["transition_steps"])
    rise = optim.cosine(low, steps=up, end=h["peak_value"])
    fall = optim.cosine(h["peak_value"], steps=h["transition_steps"] - up, end=low / h["final_div_factor"])
    return optim.join([rise, fall], [up])


SCHEDULES = {
    "warmup_cosine_decay": lambda h: optim.warmup_cosine(
        h["peak_value"], warmup=h["warmup_steps"], steps=h["decay_steps"], start=h["init_value"], end=h["end_value"]
    ),
    "linear_warmup": lambda h: optim.warmup(h["peak_value"], warmup=h["warmup_steps"], start=h["init_value"]),
    "polynomial": lambda h: optim.polynomial(
        h["init_value"], h["end_value"], steps=h["transition_steps"], power=h["power"], begin=h["transition_begin"]
    ),
    "cosine_onecycle": one_cycle,
}


@pytest.mark.parametrize("name", GOLDEN["schedules"])
def test_schedules_are_those_of_optax(name: str) -> None:
    """optax's polynomial is NaN at its end, where rounding makes a power's base negative; ours stays there."""
    said = GOLDEN["schedules"][name]
    want = torch.tensor(said["values"], dtype=F64)
    if name == "polynomial":
        assert want[45:].isnan().all()
        want[45:] = said["hyper"]["end_value"]
    found = torch.stack([SCHEDULES[name](said["hyper"])(torch.tensor(t)) for t in range(len(want))])
    assert torch.allclose(found, want, rtol=0, atol=1e-14)


def test_no_warm_up() -> None:
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


# ---- optimizers of optimizers


def trained(optimizer: optim.Optimizer, steps: int = 3, stage: int = 3, jit: bool = True, **options: Any) -> Any:
    """The state after some steps of `loss` on the golden gradients, on 2 x 2 ranks."""
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        step = sl.step(loss, optimizer, layout=sl.zero(SPECS, stage=stage), **options)
        step = sl.jit(step, donate_argnums=0) if jit else step
        state = step.init(sl.shard(golden(GOLDEN["initial_params"]), SPECS))
        for g in GOLDEN["grads"][:steps]:
            rows = torch.tensor([0.5, 1.0, 0.25, 2.25], dtype=F64)
            batch = sl.shard({"rows": rows, "values": golden(g)}, {"rows": "batch/dp", "values": WHOLE})
            state, metrics = step(state, batch)
        return sl.gather((state.params, state.opt)), metrics


@pytest.mark.parametrize("jit", [False, True])
def test_by_path_gives_each_leaf_its_optimizer(jit):
    one, other = optim.adamw(0.1, weight_decay=0.5, mask="w"), optim.sgd(0.2, momentum=0.9)
    both = optim.by_path({("w", "e"): one, lambda path, spec: len(spec.dims) < 2: other})
    (params, state), metrics = trained(both, jit=jit)
    (a, _), (b, _) = trained(optim.adamw(0.1, weight_decay=0.5, mask="w"), jit=jit)[0], trained(other, jit=jit)[0]
    assert all(torch.equal(params[k], (a if k in "we" else b)[k]) for k in params)
    assert metrics["lr"].item() == 0.1 and state[1].lr.item() == 0.2
    assert tree.paths((state[0].mu, state[1].trace)) == ["0.e", "0.w", "1.b", "1.s"]


@pytest.mark.parametrize(
    "globs, said",
    [
        (["w", "e", "b"], "by_path: no key chooses `s`; there are `w`, `e` and `b`"),
        (["w", "v", "**"], "by_path: `v` matches no path"),
        (["**", "w"], "by_path: `w` gets no leaf: keys before it choose all that it matches"),
    ],
)
def test_by_path_covers_every_leaf_once(globs, said):
    with pytest.raises(sl.TreeError, match=re.escape(said)):
        trained(optim.by_path(dict.fromkeys(globs, optim.sgd(0.1))))


def test_what_is_frozen_needs_no_optimizer():
    (params, _), _ = trained(optim.by_path({"w": optim.sgd(0.1), "b": optim.sgd(0.2)}), trainable=["w", "b"])
    old, (all_, _) = golden(GOLDEN["initial_params"]), trained(optim.sgd(0.1))[0]
    assert torch.equal(params["w"], all_["w"]) and torch.equal(params["e"], old["e"])


def test_a_mask_that_matches_nothing():
    with pytest.raises(sl.TreeError, match=r"an optimizer's mask: `\*\*\.w_\*` matches no path"):
        trained(optim.adamw(0.1, weight_decay=0.1, mask="**.w_*"))


@pytest.mark.parametrize("jit", [False, True])
def test_chain_hands_updates_on(jit):
    def scaled(by: float) -> optim.Optimizer:
        return optim.Optimizer(lambda p: (), lambda g, s, p: (tree.map_(lambda x: by * x, g), s))

    def unit() -> optim.Optimizer:  # the norm of what it gets, over all ranks
        return optim.Optimizer(lambda p: (), lambda g, s, p: (tree.map_(lambda x: x / sl.global_norm(g), g), s))

    (params, _), metrics = trained(optim.chain(scaled(3.0), optim.sgd(0.5)), steps=1, jit=jit)
    (want, _), _ = trained(optim.sgd(1.5), steps=1)
    assert all(torch.allclose(params[k], want[k], rtol=1e-14) for k in want) and metrics["lr"].item() == 0.5
    (params, state), _ = trained(optim.chain(optim.sgd(0.5), unit()), steps=1, jit=jit)
    old = golden(GOLDEN["initial_params"])
    moved = torch.cat([(params[k] - old[k]).flatten() for k in old])
    assert moved.norm().item() == pytest.approx(1.0, rel=1e-12) and state[1] == ()


@pytest.mark.parametrize("stage, jit", [(0, False), (1, True), (3, True)])
def test_weight_ema_averages_what_the_update_made(stage, jit):
    decay = 0.75
    average = golden(GOLDEN["initial_params"])
    for n in range(1, 4):
        (new, _), _ = trained(optim.adamw(0.1), steps=n)
        average = {k: decay * average[k] + (1 - decay) * new[k] for k in new}
    (params, state), metrics = trained(optim.chain(optim.adamw(0.1), optim.weight_ema(decay)), stage=stage, jit=jit)
    assert all(torch.allclose(state[1].weight_ema[k], average[k], rtol=1e-13) for k in average)
    assert all(torch.allclose(params[k], new[k], rtol=1e-13) for k in new) and metrics["lr"].item() == 0.1
    with pytest.raises(ValueError, match="weight_ema: decay is a number of at least 0 and below 1, not 1"):
        optim.weight_ema(1)


def test_get_gives_a_tree_like_the_parameters():
    """16-bit, frozen and tied leaves; of the optimizer's state, what is kept."""
    ema = optim.chain(optim.sgd(0.5), optim.weight_ema(0.5))
    both = optim.by_path({"lr": ema, "*": optim.chain(optim.adamw(1.0), optim.weight_ema(0.5))})

    def total(p: Any, b: Tensor) -> sl.Mean:
        p = sl.gather(p, "dp")
        return sl.Mean.of("batch/dp", b * (p["lr"].float() * p["tie"] * p["w"]).sum() * p["frozen"].sum())

    w = torch.full((3,), 2.0)
    params = {"frozen": torch.ones(3), "lr": torch.ones(3).bfloat16(), "tie": w, "w": w}
    with sl.make_mesh(dp=2, simulate=True):
        for optimizer in (ema, both):
            step, valid = sl.step(total, optimizer, trainable=["lr", "w"]), sl.evaluate(total)
            state, _ = step(step.init(sl.shard(params, "n/dp")), sl.shard(torch.ones(2), "batch/dp"))
            found = optim.get(state, "weight_ema")
            assert [x.dtype for x in tree.leaves(found)] == [x.dtype for x in tree.leaves(state.params)]
            assert found["tie"] is found["w"] and found["frozen"] is state.params["frozen"]
            whole, new = sl.gather(found), sl.gather(state.params)
            assert torch.equal(whole["tie"], (w + new["w"]) / 2) and not torch.equal(new["w"], w)
            assert torch.equal(whole["lr"], ((1 + new["lr"].float()) / 2).bfloat16()) and new["lr"][0] != 1
            assert valid(found, sl.shard(torch.ones(2), "batch/dp"))[0].value.isfinite()
        assert optim.learning_rate(state.opt) is state.opt[0][0].lr
        assert optim.get(state, "mu")["lr"] is state.params["lr"], "which has none"
        for where, name, said in (
            (state.opt, "weight_ema", "2 optimizers keep `weight_ema`; take it from the state of one"),
            (state, "count", "2 optimizers keep `count`"),
            (state, "nothing", "no optimizer keeps `nothing`"),
        ):
            with pytest.raises(sl.TreeError, match=said):
                optim.get(where, name)
        assert optim.get(state.opt[0], "weight_ema")["w"] is None and optim.get(state.opt[1], "count").item() == 1


# ---- program 6: LoRA, freezing by path, two learning rates, an average of the weights


@sl.pytree
class Block:
    w_in: Tensor = sl.spec("model/dp hidden/tp")
    w_out: Tensor = sl.spec("hidden/tp model/dp")


@sl.pytree
class GPT:
    embed: Tensor = sl.spec("vocab model/dp")
    blocks: Block = sl.stack("layers")
    positions: Tensor = sl.spec("seq", dtype=torch.int64, init="zeros")


@sl.pytree
class Lora:
    a: Tensor = sl.spec("model/dp rank")
    b: Tensor = sl.spec("rank hidden/tp", init=0.1)


@sl.pytree
class Tuned:
    base: GPT
    lora: Lora = sl.stack("layers")


GPT_SIZES = dict(vocab=7, model=6, hidden=4, layers=3, rank=2, seq=5)
SEQ = "batch/dp seq"


def adapted(x: Tensor, w: tuple[Block, Lora]) -> Tensor:
    block, lora = sl.gather(w, "dp")
    h = sl.einsum(f"{SEQ} model, model hidden/tp -> {SEQ} hidden/tp", x, block.w_in)
    h = h + sl.einsum(f"{SEQ} model, model rank, rank hidden/tp -> {SEQ} hidden/tp", x, lora.a, lora.b)
    return x + sl.psum(
        f"{SEQ} model +tp -> {SEQ} model",
        sl.einsum(f"{SEQ} hidden/tp, hidden/tp model -> {SEQ} model +tp", h.tanh(), block.w_out),
    )


def tuned_loss(w: Tuned, tokens: Tensor) -> sl.Mean:
    embed = sl.gather(w.base.embed, "dp")
    x = torch.nn.functional.embedding(tokens, embed) * (1 + w.base.positions[:, None])
    x, _ = sl.scan(lambda x, w: (sl.remat(adapted)(x, w), None), x, (w.base.blocks, w.lora))
    return sl.token_loss(f"{SEQ} vocab, {SEQ}", x @ embed.T, tokens.roll(1, -1))


def tuned_plain(w: Tuned, tokens: Tensor) -> Tensor:
    x = w.base.embed[tokens] * (1 + w.base.positions[:, None])
    for i in range(GPT_SIZES["layers"]):
        x = x + (x @ (w.base.blocks.w_in[i] + w.lora.a[i] @ w.lora.b[i])).tanh() @ w.base.blocks.w_out[i]
    return torch.nn.functional.cross_entropy((x @ w.base.embed.T).flatten(0, 1), tokens.roll(1, -1).flatten())


@pytest.mark.parametrize("stage", [1, 3])
def test_lora_with_two_rates_and_an_average(stage, tmp_path):
    batches = [torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        sl.save(tmp_path / "base", sl.init(GPT, sizes=GPT_SIZES, key=sl.random.key(1), dtype=F64), step=0)

        opt = optim.by_path({"lora.**.b": optim.adamw(2e-2), "lora.**": optim.adamw(2e-3)})
        opt = optim.chain(opt, optim.weight_ema(0.9))
        layout = sl.zero(sl.specs(Tuned), stage=stage)
        step = sl.jit(sl.step(tuned_loss, opt, layout=layout, trainable="lora.**"), donate_argnums=0)
        valid = sl.evaluate(tuned_loss, layout=layout)
        fresh = sl.init(Tuned, sizes=GPT_SIZES, key=sl.random.key(0), dtype=F64)
        base = sl.restore(sl.latest(tmp_path / "base") or "", like=fresh.base)
        state = step.init(dataclasses.replace(fresh, base=base))
        old = sl.gather(state.params)
        for tokens in batches:
            state, metrics = step(state, sl.shard(tokens, SEQ))
        found = valid(optim.get(state, "weight_ema"), sl.shard(batches[0], SEQ))[0].value
        new, average = sl.gather(state.params), sl.gather(optim.get(state, "weight_ema"))

    own = tree.map_(lambda x: x.clone().requires_grad_(), old.lora)
    ref = torch.optim.AdamW([{"params": [own.b], "lr": 2e-2}, {"params": [own.a], "lr": 2e-3}], weight_decay=0.0)
    want = tree.map_(Tensor.clone, old.lora)
    for tokens in batches:
        ref.zero_grad()
        tuned_plain(dataclasses.replace(old, lora=own), tokens).backward()
        ref.step()
        want = tree.map_(lambda m, p: 0.9 * m + 0.1 * p.detach(), want, own)
    for ours, theirs in ((new.lora, own), (average.lora, want), (new.base, old.base), (average.base, old.base)):
        for x, y in zip(tree.leaves(ours), tree.leaves(theirs), strict=True):
            assert torch.allclose(x, y, rtol=0, atol=1e-12) and (y.requires_grad or theirs is want or torch.equal(x, y))
    assert found.item() == pytest.approx(tuned_plain(average, batches[0]).item(), rel=1e-12)
    assert metrics["lr"].item() == 2e-2 and not torch.equal(new.lora.b, old.lora.b)
