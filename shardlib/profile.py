"""`profile`: a jitted function run for real, node by node: what each rank computes, and what it waits for."""

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from shardlib import tree, wire
from shardlib.errors import SpecError
from shardlib.graph.lines import line_of
from shardlib.graph.nodes import STARTS, WAIT, inputs, op_name, outputs, waits
from shardlib.graph.program import Collective, sends
from shardlib.graph.timeline import Span, save_spans, told
from shardlib.jit import Jitted
from shardlib.mesh import Mesh
from shardlib.processes import Processes


@dataclass(frozen=True)
class Seconds:
    """Of one rank, per step: in nodes that compute, blocked in collectives (`exposed`), and the rest of the step, in
    which collectives are issued and the host goes from node to node."""

    rank: int
    compute: float
    exposed: float
    other: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.exposed + self.other


@dataclass(frozen=True)
class Profile:
    """What `profile` found, the same on all ranks. `waits`: the seconds per step (the mean of the ranks) for which each
    collective blocks; `file`: this process's trace; `result`: what the last step returned here."""

    steps: int
    ranks: list[Seconds]
    waits: dict[str, float]
    file: Path | None
    result: Any = field(repr=False)

    def __str__(self) -> str:
        head = (
            f"{'rank':>4} {'compute':>10} {'exposed':>10} {'other':>10} {'step':>10}   ms, mean of {self.steps} steps"
        )
        rows = [(s.rank, *(x * 1e3 for x in (s.compute, s.exposed, s.other, s.total))) for s in self.ranks]
        lines = [head, *("{:>4} {:>10.3f} {:>10.3f} {:>10.3f} {:>10.3f}".format(*row) for row in rows)]
        longest = sorted(self.waits.items(), key=lambda item: -item[1])[:5]
        return "\n".join([*lines, *(f"{seconds * 1e3:>10.3f} ms in {what}" for what, seconds in longest)])


def profile(f: Any, *args: Any, dir: str | Path | None = None, steps: int = 3) -> Profile:
    """Run a jitted function `steps` times for real on the current mesh, after one run that is not counted.

    Every rank of a mesh of processes calls it. The program that runs is taken node by node, whatever its backend: on
    the CPU by the host's clock, on CUDA by events on the stream that computes, so that nothing is waited for that the
    program does not wait for (a GPU that waits for the host counts as `compute`, inside the node launched next). On a
    simulated mesh one process plays all ranks in turn: what a collective costs there is copying, and `exposed` says no
    more than that.

    A function that donates argument 0 must return the next one, as `f(state, batch) -> (state, metrics)` does: each
    run gets what the last one returned, and the state that is passed is gone (`.result` has the newest). Otherwise
    every run gets `args` again. `dir`: where each process writes a trace (Trace Event Format) with the nodes' names,
    leaves and lines: `rank3.json`, or `ranks.json` for a simulated mesh. Raises `SpecError` for what is not jitted, or
    donates in another way.
    """
    if not isinstance(f, Jitted):
        raise SpecError(f"profile takes what sl.jit returns; found {f!r}")
    if f.donate not in ((), (0,)) or steps < 1:
        raise SpecError(
            f"profile: {f.__name__} donates arguments {f.donate}, steps={steps}. It runs a function at least once, and "
            "again if that donates nothing, or argument 0 and returns the next one"
        )
    structure = tree.flatten(args[0])[1] if f.donate else None
    runs: list[_Step] = []
    out: Any = None
    for _ in range(steps + 1):
        program, given = f.given(*args)
        step = _Step(program.mesh, program.running())
        out = program.returned(step.run(given))
        runs.append(step)
        if f.donate:
            args = (_next(f, out, structure), *args[1:])
    del runs[0]
    mesh = runs[0].mesh
    everyone = Processes(mesh)
    every = everyone.all(lambda: _summed(runs))
    ranks = [s for seconds, _ in every for s in seconds]
    waits = {k: sum(w.get(k, 0.0) for _, w in every) / len(ranks) for _, w in every for k in w}
    file = None
    if dir is not None:
        file = Path(dir) / (f"rank{mesh.rank}.json" if everyone.count > 1 else "ranks.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        save_spans(file, [span for step in runs for span in step.traced(runs[0].began)])
    return Profile(steps, ranks, waits, file, out)


def _next(f: Jitted, out: Any, structure: Any) -> Any:
    state = out[0] if isinstance(out, tuple) and len(out) else out
    if tree.flatten(state)[1] != structure:
        raise SpecError(
            f"profile: {f.__name__} donates argument 0, so it must return the next one, alone or as the first of a "
            "tuple; what it returned has another structure"
        )
    return state


def _summed(runs: "Sequence[_Step]") -> tuple[list[Seconds], dict[str, float]]:
    """Of the ranks that this process plays: seconds per step, and for all of them those of each collective."""
    ranks, n = runs[0].ranks, len(runs)
    compute, exposed = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
    waits: dict[str, float] = {}
    for step in runs:
        for node, rank, seconds in step.durations():
            if step.blocks(node):
                exposed[rank] += seconds / n
                waits[step.said(node)] = waits.get(step.said(node), 0.0) + seconds / n
            elif node.target not in STARTS:
                compute[rank] += seconds / n
    whole = sum(step.seconds for step in runs) / n
    rest = (whole - sum(compute.values()) - sum(exposed.values())) / len(ranks)
    return [Seconds(r, compute[r], exposed[r], rest) for r in ranks], waits


# ---- one step, node by node


class _Step:
    """One run of a program on the ranks that this process plays; when each node ran."""

    def __init__(self, mesh: Mesh, module: GraphModule) -> None:
        self.mesh, self.module = mesh, module
        self.plays = mesh.simulate and mesh.total > 1
        self.ranks = range(mesh.total) if self.plays else range(mesh.rank, mesh.rank + 1)
        self.sent: dict[Node, Collective] = sends(module)
        self.waits = waits(module)
        self.cuda = mesh.device.type == "cuda"
        self.marks: list[tuple[Node, str, int, Any, Any]] = []  # node, graph, rank, begin, end
        self.began = self.seconds = 0.0

    def mark(self) -> Any:
        """Now: seconds, or on CUDA an event in the stream."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def run(self, given: list[list[Any]]) -> list[list[Any]]:
        """The outputs of every rank. Processes start together."""
        if not self.plays and self.mesh.total > 1:
            dist.barrier()
        if self.cuda:
            torch.cuda.synchronize()
        self.began, self.first = time.perf_counter(), self.mark()
        with torch.no_grad():
            out = self.graph(self.module, "step", given)
        if self.cuda:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.began
        return out

    def graph(self, module: Any, name: str, given: list[list[Any]]) -> list[list[Any]]:
        values = [dict(zip(inputs(module.graph), one, strict=True)) for one in given]
        for one in given:
            one.clear()
        last: dict[Node, Node] = {}
        for node in module.graph.nodes:
            last |= dict.fromkeys([node, *node.all_input_nodes], node)
        dying: dict[Node, list[Node]] = {}
        for value, node in last.items():
            dying.setdefault(node, []).append(value)
        for node in module.graph.nodes:
            if node.op == "output":
                break
            if node.op != "placeholder":
                args = [map_arg((node.args, node.kwargs), own.__getitem__) for own in values]
                for own, result in zip(values, self.results(module, node, name, args), strict=True):
                    own[node] = result
                del args
            for value in dying.get(node, ()):
                for own in values:
                    del own[value]
        return [[map_arg(x, own.__getitem__) for x in outputs(module.graph)] for own in values]

    def results(self, module: Any, node: Node, graph: str, args: list[Any]) -> list[Any]:
        """What a node gives on every rank; `args`: positional and named ones on each."""
        target: Any = node.target
        if node.op == "call_module":
            return self.graph(module.get_submodule(target), str(target), [list(a) for a, _ in args])
        if node.op == "get_attr":
            return [operator.attrgetter(target)(module)] * len(args)
        if self.plays and target in wire.MEET:
            return self.meet(node, graph, [a for a, _ in args])
        out = []
        for rank, (a, k) in zip(self.ranks, args, strict=True):
            begin = self.mark()
            if not self.plays:
                out.append(target(*a, **k))
            elif target is WAIT:
                out.append(a[0])
            elif target in wire.OWN:
                out.append(wire.OWN[target](wire.members_by_rank(self.mesh, a)[rank].index(rank), *a))
            else:
                out.append(target(*a, **k))
            self.marks.append((node, graph, rank, begin, self.mark()))
        return out

    def meet(self, node: Node, graph: str, args: list[Any]) -> list[Any]:
        """A collective of simulated ranks; each member is charged its share of the time."""
        out: list[Any] = [None] * len(args)
        for members in dict.fromkeys(wire.members_by_rank(self.mesh, args[0])):
            begin = time.perf_counter()
            results = wire.combine(node.target, [args[r] for r in members], members)
            each = (time.perf_counter() - begin) / len(members)
            for i, (r, x) in enumerate(zip(members, results, strict=True)):
                out[r] = x
                self.marks.append((node, graph, r, begin + i * each, begin + (i + 1) * each))
        return out

    # ---- what was found

    def since(self, mark: Any) -> float:
        return self.first.elapsed_time(mark) / 1e3 if self.cuda else mark - self.first

    def durations(self) -> list[tuple[Node, int, float]]:
        """Node, rank, seconds."""
        return [(n, rank, self.since(end) - self.since(begin)) for n, _, rank, begin, end in self.marks]

    def blocks(self, node: Node) -> bool:
        """Whether a node waits for others: a wait, or a collective that is done when it returns."""
        if node.target not in STARTS:
            return node.target is WAIT
        return self.plays or node not in self.waits.values()

    def collective(self, node: Node) -> Collective | None:
        return self.sent.get(self.waits.get(node, node))

    def said(self, node: Node) -> str:
        c, place = self.collective(node), line_of(self.waits.get(node, node))
        at = f", {Path(place[0]).name}:{place[1]}" if place else ""
        return f"{c.op} over {c.axis} of {c.name}{at}" if c else node.name

    def traced(self, began: float) -> list[Span]:
        """The spans of the step, from the time `began` on."""
        out = []
        for node, graph, rank, begin, end in self.marks:
            c = self.collective(node)
            name = f"wait for {c.op}" if c and node.target is WAIT else op_name(node)
            start, stop = (self.began - began + self.since(m) for m in (begin, end))
            out.append(Span(name, start, stop, node in self.sent, rank, told(node, graph, c)))
        return out
