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
        embedding(clone(permute(w, [1, 0, 2])), i) ->      clone(permute(index_select(w, 1, i), [1, 0, 2]))

    The backward passes of rotations (of rotary positions) have the first two, a table that is gathered along its
    features the last. Bitwise the same: only of floating-point values of one dtype, which nothing writes into, and with
    results that lie in memory as they did.
    """
    targets = (aten.neg.default, aten.cat.default, aten.embedding.default)
    if not any(module.graph.find_nodes(op="call_function", target=t) for t in targets):
        return module
    fixed = written(module.graph)
    for node in list(module.graph.nodes):
        if node.kwargs.keys() - {"memory_format"} or node in fixed:
            continue
        with module.graph.inserting_before(node):
            if node.target is aten.add.Tensor:
                _without_neg(node, fixed)
            elif node.target is aten.clone.default:
                _in_order(node, fixed)
            elif node.target is aten.embedding.default:
                _rows_first(node, fixed)
    return dead_code(module)


def _only(x: Any, target: Any) -> bool:
    """Whether a value is of such an op, and is read once."""
    return isinstance(x, Node) and x.target is target and len(x.users) == 1 and not x.kwargs


def _without_neg(total: Node, fixed: set[Node]) -> None:
    for product, other in (total.args, total.args[::-1]):
        if product is other or not _only(product, aten.mul.Tensor):
            continue
        factors: list[Any] = list(product.args)  # type: ignore[union-attr]
        at = next((i for i, x in enumerate(factors) if _only(x, aten.neg.default)), None)
        if at is None:
            continue
        factors[at] = arg(factors[at])
        values = [total, product, other, *factors]
        dtypes = {x.meta["val"].dtype if isinstance(x, Node) else None for x in values}
        if len(dtypes) == 1 and total.meta["val"].is_floating_point() and fixed.isdisjoint(values):
            positive = emit(aten.mul.Tensor, tuple(factors), product)  # type: ignore[arg-type]
            return _instead(total, emit(aten.sub.Tensor, (other, positive), total))


def _in_order(copy: Node, fixed: set[Node]) -> None:
    """What is put together in the order in which it is wanted needs no copy."""
    turned: Any = arg(copy)
    if copy.kwargs.get("memory_format") is not torch.contiguous_format or not _only(turned, aten.permute.default):
        return
    joined, order = turned.args
    if not _only(joined, aten.cat.default) or not fixed.isdisjoint([joined, *joined.args[0]]):
        return
    parts, dim = joined.args[0], joined.args[1] if len(joined.args) > 1 else 0
    rank = len(order)
    if any(x.meta["val"].dim() != rank for x in parts):  # torch joins an empty vector with anything
        return
    order = [i % rank for i in order]
    each = [emit(aten.permute.default, (x, order), turned) for x in parts]
    _instead(copy, emit(aten.cat.default, (each, order.index(dim % rank)), copy))


def _rows_first(taken: Node, fixed: set[Node]) -> None:
    """Rows are taken from the parts of a table, and put in order, not the whole table."""
    table: Any = arg(taken, 0)
    at: Any = arg(taken, 1)
    if not _only(table, aten._unsafe_view.default) and not _only(table, aten.view.default):
        return
    copy: Any = arg(table)
    if copy.target is not aten.clone.default or len(copy.users) > 1 or not _only(arg(copy), aten.permute.default):
        return
    parts, order = arg(copy).args
    rows, shape = at.meta["val"].numel(), parts.meta["val"].shape
    if order != [1, 0, 2] or table.meta["val"].shape != (shape[1], shape[0] * shape[2]) or rows >= shape[1]:
        return
    if not fixed.isdisjoint([parts, at, copy, table]):
        return
    found: Any = emit(aten.view.default, (at, [rows]), taken)
    found = emit(aten.permute.default, (emit(aten.index_select.default, (parts, 1, found), taken), [1, 0, 2]), taken)
    found = found.graph.call_function(aten.clone.default, (found,), {"memory_format": torch.contiguous_format})
    found.meta = copy.meta | {"val": arg(found).meta["val"].contiguous()}
    _instead(taken, emit(aten.view.default, (found, [*taken.meta["val"].shape]), taken))


def _instead(old: Node, new: Node) -> None:
    """Put a node in place of another, if it lies in memory like that."""
    if new.meta["val"].stride() == old.meta["val"].stride():
        old.replace_all_uses_with(new)
        new.meta = old.meta
