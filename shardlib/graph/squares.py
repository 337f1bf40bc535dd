"""`squares`: sums of squares in one reading."""

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardlib.graph.nodes import arg, dead_code, emit, written

aten = torch.ops.aten
_TILE = 1 << 16  # elements that one product of vectors sums up, in a handful of running sums

_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("sum_of_squares(Tensor x) -> Tensor")


def squares(module: GraphModule) -> GraphModule:
    """Sum squares while they are read, as the global norm of gradients does, and keep none of them.

        sum(x * x)                        ->      sum_of_squares(x)

    Of float32 and float64, in another order: some 1e-6 of a sum in float32, however many there are.
    """
    fixed = None
    for node in module.graph.find_nodes(op="call_function", target=aten.sum.default):
        product = arg(node)
        if node.kwargs or product.target is not aten.mul.Tensor or product.args[0] is not product.args[1]:
            continue
        fixed = written(module.graph) if fixed is None else fixed
        whole = arg(product).meta["val"].is_contiguous() and product.meta["val"].dtype in (torch.float32, torch.float64)
        if whole and len(product.users) == 1 and fixed.isdisjoint([arg(product), product, node]):
            with node.graph.inserting_before(product):
                new = emit(SQUARES, (arg(product),), node)
            node.replace_all_uses_with(new)
            new.meta = node.meta
    return module if fixed is None else dead_code(module)


def _summed(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return torch.linalg.vector_norm(x).square()
    return torch.stack([torch.dot(part, part) for part in x.reshape(-1).split(_TILE)]).sum()


_lib.impl("sum_of_squares", _summed, "CompositeExplicitAutograd")
_lib.impl("sum_of_squares", lambda x: x.new_empty(()), "Meta")
SQUARES = torch.ops.shardlib.sum_of_squares.default
