"""Moving values between specs inside a per-device function: `reshard` and `gather` turn the difference of two specs
into collectives.

A dimension's chain of axes changes at its end. `plan` finds the cheapest way in elements sent per rank; a collective
costs a quarter of the value on top. So sums are scattered rather than made whole, what is left of them is made on small
values, and nothing goes through more collectives for the sake of a few elements.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from shardlib import collectives as c
from shardlib import layout, tree
from shardlib.errors import SpecError, dimensions, listing
from shardlib.mesh import Axes, Mesh
from shardlib.parts import once
from shardlib.spec import Chains, Spec, as_spec
from shardlib.types import Leaf, Region, padding_allowed, region


@dataclass(frozen=True)
class Move:
    """One collective of a plan over `axes`: `sum`; `gather`, `scatter` or `slice` (which sends nothing) along `dim`; or
    `exchange`, which gathers along `dim` and splits along `to`."""

    op: str
    axes: tuple[str, ...]
    dim: int = -1
    to: int = -1

    def after(self, chains: Chains) -> Chains:
        """The chains once it is done."""
        out = list(chains)
        if self.op in ("gather", "exchange"):
            out[self.dim] = out[self.dim][: -len(self.axes)]
        if self.op != "sum" and self.op != "gather":
            at = self.to if self.op == "exchange" else self.dim
            out[at] = out[at] + self.axes
        return tuple(out)


def plan(src: Spec, dst: Spec, shape: Sequence[int], mesh: Mesh) -> list[Move]:
    """The collectives that turn a value of spec `src` into one of spec `dst`; sends nothing, so it can be shown."""
    if len(src.dims) != len(dst.dims):
        raise dst.error(f"`{src}` -> `{dst}`: {dimensions(len(src.dims))} cannot become {len(dst.dims)}")
    made = [a for a in dst.pending if a not in src.pending]
    if made:
        raise dst.error(f"`{src}` -> `{dst}`: no sum over {listing(made)} is pending on the left", made[0])
    pending, keep, sizes = frozenset(src.pending), frozenset(dst.pending), tuple(mesh.shape.items())
    return list(_cheapest(_Search(src.chains, dst.chains, pending, keep, tuple(shape), sizes)))


@dataclass(frozen=True)
class _Search:
    """What a value is at the start and the goal, and what leads from one to the other."""

    start: Chains
    goal: Chains
    pending: frozenset[str]
    keep: frozenset[str]
    shape: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    def moves(self, chains: Chains, pending: frozenset[str]) -> Iterator[Move]:
        """What may lead on from a state."""
        due = tuple(a for a in self.sizes if a in pending and a not in self.keep)  # sums to make
        held = {a for chain in chains for a in chain} | pending
        wanted = tuple(a for chain in self.goal for a in chain)
        free = tuple(a for a in wanted if a not in held)  # splits to make
        dims = [i for i, chain in enumerate(self.start) if chain != self.goal[i]]
        for axes in dict.fromkeys([due, *((a,) for a in due)] if due else []):
            yield Move("sum", axes)
        for i in dims:
            chain, rest = chains[i], _rest(chains[i], self.goal[i])
            for at in range(len(chain) - len(rest), len(chain)):
                axes = chain[at:]
                if self.at_once(i, chain[:at], axes):
                    yield Move("gather", axes, i)
                    to = [j for j in dims if j != i and self.at_once(j, chains[j], axes)]
                    yield from (Move("exchange", axes, i, j) for j in to if any(a in wanted for a in axes))
            more = () if rest else _rest(self.goal[i], chain)
            for axes in dict.fromkeys([*(more[:n] for n in range(len(more), 0, -1)), *((a,) for a in due + free)]):
                for op, among in (("scatter", due), ("slice", free)):
                    if all(a in among for a in axes) and self.at_once(i, chain, axes):
                        yield Move(op, axes, i)

    def at_once(self, dim: int, chain: tuple[str, ...], axes: tuple[str, ...]) -> bool:
        """Whether one collective can cut a dimension over `axes`, after `chain`: the nested cuts are even, and the
        order is that of the mesh, in which groups count their ranks."""
        ordered = axes == tuple(a for a in self.sizes if a in axes)
        length = layout.padded_length(self.shape[dim], chain, self.sizes)
        return len(axes) == 1 or (ordered and length % self.ways(axes) == 0)

    def ways(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def held(self, chains: Chains) -> int:
        """The elements that a rank holds."""
        return math.prod(layout.padded_length(n, c, self.sizes) for n, c in zip(self.shape, chains, strict=True))

    def cost(self, m: Move, before: Chains, after: Chains) -> int:
        """Elements that a rank sends and a quarter of the value, times 4 and the number of ranks: a whole number."""
        n, total, a = self.ways(m.axes), self.ways(self.sizes), self.held(before)
        if n == 1 or m.op == "slice":
            return 0
        parts = {"sum": 2 * a, "gather": a * n, "scatter": self.held(after) * n, "exchange": a}[m.op]
        return 4 * parts * (n - 1) * total // n + self.held(self.start) * total


def _rest(chain: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """What follows in `chain` where it parts from `other`."""
    k = next((k for k, (a, b) in enumerate(zip(chain, other, strict=False)) if a != b), min(len(chain), len(other)))
    return chain[k:]


@lru_cache(maxsize=4096)
def _cheapest(search: _Search) -> tuple[Move, ...]:
    """Dijkstra's algorithm over what the value can be on the way: its chains and its pending sums."""
    order, done = itertools.count(1), set()
    queue: list[Any] = [(0, 0, 0, (search.start, search.pending), ())]
    while True:
        spent, count, _, state, moves = heapq.heappop(queue)
        if state == (search.goal, search.keep):
            return moves
        if state not in done:
            done.add(state)
            for m in search.moves(*state):
                after = m.after(state[0])
                cost = spent + search.cost(m, state[0], after)
                heapq.heappush(queue, (cost, count + 1, next(order), (after, state[1].difference(m.axes)), (*moves, m)))


def _fit(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` cut or zero-padded to `length` along `dim`."""
    n = x.shape[dim]
    if n >= length:
        return x if n == length else x.narrow(dim, 0, length)
    zeros = [0, 0] * (x.dim() - 1 - dim) + [0, length - n]
    return torch.nn.functional.pad(x, zeros)


def _perform(here: Region, x: Tensor, m: Move, chains: Chains, shape: tuple[int, ...], invariant: bool) -> Tensor:
    """One move on a value; `chains` are those after it."""
    if m.op == "sum":
        return c._psum(x, m.axes)

    def length(dim: int) -> int:
        return layout.padded_length(shape[dim], chains[dim], here.mesh.shape)

    if m.op == "gather":
        return _fit(c._all_gather(x, m.axes, m.dim, invariant, here.reduce), m.dim, length(m.dim))
    cut = m.to if m.op == "exchange" else m.dim
    x = _fit(x, cut, length(cut) * here.mesh.size(m.axes))
    if m.op == "exchange":
        return _fit(c._all_to_all(x, m.axes, m.to, m.dim), m.dim, length(m.dim))
    return c._psum_scatter(x, m.axes, m.dim) if m.op == "scatter" else _slice(here, x, m.axes, m.dim)


def _slice(here: Region, x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
    if all(here.over(x, a) == "I" for a in axes):
        return c._own_slice(x, axes, dim)
    pieces = x.unflatten(dim, (here.mesh.size(axes), -1))  # equal, but differently used: its gradient is pending
    return pieces.index_select(dim, c.axis_index(axes).reshape(1)).squeeze(dim)


def leaf_of(x: Any, what: str) -> Leaf:
    """The leaf that `x` is, or an error that says how it lost its spec."""
    found = region().leaves.get(x) if isinstance(x, Tensor) else None
    if found is None:
        if not isinstance(x, Tensor):
            raise SpecError(f"{what}: a tensor is needed, found {type(x).__name__}")
        axes, mend = region().axes_of(region().type_of(x), "V"), "Do this first and compute after"
        if axes:
            mend += f", or write what is split: sl.all_gather('a/{axes[0]} b -> a b', x)"
        elif what.startswith("gather"):
            mend = "It is equal on all ranks: there is nothing to gather"
        raise SpecError(
            f"{what}: {region().describe(x)} is a computed value; only arguments of the per-device function, as they "
            f"came in, have names that say what is split.\n  {mend}"
        )
    if x.dim() != found.spec.ndim:
        raise SpecError(
            f"{what}: the leaf `{found.spec}` has {dimensions(x.dim())} here (inside vmap one is hidden, and a spec "
            "counts all): gather it outside of vmap, or use a pattern such as all_gather('a/x b -> a b', x)"
        )
    return found


def move(x: Tensor, dst: Spec, invariant: bool = True) -> Tensor:
    """One leaf inside a per-device function, brought from its spec to `dst`. Sums and gathers give invariant values,
    with `invariant=False` replicated ones (whose gradient is scattered back)."""
    here = region()
    if not here.typed:
        known = here.leaves.get(x)
        return x if known is None else settle(x.view_as(x), Leaf(dst, known.shape))
    leaf = leaf_of(x, "reshard")
    src = leaf.spec
    moves = plan(src, dst, leaf.shape, here.mesh)
    chains = src.chains
    with padding_allowed():
        for m in moves:
            chains = m.after(chains)
            x = _perform(here, x, m, chains, leaf.shape, invariant)
        x = x if moves else x.view_as(x)  # what comes in keeps its spec
    named = (replace(b, name=b.name if a.name == "_" else a.name) for a, b in zip(src.dims, dst.dims, strict=True))
    final = replace(dst, dims=tuple(named)).noting(src)
    return settle(x, Leaf(final, leaf.shape))


def settle(x: Tensor, leaf: Leaf) -> Tensor:
    """Note on `x` which leaf it is now."""
    here = region()
    here.padded.discard(x)
    return here.mark(x, leaf, not layout.is_even(leaf.spec, leaf.shape, here.mesh.shape))


def gather_local(x: Any, axes: Axes | None) -> Any:
    """`gather` inside a per-device function: the axes removed from the leaves split over them; others as they are."""
    mesh = region().mesh
    if not region().typed:
        return x
    drop, moved = tuple(mesh.shape) if axes is None else mesh.expand(axes), once(move)

    def one(path: str, leaf: Any) -> Any:
        spec = leaf_of(leaf, f"gather: `{path}`" if path else "gather").spec
        whole = spec.without(a for a in drop if a in spec.split)
        return moved(leaf, whole, False) if whole.chains != spec.chains else leaf

    flat, treedef = tree.flatten(x)
    return tree.unflatten(treedef, map(one, tree.paths(x), flat))


def reshard_local(x: Any, specs: Any) -> Any:
    """`reshard` inside a per-device function."""
    mesh, moved = region().mesh, once(move)

    def one(path: str, leaf: Any, said: Any) -> Tensor:
        has = leaf_of(leaf, f"reshard: `{path}`" if path else "reshard").spec
        return moved(leaf, mesh.resolve(as_spec(said).expand(has.ndim)))

    flat, treedef = tree.flatten(x)
    return tree.unflatten(treedef, map(one, tree.paths(x), flat, tree.broadcast(specs, x, "reshard")))
