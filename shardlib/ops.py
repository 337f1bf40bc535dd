"""Ops with patterns: the string states what the operands are, and is checked; the op does just that."""

import string
from collections.abc import Callable, Sequence
from typing import Any

import einops
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib import collectives as c
from shardlib import layout, tree
from shardlib.mean import Mean, summed_later
from shardlib.mesh import Axes
from shardlib.patterns import check_operand, failure, moved, resolve, state_sum
from shardlib.spec import Dim, Pattern, Spec, parse_list, parse_pattern
from shardlib.types import region

# ---- collectives by pattern


def _collective(op: str, text: str, x: Any, do: Callable[[Tensor, Spec, Spec, Pattern], Tensor]) -> Any:
    pattern = parse_pattern(text, 1)

    def one(leaf: Tensor) -> Tensor:
        here = region()
        axes = {b for a in pattern.axes for b in here.mesh.expand(a)}
        src = check_operand(pattern.inputs[0], leaf, text, axes)
        dst = resolve(pattern.outputs[0], here).expand(leaf.dim())
        return do(state_sum(src, leaf), src, dst, pattern)

    return tree.map_(one, x)


def _refuse_rest(op: str, pattern: Pattern, wrong: Sequence[Any], hint: str) -> None:
    if wrong:
        span = pattern.outputs[0].dims[0].span[0] if pattern.outputs[0].dims else 0
        raise failure(pattern.text, (span, len(pattern.text)), f"{op} does not do that", hint)


def all_gather(pattern: str, x: Any, *, invariant: bool = False) -> Any:
    """Gather pieces: `all_gather("batch/dp seq/tp model -> batch/dp seq model", x)`.

    varying -> replicated; transpose psum_scatter. With `invariant=True` varying -> invariant, transpose: the own slice.
    Axes leave the end of a dimension's chain. Bytes sent per rank: (n-1) times the operand.
    """

    def do(y: Tensor, src: Spec, dst: Spec, p: Pattern) -> Tensor:
        left, joined = moved(src, dst, p.text)
        _refuse_rest("all_gather", p, joined, "an axis leaves a dimension, none joins one: see all_to_all and psum_scatter")
        _refuse_rest("all_gather", p, [1] * (not left), "no axis leaves a dimension")
        _refuse_rest("all_gather", p, set(src.pending) ^ set(dst.pending), "pending sums stay as they are: psum makes them")
        for dim, axes in left:
            y = c._all_gather(y, axes, dim, invariant)
        return y

    return _collective("all_gather", pattern, x, do)


def psum_scatter(pattern: str, x: Any) -> Any:
    """Make a sum and keep one piece: `psum_scatter("batch/dp seq model +tp -> batch/dp seq/tp model", x)`.

    pending (or varying) -> varying; transpose all_gather. Bytes sent per rank: (n-1)/n times the operand.
    Raises `SpecError` where the dimension does not divide.
    """

    def do(y: Tensor, src: Spec, dst: Spec, p: Pattern) -> Tensor:
        left, joined = moved(src, dst, p.text)
        _refuse_rest("psum_scatter", p, left, "an axis goes from `+axis` to a dimension, none leaves one")
        into = tuple(a for _, axes in joined for a in axes)
        _refuse_rest("psum_scatter", p, [1] * (not into), "no axis joins a dimension: psum makes the whole sum")
        gone = set(src.pending) - set(dst.pending)
        _refuse_rest("psum_scatter", p, gone ^ set(into), "the axes that join dimensions must be the `+axes` that go")
        for dim, axes in joined:
            divides(p, dst, dim, y.shape[dim], axes)
            y = c._psum_scatter(y, axes, dim)
        return y

    return _collective("psum_scatter", pattern, x, do)


def all_to_all(pattern: str, x: Any) -> Any:
    """Move a split from one dimension to another: `all_to_all("heads seq/cp -> heads/cp seq", x)`.

    varying -> varying; transpose: back. Bytes sent per rank: (n-1)/n times the operand.
    """

    def do(y: Tensor, src: Spec, dst: Spec, p: Pattern) -> Tensor:
        left, joined = moved(src, dst, p.text)
        fits = len(left) == len(joined) == 1 and left[0][1] == joined[0][1] and src.pending == dst.pending
        _refuse_rest("all_to_all", p, [1] * (not fits), "the axes that leave one dimension must join another, in the same order")
        divides(p, dst, joined[0][0], y.shape[joined[0][0]], joined[0][1])
        return c._all_to_all(y, left[0][1], joined[0][0], left[0][0])

    return _collective("all_to_all", pattern, x, do)


def psum(first: Any, second: Any) -> Any:
    """Make a sum, by pattern or by axes: `psum("batch/dp model +tp -> batch/dp model", x)`, `psum(x, "tp")`.

    pending (or varying, which states the sum) -> invariant; transpose pvary. Bytes sent per rank: 2 (n-1)/n times the operand.
    """
    if not isinstance(first, str):
        return c.psum(first, second)

    def do(y: Tensor, src: Spec, dst: Spec, p: Pattern) -> Tensor:
        left, joined = moved(src, dst, p.text)
        _refuse_rest("psum", p, left + joined, "dimensions keep their axes; only `+axes` go")
        gone = tuple(a for a in src.pending if a not in dst.pending)
        _refuse_rest("psum", p, [1] * (not gone), "no `+axis` goes")
        return c._psum(y, region().mesh.ordered(gone))

    return _collective("psum", first, second, do)


def divides(p: Pattern, spec: Spec, dim: int, length: int, axes: Sequence[str]) -> None:
    """Raise where `length` (on this rank) does not divide over `axes`."""
    n = region().mesh.size(axes)
    if length % n:
        d = spec.dims[dim]
        raise failure(p.text, d.span, f"`{d.name}` is {length} here, which does not divide by {n}, the size of {'/'.join(axes)}",
                      "pad the dimension, or choose another")  # fmt: skip


# ---- local ops


def _chains(pattern: Pattern, specs: Sequence[Spec]) -> dict[str, Dim]:
    """Each name's split, which must be the same wherever the name stands."""
    seen: dict[str, Dim] = {}
    for s in specs:
        for d in s.dims:
            first = seen.setdefault(d.name, d)
            if d.name != "_" and first.axes != d.axes:
                raise failure(pattern.text, d.span, f"`{d.name}` is split as `{first}` elsewhere in the pattern, as `{d}` here",
                              "a local op cannot change a split: use a collective")  # fmt: skip
    return seen


def einsum(pattern: str, *operands: Tensor) -> Tensor:
    """`einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", h, w)`: `torch.einsum` on what this rank holds.

    A contracted dimension that is split leaves a sum still to be made, written `+axis` on the result.
    """
    p = parse_pattern(pattern, len(operands))
    here = region()
    axes = {b for a in p.axes for b in here.mesh.expand(a)}
    local: dict[str, int] = {}
    specs = [check_operand(s, x, pattern, axes, local) for s, x in zip(p.inputs, operands)]
    out = resolve(p.outputs[0], here)
    dots = next((s for s, q in zip(specs, p.inputs) if q.has_ellipsis), None)
    if out.has_ellipsis and dots is not None:
        out = out.expand(len(out.dims) - 1 + sum(d.name == "_" for d in dots.dims))
    seen = _chains(p, specs)
    for d in out.dims:
        if d.name not in seen:
            raise failure(pattern, d.span, f"`{d.name}` stands on the right of `->` only")
    _chains(p, [*specs, out])
    contracted: dict[str, str] = {}
    for n, d in seen.items():
        for a in d.axes if n not in out.names else ():
            if a in contracted:
                raise failure(pattern, d.span, f"`{contracted[a]}` and `{n}` are both split over `{a}` and summed over: a rank holds one "
                              "piece of each and would miss the other products", f"all_gather one of them over `{a}`")  # fmt: skip
            contracted[a] = n
    carried = {a for s in specs for a in s.pending}
    end = len(pattern.rstrip())
    for a, n in contracted.items():
        if a not in out.pending:
            raise failure(pattern, (end - 1, end), f"einsum contracts `{n}`, split over `{a}`, so its result still waits for a sum over `{a}`",
                          f'write `+{a}` here, then psum("... +{a} -> ...") or psum_scatter it')  # fmt: skip
    for a in out.pending:
        if a not in contracted and a not in carried:
            raise failure(pattern, (end - len(a) - 1, end), f"`+{a}` on the right, but no dimension split over `{a}` is contracted", "nothing is to be summed")
    missing = carried - set(out.pending)
    if missing:
        raise failure(pattern, (end - 1, end), f"an operand waits for a sum over `{min(missing)}`; so does the result", f"write `+{min(missing)}` here")
    names = iter(string.ascii_letters)
    letters = {n: next(names) for n in [*seen] if n != "_"}
    terms = [_letters(s, letters) for s in specs]
    y = torch.einsum(f"{','.join(terms)}->{_letters(out, letters)}", *(state_sum(s, x) for s, x in zip(specs, operands)))
    return c._pending(y, tuple(a for a in here.mesh.shape if a in contracted))


def _letters(spec: Spec, letters: dict[str, str]) -> str:
    out, dotted = "", False
    for d in spec.dims:
        out += letters[d.name] if d.name != "_" else "" if dotted else "..."
        dotted = dotted or d.name == "_"
    return out


def _plain(spec: Spec) -> str:
    """The spec as einops reads it: no axes, integers as names."""

    def name(n: str) -> str:
        return f"n{n}" if n.isdigit() and n != "1" else n

    return " ".join(
        f"({' '.join(name(p) for p in d.parts)})" if d.parts or d.name == "()" else "..." if d.name == "..." else name(d.name)
        for d in spec.dims
    )


def _parts(spec: Spec) -> dict[str, Dim]:
    """Every plain name with its split: of a `(a b)/x` group the first name carries the axes."""
    out: dict[str, Dim] = {}
    for d in spec.dims:
        for i, n in enumerate(d.parts or (d.name,)):
            out[n] = Dim(n, d.axes if i == 0 else (), (), d.span)
    return out


def _einops(op: str, text: str, x: Tensor, sizes: dict[str, int], run: Callable[[str, dict[str, int]], Tensor]) -> tuple[Tensor, Spec, Spec, Pattern]:
    p = parse_pattern(text, 1)
    here = region()
    axes = {b for a in p.axes for b in here.mesh.expand(a)}
    src, dst = p.inputs[0], resolve(p.outputs[0], here)
    flat = Spec(tuple(Dim(d.name, d.axes, d.parts, d.span) for d in src.dims), src.pending, text=src.text)
    checked = check_operand(flat, x, text, axes, groups=True)
    left, right = _parts(resolve(src, here)), _parts(dst)
    local: dict[str, int] = {}
    for n, size in sizes.items():
        d = left.get(n) or right.get(n)
        if d is None:
            raise failure(text, (0, len(text)), f"size given for `{n}`, which the pattern does not name")
        ways = layout.parts(right.get(n, d) if op == "rearrange" else d, here.mesh.shape)
        if size % ways:
            over = "/".join((right.get(n) or d).axes)
            raise failure(text, d.span, f"`{n}` is {size}, which does not divide by {ways}, the size of `{over}`", "the first name of a group is the one that is cut")
        local[n] = size // ways
    for n, d in right.items():
        if n in left and left[n].axes != d.axes:
            raise failure(text, d.span, f"`{n}` is split as `{left[n]}` on the left, as `{d}` on the right", "the first name of a `(a b)` group carries its axes; only collectives change a split")
    for (dim, n) in zip(src.dims, x.shape):
        known = [local[q] for q in dim.parts if q in local]
        if dim.parts and len(known) == len(dim.parts) - 1:
            product = 1
            for k in known:
                product *= k
            if product and n % product:
                free = next(q for q in dim.parts if q not in local)
                raise failure(text, dim.span, f"`{dim.name}` is {n} on this rank, which does not divide by {product}: `{free}` does not divide over `{'/'.join(dim.axes)}`" if dim.axes else f"`{dim.name}` is {n}, which does not divide by {product}")
    return run(f"{_plain(src)} -> {_plain(dst)}", {(f"n{n}" if n.isdigit() else n): s for n, s in local.items()}), checked, dst, p


def rearrange(pattern: str, x: Tensor, **sizes: int) -> Tensor:
    """einops' `rearrange` on what this rank holds: `rearrange("batch/dp seq (heads head)/tp -> batch/dp heads/tp seq head", x, head=64)`.

    The first name of a `(a b)/axis` group carries the axis. `sizes` are global. Raises `SpecError` where they do not divide.
    """
    return _einops("rearrange", pattern, x, sizes, lambda q, s: einops.rearrange(x, q, **s))[0]


def reduce(pattern: str, x: Tensor, op: str, **sizes: int) -> Tensor:
    """einops' `reduce` by `"sum"`, `"mean"`, `"max"`, `"min"`: `reduce("batch/dp seq model/tp -> batch/dp seq +tp", x, "sum")`.

    A sum or mean over a split dimension leaves a sum to be made, written `+axis`. Sizes of a mean are global.
    """
    here = region()
    p = parse_pattern(pattern, 1)
    src, dst = _parts(resolve(p.inputs[0], here)), resolve(p.outputs[0], here)
    gone = [d for n, d in src.items() if n not in _parts(dst)]
    over = tuple(a for d in gone for a in d.axes)
    ways = here.mesh.size(over) if over else 1
    end = len(pattern.rstrip())
    if over and op not in ("sum", "mean"):
        raise failure(pattern, gone[0].span, f"{op} over `{gone[0]}`, which is split", f"reduce what this rank holds in torch, then sl.pmax over `{over[0]}`")
    for a in over:
        if a not in dst.pending:
            raise failure(pattern, (end - 1, end), f"a {op} over a dimension split over `{a}` still waits for a sum over `{a}`", f"write `+{a}` here, then psum it")
    for a in dst.pending:
        if a not in over and a not in p.inputs[0].pending:
            raise failure(pattern, (end - len(a) - 1, end), f"`+{a}` on the right, but no dimension split over `{a}` is reduced")
    y, checked, _, _ = _einops("reduce", pattern, x, sizes, lambda q, s: einops.reduce(state_sum(resolve(p.inputs[0], here), x), q, op, **s))
    return c._pending(y / ways if op == "mean" and ways > 1 else y, here.mesh.ordered(over))


def iota(spec: str, n: int) -> Tensor:
    """The global positions of this rank's piece of a dimension: `iota("seq/cp", n)`, `n` positions on this rank; int64."""
    here = region()
    dim = resolve(parse_list(spec, 1)[0], here).dims[0]
    positions = torch.arange(n, device=here.mesh.device)
    return positions + n * c.axis_index(dim.axes) if dim.axes else positions


def embed(pattern: str, table: Tensor, tokens: Tensor) -> Tensor:
    """Look rows up: `embed("vocab/tp model, batch/dp seq -> batch/dp seq model +tp", table, tokens)`.

    The first dimension of the table may be split; each rank then looks up what it holds and the result is pending.
    Token ids outside 0..vocab-1 give zeros where the table is split, and are an error of torch where it is not.
    """
    p = parse_pattern(pattern, 2)
    here, local = region(), {}
    axes = {b for a in p.axes for b in here.mesh.expand(a)}
    rows, ids = (check_operand(s, x, pattern, axes, local) for s, x in zip(p.inputs, (table, tokens)))
    out, split = resolve(p.outputs[0], here), rows.dims[0].axes
    want = ids.dims + rows.dims[1:]
    if [(d.name, d.axes) for d in out.dims] != [(d.name, d.axes) for d in want] or set(out.pending) != set(split):
        right = str(Spec(want, split))
        raise failure(pattern, (pattern.index("->") + 2, len(pattern)), "embed gives the dimensions of the tokens, then those of a row", f"write `{right}`")
    if not split:
        return F.embedding(tokens, table)
    at = tokens - table.shape[0] * c.axis_index(split)
    mine = (at >= 0) & (at < table.shape[0])
    found = F.embedding(torch.where(mine, at, 0), table)
    return c._pending(torch.where(mine.unsqueeze(-1), found, torch.zeros((), dtype=table.dtype, device=table.device)), here.mesh.ordered(split))


def token_loss(pattern: str, logits: Tensor, targets: Tensor, *, weight: Tensor | None = None, per_token: bool = False) -> Any:
    """Cross-entropy in nats over the last dimension: `token_loss("batch/dp seq vocab/tp, batch/dp seq", logits, targets)`.

    The vocabulary may be split. Negative targets weigh nothing. A `Mean` over tokens (each weighing `weight`, default 1),
    pending over the axes of the targets; with `per_token=True` the losses themselves, zeros where the target is negative.
    16-bit logits are computed in float32.
    """
    first, second = parse_list(pattern, 2)
    here, local = region(), {}
    axes = {b for s in (first, second) for a in s.axes for b in here.mesh.expand(a)}
    scores, ids = (check_operand(s, x, pattern, axes, local) for s, x in zip((first, second), (logits, targets)))
    if [(d.name, d.axes) for d in scores.dims[:-1]] != [(d.name, d.axes) for d in ids.dims]:
        raise failure(pattern, second.dims[0].span if second.dims else (0, 1), "the targets have the dimensions of the logits but for the last")
    split, valid = here.mesh.ordered(scores.dims[-1].axes), targets >= 0
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if split:
        peak = c.pmax(logits.detach().amax(-1, keepdim=True), split)
        shifted = logits - peak
        norm = c._psum(shifted.exp().sum(-1), split).log()
        at = targets - logits.shape[-1] * c.axis_index(scores.dims[-1].axes)
        mine = (at >= 0) & (at < logits.shape[-1])
        picked = shifted.gather(-1, torch.where(mine, at, 0).unsqueeze(-1)).squeeze(-1)
        loss = norm - c._psum(torch.where(mine, picked, torch.zeros((), dtype=logits.dtype, device=logits.device)), split)
        loss = torch.where(valid, loss, torch.zeros((), dtype=loss.dtype, device=loss.device))
    else:
        flat = F.cross_entropy(logits.flatten(0, -2), torch.where(valid, targets, -100).flatten(), reduction="none")
        loss = flat.view(targets.shape)
    if per_token:
        return loss if weight is None else loss * weight
    weights = valid.to(loss.dtype) if weight is None else torch.where(valid, weight.to(loss.dtype), 0.0)
    total = loss.sum() if weight is None else (loss * weights).sum()
    over = here.mesh.ordered(ids.split)
    return Mean(summed_later(total, over), summed_later(weights.sum(), over))


