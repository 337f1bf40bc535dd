"""`pipeline`: a loss and its gradient computed by stages on the ranks of one axis, as a schedule says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # the graph that is being traced has no public name

from shardlib import collectives as c
from shardlib import tree
from shardlib.accumulate import added
from shardlib.autodiff import Aux, GradFn, as_gradient, aux_of
from shardlib.errors import SpecError
from shardlib.graph import trace
from shardlib.graph.nodes import inputs, sliced, used_placeholders
from shardlib.graph.program import copied
from shardlib.graph.trace import Meta, call, is_analysing
from shardlib.mean import Mean, divide, whole
from shardlib.parts import Memo, Part
from shardlib.phases import gradients
from shardlib.pipeline.arguments import Arguments, stacked_over
from shardlib.pipeline.schedule import Schedule
from shardlib.pipeline.stages import Traced, takes_another, traced
from shardlib.pipeline.turns import Work
from shardlib.simulate import current_rank
from shardlib.spec import Spec
from shardlib.switch import Switch
from shardlib.types import paused, region, valueless
from shardlib.zero import Layout


def pipeline(
    first: Callable[..., Any],
    stage: Callable[..., Any],
    last: Callable[..., Any],
    schedule: Schedule | Callable[[int], Schedule],
    axis: str = "pp",
) -> "Pipeline":
    """A loss for `step` and `evaluate` whose layers lie on the ranks of `axis`.

    `first(params, mb, key) -> x`, `stage(blocks, x, mb, key) -> x`, `last(params, x, mb, key) -> Mean` are per-device
    functions; one that has no `key` gets none; `x` is any tree of tensors, `last` may return metrics as a loss does.
    `blocks`: this stage's layers of the parameters that are stacked along `axis` (`blocks: Block =
    sl.stack("layers/pp")`; `"v layers/pp"` where a rank has v stages); `params`: all others, None for those; `mb`: a
    micro-batch. A leaf of the others may be split over `axis` at rest (`"vocab/tp/pp model"`): `step` gathers it before
    the first action and sums its gradient after the last. `schedule`: one of `sl.schedules`, `one_f_one_b(8)`, or a
    `Schedule`, in whose micro-batches the batch is cut; `accumulate=` of `step` repeats it.

    Raises `SpecError` for a collective over `axis` inside a function, for a stage without layers, and where blocks are
    not stacked as the schedule has stages; `ScheduleError` for a schedule of another number of ranks.
    """
    told = [f"{f!r}" for f in (first, stage, last, schedule) if not callable(f) and not isinstance(f, Schedule)]
    if told:
        raise SpecError(f"pipeline(first, stage, last, schedule) takes three functions and a schedule; found {told[0]}")
    return Pipeline(first, stage, last, schedule, axis)


class Pipeline(GradFn):
    """What `pipeline` returns: a `GradFn`, which remembers what it has traced."""

    def __init__(self, first: Any, stage: Any, last: Any, schedule: Any, axis: str) -> None:
        super().__init__(last)
        self.functions = {"first": first, "stage": stage, "last": last}
        self.schedule, self.axis = schedule, axis
        takes = (takes_another(f, 2 if n == "first" else 3) for n, f in self.functions.items())
        self.takes_key = any(takes)
        self.traced: dict[Any, Traced] = Memo()
        self.switches: dict[Any, tuple[Work, Switch]] = Memo()
        self.turns: dict[tuple[int, int], Any] = Memo()
        self.weighing: dict[Any, tuple[Traced, Any]] = Memo()

    def laid_out(self, layout: Layout) -> Layout:
        """The layout with leaves that are not stacked along the axis whole over it, but at rest."""

        def one(s: Spec) -> Spec:
            return s if stacked_over(s, self.axis) or self.axis not in s.split else s.without((self.axis,))

        return replace(layout, compute=tree.map_(one, layout.compute), grads=tree.map_(one, layout.grads))

    def forward(self, *args: Any, key: Any = None, extra: Any = None) -> tuple[Mean, Aux]:
        """The loss itself: the forward actions of the schedule."""
        params, batch = args
        here = _Call(self, params, batch, key, None, False)
        totals, aux, _ = here.run([])
        return here.mean(totals), aux

    def __call__(
        self,
        *args: Any,
        key: Any = None,
        extra: Any = None,
        seeds: Sequence[Tensor] | None = None,
        part: Part | None = None,
    ) -> Any:
        params, batch = args
        here = _Call(self, params, batch, key, part, True)
        weights = here.weights()
        if seeds is None:
            pairs = zip(here.last.coefficients, weights, strict=True)
            wanted = [k * divide(torch.ones_like(w), whole(w)) for k, w in pairs]
        else:
            wanted = list(seeds)
        totals, aux, grads = here.run(wanted)
        mean = here.mean(totals, weights)
        if seeds is not None:
            return (mean, aux), grads
        return (mean.value if aux.metrics is None else (mean.value, aux)), grads


class _Call:
    """One call: its arguments, and the functions as they are traced for them."""

    def __init__(self, of: Pipeline, params: Any, batch: Any, key: Any, part: Part | None, grad: bool) -> None:
        region().asked = True  # an untyped run would not know what it is given
        self.of, self.grad = of, grad
        self.given = Arguments(of.schedule, of.axis, params, batch, key if of.takes_key else None, part)
        given = self.given
        rest = [given.meta(given.flat[i]) for i in given.rest]
        self.first = before = self._function("first", rest, [], tree.flatten(None)[1])
        self.stages: list[Traced] = []
        for n in given.layers:
            own = [given.layer_meta(k, n) for k in range(len(given.own))]
            before = self._function("stage", own, before.given, before.joint.structure)
            self.stages.append(before)
        self.last = self._function("last", rest, before.given, before.joint.structure)
        self.handed = range(len(rest), len(rest) + len(before.given))  # among the inputs of the last

    def _function(self, what: str, own: list[Meta], handed: list[Meta], structure: Any) -> Traced:
        """A function traced for these parameters and what is handed to it."""
        given = self.given
        at = tuple(given.trained(given.own if what == "stage" else given.rest)) if self.grad else ()
        how = given.inputs(what == "stage", structure)
        metas = (*own, *handed, *map(given.meta, given.context(0)))
        key = (what, given.inner.name, metas, how, at, self.grad)
        if key not in self.of.traced:
            self.of.traced[key] = traced(self.of.functions[what], what, given.inner, metas, how, at, self.grad)
        return self.of.traced[key]

    def run(self, seeds: list[Tensor]) -> tuple[list[Tensor], Aux, Any]:
        """The totals, the metrics and, with seeds, the gradients."""
        given = self.given
        work = Work(
            schedule=given.schedule,
            mesh=given.inner,
            group=given.here.mesh.group((given.axis,)),
            first=self.first,
            stages=self.stages,
            last=self.last,
            layers=given.layers,
            rest=[given.meta(given.flat[i]) for i in given.rest],
            own=[given.layer_meta(k, None) for k in range(len(given.own))],
            batch=[given.meta(x) for x in tree.leaves(given.batches[0])],
            key=[given.meta(x) for x in given.key],
            number=[given.meta(x) for x in given.numbers[:1]],
            seeds=[replace(given.meta(x), leaf=None) for x in seeds],
        )
        letters = [*"P" * len(work.totals)]
        if seeds:
            own, rest = work.trained
            letters += "V" * len(own) * work.chunks + "P" * len(rest)
        results = [given.full(m, letter) for m, letter in zip(work.results, letters, strict=True)]
        out = self._as_fake(results) if is_analysing() else self._switched(work, seeds, results)
        n = len(work.totals)
        return out[: len(self.last.coefficients)], self._aux(out[:n]), self._gradients(work, out[n:]) if seeds else None

    def _switched(self, work: Work, seeds: list[Tensor], results: list[Meta]) -> list[Tensor]:
        given = self.given
        key = (tuple(map(id, (self.first, *self.stages, self.last))), tuple(work.metas), given.inner.name)
        if key not in self.of.switches:
            self.of.switches[key] = work, work.switch()
        chunks = [x for each in zip(*given.chunks, strict=True) for x in each]
        batches = [x for b in given.batches for x in tree.leaves(b)]
        flat = [*(given.flat[i] for i in given.rest), *chunks, *batches, *given.key, *given.numbers, *seeds]
        return self._ran("pipeline", self.of.switches[key][1], flat, results)

    def _as_fake(self, results: Sequence[Meta]) -> list[Tensor]:
        with paused():
            return [m.label(self.given.here, m.empty()) for m in results]

    def _ran(self, name: str, module: Any, flat: Sequence[Tensor], results: Sequence[Meta]) -> list[Tensor]:
        """A graph of values; while a program is traced, called by it."""
        here = self.given.here
        flat = [x.contiguous() for x in flat]
        if get_proxy_mode() is not None:
            return call(trace.added(name, copied(module) if isinstance(module, Switch) else module), flat, results)
        if any(valueless(x) for x in flat):
            return self._as_fake(results)
        if isinstance(module, Switch):
            rank = current_rank() if here.mesh.simulate else here.mesh.rank
            index = here.mesh.coordinates(rank or 0)[self.given.axis]
            module = self.of.turns.setdefault((id(module), index), module.turn(index))
        with paused(), torch.no_grad():
            return [m.label(here, x) for m, x in zip(results, module(*flat), strict=True)]

    # ---- the loss

    def _aux(self, out: Sequence[Tensor]) -> Aux:
        """The metrics of all micro-batches, from the totals and metrics."""
        n = len(self.last.coefficients)
        _, (_, found) = tree.unflatten(self.last.joint.structure, [*out[:n], *out[:n], *out[n:]])
        metrics, count = aux_of(found).metrics, self.given.schedule.microbatches
        if metrics is None:
            return Aux()
        return Aux({k: v if isinstance(v, Mean) else v / count for k, v in metrics.items()})

    def mean(self, totals: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Mean:
        """The loss."""
        terms = zip(totals, weights or self.weights(), self.last.coefficients, strict=True)
        return sum((Mean(t, w) * k for t, w, k in terms), start=0)  # type: ignore[return-value]

    def weights(self) -> list[Tensor]:
        """The weight of every term, which all ranks know from the batch."""
        given = self.given
        if id(self.last) not in self.of.weighing:
            self.of.weighing[id(self.last)] = self.last, self._weights_alone()
        module = self.of.weighing[id(self.last)][1]
        results = [given.full(self.last.joint.results[i], "I") for i in self.last.weights]
        rest = [given.flat[i] for i in given.rest]
        each = [
            self._ran("weights", module, [*rest, *given.context(k)], results)
            for k in range(given.schedule.microbatches)
        ]
        return [added(ws) for ws in zip(*each, strict=True)]

    def _weights_alone(self) -> Any:
        """The graph of the weights, without what the last function is handed."""
        module = sliced(self.last.joint.forward, self.last.weights)
        reads, nodes = used_placeholders(module), inputs(module.graph)
        if any(reads[i] for i in self.handed):
            raise SpecError(
                "the weight of the loss depends on what the stages computed: a weight says how much each element "
                "counts, and comes from the micro-batch alone; it is known before anything runs"
            )
        for i in self.handed:
            module.graph.erase_node(nodes[i])
        module.recompile()
        return module

    # ---- the gradients

    def _gradients(self, work: Work, out: Sequence[Tensor]) -> Any:
        """A tree like what is differentiated, from the gradients of each chunk and of the rest."""
        given, here = self.given, self.given.here
        own, rest = work.trained
        found: dict[int, Tensor] = {}
        for k, at in enumerate(own):
            pieces = []
            for chunk, g in enumerate(out[k : len(own) * work.chunks : len(own)]):
                source = given.moves(chunk)
                pieces.append(g if source is None else c._ppermute(g, (given.axis,), c._inverse(source)))
            stacked = given.axis not in given.leaf(given.own[at]).spec.dims[0].axes
            found[given.own[at]] = torch.stack(pieces) if stacked else pieces[0]
        for at, g in zip(rest, out[len(own) * work.chunks :], strict=True):
            i = given.rest[at]
            found[i] = c._psum(g, (given.axis,)) if here.over(given.flat[i], given.axis) == "I" else g
        for positions in (given.own, given.rest):
            for i in (positions[k] for k in given.trained(positions)):
                if i not in found:  # no function uses it
                    found[i] = torch.zeros_like(given.flat[i])
        gradients(found.values(), [given.paths[i] for i in found])
        made = {i: as_gradient(here, given.flat[i], g, given.paths[i]) for i, g in found.items()}
        if given.part is None:
            return tree.unflatten(given.structure, [made.get(i) for i in given.places])
        return tree.unflatten(given.structure, [made.get(i) for i in range(len(given.flat))])
