"""Programs as text: one line of JSON for each node, which names ops and plain values. Loading runs no code of the text.

Only ops that torch knows by name, `getitem` and calls of graphs of the program can be named. The device of the mesh is
`"mesh"`, so that all ranks share a text; the rank itself is a value that ops read.
"""

import base64
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor
from torch._ops import OpOverload  # what an op in a graph is
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # values of nodes: shapes without storage
from torch.fx import Graph, GraphModule, Node

from shardlib import fused as fused  # defines ops
from shardlib import tree
from shardlib.errors import ShardError
from shardlib.graph import buckets as buckets
from shardlib.graph import finite as finite
from shardlib.graph import squares as squares
from shardlib.graph.fuse import Island
from shardlib.mesh import Mesh
from shardlib.spec import Spec, as_spec
from shardlib.switch import Switch

_PLAIN = (bool, int, float, str, type(None))
_WORDS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_REFUSED = {"aten::from_file"}  # which opens files
_LARGEST = 1 << 20  # bytes of a constant
_NO_NODES: dict[Node, int] = {}


class Unstorable(ShardError):
    """A program holds what has no text, or a text names what is not there."""


# ---- values


def text(x: Any, mesh: Mesh, index: Mapping[Node, int] = _NO_NODES) -> Any:
    """A value as plain JSON. Raises `Unstorable`."""
    if isinstance(x, Node):
        return {"node": index[x]}
    if type(x) in _PLAIN:
        return x
    if isinstance(x, (tuple, list)):
        items = [text(y, mesh, index) for y in x]
        return {"tuple": items} if isinstance(x, tuple) else items
    if isinstance(x, slice):
        return {"slice": [text(y, mesh, index) for y in (x.start, x.stop, x.step)]}
    if isinstance(x, torch.device):
        return {"device": "mesh" if x == mesh.device else str(x)}
    if isinstance(x, Spec):
        if as_spec(str(x)).noting(x) != x:
            raise Unstorable(f"the spec {x!r} has no text")
        return {"spec": [str(x), x.stacked, x.matrix]}
    if type(x) in _WORDS:
        return {_WORDS[type(x)]: str(x).removeprefix("torch.")}
    raise Unstorable(f"a {type(x).__name__}, which has no text")


def value(said: Any, mesh: Mesh, nodes: Sequence[Node] = ()) -> Any:
    """The inverse."""
    if isinstance(said, list):
        return [value(y, mesh, nodes) for y in said]
    if not isinstance(said, dict):
        return said
    ((kind, x),) = said.items()
    if kind == "node":
        return nodes[x]
    if kind == "tuple":
        return tuple(value(y, mesh, nodes) for y in x)
    if kind == "slice":
        return slice(*(value(y, mesh, nodes) for y in x))
    if kind == "device":
        return mesh.device if x == "mesh" else torch.device(x)
    if kind == "spec":
        return replace(as_spec(x[0]), stacked=x[1], matrix=tuple(map(tuple, x[2])))
    for type_, word in _WORDS.items():
        if kind == word and isinstance(found := getattr(torch, x, None), type_):
            return found
    raise Unstorable(f"the text has a value {said!r}")


def _shape(x: Any, mesh: Mesh) -> Any:
    """What a node's value is: of a tensor its dtype, shape, strides and device."""
    if isinstance(x, Tensor):
        device = "mesh" if x.device == mesh.device else str(x.device)
        return {"tensor": [str(x.dtype).removeprefix("torch."), list(x.shape), list(x.stride()), device]}
    if isinstance(x, (tuple, list)):
        return [_shape(y, mesh) for y in x]
    return None


def _fake(said: Any, mesh: Mesh, mode: FakeTensorMode) -> Any:
    if isinstance(said, list):
        return [_fake(y, mesh, mode) for y in said]
    if said is None:
        return None
    dtype, shape, stride, device = said["tensor"]
    bare = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
    return FakeTensor(mode, bare, mesh.device if device == "mesh" else torch.device(device))


# ---- ops


def _name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return target.name()
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, str) and target.isidentifier():
        return target
    raise Unstorable(f"a call of {getattr(target, '__name__', target)!r}, which is no op that torch knows by name")


def _op(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    space, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    if all(part.isidentifier() for part in (space, op, overload or "default")) and name not in _REFUSED:
        found: Any = torch.ops
        for part in (space, op, overload or "default"):
            found = getattr(found, part, None)
        if isinstance(found, OpOverload):
            return found
    raise Unstorable(f"there is no op {name!r}")


# ---- graphs


def lines(module: GraphModule, mesh: Mesh, graph: str = "", numbers: dict[int, int] | None = None) -> Iterator[str]:
    """The program as lines of text, the graphs that it calls before it. Raises `Unstorable`.

    `numbers`: those of phases, which a process counts on; in a text they start from 1.
    """
    numbers = {} if numbers is None else numbers
    for name, child in module.named_children():
        if isinstance(child, GraphModule):
            yield from lines(child, mesh, f"{graph}.{name}" if graph else name, numbers)
    if isinstance(module, Switch):
        for i, turn in enumerate(module.turns):
            yield json.dumps({"graph": graph, "turn": i, "of": len(module.turns), "group": module.group})
            yield from _nodes(module, turn, mesh, numbers)
        return
    yield json.dumps({"graph": graph, "island": isinstance(module, Island)})
    yield from _nodes(module, module.graph, mesh, numbers)


def _nodes(module: GraphModule, graph: Graph, mesh: Mesh, numbers: dict[int, int]) -> Iterator[str]:
    index: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            yield json.dumps({"constant": _constant(node.target, getattr(module, node.target))})
        args, kwargs = ([*node.args], {**node.kwargs})
        said = [
            node.op,
            node.name,
            _name(node.target),
            [text(a, mesh, index) for a in args],
            {k: text(a, mesh, index) for k, a in kwargs.items()},
            _shape(node.meta.get("val"), mesh),
            {k: _note(v, numbers) for k, v in node.meta.items() if type(v) in (bool, int, str) or _is_texts(v)},
        ]
        index[node] = len(index)
        yield json.dumps(said)


def _note(x: Any, numbers: dict[int, int]) -> Any:
    return numbers.setdefault(x, len(numbers) + 1) if type(x) is int else x


def _is_texts(x: Any) -> bool:
    return isinstance(x, list) and all(type(y) is str for y in x)


def _constant(name: str, x: Any) -> list[Any]:
    """A constant of a graph, with its bytes."""
    if not name.isidentifier() or not isinstance(x, Tensor) or isinstance(x, FakeTensor) or x.nbytes > _LARGEST:
        raise Unstorable(f"the constant `{name}`, which is no tensor of up to {_LARGEST} bytes")
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [name, str(x.dtype).removeprefix("torch."), list(x.shape), base64.b64encode(data).decode()]


def program(said_lines: Sequence[str], mesh: Mesh) -> GraphModule:
    """The program of some `lines`. Raises `Unstorable`, or whatever a damaged text leads to."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[str, GraphModule] = {}
    root, graph, name, head = torch.nn.Module(), Graph(), "", {}
    nodes: list[Node] = []
    turns: list[Graph] = []
    for line in said_lines:
        said = json.loads(line)
        if isinstance(said, dict) and "graph" in said:
            graph, name, nodes, head = Graph(), said["graph"], [], said
            if said.get("turn", 0):
                continue
            root, turns = torch.nn.Module(), []
            for child in [c for c in made if c.rpartition(".")[0] == name and c]:
                root.add_module(child.rpartition(".")[2], made.pop(child))
            continue
        if isinstance(said, dict):
            constant, dtype, shape, data = said["constant"]
            x = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8) if math.prod(shape) else None
            x = torch.empty(shape) if x is None else x.view(getattr(torch, dtype)).view(shape)
            root.register_buffer(_identifier(constant), x.to(getattr(torch, dtype)))
            continue
        op, own, target, args, kwargs, val, meta = said
        args = tuple(value(a, mesh, nodes) for a in args)
        kwargs = {_identifier(k): value(a, mesh, nodes) for k, a in kwargs.items()}
        called = _op(target) if op == "call_function" else _identifier(target)
        node = graph.create_node(op, called, args, kwargs, name=_identifier(own))
        node.meta = {k: v for k, v in meta.items() if k != "stack_trace" or _printable(v)}
        if val is not None:
            node.meta["val"] = _fake(val, mesh, mode)
        nodes.append(node)
        if op == "output":
            turns.append(graph)
            if "turn" not in head:
                made[name] = (Island if head["island"] else GraphModule)(root, graph)
            elif len(turns) == head["of"]:
                made[name] = Switch(root, turns, head["group"])
    return made[""]


def _identifier(name: str) -> str:
    """A name that becomes part of generated code."""
    if not name.isidentifier():
        raise Unstorable(f"the text has {name!r} for a name")
    return name


def _printable(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


# ---- structures of results


def structure_text(structure: optree.PyTreeSpec, mesh: Mesh) -> Any:
    """The structure of a tree as plain values: classes by name. Raises `Unstorable`."""

    def one(x: Any) -> Any:
        if x is None or type(x) is int:
            return x
        if type(x) in (list, tuple):
            return {type(x).__name__: [one(y) for y in x]}
        if type(x) is dict:
            return {"dict": [[text(k, mesh), one(y)] for k, y in x.items()]}
        kids, meta, _, _ = optree.tree_flatten_one_level(x, namespace=tree.NAMESPACE)
        if not optree.register_pytree_node.get(type(x), namespace=tree.NAMESPACE):  # type: ignore[attr-defined]
            raise Unstorable(f"a {type(x).__name__} among the results")
        return {"class": [named(type(x)), text(meta, mesh), [one(y) for y in kids]]}

    return one(tree.unflatten(structure, range(structure.num_leaves)))


def structure_of(said: Any, mesh: Mesh, class_of: Callable[[str], type | None]) -> optree.PyTreeSpec:
    """The inverse. `class_of` a name."""

    def one(x: Any) -> Any:
        if x is None or type(x) is int:
            return x
        ((kind, items),) = x.items()
        if kind in ("list", "tuple"):
            return {"list": list, "tuple": tuple}[kind](one(y) for y in items)
        if kind == "dict":
            return {value(k, mesh): one(y) for k, y in items}
        name, meta, kids = items
        cls = class_of(name)
        if cls is None:
            raise Unstorable(f"the class {name} is not there")
        entry: Any = optree.register_pytree_node.get(cls, namespace=tree.NAMESPACE)  # type: ignore[attr-defined]
        return entry.unflatten_func(value(meta, mesh), [one(y) for y in kids])

    leaves, found = tree.flatten(one(said))
    if leaves != [*range(len(leaves))]:
        raise Unstorable("the leaves of the results are out of order")
    return found


def named(cls: type) -> str:
    """A class by its module and name."""
    return f"{cls.__module__}:{cls.__qualname__}"
