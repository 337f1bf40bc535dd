"""in_place and reuse: what is written into where it lies, and what is left since another reads it."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lowered import MESH, Net, is_write, loss, lowered, state_and_batch
from torch import Tensor
from torch.fx import GraphModule

import shardlib as sl
from shardlib import passes, tree
from shardlib.graph.nodes import WAIT


@pytest.mark.parametrize(
    ("stage", "adam", "options"),
    [(0, True, {}), (3, False, {}), (0, False, dict(accumulate=2)), (3, True, dict(accumulate=2))],
    ids=str,
)
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


JOINED: dict[str, tuple[Callable[[Tensor], Any], int]] = {  # and how many parts are written where they are joined
    "parts": (lambda x: torch.cat([x * 2, x - 1], -1), 2),
    "parts that were written into": (lambda x: torch.cat([x * 2 + 1, (x - 1) / 3], 0), 2),
    "one part": (lambda x: torch.cat([x * 2, torch.exp(x), x], 1), 1),
    "in another order": (lambda x: torch.cat([(x * 2).permute(2, 0, 1), (x / 3).permute(-1, 0, 1)], 2), 2),
    "read besides": (lambda x: torch.cat([y := x * 2, x / 3, y.sum(0, keepdim=True)], 0), 1),
    "read later": (lambda x: (torch.cat([y := x * 2, x / 3]), torch.exp(y)), 1),
    "twice": (lambda x: torch.cat([y := x * 2, x / 3, y]), 1),
    "in two orders": (lambda x: torch.cat([(y := x * 2).permute(1, 0, 2), y.view(3, 2, 4)]), 0),
    "itself and turned": (lambda x: torch.cat([(y := x[:, :2, :2] * 2).permute(1, 0, 2), y, x[:, :2, :2] / 2]), 1),
    "in two places": (lambda x: (torch.cat([y := x * 2, x]), torch.cat([x, y])), 0),
    "of another dtype": (lambda x: torch.cat([x * 2, (x * 9).int() * 2]), 1),
    "twice the other": (lambda x: torch.cat([torch.add(x, x, alpha=2), x]), 0),
    "a part of it": (lambda x: torch.cat([(x * 2)[:1], x]), 0),
    "into itself": (lambda x: torch.cat([torch.cat([x * 2, x / 3]), x * 4]) + 1, 3),
}


@pytest.mark.parametrize("name", JOINED)
def test_what_is_joined_is_made_there(name):
    f, wanted = JOINED[name]
    x = torch.sin(torch.arange(24.0)).view(2, 3, 4)
    with sl.make_mesh(dp=1, simulate=True):
        run = sl.shard_map(f, in_specs="a b c", out_specs=None if isinstance(f(x), tuple) else "...")
        found, nodes = (g(sl.shard(x, "a b c")) for g in (sl.jit(run), lambda x: lowered(run, x, use=[passes.reuse])))
        for a, b in zip(tree.leaves(sl.gather(found)), tree.leaves(f(x)), strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
    made = [n for n in nodes.graph.nodes if n.kwargs.get("out") is not None and n.kwargs["out"] not in n.args]
    assert len(made) == wanted
