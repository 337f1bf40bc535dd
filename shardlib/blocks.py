"""Collectives of the processes of one host through memory that they share (`shared`): each puts what it gives where the
others read it, and takes what it needs from where it lies.

The operands are those of the ops in `posted`, `out` is what these return.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardlib.shared import Piece, Shared
from shardlib.wire import reduced

_PARTS = 1 << 16  # bytes of a reduction from which each member makes a part of it


def gather(here: Shared, out: Tensor, xs: Sequence[Tensor]) -> Tensor:
    """In memory that all members read, of one of them by turns, to which each brings its rows."""
    number = here.number()
    owner, theirs = number % here.size, list[Tensor]()

    def check(i: int, pieces: Sequence[Piece]) -> bool:
        pieces[0].checked(out.numel(), out.dtype)
        return True

    if owner == here.me:
        out = here.empty(out.shape, out.dtype)
        bring(rows(out, xs, here.size), xs, here.me)
        begun = here.begin(number, {i: [out] for i in here.others}, check)
        return here.until(out, lambda: here.wait(begun), *xs)

    def join(i: int, pieces: Sequence[Piece]) -> bool:
        if i != owner:
            return check(i, pieces)
        try:
            theirs.append(here.kept(number, i, pieces[0], out))
            bring(rows(theirs[0], xs, here.size), xs, here.me)
        finally:
            here.written(number, out.nbytes)  # so that whoever gathers something else knows, too
        return True

    begun = here.begin(number, {}, join)
    begun.source = owner

    def end() -> None:
        here.wait(begun)
        out.set_(theirs.pop())  # pyright: ignore[reportArgumentType]

    return here.until(out, end, *xs)


def gather_apart(here: Shared, out: Tensor, xs: Sequence[Tensor]) -> Tensor:
    """In memory of each member's own, where it copies what the others give."""
    counts, mine = [x.numel() for x in xs], rows(out, xs, here.size)
    bring(mine, xs, here.me)

    def take(i: int, pieces: Sequence[Piece]) -> None:
        (piece,) = pieces
        for r, x in zip(mine, piece.tensor(sum(counts), out.dtype).split(counts), strict=True):
            r[i].copy_(x)

    lies = _put(here, {here.me: xs})[here.me]
    begun = here.begin(here.number(), {i: [lies] for i in here.others}, take)
    return here.until(out, lambda: here.wait(begun), *xs)


def rows(whole: Tensor, xs: Sequence[Tensor], size: int) -> list[Tensor]:
    """What is gathered of each tensor: views of the whole, a row for each member."""
    return [part.view(size, -1) for part in whole.view(-1).split([size * x.numel() for x in xs])]


def bring(whole: Sequence[Tensor], xs: Sequence[Tensor], me: int) -> None:
    """Copy what member `me` has of each tensor to its row of the `rows`."""
    for r, x in zip(whole, xs, strict=True):
        r[me].copy_(x.reshape(-1))


def exchange(here: Shared, out: Tensor, x: Tensor, takes: Sequence[int], gives: Sequence[int]) -> Tensor:
    """Each member copies its rows from where the others have put theirs."""
    taken, given, me = out.split(takes), x.split(gives), here.me
    taken[me].copy_(given[me])

    def take(i: int, pieces: Sequence[Piece]) -> None:
        (piece,) = pieces
        taken[i].copy_(piece.tensor(taken[i].numel(), out.dtype).view(taken[i].shape))

    put = _put(here, {i: [given[i]] for i in here.others})
    begun = here.begin(here.number(), {i: [x] for i, x in put.items()}, take)
    return here.until(out, lambda: here.wait(begun), x)


def scatter(here: Shared, out: Tensor, xs: Sequence[Tensor]) -> Tensor:
    """The others read a member's rows of theirs when they sum: where they are, or else in a copy. The result holds
    nothing, but `total` knows it."""
    out = out if out.numel() else here.empty(out.shape, out.dtype)  # an address of its own
    held, copied = ([x.view(here.size, -1) for x in xs if here.holds(x) == inside] for inside in (True, False))
    put = _put(here, {i: [x[i] for x in copied] for i in here.others}) if copied else {}
    begun = here.begin(here.number(), {i: [*([put[i]] if put else []), *(x[i] for x in held)] for i in here.others})
    here.sums[out.untyped_storage().data_ptr()] = begun
    return here.until(out, lambda: here.wait(begun))


def total(here: Shared, arrived: Tensor, xs: Sequence[Tensor]) -> Tensor:
    """The sum of a member's rows on all, after `scatter`."""
    begun = here.sums.pop(arrived.untyped_storage().data_ptr())
    counts = [x.numel() // here.size for x in xs]
    held = [here.holds(x) for x in xs]
    copied = [c for c, h in zip(counts, held, strict=True) if not h]

    def given(pieces: Sequence[Piece]) -> list[Tensor]:
        it = iter(pieces)
        others = iter(next(it).tensor(sum(copied), arrived.dtype).split(copied) if copied else ())
        return [next(it).tensor(c, arrived.dtype) if h else next(others) for c, h in zip(counts, held, strict=True)]

    out = here.empty([sum(counts)], arrived.dtype)  # of pages that are there
    summed(here.me, {i: given(pieces) for i, pieces in begun.came.items()}, xs, out)
    here.read(begun)
    return out


def reduce(here: Shared, x: Tensor, out: Tensor, op: str) -> Tensor:
    """Of little each member reads all that the others have, of much a part, and then what they made of theirs: that
    begins in `wait`, so members wait in the same order. With `out` the operand itself, where the others can read it,
    each part is written when its member has read it: nobody else may write there before they have read the result."""
    n, me, others = here.size, here.me, here.others
    inside = out is x and here.holds(x)
    lies = x.view(-1) if inside else _put(here, {me: [x]})[me]
    parts = [*lies.tensor_split(n)] if inside or (n > 3 and x.nbytes >= _PARTS) else [lies] * n
    begun = here.begin(here.number(), {i: [parts[i]] for i in others})
    second = here.number() if parts[me] is not lies else 0

    def end() -> None:
        own, came = parts[me], here.wait(begun)
        made = out.view(-1) if not second else own if inside and n == 2 else here.empty(own.shape, own.dtype)
        reduced((own if i == me else came[i][0].tensor(own.numel(), own.dtype) for i in range(n)), op, made)
        here.read(begun)
        if not second:
            return
        whole = out.view(-1).tensor_split(n)
        if made is not own:
            whole[me].copy_(made)

        def take(i: int, pieces: Sequence[Piece]) -> None:
            whole[i].copy_(pieces[0].tensor(whole[i].numel(), out.dtype))

        here.wait(here.begin(second, {i: [made] for i in others}, take))

    return here.until(out, end)


def summed(me: int, theirs: Mapping[int, Sequence[Tensor]], xs: Sequence[Tensor], out: Tensor) -> None:
    """Into `out` the sums of member `me`'s rows of each tensor, one after the other, with the others' of the same."""
    size, at = len(theirs) + 1, 0
    for k, x in enumerate(xs):
        own = x.view(size, -1)[me]
        reduced((own if i == me else theirs[i][k] for i in range(size)), "sum", out[at : (at := at + len(own))])


def _put(here: Shared, gives: Mapping[int, Sequence[Tensor]]) -> dict[int, Tensor]:
    """Copies of tensors for some members, one after the other, in one block, since all members are to know of it."""
    sizes = [sum(x.numel() for x in xs) for xs in gives.values()]
    flat = here.empty([sum(sizes)], next(x.dtype for xs in gives.values() for x in xs))
    put = dict(zip(gives, flat.split(sizes), strict=True))
    for i, xs in gives.items():
        for piece, x in zip(put[i].split([x.numel() for x in xs]), xs, strict=True):
            piece.view(x.shape).copy_(x)
    return put
