"""All optimizers and all schedules, by two tables: what each computes, and what each owes to the layouts.

A new optimizer is a row of OPTIMIZERS, a new schedule a row of SCHEDULES.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import optim, tree
from shardlib.accumulate import same_leaves
from shardlib.graph.program import graphs
from shardlib.optim.base import apply_updates, kept
from shardlib.optim.schedules import Schedule
from shardlib.types import padding_allowed

F64 = torch.float64
UPDATES = 20
Rule = Callable[[Tensor, Tensor, int, dict[str, Any]], Tensor]  # p, g, t = 1, 2, ..., own state -> new p


# ---- the published algorithms, on whole leaves


def of_torch(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Rule:
    def rule(p: Tensor, g: Tensor, t: int, s: dict[str, Any]) -> Tensor:
        if t == 1:
            s["p"] = p.clone().requires_grad_()
            s["opt"] = make([s["p"]], **options)
        s["p"].grad = g
        s["opt"].step()
        return s["p"].detach().clone()

    return rule


def lion(p: Tensor, g: Tensor, t: int, s: dict[str, Any]) -> Tensor:
    m = s.get("m", torch.zeros_like(p))
    s["m"] = 0.99 * m + 0.01 * g
    return p - 0.01 * (torch.sign(0.9 * m + 0.1 * g) + 0.1 * p)


def lamb(low: float, high: float) -> Rule:
    def rule(p: Tensor, g: Tensor, t: int, s: dict[str, Any]) -> Tensor:
        s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
        s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
        r = s["m"] / (1 - 0.9**t) / ((s["v"] / (1 - 0.999**t)).sqrt() + 1e-6) + 0.1 * p
        ratio = min(max((p.norm() / r.norm()).item(), low), high) if p.norm() > 0 and r.norm() > 0 else 1.0
        return p - 0.05 * ratio * r

    return rule


def adafactor(least: int, momentum: float, scaled: bool) -> Rule:
    def rule(p: Tensor, g: Tensor, t: int, s: dict[str, Any]) -> Tensor:
        decay, square = 1 - t**-0.8, g**2 + 1e-30
        order = sorted(range(p.dim()), key=lambda i: p.shape[i])
        if len(order) > 1 and p.shape[order[-2]] >= least:
            d0, d1 = order[-1], order[-2]
            s["row"] = decay * s.get("row", 0) + (1 - decay) * square.mean(d0, keepdim=True)
            s["col"] = decay * s.get("col", 0) + (1 - decay) * square.mean(d1, keepdim=True)
            u = g / (s["row"] / s["row"].mean(d1, keepdim=True)).sqrt() / s["col"].sqrt()
        else:
            s["v"] = decay * s.get("v", 0) + (1 - decay) * square
            u = g / s["v"].sqrt()
        u = 0.05 * u / max(1.0, (u**2).mean().sqrt().item())
        u = u * max(1e-3, (p**2).mean().sqrt().item()) if scaled else u
        if momentum:
            u = s["m"] = momentum * s.get("m", 0) + (1 - momentum) * u
        return p - u - 0.01 * p

    return rule


def orthogonal(m: Tensor) -> Tensor:
    x = m if m.shape[0] <= m.shape[1] else m.T
    x = x / (x.norm() + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if m.shape[0] <= m.shape[1] else x.T


def muon(scale: Callable[[int, int], float], nesterov: bool = True) -> Rule:
    """Rows are inputs."""

    def rule(p: Tensor, g: Tensor, t: int, s: dict[str, Any]) -> Tensor:
        if p.dim() != 2:
            return adamw(p, g, t, s)
        s["m"] = 0.95 * s.get("m", 0) + 0.05 * g
        m = s["m"] / (1 - 0.95**t)
        if nesterov:
            m = 0.95 * s["m"] / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
        return p - 0.05 * (scale(*p.shape) * orthogonal(m) + 0.1 * p)

    return rule


adamw = of_torch(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


# ---- the table


class Row(NamedTuple):
    """`slots`: the elements of state for a leaf, from the shape that a rank holds; `same`: whether stacked and listed
    layers agree bit by bit; `lr`: the metric."""

    ours: optim.Optimizer
    rule: Rule
    slots: Callable[[tuple[int, ...]], int]
    same: bool = True
    lr: float = 0.05


def slots(n: int) -> Callable[[tuple[int, ...]], int]:
    return lambda shape: n * math.prod(shape)


def factored(shape: tuple[int, ...]) -> int:
    """Row and column means, over the last of two, over the first two of three (`e`: its largest is the second)."""
    if len(shape) < 2:
        return math.prod(shape)
    a, b, *more = shape
    return (a + b) * math.prod(more)


original, matched = (lambda i, o: math.sqrt(max(1, o / i))), (lambda i, o: 0.2 * math.sqrt(max(i, o)))


def with_adamw(matrices: optim.Optimizer) -> optim.Optimizer:
    others = optim.adamw(0.05, weight_decay=0.1)
    return optim.by_path({lambda path, spec: spec.ndim - spec.stacked == 2: matrices, "**": others})


OPTIMIZERS = {
    "sgd": Row(optim.sgd(0.05), of_torch(torch.optim.SGD, lr=0.05), slots(0)),
    "sgd, nesterov": Row(
        optim.sgd(0.05, momentum=0.9, nesterov=True),
        of_torch(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
        slots(1),
    ),
    "sgd, L2": Row(
        optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.05, momentum=0.9)),
        of_torch(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
        slots(1),
    ),
    "adam": Row(
        optim.adam(0.05, weight_decay=0.1), of_torch(torch.optim.Adam, lr=0.05, weight_decay=0.1), slots(2)
    ),
    "adamw": Row(optim.adamw(0.05, weight_decay=0.1), adamw, slots(2)),
    "lion": Row(optim.lion(0.01, weight_decay=0.1), lion, slots(1), lr=0.01),
    "lamb": Row(optim.lamb(0.05, weight_decay=0.1), lamb(0.0, math.inf), slots(2), same=False),
    "lamb, bounded": Row(
        optim.lamb(0.05, weight_decay=0.1, min_coeff=0.4, max_coeff=0.6), lamb(0.4, 0.6), slots(2), same=False
    ),
    "adafactor": Row(
        optim.adafactor(0.05, min_dim_size_to_factor=3, weight_decay_rate=0.01),
        adafactor(3, 0.0, True),
        factored,
        same=False,
    ),
    "adafactor, momentum": Row(
        optim.adafactor(
            0.05, momentum=0.9, multiply_by_parameter_scale=False, weight_decay_rate=0.01
        ),
        adafactor(128, 0.9, False),
        slots(2),
        same=False,
    ),
    "muon": Row(
        with_adamw(optim.muon(0.05, weight_decay=0.1)),
        muon(original),
        lambda shape: (1 if len(shape) == 2 else 2) * math.prod(shape),
        same=False,
    ),
    "muon, matched": Row(
        with_adamw(optim.muon(0.05, nesterov=False, weight_decay=0.1, scale="match_rms_adamw")),
        muon(matched, nesterov=False),
        lambda shape: (1 if len(shape) == 2 else 2) * math.prod(shape),
        same=False,
    ),
    "skip_nonfinite": Row(optim.skip_nonfinite(optim.adamw(0.05, weight_decay=0.1)), adamw, slots(2)),
    "accumulate": Row(optim.accumulate(optim.adamw(0.05, weight_decay=0.1), every=1), adamw, slots(3)),
    "masked": Row(optim.masked(optim.adamw(0.05, weight_decay=0.1), "**"), adamw, slots(2)),
    "weight_ema": Row(
        optim.chain(optim.adamw(0.05, weight_decay=0.1), optim.weight_ema(0.9)), adamw, slots(3)
    ),
}  # fmt: skip
LAYER = "a/dp b/tp"
SPECS = {"w": "u/dp v", "b": "n/dp", "s": "", "e": "x y/tp z/dp"}
SPECS |= {"stacked": sl.stack(LAYER, "layers"), "listed": [LAYER] * 3}
SHAPES = {"w": (5, 7), "b": (7,), "s": (), "e": (3, 4, 2)}


def values(seed: int) -> dict[str, Any]:
    """Uneven, 0-d and 3-d leaves; layers, stacked and listed. Layers of so many elements that torch's fused AdamW takes
    all of them in whole vectors: what is left over it rounds otherwise."""
    g = torch.Generator().manual_seed(seed)
    layers = torch.randn(3, 16, 8, generator=g, dtype=F64)
    leaves = {name: torch.randn(shape, generator=g, dtype=F64) for name, shape in SHAPES.items()}
    return leaves | {"stacked": layers, "listed": list(layers.unbind())}


def trained(
    optimizer: optim.Optimizer, params: Any, grads: list[Any], specs: Any, stage: int = 3, dp: int = 2, tp: int = 2
) -> tuple[Any, Any]:
    """Parameters, whole, and the optimizer's state after an update for each of `grads`, in one traced program."""

    def init(params: Any) -> Any:
        with padding_allowed():
            return optimizer.init(params)

    def update(params: Any, state: Any, grads: Any) -> Any:
        with padding_allowed():
            updates, new = optimizer.update(grads, state, params)
            return apply_updates(params, updates), same_leaves("the optimizer", new, state)

    with sl.make_mesh(dp=dp, tp=tp, simulate=True):
        cut = sl.zero(specs, stage=stage).resolve(sl.shard(params, specs)).opt
        now = sl.shard(params, cut)
        state = sl.shard_map(init, in_specs=None, out_specs=None)(now)
        assert all(torch.equal(x, y) for x, y in zip(tree.leaves(sl.gather(now)), tree.leaves(params), strict=True))
        run = sl.jit(sl.shard_map(update, in_specs=None, out_specs=None))
        for g in grads:
            now, state = run(now, state, sl.shard(g, cut))
        assert len(run.traces) == bool(grads)
        return sl.gather(now), state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_what_was_published(name):
    """On one rank, on 2 x 2 with whole leaves (ZeRO-0, where layouts matter) and with cut ones (1-3: variants, only
    so); stacked layers train as listed ones."""
    row, params, grads = OPTIMIZERS[name], values(0), [values(t) for t in range(1, UPDATES + 1)]
    want: dict[str, Any] = {}
    for path, p, *gs in zip(tree.paths(params), *map(tree.leaves, [params, *grads]), strict=True):
        layers = p.unbind() if path == "stacked" else [p]
        done = []
        for i, x in enumerate(layers):
            own: dict[str, Any] = {}
            for t, g in enumerate(gs, 1):
                x = row.rule(x, g[i] if path == "stacked" else g, t, own)
            done.append(x)
        want[path] = torch.stack(done) if path == "stacked" else done[0]
    for dp, stage in ((1, 0), (2, 3)) if row.same else ((2, 3),) if "," in name else ((1, 0), (2, 0), (2, 3)):
        found, state = trained(row.ours, params, grads, SPECS, stage, dp=dp, tp=dp)
        for path, x in zip(tree.paths(found), tree.leaves(found), strict=True):
            assert torch.allclose(x, want[path], rtol=0, atol=1e-10), (path, dp, stage)
        if row.same:
            assert torch.equal(found["stacked"], torch.stack(found["listed"]))
        assert {sl.gather(lr).item() for lr in kept(state, "lr")} == {row.lr}
    local = [(3, 7), (4,), (), (3, 2, 1), *[(8, 4)] * 6]  # on a rank, with padding
    held = sum(x.shards[0].numel() for x in tree.leaves(state) if x.dtype == F64) - len(kept(state, "lr"))
    assert held == sum(map(row.slots, local)), "the state that a rank holds"


@pytest.mark.parametrize("name", ["adam", "lion", "lamb", "adafactor", "muon"])
def test_the_contract_of_optimizers(name):
    sl.testing.check_optimizer(OPTIMIZERS[name].ours)


# ---- cases


DECAYED = {
    "adamw": optim.adamw(0.1, weight_decay=0.5, mask=optim.matrices),
    "lion": optim.lion(0.1, weight_decay=0.5, mask=optim.matrices),
    "lamb": optim.lamb(0.1, weight_decay=0.5, mask=optim.matrices, max_coeff=1.0),
    "adafactor": optim.adafactor(0.1, weight_decay_rate=0.05, mask=optim.matrices),
    "muon": optim.by_path({optim.matrices: optim.muon(0.1, weight_decay=0.5), "**": optim.sgd(0.1)}),
    "sgd": optim.chain(optim.add_decayed_weights(0.5, optim.matrices), optim.sgd(0.1)),
}


@pytest.mark.parametrize("name", DECAYED)
def test_c33_decay_is_decided_by_the_global_shape(name):
    """C33: gradients 0: W (4, 4) goes to 0.95 and a norm's scale stays, stacked ones too."""
    specs = {"w": "a/dp b/tp", "scale": "n/dp", "layers": sl.stack({"w": "a/dp b/tp", "scale": "n/dp"}, "layers")}
    ones = {"w": torch.ones(4, 4), "scale": torch.ones(4)}
    params = ones | {"layers": tree.map_(lambda x: x.expand(3, *x.shape).clone(), ones)}
    found, _ = trained(DECAYED[name], params, [tree.map_(torch.zeros_like, params)], specs)
    for part in (found, found["layers"]):
        assert torch.allclose(part["w"], torch.tensor(0.95)) and (part["scale"] == 1).all()


@pytest.mark.parametrize("ours", [optim.adam(0.1), optim.adamw(0.1)])
def test_c35_the_first_update_of_adam_is_the_rate(ours):
    one = torch.ones(3, dtype=F64)
    found, state = trained(ours, one, [one], "n/dp")
    assert torch.allclose(found, torch.tensor(0.9, dtype=F64), atol=1e-8)
    assert torch.allclose(sl.gather(state.mu), torch.tensor(0.1, dtype=F64))
    for decaying in (optim.adam(0.1, weight_decay=0.5), optim.adamw(0.1, weight_decay=0.5)):
        _, state = trained(decaying, torch.ones(3), [], "n/dp")
        assert not sl.gather(state.mu).any() and not sl.gather(state.nu).any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_skip_nonfinite_changes_nothing(bad):
    """Whatever rank has it, in a leaf that is cut or whole; the good ones count as if it had not been."""
    specs, zero = {"w": "a/dp b/tp", "b": "n"}, {"w": torch.ones(4, 4), "b": torch.ones(3)}
    good = [tree.map_(lambda x, k=k: k * x, zero) for k in (1.0, 2.0)]
    want, _ = trained(optim.adamw(0.1), zero, good, specs)
    planted = []
    for path, at in (("w", (0, 0)), ("w", (3, 0)), ("w", (0, 3)), ("w", (3, 3)), ("b", (1,))):
        planted.append(tree.map_(torch.clone, good[0]))
        planted[-1][path][at] = bad
    found, state = trained(optim.skip_nonfinite(optim.adamw(0.1)), zero, [good[0], *planted, good[1]], specs)
    assert all(torch.equal(found[k], want[k]) for k in want)
    assert sl.gather(state.skipped) == 5 and sl.gather(optim.get(state, "count")) == 2


def test_accumulate_updates_once_for_the_mean():
    params, grads = values(0), [values(t) for t in range(1, 7)]
    ours = optim.accumulate(optim.lamb(0.05), every=3)
    means = [tree.map_(lambda *xs: sum(xs) / 3, *grads[i : i + 3]) for i in (0, 3)]
    for n in (2, 6):
        found, state = trained(ours, params, grads[:n], SPECS)
        want, _ = trained(optim.lamb(0.05), params, means[: n // 3], SPECS)
        pairs = zip(tree.leaves(found), tree.leaves(want), strict=True)
        assert all(torch.allclose(x, y, rtol=0, atol=1e-14) for x, y in pairs)
        assert sl.gather(state.since) == n % 3 and sl.gather(state.inner.count) == n // 3
    with pytest.raises(ValueError, match="at least 1, not 0"):
        optim.accumulate(optim.sgd(0.1), every=0)


def test_clip_by_global_norm_and_masked():
    params, g = values(0), values(1)
    norm = torch.cat([x.flatten() for x in tree.leaves(g)]).norm()
    found, _ = trained(optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(1.0)), params, [g], SPECS)
    for p, x, y in zip(*map(tree.leaves, (params, g, found)), strict=True):
        assert torch.allclose(p - y, 0.5 * x / norm, rtol=1e-12)
    part = optim.chain(optim.masked(optim.clip_by_global_norm(0.5), ["w", "b"]), optim.sgd(1.0))
    found, _ = trained(part, params, [g], SPECS)
    norm = torch.cat([g["w"].flatten(), g["b"]]).norm()
    assert torch.allclose(params["w"] - found["w"], 0.5 * g["w"] / norm, rtol=1e-12)
    assert torch.allclose(params["e"] - found["e"], g["e"], rtol=1e-12)
    with pytest.raises(ValueError, match="a norm above 0 is needed, found 0"):
        optim.clip_by_global_norm(0)
    with pytest.raises(sl.TreeError, match=r"masked: `<function .*` chooses no leaf"):
        trained(optim.masked(optim.sgd(0.1), lambda path, spec: False), params, [g], SPECS)


# ---- Muon: what a matrix is, and who works on it


@sl.pytree
class Attention:
    qkv: Tensor = sl.spec("3 model/dp heads/tp head", matrix="model -> heads head")
    out: Tensor = sl.spec("heads/tp head model/dp", matrix="heads head -> model")


@sl.pytree
class Blocks:
    layers: Attention = sl.stack("layers")


def test_muon_takes_inputs_and_outputs_as_said():
    sizes = dict(model=6, heads=4, head=2, layers=2)
    with sl.make_mesh(dp=1, simulate=True, tp=1):
        params, grads = (sl.gather(sl.init(Blocks, sizes=sizes, key=sl.random.key(k), dtype=F64)) for k in range(2))
    rule, want = muon(original), tree.map_(torch.clone, params)
    for i in range(2):
        for j in range(3):
            p, g = (x.layers.qkv[i, j].reshape(6, 8) for x in (params, grads))
            want.layers.qkv[i, j] = rule(p, g, 1, {}).view(6, 4, 2)
        p, g = (x.layers.out[i].reshape(8, 6) for x in (params, grads))
        want.layers.out[i] = rule(p, g, 1, {}).view(4, 2, 6)
    for stage in (0, 3):
        found, _ = trained(optim.muon(0.05, weight_decay=0.1), params, [grads], Blocks, stage)
        for x, y in zip(tree.leaves(found), tree.leaves(want), strict=True):
            assert torch.allclose(x, y, rtol=0, atol=1e-12)
    said = r"muon: `w` is no matrix.\n  Name inputs and outputs, sl.spec\(..., matrix='a -> b c'\), or give it to"
    with pytest.raises(sl.SpecError, match=said):
        trained(optim.muon(0.1), {"w": torch.ones(2, 2, 2)}, [], {"w": "a b c"})
    with pytest.raises(ValueError, match="scale is 'original' or 'match_rms_adamw', not 'rms'"):
        optim.muon(0.1, scale="rms")


def products(specs: Any, params: Any, dp: int, tp: int = 1, stage: int = 3) -> int:
    """The multiply-adds of matrix products that a rank does in an update with Muon."""
    ours = optim.muon(0.1)

    def update(params: Any, grads: Any) -> Any:
        return apply_updates(params, ours.update(grads, ours.init(params), params)[0])

    with sl.make_mesh(dp=dp, tp=tp, simulate=True):
        now = sl.shard(params, sl.zero(specs, stage=stage).resolve(sl.shard(params, specs)).opt)
        module = sl.jit(sl.shard_map(update, in_specs=None, out_specs=None)).lower(now, now).module
    total = 0
    for _, graph in graphs(module):
        for node in graph.graph.nodes:
            if getattr(node.target, "__name__", "") in ("mm.default", "bmm.default"):
                left = node.args[0].meta["val"]
                total += math.prod(node.meta["val"].shape) * left.shape[-1]
    return total


def test_muon_does_its_part_of_the_work_under_zero():
    """1/N of the Newton-Schulz products on each of N ranks, for stacked, listed and tensor-parallel matrices."""
    specs = {"stacked": sl.stack("a/dp b/tp", "layers"), "listed": [{"i": "a/dp b/tp", "o": "b/tp a/dp"}] * 4}
    w = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=F64)
    params = {"stacked": w.expand(8, 8, 16), "listed": [{"i": w, "o": w.T}] * 4}
    params = tree.map_(torch.clone, params)
    whole = products(specs, params, dp=1)
    assert whole == 16 * 5 * (8 * 8 * 16 + 8 * 8 * 8 + 8 * 8 * 16)
    assert products(specs, params, dp=4) * 4 == whole
    assert products(specs, params, dp=2, tp=2) * 4 == whole
    assert products(specs, params, dp=4, stage=0) == whole
    five = {"w": sl.stack("a/dp b", "layers")}, {"w": params["stacked"][:5].clone()}
    assert products(*five, dp=4) == whole // 16 * 2, "5 matrices on 4 ranks: 2 at most"


# ---- schedules


class Shape(NamedTuple):
    """`value`: the documented formula, of a Python int."""

    ours: Schedule
    value: Callable[[int], float]


def warmed(kind: str, t: int, warmup: int) -> float:
    """DeepSpeed's gamma, t its `last_batch_iteration`."""
    if t >= warmup:
        return 1.0
    return math.log(t + 1) / math.log(warmup) if kind == "log" else t / warmup


def deepspeed_cosine(t: int, warmup: int = 8, total: int = 30, low: float = 0.1, least: float = 0.05) -> float:
    if t < warmup:
        return 0.4 * (low + (1 - low) * warmed("log", t, warmup))
    done = min(1.0, (t - warmup + 1) / (total - warmup))
    return 0.4 * (least + (1 - least) * (1 + math.cos(math.pi * done)) / 2)


def deepspeed_cycle(t: int, up: int, down: int, stairs: int, decay: float, every: int) -> float:
    """The rate of the update after t others: the scheduler's `last_batch_iteration` is t - 1 then."""
    last, total = t - 1, up + down
    if last < total:
        at = (last + 1) % total
        scale = at / up if at <= up else (total - at) / down
        if stairs:
            scale = math.floor(at * stairs / up if at <= up else (total - at) * stairs / down) / stairs
        return 0.1 + 0.3 * scale
    return 0.1 / (1 + decay * (last - total + 1) / every if every else 1)


def steady(t: int, shape: Callable[[float], float]) -> float:
    return 0.1 + 0.4 * t / 5 if t < 5 else 0.5 if t < 20 else 0.02 + 0.48 * shape(min(1.0, (t - 20) / 10))


def half(x: float) -> float:
    return (1 + math.cos(math.pi * x)) / 2


SCHEDULES = {
    "constant": Shape(optim.constant(0.3), lambda t: 0.3),
    "polynomial": Shape(
        optim.polynomial(1.0, 0.2, steps=20, power=2.0, begin=3),
        lambda t: 0.2 + 0.8 * (1 - min(max(t - 3, 0), 20) / 20) ** 2,
    ),
    "exponential": Shape(
        optim.exponential(1.0, steps=4, rate=0.5, begin=2, end=0.1), lambda t: max(0.1, 0.5 ** (max(t - 2, 0) / 4))
    ),
    "exponential, growing stairs": Shape(
        optim.exponential(0.1, steps=4, rate=2.0, staircase=True, end=1.0), lambda t: min(1.0, 0.1 * 2 ** (t // 4))
    ),
    "cosine": Shape(optim.cosine(0.5, steps=20, end=0.1), lambda t: 0.1 + 0.4 * half(min(1.0, t / 20))),
    "piecewise": Shape(
        optim.piecewise(1.0, {5: 0.5, 9: 0.1}), lambda t: 1.0 if t < 5 else 0.5 if t < 9 else 0.5 * 0.1
    ),
    "join": Shape(
        optim.join([0.3, optim.polynomial(1.0, 0.0, steps=10), optim.cosine(1.0, steps=4)], [6, 11]),
        lambda t: 0.3 if t < 6 else 1 - (t - 6) / 10 if t < 11 else half(min(1.0, (t - 11) / 4)),
    ),
    "warmup": Shape(optim.warmup(0.5, warmup=7, start=0.1), lambda t: 0.1 + 0.4 * warmed("linear", t, 7)),
    "warmup, log": Shape(
        optim.warmup(0.5, warmup=7, start=0.1, kind="log"), lambda t: 0.1 + 0.4 * warmed("log", t, 7)
    ),
    "warmup_decay": Shape(
        optim.warmup_decay(0.5, warmup=7, steps=25, start=0.1, kind="log"),
        lambda t: 0.1 + 0.4 * (warmed("log", t, 7) if t < 7 else max(0.0, (25 - t) / 18)),
    ),
    "warmup_cosine": Shape(
        optim.warmup_cosine(0.4, warmup=8, steps=30, start=0.1, end=0.02),
        lambda t: 0.1 + 0.3 * t / 8 if t < 8 else 0.02 + 0.38 * half(min(1.0, (t - 8) / 22)),
    ),
    "warmup_cosine, DeepSpeed's": Shape(
        optim.warmup_cosine(0.4, warmup=8, steps=30, start=0.04, end=0.02, kind="log", last_at_end=True),
        deepspeed_cosine,
    ),
    **{
        f"warmup_stable_decay, {shape}": Shape(
            optim.warmup_stable_decay(0.5, warmup=5, steps=30, decay=10, start=0.1, end=0.02, shape=shape),
            lambda t, form=form: steady(t, form),
        )
        for shape, form in {"linear": lambda x: 1 - x, "cosine": half, "sqrt": lambda x: 1 - math.sqrt(x)}.items()
    },
    "one_cycle": Shape(
        optim.one_cycle(0.4, start=0.1, up=8, down=12, decay_rate=0.5, decay_steps=4),
        lambda t: deepspeed_cycle(t, 8, 12, 0, 0.5, 4),
    ),
    "one_cycle, stairs": Shape(
        optim.one_cycle(0.4, start=0.1, up=9, up_stairs=3), lambda t: deepspeed_cycle(t, 9, 9, 3, 0.0, 0)
    ),
    "lr_range_test": Shape(optim.lr_range_test(0.01, steps=5, rate=2.0), lambda t: 0.01 * (1 + 2 * t / 5)),
    "lr_range_test, stairs": Shape(
        optim.lr_range_test(0.01, steps=5, staircase=True), lambda t: 0.01 * (1 + t // 5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_their_formulas(name):
    found = [SCHEDULES[name].ours(torch.tensor(t)) for t in range(40)]
    assert all(x.dtype == F64 and x.shape == () for x in found)
    assert [x.item() for x in found] == pytest.approx([SCHEDULES[name].value(t) for t in range(40)], rel=1e-12)


def test_schedules_trace():
    """All of them in one program, of the count as a tensor."""
    with sl.make_mesh(dp=1, simulate=True):
        f = sl.jit(sl.shard_map(lambda n: [s.ours(n) for s in SCHEDULES.values()], in_specs="", out_specs=None))
        for t in (0, 7, 33):
            found = [x.item() for x in sl.gather(f(sl.shard(torch.tensor(t), "")))]
            assert found == pytest.approx([s.value(t) for s in SCHEDULES.values()], rel=1e-12)
        assert len(f.traces) == 1


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: optim.polynomial(1.0, 0.0, steps=0), "polynomial: steps > 0"),
        (lambda: optim.exponential(1.0, steps=5, rate=0.0), "exponential: .*rate > 0"),
        (lambda: optim.cosine(1.0, steps=0), "cosine: steps > 0 is needed"),
        (lambda: optim.piecewise(1.0, {-1: 0.5}), "piecewise: counts >= 0"),
        (lambda: optim.join([1.0, 0.1], []), r"join: one boundary between each two .* found \[\] for 2"),
        (lambda: optim.join([1.0, 0.1, 0.2], [5, 3]), "ascending"),
        (lambda: optim.warmup(1.0, warmup=1, kind="log"), "a log warm-up takes at least 2 updates, found 1"),
        (lambda: optim.warmup(1.0, warmup=5, kind="cosine"), "kind is 'linear' or 'log', not 'cosine'"),
        (lambda: optim.warmup_decay(1.0, warmup=9, steps=9), "0 <= warmup < steps is needed, found warmup=9, steps=9"),
        (lambda: optim.warmup_stable_decay(1.0, warmup=5, steps=9, decay=5), "0 < decay <= steps - warmup"),
        (lambda: optim.warmup_stable_decay(1.0, warmup=5, steps=9, decay=2, shape="cubic"), "not 'cubic'"),
        (lambda: optim.one_cycle(1.0, start=0.1, up=0), "one_cycle: up > 0"),
        (lambda: optim.one_cycle(1.0, start=0.1, up=5, decay_rate=-1.0), "decay_rate >= 0"),
        (lambda: optim.lr_range_test(1.0, steps=0), "lr_range_test: steps > 0"),
        (lambda: optim.lamb(1.0, min_coeff=2.0, max_coeff=1.0), "0 <= min_coeff <= max_coeff"),
        (lambda: optim.lion([0.1]), "a learning rate is a number or a schedule"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises((ValueError, TypeError), match=said):
        make()
