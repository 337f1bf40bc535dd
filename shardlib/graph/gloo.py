"""`for_gloo`, `by_messages`: collectives as gloo does them best."""

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardlib import posted
from shardlib.graph.buckets import PACK, UNPACK
from shardlib.graph.fuse import Island
from shardlib.graph.nodes import (
    STARTS,
    WAIT,
    aliased,
    arg,
    emit,
    group,
    inputs,
    outputs,
    positions,
    roots,
    size_of,
    started,
)
from shardlib.graph.placed import SMALL, placed

aten = torch.ops.aten
EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
_SAME = {
    EXCHANGE: posted.EXCHANGE,
    torch.ops._c10d_functional.all_reduce.default: posted.REDUCED,
    torch.ops._c10d_functional.all_reduce_.default: posted.REDUCED_,
}


def for_gloo(module: GraphModule, exchange: Any = EXCHANGE) -> GraphModule:
    """Scatter sums by an exchange, and add what arrives; also where a called graph starts what its caller waits for.

        y = psum_scatter(x)       ->      y = sum(exchange(x))

    gloo's own makes the whole sum on every rank first: it sends n times what is needed (measured for n = 2 and 4:
    2 (n-1)/n of the operand's bytes for (n-1)/n, and 1.7 to 2 times the CPU time).
    """
    waits: dict[Node, list[Node]] = {}  # by what they wait for: a start here, or one that a called graph returns
    for wait in [n for n in module.graph.nodes if n.target is WAIT]:
        waits.setdefault(started(module, arg(wait)), []).append(wait)
    for start, ends in waits.items():
        if not _scatters(start):
            continue
        name, n = group(start)
        rows = start.meta["val"].shape
        with start.graph.inserting_before(start):
            sent = emit(exchange, (arg(start), [rows[0]] * n, [rows[0]] * n, name), start)
        start.replace_all_uses_with(sent)
        start.graph.erase_node(start)
        for wait in ends:
            arg(wait).meta["val"] = wait.meta["val"] = sent.meta["val"]
            with wait.graph.inserting_before(wait.next):
                parts = emit(aten.view.default, (wait, [n, *rows]), wait)
                total = emit(aten.sum.dim_IntList, (parts, [0]), wait)
            wait.replace_all_uses_with(total, lambda u, parts=parts: u is not parts)
    return module


def by_messages(module: GraphModule) -> GraphModule:
    """Gathers, exchanges and scatters by messages of our own, from and to where the large tensors of a bucket are.

        v = all_gather(pack(a, b))        ->      v = posted_gather([a, b]).wait()
        w, x = unpack(v)                          w, x = v[:n], v[n:]

        y = psum_scatter(pack(a, b))      ->      v = posted_scatter([a, b]).wait()
                                                  y = posted_sum(v, [a, b])

    Tensors that are small, whose dims change places, that are written into while they would be sent, or that the
    graph returns, are packed as they were, with their neighbours.
    """
    order, held = positions(module.graph), roots(module.graph)
    returned = {r for x in outputs(module.graph) for r in held.get(x, ())}  # which is to have storage of its own
    written = [{r for a in _written(module, n) for r in held[a]} for n in module.graph.nodes]
    for start in [n for n in module.graph.nodes if n.target in STARTS]:
        wait = next(iter(start.users), start)
        if wait.target is not WAIT:  # a called graph's, for which its caller waits
            continue
        first = arg(start) if arg(start).target is PACK else start
        changed = set[Node]().union(*written[order[first] : order[wait]])

        def alone(x: Node, result: Node | None = None, changed: set[Node] = changed) -> bool:
            large = x.meta["val"].is_contiguous() and size_of(x) >= SMALL
            free = x in held and changed.isdisjoint(held[x])
            return large and free and (result is None or returned.isdisjoint(held[result]))

        if _scatters(start):
            _scatter(start, wait, alone)
        elif STARTS[start.target] == "all_gather":
            _gather(start, wait, alone)
    for node in for_gloo(module, posted.EXCHANGE).graph.nodes:
        if node.target in _SAME:
            node.target = _SAME[node.target]
        elif STARTS.get(node.target) == "all_gather" and node.target is not posted.GATHER:
            node.args, node.target = ([arg(node)], *node.args[1:]), posted.GATHER
    placed(module, [_written(module, n) for n in module.graph.nodes])
    _apart(module)
    return module


def _apart(module: GraphModule) -> None:
    """Have gathers use memory of their own for what is written into later, perhaps by who gets it returned."""
    held = roots(module.graph)
    changed = [*outputs(module.graph), *(x for n in module.graph.nodes for x in _written(module, n))]
    later = {r for x in changed for r in held.get(x, ())}
    for node in module.graph.nodes:
        if node.target is posted.GATHER and not later.isdisjoint(held[node]):
            node.args = (*node.args, True)


def _scatters(start: Node) -> bool:
    """Whether a node is a scatter of sums that gloo is to be helped with."""
    op = torch.ops._c10d_functional.reduce_scatter_tensor.default
    return start.target is op and start.meta["val"].is_floating_point()


def _written(module: GraphModule, node: Node) -> list[Node]:
    """What a node may write into."""
    if node.op != "call_module":
        return aliased(node, written=True)
    child: Any = module.get_submodule(str(node.target))
    if isinstance(child, Island):
        return []
    return [x for x, given in zip(node.args, inputs(child.graph), strict=True) if "donated" in given.meta]  # type: ignore[misc]


def _runs(alone: Sequence[bool]) -> list[tuple[bool, list[int]]]:
    """The numbers of tensors, each alone or together with its neighbours."""
    runs = groupby(range(len(alone)), key=lambda i: i if alone[i] else -1)
    return [(i >= 0, [*some]) for i, some in runs]


def _gather(start: Node, wait: Node, alone: Callable[[Node, Node | None], bool]) -> None:
    """A gather of a bucket, without copies for the tensors that are sent `alone`, which are told with their results."""
    pack, unpack = arg(start), next(iter(wait.users), wait)
    if pack.target is not PACK or unpack.target is not UNPACK or len(pack.users) > 1 or len(wait.users) > 1:
        return
    xs, n, shapes, orders = arg(pack), *(arg(unpack, i) for i in (1, 2, 3))
    items: dict[int, Node] = {arg(u, 1): u for u in unpack.users}
    runs = _runs([alone(x, items.get(i)) and orders[i] == sorted(orders[i]) for i, x in enumerate(xs)])
    sent = _sent(start, runs, xs, 1)
    with start.graph.inserting_before(start):
        start.replace_all_uses_with(emit(posted.GATHER, (sent, n, group(start)[0]), start))
    at = 0
    with unpack.graph.inserting_before(unpack):
        for (single, some), x in zip(runs, sent, strict=True):
            piece = emit(aten.slice.Tensor, (wait, 0, at, at := at + n * x.meta["val"].numel()), unpack)
            if single:
                found = [emit(aten.view.default, (piece, [n, *shapes[some[0]]]), unpack)]
            else:
                out = emit(UNPACK, (piece, n, [shapes[i] for i in some], [orders[i] for i in some]), unpack)
                found = [emit(getitem, (out, k), unpack) for k in range(len(some))]
            for i, new in zip(some, found, strict=True):
                if i in items:
                    new.meta |= {k: v for k, v in items[i].meta.items() if k in ("kind", "gradient")}
                    items[i].replace_all_uses_with(new)
    _erase(*items.values(), unpack, start, pack)


def _scatter(start: Node, wait: Node, alone: Callable[[Node], bool]) -> None:
    """A scatter of sums, without copies for the tensors that are sent `alone`."""
    name, n = group(start)
    pack = arg(start)
    xs = arg(pack) if pack.target is PACK else [pack]
    sent = _sent(start, _runs([alone(x) for x in xs]), xs, n)
    with start.graph.inserting_before(start):
        begun = emit(posted.SCATTER, (sent, n, name), start)
    with wait.graph.inserting_before(wait):
        arrived = emit(WAIT, (begun,), wait)
        total = emit(posted.SUM, (arrived, sent, n, name), wait)
        wait.replace_all_uses_with(emit(aten.view.default, (total, list(wait.meta["val"].shape)), wait))
    _erase(wait, start, *([pack] if pack.target is PACK else []))


def _sent(start: Node, runs: Sequence[tuple[bool, list[int]]], xs: Sequence[Node], rows: int) -> list[Node]:
    """What is sent: tensors, and those that are packed."""
    with start.graph.inserting_before(start):
        return [xs[some[0]] if single else emit(PACK, ([xs[i] for i in some], rows), start) for single, some in runs]


def _erase(*nodes: Node) -> None:
    """Take out what nothing uses any more, the last of a chain first."""
    for node in nodes:
        if not node.users:
            node.graph.erase_node(node)
