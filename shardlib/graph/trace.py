"""Functions traced to FX graphs of plain ops under fake tensors, with the types of what comes out.

A graph is the same on all ranks: groups are names, the rank enters as a value.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager  # without storage
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import (  # make_fx's own way to add a node for a call (as higher-order ops do)
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
)

from shardlib import tree
from shardlib.errors import SpecError, pointed
from shardlib.graph.lines import Lines, said_at
from shardlib.graph.nodes import aliased, clean, op_name, roots
from shardlib.graph.record import Recording, track
from shardlib.insert import isolated, per_device
from shardlib.mesh import Mesh
from shardlib.shard_map import DATA_DEPENDENT
from shardlib.types import Leaf, Region, paused, region


@dataclass(frozen=True)
class Meta:
    """A tensor without its values: enough to trace with it, and to type what a call gives."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: str | None = None
    leaf: Leaf | None = None
    padded: bool = False

    def empty(self) -> Tensor:
        """A tensor like it; without storage under a fake mode."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def label(self, here: Region, x: Tensor) -> Tensor:
        """Give `x` the type and leaf."""
        here.set_type(x, self.kind or here.invariant)
        return x if self.leaf is None else here.mark(x, self.leaf, self.padded)


def strides(x: Tensor) -> tuple[int, ...]:
    """Its strides; where it is contiguous, those of its shape (dimensions of size 1 may have any)."""
    if not x.is_contiguous():
        return tuple(x.stride())
    sizes = [max(1, n) for n in x.shape]
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def meta(x: Tensor, here: Region | None = None) -> Meta:
    """What `x` is, with its type where a region is given."""
    plain = Meta(tuple(x.shape), strides(x), x.dtype, x.device)
    if here is None:
        return plain
    return Meta(
        plain.shape,
        plain.stride,
        plain.dtype,
        plain.device,
        here.type_of(x),
        here.leaves.get(x),
        here.padded.get(x) is not None,
    )


def without_values(metas: Sequence[Meta]) -> list[Tensor]:
    """Tensors like these without values, wherever this is called from."""
    with isolated(), FakeTensorMode():
        return [m.empty() for m in metas]


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python does not look for garbage in cycles: a trace makes none worth the time that the search takes."""
    held = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if held:
            gc.enable()


def trace(f: Callable[..., Sequence[Tensor]], metas: Sequence[Meta], name: str, lines: bool = True) -> GraphModule:
    """The graph of `f`, a function of plain tensors, wherever this is called from; dead nodes removed.

    `lines`: whether nodes know the lines of code that made them.
    """
    with isolated():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            fakes = [m.empty() for m in metas]
        start = sys._getframe()

        def run(*xs: Tensor) -> list[Tensor]:
            tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
            create = tracer.graph.create_node
            if lines:
                noted = Lines(start).noted
                tracer.create_node, create = noted(tracer.create_node), noted(create)
            with Recording(mode, tracer, create):
                return list(f(*xs))

        try:
            module = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
        except DATA_DEPENDENT as e:
            with pointed():
                raise SpecError(
                    f"{name} takes a Python decision on a tensor's value (.item(), bool(), `if x > 0`), which a traced "
                    f"program cannot: use torch.where, or run it without jit ({type(e).__name__})"
                ).with_traceback(e.__traceback__) from e
        for node in module.graph.find_nodes(op="get_attr"):
            if isinstance(getattr(module, node.target, None), FakeTensor):
                raise SpecError(
                    f"{name} reads a value that was kept from an earlier trace{said_at(node)}, where it stood for the "
                    "values of any call: return it instead, and pass it in"
                )
        return clean(module)


def refuse_writes(graph: Graph, name: str) -> None:
    """Raise where a graph writes into an input: what is not donated is not touched, and ranks may share it."""
    writes = [n for n in graph.nodes if aliased(n, written=True)]
    held = roots(graph) if writes else {}
    for node in writes:
        into = {r for a in aliased(node, written=True) for r in held[a] if r.op == "placeholder"}
        if into:
            path = into.pop().meta["path"]
            raise SpecError(
                f"{name}: `{op_name(node)}` writes in place into the argument `{path}`{said_at(node)}\n"
                "  Write into a clone, or take the op that makes a new tensor"
            )


def typed(
    f: Callable[..., Any], mesh: Mesh, metas: Sequence[Meta], name: str, lines: bool = True
) -> tuple[GraphModule, list[Meta], Any]:
    """The graph of a per-device function of flat tensors: (graph, what its results are, their structure)."""
    found: list[Any] = []

    def run(*xs: Tensor) -> list[Tensor]:
        with per_device(mesh) as here:
            here.where = name
            for x, m in zip(xs, metas, strict=True):
                here.entered.add(x.untyped_storage()._cdata)
                m.label(here, x)
            flat, treedef = tree.flatten(f(*xs))
            found[:] = [[meta(x, here) for x in flat], treedef]
            return flat

    return trace(run, metas, name, lines), found[0], found[1]


# ---- calls: a graph called from a graph


class _Calls(dict[Any, tuple[str, list[Meta], Any]]):
    """The graphs that one trace calls, by function, structure and what goes in."""


_calls: WeakKeyDictionary[Any, _Calls] = WeakKeyDictionary()


def called(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, a per-device function of trees of tensors; while a program is traced, one graph that is called.

    Everything it needs must be an argument. So a loop over micro-batches stays a loop of calls, not `n` copies.
    """

    def run(*args: Any) -> Any:
        mode = get_proxy_mode()
        if mode is None:
            return f(*args)
        here = region()
        flat, treedef = tree.flatten(args)
        metas = tuple(meta(x, here) for x in flat)
        calls = _calls.setdefault(mode.tracer, _Calls())
        key = (f, treedef, metas)
        if key not in calls:
            module, results, structure = typed(lambda *xs: f(*tree.unflatten(treedef, xs)), here.mesh, metas, name)
            calls[key] = (added(name, module), results, structure)
        target, results, structure = calls[key]
        return tree.unflatten(structure, call(target, flat, results))

    return run


def added(name: str, module: GraphModule) -> str:
    """The name under which the program that is being traced can call a graph."""
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    taken = dict(tracer.root.named_children())
    if taken.get(name) is module:
        return name
    target = name if name not in taken else f"{name}_{len(taken)}"
    tracer.root.add_module(target, module)
    tracer.graph.owning_module = tracer.root  # where torch looks modules up
    return target


_analysing: ContextVar[bool] = ContextVar("analysing", default=False)


@contextmanager
def analysing() -> Iterator[None]:
    """Inside, a program is traced only to see what depends on what: it will not run."""
    held = _analysing.set(True)
    try:
        yield
    finally:
        _analysing.reset(held)


def is_analysing() -> bool:
    """Whether that is so."""
    return _analysing.get()


def _fakes(like: Sequence[Tensor], metas: Sequence[Meta]) -> list[Tensor]:
    """Tensors without values beside those of a trace, made at once."""
    mode = next((x.fake_mode for x in like if isinstance(x, FakeTensor)), None)
    if mode is None:
        return [m.empty() for m in metas]
    with in_kernel_invocation_manager(mode):
        plain = [torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="meta") for m in metas]
    return [FakeTensor(mode, x, m.device) for x, m in zip(plain, metas, strict=True)]


def call(target: str, args: Sequence[Tensor], results: Sequence[Meta]) -> list[Tensor]:
    """Call a graph of the program that is being traced."""
    mode, here = get_proxy_mode(), region()
    assert mode is not None
    tracer: Any = mode.tracer
    proxies = tuple(tracer.unwrap_proxy(x) for x in args)
    out = tracer.create_proxy("call_module", target, proxies, {})
    with paused():
        with disable_proxy_modes_tracing():
            fakes = _fakes(args, results)
        track(fakes, out.node, tracer, tracer.create_node)
    return [m.label(here, x) for m, x in zip(results, fakes, strict=True)]
