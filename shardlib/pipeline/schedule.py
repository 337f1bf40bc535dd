"""`Schedule`: what every rank of a pipeline does, in order, as plain data; proven when it is made. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardlib.errors import ScheduleError, listing
from shardlib.pipeline import draw
from shardlib.pipeline.actions import COMPUTE, GATHERS, RECEIVES, SENDS, Action, Lists, parsed, placement, places
from shardlib.pipeline.order import Span, idle, played

Costs = float | Sequence[float]  # of every stage, or of each its own


@dataclass(frozen=True)
class Schedule:
    """For each rank its list of actions: `Schedule([["F0.0", "B0.0"], ["F1.0", "B1.0"]])`.

    Lists of `F`, `B` (or `I` and `W`) alone are enough: what is sent and received is added, and `R` after every
    backward where the layout cuts gradients further than weights (ZeRO-2). With `GF` and `GB` a stage's weights come
    in as they lie at rest and are gathered where these stand (ZeRO-3); without, before the first action. `lists` holds
    the whole lists, `stages`, `microbatches` and `placement` (the rank of each stage) are read from them. Rank r of p
    holds one stage of each run of p stages. Raises `ScheduleError`, which names rank, step and action, where an action
    is missing or stands twice, sends and receives do not match, or the lists cannot run to their end.
    """

    lists: tuple[tuple[Action, ...], ...]
    name: str = field(default="schedule", compare=False)

    def __init__(self, lists: Sequence[Sequence[Action | str]], name: str = "schedule") -> None:
        read = tuple(
            tuple(parsed(a, f"rank {rank}, step {step}") for step, a in enumerate(actions))
            for rank, actions in enumerate(lists)
        )
        check_complete(read)
        check_weights(read)
        if not any(a.kind in SENDS + RECEIVES for _, _, a in places(read)):
            read = with_transfers(read)
        check_transfers(read)
        played(read)
        object.__setattr__(self, "lists", read)
        object.__setattr__(self, "name", name)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage."""
        return tuple(placement(self.lists).values())

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.lists)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        """How many micro-batches there are."""
        return 1 + max(a.microbatch for _, _, a in places(self.lists))

    @cached_property
    def gathers(self) -> bool:
        """Whether weights are gathered by its actions."""
        return any(a.kind in GATHERS for _, _, a in places(self.lists))

    @cached_property
    def reducing(self) -> "Schedule":
        """The schedule with gradients reduced after every backward, where it does not say when."""
        if any(a.kind == "R" for _, _, a in places(self.lists)):
            return self
        lists = [list(actions) for actions in self.lists]
        for actions in lists:
            for i, (kind, s, k) in reversed(list(enumerate(actions))):
                if kind in ("B", "W"):  # after the send, for which others wait
                    sent = actions[i + 1 : i + 2] == [Action("SB", s, k)]
                    actions.insert(i + 1 + sent, Action("R", s, k))
        return Schedule(lists, self.name)

    def timeline(
        self, *, forward: Costs = 1, input: Costs = 1, weight: Costs = 1, send: Costs = 0
    ) -> dict[Action, Span]:
        """When each action runs, if a stage's forward, the gradients of its input and those of its weights take so
        long (`B` both of the latter), and what it sends arrives `send` later. Each is a number, or a list of one for
        every stage; `ScheduleError` for a list of another length."""
        given = {"forward": forward, "input": input, "weight": weight, "send": send}
        f, i, w, late = (self._by_stage(what, costs) for what, costs in given.items())
        cost = {"F": f, "B": [a + b for a, b in zip(i, w, strict=True)], "I": i, "W": w}
        return played(self.lists, lambda a: cost[a.kind][a.stage], late)

    def _by_stage(self, what: str, costs: Costs) -> Sequence[float]:
        if isinstance(costs, int | float):
            return [costs] * self.stages
        if len(costs) != self.stages:
            raise ScheduleError(
                f"{what}= lists {len(costs)} costs, and {self.name} on {self.ranks} ranks has {self.stages} stages: "
                "give one for each stage, or a number for all"
            )
        return costs

    def idle(self, **costs: Costs) -> float:
        """The fraction of the ranks' time in which they compute nothing; `costs` as for `timeline`."""
        return idle(self.timeline(**costs), self.ranks)

    def bubble(self, **costs: Costs) -> float:
        """The longest that a rank computes nothing between its own first action and its own last: what is left where
        steps follow each other without a barrier (Qi et al. 2023)."""
        spans, longest = self.timeline(**costs), 0.0
        for actions in self.lists:
            own = [spans[a] for a in actions if a.kind in COMPUTE]
            longest = max(longest, own[-1].end - own[0].start - sum(s.end - s.start for s in own))
        return longest

    def live(self) -> tuple[int, ...]:
        """By rank the most stages' activations of a micro-batch that it holds at once: from `F` to the end of `B`, or
        of `W`, which needs some of them and what `I` hands over."""
        peaks = []
        for actions in self.lists:
            now = peak = 0
            for a in actions:
                now += (a.kind == "F") - (a.kind in "BW")
                peak = max(peak, now)
            peaks.append(peak)
        return tuple(peaks)

    def as_text(self, **costs: Costs) -> str:
        """The timeline to read: a line for each rank, a column for each unit of time."""
        return draw.text([self._row(r, costs) for r in range(self.ranks)])

    def as_svg(self, **costs: Costs) -> str:
        """The timeline as a picture."""
        told = f"{self.name}: ranks {self.ranks}, stages {self.stages}, micro-batches {self.microbatches}"
        return draw.svg([self._row(r, costs) for r in range(self.ranks)], f"{told}, idle {self.idle(**costs):.1%}")

    def show(self, svg: str | None = None, **costs: Costs) -> None:
        """Print the timeline; `svg`: draw it into this file, too. `costs` as for `timeline`."""
        print(self.as_text(**costs))
        print(
            f"{self.name}: idle {self.idle(**costs):.1%}; live activations by rank: {' '.join(map(str, self.live()))}"
        )
        if svg is not None:
            with open(svg, "w") as file:
                file.write(self.as_svg(**costs))

    def _row(self, rank: int, costs: dict[str, Costs]) -> list[draw.Box]:
        spans = self.timeline(**costs)
        return [
            draw.Box(a.kind, a.stage // self.ranks, a.microbatch, *spans[a])
            for a in self.lists[rank]
            if a.kind in COMPUTE
        ]


# ---- what a schedule must be


def check_complete(lists: Lists) -> None:
    """Raise unless every stage does `F` and either `B` or `I` and `W` once for every micro-batch, and ranks hold one
    stage of each run."""
    seen: dict[Action, tuple[int, int]] = {}
    for rank, step, action in places(lists):
        if action in seen:
            before = seen[action]
            raise ScheduleError(
                f"rank {rank}, step {step}: {action} stands twice, first at rank {before[0]}, step {before[1]}"
            )
        seen[action] = rank, step
    at = placement(lists)
    if not seen:
        raise ScheduleError("a schedule has actions; these lists are empty")
    if unknown := [a for a in seen if a.stage >= len(at)]:
        (rank, step), missing = seen[unknown[0]], min({*range(len(at))} - {*at})
        raise ScheduleError(
            f"rank {rank}, step {step}: {unknown[0]} is of stage {unknown[0].stage}, but no action is of stage "
            f"{missing}: stages are numbered from 0"
        )
    n, p = 1 + max(a.microbatch for a in seen), len(lists)
    for s, rank in at.items():
        for k in range(n):
            forward, whole, *parts = (Action(kind, s, k) for kind in "FBIW")
            if whole in seen and any(a in seen for a in parts):
                raise ScheduleError(f"rank {rank}, step {seen[whole][1]}: {whole} stands beside I or W of the same")
            wanted = [forward, whole] if not any(a in seen for a in parts) else [forward, *parts]
            if missing := [a for a in wanted if a not in seen]:
                beside = next((a for a in wanted if a in seen), None)
                where = f"rank {rank}" if beside is None else f"rank {rank}, step {seen[beside][1]}: {beside} is there"
                raise ScheduleError(f"{where}, {missing[0]} is missing; micro-batches: {n}")
    for run in range(0, len(at), p):
        held = [at[s] for s in range(run, min(run + p, len(at)))]
        if sorted(held) != list(range(p)):
            raise ScheduleError(
                f"stages {run} to {run + len(held) - 1} lie on ranks {listing(held)}; each of {p} ranks holds one of "
                f"every {p} stages"
            )


def check_transfers(lists: Lists) -> None:
    """Raise unless what is sent between two ranks is received by the other, in the same order each way."""
    at, last = placement(lists), len(placement(lists)) - 1
    ways: dict[tuple[str, int, int], list[list[tuple[Action, int]]]] = {}
    for rank, step, action in places(lists):
        kind, s, _ = action
        if kind not in SENDS + RECEIVES:
            continue
        ahead = (kind == "SF") - (kind == "SB") - (kind == "RF") + (kind == "RB")
        if not 0 <= s + ahead <= last or at[s + ahead] == rank:
            raise ScheduleError(f"rank {rank}, step {step}: {action} has no other rank at its end")
        pair = (rank, at[s + ahead]) if kind in SENDS else (at[s + ahead], rank)
        ways.setdefault((kind[1], *pair), [[], []])[kind in RECEIVES].append((action, step))
    for (kind, source, to), (sends, receives) in ways.items():
        step = 1 if kind == "F" else -1
        expected = [Action(f"R{kind}", a.stage + step, a.microbatch) for a, _ in sends]
        found = [a for a, _ in receives]
        if expected != found:
            i = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
            if i is None:
                i = min(len(expected), len(found))
            a = f"rank {source}, step {sends[i][1]}: {sends[i][0]}" if i < len(sends) else f"rank {source}: nothing"
            b = f"rank {to}, step {receives[i][1]}: {receives[i][0]}" if i < len(receives) else f"rank {to}: nothing"
            raise ScheduleError(f"sends and receives from rank {source} to {to} differ at number {i}:\n  {a}\n  {b}")


def check_weights(lists: Lists) -> None:
    """Raise where weights are gathered for some actions only, or gradients reduced for some only."""
    kinds = {a.kind for _, _, a in places(lists)}
    for rank, actions in enumerate(lists):
        gathered, due = set[int](), dict[int, tuple[int, Action]]()
        for step, a in enumerate(actions):
            if a.kind in GATHERS:
                gathered.add(a.stage)
            elif a.kind == "F" and kinds.intersection(GATHERS) and a.stage not in gathered:
                raise ScheduleError(
                    f"rank {rank}, step {step}: {a} comes before GF{a.stage}.{a.microbatch}: "
                    "where some weights are gathered by the schedule, all are"
                )
            elif a.kind in ("B", "W"):
                due[a.stage] = step, a
            elif a.kind == "R":
                due.pop(a.stage, None)
        if due and "R" in kinds:
            step, a = min(due.values())
            raise ScheduleError(
                f"rank {rank}, step {step}: no R{a.stage}.{a.microbatch} comes after {a}: where some "
                "gradients are reduced by the schedule, all are"
            )


def with_transfers(lists: Lists) -> tuple[tuple[Action, ...], ...]:
    """Lists of what is computed with what is sent and received.

    A send follows what made it. A receive stands one action before the last that starts before the message is there,
    so that the wire waits for it and not the rank. Messages between two ranks, both ways, stand in one order on both:
    that in which they are made when all actions take as long. So no two ranks wait for each other.
    """
    at, spans = placement(lists), played(lists)
    out: list[list[tuple[int, int, Action]]] = [[(i, 1, a) for i, a in enumerate(each)] for each in lists]
    least: dict[tuple[int, int], int] = {}  # where a rank's next receive from another may stand at the earliest
    for end, rank, step, action in sorted(
        (spans[a].end, r, i, a) for r, i, a in places(lists) if a.kind in ("F", "B", "I")
    ):
        way = "F" if action.kind == "F" else "B"
        other = action.stage + (1 if way == "F" else -1)
        to = at.get(other, rank)
        if to == rank:
            continue
        later = next(i for i, a in enumerate(lists[to]) if spans[a].start >= end)
        before = max(later - 1, 0, least.get((to, rank), 0))
        least[rank, to], least[to, rank] = step + 1, before
        out[rank].append((step, 2, Action(f"S{way}", action.stage, action.microbatch)))
        out[to].append((before, 0, Action(f"R{way}", other, action.microbatch)))
    return tuple(tuple(a for _, _, a in sorted(each, key=lambda x: x[:2])) for each in out)
