"""`Switch`: a graph in which the ranks along one axis go different ways."""

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule


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
