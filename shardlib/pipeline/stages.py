"""The functions of a pipeline as graphs: forward, backward, and the backward in two, traced once for each shape."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shardlib import tree
from shardlib.accumulate import same_leaves
from shardlib.autodiff import accepted, aux_tree, parts_of_loss
from shardlib.errors import SpecError, defined
from shardlib.graph.joint import Joint, again, joint
from shardlib.graph.nodes import ancestors, clean, inputs, outputs, used_placeholders
from shardlib.graph.trace import Meta, without_values
from shardlib.insert import isolated
from shardlib.mesh import Inner
from shardlib.pipeline.sums import Place, adding
from shardlib.spec import Dim
from shardlib.types import Region, region


def layered(m: Meta, layers: int) -> Meta:
    """A stacked parameter as a stage of so many layers has it."""
    return replace(m, shape=(layers, *m.shape[1:]))


@dataclass
class Halves:
    """A backward graph in two. `first`, given the inputs `reads_first` of the whole, gives the gradients of what the
    function was handed, then what it hands over (`over`, as it was traced); `second`, given the inputs `reads_second`
    and that, the gradients of the parameters."""

    first: GraphModule
    second: GraphModule
    over: list[Tensor]
    reads_first: list[int]
    reads_second: list[int]


@dataclass
class Traced:
    """One function for one shape of its inputs: parameters, what the function before gave (`handed`), the micro-batch,
    `extra`, the key, the number of the micro-batch. The backward gives the gradients of the parameters `at`, then of
    the floats among what was handed; that of a parameter whose `layers` are not 0 as so many, for each layer its own.
    The last `changes` of what it gives are the new `extra`."""

    joint: Joint
    at: list[int]
    layers: list[int]
    coefficients: tuple[float, ...] = ()
    changes: int = 0
    _halves: Halves | None = None
    _adding: dict[Any, GraphModule] = field(default_factory=dict)

    @property
    def given(self) -> list[Meta]:
        """What it gives, in order."""
        return [replace(m, leaf=None, padded=False) for m in self.joint.results]

    @property
    def weights(self) -> range:
        """Of the last function, which of its results are the weights."""
        return range(len(self.coefficients), 2 * len(self.coefficients))

    @property
    def of_parameters(self) -> int:
        """How many of the results of the backward are gradients of parameters."""
        return sum(max(1, n) for n in self.layers)

    def halves(self) -> Halves:
        """The backward in two."""
        if self._halves is None:
            self._halves = _halved(self.joint.backward, self.of_parameters)
        return self._halves

    def adding(
        self, module: GraphModule, results: Sequence[Meta], into: Sequence[Meta | None], new: Sequence[bool]
    ) -> tuple[GraphModule, list[Meta]]:
        """A graph of its backward that adds gradients to sums, and what that gives. `into`: for each parameter that has
        a gradient its sum, or None where that is one of the results still; `new`: whether the sum has no value yet."""
        sums, places = [m for m in into if m], list[Place | None]()
        numbers = iter(range(len(sums)))
        for m, layers, first in zip(into, self.layers, new, strict=True):
            k = next(numbers) if m else None
            places += [None if k is None else Place(k, n if layers else None, first) for n in range(max(1, layers))]
        places += [None] * (len(results) - len(places))
        key = (id(module), *places, *sums)
        if sums and key not in self._adding:
            like = without_values(sums)
            with isolated():
                self._adding[key] = adding(module, places, like)
        rest = [m for m, place in zip(results, places, strict=True) if place is None]
        return self._adding.get(key, module), [*rest, *sums]


@dataclass(frozen=True)
class Inputs:
    """How the flat inputs of a function are trees again: `params` and `handed` are structures, with the leaves that
    stand at several places of the former."""

    params: Any
    sources: tuple[int, ...]
    handed: Any
    batch: Any
    extra: Any
    key: bool
    dim: Dim | None
    count: int
    reduce: torch.dtype | None

    def of(self, xs: Sequence[Tensor]) -> tuple[Any, Any, Any, Any, Tensor | None, Tensor | None]:
        """Parameters, what was handed, the micro-batch, extra, key and number."""
        it = iter(xs)
        own = [next(it) for _ in range(len(set(self.sources)))]
        place = {at: i for i, at in enumerate(dict.fromkeys(self.sources))}
        params = tree.unflatten(self.params, [own[place[at]] for at in self.sources])
        handed = tree.unflatten(self.handed, [next(it) for _ in range(self.handed.num_leaves)])
        batch = tree.unflatten(self.batch, [next(it) for _ in range(self.batch.num_leaves)])
        extra = tree.unflatten(self.extra, [next(it) for _ in range(self.extra.num_leaves)])
        return params, handed, batch, extra, next(it) if self.key else None, next(it, None)


def traced(
    f: Callable[..., Any],
    what: str,
    mesh: Inner,
    metas: Sequence[Meta],
    how: Inputs,
    at: Sequence[int],
    differentiated: bool,
) -> Traced:
    """Trace `first(params, mb, key)`, `stage(blocks, x, mb, key)` or `last(params, x, mb, key)` (`what` says which);
    of the last the result is `(totals, (weights, metrics))`, whose totals alone are differentiated."""
    here = Region(mesh)
    here.where, here.reduce = getattr(f, "__name__", what), how.reduce
    floats = [i for i, m in enumerate(metas) if m.dtype.is_floating_point or m.dtype.is_complex]
    own = len(set(how.sources))
    handed = [i for i in floats if own <= i < own + how.handed.num_leaves]
    coefficients: list[float] = []

    def run(*xs: Tensor) -> Any:
        params, x, batch, extra, key, number = how.of(xs)
        with region().names(xs), region().running(how.dim, number, how.count, how.reduce):
            args = (params, batch) if what == "first" else (params, x, batch)
            more = accepted(f, len(args), extra=extra)
            out = f(*args, *((key,) if takes_another(f, len(args)) else ()), **more)
            return _loss(f, out, extra, coefficients) if what == "last" else _passed(f, out)

    last = what == "last"
    made = joint(
        run,
        here,
        metas,
        [*at, *handed] if differentiated else [],
        getattr(f, "__name__", what),
        (lambda out: out[0]) if last else (lambda out: out),
    )
    used = used_placeholders(made.forward)
    made, layers = _by_layer(made, [used[i] for i in at])
    changes = len(tree.leaves(tree.unflatten(made.structure, made.results)[1][1][1])) if last else 0
    return Traced(made, [i for i in at if used[i]], layers, tuple(coefficients), changes)


def _by_layer(made: Joint, used: Sequence[bool]) -> tuple[Joint, list[int]]:
    """Without the gradients of the parameters that are not used, which are zero; those that are stacked, in a loop over
    layers, as the layers' own, which are added up over micro-batches before they are stacked. How many each is then."""
    graph, layers = made.backward.graph, list[int]()
    results, gradients = list[Any](), list[Meta]()
    for i, (x, m) in enumerate(zip(outputs(graph), made.gradients, strict=True)):
        of_parameter, pieces = i < len(used), []
        if of_parameter and not used[i]:
            continue
        if of_parameter and x.target is torch.ops.aten.stack.default and len(x.args) == 1:
            pieces = list(x.args[0])
        if of_parameter:
            layers.append(len(pieces))
        results += pieces or [x]
        gradients += [replace(m, shape=m.shape[1:], stride=m.stride[1:])] * len(pieces) or [m]
    if made.gradients:
        graph.output_node().args = (results,)
        clean(made.backward).recompile()
    return replace(made, gradients=gradients), layers


def takes_another(f: Callable[..., Any], given: int) -> bool:
    """Whether a function takes the key after `given` other arguments: one of that name, or one without a default."""
    try:
        parameters = list(inspect.signature(f).parameters.values())[given:]
    except (TypeError, ValueError):
        return True
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters if _asks(p))


def _asks(p: inspect.Parameter) -> bool:
    return p.name == "key" or (p.default is p.empty and p.name != "extra")


def _passed(f: Callable[..., Any], out: Any) -> Any:
    """What a stage hands to the next: tensors, contiguous."""
    for path, x in zip(tree.paths(out), tree.leaves(out), strict=True):
        if not isinstance(x, Tensor):
            raise SpecError(
                f"`{path}` of what {getattr(f, '__name__', 'a stage')} returns is of type {type(x).__name__}; stages "
                "hand on trees of tensors"
            )
    return tree.map_(lambda x: x.contiguous(), out)


def _loss(f: Callable[..., Any], out: Any, extra: Any, kept: list[float]) -> Any:
    here = region()
    with defined(f):
        mean, aux = parts_of_loss(out)
        if aux.extra is not None:
            aux = replace(aux, extra=same_leaves("the last function", aux.extra, extra))
            for path, x, old in zip(tree.paths(extra), tree.leaves(aux.extra), tree.leaves(extra), strict=True):
                if here.type_of(x) != here.type_of(old):
                    raise SpecError(
                        f"the last function made `{path}` of its state {here.describe(x)}; it was {here.describe(old)}"
                    )
    kept[:] = [t.coefficient for t in mean.terms]
    return tuple(t.total for t in mean.terms), (tuple(t.weight for t in mean.terms), aux_tree(aux))


# ---- the backward in two


def _halved(module: GraphModule, weights: int) -> Halves:
    """Cut a backward graph between the gradients of what was handed and those of its first `weights` outputs."""
    graph = _inlined(module)
    order, ends, given = list(graph.graph.nodes), outputs(graph.graph), inputs(graph.graph)
    own, handed = ends[:weights], ends[weights:]
    first = ancestors(handed) - {*given}
    first |= {n for n in order if n.target is getitem and n.args[0] in first and not again(n)}  # one of several results
    second = ancestors(own) - first - {*given}
    read = [a for n in order if n in second for a in n.all_input_nodes] + own
    for a in read:  # grows: views are made again
        if a in first and a not in second and again(a):
            second.add(a)
            read += a.all_input_nodes
    over = [n for n in order if n in {*read} & first - second]
    one, reads_one = _part(graph, given, [n for n in order if n in first], [*handed, *over], [])
    two, reads_two = _part(graph, given, [n for n in order if n in second], own, over)
    return Halves(one, two, [n.meta["val"] for n in over], reads_one, reads_two)


def _part(
    root: GraphModule, given: list[Node], nodes: list[Node], ends: list[Node], more: list[Node]
) -> tuple[GraphModule, list[int]]:
    """A graph of some nodes, and which inputs it reads, before `more`."""
    read = {a for n in nodes for a in n.all_input_nodes} | {*ends}
    reads = [i for i, n in enumerate(given) if n in read]
    graph, copies = Graph(), dict[Node, Node]()
    for n in [*(given[i] for i in reads), *more]:
        copies[n] = graph.placeholder(n.name)
        copies[n].meta = dict(n.meta)
    for n in nodes:
        copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output([copies[n] for n in ends])
    return clean(GraphModule(root, graph)), reads


def _inlined(module: GraphModule) -> GraphModule:
    """The graph with those that it calls copied in."""
    graph, copies = Graph(), dict[Node, Any]()
    for node in module.graph.nodes:
        if node.op == "call_module":
            child = _inlined(module.get_submodule(node.target))  # type: ignore[arg-type]
            inner = dict(zip(inputs(child.graph), (copies[a] for a in node.args), strict=True))  # type: ignore[index]
            copies[node] = graph.graph_copy(child.graph, inner)
        elif node.op == "call_function" and node.args and isinstance(copies.get(node.args[0]), (list, tuple)):
            copies[node] = copies[node.args[0]][node.args[1]]  # type: ignore[index]
        elif node.op == "output":
            graph.output(torch.fx.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule(module, graph)
