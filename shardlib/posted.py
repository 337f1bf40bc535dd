"""Collectives for gloo by messages whose receivers are ready: what is sent fills both ways of a link, and goes from and
to where it is wanted, without copies.

gloo sends a message when the receiver has asked for it, and asks over the same connection, behind what that is sending.
Its own collectives send before they ask, so one way of the link waits until a whole message has gone the other way.
Here every rank asks for all that it will get before it sends anything, in pieces, so that none waits for long.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.shared import Collective, Piece, Shared, shared
from shardlib.wire import REDUCE, resolve, until

_ops = torch.ops._c10d_functional

_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("posted_gather(Tensor[] xs, int size, str group, bool own=False) -> Tensor")
_lib.define("posted_exchange(Tensor x, int[] takes, int[] gives, str group) -> Tensor")
_lib.define("posted_scatter(Tensor[] xs, int size, str group) -> Tensor")
_lib.define("posted_reduce(Tensor x, str op, str group) -> Tensor")
_lib.define("posted_reduce_(Tensor(a!) x, str op, str group) -> Tensor(a!)")
_lib.define("posted_sum(Tensor arrived, Tensor[] xs, int size, str group) -> Tensor")

_TAG = 1  # of these messages; a pipeline's have 0
_PIECE = 1 << 20  # bytes
_PARTS = 1 << 16  # bytes from which each member reduces a part
_summed: dict[int, Collective] = {}  # scatters that have begun, by the address of what waits for them
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


def _gather(xs: list[Tensor], size: int, group: str, own: bool = False) -> Tensor:
    """For each tensor those of all members, one tensor after the other; of a single one with its shape. With `own` in
    memory that nobody else reads."""
    pg, here, out = resolve(group), shared(group), _gathered(xs, size, group)
    if here and not own:
        out = here.empty(out.shape, out.dtype)
    others, me, counts = _others(pg), pg.rank(), [x.numel() for x in xs]

    def rows(whole: Tensor) -> list[Tensor]:
        return [piece.view(size, -1) for piece in whole.view(-1).split([size * n for n in counts])]

    mine = rows(out)
    if not here:
        until(out, _messages(pg, ((i, r[i]) for i in others for r in mine), ((i, x) for i in others for x in xs)))
    for r, x in zip(mine, xs, strict=True):
        r[me].copy_(x.reshape(-1))
    if not here:
        return out

    def take(i: int, piece: Piece) -> None:
        if own:
            theirs = piece.tensor(sum(counts), out.dtype).split(counts)
        else:
            theirs = [r[i] for r in rows(piece.tensor(out.numel(), out.dtype))]
        for r, x in zip(mine, theirs, strict=True):
            r[i].copy_(x)

    lies = here.empty([sum(counts)], out.dtype) if own else out
    place = _put(lies, {me: xs})[me] if own else (0, out.nbytes)
    begun = here.begin(here.number(), lies, dict.fromkeys(others, place), take)
    return here.until(out, lambda: here.wait(begun), *xs)


def _exchange(x: Tensor, takes: list[int], gives: list[int], group: str) -> Tensor:
    pg, here, out = resolve(group), shared(group), _exchanged(x, takes, gives, group)
    rows, given, others, me = out.split(takes), x.split(gives), _others(pg), pg.rank()
    rows[me].copy_(given[me])
    if not here:
        return until(out, _messages(pg, ((i, rows[i]) for i in others), ((i, given[i]) for i in others)))

    def take(i: int, piece: Piece) -> None:
        rows[i].copy_(piece.tensor(rows[i].numel(), out.dtype).view(rows[i].shape))

    lies = here.empty([x.numel() - given[me].numel()], x.dtype)
    begun = here.begin(here.number(), lies, _put(lies, {i: [given[i]] for i in others}), take)
    return here.until(out, lambda: here.wait(begun), x)


def _scatter(xs: list[Tensor], size: int, group: str) -> Tensor:
    """What the other members have of this one's row of each tensor, by member and one tensor after the other; where
    they share memory, what this one has of theirs."""
    pg, here, out = resolve(group), shared(group), _scattered(xs, size, group)
    others, me = _others(pg), pg.rank()
    rows = [x.view(size, -1) for x in xs]
    if here:
        out = here.empty(out.shape, out.dtype)
        begun = here.begin(here.number(), out, _put(out, {i: [r[i] for r in rows] for i in others}))
        _summed[out.untyped_storage().data_ptr()] = begun
        return here.until(out, lambda: here.wait(begun))
    arrive = [row.split([r.shape[1] for r in rows]) for row in out]
    get = ((i, x) for i in others for x in arrive[i - (i > me)])
    return until(out, _messages(pg, get, ((i, r[i]) for i in others for r in rows)))


def _sum(arrived: Tensor, xs: list[Tensor], size: int, group: str) -> Tensor:
    """The sums of what has arrived and the member's own rows, in the order of members; of 16 bits in float32."""
    me, here = resolve(group).rank(), shared(group)
    count = arrived.shape[1]
    begun = _summed.pop(arrived.untyped_storage().data_ptr()) if here else None
    if begun:
        theirs = {i: piece.tensor(count, arrived.dtype) for i, piece in begun.came.items()}
    else:
        theirs = {i + (i >= me): row for i, row in enumerate(arrived)}
    out, at = arrived.new_empty(count), 0
    for x in xs:
        own = x.view(size, -1)[me]
        rows = (own if i == me else theirs[i][at : at + len(own)] for i in range(size))
        _reduced(rows, "sum", out[at : at + len(own)])
        at += len(own)
    if here and begun:
        here.read(begun)
    return out


def _reduce(x: Tensor, op: str, group: str) -> Tensor:
    here = shared(group)
    return _over(here, x, torch.empty_like(x), op, group) if here else _ops.all_reduce(x, op, group)


def _reduce_(x: Tensor, op: str, group: str) -> Tensor:
    here = shared(group)
    return _over(here, x, x, op, group) if here else _ops.all_reduce_(x, op, group)


def _over(here: Shared, x: Tensor, out: Tensor, op: str, group: str) -> Tensor:
    """The reduction of all that is in `x`, in the order of members, into `out`: of little each member reads all that
    the others have, of much a part, and then what the others made of theirs."""
    pg = resolve(group)
    n, me, others = pg.size(), pg.rank(), _others(pg)
    lies = here.empty([x.numel()], x.dtype)
    lies.view(x.shape).copy_(x)
    parts = [lies] * n if n < 4 or x.nbytes < _PARTS else [*lies.tensor_split(n)]
    places = [(int(p.storage_offset()) * p.itemsize, p.nbytes) for p in parts]
    second = here.number() if parts[me] is not lies else 0
    begun = here.begin(here.number(), lies, {i: places[i] for i in others})

    def end() -> None:
        own = parts[me]
        made = out.view(-1) if own is lies else here.empty(own.shape, own.dtype)
        came = here.wait(begun)
        _reduced((own if i == me else came[i].tensor(own.numel(), own.dtype) for i in range(n)), op, made)
        here.read(begun)
        if own is lies:
            return
        rows = out.view(-1).tensor_split(n)

        def take(i: int, piece: Piece) -> None:
            rows[i].copy_(piece.tensor(rows[i].numel(), out.dtype))

        then = here.begin(second, made, dict.fromkeys(others, (0, made.nbytes)), take)
        rows[me].copy_(made)
        here.wait(then)

    return here.until(out, end)


def _reduced(rows: Iterable[Tensor], op: str, out: Tensor) -> None:
    """The reduction of some tensors, one after the other, into `out`; of 16 bits in float32."""
    first, second, *rest = rows
    narrow = out.is_floating_point() and out.dtype.itemsize < 4
    wide = torch.empty_like(out, dtype=torch.float32) if narrow else out
    REDUCE[op](first.to(wide.dtype), second, out=wide)
    for row in rest:
        REDUCE[op](wide, row, out=wide)
    if op == "avg":
        wide /= 2 + len(rest)
    if wide is not out:
        out.copy_(wide)


def _put(lies: Tensor, gives: Mapping[int, Sequence[Tensor]]) -> dict[int, tuple[int, int]]:
    """Put tensors for some members one after the other; for each its offset and bytes."""
    flat, at, places = lies.view(-1), 0, {}
    for i, xs in gives.items():
        first = at
        for x in xs:
            flat[at : (at := at + x.numel())].view(x.shape).copy_(x)
        places[i] = first * lies.itemsize, (at - first) * lies.itemsize
    return places


def _gathered(xs: list[Tensor], size: int, group: str, own: bool = False) -> Tensor:
    if len(xs) == 1:
        return xs[0].new_empty((size * xs[0].shape[0], *xs[0].shape[1:]))
    return xs[0].new_empty(size * sum(x.numel() for x in xs))


def _exchanged(x: Tensor, takes: list[int], gives: list[int], group: str) -> Tensor:
    return x.new_empty((sum(takes), *x.shape[1:]))


def _scattered(xs: list[Tensor], size: int, group: str) -> Tensor:
    return xs[0].new_empty(size - 1, sum(x.numel() for x in xs) // size)


for _name, _run, _shape in (
    ("posted_gather", _gather, _gathered),
    ("posted_exchange", _exchange, _exchanged),
    ("posted_scatter", _scatter, _scattered),
    ("posted_reduce", _reduce, lambda x, op, group: torch.empty_like(x)),
    ("posted_reduce_", _reduce_, lambda x, op, group: x),
    ("posted_sum", _sum, lambda arrived, xs, size, group: arrived.new_empty(arrived.shape[1])),
):
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    _lib.impl(_name, _shape, "Meta")
GATHER, EXCHANGE = torch.ops.shardlib.posted_gather.default, torch.ops.shardlib.posted_exchange.default
SCATTER, SUM = torch.ops.shardlib.posted_scatter.default, torch.ops.shardlib.posted_sum.default
REDUCED, REDUCED_ = torch.ops.shardlib.posted_reduce.default, torch.ops.shardlib.posted_reduce_.default
