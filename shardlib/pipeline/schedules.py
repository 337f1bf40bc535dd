"""Schedules of the literature. Each is given the number of micro-batches and gives a function of the number of ranks:
`gpipe(4)(2)` is a `Schedule`; `sl.pipeline` takes either."""

from collections import deque
from collections.abc import Callable, Iterator

from shardlib.errors import ScheduleError
from shardlib.pipeline.actions import Action
from shardlib.pipeline.schedule import Schedule

Lines = Callable[[int, int, int], Iterator[Action]]  # of the rank, the number of ranks, the number of micro-batches


class Recipe:
    """A schedule for any number of ranks."""

    def __init__(
        self, name: str, lines: Lines, microbatches: int, fit: Callable[[int, int], int] = lambda p, m: m
    ) -> None:
        if type(microbatches) is not int or microbatches < 1:
            raise ScheduleError(f"{name}: microbatches is a whole number from 1, not {microbatches!r}")
        self.name, self.lines, self.microbatches, self.fit = name, lines, microbatches, fit

    def __call__(self, ranks: int) -> Schedule:
        """The schedule on so many ranks. A pattern that fits only other numbers of micro-batches is laid out for the
        next of them, and what it does for those that there are not is left out."""
        if type(ranks) is not int or ranks < 1:
            raise ScheduleError(f"{self.name}: a pipeline has a whole number of ranks from 1, not {ranks!r}")
        n, laid = self.microbatches, self.fit(ranks, self.microbatches)
        lists = [[a for a in self.lines(r, ranks, laid) if a.microbatch < n] for r in range(ranks)]
        return Schedule(lists, self.name)

    def __repr__(self) -> str:
        return f"{self.name}(microbatches={self.microbatches})"


def gpipe(microbatches: int) -> Recipe:
    """All forwards, then all backwards (Huang et al. 2019). Idle (p-1)/(m+p-1), all m micro-batches alive."""

    def lines(rank: int, p: int, m: int) -> Iterator[Action]:
        for kind in "FB":
            for k in range(m):
                yield Action(kind, rank, k)

    return Recipe("gpipe", lines, microbatches)


def one_f_one_b(microbatches: int) -> Recipe:
    """One forward, one backward (PipeDream-flush, Narayanan et al. 2021). Idle as GPipe, at most p - rank alive."""

    def lines(rank: int, p: int, m: int) -> Iterator[Action]:
        ahead = min(m, p - rank - 1)
        for k in range(ahead):
            yield Action("F", rank, k)
        for k in range(m):
            if k + ahead < m:
                yield Action("F", rank, k + ahead)
            yield Action("B", rank, k)

    return Recipe("one_f_one_b", lines, microbatches)


def interleaved(microbatches: int, v: int) -> Recipe:
    """1F1B with v stages on each rank, rank r holding r, r + p, r + 2p (Narayanan et al. 2021). Idle
    (p-1)/(v m+p-1) where p divides m."""
    if type(v) is not int or v < 1:
        raise ScheduleError(f"interleaved: v is how many stages a rank holds, from 1, not {v!r}")

    def lines(rank: int, p: int, m: int) -> Iterator[Action]:
        def nth(kind: str, i: int) -> Action:  # p micro-batches go through one stage, then through the next
            turn, k = divmod(i, p * v)
            chunk = k // p if kind == "F" else v - 1 - k // p
            return Action(kind, chunk * p + rank, turn * p + k % p)

        ahead = min(m * v, (p - rank - 1) * 2 + (v - 1) * p)
        for i in range(ahead):
            yield nth("F", i)
        for i in range(m * v):
            if i + ahead < m * v:
                yield nth("F", i + ahead)
            yield nth("B", i)

    return Recipe("interleaved", lines, microbatches, lambda p, m: -(-m // p) * p)


def zero_bubble(microbatches: int) -> Recipe:
    """ZB-H1 (Qi et al. 2023): 1F1B with the backward in two, so that gradients of weights fill what is idle. With
    F = I = W idle (p-1)/(3m+p-1), at most p alive."""

    def lines(rank: int, p: int, m: int) -> Iterator[Action]:
        ahead, late = min(m, p - rank - 1), min(m, rank)
        for k in range(ahead):
            yield Action("F", rank, k)
        for k in range(m):
            if k + ahead < m:
                yield Action("F", rank, k + ahead)
            yield Action("I", rank, k)
            if k >= late:
                yield Action("W", rank, k - late)
        for k in range(m - late, m):
            yield Action("W", rank, k)

    return Recipe("zero_bubble", lines, microbatches)


def zbv(microbatches: int) -> Recipe:
    """ZB-V (Qi et al. 2024): rank r holds stages r and 2p-1-r, a V. With F = I = W and m >= 2p no rank waits between
    its first action and its last; at most 2p stages alive, half the size of 1F1B's."""

    def lines(rank: int, p: int, m: int) -> Iterator[Action]:
        turn = _Turns(rank, 2 * p - 1 - rank)
        yield from turn.all("F0", 2 * (p - rank) - 1)
        yield from turn.all("F1 F0", rank)
        yield from turn.all("F1 I1 W1", p - rank)
        while turn.count["F1"] < m:
            yield from turn.all("F0 I0 W0 F1 I1 W1" if turn.count["F0"] < m else "I0 W0 F1 I1 W1", 1)
        yield from turn.all("I0 I1", rank)
        yield from turn.all("I0 W0", p - rank)
        yield from turn.all("W1", m - turn.count["W1"])
        yield from turn.all("W0", m - turn.count["W0"])

    return Recipe("zbv", lines, microbatches, lambda p, m: max(m, 2 * p))


def dualpipe_v(microbatches: int) -> Recipe:
    """DualPipeV (DeepSeek 2025, DualPipe cut in half): a V as ZB-V, in which one stage's forward runs beside the
    other's backward, and ZB-V's idle time. At most 2p + 1 stages alive."""

    def lines(rank: int, p: int, m: int) -> Iterator[Action]:
        turn, behind = _Turns(rank, 2 * p - 1 - rank), p - rank - 1
        yield from turn.all("F0", 2 * behind)
        yield from turn.all("F0 F1", rank + 1)
        yield from turn.all("I1 W F1", behind)
        yield from turn.all("F0 B1 F1 B0", m - 2 * p + rank + 1)
        yield from turn.all("B1 F1 B0", behind)
        half = (rank + 1) // 2  # the second half of what is left splits the backward
        for i in range(rank + 1):
            yield from turn.all("I1" if i > half or (i == half and rank % 2) else "B1", 1)
            yield from turn.all("I0" if i >= half else "B0", 1)
        yield from turn.all("W I0", behind)
        yield from turn.all("W", len(turn.due))

    return Recipe("dualpipe_v", lines, microbatches, lambda p, m: max(m, 2 * p))


class _Turns:
    """The actions of two stages of a rank, each for the micro-batch whose turn it is; `W` alone: the oldest due."""

    def __init__(self, *stages: int) -> None:
        self.stages, self.due = stages, deque[Action]()
        self.count = {f"{kind}{i}": 0 for kind in "FGW" for i in range(len(stages))}  # G: backward, B or I

    def all(self, names: str, times: int) -> Iterator[Action]:
        """These actions, `times` over: `F0` the forward of the first stage."""
        for name in names.split() * max(0, times):
            kind = name[0]
            if name == "W":
                yield self.due.popleft()
                continue
            counter = f"G{name[1]}" if kind in "BI" else name
            action = Action(kind, self.stages[int(name[1])], self.count[counter])
            self.count[counter] += 1
            if kind == "I":
                self.due.append(Action("W", action.stage, action.microbatch))
            yield action
