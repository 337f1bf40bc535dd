"""tree.py: `@pytree` classes, their spec trees, paths, globs, broadcasting, and every error with its path."""

import copy
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

import shardlib as sl
from shardlib import tree
from shardlib.errors import SpecError, TreeError


@sl.pytree
class Norm:
    scale: Tensor = sl.spec("model")
    eps: float = sl.static(default=1e-6)


@sl.pytree
class Block:
    norm: Norm
    w: Tensor = sl.spec("model hidden/tp", dtype=torch.float64, init=0.5)


@sl.pytree
class Model:
    embed: Tensor = sl.spec("vocab/tp model")
    stacked: Block = sl.stack("layers/pp")
    listed: list[Block] = sl.stack("layers")
    pair: tuple[Norm, ...] = sl.stack("two")
    n: int = sl.static()


N: Any = Norm  # leaves of any kind
B: Any = Block
M: Any = Model


class Point(NamedTuple):
    x: Any
    y: Any


def _block(x):
    return B(norm=N(scale=x), w=x + 1)


def _model(x: Any = 0, n=7):
    """A tree with the structure of Model and any leaves."""
    return M(x, _block(x), [_block(x), _block(x)], (N(x), N(x), N(x)), n)


PATHS = (
    "embed stacked.*.norm.scale stacked.*.w listed.0.norm.scale listed.0.w listed.1.norm.scale listed.1.w "
    "pair.0.scale pair.1.scale pair.2.scale"
).split()


def test_flatten_knows_children_statics_and_stacks():
    flat, treedef = tree.flatten(_model(3))
    assert flat == [3, 3, 4, 3, 4, 3, 4, 3, 3, 3] == tree.leaves(_model(3))
    assert tree.paths(_model()) == PATHS
    back = tree.unflatten(treedef, PATHS)
    assert back.n == 7 and back.listed[1].w == "listed.1.w" and back.pair[2].scale == "pair.2.scale"
    assert back.stacked.norm.eps == 1e-6
    assert tree.flatten(_model(1))[1] == treedef != tree.flatten(_model(1, n=8))[1]


def test_specs_of_a_class():
    found = tree.specs(Model)
    assert [str(s) for s in tree.leaves(found)] == [
        "vocab/tp model", "layers/pp model", "layers/pp model hidden/tp", "model", "model hidden/tp", "model"
    ]  # fmt: skip
    assert [s.stacked for s in tree.leaves(found)] == [0, 1, 1, 0, 0, 0]
    assert tree.paths(found)[3:] == ["listed.*.norm.scale", "listed.*.w", "pair.*.scale"]
    field = tree.fields(Model).stacked.w
    assert (field.dtype, field.init, field.levels) == (torch.float64, 0.5, (1,))


def test_specs_of_trees():
    given = {"a": "x/tp", "b": Norm, "c": [tree.parse("y")], "d": None}
    found = sl.specs(given)
    assert str(found["a"]) == "x/tp" and str(found["b"].scale) == "model" and str(found["c"][0]) == "y"
    with pytest.raises(
        TreeError, match=r"a leaf of type int carries no spec: sl.shard it first, or give the spec string"
    ):
        sl.specs({"a": 3})


def test_subclasses():
    @sl.pytree
    class Wide(Block):
        bias: Tensor = sl.spec("wide")

    class Plain(Wide):
        pass

    assert tree.paths(sl.specs(Wide)) == ["norm.scale", "w", "bias"]
    with pytest.raises(TreeError, match=r"Plain is not a @pytree class \(a subclass of one needs the decorator, too\)"):
        sl.specs(Plain)


def test_stack_of_spec_trees():
    stacked = sl.stack({"a": "x/tp", "b": Norm}, "v layers/pp")
    assert str(stacked["a"]) == "v layers/pp x/tp" and str(stacked["b"].scale) == "v layers/pp model"
    assert stacked["a"].stacked == 2
    for wrong in ("", "layers +pp", "...", "layers @host"):
        with pytest.raises(SpecError, match="stack takes the dimensions that lead"):
            sl.stack(wrong)


def test_classes_are_frozen_and_compare_by_identity():
    x = N(torch.ones(2))
    with pytest.raises(AttributeError):
        x.scale = None  # type: ignore[misc]
    assert x != N(x.scale) and x == x and copy.deepcopy(x).scale is not x.scale


def test_annotations_that_say_nothing_are_refused():
    @sl.pytree
    class Bare:
        w: Tensor

    @sl.pytree
    class Unstacked:
        blocks: list[Norm]

    @sl.pytree
    class Tensors:
        ws: list[Tensor] = sl.stack("layers")

    for cls in (Bare, Unstacked, Tensors):
        with pytest.raises(
            TreeError, match=rf"{cls.__name__}\.\w+ needs sl.spec\(...\), sl.static\(\), or as its annotation a @pytree"
        ):
            sl.specs(cls)

    @sl.pytree
    class Split:
        blocks: list[Norm] = sl.stack("layers/pp")

    with pytest.raises(SpecError, match=r"Split.blocks is a list: it has one length, and no axis splits it"):
        sl.specs(Split)

    @sl.pytree
    class Twice:
        block: Block = sl.stack("layers/tp")

    with pytest.raises(SpecError, match="a leaf `model hidden/tp` cannot be stacked along `layers/tp`: it names `tp`"):
        sl.specs(Twice)

    @sl.pytree
    class Late:
        block: "Unknown"  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(TreeError, match="Late: name 'Unknown' is not defined"):
        sl.specs(Late)
    with pytest.raises(SpecError, match="init is a number, 'zeros', 'ones' or a function, not 'zeroes'"):
        sl.spec("a", init="zeroes")


def test_statics_must_be_hashable():
    with pytest.raises(TreeError, match=r"Norm.eps is static, hence hashable; found a list"):
        tree.flatten(N(torch.ones(1), [1]))


def test_classes_of_one_name_do_not_clash():
    def make():
        @sl.pytree
        class Same:
            x: Any

        return Same

    first, second = make(), make()
    assert tree.leaves([first(1), second(2)]) == [1, 2]
    assert tree.flatten(first(1))[1] != tree.flatten(second(1))[1]


def test_torch_and_optree_know_the_classes():
    m = _model(torch.ones(2))
    for flatten in (torch_pytree.tree_flatten, lambda t: optree.tree_flatten(t, namespace=tree.NAMESPACE)):
        assert len(flatten(m)[0]) == 10
    found = torch_pytree.tree_flatten_with_path(m)[0]
    assert torch_pytree.keystr(found[4][0]) == ".listed[0].w"
    doubled = torch_pytree.tree_map(lambda x: 2 * x, m)
    assert doubled.n == 7 and doubled.listed[0].w.tolist() == [4, 4]

    def loss(m):
        return sum((x**2).sum() for x in tree.leaves(m))

    gradient = torch.func.grad(loss)(m)
    assert gradient.stacked.w.tolist() == [4, 4] and gradient.n == 7
    assert torch.func.vmap(lambda m: m.embed + 1)(m).tolist() == [2, 2]


def test_containers():
    t = {"b": [1, None, (2,)], "a": Point(3, {}), 5: OrderedDict(z=4)}
    assert tree.paths({"b": t["b"], "a": t["a"]}) == ["a.x", "b.0", "b.2.0"]
    assert tree.paths({5: t[5]}) == ["5.z"]
    assert tree.paths(1) == [""] and tree.leaves(None) == tree.paths([]) == []
    assert tree.map_(lambda x: x + 1, t)["b"] == [2, None, (3,)]
    assert tree.map_(lambda x, y: (x, y), {"a": 1, "b": 2}, {"b": 3, "a": 4}) == {"a": (1, 4), "b": (2, 3)}


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}, "at the root: a dict of 2 for a dict of 2; missing `b`, unexpected `c`"),
        ({"a": [1, 2]}, {"a": [1]}, "at `a`: a list of 1 for a list of 2; missing `1`"),
        ({"a": [1, 2]}, {"a": (1, 2)}, "at `a`: a tuple of 2 for a list of 2"),
        ({"a": Point(1, [2])}, {"a": Point(1, 2)}, "at `a.y`: a list of 1 for a leaf (int)"),
        ([1, None], [1, 2], "at `1`: None for a leaf (int)"),
        ([1, 2], [1, None], "at `1`: None for a leaf (int)"),
        (_model(), _model(n=8), "at the root: static fields (8,) for (7,)"),
        (N(1), Point(1, 2), "at the root: a Point of 2 for a Norm"),
    ],
)
def test_trees_that_do_not_match(first, second, told):
    with pytest.raises(TreeError) as e:
        tree.map_(lambda x, y: x, first, second)
    assert str(e.value) == f"the second tree does not match the first: {told}"


def test_broadcast():
    assert tree.broadcast("s", _model()) == ["s"] * 10
    assert tree.broadcast("s", []) == []
    found = tree.broadcast({"m": Model, "x": "b/dp ..."}, {"m": _model(), "x": {"t": 1, "u": [2, 3]}})
    assert [str(s) for s in found[3:7]] == ["model", "model hidden/tp", "model", "model hidden/tp"]
    assert found[10:] == ["b/dp ..."] * 3
    assert tree.broadcast([None, "s"], [None, 1]) == ["s"]
    assert tree.broadcast(Point(Norm, "p"), Point(N(1, eps=2), [3])) == [*tree.leaves(tree.specs(Norm)), "p"]
    for kind in (OrderedDict, lambda **kw: defaultdict(list, kw)):
        assert [str(s) for s in tree.broadcast(kind(a=Norm, b="x"), kind(a=N(1), b=2))] == ["model", "x"]
    assert tree.broadcast((Norm, "y"), (N(1), [2, 3]))[1:] == ["y", "y"]
    specs = M("e", B("n", "w"), "l", "p", 0)  # n is static: that of the tree stands
    assert tree.broadcast(specs, _model()) == ["e", "n", "w", *"llll", *"ppp"]


@pytest.mark.parametrize(
    ("specs", "given", "told"),
    [
        (("a", "b"), (1,), "at the root: a tuple of 2 for a tuple of 1; unexpected `1`"),
        ({"w": {"x": "a"}}, {"w": 1}, "at `w`: a dict of 1 for a leaf (int)"),
        ({"w": None}, {"w": 1}, "at `w`: None for a leaf (int)"),
        (
            {"w": "a", "q": "b"},
            {"w": 1, "v": 2},
            "at the root: a dict of 2 for a dict of 2; missing `v`, unexpected `q`",
        ),
        (Model, {"embed": 1}, "at the root: a Model for a dict of 1"),
        ({"m": Model}, {"m": M(1, _block(1), _block(1), (), 7)}, "at `m.listed.*`: a list for a Block"),
        ([Norm], [B(N(1), 1)], "at `0`: a Norm for a Block"),
    ],
)
def test_specs_that_do_not_match(specs, given, told):
    with pytest.raises(TreeError) as e:
        tree.broadcast(specs, given, "f: specs")
    assert str(e.value) == f"f: specs does not match the tree: {told}"


WHERE = ["embed", "blocks.0.w_in", "blocks.0.norm.scale", "blocks.1.w_in", "stack.*.w_in", "step"]


@pytest.mark.parametrize(
    ("glob", "chosen"),
    [
        ("embed", [0]),
        ("blocks.*.w_in", [1, 3]),
        ("blocks.1.*", [3]),
        ("blocks.**", [1, 2, 3]),
        ("**", range(6)),
        ("**.w_*", [1, 3, 4]),
        ("**.scale", [2]),
        ("*", [0, 5]),
        ("stack.*.w_in", [4]),
        ("blocks.?.w_in", [1, 3]),
        ("**.norm.**", [2]),
        (["embed", "step"], [0, 5]),
        ([], []),
        (lambda path, value: value > 3, [4, 5]),
    ],
)
def test_globs(glob, chosen):
    assert tree.choose(glob, WHERE, list(range(6))) == [i in chosen for i in range(6)]


def test_a_glob_that_matches_nothing_says_what_there_is():
    with pytest.raises(
        TreeError, match=r"`blocks.0.w_im` matches no path \(did you mean `blocks.0.w_in`\?\); there are `e"
    ):
        tree.choose(["embed", "blocks.0.w_im"], WHERE)
    with pytest.raises(TreeError, match="matches no path; there are `a`"):
        tree.choose("a.**", ["a"])  # ** after a dot stands for one name at least
    assert tree.choose("**", [""]) == tree.choose("*", [""]) == [True]
    with pytest.raises(TreeError):
        tree.choose("emb.d", ["embed"])
