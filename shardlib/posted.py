"""Collectives of processes on the CPU as shardlib makes them: through memory where all are on one host (`blocks`), else
by messages of gloo whose receivers are ready, so that what is sent fills both ways of a link, and goes from and to
where it is wanted, without copies.

gloo sends a message when the receiver has asked for it, and asks over the same connection, behind what that is sending.
Its own collectives send before they ask, so one way of the link waits until a whole message has gone the other way.
Here every rank asks for all that it will get before it sends anything, in pieces, so that none waits for long.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib import blocks
from shardlib.neighbours import shared
from shardlib.wire import resolve, until

_ops = torch.ops._c10d_functional
_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("posted_empty(int[] shape, ScalarType dtype, str group) -> Tensor")
_lib.define("posted_gather(Tensor[] xs, int size, str group, bool own=False) -> Tensor")
_lib.define("posted_exchange(Tensor x, int[] takes, int[] gives, str group) -> Tensor")
_lib.define("posted_scatter(Tensor[] xs, int size, str group) -> Tensor")
_lib.define("posted_sum(Tensor arrived, Tensor[] xs, int size, str group) -> Tensor")
_lib.define("posted_reduce(Tensor x, str op, str group) -> Tensor")
_lib.define("posted_reduce_(Tensor(a!) x, str op, str group) -> Tensor(a!)")

_TAG = 1  # of these messages; a pipeline's have 0
_PIECE = 1 << 20  # bytes
_Addressed = Iterable[tuple[int, Tensor]]  # to or from members of a group


def _messages(pg: dist.ProcessGroup, get: _Addressed, give: _Addressed) -> list[Any]:
    """Start to get some tensors and to give others, between each two members in the same order on both sides."""
    works = [pg.recv([piece], source, _TAG) for source, x in get for piece in _pieces(x)]
    return works + [pg.send([piece], to, _TAG) for to, x in give for piece in _pieces(x)]


def _pieces(x: Tensor) -> Sequence[Tensor]:
    return x.contiguous().view(-1).split(max(1, _PIECE // x.element_size())) if x.numel() else ()


def _others(pg: dist.ProcessGroup) -> list[int]:
    """The other members, from the next on: so not all send to the same at first."""
    return [(pg.rank() + i) % pg.size() for i in range(1, pg.size())]


def _empty(shape: list[int], dtype: torch.dtype, group: str) -> Tensor:
    """Memory for what is to be sent, where others read it if they share memory."""
    here = shared(group)
    return here.empty(shape, dtype, placed=True) if here else torch.empty(shape, dtype=dtype)


def _gather(xs: list[Tensor], size: int, group: str, own: bool = False) -> Tensor:
    """For each tensor those of all members, one tensor after the other; of a single one with its shape. With `own` in
    memory that nobody else reads."""
    out = _gathered(xs, size, group)
    if here := shared(group):
        return (blocks.gather_apart if own else blocks.gather)(here, out, xs)
    pg = resolve(group)
    rows, others = blocks.rows(out, xs, size), _others(pg)
    works = _messages(pg, ((i, r[i]) for i in others for r in rows), ((i, x) for i in others for x in xs))
    blocks.bring(rows, xs, pg.rank())
    return until(out, works)


def _exchange(x: Tensor, takes: list[int], gives: list[int], group: str) -> Tensor:
    out = _exchanged(x, takes, gives, group)
    if here := shared(group):
        return blocks.exchange(here, out, x, takes, gives)
    pg = resolve(group)
    rows, given, others = out.split(takes), x.split(gives), _others(pg)
    works = _messages(pg, ((i, rows[i]) for i in others), ((i, given[i]) for i in others))
    rows[pg.rank()].copy_(given[pg.rank()])
    return until(out, works)


def _scatter(xs: list[Tensor], size: int, group: str) -> Tensor:
    """For `posted_sum` what the other members have of this one's row of each tensor, by member and one tensor after the
    other."""
    out = _scattered(xs, size, group)
    if here := shared(group):
        return blocks.scatter(here, out, xs)
    pg = resolve(group)
    rows = [x.view(size, -1) for x in xs]
    arrive = [row.split([r.shape[1] for r in rows]) for row in out]
    others, me = _others(pg), pg.rank()
    get = ((i, x) for i in others for x in arrive[i - (i > me)])
    return until(out, _messages(pg, get, ((i, r[i]) for i in others for r in rows)))


def _sum(arrived: Tensor, xs: list[Tensor], size: int, group: str) -> Tensor:
    """The sums of what has arrived and the member's own rows, in the order of members; of 16 bits in float32."""
    if here := shared(group):
        return blocks.total(here, arrived, xs)
    me, counts = resolve(group).rank(), [x.numel() // size for x in xs]
    out = arrived.new_empty(sum(counts))
    blocks.summed(me, {i + (i >= me): row.split(counts) for i, row in enumerate(arrived)}, xs, out)
    return out


def _reduce(x: Tensor, op: str, group: str) -> Tensor:
    here = shared(group)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return blocks.reduce(here, x, out, op) if here else _ops.all_reduce(x, op, group)


def _reduce_(x: Tensor, op: str, group: str) -> Tensor:
    here = shared(group) if x.is_contiguous() else None
    return blocks.reduce(here, x, x, op) if here else _ops.all_reduce_(x, op, group)


def _gathered(xs: list[Tensor], size: int, group: str, own: bool = False) -> Tensor:
    if len(xs) == 1:
        return xs[0].new_empty((size * xs[0].shape[0], *xs[0].shape[1:]))
    return xs[0].new_empty(size * sum(x.numel() for x in xs))


def _exchanged(x: Tensor, takes: list[int], gives: list[int], group: str) -> Tensor:
    return x.new_empty((sum(takes), *x.shape[1:]))


def _scattered(xs: list[Tensor], size: int, group: str) -> Tensor:
    return xs[0].new_empty(size - 1, sum(x.numel() for x in xs) // size)


for _name, _run, _shape in (
    ("posted_empty", _empty, lambda shape, dtype, group: torch.empty(shape, dtype=dtype, device="meta")),
    ("posted_gather", _gather, _gathered),
    ("posted_exchange", _exchange, _exchanged),
    ("posted_scatter", _scatter, _scattered),
    ("posted_reduce", _reduce, lambda x, op, group: torch.empty_like(x, memory_format=torch.contiguous_format)),
    ("posted_reduce_", _reduce_, lambda x, op, group: x),
    ("posted_sum", _sum, lambda arrived, xs, size, group: arrived.new_empty(arrived.shape[1])),
):
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    _lib.impl(_name, _shape, "Meta")
EMPTY = torch.ops.shardlib.posted_empty.default
GATHER, EXCHANGE = torch.ops.shardlib.posted_gather.default, torch.ops.shardlib.posted_exchange.default
SCATTER, SUM = torch.ops.shardlib.posted_scatter.default, torch.ops.shardlib.posted_sum.default
REDUCED, REDUCED_ = torch.ops.shardlib.posted_reduce.default, torch.ops.shardlib.posted_reduce_.default
