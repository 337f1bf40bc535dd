"""Passes: each on small graphs, what it changes and that values stay; all of them together on a train step."""

import gc
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import shardlib as sl
from shardlib import passes, tree
from shardlib.graph.buckets import UNPACK
from shardlib.graph.forms import ARRANGE
from shardlib.graph.gloo import for_gloo
from shardlib.graph.nodes import STARTS, WAIT, aliased, op_name
from shardlib.graph.program import copied, graphs
from shardlib.simulate import run_lockstep
from tests.ranks import on_ranks

MESH = dict(dp=4, tp=2)


@sl.pytree
class Layer:
    w_in: Tensor = sl.spec("model/dp hidden/tp")
    bias: Tensor = sl.spec("hidden/tp")
    w_out: Tensor = sl.spec("hidden/tp model/dp")


@sl.pytree
class Net:
    layers: list[Layer] = sl.stack("layers")
    head: Tensor = sl.spec("model/dp classes")


def block(w: Layer, x: Tensor) -> Tensor:
    w = sl.gather(w, "dp")
    h = sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", x, w.w_in) + w.bias
    y = sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", torch.tanh(h), w.w_out)
    return x + sl.psum("batch/dp model +tp -> batch/dp model", y)


def loss(w: Net, batch: Tensor) -> sl.Mean:
    x = batch
    for layer in w.layers:
        x = block(layer, x)
    return sl.Mean.of("batch/dp classes", torch.tanh(x @ sl.gather(w.head, "dp")) ** 2)


def rematted(w: Net, batch: Tensor) -> sl.Mean:
    x = batch
    for layer in w.layers:
        x = sl.remat(block)(layer, x)
    return sl.Mean.of("batch/dp classes", torch.tanh(x @ sl.gather(w.head, "dp")) ** 2)


def lowered(f: Callable[..., Any], *args: Any, use: Sequence[passes.Pass] = ()) -> GraphModule:
    return sl.jit(f, passes=use).lower(*args).module


def ops(module: GraphModule) -> list[str]:
    """The collectives of a graph in the order in which they are issued."""
    return [STARTS[n.target] for n in module.graph.nodes if n.target in STARTS]


def train(stage: int = 3, f: Callable[..., Any] = loss, **options: Any) -> Any:
    return sl.step(f, sl.optim.sgd(0.1), layout=sl.zero(sl.specs(Net), stage=stage), **options)


def state_and_batch(step: Any, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    params = sl.init(Net, sizes=dict(layers=2, model=8, hidden=6, classes=4), key=sl.random.key(1))
    params = tree.map_(lambda x: sl.shard(sl.gather(x).to(dtype), str(x.spec)), params)
    return step.init(params), sl.shard(torch.arange(16 * 8, dtype=dtype).view(16, 8) / 100, "batch/dp model")


def values(run: Any, state: Any, batch: Any) -> list[Tensor]:
    state, metrics = run(state, batch)
    return [*tree.leaves(sl.gather(state.params)), metrics["loss"], metrics["grad_norm"]]


def assert_same(
    step: Any, use: Sequence[passes.Pass], bitwise: bool = True, dtype: torch.dtype = torch.float64
) -> None:
    state, batch = state_and_batch(step, dtype)
    plain, got = values(sl.jit(step, passes=[]), state, batch), values(sl.jit(step, passes=use), state, batch)
    for a, b in zip(plain, got, strict=True):
        assert torch.equal(a, b) if bitwise else (a - b).abs().max() <= 5e-6 * a.abs().max()


def test_dedupe_makes_a_gather_once_but_not_what_remat_makes_again():
    def twice(w: Tensor, x: Tensor) -> Tensor:
        return x @ sl.all_gather("model/dp out -> model out", w) @ sl.all_gather("model/dp out -> model out", w)

    with sl.make_mesh(MESH, simulate=True):
        w, x = sl.shard(torch.randn(8, 8), "model/dp out"), sl.shard(torch.randn(4, 8), "batch/dp model")
        f = sl.shard_map(twice, in_specs=("model/dp out", "batch/dp model"), out_specs="batch/dp model")
        assert ops(lowered(f, w, x)) == ["all_gather"] * 2
        assert ops(lowered(f, w, x, use=[passes.dedupe])) == ["all_gather"]
        assert torch.equal(sl.gather(sl.jit(f, passes=[passes.dedupe])(w, x)), sl.gather(f(w, x)))

        step = train(f=rematted)
        plain, once = (ops(lowered(step, *state_and_batch(step), use=use)) for use in ([], [passes.dedupe]))
        assert plain.count("all_gather") == once.count("all_gather") == 2 * 2 * 2 + 1
        assert_same(step, [passes.dedupe])


def test_regather_gathers_again_in_the_backward_pass():
    with sl.make_mesh(MESH, simulate=True):
        step = train()
        plain, again = (ops(lowered(step, *state_and_batch(step), use=use)) for use in ([], [passes.regather]))
        assert plain.count("all_gather") == 5  # 2 layers of 2 split leaves and the head
        assert (
            again.count("all_gather") == 5 + 3
        )  # not the first, whose input needs no gradient, and not the last, the head
        assert [o for o in again if o != "all_gather"] == [o for o in plain if o != "all_gather"]
        assert_same(step, [passes.regather])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_regather_keeps_what_the_step_gathers(stage):
    layout = sl.zero(sl.specs(Net), stage=stage, gather="forward" if stage else "update")
    with sl.make_mesh(MESH, simulate=True):
        step = sl.step(loss, sl.optim.sgd(0.1), layout=layout)
        args = state_and_batch(step)
        assert ops(lowered(step, *args)) == ops(lowered(step, *args, use=[passes.regather]))


def bucketed(limit: int) -> passes.Pass:
    return lambda module: passes.bucket(module, limit=limit)


@pytest.mark.parametrize("limit", [1, 100, 10**9])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_c31_bucket(stage, limit):
    """C31: within 5e-6 of the leaf's maximum in float32 whatever the limit; C25: leaves of several sizes."""
    with sl.make_mesh(MESH, simulate=True):
        step = train(stage)
        args = state_and_batch(step, torch.float32)
        plain, merged = ops(lowered(step, *args)), ops(lowered(step, *args, use=[bucketed(limit)]))
        assert len(merged) == len(plain) if limit == 1 else len(merged) < len(plain) or limit == 100
        if limit == 10**9 and stage == 3:
            assert merged.count("all_gather") == 1 and merged.count("psum_scatter") == 1
        assert_same(step, [bucketed(limit)], bitwise=False, dtype=torch.float32)


@pytest.mark.parametrize("limit", [1, 100, 10**9])
def test_c31_integer_valued_gradients_are_bitwise_the_same(limit):
    """C31: a loss whose gradients are sums of small integers, in float32."""

    def counted(w: Net, batch: Tensor) -> sl.Mean:
        leaves = [sl.gather(x, "dp").sum() for x in tree.leaves(w)]
        return sl.Mean(sl.pending(batch.sum() * torch.stack(leaves).sum(), ("dp", "tp")), torch.ones(()))

    with sl.make_mesh(MESH, simulate=True):
        step = train(3, counted)
        state, batch = state_and_batch(step, torch.float32)
        batch = sl.shard(torch.arange(16.0 * 8).view(16, 8), "batch/dp model")
        found = [values(sl.jit(step, passes=use), state, batch) for use in ([], [bucketed(limit)])]
        assert not all(torch.equal(a, b) for a, b in zip(found[0], tree.leaves(sl.gather(state.params)), strict=False))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def c30_sums(simulate: bool) -> list[Any]:
    """Sums over 4 ranks: of 256, 1, 1, 1 in bfloat16, and of float32 values three times under one plan of buckets."""
    with sl.make_mesh(dp=4, simulate=simulate):
        run = sl.shard_map(lambda *xs: sl.psum(xs, "dp"), in_specs="n/dp", out_specs="n")
        (half,) = sl.gather(sl.jit(run)(sl.shard(torch.tensor([256.0, 1, 1, 1]).bfloat16(), "n/dp")))
        singles = [sl.shard(torch.sin(torch.arange(n * 4.0)), "n/dp") for n in (5, 3, 7)]
        plans = [sl.gather(sl.jit(run, passes=[bucketed(limit)])(*singles)) for limit in (10**9, 10**9, 1)]
        return [half.tolist(), *plans]


def test_c30_sums_of_16_bits_and_equal_plans():
    """C30: 260, the sum rounded once, not 256; equal plans give equal bits, others may differ by rounding."""
    for half, one, other, apart in (c30_sums(True), *on_ranks(4, lambda: c30_sums(False))):
        assert half == [260.0]
        for a, b, c in zip(one, other, apart, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(c, a, rtol=0, atol=5e-6 * a.abs().max().item())


def test_bucket_of_integers_is_exact_and_results_share_no_storage():
    """C31: sums of integers have the same bits under every plan."""

    def f(*xs: Tensor) -> Any:
        return sl.psum(xs, "dp")

    specs, shapes = ("n/dp", "n/dp k", "m k/dp"), ((20,), (8, 3), (7, 4))
    with sl.make_mesh(dp=4, simulate=True):
        args = [
            sl.shard(torch.arange(float(torch.Size(s).numel())).view(s), p) for s, p in zip(shapes, specs, strict=True)
        ]
        run = sl.shard_map(f, in_specs=specs, out_specs=("n", "n k", "m k"))
        plain, merged = sl.jit(run, passes=[]), sl.jit(run, passes=[bucketed(1 << 30)])
        out = merged(*args)
        for x, y in zip(sl.gather(plain(*args)), sl.gather(out), strict=True):
            assert torch.equal(x, y)
        assert ops(merged.traces[0].module) == ["psum"]
        assert len({x.shards[0].untyped_storage().data_ptr() for x in out}) == 3


def test_bucket_of_slices_of_one_leaf_that_are_cut_after_the_first_gather():
    def f(a: Tensor, w: Tensor) -> Tensor:
        total = sl.all_gather("m/dp -> m", a).sum()
        for piece in w.unbind(0):
            total = total + sl.all_gather("m/dp -> m", piece).square().sum()
        return total[None]

    run = sl.shard_map(f, in_specs=("m/dp", "layers m/dp"), out_specs="n/dp")
    with sl.make_mesh(dp=2, simulate=True):
        args = sl.shard(torch.arange(4.0), "m/dp"), sl.shard(torch.arange(12.0).view(3, 4), "layers m/dp")
        jitted = sl.jit(run, passes=[passes.bucket])
        assert [c.op for c in jitted.lower(*args).collectives()] == ["all_gather"]
        assert torch.equal(sl.gather(jitted(*args)), sl.gather(run(*args)))


def test_bucket_keeps_forward_backward_and_each_remat_apart():
    with sl.make_mesh(MESH, simulate=True):
        step = train(f=rematted)
        gathers = ops(lowered(step, *state_and_batch(step), use=[bucketed(1 << 30)])).count("all_gather")
        assert gathers == 1 + 2  # the forward's, and one for each layer computed again
        assert_same(step, [bucketed(1 << 30)], bitwise=False)


def first_use(module: GraphModule, start: Any) -> Any:
    """The first node that computes with a collective's result."""
    family, uses = [start], []
    for n in family:
        for u in n.users:
            through = u.target in ARRANGE or u.target in (WAIT, UNPACK, operator.getitem)
            (family if through else uses).append(u)
    return min(uses, key=list(module.graph.nodes).index)


def test_overlap_waits_late_and_gathers_one_ahead():
    with sl.make_mesh(MESH, simulate=True):
        step = train()
        use = [passes.regather, bucketed(1), passes.overlap]
        module = lowered(step, *state_and_batch(step), use=use)
        nodes = list(module.graph.nodes)
        at = {n: i for i, n in enumerate(nodes)}
        starts = [n for n in nodes if STARTS.get(n.target) == "all_gather"]
        uses = [at[first_use(module, s)] for s in starts]
        assert uses == sorted(uses)
        for i, start in enumerate(starts):
            assert at[start] < uses[i]
            if i:
                assert at[start] < uses[i - 1], "issued before the use of the one before"
            if i > 1:
                assert at[start] > uses[i - 2], "not more than one ahead"
        for n in nodes:
            if n.target is WAIT and STARTS.get(n.args[0].target) == "psum_scatter":
                assert "backward" not in min(n.users, key=at.__getitem__).meta, "waited for in the optimizer"
        assert_same(step, use)


@pytest.mark.parametrize("ahead", [0, 1])
def test_overlap_issues_a_gather_before_its_wait(ahead):
    """Also where the use reads a number that is made, after the wait, of another gathered weight."""

    def scaled(w: Net, batch: Tensor) -> sl.Mean:
        head, scale = sl.gather(w.head, "dp"), sl.gather(w.layers[0].w_in, ("dp", "tp")).sum()
        return sl.Mean.of("batch/dp classes", torch.tanh(batch @ (head * scale)) ** 2)

    with sl.make_mesh(dp=4, tp=1, simulate=True):
        assert_same(train(f=scaled), [passes.regather, partial(passes.overlap, ahead=ahead)])


@pytest.mark.parametrize("options", [{}, dict(clip=0.5), dict(accumulate=2)], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_of_them(stage, options):
    with sl.make_mesh(MESH, simulate=True):
        assert_same(train(stage, **options), passes.default, bitwise=False)
        assert_same(train(stage, **options), [passes.dedupe, passes.regather, passes.overlap])


@pytest.mark.parametrize("options", [{}, dict(accumulate=2)], ids=str)
@pytest.mark.parametrize("adam", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_in_place_updates_a_donated_state(stage, adam, options):
    """The addresses of what is at rest stay, values are those of the other program; accumulators are written into."""
    optimizer = sl.optim.adamw(0.1, weight_decay=0.1) if adam else sl.optim.sgd(0.1)
    with sl.make_mesh(MESH, simulate=True):
        step = sl.step(loss, optimizer, layout=sl.zero(sl.specs(Net), stage=stage), **options)
        state, batch = state_and_batch(step)
        kept, _ = sl.jit(step, passes=[])(state, batch)
        donating = sl.jit(step, donate_argnums=0)
        state, _ = donating(state, batch)
        for a, b in zip(*(tree.leaves(sl.gather((s.params, s.opt))) for s in (kept, state)), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
        del a, b

        def addresses() -> list[int]:
            leaves = [x for x in tree.leaves((state.params, state.opt)) if x.dim()]
            return [s.data_ptr() for x in leaves for s in x.shards]

        gc.collect()  # what gather left in cycles holds shards
        before = addresses()
        state, _ = donating(state, batch)
        assert addresses() == before
        writes = [n for m in donating.traces[0].program.values() for n in m.graph.nodes if is_write(n)]
        assert len(writes) >= len(tree.leaves(state.params)) * (2 if options else 1)


def is_write(node: Any) -> bool:
    return bool(aliased(node, written=True))


def test_fuse_makes_one_graph_of_equal_groups():
    """Products, sums over ranks and single numbers stand apart; values stay bitwise, with remat and micro-batches."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            gate, up = (x @ w).chunk(2, -1)
            x = x + torch.sigmoid(gate) * up
        return x * x.sum() / 7

    with sl.make_mesh(dp=1, simulate=True):
        run = sl.shard_map(f, in_specs=("a b", "b c"), out_specs="a b")
        args = sl.shard(torch.rand(3, 4), "a b"), sl.shard(torch.rand(4, 8), "b c")
        module = lowered(run, *args, use=[passes.fuse])
        calls = [n.target for n in module.graph.nodes if n.op == "call_module"]
        assert calls == ["fused_1", "fused_1", "fused_2"]  # what follows the last layer goes with it
        assert [n.target for n in module.graph.nodes if "mm" in str(n.target)] == [torch.ops.aten.mm.default] * 3
        assert torch.equal(sl.gather(sl.jit(run, passes=[passes.fuse])(*args)), sl.gather(run(*args)))
    with sl.make_mesh(MESH, simulate=True):
        for step in (train(), train(f=rematted), train(accumulate=2)):
            assert_same(step, [passes.dedupe, passes.overlap, passes.fuse])


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_fuse_leaves_joins_of_many(join):
    """What is compiled does not grow with the number of layers whose gradients are stacked."""

    def islands(n: int) -> tuple[int, int]:
        run = sl.shard_map(lambda x: 2 * join([y @ y for y in x.unbind()]).sin(), in_specs="n a b", out_specs=None)
        x = sl.shard(torch.rand(n, 3, 3), "n a b")
        module = lowered(run, x, use=[passes.fuse])
        assert torch.equal(sl.gather(sl.jit(run, passes=[passes.fuse])(x)), sl.gather(run(x)))
        nodes = [len(m.graph.nodes) for m in module.children() if isinstance(m, GraphModule)]
        return len(nodes), sum(nodes)

    with sl.make_mesh(dp=1, simulate=True):
        assert islands(3) == (1, 3 + 3 + 1)  # inputs; the join, sin and the product; what it returns
        assert islands(5) == islands(32) == (1, 1 + 2 + 1)


def test_fuse_leaves_what_is_written_in_place_and_integers():
    def f(x: Tensor) -> Any:
        a = torch.sin(x) * 2
        kept = a + 1
        a.add_(x)  # in place: kept must be made of the old a
        n = (x > 0).long() * 3 + 5
        return kept, torch.cos(a) * 2, n * n

    with sl.make_mesh(dp=1, simulate=True):
        run = sl.shard_map(f, in_specs="a", out_specs=("a", "a", "a"))
        x = torch.linspace(-1, 1, 5)
        got = sl.jit(run, passes=[passes.fuse, passes.in_place, passes.reuse])(sl.shard(x, "a"))
        for one, wanted in zip(sl.gather(got), f(x.clone()), strict=True):
            assert torch.equal(one, wanted)
        module = lowered(run, sl.shard(x, "a"), use=[passes.fuse])
        apart = {str(n.target).split(".")[1] for n in module.graph.nodes if n.op == "call_function"}
        assert apart >= {"sin", "add_", "mul", "add"}


def test_in_place_writes_elements_where_nothing_reads_any_more():
    """Not into arguments, nor what is read later, nor a value of another shape or dtype."""

    def f(x: Tensor, row: Tensor) -> Any:
        a = torch.exp(x)  # x belongs to the caller
        b = torch.sin(a)  # a is read again
        c = a * b  # into a
        d = (c + row).sum(0)  # into c
        return d * 2, (row * 2 > d) & (row > 1)  # d is read again; then `row * 2 > d` is bool, and written into

    with sl.make_mesh(dp=1, simulate=True):
        x, row = torch.rand(3, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
        run = sl.shard_map(f, in_specs=("a b", "b"), out_specs=("b", "b"))
        args = sl.shard(x, "a b"), sl.shard(row, "b")
        module = lowered(run, *args, use=[passes.reuse])
        writes = [(str(n.target), str(n.kwargs["out"].target)) for n in module.graph.nodes if is_write(n)]
        assert writes == [
            ("aten.mul.out", "aten.exp.default"),
            ("aten.add.out", "aten.exp.default"),
            ("aten.bitwise_and.Tensor_out", "aten.gt.Tensor"),
        ]
        before = x.clone(), row.clone()
        for got, wanted in zip(sl.gather(sl.jit(run)(*args)), f(x, row), strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(x, before[0]) and torch.equal(row, before[1])


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x + x.t(),
    "a column": lambda x: x - x[:, :1],
    "a row": lambda x: x / x[1],
    "turned": lambda x: torch.where(x > 0, x, x.view(3, 3).permute(1, 0)),
    "itself": lambda x: x * x + 1,
}


@pytest.mark.parametrize("name", PARTS)
def test_in_place_leaves_a_value_that_is_read_in_another_order(name):
    def f(x: Tensor) -> Tensor:
        return PARTS[name](x * 2)

    with sl.make_mesh(dp=1, simulate=True):
        x = torch.sin(torch.arange(9.0).view(3, 3))
        run = sl.shard_map(f, in_specs="a b", out_specs="a b")
        assert torch.equal(sl.gather(sl.jit(run)(sl.shard(x, "a b"))), f(x))
        module = lowered(run, sl.shard(x, "a b"), use=[passes.reuse])
        assert any(map(is_write, module.graph.nodes)) == (name == "itself")


def test_in_place_leaves_what_a_call_is_given_twice():
    """Both halves of the carry have one cotangent, which the graph of a turn gets twice."""

    def f(pair: Any, ws: Tensor) -> Any:
        def total(pair: Any, ws: Tensor) -> Tensor:
            (a, b), _ = sl.scan(lambda ab, w: ((torch.sin(ab[0]) * w, torch.cos(ab[1]) * w), None), pair, ws)
            return torch.tanh(a + b).sum()

        return sl.grad(total, (0, 1))(pair, ws)

    with sl.make_mesh(dp=1, simulate=True):
        run = sl.shard_map(f, in_specs=("n", "layers n"), out_specs=("n", "layers n"))
        pair = [sl.shard(torch.arange(3.0) + i, "n") for i in range(2)]
        args = pair, sl.shard(torch.sin(torch.arange(6.0)).view(2, 3), "layers n")
        found = sl.gather(sl.jit(run)(*args))
        for a, b in zip(*(tree.leaves(x) for x in (found, sl.gather(run(*args)))), strict=True):
            assert torch.equal(a, b)


def test_in_place_leaves_what_a_call_is_still_sending():
    """A scatter that a turn starts, of what it was given, and hands back: its operand is read until the wait."""

    def late(module: GraphModule) -> GraphModule:
        *nodes, output = module.graph.nodes
        for n in nodes:
            if n.target is WAIT or "stack" in str(n.target):
                output.prepend(n)
        return module

    def f(c: Tensor, xs: Tensor) -> Any:
        c = torch.exp(c)
        _, ys = sl.scan(lambda c, x: (c, sl.psum_scatter("p q +dp -> p/dp q", c)), c, xs)
        return ys, c * 2

    with sl.make_mesh(dp=2, simulate=True):
        run = sl.shard_map(f, in_specs=("b/dp n", "l"), out_specs=("l p/dp q", "b/dp n"))
        args = sl.shard(torch.ones(4, 3), "b/dp n"), sl.shard(torch.ones(2), "l")
        nodes = lowered(run, *args, use=[passes.hoist, late, passes.reuse]).graph.nodes
        names = [str(n.target) for n in nodes]
        assert names.index("aten.mul.Tensor") < names.index("_c10d_functional.wait_tensor.default")


def test_in_place_leaves_what_is_still_being_sent():
    def f(x: Tensor) -> Any:
        sent = x * 2
        total = sl.psum(sent, "dp")
        return total, sent + 1  # runs before the wait, and must not write into what is being read

    with sl.make_mesh(dp=2, simulate=True):
        run = sl.shard_map(f, in_specs="n/dp", out_specs=("n", "n/dp"))
        x = sl.shard(torch.arange(4.0), "n/dp")
        module = lowered(run, x, use=[passes.overlap, passes.in_place, passes.reuse])
        names = [str(n.target).split(".")[1] for n in module.graph.nodes if n.op == "call_function"]
        assert names == ["mul", "all_reduce", "add", "wait_tensor"] and not any(map(is_write, module.graph.nodes))


def test_in_place_leaves_what_others_hold():
    """C41's kind: a view, or another array over the same memory, keeps its values when the state is donated."""
    with sl.make_mesh(dp=1, simulate=True):
        state = {"w": sl.shard(torch.arange(4.0), "n")}
        view = sl.local(state)["w"]
        alias = sl.jit(lambda s: {"w": s["w"]})(state)
        new = sl.jit(sl.shard_map(lambda s: {"w": s["w"] + 1}, in_specs=None, out_specs=None), donate_argnums=0)(state)
        assert torch.equal(sl.gather(new)["w"], torch.arange(4.0) + 1)
        assert torch.equal(view, torch.arange(4.0)) and torch.equal(sl.gather(alias)["w"], torch.arange(4.0))
        held = sl.shard(torch.arange(4.0), "n")
        two = sl.jit(sl.shard_map(lambda s: (s + 1, s + 2), in_specs=None, out_specs=None), donate_argnums=0)(held)
        assert torch.equal(sl.gather(two)[0], torch.arange(4.0) + 1) and torch.equal(
            sl.gather(two)[1], torch.arange(4.0) + 2
        )


def pulled(used: str, x: Tensor, w: Tensor, at: Tensor) -> Any:
    """The gradient of a loss by its logits, which are a view of a product; `used` says who else holds those."""
    z = w if used == "are an input" else (x @ w).view(2, 3, 5)
    picked, lse = torch.ops.shardlib.token_scores(z, at)
    early = z.exp().sum() if used == "read before" else 0
    dz = torch.ops.shardlib.token_scores_backward(picked, lse, z, at, lse)
    return dz + 1, early, z.sum() if used == "read later" else z[0] if used == "given back" else 0


@pytest.mark.parametrize("used", ["no other", "read before", "read later", "given back", "are an input"])
def test_in_place_gradient_of_logits(used):
    """Where nothing reads the logits later, which are the program's own."""
    x, w, at = torch.randn(6, 4), torch.randn(4, 5), torch.arange(6).view(2, 3) - 1
    args = x, torch.randn(2, 3, 5) if used == "are an input" else w, at
    with sl.make_mesh(dp=1, simulate=True):
        f = sl.jit(partial(pulled, used))
        kept, found = pulled(used, *(a.clone() for a in args)), f(*args)
        targets = [str(n.target) for n in f.traces[0].module.graph.nodes if "token_scores_b" in str(n.target)]
    taken = used in ("no other", "read before")
    assert targets == [f"shardlib.token_scores_backward{'_' * taken}.default"]
    for a, b in zip(kept, found, strict=True):
        torch.testing.assert_close(b, a) if isinstance(a, Tensor) else None


@sl.pytree
class Stacked:
    layers: Layer = sl.stack("layers")
    head: Tensor = sl.spec("model/dp classes")


def scanned(w: Stacked, batch: Tensor) -> sl.Mean:
    x, _ = sl.scan(lambda x, w: (block(w, x), None), batch, w.layers)
    return sl.Mean.of("batch/dp classes", torch.tanh(x @ sl.gather(w.head, "dp")) ** 2)


@pytest.mark.parametrize("scan", [False, True])
def test_for_gloo_keeps_values(scan):
    """Also where a turn of a loop starts what its caller waits for."""
    with sl.make_mesh(MESH, simulate=True) as mesh:
        step = train(3)
        state, batch = state_and_batch(step)
        if scan:
            step = sl.step(scanned, sl.optim.sgd(0.1), layout=sl.zero(sl.specs(Stacked), stage=3))
            sizes = dict(layers=3, model=8, hidden=6, classes=4)
            state = step.init(sl.init(Stacked, sizes=sizes, key=sl.random.key(1), dtype=torch.float64))
        program = sl.jit(step).lower(state, batch)
        own = passes.applied([for_gloo], copied(program.module))
        plain, other = ({op for _, m in graphs(module) for op in ops(m)} for module in (program.module, own))
        assert "psum_scatter" in plain and "psum_scatter" not in other
        inputs = [[x.shards[r] for x in tree.leaves((state, batch))] for r in range(mesh.total)]
        plain, other = (run_lockstep(mesh, m, [list(i) for i in inputs]) for m in (program.module, own))
        for a, b in zip(plain, other, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_join_makes_one_update_of_neighbours():
    """Not beyond a wait, nor of leaves with other options, nor more bytes than the limit."""
    optimizer = sl.optim.adamw(0.1, weight_decay=0.1, mask=sl.optim.matrices)
    updates = torch.ops.shardlib.adamw_.default, torch.ops.shardlib.adamw_all_.default
    with sl.make_mesh(MESH, simulate=True):
        step = sl.step(loss, optimizer, layout=sl.zero(sl.specs(Net), stage=3))

        def sizes(limit: int) -> list[int]:
            joined = [partial(passes.join, limit=limit) if p is passes.join else p for p in passes.default]
            module = sl.jit(step, passes=joined, donate_argnums=0).lower(*state_and_batch(step)).module
            found = [n for n in module.graph.nodes if n.target in updates]
            return sorted(len(n.args[0]) if n.target is updates[1] else 1 for n in found)

        assert sizes(1) == [1] * 7
        assert sum(sizes(16 << 20)) == 7 and 2 <= max(sizes(16 << 20)) <= 5  # the two biases do not decay
        found: list[list[Tensor]] = []
        for use in ([p for p in passes.default if p is not passes.join], passes.default):
            state, batch = state_and_batch(step)
            run = sl.jit(step, passes=use, donate_argnums=0)
            for _ in range(2):
                state, _ = run(state, batch)
            found.append(tree.leaves(sl.gather(state)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_join_leaves_what_is_read_or_written_between():
    def f(p: Tensor, q: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: Tensor, count: Tensor) -> Any:
        options = (lr, count, 0.9, 0.999, 1e-8, 0.0)
        m2, v2 = m.clone(), v.clone()
        torch.ops.shardlib.adamw_(p, g, m, v, *options)
        h = p * 2  # reads the new p
        torch.ops.shardlib.adamw_(q, h, m2, v2, *options)
        return p.clone(), q.clone()

    args = [torch.full((3,), x) for x in (1.0, 2.0, 3.0, 0.0, 0.0)]
    module = passes.join(make_fx(f, tracing_mode="fake")(*args, torch.tensor(0.1), torch.tensor(1)))
    assert [str(n.target) for n in module.graph.nodes if "adamw" in str(n.target)] == ["shardlib.adamw_.default"] * 2


def test_a_pass_of_ones_own():
    """A pass is one function of a graph; here every tanh becomes the identity."""

    def linear(module: GraphModule) -> GraphModule:
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.replace_all_uses_with(node.args[0])
        module.recompile()
        return module

    with sl.make_mesh(dp=2, simulate=True):
        x = sl.shard(torch.randn(4, 3), "batch/dp n")
        f = sl.shard_map(torch.tanh, in_specs="batch/dp n", out_specs="batch/dp n")
        assert torch.equal(sl.gather(sl.jit(f, passes=[linear])(x)), sl.gather(x))


# ---- recompute


def named(w: Net, batch: Tensor) -> sl.Mean:
    x = batch
    for layer in w.layers:
        x = sl.save_name(block(layer, x), "x")
    return sl.Mean.of("batch/dp classes", torch.tanh(x @ sl.gather(w.head, "dp")) ** 2)


def test_recompute_keeps_what_the_policy_says_bit_for_bit():
    """Before the pass one product, one tanh of each layer and the last tanh are left for the backward pass."""
    with sl.make_mesh(MESH, simulate=True):
        step = train(f=named)
        state, batch = state_and_batch(step)
        plain = sl.jit(step, passes=[]).lower(state, batch)
        for policy, products, tanhs in (("dots", 0, 3), (("x",), 3, 3), ({"x", "dots"}, 0, 3)):
            use = [passes.recompute(policy), *passes.default]
            program = sl.jit(step, passes=use[:1]).lower(state, batch)
            more = [Counter(op_name(n) for n in p.module.graph.nodes) for p in (plain, program)]
            assert (more[1]["mm"] - more[0]["mm"], more[1]["tanh"] - more[0]["tanh"]) == (products, tanhs)
            assert program.memory().total < plain.memory().total
            assert_same(step, use)
            assert_same(train(f=named, accumulate=2), use)


def test_recompute_refuses_what_keeps_nothing_and_names_that_nothing_has():
    def scanned(w: Tensor, x: Tensor) -> sl.Mean:
        x, _ = sl.scan(lambda x, w: (sl.save_name(torch.tanh(x * w), "x"), None), x * 1, w)
        return sl.Mean.of("batch/dp model", x)

    with pytest.raises(sl.SpecError, match=r"passes\.recompute: a policy that keeps nothing saves nothing"):
        passes.recompute("nothing")
    with sl.make_mesh(MESH, simulate=True):
        step = train(f=named)
        with pytest.raises(sl.SpecError, match=r"recompute: the policy keeps `y`, .* it names `x`"):
            sl.jit(step, passes=[passes.recompute(("x", "y"))]).lower(*state_and_batch(step))
        looped = sl.jit(sl.step(scanned, sl.optim.sgd(0.1)), passes=[passes.recompute(("x",))])
        state = looped.init(sl.shard(torch.ones(3, 8), "layers model"))
        with pytest.raises(sl.SpecError, match="names in the body of a scan are for remat"):
            looped.lower(state, sl.shard(torch.ones(8, 8), "batch/dp model"))
