"""`overlap`: communication runs behind compute: issued early, waited for late."""

from operator import getitem

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shardlib.graph.buckets import PACK, UNPACK
from shardlib.graph.nodes import ARRANGE, STARTS, WAIT, acts, arg, at_rest, positions, written

aten = torch.ops.aten
_THROUGH = ARRANGE | {WAIT, UNPACK, getitem, aten.slice.Tensor}  # of a collective's result, only another form


def overlap(module: GraphModule, ahead: int = 1) -> GraphModule:
    """Put every collective where its operand is ready, its wait where its result is used.

        v = all_gather(a).wait()                  a_ = all_gather(a)
        y = f(v)                                  v = a_.wait()
        w = all_gather(b).wait()          ->      b_ = all_gather(b)
        z = g(w)                                  y = f(v)
                                                  w = b_.wait(); z = g(w)

    Gathers of parameters are issued `ahead` gathers before their use, so that no more of them are whole at a time. What
    follows the backward pass runs in the order in which reductions come in, so that the optimizer works on the first
    gradients while the last are on the wire. The same on all ranks; bitwise the same results.
    """
    graph, pinned = module.graph, written(module.graph)
    _by_arrival(graph, pinned)
    _sink(graph, pinned)
    _prefetch(graph, pinned, ahead)
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
    for node in [*(n for n in nodes if n not in lazy), output]:
        run(node)
    for node in list(order)[:-1]:
        output.prepend(node)


def _number(node: Node) -> bool:
    x = node.meta.get("val")
    return node.op == "call_function" and node.target not in STARTS and isinstance(x, Tensor) and x.numel() == 1


def _prefetch(graph: Graph, pinned: set[Node], ahead: int) -> None:
    order = positions(graph)
    gathers = []
    for start in graph.nodes:
        if STARTS.get(start.target) == "all_gather" and not pinned & {start, *start.all_input_nodes}:
            x = arg(start)
            operands = arg(x) if x.target is PACK else [x]
            chains = [at_rest(o) for o in operands]
            if all(c is not None for c in chains):
                moved = [n for c in chains for n in c or ()] + ([x] if x.target is PACK else []) + [start]
                gathers.append((min(order[u] for u in _uses(start)), moved))
    nodes = list(graph.nodes)
    uses, moving = sorted({use for use, _ in gathers}), {n for _, moved in gathers for n in moved}
    for use, moved in gathers:
        i = uses.index(use) - ahead
        at = uses[i] if i >= 0 else 0
        before = next(n for n in nodes[at:] if n.op != "placeholder" and n not in moving)
        for node in dict.fromkeys(moved):
            if order[node] > order[before] or node is moved[-1]:
                before.prepend(node)


def _uses(start: Node) -> list[Node]:
    """What reads a collective's result, seen through its wait and what only arranges it."""
    family = [start]
    uses = []
    for n in family:
        for u in n.users:
            (family if u.target in _THROUGH else uses).append(u)
    return uses


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
