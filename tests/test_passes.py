"""Passes: what each changes and that values stay; all of them together on a train step."""

import operator
from functools import partial
from typing import Any

import pytest
import torch
from lowered import MESH, Layer, Net, block, bucketed, compared, loss, lowered, ops, rematted, state_and_batch, train
from ranks import on_ranks
from torch import Tensor
from torch.fx import GraphModule

import shardlib as sl
from shardlib import passes, tree
from shardlib.graph.buckets import UNPACK
from shardlib.graph.forms import ARRANGE
from shardlib.graph.gloo import by_messages, for_gloo
from shardlib.graph.nodes import STARTS, WAIT, ancestors, group
from shardlib.graph.program import copied, graphs
from shardlib.simulate import run_lockstep


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
        plain, once = map(ops, compared(step, [passes.dedupe]))
        assert plain.count("all_gather") == once.count("all_gather") == 2 * 2 * 2 + 1


def test_regather_gathers_again_in_the_backward_pass():
    with sl.make_mesh(MESH, simulate=True):
        plain, again = map(ops, compared(train(), [passes.regather]))
        assert plain.count("all_gather") == 5  # 2 layers of 2 split leaves and the head
        # not the first, whose input needs no gradient, and not the last, the head
        assert again.count("all_gather") == 5 + 3
        assert [o for o in again if o != "all_gather"] == [o for o in plain if o != "all_gather"]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_regather_keeps_what_the_step_gathers(stage):
    layout = sl.zero(sl.specs(Net), stage=stage, gather="forward" if stage else "update")
    with sl.make_mesh(MESH, simulate=True):
        step = sl.step(loss, sl.optim.sgd(0.1), layout=layout)
        args = state_and_batch(step)
        assert ops(lowered(step, *args)) == ops(lowered(step, *args, use=[passes.regather]))


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
        _, module = compared(train(), [passes.regather, bucketed(1), passes.overlap])
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


@pytest.mark.parametrize("ahead", [0, 1])
def test_overlap_issues_a_gather_before_its_wait(ahead):
    """Also where the use reads a number that is made, after the wait, of another gathered weight."""

    def scaled(w: Net, batch: Tensor) -> sl.Mean:
        head, scale = sl.gather(w.head, "dp"), sl.gather(w.layers[0].w_in, ("dp", "tp")).sum()
        return sl.Mean.of("batch/dp classes", torch.tanh(batch @ (head * scale)) ** 2)

    with sl.make_mesh(dp=4, tp=1, simulate=True):
        compared(train(f=scaled), [passes.regather, partial(passes.overlap, ahead=ahead)])


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (1, 2)])
def test_a_gradient_is_reduced_as_soon_as_it_is_made(stage, accumulate):
    """Where weights are gathered all at once, where the step makes the sums, and in the last micro-batch."""

    def deep(w: Net, batch: Tensor) -> sl.Mean:
        layers, head = sl.gather((w.layers, w.head), "dp")
        x = batch
        for layer in layers:
            y = sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", x, layer.w_in)
            y = sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", torch.tanh(y), layer.w_out)
            x = x + sl.psum("batch/dp model +tp -> batch/dp model", y)
        return sl.Mean.of("batch/dp classes", torch.tanh(x @ head) ** 2)

    with sl.make_mesh(MESH, simulate=True):
        step = train(stage, f=deep, accumulate=accumulate)
        nodes = list(lowered(step, *state_and_batch(step)).graph.nodes)
    products = [n for n in nodes if n.target is torch.ops.aten.mm.default]
    sums = [n for n in nodes if STARTS.get(n.target) in ("psum", "psum_scatter") and "backward" in n.meta]
    sums = [n for n in sums if group(n)[0].endswith("/dp")]
    of = [(s, [m for m in products if m in ancestors([s])]) for s in sums]
    last = [(start, before[-1]) for start, before in of if before]  # a bias that is not used has zeros
    assert len(last) == 5, "of two layers' weights and the head"
    for start, product in last:
        between = nodes[nodes.index(product) + 1 : nodes.index(start)]
        assert not set(products) & set(between), f"{start} waits for the rest of the backward pass"


EACH = [*((stage, {}) for stage in range(4)), (3, dict(clip=0.5)), (0, dict(accumulate=2)), (3, dict(accumulate=2))]


@pytest.mark.parametrize(("stage", "options"), EACH, ids=str)
def test_all_of_them(stage, options):
    with sl.make_mesh(MESH, simulate=True):
        compared(train(stage, **options), passes.default, bitwise=False)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_those_that_move_no_sums_keep_bits(accumulate):
    with sl.make_mesh(MESH, simulate=True):
        compared(train(accumulate=accumulate), [passes.dedupe, passes.regather, passes.overlap])


def test_backends_leave_out_what_they_do_themselves():
    names = {
        backend: [one.__name__ for one in passes.for_backend(passes.default, backend)]
        for backend in ("graph", "regional", "inductor", "cudagraph")
    }
    assert names["graph"] == [one.__name__ for one in passes.default]
    assert names["regional"] == "dedupe shorten regather bucket hoist overlap fuse in_place reuse join".split()
    assert names["inductor"] == "dedupe shorten regather bucket hoist overlap in_place".split()
    assert names["cudagraph"] == "dedupe shorten squares regather bucket hoist overlap in_place reuse".split()


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
        sent = {
            n.target for _, m in graphs(passes.applied([by_messages], copied(program.module))) for n in m.graph.nodes
        }
        names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
        assert sent.isdisjoint(getattr(torch.ops._c10d_functional, name).default for name in names)
        inputs = [[x.shards[r] for x in tree.leaves((state, batch))] for r in range(mesh.total)]
        plain, other = (run_lockstep(mesh, m, [list(i) for i in inputs]) for m in (program.module, own))
        for a, b in zip(plain, other, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_processes_sum_where_an_operand_is_that_nothing_else_reads():
    def sums(x: Tensor) -> tuple[Tensor, ...]:
        kept, gone = 2 * x, 3 * x
        return sl.psum(x, "dp"), sl.psum(kept, "dp"), sl.psum(gone, "dp"), kept

    def body() -> tuple[list[bool], list[Tensor]]:
        from shardlib.graph.nodes import STARTS, aliased  # ops are not sent to processes

        with sl.make_mesh(dp=2):
            f = sl.jit(sl.shard_map(sums, in_specs="n/dp", out_specs=("n", "n", "n", "n/dp")), passes=[])
            x = sl.shard(torch.arange(6.0), "n/dp")
            program = f.lower(x).running()
            written = [bool(aliased(n, written=True)) for n in program.graph.nodes if n.target in STARTS]
            return written, [*sl.gather(f(x)), sl.gather(x)]

    written, found = on_ranks(2, body)[1]
    assert written == [False, False, True]
    total = torch.arange(3.0) * 2 + 3
    for x, wanted in zip(found, (total, 2 * total, 3 * total, 2 * torch.arange(6.0), torch.arange(6.0)), strict=True):
        assert torch.equal(x, wanted)


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
