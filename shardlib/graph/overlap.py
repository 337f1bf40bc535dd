"""`overlap`: communication runs behind compute: issued early, waited for late."""

from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shardlib.graph.buckets import PACK, UNPACK, parameters
from shardlib.graph.forms import ARRANGE, spread
from shardlib.graph.nodes import (
    STARTS,
    WAIT,
    acts,
    arg,
    group,
    inputs,
    positions,
    size_of,
    started,
    wait_of,
    written,
)

aten = torch.ops.aten
_HELD = ("psum_scatter", "all_gather")  # whose operands are kept, and may be so for long
_THROUGH = ARRANGE | {WAIT, UNPACK, getitem}  # of a collective's result, only another form


def overlap(module: GraphModule, ahead: int = 1, limit: int = 16 << 20) -> GraphModule:
    """Put every collective where its operand is ready, its wait where its result is used.

        v = all_gather(a).wait()                  a_ = all_gather(a)
        y = f(v)                                  v = a_.wait()
        w = all_gather(b).wait()          ->      b_ = all_gather(b)
        z = g(w)                                  y = f(v)
                                                  w = b_.wait(); z = g(w)

    Gathers of parameters are issued `ahead` gathers before their use, and not while more than `ahead` others are whole
    that are done with before that use: so no more of them are whole at a time than those needed and `ahead`. Others are
    waited for before more than `limit` bytes of a group are being sent, which are kept until then. What follows the
    backward pass runs in the order in which reductions come in, so that the optimizer works on the first gradients
    while the last are on the wire. The same on all ranks; bitwise the same results.
    """
    graph, pinned = module.graph, written(module.graph)
    _by_arrival(graph, pinned)
    _sink(graph, pinned)
    _prefetch(graph, pinned, ahead)
    _let_go(module, pinned, limit)
    return module


def _sink(graph: Graph, pinned: set[Node]) -> None:
    """Waits, what only arranges their results, and numbers computed from them go before the first use."""
    lazy: set[Node] = set()
    for node in graph.nodes:
        arranges = node.target in _THROUGH or _number(node)
        if node.target is WAIT or (arranges and not lazy.isdisjoint(node.all_input_nodes)):
            lazy.add(node)
    lazy -= pinned
    order: dict[Node, None] = {}

    def run(node: Node) -> None:
        for i in node.all_input_nodes:
            if i not in order:
                run(i)
        order[node] = None

    *nodes, output = graph.nodes
    late = [n for n in nodes if n in lazy and n.target is WAIT]  # before results are copied, so that operands can go
    for node in [*(n for n in nodes if n not in lazy), *late, output]:
        run(node)
    for node in list(order)[:-1]:
        output.prepend(node)


def _number(node: Node) -> bool:
    x = node.meta.get("val")
    return node.op == "call_function" and node.target not in STARTS and isinstance(x, Tensor) and x.numel() == 1


def _prefetch(graph: Graph, pinned: set[Node], ahead: int) -> None:
    order, nodes = positions(graph), list(graph.nodes)
    gathers = []
    for start in nodes:
        if STARTS.get(start.target) == "all_gather" and not pinned & {start, *start.all_input_nodes}:
            made = parameters(start)
            if made is not None:
                at = [order[u] for u in spread(start, _THROUGH)[1]]
                gathers.append((min(at), max(at), [*made, start]))
    uses = sorted({use for use, *_ in gathers})
    moving, placed = {n for *_, moved in gathers for n in moved}, set[Node]()
    for use, _, moved in sorted(gathers, key=lambda g: g[0]):
        i = uses.index(use) - ahead
        done = [last + 1 for begun, last, _ in gathers if i > 0 and begun < uses[i] and last < use]
        place = min(max([uses[i] if i >= 0 else len(inputs(graph)), *done]), order[wait_of(moved[-1])])
        before = next(n for n in nodes[place:] if n not in moving)
        for node in moved:
            if node not in placed and (order[node] > order[before] or node is moved[-1]):
                before.prepend(node)
                placed.add(node)


def _let_go(module: GraphModule, pinned: set[Node], limit: int) -> None:
    """Wait for scatters, gathers of values and what calls have started, so that when the next is packed or called no
    more than `limit` bytes are being sent over its group: till then operands cannot be freed."""
    order = positions(module.graph)
    sent: dict[Any, dict[Node, list[Node]]] = {}  # by group: the waits, by the start or the call in which it is
    for wait in module.graph.nodes:
        if wait.target is not WAIT or wait in pinned or _number(wait):
            continue
        at = arg(wait)
        start = started(module, at)
        if STARTS.get(start.target) not in _HELD or parameters(start) is not None:
            continue
        sent.setdefault(group(start), {}).setdefault(at if at is start else arg(at), []).append(wait)
    for starts in sent.values():
        flying: list[tuple[int, list[Node]]] = []
        last = -1
        for start in sorted(starts, key=order.__getitem__):
            first = next(n for n in (*_made_for(start), start) if order[n] > last)
            flying = [(size, waits) for size, waits in flying if order[waits[0]] > order[first]]
            size = sum(size_of(arg(started(module, arg(w)))) for w in starts[start])
            while flying and size + sum(s for s, _ in flying) > limit:
                for wait in flying.pop(0)[1]:
                    first.prepend(wait)
            flying.append((size, starts[start]))
            last = order[start]


def _made_for(start: Node) -> list[Node]:
    """The nodes that only arrange, or pack, what a collective sends, in order; none of a call."""
    chain: list[Node] = []
    node = arg(start) if start.target in STARTS else start
    while node.target in ARRANGE and len(node.users) == 1:
        chain.append(node)
        node = arg(node)
    return [*([node] if node.target is PACK else []), *reversed(chain)]


def _by_arrival(graph: Graph, pinned: set[Node]) -> None:
    """Sort what follows the backward pass by the last reduction that it needs."""
    nodes = list(graph.nodes)
    last = max((i for i, n in enumerate(nodes) if "backward" in n.meta), default=len(nodes))
    tail = [n for n in nodes[last + 1 :] if n.op not in ("placeholder", "output")]
    if any(n in pinned for n in tail):
        return
    order = positions(graph)
    arrives: dict[Node, int] = {}
    acted = -1  # what acts (prints) keeps its order
    for n in nodes:
        own = order[n] if n.target in STARTS and order[n] <= last else acted if acts(n) else -1
        arrives[n] = max([own, *(arrives[i] for i in n.all_input_nodes)])
        acted = arrives[n] if acts(n) else acted
    output = nodes[-1]
    for n in sorted(tail, key=lambda n: arrives[n]):
        output.prepend(n)
