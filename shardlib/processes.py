"""Processes that act together on the host: what one of them raises, all raise."""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardlib.errors import RankError, ShardError
from shardlib.mesh import Mesh
from shardlib.watch import blamed

T = TypeVar("T")


class Processes:
    """The processes of a mesh; this one alone where there is no mesh, or a simulated one.

    Every method is called by all of them. Objects are pickled and meet on the first process, so keep them small.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self.count = mesh.total if mesh and not mesh.simulate else 1
        self.rank = mesh.rank if mesh and self.count > 1 else 0

    def exchange(self, f: Callable[[], Any], g: Callable[[list[Any]], list[Any]]) -> Any:
        """`f()` on every process, `g` of the results on the first; each process gets its item of what `g` returns.

        An error on one process is raised on all, as `RankError` unless it is one of the library's. A process on its own
        raises what was raised.
        """
        if self.count == 1:
            return g([f()])[0]
        with blamed():
            return self._exchange(f, g)

    def _exchange(self, f: Callable[[], Any], g: Callable[[list[Any]], list[Any]]) -> Any:
        mine = _attempt(f, self.rank)
        if self.rank == 0:
            given: list[Any] = [None] * self.count
            dist.gather_object(mine, given)
            answers: list[Any] = [e for _, e in given if e][:1] * self.count
            if not answers:
                items, error = _attempt(lambda: g([x for x, _ in given]), 0)
                answers = [error] * self.count if items is None else [(x,) for x in items]
        else:
            dist.gather_object(mine)
            answers = []
        got: list[Any] = [None]
        dist.scatter_object_list(got, answers or None)
        if len(got[0]) == 2:
            kind, message = got[0]
            raise kind(message)
        return got[0][0]

    def all(self, f: Callable[[], T]) -> list[T]:
        """What `f` returns on every process, in rank order."""
        return self.exchange(f, lambda given: [given] * len(given))

    def first(self, f: Callable[[], T]) -> T:
        """What `f` returns on the first process."""
        return self.exchange(lambda: None, lambda given: [f()] * len(given))

    def agree(self, what: str, f: Callable[[], tuple[T, list[str]]]) -> T:
        """The first item of `f()`, where the second, lines of text, is the same on all processes; else `RankError`."""
        kept: list[tuple[T, list[str]]] = []

        def digest() -> str:
            kept.append(f())
            return hashlib.sha256("\n".join(kept[0][1]).encode()).hexdigest()

        if len(set(self.all(digest))) > 1:
            first, *others = self.all(lambda: kept[0][1])
            details = ""
            for rank, lines in enumerate(others, 1):
                has = ", ".join(x for x in lines if x not in first) or "nothing more"
                lacks = ", ".join(x for x in first if x not in lines) or "nothing more"
                details += f"\n  rank {rank} has {has}; rank 0 has {lacks}" if lines != first else ""
            raise RankError(f"{what} is not the same on all ranks{details}")
        return kept[0][0]


def _attempt(f: Callable[[], T], rank: int) -> tuple[T | None, tuple[type[ShardError], str] | None]:
    """`f()`, or what it raised in a form that can be sent."""
    try:
        return f(), None
    except Exception as e:
        kind, name = (type(e), "") if isinstance(e, ShardError) else (RankError, f"{type(e).__name__}: ")
        return None, (kind, f"rank {rank}: {name}{e}")
