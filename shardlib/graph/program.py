"""Programs: a graph and the graphs it calls; how they run, and what they send."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload  # what an op in a graph is
from torch._subclasses.fake_tensor import FakeTensorMode  # shapes without storage
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.fx.passes.split_module import split_module

from shardlib.errors import SpecError, listing
from shardlib.graph.buckets import PACK
from shardlib.graph.captured import Captured, refuse_uncapturable, state_in_place
from shardlib.graph.fuse import Island
from shardlib.graph.nodes import STARTS, arg, few, group, group_size, inputs, size_of
from shardlib.phases import part_of
from shardlib.switch import Doing, Switch
from shardlib.wire import SEND, resolve

Run = Callable[[list[Tensor]], list[Tensor]]
_CALLED = re.compile(r"^(\s*(?:\w+(?: : [^=]*)? = )?)(torch\.ops\.\w+\.\w+\.\w+\()", re.MULTILINE)
BACKENDS = ("graph", "regional", "inductor", "cudagraph")


@dataclass(frozen=True)
class Collective:
    """One collective of a program: the inputs that it moves, or the leaf whose gradient (or its node), the op over an
    axis, the operand.

    `bytes`: what each rank sends for it, by the usual ring algorithms. `part`: `forward`, `backward` or `remat` where
    it belongs to a derivative. `times`: how often a step makes it, `graph` being called so often.
    """

    name: str
    op: str
    axis: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    graph: str
    times: int = 1
    part: str = ""

    @property
    def scalar(self) -> bool:
        """Whether it moves a single number."""
        return math.prod(self.shape) == 1


def collectives(module: GraphModule) -> list[Collective]:
    """Every collective of a program in order; one in a called graph counts as often as it is called. Of a pipeline
    those of its first rank, with the messages that this sends."""
    return list(sends(module).values())


def sends(
    module: GraphModule, graph: str = "step", times: int = 1, paths: Mapping[Node, str] | None = None
) -> dict[Node, Collective]:
    """The collectives of a program and of the graphs that it calls, by the nodes that start them.

    `paths`: of the graph's inputs, where they are not known by themselves.
    """
    out: dict[Node, Collective] = {}
    known = {n: n.meta["path"] for n in module.graph.nodes if "path" in n.meta} | dict(paths or {})
    called = Counter(n.target for n in module.graph.nodes if n.op == "call_module")
    done: set[Any] = set()
    for node in module.graph.nodes:
        if node.op == "call_module" and node.target not in done:
            done.add(node.target)
            child: Any = module.get_submodule(node.target)
            given = zip(inputs(child.graph), node.args, strict=True)
            below = {n: path for n, arg in given if (path := _origin(arg, known))}
            out |= sends(child, node.target, times * called[node.target], below)
        if node.target in STARTS or node.target is SEND:
            out[node] = _collective(node, graph, times, known)
    return out


def group_names(module: GraphModule) -> list[str]:
    """The process groups that a program names, `dp=2,tp=2/dp`, in the order in which it first does."""
    seen: dict[str, None] = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            child: Any = module.get_submodule(node.target)
            for each in [child, *(child.children() if isinstance(child, Switch) else ())]:
                seen |= dict.fromkeys(group_names(each))
        elif str(node.target).startswith(("_c10d_functional.", "shardlib.")):
            seen |= dict.fromkeys(a for a in node.args if isinstance(a, str) and "/" in a)
    return [*seen]


def bytes_sent(op: str, size: int, n: int) -> int:
    """What each of `n` ranks sends in a collective of an operand of `size` bytes, by the usual ring algorithms."""
    if op in ("ppermute", "pbroadcast", "send"):
        return size
    return {"psum": 2 * size * (n - 1) // n, "all_gather": size * (n - 1)}.get(op, size * (n - 1) // n)


def _collective(node: Node, graph: str, times: int, paths: Mapping[Node, str]) -> Collective:
    op, (name, n) = STARTS.get(node.target, "send"), group(node)
    xs = arg(node) if isinstance(arg(node), (list, tuple)) else [arg(node)]
    size = sum(map(size_of, xs))
    sent = bytes_sent(op, size, n)
    if op == "psum" and node.args[1] == "max":
        op = "pmax"
    x = xs[0].meta["val"]
    shape = tuple(x.shape) if len(xs) == 1 else (size // x.element_size(),)
    said = node.meta.get("action") or _origins(xs, paths) or node.name
    return Collective(said, op, name.split("/")[1], shape, x.dtype, sent, graph, times, part_of(node))


def _origins(xs: Sequence[Any], paths: Mapping[Node, str]) -> str | None:
    """Of what is sent, several values or one, perhaps packed."""
    xs = [y for x in xs for y in (x.all_input_nodes if isinstance(x, Node) and x.target is PACK else [x])]
    if len(xs) == 1:
        return _origin(xs[0], paths)
    return few([_origin(y, paths) or y.name for y in xs])


def _origin(x: Any, paths: Mapping[Node, str]) -> str | None:
    """The inputs that a value comes from, seen through views, casts, padding and packing."""
    while isinstance(x, Node) and x not in paths:
        if "gradient" in x.meta:
            return f"the gradient of {x.meta['gradient']}"
        if x.target is PACK:
            return _origins([x], paths)
        if getattr(x.target, "overloadpacket", None) is torch.ops.aten.add:  # to those of other micro-batches
            found = [_origin(y, paths) or "" for y in x.all_input_nodes]
            return next((name for name in found if name.startswith("the gradient of")), None)
        if len(x.all_input_nodes) != 1:
            return None
        x = x.all_input_nodes[0]
    return paths.get(x) if isinstance(x, Node) else None


# ---- running


class _Boxed(CodeGen):
    """A function of one list, which it empties: each value is freed after its last use, inputs too, and those that
    nothing reads at once. Ops are called as functions of C++, which takes half a microsecond less than by their names.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.unused = [n.name for n in inputs(graph) if not n.users]
        ops = dict.fromkeys(n.target for n in graph.nodes if isinstance(n.target, OpOverload))
        self.ops = {f"torch.ops.{op}(": (f"OP{i}", op._op) for i, op in enumerate(ops)}  # has no public name
        graph.set_codegen(self)
        graph.on_generate_code(lambda _: self.bound)

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [("OPS", tuple(op for _, op in self.ops.values()))]

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        out = f"def {self._func_name}(self, boxed){maybe_return_annotation}:"
        if self.ops:
            out += f"\n    [{', '.join(name for name, _ in self.ops.values())}] = OPS"
        if names:
            out += f"\n    [{', '.join(names)}] = boxed\n    boxed.clear()"
            out += "".join(f"\n    {name} = None" for name in self.unused)
        return out

    def bound(self, body: list[str]) -> list[str]:
        """The lines of the code with the ops' own names."""
        return [_CALLED.sub(lambda m: f"{m[1]}{self.ops[m[2]][0]}(" if m[2] in self.ops else m[0], x) for x in body]


def runner(module: GraphModule, backend: str) -> Run:
    """The program as a function from the list of its inputs, which it empties, to the list of its outputs."""
    for _, each in graphs(module):
        each.recompile()  # passes change graphs, not yet their code
    if backend == "graph":
        run = _generated(module)
    elif backend == "regional":
        run = _generated(_with_islands_compiled(module, {}))
    elif backend == "inductor":
        if any(isinstance(child, Switch) for child in module.modules()):
            raise SpecError("backend='inductor' takes no pipelines; take 'regional', or 'graph'")
        run = _inductor(module)
    elif backend == "cudagraph":
        refuse_uncapturable(module)
        run = Captured(_generated(module), state_in_place(module))
    else:
        raise SpecError(f"unknown backend `{backend}`; there are {listing(BACKENDS)}")

    def without_autograd(inputs: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return run(inputs)

    return without_autograd


def _generated(module: GraphModule, made: dict[int, torch.nn.Module] | None = None) -> Run:
    """Generated code of a program. A graph that is called is handed a list, too, so that an operand of which the caller
    needs no more is freed inside, after its last use there. `made`: what has become of graphs, by their ids."""
    made = {} if made is None else made
    graph = _copy(module.graph)
    for node in graph.find_nodes(op="call_module"):
        with graph.inserting_before(node):
            node.args = (graph.call_function(_listed, node.args),)
    _Boxed(graph)
    out = GraphModule(module, graph)
    for target in {str(n.target) for n in graph.find_nodes(op="call_module")}:
        out.set_submodule(target, _taking_lists(out.get_submodule(target), made))
    return out.forward  # type: ignore[return-value]


def _listed(*xs: Tensor) -> list[Tensor]:
    return [*xs]


def _taking_lists(module: Any, made: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """What runs a called graph, given a list."""
    if isinstance(module, Doing):
        return Doing(_taking_lists(module.graph, made), module.doing)
    if not isinstance(module, GraphModule):
        return module
    if id(module) not in made:
        own = module.running(own_index(module.group)) if isinstance(module, Switch) else module
        made[id(module)] = _Calling(_generated(own, made))
    return made[id(module)]


def own_index(group: str) -> int:
    """This process's index in the group of a name; 0 where it is alone."""
    return resolve(group).rank() if group_size(group) > 1 else 0


def _with_islands_compiled(module: GraphModule, made: dict[str, Any]) -> GraphModule:
    """A copy of the program in which each distinct island is compiled, once."""
    out = copied(module)
    for name, child in list(out.named_children()):
        if isinstance(child, Island):
            key = str([(str(n.target), n.args, n.kwargs, n.meta.get("val")) for n in child.graph.nodes])
            if key not in made:
                made[key] = _Calling(_compiled(child))
            setattr(out, name, made[key])
        elif isinstance(child, GraphModule):
            setattr(out, name, _with_islands_compiled(child, made))
    return out


def _compiled(module: GraphModule) -> Run:
    """A graph of plain ops compiled by Inductor, as a function from the list of its inputs to that of its outputs."""
    from torch._guards import TracingContext, tracing  # Inductor's own step, after those that torch.compile makes
    from torch._inductor.compile_fx import compile_fx_inner  # before it, which a graph of plain ops does not need
    from torch._inductor.decomposition import select_decomp_table  # the ops that Inductor knows

    mode = FakeTensorMode()
    with mode:
        fakes = [_empty(n.meta["val"]) for n in inputs(module.graph)]
    with mode, torch.no_grad():
        traced = make_fx(module, decomposition_table=select_decomp_table(), tracing_mode="fake")(*fakes)
    with tracing(TracingContext(mode)):
        return compile_fx_inner(traced, [n.meta["val"] for n in inputs(traced.graph)])


def _empty(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _inductor(module: GraphModule) -> Run:
    """Each called graph, and each stretch between calls, compiled by Inductor on its own."""
    from torch._inductor.compile_fx import compile_fx  # the compiler behind torch.compile, for a graph made already

    def compile_one(part: GraphModule) -> Run:
        compiled: Any = compile_fx(part, [n.meta["val"] for n in inputs(part.graph)])
        return lambda boxed: compiled(*boxed)

    calls = {n.target for n in module.graph.nodes if n.op == "call_module"}
    if not calls:
        whole = compile_one(module)
        return lambda boxed: list(whole(boxed))
    part, parts = 0, {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            part += 1
        parts[node] = part
        if node.op == "call_module":
            part += 1
    split = split_module(module, module, lambda n: parts[n], keep_original_order=True)
    for name, child in split.named_children():
        if isinstance(child, GraphModule):
            inner = [n.target for n in child.graph.nodes if n.op == "call_module"]
            if not inner:
                _with_values(child, split, name)
                setattr(split, name, _Calling(compile_one(child)))
    compiled_calls = {t: _Calling(compile_one(module.get_submodule(t))) for t in calls}  # type: ignore[arg-type]
    for child in split.children():
        for target in calls:
            if isinstance(child, GraphModule) and hasattr(child, target):
                setattr(child, target, compiled_calls[target])
    return _generated(split)


class _Calling(torch.nn.Module):
    """A function of a list as a module that a graph can call."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def forward(self, boxed: list[Tensor]) -> Any:
        return self.run(boxed)


def _with_values(child: GraphModule, parent: GraphModule, name: str) -> None:
    """Give the inputs of a part the shapes that they have in the whole."""
    call = next(n for n in parent.graph.nodes if n.op == "call_module" and n.target == name)
    for inner, outer in zip(inputs(child.graph), call.args, strict=True):
        if "val" not in inner.meta and isinstance(outer, Node):
            inner.meta["val"] = outer.meta["val"]


def copied(module: GraphModule) -> GraphModule:
    """A program of its own: nodes and the graphs that are called are copies."""
    if isinstance(module, Switch):
        out: GraphModule = Switch(module, [_copy(turn) for turn in module.turns], module.group)
    else:
        out = (Island if isinstance(module, Island) else GraphModule)(module, _copy(module.graph))
    for name, child in module.named_children():
        if isinstance(child, GraphModule):
            setattr(out, name, copied(child))
    return out


def _copy(graph: Graph) -> Graph:
    out = Graph()
    out.output(out.graph_copy(graph, {}))
    return out


def graphs(module: GraphModule, name: str = "step") -> Iterator[tuple[str, GraphModule]]:
    """The program's graphs by name: itself, then those it calls."""
    yield name, module
    for target, child in module.named_children():
        if isinstance(child, GraphModule):
            yield from graphs(child, target)
