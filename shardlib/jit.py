"""`jit`: a function on arrays traced once for each signature into a program of graphs, then run as generated code."""

import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from shardlib import tree
from shardlib.array import Array
from shardlib.cache import Program, cached
from shardlib.errors import ShardError, SpecError, listing
from shardlib.graph.digests import fingerprint, titles
from shardlib.graph.memory import KINDS, Point, alive, explained, turns
from shardlib.graph.nodes import inputs as graph_inputs
from shardlib.graph.program import BACKENDS, Collective, Run, collectives, copied, graphs, group_names, runner
from shardlib.graph.text import listing_of
from shardlib.graph.timeline import Hardware, Timeline, timeline
from shardlib.graph.trace import meta, refuse_writes, trace, uncollected
from shardlib.heap import keep_freed
from shardlib.insert import refuse_autocast
from shardlib.log import Log, marked, telling, wanted
from shardlib.meeting import Meeting
from shardlib.mesh import Mesh, TracedMesh, current_mesh
from shardlib.meter import meter
from shardlib.parts import Memo, once, places
from shardlib.passes import Pass, applied, default, for_backend, for_processes
from shardlib.shard_map import shards_of, tracing
from shardlib.signature import (
    Constant,
    Signature,
    argument_numbers,
    argument_paths,
    by_position,
    constants,
    described,
    mesh_key,
    name_of,
    refuse_odd,
    refuse_valueless,
    settings,
    signature_of,
)
from shardlib.simulate import run_lockstep
from shardlib.spec import Spec
from shardlib.types import inside, shapes_alone

_WHOLE = ("inductor", "cudagraph")  # make one of the whole program, so that nothing is told from inside


@dataclass(frozen=True)
class _Result:
    """What one leaf of the result is: an array, a plain tensor (`spec` None), or a constant."""

    spec: Spec | None = None
    shape: tuple[int, ...] = ()
    constant: Any = None
    position: int = -1


@dataclass
class Lowered:
    """A traced program: its graphs, and what it sends. `compile()` makes it run."""

    module: GraphModule
    mesh: Mesh
    backend: str
    results: list[_Result]
    structure: Any
    seconds: float
    name: str = "step"
    met: bool = field(default=False, repr=False)  # whether all processes have agreed on it
    _run: Run | None = field(default=None, repr=False)

    @property
    def program(self) -> dict[str, GraphModule]:
        """The graphs by name; `step` calls the others."""
        found = dict(graphs(self.module))
        for module in found.values():
            module.recompile()  # passes change graphs, not yet their code
        return found

    def collectives(self, hardware: str | Hardware | None = None) -> Sequence[Collective]:
        """Every collective with its name, op, axis and the bytes each rank sends; on `hardware` those of `timeline`,
        each time it is made: for how many seconds it is `exposed`, the rest being hidden behind compute."""
        return collectives(self.module) if hardware is None else self.timeline(hardware).collectives

    def memory(self, *kinds: str) -> Point:
        """The moment when most is alive on a rank (of a pipeline, that which holds most), of some kinds or of all, and
        the bytes of each: `parameters`, their `copies` (gathered, sliced), `buckets` to be sent, `gradients`,
        `optimizer`, `activations` (left by the forward for the backward pass) and `other`."""
        if unknown := {*kinds}.difference(KINDS):
            raise SpecError(f"memory: no kind {listing(sorted(unknown))}; there are {listing(KINDS)}")
        module = self._here(self.module)
        points = (p for turn in range(turns(module)) for p in alive(module, turn=turn))
        return max(points, key=lambda point: sum(point.bytes[k] for k in kinds or point.bytes))

    def timeline(self, hardware: str | Hardware = "h100") -> Timeline:
        """When each node runs and each collective is on the wire, under the model of `shardlib.graph.timeline`; on
        `"h100"`, `"a100"` and others of `HARDWARE` there, or on an `sl.Hardware(...)`."""
        return timeline(self.module, hardware)

    def as_text(self) -> str:
        """The graphs as a listing to read, a line for each node."""
        return listing_of(self.module)

    def running(self, log: Log | None = None) -> GraphModule:
        """The graphs as they run here: processes that talk gloo change some collectives. Where there is a log, they
        tell it of each one, and a meter when they wait."""
        module = self.module
        if not self.mesh.simulate or self.mesh.total == 1:
            for group in group_names(module):  # made by all of its ranks, where one has traced for all
                self.mesh.group(group.rpartition("/")[2].split(","))
        if log is None or self.backend in _WHOLE:
            return self._here(module)
        return marked(self._here(telling(copied(module), log)))

    def _here(self, module: GraphModule) -> GraphModule:
        """The graphs with the collectives that are used here."""
        use = () if self.mesh.simulate or self.mesh.total == 1 else for_processes(self.mesh.device.type, self.backend)
        return applied(use, copied(module)) if use else module

    def compile(self) -> "Lowered":
        """Compile with the backend, if that has not been done."""
        if self._run is None and not (self.mesh.simulate and self.mesh.total > 1):
            log = wanted(self.mesh)
            if self.mesh.device.type == "cpu":
                keep_freed()
            run = runner(self.running(log), self.backend)
            self._run = log.around(run, self.name, self.mesh.name) if log is not None else run
        return self

    def __call__(self, inputs: list[list[Tensor]]) -> Any:
        """Run on the inputs of every rank that this process plays."""
        run, alone = self.compile()._run, self.mesh.simulate or self.mesh.total == 1
        program = meter().program(self.mesh.device.type == "cuda", alone or self.backend not in _WHOLE)
        with explained(self.module, self.mesh), program:
            outputs = [run(inputs[0])] if run else run_lockstep(self.mesh, self.module, inputs, self._equal())
        return self.returned(outputs)

    def returned(self, outputs: list[Any]) -> Any:
        """What the function returns, from the outputs of every rank that this process plays."""
        array = once(lambda position, spec, shape: Array([o[position] for o in outputs], spec, shape, self.mesh))

        def value(r: _Result) -> Any:
            if r.position < 0:
                return r.constant
            return outputs[0][r.position] if r.spec is None else array(r.position, r.spec, r.shape)

        return tree.unflatten(self.structure, list(map(value, self.results)))

    def _equal(self) -> dict[int, tuple[str, ...]]:
        """By position of output: the axes over which the types say that all ranks hold the same."""
        return {
            r.position: tuple(a for a in self.mesh.shape if r.spec is None or a not in r.spec.axes)
            for r in self.results
            if r.position >= 0
        }


class Jitted:
    """What `jit` returns. `traces`: the programs made so far; other attributes are those of the function."""

    def __init__(
        self,
        f: Callable[..., Any],
        donate: tuple[int, ...],
        static: tuple[int, ...],
        backend: str,
        passes: tuple[Pass, ...],
        max_traces: int,
        cache: str | None = None,
    ) -> None:
        self.f, self.donate, self.static, self.max_traces = f, donate, static, max_traces
        self.backend, self.passes, self.cache = backend, for_backend(passes, backend), cache
        self.__name__ = name_of(f)
        self._programs: dict[Any, Lowered] = Memo()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["f"], name)

    @property
    def traces(self) -> list[Lowered]:
        """Every program traced so far."""
        return list(self._programs.values())

    def __get__(self, instance: Any, kind: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def lower(self, *args: Any, **words: Any) -> Lowered:
        """The program for these arguments (arrays, or abstract ones), traced but not run."""
        return self._program(*self._flat(by_position(self.f, args, words, self.__name__)))

    def __call__(self, *args: Any, **words: Any) -> Any:
        if tracing() or inside() or shapes_alone():  # part of a jitted function, or of what runs on one rank; abstract
            return self.f(*args, **words)
        program, inputs = self.given(*args, **words)
        return program(inputs)

    def given(self, *args: Any, **words: Any) -> tuple[Lowered, list[list[Tensor]]]:
        """The program for these arguments, and its inputs on every rank that this process plays. Takes donated ones."""
        refuse_autocast()
        args = by_position(self.f, args, words, self.__name__)
        flat, treedef, static = self._flat(args)
        refuse_valueless(self.__name__, treedef, flat)
        gone = self._donated(args)
        program = self._program(flat, treedef, static, called=True)
        mesh = program.mesh
        tensors = _distinct(flat)
        shards = [x.donate() if id(x) in gone and isinstance(x, Array) else shards_of(x) for x in tensors]
        ranks = range(mesh.total) if mesh.simulate else range(1)
        return program, [[s[r if len(s) > 1 else 0] for s in shards] for r in ranks]

    def _flat(self, args: Sequence[Any]) -> tuple[list[Any], Any, tuple[Constant, ...]]:
        static = constants(args, self.static, self.__name__)
        flat, treedef = tree.flatten(tuple(None if i in self.static else a for i, a in enumerate(args)))
        return flat, treedef, static

    def _donated(self, args: Sequence[Any]) -> set[int]:
        """The ids of the arrays that this call takes over; refuses storage that another leaf holds too."""
        gone: set[int] = set()
        held: dict[int, str] = {}
        rest = [i for i in range(len(args)) if i not in self.donate + self.static] if self.donate else []
        for i in [*(i for i in self.donate if i < len(args)), *rest]:
            for path, x in zip(tree.paths(args[i]), tree.leaves(args[i]), strict=True):
                if not isinstance(x, Tensor) or (i in self.donate and id(x) in gone):
                    continue
                where = f"argument {i}, `{path}`" if path else f"argument {i}"
                storages = {s.untyped_storage()._cdata for s in shards_of(x)}
                other = next((held[s] for s in storages if s in held), None)
                if other is not None:
                    raise ShardError(
                        f"{self.__name__}: {where} shares storage with {other}, which is donated: clone one of them"
                    )
                if i in self.donate and isinstance(x, Array):
                    gone.add(id(x))
                    held.update(dict.fromkeys(storages, where))
        return gone

    def _program(self, flat: list[Any], treedef: Any, static: tuple[Constant, ...], called: bool = False) -> Lowered:
        mesh = current_mesh()
        self._refuse_device(mesh)
        try:
            key = Signature(
                treedef, static, tuple(signature_of(x) for x in flat), places(flat), mesh_key(mesh), settings()
            )
            found = self._programs.get(key)
        except TypeError:
            paths = [*argument_paths(treedef), *(f"the static argument {i}" for i in self.static)]
            refuse_odd(self.__name__, "takes", paths, [*flat, *(x.value for x in static)])
            raise
        if called and mesh.total > 1 and not mesh.simulate and not (found and found.met):
            with Meeting(mesh, self.__name__, key.lines(mesh)) as meeting:
                found = found or self._made(key, flat, mesh, meeting)
                meeting.agree(fingerprint(found.module), list(titles(found.module).values()))
            found.met = True
        return found or self._made(key, flat, mesh, None)

    def _made(self, key: Signature, flat: list[Any], mesh: Mesh, meeting: Meeting | None) -> Lowered:
        """The program of a new signature, traced or loaded."""
        if len(self._programs) >= self.max_traces:
            raise ShardError(
                f"{self.__name__} was traced for {len(self._programs)} signatures, which is max_traces: shapes, "
                "specs or static arguments change from call to call. Pad batches to few shapes, or raise max_traces"
            )
        began = time.perf_counter()
        static = tuple(x.value for x in key.static)

        def trace() -> Program:
            with uncollected():
                return self._trace(flat, key.structure, static)

        if self.cache is None:
            made = trace()
        else:
            example = tree.unflatten(key.structure, range(len(flat)))
            parts = {
                "function": self.f,
                "passes": self.passes,
                "options": (self.__name__, self.backend, self.donate, self.static),
                "arguments": (example, static, key.places, tuple(map(described, flat))),
            }
            made = cached(self.cache, self.__name__, parts, mesh, example, trace, meeting)
        results = [_Result(*r) for r in made.results]
        seconds = time.perf_counter() - began
        found = Lowered(made.module, mesh, self.backend, results, made.structure, seconds, self.__name__)
        if self._programs:
            print(
                f"shardlib: {self.__name__} was traced again: {key.changed(next(reversed(self._programs)))}",
                file=sys.stderr,
            )
        self._programs[key] = found
        return found

    def _refuse_device(self, mesh: Mesh) -> None:
        if self.backend == "cudagraph" and mesh.device.type != "cuda":
            raise SpecError(
                f'{self.__name__}: backend="cudagraph" captures CUDA graphs, and this mesh is on the '
                f'{mesh.device.type}: use backend="graph", "regional" or "inductor"'
            )

    def _trace(self, flat: list[Any], treedef: Any, static: tuple[Any, ...]) -> Program:
        mesh = TracedMesh.of(current_mesh())
        tensors = _distinct(flat)
        for x in tensors:
            if isinstance(x, Array) and x.mesh.shape != mesh.shape:
                raise SpecError(
                    f"{self.__name__}: an argument lies on {x.mesh!r}, the current mesh is {mesh!r}: call it under "
                    "`with` the array's mesh"
                )
        kept: list[Any] = []

        def run(*locals_: Tensor) -> list[Tensor]:
            fresh = iter(locals_)
            like = once(lambda x: _like(x, next(fresh), mesh))
            full = [like(x) if isinstance(x, Tensor) else x for x in flat]
            args = list(tree.unflatten(treedef, full))
            for i, value in zip(self.static, static, strict=False):
                args[i] = value
            out, structure = tree.flatten(self.f(*args))
            values: list[Tensor] = []

            def result(x: Tensor) -> _Result:
                values.append(shards_of(x)[0])
                return _Result(x.spec if isinstance(x, Array) else None, tuple(x.shape), position=len(values) - 1)

            result = once(result)
            paths = [f"result `{path}`" for path in tree.paths(tree.unflatten(structure, out))]
            refuse_odd(self.__name__, "gives", paths, out)  # tensors in them would be those of the trace
            kept[:] = [[result(x) if isinstance(x, Tensor) else _Result(constant=x) for x in out], structure]
            return values

        with mesh:
            module = trace(run, [meta(shards_of(x)[0]) for x in tensors], self.__name__)
        where = dict(zip(map(id, reversed(flat)), reversed(tree.paths(tree.unflatten(treedef, flat))), strict=True))
        for node, x in zip(graph_inputs(module.graph), tensors, strict=True):
            node.meta["path"] = where[id(x)]
            if isinstance(x, Array) and int(where[id(x)].split(".")[0]) in self.donate:
                node.meta["donated"] = True
        refuse_writes(module.graph, self.__name__)
        ends = zip(kept[0], tree.paths(tree.unflatten(kept[1], kept[0])), strict=True)
        paths = {r.position: path for r, path in reversed(list(ends)) if r.position >= 0}
        module.graph.output_node().meta["paths"] = [paths[i] for i in range(len(paths))]
        with mesh:
            module = applied(self.passes, module)
        return Program(module, [(r.spec, r.shape, r.constant, r.position) for r in kept[0]], kept[1], mesh.asked)


def _distinct(flat: Sequence[Any]) -> list[Tensor]:
    """The inputs of a program: every tensor once."""
    return [x for i, (x, at) in enumerate(zip(flat, places(flat), strict=True)) if at == i and isinstance(x, Tensor)]


def _like(x: Tensor, local: Tensor, mesh: Mesh) -> Tensor:
    return Array([local], x.spec, x.shape, mesh) if isinstance(x, Array) else local


def jit(
    f: Callable[..., Any],
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    backend: str = "graph",
    passes: Sequence[Pass] = default,
    max_traces: int = 8,
    cache: str | os.PathLike[str] | None = None,
) -> Any:
    """Trace `f(*arrays)` into a program of graphs, once for each signature, and run that.

    Everything is traced: forward, backward, collectives, optimizer; a loop over micro-batches is one graph called
    several times. All ranks have the same program. On a simulated mesh the ranks run it in lockstep, and what types
    call equal is compared. Attributes of `f` (`init`) stay; a line on stderr says what led to another trace.

    `.lower(*args)` gives the program without running it (`Lowered`): `.collectives()` lists what it sends, `.memory()`
    what it keeps, `.timeline()` when, `.as_text()` a listing; `.traces` holds the programs made so far.

    `donate_argnums`: arguments whose memory the call takes over and writes into; they cannot be used again.
    `static_argnums`: hashable arguments that are part of the signature. `backend`: `"graph"` (generated FX code),
    `"regional"` or `"inductor"` (compiled in part or whole), on GPUs `"cudagraph"`. `passes`: functions from graph to
    graph, in order (`sl.passes.default`; `[]`: the program as written).
    `cache`: a folder for programs: what is found there is not traced, by the other ranks or by the next run.
    On several processes the first call for each signature must be made by all of them, which compare arguments and
    collectives before anything is sent. Raises `SpecError` for Python that looks at a tensor's value, `RankError` where
    ranks differ.
    """
    if backend not in BACKENDS:
        raise SpecError(f"unknown backend `{backend}`; there are {listing(BACKENDS)}")
    if not callable(f) or inspect.isgeneratorfunction(f) or inspect.iscoroutinefunction(f):
        raise SpecError(f"jit takes a function that returns its results, not {f!r}")
    donate = argument_numbers(f, "donate_argnums", donate_argnums)
    static = argument_numbers(f, "static_argnums", static_argnums)
    if both := {*donate} & {*static}:
        raise SpecError(f"argument {min(both)} is static, so that there is nothing of it to donate")
    return Jitted(f, donate, static, backend, tuple(passes), max_traces, None if cache is None else os.fspath(cache))
