"""Gradients that are added up where they are made: a backward graph is given the sums of the micro-batches before."""

from collections.abc import Sequence
from contextlib import nullcontext
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shardlib.graph.forms import product_of
from shardlib.graph.joint import Layer
from shardlib.graph.nodes import WAIT, arg, emit, outputs

aten = torch.ops.aten


class Place(NamedTuple):
    """Where a result is added: the number of the sum, which of its slices (None: all of it), and whether that has no
    value yet, so that the result is all of it."""

    sum: int
    at: int | None = None
    new: bool = False


def adding(module: GraphModule, places: Sequence[Place | None], sums: Sequence[Tensor]) -> GraphModule:
    """A graph that adds those of its results that have a place to sums like `sums`, given after its inputs; it returns
    the other results, then the sums.

        g = mm(a, b); return x, g         ->      addmm.out(s, a, b, out=s); return x, s

    Where a sum has no value yet, it is the result: mm.out(a, b, out=s). What is added at once is not kept, nor read
    again from far away. What another rank sends is added at the end, so that the graph goes on until it is there.
    """
    graph, root = Graph(), torch.nn.Module()
    ends: Any = graph.graph_copy(module.graph, {})
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            setattr(root, node.target, getattr(module, node.target))
    given = _given(graph, sums)
    pairs = [(end, _slice(given, p), p.new) for end, p in zip(ends, places, strict=True) if p is not None]
    out = graph.output([*(end for end, place in zip(ends, places, strict=True) if place is None), *given])
    alone = {end for end, *_ in pairs if not end.users and sum(end is other for other, *_ in pairs) == 1}
    inside: dict[Node, dict[int, tuple[Node, bool]]] = {}  # by call and number of its result: where that is added
    for end, into, new in pairs:
        if end in alone and _of_layer(root, end):
            inside.setdefault(arg(end), {})[arg(end, 1)] = into, new
        else:
            with graph.inserting_before(out if end.op == "placeholder" or _sent(root, end) else end.next):
                _add(end, into, new, end in alone)
    named: dict[Any, str] = {}
    for call, found in inside.items():
        _into_call(root, call, found, named)
    return (Layer if isinstance(module, Layer) else GraphModule)(root, graph)


def _given(graph: Graph, values: Sequence[Tensor]) -> list[Node]:
    """New inputs, after those that there are, that hold values like these."""
    after, found = next((n for n in graph.nodes if n.op != "placeholder"), None), list[Node]()
    with graph.inserting_before(after) if after else nullcontext():
        for i, value in enumerate(values):
            found.append(graph.placeholder(f"sum{i}"))
            found[-1].meta["val"] = value
    return found


def _slice(given: Sequence[Node], place: Place) -> Node:
    """What of the sums a result is added to."""
    whole = given[place.sum]
    if place.at is None:
        return whole
    with whole.graph.inserting_after(given[-1]):
        return emit(aten.select.int, (whole, 0, place.at), whole)


def _sent(root: torch.nn.Module, end: Node) -> bool:
    """Whether a result is what a collective gives, cast or put in order, here or in a called graph."""
    while end.target is not WAIT:
        source = end.all_input_nodes[0] if len(end.all_input_nodes) == 1 else None
        if source is not None and source.op == "call_module" and end.target is getitem:
            child: Any = root.get_submodule(str(source.target))
            return _sent(child, outputs(child.graph)[arg(end, 1)])
        if source is None or end.op != "call_function":
            return False
        end = source
    return True


def _of_layer(root: torch.nn.Module, end: Node) -> bool:
    """Whether a result is made by a called layer, of which others are read: else nothing would need the call."""
    call = arg(end) if end.target is getitem else end
    if call.op != "call_module" or not isinstance(root.get_submodule(str(call.target)), Layer) or _sent(root, end):
        return False
    return any(u.users for u in call.users)


def _into_call(root: torch.nn.Module, call: Node, found: dict[int, tuple[Node, bool]], named: dict[Any, str]) -> None:
    """Let a called layer add some of its results itself; `named`: the graphs that do, by layer and results."""
    sums, places = [into for into, _ in found.values()], {j: Place(k, None, found[j][1]) for k, j in enumerate(found)}
    key = call.target, *places.items()
    if key not in named:
        child: Any = root.get_submodule(str(call.target))
        each = [places.get(j) for j in range(len(outputs(child.graph)))]
        named[key] = f"{call.target}_adding_{len(named)}" if named else f"{call.target}_adding"
        root.add_module(named[key], adding(child, each, [into.meta["val"] for into in sums]))
    call.target, call.args = named[key], (*call.args, *sums)
    for item in list(call.users):
        j: Any = arg(item, 1)
        if j in found:
            call.graph.erase_node(item)
        else:
            item.args = (call, j - sum(i < j for i in found))


def _add(end: Node, into: Node, new: bool, alone: bool) -> None:
    """Add a result; a product of matrices that nothing else reads by the product itself."""
    chain = product_of(end) if alone else []
    if not chain or chain[-1].meta["val"].dtype != into.meta["val"].dtype:
        _writes(aten.copy_.default if new else aten.add.out, (into, end), into, end)
        return
    product = chain[-1]
    with end.graph.inserting_before(product.next):  # while its factors are what they were
        if product is not end:
            into = emit(aten.view.default, (into, list(product.meta["val"].shape)), end)
        target, args = (aten.mm.out, product.args) if new else (aten.addmm.out, (into, *product.args))
        _writes(target, args, into, product)
    for node in chain:  # from the last
        node.graph.erase_node(node)


def _writes(target: Any, args: tuple[Any, ...], into: Node, like: Node) -> None:
    """A node that writes into a value, of the phase of another."""
    node = like.graph.call_function(target, args, {} if target is aten.copy_.default else {"out": into})
    node.meta = {k: v for k, v in like.meta.items() if k in ("backward", "remat", "stack_trace")} | {
        "val": into.meta["val"]
    }
