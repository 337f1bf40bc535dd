"""`show`: which rank holds what, and what a layout sends, as a table: in colour on a terminal, HTML in a notebook."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardlib import layout as cuts
from shardlib import tree
from shardlib.array import Array
from shardlib.errors import SpecError, amount
from shardlib.graph.program import bytes_sent
from shardlib.mesh import Axes, Mesh
from shardlib.sharding import Move, plan
from shardlib.spec import Spec
from shardlib.types import short
from shardlib.zero import Layout

if TYPE_CHECKING:
    from rich.table import Table  # rich takes a while to load: at first use

_NAMES = {"sum": "psum", "gather": "all_gather", "scatter": "psum_scatter", "exchange": "all_to_all", "slice": "slice"}
_COLOURS = "blue green magenta cyan red yellow bright_blue bright_green bright_magenta bright_cyan".split()


def show(x: Any, params: Any = None, *, axes: Axes | None = None) -> None:
    """Print an array (which rank holds which piece), a tree of arrays (a row per leaf), or a layout.

    `show(layout, params)`, params being arrays or abstract ones, prints for every leaf where it is cut and the
    collectives of each arrow with the bytes that a rank sends: `enter` (params -> compute, once a step), `reduce`
    (pending gradients -> grads, every micro-batch), `update` (grads -> opt, once a step), `leave` (opt -> params).
    `axes`: those over which the loss is a sum; by default those that the layout cuts or sums gradients over.
    """
    from rich.console import Console

    if isinstance(x, Layout):
        if params is None:
            raise SpecError("show(layout, params): the arrays, or sl.abstract ones, say how long leaves are")
        title, table = _layout(x, params, axes)
    elif isinstance(x, Array):
        title, table = f"{short(x)} `{x.spec}` on {x.mesh.name}", _array(x)
    else:
        title, table = "", _tree(x)
    console = Console()
    console = console if console.is_terminal else Console(width=1000)  # a notebook scrolls, a file has no width
    if title:
        console.print(title, markup=False, highlight=False)
    console.print(table)


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table()
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


# ---- trees


def _tree(x: Any) -> "Table":
    table = _table("path", "spec", "global", "here", "bytes", "bytes here")
    whole = held = 0
    for path, leaf in zip(tree.paths(x), tree.leaves(x), strict=True):
        if not isinstance(leaf, Tensor):
            table.add_row(path, "", type(leaf).__name__, "", "", "")
            continue
        size, here = leaf.numel() * leaf.dtype.itemsize, math.prod(_local(leaf)) * leaf.dtype.itemsize
        whole, held = whole + size, held + here
        spec = str(leaf.spec) if isinstance(leaf, Array) else "(plain)"
        table.add_row(path, spec, short(leaf), str(list(_local(leaf))), amount(size), amount(here))
    table.add_section()
    table.add_row("all", "", "", "", amount(whole), amount(held))
    return table


def _local(leaf: Tensor) -> tuple[int, ...]:
    is_array = isinstance(leaf, Array)
    return cuts.padded_shape(leaf.spec, leaf.shape, leaf.mesh.shape) if is_array else tuple(leaf.shape)


# ---- arrays


def _array(x: Array) -> "Table":
    """A grid of the pieces of one or two dimensions; of more, a row for each piece."""
    sizes = x.mesh.shape
    held: dict[tuple[slice, ...], list[int]] = {}
    for rank in range(x.mesh.total):
        at = cuts.slices(x.spec, x.shape, sizes, x.mesh.coordinates(rank))
        held.setdefault(tuple((s.start, s.stop) for s in at), []).append(rank)  # type: ignore[arg-type]
    cell = {at: f"[{_COLOURS[i % len(_COLOURS)]}]{_ranks(r)}[/]" for i, (at, r) in enumerate(held.items())}
    if x.dim() not in (1, 2):
        table = _table("piece", "held by")
        for at, said in cell.items():
            table.add_row(", ".join(_range(part) for part in at) or "all", said)
        return table
    rows, columns = ([*dict.fromkeys(at[i] for at in held)] for i in (0, x.dim() - 1))
    columns = columns if x.dim() == 2 else [()]
    table = _table("", *(_range(c) if c else "" for c in columns))
    for row in rows:
        table.add_row(_range(row), *(cell[(row, c) if c else (row,)] for c in columns))  # type: ignore[index]
        table.add_section()
    return table


def _range(part: Any) -> str:
    return f"{part[0]}:{part[1]}"


def _ranks(ranks: Sequence[int]) -> str:
    said = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {said}"


# ---- layouts


def sent(src: Spec, dst: Spec, shape: Sequence[int], itemsize: int, mesh: Mesh) -> list[tuple[Move, int]]:
    """The collectives that bring a leaf from one spec to another, each with the bytes that a rank sends."""
    out, chains = [], src.chains

    def elements(of: Any) -> int:
        return math.prod(cuts.padded_length(n, c, mesh.shape) for n, c in zip(shape, of, strict=True))

    for move in plan(src, dst, shape, mesh):
        size, chains = elements(chains) * itemsize, move.after(chains)
        n = 0 if move.op == "slice" else bytes_sent(_NAMES[move.op], size, mesh.size(move.axes))
        out.append((move, n))
    return out


def _layout(x: Layout, params: Any, axes: Axes | None) -> "tuple[str, Table]":
    flat = tree.leaves(params)
    if not flat or not all(isinstance(leaf, Array) for leaf in flat):
        raise SpecError("show(layout, params): params are arrays, or sl.abstract ones")
    mesh = flat[0].mesh
    with mesh:
        lay = x.resolve(params)
    trees = [tree.leaves(getattr(lay, name)) for name in ("compute", "params", "grads", "opt")]
    cut = [a for compute, _, *rest in zip(*trees, strict=True) for s in rest for a in s.axes if a not in compute.split]
    over = mesh.ordered(cut) if axes is None else mesh.expand(axes)
    table = _table("path", "global", "compute", "params", "grads", "opt", "enter", "reduce", "update", "leave")
    total = [0, 0, 0, 0]
    for path, leaf, compute, held, grads, opt in zip(tree.paths(params), flat, *trees, strict=True):
        due = tuple(a for a in over if a not in compute.split)
        pending = compute.with_pending(due)
        summed = grads.with_pending(a for a in due if a not in grads.axes)
        arrows = ((held, compute), (pending, summed), (summed, opt), (opt, held))
        said = []
        for i, (src, dst) in enumerate(arrows):
            moves = sent(src, dst, leaf.shape, leaf.dtype.itemsize, mesh)
            total[i] += sum(n for _, n in moves)
            said.append("\n".join(f"{_NAMES[m.op]} {','.join(m.axes)} {amount(n)}" for m, n in moves))
        table.add_row(path, short(leaf), *map(str, (compute, held, grads, opt)), *said)
    table.add_section()
    table.add_row("sent by a rank", "", "", "", "", "", *map(amount, total))
    return f"mesh {mesh.name}; the loss is a sum over {', '.join(over) or 'no axis'}", table
