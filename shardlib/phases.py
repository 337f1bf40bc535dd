"""Notes on the nodes of a traced graph: which part of a step made them, and what they hold."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
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


def again_for(node: Node) -> dict[str, int]:
    """The notes on what is computed again for a node: a `remat` of its own, within the node's backward pass."""
    return {k: node.meta[k] for k in ("backward",) if k in node.meta} | {"remat": next(_numbers)}


def noted(key: str, said: Any, values: Any) -> Any:
    """`values`, a tree; while a program is traced, their nodes know what they hold: `meta[key]`."""
    mode = get_proxy_mode()
    if mode is not None:
        for proxy in map(mode.tracer.unwrap_proxy, tree.leaves(values)):
            if isinstance(proxy, Proxy):
                proxy.node.meta[key] = said
    return values


def gradients(values: Iterable[Tensor], paths: Iterable[str]) -> None:
    """While a program is traced, the nodes of `values`, gradients of the leaves at `paths`, know whose they are:
    `meta["gradient"]`; so do the nodes before them of which they are but copies, sums over ranks or pieces of those."""
    mode = get_proxy_mode()
    if mode is None:
        return
    for proxy, path in zip(map(mode.tracer.unwrap_proxy, values), paths, strict=True):
        node = proxy.node if isinstance(proxy, Proxy) else None
        while node is not None and "gradient" not in node.meta:
            node.meta["gradient"] = path
            sources = node.all_input_nodes
            one = len(sources) == 1 and len(sources[0].users) == 1
            summed = getattr(node.target, "namespace", "") == "_c10d_functional"
            node = sources[0] if one and (summed or _numel(sources[0]) == _numel(node)) else None


def _numel(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else None
