"""What jitted programs take, step for step and always: for `monitor`.

A program has marks around all that blocks: times of the host on the CPU, and on CUDA events in the stream that computes
(0.1 and some 3 microseconds each), which are read once they have passed, so that nothing is waited for.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch


class Spent(NamedTuple):
    """Seconds that programs took until they had ended, of which they were blocked in collectives; how many programs,
    and how many of these had no marks."""

    programs: float = 0.0
    blocked: float = 0.0
    count: int = 0
    unmarked: int = 0


class Meter(threading.local):
    """Marks of the programs that run, or have ended and are not read yet; each thread has its own."""

    def __init__(self) -> None:
        self.spent = Spent()
        self.marks: list[Any] = []
        self.ended = deque[tuple[list[Any], bool]]()
        self.now: Callable[[], Any] = time.perf_counter

    def mark(self) -> None:
        """Something that blocks begins, or has ended."""
        self.marks.append(self.now())

    @contextmanager
    def program(self, cuda: bool, marked: bool) -> Iterator[None]:
        """A program that runs inside; `marked`: it has marks wherever it blocks."""
        self.read()
        self.now, self.marks = _event if cuda else time.perf_counter, []
        self.mark()
        yield
        self.mark()
        self.ended.append((self.marks, marked))

    def read(self) -> Spent:
        """Of all programs that have ended by now, on the device too."""
        while self.ended and _passed(self.ended[0][0][-1]):
            marks, marked = self.ended.popleft()
            blocked = sum(_between(a, b) for a, b in zip(marks[1:-1:2], marks[2:-1:2], strict=True))
            whole, waits, count, unmarked = self.spent
            self.spent = Spent(
                whole + _between(marks[0], marks[-1]), waits + blocked, count + 1, unmarked + (not marked)
            )
        return self.spent


@cache
def meter() -> Meter:
    """That of this process."""
    return Meter()


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _passed(mark: Any) -> bool:
    return isinstance(mark, float) or mark.query()


def _between(a: Any, b: Any) -> float:
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3
