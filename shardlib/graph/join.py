"""`join`: one update for many leaves."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardlib import fused as fused  # defines the ops
from shardlib.graph.nodes import WAIT, aliased, arg, emit, roots, size_of

_ONE, _ALL = torch.ops.shardlib.adamw_.default, torch.ops.shardlib.adamw_all_.default


def join(module: GraphModule, limit: int = 16 << 20) -> GraphModule:
    """Make one call of updates in place that follow each other, for up to `limit` bytes of gradients.

        adamw_(p, g, m, v); adamw_(q, h, n, w)      ->      adamw_all_([p, q], [g, h], [m, n], [v, w])

    On a GPU that is one launch, on the CPU one call of torch. No update is put off beyond a wait or a call. Leaves of
    one call have the same dtypes and options. After `in_place`. Bitwise the same.
    """
    held = roots(module.graph)
    filling: dict[Any, list[Node]] = {}
    read, wrote = set[Node](), set[Node]()  # storages, by what is in there
    for node in list(module.graph.nodes):
        reads = {r for a in node.all_input_nodes for r in held[a]}
        writes = {r for a in aliased(node, written=True) for r in held[a]}
        if node.target is WAIT or node.op in ("call_module", "output") or reads & wrote or writes & read:
            _merged(filling, [*filling])
            read, wrote = set[Node](), set[Node]()
        if node.target is _ONE:
            p, g, m = (arg(node, i).meta["val"].dtype for i in range(3))
            key = (*node.args[4:], p, g, m)
            if key in filling and sum(size_of(arg(n, 1)) for n in (*filling[key], node)) > limit:
                _merged(filling, [key])
            filling.setdefault(key, []).append(node)
            read, wrote = read | reads, wrote | writes
    return module


def _merged(filling: dict[Any, list[Node]], keys: list[Any]) -> None:
    """Make one call of those of each key, where the last was."""
    for updates in map(filling.pop, keys):
        last = updates[-1]
        if len(updates) > 1:
            with last.graph.inserting_before(last):
                lists = [[arg(n, i) for n in updates] for i in range(4)]
                emit(_ALL, (*lists, *last.args[4:]), last)
            for n in updates:
                n.graph.erase_node(n)
