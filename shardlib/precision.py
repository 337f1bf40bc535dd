"""Precision as a value: the dtype of what a train step keeps, computes with, sends and gives."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib import tree
from shardlib.errors import SpecError, located
from shardlib.loss_scale import Scaling, dynamic_scale, static_scale
from shardlib.parts import once
from shardlib.sharding import leaf_of, settle
from shardlib.types import inside, padding_allowed

DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "fp16": torch.float16,
    "f32": torch.float32,
    "fp32": torch.float32,
    "f64": torch.float64,
}


@dataclass(frozen=True)
class Precision:
    """What `precision` returns. None: every value stays in the dtype that it has."""

    compute: torch.dtype | None = None
    params: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    scale: Scaling | None = None
    keep: tree.Chooser | None = None

    def cast(self, params: Any, dtype: torch.dtype | None) -> Any:
        """Parameters, leaves of a per-device function, in `dtype`; those of `keep` and what is no float stay."""

        def one(x: Tensor, new: torch.dtype) -> Tensor:
            return x if x.dtype == new else settle(x.to(new), leaf_of(x, "precision"))

        flat, treedef = tree.flatten(params)
        with padding_allowed():
            return tree.unflatten(treedef, map(once(one), flat, self.dtypes(params, dtype)))

    def dtypes(self, params: Any, dtype: torch.dtype | None) -> list[torch.dtype]:
        """What `cast` gives, leaf by leaf; also of parameters at rest."""
        flat = tree.leaves(params)
        specs = [leaf_of(x, "precision").spec if inside() else getattr(x, "spec", None) for x in flat]
        with located("precision: keep"):
            kept = [False] * len(flat) if self.keep is None else tree.choose(self.keep, tree.paths(params), specs)
        pairs = zip(flat, kept, strict=True)
        return [dtype if dtype and x.is_floating_point() and not stays else x.dtype for x, stays in pairs]

    def given(self, values: Any) -> Any:
        """What a loss gives (totals, weights, metrics), before sums over ranks and micro-batches are made of it."""
        return tree.map_(lambda x: x.to(self.output) if self.output and x.is_floating_point() else x, values)


AS_IS = Precision()


def precision(
    compute: str | torch.dtype = "bf16",
    params: str | torch.dtype = "f32",
    reduce: str | torch.dtype = "f32",
    output: str | torch.dtype = "f32",
    *,
    scale: Scaling | float | None = None,
    keep: tree.Chooser | None = None,
) -> Precision:
    """The dtypes of a train step: `step(..., precision=sl.precision(compute="bf16"))`; `evaluate` takes one too.

    `compute`: of parameters as the loss gets them, cast before they are gathered. `params`: of parameters at rest, to
    which `step.init` casts those that are trained; the optimizer keeps float32 masters of 16-bit ones. `reduce`: in
    which gradients are summed over ranks. `output`: of the loss's totals, weights and metrics, and of the sums over
    micro-batches and ranks that are made of them. Gradients of micro-batches add up in float32 or wider whatever is
    said. Names are "bf16", "f16", "f32" and "f64"; torch's dtypes are taken too.

    `scale`: what the loss is multiplied by while gradients are computed: a number, or `dynamic_scale(...)`, which is
    the default where `compute` is float16. `keep` (globs, or `(path, spec) -> bool`): parameters that stay as they are
    at rest and in the loss, such as a router. Integers, booleans, batch, keys and `extra` are never cast: a loss casts
    what it wants like a parameter (`x.to(w.dtype)`). As jmp's `Policy`, which casts what a loss gets and not only
    parameters. Raises `SpecError` for what is no floating-point dtype.
    """
    named = dict(compute=compute, params=params, reduce=reduce, output=output)
    dtypes = {what: _dtype(what, said) for what, said in named.items()}
    if scale is None and dtypes["compute"] == torch.float16:
        scale = dynamic_scale()
    return Precision(**dtypes, scale=scale if isinstance(scale, Scaling | None) else static_scale(scale), keep=keep)


def checked(value: Precision | None, what: str) -> Precision:
    """The precision that `what` was given; None: values stay as they are."""
    if not isinstance(value, Precision | None):
        raise SpecError(f"{what}: precision= is what sl.precision(compute='bf16') and its like return, not {value!r}")
    return value or AS_IS


def _dtype(what: str, said: Any) -> torch.dtype:
    found = DTYPES.get(said) if isinstance(said, str) else said
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        known = ", ".join(map(repr, DTYPES))
        raise SpecError(f"precision: {what}= is one of {known} or a floating-point dtype of torch, not {said!r}")
    return found
