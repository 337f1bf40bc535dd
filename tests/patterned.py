"""What tests of ops with patterns share: two tensors on a mesh, and an op against plain torch on one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import shardlib as sl

MESHES = (dict(dp=2, tp=2), dict(tp=4, dp=1))
X = torch.arange(192, dtype=torch.float64).sin().view(4, 6, 8)
W = torch.arange(40, dtype=torch.float64).cos().view(8, 5)


def run(body: Callable[[Tensor, Tensor], Any], out: Any = "...") -> Any:
    """`body(x, w)`: x is `b/dp s d/tp` of (4, 6, 8), w is `d e` of (8, 5)."""
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        args = sl.shard(X, "b/dp s d/tp"), sl.shard(W, "d e")
        return sl.gather(sl.shard_map(body, in_specs=None, out_specs=out)(*args))


def check(row: Any, mesh: dict[str, int]) -> None:
    """A row: the op, the same in plain torch, the arguments with their specs, the spec of the result."""
    f, plain, given, out = row
    args, specs = zip(*given, strict=True)
    sl.testing.check(f, plain, mesh=mesh, in_specs=specs, out_specs=out, args=args)
