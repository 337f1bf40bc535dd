"""What a program keeps alive: the bytes of parameters, gradients, optimizer state and the rest at every node.

A storage lives from the node that makes it to the last one that reads it or a view of it, as the generated code frees
values. What an op allocates for itself while it runs is not seen, nor is fragmentation.
"""

import operator
import re
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardlib.errors import amount
from shardlib.graph.fuse import Island
from shardlib.graph.lines import said_at
from shardlib.graph.nodes import inputs, outputs, roots
from shardlib.switch import AT

_BY_FIELD = {"params": "parameters", "opt": "optimizer"}  # of `State`, the argument or result that a path leads into
_COPIED = {"parameters": "copies", "copies": "copies", "gradients": "gradients"}  # what a copy of each kind counts as
_COPIES = frozenset("clone constant_pad_nd cat own_slice".split())


@dataclass(frozen=True)
class Point:
    """While a node runs: the bytes alive by kind, its result among them. Kinds: `parameters`, `copies` of them
    (gathered, sliced), `gradients`, `optimizer` and `other`."""

    graph: str
    node: str
    bytes: Counter[str]

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return self.bytes.total()

    @property
    def state(self) -> int:
        """The bytes of parameters, gradients and optimizer state."""
        return sum(self.bytes[k] for k in ("parameters", "gradients", "optimizer"))


def alive(module: GraphModule, donated: Collection[int] = ()) -> list[Point]:
    """The points of a jitted program in order, those of a called graph at each call.

    `donated`: the arguments whose memory is given up, if it was traced without; other inputs stay to the end.
    """
    paths = [n.meta.get("path", "") for n in inputs(module.graph)]
    given = ("donated" in n.meta for n in inputs(module.graph))
    gone = [g or p.split(".")[0] in map(str, donated) for g, p in zip(given, paths, strict=True)]
    return list(_Graph(module, "step", [_of_path(p) for p in paths]).points(Counter(), gone))


def _of_path(path: str) -> str:
    """The kind of an argument's or a result's leaf: `0.params.w` holds a parameter."""
    return _BY_FIELD.get(path.split(".")[1] if "." in path else "", "other")


class _Graph:
    """One graph: which storages every node's value lies in, known by the nodes that made them, and what those hold.
    `kinds`: what the inputs do."""

    def __init__(self, module: GraphModule, name: str, kinds: Sequence[str]) -> None:
        self.graph, self.name = module.graph, name
        self.inputs, self.results = inputs(self.graph), outputs(self.graph)
        self.kinds: dict[Node, str] = dict(zip(self.inputs, kinds, strict=True))
        self.roots = roots(self.graph)
        self.called: dict[Node, _Graph] = {}
        for node in self.graph.nodes:
            child = module.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(child, GraphModule) and not isinstance(child, Island):
                self.called[node] = _Graph(child, str(node.target), [self.kind(a) for a in node.args])
            self.kinds.setdefault(node, self._holds(node))
            if "kind" in node.meta:
                self.kinds |= {root: node.meta["kind"] for root in self.roots[node]}
        paths = self.graph.output_node().meta.get("paths", [""] * len(self.results))
        for result, path in zip(self.results, paths, strict=True):
            for root in self.roots.get(result, ()):
                if self.kinds[root] in ("other", "copies"):
                    self.kinds[root] = _of_path(path)

    def kind(self, node: Any) -> str:
        """What a node's value is."""
        found = {self.kinds[r] for r in self.roots[node]} - {"other"}
        return found.pop() if len(found) == 1 else "other"

    def _holds(self, node: Node) -> str:
        """The kind of a new storage, if nothing else is said: that of what it is a copy of."""
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and source in self.called:
            child = self.called[source]
            return child.kind(child.results[int(node.args[1])])  # type: ignore[arg-type]
        schema = getattr(node.target, "_schema", None)
        space, _, op = schema.name.partition("::") if schema else ("", "", "")
        if op in _COPIES or space == "_c10d_functional":
            found = {_COPIED.get(self.kind(a), "other") for a in node.all_input_nodes}
            return found.pop() if len(found) == 1 else "other"
        return "other"

    def points(self, base: Counter[str], donated: Sequence[bool] = ()) -> Iterator[Point]:
        """Every point, `base` being alive besides. `donated`: for each input whether it goes with its last use; none
        is given for a called graph, whose inputs are in `base`."""
        last: dict[Node, Node] = {}
        for node in self.graph.nodes:
            for used in (node, *node.all_input_nodes):
                last |= {root: node for root in self.roots[used]}
        given_up = {n for n, gone in zip(self.inputs, donated, strict=False) if gone}
        dying: dict[Node, list[Node]] = {}
        for root, node in last.items():
            if root.op != "placeholder" or root in given_up:
                dying.setdefault(node, []).append(root)
        now = base.copy()
        for node in self.inputs if donated else ():
            now[self.kinds[node]] += _size(node)
        for node in self.graph.nodes:
            if node in self.called:
                yield from self.called[node].points(now)
            if node.op != "placeholder":
                if self.roots[node] == {node}:
                    now[self.kinds[node]] += _size(node)
                yield Point(self.name, node.name, now.copy())
            for root in dying.get(node, ()):
                now[self.kinds[root]] -= _size(root)


def _size(node: Node) -> int:
    """The bytes of the storage of a node's value; none of several values, which count by themselves."""
    value = node.meta.get("val")
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0


# ---- running out of it


@contextmanager
def explained(module: GraphModule) -> Iterator[None]:
    """Where memory runs out inside, the error gets a note: the node that wanted more with the user's line, and what the
    program keeps alive there and at its peak, by kind."""
    try:
        yield
    except Exception as e:
        if _is_out_of_memory(e) or (e.__cause__ is not None and _is_out_of_memory(e.__cause__)):
            e.add_note(_told(module, *_failing(e)))
        raise


def _is_out_of_memory(e: BaseException) -> bool:
    said = ("can't allocate memory", "not enough memory")  # torch's on the CPU
    return isinstance(e, (torch.OutOfMemoryError, MemoryError)) or any(s in str(e) for s in said)


def _failing(e: Exception) -> tuple[str, str]:
    """The graph and the node in which generated code, or a simulated rank, was; empty where that is not known."""
    simulated = re.search(r"node `(?:(\w+)\.)?(\w+)`", str(e))
    if simulated:
        return simulated[1] or "step", simulated[2]
    frames = [f for x in (e, e.__cause__) if x is not None for f in traceback.extract_tb(x.__traceback__)]
    lines = [f.line or "" for f in frames if f.filename.startswith("<eval_with_key>")]
    node, graph = "", "step"
    for line in lines:
        node, _, call = line.strip().partition(" = ")
        if called := re.match(r"self\.(\w+)\(", call):
            graph, node = called[1].partition(AT)[0], ""
    return graph, node.partition(":")[0].strip()


def _told(module: GraphModule, graph: str, name: str) -> str:
    points = alive(module)
    peak = max(points, key=lambda point: point.total)
    here = next((p for p in points if (p.graph, p.node) == (graph, name)), None)
    parts: dict[str, Any] = {name.rpartition(".")[2] or "step": m for name, m in module.named_modules()}
    said, columns = [], [("where it ran out", here), ("at the peak", peak)]
    columns = [(what, point) for what, point in columns if point is not None]
    for what, p in columns:
        at = next((said_at(n) for n in parts[p.graph].graph.nodes if n.name == p.node), "")
        said.append(f"  {what}: `{p.node}` of {p.graph}{at}")
    rows = [["alive on a rank", *(what for what, _ in columns)]]
    for kind in sorted({k for _, p in columns for k, n in p.bytes.items() if n}):
        rows.append([kind, *(amount(p.bytes[kind]) for _, p in columns)])
    rows.append(["all", *(amount(p.total) for _, p in columns)])
    return "\n".join([*said, *("  " + "".join(f"{cell:<18}" for cell in row).rstrip() for row in rows)])
