"""Ranks that go different ways: messages, collectives between some, what none can do."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

import shardlib as sl
from shardlib import wire
from shardlib.errors import RankError
from shardlib.simulate import run_lockstep, run_threads
from shardlib.switch import Switch

GROUP = "pp=2/pp"


def traced(f: Callable[[Tensor], list[Tensor]]) -> Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(f, tracing_mode="fake")(torch.zeros(2)).graph
    for node in reversed(graph.nodes):  # what tracing leaves behind
        if node.op == "call_function" and not node.users and node.target is not wire.SENT:
            graph.erase_node(node)
    return graph


def sends(to: int) -> Callable[[Tensor], list[Tensor]]:
    def run(x: Tensor) -> list[Tensor]:
        wire.sent(wire.isend(x + 1, to, GROUP))
        return [x * 2]

    return run


def receives(source: int, shape: tuple[int, ...] = (2,)) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: [wire.wait(wire.irecv(shape, torch.float32, x.device, source, GROUP)) * x]


def lockstep(*turns: Callable[[Tensor], list[Tensor]]) -> list[Any]:
    """A program in which each rank takes its turn."""
    graph, root = Graph(), torch.nn.Module()
    root.add_module("switch", Switch(torch.nn.Module(), [traced(f) for f in turns], GROUP))
    graph.output([graph.call_function(operator.getitem, (graph.call_module("switch", (graph.placeholder("x"),)), 0))])
    with sl.make_mesh(pp=2, simulate=True) as mesh:
        return run_lockstep(mesh, GraphModule(root, graph), [[torch.tensor([1.0, 2.0]) * (r + 1)] for r in range(2)])


def threads(*turns: Callable[[Tensor], list[Tensor]]) -> list[Any]:
    """The same, a thread for each rank."""
    from shardlib.simulate import current_rank

    with sl.make_mesh(pp=2, simulate=True) as mesh:
        inputs = [[torch.tensor([1.0, 2.0]) * (r + 1)] for r in range(2)]
        return run_threads(mesh, lambda x: turns[current_rank() or 0](x), inputs)


@pytest.mark.parametrize("played", [lockstep, threads])
def test_a_message_arrives(played: Callable[..., list[Any]]) -> None:
    (a,), (b,) = played(sends(1), receives(0))
    assert a.tolist() == [2.0, 4.0] and b.tolist() == [4.0, 12.0]


@pytest.mark.parametrize("played", [lockstep, threads])
def test_nobody_sends(played: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankError, match=r"(?s)deadlock: no rank can go on.*irecv\(float32\[2\], 0\) over `pp`"):
        played(receives(1), receives(0))


def test_what_is_sent_is_not_what_is_waited_for() -> None:
    with pytest.raises(RankError, match=r"(?s)ranks disagree.*isend\(float32\[2\], 1\).*irecv\(float32\[1\], 0\)"):
        lockstep(sends(1), receives(0, (1,)))


def test_some_ranks_meet_while_others_do_not() -> None:
    """A sum over tp on the first stage alone."""
    mesh = sl.make_mesh(pp=2, tp=2, simulate=True)
    first, second = traced(lambda x: [wire.all_reduce(x, "pp=2,tp=2/tp")]), traced(lambda x: [x * 10])
    graph, root = Graph(), torch.nn.Module()
    root.add_module("switch", Switch(torch.nn.Module(), [first, second], "pp=2,tp=2/pp"))
    graph.output([graph.call_function(operator.getitem, (graph.call_module("switch", (graph.placeholder("x"),)), 0))])
    got = run_lockstep(mesh, GraphModule(root, graph), [[torch.full((2,), float(r + 1))] for r in range(4)])
    assert [x[0].tolist() for x in got] == [[3.0, 3.0], [3.0, 3.0], [30.0, 30.0], [40.0, 40.0]]
