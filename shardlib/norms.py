"""Norms and sums over sharded trees: every element of every leaf counts once, wherever its copies lie."""

import math
from collections.abc import Callable
from functools import reduce
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from shardlib import collectives as c
from shardlib import tree
from shardlib.errors import SpecError
from shardlib.parts import places
from shardlib.sharding import leaf_of, settle
from shardlib.types import padding_allowed, region


def global_norm(values: Any, ord: float = 2) -> Tensor:
    """The `ord`-norm (1, 2, p or inf) of all elements of a tree of leaves in a per-device function: invariant, 0-d.

    Leaves are summed in tree order on each rank, then over ranks, one sum per distinct set of axes. 16-bit leaves count
    in float32. Empty trees have norm 0. A leaf that is still pending is an error; one at several places counts once.
    """

    def local(x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if ord == math.inf:
            return x.abs().amax() if x.numel() else x.new_zeros(())
        return x.abs().sum() if ord == 1 else (x * x).sum() if ord == 2 else (x.abs() ** ord).sum()

    if ord == math.inf:
        return _over_ranks("global_norm", values, local, torch.maximum, _largest)
    total = _over_ranks("global_norm", values, local, torch.add, c._psum)
    return total if ord == 1 else total.sqrt() if ord == 2 else total ** (1 / ord)


def global_sum(values: Any) -> Tensor:
    """The sum of all elements of a tree of leaves in a per-device function: invariant, 0-d.

    As `global_norm` counts them: an element once, wherever its copies lie. 16-bit leaves count in float32, integers and
    booleans in int64. The sum of an empty tree is 0.
    """

    def local(x: Tensor) -> Tensor:
        return x.sum(dtype=torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else None)

    return _over_ranks("global_sum", values, local, torch.add, c._psum)


def not_finite(values: Any) -> Tensor:
    """For each leaf of a tree in a per-device function, how many ranks of all axes hold an infinity or a NaN of it:
    int64, invariant."""
    flat, mesh = tree.leaves(values), region().mesh
    if not flat:
        return torch.zeros(0, dtype=torch.int64, device=mesh.device)
    with padding_allowed():
        bad = torch.stack([(~torch.isfinite(x).all()).to(torch.int64) for x in flat])
        return c._psum(c._pending(bad, mesh.axis_names), mesh.axis_names)


def _over_ranks(
    what: str,
    values: Any,
    local: Callable[[Tensor], Tensor],
    both: Callable[[Tensor, Tensor], Tensor],
    among: Callable[[Tensor, tuple[str, ...]], Tensor],
) -> Tensor:
    """One number from every leaf, combined by `both` on a rank and by `among` over the axes that split the leaf."""
    here, flat, where = region(), tree.leaves(values), tree.paths(values)
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    with padding_allowed():
        for i in dict.fromkeys(places(flat)):
            spec = leaf_of(flat[i], f"{what}: `{where[i]}`").spec
            if spec.pending:
                raise SpecError(
                    f"{what}: `{where[i]}` (`{spec}`) still waits for a sum over `{spec.pending[0]}`: reshard it first"
                )
            by_axes.setdefault(here.mesh.ordered(spec.split), []).append(local(flat[i]))
        ones = {axes: reduce(both, found) for axes, found in by_axes.items()}
        totals = [among(one, axes) if axes else one for axes, one in ones.items()]
    return reduce(both, totals) if totals else here.set_type(torch.zeros((), device=here.mesh.device), here.invariant)


def _largest(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """`pmax` that keeps a NaN: gloo's maximum may lose one."""
    nan = x.isnan()
    most, bad = c.pmax(torch.stack([torch.where(nan, torch.zeros_like(x), x), nan.to(x.dtype)]), axes).unbind()
    return torch.where(bad > 0, torch.full_like(most, math.nan), most)


def clips(norm: Any) -> bool:
    """Whether gradients can be clipped to this norm, None being no clipping."""
    return norm is None or (isinstance(norm, Real) and float(norm) > 0)


def scaled_to(values: Any, norm: Tensor, largest: float) -> Any:
    """`values` scaled so that their norm, `norm`, is at most `largest`; unchanged where it is already (as optax)."""
    factor = torch.where(norm < largest, torch.ones_like(norm), largest / norm)

    def one(x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)  # the factor of a 16-bit leaf is not rounded
        return settle((x.to(wide) * factor.to(wide)).to(x.dtype), leaf_of(x, "clip"))

    return tree.map_(one, values)
