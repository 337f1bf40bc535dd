"""A chunk in a file: its bytes are checked as they are read, those of a tensor straight into their place.

A chunk is a zip file as `torch.save` writes it, in which a tensor lies as it does in memory.
"""

import io
import struct
import zlib
from collections.abc import Mapping
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor

from shardlib.errors import TreeError

MEND = "restore an older save, or copy the file again from where it is whole"
_BLOCK = 1 << 18  # bytes that are read at once: they are still in the cache when they are summed


class Chunk(io.RawIOBase):
    """`length` bytes of `file` from `start`, which hold something of the leaf `name`; as a file of their own. `sums`:
    the checksums of the chunks of the file, by where they start."""

    def __init__(self, name: str, file: Any, start: int, length: int, sums: Mapping[str, int]) -> None:
        self.name, self.file, self.start, self.length, self.at = name, file, start, length, 0
        self.crc = sums.get(str(start))

    def check(self) -> None:
        """Raise `TreeError` where it is not as it was written."""
        block = memoryview(bytearray(_BLOCK))
        self._compare(self._read(block[: self.length - i] for i in range(0, self.length, _BLOCK)))

    def value(self) -> memoryview:
        """All bytes. Raises as `check`."""
        data = memoryview(bytearray(self.length))
        self._compare(self._read([data]))
        return data

    def fill(self, x: Tensor) -> None:
        """Read the tensor into `x`: on the CPU, contiguous, of its shape and dtype. Raises as `check`."""
        data = x.view(-1).view(torch.uint8).numpy().data
        ends = memoryview(bytearray(max(0, self.length - len(data))))
        try:
            start = self._tensor() if len(data) else 0
            found = self._read([ends[:start], data, ends[start:]])
        except Exception:  # the zip file's directory is damaged
            self.check()
            raise
        self._compare(found)

    def _tensor(self) -> int:
        """Where the bytes of the tensor begin."""
        with ZipFile(self) as file:
            (record,) = [r for r in file.infolist() if r.filename.endswith("/data/0")]
        self.seek(record.header_offset + 26)  # how long the name in the header is, and what fills up after it
        return record.header_offset + 30 + sum(struct.unpack("<HH", self.read(4)))

    def _read(self, parts: Any) -> int:
        """Read from the beginning into these, one after the other; the checksum."""
        crc = 0
        self.seek(0)
        for part in parts:
            for i in range(0, len(part), _BLOCK):
                block = part[i : i + _BLOCK]
                crc = zlib.crc32(block[: self.readinto(block)], crc)
        return crc

    def _compare(self, crc: int) -> None:
        if crc != self.crc:
            where = f"the checksum of the {self.length} bytes from byte {self.start}"
            raise TreeError(
                f"`{self.name}`: {self.file.name} is damaged: {where} is not the one that was written; {MEND}"
            )

    # ---- as a file

    def readinto(self, buffer: Any) -> int:
        left = memoryview(buffer).cast("B")[: max(0, self.length - self.at)]
        whole = len(left)
        self.file.seek(self.start + self.at)
        while left and (got := self.file.readinto(left)):  # some file systems give less than they are asked for
            left = left[got:]
        self.at += whole - len(left)
        return whole - len(left)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
