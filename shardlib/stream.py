"""A file as it is written: it goes to the disk as it grows, each part of it is summed, and its errors name it."""

import os
import threading
import zlib
from collections.abc import Callable
from typing import Any

_STEP = 8 << 20  # bytes


class Stream:
    """`sums`: the checksum of each part, by where it starts: torch's writer asks at both ends of one where it is.

    `soon`: while more is written, a thread brings every `_STEP` bytes to the disk, so that little is left to wait for
    when the writer, for which it asks `fileno`, does so at the end. `error`: the first that was met, by either.
    """

    def __init__(self, file: Any, soon: bool = True) -> None:
        self.file, self.sums, self.start, self.crc = file, dict[int, int](), 0, 0
        self.error: OSError | None = None
        self.soon = soon
        self.new, self.due, self.ended = 0, threading.Event(), False
        self.thread: threading.Thread | None = None

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        written = self._named(lambda: self.file.write(data))
        self.new += written
        if self.soon and self.new > _STEP:
            self.new = 0
            if not self.thread:
                self.thread = threading.Thread(target=self._sync, name="shardlib-sync")
                self.thread.start()
            self.due.set()
        return written

    def tell(self) -> int:
        at = self.file.tell()
        if at > self.start:
            self.sums[self.start], self.start, self.crc = self.crc, at, 0
        return at

    def flush(self) -> None:
        self._named(self.file.flush)

    def fileno(self) -> int:
        self.flush()
        self.end()
        if self.error:  # the disk tells it once
            raise self.error
        return self.file.fileno()

    def close(self) -> None:
        self.end()
        self._named(self.file.close)

    def end(self) -> None:
        """End the thread, if there is one."""
        if self.thread:
            self.ended = True
            self.due.set()
            self.thread.join()

    def _sync(self) -> None:
        while not self.error:
            self.due.wait()
            self.due.clear()
            if self.ended:
                return
            try:
                self._named(lambda: os.fsync(self.file.fileno()))
            except OSError:
                return  # `error` has it

    def _named(self, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except OSError as e:
            self.error = self.error or type(e)(e.errno, e.strerror, self.file.name)
            raise self.error from None
