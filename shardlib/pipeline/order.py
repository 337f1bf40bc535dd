"""Playing a schedule: when each action starts and ends, given what actions cost. What cannot end is a deadlock."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shardlib.errors import ScheduleError
from shardlib.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Lists, placement, places, waits


class Span(NamedTuple):
    """When an action runs."""

    start: float
    end: float


Cost = Callable[[Action], float]


def played(lists: Lists, cost: Cost = lambda action: 1.0, send: Sequence[float] | None = None) -> dict[Action, Span]:
    """The span of every action when each starts as soon as its rank is free and what it waits for is done.

    Actions that compute nothing take no time of a rank; what stage s sends arrives `send[s]` later (None: at once).
    Raises `ScheduleError` where some actions can never start, with what each rank waits for.
    """
    at = placement(lists)
    send = send or [0.0] * len(at)
    sent = any(a.kind in SENDS + RECEIVES for _, _, a in places(lists))
    spans: dict[Action, Span] = {}
    steps, free = [0] * len(lists), [0.0] * len(lists)
    going = True
    while going:
        going = False
        for rank, actions in enumerate(lists):
            while steps[rank] < len(actions):
                action = actions[steps[rank]]
                ready = _ready(action, rank, waits(action, at, sent), spans, at, send)
                if ready is None:
                    break
                start = max(free[rank], ready)
                spans[action] = Span(start, start + (cost(action) if action.kind in COMPUTE else 0.0))
                free[rank] = spans[action].end
                steps[rank], going = steps[rank] + 1, True
    if any(step < len(actions) for step, actions in zip(steps, lists, strict=True)):
        raise _deadlock(lists, steps, spans, at, sent)
    return spans


def _ready(
    action: Action,
    rank: int,
    needed: list[tuple[Action, ...]],
    spans: Mapping[Action, Span],
    at: Mapping[int, int],
    send: Sequence[float],
) -> float | None:
    """When all that an action waits for is there; None where some of it is not done."""
    ready = 0.0
    for choice in needed:
        found = next((spans[a] for a in choice if a in spans), None)
        if found is None:
            return None
        source = choice[0].stage
        crossed = choice[0].kind in SENDS or at[source] != rank
        ready = max(ready, found.end + send[source] * crossed)
    return ready


def _deadlock(
    lists: Lists, steps: list[int], spans: Mapping[Action, Span], at: Mapping[int, int], sent: bool
) -> ScheduleError:
    where = {action: (rank, step) for rank, step, action in places(lists)}
    lines = []
    for rank, (actions, step) in enumerate(zip(lists, steps, strict=True)):
        if step < len(actions):
            missing = [c for c in waits(actions[step], at, sent) if not any(a in spans for a in c)]
            said = " and ".join(_place(choice, where) for choice in missing)
            lines.append(f"  rank {rank}, step {step}: {actions[step]} waits for {said}")
    return ScheduleError("the schedule cannot go on:\n" + "\n".join(lines))


def _place(choice: tuple[Action, ...], where: Mapping[Action, tuple[int, int]]) -> str:
    found = next((a for a in choice if a in where), None)
    if found is None:
        return f"{' or '.join(map(str, choice))}, which no rank does"
    return "{}, step {} of rank {}".format(found, *reversed(where[found]))


def idle(spans: Mapping[Action, Span], ranks: int) -> float:
    """The fraction of the ranks' time, from the first action to the last, in which they compute nothing."""
    busy = sum(s.end - s.start for a, s in spans.items() if a.kind in COMPUTE)
    whole = max(s.end for s in spans.values()) - min(s.start for s in spans.values())
    return 1 - busy / (ranks * whole) if whole else 0.0
