"""Collectives of the processes of one host through memory that they share (`shared`): each puts what it gives where the
others read it, and takes what it needs from where it lies.

The operands are those of the ops in `posted`, `out` is what these return.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardlib.shared import Piece, Shared
from shardlib.wire import reduced

_PARTS = 1 << 16  # bytes of a reduction from which each member makes a part of it


def gather(here: Shared, out: Tensor, xs: Sequence[Tensor], own: bool) -> Tensor:
    """The others read a member's rows where its own result lies; with `own` in a copy beside that."""
    counts, me = [x.numel() for x in xs], here.me
    if not own:
        out = here.empty(out.shape, out.dtype)
    mine = rows(out, xs, here.size)
    for r, x in zip(mine, xs, strict=True):
        r[me].copy_(x.reshape(-1))

    def take(i: int, piece: Piece) -> None:
        if own:
            theirs = piece.tensor(sum(counts), out.dtype).split(counts)
        else:
            theirs = [r[i] for r in rows(piece.tensor(out.numel(), out.dtype), xs, here.size)]
        for r, x in zip(mine, theirs, strict=True):
            r[i].copy_(x)

    lies = here.empty([sum(counts)], out.dtype) if own else out
    place = _put(lies, {me: xs})[me] if own else (0, out.nbytes)
    begun = here.begin(here.number(), lies, dict.fromkeys(here.others, place), take)
    return here.until(out, lambda: here.wait(begun), *xs)


def rows(whole: Tensor, xs: Sequence[Tensor], size: int) -> list[Tensor]:
    """What is gathered of each tensor: views of the whole, a row for each member."""
    return [part.view(size, -1) for part in whole.view(-1).split([size * x.numel() for x in xs])]


def exchange(here: Shared, out: Tensor, x: Tensor, takes: Sequence[int], gives: Sequence[int]) -> Tensor:
    """Each member copies its rows from where the others have put theirs."""
    taken, given, me = out.split(takes), x.split(gives), here.me
    taken[me].copy_(given[me])

    def take(i: int, piece: Piece) -> None:
        taken[i].copy_(piece.tensor(taken[i].numel(), out.dtype).view(taken[i].shape))

    lies = here.empty([x.numel() - given[me].numel()], x.dtype)
    begun = here.begin(here.number(), lies, _put(lies, {i: [given[i]] for i in here.others}), take)
    return here.until(out, lambda: here.wait(begun), x)


def scatter(here: Shared, out: Tensor, xs: Sequence[Tensor]) -> Tensor:
    """Instead of what the others have of this member's rows: what it has of theirs, which they read when they sum."""
    out = here.empty(out.shape, out.dtype)
    given = [x.view(here.size, -1) for x in xs]
    begun = here.begin(here.number(), out, _put(out, {i: [g[i] for g in given] for i in here.others}))
    here.sums[out.untyped_storage().data_ptr()] = begun
    return here.until(out, lambda: here.wait(begun))


def total(here: Shared, arrived: Tensor, xs: Sequence[Tensor]) -> Tensor:
    """The sum of a member's rows on all, after `scatter`."""
    begun = here.sums.pop(arrived.untyped_storage().data_ptr())
    out = summed(here.me, {i: piece.tensor(arrived.shape[1], arrived.dtype) for i, piece in begun.came.items()}, xs)
    here.read(begun)
    return out


def reduce(here: Shared, x: Tensor, out: Tensor, op: str) -> Tensor:
    """Of little each member reads all that the others have, of much a part, and then what they made of theirs: that
    begins in `wait`, so members wait in the same order."""
    n, me, others = here.size, here.me, here.others
    lies = here.empty([x.numel()], x.dtype)
    lies.view(x.shape).copy_(x)
    parts = [lies] * n if n < 4 or x.nbytes < _PARTS else [*lies.tensor_split(n)]
    places = [(int(p.storage_offset()) * p.itemsize, p.nbytes) for p in parts]
    begun = here.begin(here.number(), lies, {i: places[i] for i in others})
    second = here.number() if parts[me] is not lies else 0

    def end() -> None:
        own, came = parts[me], here.wait(begun)
        made = here.empty(own.shape, own.dtype) if second else out.view(-1)
        reduced((own if i == me else came[i].tensor(own.numel(), own.dtype) for i in range(n)), op, made)
        here.read(begun)
        if not second:
            return
        whole = out.view(-1).tensor_split(n)
        whole[me].copy_(made)

        def take(i: int, piece: Piece) -> None:
            whole[i].copy_(piece.tensor(whole[i].numel(), out.dtype))

        here.wait(here.begin(second, made, dict.fromkeys(others, (0, made.nbytes)), take))

    return here.until(out, end)


def summed(me: int, theirs: Mapping[int, Tensor], xs: Sequence[Tensor]) -> Tensor:
    """The sums of member `me`'s rows of each tensor, one after the other, with the others' rows of the same."""
    size, at = len(theirs) + 1, 0
    out = xs[0].new_empty(sum(x.numel() for x in xs) // size)
    for x in xs:
        own = x.view(size, -1)[me]
        each = (own if i == me else theirs[i][at : at + len(own)] for i in range(size))
        reduced(each, "sum", out[at : at + len(own)])
        at += len(own)
    return out


def _put(lies: Tensor, gives: Mapping[int, Sequence[Tensor]]) -> dict[int, tuple[int, int]]:
    """Put tensors for some members one after the other; for each its offset and bytes."""
    flat, at, places = lies.view(-1), 0, {}
    for i, xs in gives.items():
        first = at
        for x in xs:
            flat[at : (at := at + x.numel())].view(x.shape).copy_(x)
        places[i] = first * lies.itemsize, (at - first) * lies.itemsize
    return places
