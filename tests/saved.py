"""Trees that tests of checkpoints save, and whether two hold the same bits."""

from typing import Any

import torch
from torch import Tensor

import shardlib as sl
from shardlib import tree as trees

DOUBLE = torch.float64


def simulated(**axes: int) -> sl.Mesh:
    return sl.make_mesh(axes, simulate=True)


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold equal bits (arrays: as whole tensors) in equal structures."""
    xs, ys = trees.leaves(a), trees.match(a, b)
    return all(equal(whole(x), whole(y)) for x, y in zip(xs, ys, strict=True))


def whole(x: Any) -> Any:
    return sl.gather(x) if isinstance(x, sl.Array) else x


def equal(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor):
        return type(x) is type(y) and x == y
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8) if x.numel() else x


def zeros_of(tree: Any) -> Any:
    return trees.map_(lambda x: sl.shard(torch.zeros(x.shape), x.spec) if isinstance(x, sl.Array) else x, tree)


# ---- stacked leaves are one leaf per layer


@sl.pytree
class Block:
    norm: Tensor = sl.spec("model", dtype=DOUBLE)
    w_in: Tensor = sl.spec("model/dp hidden/tp", dtype=DOUBLE)
    w_out: Tensor = sl.spec("hidden/tp model/dp", dtype=DOUBLE)


@sl.pytree
class Model:
    embed: Tensor = sl.spec("vocab model/dp", dtype=DOUBLE)
    nothing: Tensor = sl.spec("four none", dtype=DOUBLE)
    blocks: list[Block] = sl.stack("layers")


@sl.pytree
class Stacked:
    embed: Tensor = sl.spec("vocab model/dp", dtype=DOUBLE)
    nothing: Tensor = sl.spec("four none", dtype=DOUBLE)
    blocks: Block = sl.stack("layers/pp")
    name: str = sl.static()


SIZES: dict[str, Any] = dict(vocab=16, model=8, hidden=12, layers=3, four=4, none=0, name="stacked")
KEY = sl.random.key(0)
