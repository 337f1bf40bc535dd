"""Sums over a leaf's dimensions, over all ranks: of the global leaf, and for a stacked leaf of each of its layers."""

import math
from collections.abc import Sequence

from torch import Tensor

from shardlib import collectives as c
from shardlib.types import Leaf, region


def inner(leaf: Leaf) -> tuple[int, ...]:
    """The dimensions of one layer: all but those that `stack` added."""
    return tuple(range(leaf.spec.stacked, len(leaf.spec.dims)))


def mean(x: Tensor, leaf: Leaf, dims: Sequence[int]) -> Tensor:
    """The mean of a value cut as `leaf` is over some dimensions of the global value, which stay with length 1.

    Padding, which is zero, does not count; the mean of nothing is 0.
    """
    axes = region().mesh.ordered([a for i in dims for a in leaf.spec.dims[i].axes])
    found = x.sum(tuple(dims), keepdim=True) if dims else x
    return (c._psum(found, axes) if axes else found) / max(1, math.prod(leaf.shape[i] for i in dims))


def rms(x: Tensor, leaf: Leaf) -> Tensor:
    """The root mean square of each layer, in the dimensions of `x`."""
    return mean(x * x, leaf, inner(leaf)).sqrt()
