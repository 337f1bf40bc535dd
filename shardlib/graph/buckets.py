"""`bucket`: many small collectives become few large ones."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardlib.graph.forms import ARRANGE, arranged, at_rest, spread
from shardlib.graph.nodes import (
    STARTS,
    WAIT,
    arg,
    dead_code,
    emit,
    group,
    positions,
    size_of,
    wait_of,
    written,
)

aten = torch.ops.aten
_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("pack(Tensor[] xs, int n) -> Tensor")
_lib.define("unpack(Tensor flat, int n, int[][] shapes, int[][] orders) -> Tensor[]")


def _pack(xs: Sequence[Tensor], n: int) -> Tensor:
    """Tensors of leading dim `n` (of any shape where it is 1) side by side: row i holds the rows i of all."""
    sizes = [x.numel() // n for x in xs]
    flat = xs[0].new_empty(n, sum(sizes))
    for x, piece in zip(xs, flat.split(sizes, 1), strict=True):
        piece.view(x.shape if n > 1 else (1, *x.shape)).copy_(x)
    return flat.view(-1)


def _unpack(flat: Tensor, n: int, shapes: Sequence[Sequence[int]], orders: Sequence[Sequence[int]]) -> list[Tensor]:
    """The inverse: the columns of each tensor, of shape `(n, *shape)`, its dims in another order, copied."""
    sizes = [torch.Size(s).numel() for s in shapes]
    pieces = flat.view(n, -1).split(sizes, 1)
    parts = [p.view(n, *s).permute(*o) for p, s, o in zip(pieces, shapes, orders, strict=True)]
    return [p.clone(memory_format=torch.contiguous_format) for p in parts]


_lib.impl("pack", _pack, "CompositeExplicitAutograd")
_lib.impl("unpack", _unpack, "CompositeExplicitAutograd")
PACK, UNPACK = torch.ops.shardlib.pack.default, torch.ops.shardlib.unpack.default


@dataclass
class _Bucket:
    """Collectives made at once: where the first of them was, if `early`, else where the last was."""

    early: bool
    starts: list[Node] = field(default_factory=list)
    bytes: int = 0
    deadline: int = sys.maxsize  # the position of the first use of any result


def bucket(module: GraphModule, limit: int | None = None) -> GraphModule:
    """Merge gathers, scatters and sums of one group and dtype, up to `limit` bytes of what is whole (None: 4 MB on the
    CPU, whose links are slow, so that sending begins early; 16 MB on others).

        a = all_gather(v); b = all_gather(w)      ->      a, b = unpack(all_gather(pack(v, w)))

    A collective waits for the bucket's last operand, never beyond the first use of a result; gathers of parameters wait
    for none, and go together as they are used. What belongs to different passes (forward, backward, one `remat`) stays
    apart. Copies in and out take one pass each, in which dimensions change places as the collective needs them; sums
    and scatters need none out. Sums differ by rounding at most.
    """
    graph, pinned, order = module.graph, written(module.graph), positions(module.graph)
    filling: dict[Any, _Bucket] = {}
    full: list[_Bucket] = []
    starts = [
        n
        for n in graph.nodes
        if STARTS.get(n.target) in ("all_gather", "psum_scatter", "psum")
        and "max" not in n.args
        and not pinned & {n, arg(n)}
    ]
    rests = {n for n in starts if STARTS[n.target] == "all_gather" and at_rest(arg(n)) is not None}
    used = {n: min(order[u] for u in spread(wait_of(n), ARRANGE)[1]) for n in starts}
    for start in sorted(starts, key=lambda n: (used if n in rests else order)[n]):
        op, early = STARTS[start.target], start in rests
        passes = tuple(start.meta.get(k) for k in ("forward", "backward", "remat"))
        key = (start.target, start.args[1:], start.meta["val"].dtype, early, passes)
        size = size_of(start if op == "all_gather" else arg(start))
        most = _most(start) if limit is None else limit
        b = filling.get(key)
        if b is None or b.bytes + size > most or (not early and order[start] > b.deadline):
            b = filling[key] = _Bucket(early)
            full.append(b)
        b.starts.append(start)
        b.bytes += size
        b.deadline = min(b.deadline, used[start])
    for b in full:
        if len(b.starts) > 1:
            _merge(b, order)
    return dead_code(module)


def _most(start: Node) -> int:
    """The bytes of a bucket where nothing is said."""
    return 4 << 20 if start.meta["val"].device.type == "cpu" else 16 << 20


def parameters(start: Node) -> list[Node] | None:
    """The nodes that arrange and pack parameters for a gather, in order; None where other values are gathered."""
    x = arg(start)
    chains = [at_rest(o) for o in (arg(x) if x.target is PACK else [x])]
    if any(c is None for c in chains):
        return None
    return [*dict.fromkeys(n for c in chains for n in c or ()), *([x] if x.target is PACK else [])]


def _merge(b: _Bucket, order: dict[Node, int]) -> None:
    """One collective for those of a bucket."""
    first = b.starts[0]
    anchor = first if b.early else b.starts[-1]
    n = group(first)[1]
    gather, scatter = (STARTS[first.target] == op for op in ("all_gather", "psum_scatter"))
    chains = [at_rest(arg(start)) or [] for start in b.starts if b.early]
    for node in dict.fromkeys(n for chain in chains for n in chain):  # each once: chains share nodes
        if order.get(node, 0) > order[anchor]:
            anchor.prepend(node)
    after = anchor.next  # what was made of results before moves here
    with first.graph.inserting_before(anchor):
        rows = n if scatter else 1
        flat = emit(PACK, ([_source(arg(start), rows) for start in b.starts], rows), anchor)
        wait = emit(WAIT, (emit(first.target, (flat, *first.args[1:]), anchor),), anchor)
        waits = [wait_of(start) for start in b.starts]
        families = [arranged(w)[1:] for w in waits]
        results = _gathered(wait, b.starts, n) if gather else _pieces(wait, waits)
        for (old, new), family in zip(results, families, strict=True):
            old.replace_all_uses_with(new)
            new.meta |= {k: old.meta[k] for k in ("kind", "gradient") if k in old.meta}
            for node in family:
                if order.get(node, sys.maxsize) < order[anchor]:  # what other buckets made stands later
                    after.prepend(node)


def _source(x: Node, rows: int) -> Node:
    """What `x` is a contiguous copy of, so that packing makes the only copy; it has `rows` rows where that is > 1."""
    copy = arg(x) if x.target in (aten._unsafe_view.default, aten.view.default) and len(x.users) == 1 else x
    if copy.target is aten.clone.default and len(copy.users) == 1:
        found = arg(copy)
        if rows == 1 or found.meta["val"].shape[:1] == (rows,):
            return found
    return x if rows == 1 else emit(aten.view.default, (x, [rows, -1]), x)


def _gathered(wait: Node, starts: Sequence[Node], n: int) -> list[tuple[Node, Node]]:
    """The nodes that are replaced, and by what: for each gather its result, or that in the order that is wanted."""
    chains = [_rearranged(wait_of(s), [n, *arg(s).meta["val"].shape]) for s in starts]
    shapes = [list(arg(s).meta["val"].shape) for s in starts]
    orders = [c[1] if c else list(range(len(s) + 1)) for c, s in zip(chains, shapes, strict=True)]
    out = emit(UNPACK, (wait, n, shapes, orders), wait)
    found = []
    for i, (start, chain) in enumerate(zip(starts, chains, strict=True)):
        item = emit(getitem, (out, i), start)
        if chain is None:
            old = wait_of(start)
            found.append((old, emit(aten.view.default, (item, list(old.meta["val"].shape)), start)))
        else:
            found.append((chain[0], item))
    return found


def _rearranged(wait: Node, shape: list[int]) -> tuple[Node, list[int]] | None:
    """The copy of a gather's result with the dim of ranks in another place, and the order of its dims, if that is all
    that is made of it."""
    want = (aten.view.default, aten.permute.default, aten.clone.default)
    node = wait
    for target in want:
        if len(node.users) != 1 or next(iter(node.users)).target is not target:
            return None
        node = next(iter(node.users))
        if target is aten.view.default and list(node.meta["val"].shape) != shape:
            return None
    return node, list(arg(node).args[1])


def _pieces(wait: Node, waits: Sequence[Node]) -> list[tuple[Node, Node]]:
    """The results of sums or scatters, in the bucket's: views, copied where they leave the graph."""
    found, at = [], 0
    for old in waits:
        shape = list(old.meta["val"].shape)
        size = old.meta["val"].numel()
        piece = emit(aten.slice.Tensor, (wait, 0, at, at + size), old)
        piece = emit(aten.view.default, (piece, shape), old)
        if any(u.op == "output" for n in arranged(old) for u in n.users):
            piece = emit(aten.clone.default, (piece,), old)
        found.append((old, piece))
        at += size
    return found
