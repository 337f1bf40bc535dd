"""All optimizers and all schedules: one table each, of ours and of the published algorithm on whole leaves.

A new optimizer is a row of OPTIMIZERS, a new schedule a row of SCHEDULES: test_optimizers, test_schedules and the great
test then run it. What stands after a comma makes a variant.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shardlib as sl
from shardlib import optim, tree
from shardlib.optim.schedules import Schedule

F64 = torch.float64

Rule = Callable[[Tensor, Tensor, int, float, dict[str, Any]], Tensor]  # p, g, t = 1, 2, ..., rate, own state -> new p
# What a rule's state has under the name of a field of ours must be the same.


# ---- the published algorithms, on whole leaves


def of_torch(
    make: Callable[..., torch.optim.Optimizer],
    kept: dict[str, str],
    each: Callable[[int], dict[str, Any]] = lambda n: {},
    **options: Any,
) -> Rule:
    """One of torch's; `kept`: its names for ours; `each`: options of the update after n others."""

    def rule(p: Tensor, g: Tensor, t: int, lr: float, s: dict[str, Any]) -> Tensor:
        if t == 1:
            s["own"] = p.clone().requires_grad_()
            s["torch"] = make([s["own"]], lr=lr, **options)
        s["own"].grad = g
        s["torch"].param_groups[0].update(lr=lr, **each(t - 1))
        s["torch"].step()
        s |= {ours: s["torch"].state[s["own"]][theirs] for ours, theirs in kept.items()}
        return s["own"].detach().clone()

    return rule


def lion(p: Tensor, g: Tensor, t: int, lr: float, s: dict[str, Any]) -> Tensor:
    m = s.get("mu", torch.zeros_like(p))
    s["mu"] = 0.99 * m + 0.01 * g
    return p - lr * (torch.sign(0.9 * m + 0.1 * g) + 0.1 * p)


def lamb(low: float, high: float, moments: bool = True) -> Rule:
    def rule(p: Tensor, g: Tensor, t: int, lr: float, s: dict[str, Any]) -> Tensor:
        s["mu"] = 0.9 * s.get("mu", 0) + 0.1 * g
        s["nu"] = 0.999 * s.get("nu", 0) + 0.001 * g**2
        first, second = 1 - 0.9**t, 1 - 0.999**t
        if not moments:
            lr, first, second = lr * math.sqrt(second) / first, 1, 1
        r = s["mu"] / first / ((s["nu"] / second).sqrt() + 1e-6) + 0.1 * p
        ratio = min(max((p.norm() / r.norm()).item(), low), high) if p.norm() > 0 and r.norm() > 0 else 1.0
        return p - lr * ratio * r

    return rule


def adafactor(least: int, momentum: float, scaled: bool) -> Rule:
    def rule(p: Tensor, g: Tensor, t: int, lr: float, s: dict[str, Any]) -> Tensor:
        decay, square = 1 - t**-0.8, g**2 + 1e-30
        order = sorted(range(p.dim()), key=lambda i: p.shape[i])
        if len(order) > 1 and p.shape[order[-2]] >= least:
            d0, d1 = order[-1], order[-2]
            s["rows"] = decay * s.get("rows", 0) + (1 - decay) * square.mean(d0, keepdim=True)
            s["columns"] = decay * s.get("columns", 0) + (1 - decay) * square.mean(d1, keepdim=True)
            u = g / (s["rows"] / s["rows"].mean(d1, keepdim=True)).sqrt() / s["columns"].sqrt()
        else:
            s["nu"] = decay * s.get("nu", 0) + (1 - decay) * square
            u = g / s["nu"].sqrt()
        u = lr * u / max(1.0, (u**2).mean().sqrt().item()) if u.numel() else u
        u = u * max(1e-3, (p**2).mean().sqrt().item()) if scaled and u.numel() else u
        if momentum:
            u = s["mu"] = momentum * s.get("mu", 0) + (1 - momentum) * u
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

    def rule(p: Tensor, g: Tensor, t: int, lr: float, s: dict[str, Any]) -> Tensor:
        if p.dim() != 2:
            return adamw(p, g, t, lr, s)
        s["mu"] = 0.95 * s.get("mu", 0) + 0.05 * g
        m = s["mu"] / (1 - 0.95**t)
        if nesterov:
            m = 0.95 * s["mu"] / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
        return p - lr * (scale(*p.shape) * orthogonal(m) + 0.1 * p)

    return rule


MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
adamw = of_torch(torch.optim.AdamW, MOMENTS, weight_decay=0.1)


CYCLE: dict[str, Any] = dict(low=0.7, high=0.9, up=4, down=5, up_stairs=2, decay_rate=0.01, decay_steps=3)


def momentum(n: int) -> float:
    """DeepSpeed's, in the update after n others: `_get_cycle_mom` and `_get_decay_mom`."""
    if n >= 9:
        return 0.9 * (1 + 0.01 * (n - 9) / 3)
    return 0.9 - 0.2 * math.floor(n * 2 / 4 if n <= 4 else (9 - n) * 2 / 5) / 2


# ---- optimizers


class Row(NamedTuple):
    """`make`: from a rate; `slots`: the elements of state for a leaf, from the shape that a rank holds. `joint`: an
    element's update depends on others of its leaf. `fused`: by torch's kernel, which rounds in its own way."""

    make: Callable[[float | Schedule], optim.Optimizer]
    rule: Rule
    slots: Callable[[tuple[int, ...]], int]
    joint: bool = False
    fused: bool = False


def slots(n: int) -> Callable[[tuple[int, ...]], int]:
    return lambda shape: n * math.prod(shape)


def factored(shape: tuple[int, ...]) -> int:
    """Row and column means, over the last of two, over the first two of three (`e`: its largest is the second)."""
    if len(shape) < 2:
        return math.prod(shape)
    a, b, *more = shape
    return (a + b) * math.prod(more)


def one_for_matrices(shape: tuple[int, ...]) -> int:
    return (1 if len(shape) == 2 else 2) * math.prod(shape)


original, matched = (lambda i, o: math.sqrt(max(1, o / i))), (lambda i, o: 0.2 * math.sqrt(max(i, o)))


def with_adamw(matrices: Callable[[Any], optim.Optimizer]) -> Callable[[Any], optim.Optimizer]:
    two = lambda path, spec: spec.ndim - spec.stacked == 2  # noqa: E731
    return lambda lr: optim.by_path({two: matrices(lr), "**": optim.adamw(lr, weight_decay=0.1)})


OPTIMIZERS = {
    "adamw": Row(lambda lr: optim.adamw(lr, weight_decay=0.1), adamw, slots(2), fused=True),
    "sgd": Row(optim.sgd, of_torch(torch.optim.SGD, {}), slots(0)),
    "sgd, nesterov": Row(
        lambda lr: optim.sgd(lr, momentum=0.9, nesterov=True),
        of_torch(torch.optim.SGD, {"trace": "momentum_buffer"}, momentum=0.9, nesterov=True),
        slots(1),
    ),
    "sgd, L2": Row(
        lambda lr: optim.chain(optim.add_decayed_weights(0.1), optim.sgd(lr, momentum=0.9)),
        of_torch(torch.optim.SGD, {"trace": "momentum_buffer"}, momentum=0.9, weight_decay=0.1),
        slots(1),
    ),
    "muon": Row(
        with_adamw(lambda lr: optim.muon(lr, weight_decay=0.1)), muon(original), one_for_matrices,
        joint=True, fused=True,
    ),
    "lamb": Row(lambda lr: optim.lamb(lr, weight_decay=0.1), lamb(0.0, math.inf), slots(2), joint=True),
    "adafactor": Row(
        lambda lr: optim.adafactor(lr, min_dim_size_to_factor=3, weight_decay_rate=0.01),
        adafactor(3, 0.0, True), factored, joint=True,
    ),
    "lion": Row(lambda lr: optim.lion(lr, weight_decay=0.1), lion, slots(1)),
    "adam": Row(
        lambda lr: optim.adam(lr, weight_decay=0.1), of_torch(torch.optim.Adam, MOMENTS, weight_decay=0.1), slots(2),
        fused=True,
    ),
    "lamb, bounded, as DeepSpeed's": Row(
        lambda lr: optim.lamb(lr, weight_decay=0.1, min_coeff=0.4, max_coeff=0.6, correct="rate"),
        lamb(0.4, 0.6, moments=False), slots(2), joint=True
    ),
    "adafactor, momentum": Row(
        lambda lr: optim.adafactor(lr, momentum=0.9, multiply_by_parameter_scale=False, weight_decay_rate=0.01),
        adafactor(128, 0.9, False), slots(2), joint=True,
    ),
    "muon, matched": Row(
        with_adamw(lambda lr: optim.muon(lr, nesterov=False, weight_decay=0.1, scale="match_rms_adamw")),
        muon(matched, nesterov=False), one_for_matrices, joint=True, fused=True,
    ),
    "adamw, momentum in a cycle": Row(
        lambda lr: optim.adamw(lr, b1=optim.one_cycle_momentum(**CYCLE), weight_decay=0.1),
        of_torch(torch.optim.AdamW, MOMENTS, lambda n: {"betas": (momentum(n), 0.999)}, weight_decay=0.1), slots(2),
    ),
    "sgd, momentum in a cycle": Row(
        lambda lr: optim.sgd(lr, momentum=optim.one_cycle_momentum(**CYCLE)),
        of_torch(torch.optim.SGD, {"trace": "momentum_buffer"}, lambda n: {"momentum": momentum(n)}, momentum=0.9),
        slots(1),
    ),
    "adamw, skip_nonfinite": Row(
        lambda lr: optim.skip_nonfinite(optim.adamw(lr, weight_decay=0.1)), adamw, slots(2), fused=True
    ),
    "adamw, accumulate": Row(
        lambda lr: optim.accumulate(optim.adamw(lr, weight_decay=0.1), every=1), adamw, slots(3), fused=True
    ),
    "adamw, masked": Row(lambda lr: optim.masked(optim.adamw(lr, weight_decay=0.1), "**"), adamw, slots(2), fused=True),
    "adamw, weight_ema": Row(
        lambda lr: optim.chain(optim.adamw(lr, weight_decay=0.1), optim.weight_ema(0.9)), adamw, slots(3), fused=True
    ),
}  # fmt: skip


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
    "one_cycle_momentum": Shape(optim.one_cycle_momentum(**CYCLE), momentum),
    "lr_range_test": Shape(optim.lr_range_test(0.01, steps=5, rate=2.0), lambda t: 0.01 * (1 + 2 * t / 5)),
    "lr_range_test, stairs": Shape(
        optim.lr_range_test(0.01, steps=5, staircase=True), lambda t: 0.01 * (1 + t // 5)
    ),
}  # fmt: skip


# ---- running an optimizer


LAYER = "a/dp b/tp"
SPECS = {"w": "u/dp v", "b": "n/dp", "s": "", "e": "x y/tp z/dp"}
SPECS |= {"stacked": sl.stack(LAYER, "layers"), "listed": [LAYER] * 3}
SHAPES = {"w": (5, 7), "b": (7,), "s": (), "e": (3, 4, 2)}


def values(seed: int) -> dict[str, Any]:
    """Uneven, 0-d and 3-d leaves; layers, stacked and listed, whose elements fill no whole vectors."""
    g = torch.Generator().manual_seed(seed)
    layers = torch.randn(3, 5, 7, generator=g, dtype=F64)
    leaves = {name: torch.randn(shape, generator=g, dtype=F64) for name, shape in SHAPES.items()}
    return leaves | {"stacked": layers, "listed": list(layers.unbind())}


def trained(
    optimizer: optim.Optimizer, params: Any, grads: list[Any], specs: Any, stage: int = 3, dp: int = 2, tp: int = 2
) -> tuple[Any, Any]:
    """Parameters, whole, and the optimizer's state after an update for each of `grads`, in one traced program."""

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, new = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), new

    with sl.make_mesh(dp=dp, tp=tp, simulate=True):
        cut = sl.zero(specs, stage=stage).resolve(sl.shard(params, specs)).opt
        now = sl.shard(params, cut)
        state = sl.shard_map(optimizer.init, in_specs=None, out_specs=None)(now)
        assert all(torch.equal(x, y) for x, y in zip(tree.leaves(sl.gather(now)), tree.leaves(params), strict=True))
        run = sl.jit(sl.shard_map(update, in_specs=None, out_specs=None))
        for g in grads:
            now, state = run(now, state, sl.shard(g, cut))
        assert len(run.traces) == bool(grads)
        return sl.gather(now), state
