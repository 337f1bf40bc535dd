"""What one call of a pipeline is given, as its functions take it: parameters by stage, the batch by micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import optree
from torch import Tensor

from shardlib import collectives as c
from shardlib import layout as cuts
from shardlib import tree
from shardlib.accumulate import cut, number
from shardlib.errors import ScheduleError, SpecError
from shardlib.graph.trace import Meta, meta
from shardlib.mesh import Inner
from shardlib.parts import Part, places
from shardlib.pipeline.actions import Action
from shardlib.pipeline.schedule import Schedule
from shardlib.pipeline.stages import Inputs
from shardlib.spec import Dim, Spec
from shardlib.types import Leaf, padding_allowed, region
from shardlib.zero import Layout


def stacked_over(spec: Spec, axis: str) -> bool:
    """Whether a leaf is stacked along an axis: a leading dimension that `stack` made is split over it."""
    return any(axis in d.axes for d in spec.dims[: spec.stacked])


def on(schedule: Schedule | Callable[[int], Schedule], ranks: int) -> Schedule:
    """The schedule for so many ranks."""
    made = schedule if isinstance(schedule, Schedule) else schedule(ranks)
    if not isinstance(made, Schedule):
        raise ScheduleError(
            f"the schedule, called with the {ranks} ranks, gives {made!r} and no Schedule: take sl.schedules.gpipe(4), "
            "which is given micro-batches, or a function of the ranks that returns sl.Schedule(lists)"
        )
    return made


class Arguments:
    """Parameters, batch and key of one call in a region.

    `own` and `rest`: the positions of the leaves that are stacked along the axis, and of the others, each once;
    `layers` of each stage; `chunks`: for each of `own` what each of a rank's stages has of it; `batches`, with their
    `numbers` among the `count` that the whole batch is cut into along `dim`. By position `uses`: the spec in which a
    stage uses a leaf that the schedule gathers; `sums`: that in which gradients add up which the schedule reduces.
    """

    def __init__(
        self,
        schedule: Schedule | Callable[[int], Schedule],
        axis: str,
        params: Any,
        batch: Any,
        extra: Any,
        key: Tensor | None,
        part: Part | None,
        layout: Layout | None,
    ) -> None:
        self.axis, self.here, self.part = axis, region(), part
        mesh = self.here.mesh
        if axis not in mesh.shape:
            raise SpecError(f"the pipeline runs over `{axis}`, which is no axis of {mesh!r}: make_mesh({axis}=2, ...)")
        self.ranks, self.inner = mesh.shape[axis], Inner.of(mesh, axis)
        self.schedule = on(schedule, self.ranks)
        if self.schedule.ranks != self.ranks:
            raise ScheduleError(f"the schedule is for {self.schedule.ranks} ranks, `{axis}` has {self.ranks}")
        self.flat, self.structure = tree.flatten(params)
        self.places = places(self.flat)
        leaves = [self.here.leaves.get(x) for x in self.flat]
        self.stacked = [leaf is not None and stacked_over(leaf.spec, axis) for leaf in leaves]
        self.own, self.rest = ([i for i in sorted({*self.places}) if self.stacked[i] == s] for s in (True, False))
        self.uses, self.sums = self._moved(layout)
        if self.sums:
            self.schedule = self.schedule.reducing
        self.layers = self._layers()
        self.chunks = [self._chunks(i) for i in self.own]
        self.batches, self.dim, self.numbers, self.count = self._micro_batches(batch)
        self.extra = extra
        for path, x in zip(tree.paths(extra), tree.leaves(extra), strict=True):
            if self.here.over(x, axis) != "I":
                raise SpecError(
                    f"`{path}` of extra is {self.here.describe(x)}: every rank of `{axis}`, the axis of the pipeline, "
                    "has whole extra"
                )
        self.key = [] if key is None else [key]

    def leaf(self, i: int) -> Leaf:
        """What the leaf at a position is."""
        found = self.here.leaves.get(self.flat[i])
        assert found is not None
        return found

    @cached_property
    def paths(self) -> list[str]:
        """Of all leaves."""
        return tree.paths(tree.unflatten(self.structure, self.flat))

    def trained(self, positions: Sequence[int]) -> list[int]:
        """Which of some leaves have a gradient, by their place among these."""
        sources = self.places if self.part is None else self.part.sources
        return [k for k, i in enumerate(positions) if sources[i] == i and self.flat[i].is_floating_point()]

    def _moved(self, layout: Layout | None) -> tuple[dict[int, Spec], dict[int, Spec]]:
        if layout is None:
            return {}, {}
        compute = tree.leaves(layout.compute)
        uses = {i: compute[i] for i in self.own if compute[i].chains != self.leaf(i).spec.chains}
        if self.part is None:
            return uses, {}
        trained = [i for i, source in enumerate(self.part.sources) if source == i]
        sums = dict(zip(trained, tree.leaves(layout.grads), strict=True))
        return uses, {i: s for i, s in sums.items() if i in uses or self._cut_further(s, compute[i])}

    def _cut_further(self, sums: Spec, compute: Spec) -> bool:
        """Whether gradients add up in pieces of those that the functions give, of each layer its own."""
        stacked = compute.stacked
        return sums.chains != compute.chains and sums.chains[:stacked] == compute.chains[:stacked]

    # ---- layers

    def _layers(self) -> list[int]:
        if not self.own:
            raise SpecError(
                f"no parameter is stacked along `{self.axis}`, the axis of the pipeline: write blocks: Block = "
                f'sl.stack("layers/{self.axis}"), or sl.stack(specs, "layers/{self.axis}")'
            )
        v, lengths = self.schedule.stages // self.ranks, set[int]()
        for i in self.own:
            spec, shape = self.leaf(i)
            at = next(d for d, dim in enumerate(spec.dims) if self.axis in dim.axes)
            if spec.dims[at].axes != (self.axis,) or at > 1 or (shape[0] if at else 1) != v:
                lead = f"layers/{self.axis}" if v == 1 else f"v layers/{self.axis}"
                raise SpecError(
                    f"`{self.paths[i]}` is `{spec}` of shape {shape}; the schedule has {self.schedule.stages} stages, "
                    f'{v} on each of {self.ranks} ranks: stack blocks by sl.stack("{lead}"){f" with v={v}" * (v > 1)}'
                )
            lengths.add(shape[at])
        if len(lengths) > 1:
            raise SpecError(f"the blocks of the pipeline differ in their number of layers: {sorted(lengths)}")
        (n,), sizes = lengths, {self.axis: self.ranks}
        bounds = [cuts.bounds(n, (self.axis,), sizes, {self.axis: r}) for r in range(self.ranks)]
        counts = [stop - start for start, stop in bounds]
        if 0 in counts:
            empty = Action("F", counts.index(0), 0)
            rank = self.schedule.placement[empty.stage]
            raise SpecError(
                f"rank {rank}, step {self.schedule.lists[rank].index(empty)}: {empty} is of a stage without layers: "
                f"`{self.paths[self.own[0]]}` has {n} layers{' in each run' * (v > 1)}, which are {counts} on the "
                f"{self.ranks} ranks of `{self.axis}`; take more layers or fewer ranks"
            )
        return [counts[s % self.ranks] for s in range(self.schedule.stages)]

    def moves(self, chunk: int) -> tuple[int, ...] | None:
        """From which ranks the ranks get a chunk, where the schedule has other stages there than row-major order."""
        p, at = self.ranks, self.schedule.placement
        source = tuple(next(s % p for s in range(chunk * p, chunk * p + p) if at[s] == r) for r in range(p))
        return None if source == tuple(range(p)) else source

    def _chunks(self, i: int) -> list[Tensor]:
        x, (spec, shape) = self.flat[i], self.leaf(i)
        if self.axis in spec.dims[0].axes:
            return [x]
        out = []
        with padding_allowed():
            for chunk in range(shape[0]):
                one, source = x.select(0, chunk), self.moves(chunk)
                out.append(one if source is None else c._ppermute(one, (self.axis,), source))
        return out

    # ---- micro-batches

    def _micro_batches(self, batch: Any) -> tuple[list[Any], Dim | None, list[Tensor], int]:
        here, n, outer = self.here, self.schedule.microbatches, self.here.piece
        flat = list(zip(tree.paths(batch), tree.leaves(batch), strict=True))
        for path, x in flat:
            if here.over(x, self.axis) != "I":
                raise SpecError(
                    f"`{path}` of the batch is {here.describe(x)}: every rank of `{self.axis}`, the axis of the "
                    "pipeline, has whole micro-batches"
                )
        if n == 1:
            return [batch], outer and outer.dim, [outer.at] if outer else [], outer.count if outer else 1
        leaves = [leaf for _, x in flat if (leaf := here.leaves.get(x)) and leaf.spec.dims]
        split = next((leaf for leaf in leaves if leaf.spec.dims[0].axes), leaves[0] if leaves else None)
        if split is None or split.spec.dims[0].name == "_":
            raise SpecError(
                "micro-batches are cut along the first dimension of the batch's first leaf that is split there; none "
                "has a name: sl.shard(batch, 'batch/dp ...')"
            )
        dim = outer.dim if outer else split.spec.dims[0]
        for path, x in flat:
            leaf = here.leaves.get(x)
            rows = x.shape[leaf.spec.names.index(dim.name)] if leaf and dim.name in leaf.spec.names else 0
            if rows % n:
                raise SpecError(
                    f"the schedule has {n} micro-batches, `{path}` of the batch has {rows} rows (`{dim}`) on each "
                    "rank: take a multiple"
                )
        at = [number(i) if outer is None else outer.at * n + i for i in range(n)]
        return cut(batch, dim.name, n), dim, at, n * (outer.count if outer else 1)

    # ---- what goes in, as it is without the axis

    def _kind(self, kind: str) -> str:
        at = self.here.position[self.axis]
        return kind[:at] + kind[at + 1 :]

    def meta(self, x: Tensor) -> Meta:
        """A value as a function of the pipeline knows it."""
        m = meta(x, self.here)
        assert m.kind is not None
        leaf = m.leaf and Leaf(m.leaf.spec.without((self.axis,)), m.leaf.shape)
        return replace(m, kind=self._kind(m.kind), leaf=leaf)

    def full(self, m: Meta, letter: str) -> Meta:
        """The inverse for a result: its type over the axis is `letter`."""
        at, kind = self.here.position[self.axis], m.kind or self._kind(self.here.invariant)
        return replace(m, kind=kind[:at] + letter + kind[at:], leaf=None)

    def layer_meta(self, k: int, layers: int | None) -> Meta:
        """The leaf number `k` of `own` as a stage of so many layers has it; None: as it lies there, padded."""
        (spec, shape), m = self.leaf(self.own[k]), self.meta(self.chunks[k][0])
        at = 0 if self.axis in spec.dims[0].axes else 1
        n = m.shape[0] if layers is None else layers
        leaf = Leaf(spec.unstack(at).without((self.axis,)), (n, *shape[at + 1 :]))
        return replace(m, shape=(n, *m.shape[1:]), leaf=leaf, padded=False)

    def summed_as(self, i: int) -> Spec | None:
        """The spec of the sum of the gradients of the leaf at a position, in a stage, where the schedule reduces it."""
        return self._in_stage(i, self.sums.get(i))

    def used_as(self, i: int) -> Spec | None:
        """The spec of the leaf at a position, in a stage, where the schedule gathers it."""
        return self._in_stage(i, self.uses.get(i))

    def _in_stage(self, i: int, spec: Spec | None) -> Spec | None:
        """The spec without the axis, and of several runs of stages that of one."""
        runs = self.stacked[i] and self.axis not in self.leaf(i).spec.dims[0].axes
        return spec and spec.unstack(int(runs)).without((self.axis,))

    def inputs(self, blocks: bool, handed: Any) -> Inputs:
        """How a function that takes the blocks, or the rest, gets its arguments."""
        mine = [i if s == blocks else None for i, s in zip(self.places, self.stacked, strict=True)]
        whole = tree.unflatten(self.structure, mine)
        found, structure = tree.flatten(
            _subtree(whole, tree.unflatten(self.structure, self.stacked)) if blocks else whole
        )
        batch, extra = tree.flatten(self.batches[0])[1], tree.flatten(self.extra)[1]
        more = bool(self.key), self.dim, self.count, self.here.reduce
        return Inputs(structure, tuple(found), handed, batch, extra, *more)

    def context(self, k: int) -> list[Tensor]:
        """The flat inputs of every function for micro-batch `k`: its leaves, extra, the key, its number."""
        return [*tree.leaves(self.batches[k]), *tree.leaves(self.extra), *self.key, *self.numbers[k : k + 1]]


def _subtree(whole: Any, marks: Any) -> Any:
    """The part of a tree that holds all marked leaves: down while one child alone has some, to the stacked field."""
    while True:
        kids, _, names, _ = optree.tree_flatten_one_level(marks, namespace=tree.NAMESPACE)
        having = [i for i, kid in enumerate(kids) if any(tree.leaves(kid))]
        stacked = len(having) == 1 and str(names[having[0]]).endswith(".*")
        if len(having) != 1 or isinstance(kids[having[0]], bool) or (all(tree.leaves(marks)) and not stacked):
            return whole
        marks = kids[having[0]]
        whole = optree.tree_flatten_one_level(whole, namespace=tree.NAMESPACE)[0][having[0]]
