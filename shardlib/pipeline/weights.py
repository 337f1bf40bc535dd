"""The graphs between those of a pipeline's functions: weights gathered, gradients reduced, as a layout says."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardlib.accumulate import summed
from shardlib.graph.trace import Meta, typed
from shardlib.mesh import Mesh
from shardlib.sharding import move
from shardlib.spec import Spec


class Gather:
    """The graph that brings some of a stage's parameters from how they lie at rest (`given`) to `specs` (None: stays),
    replicated where they are gathered. `at`: which those are; `used`: what the functions then take."""

    def __init__(self, given: Sequence[Meta], specs: Sequence[Spec | None], mesh: Mesh) -> None:
        moved = {i: spec for i, spec in enumerate(specs) if spec is not None}
        self.at, self.used = list(moved), list(given)
        if not moved:
            return

        def run(*xs: Tensor) -> list[Tensor]:
            return [move(x, spec, False) for x, spec in zip(xs, moved.values(), strict=True)]

        self.graph, self.results, _ = typed(run, mesh, [given[i] for i in moved], "gather")
        for i, m in zip(self.at, self.results, strict=True):
            self.used[i] = m


def reduction(
    given: Sequence[Meta], specs: Sequence[Spec], mesh: Mesh, dtype: torch.dtype | None
) -> tuple[GraphModule, list[Meta]]:
    """The graph that brings gradients to `specs`, sums made in `dtype` (None: their own), and what it gives."""

    def run(*xs: Tensor) -> list[Tensor]:
        return summed(list(xs), list(specs), dtype)

    graph, found, _ = typed(run, mesh, given, "reduce")
    return graph, found


class Sums(dict[Any, Tensor]):
    """Sums by key: the second tensor makes a value of its own, into which further ones are written."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh = set[Any]()

    def add(self, key: Any, x: Tensor) -> None:
        """Add to a sum."""
        if key not in self:
            self[key] = x.contiguous()
        elif key in self.fresh:
            self[key].add_(x)
        else:
            self[key] = self[key] + x
            self.fresh.add(key)

    def take(self, key: Any) -> Tensor:
        """Remove a sum, and give it."""
        self.fresh.discard(key)
        return self.pop(key)
