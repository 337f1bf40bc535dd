"""All ranks of a simulated mesh in one process, with true numerics.

Two executors share what a collective does (`combine`). `run_threads` runs any Python: a thread per rank, one running at
a time, and the baton changes hands only in collectives, so a deadlock is seen the moment no rank can go on.
`run_lockstep` runs a traced graph in one thread: a generator per rank, written from the graph, yields at collectives.
"""

import contextvars
import itertools
import operator
import re
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _python_dispatch as modes  # the layer below autograd and functorch has no public name

from shardlib import wire
from shardlib.apart import Apart
from shardlib.errors import MeshError, RankError, ShardError, listing
from shardlib.mesh import Mesh
from shardlib.switch import Switch
from shardlib.wire import MEET, OWN, RECEIVE, SEND, SENT, Args, combine

_PLAYED = {*MEET, *OWN, wire.wait.default, SEND, RECEIVE, SENT}
_HERE, _TORCH = __file__.removesuffix("simulate.py"), torch.__file__.removesuffix("__init__.py")
_INSIDE = (_HERE, _TORCH, threading.__file__, "<eval_with_key>", "<lockstep")  # how no file of the user starts
_VARIABLE = re.compile(r"\bv\d+\b")


def _raised(error: BaseException, where: str) -> BaseException:
    """`error` itself with a note, where its type says what is wrong; else a RankError from it."""
    if isinstance(error, ShardError) or not isinstance(error, Exception):
        error.add_note(f"on {where}")
        return error
    out = RankError(f"{where} raised {type(error).__name__}: {error}")
    out.__cause__ = error
    return out


class _Stop(BaseException):
    """Unwinds a rank because another one failed; no `except Exception` of the user keeps it."""


_here = threading.local()


def current_rank() -> int | None:
    """The rank that this thread plays in `run_threads`, else None."""
    return getattr(_here, "rank", None)


class _Baton:
    """Who runs, who waits, who is done. Only the thread that holds the baton touches it, so nothing else is locked."""

    def __init__(self, mesh: Mesh, body: Callable[[int], None]) -> None:
        self.mesh, self.body, self.context = mesh, body, contextvars.copy_context()
        self.ready = deque(range(mesh.total))  # can go on: not started yet, or the collective is done
        self.threads: dict[int, threading.Thread] = {}
        self.alive: set[int] = set()  # started and not finished
        self.waiting: dict[int, tuple[Any, Args, tuple[int, ...]]] = {}  # rank: op, arguments, members
        self.arrived: dict[tuple[int, ...], list[int]] = {}  # members: those of them that wait there
        self.results: dict[int, Tensor] = {}
        self.mail: dict[tuple[int, int], deque[Tensor]] = {}  # by source and target
        self.error: BaseException | None = None  # stops all
        self.go = [threading.Lock() for _ in range(mesh.total)]  # released once to let the rank go on
        self.over = threading.Lock()  # what the main thread waits for: an interrupted Thread.join takes it for dead
        for lock in (*self.go, self.over):
            lock.acquire()

    def wake(self, rank: int) -> None:
        if rank in self.threads:
            return self.go[rank].release()
        # started by whoever passes the baton, so that no interrupt of the main thread can fall between two starts
        run = self.context.copy().run
        self.threads[rank] = threading.Thread(target=run, args=(self.run, rank), name=f"rank {rank}", daemon=True)
        self.alive.add(rank)
        self.threads[rank].start()

    def run(self, rank: int) -> None:
        try:
            self.body(rank)
        except BaseException as e:  # a _Stop comes after an error
            self.error = self.error or _raised(e, f"rank {rank}")
        self.alive.remove(rank)
        if self.alive and not self.ready and not self.error:
            self.error = self.deadlock()
        if self.error:
            self.ready = deque(self.alive)  # they unwind one after the other; ranks not started never are
        if self.ready:
            self.wake(self.ready.popleft())
        else:
            self.over.release()

    def meet(self, rank: int, target: Any, args: Args) -> Tensor:
        """Wait until all members of the rank's group are in the same collective; the rank's result."""
        members = wire.members_by_rank(self.mesh, args)[rank]
        self.waiting[rank] = target, args, members
        here = self.arrived.setdefault(members, [])
        here.append(rank)
        op, first, _ = self.waiting[here[0]]
        if op is not target or wire.differ(target, first, args):
            self.error = self.error or wire.disagreement({r: self.where(r) for r in here})
        elif len(here) == len(members):
            del self.arrived[members]
            results = MEET[target](len(members), [self.waiting.pop(r)[1] for r in members])
            self.results.update(zip(members, results, strict=True))
            self.ready.extend(here[:-1])
        else:
            self.pause(rank)
        if self.error:
            raise _Stop
        return self.results.pop(rank)

    def post(self, rank: int, x: Tensor, to: int, group: str) -> Tensor:
        """Send a message; a handle of it."""
        target = wire.members_by_rank(self.mesh, [group])[rank][to]
        self.mail.setdefault((rank, target), deque()).append(x.clone())
        op, _, members = self.waiting.get(target, (None, (), ()))
        if op is RECEIVE and members[0] == rank:
            del self.waiting[target]
            self.ready.append(target)
        return x.new_empty(0)

    def receive(self, rank: int, *args: Any) -> Tensor:
        """Wait for the next message of the rank that the arguments name."""
        source = wire.members_by_rank(self.mesh, args)[rank][args[3]]
        while not self.mail.get((source, rank)):
            self.waiting[rank] = RECEIVE, args, (source,)
            self.pause(rank)
        return self.mail[source, rank].popleft()

    def pause(self, rank: int) -> None:
        """Let others run until this rank can go on."""
        if self.ready:
            self.wake(self.ready.popleft())
            self.go[rank].acquire()
        else:
            self.error = self.error or self.deadlock()
        if self.error:
            raise _Stop

    def where(self, rank: int) -> str:
        """The collective in which a rank waits, and the innermost line outside shardlib and torch that called it."""
        target, args, _ = self.waiting[rank]
        frame = sys._current_frames().get(self.threads[rank].ident or 0)  # the only way to see another thread's stack
        while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
            frame = frame.f_back
        return wire.describe(target, args) + (f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else "")

    def deadlock(self) -> RankError:
        told = dict.fromkeys(range(self.mesh.total), "finished")
        for rank, (op, _, members) in self.waiting.items():
            missing = set(members).difference(() if op is RECEIVE else self.arrived[members])
            told[rank] = f"{self.where(rank)}, waits for {wire.named(missing)}"
        return RankError(f"deadlock: no rank can go on\n{wire.by_rank(told)}")


class _Wire(modes.TorchDispatchMode):
    """Below all that a rank's function enters: takes the collectives, passes on the rest."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is ever compiled, and skipping costs a third of the time per op

    def __init__(self, baton: _Baton, rank: int) -> None:
        super().__init__()
        self.baton, self.rank = baton, rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.baton.error:
            raise _Stop
        if func not in _PLAYED or modes._get_current_dispatch_mode():  # torch keeps fake and tracing modes below others
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is SENT:
            return None
        if func is wire.wait.default:
            return args[0]
        if func is SEND:
            return self.baton.post(self.rank, *args)
        if func is RECEIVE:
            return self.baton.receive(self.rank, *args)
        if func in MEET:
            return self.baton.meet(self.rank, func, args)
        return OWN[func](wire.members_by_rank(self.baton.mesh, args)[self.rank].index(self.rank), *args)


def run_threads(mesh: Mesh, fn: Callable[..., Any], args: Sequence[Sequence[Any]]) -> list[Any]:
    """`fn(*args[r])` for every rank r of a simulated mesh, each in a thread of its own, one running at a time.

    Ranks take turns at collectives only, in a fixed order. Any Python goes: transforms of torch.func, plain backward,
    shapes and branches that differ by rank (`current_rank`). Threads have the caller's context variables, grad mode,
    default device and number of threads, not its modes. Raises a rank's `ShardError` with a note naming the rank, a
    `RankError` from any other exception, and `RankError` at once when ranks disagree on a collective or none can go on.
    """
    if len(args) != mesh.total:
        raise MeshError(f"arguments for {len(args)} ranks on {mesh!r}, which has {mesh.total}")
    outputs: list[Any] = [None] * mesh.total
    grad, inference, threads = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()
    device = torch.get_default_device()

    def body(rank: int) -> None:
        _here.rank = rank
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autograd.set_multithreading_enabled(False),  # no backward may wait in a thread that ranks share
            device if device.type != "cpu" else nullcontext(),
            _Wire(baton, rank),
        ):
            outputs[rank] = fn(*args[rank])

    baton = _Baton(mesh, body)
    with modes.TorchDispatchMode():  # torch's flag "a mode is on" is global: who finds it unset may leave it set
        try:
            baton.wake(baton.ready.popleft())
            baton.over.acquire()
        except BaseException as e:  # an interrupt: the rank that runs stops at its next op, the others where they wait
            baton.error = e
            baton.over.acquire()
        for thread in baton.threads.values():
            thread.join()
    if baton.error is not None:
        raise baton.error
    return outputs


class _Writer:
    """Writes graphs as generators of the rank `r`, the module `m` and the list of its inputs. They yield `((op,
    groups), operands)` at collectives, are sent results by rank, return the outputs. `v0`: variable, `k0`: constant.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.count = mesh, itertools.count()
        self.names, self.source, self.written = dict[str, Any](), list[str](), dict[GraphModule, str]()

    def constant(self, value: Any) -> str:
        self.names[name := f"k{next(self.count)}"] = value
        return name

    def expression(self, a: Any, env: Mapping[Node, str]) -> str:
        if isinstance(a, Node):
            return env[a]
        if isinstance(a, (list, tuple)):
            items = "".join(f"{self.expression(x, env)}, " for x in a)
            return f"[{items}]" if isinstance(a, list) else f"({items})"
        if isinstance(a, dict):
            return f"{{{''.join(f'{self.constant(k)}: {self.expression(x, env)}, ' for k, x in a.items())}}}"
        return repr(a) if a is None or type(a) in (bool, int) else self.constant(a)

    def value(self, node: Node, module: Any, env: Mapping[Node, str], path: str) -> tuple[str, str]:
        """The expression of a node, and the statement before it that hands over its operands, if they are."""
        target: Any = node.target
        args = [self.expression(a, env) for a in node.args]
        call = f"({', '.join([*args, *(f'{k}={self.expression(a, env)}' for k, a in node.kwargs.items())])})"
        hand = f"a = [{', '.join(args)}]"
        if node.op in ("get_attr", "call_module"):
            part = f"{self.constant(operator.attrgetter(target))}(m)"
            if node.op == "get_attr":
                return part, ""
            child = module.get_submodule(target)
            if isinstance(child, Switch):
                names = [self.graph(child.turn(i), f"{path}{target}.") for i in range(len(child.turns))]
                own = wire.members_by_rank(self.mesh, [child.group])
                index = self.constant([m.index(r) for r, m in enumerate(own)])
                return f"yield from ({', '.join(names)},)[{index}[r]](r, {part}, a)", hand
            return f"yield from {self.graph(module.get_submodule(target), f'{path}{target}.')}(r, {part}, a)", hand
        if node.op != "call_function":
            raise NotImplementedError(f"lockstep does not run the {node.op} node `{path}{node.name}`")
        if target is wire.wait.default:
            return args[0], ""
        if target is SENT:
            return "None", ""
        if target is operator.getitem:
            return f"{args[0]}[{args[1]}]", ""
        if target in OWN:
            index = self.constant([m.index(r) for r, m in enumerate(wire.members_by_rank(self.mesh, node.args))])
            return f"{self.constant(OWN[target])}({index}[r], {', '.join(args)})", ""
        if target in MEET or target in (SEND, RECEIVE):
            groups = tuple(dict.fromkeys(wire.members_by_rank(self.mesh, node.args)))
            return f"(yield {self.constant((target, groups))}, a).pop(r)", hand
        return self.constant(target) + call, ""

    def graph(self, module: Any, path: str = "") -> str:
        """Write the generator of a graph, once, after those of the graphs that it calls; its name."""
        if module in self.written:
            return self.written[module]
        *nodes, output = module.graph.nodes
        env = {node: f"v{next(self.count)}" for node in nodes if node.op == "placeholder"}
        lines = [(f"[{', '.join(env.values())}]", "given", "", "the inputs")]
        for node in [n for n in nodes if n not in env]:
            text, hand = self.value(node, module, env, path)
            env[node] = text if _VARIABLE.fullmatch(text) else f"v{next(self.count)}"
            if env[node] != text:
                places = re.findall(r'File "(.+?)", line (\d+)', node.stack_trace or "")
                user = [f" at {file}:{line}" for file, line in places if not file.startswith(_INSIDE)]
                lines.append((env[node], text, hand, f"node `{path}{node.name}`{''.join(user[-1:])}"))
        result, name = self.expression(output.args[0], env), f"g{next(self.count)}"
        names = [dict.fromkeys(_VARIABLE.findall(" ".join(line[:3]))) for line in lines]
        last = {v: at for at, line in enumerate([*names, _VARIABLE.findall(result)]) for v in line}
        self.source.append(f"def {name}(r, m, given):")
        for at, (out, text, hand, comment) in enumerate(lines):
            free = [f"{v} = None" for v in names[at] if last[v] == at]
            code = [*([hand, *free] if hand else []), f"{out} = {text}", *([] if at else ["given.clear()"]), *free]
            self.source.append(f"    {'; '.join(code)}  # {comment}")
        self.source += [f"    return {result}", "    yield  # a generator even without collectives"]
        self.written[module] = name
        return name


_programs: WeakKeyDictionary[GraphModule, dict[str, tuple[Any, ...]]] = WeakKeyDictionary()


def _program(mesh: Mesh, module: GraphModule) -> tuple[Any, ...]:
    """The code of a graph and the graphs in it, which changes when a pass recompiles, its generator, and its source."""
    code = [m.code for m in module.modules() if isinstance(m, GraphModule)]
    held = _programs.setdefault(module, {})
    if mesh.name not in held or held[mesh.name][0] != code:
        writer = _Writer(mesh)
        name = writer.graph(module)
        writer.source += ["def start(r, m, given):", f"    yield None, (yield from {name}(r, m, given))"]
        exec(compile("\n".join(writer.source), f"<lockstep {id(writer)}>", "exec"), writer.names)
        held[mesh.name] = code, writer.names["start"], writer.source
    return held[mesh.name]


def run_lockstep(
    mesh: Mesh, module: GraphModule, inputs: Sequence[Any], equal: Mapping[int, Sequence[str]] | None = None
) -> list[Any]:
    """A traced graph on all ranks of a simulated mesh: `inputs[r]` is the list of rank r's inputs; the outputs by rank.

    Lists of inputs are emptied and each value is dropped after its last use. Runs without autograd. `equal`: for the
    output at a position, the axes over which ranks must hold the same bits (a NaN equals a NaN). Raises `RankError`
    where they do not, and from what a node raises, naming the rank, the node and the user's line.
    """
    if len(inputs) != mesh.total:
        raise MeshError(f"inputs for {len(inputs)} ranks on {mesh!r}, which has {mesh.total}")
    _, start, source = _program(mesh, module)
    ranks = [start(r, module, x if isinstance(x, list) else [*x]) for r, x in enumerate(inputs)]
    apart = Apart(ranks) if any(isinstance(m, Switch) for m in module.modules()) else None
    rank, results, asked = 0, None, []
    try:
        with torch.no_grad():
            if apart is not None:
                asked = [(None, x) for x in apart.run()]
            while apart is None:
                asked = []
                for rank in range(mesh.total):
                    asked.append(ranks[rank].send(results))
                if asked[0][0] is None:
                    break
                (target, groups), results = asked[0][0], {}
                for members in groups:
                    rank, operands = members[0], [asked[r][1] for r in members]
                    try:
                        results.update(zip(members, combine(target, operands, members), strict=True))
                    except Exception as e:
                        ranks[rank].throw(e)  # which leads the traceback through the node
                    for handed in operands:
                        handed.clear()
    except Exception as e:
        frames = traceback.walk_tb(e.__traceback__)
        *_, line = (line for f, line in frames if f.f_code.co_filename == start.__code__.co_filename)
        rank = rank if apart is None else apart.rank
        error = _raised(e, f"rank {rank}, {source[line - 1].split('  # ')[-1]}")
        raise error from error.__cause__
    for position, axes in (equal or {}).items():
        values = [x[position] if isinstance(x, (list, tuple)) else x for _, x in asked]
        first = [mesh.members(rank, axes)[0] for rank in range(mesh.total)]
        told = {r: f"{how} rank {first[r]}" for r, x in enumerate(values) if (how := _difference(x, values[first[r]]))}
        if told:
            raise RankError(f"output {position} must be equal over {listing(axes)}, but is not:\n{wire.by_rank(told)}")
    return [x for _, x in asked]


def _difference(a: Any, b: Any) -> str:
    """How `a` differs from what is to hold the same bits, if it does."""
    if not isinstance(a, Tensor):
        return "" if a == b else f"is {a!r}, not {b!r} as on"
    a, b = a.reshape(-1).contiguous(), b.reshape(-1).contiguous()
    x, y = a.view(torch.uint8), b.view(torch.uint8)
    if torch.equal(x, y):
        return ""
    at = (x != y).view(-1, a.element_size()).any(1) & ~(a.isnan() & b.isnan())
    wide = torch.complex128 if a.is_complex() else torch.float64
    by = (a[at].to(wide) - b[at].to(wide)).abs()
    return f"differs by up to {by.max():.3g} in {len(by)} of {len(a)} elements from" if len(by) else ""
