"""A program to read: a Python-like listing of its graphs."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardlib.errors import amount
from shardlib.graph.buckets import PACK, UNPACK
from shardlib.graph.lines import line_of, said_at
from shardlib.graph.nodes import STARTS, WAIT, arg, inputs, op_name, outputs
from shardlib.graph.program import Collective, sends
from shardlib.phases import part_of
from shardlib.types import short

_UNSAID = ("device", "pin_memory", "layout")  # named arguments that say nothing new
_MOST = 8  # of a list of constants so many are shown


def listing_of(module: GraphModule) -> str:
    """The graphs of a program as functions, those that are called first; names of nodes are those of messages.

    A line for each node, with dtype and shape, and of a collective the axis, the leaves and the bytes that a rank
    sends; what one line of the user's made stands under that line and the pass that it belongs to.
    """
    return "\n\n\n".join(_functions(module, "step", sends(module), {}, 1))


def _functions(
    module: GraphModule, name: str, sent: Mapping[Node, Collective], given: Mapping[Node, str], times: int
) -> Iterator[str]:
    """The functions of the graphs that a graph calls, then its own. `given`: names for its inputs."""
    names = _names(module, given)
    calls = [n for n in module.graph.nodes if n.op == "call_module"]
    count = Counter(n.target for n in calls)
    for call in {n.target: n for n in reversed(calls)}.values():
        child: Any = module.get_submodule(str(call.target))
        below = {n: names[a] for n, a in zip(inputs(child.graph), call.args, strict=True)}  # type: ignore[index]
        yield from _functions(child, str(call.target), sent, below, times * count[call.target])
    yield "\n".join(_function(module, name, sent, names, times))


def _function(
    module: GraphModule, name: str, sent: Mapping[Node, Collective], names: Mapping[Node, str], times: int
) -> Iterator[str]:
    if times > 1:
        yield f"# {times} times a step"
    yield f"def {name}("
    for node in inputs(module.graph):
        said = [_value(node), node.meta.get("path", ""), "donated" * ("donated" in node.meta)]
        yield f"    {names[node]},  # {' '.join(s for s in said if s)}"
    yield "):"
    block = ""
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if (here := _block(node)) != block:
            block = here
            yield f"    # {block or 'by the library'}"
        call, comment = _call(node, names), _comment(node, sent, names)
        result = f"{names[node]} = " if node.meta.get("val") is not None or node.users else ""
        yield f"    {result}{call}" + f"  # {comment}" * bool(comment)
    yield "    return ["
    results = outputs(module.graph)
    for x, path in zip(results, module.graph.output_node().meta.get("paths", [""] * len(results)), strict=False):
        yield f"        {_said(x, names)}," + f"  # {path}" * bool(path)
    yield "    ]"


def _names(module: GraphModule, given: Mapping[Node, str]) -> dict[Node, str]:
    """Of inputs what they are, of other nodes their own names."""
    out = {n: n.name for n in module.graph.nodes if n.op != "placeholder"}
    taken = set(out.values())
    for node in inputs(module.graph):
        argument, _, path = node.meta.get("path", "").partition(".")
        said = given.get(node) or re.sub(r"\W", "_", path) or (f"arg{argument}" if argument else node.name)
        said = f"arg{argument}_{said}" if not said.isidentifier() or said in taken else said
        out[node] = next(s for s in (said, *(f"{said}_{i}" for i in range(len(taken)))) if s not in taken)
        taken.add(out[node])
    return out


def _block(node: Node) -> str:
    """The pass that a node belongs to, and the user's line."""
    place, part = line_of(node), part_of(node)
    line = said_at(node).removeprefix(" at ").replace(str(Path(place[0])), Path(place[0]).name) if place else ""
    return ", ".join(s for s in (part, line) if s)


def _call(node: Node, names: Mapping[Node, str]) -> str:
    if node.target is getitem:
        return f"{_said(node.args[0], names)}[{node.args[1]}]"
    if node.op == "get_attr":
        return f"self.{node.target}"
    args = node.args
    if node.target in STARTS:  # the group is in the comment
        args = args[:2] if STARTS[node.target] in ("ppermute", "pbroadcast") else args[:1]
    said = [_said(a, names) for a in args]
    said += [f"{k}={_said(a, names)}" for k, a in node.kwargs.items() if k not in _UNSAID]
    return f"{node.target if node.op == 'call_module' else op_name(node)}({', '.join(said)})"


def _said(x: Any, names: Mapping[Node, str]) -> str:
    if isinstance(x, Node):
        return names[x]
    if isinstance(x, (list, tuple)):
        items = [_said(i, names) for i in x]
        if len(items) > _MOST and not any(isinstance(i, Node) for i in x):
            items = [*items[:2], "..."]
        return f"[{', '.join(items)}]"
    return repr(str(x)) if isinstance(x, torch.device) else repr(x)


def _value(node: Node) -> str:
    x = node.meta.get("val")
    return short(x) if isinstance(x, Tensor) else ""


def _comment(node: Node, sent: Mapping[Node, Collective], names: Mapping[Node, str]) -> str:
    said = [_value(node)]
    if node in sent:
        c = sent[node]
        of = f"{c.name}, " if c.name != node.name else ""
        said.append(f"over {c.axis}: {of}{amount(c.bytes)} sent")
    elif "gradient" in node.meta:
        said.append(f"the gradient of {node.meta['gradient']}")
    elif (source := _unpacked(node)) is not None:
        said.append(f"of {names[source]}")
    return " ".join(s for s in said if s)


def _unpacked(node: Node) -> Node | None:
    """The input that is one of several gathered at once."""
    if node.target is not getitem or arg(node).target is not UNPACK:
        return None
    wait = arg(arg(node))
    packed = arg(arg(wait)) if wait.target is WAIT else wait
    x = arg(packed)[arg(node, 1)] if isinstance(packed, Node) and packed.target is PACK else None
    while x is not None and x.op != "placeholder":
        x = x.all_input_nodes[0] if len(x.all_input_nodes) == 1 else None
    return x
