"""Memory in files without a name, which other processes may map."""

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.errors import RankError


class Memory:
    """The memory of a file, which stays when that is closed (Python's mmap would keep a descriptor open)."""

    def __init__(self, fd: int, size: int) -> None:
        self.storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, size)
        bytes_: Any = type("Bytes", (ctypes.c_char * size,), {})  # which hold the storage
        self.bytes: Any = bytes_.from_address(self.storage.data_ptr())
        self.bytes.storage = self.storage

    def viewed(self, count: int, dtype: torch.dtype, offset: int = 0) -> tuple[Tensor, memoryview]:
        """A tensor of so many elements, and that through which it holds the memory."""
        view = memoryview(self.bytes)
        return torch.frombuffer(view, dtype=dtype, count=max(1, count), offset=offset)[:count], view


class Piece:
    """What a member gives: bytes of a block of its own. Of one without memory the size alone is known."""

    def __init__(self, rank: int, memory: Memory | None, offset: int, size: int) -> None:
        self.rank, self.memory, self.offset, self.size = rank, memory, offset, size

    def checked(self, count: int, dtype: torch.dtype) -> Any:
        """The memory of so many elements. Raises RankError when it is something else."""
        if count * dtype.itemsize != self.size:
            raise RankError(f"rank {self.rank} gives {self.size} bytes, {count * dtype.itemsize} are wanted from it")
        return self.memory

    def tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """As a tensor of so many elements, where it lies. Raises RankError."""
        found: Any = torch.empty(0, dtype=dtype)
        return found.set_(self.checked(count, dtype).storage, self.offset // dtype.itemsize, (count,))

    def kept(self, count: int, dtype: torch.dtype, gone: Callable[[], None]) -> Tensor:
        """The same; `gone` is called when that tensor and all its views have gone. Raises RankError."""
        x, view = self.checked(count, dtype).viewed(count, dtype, self.offset)
        weakref.finalize(view, gone).atexit = False
        return x


class Block:
    """Memory of this process that the others may map."""

    def __init__(self, name: int, size: int) -> None:
        self.name, self.size, self.used = name, size, name
        self.fd = os.memfd_create("shardlib")  # until the others have been told of it
        try:
            os.ftruncate(self.fd, size)
            self.memory = Memory(self.fd, size)
        except BaseException:
            self.told()
            raise
        self.view: Callable[[], memoryview | None] = lambda: None  # through which a tensor holds the memory
        self.placed = False  # whether what lies there may be given as it is
        self.unread: set[int] = set()  # collectives whose members are still to read what lies there

    @property
    def address(self) -> int:
        return self.memory.storage.data_ptr()

    def tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        x, view = self.memory.viewed(count, dtype)
        self.view = weakref.ref(view)
        return x

    def told(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    @property
    def free(self) -> bool:
        return not self.unread and self.view() is None
