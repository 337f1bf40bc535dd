"""`check_finite`: the program raises where a value stops being finite, and says what made it so."""

from bisect import bisect_right
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import has_side_effect

from shardlib import wire
from shardlib.errors import ShardError
from shardlib.graph.lines import said_at
from shardlib.graph.nodes import STARTS, WAIT, aliased, arg, emit, inputs, op_name, outputs, roots, waits
from shardlib.mesh import current_mesh
from shardlib.phases import part_of

_INF, _NAN = 1, 2  # the state of a value; 0: finite
_EMPTY = {"empty_like", "new_empty", "new_empty_strided"}  # make what nobody has written yet
_FINE = 1 << 62  # no first: more than any code
_BITS = 24  # a code: twice a place (and 1 more for an infinity), then 1 more than the place of what it was made of

_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("state_of(Tensor x) -> Tensor")
_lib.define(
    "first_not_finite(Tensor[] states, int[][] operands, int given, int[] leaving, int[] calls, int[] places, "
    "int size, int[] slots, int[] texts, str[] told) -> Tensor"
)
_lib.define("refuse_not_finite(Tensor firsts, int[] slots, int[] texts, str[] told, str mesh) -> ()")


def check_finite(module: GraphModule) -> GraphModule:
    """Raise `ShardError`, at the end of the step and on all ranks, where a value is not finite; the last pass.

    An error is a NaN in an input or in the result of any node, and an infinity that a node of the program makes and
    that leaves it (new state, loss, metrics) or the graph of a micro-batch (gradients). Other infinities are none:
    masks of attention and logits hold -inf, of which softmax makes zeros.

    The message names what comes first in the order of the program, on any rank: the node that made a NaN of operands
    without one (0/0, inf - inf, softmax of a row of -inf), or, of operands without one, an infinity that leaves. It
    says the leaf where that is a gradient, the op, the pass, the user's line and the rank, and of a NaN that was made
    of an infinity where that came from. The host reads all states at once when the step's collectives are done, and a
    small collective tells all ranks, so that none is left waiting; the results of the step are lost, and what was
    donated. Costs one more reading of every result.
    """
    table = _Table(module)
    if table.states:
        first = table.first()
        if "paths" in module.graph.output_node().meta:  # the whole program, not a graph that it calls
            _refuse(first, table)
        else:
            module.graph.output_node().args = ([*outputs(module.graph), first],)
    module.recompile()
    return module


class _Table:
    """The values of a graph whose states are taken, in order, and their places in the program: each has one, a call of
    a graph as many as that. `slots`, `texts`: from which place on which of `told` says what is there."""

    def __init__(self, module: GraphModule) -> None:
        self.module, self.roots, self.waits = module, roots(module.graph), waits(module)
        self.states: list[Node] = []
        self.operands: list[list[int]] = []  # the values that each is made of
        self.places: list[int] = []
        self.calls: list[int] = []  # which of the values are firsts of called graphs
        self.slots, self.texts, self.told = list[int](), list[int](), list[str]()
        self.size = 0
        self.at: dict[Node, int] = {}  # by storage, the latest value there
        self.called: dict[Any, int] = {}  # where the texts of a called graph start
        nodes = list(module.graph.nodes)
        before = next(n for n in nodes if n.op != "placeholder")
        for node in inputs(module.graph):
            self.take(node, node, [], before)
        self.given = len(self.states)
        for node in nodes:
            if node.op == "call_module":
                self.see_call(node)
            elif node.op == "call_function":
                self.see(node)

    def see(self, node: Node) -> None:
        """Take the states of what a node makes or writes into."""
        written = aliased(node, written=True)
        read = [n for n in node.all_input_nodes if n not in written or n in node.args]  # out= is not read
        operands = sorted({self.at[r] for n in read for r in self.roots[n] if r in self.at})
        if node.target is WAIT:
            start = self.waits.get(node) or arg(node)  # the start of another graph has shown its operands there
            self.take(node, start, [self.at[r] for r in self.roots.get(arg(start), ()) if r in self.at], node.next)
        elif written:
            for x in written:
                self.take(x, node, operands, node.next)
        elif self.roots[node] == {node} and read and node.target not in STARTS and op_name(node) not in _EMPTY:
            self.take(node, node, operands, node.next)

    def take(self, value: Node, made_by: Node, operands: list[int], before: Node) -> None:
        """Take the state of a value, if it is one of floating-point numbers."""
        x = value.meta.get("val")
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
            self.at |= dict.fromkeys(self.roots[value], len(self.states))
            self.add(emit_before(before, STATE, (value,)), operands, 1)
            self.map(self.size - 1, len(self.told))
            self.told.append(_told(value, made_by))

    def add(self, state: Node, operands: list[int], places: int) -> None:
        self.states.append(state)
        self.operands.append(operands)
        self.places.append(self.size)
        self.size += places

    def map(self, slot: int, text: int) -> None:
        """From a place on: say the texts from `text` on; nothing new where the last ones go on."""
        if not self.slots or text - self.texts[-1] != slot - self.slots[-1]:
            self.slots.append(slot)
            self.texts.append(text)

    def see_call(self, node: Node) -> None:
        """Take what a called graph says came first in it."""
        child: Any = self.module.get_submodule(str(node.target))
        ends = outputs(child.graph)
        at, first = next(((i, x) for i, x in enumerate(ends) if isinstance(x, Node) and x.target is FIRST), (0, None))
        if first is None:
            return
        size, slots, texts, told = (arg(first, i) for i in range(-4, 0))
        if node.target not in self.called:
            self.called[node.target] = len(self.told)
            self.told += told
        for slot, text in zip(slots, texts, strict=True):
            self.map(self.size + slot, self.called[node.target] + text)
        self.calls.append(len(self.states))
        self.add(emit_before(node.next, getitem, (node, at), first), [], size)

    def first(self) -> Node:
        """The node that says what came first, a code."""
        last = [arg(n) if n.target in STARTS else n for n in outputs(self.module.graph) if isinstance(n, Node)]
        leaving = sorted({self.at[r] for n in last for r in self.roots[n] if r in self.at})
        seen = (self.states, self.operands, self.given, leaving, self.calls, self.places)
        return emit_before(
            self.module.graph.output_node(), FIRST, (*seen, self.size, self.slots, self.texts, self.told)
        )


def emit_before(node: Node, target: Any, args: tuple[Any, ...], like: Node | None = None) -> Node:
    """A new node before another, with its value; of getitem, that of `like`."""
    with node.graph.inserting_before(node):
        if like is None:
            return emit(target, args, node.graph.output_node())
        new = node.graph.call_function(target, args)
        new.meta["val"] = like.meta["val"]
        return new


def _told(value: Node, made_by: Node) -> str:
    """What a message says of a value, after "a NaN"."""
    if value.op == "placeholder" and value is made_by:
        return f"in the input `{value.meta.get('path', value.name)}`"
    whose = value.meta.get("gradient") or made_by.meta.get("gradient")
    part = part_of(made_by)
    by = f"made by `{op_name(made_by)}`{f' in the {part} pass' * bool(part)}{said_at(made_by)}"
    return f"in the gradient of `{whose}`, {by}" if whose else by


def _refuse(first: Node, table: _Table) -> None:
    """Nodes that bring the firsts of all ranks together and raise."""
    end, mesh = first.graph.output_node(), current_mesh()
    firsts = emit_before(end, torch.ops.aten.view.default, (first, [1]))
    if mesh.total > 1:
        group = mesh.group(mesh.axis_names)
        start = emit_before(end, torch.ops._c10d_functional.all_gather_into_tensor.default, (firsts, mesh.total, group))
        firsts = emit_before(end, WAIT, (start,))
    emit_before(end, REFUSE, (firsts, table.slots, table.texts, table.told, mesh.name))


# ---- as the program runs


def _state(x: Tensor) -> Tensor:
    """0-d: the state of a value."""
    x = torch.view_as_real(x) if x.is_complex() else x
    if not x.numel():
        return torch.zeros((), dtype=torch.int64, device=x.device)
    low, high = torch.aminmax(x if x.dtype.itemsize > 1 else x.float())  # a NaN anywhere makes both NaN
    return torch.where(low.isnan(), _NAN, torch.where(low.isinf() | high.isinf(), _INF, 0))


def _first(
    states: Sequence[Tensor],
    operands: Sequence[Sequence[int]],
    given: int,
    leaving: Sequence[int],
    calls: Sequence[int],
    places: Sequence[int],
    *_: Any,
) -> Tensor:
    """0-d: the code of what came first. `given`: how many of the values are inputs; `leaving`: which are outputs."""
    found, codes = torch.stack(list(states)).tolist(), [_FINE]
    called = set(calls)

    def origin(i: int) -> int:
        """Of an infinity, the one that it was made of in the end."""
        while (of := next((j for j in operands[i] if found[j] == _INF), None)) is not None:
            i = of
        return i

    for i, state in enumerate(found):
        if i in called and state < _FINE:
            moved = (2 * places[i] << _BITS) + (places[i] if state % (1 << _BITS) else 0)
            codes.append(state + moved)
        elif i not in called and state == _NAN and all(found[j] != _NAN for j in operands[i]):
            of = next((places[origin(j)] + 1 for j in operands[i] if found[j] == _INF), 0)
            codes.append((2 * places[i] << _BITS) + of)
    for i in leaving:
        if found[i] == _INF and origin(i) >= given:
            codes.append(2 * places[origin(i)] + 1 << _BITS)
    return torch.tensor(min(codes), device=states[0].device)


def _raise(firsts: Tensor, slots: Sequence[int], texts: Sequence[int], told: Sequence[str], mesh: str) -> None:
    codes = firsts.tolist()
    code = min(codes)
    if code == _FINE:
        return

    def said(place: int) -> str:
        at = bisect_right(slots, place) - 1
        return told[texts[at] + place - slots[at]]

    first, of = divmod(code, 1 << _BITS)
    place, infinite = divmod(first, 2)
    ranks = [r for r, c in enumerate(codes) if c == code]
    sizes = [pair.split("=") for pair in mesh.split(",")] if mesh and len(ranks) == 1 else []
    at, left = list[str](), ranks[0]
    for axis, size in reversed(sizes):
        left, index = divmod(left, int(size))
        at.insert(0, f"{axis}={index}")
    where = wire.named(ranks) + f" ({' '.join(at)})" * bool(at)
    raise ShardError(
        f"first value that is not finite, on {where}: {'an infinity' if infinite else 'a NaN'} {said(place)}"
        + (f"\n  of an infinity {said(of - 1)}" if of else "")
    )


_lib.impl("state_of", _state, "CompositeExplicitAutograd")
_lib.impl("first_not_finite", _first, "CompositeExplicitAutograd")
_lib.impl("refuse_not_finite", _raise, "CompositeExplicitAutograd")
_lib.impl("state_of", lambda x: x.new_empty((), dtype=torch.int64), "Meta")
_lib.impl("first_not_finite", lambda states, *_: states[0].new_empty(()), "Meta")
_lib.impl("refuse_not_finite", lambda *_: None, "Meta")
STATE, FIRST = torch.ops.shardlib.state_of.default, torch.ops.shardlib.first_not_finite.default
REFUSE = has_side_effect(torch.ops.shardlib.refuse_not_finite.default)
