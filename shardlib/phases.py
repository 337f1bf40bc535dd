"""Which part of a derivative made a node of a traced graph: passes keep forward, backward and recomputation apart."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx.experimental.proxy_tensor import get_proxy_mode  # the graph that is being traced has no public name

_numbers = itertools.count(1)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """While a program is traced, nodes made in here carry `meta[name]`, a number that is this call's alone.

    Nodes that have one by an inner call keep it. Names: `forward`, `backward`, `remat` (what is computed again).
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
