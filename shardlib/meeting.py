"""The first call of a program on the processes of a mesh: before it runs, they compare what they are about to run.

They meet in the store of the default process group, which needs no collective: a rank that passes another shape, or
fails, is told of, where the collectives of its program would hang. The first rank reads what all have posted, and posts
a verdict. Later calls cost nothing.
"""

import json
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shardlib.errors import RankError, ShardError
from shardlib.mesh import Mesh
from shardlib.watch import watch
from shardlib.wire import by_rank

_PATIENCE = 10.0  # seconds until a line on stderr says who is waited for
_SHAPES = 2  # parts of a line of a fingerprint that say what must be the same for a collective to be made at all
_TRACING = 600.0  # seconds that a rank that has come may take for its program, beyond the mesh's timeout


class Meeting:
    """What the processes do at one first call of a function called `name`, the n-th of that name on each of them.

    `arguments`: lines that say what it is called with, which must be the same everywhere. Inside `with`, an error is
    told to the others, which raise `RankError`.
    """

    def __init__(self, mesh: Mesh, name: str, arguments: Sequence[str]) -> None:
        store: Any = dist.distributed_c10d._get_default_store()  # has no public name
        self.mesh, self.name, self.arguments = mesh, name, list(arguments)
        prefixed: Any = dist.distributed_c10d.PrefixStore("shardlib", store)  # typed as for text only
        self.store, self.timeout = prefixed, mesh.timeout or store.timeout
        self.label = f"{name}/{self.store.add(f'{mesh.rank}/{name}', 1)}"
        self._post("at", mesh.rank, {"label": self.label, "arguments": self.arguments})

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        if error is None or getattr(error, "told", False):
            return
        said = f"rank {self.mesh.rank} failed in its first call of `{self.name}`: {type(error).__name__}: {error}"
        if self.mesh.rank:
            self._post(f"come/{self.label}", self.mesh.rank, {"error": said, "arguments": self.arguments})
        else:
            self._judge(said)

    def agree(self, fingerprint: Sequence[str], titles: Sequence[str]) -> None:
        """Wait until all have come; raise `RankError` everywhere unless arguments and collectives are the same."""
        mine = {"arguments": self.arguments, "fingerprint": list(fingerprint), "titles": list(titles)}
        if self.mesh.rank:
            self._post(f"come/{self.label}", self.mesh.rank, mine)
            self._wait(f"verdict/{self.label}", 0)
            said = self.store.get(f"verdict/{self.label}").decode()
        else:
            said = self._verdict(mine)
            self._judge(said)
            self.store.delete_key(f"program/{self.label}")
        if said:
            raise _told(said)

    # ---- one rank's program for all

    def share(self, text: str) -> None:
        """Give the other ranks a program, or `""` for none."""
        self.store.set(f"program/{self.label}", zlib.compress(text.encode()))

    def shared(self) -> str:
        """What the first rank shares."""
        self._wait(f"program/{self.label}", 0, f"verdict/{self.label}")
        if self.store.check([f"verdict/{self.label}"]):
            raise _told(self.store.get(f"verdict/{self.label}").decode())
        return zlib.decompress(self.store.get(f"program/{self.label}")).decode()

    # ---- the store

    def _post(self, where: str, rank: int, said: Any) -> None:
        self.store.set(f"{where}/{rank}", zlib.compress(json.dumps(said).encode()))

    def _read(self, where: str, rank: int) -> Any:
        """What a rank has posted there, if it has."""
        key = f"{where}/{rank}"
        return json.loads(zlib.decompress(self.store.get(key))) if self.store.check([key]) else {}

    def _judge(self, said: str, label: str = "") -> None:
        self.store.set(f"verdict/{label or self.label}", said)

    def _verdict(self, mine: Mapping[str, Any]) -> str:
        """What the first rank finds: an error, or nothing."""
        come = {0: mine}
        for rank in range(1, self.mesh.total):
            try:
                self._wait(f"come/{self.label}/{rank}", rank)
            except RankError as e:
                return str(e)
            come[rank] = self._read(f"come/{self.label}", rank)
        error = next((c["error"] for c in come.values() if "error" in c), "")
        told = _differences({r: c["arguments"] for r, c in come.items()})
        if told:
            return f"ranks call `{self.name}` with different arguments:\n{told}" + (f"\n{error}" if error else "")
        if error:
            return error
        prints = {r: [line.split("\t") for line in c["fingerprint"]] for r, c in come.items()}
        if not self.mesh.debug and len({str(sorted(p)) for p in prints.values()}) > 1:  # else the same, in what order?
            prints = {r: [parts[:_SHAPES] for parts in p] for r, p in prints.items()}
        numbers = range(max(map(len, prints.values())))
        at = next((i for i in numbers if len({str(p[i : i + 1]) for p in prints.values()}) > 1), None)
        if at is None:
            return ""
        titles = {r: (c["titles"][at : at + 1] or ["none"])[0] for r, c in come.items()}
        if len({t.rpartition("]")[0] for t in titles.values()}) == 1:  # but for the line of code
            parts = {r: p[at] for r, p in prints.items()}
            told = {
                r: [x for x, *xs in zip(p, *parts.values(), strict=False) if {*xs} != {x}] for r, p in parts.items()
            }
            titles = {r: f"{t} ({', '.join(told[r])})" for r, t in titles.items()}
        return f"ranks disagree on the collectives of `{self.name}`; number {at + 1} is\n{by_rank(titles)}"

    def _wait(self, key: str, rank: int, *others: str) -> None:
        """Until `rank` has written `key`, or one of the others. Raises `RankError` when it never will."""
        self._post(f"waits/{self.label}", self.mesh.rank, {})
        said, limit = False, self.timeout.total_seconds()
        for waited in _ticks():
            if any(self.store.check([k]) for k in (key, *others)):
                return
            if waited > 0.5 and (ranks := watch()) and (failed := ranks.heard()):
                raise failed
            if waited > limit + _TRACING * (self._read("at", rank).get("label") == self.label):
                raise _told(f"{self._missed(rank)} within {waited:.0f} s")
            if waited > 0.5 and not self.mesh.rank and (away := self._elsewhere(rank)):
                raise _told(away)
            if waited > _PATIENCE and not said:
                said = True
                print(f"shardlib: {self._missed(rank)}; waiting", file=sys.stderr)

    def _elsewhere(self, rank: int) -> str:
        """What is wrong if a rank waits in another first call, to which this one has not come; told there, too."""
        label = self._read("at", rank).get("label", self.label)
        if label == self.label or not self._is_set(f"waits/{label}/{rank}") or self._is_set(f"verdict/{label}"):
            return ""
        said = {r: f"`{x.rpartition('/')[0]}`" for r, x in ((self.mesh.rank, self.label), (rank, label))}
        out = f"ranks call different functions, or in another order; they wait in\n{by_rank(said)}"
        self._judge(out, label)
        return out

    def _is_set(self, key: str) -> bool:
        return self.store.check([key])

    def _missed(self, rank: int) -> str:
        """What is known of a rank that did not come."""
        last = self._read("at", rank)
        me = f"rank {self.mesh.rank} calls `{self.name}` with arguments that it was not traced for"
        if last.get("label") == self.label:
            return f"{me}; rank {rank} does, too, but has no program yet"
        if not last:
            return f"{me}; rank {rank} has called no jitted function"
        told = _differences({self.mesh.rank: self.arguments, rank: last["arguments"]})
        before = last["label"].rpartition("/")[0]
        more = f"; what it last traced is `{before}`" + (f":\n{told}\n " if told and before == self.name else "")
        return f"{me}, rank {rank} does not{more}"


def _differences(lines: Mapping[int, Sequence[str]]) -> str:
    """By rank, the lines that are not the same everywhere; nothing if all are."""
    common = set.intersection(*map(set, lines.values()))
    own = {r: [x for x in xs if x not in common] for r, xs in lines.items()}
    if not any(own.values()):
        return ""
    shown = {r: "; ".join(xs[:3]) + (f"; and {len(xs) - 3} more" if len(xs) > 3 else "") for r, xs in own.items()}
    return by_rank({r: text or "nothing more" for r, text in shown.items()})


def _ticks() -> Iterator[float]:
    """The seconds that have passed, at growing intervals up to a tenth of a second."""
    began, pause = time.monotonic(), 0.001
    while True:
        yield time.monotonic() - began
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _told(said: str) -> ShardError:
    """The error on a rank that need not tell the others."""
    error = RankError(said)
    error.told = True  # type: ignore[attr-defined]
    return error
