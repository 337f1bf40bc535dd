"""What the collectives of a program are, in lines that ranks compare, and the titles that messages give them."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardlib.graph.lines import line_of
from shardlib.graph.nodes import aliased, inputs, outputs, roots
from shardlib.graph.program import Collective, sends


def titles(module: GraphModule) -> dict[Node, str]:
    """For every collective, in order: ``psum `w_in` over `dp`, float32[4, 2], model.py:31``."""
    return {node: _title(node, one) for node, one in sends(module).items()}


def _title(node: Node, one: Collective) -> str:
    dtype = str(one.dtype).removeprefix("torch.")
    return ", ".join([f"{one.op} `{one.name}` over `{one.axis}`", f"{dtype}{list(one.shape)}", *place(node)])


def place(node: Node) -> list[str]:
    """The user's line that made a node, `model.py:31`, if it is known."""
    found = line_of(node)
    return [f"{os.path.basename(found[0])}:{found[1]}"] if found else []


def fingerprint(module: GraphModule) -> list[str]:
    """A line for every collective, in parts: graph, op, axis, shape, dtype, how often; its other arguments (who sends
    to whom); its name; a digest of what computes it."""
    made, lines = _digests(module, {}), []
    for node, one in sends(module).items():
        parts = [f"{one.op} over {one.axis} of {list(one.shape)} {one.dtype}, {one.times} times in {one.graph}"]
        parts += [f"with {[*node.args[1:-1]]}", one.name, f"computed as {made[node]}"]
        lines.append("\t".join(parts))
    return lines


def _digests(module: GraphModule, given: Mapping[Node, str]) -> dict[Node, str]:
    """For every node, those of called graphs too, a digest of how its value is computed from the program's inputs."""
    made: dict[Node, str] = {**given}
    now = {**given}  # of values as they are, after what has been written into them
    held, views = roots(module.graph), defaultdict[Node, list[Node]](list)  # by storage
    for i, node in enumerate(module.graph.nodes):
        for root in held[node]:
            views[root].append(node)
        if node not in now:
            parts = [node.op, str(node.target), node.meta.get("path", str(i) if node.op == "placeholder" else "")]
            parts += [_said(a, now) for a in (*node.args, *sorted(node.kwargs.items()))]
            into = aliased(node, written=True)
            if node.op == "call_module":
                child: Any = module.get_submodule(node.target)
                known = dict(zip(inputs(child.graph), map(now.__getitem__, node.args), strict=True))
                inner = _digests(child, known)
                made |= {n: d for n, d in inner.items() if n not in known}
                parts += [_said(x, inner) for x in outputs(child.graph)]
                into = [a for a, x in zip(node.args, known, strict=True) if "donated" in x.meta]
            made[node] = now[node] = _digest(parts)
            for other in {v for x in into for root in held[x] for v in views[root]}:
                now[other] = _digest([now[other], made[node]])
    return made


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _said(x: Any, made: Mapping[Node, str]) -> str:
    if isinstance(x, Node):
        return made[x]
    if isinstance(x, (tuple, list)):
        return f"[{' '.join(_said(y, made) for y in x)}]"
    return x.type if isinstance(x, torch.device) else repr(x)
