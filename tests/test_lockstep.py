"""run_lockstep: all ranks of a traced graph in one thread; what it runs, frees, compares and refuses; its time."""

import gc
import operator
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from wired import CPU, OPS, PSum, PVary, problem, same, simulated, trace_grads
from wired import nothing_left as nothing_left

from shardlib import simulate, wire
from shardlib.errors import MeshError, RankError
from shardlib.simulate import run_lockstep, run_threads


def test_lockstep_equals_threads_over_the_same_graph():
    mesh = simulated(dp=2, tp=2)
    traced = trace_grads(mesh)
    inputs = problem(mesh)[1]
    by_threads = run_threads(mesh, lambda *p: traced(*p), inputs)
    for _ in range(2):
        assert all(map(same, run_lockstep(mesh, traced, [list(p) for p in inputs]), by_threads))


def test_lockstep_runs_every_kind_of_node():
    mesh = simulated(dp=2)

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.tensor([1.0, 2.0]))

    inner = Graph()
    x, _, y = (inner.placeholder(n) for n in "xuy")
    added = inner.call_function(operator.add, (x, y))
    gathered = inner.call_function(OPS.all_gather_into_tensor.default, (added, 2, "dp=2/dp"))
    inner.output((inner.call_function(OPS.wait_tensor.default, (gathered,)), inner.get_attr("shift")))
    holder = Inner()
    quiet = Graph()
    quiet.output(quiet.call_function(torch.neg, (quiet.placeholder("x"),)))

    outer = Graph()
    a, b = outer.placeholder("a"), outer.placeholder("b")
    sub = outer.call_module("sub", (a, b, a))
    total = outer.call_function(torch.add, (outer.call_function(operator.getitem, (sub, 1)), a), {"alpha": 2.5})
    outer.call_function(torch.ops.aten.copy_.default, (b, total))
    top = outer.call_function(torch.ops.aten.topk.default, (outer.call_function(operator.getitem, (sub, 0)), 2))
    largest = outer.call_function(operator.getitem, (top, 0))
    tail = outer.call_function(operator.getitem, (largest, slice(1, None)))
    index = outer.call_function(torch.ops.shardlib.axis_index.default, ("dp=2/dp", CPU))
    cat = outer.call_function(torch.cat, ([largest, tail],))
    neg = outer.call_module("quiet", (total,))
    outer.output([cat, b, None, {"index": index, "half": 0.5}, neg])
    root = torch.nn.Module()
    root.add_module("sub", GraphModule(holder, inner))
    root.add_module("quiet", GraphModule(torch.nn.Module(), quiet))
    module = GraphModule(root, outer)

    bs = [torch.zeros(2), torch.zeros(2)]
    got = run_lockstep(mesh, module, [[torch.tensor([1.0, 2.0]), bs[0]], (torch.tensor([3.0, 4.0]), bs[1])])
    for r, (cat_, b_, none, named, neg_) in enumerate(got):
        a_ = torch.tensor([1.0, 2.0]) + 2 * r
        assert cat_.tolist() == [8, 6, 6] and none is None and named["index"].item() == r and named["half"] == 0.5
        assert torch.equal(b_, torch.tensor([1.0, 2.0]) + 2.5 * a_) and b_ is bs[r] and torch.equal(neg_, -b_)


def test_lockstep_drops_each_value_after_its_last_use():
    mesh = simulated(dp=2)
    g = mesh.group(("dp",))
    held: list[tuple[str, weakref.ref[Tensor]]] = []
    alive: list[str] = []

    def keep(label: str, x: Tensor) -> None:
        held.append((label, weakref.ref(x)))

    def probe() -> None:
        alive.append("".join(sorted(label for label, ref in held if ref() is not None)))

    graph = Graph()
    a, b, _ = (graph.placeholder(n) for n in "abu")
    c = graph.call_function(torch.neg, (a,))
    graph.call_function(keep, ("c", c))
    graph.call_function(probe)
    d = graph.call_function(OPS.wait_tensor.default, (graph.call_function(OPS.all_reduce.default, (c, "sum", g)),))
    graph.call_function(keep, ("d", d))
    graph.call_function(probe)
    e = graph.call_function(torch.add, (d, b))
    graph.call_function(keep, ("e", e))
    graph.call_function(probe)
    graph.call_function(OPS.all_reduce.default, (e, "sum", g))  # dead
    graph.call_function(probe)
    f = graph.call_function(OPS.all_gather_into_tensor.default, (e, 2, g))
    graph.call_function(probe)
    graph.output((f,))
    inputs = [[torch.ones(3), torch.ones(3), torch.ones(3)] for _ in range(2)]
    for given in inputs:
        for label, x in zip("abu", given, strict=True):
            keep(label, x)
        del x
    got = run_lockstep(mesh, GraphModule(torch.nn.Module(), graph), inputs)
    assert inputs == [[], []] and got[1][0].tolist() == [-1] * 6
    # what lives of both ranks, at each probe: rank 0 runs up to a collective, then rank 1
    assert alive == ["abbcu", "bbcc", "bbd", "be", "bde", "ee", "ee", "ee", "", ""]


class Failing(Exception):
    pass


def three_nodes(node: Callable[..., Any], g: str) -> GraphModule:
    """neg, all_reduce, `node`; the last with a user's line."""
    graph = Graph()
    x = graph.placeholder("x")
    total = graph.call_function(OPS.all_reduce.default, (graph.call_function(torch.neg, (x,)), "sum", g))
    total.stack_trace = f'File "/home/me/model.py", line 7, in f\n  psum(x)\nFile "{wire.__file__}", line 1, in g\n'
    last = graph.call_function(node, (graph.call_function(OPS.wait_tensor.default, (total,)),))
    last.stack_trace = 'File "/home/me/model.py", line 9, in loss\n  sin(x)\n'
    graph.output((last, x))
    return GraphModule(torch.nn.Module(), graph)


def test_a_node_that_fails_is_named_with_rank_and_line():
    mesh = simulated(dp=2)
    count = iter(range(9))

    def node(x: Tensor) -> Tensor:
        if next(count) == 1:
            raise Failing("no")
        return x

    module = three_nodes(node, mesh.group(("dp",)))
    with pytest.raises(RankError) as e:
        run_lockstep(mesh, module, [[torch.ones(2)], [torch.ones(2)]])
    assert str(e.value) == "rank 1, node `node` at /home/me/model.py:9 raised Failing: no"
    assert isinstance(e.value.__cause__, Failing)
    with pytest.raises(RankError) as e:
        run_lockstep(mesh, module, [[torch.ones(2)], [torch.ones(3)]])
    assert str(e.value).splitlines()[:2] == [
        "ranks disagree on a collective:",
        "  rank 0: all_reduce(float32[2], 'sum') over `dp`",
    ]
    assert e.value.__notes__ == ["on rank 0, node `all_reduce_default` at /home/me/model.py:7"]
    with pytest.raises(RankError, match="rank 1, the inputs raised ValueError: not enough values"):
        run_lockstep(mesh, module, [[torch.ones(2)], []])
    with pytest.raises(MeshError, match="inputs for 1 ranks"):
        run_lockstep(mesh, module, [[torch.ones(2)]])


def test_lockstep_refuses_what_it_does_not_run():
    graph = Graph()
    graph.output(graph.call_method("sin", (graph.placeholder("x"),)))
    with pytest.raises(NotImplementedError, match="does not run the call_method node `sin`"):
        run_lockstep(simulated(dp=1), GraphModule(torch.nn.Module(), graph), [[torch.ones(1)]])


def ways(x: Tensor) -> dict[str, Tensor]:
    nan, other = x.clone(), x.clone()
    nan[0] = float("nan")
    other.view(torch.int32)[0] = nan.view(torch.int32)[0] ^ 1
    return {"same": x, "one": x + torch.tensor([0.0, 0.25, 0.0]), "nan": nan, "other nan": other, "zero": x * -0.0}


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ("same", "same", None),
        ("nan", "nan", None),
        ("nan", "other nan", None),
        ("same", "one", "differs by up to 0.25 in 1 of 3 elements from rank 0"),
        ("nan", "one", "differs by up to nan in 2 of 3 elements from rank 0"),
        ("zero", "same", "differs by up to 2 in 3 of 3 elements from rank 0"),
    ],
)
def test_outputs_that_must_be_equal(a, b, told):
    mesh = simulated(dp=2, tp=2)
    module = three_nodes(torch.neg, mesh.group(("dp",)))
    xs = ways(torch.ones(3) * 2)
    inputs = [xs[a].clone(), xs[a].clone(), xs[b].clone(), xs[a].clone()]
    ok = {0: ("dp",)}  # the sum over dp
    run_lockstep(mesh, module, [[x.clone()] for x in inputs], equal=ok)
    if told is None:
        run_lockstep(mesh, module, [[x] for x in inputs], equal={**ok, 1: ("dp",)})
        return
    with pytest.raises(RankError) as e:
        run_lockstep(mesh, module, [[x] for x in inputs], equal={**ok, 1: ("dp",)})
    assert str(e.value) == f"output 1 must be equal over `dp`, but is not:\n  rank 2: {told}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float64])
def test_equality_is_of_bits_in_every_dtype(dtype):
    mesh = simulated(dp=2)
    a, b = torch.tensor([[1, 0]]).to(dtype), torch.tensor([[1, 1]]).to(dtype)
    module = make_fx(lambda x: (x.t().clone(), x[:0]))(a)
    run_lockstep(mesh, module, [[a], [a.clone()]], equal={0: ("dp",), 1: ("dp",)})
    with pytest.raises(RankError, match="rank 1: differs by up to 1 in 1 of 2 elements from rank 0"):
        run_lockstep(mesh, module, [[a], [b]], equal={0: ("dp",)})


def test_negative_zero_is_another_value():
    module = make_fx(torch.clone)(torch.ones(1))
    with pytest.raises(RankError, match=r"(?s)output 0 .* differs by up to 0 in 1 of 1 elements"):
        run_lockstep(simulated(dp=2), module, [[torch.zeros(1)], [-torch.zeros(1)]], {0: ("dp",)})


def test_programs_are_kept_per_mesh_until_the_graph_changes(monkeypatch):
    written: list[str] = []
    write = simulate._Writer.graph

    def spy(self: Any, module: Any, path: str = "") -> str:
        written.append(self.mesh.name)
        return write(self, module, path)

    monkeypatch.setattr(simulate._Writer, "graph", spy)
    module = make_fx(torch.sin)(torch.ones(1))
    for axes in (dict(dp=2), dict(dp=2), dict(dp=3)):
        mesh = simulated(**axes)
        assert run_lockstep(mesh, module, [[torch.ones(1)] for _ in range(mesh.total)])[0] == torch.ones(1).sin()
    assert written == ["dp=2", "dp=3"]
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    node.target = torch.ops.aten.cos.default
    module.recompile()
    assert run_lockstep(simulated(dp=2), module, [[torch.ones(1)], [torch.ones(1)]])[0] == torch.ones(1).cos()
    ref = weakref.ref(module)
    del module, node
    gc.collect()
    assert ref() is None


def test_lockstep_records_no_gradient():
    x = torch.ones(2, requires_grad=True)
    assert not run_lockstep(simulated(dp=1), make_fx(torch.sin)(torch.ones(2)), [[x]])[0].requires_grad


# ---- time


def best_ms(f: Callable[[], Any], n: int = 3) -> float:
    times = []
    for _ in range(n):
        start = time.perf_counter()
        f()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def test_time():
    mesh = simulated(dp=2, tp=4)
    both, tp, dp = (mesh.group(a) for a in (("dp", "tp"), ("tp",), ("dp",)))

    def loss(ws: list[tuple[Tensor, ...]], x: Tensor) -> Tensor:
        for a, b in ws:
            x = PSum.apply(torch.tanh(PVary.apply(x, tp) @ a) @ b, tp)
        return PSum.apply(x.pow(2).sum(), dp)

    def step(x: Tensor, *flat: Tensor) -> list[Tensor]:
        g = grad(loss)([flat[:2], flat[2:]], x)
        return [w - 0.1 * wire.all_reduce(d, dp) for w, d in zip(flat, [d for pair in g for d in pair], strict=True)]

    inputs = [[torch.randn(8, 64)] + [torch.randn(64, 16), torch.randn(16, 64)] * 2 for _ in range(8)]
    traced = make_fx(step, tracing_mode="fake")(*inputs[0])

    def many(x: Tensor) -> Tensor:
        for _ in range(50):
            x = wire.all_reduce(x, both, "max")
        return x

    lockstep = best_ms(lambda: run_lockstep(mesh, traced, [list(p) for p in inputs]))
    eager = best_ms(lambda: run_threads(mesh, step, inputs))
    each = best_ms(lambda: run_threads(mesh, many, [(torch.ones(4),)] * 8)) * 20
    print(f"\n8 ranks: MLP step {lockstep:.2f} ms in lockstep, {eager:.1f} in threads; {each:.0f} us per collective")
    assert lockstep < 500 and eager < 5000 and each < 50000
