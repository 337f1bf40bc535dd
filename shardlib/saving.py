"""Saves that go on beside the run: one at a time in a process, and the error of one is not lost.

A thread writes, which Python waits for before the process ends. What it raises is raised where the process next asks
about files, and where it asks no more, it ends with that error and exit code 1.
"""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path


class Saving:
    """A save that goes on, as `save(..., wait=False)` returns it. `path`: where it appears once it is whole."""

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path = path
        self._work, self._error = work, None
        self._thread = threading.Thread(target=self._run, name="shardlib-save")

    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The path, once it is there. Raises what kept the save from being made; then nothing of it is."""
        self._thread.join()
        if self in _under_way:
            _under_way.remove(self)
        if self._error:
            raise self._error
        return self.path

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:
            traceback.clear_frames(e.__traceback__)
            self._error: BaseException | None = e
        del self._work  # the copy of the state goes

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._error else "done"
        return f"Saving({str(self.path)!r}, {state})"


_under_way: list[Saving] = []  # at most one


def begin(path: Path, work: Callable[[], None]) -> Saving:
    """Let a thread do the work of the save `path`."""
    saving = Saving(path, work)
    saving._thread.start()
    _under_way.append(saving)
    return saving


def finish() -> None:
    """Wait for the save that is under way, if one is. Raises what it raised, unless its `wait` has."""
    for saving in [*_under_way]:
        saving.wait()


def _at_exit() -> None:
    try:
        finish()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an error here would only be printed


atexit.register(_at_exit)  # when shardlib is loaded: what is registered later is run before
