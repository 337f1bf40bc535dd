"""Nodes of traced graphs: what shares memory with what, what nothing needs, what a pass may move."""

import itertools
import math
import operator
from collections.abc import Iterable, Sequence, Set
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager  # what shows the shapes of nodes
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from shardlib import debug as debug  # defines an op
from shardlib import posted
from shardlib import wire as wire  # defines the ops
from shardlib.flow import UNDECLARED
from shardlib.policy import SAVE_NAME
from shardlib.switch import Switch

WAIT = torch.ops._c10d_functional.wait_tensor.default
ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, SAVE_NAME}
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.view_copy.default,
}


def schema(node: Node) -> Any:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _nodes(arg: Any) -> list[Node]:
    """The nodes among one argument: itself, or those of a list."""
    return [a for a in (arg if isinstance(arg, (list, tuple)) else (arg,)) if isinstance(a, Node)]


class _Shared(NamedTuple):
    """Which arguments of an op, by position and name, its result may share memory with (`same`) or it writes into.
    `unless`: the position of an argument without which it writes into none. `returns`: whether it gives anything."""

    same: tuple[tuple[int, str], ...] = ()
    written: tuple[tuple[int, str], ...] = ()
    unless: int | None = None
    returns: bool = True


@cache
def _shared(target: Any) -> _Shared:
    said_by = getattr(target, "_schema", None)
    if target is operator.getitem or target is WAIT:
        return _Shared(((0, ""),))
    if said_by is None:
        return _Shared()
    name, returns = said_by.name.split("::")[1], bool(said_by.returns)
    if name in UNDECLARED:
        return _Shared((), ((3, ""), (4, "")), 5, returns)
    said = [(i, a.name, a.alias_info.is_write) for i, a in enumerate(said_by.arguments) if a.alias_info is not None]
    same = ((0, ""),) if "unsafe" in name else tuple((i, word) for i, word, _ in said)
    return _Shared(same, tuple((i, word) for i, word, writes in said if writes), None, returns)


def aliased(node: Node, written: bool = False) -> list[Node]:
    """The arguments that a call's result may share memory with, or with `written` those that it writes into."""
    if node.op != "call_function":
        return []
    shared = _shared(node.target)
    places = shared.written if written else shared.same
    if not places:
        return []
    args, kwargs = node.args, node.kwargs
    if shared.unless is not None and not args[shared.unless]:
        return []
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in places]
    return [n for one in given for n in _nodes(one)]


def acts(node: Node) -> bool:
    """Whether a node is there for what it does: its op returns nothing and writes into nothing."""
    return node.op == "call_function" and not _shared(node.target).returns and not aliased(node, written=True)


def clean(module: GraphModule) -> GraphModule:
    """Without aliases and views that change nothing, and without dead nodes, collectives included (FX keeps those:
    `wait_tensor` counts as impure there). A node knows the `names` that `save_name` gave its value."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.args and isinstance(node.args[0], Node):
            same = node.target in ALIASES
            if node.target is SAVE_NAME:
                node.args[0].meta.setdefault("names", []).append(node.args[1])
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


def _moved_early(graph: Graph) -> None:
    """Put the nodes that are marked `early` behind the last of their operands, and behind what wrote into those."""
    place: dict[Node, tuple[int, int]] = {}
    held, last = roots(graph), dict[Node, int]()
    first = len(inputs(graph))
    for i, node in enumerate(graph.nodes):
        operands = node.all_input_nodes
        after = [place[a][0] for a in operands] + [last[r] for a in operands for r in held[a] if r in last]
        place[node] = (max([first, *after]), i) if "early" in node.meta else (i, i)
        last |= {r: place[node][0] for a in aliased(node, written=True) for r in held[a]}
    for node, following in pairwise(sorted(place, key=place.__getitem__)):
        if node.next is not following:
            node.append(following)


def roots(graph: Graph) -> dict[Node, set[Node]]:
    """For every node, the nodes whose storage its value lies in: itself, or what it is a view of."""
    found: dict[Node, set[Node]] = {}
    children: dict[Any, list[tuple[set[int], set[int]]]] = {}
    first: dict[tuple[Node, int], Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if node.target is not operator.getitem or not isinstance(source, Node):
            held = {r for a in aliased(node) for r in found[a]}
        elif source.op == "call_module":
            if source.target not in children:
                children[source.target] = _returned(graph.owning_module.get_submodule(source.target))  # type: ignore[union-attr, arg-type]
            handed, same = children[source.target][int(node.args[1])]  # type: ignore[call-overload, arg-type]
            held = {r for i in handed for r in found[source.args[i]]} | {  # type: ignore[index]
                first.setdefault((source, i), node) for i in same
            }
        else:
            held = found[source] - {source}  # one of several new results, or of several views
        found[node] = held or {node}
    return found


def _returned(child: Any) -> list[tuple[set[int], set[int]]]:
    """For each result of a called graph, the inputs whose storages it hands back, and its new storages by number; of a
    graph that takes turns those of any."""
    found: list[tuple[set[int], set[int]]] = []
    count = itertools.count()
    for graph in child.turns if isinstance(child, Switch) else [child.graph]:
        inner, given = roots(graph), inputs(graph)
        numbers = {n: next(count) for n in inner}
        held = [inner.get(end, set()) for end in outputs(graph)]
        each = [
            ({i for i, n in enumerate(given) if n in rs}, {numbers[r] for r in rs if r.op != "placeholder"})
            for rs in held
        ]
        found = each if not found else [(a | c, b | d) for (a, b), (c, d) in zip(found, each, strict=True)]
    return found


def inputs(graph: Graph) -> list[Node]:
    """The placeholders of a graph, in order."""
    return [n for n in graph.nodes if n.op == "placeholder"]


def outputs(graph: Graph) -> list[Any]:
    """What a graph returns."""
    (found,) = graph.output_node().args
    return list(found) if isinstance(found, (list, tuple)) else [found]


def ancestors(ends: Iterable[Node], known: Set[Node] = frozenset()) -> set[Node]:
    """The nodes that some are computed from, themselves included, but for those that are known already."""
    found: set[Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node not in found and node not in known:
            found.add(node)
            stack += node.all_input_nodes
    return found


def dead_code(module: GraphModule) -> GraphModule:
    """Remove every node that no output needs. A write in place is needed where its storage is, what `acts` always."""
    _prune(module.graph)
    return module


def _prune(graph: Graph) -> None:
    held = roots(graph)
    writes = [(n, {r for a in into for r in held[a]}) for n in graph.nodes if (into := aliased(n, written=True))]
    needed: set[Node] = set()
    ends = [n for n in graph.nodes if n.op in ("output", "placeholder") or acts(n)]
    while ends:
        needed |= ancestors(ends, needed)
        live = {r for n in needed for r in held[n]}
        ends = [n for n, into in writes if n not in needed and into & live]
    for node in reversed(list(graph.nodes)):
        if node not in needed:
            graph.erase_node(node)


def sliced(module: GraphModule, outputs: Sequence[int]) -> GraphModule:
    """The graph of some of the outputs, without what `acts`; the graphs that it calls are copied in, so that it shows
    what depends on which input."""
    graph = Graph(module)
    results = graph.graph_copy(module.graph, {})
    graph.output([results[i] for i in outputs])  # type: ignore[index]
    calls = True
    while calls:
        for node in reversed([n for n in graph.nodes if acts(n)]):
            graph.erase_node(node)
        _prune(graph)
        calls = graph.find_nodes(op="call_module")
        for node in calls:
            _inline(node, module.get_submodule(str(node.target)))
    return GraphModule(module, graph)


def _inline(call: Node, child: Any) -> None:
    """The nodes of a called graph instead of a call."""
    copies: dict[Node, Any] = dict(zip(inputs(child.graph), call.args, strict=True))
    with call.graph.inserting_before(call):
        results: Any = call.graph.graph_copy(child.graph, copies)
    for node in child.graph.nodes:
        if node.op in ("call_module", "get_attr"):
            copies[node].target = f"{call.target}.{node.target}"
    for item in list(call.users):
        item.replace_all_uses_with(results[arg(item, 1)])
        call.graph.erase_node(item)
    call.graph.erase_node(call)


def used_placeholders(module: GraphModule) -> list[bool]:
    """Which inputs a graph reads."""
    return [bool(n.users) for n in inputs(module.graph)]


# ---- collectives

STARTS: dict[Any, str] = {
    torch.ops._c10d_functional.all_reduce.default: "psum",
    torch.ops._c10d_functional.all_reduce_.default: "psum",
    torch.ops._c10d_functional.all_gather_into_tensor.default: "all_gather",
    torch.ops._c10d_functional.reduce_scatter_tensor.default: "psum_scatter",
    torch.ops._c10d_functional.all_to_all_single.default: "all_to_all",
    torch.ops._c10d_functional.broadcast.default: "pbroadcast",
    torch.ops.shardlib.permute.default: "ppermute",
}
STARTS |= {posted.GATHER: "all_gather", posted.EXCHANGE: "all_to_all", posted.SCATTER: "psum_scatter"}
STARTS |= {posted.REDUCED: "psum", posted.REDUCED_: "psum"}
# those whose operand is kept until they have been waited for; the others send what becomes the result
KEEP = {start for start, name in STARTS.items() if name not in ("psum", "pbroadcast", "ppermute")}


def op_name(node: Node) -> str:
    """What a node calls: `mm`, `all_gather`."""
    said_by = schema(node)
    if said_by is None:
        return str(getattr(node.target, "__name__", node.target))
    return STARTS.get(node.target) or ("wait" if node.target is WAIT else said_by.name.partition("::")[2])


def wait_of(start: Node) -> Node:
    """The node that waits for a collective."""
    (wait,) = start.users
    return wait


def started(module: GraphModule, value: Node) -> Node:
    """The node that starts what a wait is for: itself, or in a graph that is called one that is returned."""
    call = arg(value) if value.target is operator.getitem else value
    if call.op != "call_module":
        return value
    child: Any = module.get_submodule(str(call.target))
    return outputs(child.graph)[arg(value, 1)]


def waits(module: GraphModule) -> dict[Node, Node]:
    """For every wait of a program the collective that it waits for, which a called graph may have started (`hoist`)."""
    found: dict[Node, Node] = {}

    def started(module: Any) -> list[Node | None]:
        """What the results of a graph are, where they are still on the wire."""
        of: dict[Node, Node] = {}
        called: dict[Node, list[Node | None]] = {}
        for node in module.graph.nodes:
            if node.op == "call_module":
                called[node] = started(module.get_submodule(node.target))
            elif node.target in STARTS:
                of[node] = node
            elif node.target is operator.getitem and arg(node) in called:
                start = called[arg(node)][arg(node, 1)]
                of |= {node: start} if start else {}
            elif node.target is WAIT and arg(node) in of:
                found[node] = of[arg(node)]
        return [of.get(x) if isinstance(x, Node) else None for x in outputs(module.graph)]

    started(module)
    return found


def group(start: Node) -> tuple[str, int]:
    """The name of the group that a collective runs over, and its size."""
    name = next(a for a in reversed(start.args) if isinstance(a, str) and "/" in a)
    return name, group_size(name)


def group_size(name: str) -> int:
    """How many ranks a group of this name has."""
    mesh, axes = name.split("/")
    sizes = dict(pair.split("=") for pair in mesh.split(","))
    return math.prod(int(sizes[a]) for a in axes.split(","))


def arg(node: Node, i: int = 0) -> Any:
    """One of the arguments of a node's call."""
    return node.args[i]


def few(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def positions(graph: Graph) -> dict[Node, int]:
    """The place of every node in the order in which they run."""
    return {n: i for i, n in enumerate(graph.nodes)}


def emit(target: Any, args: tuple[Any, ...], like: Node) -> Node:
    """A new node where the graph inserts, of the phase of another, with the value that it will have."""
    node = like.graph.call_function(target, args)
    node.meta = {k: like.meta[k] for k in ("forward", "backward", "remat", "stack_trace") if k in like.meta}
    node.meta["val"] = _value(target, map_arg(args, lambda n: n.meta["val"]))
    return node


def _value(target: Any, args: Any) -> Any:
    """What a call gives, by the op's own kernel for shapes, which is much quicker than what fake tensors do first."""
    given = next((x for a in args for x in (a if isinstance(a, list) else [a]) if isinstance(x, FakeTensor)), None)
    if given is None or target is operator.getitem:
        return target(*args)
    mode, device = given.fake_mode, given.device
    with in_kernel_invocation_manager(mode):
        out = target(*args)

    def faked(y: Any) -> Any:
        return y if not isinstance(y, Tensor) or isinstance(y, FakeTensor) else FakeTensor(mode, y, device)

    return type(out)(map(faked, out)) if isinstance(out, (list, tuple)) else faked(out)


def size_of(node: Node) -> int:
    """The bytes of a node's value."""
    x = node.meta["val"]
    return x.numel() * x.dtype.itemsize


def written(graph: Graph) -> set[Node]:
    """The nodes whose storage some node writes into, which nothing that reads them may pass; and the waits till which
    an operand is read that is written into later."""
    held, order, last = roots(graph), positions(graph), dict[Node, int]()
    for node in graph.nodes:
        last |= {r: order[node] for a in aliased(node, written=True) for r in held[a]}
    found = {n for n, rs in held.items() if not rs.isdisjoint(last)}
    for wait in graph.find_nodes(op="call_function", target=WAIT) if last else ():
        read = {r for a in arg(wait).all_input_nodes for r in held[a]}
        found |= {wait} if any(last.get(r, -1) > order[arg(wait)] for r in read) else set()
    return found
