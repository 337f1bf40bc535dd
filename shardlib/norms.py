"""Norms and sums over sharded trees: every element of every leaf counts once, wherever its copies lie."""

import math
from typing import Any

import torch
from torch import Tensor

from shardlib import collectives as c
from shardlib import tree
from shardlib.errors import SpecError
from shardlib.sharding import leaf_of, settle
from shardlib.types import padding_allowed, region


def global_norm(values: Any, ord: float = 2) -> Tensor:
    """The `ord`-norm (1, 2, p or inf) of all elements of a tree of leaves in a per-device function: invariant, 0-d.

    Leaves are summed in tree order on each rank, then over ranks, one sum per distinct set of axes. 16-bit leaves count
    in float32. Empty trees have norm 0. A leaf that is still pending is an error.
    """
    here = region()
    by_axes: dict[tuple[str, ...], Tensor] = {}
    with padding_allowed():
        for path, x in zip(tree.paths(values), tree.leaves(values), strict=True):
            spec = leaf_of(x, f"global_norm: `{path}`").spec
            if spec.pending:
                raise SpecError(
                    f"global_norm: `{path}` (`{spec}`) still waits for a sum over `{spec.pending[0]}`: reshard it first"
                )
            one = _local(x.to(torch.promote_types(x.dtype, torch.float32)), ord)
            axes = here.mesh.ordered(spec.split)
            held = by_axes.get(axes)
            by_axes[axes] = one if held is None else torch.maximum(held, one) if ord == math.inf else held + one
        total: Tensor | None = None
        for axes, one in by_axes.items():
            one = (_largest(one, axes) if ord == math.inf else c._psum(one, axes)) if axes else one
            total = one if total is None else torch.maximum(total, one) if ord == math.inf else total + one
    if total is None:
        return here.set_type(torch.zeros((), device=here.mesh.device), here.invariant)
    return total if ord in (1, math.inf) else total.sqrt() if ord == 2 else total ** (1 / ord)


def _largest(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """`pmax` that keeps a NaN: gloo's maximum may lose one."""
    nan = x.isnan()
    most, bad = c.pmax(torch.stack([torch.where(nan, torch.zeros_like(x), x), nan.to(x.dtype)]), axes).unbind()
    return torch.where(bad > 0, torch.full_like(most, math.nan), most)


def _local(x: Tensor, ord: float) -> Tensor:
    if ord == math.inf:
        return x.abs().amax() if x.numel() else x.new_zeros(())
    return x.abs().sum() if ord == 1 else (x * x).sum() if ord == 2 else (x.abs() ** ord).sum()


def scaled_to(values: Any, norm: Tensor, largest: float) -> Any:
    """`values` scaled so that their norm, `norm`, is at most `largest`; unchanged where it is already (as optax)."""
    factor = torch.where(norm < largest, torch.ones_like(norm), largest / norm)

    def one(x: Tensor) -> Tensor:
        return settle(x * factor.to(x.dtype), leaf_of(x, "clip"))

    return tree.map_(one, values)
