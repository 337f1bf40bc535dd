"""Which processes of a group share memory: all of them, where all are on one host and can; they meet once."""

import mmap
import os
import secrets
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlib.mapped import Block
from shardlib.shared import Shared
from shardlib.wire import resolve

_MEET = 60.0  # seconds in which the members connect, at most; less where the group's timeout is short
_met: dict[str, tuple[Any, Shared | None]] = {}


def shared(group: str) -> Shared | None:
    """The memory that all members of a group share, if they run on one host; the first call is made by all of them.

    `SHARDLIB_SHARED_MEMORY=0` in the environment of any of them is a no.
    """
    pg, held = resolve(group), _met.get(group)
    if held is None or held[0] is not pg:
        if held and held[1]:
            held[1].close()
        held = _met[group] = pg, _meet(pg) if pg.size() > 1 else None
    return held[1]


def _leave() -> None:
    """In a child of this process, whose sockets would hide that this process is gone."""
    for _, held in _met.values():
        if held:
            held.close()
    _met.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave)


def _meet(pg: dist.ProcessGroup) -> Shared | None:
    """Connect to all members, where all of them are here and can."""
    ranks, me = dist.get_process_group_ranks(pg), pg.rank()
    timeout: timedelta = pg._get_backend(torch.device("cpu")).options._timeout  # what gloo keeps to
    deadline = time.monotonic() + min(_MEET, timeout.total_seconds() / 4)
    sockets: dict[int, socket.socket] = {}
    with ExitStack() as opened:
        name = f"\0shardlib-{secrets.token_hex(8)}"
        listener, here = _listener(name, len(ranks), opened)
        hosts: list[Any] = [None] * len(ranks)
        dist.all_gather_object(hosts, (here, name) if listener else None, group=pg)
        if not listener or any(h is None or h[0] != here for h in hosts):
            return None
        with suppress(OSError):
            for other in range(me):
                s = opened.enter_context(_socket(deadline))
                s.connect(hosts[other][1])
                if _user(s) != os.getuid():
                    raise PermissionError
                s.send(me.to_bytes(4, "big"))
                sockets[other] = s
            while len(sockets) < len(ranks) - 1:
                listener.settimeout(max(1e-3, deadline - time.monotonic()))
                s = listener.accept()[0]
                s.settimeout(max(1e-3, deadline - time.monotonic()))
                said = s.recv(4) if _user(s) == os.getuid() else b""
                other = int.from_bytes(said, "big")
                if len(said) < 4 or not me < other < len(ranks):
                    s.close()
                    continue
                sockets[other] = opened.enter_context(s)
        agreed: list[Any] = [None] * len(ranks)
        dist.all_gather_object(agreed, len(sockets) == len(ranks) - 1, group=pg)
        if not all(agreed):
            return None
        opened.pop_all()
    listener.close()
    return Shared(ranks, me, sockets, timeout)


def _socket(deadline: float) -> socket.socket:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.settimeout(max(1e-3, deadline - time.monotonic()))
    return s


def _listener(name: str, members: int, opened: ExitStack) -> tuple[socket.socket | None, Any]:
    """A socket to which the others can connect, and the host, where there is all that this needs."""
    if sys.platform != "linux" or os.environ.get("SHARDLIB_SHARED_MEMORY") == "0":
        return None, None
    try:
        Block(0, mmap.PAGESIZE).told()
        here = _host()
        s = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        s.bind(name)
        s.listen(members)
        return s, here
    except (OSError, RuntimeError, AttributeError):  # no memfd, no /proc
        return None, None


def _host() -> tuple[str, int, int, int]:
    """What processes have in common that can connect: a kernel since it started, a network of it, a user."""
    network, users = (os.stat(f"/proc/self/ns/{x}").st_ino for x in ("net", "user"))
    return Path("/proc/sys/kernel/random/boot_id").read_text(), network, users, os.getuid()


def _user(s: socket.socket) -> int:
    """Of the process at the other end."""
    return struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
