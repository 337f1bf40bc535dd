"""`custom_vjp`: a function with a gradient of one's own, typed as everything else is."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, is_gradtrackingtensor  # what has a gradient

from shardlib import collectives as c
from shardlib import tree
from shardlib.errors import SpecError
from shardlib.insert import reentered
from shardlib.remat import _floats, _pull, _Remat, distinct
from shardlib.types import WORDS, region, short

_plain = torch._C.DisableTorchFunction  # a Function below Insert, which fwd and bwd turn on again


def custom_vjp(
    f: Callable[..., Any], fwd: Callable[..., tuple[Any, Any]], bwd: Callable[[Any, Any], tuple[Any, ...]]
) -> Callable[..., Any]:
    """`f`, with the gradient that `bwd` gives. As `jax.custom_vjp`.

    `fwd(*args) -> (out, residuals)` runs in place of `f` where a gradient is wanted; `bwd(residuals, cotangent) ->
    (cotangent of each argument, ...)`. Arguments, results, residuals and cotangents are trees; what is no tensor passes
    through. The cotangent of a result that is no float is None; a cotangent of None, for an argument or within its
    tree, is zero. All three may use collectives, and may be differentiated again (`bwd` as it is written, residuals as
    `fwd` computes them).

    Types are those of transposes: over an axis over which an argument is invariant its cotangent is invariant; where it
    is replicated, pending (a varying one counts as this rank's term); varying for varying, replicated for pending.
    Likewise the cotangent that `bwd` gets is that of the result. Raises `SpecError` for another type, shape or
    structure, for a captured value that is being differentiated, and in forward mode.
    """

    def run(*args: Any) -> Any:
        flat = tree.leaves(args)
        xs = [x for x in flat if isinstance(x, Tensor)]
        if not any(map(_differentiated, xs)):
            return f(*args)
        call = _Call(getattr(f, "__name__", "custom_vjp"), fwd, bwd, args)
        with _plain():
            made: Any = _Custom.apply(call, *xs)
        return call.results(made)

    run.__name__ = getattr(f, "__name__", "custom_vjp")
    return run


def _differentiated(x: Tensor) -> bool:
    """Whether a transform differentiates `x`."""
    while is_functorch_wrapped_tensor(x):
        if is_gradtrackingtensor(x):
            return True
        x = get_unwrapped(x)
    return x.requires_grad


_TENSOR = object()  # where a tensor stands in a flat list


def _marked(flat: Sequence[Any]) -> list[Any]:
    """`flat` without its tensors, which it must not keep alive."""
    return [_TENSOR if isinstance(x, Tensor) else x for x in flat]


def _filled(marked: Sequence[Any], tensors: Iterable[Any]) -> list[Any]:
    """`marked` with values where tensors stood, in order."""
    fresh = iter(tensors)
    return [next(fresh) if x is _TENSOR else x for x in marked]


def _said(x: Any) -> str:
    return "a tensor" if isinstance(x, Tensor) else type(x).__name__


class _Call:
    """One call of a function with a gradient of its own, as functions of flat tensors. `count`: how many of the results
    of `forward` are results of `fwd`, the others being residuals; `given`: the arguments that `backward` gave a
    cotangent for, by position."""

    def __init__(self, name: str, fwd: Callable[..., Any], bwd: Callable[..., Any], args: tuple[Any, ...]) -> None:
        flat, self.treedef = tree.flatten(args)
        at = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        self.name, self.fwd, self.bwd, self.flat = name, fwd, bwd, _marked(flat)
        self.paths = [tree.paths(args)[i] for i in at]
        self.kinds = [region().type_of(flat[i]) for i in at]
        self.count, self.given = 0, list[int]()

    def arguments(self, xs: Iterable[Any]) -> tuple[Any, ...]:
        return tree.unflatten(self.treedef, _filled(self.flat, xs))

    def results(self, ys: Iterable[Any]) -> Any:
        return tree.unflatten(self.structure, _filled(self.out, ys))

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """What `fwd` gives: the tensors of its result, then those of its residuals."""
        with reentered("custom_vjp"):
            pair = self.fwd(*self.arguments(xs))
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise SpecError(f"{self.name}: fwd gives (out, residuals), found {_said(pair)}")
            (out, self.structure), (kept, self.residuals) = map(tree.flatten, pair)
            ys = [y for y in out if isinstance(y, Tensor)]
            self.out, self.kept, self.count = _marked(out), _marked(kept), len(ys)
            self.like, self.kinds_out = [(y.shape, y.dtype) for y in xs], [region().type_of(y) for y in ys]
            self.floats = _floats(ys)
            return distinct([*ys, *(r for r in kept if isinstance(r, Tensor))], xs)

    def backward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From the cotangents of the floats among the results and the residuals, those that `bwd` gives."""
        n = len(self.floats)
        with reentered("custom_vjp"):
            duals: list[Tensor | None] = [None] * self.count
            for i, g in zip(self.floats, tensors[:n], strict=True):
                duals[i] = self._received(g, self.kinds_out[i])
            residuals = tree.unflatten(self.residuals, _filled(self.kept, tensors[n:]))
            cotangent = tree.unflatten(self.structure, _filled([x if x is _TENSOR else None for x in self.out], duals))
            got = self.bwd(residuals, cotangent)
            slots = [object() for _ in self.kinds]
            args = self.arguments(slots)
            if not isinstance(got, tuple) or len(got) != len(args):
                said = len(got) if isinstance(got, tuple) else _said(got)
                raise SpecError(
                    f"{self.name}: bwd gives a tuple, one cotangent for each of {len(args)} arguments; found {said}"
                )
            flat = tree.match_or_none(args, got, f"{self.name}: what bwd gives")
            of = {id(x): g for x, g in zip(tree.leaves(args), flat, strict=True)}
            found = {
                i: of[id(x)]
                for i, x in enumerate(slots)
                if self.like[i][1].is_floating_point or self.like[i][1].is_complex
            }
            self.given = [i for i, g in found.items() if g is not None]
            return distinct([self._checked(i, found[i]) for i in self.given], tensors)

    def _received(self, g: Tensor, kind: str) -> Tensor:
        """The cotangent of a result of type `kind`, as its dual."""
        here = region()
        lost = [a for a in here.axes_of(kind, "I") if here.over(g, a) in "VP"]
        if lost:
            raise SpecError(
                f"{self.name}: the cotangent of its result, which is invariant over `{lost[0]}`, differs by rank: a "
                "reduction was lost in what followed.\n  pvary the result there, where ranks use it differently"
            )
        g = c._pending(g, tuple(a for a in here.axes_of(kind, "R") if here.over(g, a) != "P"))
        return c._pvary(g, tuple(a for a in here.axes_of(kind, "P") if here.over(g, a) == "I"))

    def _checked(self, i: int, g: Any) -> Tensor:
        """What `bwd` gives for the argument `i`, as the dual of its type."""
        here, (shape, dtype), kind = region(), self.like[i], self.kinds[i]
        where = f"{self.name}: the cotangent that bwd gives for argument `{self.paths[i]}`"
        if not isinstance(g, Tensor) or (g.shape, g.dtype) != (shape, dtype):
            said = short(g) if isinstance(g, Tensor) else _said(g)
            raise SpecError(
                f"{where} is {said}; the argument is {short(torch.empty(shape, dtype=dtype, device='meta'))}"
            )
        zero = here.zeros.get(g) is not None
        for axis, k in zip(here.mesh.shape, kind, strict=True):
            found = here.over(g, axis)
            if found not in _DUALS[k] and not (zero and found == "I"):
                raise SpecError(
                    f"{where} is {here.describe(g)}; over `{axis}` the argument is {WORDS[k]}, so it must be "
                    f"{WORDS[_DUALS[k][0]]}.\n  {_MEND[k].format(a=axis)}"
                )
        g = c._pending(g, tuple(a for a in here.axes_of(kind, "R") if here.over(g, a) == "V"))
        return c._pvary(g, tuple(a for a in here.axes_of(kind, "VP") if here.over(g, a) == "I"))


# what a cotangent may be, the dual first, and how to mend another
_DUALS = {"I": "I", "R": "PV", "V": "VRI", "P": "RI"}
_MEND = {
    "I": "psum it over `{a}` in bwd (or gather it with invariant=True)",
    "R": "Return this rank's term: the sum over `{a}` is made later, and would count an equal value once per rank",
    "V": "psum_scatter it, or psum it, over `{a}` in bwd",
    "P": "psum it over `{a}`, or all_gather it, in bwd",
}


class _Mapped:
    """A `_Call` mapped by vmap over a dimension of its arguments (`dims`; None: the argument is not mapped)."""

    def __init__(self, call: Any, dims: tuple[int | None, ...], randomness: str) -> None:
        self.call, self.dims = call, dims
        self.forward = torch.func.vmap(call.forward, in_dims=dims, randomness=randomness)
        self.many = torch.func.vmap(call.backward, randomness=randomness)

    @property
    def count(self) -> int:
        return self.call.count

    @property
    def given(self) -> list[int]:
        return self.call.given

    def backward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = zip(self.many(*tensors), self.call.given, strict=True)
        return tuple(g.sum(0) if self.dims[i] is None else g.movedim(0, self.dims[i]) for g, i in found)


def _or_zeros(g: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if g is None else g


class _Custom(torch.autograd.Function):
    """`call.forward`, whose backward is `call.backward`: remat of it, which runs typed and nests."""

    @staticmethod
    def forward(call: Any, *xs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return call.forward(*xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *xs = inputs
        ctx.arguments, ctx.like = len(xs), [(y.shape, y.dtype, y.device) for y in output]
        ctx.floats = _floats(output)
        ctx.set_materialize_grads(False)  # residuals have cotangents in derivatives of second order only
        ctx.mark_non_differentiable(*(y for i, y in enumerate(output) if i not in ctx.floats))
        ctx.save_for_backward(*xs, *output[ctx.call.count :])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        call, n = ctx.call, ctx.arguments
        xs, residuals = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        given = [_or_zeros(cotangents[i], *ctx.like[i]) for i in ctx.floats if i < call.count]
        with _plain():
            found: Any = _Remat.apply(call.backward, *given, *residuals)
            grads = dict(zip(call.given, found, strict=True))
            later = [i for i in ctx.floats if i >= call.count and cotangents[i] is not None]
            if later:
                at = tuple(i for i in _floats(xs) if ctx.needs_input_grad[i + 1])
                pull = partial(_pull, call.forward, later, at, len(later))
                more: Any = _Remat.apply(pull, *(cotangents[i] for i in later), *xs)
                for i, g in zip(at, more, strict=True):
                    grads[i] = grads[i] + g if i in grads else g
        return None, *(grads.get(i) for i in range(n))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise SpecError(f"{ctx.call.name}: custom_vjp has no forward mode (jvp, jacfwd, hessian): use jacrev twice")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: Any, *xs: Tensor) -> tuple[Any, Any]:
        with _plain():
            out: Any = _Custom.apply(_Mapped(call, in_dims[1:], info.randomness), *xs)
        return out, (0,) * len(out)
