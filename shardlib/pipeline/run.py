"""`pipeline`: a loss and its gradient computed by stages on the ranks of one axis, as a schedule says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # the graph that is being traced has no public name

from shardlib import collectives as c
from shardlib import layout as cuts
from shardlib import tree
from shardlib.accumulate import cut, number
from shardlib.autodiff import Aux, GradFn, as_gradient, aux_of
from shardlib.errors import ScheduleError, SpecError
from shardlib.graph.nodes import inputs, sliced, used_placeholders
from shardlib.graph.trace import Meta, added, call, is_inlining, meta
from shardlib.mean import Mean, Term, divide, whole
from shardlib.mesh import Inner, Mesh
from shardlib.parts import Memo, Part, places
from shardlib.pipeline.schedule import Schedule
from shardlib.pipeline.stages import Inputs, Traced, takes_another, traced
from shardlib.pipeline.turns import Work, own_turn
from shardlib.simulate import current_rank
from shardlib.spec import Dim, Spec
from shardlib.switch import Switch
from shardlib.types import Leaf, padding_allowed, paused, region, valueless
from shardlib.zero import Layout


def pipeline(
    first: Callable[..., Any],
    stage: Callable[..., Any],
    last: Callable[..., Any],
    schedule: Schedule | Callable[[int], Schedule],
    axis: str = "pp",
) -> "Pipeline":
    """A loss for `step` and `evaluate` whose layers lie on the ranks of `axis`.

    `first(params, mb, key) -> x`, `stage(blocks, x, mb, key) -> x`, `last(params, x, mb, key) -> Mean`, per-device
    functions; a function that has no `key` gets none; `x` is any tree of tensors, `last` may return metrics as a loss
    does. `blocks`: the parameters that are stacked along `axis` (`blocks: Block = sl.stack("layers/pp")`), this
    stage's layers of them; `params`: the rest, with None in place of the blocks; `mb`: a micro-batch, whole on every
    rank of `axis`. With `stack("v layers/pp")` a rank holds v stages: `blocks[i]` of a schedule's stages in order.

    A leaf of the rest may be split over `axis` at rest (`"vocab/tp/pp model"`): `step` gathers it before the first
    action and sums its gradient after the last. The batch is cut in as many micro-batches as the schedule
    (`sl.schedules.one_f_one_b(8)`, or a `Schedule`) has; `accumulate=` of `step` repeats the schedule.
    Raises `SpecError` for a collective over `axis` in one of the functions, for fewer layers than stages, and for a
    schedule that is not for so many ranks.
    """
    return Pipeline(first, stage, last, schedule, axis)


class Pipeline(GradFn):
    """What `pipeline` returns: a `GradFn`."""

    def __init__(self, first: Any, stage: Any, last: Any, schedule: Any, axis: str) -> None:
        super().__init__(last)
        if not (
            callable(first)
            and callable(stage)
            and callable(last)
            and callable(schedule) | isinstance(schedule, Schedule)
        ):
            raise SpecError(
                "pipeline(first, stage, last, schedule): three functions, and one of sl.schedules or a Schedule"
            )
        self.functions = {"first": first, "stage": stage, "last": last}
        self.schedule, self.axis = schedule, axis
        self._traced: dict[Any, Traced] = Memo()
        self._work: dict[Any, tuple[Work, Switch]] = Memo()
        self._weights: dict[int, Any] = Memo()

    def laid_out(self, layout: Layout) -> Layout:
        """The layout with leaves that are not stacked over the axis whole over it where functions and sums have them."""

        def one(s: Spec) -> Spec:
            return s if self._stacked(s) or self.axis not in s.split else s.without((self.axis,))

        return replace(layout, compute=tree.map_(one, layout.compute), grads=tree.map_(one, layout.grads))

    def _stacked(self, spec: Spec) -> bool:
        return any(self.axis in d.axes for d in spec.dims[: spec.stacked])

    def forward(self, *args: Any, key: Any = None, extra: Any = None) -> tuple[Mean, Aux]:
        """The loss itself: the forward actions of the schedule."""
        params, batch = args
        here = _Call(self, params, batch, key, None)
        totals, metrics = here.totals_and_metrics(here.run([]))
        return here.mean(totals), metrics

    def __call__(
        self,
        *args: Any,
        key: Any = None,
        extra: Any = None,
        seeds: Sequence[Tensor] | None = None,
        part: Part | None = None,
    ) -> Any:
        params, batch = args
        here = _Call(self, params, batch, key, part)
        if seeds is None:
            mean = here.mean([None] * len(here.last(False).coefficients))
            wanted = [t.coefficient * divide(torch.ones_like(t.weight), whole(t.weight)) for t in mean.terms]
        else:
            wanted = list(seeds)
        out = here.run(wanted)
        totals, aux = here.totals_and_metrics(out)
        mean, grads = here.mean(totals), here.gradients(out)
        if seeds is not None:
            return (mean, aux), grads
        return (mean.value if aux.metrics is None else (mean.value, aux)), grads


class _Call:
    """One call of a pipeline in a region: its arguments as the functions take them."""

    def __init__(self, of: Pipeline, params: Any, batch: Any, key: Any, part: Part | None) -> None:
        self.of, self.axis, self.here = of, of.axis, region()
        here = self.here
        here.asked = True  # an untyped run would not know what it is given
        mesh = here.mesh
        if self.axis not in mesh.shape:
            raise SpecError(f"pipeline over `{self.axis}`: the mesh is {mesh!r}; make_mesh({self.axis}=2, ...)")
        self.ranks, self.inner = mesh.shape[self.axis], Inner.of(mesh, self.axis)
        self.schedule = self._schedule()
        self.flat, self.structure = tree.flatten(params)
        self.places = places(self.flat)
        leaves = [here.leaves.get(x) for x in self.flat]
        self.blocks = [leaf is not None and of._stacked(leaf.spec) for leaf in leaves]
        self.part = part
        self.own = self._distinct(True)
        self.rest = self._distinct(False)
        self.layers = self._layers()
        self.chunked = [self._chunks(self.flat[i]) for i in self.own]
        self.batches, self.dim, self.numbers, self.count = self._micro_batches(batch)
        self.batch_structure = tree.flatten(self.batches[0])[1]
        takes = any(takes_another(f, 2 if n == "first" else 3) for n, f in of.functions.items())
        self.key = [key] if isinstance(key, Tensor) and takes else []

    def _schedule(self) -> Schedule:
        found = self.of.schedule
        found = found if isinstance(found, Schedule) else found(self.ranks)
        if found.ranks != self.ranks:
            raise ScheduleError(f"the schedule is for {found.ranks} ranks, `{self.axis}` has {self.ranks}")
        return found

    def _distinct(self, blocks: bool) -> list[int]:
        """The positions of the leaves that are stacked over the axis, or that are not, each once."""
        return [i for i, at in enumerate(self.places) if at == i and self.blocks[i] == blocks]

    def _leaf(self, i: int) -> Leaf:
        found = self.here.leaves.get(self.flat[i])
        assert found is not None
        return found

    # ---- layers

    def _layers(self) -> list[int]:
        """How many layers each stage has."""
        paths = tree.paths(tree.unflatten(self.structure, self.flat))
        if not self.own:
            raise SpecError(
                f"pipeline over `{self.axis}`: no parameter is stacked along it; write blocks: Block = "
                f'sl.stack("layers/{self.axis}"), or sl.stack(specs, "layers/{self.axis}")'
            )
        v, found = self.schedule.stages // self.ranks, set()
        for i in self.own:
            spec, shape = self._leaf(i).spec, self._leaf(i).shape
            at = next(d for d, dim in enumerate(spec.dims) if self.axis in dim.axes)
            said = f"pipeline: `{paths[i]}` (`{spec}` of shape {shape})"
            if spec.dims[at].axes != (self.axis,) or at > 1 or (shape[0] if at else 1) != v:
                lead = f"layers/{self.axis}" if v == 1 else f"v layers/{self.axis}"
                raise SpecError(
                    f"{said}: the schedule has {self.schedule.stages} stages on {self.ranks} ranks, {v} on each, so blocks "
                    f'are stacked as sl.stack("{lead}")' + f" with v={v}" * (v > 1)
                )
            if (
                shape[at] < self.ranks
                or cuts.bounds(shape[at], (self.axis,), {self.axis: self.ranks}, {self.axis: self.ranks - 1})[0]
                >= shape[at]
            ):
                raise SpecError(
                    f"{said}: {shape[at]} layers leave a stage of {self.ranks} without any: take at least one more for "
                    "each, or fewer ranks"
                )
            found.add(shape[at])
        if len(found) > 1:
            raise SpecError(f"pipeline: blocks differ in their number of layers: {sorted(found)}")
        (n,) = found
        sizes = {self.axis: self.ranks}
        ends = [cuts.bounds(n, (self.axis,), sizes, {self.axis: r}) for r in range(self.ranks)]
        return [ends[s % self.ranks][1] - ends[s % self.ranks][0] for s in range(self.schedule.stages)]

    def _moves(self, chunk: int) -> tuple[int, ...] | None:
        """Where a rank's chunk comes from, if the schedule has other stages there than the row-major order."""
        p = self.ranks
        source = tuple(
            next(s % p for s in range(chunk * p, chunk * p + p) if self.schedule.placement[s] == r) for r in range(p)
        )
        return None if source == tuple(range(p)) else source

    def _chunks(self, x: Tensor) -> list[Tensor]:
        """A block leaf as the rank's stages have it."""
        leaf = self.here.leaves.get(x)
        assert leaf is not None
        if self.axis in leaf.spec.dims[0].axes:
            return [x]
        out = []
        with padding_allowed():
            for chunk in range(leaf.shape[0]):
                one = x.select(0, chunk).contiguous()
                source = self._moves(chunk)
                out.append(one if source is None else c._ppermute(one, (self.axis,), source))
        return out

    # ---- micro-batches

    def _micro_batches(self, batch: Any) -> tuple[list[Any], Dim | None, list[Tensor], int]:
        """The micro-batches, along which dimension they are cut, their numbers in the whole batch, and how many there
        are in that."""
        here, n = self.here, self.schedule.microbatches
        for path, x in zip(tree.paths(batch), tree.leaves(batch), strict=True):
            if here.over(x, self.axis) != "I":
                raise SpecError(
                    f"pipeline: `{path}` of the batch is {here.describe(x)}: every rank of `{self.axis}` has the whole "
                    "micro-batch, since first, stages and last all take it"
                )
        outer = here.piece
        if n == 1:
            return [batch], outer and outer.dim, [outer.at] if outer else [], outer.count if outer else 1
        leaves = [leaf for x in tree.leaves(batch) if (leaf := here.leaves.get(x)) and leaf.spec.dims]
        split = next((leaf for leaf in leaves if leaf.spec.dims[0].axes), leaves[0] if leaves else None)
        if split is None or split.spec.dims[0].name == "_":
            raise SpecError(
                "pipeline: micro-batches are cut along the first dimension of the batch's first leaf that is split "
                "there; none has a name: sl.shard(batch, 'batch/dp ...')"
            )
        dim = outer.dim if outer else split.spec.dims[0]
        for path, x in zip(tree.paths(batch), tree.leaves(batch), strict=True):
            leaf = here.leaves.get(x)
            rows = x.shape[leaf.spec.names.index(dim.name)] if leaf and dim.name in leaf.spec.names else 0
            if rows % n:
                raise SpecError(
                    f"pipeline: the schedule has {n} micro-batches, `{path}` of the batch has {rows} rows of "
                    f"`{dim.name}` on each rank: take a multiple"
                )
        at = [number(i) if outer is None else outer.at * n + i for i in range(n)]
        return cut(batch, dim.name, n), dim, at, n * (outer.count if outer else 1)

    # ---- metas, without the axis

    def _kind(self, kind: str) -> str:
        at = self.here.position[self.axis]
        return kind[:at] + kind[at + 1 :]

    def _full(self, m: Meta, letter: str) -> Meta:
        """A result as all ranks have it."""
        at = self.here.position[self.axis]
        kind = m.kind or self._kind(self.here.invariant)
        return replace(m, kind=kind[:at] + letter + kind[at:])

    def _meta(self, x: Tensor) -> Meta:
        m = meta(x, self.here)
        assert m.kind is not None
        leaf = m.leaf and Leaf(m.leaf.spec.without((self.axis,)), m.leaf.shape)
        return replace(m, kind=self._kind(m.kind), leaf=leaf)

    def _own_meta(self, i: int, layers: int | None) -> Meta:
        """A leaf of the blocks as a stage of so many layers has it; None: as it lies there."""
        m, leaf = self._meta(self.chunked[self.own.index(i)][0]), self._leaf(i)
        n = m.shape[0] if layers is None else layers
        at = 0 if self.axis in leaf.spec.dims[0].axes else 1
        spec = leaf.spec.unstack(at).without((self.axis,))
        return replace(m, shape=(n, *m.shape[1:]), leaf=Leaf(spec, (n, *leaf.shape[at + 1 :])), padded=False)

    def _trained(self, positions: Sequence[int]) -> list[int]:
        """Which of some leaves have a gradient, by their place among these."""
        sources = self.part.sources if self.part is not None else range(len(self.flat))
        return [k for k, i in enumerate(positions) if sources[i] == i and self.flat[i].is_floating_point()]

    # ---- the three functions

    def _inputs(self, blocks: bool, handed: Any) -> Inputs:
        mine = [x if b == blocks else None for x, b in zip(self.places, self.blocks, strict=True)]
        whole = tree.unflatten(self.structure, mine)
        if blocks:
            whole = _subtree(whole, tree.unflatten(self.structure, self.blocks))
        found, structure = tree.flatten(whole)
        return Inputs(structure, tuple(found), handed, self.batch_structure, bool(self.key), self.dim, self.count)

    def _function(self, what: str, own: list[Meta], handed: list[Meta], structure: Any, grad: bool) -> Traced:
        """A function traced for these parameters and what is handed to it."""
        positions = self.own if what == "stage" else self.rest
        at = tuple(self._trained(positions)) if grad else ()
        how = self._inputs(what == "stage", structure)
        more = [self._meta(x) for x in [*tree.leaves(self.batches[0]), *self.key, *self.numbers[:1]]]
        metas = (*own, *handed, *more)
        key = (what, self.inner.name, metas, how, at, grad)
        if key not in self.of._traced:
            f = self.of.functions[what]
            self.of._traced[key] = traced(f, what, self.inner, metas, how, at, grad)
        return self.of._traced[key]

    def _functions(self, grad: bool) -> tuple[Traced, list[Traced], Traced]:
        rest = [self._meta(self.flat[i]) for i in self.rest]
        none = tree.flatten(None)[1]
        first = before = self._function("first", rest, [], none, grad)
        stages = []
        for n in self.layers:
            own = [self._own_meta(i, n) for i in self.own]
            stages.append(self._function("stage", own, before.given, before.joint.structure, grad))
            before = stages[-1]
        return first, stages, self._function("last", rest, before.given, before.joint.structure, grad)

    def last(self, grad: bool) -> Traced:
        """The last function, traced."""
        return self._functions(grad)[2]

    # ---- running

    def run(self, seeds: list[Tensor]) -> list[Tensor]:
        """The totals, metrics and, with seeds, gradients of the rank."""
        first, stages, last = self._functions(bool(seeds))
        self.traced = first, stages, last
        work = Work(
            self.schedule,
            self.inner,
            self.here.mesh.group((self.axis,)),
            first,
            stages,
            last,
            self.layers,
            [self._meta(self.flat[i]) for i in self.rest],
            [self._own_meta(i, None) for i in self.own],
            [self._meta(x) for x in tree.leaves(self.batches[0])],
            [self._meta(x) for x in self.key],
            [self._meta(x) for x in self.numbers[:1]],
            [replace(self._meta(x), leaf=None) for x in seeds],
        )
        self.work = work
        results = [self._full(m, "P") for m in work.totals]
        if seeds:
            own, rest = work.trained
            letters = "V" * (len(own) * work.chunks) + "P" * len(rest)
            results += [self._full(m, letter) for m, letter in zip(work.gradients, letters, strict=True)]
        if is_inlining():  # what is asked is how things depend on each other
            return self._as_fake(results)
        key = (tuple(map(id, (first, *stages, last))), tuple(work.metas), self.inner.name)
        if key not in self.of._work:
            self.of._work[key] = work, work.switch()
        chunks = [x for each in zip(*self.chunked, strict=True) for x in each]
        batches = [x for b in self.batches for x in tree.leaves(b)]
        flat = [*(self.flat[i] for i in self.rest), *chunks, *batches, *self.key, *self.numbers, *seeds]
        return self._ran("pipeline", self.of._work[key][1], flat, results)

    def _as_fake(self, results: Sequence[Meta]) -> list[Tensor]:
        with paused():
            return [m.label(self.here, m.empty()) for m in results]

    def _ran(self, name: str, module: Any, flat: list[Tensor], results: Sequence[Meta]) -> list[Tensor]:
        """A graph on values, or called by the program that is being traced."""
        flat = [x.contiguous() for x in flat]
        if get_proxy_mode() is not None:
            return call(added(name, module), flat, results)
        if any(valueless(x) for x in flat):
            return self._as_fake(results)
        if isinstance(module, Switch):
            module = own_turn(module, _index(self.here.mesh, self.axis))
        with paused(), torch.no_grad():
            out = module(*flat)
        return [m.label(self.here, x) for m, x in zip(results, out, strict=True)]

    def totals_and_metrics(self, out: list[Tensor]) -> tuple[list[Tensor], Aux]:
        """The totals of the terms, and the metrics of all micro-batches."""
        last = self.traced[2]
        n = len(last.coefficients)
        weights = [x for x in out[:n]]
        _, (_, found) = tree.unflatten(last.joint.structure, [*out[:n], *weights, *out[n : len(self.work.totals)]])
        aux = aux_of(found)
        mean = {k: v if isinstance(v, Mean) else v / self.schedule.microbatches for k, v in (aux.metrics or {}).items()}
        return out[:n], Aux(mean if aux.metrics is not None else None, None)

    def mean(self, totals: Sequence[Tensor | None]) -> Mean:
        """The loss: what was summed, and the weights, which every rank knows from the batch."""
        last = self.last(False)
        if id(last) not in self.of._weights:
            self.of._weights[id(last)] = self._weights_graph(last)
        module, metas = self.of._weights[id(last)]
        sums: list[Tensor] = []
        for k in range(len(self.batches)):
            flat = [self.flat[i] for i in self.rest]
            flat += [*tree.leaves(self.batches[k]), *self.key, *self.numbers[k : k + 1]]
            found = self._ran("weights", module, flat, [self._full(m, "I") for m in metas])
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
        pairs = zip(totals, sums, last.coefficients, strict=True)
        return Mean._of_terms(tuple(Term(total=w if t is None else t, weight=w, coefficient=k) for t, w, k in pairs))  # type: ignore[call-arg]

    def _weights_graph(self, last: Traced) -> tuple[Any, list[Meta]]:
        module = sliced(last.joint.forward, last.weights)
        n = len(self.rest)
        reads = used_placeholders(module)
        handed = range(n, n + self._functions(False)[1][-1].joint.structure.num_leaves)
        if any(reads[i] for i in handed):
            raise SpecError(
                "pipeline: the weight of the loss depends on what the stages computed; a weight says how much each "
                "element counts, and comes from the batch alone: it is known on every rank before anything runs"
            )
        given = inputs(module.graph)
        for i in handed:
            module.graph.erase_node(given[i])
        module.recompile()
        return module, [last.joint.results[i] for i in last.weights]

    def gradients(self, out: list[Tensor]) -> Any:
        """The gradients as a tree like what is differentiated."""
        here, work = self.here, self.work
        own, rest = work.trained
        given = iter(out[len(work.totals) :])
        by_chunk = [[next(given) for _ in own] for _ in range(work.chunks)]
        found: dict[int, Tensor] = {}
        for k, at in enumerate(own):
            i, pieces = self.own[at], []
            for chunk in range(work.chunks):
                g, source = by_chunk[chunk][k], self._moves(chunk)
                pieces.append(g if source is None else c._ppermute(g, (self.axis,), c._inverse(source)))
            x = self.flat[i]
            found[i] = as_gradient(
                here, x, pieces[0] if x.dim() == pieces[0].dim() else torch.stack(pieces), self._path(i)
            )
        for at in rest:
            i = self.rest[at]
            g = next(given)
            if here.over(self.flat[i], self.axis) == "I":
                g = c._psum(g, (self.axis,))
            found[i] = as_gradient(here, self.flat[i], g, self._path(i))
        for i in self._trained_all():
            if i not in found:  # no function uses it
                x = self.flat[i]
                with paused():
                    zeros = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
                here.zeros.set(here.set_type(zeros, here.invariant), True)
                found[i] = as_gradient(here, x, zeros, self._path(i))
        if self.part is None:
            return tree.unflatten(self.structure, [found.get(at) for at in self.places])
        return tree.unflatten(self.structure, [found.get(i) for i in range(len(self.flat))])

    def _trained_all(self) -> list[int]:
        return [self.own[k] for k in self._trained(self.own)] + [self.rest[k] for k in self._trained(self.rest)]

    def _path(self, i: int) -> str:
        return tree.paths(tree.unflatten(self.structure, self.flat))[i]


def _index(mesh: Mesh, axis: str) -> int:
    """The index along an axis of the rank that runs here."""
    rank = current_rank() if mesh.simulate else mesh.rank
    return mesh.coordinates(rank or 0)[axis]


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
