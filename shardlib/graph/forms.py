"""Forms of one value: what only arranges its elements anew, from an input to what is sent, from there to its uses."""

import operator
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch.fx import Node

from shardlib.graph.nodes import arg

# what only arranges a value's elements anew, or leaves some out, as the padding of an uneven dimension
ARRANGE: set[Any] = {
    *(getattr(torch.ops.aten, name).default for name in "view _unsafe_view permute t clone expand unsqueeze".split()),
    torch.ops.aten.transpose.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.squeeze.dim,
}
_RESHAPE = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def arranged(node: Node) -> list[Node]:
    """A node and all that only arranges its value anew, in order."""
    return spread(node, ARRANGE)[0]


def spread(node: Node, through: Set[Any]) -> tuple[list[Node], list[Node]]:
    """A value and what ops of a kind make of it, in order; and what else uses any of that."""
    family, uses, seen = [node], list[Node](), {node}
    for n in family:
        new = [u for u in n.users if u not in seen]
        seen.update(new)
        for u in new:
            (family if u.target in through else uses).append(u)
    return family, uses


def product_of(x: Node, adding: Mapping[Node, Set[Node]] | None = None) -> list[Node]:
    """A value and what it is a reshape of, down to a product of matrices; none where it is no product, or something
    else reads what lies below. `adding`: by node those readers that do not count."""
    chain = [x]
    while chain[-1].target in _RESHAPE:
        below = arg(chain[-1])
        if len({*below.users} - (adding or {}).get(below, set())) != 1:
            return []
        chain.append(below)
    return chain if chain[-1].target is torch.ops.aten.mm.default else []


def at_rest(node: Node) -> list[Node] | None:
    """The nodes that arrange or cast one input of the graph, or a slice of one, into this value, in order; None where
    it is computed."""
    chain: list[Node] = []
    while len(node.all_input_nodes) == 1 and (node.target in ARRANGE or _slices(node) or _casts(node)):
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain[::-1] if node.op == "placeholder" else None


def _slices(node: Node) -> bool:
    return (arg(node) if node.target is operator.getitem else node).target is torch.ops.aten.unbind.int


def _casts(node: Node) -> bool:
    return node.target is torch.ops.aten._to_copy.default and node.kwargs.keys() == {"dtype"}
