"""`hoist`: gathers of parameters and last waits leave called graphs, so that they can run beside other calls."""

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from shardlib.graph.buckets import UNPACK, parameters
from shardlib.graph.forms import ARRANGE, spread
from shardlib.graph.joint import Layer
from shardlib.graph.nodes import (
    STARTS,
    WAIT,
    aliased,
    ancestors,
    arg,
    dead_code,
    inputs,
    outputs,
    written,
)


def hoist(module: GraphModule) -> GraphModule:
    """Gather what a turn of a loop gathers of its inputs before its call; wait for what it returns where that is used.

        layer(w, x):                              layer(v, x):
            v = all_gather(w).wait()                  ...
            ...                                       return s_
            return s_.wait()              ->
                                                  v_ = all_gather(w)
        s = layer(w, x)                           s_ = layer(v_.wait(), x)
                                                  s = s_.wait()

    What is gathered goes in as it is used, unpacked and in order, so that only one copy of it is alive. `overlap` then
    issues a layer's gather while the layer before runs. Other graphs that are called keep theirs: a
    micro-batch's is long, and would have all its parameters whole. Bitwise the same.
    """
    sites: dict[Any, list[Node]] = {}
    for node in module.graph.nodes:
        if node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), Layer):
            sites.setdefault(node.target, []).append(node)
    for target, calls in sites.items():
        child: Any = module.get_submodule(target)
        for wait in [n for n in child.graph.nodes if n.target is WAIT]:
            chain = parameters(arg(wait)) if STARTS.get(arg(wait).target) == "all_gather" else None
            if chain is not None:
                _before(child.graph, [*chain, arg(wait)], _copied(wait), calls)
        pinned = written(dead_code(child).graph)
        for wait in [n for n in child.graph.nodes if n.target is WAIT and n not in pinned]:
            chain = _returned(wait)
            if chain is not None and _taken(child.graph, chain, calls):
                _after(child.graph, chain, calls)
        dead_code(child)
    return dead_code(module)


def _phases(node: Node) -> dict[str, Any]:
    return {k: node.meta[k] for k in ("forward", "backward", "remat") if k in node.meta}


def _copied(wait: Node) -> list[Node]:
    """A wait and what leads from it to copies in another order, in order."""
    family = spread(wait, ARRANGE | {UNPACK, getitem})[0]
    found = ancestors(n for n in family if n.target in (getitem, torch.ops.aten.clone.default))
    return [wait, *(n for n in family[1:] if n in found)]


def _before(graph: Graph, chain: Sequence[Node], results: Sequence[Node], calls: Sequence[Node]) -> None:
    """Move a chain of nodes that starts at inputs before the calls, and its results; what the rest of the graph reads
    of these are new inputs."""
    given = inputs(graph)
    ends = [n for n in results if any(u not in results for u in n.users)]
    for call in calls:
        copies: dict[Node, Node] = dict(zip(given, call.args, strict=True))  # type: ignore[arg-type]
        with call.graph.inserting_before(call):
            for n in (*chain, *results):
                copies[n] = call.graph.node_copy(n, copies.__getitem__)
                copies[n].meta |= _phases(call)
        call.args = (*call.args, *(copies[n] for n in ends))
    last = given[-1]
    for i, end in enumerate(ends, len(given)):
        with graph.inserting_after(last):
            last = graph.placeholder(f"whole{i}")
        last.meta = dict(end.meta)
        end.replace_all_uses_with(last, lambda u: u not in results)


def _returned(wait: Node) -> list[Node] | None:
    """A wait and what only arranges its result, in order, if nothing else in the graph reads any of it."""
    found = [wait]
    for n in found:
        found += [u for u in n.users if u not in found and u.all_input_nodes == [n] and _arranges(u)]
    mine = arg(wait).op == "call_function" and len(arg(wait).users) == 1
    return found if mine and all(u in found or u.op == "output" for n in found for u in n.users) else None


def _taken(graph: Graph, chain: Sequence[Node], calls: Sequence[Node]) -> bool:
    """Whether every call reads a result that the chain makes: else nothing would wait there for what is started."""
    at = {i for i, end in enumerate(outputs(graph)) if end in chain}
    return all(any(u.target is getitem and u.args[1] in at and u.users for u in call.users) for call in calls)


def _arranges(node: Node) -> bool:
    return node.target in ARRANGE or (node.op == "call_function" and node.target is not getitem and bool(aliased(node)))


def _after(graph: Graph, chain: Sequence[Node], calls: Sequence[Node]) -> None:
    """Return from a graph what a chain starts with a wait for, and make the chain after the calls."""
    start, ends = arg(chain[0]), outputs(graph)
    graph.output_node().args = ([*(None if e in chain else e for e in ends), start],)
    for call in calls:
        read = {u.args[1]: u for u in call.users if u.target is getitem}
        copies: dict[Node, Node] = {}
        with call.graph.inserting_after(call):
            copies[start] = call.graph.call_function(getitem, (call, len(ends)))
        copies[start].meta = dict(start.meta)
        at = copies[start]
        for n in chain:
            with call.graph.inserting_after(at):
                at = copies[n] = call.graph.node_copy(n, copies.__getitem__)
            at.meta |= _phases(call)
        for i, end in enumerate(ends):
            if end in chain and i in read:
                read[i].replace_all_uses_with(copies[end])
    for n in reversed(chain):
        graph.erase_node(n)
