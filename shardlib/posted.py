"""Gathers and exchanges for gloo, by messages whose receivers are ready: what is sent fills both ways of a link.

gloo sends a message when the receiver has asked for it, and asks over the same connection, behind what that is sending.
Its own collectives send before they ask, so one way of the link waits until a whole message has gone the other way.
Here every rank asks for all that it will get before it sends anything, in pieces, so that none waits for long.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.wire import resolve, until

_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("posted_gather(Tensor x, int size, str group) -> Tensor")
_lib.define("posted_exchange(Tensor x, int[] takes, int[] gives, str group) -> Tensor")

_TAG = 1  # of these messages; a pipeline's have 0
_PIECE = 1 << 20  # bytes


def _posted(out: Sequence[Tensor], given: Sequence[Tensor], pg: dist.ProcessGroup, me: int) -> list[Any]:
    """Start to receive each of `out` from the rank at its place in the group, and to send each of `given` there."""
    peers = [(me + i) % len(out) for i in range(1, len(out))]
    works = [pg.recv([piece], i, _TAG) for i in reversed(peers) for piece in _pieces(out[i])]
    return works + [pg.send([piece], i, _TAG) for i in peers for piece in _pieces(given[i])]


def _pieces(x: Tensor) -> Sequence[Tensor]:
    return x.view(-1).split(max(1, _PIECE // x.element_size())) if x.numel() else ()


def _gather(x: Tensor, size: int, group: str) -> Tensor:
    pg, out = resolve(group), x.new_empty((size * x.shape[0], *x.shape[1:]))
    rows, me = out.view(size, *x.shape).unbind(), pg.rank()
    works = _posted(rows, [x] * size, pg, me)
    rows[me].copy_(x)
    return until(out, works)


def _exchange(x: Tensor, takes: list[int], gives: list[int], group: str) -> Tensor:
    pg, out = resolve(group), x.new_empty((sum(takes), *x.shape[1:]))
    rows, given, me = out.split(takes), x.split(gives), pg.rank()
    works = _posted(rows, given, pg, me)
    rows[me].copy_(given[me])
    return until(out, works)


_lib.impl("posted_gather", _gather, "CompositeExplicitAutograd")
_lib.impl("posted_exchange", _exchange, "CompositeExplicitAutograd")
_lib.impl("posted_gather", lambda x, size, group: x.new_empty((size * x.shape[0], *x.shape[1:])), "Meta")
_lib.impl("posted_exchange", lambda x, takes, gives, group: x.new_empty((sum(takes), *x.shape[1:])), "Meta")

# by the functional collective that does the same, of the same arguments
POSTED: dict[Any, Any] = {
    torch.ops._c10d_functional.all_gather_into_tensor.default: torch.ops.shardlib.posted_gather.default,
    torch.ops._c10d_functional.all_to_all_single.default: torch.ops.shardlib.posted_exchange.default,
}
