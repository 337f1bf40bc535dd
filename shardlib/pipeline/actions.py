"""The actions of a pipeline and what each waits for. Plain data, no torch.

| action | does                                                       | waits for                                |
|--------|------------------------------------------------------------|------------------------------------------|
| `F`    | forward of a stage for a micro-batch                       | `F` of the stage before                  |
| `B`    | backward: gradients of the stage's input and weights       | its `F`, `B` or `I` of the stage behind  |
| `I`    | backward, the gradient of the input alone                  | as `B`                                   |
| `W`    | backward, the gradients of the weights, what `I` left over | its `I`                                  |
| `SF`   | starts to send what `F` gave to the rank of the next stage | its `F`                                  |
| `RF`   | starts to receive what `F` needs from the stage before     | `SF` of that stage                       |
| `SB`   | starts to send what `B` or `I` gave to the stage before    | its `B` or `I`                           |
| `RB`   | starts to receive what `B` or `I` needs                    | `SB` of the stage behind                 |

As text `F2.5` is the forward of stage 2 for micro-batch 5.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardlib.errors import ScheduleError

COMPUTE = ("F", "B", "I", "W")
SENDS = ("SF", "SB")
RECEIVES = ("RF", "RB")
_TEXT = re.compile(r"(F|B|I|W|SF|RF|SB|RB)(\d+)\.(\d+)")


class Action(NamedTuple):
    """One action of one rank, for a stage and a micro-batch, both counted from 0."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Lists = Sequence[Sequence[Action]]


def parsed(action: "Action | str", where: str) -> Action:
    """An action from its text. Raises `ScheduleError`."""
    if isinstance(action, Action):
        return action
    found = _TEXT.fullmatch(action) if isinstance(action, str) else None
    if found is None:
        raise ScheduleError(f"{where}: {action!r} is no action; write F, B, I, W, SF, RF, SB or RB as in 'F2.5'")
    return Action(found[1], int(found[2]), int(found[3]))


def placement(lists: Lists) -> dict[int, int]:
    """The rank of every stage, in the order of the stages. Raises `ScheduleError` for a stage on two ranks."""
    found: dict[int, int] = {}
    for rank, step, action in places(lists):
        if found.setdefault(action.stage, rank) != rank:
            raise ScheduleError(
                f"rank {rank}, step {step}: {action} is an action of stage {action.stage}, which rank "
                f"{found[action.stage]} holds: one rank runs all actions of a stage"
            )
    return dict(sorted(found.items()))


def places(lists: Lists) -> Iterator[tuple[int, int, Action]]:
    """Every action with its rank and its place there."""
    for rank, actions in enumerate(lists):
        for step, action in enumerate(actions):
            yield rank, step, action


def waits(action: Action, at: Mapping[int, int], sent: bool) -> list[tuple[Action, ...]]:
    """What an action waits for: of each tuple one action. `at`: the rank of every stage; `sent`: whether sends and
    receives are actions, too."""
    kind, s, k = action
    own, last = at[s], len(at) - 1
    if kind == "W":
        return [(Action("I", s, k),)]
    if kind == "SF":
        return [(Action("F", s, k),)]
    if kind == "SB":
        return [(Action("B", s, k), Action("I", s, k))]
    if kind in RECEIVES:
        return []
    found: list[tuple[Action, ...]] = [] if kind == "F" else [(Action("F", s, k),)]
    way, source = ("F", s - 1) if kind == "F" else ("B", s + 1)
    if not 0 <= source <= last:
        return found
    if sent and at[source] != own:
        return [*found, (Action(f"R{way}", s, k),), (Action(f"S{way}", source, k),)]
    return [*found, (Action("F", source, k),) if way == "F" else (Action("B", source, k), Action("I", source, k))]
