"""Adafactor."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardlib import layout, tree
from shardlib.optim.base import Optimizer, chosen, counter, in_full, leaves_of, masters, rounded, wide, zeros32
from shardlib.optim.layers import inner, mean, rms
from shardlib.optim.options import check
from shardlib.optim.schedules import Schedule, as_schedule
from shardlib.sharding import leaf_of, settle
from shardlib.tree import pytree
from shardlib.types import Leaf, region


@pytree
class AdafactorState:
    """`count` of updates; the second moment, of factored leaves its means over the largest dimension (`row`) and over
    the second largest (`col`), of others whole (`nu`); the momentum; float32 masters of 16-bit leaves; the last rate.
    """

    count: Tensor
    row: Any
    col: Any
    nu: Any
    mu: Any
    master: Any
    lr: Tensor


def adafactor(
    lr: float | Schedule,
    *,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float = 0.0,
    weight_decay_rate: float = 0.0,
    eps: float = 1e-30,
    mask: tree.Chooser | None = None,
) -> Optimizer:
    """Adafactor (Shazeer and Stern 2018), as optax: of a matrix's second moments it keeps row and column means.

    Of `g^2 + eps` an average is kept with decay `1 - t^-decay_rate` at update t = 1, 2, ...; factored over the two
    largest dimensions of the global leaf (of a layer, where it is stacked) if both have `min_dim_size_to_factor`. The
    update `u = g / sqrt(v)` is scaled down to an rms of `clipping_threshold` (None: never), times `lr`, times the rms
    of the leaf (at least 1e-3; `multiply_by_parameter_scale`); with `momentum` averaged, without bias correction; at
    last `weight_decay_rate p` is added, not times `lr`. `mask` chooses the leaves that decay.

    Others: torch.optim.Adafactor factors the last two dimensions, caps `lr` at `1 / sqrt(t)` and multiplies its decay
    by `lr`; transformers' factors the last two and its `relative_step` is the schedule `min(1e-2, 1 / sqrt(t))`. 16-bit
    leaves have a float32 master in the state.
    """
    rate = as_schedule(lr, "adafactor")
    check("adafactor", 0, 1, momentum=momentum or 0.0)
    check("adafactor", 0, weight_decay_rate=weight_decay_rate or 0.0, decay_rate=decay_rate, eps=eps)
    check("adafactor", 1, min_dim_size_to_factor=min_dim_size_to_factor)
    if clipping_threshold is not None:
        check("adafactor", above=0, clipping_threshold=clipping_threshold)

    def init(params: Any) -> AdafactorState:
        zero, cuts = counter(), _cuts(params, min_dim_size_to_factor)
        flat, treedef = tree.flatten(params)

        def kept(make: Any) -> Any:
            return tree.unflatten(treedef, map(make, flat, cuts))

        return AdafactorState(
            count=zero,
            row=kept(lambda p, cut: _zeros(p, *cut) if cut else None),
            col=kept(lambda p, cut: _zeros(p, *reversed(cut)) if cut else None),
            nu=kept(lambda p, cut: None if cut else zeros32(p)),
            mu=tree.map_(zeros32, params) if momentum else None,
            master=masters(params),
            lr=rate(zero),
        )

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
        step, count, own = rate(state.count), state.count + 1, in_full(params, state.master)
        decay = 1 - count.to(torch.float64) ** -decay_rate
        slots = {name: iter(tree.leaves(getattr(state, name))) for name in ("row", "col", "nu", "mu")}
        made: dict[str, list[Any]] = {name: [] for name in slots}

        def averaged(name: str, new: Tensor) -> Tensor:
            d = decay.to(new.dtype)
            made[name].append(d * next(slots[name]) + (1 - d) * new)
            return made[name][-1]

        def one(p: Tensor, g: Tensor, decays: bool, leaf: Leaf, cut: tuple[int, int] | None) -> Tensor:
            g = g.to(p.dtype)
            square = g * g  # eps is added where a moment is used: its average is eps, since the first decay is 0
            if cut:
                large, second = cut
                row = averaged("row", mean(square, leaf, [large]).squeeze(large)).unsqueeze(large)
                col = averaged("col", mean(square, leaf, [second]).squeeze(second)).unsqueeze(second)
                across = (mean(row, leaf, [second]) + eps).sqrt()
                u = g / (row + eps).sqrt() * across / (col + eps).sqrt()
            else:
                u = g / (averaged("nu", square) + eps).sqrt()
            if clipping_threshold is not None:
                u = u / (rms(u, leaf) / clipping_threshold).clamp(min=1.0)
            u = step.to(u.dtype) * u
            if multiply_by_parameter_scale:
                u = u * rms(p, leaf).clamp(min=1e-3)
            if momentum:
                made["mu"].append(momentum * next(slots["mu"]) + (1 - momentum) * u)
                u = made["mu"][-1]
            return -(u + weight_decay_rate * p if decays and weight_decay_rate else u)

        each = (tree.leaves(t) for t in (own, grads, chosen(mask, params)))
        updates = map(one, *each, leaves_of(params, "adafactor"), _cuts(params, min_dim_size_to_factor))
        updates = tree.unflatten(tree.flatten(params)[1], updates)
        updates, master = rounded(params, own, updates)
        new = {name: tree.unflatten(tree.flatten(getattr(state, name))[1], xs) for name, xs in made.items()}
        return updates, AdafactorState(count=count, **new, master=master, lr=step)

    return Optimizer(init, update)


def _cuts(params: Any, least: int) -> list[tuple[int, int] | None]:
    """For each leaf its largest dimension and the next, among equals the later first; None where it is not factored."""

    def one(leaf: Leaf) -> tuple[int, int] | None:
        dims = sorted(inner(leaf), key=lambda i: leaf.shape[i])
        return (dims[-1], dims[-2]) if len(dims) > 1 and leaf.shape[dims[-2]] >= least else None

    return list(map(one, leaves_of(params, "adafactor")))


def _zeros(p: Tensor, dim: int, _: int) -> Tensor:
    """Zeros like `p` without a dimension, cut as `p` is along the others."""
    whole = leaf_of(p, "adafactor")
    spec = replace(whole.spec, dims=_but(whole.spec.dims, dim), matrix=((), ()), text="")
    leaf, here = Leaf(spec, _but(whole.shape, dim)), region()
    shape = layout.padded_shape(spec, leaf.shape, here.mesh.shape)
    zeros = torch.zeros(shape, dtype=wide(p.dtype), device=p.device)
    return settle(here.set_type(zeros, here.make(V=spec.split)), leaf)


def _but(items: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return items[:at] + items[at + 1 :]
