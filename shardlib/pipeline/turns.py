"""What each rank of a pipeline runs, as a graph: calls of the functions' graphs, sends and receives, in the order of
the schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardlib import layout as cuts
from shardlib import wire
from shardlib.autodiff import dual
from shardlib.graph.trace import Meta, added, call, meta, strides, typed
from shardlib.mesh import Inner
from shardlib.phases import marked, noted
from shardlib.pipeline.actions import Action
from shardlib.pipeline.schedule import Schedule
from shardlib.pipeline.stages import Traced, layered
from shardlib.pipeline.weights import Gather, Sums, reduction
from shardlib.spec import Spec
from shardlib.switch import Switch
from shardlib.types import Leaf, Region, paused, region


@dataclass
class Work:
    """What a pipeline does: its schedule, its functions as graphs (`stages` by stage), how many layers each stage has.

    Its inputs in order: `rest` (parameters that first and last take), for each of a rank's stages `own`, for each
    micro-batch `batch`, `extra`, the key if there is one, the numbers of the micro-batches if they have one, the seeds
    of the loss's terms if there is a backward. Its results: the totals of the terms, the metrics, the new extra where
    the last function gives one, and with a backward for each of a rank's stages the gradients of the parameters that
    are trained, then those of `rest`.

    `gathers`: by stage, what `GF` and `GB` do. `sums_own`, `sums_rest`: the specs to which `R` brings gradients, in
    `reduce` (None: it leaves them).
    """

    schedule: Schedule
    mesh: Inner
    group: str
    first: Traced
    stages: list[Traced]
    last: Traced
    layers: list[int]
    rest: list[Meta]
    own: list[Meta]
    batch: list[Meta]
    extra: list[Meta]
    key: list[Meta]
    number: list[Meta]
    seeds: list[Meta]
    gathers: list[Gather]
    sums_own: list[Spec | None]
    sums_rest: list[Spec | None]
    reduce: torch.dtype | None
    reductions: dict[Any, tuple[str, GraphModule, list[Meta]]] = field(default_factory=dict)

    @property
    def backward(self) -> bool:
        """Whether there is one."""
        return bool(self.seeds)

    @property
    def chunks(self) -> int:
        """How many stages a rank has."""
        return self.schedule.stages // self.schedule.ranks

    @property
    def metas(self) -> list[Meta]:
        """Of all inputs."""
        n = self.schedule.microbatches
        blocks, batches = self.own * self.chunks, self.batch * n
        return [*self.rest, *blocks, *batches, *self.extra, *self.key, *self.number * n, *self.seeds]

    @property
    def totals(self) -> list[Meta]:
        """Of the totals, the metrics and the new extra."""
        n = len(self.last.coefficients)
        return self.last.given[:n] + self.last.given[2 * n :]

    @cached_property
    def trained(self) -> tuple[list[int], list[int]]:
        """Which of `own` and which of `rest` have a gradient."""
        return self.stages[0].at, sorted({*self.first.at, *self.last.at})

    @property
    def gradients(self) -> list[Meta]:
        """Of the gradients, in order."""
        own, rest = self.trained
        return [self.gradient(self.own[i], self.sums_own[i]) for _ in range(self.chunks) for i in own] + [
            self.gradient(self.rest[i], self.sums_rest[i]) for i in rest
        ]

    def gradient(self, m: Meta, spec: Spec | None = None) -> Meta:
        """Of the gradient of a parameter, brought to `spec`; of several micro-batches the sum, in float32 or wider."""
        more = torch.float32 if self.schedule.microbatches > 1 else (spec and self.reduce) or m.dtype
        assert m.kind is not None
        kind, shape = dual(m.kind), m.shape
        if spec is not None:
            assert m.leaf is not None
            shape = cuts.padded_shape(spec, m.leaf.shape, self.mesh.shape)
            kind = Region(self.mesh).make(V=spec.split, P=spec.pending)
        as_is = strides(torch.empty(shape, device="meta"))
        return Meta(shape, as_is, torch.promote_types(m.dtype, more), m.device, kind)

    def summed_as(self, key: Any) -> Spec | None:
        """The spec to which a sum of gradients is brought (of all layers, where it is that of one)."""
        return self.sums_own[key[2]] if key[0] == "own" else self.sums_rest[key[1]]

    def reduction(self, stage: int, keys: Sequence[Any]) -> tuple[str, GraphModule, list[Meta]]:
        """The graph that brings sums of gradients to their specs: its name, the graph, what it gives."""
        given, specs = list[Meta](), list[Spec]()
        for key in keys:
            own, spec = key[0] == "own", self.summed_as(key)
            m = self.gathers[stage].used[key[2]] if own else self.rest[key[1]]
            assert spec is not None and m.leaf is not None and m.kind is not None
            one = int(own and len(key) == 4)  # the gradient of one layer
            kind, whole = dual(m.kind), self.gradient(m)
            pending = tuple(a for a, letter in zip(self.mesh.shape, kind, strict=True) if letter == "P")
            leaf = Leaf(replace(m.leaf.spec.unstack(one), pending=pending), m.leaf.shape[one:])
            given.append(replace(whole, shape=whole.shape[one:], stride=whole.stride[one:], leaf=leaf))
            specs.append(spec.unstack(one))
        memo, how = self.reductions, (tuple(given), tuple(specs))
        if how not in memo:
            memo[how] = f"reduce_{len(memo)}" if memo else "reduce", *reduction(given, specs, self.mesh, self.reduce)
        return memo[how]

    @cached_property
    def results(self) -> list[Meta]:
        """Of all results."""
        return [*self.totals, *(self.gradients if self.backward else ())]

    def name(self, one: Traced) -> str:
        """The name under which a function's graphs are called."""
        if one is self.first or one is self.last:
            return "first" if one is self.first else "last"
        distinct = list({id(t): t for t in self.stages}.values())
        at = next(i for i, t in enumerate(distinct) if t is one)
        return f"stage_{at}" if len(distinct) > 1 else "stage"

    def switch(self) -> Switch:
        """The graph that does it, a turn for each rank."""
        root, turns = torch.nn.Module(), []
        for index in range(self.schedule.ranks):
            module, _, _ = typed(
                lambda *xs, i=index: _Turn(self, i, xs).results(), self.mesh, self.metas, "pipeline", lines=False
            )
            for name, child in module.named_children():
                root.add_module(name, child)
            turns.append(module.graph)
        return Switch(root, turns, self.group)


class _Turn:
    """One rank's actions, as they are traced."""

    def __init__(self, work: Work, index: int, xs: Sequence[Tensor]) -> None:
        self.work, self.index, self.last = work, index, work.schedule.stages - 1
        given, n = iter(xs), work.schedule.microbatches
        self.rest = [next(given) for _ in work.rest]
        self.own = [[next(given) for _ in work.own] for _ in range(work.chunks)]
        batch = [[next(given) for _ in work.batch] for _ in range(n)]
        self.extra = [next(given) for _ in work.extra]
        self.state = self.extra  # as the micro-batches that the last function has had have left it
        key = [next(given) for _ in work.key]
        numbers = [[next(given) for _ in work.number] for _ in range(n)]
        self.seeds = list(given)
        self.context = [(b, [*key, *k]) for b, k in zip(batch, numbers, strict=True)]
        self.made: dict[Action, list[Tensor]] = {}  # what an action gave, until the next takes it
        self.saved: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}  # by function and micro-batch: inputs, kept
        self.due: dict[Any, list[Tensor]] = {}  # what the second half of a backward is given
        self.handles: dict[tuple[str, int], list[Tensor]] = {}
        self.weights: dict[int, list[Tensor]] = {}  # by stage, as they were last gathered
        self.sums, self.reduced = Sums(), Sums()
        self.added: dict[Any, Tensor] = {}  # sums of gradients that the functions' graphs make themselves

    def results(self) -> list[Tensor]:
        """Do the actions; what the rank gives."""
        with paused():
            for action in self.work.schedule.lists[self.index]:
                if self.work.backward or action.kind.endswith("F"):
                    with marked("doing", action.words):
                        getattr(self, f"_{action.kind}")(action.stage, action.microbatch)
            for handle in [h for hs in self.handles.values() for h in hs]:
                wire.sent(handle)
            return [m.label(region(), x) for m, x in zip(self.work.results, self._sums(), strict=True)]

    def _sums(self) -> list[Tensor]:
        """The sums that are results; zeros for those that other ranks make."""
        work, (own, rest) = self.work, self.work.trained
        keys: list[Any] = [("total", i) for i in range(len(work.totals))]
        if work.backward:
            keys += [("own", chunk, i) for chunk in range(work.chunks) for i in own] + [("rest", i) for i in rest]
        out = []
        for key, m in zip(keys, work.results, strict=True):
            sums = self.sums if key[0] == "total" or work.summed_as(key) is None else self.reduced
            x = self.added.get(key, sums.get(key))
            layers = [sums[of] for n in range(m.shape[0] if m.shape else 0) if (of := (*key, n)) in sums]
            if layers:
                x = torch.stack(layers) if x is None else x + torch.stack(layers)  # one end may use the leaf whole
            if x is None:
                x = torch.zeros(m.shape, dtype=m.dtype, device=m.device)
            elif key[0] == "own" and x.shape[0] < m.shape[0]:
                x = torch.cat([x, x.new_zeros(m.shape[0] - x.shape[0], *x.shape[1:])])
            out.append(x)
        return out

    # ---- compute

    def _F(self, s: int, k: int) -> None:
        work = self.work
        x = self._take("F", s - 1, k) if s else self._run(work.first, self.rest, [], k)
        y = self._run(work.stages[s], self._chunk(s), x, k, s)
        if s < self.last:
            self.made[Action("F", s, k)] = y
            return
        out, n = self._run(work.last, self.rest, y, k), len(work.last.coefficients)
        told = out[:n] + out[2 * n :]
        for i, total in enumerate(told):
            if i < len(told) - work.last.changes:
                self.sums.add(("total", i), total)
            else:
                self.sums["total", i] = total
        if work.last.changes:
            self.state = told[-work.last.changes :]

    def _chunk(self, s: int) -> list[Tensor]:
        """The parameters of a stage, without what pads them; as they were last gathered."""
        if s in self.weights:
            return self.weights[s]
        n = self.work.layers[s]
        return [x.narrow(0, 0, n) if n < x.shape[0] else x for x in self.own[s // self.work.schedule.ranks]]

    def _run(self, f: Traced, params: list[Tensor], handed: list[Tensor], k: int, s: int | None = None) -> list[Tensor]:
        (batch, more), extra = self.context[k], self.state if f is self.work.last else self.extra
        given, made = [*params, *handed, *batch, *extra, *more], f.joint
        target = added(self.work.name(f), made.forward)
        out = call(target, given, [*f.given, *made.kept])
        if self.work.backward:
            kept = noted("kind", "activations", [*handed, *out[len(f.given) :]])[len(handed) :]
            self.saved[id(f), s, k] = given[len(params) :], kept
        return out[: len(f.given)]

    def _losses(self) -> list[Tensor]:
        """The cotangents of the totals."""
        return [seed.to(m.dtype) for seed, m in zip(self.seeds, self.work.last.given, strict=False)]

    def _B(self, s: int, k: int) -> None:
        work = self.work
        given = self._pull(work.last, k, self._losses()) if s == self.last else self._take("B", s + 1, k)
        self._handed(s, k, self._pull(work.stages[s], k, given, s))

    def _I(self, s: int, k: int) -> None:
        work = self.work
        given = self._pull_first(work.last, k, self._losses()) if s == self.last else self._take("B", s + 1, k)
        x = self._pull_first(work.stages[s], k, given, s)
        if s:
            self._handed(s, k, x)
        else:
            self.made[Action("I", 0, k)] = x  # the first function has parameters only: all of it is W

    def _W(self, s: int, k: int) -> None:
        if s == self.last:
            self._pull_second(self.work.last, k)
        self._pull_second(self.work.stages[s], k, s)
        if s == 0:
            self._handed(0, k, self.made.pop(Action("I", 0, k)))

    def _handed(self, s: int, k: int, gradient: list[Tensor]) -> None:
        """What becomes of the gradient of a stage's input."""
        if s:
            self.made[Action("B", s, k)] = gradient
        else:
            self._pull(self.work.first, k, gradient)

    def _arguments(self, f: Traced, k: int, cotangents: list[Tensor], s: int | None) -> list[Tensor]:
        given, kept = self.saved.pop((id(f), s, k))
        given = [*(self.rest if s is None else self._chunk(s)), *given]
        return [*kept, *(given[i] for i in f.joint.of_inputs), *cotangents]

    def _pull(self, f: Traced, k: int, cotangents: list[Tensor], s: int | None = None) -> list[Tensor]:
        """The backward of a function; the gradients of what it was handed."""
        args = self._arguments(f, k, cotangents, s)
        if not f.joint.gradients:
            return []
        return self._summing(f, f"{self.work.name(f)}_backward", f.joint.backward, args, s, f.joint.gradients)

    def _pull_first(self, f: Traced, k: int, cotangents: list[Tensor], s: int | None = None) -> list[Tensor]:
        """The first half of a backward: the gradients of what the function was handed."""
        args, halves = self._arguments(f, k, cotangents, s), f.halves()
        gradients = f.joint.gradients[f.of_parameters :]
        target = added(f"{self.work.name(f)}_input", halves.first)
        out = call(target, [args[i] for i in halves.reads_first], [*gradients, *map(meta, halves.over)])
        over = noted("kind", "activations", out[len(gradients) :])
        self.due[id(f), s, k] = [*(args[i] for i in halves.reads_second), *over]
        return out[: len(gradients)]

    def _pull_second(self, f: Traced, k: int, s: int | None = None) -> None:
        """The second half: the gradients of parameters."""
        args = self.due.pop((id(f), s, k))
        if f.at:
            gradients = f.joint.gradients[: f.of_parameters]
            self._summing(f, f"{self.work.name(f)}_weight", f.halves().second, args, s, gradients)

    def _summing(
        self, f: Traced, name: str, module: GraphModule, args: list[Tensor], s: int | None, results: Sequence[Meta]
    ) -> list[Tensor]:
        """Call a graph that gives the gradients of a function's parameters, which are added to those of other
        micro-batches, and others; these."""
        work, several = self.work, self.work.schedule.microbatches > 1
        keys: list[Any] = [("rest", i) if s is None else ("own", s // work.schedule.ranks, i) for i in f.at]
        held = [work.rest[i] if s is None else layered(work.own[i], work.layers[s]) for i in f.at]
        metas = list(map(work.gradient, held))
        into = [m if several and work.summed_as(key) is None else None for key, m in zip(keys, metas, strict=True)]
        sums = {key: m for key, m in zip(keys, into, strict=True) if m}
        new = {key: m.empty() for key, m in sums.items() if key not in self.added}
        self.added |= new
        module, results = f.adding(module, results, into, [key in new for key in keys])
        name = f"{name}_anew" if new else name
        out = call(added(name, module), [*args, *(self.added[key] for key in sums)], results)
        rest = len(out) - len(sums)
        self.added |= zip(sums, out[rest:], strict=True)
        given = iter(out[:rest])
        for key, m, layers in zip(keys, metas, f.layers, strict=True):
            if key in sums:
                continue
            pieces = [next(given).to(m.dtype) for _ in range(max(1, layers))]
            if layers and not (s is None and work.summed_as(key)):  # which may be cut there
                for n, piece in enumerate(pieces):
                    self.sums.add((*key, n), piece)
            else:
                self.sums.add(key, torch.stack(pieces) if layers else pieces[0])
        return list(given)

    # ---- weights and their gradients between the ranks of other axes

    def _GF(self, s: int, k: int) -> None:
        gather = self.work.gathers[s]
        if gather.at:
            self.weights.pop(s, None)
            own = self._chunk(s)
            name = f"{self.work.name(self.work.stages[s])}_gather"
            out = call(added(name, gather.graph), [own[i] for i in gather.at], gather.results)
            whole = dict(zip(gather.at, out, strict=True))
            self.weights[s] = [whole.get(i, x) for i, x in enumerate(own)]

    _GB = _GF

    def _R(self, s: int, k: int) -> None:
        """What the stage, and the functions before the first and after the last, have added up since the last time."""
        work, chunk = self.work, s // self.work.schedule.ranks
        ends = [f for f, at in ((work.first, 0), (work.last, self.last)) if at == s]
        rest = {i for f in ends for i in f.at}
        keys = [key for key in self.sums if key[:2] == ("own", chunk) or (key[0] == "rest" and key[1] in rest)]
        keys = [key for key in keys if work.summed_as(key) is not None]
        if not keys:
            return
        name, graph, results = work.reduction(s, keys)
        out = call(added(name, graph), [self.sums.take(key) for key in keys], results)
        for key, x in zip(keys, out, strict=True):
            m = work.own[key[2]] if key[0] == "own" else work.rest[key[1]]
            self.reduced.add(key, x.to(work.gradient(m, work.summed_as(key)).dtype))

    # ---- between ranks

    def _take(self, way: str, s: int, k: int) -> list[Tensor]:
        """What the action of stage `s` gave: here, or on the rank that sent it."""
        if self.work.schedule.placement[s] == self.index:
            return self.made.pop(Action(way, s, k))
        return [wire.wait(x) for x in self.made.pop(Action(f"R{way}", s, k))]

    def _send(self, way: str, s: int, k: int, to: int) -> None:
        rank = self.work.schedule.placement[to]
        for handle in self.handles.pop((way, rank), []):
            wire.sent(handle)
        values = self.made.pop(Action(way, s, k))
        handles = [wire.isend(x, rank, self.work.group) for x in values]
        self.handles[way, rank] = noted("action", f"{way}{s}.{k}", handles)

    def _receive(self, way: str, s: int, k: int, metas: Sequence[Meta]) -> None:
        rank = self.work.schedule.placement[s]
        found = [wire.irecv(m.shape, m.dtype, m.device, rank, self.work.group) for m in metas]
        self.made[Action(f"R{way}", s, k)] = found

    def _SF(self, s: int, k: int) -> None:
        self._send("F", s, k, s + 1)

    def _RF(self, s: int, k: int) -> None:
        self._receive("F", s - 1, k, self.work.stages[s - 1].given)

    def _SB(self, s: int, k: int) -> None:
        self._send("B", s, k, s - 1)

    def _RB(self, s: int, k: int) -> None:
        made = self.work.stages[s].joint
        self._receive("B", s + 1, k, [made.results[i] for i in made.floats])
