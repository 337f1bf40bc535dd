"""Generators of ranks that go different ways: each goes on as soon as what it asks for is there."""

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, NoReturn

from torch import Tensor

from shardlib import wire
from shardlib.errors import RankError

Ranks = Sequence[Generator[Any, Any, Any]]


class Apart:
    """Drives one generator for each rank, which yields `((op, groups), operands)` at collectives and messages, is sent
    results by rank, and yields `(None, outputs)` at its end. `rank`: the one that runs."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.rank = ranks, 0
        self.ready = deque[tuple[int, Any]]((r, None) for r in range(len(ranks)))
        self.waiting: dict[int, tuple[Any, list[Any]]] = {}
        self.mail: dict[tuple[int, int], deque[Tensor]] = {}
        self.outputs: dict[int, Any] = {}

    def run(self) -> list[Any]:
        """The outputs of all ranks. Raises `RankError` where ranks disagree or none can go on."""
        while self.ready:
            self.rank, given = self.ready.popleft()
            asked, operands = self.ranks[self.rank].send(given)
            if asked is None:
                self.outputs[self.rank] = operands
            elif asked[0] is wire.SEND:
                self._post(asked, operands)
            else:
                self.waiting[self.rank] = asked, operands
                self._serve(self.rank)
        if self.waiting:
            told = dict.fromkeys(self.outputs, "finished")
            told |= {r: wire.describe(asked[0], operands) for r, (asked, operands) in self.waiting.items()}
            self._fail(next(iter(self.waiting)), RankError(f"deadlock: no rank can go on\n{wire.by_rank(told)}"))
        return [self.outputs[r] for r in range(len(self.ranks))]

    def _post(self, asked: Any, operands: list[Any]) -> None:
        x, to = operands[0], _members(asked, self.rank)[operands[1]]
        self.mail.setdefault((self.rank, to), deque()).append(x.clone())
        self.ready.append((self.rank, {self.rank: x.new_empty(0)}))
        if to in self.waiting:
            self._serve(to)

    def _serve(self, rank: int) -> None:
        """Let a waiting rank go on, if what it waits for is there, and all that meet it."""
        asked, operands = self.waiting[rank]
        members = _members(asked, rank)
        if asked[0] is wire.RECEIVE:
            shape, dtype, _, source, _ = operands
            mail = self.mail.get((members[source], rank))
            if not mail:
                return
            x = mail.popleft()
            if (list(x.shape), x.dtype) != (list(shape), dtype):
                found = wire.describe(wire.SEND, [x, members.index(rank), operands[-1]])
                told = {members[source]: found, rank: wire.describe(asked[0], operands)}
                self._fail(rank, wire.disagreement(told))
            self.waiting.pop(rank)
            self.ready.append((rank, {rank: x}))
        elif all(self._meets(m, members) for m in members):
            given = [self.waiting[m][1] for m in members]
            if any(self.waiting[m][0][0] is not asked[0] for m in members):
                told = {m: wire.describe(self.waiting[m][0][0], x) for m, x in zip(members, given, strict=True)}
                self._fail(members[0], wire.disagreement(told))
            try:
                results = wire.combine(asked[0], given, members)
            except Exception as e:
                self._fail(members[0], e)
            for m, result in zip(members, results, strict=True):
                del self.waiting[m]
                self.ready.append((m, {m: result}))
            for handed in given:
                handed.clear()

    def _fail(self, rank: int, error: Exception) -> NoReturn:
        """Raise an error where a rank waits, so that its traceback leads through the node."""
        self.rank = rank
        self.ranks[rank].throw(error)
        raise error

    def _meets(self, rank: int, members: tuple[int, ...]) -> bool:
        """Whether a rank waits in a collective of these."""
        asked, _ = self.waiting.get(rank, ((wire.RECEIVE, ()), ()))
        return asked[0] is not wire.RECEIVE and _members(asked, rank) == members


def _members(asked: Any, rank: int) -> tuple[int, ...]:
    return next(group for group in asked[1] if rank in group)
