"""`overlap`: communication runs behind compute: issued early, waited for late."""

from operator import getitem

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shardlib.graph.buckets import PACK, UNPACK
from shardlib.graph.nodes import ARRANGE, STARTS, WAIT, acts, arg, at_rest, inputs, positions, spread, written

aten = torch.ops.aten
_REDUCE = ("psum", "psum_scatter")
_THROUGH = ARRANGE | {WAIT, UNPACK, getitem, aten.slice.Tensor}  # of a collective's result, only another form


def overlap(module: GraphModule, ahead: int = 1) -> GraphModule:
    """Put every collective where its operand is ready, its wait where its result is used.

        v = all_gather(a).wait()                  a_ = all_gather(a)
        y = f(v)                                  v = a_.wait()
        w = all_gather(b).wait()          ->      b_ = all_gather(b)
        z = g(w)                                  y = f(v)
                                                  w = b_.wait(); z = g(w)

    Gathers of parameters are issued `ahead` gathers before their use, and not while more than `ahead` others are whole
    that are done with before that use: so no more of them are whole at a time than are needed and `ahead`. What is
    reduced is waited for before the next but `ahead` begins, since it is kept until then. What
    follows the backward pass runs in the order in which reductions come in, so that the optimizer works on the first
    gradients while the last are on the wire. The same on all ranks; bitwise the same results.
    """
    graph, pinned = module.graph, written(module.graph)
    _by_arrival(graph, pinned)
    _sink(graph, pinned)
    _prefetch(graph, pinned, ahead)
    _let_go(graph, pinned, ahead)
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
            x = arg(start)
            operands = arg(x) if x.target is PACK else [x]
            chains = [at_rest(o) for o in operands]
            if all(c is not None for c in chains):
                moved = [n for c in chains for n in c or ()] + ([x] if x.target is PACK else []) + [start]
                at = [order[u] for u in spread(start, _THROUGH)[1]]
                gathers.append((min(at), max(at), moved))
    uses = sorted({use for use, _, _ in gathers})
    unmoved = {*nodes}.difference(*(moved for *_, moved in gathers))
    for use, _, moved in sorted(gathers, key=lambda g: g[0]):
        i = uses.index(use) - ahead
        done = [last + 1 for begun, last, _ in gathers if i > 0 and begun < uses[i] and last < use]
        place = max([uses[i] if i >= 0 else len(inputs(graph)), *done])
        before = next(n for n in nodes[place:] if n in unmoved)
        for node in moved:
            if node not in unmoved and (order[node] > order[before] or node is moved[-1]):
                before.prepend(node)
                unmoved.add(node)


def _let_go(graph: Graph, pinned: set[Node], ahead: int) -> None:
    """Wait for a reduction, or what a call has started, before the next but `ahead` is packed or called."""
    order = positions(graph)
    sent: dict[Node, list[Node]] = {}
    for wait in graph.nodes:
        start = arg(wait) if wait.target is WAIT and wait not in pinned else wait
        call = start.target is getitem and arg(start).op == "call_module"
        if start is not wait and (call or (STARTS.get(start.target) in _REDUCE and not _number(wait))):
            packs = [] if call else [arg(start)] if arg(start).target is PACK else []
            first = arg(start) if call else [*packs, start][0]
            sent.setdefault(first, []).append(wait)
    begun = sorted(sent, key=order.__getitem__)
    for first, late in zip(begun[ahead + 1 :], begun, strict=False):
        for wait in sent[late]:
            if order[wait] > order[first]:
                first.prepend(wait)


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
        own = order[n] if n.target in STARTS and "backward" in n.meta else acted if acts(n) else -1
        arrives[n] = max([own, *(arrives[i] for i in n.all_input_nodes)])
        acted = arrives[n] if acts(n) else acted
    output = nodes[-1]
    for n in sorted(tail, key=lambda n: arrives[n]):
        output.prepend(n)
