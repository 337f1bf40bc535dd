"""The great test: on any mesh, with any legal specs, layout and number of micro-batches, a step does as one process.

Compared are loss, tokens, gradients, their norm, the rate, and the state after three steps, of eager ones two. The
oracle is plain torch (`Net.plain`, the rules of optimizers.py) in float64. Precision, optimizer, schedule, dropout and
what `remat` keeps are drawn, too. Jitted steps run with any of the passes; those that only move what is done when give
the bits of the program as it was written.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from models import Net
from optimizers import OPTIMIZERS, SCHEDULES, Row, Shape
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import tree
from shardlib.loss_scale import Scaling
from shardlib.optim.base import kept
from shardlib.passes import for_backend
from shardlib.spec import parse

Draw = Callable[[st.SearchStrategy[Any]], Any]
LAYOUTS = ("none", "0", "1", "2", "3", "2 by step", "hand")
SHAPES = (
    (2, 2, 1),
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (4, 2, 1),
    (2, 4, 1),
    (3, 2, 1),
    (1, 4, 1),
    (8, 1, 1),
    (2, 2, 2),
    (1, 2, 3),
    (2, 1, 3),
    (1, 2, 4),
)
POLICIES = (("mixed",), "nothing", "dots", ("dots", "mixed"), "everything", None)
SMALL = ((2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1))
PASSES = {one.__name__: one for one in for_backend(sl.passes.default, "regional")}
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
PRECISIONS = {  # compute, params, reduce, output; how far gradients may be off
    "f64": (F64, F64, F64, F64, 1e-12),
    "f32": (F32, F32, F32, F32, 5e-6),
    "f32, sums in f64": (F32, F32, F64, F64, 5e-6),
    "f64 computed in f32": (F32, F64, F64, F32, 5e-6),
    "bf16": (BF16, F32, F32, F32, 0.1),
    "f16": (F16, F32, F32, F32, 0.01),
}
MASKS = ("some", "all", "no tokens on a rank", "no tokens in a micro-batch", "one token", "none")


@dataclass(frozen=True, repr=False)
class Case:
    """One example; everything that made it is printed when it fails."""

    net: Net
    axes: dict[str, Any]
    groups: dict[str, str]
    rows: int
    seq: int
    count: int
    by_rows: bool
    mask: str
    weighted: bool
    clip: float | None
    optimizer: str
    schedule: str
    precision: str
    params: Any
    layout: sl.Layout | None
    passes: tuple[str, ...]
    donate: bool
    scale: Scaling | float | None

    @property
    def row(self) -> Row:
        return OPTIMIZERS[self.optimizer]

    @property
    def rate(self) -> Shape:
        """A tenth of the schedule's: three steps stay near where they start."""
        ours, value = SCHEDULES[self.schedule]
        return Shape(lambda count: 0.1 * ours(count), lambda count: 0.1 * value(count))

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters at rest."""
        return PRECISIONS[self.precision][1]

    @property
    def close(self) -> float:
        """How far gradients may be off, as a part of their largest."""
        return PRECISIONS[self.precision][-1]

    def __repr__(self) -> str:
        trees = {"params": self.params, "layout": None if self.layout is None else vars(self.layout)}
        shown = {**vars(self), **{k: tree.map_(str, v) for k, v in trees.items()}}
        return f"Case({', '.join(f'{k}={v}' for k, v in shown.items())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # what hypothesis prints
        printer.text(repr(self))

    def mesh(self, simulate: bool = True) -> sl.Mesh:
        return sl.make_mesh(self.axes, groups=self.groups, simulate=simulate)

    def step(self) -> Any:
        here = self.rows // self.mesh().size("dp")
        cut: Any = dict(microbatch=here // self.count) if self.by_rows else dict(accumulate=self.count)
        optimizer = sl.optim.chain(RECORDED, self.row.make(self.rate.ours))
        how = sl.precision(*PRECISIONS[self.precision][:-1], scale=self.scale)
        return sl.step(self.net.loss, optimizer, layout=self.layout, clip=self.clip, precision=how, **cut)

    def batches(self, steps: int = 3) -> list[dict[str, Tensor]]:
        return [self.batch(i) for i in range(steps)]

    def batch(self, number: int) -> dict[str, Tensor]:
        batch, targets = self.net.batch(self.rows, self.seq, number), None
        if not self.weighted:
            del batch["weight"]
        here = self.rows // self.mesh().size("dp")
        row = torch.arange(self.rows)[:, None]
        targets = batch["targets"].abs() % self.net.vocab
        empty = {
            "some": batch["targets"] < 0,
            "all": row < 0,
            "no tokens on a rank": row // here == number % (self.rows // here),
            "no tokens in a micro-batch": row % here // (here // self.count) == number % self.count,
            "one token": torch.arange(self.rows * self.seq).view(self.rows, self.seq)
            != 5 * number % (self.rows * self.seq),
            "none": row >= 0,
        }
        return batch | {"targets": torch.where(empty[self.mask], -1, targets)}


# Keeps the gradients that the optimizer gets.
RECORDED = sl.optim.Optimizer(
    lambda params: {"gradient": tree.map_(torch.zeros_like, params)},
    lambda grads, state, params: (grads, {"gradient": tree.map_(lambda g, p: g.to(p.dtype), grads, params)}),
)


# ---- drawing cases


def spread(draw: Draw, dims: list[str], axes: tuple[str, ...], lowest: int = 0) -> str:
    """A spec: each of `axes`, in any order, at the end of the chain of some dimension, or nowhere."""
    dims = list(dims)
    for axis in draw(st.permutations(axes)):
        at = draw(st.integers(lowest - 1, len(dims) - 1))
        if at >= lowest:
            dims[at] += f"/{axis}"
    return " ".join(dims)


def spec_trees(draw: Draw, net: Net, data: tuple[str, ...], every: tuple[str, ...]) -> tuple[Any, Callable[[], Any]]:
    """A spec tree that the loss of `net` can compute with, and a function that draws trees of any specs at all."""
    leaves: dict[str, Any] = dict(net.shapes())
    block = leaves.pop("block")

    def made(one: Callable[[str, str, bool], Any]) -> Any:
        lead = not net.listed
        layers = [{n: one(n, s, lead) for n, (s, _) in block.items()} for _ in range(net.layers if net.listed else 1)]
        return {n: one(n, s, False) for n, (s, _) in leaves.items()} | {"blocks": layers if net.listed else layers[0]}

    def computes(name: str, text: str, lead: bool) -> Any:
        axes = (*data, "tp") if net.seq_parallel and "tp" not in text and name != "unused" else data
        spec = spread(draw, text.split(), every if name == "unused" else axes)
        return sl.stack(spec, "layers") if lead else spec

    def rests(name: str, text: str, lead: bool) -> Any:
        names = ["layers"] * lead + [d.split("/")[0] for d in text.split()]
        spec = parse(spread(draw, names, every))
        return spec.unstack().prepend(parse(str(spec.dims[0]))) if lead else spec

    return made(computes), lambda: made(rests)


def turned(names: Iterable[str], by: int) -> list[str]:
    """The names from another one on: hypothesis begins with the first."""
    found = list(names)
    return found[by % len(found) :] + found[: by % len(found)]


@st.composite
def cases(draw: Draw, kind: str, number: int, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> Case:
    """A case with a layout of one kind, on a mesh of one of the shapes (dp, tp, and cp or copies of dp). `number`: of
    the optimizer and the schedule that come first."""
    dp, tp, third = draw(st.sampled_from(shapes))
    how = draw(st.sampled_from(("cp", "", "group")))
    sizes: dict[str, Any] = {"dp": dict(rep=third, fs=dp) if how == "group" else dp, "tp": tp}
    sizes |= {"cp": third} if how == "cp" else {}
    axes = {a: sizes[a] for a in draw(st.permutations(list(sizes)))}
    flag = st.sampled_from((True, False))  # the first example of hypothesis, all first choices, has everything on
    seq_parallel, split_vocab = draw(flag), draw(flag)
    net = Net(
        layers=draw(st.sampled_from((2, 1, 3))), attention=draw(flag), listed=draw(flag), tied=draw(flag),
        seq_parallel=seq_parallel, split_vocab=split_vocab, cp=how == "cp", second_term=draw(flag),
        remat=draw(st.sampled_from(POLICIES)),
        vocab=tp * draw(st.integers(2, 3)) if split_vocab else draw(st.sampled_from((7, 8, 3))),
        model=draw(st.sampled_from((5, 4, 3))),
        hidden=tp * draw(st.integers(1, 3)), heads=tp * draw(st.integers(1, 2)), head=draw(st.sampled_from((3, 2))),
        dropout=draw(st.sampled_from((0.25, 0.0))),
    )  # fmt: skip
    data = ("rep", "fs") if how == "group" else net.data
    computable, anything = spec_trees(draw, net, data, (*data, "tp"))
    groups = {"both": "dp/cp"} if how == "cp" else {}
    over = draw(st.sampled_from({"": ["dp"], "cp": ["dp", "cp", "both"], "group": ["dp", "fs"]}[how]))
    if kind == "none":
        params, layout = computable, None
    elif kind == "hand":
        params, layout = anything(), sl.Layout(compute=computable, params=anything(), grads=anything(), opt=anything())
    else:
        by_step = kind == "2 by step"
        layout = sl.zero(computable, over, int(kind[0]), reduce="step" if by_step else "microbatch")
        params = anything()
    ranks = dp * (third if how == "group" else 1)
    seq = (tp if seq_parallel else 1) * (third if how == "cp" else 1)
    count = draw(st.sampled_from((2, 1, 3, 4)))
    optimizer, schedule = (draw(st.sampled_from(turned(names, number))) for names in (OPTIMIZERS, SCHEDULES))
    # What divides by the root of a second moment blows up rounding, 32-bit gradients more than that of their sums.
    exact = not optimizer.startswith("sgd")
    precision = draw(st.sampled_from(["f64", "bf16", "f16"] if exact else turned(PRECISIONS, number)))
    scales = (sl.dynamic_scale(2.0**10), 2.0**7, *[None] * (precision != "f16"))  # its own would overflow
    on = draw(st.one_of(st.just([*PASSES]), st.lists(st.sampled_from([*PASSES]), unique=True)))
    return Case(
        net=net, axes=axes, groups=groups, params=params, layout=layout, count=count, by_rows=draw(flag),
        rows=ranks * count * draw(st.integers(1, 2)), seq=seq * draw(st.integers(1, 3)),
        mask=draw(st.sampled_from(MASKS)), weighted=draw(flag), clip=draw(st.sampled_from((0.5, 100.0, None))),
        passes=tuple(name for name in PASSES if name in on), donate=draw(flag),
        scale=draw(st.sampled_from(scales)), optimizer=optimizer, schedule=schedule, precision=precision,
    )  # fmt: skip


# ---- running them


@dataclass
class Run:
    """What some steps gave: metrics of each, first gradients (after clipping), and the state at the end by name."""

    metrics: list[dict[str, float]]
    grads: dict[str, Tensor]
    state: dict[str, Tensor]


def named(what: str, values: Any) -> dict[str, Tensor]:
    return {f"{what} {p}": x.double() for p, x in zip(tree.paths(values), tree.leaves(values), strict=True)}


def on_mesh(case: Case, mesh: sl.Mesh, jit: bool, passes: Sequence[str] | None = None, cache: Any = None) -> Run:
    """Three steps of one program, or two as they are written."""
    params, step = case.net.params(dtype=case.dtype), case.step()
    if jit:
        use = [PASSES[name] for name in (case.passes if passes is None else passes)]
        step = sl.jit(step, passes=use, donate_argnums=0 if case.donate else (), cache=cache)
    metrics, grads = [], {}
    with mesh:
        state = step.init(sl.shard(params, case.params))
        for batch in case.batches(3 if jit else 2):
            state, found = step(state, sl.shard(batch, case.net.batch_spec))
            metrics.append({k: found[k].item() for k in ("loss", "grad_norm", "tokens", "lr")})
            grads = grads or named("gradient", sl.gather(state.opt[0]["gradient"]))
        own = named("params", sl.gather(state.params))
        for name in ("trace", "mu", "nu"):
            for part in kept(state.opt, name):
                own |= named(name, sl.gather(part))
        assert tree.flatten(state.params)[1] == tree.flatten(params)[1]
        assert {x.dtype for x in tree.leaves(state.params)} == {case.dtype}
        assert {n.item() for n in [state.step, *kept(state.opt, "count")]} == {len(metrics)}
        assert not jit or len(step.traces) == 1
    return Run(metrics, grads, own)


def in_one_process(case: Case, steps: int) -> tuple[Run, dict[str, Tensor]]:
    """The oracle in float64, and where a gradient is zero but for rounding (which AdamW blows up)."""
    params = tree.map_(lambda x: x.to(case.dtype).double(), case.net.params(dtype=case.dtype))
    flat, treedef = tree.flatten(params)
    layered = [not case.net.listed and path.startswith("blocks") for path in tree.paths(params)]
    states: list[list[dict[str, Any]]] = [
        [{} for _ in (x if many else [x])] for x, many in zip(flat, layered, strict=True)
    ]
    metrics, first, noise = [], {}, {}
    for t, batch in enumerate(case.batches(steps)):
        key, rate = sl.random.fold_in(sl.random.key(0), t), case.rate.value(t)
        grads, (loss, tokens) = torch.func.grad_and_value(case.net.plain, has_aux=True)(
            tree.unflatten(treedef, flat), batch, key
        )
        norm = torch.stack([g.square().sum() for g in tree.leaves(grads)]).sum().sqrt()
        metrics.append({"loss": loss.item(), "grad_norm": norm.item(), "tokens": tokens.item(), "lr": rate})
        if case.clip is not None and norm >= case.clip:
            grads = tree.map_(lambda g, factor=case.clip / norm: g * factor, grads)
        first = first or named("gradient", grads)
        for i, (name, g) in enumerate(named("", grads).items()):
            small = (g != 0) & (g.abs() < 1e-9 * norm)
            noise[name] = noise[name] | small if name in noise else small
            layers = zip(flat[i], g, states[i], strict=True) if layered[i] else [(flat[i], g, states[i][0])]
            done = [case.row.rule(p, d, t + 1, rate, s) for p, d, s in layers]
            flat[i] = torch.stack(done) if layered[i] else done[0]
    state = named("params", tree.unflatten(treedef, flat))
    for path, many, own in zip(tree.paths(params), layered, states, strict=True):
        for name in ("trace", "mu", "nu"):
            if name in own[0]:
                state[f"{name} {path}"] = torch.stack([s[name] for s in own]) if many else own[0][name]
    return Run(metrics, first, state), noise


def compare(case: Case, found: Run) -> None:
    want, noise = in_one_process(case, len(found.metrics))
    exact, single = case.close, case.close < 1e-4 and case.close > 1e-10
    loose = 2e-5 if single else 1e-12 if case.optimizer.startswith("sgd") else 1e-8
    # In 16 bits, and where noise in one element is in the updates of its whole leaf, the first step is compared alone.
    steps = 1 if exact > 1e-4 or (case.row.joint and any(n.any() for n in noise.values())) else len(found.metrics)
    for i, (a, b) in enumerate(zip(found.metrics[:steps], want.metrics[:steps], strict=True)):
        for name, value in b.items():
            near = 1e-12 if name == "lr" else exact if i == 0 else loose
            assert a[name] == pytest.approx(value, rel=near, abs=1e-14), f"{name} of step {i}"
    largest = max([g.abs().max().item() for g in want.grads.values() if g.numel()])
    for tolerance, xs, ys in ((exact, found.grads, want.grads), (loose, found.state, want.state))[:steps]:
        assert xs.keys() == ys.keys()
        for name, y in ys.items():
            x = xs[name]
            assert x.shape == y.shape, name
            if y.numel():
                off = (x - y).abs()
                if tolerance == 1e-8:
                    off = torch.where(noise[" " + name.split()[1]], 0.0, off)
                # A sum of terms that cancel is rounded as its terms are: a scalar has no other elements that show them.
                least = largest if y.numel() == 1 and exact > 1e-10 else 1e-6 * largest
                scale = max(y.abs().max().item(), least, 1e-300)
                assert off.max().item() <= tolerance * scale, (
                    f"{name}: off by {off.max().item() / scale:.2e} of its maximum"
                )


def check(kind: str, number: int, examples: int, test: Callable[[Case], None], **options: Any) -> None:
    """`examples` cases of one kind, the same on every run. A failing one is printed, not shrunk (it takes minutes)."""

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(case=cases(kind, number, **options))
    def each(case: Case) -> None:
        test(case)

    each()


def jitted(case: Case) -> None:
    compare(case, on_mesh(case, case.mesh(), jit=True))


def moved(case: Case) -> None:
    """Passes that keep bits, against none: all but sums in another order, and AdamW as torch rounds it in place."""
    exact = [name for name in case.passes if name != "bucket" and not (case.row.fused and name == "in_place")]
    want, got = (on_mesh(case, case.mesh(), jit=True, passes=use) for use in ([], exact))
    assert repr(got.metrics) == repr(want.metrics)
    for name, x in want.state.items():
        assert torch.equal(got.state[name], x), name


def eager(case: Case) -> None:
    compare(case, on_mesh(case, case.mesh(), jit=False))


def processes(case: Case) -> None:
    """On gloo, every rank checked; two ranks eager, more jitted, where one traces for all."""
    with TemporaryDirectory() as cache:

        def body() -> Run:
            return on_mesh(case, case.mesh(simulate=False), case.mesh().total > 2, cache=cache)

        for run in on_ranks(case.mesh().total, body):
            compare(case, run)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_jit(kind: str) -> None:
    check(kind, LAYOUTS.index(kind), 2 if kind == "hand" else 1, jitted)


@pytest.mark.parametrize("kind", ["2", "3"])
def test_passes_keep_bits(kind: str) -> None:
    check(kind, 40 + LAYOUTS.index(kind), 1, moved)


@pytest.mark.parametrize("kind", ["3", "hand"])
def test_eager(kind: str) -> None:
    check(kind, 10 + LAYOUTS.index(kind), 1, eager)


@pytest.mark.parametrize("kind", ["2", "3"])
def test_processes(kind: str) -> None:
    check(kind, 20, 1, processes, shapes=((2, 1, 1),) if kind == "2" else ((1, 2, 2), (2, 2, 1)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_many(kind: str) -> None:
    check(kind, 100 + LAYOUTS.index(kind), 30, jitted)
    check(kind, 200 + LAYOUTS.index(kind), 5, eager)
    check(kind, 400 + LAYOUTS.index(kind), 10, moved)
    check(kind, 300 + LAYOUTS.index(kind), 2, processes, shapes=SMALL)
