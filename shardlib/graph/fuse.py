"""`fuse`: groups of element-wise ops and reductions become graphs of their own, for a compiler to make one loop of."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shardlib.graph.nodes import written

aten = torch.ops.aten
_REDUCES = frozenset(
    "sum mean amax amin _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data var_mean "
    "native_layer_norm native_layer_norm_backward".split()
)
_MOVES = frozenset(
    "cat stack clone _to_copy constant_pad_nd slice_backward full zeros ones zeros_like ones_like full_like".split()
)
_JOINS, _FEW = frozenset(("cat", "stack")), 4  # those of more operands are copies of values that others have made
_VIEWS = frozenset("view _unsafe_view permute t transpose unsqueeze squeeze expand slice select split".split())


@dataclass
class _Group:
    """Nodes that run together, where the last of them stood."""

    nodes: list[Node] = field(default_factory=list)
    open: bool = True  # nothing outside has read a value of it


class Island(GraphModule):
    """A group as a graph; equal groups are one."""


def fuse(module: GraphModule) -> GraphModule:
    """Call a graph for every group of element-wise ops and reductions that nothing else stands between.

        g = mm(x, a); u = mm(x, b)                g = mm(x, a); u = mm(x, b)
        s = silu(g)                       ->      h = fused_1(g, u)
        h = s * u                                 y = mm(h, c)
        y = mm(h, c)

    Equal groups (of equal layers) call one graph, so what a compiler has to do does not grow with depth. Products,
    collectives, attention, what works in place, single numbers, and `stack` and `cat` of many operands (gradients of
    all layers) stay where they are. Bitwise the same until compiled.
    """
    names: dict[str, str] = {}
    for group in _groups(module.graph):
        _replace(module, group, names)
    module.graph.lint()
    return module


def _groups(graph: Graph) -> Iterator[list[Node]]:
    """What is worth a graph: two ops or more that compute or move values."""
    of: dict[Node, _Group] = {}
    found: list[_Group] = []
    pinned = written(graph)
    for node in graph.nodes:
        kind = _kind(node) if node not in pinned and not pinned & {*node.all_input_nodes} else None
        near = {id(g): g for a in node.all_input_nodes if (g := of.get(a)) is not None and g.open}
        if kind is None or (kind == "view" and not near):
            for g in near.values():
                g.open = False
            continue
        first, *others = near.values() or [_Group()]
        if not near:
            found.append(first)
        for g in others:
            first.nodes += g.nodes
            of |= dict.fromkeys(g.nodes, first)
            found.remove(g)
        first.nodes.append(node)
        of[node] = first
    order = {n: i for i, n in enumerate(graph.nodes)}
    for nodes in (sorted(g.nodes, key=order.__getitem__) for g in found):
        several = (n for n in nodes if not isinstance(n.meta.get("val"), Tensor))
        if sum(_kind(n) == "op" for n in nodes) > 1 and all({*nodes} >= {*n.users} for n in several):
            yield nodes


def _kind(node: Node) -> str | None:
    """`op`, `view`, or None for what stays apart."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return "view" if source.op == "call_function" and _kind(source) else None
    value, target = node.meta.get("val"), cast(Any, node.target)
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable or not schema.name.startswith("aten::"):
        return None
    name = schema.name.removeprefix("aten::")
    if name in _VIEWS:
        return "view"
    if name in _REDUCES:
        return "op"
    if name in _JOINS and len(node.all_input_nodes) > _FEW:
        return None
    # Not numbers, which cost nothing, nor integers, whose overflow C++ leaves undefined.
    plain = isinstance(value, Tensor) and value.numel() > 1 and (value.is_floating_point() or value.dtype == torch.bool)
    return "op" if plain and (name in _MOVES or torch.Tag.pointwise in target.tags) else None


def _replace(module: GraphModule, nodes: list[Node], names: dict[str, str]) -> None:
    """A call of the group's graph instead of its nodes."""
    inside, graph = set(nodes), Graph()
    given = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    copies: dict[Node, Node] = {}
    for i, a in enumerate(given):
        copies[a] = graph.placeholder(f"x{i}")
        copies[a].meta["val"] = a.meta["val"]
    for n in nodes:
        copies[n] = graph.node_copy(n, copies.__getitem__)
        copies[n].name = f"y{len(copies)}"
    results = [n for n in nodes if isinstance(n.meta.get("val"), Tensor) and not inside >= {*n.users}]
    graph.output(tuple(copies[n] for n in results))
    key = str([(n.op, str(n.target), str(n.args), str(n.kwargs), _layout(n)) for n in graph.nodes])
    if key not in names:
        names[key] = f"fused_{len(names) + 1}"
        module.add_submodule(names[key], Island(module, graph))
    last = nodes[-1]
    with last.graph.inserting_after(last):
        call = last.graph.call_module(names[key], tuple(given))
    call.meta = {k: v for k, v in last.meta.items() if k not in ("val", "kind")}
    at = call
    for i, n in enumerate(results):
        with last.graph.inserting_after(at):
            at = last.graph.call_function(operator.getitem, (call, i))
        at.meta = n.meta
        n.replace_all_uses_with(at)
    for n in reversed(nodes):
        last.graph.erase_node(n)


def _layout(node: Node) -> Any:
    x = node.meta.get("val")
    return (x.dtype, tuple(x.shape), x.stride(), x.device) if isinstance(x, Tensor) else None
