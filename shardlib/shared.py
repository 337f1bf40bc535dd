"""Memory that the processes of a group share where they run on one host: what one puts there, the others read.

Every collective of a group has a number, the same on all its members. A member puts what it gives into a block of its
own and tells the others where that lies, over a socket to each. They read it there and say so; then the block is free
for something else. A socket also tells at once when its other end is gone.
"""

import errno
import math
import mmap
import os
import select
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.errors import RankError
from shardlib.mapped import Block, Memory, Piece
from shardlib.wire import named, until

_MESSAGE = struct.Struct("=cqqqq")  # what it says, a collective's number, a block, offset and bytes in it
_GIVEN, _LAST, _WRITTEN, _READ, _DROPPED = b"g", b"l", b"w", b"r", b"d"  # pieces, the last of them; into another's

Take = Callable[[int, Sequence[Piece]], Any]


class _Work(dist.Work):
    """What `wait` waits for: that `end` has been called. Until then it is among `all`, since torch holds no more of it
    than the part in C++."""

    def __init__(self, end: Callable[[], Any], operands: tuple[Tensor, ...], all: set[Any]) -> None:
        super().__init__()
        self.end, self.operands, self.all = end, operands, all
        all.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.all.discard(self)
        end = self.end
        del self.end, self.operands  # they live no longer than what is made of them
        end()
        return True


class Collective:
    """What is known here of one, once it has begun here, or elsewhere."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.coming: defaultdict[int, list[Piece]] = defaultdict(list)  # by the member that gives them
        self.came: dict[int, list[Piece]] = {}  # of members that have given all
        self.begun = False  # here
        self.blocks: set[Block] = set()  # of what is given here
        self.unread: set[int] = set()  # members that are still to read it
        self.source: int | None = None  # the member without which the others cannot give
        self.take: Take | None = None
        self.taken: set[int] = set()
        self.failed: Exception | None = None  # of taking


class Shared:
    """A member's part in the memory of a group. `ranks` of the members, `me` among them; `sockets` to the others."""

    def __init__(self, ranks: Sequence[int], me: int, sockets: Mapping[int, socket.socket], timeout: timedelta) -> None:
        self.ranks, self.sockets, self.timeout = ranks, sockets, timeout.total_seconds()
        self.size, self.me, self.others = len(ranks), me, [m for m in range(len(ranks)) if m != me]
        self.poll, self.members = select.poll(), {s.fileno(): m for m, s in sockets.items()}
        for s in sockets.values():
            s.setblocking(False)
            self.poll.register(s, select.POLLIN)
        self.numbers = self.asked = self.peak = 0
        self.blocks: defaultdict[int, list[Block]] = defaultdict(list)  # by size
        self.at: dict[int, Block] = {}  # by address
        self.maps: dict[tuple[int, int], Memory] = {}  # of the others, by member and name
        self.released: list[tuple[int, int]] = []  # what has been read to the end: the member that gave it, the number
        self.open: dict[int, Collective] = {}  # by number
        self.works: set[_Work] = set()  # not waited for yet
        self.sums: dict[int, Collective] = {}  # scatters that are to be summed, by the address of what waits for them
        self.gone: set[int] = set()

    # ---- what collectives use

    def empty(self, shape: Sequence[int], dtype: torch.dtype, placed: bool = False) -> Tensor:
        """A tensor that the others can read. Its block is free for another once it is gone, and read. `placed`: that
        all members make in the course of a program, to give it where it is."""
        count = math.prod(shape)
        size = max(1, count * dtype.itemsize)
        unit = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 3))  # so that what is about as large uses it again
        block = self._block(-(-size // unit) * unit)
        self.at[block.address], block.placed = block, placed
        return block.tensor(count, dtype).view(shape)

    def number(self) -> int:
        """The next collective's; all members ask for theirs in the same order."""
        self.numbers += 1
        return self.numbers

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor is to be given where it is: the same on all members."""
        block = self.at.get(x.untyped_storage().data_ptr())
        return block is not None and block.placed and x.is_contiguous()

    def begin(self, number: int, gives: Mapping[int, Sequence[Tensor]], take: Take | None = None) -> Collective:
        """Give each of the other members some tensors, which `empty` made, or parts of those.

        `take` is called with each member and the pieces that it gives, which are there until that returns, or on if it
        returns True; without, they are there until `read`.
        """
        here = self._open(number)
        here.begun, here.take, here.unread = True, take, gives.keys() - self.gone
        for m, xs in gives.items():
            told = set[Block]()
            for i, x in enumerate(xs):
                block = self.at[x.untyped_storage().data_ptr()]
                block.unread |= {number} if here.unread else set()
                what, fd = _LAST if i == len(xs) - 1 else _GIVEN, -1 if block in told else block.fd
                self._send(m, what, number, block.name, int(x.storage_offset()) * x.itemsize, x.nbytes, fd=fd)
                told.add(block)
            here.blocks |= told
        for block in here.blocks:
            block.told()
        self._go_on(here)
        return here

    def wait(self, here: Collective) -> Mapping[int, Sequence[Piece]]:
        """Wait until all others have given their pieces."""
        deadline = time.monotonic() + self.timeout
        while missing := self.sockets.keys() - here.came.keys():
            missing = missing & {here.source} or missing
            if missing & self.gone:
                lost = named(self.ranks[m] for m in missing & self.gone)
                raise dist.DistNetworkError(f"{lost} of this host closed the connection")
            left = deadline - time.monotonic()
            if left <= 0:
                late = named(self.ranks[m] for m in missing)
                raise dist.DistNetworkError(f"timed out after {self.timeout:g} s waiting for {late} of this host")
            self._hear(left)
        if here.failed:
            raise here.failed
        return here.came

    def kept(self, number: int, member: int, piece: Piece, like: Tensor) -> Tensor:
        """A piece as a tensor like another, which is there as long as that is used. Raises RankError."""
        gone = partial(self.released.append, (member, number))
        return piece.kept(like.numel(), like.dtype, gone).view(like.shape)

    def written(self, number: int, size: int) -> None:
        """Say that this member's part of what another gives, of some bytes in all, is there."""
        for m in self.others:
            self._send(m, _WRITTEN, number, 0, 0, size)

    def read(self, here: Collective) -> None:
        """Say that what was given has been read."""
        for m in here.came:
            self._send(m, _READ, here.number)

    def close(self) -> None:
        for s in self.sockets.values():
            s.close()

    def until(self, x: Tensor, end: Callable[[], Any], *operands: Tensor) -> Tensor:
        """`x`, for which `wait` calls `end`; the operands live until then, as with messages."""
        return until(x, [_Work(end, operands, self.works)])

    # ---- blocks

    def _block(self, size: int) -> Block:
        """A free one of that size, or a new one. Then those that were used last remain, up to twice what was ever in
        use at once."""
        self._hear(0)
        self.asked += 1
        found = next((b for b in self.blocks[size] if b.free), None)
        if found is None:
            free = sorted((b for b in self.at.values() if b.free), key=lambda b: b.used)
            idle = sum(b.size for b in free)
            self.peak = max(self.peak, size + sum(b.size for b in self.at.values()) - idle)
            for old in free:
                if idle > 2 * self.peak:
                    self._drop(old)
                    idle -= old.size
            found = Block(self.asked, size)
            self.blocks[size].append(found)
        found.used = self.asked
        return found

    def _drop(self, block: Block) -> None:
        self.blocks[block.size].remove(block)
        del self.at[block.address]
        for m in self.sockets if block.fd < 0 else ():
            self._send(m, _DROPPED, block=block.name)
        block.told()

    # ---- what is said

    def _hear(self, seconds: float) -> None:
        """Take in what has come, or else what comes first in that time; first say what is not read any more."""
        while self.released:
            member, number = self.released.pop()
            self._send(member, _READ, number)
        for fd, _ in self.poll.poll(1e3 * min(seconds, 1e6)):
            while said := self._received(self.members[fd]):
                self._take(self.members[fd], *said)

    def _received(self, member: int) -> tuple[bytes, list[int]] | None:
        """The next message of a member, and a block's memory with the first that names it."""
        if member in self.gone:
            return None
        while True:
            try:
                said, fds, _, _ = socket.recv_fds(self.sockets[member], _MESSAGE.size, 1)
            except BlockingIOError:
                return None
            except ConnectionError:
                continue  # said once; what had come before is still there
            if said:
                return said, fds
            self.gone.add(member)
            self.poll.unregister(self.sockets[member])
            for here in list(self.open.values()):
                self._was_read(here, member)
            return None

    def _take(self, member: int, said: bytes, fds: list[int]) -> None:
        what, number, name, offset, size = _MESSAGE.unpack(said)
        for fd in fds:
            try:
                self.maps[member, name] = Memory(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)
        if what in (_GIVEN, _LAST):
            here = self._open(number)
            if (member, name) not in self.maps:
                rank = self.ranks[member]
                raise RankError(f"no memory came with what rank {rank} gives: too many open files here (ulimit -n)")
            here.coming[member].append(Piece(self.ranks[member], self.maps[member, name], offset, size))
            if what == _LAST:
                here.came[member] = here.coming.pop(member)
                self._go_on(here)
        elif what == _WRITTEN:
            here = self._open(number)
            here.came[member] = [Piece(self.ranks[member], None, 0, size)]
            self._go_on(here)
        elif what == _READ:
            self._was_read(self._open(number), member)
        else:
            self.maps.pop((member, name), None)

    def _open(self, number: int) -> Collective:
        return self.open.setdefault(number, Collective(number))

    def _was_read(self, here: Collective, member: int) -> None:
        here.unread.discard(member)
        self._go_on(here)

    def _go_on(self, here: Collective) -> None:
        """Take what has come, if the collective has begun here; forget it when nothing more will be heard of it."""
        if not here.begun:
            return
        for block in here.blocks if not here.unread else ():
            block.unread.discard(here.number)
        while here.take and (new := here.came.keys() - here.taken):
            m = new.pop()
            here.taken.add(m)  # first, since sending may take in more
            reads_on = None
            try:
                reads_on = here.take(m, here.came[m])
            except Exception as e:  # of this collective: whoever waits for it is to know
                here.failed = e
            if not reads_on:
                self._send(m, _READ, here.number)
        if len(here.came) == len(self.sockets):
            here.take = None  # and what that holds
            if not here.unread:
                self.open.pop(here.number, None)

    def _send(self, member: int, what: bytes, number: int = 0, block: int = 0, *place: int, fd: int = -1) -> None:
        said, to = _MESSAGE.pack(what, number, block, *(place or (0, 0))), self.sockets[member]
        deadline = time.monotonic() + self.timeout
        while member not in self.gone:
            try:
                if fd >= 0:
                    socket.send_fds(to, [said], [fd], socket.MSG_NOSIGNAL)
                else:
                    to.send(said, socket.MSG_NOSIGNAL)
                return
            except ConnectionError:
                return  # whoever waits for it will find out
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.ETOOMANYREFS):
                    raise
                self._until_there_is_room(to, e.errno)
                if time.monotonic() > deadline:
                    late = named([self.ranks[member]])
                    raise dist.DistNetworkError(f"timed out after {self.timeout:g} s telling {late}") from None

    def _until_there_is_room(self, to: socket.socket, why: int) -> None:
        """A member has not taken in what it was told, perhaps since it waits to tell us: hear it."""
        if why == errno.ETOOMANYREFS:  # files on their way
            time.sleep(1e-3)
        else:
            full = select.poll()
            for m, s in self.sockets.items():
                if m not in self.gone:
                    full.register(s, select.POLLIN | (select.POLLOUT if s is to else 0))
            full.poll(1e3)
        self._hear(0)
