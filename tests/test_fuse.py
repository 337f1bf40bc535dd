"""fuse: one graph of elementwise neighbours; join: one update of neighbouring leaves."""

from functools import partial
from typing import Any

import pytest
import torch
from lowered import MESH, Net, compared, loss, lowered, rematted, state_and_batch, train
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import shardlib as sl
from shardlib import passes, tree


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
            compared(step, [passes.dedupe, passes.overlap, passes.fuse])


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
