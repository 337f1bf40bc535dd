"""Ops with patterns: the string states what the operands are, and is checked; the op does just that."""

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import einops
from torch import Tensor

from shardlib import collectives as c
from shardlib import layout, tree
from shardlib.contract import einsum as _einsum
from shardlib.errors import SpecError
from shardlib.patterns import axes_named, check_operand, failure, moved, resolve, state_sum
from shardlib.spec import Dim, Pattern, Spec, parse_pattern
from shardlib.types import region

# ---- collectives by pattern


def _collective(text: str, x: Any, do: Callable[[Tensor, Spec, Spec, Pattern], Tensor]) -> Any:
    """`do(leaf, left, right, pattern)` for every leaf of a tree, after its check."""
    pattern, here = parse_pattern(text, 1), region()
    axes = axes_named(pattern.inputs + pattern.outputs, here)

    def one(leaf: Tensor) -> Tensor:
        src = check_operand(pattern.inputs[0], leaf, text, axes)
        return do(state_sum(src, leaf), src, resolve(pattern.outputs[0], here).expand(leaf.dim()), pattern)

    return tree.map_(one, x)


def _needs(op: str, pattern: Pattern, holds: object, hint: str) -> None:
    """Raise, with the right side underlined, where a pattern asks for something else than `op` does."""
    if not holds:
        span = pattern.outputs[0].dims[0].span[0] if pattern.outputs[0].dims else 0
        raise failure(pattern.text, (span, len(pattern.text)), f"{op} does not do that", hint)


def all_gather(pattern: str, x: Any, *, invariant: bool = False) -> Any:
    """Gather pieces: `all_gather("batch/dp seq/tp model -> batch/dp seq model", x)`.

    varying -> replicated; transpose psum_scatter. With `invariant=True` varying -> invariant, transpose: the own slice.
    Axes leave the end of a dimension's chain. Bytes sent per rank: (n-1) times the operand.
    """

    def do(y: Tensor, src: Spec, dst: Spec, p: Pattern) -> Tensor:
        left, joined = moved(src, dst, p.text)
        hint = "an axis leaves a dimension, none joins one: see all_to_all and psum_scatter"
        _needs("all_gather", p, not joined, hint)
        _needs("all_gather", p, left, "no axis leaves a dimension")
        same = set(src.pending) == set(dst.pending)
        _needs("all_gather", p, same, "pending sums stay as they are: psum makes them")
        for dim, axes in left:
            y = c._all_gather(y, axes, dim, invariant)
        return y

    return _collective(pattern, x, do)


def psum_scatter(pattern: str, x: Any) -> Any:
    """Make a sum and keep one piece: `psum_scatter("batch/dp seq model +tp -> batch/dp seq/tp model", x)`.

    pending (or varying) -> varying; transpose all_gather. Bytes sent per rank: (n-1)/n times the operand.
    Raises `SpecError` where the dimension does not divide.
    """

    def do(y: Tensor, src: Spec, dst: Spec, p: Pattern) -> Tensor:
        left, joined = moved(src, dst, p.text)
        _needs("psum_scatter", p, not left, "an axis goes from `+axis` to a dimension, none leaves one")
        into = {a for _, axes in joined for a in axes}
        _needs("psum_scatter", p, into, "no axis joins a dimension: psum makes the whole sum")
        gone = set(src.pending) - set(dst.pending)
        _needs("psum_scatter", p, gone == into, "the axes that join dimensions must be the `+axes` that go")
        for dim, axes in joined:
            _divides(p, dst, dim, y.shape[dim], axes)
            y = c._psum_scatter(y, axes, dim)
        return y

    return _collective(pattern, x, do)


def all_to_all(pattern: str, x: Any) -> Any:
    """Move a split from one dimension to another: `all_to_all("heads seq/cp -> heads/cp seq", x)`.

    varying -> varying; transpose: back. Bytes sent per rank: (n-1)/n times the operand.
    """

    def do(y: Tensor, src: Spec, dst: Spec, p: Pattern) -> Tensor:
        left, joined = moved(src, dst, p.text)
        fits = len(left) == len(joined) == 1 and left[0][1] == joined[0][1] and src.pending == dst.pending
        _needs("all_to_all", p, fits, "the axes that leave one dimension must join another, in the same order")
        (dim, axes), (to, _) = left[0], joined[0]
        _divides(p, dst, to, y.shape[to], axes)
        return c._all_to_all(y, axes, to, dim)

    return _collective(pattern, x, do)


def psum(first: Any, second: Any) -> Any:
    """Make a sum, by pattern or by axes: `psum("batch/dp model +tp -> batch/dp model", x)`, `psum(x, "tp")`.

    pending (or varying, which states the sum) -> invariant; transpose pvary. Bytes sent per rank: 2 (n-1)/n times the
    operand.
    """
    if not isinstance(first, str):
        return c.psum(first, second)

    def do(y: Tensor, src: Spec, dst: Spec, p: Pattern) -> Tensor:
        _needs("psum", p, moved(src, dst, p.text) == ([], []), "dimensions keep their axes; only `+axes` go")
        gone = tuple(a for a in src.pending if a not in dst.pending)
        _needs("psum", p, gone, "no `+axis` goes")
        return c._psum(y, region().mesh.ordered(gone))

    return _collective(first, second, do)


def _divides(p: Pattern, spec: Spec, dim: int, length: int, axes: Sequence[str]) -> None:
    """Raise where `length` (on this rank) does not divide over `axes`."""
    n, d = region().mesh.size(axes), spec.dims[dim]
    if length % n:
        what = f"`{d.name}` is {length} here, which does not divide by {n}, the size of {'/'.join(axes)}"
        raise failure(p.text, d.span, what, "pad the dimension, or choose another")


# ---- einsum


def einsum(pattern: str, *operands: Tensor) -> Tensor:
    """`torch.einsum` on what this rank holds: `einsum("batch hidden/tp, hidden/tp model -> batch model +tp", h, w)`.

    A contracted dimension that is split leaves a sum still to be made, written `+axis` on the result.
    """
    p, here = parse_pattern(pattern, len(operands)), region()
    axes, local = axes_named(p.inputs + p.outputs, here), dict[str, int]()
    specs = [check_operand(s, x, pattern, axes, local) for s, x in zip(p.inputs, operands, strict=True)]
    out = resolve(p.outputs[0], here)
    dots = next((s for s, given in zip(specs, p.inputs, strict=True) if given.has_ellipsis), None)
    if out.has_ellipsis and dots is not None:
        out = out.expand(len(out.dims) - 1 + sum(d.name == "_" for d in dots.dims))
    seen = _splits(pattern, specs)
    for d in out.dims:
        if d.name not in seen:
            raise failure(pattern, d.span, f"`{d.name}` stands on the right of `->` only")
    _splits(pattern, [*specs, out])
    contracted = _contracted(pattern, seen, out)
    _check_sums(pattern, out, contracted, {a for s in specs for a in s.pending})
    letters = dict(zip((n for n in seen if n != "_"), string.ascii_letters, strict=False))
    terms = ",".join(_letters(s, letters) for s in specs)
    values = [state_sum(s, x) for s, x in zip(specs, operands, strict=True)]
    return c._pending(_einsum(f"{terms}->{_letters(out, letters)}", *values), here.mesh.ordered(list(contracted)))


def _splits(text: str, specs: Sequence[Spec]) -> dict[str, Dim]:
    """Each name's split, which must be the same wherever the name stands."""
    seen: dict[str, Dim] = {}
    for d in (d for s in specs for d in s.dims):
        first = seen.setdefault(d.name, d)
        if d.name != "_" and first.axes != d.axes:
            what = f"`{d.name}` is split as `{first}` elsewhere in the pattern, as `{d}` here"
            raise failure(text, d.span, what, "a local op cannot change a split: use a collective")
    return seen


def _contracted(text: str, seen: dict[str, Dim], out: Spec) -> dict[str, str]:
    """The axes over which a sum is left to be made, each with the name whose split leaves it."""
    found: dict[str, str] = {}
    for n, d in seen.items():
        for a in d.axes if n not in out.names else ():
            if a in found:  # the rank would pair its piece of one with its piece of the other only
                what = f"`{found[a]}` and `{n}` are both split over `{a}` and summed over: products of different pieces"
                raise failure(text, d.span, f"{what} would be missing", f"all_gather one of them over `{a}`")
            found[a] = n
    return found


def _check_sums(text: str, out: Spec, contracted: dict[str, str], carried: set[str]) -> None:
    """Raise where the sums still to be made are not those that the right side writes."""
    end = len(text.rstrip())
    for a, n in contracted.items():
        if a not in out.pending:
            what = f"einsum contracts `{n}`, split over `{a}`, so its result still waits for a sum over `{a}`"
            mend = f'write `+{a}` here, then psum("... +{a} -> ...") or psum_scatter it'
            raise failure(text, (end - 1, end), what, mend)
    for a in out.pending:
        if a not in contracted and a not in carried:
            what = f"`+{a}` on the right, but no dimension split over `{a}` is contracted"
            raise failure(text, (end - len(a) - 1, end), what, "nothing is to be summed")
    for a in sorted(carried - set(out.pending)):
        what = f"an operand waits for a sum over `{a}`; so does the result"
        raise failure(text, (end - 1, end), what, f"write `+{a}` here")


def _letters(spec: Spec, letters: dict[str, str]) -> str:
    out, dotted = "", False
    for d in spec.dims:
        out += letters[d.name] if d.name != "_" else "" if dotted else "..."
        dotted = dotted or d.name == "_"
    return out


# ---- rearrange, reduce


def rearrange(pattern: str, x: Tensor, **sizes: int) -> Tensor:
    """einops' `rearrange` on what this rank holds: `rearrange("batch seq (h d)/tp -> batch h/tp seq d", x, d=64)`.

    The first name of a `(a b)/axis` group carries the axis. `sizes` are global. Raises `SpecError` where they do not
    divide.
    """
    plain, local = _einops(pattern, x, sizes)
    return _run(einops.rearrange, x, plain, **local)


def reduce(pattern: str, x: Tensor, op: str, **sizes: int) -> Tensor:
    """einops' `reduce` by `"sum"`, `"mean"`, `"max"`, `"min"`: `reduce("batch model/tp -> batch +tp", x, "sum")`.

    A sum or mean over a split dimension leaves a sum to be made, written `+axis`. Sizes are global.
    """
    p, here = parse_pattern(pattern, 1), region()
    src, dst = resolve(p.inputs[0], here), resolve(p.outputs[0], here)
    kept, end = _names(dst), len(pattern.rstrip())
    gone = [d for n, d in _names(src).items() if n not in kept]
    over = tuple(a for d in gone for a in d.axes)
    if over and op not in ("sum", "mean"):
        at = tuple(i for i, d in enumerate(src.dims) if not {*(d.parts or (d.name,))} & {*kept}) or "..."
        cut, dims, sign = next(d for d in gone if d.axes), at[0] if len(at) == 1 else at, "-" * (op == "min")
        mend = f"reduce what this rank holds, then over ranks: {sign}sl.pmax({sign}x.a{op}({dims}), {over[0]!r})"
        raise failure(pattern, cut.span, f"{op} over `{cut}`, which is split", mend)
    for a in over:
        if a not in dst.pending:
            what = f"a {op} over a dimension split over `{a}` still waits for a sum over `{a}`"
            raise failure(pattern, (end - 1, end), what, f"write `+{a}` here, then psum it")
    for a in dst.pending:
        if a not in over and a not in src.pending:
            what = f"`+{a}` on the right, but no dimension split over `{a}` is reduced"
            raise failure(pattern, (end - len(a) - 1, end), what)
    plain, local = _einops(pattern, x, sizes)
    y = _run(einops.reduce, state_sum(src, x), plain, op, **local)
    ways = here.mesh.size(over) if op == "mean" else 1
    return c._pending(y / ways if ways > 1 else y, here.mesh.ordered(over))


def _einops(text: str, x: Tensor, sizes: dict[str, int]) -> tuple[str, dict[str, int]]:
    """Check a pattern with groups; the pattern and the sizes on this rank as einops takes them."""
    p, here = parse_pattern(text, 1), region()
    src, dst = resolve(p.inputs[0], here), resolve(p.outputs[0], here)
    check_operand(src, x, text, axes_named((src, dst), here), groups=True)
    left, right, local = _names(src), _names(dst), dict[str, int]()
    for n, size in sizes.items():
        d = left.get(n) or right.get(n)
        if d is None:
            raise failure(text, (0, len(text)), f"size given for `{n}`, which the pattern does not name")
        ways = layout.parts(d, here.mesh.shape)
        if size % ways:
            what = f"`{n}` is {size}, which does not divide by {ways}, the size of `{'/'.join(d.axes)}`"
            raise failure(text, d.span, what, "the first name of a group is the one that is cut")
        local[n] = size // ways
    for n, d in right.items():
        if n in left and left[n].axes != d.axes:
            what = f"`{n}` is split as `{left[n]}` on the left, as `{d}` on the right"
            mend = "the first name of a `(a b)` group carries its axes; only collectives change a split"
            raise failure(text, d.span, what, mend)
    for d, length in zip(src.dims, x.shape, strict=False):  # an ellipsis ends it: einops checks the rest
        by = {q: local[q] for q in d.parts if q in local}
        if d.name == "...":
            break
        if len(d.parts) == len(by) + 1 and (known := math.prod(by.values())) and length % known:
            raise _no_group(text, d, length, by)
    return f"{_plain(src)} -> {_plain(dst)}", {_einops_name(n): size for n, size in local.items()}


def _no_group(text: str, d: Dim, length: int, by: dict[str, int]) -> SpecError:
    """The sizes `by` of all names of a group but one do not divide its `length` on this rank."""
    ways, known, over = layout.parts(d, region().mesh.shape), math.prod(by.values()), "/".join(d.axes)
    what, total = f"`{d}` is {length * ways} in all", length * ways
    if d.axes and d.parts[0] not in by and total % known == 0:
        what += f": `{d.parts[0]}` would be {total // known}, which does not divide over {over}={ways}"
    else:
        what += f", {length} on each of the {ways} ranks of {over}" * bool(d.axes)
        what += f", and {length} does not divide by {' * '.join(f'{q}={n}' for q, n in by.items())}"
    return failure(text, d.span, what, f"take sizes that divide {length}, or make it a multiple of {known * ways}")


def _run(f: Callable[..., Tensor], *args: Any, **sizes: int) -> Tensor:
    try:
        return f(*args, **sizes)
    except einops.EinopsError as e:  # shows the pattern and the shape
        raise SpecError(str(e)) from None


def _einops_name(n: str) -> str:
    return f"n{n}" if n.isdigit() and n != "1" else n


def _plain(spec: Spec) -> str:
    """The spec as einops reads it: no axes, integers as names."""

    def one(d: Dim) -> str:
        grouped = d.parts or d.name == "()"
        return f"({' '.join(map(_einops_name, d.parts))})" if grouped else _einops_name(d.name)

    return " ".join(map(one, spec.dims))


def _names(spec: Spec) -> dict[str, Dim]:
    """Every plain name with its split: of a `(a b)/x` group the first name carries the axes."""
    out: dict[str, Dim] = {}
    for d in spec.dims:
        for i, n in enumerate(d.parts or (d.name,)):
            out[n] = Dim(n, d.axes if i == 0 else (), (), d.span)
    return out
