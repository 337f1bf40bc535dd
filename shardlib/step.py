"""The train step: a pure function `(state, batch) -> (state, metrics)` from a loss, an optimizer and a layout."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardlib import random, tree
from shardlib.accumulate import Plan, accumulated, entering, planned, reduced, same_leaves
from shardlib.autodiff import value_and_grad
from shardlib.errors import SpecError
from shardlib.loss_scale import judged, scale_metrics, scaled, unscaled
from shardlib.mean import Mean, divide, whole
from shardlib.norms import clips, global_norm, scaled_to
from shardlib.optim.base import Optimizer, apply_updates, learning_rate, selected
from shardlib.parts import once, part_of
from shardlib.phases import phase
from shardlib.precision import Precision, checked
from shardlib.shard_map import shard_map
from shardlib.state import check_key, gather, reshard, shard
from shardlib.tree import pytree
from shardlib.types import padding_allowed
from shardlib.zero import Layout, layout_of


@pytree
class State:
    """What a train step carries. `step`: updates so far; `key`: the root of the random keys; `extra`: the loss's."""

    step: Tensor
    params: Any
    opt: Any
    key: Tensor
    scale: Any
    extra: Any


def step(
    loss: Callable[..., Any],
    optimizer: Optimizer,
    *,
    layout: Layout | None = None,
    accumulate: int | None = None,
    microbatch: int | None = None,
    precision: Precision | None = None,
    clip: float | None = None,
    trainable: tree.Chooser | None = None,
) -> Any:
    """A train step: `(state, batch) -> (state, metrics)`, pure, with `.init(params, key=, extra=) -> State`.

    `loss(params, batch)`, a per-device function that returns a `Mean`, gets `key=` and `extra=` if it has such
    parameters; `key` is one for the whole step, on all ranks and in all micro-batches: `dropout` draws by global row.
    `layout`: where things are cut (`zero`; by default as the parameters' own specs say). `accumulate`: the number of
    micro-batches, or `microbatch`: their rows per rank. `precision`: dtypes, and the scale of the loss, with which a
    step whose gradients are not finite is skipped. `clip`: the largest global gradient norm.
    `trainable` (globs, or `(path, spec) -> bool`): the parameters that are trained; no others have a gradient or
    optimizer state. An array that stands at several places of `params` is one parameter, known by its first path.
    Metrics, 0-d tensors: `loss`, `grad_norm` (before clipping), `tokens` (the weight of the whole batch), `lr`; where
    the loss is scaled `skipped` (0 or 1) and `scale`.
    """
    grad_fn, precision = value_and_grad(loss), checked(precision, "step")
    plan_for = planned(grad_fn, layout, accumulate, microbatch, trainable, precision)
    if not (isinstance(optimizer, Optimizer) and isinstance(layout, Layout | None) and clips(clip)):
        found = f"{optimizer!r}, layout={layout!r}, clip={clip!r}"
        raise SpecError(f"step takes an sl.optim.Optimizer(init, update), a Layout and a clip above 0; found {found}")

    def device(plan: Plan, state: State, batch: Any) -> tuple[State, dict[str, Tensor]]:
        trained, key = plan.trained, random.fold_in(state.key, state.step)
        params = precision.cast(state.params, precision.compute)
        params = entering(reshard(params, grad_fn.taken(plan.layout)), plan.axes)
        pieces = plan.pieces(batch)
        weights = plan.weights(params, pieces, key, state.extra)  # of the whole batch, on all ranks
        seeds = [c * divide(torch.ones_like(w), w) for c, w in zip(plan.coefficients, weights, strict=True)]
        by = scaled(seeds, state.scale)
        totals, aux, grads = accumulated(grad_fn, plan, params, pieces, key, state.extra, by)
        grads = reduced(grads, trained.take(plan.layout.opt), precision.reduce)  # one collective per leaf
        finite, scale = judged(grads, state.scale, precision.scale)
        grads = unscaled(grads, state.scale)
        norm = global_norm(grads)
        with padding_allowed():
            grads = grads if clip is None else scaled_to(grads, norm, clip)
            old = reshard(trained.take(state.params), trained.take(plan.layout.opt))
            updates, opt = optimizer.update(grads, state.opt, old)
            with phase("early"):  # at once and leaf by leaf, rather than after all updates
                value = sum(s * whole(t) for s, t in zip(seeds, totals, strict=True))
                new = selected(finite, apply_updates(old, updates), old)
                new = reshard(new, trained.take(plan.layout.params))
                opt = selected(finite, same_leaves("the optimizer", opt, state.opt), state.opt)
        metrics = {"loss": value, "grad_norm": norm, "tokens": weights[0], "lr": learning_rate(opt)}
        metrics |= scale_metrics(finite, state.scale) | (aux.metrics or {})
        extra = state.extra if aux.extra is None else same_leaves("the loss", aux.extra, state.extra)
        rest = selected(finite, {"step": state.step + 1, "extra": extra}, {"step": state.step, "extra": state.extra})
        return replace(state, params=trained.put(new, state.params), opt=opt, scale=scale, **rest), metrics

    on_ranks = shard_map(device, in_specs=None, out_specs=None)

    def run(state: State, batch: Any) -> tuple[State, dict[str, Tensor]]:
        new, metrics = on_ranks(plan_for(state, batch), state, batch)
        return new, gather(metrics)

    with_opt = shard_map(optimizer.init, in_specs=None, out_specs=None)
    cast = shard_map(lambda params: precision.cast(params, precision.params), in_specs=None, out_specs=None)

    def init(params: Any, *, key: Tensor | None = None, extra: Any = None) -> State:
        if key is not None:
            check_key(key, "step.init")
        lay = (layout or layout_of(tree.specs(params))).resolve(params)
        zero = shard(torch.zeros((), dtype=torch.int64), "")
        root = shard(random.key(0) if key is None else key, "key")
        trained = part_of(params, trainable, "step: trainable")
        at_rest = trained.put(trained.take(cast(params)), params)
        opt = with_opt(reshard(trained.take(at_rest), trained.take(lay.opt)))
        own = tree.map_(once(owned), reshard(at_rest, lay.params), params)
        scale = precision.scale and shard(precision.scale.init(), "")
        return State(step=zero, params=own, opt=opt, key=root, scale=scale, extra=extra)

    run.init = init  # type: ignore[attr-defined]
    run.__name__ = getattr(loss, "__name__", "step")
    return run


def owned(new: Any, old: Any) -> Any:
    """The array `new`; where it is `old`, which belongs to the caller, a copy: the state may be donated."""
    return deepcopy(new) if new is old else new


def evaluate(
    loss: Callable[..., Any], *, layout: Layout | None = None, precision: Precision | None = None
) -> Callable[..., Any]:
    """`(params, batch, key=, extra=) -> (Mean, metrics)`: the loss forward only, its sums over all ranks made.

    Means of several batches add up: `sum(valid(params, b)[0] for b in batches).value`; so do metrics that are Means.
    `key` and `extra`: for a loss that takes them.
    """
    grad_fn, precision = value_and_grad(loss), checked(precision, "evaluate")

    def device(lay: Layout, params: Any, batch: Any, key: Any, extra: Any) -> tuple[Any, Any]:
        params = reshard(precision.cast(params, precision.compute), grad_fn.taken(lay))
        mean, aux = grad_fn.forward(params, batch, key=key, extra=extra, layout=lay)
        mean, found = precision.given((mean, aux.metrics or {}))
        metrics = {k: v.summed().terms if isinstance(v, Mean) else whole(v) for k, v in found.items()}
        return mean.summed().terms, metrics

    on_ranks = shard_map(device, in_specs=None, out_specs=None)

    def run(params: Any, batch: Any, *, key: Tensor | None = None, extra: Any = None) -> tuple[Any, dict[str, Any]]:
        lay = grad_fn.laid_out((layout or layout_of(tree.specs(params))).resolve(params))
        terms, metrics = on_ranks(lay, params, batch, key, extra)
        found = {k: Mean._of_terms(v) if isinstance(v, tuple) else v for k, v in gather(metrics).items()}
        return Mean._of_terms(gather(terms)), found

    run.__name__ = getattr(loss, "__name__", "evaluate")
    return run
