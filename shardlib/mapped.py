"""Memory in files without a name, which other processes may map."""

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.errors import RankError


def mapped(fd: int, size: int) -> torch.UntypedStorage:
    """The memory of a file, which stays when that is closed (Python's mmap would keep a descriptor open)."""
    found: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, size)
    return found


class Piece:
    """What a member gives: bytes of a block of its own."""

    def __init__(self, rank: int, memory: torch.UntypedStorage, offset: int, size: int) -> None:
        self.rank, self.memory, self.offset, self.size = rank, memory, offset, size

    def tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """As a tensor of so many elements, where it lies. Raises RankError when it is something else."""
        if count * dtype.itemsize != self.size:
            raise RankError(f"rank {self.rank} gives {self.size} bytes, {count * dtype.itemsize} are wanted from it")
        return torch.empty(0, dtype=dtype).set_(self.memory, self.offset // dtype.itemsize, (count,))  # type: ignore[call-overload]


class Block:
    """Memory of this process that the others may map."""

    def __init__(self, name: int, size: int) -> None:
        self.name, self.size, self.used = name, size, name
        self.fd = os.memfd_create("shardlib")  # until the others have been told of it
        try:
            os.ftruncate(self.fd, size)
            storage = mapped(self.fd, size)
        except BaseException:
            self.told()
            raise
        bytes_: Any = type("Bytes", (ctypes.c_char * size,), {})  # which hold the storage
        self.memory: Any = bytes_.from_address(storage.data_ptr())
        self.memory.storage = storage
        self.view: Callable[[], memoryview | None] = lambda: None  # through which a tensor holds the memory
        self.unread: set[int] = set()  # collectives whose members are still to read what lies there

    def told(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    @property
    def free(self) -> bool:
        return not self.unread and self.view() is None
