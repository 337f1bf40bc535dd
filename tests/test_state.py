"""state.py and array.py: trees at rest, made from global tensors, local ones or nothing, and taken apart again."""

import copy
import pickle
import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import tree
from shardlib.errors import DonatedError, MeshError, ShardError, SpecError, TreeError

MESHES = ({}, {"a": 1}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 3})


def mesh(**axes):
    return sl.make_mesh(**axes, simulate=True)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@sl.pytree
class Layer:
    w: Tensor = sl.spec("model hidden/a")
    scale: Tensor = sl.spec("model/a")


@sl.pytree
class Model:
    embed: Tensor = sl.spec("vocab/a model", init=0.02)
    twin: Tensor = sl.spec("vocab/a model", init=0.02)
    blocks: Layer = sl.stack("layers")
    bias: Tensor = sl.spec("model", init="zeros", dtype=torch.bfloat16)


@sl.pytree
class Listed:
    blocks: list[Layer] = sl.stack("layers")


SIZES = {"vocab": 7, "model": 5, "hidden": 6, "layers": 3}


# ---- shard and gather


def leaves():
    """Every kind of leaf that is not plain, with a spec (C23, C26, C27)."""
    w = torch.arange(48.0).reshape(6, 8)
    return {
        "zero first": (torch.empty(4, 0, dtype=torch.float16), "x/a y"),
        "transposed": (w.t(), "x/a y"),
        "strided": (w[:, ::2], "x y/a"),
        "expanded": (torch.arange(5.0).expand(6, 5), "x/a y"),
        "expanded along": (torch.arange(5.0)[:, None].expand(5, 6), "x y/a"),
        "offset": (w[1:, 3:], "x/a y"),
        "zero middle": (torch.empty(0, 4), "x y/a"),
        "scalar": (torch.tensor(3.5), ""),
        "one": (torch.tensor([7]), "x/a"),
        "ints": (torch.arange(4097, dtype=torch.int64)[-3:], "x/a"),
        "mask": (torch.tensor([True, False, True]), "x"),
        "bf16": (torch.arange(10).bfloat16(), "..."),
        "parameter": (torch.nn.Parameter(torch.arange(9.0).reshape(3, 3)), "x/a ..."),
        "none": (None, "x/a"),
        "empty": ({}, "x/a"),
        "nested": ([torch.arange(3), (torch.arange(4), None)], "x/a"),
        "zero last": (torch.empty(4, 0), "x y/a"),
    }


@pytest.mark.parametrize("axes", MESHES[1:], ids=str)
def test_every_kind_of_leaf_comes_back(axes):
    whole = {k: x for k, (x, _) in leaves().items()}
    specs: dict[str, Any] = {k: s for k, (_, s) in leaves().items()}
    before = copy.deepcopy(whole)
    with mesh(**axes):
        arrays = sl.shard(whole, specs)
        back = sl.gather(arrays)
        other = sl.gather(sl.reshard(arrays, specs | {"transposed": "x y/a", "expanded": "x y/a", "strided": "x/a y"}))
    assert tree.flatten(arrays)[1] == tree.flatten(whole)[1]
    for path, was, x, y, z in zip(tree.paths(whole), *map(tree.leaves, (before, whole, back, other)), strict=True):
        assert same(y, x) and same(z, x), path
        assert same(was, x) and was.stride() == x.stride(), path  # inputs are untouched
        assert y.is_contiguous() and not y.requires_grad, path


@pytest.mark.parametrize(("axes", "spec"), [({}, "x"), *product(MESHES[1:], ["x", "x/a"])], ids=str)
def test_nothing_aliases(axes, spec):
    x = torch.arange(8.0)
    with mesh(**axes):
        array = sl.shard(x, spec)
        x.add_(100)
        first = sl.gather(array)
        assert first.tolist() == list(range(8))
        first.add_(100)
        assert sl.gather(array).tolist() == list(range(8))
        if array.mesh.total == 1:
            x = torch.arange(8.0)
            array = sl.from_local(x, spec)
            x.add_(100)
            assert sl.gather(array).tolist() == list(range(8))


def test_gather_of_some_axes():
    x = torch.arange(35.0).reshape(5, 7)
    with mesh(dp={"r": 2, "f": 2}, tp=2):
        tree_ = sl.shard({"w": x, "b": x[0], "s": x[0, 0]}, {"w": "m/f n/tp", "b": "m/tp/dp", "s": ""})
        for axes, specs in (
            ("f", ["m n/tp", "m/tp/r", ""]),
            ("dp", ["m n/tp", "m/tp", ""]),
            (("tp", "dp"), ["m n", "m", ""]),
            ("r", ["m/f n/tp", "m/tp/f", ""]),
        ):
            some = sl.gather(tree_, axes)
            assert [str(some[k].spec) for k in "wbs"] == [s.replace("dp", "r/f") for s in specs]
            assert all(same(y, z) for y, z in zip(tree.leaves(sl.gather(some)), (x[0], x[0, 0], x), strict=True))
        assert sl.gather({}, "dp") == {} and sl.gather([None]) == [None]


def test_what_shard_refuses():
    x = torch.ones(2, 3)
    with mesh(dp=2, tp=2):
        for specs, told in (
            ("m n o", "shard: `a.w`: `m n o` names 3 dimensions, the tensor has 2: (2, 3)\n  spec:    m n o\n"),
            ("m/tpp n", "shard: `a.w`: the mesh has no axis `tpp` (did you mean `tp`?); its axes are `dp` and `tp`\n"),
            ("m +tp n", "nothing may follow the pending sums"),
            ("m n +tp", "shard: `a.w`: a global value is no sum still to be made\n  spec:    m n +tp\n               "),
            (
                {"a": {"v": "m n"}},
                "shard: specs does not match the tree: at `a`: a dict of 1 for a dict of 1; missing `w`",
            ),
            (None, "shard: give specs; only a @pytree object brings its own, found dict"),
            ({"a": {"w": 3}}, "a spec is a string such as 'd_model/dp heads/tp', not 3"),
        ):
            with pytest.raises(ShardError) as e:
                sl.shard({"a": {"w": x}}, specs)
            assert told in str(e.value)
        with pytest.raises(SpecError, match="shard: `0` is a float; a tensor is needed"):
            sl.shard([3.0], "")
        with pytest.raises(SpecError, match="shard is a float; a tensor is needed"):
            sl.shard(3.0, "")
        array = sl.shard(x, "m/dp n")
        with pytest.raises(SpecError, match=r"shard: `w` is an array at rest already \(`m/dp n`\): sl.reshard changes"):
            sl.shard({"w": array}, "m n/dp")
        for f in (sl.gather, lambda t: sl.reshard(t, "m n"), sl.local):
            with pytest.raises(SpecError, match=r"`w` is a Tensor, not an array at rest: sl.shard makes one"):
                f({"v": array, "w": x})
        with pytest.raises(SpecError, match=r"reshard: `w`: `n m` names|reshard: `w`: `n` names 1 dimension"):
            sl.reshard({"w": array}, "n")
        with pytest.raises(MeshError, match="reshard: `w`: the mesh has no axis `q`"):
            sl.reshard({"w": array}, "m/q n")
        with pytest.raises(
            SpecError, match=r"reshard: `w`: .*no sum over `tp` is pending on the left\n  spec:    m n \+tp\n"
        ):
            sl.reshard({"w": array}, "m n +tp")
    with (
        mesh(dp=4),
        pytest.raises(MeshError, match=r"gather: `1` lies on Mesh\(dp=4, simulated\), others on Mesh\(dp=2,"),
    ):
        sl.gather([array, sl.shard(x, "m n")])
    with pytest.raises(MeshError, match="no mesh"):
        sl.shard(x, "m n")


# ---- arrays


def test_an_array_is_whole_in_shape_and_refuses_arithmetic():
    with mesh(a=2, b=2) as m:
        x = sl.shard(torch.arange(15.0).reshape(5, 3), "m/a n/b")
        assert x.shape == (5, 3) and x.dtype == torch.float32 and x.dim() == 2 and x.numel() == 15
        assert repr(x) == "Array('m/a n/b', shape=(5, 3), float32, mesh a=2,b=2)"
        assert x.padded and [tuple(s.shape) for s in x.shards] == [(3, 2)] * 4
        assert x.local(3).tolist() == [[11.0], [14.0]] and sl.local({"x": x}, rank=0)["x"].shape == (3, 2)
        told = "add on an array at rest (`m/a n/b`, shape (5, 3)): nothing is communicated silently"
        for f in (lambda: x + 1, lambda: 1 + x, lambda: x + x, lambda: torch.add(torch.ones(3), x)):
            with pytest.raises(ShardError, match=re.escape(told)):
                f()
        for f in (lambda: x.tolist(), lambda: x.numpy(), lambda: np.asarray(x), lambda: x @ x, lambda: list(x)):
            with pytest.raises(ShardError, match=r"on an array at rest \(`m/a n/b`, shape \(5, 3\)\)"):
                f()
        for f in (lambda: x @ x, lambda: x[0], lambda: x.sum(), lambda: x.tolist(), lambda: list(x), lambda: bool(x),
                  lambda: x.to("meta"), lambda: x.float().double(), lambda: torch.equal(x, x), lambda: x == x,
                  lambda: x.numpy(), lambda: x.item(), lambda: torch.cat([x, x]), lambda: x.reshape(15)):  # fmt: skip
            with pytest.raises(
                (ShardError, RuntimeError), match=r"on an array at rest \(`m/a n/b`|of Tensor|to Scalar"
            ):
                f()
        assert float(sl.shard(torch.tensor(2.5), "")) == 2.5 and int(sl.shard(torch.tensor([4]), "n")) == 4
        with pytest.raises(MeshError, match=r"say which, local\(tree, rank=5\)"):
            x.local()
        with pytest.raises(MeshError, match=r"Mesh\(a=2,b=2, simulated\) does not hold the shard of rank 4"):
            x.local(4)
        assert x.detach() is x and x.mesh is m
        twin = copy.deepcopy(x)
        twin.shards[0].add_(1)
        assert x.shards[0][0, 0] == 0
        with pytest.raises(ShardError, match=r"cannot be pickled: use sl.save, or sl.gather it first"):
            pickle.dumps(x)


def test_a_donated_array_is_gone():
    with mesh(a=2):
        x = sl.shard(torch.arange(4.0), "m/a")
        x.donate()
        assert repr(x).endswith("mesh a=2, donated)")
        for f in (lambda: x.shards, lambda: sl.gather(x), lambda: x.local(0), x.donate, lambda: copy.deepcopy(x)):
            with pytest.raises(DonatedError, match=r"`m/a`, shape \(4,\)\) was donated"):
                f()


def test_borders_say_where_what_and_how_to_mend():
    """What `shard_map` says of arguments and results whose specs do not fit."""

    def run(f, x, in_specs, out_specs):
        return sl.shard_map(f, in_specs=in_specs, out_specs=out_specs)(x)

    def f(t):
        return t

    with mesh(dp=2, tp=2):
        w = {"w": sl.shard(torch.ones(4, 6), "m/dp n")}
        plain = {"w": torch.ones(4, 6)}
        head = "f: argument `0.w`:"
        for x, in_specs, told in (
            (w, "m n/dp", f"{head} a value of shape (4, 6), split as `m/dp n`, is not `m n/dp`\n  spec:    m n/dp\n"
             "           ^ sl.reshard(x, 'm n/dp') first: nothing is redistributed by itself"),
            (plain, "m/dp n", f"{head} a value of shape (4, 6), plain, hence equal on all ranks, is not `m/dp n`\n"
             "  spec:    m/dp n\n           ^^^^ sl.shard(x, 'm/dp n') first"),
            (w, "m/dpp n", f"{head} the mesh has no axis `dpp` (did you mean `dp`?); its axes are `dp` and `tp`"),
            (w, ({"v": "m"},), "f: in_specs does not match the tree: at `0`: a dict of 1 for a dict of 1; missing `w`"),
        ):  # fmt: skip
            with pytest.raises((SpecError, MeshError, TreeError)) as e:
                run(f, x, in_specs, None)
            assert str(e.value).startswith(told)

        def kept(t):
            return t["w"]

        def summed(t):
            return sl.pending(t["w"] * 1, "dp")

        def gathered(t):
            return sl.gather(t["w"], "dp")

        v, p = "f32[2, 6] varying over dp", "f32[2, 6] pending over dp"
        for g, out_specs, told, caret in (
            (kept, "m n", f"{v} (`m/dp n`) differs by rank over `dp`, which `m n` does not name",
             "^^^ split a dimension (`/dp`), all_gather(..., invariant=True) it, or psum it"),
            (summed, "m/dp n", f"{p} still waits for a sum over `dp`", "^^^^ psum_scatter it there"),
            (summed, "m n", f"{p} still waits for a sum over `dp`", "^^^ psum it, or write `+dp` here"),
            (gathered, "m n", "f32[4, 6] replicated over dp (`m n`) is replicated over `dp`, `m n` says invariant",
             "^^^ gather it with invariant=True, so that its gradient is counted once"),
            (kept, "m/dp n +tp", f"{v} (`m/dp n`) is equal over `tp`: no sum is to be made", "       ^^^ leave it out"),
            (kept, "m/dp", "`m/dp` names 1 dimension, the tensor has 2: (2, 6)", "^^^^ one name for each dimension"),
        ):  # fmt: skip
            with pytest.raises(SpecError) as e:
                run(g, w, None, out_specs)
            assert str(e.value) == f"{g.__name__}: the result: {told}\n  spec:    {out_specs}\n{' ' * 11}{caret}"
        with pytest.raises(SpecError) as e:
            run(lambda t: [t["w"] * 1], w, None, None)
        assert str(e.value) == f"<lambda>: result `0`: {v}: no spec says how it is split; give out_specs"
        with mesh(dp=4), pytest.raises(MeshError) as e:
            run(f, w, None, None)
        told = "it lies on Mesh(dp=2,tp=2, simulated), the current mesh is Mesh(dp=4, simulated)"
        mend = "  Run it under `with` the array's mesh, or move the array: sl.shard(sl.gather(x), spec, mesh)"
        assert str(e.value) == f"f: argument `0.w`: {told}.\n{mend}"


# ---- made from nothing


def _gathered(model, sizes, **axes):
    with mesh(**axes):
        return sl.gather(sl.init(model, sizes=sizes, key=sl.random.key(3)))


def test_init_depends_on_the_key_and_the_path_alone():
    """Case C37."""
    ref = _gathered(Model, SIZES, a=1)
    for axes in ({"a": 4}, {"a": 2, "b": 2}, {"b": 2, "a": 3}, {"a": {"x": 2, "y": 3}}):
        found = _gathered(Model, SIZES, **axes)
        assert all(same(x, y) for x, y in zip(tree.leaves(found), tree.leaves(ref), strict=True)), axes
    assert not torch.equal(ref.embed, ref.twin)
    assert ref.bias.dtype == torch.bfloat16 and not ref.bias.any()
    assert ref.blocks.scale.tolist() == [[1.0] * 5] * 3
    assert ref.blocks.w.shape == (3, 5, 6) and not torch.equal(ref.blocks.w[0], ref.blocks.w[1])
    listed = _gathered(Listed, SIZES, a=2)
    assert len(listed.blocks) == 3
    assert all(same(layer.w, ref.blocks.w[i]) for i, layer in enumerate(listed.blocks))
    with mesh(a=2):
        shards = sl.init(Model, sizes=SIZES | {"vocab": 8}, key=sl.random.key(3)).embed.shards
        assert not torch.equal(shards[0], shards[1])
        other = sl.gather(sl.init(Model, sizes=SIZES, key=sl.random.key(4)))
    assert not torch.equal(other.embed, ref.embed)


def test_nested_stacks_agree_with_nested_lists():
    @sl.pytree
    class Inner:
        w: Tensor = sl.spec("m n/a", init=1.0)

    @sl.pytree
    class Outer:
        pairs: Inner = sl.stack("v depth")
        rest: list[Inner] = sl.stack("width")

    @sl.pytree
    class Stacked:
        layers: Outer = sl.stack("layers")

    @sl.pytree
    class Mixed:
        layers: list[Outer] = sl.stack("layers")

    sizes = {"m": 3, "n": 4, "v": 2, "depth": 3, "width": 2, "layers": 2}
    stacked, mixed = _gathered(Stacked, sizes, a=2), _gathered(Mixed, sizes, a=4)
    assert stacked.layers.pairs.w.shape == (2, 2, 3, 3, 4)
    for i, layer in enumerate(mixed.layers):
        assert same(layer.pairs.w, stacked.layers.pairs.w[i])
        assert all(same(inner.w, stacked.layers.rest[j].w[i]) for j, inner in enumerate(layer.rest))
    flat = stacked.layers.pairs.w.flatten(0, 2)
    assert len({tuple(x.flatten().tolist()) for x in flat}) == len(flat)


def test_init_of_every_kind():
    def halves(key, shape, dtype, *, index):
        return index.to(dtype) / 2

    @sl.pytree
    class Kinds:
        zeros: Tensor = sl.spec("m/a n", init="zeros")
        ones: Tensor = sl.spec("m 3", init="ones", dtype=torch.int32)
        scaled: Tensor = sl.spec("big n/a", init=0.1)
        matrix: Tensor = sl.spec("big n")
        counted: Tensor = sl.spec("m/a n/b", init=halves)
        vector: Tensor = sl.spec("n/a", dtype=torch.float64)
        scalar: Tensor = sl.spec("")
        heads: int = sl.static()
        eps: float = sl.static(default=1e-5)

    found = _gathered(Kinds, {"m": 5, "n": 4, "big": 400, "heads": 8}, a=2, b=3)
    assert not found.zeros.any() and same(found.ones, torch.ones(5, 3, dtype=torch.int32))
    assert found.scaled.std() == pytest.approx(0.1, rel=0.1)
    assert found.matrix.std() == pytest.approx(1 / 20, rel=0.1)
    assert found.counted.tolist() == (torch.arange(20.0).reshape(5, 4) / 2).tolist()
    assert found.vector.dtype == torch.float64 and found.scalar.item() == 1
    assert (found.heads, found.eps) == (8, 1e-5)
    with mesh(a=2, b=3):
        shape = sl.abstract(Kinds, {"m": 5, "n": 4, "big": 400, "heads": 8, "eps": 0.1})
        assert shape.counted.shape == (5, 4) and str(shape.counted.spec) == "m/a n/b" and shape.eps == 0.1
        assert sl.local(shape, rank=5).counted.shape == (2, 0)
        assert sl.gather(sl.reshard(shape, "...")).counted.shape == (5, 4)
        made = sl.abstract(
            lambda: sl.init(Kinds, sizes={"m": 5, "n": 4, "big": 10**12, "heads": 8}, key=sl.random.key(0))
        )
        assert made.matrix.shape == (10**12, 4)  # no storage
        arrays = sl.init(lambda key: [sl.random.normal(key, (5, 3))], "m/a n/b", key=sl.random.key(1))
        assert same(sl.gather(arrays)[0], sl.random.normal(sl.random.key(1), (5, 3)))


def test_what_init_refuses():
    @sl.pytree
    class Static:
        heads: int = sl.static()

    key = sl.random.key(0)
    with (
        mesh(b=2),
        pytest.raises(
            MeshError, match=r"Model: `embed`: the mesh has no axis `a`; its axes are `b`\n  spec:    vocab/a"
        ),
    ):
        sl.init(Model, sizes=SIZES, key=key)
    with mesh(a=2):
        for model, sizes, error, told in (
            (Model, {"vocab": 3, "modell": 2}, SpecError, "Model: `embed`: a size is needed for `model`; sizes has "
             "vocab=3 modell=2 (did you mean `modell`?)\n  spec:    vocab/a model\n                   ^^^^^"),
            (Model, {"vocab": 3, "model": 2}, SpecError, "Model: `blocks.*.w`: a size is needed for `layers`"),
            (Listed, {}, TreeError, "Listed.blocks is a list, give the size of `layers`: sizes has none"),
            (Static, {}, TreeError, "Static.heads is static: give its value in sizes, or as static(default=)"),
        ):  # fmt: skip
            with pytest.raises(error, match=re.escape(told)):
                sl.init(model, sizes=sizes, key=key)
            with pytest.raises(error, match=re.escape(told)):
                sl.abstract(model, sizes)


def test_from_local_is_for_real_ranks():
    with mesh(a=2), pytest.raises(MeshError, match=r"this process is every rank; pass the global batch to sl.shard"):
        sl.from_local(torch.ones(2), "m/a")


# ---- real ranks


def _on_ranks(axes: dict[str, int]) -> Any:
    def body():
        with sl.make_mesh(axes) as m:
            whole = {
                "w": torch.arange(35.0).reshape(5, 7),
                "b": torch.arange(3),
                "e": torch.empty(0, 3),
                "s": torch.tensor(2),
            }
            specs = {"w": "m/a n/b", "b": "m/b/a", "e": "m n/a", "s": ""}
            arrays = sl.shard(whole, specs)
            mine = sl.local(arrays)
            back = sl.gather(arrays)
            moved = sl.gather(sl.reshard(arrays, specs | {"w": "m n/b/a", "b": "m/a", "e": "m/a n/b"}))
            model = sl.gather(sl.init(Model, sizes=SIZES, key=sl.random.key(3)))
            rows = sl.from_local(torch.full((2, 3), float(m.rank)), "rows/a/b m")
            with pytest.raises(MeshError, match="does not hold the shard of rank 99 in this process"):
                sl.local(arrays, rank=99)
            assert all(
                same(x, y) and same(x, z) for x, y, z in zip(*map(tree.leaves, (whole, back, moved)), strict=True)
            )
            assert (dist.get_world_size() == m.total) and len(arrays["w"].shards) == 1
            return mine, sl.gather(rows), model

    return on_ranks(torch.Size(axes.values()).numel(), body)


@pytest.mark.parametrize("axes", [{"a": 2, "b": 1}, {"a": 2, "b": 2}], ids=str)
def test_on_real_ranks(axes):
    found = _on_ranks(axes)
    ref = _gathered(Model, SIZES, a=1)
    w = torch.arange(35.0).reshape(5, 7)
    n = len(found)
    assert torch.equal(torch.cat([m["w"].flatten() for m, _, _ in found]).sort()[0], w.flatten())
    for mine, rows, model in found:
        assert mine["s"] == 2
        assert rows[:, 0].tolist() == [r for r in range(n) for _ in range(2)]
        assert all(same(x, y) for x, y in zip(tree.leaves(model), tree.leaves(ref), strict=True))
    with mesh(**axes):
        simulated = sl.shard(w, "m/a n/b")
        assert all(same(simulated.local(r), found[r][0]["w"]) for r in range(n))


def test_default_init_has_variance_one_over_fan_in() -> None:
    @sl.pytree
    class Weights:
        two: Tensor = sl.spec("model hidden")
        more: Tensor = sl.spec("3 model heads head")
        said: Tensor = sl.spec("heads head model", matrix="heads head -> model")

    w = sl.init(Weights, sizes=dict(model=64, hidden=96, heads=8, head=16), key=sl.random.key(0), mesh=mesh(a=2))
    for leaf, fan_in in ((w.two, 64), (w.more, 64), (w.said, 128)):
        assert abs(leaf.shards[0].std().item() * fan_in**0.5 - 1) < 0.05
    assert sl.specs(Weights).said.matrix == (("heads", "head"), ("model",)) and sl.spec("3 m n", matrix="m -> n")
    for bad in ("heads heads -> model", "heads -> model mode", "-> model"):
        with pytest.raises(sl.SpecError, match="must name dimensions of the leaf on both sides, each once"):
            sl.spec("heads head model", matrix=bad)


def test_init_of_trees_and_tuples_of_classes() -> None:
    @sl.pytree
    class A:
        w: Tensor = sl.spec("m/a n")

    @sl.pytree
    class B:
        v: Tensor = sl.spec("n")

    @sl.pytree
    class Both:
        ends: tuple[A, B]
        more: list[A] = sl.stack("layers")

    sizes, key = dict(m=4, n=3, layers=2), sl.random.key(0)
    made = sl.init(Both, sizes=sizes, key=key, mesh=mesh(a=2))
    assert tree.paths(made) == ["ends.0.w", "ends.1.v", "more.0.w", "more.1.w"]
    listed = sl.init({"x": [A, B], "y": B}, sizes=sizes, key=key, mesh=mesh(a=2))
    assert [str(x.spec) for x in tree.leaves(listed)] == ["m/a n", "n", "n"]
    assert tree.map_(str, sl.specs(Both)).ends[0].w == "m/a n"


@pytest.mark.parametrize(
    "model, options, said",
    [
        ([1], {}, r"init makes a @pytree class, a tree of them, .*found \[1\]"),
        (torch.nn.Linear(2, 2), {}, "init makes a @pytree class"),
        (lambda key: torch.ones(2), {"key": 0}, "init: a key is what sl.random.key"),
        (lambda key: torch.ones(2), {"dtype": "bfloat16"}, "init: dtype is one of torch's"),
    ],
)
def test_init_refuses(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(sl.SpecError, match=said):
        sl.init(model, "...", **{"key": sl.random.key(0), **options}, mesh=mesh(a=2))
