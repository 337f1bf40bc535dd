"""`placed`: what is sent is made where the others read it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardlib import posted
from shardlib.graph.buckets import PACK
from shardlib.graph.nodes import WAIT, arg, emit, few, group, outputs, positions, roots, size_of

aten = torch.ops.aten
SMALL = 1 << 18  # bytes below which a copy costs little
_MAKERS: dict[Any, Any] = {aten.mm.default: {}, aten.clone.default: {"memory_format": torch.contiguous_format}}
_ALIGNED = 64  # bytes; a product of matrices that begins elsewhere is slower, and may have other bits


def placed(module: GraphModule, written: Sequence[Sequence[Node]]) -> GraphModule:
    """Make large operands of scatters and of sums in place where the other ranks read them: products of matrices, and
    what is put in order. `written`: for each node what it may write into.

        y = mm(a, b)                      ->      y = posted_empty(...); mm.out(a, b, out=y)
        posted_reduce_(y)                         posted_reduce_(y)

        y = pack([mm(a, b), c])           ->      y = posted_empty(...); mm.out(a, b, out=y[:n]); y[n:].copy_(c)
        posted_reduce_(y)                         posted_reduce_(y)

    Nothing may write there after that, for the others may still read, and who gets what the graph returns might.
    """
    values = _Values(module, written)
    for start in list(module.graph.nodes):
        if len(start.users) != 1 or next(iter(start.users)).target is not WAIT:
            continue  # its caller waits
        sent = arg(start) if start.target is posted.SCATTER else [arg(start)] if start.target is posted.REDUCED_ else []
        for x in sent:
            maker = values.maker(x, start)
            if maker:
                with module.graph.inserting_before(maker):
                    _moved(maker, _empty(maker, start))
        if start.target is posted.REDUCED_ and arg(start).target is PACK:
            _packed(arg(start), start, values)
    return module


class _Values:
    """What makes, reads and writes into the values of a graph."""

    def __init__(self, module: GraphModule, written: Sequence[Sequence[Node]]) -> None:
        self.order, self.held = positions(module.graph), roots(module.graph)
        self.returned = {r for x in outputs(module.graph) for r in self.held.get(x, ())}
        self.last_read: dict[Node, int] = {}
        self.last_written: dict[Node, int] = {}
        for node, into in zip(module.graph.nodes, written, strict=True):
            self.last_read |= {r: self.order[node] for x in node.all_input_nodes for r in self.held[x]}
            self.last_written |= {r: self.order[node] for x in into for r in self.held[x]}
        self.moved = set[Node]()

    def maker(self, x: Node, start: Node, within: bool = False) -> Node | None:
        """What makes a value, if it can be told where: once. `within` something that the collective writes into."""
        root = next(iter(self.held[x]))
        if len(self.held[x]) > 1 or root in self.moved or root.kwargs != _MAKERS.get(root.target):
            return None
        whole = x.meta["val"].is_contiguous() and size_of(x) == size_of(root) >= SMALL
        if not whole or not self.settled(root, start) or (within and self.last_read[root] > self.order[start]):
            return None
        self.moved.add(root)
        return root

    def settled(self, root: Node, start: Node) -> bool:
        """Whether nothing writes there once it is sent."""
        return root not in self.returned and self.last_written.get(root, -1) <= self.order[start]


def _packed(pack: Node, start: Node, values: _Values) -> None:
    """Put into a bucket what it is to hold when that is made, where anything can be."""
    if len(pack.users) > 1 or not values.settled(pack, start):
        return
    at, places, makers = 0, list[tuple[int, int]](), dict[int, Node]()
    for i, x in enumerate(arg(pack)):
        val = x.meta["val"]
        places.append((at, at := at + val.numel()))
        if places[i][0] * val.itemsize % _ALIGNED == 0 and (maker := values.maker(x, start, within=True)):
            makers[i] = maker
    if not makers:
        return
    first = min(makers.values(), key=values.order.__getitem__)
    with pack.graph.inserting_before(first):
        whole = _empty(pack, start)
        whole.meta |= {"kind": "buckets", "gradient": few([x.meta.get("gradient", x.name) for x in arg(pack)])}
    for i, place in enumerate(places):
        x, maker = arg(pack)[i], makers.get(i)
        with pack.graph.inserting_before(maker or pack):
            piece = emit(aten.slice.Tensor, (whole, 0, *place), x)
            piece = emit(aten.view.default, (piece, list((maker or x).meta["val"].shape)), x)
            if maker:
                _moved(maker, piece)
            else:
                emit(aten.copy_.default, (piece, x), x)
    pack.replace_all_uses_with(whole)
    pack.graph.erase_node(pack)


def _empty(like: Node, start: Node) -> Node:
    """Memory for a value."""
    val: Any = like.meta["val"]
    node = like.graph.call_function(posted.EMPTY, ([*val.shape], val.dtype, group(start)[0]))
    node.meta = dict(like.meta)
    return node


def _moved(maker: Node, into: Node) -> None:
    """Make a value there."""
    with maker.graph.inserting_before(maker):
        if maker.target is aten.clone.default:
            new = maker.graph.call_function(aten.copy_.default, (into, *maker.args))
        else:
            new = maker.graph.call_function(aten.mm.out, maker.args, {"out": into})
    new.meta = dict(maker.meta)
    maker.replace_all_uses_with(into)
    maker.graph.erase_node(maker)
