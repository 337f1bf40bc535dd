"""`scan`: a loop over the leading dim of a tree; while a program is traced, its body is traced once and called."""

import dis
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_interpreter_stack, is_functorch_wrapped_tensor  # what is being differentiated
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # the graph that is being traced has no public name

from shardlib import collectives as c
from shardlib import tree
from shardlib.errors import ShardError, SpecError
from shardlib.fused import forward_modes
from shardlib.graph.joint import Joint, joint
from shardlib.graph.trace import Meta, added, call, meta
from shardlib.sharding import settle
from shardlib.types import Leaf, Piece, Region, inside, padding_allowed, region, valueless

_plain = torch._C.DisableTorchFunction


def scan(f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, length: int | None = None) -> tuple[Any, Any]:
    """`f(carry, x) -> (carry, y)` over the leading dim of every leaf of `xs`: the last carry, and the `y`s stacked
    (None where there are none, or no turns).

    A leaf that is split keeps its spec without the leading dimension, so `gather` works on slices. As `jax.lax.scan`:
    inside `jit`, `f` runs once for each type of carry, and the program calls its graphs (forward and backward). Where
    `f` cannot be traced alone, a `UserWarning` says why, and the program has a copy of it for each turn; in forward
    mode (`torch.func.jvp`) it always has.
    """
    flat, treedef = tree.flatten(xs)
    if not flat and length is None:
        raise SpecError("scan needs xs, or length=")
    lengths = {x.shape[0] for x in flat}
    if len(lengths | ({length} if length is not None else set())) > 1:
        raise SpecError(
            f"scan: the leading dimensions differ: {sorted(lengths)}" + (f", length={length}" if length else "")
        )
    n = length if length is not None else lengths.pop()
    slices = [_unstacked(x) for x in flat]
    body = _Body(f) if n > 1 else f
    carry, ys = init, []
    for i in range(n):
        carry, y = body(carry, tree.unflatten(treedef, [s[i] for s in slices]))
        ys.append(y)
    if not ys or not tree.leaves(ys[0]):
        return carry, ys[0] if ys else None
    return carry, tree.map_(lambda *parts: torch.stack(parts), *ys)


def _unstacked(x: Tensor) -> tuple[Tensor, ...]:
    """The slices of `x`, in one op (its transpose is one `stack`), each still a leaf."""
    leaf = region().leaves.get(x) if inside() else None
    if leaf is None or leaf.spec.dims[0].axes:
        return torch.unbind(x)
    with padding_allowed():  # slices are as padded as the whole
        parts = torch.unbind(x)
    for p in parts:
        settle(p, Leaf(leaf.spec.unstack(), leaf.shape[1:]))
    return parts


class _Body:
    """`f`, run once for each signature where only shapes and types matter: on fake tensors, and while a program is
    traced, if no transform but one derivative is around. What cannot be traced alone runs as it is, and says so."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f
        self.seen: dict[Any, Any] = {}
        self.alone = True

    def __call__(self, *args: Any) -> Any:
        depth = len(get_interpreter_stack() or ())
        if not (self.alone and inside() and region().typed) or depth > 1 or forward_modes():
            return self.f(*args)
        if get_proxy_mode() is not None:
            return self._traced(args)
        flat, treedef = tree.flatten(args)
        if depth or not all(isinstance(x, Tensor) and valueless(x) for x in flat):
            return self.f(*args)
        here = region()
        key = treedef, tuple(meta(x, here) for x in flat)
        if key not in self.seen:
            out, structure = tree.flatten(self.f(*args))
            if not all(isinstance(y, Tensor) for y in out):
                return tree.unflatten(structure, out)
            self.seen[key] = [meta(y, here) for y in out], structure
        results, structure = self.seen[key]
        return tree.unflatten(structure, [m.label(here, m.empty()) for m in results])

    def _traced(self, args: Any) -> Any:
        try:
            return self._called(args)
        except ShardError as e:
            why = str(e)
        self.alone = False
        out = self.f(*args)  # which raises what was no matter of tracing it alone
        name = getattr(self.f, "__name__", "its function")
        warnings.warn(f"scan: in a jitted program `{name}` is copied for each turn: {why}", stacklevel=4)
        return out

    def _called(self, args: Any) -> Any:
        here, piece = region(), region().piece
        captured, remade = lifted(self.f)
        values, treedef = tree.flatten((args, captured, piece and piece.at))
        at = [i for i, x in enumerate(values) if isinstance(x, Tensor)]
        tensors = [values[i] for i in at]
        metas = [meta(x, here) for x in tensors]
        diff = [i for i, x in enumerate(tensors) if is_functorch_wrapped_tensor(x) and x.requires_grad]
        rest = tuple(None if isinstance(x, Tensor) else x for x in values)
        bad = next((x for x in rest if type(x).__hash__ is None), None)
        if bad is not None:
            raise SpecError(f"a {type(bad).__name__} goes into it, which has no hash: make it a tensor")
        key = treedef, tuple(metas), tuple(diff), rest

        def alone(*xs: Tensor) -> Any:
            full = list(rest)
            for i, x in zip(at, xs, strict=True):
                full[i] = x
            inner, others, where = tree.unflatten(treedef, full)
            region().piece = piece and Piece(piece.dim, where, piece.count)
            return remade(others)(*inner)

        def graphs() -> tuple[Joint, str, str]:
            if key not in self.seen:
                with torch._C._EnableTorchFunction():  # which Functions are called without
                    made = joint(alone, here, metas, diff, "layer")
                self.seen[key] = made, added("layer", made.forward), added("layer_backward", made.backward)
            return self.seen[key]

        with _plain():
            out: Any = _Layer.apply(graphs, diff, *tensors)
        made = graphs()[0]
        return tree.unflatten(made.structure, out[: len(made.results)])


class _Layer(torch.autograd.Function):
    """(the joint and the names of its graphs, the inputs that are differentiated, inputs) -> results, what is kept.

    The graphs are made in here, where the transform around is off.
    """

    @staticmethod
    def forward(graphs: Callable[[], Any], diff: list[int], *xs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        made, target, _ = graphs()
        return tuple(call(target, xs, [*made.results, *made.kept]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        graphs, ctx.diff, *xs = inputs
        (made, _, ctx.target), ctx.count = graphs(), len(xs)
        ctx.made = made
        ctx.mark_non_differentiable(*(y for i, y in enumerate(output) if i not in made.floats))
        ctx.save_for_backward(*output[len(made.results) :], *(xs[i] for i in made.of_inputs))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        made, here = ctx.made, region()
        pairs = zip(made.floats, made.cotangents, strict=True)
        given = [_as_typed(here, cotangents[i].contiguous(), m) for i, m in pairs]
        with _plain():
            grads = iter(_Call.apply(ctx.target, made.gradients, *ctx.saved_tensors, *given))  # type: ignore[arg-type]
        return None, None, *(next(grads) if i in ctx.diff else None for i in range(ctx.count))


class _Call(torch.autograd.Function):
    """A call of a graph, below all transforms."""

    @staticmethod
    def forward(target: str, results: list[Meta], *xs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(call(target, xs, results))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)


def _as_typed(here: Region, x: Tensor, wanted: Meta) -> Tensor:
    """A cotangent, which may be zero and so equal on all ranks, as the type that the backward graph was traced for."""
    assert wanted.kind is not None
    pairs = list(zip(here.mesh.shape, here.type_of(x), wanted.kind, strict=True))
    x = c._pvary(x, tuple(a for a, k, w in pairs if k == "I" and w in "RV"))
    x = c._pending(x, tuple(a for a, k, w in pairs if k in "IR" and w == "P"))
    with _plain():
        x = x.view_as(x)
    return here.set_type(x, wanted.kind)


# ---- what a function captures


def lifted(value: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The tensors that a function reaches by closures, partials and trees in them, and how to make it with others."""
    found: list[Tensor] = []
    _over(value, lambda x: found.append(x) or x, set())

    def remade(others: list[Tensor]) -> Any:
        fresh: Iterator[Tensor] = iter(others)
        return _over(value, lambda _: next(fresh), set())

    return found, remade


def _over(value: Any, one: Callable[[Tensor], Tensor], active: set[int]) -> Any:
    """`value` with `one(tensor)` for every tensor that it reaches."""
    if id(value) in active:  # a function that captures itself
        return value
    active = active | {id(value)}
    if isinstance(value, partial):
        args = [_over(a, one, active) for a in value.args]
        words = {k: _over(a, one, active) for k, a in value.keywords.items()}
        return partial(_over(value.func, one, active), *args, **words)
    if isinstance(value, FunctionType):
        if any(
            i.opname == "STORE_DEREF" and i.argval in value.__code__.co_freevars for i in dis.get_instructions(value)
        ):
            raise SpecError(
                f"`{value.__name__}` assigns to a nonlocal variable, which is to happen in every turn: carry the value"
            )
        cells = tuple(_cell(cell, one, active) for cell in value.__closure__ or ())
        defaults = value.__defaults__ and tuple(_over(v, one, active) for v in value.__defaults__)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        made.__kwdefaults__, made.__qualname__, made.__module__ = (
            value.__kwdefaults__,
            value.__qualname__,
            value.__module__,
        )
        return made
    flat, treedef = tree.flatten(value)
    if not any(isinstance(x, Tensor) for x in flat):
        return value
    return tree.unflatten(treedef, [one(x) if isinstance(x, Tensor) else x for x in flat])


def _cell(cell: CellType, one: Callable[[Tensor], Tensor], active: set[int]) -> CellType:
    try:
        return CellType(_over(cell.cell_contents, one, active))
    except ValueError:  # still empty
        return cell
