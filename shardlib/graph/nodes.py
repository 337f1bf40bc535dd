"""Nodes of traced graphs: what shares memory with what, what nothing needs, what a pass may move."""

import math
import operator
from collections.abc import Iterable, Sequence, Set
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from shardlib import debug as debug  # defines an op
from shardlib import wire as wire  # defines the ops
from shardlib.flow import UNDECLARED

WAIT = torch.ops._c10d_functional.wait_tensor.default
ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.view_copy.default,
}


def schema(node: Node) -> Any:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _nodes(arg: Any) -> list[Node]:
    """The nodes among one argument: itself, or those of a list."""
    return [a for a in (arg if isinstance(arg, (list, tuple)) else (arg,)) if isinstance(a, Node)]


def aliased(node: Node, written: bool = False) -> list[Node]:
    """The arguments that a call's result may share memory with, or with `written` those that it writes into."""
    if node.target is operator.getitem:
        return [] if written else _nodes(node.args[0])
    if node.target is WAIT:
        return [] if written else _nodes(node.args[0])
    said_by = schema(node)
    if said_by is None:
        return []
    name = said_by.name.split("::")[1]
    if name in UNDECLARED:
        return [a for arg in node.args[3:5] for a in _nodes(arg)] if written and node.args[5] else []
    if not written and "unsafe" in name:
        return _nodes(node.args[0])
    given = [*zip(said_by.arguments, node.args, strict=False)]
    given += [(a, node.kwargs[a.name]) for a in said_by.arguments if a.name in node.kwargs]
    said = [(a.alias_info, arg) for a, arg in given if a.alias_info is not None]
    return [n for info, arg in said if info.is_write or not written for n in _nodes(arg)]


def acts(node: Node) -> bool:
    """Whether a node is there for what it does: its op returns nothing and writes into nothing."""
    said_by = schema(node)
    return said_by is not None and not said_by.returns and not aliased(node, written=True)


def clean(module: GraphModule) -> GraphModule:
    """Without aliases and views that change nothing, and without dead nodes, collectives included (FX keeps those:
    `wait_tensor` counts as impure there)."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.args and isinstance(node.args[0], Node):
            same = node.target in ALIASES
            if node.target in _VIEWS:
                a, b = node.args[0].meta.get("val"), node.meta.get("val")
                same = (
                    isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.stride() == b.stride()
                )
            if same:
                if "kind" in node.meta:
                    node.args[0].meta.setdefault("kind", node.meta["kind"])
                node.replace_all_uses_with(node.args[0])
    _moved_early(module.graph)
    return dead_code(module)


def _moved_early(graph: torch.fx.Graph) -> None:
    """Put the nodes that are marked `early` behind the last of their operands, and behind what wrote into those."""
    place: dict[Node, tuple[int, int]] = {}
    held, last = roots(graph), dict[Node, int]()
    first = len(inputs(graph))
    for i, node in enumerate(graph.nodes):
        operands = node.all_input_nodes
        after = [place[a][0] for a in operands] + [last[r] for a in operands for r in held[a] if r in last]
        place[node] = (max([first, *after]), i) if "early" in node.meta else (i, i)
        last |= {r: place[node][0] for a in aliased(node, written=True) for r in held[a]}
    for node, following in pairwise(sorted(place, key=place.__getitem__)):
        if node.next is not following:
            node.append(following)


def roots(graph: torch.fx.Graph) -> dict[Node, set[Node]]:
    """For every node, the nodes whose storage its value lies in: itself, or what it is a view of."""
    found: dict[Node, set[Node]] = {}
    children: dict[Any, list[tuple[set[int], set[int]]]] = {}
    first: dict[tuple[Node, int], Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if node.target is not operator.getitem or not isinstance(source, Node):
            held = {r for a in aliased(node) for r in found[a]}
        elif source.op == "call_module":
            if source.target not in children:
                children[source.target] = _returned(graph.owning_module.get_submodule(source.target))  # type: ignore[union-attr, arg-type]
            handed, same = children[source.target][int(node.args[1])]  # type: ignore[call-overload, arg-type]
            held = {r for i in handed for r in found[source.args[i]]} | {  # type: ignore[index]
                first.setdefault((source, i), node) for i in same
            }
        else:
            held = found[source] - {source}  # one of several new results, or of several views
        found[node] = held or {node}
    return found


def _returned(child: Any) -> list[tuple[set[int], set[int]]]:
    """For each result of a called graph, the inputs whose storages it hands back, and its new storages by number."""
    inner, given = roots(child.graph), inputs(child.graph)
    numbers = {n: i for i, n in enumerate(inner)}
    held = [inner.get(end, set()) for end in outputs(child.graph)]
    return [
        ({i for i, n in enumerate(given) if n in rs}, {numbers[r] for r in rs if r.op != "placeholder"}) for rs in held
    ]


def inputs(graph: torch.fx.Graph) -> list[Node]:
    """The placeholders of a graph, in order."""
    return [n for n in graph.nodes if n.op == "placeholder"]


def outputs(graph: torch.fx.Graph) -> list[Any]:
    """What a graph returns."""
    (found,) = graph.output_node().args
    return list(found) if isinstance(found, (list, tuple)) else [found]


def ancestors(ends: Iterable[Node], known: Set[Node] = frozenset()) -> set[Node]:
    """The nodes that some are computed from, themselves included, but for those that are known already."""
    found: set[Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node not in found and node not in known:
            found.add(node)
            stack += node.all_input_nodes
    return found


def dead_code(module: GraphModule) -> GraphModule:
    """Remove every node that no output needs. A write in place is needed where its storage is, what `acts` always."""
    graph = module.graph
    held = roots(graph)
    writes = [(n, {r for a in into for r in held[a]}) for n in graph.nodes if (into := aliased(n, written=True))]
    needed: set[Node] = set()
    ends = [n for n in graph.nodes if n.op in ("output", "placeholder") or acts(n)]
    while ends:
        needed |= ancestors(ends, needed)
        live = {r for n in needed for r in held[n]}
        ends = [n for n, into in writes if n not in needed and into & live]
    for node in reversed(list(graph.nodes)):
        if node not in needed:
            graph.erase_node(node)
    return module


def sliced(module: GraphModule, outputs: Sequence[int]) -> GraphModule:
    """The graph of some of the outputs, without what `acts`."""
    made = GraphModule(module, torch.fx.Graph())
    values: dict[Node, Node] = {}
    results = made.graph.graph_copy(module.graph, values)
    for node in reversed([n for n in made.graph.nodes if acts(n)]):
        made.graph.erase_node(node)
    made.graph.output([results[i] for i in outputs])  # type: ignore[index]
    dead_code(made).recompile()
    return made


def used_placeholders(module: GraphModule) -> list[bool]:
    """Which inputs a graph reads."""
    return [bool(n.users) for n in inputs(module.graph)]


# ---- collectives

STARTS: dict[Any, str] = {
    torch.ops._c10d_functional.all_reduce.default: "psum",
    torch.ops._c10d_functional.all_gather_into_tensor.default: "all_gather",
    torch.ops._c10d_functional.reduce_scatter_tensor.default: "psum_scatter",
    torch.ops._c10d_functional.all_to_all_single.default: "all_to_all",
    torch.ops._c10d_functional.broadcast.default: "pbroadcast",
    torch.ops.shardlib.permute.default: "ppermute",
}
# those whose operand is kept until they have been waited for; the others send a copy, which becomes the result
KEEP = {start for start, name in STARTS.items() if name not in ("psum", "pbroadcast", "ppermute")}
# what only arranges a value's elements anew
ARRANGE: set[Any] = {
    *(getattr(torch.ops.aten, name).default for name in "view _unsafe_view permute t clone expand unsqueeze".split()),
    torch.ops.aten.transpose.int,
    torch.ops.aten.squeeze.dim,
}


def op_name(node: Node) -> str:
    """What a node calls: `mm`, `all_gather`."""
    said_by = schema(node)
    if said_by is None:
        return str(getattr(node.target, "__name__", node.target))
    return STARTS.get(node.target) or ("wait" if node.target is WAIT else said_by.name.partition("::")[2])


def wait_of(start: Node) -> Node:
    """The node that waits for a collective."""
    (wait,) = start.users
    return wait


def started(module: GraphModule, value: Node) -> Node:
    """The node that starts what a wait is for: itself, or in a graph that is called one that is returned."""
    call = arg(value) if value.target is operator.getitem else value
    if call.op != "call_module":
        return value
    child: Any = module.get_submodule(str(call.target))
    return outputs(child.graph)[arg(value, 1)]


def group(start: Node) -> tuple[str, int]:
    """The name of the group that a collective runs over, and its size."""
    name = next(a for a in reversed(start.args) if isinstance(a, str) and "/" in a)
    mesh, axes = name.split("/")
    sizes = dict(pair.split("=") for pair in mesh.split(","))
    return name, math.prod(int(sizes[a]) for a in axes.split(","))


def arg(node: Node, i: int = 0) -> Any:
    """One of the arguments of a node's call."""
    return node.args[i]


def positions(graph: torch.fx.Graph) -> dict[Node, int]:
    """The place of every node in the order in which they run."""
    return {n: i for i, n in enumerate(graph.nodes)}


def emit(target: Any, args: tuple[Any, ...], like: Node) -> Node:
    """A new node where the graph inserts, of the phase of another, with the value that it will have."""
    node = like.graph.call_function(target, args)
    node.meta = {k: like.meta[k] for k in ("forward", "backward", "remat", "stack_trace") if k in like.meta}
    node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
    return node


def size_of(node: Node) -> int:
    """The bytes of a node's value."""
    x = node.meta["val"]
    return x.numel() * x.dtype.itemsize


def written(graph: torch.fx.Graph) -> set[Node]:
    """The nodes whose storage some node writes into: nothing that reads them may move."""
    held = roots(graph)
    into = {r for n in graph.nodes for a in aliased(n, written=True) for r in held[a]}
    return {n for n, rs in held.items() if rs & into}


def arranged(node: Node) -> list[Node]:
    """A node and all that only arranges its value anew, in order."""
    found = [node]
    for n in found:
        found += [u for u in n.users if u.target in ARRANGE and arg(u) is n and u not in found]
    return found


def at_rest(node: Node) -> list[Node] | None:
    """The nodes that arrange one input of the graph, or a slice of one, into this value, in order; None where it is
    computed."""
    chain: list[Node] = []
    while len(node.all_input_nodes) == 1 and (node.target in ARRANGE or _slices(node)):
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain[::-1] if node.op == "placeholder" else None


def _slices(node: Node) -> bool:
    return (arg(node) if node.target is operator.getitem else node).target is torch.ops.aten.unbind.int


def spread(node: Node, through: Set[Any]) -> tuple[list[Node], list[Node]]:
    """A value and what ops of a kind make of it, in order; and what else uses any of that."""
    family, uses = [node], list[Node]()
    for n in family:
        for u in n.users:
            mine = u.target in through
            if u not in (family if mine else uses):
                (family if mine else uses).append(u)
    return family, uses
