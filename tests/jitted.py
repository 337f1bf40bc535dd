"""Arrays, a doubling function and a train step for the tests of jit."""

from typing import Any

import torch
from torch import Tensor

import shardlib as sl
from shardlib import tree

F64 = torch.float64


def mesh(**axes: Any) -> sl.Mesh:
    return sl.make_mesh(axes, simulate=True)


def doubled(x: Any) -> Any:
    return sl.shard_map(lambda y: tree.map_(lambda z: z * 2, y), in_specs=None, out_specs=specs_of(x))(x)


def specs_of(x: Any) -> Any:
    return tree.map_(lambda leaf: leaf.spec if isinstance(leaf, sl.Array) else "...", x)


def arange(*shape: int, spec: str = "...", dtype: torch.dtype = F64) -> Any:
    return sl.shard(torch.arange(torch.Size(shape).numel()).view(shape).to(dtype), spec)


def loss(p: Any, batch: Tensor) -> sl.Mean:
    w = sl.gather(p["w"], "dp")
    return sl.Mean.of("batch/dp n", torch.tanh(batch @ w) * p["b"])


def started(step: Any, rows: int = 16) -> Any:
    params = {"w": torch.arange(12.0, dtype=F64).view(4, 3) / 12, "b": torch.ones((), dtype=F64)}
    return step.init(sl.shard(params, {"w": "m/dp n", "b": ""})), sl.shard(
        torch.arange(rows * 4, dtype=F64).view(rows, 4) / 50, "batch/dp m"
    )
