"""Patterns against tensors: names bind sizes, axes are checked against types. Used by every op that takes a pattern."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from shardlib import collectives as c
from shardlib import layout, wire
from shardlib.errors import RankError, SpecError, caret, dimensions, sizes, users_frame
from shardlib.spec import Dim, Spec, parse_list
from shardlib.types import Leaf, Region, base, paused, region, short, valueless, words

_MEND = {
    "split": "sl.shard the argument it came from, write the dimension without the axis, or slice it with sl.reshard",
    "sum": "psum or psum_scatter it over `{a}` first, or write `+{a}`",
}


def resolve(spec: Spec, here: Region) -> Spec:
    """Groups as plain axes; an unknown axis is an error."""
    return here.mesh.resolve(spec)


def axes_named(specs: Iterable[Spec], here: Region) -> set[str]:
    """Every axis that some specs name, groups resolved."""
    return {b for s in specs for a in s.axes for b in here.mesh.expand(a)}


def failure(text: str, span: tuple[int, int], message: str, note: str = "") -> SpecError:
    """An error that shows the pattern, the sizes bound so far and the mesh."""
    here, at = region(), id(users_frame())
    known = here.sizes | {name: n for (frame, name), (_, n, _) in here.said.items() if frame == at}
    bound = f"{sizes({k: n for k, n in known.items() if n >= 0})}; mesh {here.mesh.name.replace(',', ' ')}"
    return SpecError(f"{message}\n{caret(text, *span, note)}\n  sizes:   {bound}")


def bind(here: Region, spec: Spec, x: Tensor, text: str, local: dict[str, int]) -> None:
    """Bind each name to its global size: one size within a pattern, and across patterns as `Region.names` says.

    Across patterns, names that no leaf has are compared in the first, fake run: so no call is kept alive by its values.
    """
    kind, frame = here.type_of(x), users_frame() if valueless(x) else None
    for dim, n in zip(spec.dims, x.shape, strict=True):
        if dim.name == "_" or dim.parts:
            continue
        size = n * layout.parts(dim, here.mesh.shape)
        known, where = local.get(dim.name), "elsewhere in this pattern"
        if known is None and dim.name in here.sizes:
            known, where = here.sizes[dim.name], f"in {here.bound_by[dim.name]}"
        elif known is None and frame is not None and not dim.name.isdigit():
            _, known, said = here.said.setdefault((id(frame), dim.name), (frame, size, text))
            where = f"in `{said}`"
        if known is not None and known not in (size, -1):
            what = f"`{dim.name}` is {size} in this operand, of shape {tuple(x.shape)}, and {known} {where}"
            over = f", split over {'/'.join(dim.axes)}" if dim.axes else ""
            missing = [a for a in here.axes_of(kind, "V") if a not in spec.split and n * here.mesh.shape[a] == known]
            mend = f"; the value varies over `{missing[0]}`: write `{dim}/{missing[0]}`" if missing else ""
            raise failure(text, dim.span, what, f"{n} on this rank{over}{mend}")
        local[dim.name] = size


def check_operand(
    spec: Spec,
    x: Tensor,
    text: str,
    axes: Collection[str] | None = None,
    local: dict[str, int] | None = None,
    groups: bool = False,
) -> Spec:
    """Check one operand against its spec; returns the spec for its dimensions, groups resolved.

    `/a` wants a varying value, `+a` a pending one (or varying, which writing it states to be a sum); an axis in `axes`
    (those that the pattern names anywhere) which the operand omits wants an equal one. `local`: sizes of the pattern.
    `groups`: whether `(a b)` may stand for a dimension.
    """
    here = region()
    if not isinstance(x, Tensor):
        raise failure(text, _span(spec), f"a tensor is needed for `{spec}`, found {type(x).__name__}")
    spec = resolve(spec, here)
    for dim in spec.dims:
        if dim.parts and not groups:
            raise failure(text, dim.span, f"`{dim.name}` groups dimensions, which only rearrange and reduce do")
    if len(spec.dims) != x.dim() and not (spec.has_ellipsis and x.dim() >= len(spec.dims) - 1):
        what = f"`{spec}` names {dimensions(len(spec.dims))}, the value has {x.dim()}: {tuple(x.shape)}"
        raise failure(text, _span(spec), what)
    spec, kind = spec.expand(x.dim()), here.type_of(x)
    _check_piece(here, spec, x, text)

    def is_() -> str:
        equal = f", equal over {axis}" if letter == "I" and kind != here.invariant else ""
        return f"the value is {short(x)} {words(here, kind)}{equal}"

    for axis, letter in zip(here.mesh.shape, kind, strict=True) if here.typed else ():
        if axis in spec.split and letter != "V":
            dim = next(d for d in spec.dims if axis in d.axes)
            mend = _MEND["sum" if letter == "P" else "split"].format(a=axis)
            raise failure(text, dim.span, f"`{dim}` says split over `{axis}`, {is_()}", mend)
        if axis in spec.pending and letter in "IR":
            what = f"`+{axis}` says a sum over `{axis}` is still to be made, but none waits: {is_()}"
            note = f"it has been made already, or there never was one: leave `+{axis}` out, and the op that makes it"
            raise failure(text, _span(spec), what, note)
        if axes is not None and axis in axes and axis not in spec.axes and letter in "VP":
            mend = _MEND["sum"].format(a=axis) if letter == "P" else _made_equal(here, spec, x, axis)
            raise failure(text, _span(spec), f"`{spec}` says equal over `{axis}`, {is_()}", mend)
    here.refuse_padded(f"`{text}`", x)
    bind(here, spec, x, text, {} if local is None else local)
    return spec


def _check_piece(here: Region, spec: Spec, x: Tensor, text: str) -> None:
    """Raise where a dimension of an argument that is as it came in is split otherwise than the spec says."""
    leaf = here.leaves.get(x)
    if leaf is None or len(leaf.spec.dims) != x.dim():
        return
    for dim, has, n, size in zip(spec.dims, leaf.spec.dims, x.shape, leaf.shape, strict=True):
        cut = tuple(a for a in has.axes if a not in spec.pending)  # `+a` states that pieces are terms of a sum
        if dim.name != "_" and cut and dim.axes != cut and all(here.over(x, a) == "V" for a in cut):
            said = "split otherwise" if dim.axes else f"written whole, but this rank holds {n} of its {size}"
            mend = f"write `{'/'.join((dim.name, *cut))}`"
            over = [a for a in cut if a not in spec.split]
            mend += f" wherever it stands, or sl.gather(x, {over[0]!r}) first" if over else "; all_to_all moves a split"
            raise failure(text, dim.span, f"`{dim}` is {said}: the value is a piece of `{leaf.spec}`", mend)


def _made_equal(here: Region, spec: Spec, x: Tensor, axis: str) -> str:
    """How to mend a value that varies over an axis that its spec does not name, as far as its sizes tell."""
    wants = [here.sizes.get(d.name, -1) // layout.parts(d, here.mesh.shape) for d in spec.dims]
    term = (
        f"probably terms of a sum, left by a plain torch op over a dimension split over `{axis}`. Write that op as "
        f"sl.einsum or sl.reduce with `+{axis}`, then psum it"
    )
    if [*x.shape] == wants:
        return f"its sizes are whole: {term}"
    for d, n, want in zip(spec.dims, x.shape, wants, strict=True):
        if n * here.mesh.shape[axis] == want:
            return f"`{d.name}` is {n} of {want}: write `{d}/{axis}`, or all_gather it over `{axis}` first"
    return f"{term}. If a dimension is split: write `/{axis}` on it, or all_gather it first"


def state_sum(spec: Spec, x: Tensor) -> Tensor:
    """`x` with the axes that `spec` writes with `+` pending."""
    here = region()
    return c._pending(x, tuple(a for a in spec.pending if here.over(x, a) == "V"))


def assume(spec: str, x: Tensor) -> Tensor:
    """Declare what the library cannot know: `assume("batch/dp model +tp", own_kernel(x))`, `assume("d", constant)`.

    `/a` varying over a, `+a` pending, else invariant; the result is a leaf of that spec. The one statement that is not
    checked, but for this: eager code on a simulated mesh compares what is declared equal, and raises `RankError`.
    """
    here, parsed = region(), parse_list(spec, 1)[0]
    parsed = layout.check_rank(resolve(parsed, here), x.shape)
    with c._plain(), paused():
        y = x.view_as(x)
        if here.mesh.simulate and here.mesh.total > 1 and not valueless(y):
            for axis in (a for a, n in here.mesh.shape.items() if n > 1 and a not in parsed.axes):
                _compare(base(y).detach(), axis, spec)
    here.set_type(y, here.make(V=parsed.split, P=parsed.pending))
    bind(here, parsed, y, spec, {})
    return here.mark(y, Leaf(parsed, layout.global_shape(parsed, x.shape, here.mesh.shape)))


def _compare(x: Tensor, axis: str, spec: str) -> None:
    mesh = region().mesh
    for i, other in enumerate(wire.all_gather(x.reshape(1, -1), 0, mesh.shape[axis], mesh.group((axis,)))):
        if not torch.equal(other.nan_to_num(), x.flatten().nan_to_num()):
            raise RankError(
                f"assume(`{spec}`) says equal over `{axis}`, but this rank's value is not that of index {i}"
            )


Moved = list[tuple[int, tuple[str, ...]]]


def moved(src: Spec, dst: Spec, text: str) -> tuple[Moved, Moved]:
    """Which axes leave and which join each dimension: (dim, axes) pairs. Chains may change only at their end."""
    if src.names != dst.names:
        what = f"the dimensions must stay as they are: `{' '.join(src.names)}` on the left"
        raise failure(text, _span(dst), what, "collectives do not permute; sl.rearrange does")
    left, joined = [], []
    for i, (a, b) in enumerate(zip(src.dims, dst.dims, strict=True)):
        k = len(_common(a, b))
        if a.axes[k:] and b.axes[k:]:
            what = f"`{a}` -> `{b}`: `{a.name}` is cut over {', then over '.join(a.axes)}; a collective takes away the "
            less = " or ".join(f"`{'/'.join((a.name, *a.axes[:j]))}`" for j in reversed(range(len(a.axes))))
            mend = f"all_gather can make {less}; sl.reshard(x, '{dst}') finds a way for an argument as it came in"
            raise failure(text, b.span, f"{what}last of these axes, or adds some after them", mend)
        left += [(i, a.axes[k:])] * bool(a.axes[k:])
        joined += [(i, b.axes[k:])] * bool(b.axes[k:])
    return left, joined


def _common(a: Dim, b: Dim) -> tuple[str, ...]:
    k = 0
    while k < min(len(a.axes), len(b.axes)) and a.axes[k] == b.axes[k]:
        k += 1
    return a.axes[:k]


def _span(spec: Spec) -> tuple[int, int]:
    return (spec.dims[0].span[0], spec.dims[-1].span[1]) if spec.dims else (0, 1)
