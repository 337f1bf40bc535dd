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
from shardlib.graph.buckets import PACK, UNPACK
from shardlib.graph.fuse import Island
from shardlib.graph.lines import said_at
from shardlib.graph.nodes import KEEP, STARTS, WAIT, arg, inputs, outputs, positions, roots
from shardlib.graph.program import own_index
from shardlib.mesh import Mesh
from shardlib.switch import AT, Switch
from shardlib.wire import SEND, SENT, members_by_rank

_BY_FIELD = {"params": "parameters", "opt": "optimizer"}  # of `State`, the argument or result that a path leads into
_COPIED = {"parameters": "copies", "copies": "copies", "gradients": "buckets"}  # what a copy of each counts as
_COPIES = frozenset("clone constant_pad_nd cat own_slice unpack posted_gather posted_exchange posted_scatter".split())
KINDS = ("parameters", "copies", "buckets", "gradients", "optimizer", "activations", "other")
HELD = {*KEEP, SEND}  # what keeps its operand until it has been waited for


@dataclass(frozen=True)
class Point:
    """While a node runs: the bytes alive by kind, its result among them. Kinds: `parameters`, `copies` of them
    (gathered, sliced), `buckets` (copies to be sent), `gradients`, `optimizer`, `activations` (what the forward pass
    leaves for the backward pass; in a pipeline also what a stage is handed, and what one half of its backward leaves
    for the other) and `other`."""

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


def alive(module: GraphModule, donated: Collection[int] = (), turn: int = 0) -> list[Point]:
    """The points of a jitted program in order, those of a called graph at each call.

    `donated`: the arguments whose memory is given up, if it was traced without; other inputs stay to the end. `turn`:
    the index of the rank in its pipeline.
    """
    held, base = holding(module, turn), Counter[str]()
    for n in held.inputs:
        base[held.kinds[n]] += held.bytes[n]
    numbers = {*map(str, donated)}
    gone = [n for n in held.inputs if "donated" in n.meta or n.meta.get("path", "").split(".")[0] in numbers]
    return list(held.points(base, [_Leaving(held.kinds[n], held.bytes[n], {n}) for n in gone]))


def turns(module: GraphModule) -> int:
    """How many ranks of a program run graphs of their own: those of its pipeline."""
    return max((len(m.turns) for m in module.modules() if isinstance(m, Switch)), default=1)


def turns_here(module: GraphModule, mesh: Mesh) -> list[int]:
    """The index in the program's pipeline of each rank that this process plays; 0 where there is none."""
    many = mesh.simulate and mesh.total > 1
    group = next((m.group for m in module.modules() if isinstance(m, Switch)), None)
    if group is None:
        return [0] * (mesh.total if many else 1)
    if not many:
        return [own_index(group)]
    return [members.index(r) for r, members in enumerate(members_by_rank(mesh, [group]))]


def _of_turn(module: Any, turn: int) -> Any:
    """A graph as a rank of that index runs it."""
    return module.turn(turn % len(module.turns)) if isinstance(module, Switch) else module


def holding(module: GraphModule, turn: int = 0) -> "Storages":
    """The storages of a jitted program and, within, of the graphs that it calls."""
    return Storages(module, "step", [_of_path(n.meta.get("path", "")) for n in inputs(module.graph)], turn)


def _of_path(path: str) -> str:
    """The kind of an argument's or a result's leaf: `0.params.w` holds a parameter."""
    return _BY_FIELD.get(path.split(".")[1] if "." in path else "", "other")


@dataclass(frozen=True)
class _Leaving:
    """A storage that goes with its last use in a graph: what it holds, its bytes, which values lie in it."""

    kind: str
    bytes: int
    roots: set[Any]


class Storages:
    """The storages of one graph, by the node that makes each: what they hold, how large they are, when they begin and
    end. `kinds`: what the inputs hold; `turn`: as of `alive`.

    An operand that is sent stays to the wait, since the process group holds it; results of one op or call stay
    together until the last is taken out.
    """

    def __init__(self, module: GraphModule, name: str, kinds: Sequence[str], turn: int) -> None:
        self.graph, self.name, self.nodes = module.graph, name, list(module.graph.nodes)
        self.inputs, self.results = inputs(self.graph), outputs(self.graph)
        self.kinds: dict[Any, str] = dict(zip(self.inputs, kinds, strict=True))
        self.roots = roots(self.graph)
        self.called: dict[Node, Storages] = {}
        for node in self.graph.nodes:
            child = module.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(child, GraphModule) and not isinstance(child, Island):
                kinds = [self.kind(a) for a in node.args]
                self.called[node] = Storages(_of_turn(child, turn), str(node.target), kinds, turn)
            self.kinds.setdefault(node, self._holds(node))
            if "kind" in node.meta:
                self.kinds |= {root: node.meta["kind"] for root in self.roots[node]}
        paths = self.graph.output_node().meta.get("paths", [""] * len(self.results))
        for result, path in zip(self.results, paths, strict=True):
            for root in self.roots.get(result, ()):
                if self.kinds[root] in ("other", "copies"):
                    self.kinds[root] = _of_path(path)
        self._leave()
        self.bytes: dict[Any, int] = {}  # keys: roots; (node, i) for a result that nobody takes, or sent by a call
        self.begins: dict[Node, list[Any]] = {}
        self.ends: dict[Any, Node] = {}
        self.sent: dict[int, list[Node]] = {}  # by position of output: the operands of a collective that it started
        self._live()

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
        if node.target is PACK:
            return "buckets"
        node = source if isinstance(source, Node) and source.target is UNPACK else node
        given = node.all_input_nodes
        if node.target in STARTS:  # of a bucket's leaves
            given = [x for i in given for x in (i.all_input_nodes if i.target is PACK else [i])]
        schema = getattr(node.target, "_schema", None)
        space, _, op = schema.name.partition("::") if schema else ("", "", "")
        if op in _COPIES or space == "_c10d_functional":
            found = {_COPIED.get(self.kind(a), "other") for a in given}
            return found.pop() if len(found) == 1 else "other"
        return "other"

    def _leave(self) -> None:
        """What the forward pass leaves for the backward pass are activations."""
        for used in {a for n in self.graph.nodes if "backward" in n.meta for a in n.all_input_nodes}:
            for root in self.roots[used]:
                if self.kinds[root] == "other" and "forward" in root.meta:
                    self.kinds[root] = "activations"

    def _live(self) -> None:
        """When every storage begins and ends."""
        sends = [
            (n, [r for x in n.all_input_nodes for r in self.roots[x]]) for n in self.graph.nodes if n.target in HELD
        ]
        for node in self.graph.nodes:
            if self.roots[node] == {node}:
                for key, size, kind in self._made(node):
                    self.bytes[key] = size
                    self.begins.setdefault(node, []).append(key)
                    self.kinds.setdefault(key, kind)
            sends += self._sent_by(node)
        for node in self.graph.nodes:
            for used in (node, *node.all_input_nodes):
                self.ends |= {key: node for key in (*self.roots[used], *self.begins.get(used, ()))}
        order, last = positions(self.graph), self.nodes[-1]
        for start, keys in sends:
            end = next((u for u in start.users if u.target in (WAIT, SENT)), last)
            self.ends |= {k: max(self.ends[k], end, key=order.__getitem__) for k in keys}
            self.sent |= {i: keys for i, result in enumerate(self.results) if result is start}

    def _made(self, node: Node) -> list[tuple[Any, int, str]]:
        """The storages that a node makes: keys, bytes, kinds. Of several results each has its own."""
        several: list[tuple[int, str]]
        value = node.meta.get("val")
        if node in self.called:
            several = self.called[node].returned()
        elif isinstance(value, (list, tuple)):
            several = [(_bytes(v), self.kinds[node]) for v in value]
        else:
            return [] if node.target is operator.getitem else [(node, _bytes(value), self.kinds[node])]
        taken: dict[Any, Any] = {u.args[1]: u for u in reversed(node.users) if u.target is operator.getitem}
        found = [(taken.get(i, (node, i)), size, kind) for i, (size, kind) in enumerate(several)]
        return [(key, size, kind) for key, size, kind in found if size and self.roots.get(key, {key}) == {key}]

    def returned(self) -> list[tuple[int, str]]:
        """For each result the bytes of its storage, and their kind; none where that is an input's or known already."""
        seen, found = {*self.inputs}, list[tuple[int, str]]()
        for result in self.results:
            new = self.roots.get(result, set()) - seen
            seen |= new
            found.append((sum(self.bytes[r] for r in new), self.kind(result) if new else ""))
        return found

    def _sent_by(self, node: Node) -> Iterator[tuple[Node, list[Any]]]:
        """The collectives that a call has started, and what they read, which may be made in there."""
        if node not in self.called:
            return
        child = self.called[node]
        for i, keys in child.sent.items():
            start = next(u for u in node.users if u.target is operator.getitem and u.args[1] == i)
            given = [r for k in keys if k in child.inputs for r in self.roots[arg(node, child.inputs.index(k))]]
            inside = [((node, k), child.bytes[k], child.kinds[k]) for k in keys if k not in child.inputs]
            for key, size, kind in inside:
                self.bytes[key], self.kinds[key] = size, kind
                self.begins.setdefault(node, []).append(key)
            yield start, [*given, *(key for key, _, _ in inside)]

    def points(self, base: Counter[str], given: Sequence[_Leaving]) -> Iterator[Point]:
        """Every point, `base` being alive before the first. `given`: what of that, among the inputs, goes in here."""
        dying: dict[Node, list[_Leaving]] = {}
        for key, end in self.ends.items():
            if key in self.bytes and key not in self.inputs:
                dying.setdefault(end, []).append(_Leaving(self.kinds[key], self.bytes[key], {key}))
        order = positions(self.graph)
        for one in given:
            dying.setdefault(max((self.ends[n] for n in one.roots), key=order.__getitem__), []).append(one)
        now = base.copy()
        for node in self.graph.nodes:
            if node in self.called:
                handed = self._handed(node, dying.get(node, []))
                yield from self.called[node].points(now, [*handed.values()])
                dying[node] = [one for one in dying.get(node, ()) if id(one) not in handed]
                for one in handed.values():
                    now[one.kind] -= one.bytes
            if node.op != "placeholder":
                for key in self.begins.get(node, ()):
                    now[self.kinds[key]] += self.bytes[key]
                yield Point(self.name, node.name, now.copy())
            for one in dying.get(node, ()):
                now[one.kind] -= one.bytes

    def _handed(self, call: Node, dying: Sequence[_Leaving]) -> dict[int, _Leaving]:
        """By id, what of that which goes with a call goes inside: its operands, but those that it gives back."""
        child, found = self.called[call], dict[int, _Leaving]()
        back = {root for result in child.results for root in child.roots.get(result, ())}
        for one in dying:
            given = zip(child.inputs, call.args, strict=True)
            inside: set[Any] = {n for n, x in given if isinstance(x, Node) and self.roots[x] & one.roots}
            if inside and not inside & back:
                found[id(one)] = _Leaving(one.kind, one.bytes, inside)
        return found


def _bytes(value: Any) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0


# ---- running out of it


@contextmanager
def explained(module: GraphModule, mesh: Mesh) -> Iterator[None]:
    """Where memory runs out inside, the error gets a note: the node that wanted more with the user's line, and what the
    program keeps alive there and at its peak, by kind, on the rank that failed."""
    try:
        yield
    except Exception as e:
        if _is_out_of_memory(e) or (e.__cause__ is not None and _is_out_of_memory(e.__cause__)):
            e.add_note(_told(module, mesh, *_failing(e)))
        raise


def _is_out_of_memory(e: BaseException) -> bool:
    said = ("can't allocate memory", "not enough memory")  # torch's on the CPU
    return isinstance(e, (torch.OutOfMemoryError, MemoryError)) or any(s in str(e) for s in said)


def _failing(e: Exception) -> tuple[int, str, str]:
    """Which of the ranks that this process plays failed, and in which graph and node; empty where that is not known."""
    simulated = re.search(r"rank (\d+), node `(?:(?:\w+\.)*(\w+)\.)?(\w+)`", str(e))
    if simulated:
        return int(simulated[1]), simulated[2] or "step", simulated[3]
    frames = [f for x in (e, e.__cause__) if x is not None for f in traceback.extract_tb(x.__traceback__)]
    lines = [f.line or "" for f in frames if f.filename.startswith("<eval_with_key>")]
    node, graph = "", "step"
    for line in lines:
        node, _, call = line.strip().partition(" = ")
        if called := re.match(r"self\.(\w+)\(", call):
            graph, node = called[1].partition(AT)[0], ""
    return 0, graph, node.partition(":")[0].strip()


def _told(module: GraphModule, mesh: Mesh, rank: int, graph: str, node: str) -> str:
    turn = turns_here(module, mesh)[rank]
    points = alive(module, turn=turn)
    here = next((p for p in points if (p.graph, p.node) == (graph, node)), None)
    peak = max(points, key=lambda point: point.total)
    parts = {name.rpartition(".")[2] or "step": _of_turn(m, turn) for name, m in module.named_modules()}
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
