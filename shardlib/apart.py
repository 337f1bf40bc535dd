"""Generators of ranks that go different ways: each goes on as soon as what it asks for is there."""

from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from shardlib import wire
from shardlib.errors import RankError

AWAIT = wire.wait.default  # of a message
Ranks = Sequence[Generator[Any, Any, Any]]


class Mail:
    """Messages from rank to rank, which arrive in the order of sending and are asked for in that order."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], list[Tensor | None]] = {}
        self.expected = Counter[tuple[int, int]]()

    def post(self, source: int, target: int, x: Tensor) -> None:
        """Send a copy."""
        self.sent.setdefault((source, target), []).append(x.clone())

    def expect(self, source: int, target: int) -> int:
        """Ask for the next; its number."""
        self.expected[source, target] += 1
        return self.expected[source, target] - 1

    def take(self, source: int, target: int, number: int) -> Tensor | None:
        """The message of a number, once; None where it has not been sent."""
        sent = self.sent.get((source, target), [])
        if number >= len(sent):
            return None
        found, sent[number] = sent[number], None
        return found


class Apart:
    """Drives one generator for each rank, which yields `((op, groups), operands)` at collectives and messages, is sent
    results by rank, and yields `(None, outputs)` at its end. A receive gives at once what stands for a message, a wait
    for that the message. `rank`: the one that runs."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.rank = ranks, 0
        self.ready = deque[tuple[int, Any]]((r, None) for r in range(len(ranks)))
        self.waiting: dict[int, tuple[Any, list[Any]]] = {}
        self.mail = Mail()
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
            elif asked[0] is wire.RECEIVE:
                self.ready.append((self.rank, {self.rank: self._coming(asked, operands)}))
            else:
                self.waiting[self.rank] = asked, operands
                self._serve(self.rank)
        if self.waiting:
            told = dict.fromkeys(self.outputs, "finished")
            told |= {r: _described(*waiting) for r, waiting in self.waiting.items()}
            self._fail(next(iter(self.waiting)), RankError(f"deadlock: no rank can go on\n{wire.by_rank(told)}"))
        return [self.outputs[r] for r in range(len(self.ranks))]

    def _post(self, asked: Any, operands: list[Any]) -> None:
        x, to = operands[0], _members(asked, self.rank)[operands[1]]
        operands.clear()  # the rank's list, which would keep what is sent
        self.mail.post(self.rank, to, x)
        self.ready.append((self.rank, {self.rank: x.new_empty(0)}))
        if to in self.waiting:
            self._serve(to)

    def _coming(self, asked: Any, operands: list[Any]) -> "_Coming":
        """The next message of a rank that has not been asked for yet."""
        source = _members(asked, self.rank)[operands[3]]
        return _Coming(source, self.mail.expect(source, self.rank), asked, operands)

    def _serve(self, rank: int) -> None:
        """Let a waiting rank go on, if what it waits for is there, and all that meet it."""
        asked, operands = self.waiting[rank]
        if asked[0] is AWAIT:
            (coming,) = operands
            x = self.mail.take(coming.source, rank, coming.number)
            if x is None:
                return
            shape, dtype = coming.operands[:2]
            if (list(x.shape), x.dtype) != (list(shape), dtype):
                to = _members(coming.asked, rank).index(rank)
                found = wire.describe(wire.SEND, [x, to, coming.operands[-1]])
                self._fail(rank, wire.disagreement({coming.source: found, rank: _described(asked, operands)}))
            self.waiting.pop(rank)
            self.ready.append((rank, {rank: x}))
            return
        members = _members(asked, rank)
        if all(self._meets(m, members) for m in members):
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
        asked, _ = self.waiting.get(rank, ((AWAIT, ()), ()))
        return asked[0] is not AWAIT and _members(asked, rank) == members


@dataclass
class _Coming:
    """A message that a rank has asked for: the `number`th of `source`, as it was asked."""

    source: int
    number: int
    asked: Any
    operands: list[Any]


def _described(asked: Any, operands: list[Any]) -> str:
    """What a rank waits for, in words."""
    return wire.describe(wire.RECEIVE, operands[0].operands) if asked[0] is AWAIT else wire.describe(asked[0], operands)


def _members(asked: Any, rank: int) -> tuple[int, ...]:
    return next(group for group in asked[1] if rank in group)
