"""Layouts and what they cost: spec trees of every ZeRO stage, collectives and bytes of a step, state per rank."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import tree
from shardlib.graph.program import Collective

F64 = torch.float64
SPECS = {"a": "m/dp n", "b": "m n/tp", "c": "odd", "d": "m n/tp/dp", "z": ""}
SHAPES = {"a": (4, 6), "b": (4, 16), "c": (3,), "d": (4, 16), "z": ()}
CUT = {"a": "m/dp n", "b": "m n/tp/dp", "c": "odd", "d": "m n/tp/dp", "z": ""}  # b at its largest dimension, c nowhere
LEFT = {"a": "m n", "b": "m n/tp", "c": "odd", "d": "m n/tp", "z": ""}
SUMMED = {k: f"{v} +dp".strip() for k, v in LEFT.items()}


def mesh(**axes: Any) -> sl.Mesh:
    return sl.make_mesh(axes, simulate=True)


def resolved(layout: sl.Layout, m: sl.Mesh, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, dict[str, str]]:
    with m:
        params = sl.shard({k: torch.zeros(s) for k, s in shapes.items()}, "...")
        return {k: tree.map_(str, v) for k, v in vars(layout.resolve(params)).items()}


@pytest.mark.parametrize(
    "stage, options, compute, params, grads, opt",
    [
        (0, {}, LEFT, LEFT, SUMMED, LEFT),
        (1, {}, LEFT, LEFT, SUMMED, CUT),
        (2, {}, LEFT, LEFT, CUT, CUT),
        (2, {"reduce": "step"}, LEFT, LEFT, SUMMED, CUT),
        (3, {}, CUT, CUT, CUT, CUT),
    ],
)
def test_stages_are_spec_trees(stage, options, compute, params, grads, opt):
    found = resolved(sl.zero(SPECS, stage=stage, **options), mesh(dp=2, tp=2))
    assert found == {"compute": compute, "params": params, "grads": grads, "opt": opt}


def test_a_group_cuts_with_the_axes_that_a_leaf_does_not_use():
    specs = {"w": "experts/ep m n", "v": "m/dp n", "u": "m n"}
    shapes = {"w": (2, 8, 3), "v": (8, 3), "u": (3, 8)}
    m = mesh(dp=dict(rep=2, ep=2), tp=2)
    assert resolved(sl.zero(specs, "dp", 3), m, shapes)["opt"] == {
        "w": "experts/ep m/rep n",
        "v": "m/rep/ep n",
        "u": "m n/rep/ep",
    }
    assert resolved(sl.zero(specs, "dp", 1), m, shapes) == {
        "compute": {"w": "experts/ep m n", "v": "m n", "u": "m n"},
        "params": {"w": "experts/ep m n", "v": "m n", "u": "m n"},
        "grads": {"w": "experts/ep m n +rep", "v": "m n +rep +ep", "u": "m n +rep +ep"},
        "opt": {"w": "experts/ep m/rep n", "v": "m/rep/ep n", "u": "m n/rep/ep"},
    }


def test_a_stacked_leaf_is_not_cut_along_its_layers():
    with mesh(dp=4):
        params = sl.shard({"w": torch.zeros(8, 4)}, sl.stack({"w": "m"}, "layers"))
        layout = sl.zero(sl.stack({"w": "m"}, "layers"), stage=3).resolve(params)
        assert str(layout.params["w"]) == "layers m/dp" and layout.params["w"].stacked == 1


DP = {"w": "m/dp n/tp", "e": "experts/gpu m n", "v": "n m", "s": ""}  # `/dp`: where a leaf is cut when it is
LENGTHS = {"w": (8, 6), "e": (4, 3, 8), "v": (3, 8), "s": ()}


@pytest.mark.parametrize(
    "tree_, w, e, v",
    [
        (sl.zero(DP, "gpu", 3).params, "m/gpu n/tp", "experts/gpu m n", "n m/gpu"),  # hybrid: copies over nodes
        (sl.zero(DP, "gpu", 1).params, "m n/tp", "experts m n", "n m"),
        (sl.zero(DP, "dp", 3).params, "m/node/gpu n/tp", "experts/gpu m n/node", "n m/node/gpu"),
        (sl.zero(DP, ("gpu", "node"), 3).params, "m/gpu/node n/tp", "experts/gpu/node m n", "n m/gpu/node"),
        (sl.split(DP, "gpu", "node"), "m/gpu/node n/tp", "experts/gpu/node m n", "n m/gpu/node"),
        (sl.split(DP, "gpu", where="v"), "m/node/gpu n/tp", "experts/gpu m n", "n m/gpu"),
        (sl.split(sl.split(DP, "gpu"), "node", where=["w", "v"]), "m/gpu/node n/tp", "experts/gpu m n", "n m/gpu/node"),
        (sl.zero(DP, "dp", 3, min_size=48).params, "m/node/gpu n/tp", "experts/gpu m n/node", "n m"),
        (sl.zero(DP, "dp", 3, min_size=49).params, "m n/tp", "experts/gpu m n/node", "n m"),
    ],
)
def test_leaves_are_cut_where_a_group_stands_that_holds_the_axis(tree_, w, e, v):
    with mesh(dp=dict(node=2, gpu=2), tp=2):
        params = sl.shard({k: torch.zeros(s) for k, s in LENGTHS.items()}, tree_)
    assert {k: str(x.spec) for k, x in params.items()} == {"w": w, "e": e, "v": v, "s": ""}


def test_gather_in_the_forward_keeps_parameters_cut():
    for stage, cut in ((0, LEFT), (1, CUT), (2, CUT), (3, CUT)):
        found = resolved(sl.zero(SPECS, stage=stage, gather="forward"), mesh(dp=2, tp=2))
        assert found["params"] == cut and found["compute"] == (CUT if stage == 3 else LEFT)


def test_place_says_which_memory():
    specs = sl.place(DP, "host", where=lambda path, spec: spec.ndim > 2)
    assert tree.map_(str, specs) == DP | {"e": "experts/gpu m n @host"}
    with pytest.raises(sl.SpecError, match="place: memory is 'device', 'host', 'disk', not 'cloud'"):
        sl.place(DP, "cloud")
    with pytest.raises(sl.TreeError, match="`q` matches no path"):
        sl.split(DP, "gpu", where="q")


@pytest.mark.parametrize(
    "options, said",
    [
        ({"gather": "never"}, "gather is 'update' or 'forward'"),
        ({"stage": 4}, "stage is 0, 1, 2 or 3"),
        ({"stage": 2, "reduce": "later"}, "reduce is 'microbatch' or 'step'"),
    ],
)
def test_wrong_options(options, said):
    with pytest.raises(sl.SpecError, match=said):
        sl.zero(SPECS, **options)


# ---- what a step sends: six leaves, one of them used twice

LEAVES = 6
MODEL: Any = {"embed": "vocab model/dp", "layers": [{"scale": "model/dp"}] * (LEAVES - 1)}
SIZE = 8
BYTES = 8 * (SIZE * SIZE + SIZE * (LEAVES - 1))  # of all parameters


def loss(p: Any, batch: Tensor) -> sl.Mean:
    embed = sl.gather(p["embed"], "dp")
    x = embed[batch]
    for w in p["layers"]:
        x = x * sl.gather(w["scale"], "dp")
    return sl.token_loss("batch/dp vocab, batch/dp", x @ embed.T, batch)


def started(
    stage: int, ranks: int = 2, optimizer: Any = None, count: int = 1, reduce: str = "microbatch", f: Any = loss
) -> Any:
    """A step on the current mesh, its first state and a batch."""
    g = torch.Generator().manual_seed(0)
    params = tree.map_(lambda spec: torch.randn([SIZE] * len(spec.split()), generator=g, dtype=F64), MODEL)
    layout = sl.zero(MODEL, stage=stage, reduce=reduce)
    step = sl.jit(sl.step(f, optimizer or sl.optim.sgd(0.1), layout=layout, accumulate=count), passes=[])
    return step, step.init(sl.shard(params, MODEL)), sl.shard(torch.arange(8 * count) % SIZE, "batch/dp")


@cache
def lowered(stage: int, count: int, ranks: int = 2, reduce: str = "microbatch", f: Any = loss) -> list[Collective]:
    """Collectives of a step that move leaves, not single numbers, on `ranks` ranks of dp."""
    with mesh(dp=ranks):
        step, *args = started(stage, ranks, None, count, reduce, f)
        return [c for c in step.lower(*args).collectives() if not c.scalar]


def sent(found: list[Collective]) -> dict[tuple[str, str], int]:
    """How many collectives of each kind run in a step, by graph."""
    out: Counter[tuple[str, str]] = Counter()
    for c in found:
        assert c.axis == "dp"
        out[c.graph, c.op] += c.times
    return dict(out)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("stage, options", [(0, {}), (1, {}), (2, {"reduce": "step"}), (2, {}), (3, {})])
def test_every_leaf_is_reduced_once(stage, options, count):
    micro = "step" if count == 1 else "microbatch"
    found = sent(lowered(stage, count, 2, **options))
    if stage == 0:
        assert found == {("step", "psum"): LEAVES}
    elif stage < 3:
        where = micro if stage == 2 and not options else "step"
        assert found == {
            (where, "psum_scatter"): LEAVES * (count if where == "microbatch" else 1),
            ("step", "all_gather"): LEAVES,
        }
    else:
        assert found == {(micro, "psum_scatter"): LEAVES * count, (micro, "all_gather"): LEAVES * count}


@pytest.mark.parametrize("ranks, count", [(2, 1), (2, 2), (4, 1)])
def test_bytes_of_every_stage(ranks, count):
    once = BYTES * (ranks - 1) // ranks

    def volume(stage: int, **options: Any) -> int:
        return sum(c.bytes * c.times for c in lowered(stage, count, ranks, **options))

    assert volume(0) == 2 * once
    assert volume(1) == 2 * once  # scatter, then gather the updated parameters
    assert volume(2, reduce="step") == 2 * once
    assert volume(2) == (count + 1) * once
    assert volume(3) == 2 * count * once  # gathered in the forward, kept for the backward


@pytest.mark.parametrize("stage, pieces", [(0, (1, 1)), (1, (1, 4)), (2, (1, 4)), (3, (4, 4))])
def test_bytes_of_state_on_a_rank(stage, pieces):
    with mesh(dp=4):
        _, state, _ = started(stage, 4, sl.optim.adamw(0.1))
    for held, parts, copies in ((state.params, pieces[0], 1), ((state.opt.mu, state.opt.nu), pieces[1], 2)):
        assert sum(x.nbytes for x in sl.local(tree.leaves(held), rank=3)) == copies * BYTES // parts


def hybrid(layout: sl.Layout, count: int = 1) -> Counter[tuple[str, str]]:
    """Bytes that a step sends over nodes and GPUs, by op and axis, leaves only."""
    out: Counter[tuple[str, str]] = Counter()
    with mesh(dp=dict(node=2, gpu=4)):
        g = torch.Generator().manual_seed(0)
        params = tree.map_(lambda spec: torch.randn([2 * SIZE] * len(spec.split()), generator=g, dtype=F64), MODEL)
        step = sl.jit(sl.step(loss, sl.optim.sgd(0.1), layout=layout, accumulate=count), passes=[])
        state = step.init(sl.shard(params, "..."))
        batch = sl.shard(torch.arange(8 * count) % SIZE, "batch/dp")
        for c in step.lower(state, batch).collectives():
            if not c.scalar:
                out[c.op, c.axis] += c.bytes * c.times
    return out


def test_hybrid_layouts_send_what_their_papers_say():
    whole = 8 * (4 * SIZE * SIZE + 2 * SIZE * (LEAVES - 1))  # bytes of all parameters
    shard = whole // 4  # of one GPU's quarter
    hsdp = sl.zero(MODEL, "gpu", 3)
    scatter, gathers = {("psum_scatter", "gpu"): whole * 3 // 4}, {("all_gather", "gpu"): whole * 3 // 4}
    summed = {("psum", "node"): 2 * shard // 2}
    assert hybrid(hsdp) == {**scatter, **gathers, **summed}
    # MiCS (Zhang et al. 2022), optimizer over all: the shard's sum is scattered over nodes, the update gathered back
    mics = replace(hsdp, opt=sl.split(MODEL, "gpu", "node"))
    over = {("psum_scatter", "node"): shard // 2, ("all_gather", "node"): shard // 2}
    assert hybrid(mics) == {**scatter, **gathers, **over}
    # hpZ (Wang et al. 2023): kept cut over all, gathered over nodes once a step, over GPUs where a leaf is used
    every = sl.split(MODEL, "gpu", "node")
    hpz = sl.Layout(compute=sl.split(MODEL, "gpu"), params=every, grads=sl.split(MODEL, "gpu"), opt=every)
    assert hybrid(hpz) == {**scatter, **gathers, **over}
    twice = hybrid(hpz, 2)
    assert twice["all_gather", "node"] == shard // 2 and twice["all_gather", "gpu"] == 2 * (whole * 3 // 4)


def test_remat_gathers_again():
    def again(p: Any, batch: Tensor) -> sl.Mean:
        embed = sl.gather(p["embed"], "dp")

        def layer(w: Any, x: Tensor) -> Tensor:
            return x * sl.gather(w["scale"], "dp")

        x = embed[batch]
        for w in p["layers"]:
            x = sl.remat(layer)(w, x)
        return sl.token_loss("batch/dp vocab, batch/dp", x @ embed.T, batch)

    assert sent(lowered(3, 1, f=again)) == {("step", "psum_scatter"): LEAVES, ("step", "all_gather"): 2 * LEAVES - 1}


def test_collectives_are_named_by_their_leaves():
    found = lowered(3, 1, 2)
    assert [c.name for c in found if c.op == "all_gather"][:3] == [
        "0.params.embed",
        "0.params.layers.0.scale",
        "0.params.layers.1.scale",
    ]
    assert {c.dtype for c in found} == {F64} and {c.graph for c in found} == {"step"}
