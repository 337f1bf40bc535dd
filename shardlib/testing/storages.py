"""What is alive while a program runs, counted from its tensors' storages."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from shardlib.errors import SpecError
from shardlib.graph.fuse import Island
from shardlib.graph.memory import HELD, Point, Storages, holding, turns_here
from shardlib.graph.nodes import WAIT, arg
from shardlib.graph.program import copied, runner
from shardlib.jit import Jitted
from shardlib.simulate import run_lockstep
from shardlib.switch import Switch
from shardlib.wire import RECEIVE, SENT

_PATIENCE = 1.0  # seconds in which gloo's thread lets go of an operand, after the wait


def memory(f: Callable[..., Any], *args: Any, rank: int = 0) -> list[Point]:
    """Run a jitted function once; what is alive on a rank at every node, of each kind: the bytes of its storages.

    The points are what `f.lower(*args).memory()` takes the largest of, by counting instead of reading the graphs; kinds
    are its. Runs as `backend="graph"`, on a simulated mesh with operands kept to the end of a collective, and room for
    a message from when it is asked for, as processes keep them. All ranks of a mesh of processes call it, and each gets
    its own points; on a simulated mesh they are those of `rank`, which differ from others' in a pipeline. Raises
    `SpecError` where `f` is not jitted.
    """
    if not isinstance(f, Jitted):
        raise SpecError(f"testing.memory takes what `sl.jit` returns, not {f!r}")
    program, given = f.given(*args)
    mesh, module = program.mesh, program.running()
    many = mesh.simulate and mesh.total > 1
    turns = turns_here(module, mesh)
    recorders = [_Recorder(holding(module, turn), xs, many) for turn, xs in zip(turns, given, strict=True)]
    told: list[list[Any]] = [[r, *xs] for r, xs in zip(recorders, given, strict=True)]
    given.clear()
    probed = _probed(copied(module))
    if many:
        run_lockstep(mesh, probed, told)
    else:
        runner(probed, "graph")(told.pop())
    return recorders[rank if many else 0].points


@dataclass
class _Known:
    """A storage: how to tell whether it is there, what it holds, its bytes."""

    ref: StorageWeakRef
    kind: str
    bytes: int


@dataclass
class _Running:
    """A node that runs: its graph, what was alive before and is held while it runs, the operands of a collective."""

    graph: Storages
    node: Node
    before: list[_Known]
    operands: tuple[Any, ...]


class _Recorder:
    """The storages of one rank. `holds`: whether it keeps operands itself."""

    def __init__(self, graph: Storages, given: list[Tensor], holds: bool) -> None:
        self.points: list[Point] = []
        self.graphs = [graph]  # those that run, the innermost last
        self.running: list[_Running] = []
        self.known: dict[int, _Known] = {}  # by the address of the storage
        self.sending: dict[int, tuple[Any, ...]] = {}  # operands, by the address of the result
        self.coming: dict[Node, Tensor] = {}  # by the node that asks for a message, where that will lie
        self.began: dict[int, int] = {}  # by result of a collective, the address of its storage before the wait
        self.holds = holds
        for node, x in zip(self.graphs[0].inputs, given, strict=True):
            self.add(x, self.graphs[0].kinds[node])
        self.given = {*self.known}

    def add(self, x: Tensor, kind: str) -> None:
        storage = x.untyped_storage()
        new = _Known(StorageWeakRef(storage), kind, storage.nbytes())
        self.known.setdefault(storage._cdata, new).kind = kind

    def alive(self) -> list[_Known]:
        self.known = {k: v for k, v in self.known.items() if not v.ref.expired()}
        return list(self.known.values())

    def starts(self, i: int, operands: tuple[Any, ...]) -> None:
        """The node `i` of the innermost graph runs next."""
        here = self.graphs[-1]
        node = here.nodes[i]
        if not self.holds and node.target is not SENT:  # the process group does
            sent = [x for x, n in zip(operands, node.all_input_nodes, strict=False) if _lets_go(here, n)]
            storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in sent if node.target in HELD}
            operands = tuple(StorageWeakRef(s) for k, s in storages.items() if k not in self.given)
        before = [] if node in here.called else self.alive()  # a called graph frees its operands itself
        self.running.append(_Running(here, node, before, operands))
        if node in here.called:
            self.graphs.append(here.called[node])
        elif node.op == "output":
            self.count()

    def ends(self, value: Any) -> None:
        """The node that runs has made `value`."""
        now = self.running[-1]
        if now.node in now.graph.called:
            self.graphs.pop()
        if now.node.target is RECEIVE and self.holds:
            shape, dtype = now.node.args[:2]
            value = self.coming[now.node] = torch.empty(shape, dtype=dtype)  # type: ignore[arg-type]
        elif now.node.target is WAIT and now.node.args[0] in self.coming:
            self.moved(now, self.coming.pop(arg(now.node)).untyped_storage()._cdata, value)
        elif now.node.target is WAIT:
            before, after = self.began.pop(id(value), 0), value.untyped_storage()._cdata
            if before not in (0, after):  # in memory that another rank gave
                self.moved(now, before, value)
                self.sending[after] = self.sending.pop(before, ())
        several: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        for key in now.graph.begins.get(now.node, ()):
            at = 0 if key is now.node else key.args[1] if isinstance(key, Node) else key[1]
            if isinstance(at, int) and isinstance(several[at], Tensor):
                self.add(several[at], now.graph.kinds[key])
        for x in several:
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.known:
                self.add(x, "other")
        if now.node.target in HELD:
            self.sending[several[0].untyped_storage()._cdata] = now.operands
            self.began[id(several[0])] = several[0].untyped_storage()._cdata
        elif now.node.target in (WAIT, SENT):
            done = several[0] if now.node.target is WAIT else now.operands[0]
            let_go = self.sending.pop(done.untyped_storage()._cdata, ())
            until = time.monotonic() + _PATIENCE
            while not self.holds and time.monotonic() < until and not all(x.expired() for x in let_go):
                time.sleep(1e-4)
        self.count()

    def moved(self, now: _Running, before: int, value: Tensor) -> None:
        """What was to lie in a storage lies in another now."""
        room = self.known.pop(before)
        now.before.remove(room)
        self.add(value, room.kind)

    def count(self) -> None:
        now = self.running.pop()
        found = {id(x): x for x in [*now.before, *self.alive()]}
        total = Counter[str]()
        for x in found.values():
            total[x.kind] += x.bytes
        self.points.append(Point(now.graph.name, now.node.name, total))


def _lets_go(graph: Storages, sent: Node) -> bool:
    """Whether nothing needs an operand that is sent but the wait for it, or what the graph returns that to."""
    ends = {graph.ends[r].target for r in graph.roots[sent] if r in graph.ends}
    return ends <= {WAIT, SENT, "output"}


def _starts(recorder: _Recorder, i: int, *operands: Any) -> None:
    recorder.starts(i, operands)


def _ends(recorder: _Recorder, value: Any) -> None:
    recorder.ends(value)


def _probed(module: GraphModule) -> GraphModule:
    """The program, which tells its first input, a recorder, of every node before and after."""
    if isinstance(module, Switch):
        out: GraphModule = Switch(module, [_telling(module, turn) for turn in module.turns], module.group)
    else:
        out = GraphModule(module, _telling(module, module.graph))
    for name, child in module.named_children():
        if isinstance(child, GraphModule) and not isinstance(child, Island):
            setattr(out, name, _probed(child))
    return out


def _telling(module: GraphModule, given: Graph) -> Graph:
    graph, made = Graph(), dict[Node, Node]()
    recorder = graph.placeholder("recorder")
    for i, node in enumerate(given.nodes):
        calls = node.op == "call_module" and not isinstance(module.get_submodule(str(node.target)), Island)
        if node.op != "placeholder":
            told = node.target in HELD or node.target is SENT
            graph.call_function(_starts, (recorder, i, *([made[x] for x in node.all_input_nodes] if told else [])))
        made[node] = graph.node_copy(node, made.__getitem__)
        if calls:
            made[node].args = (recorder, *made[node].args)
        if node.op not in ("placeholder", "output"):
            graph.call_function(_ends, (recorder, made[node]))
    return graph
