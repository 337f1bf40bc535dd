"""`jit`: a function on arrays traced once for each signature into a program of graphs, then run as generated code."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardlib import tree
from shardlib.array import Array
from shardlib.errors import ShardError, SpecError, listing
from shardlib.graph.program import BACKENDS, Collective, Run, collectives, graphs, runner
from shardlib.graph.trace import meta, trace
from shardlib.mesh import Mesh, current_mesh
from shardlib.simulate import run_lockstep
from shardlib.spec import Spec


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
    _run: Run | None = field(default=None, repr=False)

    @property
    def program(self) -> dict[str, GraphModule]:
        """The graphs by name; `step` calls the others."""
        return dict(graphs(self.module))

    def collectives(self) -> list[Collective]:
        """Every collective with its name, op, axis and the bytes each rank sends."""
        return collectives(self.module)

    def as_text(self) -> str:
        """The graphs as Python source."""
        return "\n\n".join(f"# {name}\n{module.code.strip()}" for name, module in self.program.items())

    def compile(self) -> "Lowered":
        """Compile with the backend, if that has not been done."""
        if self._run is None and not (self.mesh.simulate and self.mesh.total > 1):
            self._run = runner(self.module, self.backend)
        return self

    def __call__(self, inputs: list[list[Tensor]]) -> Any:
        """Run on the inputs of every rank that this process plays."""
        if self.mesh.simulate and self.mesh.total > 1:
            outputs = run_lockstep(self.mesh, self.module, inputs, self._equal())
        else:
            run = self.compile()._run
            assert run is not None
            outputs = [run(inputs[0])]
        return tree.unflatten(self.structure, [self._wrap(r, outputs) for r in self.results])

    def _wrap(self, result: _Result, outputs: Sequence[Sequence[Tensor]]) -> Any:
        if result.position < 0:
            return result.constant
        if result.spec is None:
            return outputs[0][result.position]
        return Array([out[result.position] for out in outputs], result.spec, result.shape, self.mesh)

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
        self, f: Callable[..., Any], donate: tuple[int, ...], static: tuple[int, ...], backend: str, max_traces: int
    ) -> None:
        self.f, self.donate, self.static, self.backend, self.max_traces = f, donate, static, backend, max_traces
        self.__name__ = getattr(f, "__name__", "jit")
        self._programs: dict[Any, Lowered] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["f"], name)

    @property
    def traces(self) -> list[Lowered]:
        """Every program traced so far."""
        return list(self._programs.values())

    def lower(self, *args: Any) -> Lowered:
        """The program for these arguments (arrays, or abstract ones), traced but not run."""
        return self._program(*self._flat(args))

    def __call__(self, *args: Any) -> Any:
        flat, treedef, static = self._flat(args)
        program = self._program(flat, treedef, static)
        mesh = program.mesh
        tensors = [x for x in flat if isinstance(x, Tensor)]
        gone = self._donated(args)
        shards = [x.donate() if id(x) in gone and isinstance(x, Array) else _shards(x) for x in tensors]
        ranks = range(mesh.total) if mesh.simulate else range(1)
        inputs = [[s[r if len(s) > 1 else 0] for s in shards] for r in ranks]
        del shards, tensors, flat
        return program(inputs)

    def _flat(self, args: Sequence[Any]) -> tuple[list[Any], Any, tuple[Any, ...]]:
        static = tuple(args[i] for i in self.static)
        flat, treedef = tree.flatten(tuple(None if i in self.static else a for i, a in enumerate(args)))
        return flat, treedef, static

    def _donated(self, args: Sequence[Any]) -> set[int]:
        """The ids of the arrays that this call takes over; refuses storage that two leaves share."""
        gone: dict[int, str] = {}
        storages: dict[int, str] = {}
        for i in self.donate:
            for path, x in zip(tree.paths(args[i]), tree.leaves(args[i])):
                if not isinstance(x, Array):
                    continue
                where = f"argument {i}, `{path}`"
                if id(x) in gone:
                    raise ShardError(f"{self.__name__}: {where} is the same array as {gone[id(x)]}; it cannot be donated twice")
                gone[id(x)] = where
                for s in {s.untyped_storage()._cdata for s in x.shards}:
                    if s in storages:
                        raise ShardError(f"{self.__name__}: {where} shares storage with {storages[s]}; clone one of them before donating")
                    storages[s] = where
        return gone

    def _program(self, flat: list[Any], treedef: Any, static: tuple[Any, ...]) -> Lowered:
        mesh = current_mesh()
        key = (treedef, static, tuple(_signature(x) for x in flat), mesh.name, mesh.simulate, self.backend, *_settings())
        found = self._programs.get(key)
        if found is None:
            if len(self._programs) >= self.max_traces:
                raise ShardError(
                    f"{self.__name__} was traced for {len(self._programs)} signatures, which is max_traces: shapes, specs or "
                    "static arguments change from call to call. Pad batches to few shapes, or raise max_traces"
                )
            found = self._programs[key] = self._trace(flat, treedef, static, mesh)
        return found

    def _trace(self, flat: list[Any], treedef: Any, static: tuple[Any, ...], mesh: Mesh) -> Lowered:
        began = time.perf_counter()
        tensors = [x for x in flat if isinstance(x, Tensor)]
        for x in tensors:
            if isinstance(x, Array) and x.mesh.shape != mesh.shape:
                raise SpecError(f"{self.__name__}: an argument lies on {x.mesh!r}, the current mesh is {mesh!r}")
        kept: list[Any] = []

        def run(*locals_: Tensor) -> list[Tensor]:
            fresh = iter(locals_)
            full = [_like(x, next(fresh)) if isinstance(x, Tensor) else x for x in flat]
            args = list(tree.unflatten(treedef, full))
            for i, value in zip(self.static, static, strict=True):
                args[i] = value
            out, structure = tree.flatten(self.f(*args))
            results, values = [], []
            for x in out:
                if not isinstance(x, Tensor):
                    results.append(_Result(constant=x))
                    continue
                spec = x.spec if isinstance(x, Array) else None
                results.append(_Result(spec, tuple(x.shape), position=len(values)))
                values.append(_shards(x)[0])
            kept[:] = [results, structure]
            return values

        module = trace(run, [meta(_shards(x)[0]) for x in tensors], self.__name__)
        full_paths = [p for p, x in zip(tree.paths(tree.unflatten(treedef, flat)), flat) if isinstance(x, Tensor)]
        for node, path in zip((n for n in module.graph.nodes if n.op == "placeholder"), full_paths):
            node.meta["path"] = path
        return Lowered(module, mesh, self.backend, kept[0], kept[1], time.perf_counter() - began)


def _shards(x: Tensor) -> list[Tensor]:
    return x.shards if isinstance(x, Array) else [x]


def _like(x: Tensor, local: Tensor) -> Tensor:
    return Array([local], x.spec, x.shape, x.mesh) if isinstance(x, Array) else local


_interned: dict[Any, int] = {}


def _signature(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return (type(x), x)
    local = _shards(x)[0]
    spec = x.spec if isinstance(x, Array) else None
    return (spec, tuple(x.shape), tuple(local.stride()), x.dtype, x.device)


def _settings() -> tuple[Any, ...]:
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.__version__


def jit(
    f: Callable[..., Any],
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    backend: str = "graph",
    max_traces: int = 8,
) -> Any:
    """Trace `f(*arrays)` into a program of graphs, once for each signature, and run that.

    Everything is traced: forward, backward, collectives, optimizer; a loop over micro-batches is one graph called
    several times. All ranks have the same program. On a simulated mesh the ranks run it in lockstep, and what types call
    equal is compared. `donate_argnums`: arguments whose memory the call takes over; they cannot be used again.
    `static_argnums`: hashable arguments that are part of the signature. `backend`: `"graph"` (generated FX code) or
    `"inductor"`. Attributes of `f` (`init`) stay. Raises `SpecError` for Python that looks at a tensor's value.
    """
    if backend not in BACKENDS:
        raise SpecError(f"unknown backend `{backend}`; there are {listing(BACKENDS)}")
    donate = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    return Jitted(f, donate, static, backend, max_traces)
