"""`remat`: what a function computes is computed again for its derivative, but for what a policy keeps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_current_level  # what has a gradient

from shardlib import tree
from shardlib.fused import forward_modes, or_zeros, pushed, refuse_nested
from shardlib.insert import hiding, reentered
from shardlib.phases import noted, phase
from shardlib.policy import Policy, chosen, refuse_missing
from shardlib.replay import Record, Replay

_plain = torch._C.DisableTorchFunction  # a Function below Insert, which user code turns on again


class _Remat(torch.autograd.Function):
    """`f(*xs)`, a tuple of tensors: keeps its inputs only. The backward pass is such a function again: so it nests."""

    @staticmethod
    def forward(f: Callable[..., tuple[Tensor, ...]], *xs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return f(*xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.f, ctx.floats, ctx.count = inputs[0], _floats(output), len(output)
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.mark_non_differentiable(*(y for i, y in enumerate(output) if i not in ctx.floats))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *_pulled(ctx, ctx.f, cotangents, len(ctx.saved_tensors))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        xs = ctx.saved_tensors
        at = _floats(xs)

        def of_floats(*floats: Tensor) -> tuple[Tensor, ...]:
            out = ctx.f(*_put(xs, at, floats))
            return tuple(out[i] for i in ctx.floats)

        primals = tuple(xs[i] for i in at)
        along = or_zeros([tangents[i] for i in at], primals)
        return tuple(_put([None] * ctx.count, ctx.floats, pushed(of_floats, primals, along)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], f: Callable[..., Any], *xs: Tensor) -> tuple[Any, Any]:
        many = torch.func.vmap(f, in_dims=in_dims[1:], randomness=info.randomness)
        with _plain():
            out: Any = _Remat.apply(many, *xs)
        return out, (0,) * len(out)


def _floats(xs: Sequence[Tensor]) -> tuple[int, ...]:
    """The positions of what can have a gradient."""
    return tuple(i for i, x in enumerate(xs) if x.is_floating_point() or x.is_complex())


def _put(xs: Sequence[Any], at: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """`xs` with `values` at the positions `at`."""
    full = list(xs)
    for i, x in zip(at, values, strict=True):
        full[i] = x
    return full


def _pulled(
    ctx: Any, f: Callable[..., tuple[Tensor, ...]], cotangents: Sequence[Tensor], inputs: int
) -> Iterator[Tensor | None]:
    """The gradients of a Function's inputs, the first ones of what it saved for `f`; None for those that are frozen."""
    saved, given = ctx.saved_tensors, [cotangents[i] for i in ctx.floats]
    at = tuple(i for i in _floats(saved[:inputs]) if ctx.needs_input_grad[i + 1])
    with _plain():
        grads = iter(_Remat.apply(partial(_pull, f, ctx.floats, at, len(given)), *given, *saved))  # type: ignore[arg-type]
    return (next(grads) if i in at else None for i in range(inputs))


def _pull(
    f: Callable[..., tuple[Tensor, ...]], outputs: Sequence[int], at: Sequence[int], n: int, *xs: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the inputs `at` among the inputs `xs[n:]` of `f`, for the cotangents `xs[:n]` of its `outputs`."""
    primals = xs[n:]

    def of_floats(*floats: Tensor) -> tuple[Tensor, ...]:
        with phase("remat"):
            out = f(*_put(primals, at, floats))
        return tuple(out[i] for i in outputs)

    return torch.func.vjp(of_floats, *(primals[i] for i in at))[1](tuple(xs[:n]))


@dataclass
class _Call:
    """One call of `f`, a function of a number of tensors, that keeps what a record is for, to be differentiated by the
    inputs `at`. `level`: how many transforms were around it."""

    f: Callable[..., tuple[Tensor, ...]]
    level: int
    inputs: int
    at: Sequence[int]
    record: Record

    def run(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """The results, then what is kept. Inside a derivative, as when it runs again: torch chooses ops by that."""

        def of_floats(*floats: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            with self.record:
                return floats[0], self.f(*_put(xs, self.at, floats))

        levels = range((maybe_current_level() or 0) + 1, self.level + 1)
        with hiding(levels):
            out = _above(
                len(levels),
                lambda: torch.func.vjp(of_floats, *(xs[i] for i in self.at), has_aux=True)[2],  # type: ignore[misc]
            )
        self.record.count = len(out)
        return distinct([*out, *noted("kept", True, self.record.taken())], xs)

    def again(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """The results, from the inputs and what was kept."""
        with Replay(self.record, xs[self.inputs :]):
            return self.f(*xs[: self.inputs])


def _above(levels: int, f: Callable[[], Any]) -> Any:
    """`f()` inside so many derivatives of nothing, so that what it makes is told from what it captured by its level."""
    if not levels:
        return f()
    return torch.func.vjp(lambda x: (x, _above(levels - 1, f)), torch.zeros(()), has_aux=True)[2]  # type: ignore[misc]


class _Keeping(torch.autograd.Function):
    """`call.run(*xs)`: keeps its inputs and what the policy says."""

    @staticmethod
    def forward(call: _Call, *xs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return call.run(*xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *xs = inputs
        count = ctx.call.record.count
        ctx.floats = _floats(output[:count])
        ctx.mark_non_differentiable(*(y for i, y in enumerate(output) if i not in ctx.floats))
        ctx.save_for_backward(*xs, *output[count:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *_pulled(ctx, ctx.call.again, cotangents, ctx.call.inputs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: _Call, *xs: Tensor) -> tuple[Any, Any]:
        many = replace(call, f=torch.func.vmap(call.f, in_dims=in_dims[1:], randomness=info.randomness))
        with _plain():
            out: Any = _Keeping.apply(many, *xs)
        count = call.record.count  # what is kept lies below the map
        return out, (0,) * count + (None,) * (len(out) - count)


def _differentiated(x: Tensor) -> bool:
    """Whether a derivative by `x` is being taken, at any level."""
    while is_functorch_wrapped_tensor(x) and not x.requires_grad:
        x = get_unwrapped(x)
    return x.requires_grad


def distinct(ys: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`ys` as the results of a Function, which returns no input, and nothing twice."""
    held = {id(x) for x in inputs}
    out = []
    for y in ys:
        out.append(y.view_as(y) if id(y) in held else y)
        held.add(id(y))
    return tuple(out)


def remat(f: Callable[..., Any], policy: Policy = "nothing") -> Callable[..., Any]:
    """`f`, whose intermediate values are computed again in the backward pass instead of kept (its collectives too).

    `policy` says what is kept all the same, beside the arguments: `"nothing"`; `"dots"`, what products of matrices and
    attention give; the values with certain names, `("attention", "out")`, given by `save_name` in `f` (a collection,
    which may hold `"dots"`, too); `"everything"`, which leaves `f` as it is.

    Arguments and results are trees; what is no tensor passes through. Everything that needs a gradient must be an
    argument: a captured value that is being differentiated (or mapped by vmap) is an error. As `jax.checkpoint`. In
    forward mode (`torch.func.jvp`), which keeps nothing, all policies are one; it does not nest: an error, too.
    Raises `SpecError`, too, for an unknown policy, and for a name that no `save_name` gives in `f`.
    """
    if policy == "everything":
        return f
    name = getattr(f, "__name__", "remat")
    wanted = chosen(policy, f"remat of {name}")

    def run(*args: Any, **options: Any) -> Any:
        flat, treedef = tree.flatten((args, options))
        at = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        kept: list[Any] = []

        def of_tensors(*xs: Tensor) -> tuple[Tensor, ...]:
            a, o = tree.unflatten(treedef, _put(flat, at, xs))
            with reentered("remat"):
                out, structure = tree.flatten(f(*a, **o))
            kept[:] = [structure, [None if isinstance(y, Tensor) else y for y in out]]
            return distinct([y for y in out if isinstance(y, Tensor)], xs)

        refuse_nested(f"remat of {name}")
        with _plain():
            tensors = [flat[i] for i in at]
            keeps = wanted and not forward_modes()
            diff = [i for i in _floats(tensors) if keeps and _differentiated(tensors[i])]
            if diff:
                record = Record(wanted)
                made: Any = _Keeping.apply(
                    _Call(of_tensors, maybe_current_level() or 0, len(tensors), diff, record), *tensors
                )
                refuse_missing(f"remat of {name}", wanted, record.names)
            else:
                made = _Remat.apply(of_tensors, *tensors)  # type: ignore[arg-type]
        structure, rest = kept
        fresh = iter(made)
        return tree.unflatten(structure, [next(fresh) if y is None else y for y in rest])

    run.__name__ = name
    return run
