"""sharding.py: `reshard` between every pair of specs, and what `plan` sends for it."""

import random
from itertools import chain, combinations, permutations, product

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import tree
from shardlib.errors import SpecError
from shardlib.sharding import Move, leaf_of, plan, settle
from shardlib.spec import parse
from shardlib.types import padding_allowed

A, B = {"a": 2, "b": 2}, {"a": 2, "b": 3}


def mesh(**axes):
    return sl.make_mesh(**axes, simulate=True)


def every_spec(ndim, axes=("a", "b")):
    """All ways to split `ndim` dimensions over some of `axes`."""
    found = {}
    for order in chain.from_iterable(permutations(axes, k) for k in range(len(axes) + 1)):
        for where in product(range(ndim), repeat=len(order)):
            dims = [
                "/".join(["xyz"[i], *(a for a, w in zip(order, where, strict=True) if w == i)]) for i in range(ndim)
            ]
            found[" ".join(dims)] = None
    return list(found)


def whole(shape, start=1.0):
    return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)


# ---- values


@pytest.mark.parametrize(
    ("axes", "shape"),
    [*product([A], [(12,), (1,), (5, 7)]), *product([B], [(5,), (0,), (12, 6), (1, 3)])],
    ids=str,
)
def test_reshard_from_every_spec_to_every_spec(axes, shape):
    specs = every_spec(len(shape))
    x = whole(shape)
    with mesh(**axes):
        pairs = list(product(specs, specs))
        found = sl.reshard(sl.shard([x] * len(pairs), [src for src, _ in pairs]), [dst for _, dst in pairs])
        want = {dst: sl.shard(x, dst) for dst in specs}
    for (src, dst), y in zip(pairs, found, strict=True):
        assert str(y.spec) == dst and y.shape == x.shape
        for rank, (got, shard) in enumerate(zip(y.shards, want[dst].shards, strict=True)):
            assert torch.equal(got, shard), f"{src} -> {dst}, rank {rank}: {got} for {shard}"  # the padding too


def test_reshard_over_three_axes():
    draw = random.Random(0)
    specs = every_spec(3, ("a", "b", "c"))
    for axes in ({"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 1, "c": 2}):
        cases = [
            (draw.choice(specs), draw.choice(specs), [draw.choice((0, 1, 4, 5, 6, 12)) for _ in "xyz"])
            for _ in range(20)
        ]
        with mesh(**axes):
            found = sl.reshard(sl.shard([whole(s) for *_, s in cases], [c[0] for c in cases]), [c[1] for c in cases])
            for (src, dst, shape), y in zip(cases, found, strict=True):
                for rank, (got, shard) in enumerate(zip(y.shards, sl.shard(whole(shape), dst).shards, strict=True)):
                    assert torch.equal(got, shard), f"{src} -> {dst}, {shape}, rank {rank}: {got} for {shard}"


def term(x, spec):
    """A leaf of `spec`, whose terms are x times the sum of 1 + the index along each axis that is pending."""
    leaf, pending = leaf_of(x, "term"), parse(spec).pending
    with padding_allowed():
        y = sl.pending(x * sum(1 + sl.axis_index(a) for a in pending), pending)
    return settle(y, leaf._replace(spec=leaf.spec.with_pending(pending)))


def pending_pairs(ndim):
    """Sources with sums to make, and what they can become: all that keep some of the sums or none."""
    for src in every_spec(ndim):
        free = [a for a in "ab" if a not in src]
        for sums in (s for k in (1, 2) for s in combinations(free, k)):
            for dst in every_spec(ndim):
                left = [a for a in sums if a not in dst]
                for keep in (s for k in range(len(left) + 1) for s in combinations(left, k)):
                    yield *(" ".join([s, *(f"+{a}" for a in p)]) for s, p in ((src, sums), (dst, keep))), keep


@pytest.mark.parametrize(("axes", "shape"), [*product([A], [(6,), (3, 5)]), *product([B], [(5,), (4, 6)])], ids=str)
def test_pending_sums_are_made_or_scattered(axes, shape):
    pairs = list(pending_pairs(len(shape)))
    x = whole(shape)

    def terms(xs):
        return [term(x, src) for x, (src, _, _) in zip(xs, pairs, strict=True)]

    def total(sums, keep, rank_at):
        """Of the terms, those of all ranks along `sums`, of this rank along `keep`."""
        ranges = [[rank_at[a]] if a in keep else range(axes[a]) for a in sums]
        return sum(sum(1 + i for i in at) for at in product(*ranges))

    with mesh(**axes) as m:
        at_rest = sl.shard([x] * len(pairs), [src.partition(" +")[0] for src, _, _ in pairs])
        made = sl.shard_map(terms, in_specs=None, out_specs=None)(at_rest)
        assert [str(y.spec) for y in made] == [src for src, _, _ in pairs]
        found = sl.reshard(made, [dst for _, dst, _ in pairs])
        want = {dst: sl.shard(x, dst.partition(" +")[0]) for _, dst, _ in pairs}
        for (src, dst, keep), y in zip(pairs, found, strict=True):
            assert str(y.spec) == dst
            for rank, (got, shard) in enumerate(zip(y.shards, want[dst].shards, strict=True)):
                factor = total(parse(src).pending, keep, m.coordinates(rank))
                assert torch.equal(got, shard * factor), f"{src} -> {dst}, rank {rank}: {got} for {shard * factor}"


SAMPLE = (
    ("x/a y", "x y/a"), ("x/a/b y", "x/b/a y"), ("x/b y/a", "x/a y/b"), ("x y/b/a", "x/a y/b"), ("x y", "x/b y/a"),
    ("x/a y/b", "x y"), ("x/a/b y", "x y/a/b"), ("x y/a", "x/b y/a"),
)  # fmt: skip


@pytest.mark.parametrize("axes", [{"a": 2, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}], ids=str)
def test_on_real_ranks(axes):
    shapes = ((4, 6), (5, 7), (1, 3), (0, 2))
    srcs, dsts = ([s[i] for s in SAMPLE for _ in shapes] for i in (0, 1))
    xs = [whole(shape) for _ in SAMPLE for shape in shapes]

    def body():
        with sl.make_mesh(axes) as m:
            moved = sl.local(sl.reshard(sl.shard(xs, srcs), dsts))
            sums = sl.shard_map(lambda x: term(x, "x/b y +a"), in_specs=None, out_specs=None)
            pending = sums(sl.shard(whole((5, 7)), "x/b y"))
            scattered = sl.local(sl.reshard([pending] * 3, ["x/b y", "x/b y/a", "x/b/a y"]))
            return m.rank, moved, scattered

    n = axes["a"]
    with mesh(**axes):
        want = sl.shard(xs, dsts)
        summed = sl.shard([whole((5, 7)) * (n * (n + 1) // 2)] * 3, ["x/b y", "x/b y/a", "x/b/a y"])
    for rank, moved, scattered in on_ranks(torch.Size(axes.values()).numel(), body):
        for src, dst, got, w in zip(srcs, dsts, moved, want, strict=True):
            assert torch.equal(got, w.local(rank)), f"{src} -> {dst} on rank {rank}"
        assert all(torch.equal(got, w.local(rank)) for got, w in zip(scattered, summed, strict=True))


# ---- plans


def moves(src, dst, shape, **axes):
    return " ".join(
        f"{m.op} {''.join(m.axes)}{'' if m.dim < 0 else m.dim}{'' if m.to < 0 else m.to}"
        for m in plan(parse(src), parse(dst), shape, mesh(**axes))
    )


@pytest.mark.parametrize(
    ("src", "dst", "sent"),
    [
        ("x y", "x y", ""),
        ("x/a y", "x y", "gather a0"),
        ("x/a 1", "1 1", "gather a0"),
        ("x/a/b y", "x y", "gather ab0"),
        ("x/a/b y", "x/a y", "gather b0"),
        ("x/a y/b", "x y", "gather a0 gather b1"),
        ("x y", "x/a y", "slice a0"),
        ("x y", "x/a/b y", "slice ab0"),
        ("x y", "x/b/a y", "slice b0 slice a0"),  # a group counts its ranks in mesh order
        ("x/a y", "x y/a", "exchange a01"),
        ("x/a/b y", "x y/a/b", "exchange ab01"),
        ("x/a/b y", "x/a y/b", "exchange b01"),
        ("x/b/a y", "x y/b/a", "gather a0 exchange b01 slice a1"),
        ("x/a y", "x/b y", "gather a0 slice b0"),
        ("x/a/b y", "x/b/a y", "gather ab0 slice b0 slice a0"),
        ("x/a y/b", "x/b y/a", "gather a0 exchange b10 slice a1"),  # never both dimensions whole
        ("x/a y/b", "x/b y", "gather a0 exchange b10"),
        ("x/b y", "x y/b/a", "exchange b01 slice a1"),
        ("x y +a", "x y", "sum a"),
        ("x y +a +b", "x y", "sum ab"),
        ("x y +b +a", "x y +a", "sum b"),
        ("x y +a", "x/a y", "scatter a0"),
        ("x y +a +b", "x/a/b y", "scatter ab0"),
        ("x y +a +b", "x/b/a y", "scatter b0 scatter a0"),
        ("x y +a +b", "x/b y", "scatter b0 sum a"),  # as the design promises: the sum is made on the smaller value
        ("x y +a +b", "x/b y +a", "scatter b0"),
        ("x y +a", "x/b y", "slice b0 sum a"),
        ("x/b y +a", "x y/a", "scatter a1 gather b0"),
        ("x/b y +a", "x y", "sum a gather b0"),
        ("x/a y +b", "x y/a", "scatter b0 exchange ab01 gather b1"),  # exchanged when it is smallest
    ],
)
def test_plans(src, dst, sent):
    assert moves(src, dst, (8, 24), a=2, b=4) == sent


def test_plans_of_lengths_that_do_not_divide_go_axis_by_axis():
    assert moves("x/a/b y", "x y", (5, 7), a=2, b=2) == "gather b0 gather a0"
    assert moves("x/a/b y", "x y", (6, 7), a=2, b=3) == "gather ab0"
    assert moves("x y", "x/a/b y", (5, 7), a=2, b=2) == "slice a0 slice b0"
    assert moves("x y +a +b", "x/a/b y", (5, 7), a=2, b=2) == "scatter a0 scatter b0"
    assert moves("x/a y", "x y/a", (5, 7), a=2, b=2) == "exchange a01"


def test_a_plan_for_thousands_of_ranks_is_quick():
    axes = {"pp": 8, "replica": 4, "fsdp": 64, "tp": 8}
    src = "layers/pp model/replica/fsdp hidden/tp"
    assert moves(src, "layers/pp model hidden/tp", (64, 8192, 32768), **axes) == "gather replicafsdp1"
    assert moves(src, "layers model/tp hidden/fsdp/replica", (64, 8192, 32768), **axes)


def test_what_a_plan_cannot_do():
    m = mesh(a=2, b=2)
    for src, dst, told in (
        (
            "x y",
            "x y +a",
            "`x y` -> `x y +a`: no sum over `a` is pending on the left\n  spec:    x y +a\n               ^^",
        ),
        ("x y", "x", "`x y` -> `x`: 2 dimensions cannot become 1\n  spec:    x\n           ^"),
    ):
        with pytest.raises(SpecError) as e:
            plan(parse(src), parse(dst), (4, 4), m)
        assert told in str(e.value)


def test_moves_are_data():
    assert plan(parse("x/a y"), parse("x y/a"), (4, 4), mesh(a=2)) == [Move("exchange", ("a",), 0, 1)]


# ---- inside a per-device function


def run(f, *args, specs):
    return sl.shard_map(f, in_specs=specs, out_specs=None)(*args)


def test_gather_inside_gives_replicated_and_reshard_invariant_values():
    def f(w):
        whole_ = sl.gather(w, "dp")
        said = [sl.typeof(whole_["w"]), sl.typeof(whole_["b"]), sl.typeof(sl.reshard(w, "m ...")["w"])]
        assert whole_["b"] is w["b"]  # not split over dp
        assert sl.typeof(sl.gather(w["w"])) == "f32[4, 6] replicated over dp, tp (`m n`)"
        return said

    with mesh(dp=2, tp=2):
        w = sl.shard({"w": whole((4, 6)), "b": whole((4,))}, {"w": "m/dp n/tp", "b": "m/tp"})
        assert run(f, w, specs=None) == [
            "f32[4, 3] varying over tp, replicated over dp (`m n/tp`)",
            "f32[2] varying over tp (`m/tp`)",
            "f32[4, 6] invariant (`m n`)",
        ]


def test_what_comes_in_keeps_its_spec():
    def f(x):
        y = sl.reshard(x, "q r/b @host")
        return sl.typeof(x), sl.typeof(y)

    with mesh(a=2, b=2):
        said = run(f, sl.shard(whole((4, 4)), "m n/b"), specs=None)
    assert said == ("f32[4, 2] varying over b (`m n/b`)", "f32[4, 2] varying over b (`m n/b @host`)")


@pytest.mark.parametrize("shape", [(4, 6), (5, 7)], ids=str)
def test_gradients_are_cut_like_the_leaf(shape):
    """d/dw of sum(c_r * gather(w)) over ranks r: the sum of the c_r, each rank its slice."""

    def f(w, c):
        def loss(w):
            return sl.psum(
                sl.pending(
                    (sl.gather(w, ("a", "b")) * (c + sl.axis_index("a") * 3 + sl.axis_index("b"))).sum(), ("a", "b")
                ),
                ("a", "b"),
            )

        return sl.grad(loss)(w)

    with mesh(a=2, b=2):
        c = whole(shape)
        for spec in ("x/a y/b", "x/b/a y", "x y/a/b"):
            found = sl.gather(run(f, sl.shard(torch.ones(shape), spec), c, specs=None))
            assert torch.equal(found, 4 * c + 2 * 3 + 2), spec


def test_gradients_go_back_the_same_way():
    specs = [s for s in every_spec(2) if "a" in s and "b" in s][::2]

    def f(ws, cs):
        def loss(ws):
            moved = [sl.reshard(w, dst) for w in ws for dst in specs]
            terms = sum((w * c).sum() for w, c in zip(moved, cs * len(ws), strict=True))
            return sl.psum(sl.pending(terms, ("a", "b")), ("a", "b"))

        return sl.grad(loss)(ws)

    c = whole((12, 6))
    with mesh(**B):
        found = run(f, sl.shard([torch.ones(12, 6)] * len(specs), specs), sl.shard([c] * len(specs), specs), specs=None)
        assert [str(g.spec) for g in found] == specs
        for g in sl.gather(found):
            assert torch.equal(g, c * len(specs))


def test_values_that_are_no_leaves_are_refused():
    def computed(x):
        return sl.gather({"h": x * 2}, "a")

    def stated(x):
        return sl.reshard({"h": sl.pending(x, "b")}, "m n")

    with mesh(a=2, b=2):
        x = sl.shard(whole((4, 4)), "m n")
        with pytest.raises(
            SpecError, match=r"`h`: f32\[4, 4\] equal on all ranks is a computed value.*\n.*nothing to gather"
        ):
            run(computed, x, specs=None)
        with pytest.raises(SpecError, match=r"reshard: `h`: f32\[4, 2\] pending over b is a computed"):  # nor `m n/b`
            run(stated, sl.shard(whole((4, 4)), "m n/b"), specs=None)
        with pytest.raises(SpecError, match="gather: `h`: a tensor is needed, found float"):
            run(lambda x: sl.gather({"h": 1.0}, "a"), x, specs=None)


def test_an_uneven_leaf_is_stored_not_computed_with():
    with mesh(a=2):
        w = sl.shard({"w": whole((5, 3))}, "m/a n")
        with pytest.raises(
            SpecError,
            match=r"padded to f32\[3, 3\] \(`m/a n` of shape \(5, 3\)\): `m` is 5, which does not divide over a=2",
        ):
            run(lambda w: w["w"] * 2, w, specs=None)
        doubled = run(lambda w: sl.gather(w)["w"].mul(2), w, specs=None)
        assert isinstance(doubled, Tensor) and torch.equal(sl.gather(doubled), whole((5, 3)) * 2)
        assert torch.equal(sl.gather(run(lambda w: w, w, specs=None))["w"], whole((5, 3)))
        assert tree.paths(w) == ["w"]
