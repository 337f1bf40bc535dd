"""`Mean`: what a loss returns. Totals and weights stay apart until the end, so that every token counts once however
unevenly tokens fall on ranks and micro-batches; the one division is made on sums over everything."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardlib import collectives as c
from shardlib import tree
from shardlib.errors import SpecError
from shardlib.patterns import check_operand
from shardlib.spec import parse_list
from shardlib.tree import pytree, static
from shardlib.types import inside, region


@pytree
class Term:
    """`coefficient * total / weight`; both are 0-d, invariant or pending."""

    total: Tensor
    weight: Tensor
    coefficient: float = static()


class Mean:
    """A weighted mean that is still a total and a weight, or a sum of such means.

    `Mean(total, weight)` takes 0-d tensors (or numbers) that are invariant or pending; each stands for its sum over the
    axes it is pending over. Inside a per-device function means can be scaled by numbers and added: `nll + 0.01 * aux`,
    each with its own weight. At rest (what `evaluate` returns) adding merges batches: totals and weights add up.
    """

    terms: tuple[Term, ...]
    __slots__: ClassVar[tuple[str, ...]] = ("terms",)

    def __init__(self, total: Tensor, weight: Tensor | float) -> None:
        if isinstance(total, Tensor) and not isinstance(weight, Tensor):
            weight = torch.full((), float(weight), dtype=total.dtype, device=total.device)
        for what, x in (("total", total), ("weight", weight)):
            if not isinstance(x, Tensor) or x.dim():
                raise SpecError(f"Mean takes a 0-d {what}, found {tuple(x.shape) if isinstance(x, Tensor) else x!r}")
        self.terms = (_term(total, weight, 1.0),)  # type: ignore[arg-type]

    @classmethod
    def of(cls, spec: str, x: Tensor, weight: Tensor | None = None) -> "Mean":
        """The mean of all elements of `x`, of spec `spec`, each weighing `weight` (broadcast; default 1).

        Total and weight are pending over the axes that the spec names; over others `x` must not vary. 16-bit values
        are summed in float32.
        """
        varies = region().axes_of(region().type_of(x), "V") if isinstance(x, Tensor) else ()
        parsed = check_operand(parse_list(spec, 1)[0], x, spec, varies)
        axes, dtype = parsed.split, torch.promote_types(x.dtype, torch.float32)
        if weight is None:
            total, count = x.sum(dtype=dtype), torch.full((), float(x.numel()), dtype=dtype, device=x.device)
        else:
            weight = weight.expand(x.shape).to(dtype)
            total, count = (x * weight).sum(), weight.sum()
        return cls(summed_later(total, axes), summed_later(count, axes))

    @classmethod
    def _of_terms(cls, terms: tuple[Term, ...]) -> "Mean":
        made = object.__new__(cls)
        made.terms = terms
        return made

    @property
    def value(self) -> Tensor:
        """The mean itself, 0-d; inside a per-device function with all sums made. Zero where the weight is zero."""
        out: Tensor | None = None
        for t in self.terms:
            total, weight = (whole(t.total), whole(t.weight)) if inside() else (t.total, t.weight)
            one = t.coefficient * divide(total, weight)
            out = one if out is None else out + one
        assert out is not None
        return out

    def summed(self) -> "Mean":
        """The mean with the sums over ranks made: totals and weights are invariant."""
        return Mean._of_terms(tuple(_term(whole(t.total), whole(t.weight), t.coefficient) for t in self.terms))

    @classmethod
    def merged(cls, means: Sequence["Mean"]) -> "Mean":
        """One mean over the batches of several means of the same form: totals and weights add up term by term."""
        first = means[0]
        for other in means[1:]:
            if [t.coefficient for t in first.terms] != [t.coefficient for t in other.terms]:
                raise SpecError("means of several batches add up where they are of the same loss; these are of two")
            pairs = zip(first.terms, other.terms, strict=True)
            first = cls._of_terms(tuple(_term(a.total + b.total, a.weight + b.weight, a.coefficient) for a, b in pairs))
        return first

    def __mul__(self, scale: float) -> "Mean":
        if isinstance(scale, Tensor):
            raise SpecError("a Mean is scaled by a Python number; to scale by a tensor, scale what it is the mean of")
        return Mean._of_terms(tuple(_term(t.total, t.weight, t.coefficient * scale) for t in self.terms))

    __rmul__ = __mul__

    def __truediv__(self, by: float) -> "Mean":
        return self * (1 / by)

    def __neg__(self) -> "Mean":
        return self * -1

    def __sub__(self, other: Any) -> "Mean":
        return self + -other

    def __add__(self, other: Any) -> "Mean":
        if isinstance(other, (int, float)) and other == 0:
            return self  # so that sum() works
        if not isinstance(other, Mean):
            raise SpecError(f"a Mean adds to a Mean; give {other!r} a weight: Mean(total, weight)")
        if inside():
            return Mean._of_terms(self.terms + other.terms)
        return Mean.merged([self, other])

    __radd__ = __add__

    def __repr__(self) -> str:
        return f"Mean({', '.join(f'{t.coefficient} * {t.total} / {t.weight}' for t in self.terms)})"


tree.register(Mean, lambda mean: mean.terms, lambda terms: Mean._of_terms(tuple(terms)))


def _term(total: Tensor, weight: Tensor, coefficient: float) -> Term:
    return Term(total=total, weight=weight, coefficient=coefficient)  # type: ignore[call-arg]


def summed_later(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """`x` as a term of a sum over `axes`: a local count is as pending as a local total."""
    here = region()
    return here.retype(c._pending(x, axes), here.type_of(x), axes, "P") if axes else x


def whole(x: Tensor) -> Tensor:
    """`x` with the sums it is pending over made."""
    here = region()
    axes = here.axes_of(here.type_of(x), "P")
    return c._psum(x, axes) if axes else x


def divide(total: Tensor, weight: Tensor) -> Tensor:
    """`total / weight`, and zero where the weight is zero."""
    return total / torch.where(weight == 0, torch.ones_like(weight), weight)
