"""Loss scaling: steps that are skipped by all ranks, scales that follow overflows. C.. are cases with known values."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import tree

FAULTS = (torch.inf, -torch.inf, torch.nan)
X = torch.arange(24.0).reshape(8, 3) / 24
W = torch.arange(12.0).reshape(3, 4) / 12 - 0.4


def loss(p: Any, batch: Any) -> sl.Mean:
    """A matrix split over tp; `fault`, split over dp and tp, spoils the gradient of one rank."""
    y = batch["x"].to(p["w"].dtype) @ sl.gather(p["w"], "dp") + sl.gather(p["b"], "dp")
    return sl.Mean.of("batch/dp o/tp", torch.tanh(y) ** 2 * batch["fault"])


def batch(spoiled: tuple[int, int] | None = None, value: float = torch.inf) -> Any:
    fault = torch.ones(8, 4)
    if spoiled is not None:
        fault[spoiled] = value
    return {"x": sl.shard(X, "batch/dp i"), "fault": sl.shard(fault, "batch/dp o/tp")}


def made(m: sl.Mesh, optimizer: Any = None, stage: int = 3, **options: Any) -> tuple[Any, Any]:
    """A step, and its state at the start."""
    layout = sl.zero({"w": "i o/tp/dp", "b": "o/tp"}, stage=stage)
    step = sl.step(loss, optimizer or sl.optim.adamw(0.1), layout=layout, **options)
    with m:
        return step, step.init({"w": sl.shard(W, "i o/tp"), "b": sl.shard(torch.zeros(4), "o/tp")})


def values(state: Any) -> dict[str, Tensor]:
    return dict(zip(tree.paths(state), tree.leaves(sl.gather(state)), strict=True))


def changed(old: Any, new: Any) -> set[str]:
    a, b = values(old), values(new)
    return {path for path in a if not torch.equal(a[path], b[path])}


def simulated(dp: int, tp: int) -> sl.Mesh:
    return sl.make_mesh(dp=dp, tp=tp, simulate=True)


# ---- skipped steps


@pytest.mark.parametrize("dp, tp, stage", [(4, 1, 0), (4, 1, 2), (4, 1, 3), (1, 4, 0), (2, 2, 3)])
def test_c18_a_fault_on_any_rank_is_seen_by_all(dp: int, tp: int, stage: int) -> None:
    how = sl.precision("f16", scale=sl.dynamic_scale(4, hysteresis=1))
    step, state = made(m := simulated(dp, tp), stage=stage, precision=how)
    run = sl.jit(step)
    with m:
        for k in range(4):
            row, column = 8 * (k // tp) // dp, 4 * (k % tp) // tp
            for value in FAULTS:
                new, metrics = run(state, batch((row, column), value))
                assert changed(state, new) == {"scale.scale", "scale.row", "scale.skipped"}
                assert new.scale.scale.item() == 2 and metrics["skipped"].item() == 1
                assert new.scale.skipped.shards[0] == 1 and {int(x) for x in new.scale.skipped.shards} == {1}
        new, metrics = run(state, batch())
        assert metrics["skipped"].item() == 0 and metrics["scale"].item() == 4
        assert {"params.w", "params.b", "opt.count", "step", "scale.good"} <= changed(state, new)


def test_c18_a_fault_in_any_stage_of_a_pipeline_is_seen_by_all() -> None:
    """pp=4: in the gradient of the blocks of one stage alone, which no other rank holds."""
    spoil = sl.custom_vjp(lambda w, by: w, lambda w, by: (w * 1, by), lambda by, g: (g * by.to(g.dtype), None))

    def first(p: Any, mb: Any) -> Tensor:
        return mb["x"].to(p["scale"].dtype) * p["scale"]

    def stage(blocks: Any, x: Tensor, mb: Any) -> Tensor:
        return torch.tanh(x @ spoil(blocks["w"][0], blocks["fault"][0]))

    def last(p: Any, x: Tensor, mb: Any) -> sl.Mean:
        return sl.Mean.of("batch i", (x - p["scale"]) ** 2)

    how = sl.precision("f16", scale=sl.dynamic_scale(4, hysteresis=1))
    pipeline = sl.pipeline(first, stage, last, sl.schedules.one_f_one_b(2))
    step = sl.jit(sl.step(pipeline, sl.optim.adamw(0.1), precision=how, trainable=["scale", "blocks.w"]))
    specs = {"scale": "i", "blocks": sl.stack({"w": "i o", "fault": ""}, "layers/pp")}
    params = {"scale": torch.ones(3), "blocks": {"w": torch.eye(3).expand(4, 3, 3), "fault": torch.ones(4)}}

    def spoiled(state: Any, rank: int, value: float) -> Any:
        fault = torch.ones(4)
        fault[rank] = value
        blocks = state.params["blocks"] | {"fault": sl.shard(fault, specs["blocks"]["fault"])}
        return replace(state, params=state.params | {"blocks": blocks})

    with sl.make_mesh(pp=4, simulate=True):
        state, rows = step.init(sl.shard(params, specs)), {"x": sl.shard(X[:4], "batch i")}
        for k in range(4):
            for value in FAULTS:
                old = spoiled(state, k, value)
                new, metrics = step(old, rows)
                what = changed(old, new) - {"params.blocks.fault"}  # which may be NaN
                assert what == {"scale.scale", "scale.row", "scale.skipped"}
                assert [x.tolist() for x in new.scale.scale.shards] == [2.0] * 4
                assert {int(x) for x in new.scale.skipped.shards} == {1} and metrics["skipped"].item() == 1
        new, metrics = step(state, rows)
        assert metrics["skipped"].item() == 0 and {"params.blocks.w", "params.scale", "step"} <= changed(state, new)
    assert len(step.traces) == 1


def test_c18_eager_on_processes() -> None:
    def body() -> Any:
        how = sl.precision("f16", scale=sl.dynamic_scale(4, hysteresis=1))
        step, state = made(m := sl.make_mesh(dp=2, tp=1), precision=how)
        with m:
            found = [step(state, batch((row, 0), torch.nan)) for row in (0, 4)]
            return [(changed(state, new), metrics["skipped"].item(), metrics["scale"].item()) for new, metrics in found]

    for found in on_ranks(2, body):
        assert found == [({"scale.scale", "scale.row", "scale.skipped"}, 1, 4.0)] * 2


@pytest.mark.parametrize("jit", [False, True])
def test_c19_a_skipped_step_leaves_no_trace(jit: bool) -> None:
    """Adam's count, the schedule, the key, the loss's own state: as if the bad batch had not been."""

    def noisy(p: Any, batch: Any, key: Tensor, extra: Any) -> Any:
        y = batch["x"].to(p["w"].dtype) @ sl.gather(p["w"], "dp")
        y = sl.dropout("batch/dp o", y, key, 0.3) * sl.all_gather("batch/dp o/tp -> batch/dp o", batch["fault"])
        seen = sl.pmean(y.detach().float().mean(), "dp")
        return sl.Mean.of("batch/dp o", y**2), sl.Aux(extra={"seen": extra["seen"] + seen})

    schedule = sl.optim.warmup_cosine(0.1, warmup=2, steps=10, start=0.01)
    step = sl.step(noisy, sl.optim.adamw(schedule), precision=sl.precision("f16", scale=64.0), clip=0.1, accumulate=2)
    run = sl.jit(step, donate_argnums=0) if jit else step

    def trained(*batches: Any) -> tuple[Any, list[dict[str, float]]]:
        state, found = step.init({"w": sl.shard(W, "i o/dp")}, extra={"seen": sl.shard(torch.zeros(()), "")}), []
        for one in batches:
            state, metrics = run(state, one)
            found.append({k: v.item() for k, v in metrics.items()})
        return values(state), found

    with simulated(2, 1):
        three, found = trained(batch(), batch((5, 1)), batch())
        two, _ = trained(batch(), batch())
        assert [m["skipped"] for m in found] == [0, 1, 0] and three["opt.count"] == three["step"] == 2
        assert found[2]["lr"] == schedule(torch.tensor(1)).item() and found[1]["lr"] == found[0]["lr"]
        assert {k for k in two if not torch.equal(two[k], three[k])} == {"scale.skipped"}
        assert three["extra.seen"] != 0


def test_too_many_skips_are_an_error_that_names_the_leaf() -> None:
    how = sl.precision("f16", scale=sl.dynamic_scale(8, minimum=2, hysteresis=1, max_skips=3))
    step, state = made(m := simulated(2, 2), precision=how)
    run = sl.jit(step)
    with m:
        for skips in (batch((0, 0)), batch((0, 0)), batch(), batch((5, 3)), batch((5, 3))):
            state, _ = run(state, skips)
        assert state.scale.row.item() == 2 and state.scale.skipped.item() == 4 and state.scale.scale.item() == 2
        with pytest.raises(
            sl.RankError, match=r"3 steps in a row were skipped.* `b` was the first, the scale is now 2"
        ):
            run(state, batch((5, 3)))


# ---- the scale


class DeepSpeed:
    """The rules of DeepSpeed's DynamicLossScaler, by iterations as it counts them."""

    def __init__(self, initial: float, window: int, hysteresis: int, minimum: float, consecutive: bool) -> None:
        self.scale, self.window, self.minimum, self.consecutive = initial, window, minimum, consecutive
        self.full = self.left = hysteresis
        self.now, self.last = 0, -1

    def update(self, overflow: bool) -> float:
        if overflow:
            if self.full == 1 or self.left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.left -= 1
            self.last = self.now
        else:
            if self.consecutive:
                self.left = self.full
            stable = self.now - self.last - 1
            if stable > 0 and stable % self.window == 0:
                if not self.consecutive:
                    self.left = self.full
                self.scale *= 2
        self.now += 1
        return self.scale


@pytest.mark.parametrize(
    "options", [(2.0**16, 5, 2, 1.0, False), (8, 3, 1, 4, False), (8, 2, 3, 1, True), (2, 1, 2, 1, True)]
)
def test_scales_follow_the_rules_of_deepspeed(options: Any) -> None:
    initial, window, hysteresis, minimum, consecutive = options
    ours = sl.dynamic_scale(
        initial, window=window, hysteresis=hysteresis, minimum=minimum, consecutive=consecutive, max_skips=None
    )
    state, theirs, draw = ours.init(), DeepSpeed(*options), random.Random(0)
    for _ in range(200):
        overflow = draw.random() < (0.7 if theirs.scale > 2**20 else 0.3)
        state = ours.after(state, torch.tensor(not overflow))
        assert state.scale.item() == theirs.update(overflow)


def test_a_restored_scale_rises_in_a_shorter_window() -> None:
    """Though more finite steps lie behind it than the new window has."""
    long, short = sl.dynamic_scale(4.0, window=100), sl.dynamic_scale(4.0, window=3)
    state, scales = long.init(), []
    for scaling in [long] * 6 + [short] * 4:
        state = scaling.after(state, torch.tensor(True))
        scales.append(state.scale.item())
    assert scales == [4.0] * 6 + [8.0] * 3 + [16.0]


def test_defaults_are_those_of_deepspeed() -> None:
    found = sl.precision("f16").scale
    assert found == sl.dynamic_scale(2.0**16, window=1000, hysteresis=2, minimum=1, consecutive=False)
    assert sl.precision("bf16").scale is None


def test_a_scale_stays_a_number() -> None:
    """However long nothing overflows; and a static one for good."""
    grows, stays = sl.dynamic_scale(2.0**125, window=1), sl.precision(scale=3.0).scale
    assert stays is not None
    for scaling, wanted in ((grows, 2.0**126), (stays, 3.0)):
        state = scaling.init()
        for finite in (True, True, True, False, False, True, True):
            state = scaling.after(state, torch.tensor(finite))
        assert state.scale.item() == wanted and state.skipped.item() == 2


@pytest.mark.parametrize("compute, count", [("bf16", 1), ("f16", 2)])
def test_c20_gradients_do_not_depend_on_the_scale(compute: str, count: int) -> None:
    how = sl.precision(compute, scale=1.0)
    step, state = made(m := simulated(2, 2), sl.optim.sgd(0.1, momentum=0.9), precision=how, accumulate=count)
    found, run = [], sl.jit(step)
    with m:
        for scale in (1.0, 2.0**7, 2.0**16):
            scaled = replace(state.scale, scale=sl.shard(torch.tensor(scale), ""))
            new, metrics = run(replace(state, scale=scaled), batch())
            assert metrics["skipped"].item() == 0 and metrics["scale"].item() == scale
            found.append([sl.gather(new.opt.trace), metrics["grad_norm"], metrics["loss"], sl.gather(new.params)])
    for other in found[1:]:
        for a, b in zip(tree.leaves(found[0]), tree.leaves(other), strict=True):
            assert torch.equal(a, b) and torch.isfinite(a).all()


# ---- with the rest of a step


@pytest.mark.parametrize("backend", ["graph", "regional"])
def test_a_scale_changes_nothing_else(backend: str) -> None:
    """Clipping, micro-batches, frozen leaves, an optimizer with masters and an average, ZeRO-2, donation, passes."""

    def trained(scale: Any) -> dict[str, Tensor]:
        how = sl.precision("f64", params="bf16", reduce="f64", output="f64", scale=scale)
        optimizer = sl.optim.chain(sl.optim.adamw(0.1, weight_decay=0.1), sl.optim.weight_ema(0.5))
        options: Any = dict(stage=2, accumulate=2, clip=0.01, trainable="w", precision=how)
        step, state = made(m := simulated(2, 2), optimizer, **options)
        run = sl.jit(step, donate_argnums=0, backend=backend)
        with m:
            for one in (batch(), *([batch((3, 3))] if scale else []), batch()):
                state, _ = run(state, one)
            return {k: x for k, x in values(state).items() if not k.startswith("scale.")}

    want, found = trained(None), trained(sl.dynamic_scale(2.0**10))
    assert want.keys() == found.keys()
    for k, x in want.items():  # AdamW in place rounds once
        assert torch.equal(x, found[k]) or (backend == "graph" and torch.allclose(x.float(), found[k].float(), 1e-6)), k


def test_skipping_takes_no_second_state() -> None:
    """What may be skipped is chosen leaf by leaf, in place: the peak is that of a step that cannot skip."""
    peaks = []
    for scale in (None, 2.0**7):
        layout = sl.zero({"w": ["m/dp n"] * 4}, stage=1)

        def deep(p: Any, batch: Any) -> sl.Mean:
            x = batch["x"].to(p["w"][0].dtype)
            for w in p["w"]:
                x = torch.tanh(x @ sl.gather(w, "dp"))
            return sl.Mean.of("batch/dp n", x**2)

        how = sl.precision("bf16", scale=scale)
        step = sl.jit(sl.step(deep, sl.optim.adamw(0.1), layout=layout, precision=how, clip=1.0), donate_argnums=0)
        with simulated(2, 1):
            state = step.init({"w": [sl.shard(torch.eye(32), "m n") for _ in range(4)]})
            lowered = step.lower(state, {"x": sl.shard(torch.ones(2, 32), "batch/dp m")})
            peaks.append(lowered.memory().total)
    leaf = 32 * 32 * 4
    assert peaks[1] < peaks[0] + leaf / 2


# ---- what is refused


@pytest.mark.parametrize(
    "wrong", [dict(initial=0.5), dict(initial=2.0**127), dict(factor=0.5), dict(factor=torch.nan), dict(minimum=-1)]
)
def test_scales_that_are_none(wrong: Any) -> None:
    with pytest.raises(
        sl.SpecError, match=r"dynamic_scale: 0 <= minimum <= initial <= 2\*\*126.*found Scaling\(initial="
    ):
        sl.dynamic_scale(**wrong)


def test_a_state_of_another_step_is_refused() -> None:
    scaled, with_scale = made(m := simulated(2, 1), precision=sl.precision("f16"))
    plain, without = made(m, precision=sl.precision("bf16"))
    for step, state, said in ((scaled, without, "no loss scale.* scales"), (plain, with_scale, "a loss .* not scale")):
        with m, pytest.raises(sl.SpecError, match=rf"step: the state has {said}: make it with this step's init"):
            step(state, batch())


def test_counts_that_are_none() -> None:
    for wrong in (dict(window=0), dict(hysteresis=0), dict(max_skips=0), dict(window=1.5)):
        with pytest.raises(sl.SpecError, match=r"dynamic_scale: window, hysteresis and max_skips are whole numbers"):
            sl.dynamic_scale(**wrong)  # type: ignore[arg-type]
    with pytest.raises(sl.SpecError, match="precision: scale=: 0 <= minimum"):
        sl.precision(scale="dynamic")  # type: ignore[arg-type]
