"""Notes on the nodes of a traced graph: which part of a step made them, and what they hold."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # the graph that is being traced has no public name

from shardlib import tree

_numbers = itertools.count(1)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """While a program is traced, nodes made in here carry `meta[name]`, a number that is this call's alone.

    Nodes that have one by an inner call keep it. Passes keep `forward`, `backward` and `remat` (what is computed again)
    apart; what is `early` runs as soon as its operands are there.
    """
    mode = get_proxy_mode()
    if mode is None:
        yield
        return
    graph, number = mode.tracer.graph, next(_numbers)
    last = next(iter(reversed(graph.nodes)), None)
    yield
    for node in reversed(graph.nodes):
        if node is last:
            break
        node.meta.setdefault(name, number)


def part_of(node: Node) -> str:
    """`forward`, `backward` or `remat` where a node belongs to a derivative."""
    return next((k for k in ("remat", "backward", "forward") if k in node.meta), "")


def noted(kind: str, values: Any) -> Any:
    """`values`, a tree; while a program is traced, their nodes know that they hold `kind`."""
    mode = get_proxy_mode()
    if mode is not None:
        for proxy in map(mode.tracer.unwrap_proxy, tree.leaves(values)):
            if isinstance(proxy, Proxy):
                proxy.node.meta["kind"] = kind
    return values
