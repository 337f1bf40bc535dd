"""A function's forward and backward pass as two graphs, traced at once and cut between what is kept and what is not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # the graph that is being traced has no public name

from shardlib import tree
from shardlib.autodiff import as_gradient, dual
from shardlib.errors import SpecError
from shardlib.graph.forms import ARRANGE, at_rest
from shardlib.graph.nodes import (
    STARTS,
    WAIT,
    acts,
    aliased,
    ancestors,
    arg,
    clean,
    inputs,
    outputs,
    roots,
)
from shardlib.graph.trace import Meta, meta, trace
from shardlib.insert import per_device
from shardlib.remat import distinct
from shardlib.types import Region

aten = torch.ops.aten


class Layer(GraphModule):
    """A graph of one turn of a loop."""


@dataclass
class Joint:
    """`forward(*inputs)` gives `results`, then what `backward` keeps; `backward(*kept, *of_inputs, *cotangents)` the
    gradients of the inputs `at`, the cotangents being those of the results `floats`."""

    forward: GraphModule
    backward: GraphModule
    results: list[Meta]
    structure: Any
    kept: list[Meta]
    of_inputs: list[int]
    floats: list[int]
    cotangents: list[Meta]
    gradients: list[Meta]


def joint(
    f: Callable[..., Any],
    here: Region,
    metas: Sequence[Meta],
    at: Sequence[int],
    name: str,
    of: Callable[[Any], Any] = lambda out: out,
) -> Joint:
    """Trace `f`, a per-device function of flat tensors, and its derivative by the inputs `at`.

    `of`: the first part of the result, which is what is differentiated.
    Kept is what the backward pass reads of the forward one, but for views, which are made again, and gathered
    parameters, which are gathered again. Raises `SpecError` where `f` writes in place.
    """
    found: dict[str, Any] = {}

    def run(*xs: Tensor) -> list[Tensor]:
        with per_device(here.mesh) as inner:
            inner.where, inner.sizes, inner.bound_by = here.where, dict(here.sizes), dict(here.bound_by)
            inner.reduce = here.reduce
            for x, m in zip(xs, metas, strict=True):
                inner.entered.add(x.untyped_storage()._cdata)
                m.label(inner, x)

            def of_floats(*diff: Tensor) -> Any:
                full = list(xs)
                for i, x in zip(at, diff, strict=True):
                    full[i] = x
                out = f(*full)
                flat, found["structure"] = tree.flatten(out)
                for path, y in zip(tree.paths(out), flat, strict=True):
                    if not isinstance(y, Tensor):
                        raise SpecError(f"result `{path}` is {y!r}, which is no tensor: make it one")
                flat = distinct(flat, xs)
                first = flat[: len(tree.leaves(of(out)))]
                found["floats"] = [i for i, y in enumerate(first) if y.is_floating_point() and at]
                rest = tuple(y for i, y in enumerate(flat) if i not in found["floats"])
                nothing = (torch.zeros((), device=xs[0].device),) if at and not found["floats"] else ()
                return tuple(flat[i] for i in found["floats"]) or nothing, rest  # torch differentiates something

            if at:
                out, pull, rest = torch.func.vjp(of_floats, *(xs[i] for i in at), has_aux=True)  # type: ignore[misc]
            else:
                (out, rest), pull = of_floats(), lambda _: ()
            given = []
            for y in out:
                stand_in = torch.empty(y.shape, dtype=y.dtype, device=y.device)
                inner.set_type(stand_in, dual(inner.type_of(y)))
                given.append(stand_in)
            with torch.no_grad():
                pulled = pull(tuple(given))
            pairs = zip(at, pulled, strict=True)
            gradients = [as_gradient(inner, xs[i], g, name) for i, g in pairs]
            tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
            out, given = out[: len(found["floats"])], given[: len(found["floats"])]
            for i, y in enumerate(given):
                tracer.unwrap_proxy(y).node.meta["cotangent"] = i
            floats, others = iter(out), iter(rest)
            flat = [next(floats) if i in found["floats"] else next(others) for i in range(len(out) + len(rest))]
            for key, ys in (("results", flat), ("cotangents", given), ("gradients", gradients)):
                found[key] = [meta(y, inner) for y in ys]
            found["gradients"] = [replace(m, leaf=None, padded=False) for m in found["gradients"]]
            return [*flat, *gradients]

    module = trace(run, metas, name)
    forward, backward, kept, of_inputs = _cut(module, len(found["results"]), len(found["cotangents"]))
    return Joint(
        forward,
        backward,
        found["results"],
        found["structure"],
        [_plain(n, here) for n in kept],
        of_inputs,
        found["floats"],
        found["cotangents"],
        found["gradients"],
    )


def _plain(node: Node, here: Region) -> Meta:
    """What is kept, which only the backward graph reads: its type does not matter."""
    return replace(meta(node.meta["val"]), kind=here.invariant)


def _cut(module: GraphModule, results: int, cotangents: int) -> tuple[GraphModule, GraphModule, list[Node], list[int]]:
    """The graphs of both passes, what is kept between them, and which inputs the second reads."""
    order, ends, given = list(module.graph.nodes), outputs(module.graph), inputs(module.graph)
    first = ancestors(ends[:results])
    acting = [n for n in order if acts(n)]
    first |= {n for n in acting if first.issuperset(n.all_input_nodes)}
    held = roots(module.graph)
    for i, n in enumerate(order):
        into = {r for a in aliased(n, written=True) for r in held[a]} if n in first else set()
        if into:  # what is read before it is written (a copy, which the second pass wants) is read in the first
            first |= ancestors(m for m in order[:i] if any(held[a] & into for a in m.all_input_nodes))
        if n.target is getitem and arg(n) in first:  # of several results all, also those that the second alone reads
            first.add(n)
    stand_ins = {n.meta["cotangent"]: n for n in order if "cotangent" in n.meta}
    second = ancestors([*ends[results:], *acting]) - first - {*given} - {*stand_ins.values()}
    read = [a for n in order if n in second for a in n.all_input_nodes] + ends[results:]
    for a in read:  # grows
        if a not in second and a in first and again(a):
            second.add(a)
            read += a.all_input_nodes
    _refuse_writes_across(module.graph, first, second)
    kept = [n for n in order if n in {*read} & first - second and n.op != "placeholder"]
    of_inputs = [i for i, n in enumerate(given) if n in {*read}]
    forward = _graph(module, given, [n for n in order if n in first], [*ends[:results], *kept], "forward")
    missing = [stand_ins.get(i) for i in range(cotangents)]
    reads = [*kept, *(given[i] for i in of_inputs), *missing]
    backward = _graph(module, reads, [n for n in order if n in second], ends[results:], "backward")
    return forward, backward, kept, of_inputs


def _refuse_writes_across(graph: Graph, first: set[Node], second: set[Node]) -> None:
    """Raise where one pass reads what another writes into."""
    held = roots(graph)
    for node in graph.nodes:
        into = {r for a in aliased(node, written=True) for r in held[a]}
        touch = {n for n, rs in held.items() if rs & into}
        if touch and not ((node in first and not touch & second) or (node in second and not touch & first)):
            raise SpecError(
                f"`{node.target}` writes in place into a value that the forward and the backward pass both read: take "
                "the op that makes a new tensor"
            )


def again(node: Node) -> bool:
    """Whether a value of the forward pass is made again: views cost nothing, gathered parameters are not kept, if no
    policy of `remat` says so."""
    if "kept" in node.meta:
        return False
    while (node.target is aten.clone.default and _arranges(node)) or node.target is WAIT:
        node = arg(node)  # a gathered parameter may have been put in order
    if STARTS.get(node.target) == "all_gather":
        return at_rest(arg(node)) is not None
    if node.target is getitem:
        return arg(node).target in (aten.split.Tensor, aten.unbind.int)
    return node.target is aten._unsafe_view.default or bool(aliased(node))


def _arranges(node: Node) -> bool:
    """Whether a copy puts something gathered in order."""
    while node.target in ARRANGE:
        node = arg(node)
    return node.target is WAIT


def _graph(
    root: GraphModule, given: Sequence[Node | None], nodes: Sequence[Node], ends: Sequence[Node], part: str
) -> GraphModule:
    """A graph of some of another's nodes, of one part of a derivative; an input that is None is not read."""
    graph, copies = Graph(), dict[Node, Node]()
    for i, n in enumerate(given):
        made = graph.placeholder(f"x{i}")
        if n is not None:
            made.meta = {k: v for k, v in n.meta.items() if k != "cotangent"}
            copies[n] = made
    for n in nodes:
        if n not in copies:
            copies[n] = graph.node_copy(n, copies.__getitem__)
            copies[n].meta.setdefault(part, 0)
    graph.output([copies[n] for n in ends])
    return clean(Layer(root, graph))
