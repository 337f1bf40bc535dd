"""`Switch`: a graph in which the ranks along one axis go different ways."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from shardlib.errors import RankError
from shardlib.watch import lost

AT = "_at_"  # between the name of a graph and the number of a call of it


class Switch(GraphModule):
    """`turns[i]` is what a rank of index `i` in the process group `group` runs; all take the same inputs and give
    results of the same shapes. As a graph it is the first of them; the graphs that they call are its children.
    """

    def __init__(self, root: torch.nn.Module, turns: Sequence[Graph], group: str) -> None:
        super().__init__(root, turns[0])
        for name, child in root.named_children():
            if name not in dict(self.named_children()):
                self.add_module(name, child)
        self.group, self.turns = group, list(turns)
        for graph in turns:
            graph.owning_module = self

    def turn(self, index: int) -> GraphModule:
        """What one of the ranks runs, as a module of its own."""
        graph = Graph()
        graph.output(graph.graph_copy(self.turns[index], {}))
        return GraphModule(self, graph)

    def running(self, index: int) -> GraphModule:
        """The same, in which an error says what the rank was doing: `meta["doing"]` of the call that raised."""
        module = self.turn(index)
        for i, node in enumerate(module.graph.nodes):
            if node.op == "call_module" and "doing" in node.meta:
                named = f"{node.target}{AT}{i}"
                module.add_submodule(named, Doing(module.get_submodule(node.target), node.meta["doing"]))
                node.target = named
        module.delete_all_unused_submodules()
        module.recompile()
        return module


class Doing(torch.nn.Module):
    """A graph that is called to do something."""

    def __init__(self, graph: torch.nn.Module, doing: str) -> None:
        super().__init__()
        self.graph, self.doing = graph, doing

    def forward(self, *xs: Tensor) -> Any:
        try:
            return self.graph(*xs)
        except Exception as e:
            if lost(e):  # a peer, who is to blame
                raise
            raise RankError(f"{self.doing}: {type(e).__name__}: {e}") from e
