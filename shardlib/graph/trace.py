"""Functions traced to FX graphs of plain ops under fake tensors, with the types of what comes out.

A graph is the same on all ranks: groups are names, the rank enters as a value.
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # shapes without storage
from torch.fx import GraphModule, Node, Proxy
from torch.fx.experimental.proxy_tensor import (  # make_fx's own way to add a node for a call (as higher-order ops do)
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)

from shardlib import tree
from shardlib.errors import SpecError
from shardlib.flow import UNDECLARED
from shardlib.insert import isolated, per_device
from shardlib.mesh import Mesh
from shardlib.shard_map import DATA_DEPENDENT
from shardlib.types import Leaf, Region, paused, region

_STACKS = {"record_stack_traces": True} if "record_stack_traces" in inspect.signature(make_fx).parameters else {}


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


def trace(f: Callable[..., Sequence[Tensor]], metas: Sequence[Meta], name: str, lines: bool = True) -> GraphModule:
    """The graph of `f`, a function of plain tensors, wherever this is called from; dead nodes removed.

    `lines`: whether nodes know the lines of code that made them, which costs a fifth of the time.
    """
    with isolated():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            fakes = [m.empty() for m in metas]
        try:
            options: Any = _STACKS if lines else {}
            made = make_fx(lambda *xs: list(f(*xs)), tracing_mode="fake", _allow_non_fake_inputs=True, **options)
            module = made(*fakes)
        except DATA_DEPENDENT as e:
            raise SpecError(
                f"{name} takes a Python decision on a tensor's value (.item(), bool(), `if x > 0`), which a traced "
                f"program cannot: use torch.where, or run it without jit ({type(e).__name__})"
            ) from e
        return clean(module)


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
            target = name if name not in [t for t, _, _ in calls.values()] else f"{name}_{len(calls)}"
            mode.tracer.root.add_module(target, module)
            mode.tracer.graph.owning_module = mode.tracer.root  # type: ignore[assignment]  # where torch looks modules up
            calls[key] = (target, results, structure)
        target, results, structure = calls[key]
        return tree.unflatten(structure, _emit(mode, here, target, flat, results))

    return run


def _emit(mode: Any, here: Region, target: str, args: list[Tensor], results: list[Meta]) -> list[Tensor]:
    proxies = tuple(mode.tracer.unwrap_proxy(x) for x in args)
    out = mode.tracer.create_proxy("call_module", target, proxies, {})
    with paused():
        with disable_proxy_modes_tracing():
            fakes = [m.empty() for m in results]
        track_tensor_tree(fakes, out, constant=None, tracer=mode.tracer)
    return [m.label(here, x) for m, x in zip(results, fakes, strict=True)]


# ---- notes on nodes


def noted(kind: str, values: Any) -> Any:
    """`values`; while a program is traced, its nodes know that they hold `kind` (memory.py counts by it)."""
    mode = get_proxy_mode()
    if mode is not None:
        for proxy in map(mode.tracer.unwrap_proxy, tree.leaves(values)):
            if isinstance(proxy, Proxy):
                proxy.node.meta["kind"] = kind
    return values


@contextmanager
def early() -> Iterator[None]:
    """While a program is traced: what is computed inside stands in it as soon as its operands are there."""
    mode = get_proxy_mode()
    graph = None if mode is None else mode.tracer.graph
    before = set() if graph is None else set(graph.nodes)
    yield
    for node in () if graph is None else graph.nodes:
        if node not in before:
            node.meta["early"] = True


# ---- cleaning

_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.view_copy.default,
}


def _schema(node: Node) -> Any:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _nodes(arg: Any) -> list[Node]:
    """The nodes among one argument: itself, or those of a list."""
    return [a for a in (arg if isinstance(arg, (list, tuple)) else (arg,)) if isinstance(a, Node)]


def aliased(node: Node, written: bool = False) -> list[Node]:
    """The arguments that a call's result may share memory with, or with `written` those that it writes into."""
    if node.target is operator.getitem:
        return [] if written else _nodes(node.args[0])
    schema = _schema(node)
    if schema is None:
        return []
    name = schema.name.split("::")[1]
    if name in UNDECLARED:
        return [a for arg in node.args[3:5] for a in _nodes(arg)] if written and node.args[5] else []
    if not written and "unsafe" in name:
        return _nodes(node.args[0])
    given = [*zip(schema.arguments, node.args, strict=False)]
    given += [(a, node.kwargs[a.name]) for a in schema.arguments if a.name in node.kwargs]
    said = [(a.alias_info, arg) for a, arg in given if a.alias_info is not None]
    return [n for info, arg in said if info.is_write or not written for n in _nodes(arg)]


def clean(module: GraphModule) -> GraphModule:
    """Without aliases and views that change nothing, and without dead nodes, collectives included (FX keeps those:
    `wait_tensor` counts as impure there)."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.args and isinstance(node.args[0], Node):
            same = node.target in _ALIASES
            if node.target in _VIEWS:
                a, b = node.args[0].meta.get("val"), node.meta.get("val")
                same = (
                    isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.stride() == b.stride()
                )
            if same:
                if "kind" in node.meta:
                    node.args[0].meta.setdefault("kind", node.meta["kind"])
                node.replace_all_uses_with(node.args[0])
    _moved_early(module.graph)
    return dead_code(module)


def _moved_early(graph: torch.fx.Graph) -> None:
    """Put the nodes that `early` marked behind the last of their operands, and behind what wrote into those."""
    place: dict[Node, tuple[int, int]] = {}
    roots, written = _roots(graph), dict[Node, int]()
    inputs = sum(n.op == "placeholder" for n in graph.nodes)
    for i, node in enumerate(graph.nodes):
        operands = node.all_input_nodes
        after = [place[a][0] for a in operands] + [written[r] for a in operands for r in roots[a] if r in written]
        place[node] = (max([inputs, *after]), i) if "early" in node.meta else (i, i)
        written |= {r: place[node][0] for a in aliased(node, written=True) for r in roots[a]}
    for node, following in pairwise(sorted(place, key=place.__getitem__)):
        if node.next is not following:
            node.append(following)


def _roots(graph: torch.fx.Graph) -> dict[Node, set[Node]]:
    """For every node, the nodes whose storage it may share: itself, or what it is a view of."""
    roots: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        roots[node] = {r for a in aliased(node) for r in roots[a]} or {node}
    return roots


def dead_code(module: GraphModule) -> GraphModule:
    """Remove every node that no output needs. A write in place is needed where its storage is."""
    graph = module.graph
    roots = _roots(graph)
    writes = [(n, {r for a in into for r in roots[a]}) for n in graph.nodes if (into := aliased(n, written=True))]
    needed: set[Node] = set()
    stack = [n for n in graph.nodes if n.op in ("output", "placeholder")]
    while stack:
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack.extend(node.all_input_nodes)
        live = {r for n in needed for r in roots[n]}
        stack = [n for n, into in writes if n not in needed and into & live]
    for node in reversed(list(graph.nodes)):
        if node not in needed:
            graph.erase_node(node)
    module.recompile()
    return module


def sliced(module: GraphModule, outputs: Sequence[int]) -> GraphModule:
    """The graph of some of the outputs."""
    made = GraphModule(module, torch.fx.Graph())
    values: dict[Node, Node] = {}
    results = made.graph.graph_copy(module.graph, values)
    made.graph.output([results[i] for i in outputs])  # type: ignore[index]
    return dead_code(made)


def used_placeholders(module: GraphModule) -> list[bool]:
    """Which inputs a graph reads."""
    return [bool(n.users) for n in module.graph.nodes if n.op == "placeholder"]
