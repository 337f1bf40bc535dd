"""Derivatives of per-device functions: `grad`, `value_and_grad`.

At exit every gradient's type is checked to be the dual of its primal's: invariant for invariant, pending for
replicated, varying for varying, replicated for pending. A reduction that was missed is an error, never a wrong number.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level, maybe_get_level  # what depends on it

from shardlib import collectives as c
from shardlib import tree
from shardlib.errors import SpecError, defined
from shardlib.mean import Mean, divide, whole
from shardlib.parts import Part
from shardlib.phases import gradients, phase
from shardlib.types import Leaf, Region, padding_allowed, region
from shardlib.zero import Layout


@dataclass(frozen=True)
class Aux:
    """What a loss returns beside its `Mean`: `metrics` (Means, or pending or invariant scalars) and `extra`, state
    without gradients that replaces `state.extra`."""

    metrics: dict[str, Any] | None = None
    extra: Any = None


def parts_of_loss(out: Any) -> tuple[Mean, Aux]:
    """A loss's result as `(Mean, Aux)`; a scalar is a mean of weight one. Raises for anything that is not a loss."""
    value, aux = out if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Aux) else (out, Aux())
    if isinstance(value, Tensor) and value.dim() == 0:
        value = Mean(value, 1.0)
    if not isinstance(value, Mean):
        said = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise SpecError(
            f"a loss is one number, found {said}.\n  Return sl.Mean.of('batch/dp ...', x), or a 0-d tensor that is "
            "equal on all ranks or pending; with metrics: return loss, sl.Aux({'name': ...})"
        )
    here = region()
    value = Mean._of_terms(tuple(replace(t, total=_shared(here, t.total)) for t in value.terms))
    for term in value.terms:
        for what, x in (("total", term.total), ("weight", term.weight)):
            bad = here.axes_of(here.type_of(x), "V")
            if bad:
                raise SpecError(
                    f"the {what} of the loss is {here.describe(x)}: say how the ranks of `{bad[0]}` combine."
                    + _combining(what, bad[0])
                    + f"\n  where a plain torch op summed over a dimension split over `{bad[0]}`: write that op as "
                    f"sl.einsum or sl.reduce with `+{bad[0]}`, then psum it"
                )
    for name, x in (aux.metrics or {}).items():
        _check_metric(here, name, x)
    return value, aux


def _combining(name: str, axis: str) -> str:
    """How a number that differs by rank becomes one."""
    return (
        f"\n  the mean of all elements: sl.Mean.of('batch/{axis} ...', x), x before it is summed"
        f"\n  the sum of the ranks' numbers: sl.pending({name}, '{axis}')"
        f"\n  the mean of the ranks' numbers: sl.pmean({name}, '{axis}')"
    )


def _shared(here: Region, total: Tensor) -> Tensor:
    """A total that is replicated (a penalty on parameters) as a sum to which every rank gives its equal share."""
    axes = here.axes_of(here.type_of(total), "R")
    return c._pending(total / here.mesh.size(axes), axes) if axes else total


RESERVED = ("loss", "grad_norm", "tokens", "lr", "skipped", "scale")  # metrics of `step` itself


def _check_metric(here: Region, name: str, x: Any) -> None:
    """Raise where a metric does not say how the ranks combine."""
    if name in RESERVED:
        raise SpecError(f"metric `{name}`: step gives one of that name; give yours another")
    for term in x.terms if isinstance(x, Mean) else (x,):
        for y in (term.total, term.weight) if isinstance(x, Mean) else (term,):
            bad = here.axes_of(here.type_of(y), "V") if isinstance(y, Tensor) else ()
            if not isinstance(y, Tensor) or y.dim() or bad:
                said = here.describe(y) if isinstance(y, Tensor) else repr(y)
                raise SpecError(
                    f"metric `{name}` is {said}; a metric is a Mean, or a 0-d tensor that is equal on all ranks or "
                    f"pending.{_combining(name, bad[0]) if bad else ''}"
                )


def accepted(f: Callable[..., Any], given: int, **options: Any) -> dict[str, Any]:
    """Those of `options` that `f` has parameters for after `given` others. Raises where it needs one that is None."""
    try:
        names = dict(list(inspect.signature(f).parameters.items())[given:])
    except (TypeError, ValueError):
        return {}
    for k, v in options.items():
        if v is None and k in names and names[k].default is inspect.Parameter.empty:
            how = dict(key="evaluate(...)(params, batch, key=key)", extra="step.init(params, extra=...)").get(k)
            raise SpecError(f"{getattr(f, '__name__', 'the loss')} takes `{k}=`, which was not given: {how}")
    return {k: v for k, v in options.items() if k in names}


class GradFn:
    """`value_and_grad(f)`: `(params, batch, key=, extra=, seeds=, part=)`.

    With `seeds` (one invariant 0-d tensor per term of the loss, what that term's total is multiplied with) it gives
    `((Mean, Aux), gradients)`, the form that `step` takes; without, `(value, gradients)` as JAX does. `part`: which
    leaves of what is differentiated have gradients, each once; None stands for the others. `layout`: the specs of
    `compute` in which parameters are used, and of `grads` in which gradients add up, for one that moves them itself.
    """

    def __init__(self, f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> None:
        self.f, self.argnums = f, argnums

    def forward(self, *args: Any, key: Any = None, extra: Any = None, layout: Layout | None = None) -> tuple[Mean, Aux]:
        """The loss itself, in a scope of names of its own."""
        with region().names(tree.leaves(args)):
            return self._loss(args, key, extra)

    def laid_out(self, layout: Layout) -> Layout:
        """The layout (of concrete specs) that this uses parameters and gives gradients in."""
        return layout

    def taken(self, layout: Layout) -> Any:
        """The specs in which it takes parameters, of a layout that is laid out."""
        return layout.compute

    def _loss(self, args: Sequence[Any], key: Any, extra: Any) -> tuple[Mean, Aux]:
        out = self.f(*args, **accepted(self.f, len(args), key=key, extra=extra))
        with defined(self.f):
            return parts_of_loss(out)

    def __call__(
        self,
        *args: Any,
        key: Any = None,
        extra: Any = None,
        seeds: Sequence[Tensor] | None = None,
        part: Part | None = None,
        layout: Layout | None = None,
    ) -> Any:
        here = region()
        many = not isinstance(self.argnums, int)
        chosen = tuple(self.argnums) if isinstance(self.argnums, Sequence) else (self.argnums,)
        diff = tuple(args[i] if part is None else part.take(args[i]) for i in chosen)
        flat, treedef = tree.flatten(diff)
        names = [(i, p) for i, t in zip(chosen, diff, strict=True) for p in tree.paths(t)]
        for (i, path), x in zip(names, flat, strict=True):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                at = f"grad: argument {i}{f', leaf `{path}`,' if path else ''}"
                mend = "Convert it before the call, or differentiate by another argument (argnums=)"
                if part is not None:
                    at, mend = f"step: parameter `{path}`", "trainable= says which leaves are trained"
                said = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
                raise SpecError(f"{at} is {said}; only floating-point tensors have gradients. {mend}")
        kept: list[Any] = []

        def totals(*leaves: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            full = list(args)
            for i, own in zip(chosen, tree.unflatten(treedef, leaves), strict=True):
                full[i] = own if part is None else part.put(own, args[i])
            mean, aux = self._loss(full, key, extra)
            with defined(self.f):
                _check_weights(mean)
            beside, structure = tree.flatten((tuple(t.weight for t in mean.terms), aux_tree(aux)))
            kept[:] = [mean, structure]
            return tuple(t.total for t in mean.terms), tuple(beside)

        with here.names(tree.leaves(args)):  # remat runs the loss again in `pull`
            with phase("forward"):
                out, pull, beside = torch.func.vjp(totals, *flat, has_aux=True)  # type: ignore[misc]
            weights, aux = tree.unflatten(kept[1], beside)
            terms = tuple(replace(t, total=x, weight=w) for t, x, w in zip(kept[0].terms, out, weights, strict=True))
            mean, aux = Mean._of_terms(terms), aux_of(aux)
            if seeds is None:
                seeds_ = [t.coefficient * divide(torch.ones_like(t.total), whole(t.weight)) for t in terms]
            else:
                seeds_ = list(seeds)
            cotangents = tuple(
                c._pvary(s.to(t.dtype), here.axes_of(here.type_of(t), "P")) for s, t in zip(seeds_, out, strict=True)
            )
            with phase("backward"), _last_derivative():
                pulled = pull(cotangents)
            gradients(pulled, [path or f"argument {i}" for i, path in names])
            grads = [as_gradient(here, x, g, p) for x, g, (_, p) in zip(flat, pulled, names, strict=True)]
        result = tree.unflatten(treedef, grads)
        result = result if many else result[0]
        if seeds is not None:
            return (mean, aux), result
        return (mean.value if aux.metrics is None and aux.extra is None else (mean.value, aux)), result


def _last_derivative() -> Any:
    """Inside no other transform nobody can differentiate a backward pass: torch then takes its fused derivatives."""
    return torch.no_grad() if maybe_current_level() is None else nullcontext()


def _check_weights(mean: Mean) -> None:
    """Raise where a weight depends on what the innermost transform differentiates: that gradient would be left out."""
    for term in mean.terms:
        w = term.weight
        if is_functorch_wrapped_tensor(w) and maybe_get_level(w) == maybe_current_level() and w.requires_grad:
            raise SpecError(
                "the weight of the loss depends on what is differentiated, and a mean is differentiated by its total "
                "alone: detach the weight, or divide yourself and return a scalar"
            )


def aux_tree(aux: Aux) -> Any:
    """An `Aux` as a tree of tensors: means as their terms."""
    metrics = {k: v.terms if isinstance(v, Mean) else v for k, v in (aux.metrics or {}).items()}
    return (metrics if aux.metrics is not None else None, aux.extra)


def aux_of(found: Any) -> Aux:
    """The inverse of `aux_tree`."""
    metrics, extra = found
    if metrics is not None:
        metrics = {k: Mean._of_terms(v) if isinstance(v, tuple) else v for k, v in metrics.items()}
    return Aux(metrics, extra)


_DUALS = {"I": "I", "R": "P", "V": "V", "P": "R"}


def dual(kind: str) -> str:
    """The type of the gradient of a value of type `kind`."""
    return "".join(map(_DUALS.__getitem__, kind))


def as_gradient(here: Region, x: Tensor, g: Tensor, path: str) -> Tensor:
    """Check and set the type of the gradient of `x`."""
    kind, found = here.type_of(x), here.type_of(g)
    for axis, k, f in zip(here.mesh.shape, kind, found, strict=True):
        if (k == "I" and f != "I") or (k == "P" and f in "VP"):
            meant = "invariant" if k == "I" else "replicated"
            raise SpecError(
                f"the gradient of `{path}` over `{axis}` should be {meant}, its parts differ by rank: "
                "a reduction was lost (a custom backward, or an op that types do not see through).\n"
                f"  pvary the value over `{axis}` where it is used differently by rank"
            )
        if k == "R" and f == "I" and here.zeros.get(g) is None:
            raise SpecError(
                f"the gradient of `{path}` over `{axis}` should be pending, it is equal on all ranks: a sum was made "
                "in a custom backward, and would be made again.\n  Return the cotangent there as it is"
            )
    with c._plain(), padding_allowed():  # below `Insert`; `Flow` sees it, and in forward mode the tangent's view
        g = g.view_as(g)  # an object of its own: a sum gives one cotangent to both its operands
    here.set_type(g, dual(kind))
    leaf = here.leaves.get(x)
    if leaf is not None:
        spec = replace(leaf.spec, pending=here.axes_of(dual(kind), "P"))
        here.mark(g, Leaf(spec, leaf.shape), here.padded.get(x) is not None)
    return g


def value_and_grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> GradFn:
    """Value and gradient of a loss (a per-device function), with respect to the arguments `argnums`.

    `f` returns a `Mean` (total/weight is differentiated), an invariant or a pending scalar, or one with an `Aux`.
    The gradient of an invariant value is invariant (summed over the ranks that used it), of a replicated one pending.
    """
    return f if isinstance(f, GradFn) else GradFn(f, argnums)


def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """The gradient alone: `value_and_grad(f)(...)[1]`."""
    both = value_and_grad(f, argnums)
    return lambda *args, **options: both(*args, **options)[1]
