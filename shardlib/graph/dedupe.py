"""`dedupe`: what is sent twice is sent once."""

from typing import Any

from torch.fx import GraphModule, Node

from shardlib.graph.forms import ARRANGE
from shardlib.graph.nodes import STARTS, WAIT, dead_code, written


def dedupe(module: GraphModule) -> GraphModule:
    """Make each collective once: a later one of the same op, operand and group becomes the earlier result.

        a = all_gather(w); y = x @ a              a = all_gather(w); y = x @ a
        b = all_gather(w); z = y @ b      ->      z = y @ a

    Arrangements of one value (views, transposed copies) are made once too. What `remat` computes again stays apart:
    it is there so that the first value need not be kept. Values in place are left alone. Bitwise the same.
    """
    pinned = written(module.graph)
    first: dict[Any, Node] = {}
    for node in list(module.graph.nodes):
        if node in pinned or not (node.target in STARTS or node.target in ARRANGE or node.target is WAIT):
            continue
        key = (node.target, node.args, frozenset(node.kwargs.items()), node.meta.get("remat"))
        same = first.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
    return dead_code(module)
