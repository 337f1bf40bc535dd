"""`shorten`: fewer ops for the same bits."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardlib.graph.nodes import arg, dead_code, emit, written

aten = torch.ops.aten


def shorten(module: GraphModule) -> GraphModule:
    """Leave out an op whose work another does on the way.

        z + (-x) * y                               ->      z - x * y
        clone(permute(cat([a, b], 3), order))      ->      cat([permute(a, order), permute(b, order)], 2)

    The backward passes of rotations (of rotary positions) have both. Bitwise the same.
    """
    fixed = written(module.graph)
    for node in list(module.graph.nodes):
        if node in fixed or fixed & {*node.all_input_nodes}:
            continue
        with module.graph.inserting_before(node):
            if node.target is aten.add.Tensor:
                _without_neg(node)
            elif node.target is aten.clone.default:
                _in_order(node)
    return dead_code(module)


def _only(x: Any, target: Any) -> bool:
    """Whether a value is of such an op, and is read once."""
    return isinstance(x, Node) and x.target is target and len(x.users) == 1 and not x.kwargs


def _without_neg(total: Node) -> None:
    for product, other in (total.args, total.args[::-1]):
        if total.kwargs or not _only(product, aten.mul.Tensor) or not isinstance(other, Node):
            continue
        factors = list(product.args)  # type: ignore[union-attr]
        at = next((i for i, x in enumerate(factors) if _only(x, aten.neg.default)), None)
        if at is not None:
            factors[at] = arg(factors[at])  # type: ignore[arg-type]
            positive = emit(aten.mul.Tensor, tuple(factors), product)  # type: ignore[arg-type]
            return _instead(total, emit(aten.sub.Tensor, (other, positive), total))


def _in_order(copy: Node) -> None:
    """What is put together in the order in which it is wanted needs no copy."""
    turned: Any = arg(copy)
    if copy.kwargs.get("memory_format") is not torch.contiguous_format or not _only(turned, aten.permute.default):
        return
    joined, order = turned.args
    if not _only(joined, aten.cat.default):
        return
    parts, dim = joined.args[0], joined.args[1] if len(joined.args) > 1 else 0
    rank = len(order)
    if any(x.meta["val"].dim() != rank for x in parts):  # torch joins an empty vector with anything
        return
    order = [i % rank for i in order]
    each = [emit(aten.permute.default, (x, order), turned) for x in parts]
    new = emit(aten.cat.default, (each, order.index(dim % rank)), copy)
    if new.meta["val"].stride() == copy.meta["val"].stride():
        _instead(copy, new)


def _instead(old: Node, new: Node) -> None:
    old.replace_all_uses_with(new)
    new.meta = old.meta
