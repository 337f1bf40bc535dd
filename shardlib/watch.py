"""What the ranks of a run tell each other beside their collectives: who failed, who is where, and that all shall stop.

Each process has a connection of its own to the store of the default process group, and a thread that looks there twice
a second. A rank that fails writes down its error before it goes. One whose collective fails with the network's words
looks for such an error; where there is none it asks all ranks where they are: who does not answer is gone, who answers
from elsewhere did not come. The first verdict written is what all ranks raise.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore # exported, but not said to be
from torch.distributed.distributed_c10d import PrefixStore

from shardlib.errors import RankError, is_users

TICK = 0.5  # seconds between looks at the store
PATIENCE = 1.0  # seconds in which a rank that fails writes down why, after others have lost it
ANSWER = 2.5  # seconds in which a rank that lives says where it is
LINGER = 5.0  # seconds that a process which holds the store stays at its end, until the others have read what is there
AGREE = 60.0  # seconds in which all ranks write down how often they have asked whether to stop
_SILENT = timedelta(seconds=5)  # a store that takes longer is out of reach


@dataclass(frozen=True)
class Place:
    """Where a rank is: in its call number `call` of a program, which has started `started` collectives and waits for
    number `number`, called `waits` (0, "": for none); at `line` of the user's. `left`: it has ended, without error."""

    call: int = 0
    started: int = 0
    number: int = 0
    waits: str = ""
    line: str = ""
    left: bool = False


class Watch:
    """One process's part in it. `place`: what its log says of its programs; without one, nothing is known of them.
    `holds`: the store is this process's and goes with it, where no launcher holds it."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world, self.pid = _own(store), rank, world, os.getpid()
        self.main = threading.main_thread().ident or 0
        self.lock, self.end = threading.Lock(), threading.Event()
        self.place: Callable[[], Place] = Place
        self.calls, self.stop_at, self.asked, self.holds = 0, -1, False, False
        self.read = dict[str, str]()  # what has been found in the store: it may go with the process that holds it
        self.thread = threading.Thread(target=self._look, daemon=True, name="shardlib-watch")
        self.thread.start()
        atexit.register(self.close)

    # ---- failures

    def tell(self, error: BaseException) -> None:
        """Write down that this rank fails, and why; the others may then raise it."""
        if getattr(error, "told", False):
            return
        error.told = True  # type: ignore[attr-defined]
        text = "".join(traceback.format_exception(error))
        said = {"rank": self.rank, "error": f"{type(error).__name__}: {error}", "traceback": text}
        with suppress(RuntimeError):  # the store is gone, or out of reach
            self.store.compare_set("failure", "", json.dumps(said))
            self.store.set("news", "1")
        self._leave_for_launcher(error)

    def explained(self, error: BaseException) -> RankError | None:
        """Which rank is to blame where `error` is the network's word that a peer is gone or late; else None."""
        if not lost(error):
            return None
        try:
            found = self.heard(PATIENCE) or _told(self._verdict())
        except RuntimeError:
            where = "the store does not answer either: who holds it, the launcher or the first rank, is gone or cut off"
            found = _told(f"rank {self.rank} waited for {self._mine().waits or 'a collective'}; {where}")
        found.__suppress_context__ = True
        found.add_note(f"the network said: {error}")
        self._leave_for_launcher(found)
        return found

    def heard(self, seconds: float = 0.0) -> RankError | None:
        """What another rank has failed of, as soon as it is known, for so long."""
        deadline = time.monotonic() + seconds
        while not (found := self._found("failure")):
            if time.monotonic() > deadline or self._found("verdict"):
                return None
            time.sleep(0.05)
        said, waits = json.loads(found), self._mine().waits
        if said["rank"] == self.rank:
            return None
        there = f"\nrank {self.rank} waited for {waits}" if waits else ""
        error = _told(f"rank {said['rank']} failed: {said['error']}{there}")
        error.add_note(f"its traceback:\n{said['traceback']}")
        return error

    def _found(self, key: str) -> str:
        """What is in the store, or was when it was last looked at."""
        if key not in self.read and self.store.check([key]):
            self.read[key] = self.store.get(key).decode()
        return self.read.get(key, "")

    def _leave_for_launcher(self, error: BaseException) -> None:
        """The error where torch's launcher looks for one."""
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # takes its time to load

        frames = error.__traceback__
        with suppress(OSError):
            try:
                raise error  # what the handler writes is the error that is being handled
            except BaseException as e:
                get_error_handler().record_exception(e)
        error.__traceback__ = frames

    def _verdict(self) -> str:
        """The first that any rank finds of why collectives fail: the first that asks, unless it does not come back."""
        if not self._found("verdict") and self.store.add("asking", 1) > 1:
            deadline = time.monotonic() + 2 * ANSWER
            while not self._found("verdict") and time.monotonic() < deadline:
                time.sleep(0.05)
        return self._found("verdict") or self.store.compare_set("verdict", "", self._roll_call()).decode()

    def _roll_call(self) -> str:
        """Who is gone, or did not come, from what all ranks say of where they are."""
        self._answer()
        for key in ("roll", "news"):
            self.store.set(key, "1")
        deadline = time.monotonic() + ANSWER
        while len(at := self._answers()) < self.world and time.monotonic() < deadline:
            time.sleep(0.05)
        mine = at[self.rank]
        waits = mine.waits or f"a collective at {mine.line}"
        me = f"rank {self.rank} waited for {waits}"
        if left := [r for r in at if at[r].left]:
            return f"{_ranks(left)} had ended; {me}"
        if gone := [r for r in range(self.world) if r not in at]:
            return f"{_ranks(gone)} did not answer: killed, frozen, or cut off with the host; {me}"
        late = [r for r in at if mine.number and (at[r].call, at[r].started) < (mine.call, mine.number)]
        if late:
            return "\n".join(f"rank {r} did not reach {waits}, last at {at[r].line}" for r in sorted(late)[:3])
        lines = "".join(f"\n  rank {r} at {at[r].line}" for r in sorted(at))
        return f"{me}, and lost a peer; all ranks answer:{lines}"

    def _answers(self) -> dict[int, Place]:
        """Where the ranks are that have said so."""
        said = {r: self.store.get(f"at/{r}") for r in range(self.world) if self.store.check([f"at/{r}"])}
        return {r: Place(**json.loads(x)) for r, x in said.items()}

    def _mine(self, left: bool = False) -> Place:
        """Where this rank is."""
        frame: Any = sys._current_frames().get(self.main)
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        where = "a line that is not known"
        if frame is not None:
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        return replace(self.place(), line=where, left=left)

    def _answer(self, left: bool = False) -> None:
        self.store.set(f"at/{self.rank}", json.dumps(asdict(self._mine(left))))

    # ---- stopping together

    def stopping(self) -> bool:
        """Whether all ranks stop here: true from the same call on, on each of them, once one has been asked to."""
        with self.lock:
            self.calls += 1
            number = self.calls
        if self.stop_at >= 0:
            return number >= self.stop_at
        if not self.asked:
            return False
        keys, deadline = [f"calls/{r}" for r in range(self.world)], time.monotonic() + AGREE
        while missing := [k for k in keys if not self.store.check([k])]:  # each rank's thread writes: it takes a tick
            if time.monotonic() > deadline:
                raise RankError(f"a rank was asked to stop; {_ranks([int(k[6:]) for k in missing])} did not answer")
            time.sleep(0.05)
        self.stop_at = max(int(self.store.get(k)) for k in keys) + 1
        return number >= self.stop_at

    def _freeze(self) -> None:
        """Write down how often this rank has asked; from now on it waits for what the others write."""
        with self.lock:
            self.asked = True
            self.store.set(f"calls/{self.rank}", str(self.calls))

    # ---- the thread

    def _look(self) -> None:
        answered = heard = False
        with suppress(RuntimeError):  # the store is gone: so is the run
            while not self.end.wait(TICK):
                if _signalled and not self.asked:
                    self.store.set("stop", "1")
                    self.store.set("news", "1")
                if not self.store.check(["news"]):
                    continue
                if not self.asked and self.store.check(["stop"]):
                    self._freeze()
                if not answered and self.store.check(["roll"]):
                    answered = True
                    if not self.store.check([f"at/{self.rank}"]):
                        self._answer()
                if not heard and (self._found("failure") or self._found("verdict")):
                    heard = True
                    self.store.set(f"heard/{self.rank}", "1")

    def close(self) -> None:
        """At the end of the process: say why it ends, and that it does not come to anything more."""
        if os.getpid() != self.pid or self.end.is_set():
            return
        self.end.set()
        self.thread.join()  # a thread that is in C++ when Python goes would end the process with SIGABRT
        error = getattr(sys, "last_value", None)
        if error is not None and not lost(error):
            self.tell(error)
        with suppress(RuntimeError):
            if not self.asked:
                self._freeze()
            self._answer(left=error is None)
            self.store.set(f"heard/{self.rank}", "1")
            deadline = time.monotonic() + LINGER * self.holds
            while time.monotonic() < deadline and not all(self.store.check([f"heard/{r}"]) for r in range(self.world)):
                time.sleep(0.05)


def lost(error: BaseException) -> bool:
    """Whether this is what the network says of a peer that is gone or late: gloo in words, the others in classes."""
    in_words = type(error) is RuntimeError and any(x in str(error) for x in ("gloo/transport", "Application timeout"))
    return in_words or isinstance(error, dist.DistError)


def _told(said: str) -> RankError:
    """The error on a rank that need not tell the others."""
    error = RankError(said)
    error.told = True  # type: ignore[attr-defined]
    return error


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _own(store: Any) -> Any:
    """A connection for this watch: one in use by another thread waits for it."""
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if isinstance(base, TCPStore):
        base = TCPStore(base.host, base.port, is_master=False, timeout=_SILENT)
    return PrefixStore("shardlib/watch", base)


def watch() -> Watch | None:
    """This process's watch, if it has a process group of several ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()  # has no public name
    return _watch(os.getpid(), store)


@contextmanager
def blamed() -> Iterator[None]:
    """Where the network says, inside, that a peer is gone or late, `RankError` says which one, and what it missed."""
    try:
        yield
    except Exception as e:
        if (others := watch()) and (found := others.explained(e)):
            raise found from None
        raise


@cache
def _watch(pid: int, store: Any) -> Watch:
    return Watch(store, dist.get_rank(), dist.get_world_size())


_signalled: list[int] = []


def _note(number: int, frame: Any) -> None:
    _signalled.append(number)


def preempted() -> bool:
    """Whether the run shall save and end: true on all ranks from the same call on, once SIGTERM has reached any.

    The first call takes SIGTERM over, so make it before the loop; all ranks call it equally often, once per step. The
    answer costs nothing until there is a signal, and comes within about a second of it. Raises ValueError where the
    first call is not made in the main thread.
    """
    if signal.getsignal(signal.SIGTERM) is not _note:
        signal.signal(signal.SIGTERM, _note)
    found = watch()
    return bool(_signalled) if found is None else found.stopping()
