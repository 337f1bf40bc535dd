"""`in_place`: results are written where an operand was that nothing reads any more."""

from functools import cache
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from shardlib import fused as fused  # defines the ops
from shardlib.graph.forms import product_of
from shardlib.graph.fuse import Island
from shardlib.graph.nodes import STARTS, WAIT, arg, dead_code, emit, inputs, positions, roots, size_of
from shardlib.switch import Switch
from shardlib.wire import SEND

_ADD = torch.ops.aten.add.Tensor
_CAT, _PERMUTE = torch.ops.aten.cat.default, torch.ops.aten.permute.default
_EXACT: dict[Any, Any] = {
    op.default if op is torch.ops.aten.neg else op.Tensor: op.out
    for op in (torch.ops.aten.add, torch.ops.aten.sub, torch.ops.aten.mul, torch.ops.aten.div, torch.ops.aten.neg)
}
_MM, _ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.out
_ADAMW, _ADAMW_ = torch.ops.shardlib.adamw.default, torch.ops.shardlib.adamw_.default
_SUM, _SUM_ = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.all_reduce_.default
_PULL, _PULL_ = torch.ops.shardlib.token_scores_backward.default, torch.ops.shardlib.token_scores_backward_.default


def in_place(module: GraphModule) -> GraphModule:
    """Let an update write into what nothing reads later: a donated argument, or a value of the program's own.

        u, m2, v2 = adamw(p, g, m, v)
        p2 = p + u                        ->      adamw_(p, g, m, v)
        return p2, m2, v2                         return p, m, v

    So do all ops that go element by element: `p + u` becomes `add.out(p, u, out=p)`, and so does the sum of gradients
    in the graph of a micro-batch, to which that of the one before is given. The gradient of logits goes where they
    were. Saves a second state, and the time to get memory for it. After the other passes, which need values that stay.
    """
    storages = _Storages(module.graph)
    for node in list(module.graph.nodes):
        if node.target is _ADAMW:
            _update(node, storages)
        elif node.target is _PULL:
            _over_logits(node, storages)
        else:
            _written_into(node, storages, given=True)
    _give_to_calls(module, storages)
    return dead_code(module)


def reuse(module: GraphModule) -> GraphModule:
    """Write element-wise results where an operand was that nothing reads later.

        b = exp(a); c = b + 1             ->      b = exp(a); add.out(b, 1, out=b)

        y = mm(a, b) + mm(c, d)           ->      y = mm(a, b); addmm.out(y, c, d, out=y)

        y = cat([a * 2, b - 1])           ->      y = empty(...); mul.out(a, 2, out=y[:n]); sub.out(b, 1, out=y[n:])

    Saves memory, and the time to get it: the operating system clears it page by page. After the other passes.
    """
    _sums_of_products(module.graph)
    storages = _Storages(module.graph)
    for node in list(module.graph.nodes):
        _written_into(node, storages, given=False)
    return _joined_in_place(dead_code(module))


def sums_in_place(module: GraphModule) -> GraphModule:
    """Sum over ranks where the operand is, if nothing else reads that.

        y = psum(x)                       ->      psum_(x)

    Saves a copy of every bucket. For processes: ranks that one process plays in lockstep get results of their own.
    """
    storages = _Storages(module.graph)
    for node in module.graph.nodes:
        if node.target is _SUM and storages.take(node, [*storages.roots[arg(node)]], _waits(node)):
            node.target = _SUM_
    return module


class _Storages:
    """Which storages nothing reads any more after a node. Each is taken once."""

    def __init__(self, graph: Graph) -> None:
        self.order = positions(graph)
        self.roots = roots(graph)
        self.readers: dict[Node, set[Node]] = {}
        for node, held in self.roots.items():
            reads = {w for u in node.users for w in (u, *_waits(u))}
            for root in held:
                self.readers.setdefault(root, set()).update(reads)

    def take(self, at: Node, values: list[Any], besides: frozenset[Node] | set[Node] = frozenset()) -> bool:
        """Take the storages of `values`, operands of `at`, if nothing but `besides` reads any of them later."""
        if not all(self.ends(x, at, besides) for x in values):
            return False
        for x in values:
            del self.readers[x]
        return True

    def ends(self, x: Any, at: Node, besides: frozenset[Node] | set[Node] = frozenset()) -> bool:
        """Whether `x` has a storage of its own that the program may write into, and `at` is the last to read it."""
        if not isinstance(x, Node) or self.roots[x] != {x} or x not in self.readers:
            return False
        own = "donated" in x.meta if x.op == "placeholder" else x.op == "call_function"
        later = (u for u in self.readers[x] if u is not at and u not in besides)
        return own and all(self.order[u] < self.order[at] for u in later)

    def filled(self, x: Node) -> Node | None:
        """What made the storage that a value fills, alone; a collective's is not written into."""
        (root, *others) = self.roots[x]
        whole = not others and root.target not in STARTS and size_of(root) == size_of(x)
        return root if root is x or whole else None

    def within(self, x: Any, at: Node) -> list[Any]:
        """The arguments of `at` that lie in the storage of `x`: views of it, too."""
        return [a for a in (*at.args, *at.kwargs.values()) if isinstance(a, Node) and x in self.roots[a]]


def _waits(node: Node) -> set[Node]:
    """Until when a collective reads its operand, and a called graph that hands one back what it was given."""
    if node.op == "call_module":
        return {w for item in node.users for w in item.users if w.target is WAIT}
    return {*node.users} if node.target in STARTS or node.target is SEND else set()


def _alike(x: Any, y: Any) -> bool:
    a, b = (n.meta.get("val") if isinstance(n, Node) else None for n in (x, y))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.dim() > 0 and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@cache
def _into(target: Any) -> tuple[Any, str] | None:
    """The variant of an op on elements that writes into one of its operands: the op, and what it calls its result."""
    if torch.Tag.pointwise not in getattr(target, "tags", ()):
        return None
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        op = getattr(target.overloadpacket, name)
        out = [a.name for a in op._schema.arguments if a.is_out]
        given = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
        if len(out) == 1 and given == wanted:  # those without a kernel of their own compute, then copy
            return (op, out[0]) if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU") else None
    return None


def _written_into(node: Node, storages: _Storages, given: bool) -> None:
    """The result of an element-wise op written into the first operand that may be: of those that are `given`, to the
    graph or by a call, or of those made here, of which it may be a view."""
    found = _into(node.target)
    for x in node.all_input_nodes if found else ():
        root = x if given else storages.filled(x)
        if root is None or _given(root) != given or not _alike(x, node):
            continue
        alone = {*storages.within(root, node)} == {x}  # no other part of it is read beside
        if alone and storages.take(node, [root]):
            op, name = found  # type: ignore[misc]
            with node.graph.inserting_before(node):
                new = node.graph.call_function(op, node.args, dict(node.kwargs) | {name: x})
            new.meta = node.meta
            node.replace_all_uses_with(x)
            storages.readers[root] = storages.readers.pop(node, set())
            return


def _given(x: Node) -> bool:
    return x.op == "placeholder" or (x.target is getitem and arg(x).op == "call_module")


def _update(node: Node, storages: _Storages) -> None:
    """AdamW where its parameter's only other use is to add the update."""
    results = {arg(u, 1): u for u in node.users if u.target is getitem}
    update = results.get(0)
    sums = list(update.users) if update is not None else []
    p, _, m, v = node.args[:4]
    if len(sums) != 1 or sums[0].target is not _ADD or sums[0].args != (p, update) or sums[0].kwargs:
        return
    if not all(_alike(x, y) for x, y in ((p, sums[0]), (m, results.get(1)), (v, results.get(2)))):
        return
    if any(storages.within(x, node) != [x] for x in (p, m, v)) or not storages.take(node, [p, m, v], {sums[0]}):
        return
    with node.graph.inserting_before(node):
        emit(_ADAMW_, node.args, node)
    for old, new in ((sums[0], p), (results.get(1), m), (results.get(2), v)):
        if old is not None:
            old.replace_all_uses_with(new)  # type: ignore[arg-type]


def _over_logits(node: Node, storages: _Storages) -> None:
    """The gradient of logits where they are, which may be a view of another value, whole."""
    logits = arg(node, 2)
    held = [r for a in node.all_input_nodes for r in storages.roots[a] & storages.roots[logits]]
    if len(held) != 1 or held[0].target in STARTS or not _alike(logits, node) or size_of(held[0]) != size_of(logits):
        return
    if storages.take(node, held):
        with node.graph.inserting_before(node):
            emit(_PULL_, node.args, node)
        node.replace_all_uses_with(logits)
        storages.readers[held[0]] = storages.readers.pop(node, set())


def _sums_of_products(graph: Graph) -> None:
    """A product of matrices that is only added to another is added by the product itself."""
    if len(graph.find_nodes(op="call_function", target=_MM)) < 2:
        return
    order, sums = positions(graph), dict[Node, set[Node]]()  # by product what adds to it
    for node in list(graph.nodes):
        shape = node.target is _ADD and node.meta["val"].shape
        if not shape or node.kwargs or node.args[0] is node.args[1]:
            continue
        once = (isinstance(x, Node) and len({*x.users} - sums.get(x, set())) == 1 for x in node.args)
        chains = [product_of(x, sums) if o else [] for x, o in zip(node.args, once, strict=True)]  # type: ignore[arg-type]
        first, second = sorted(chains, key=lambda chain: order[chain[-1]] if chain else -1)
        alike = first and second[-1] not in sums and _alike(first[-1], second[-1])
        if not alike or any(chain[0].meta["val"].shape != shape for chain in chains):
            continue
        with graph.inserting_before(second[-1]):
            new = graph.call_function(_ADDMM, (first[-1], *second[-1].args), {"out": first[-1]})
        new.meta = second[-1].meta
        sums.setdefault(first[-1], set()).add(new)
        first[0].meta = node.meta | {"val": first[0].meta["val"]}
        node.replace_all_uses_with(first[0])
        for gone in (node, *second):
            graph.erase_node(gone)


def _joined_in_place(module: GraphModule) -> GraphModule:
    """Element-wise results that are only joined, perhaps with dims in another order, are written where they are."""
    graph, order = module.graph, positions(module.graph)
    for node in graph.find_nodes(op="call_function", target=_CAT):
        parts, dim, val = arg(node), node.args[1] if len(node.args) > 1 else 0, node.meta["val"]
        made = {x: made for x in parts if (made := _made_for(x, node, order))}
        if not made or not val.is_contiguous() or any(x.meta["val"].dim() != val.dim() for x in parts):
            continue
        with graph.inserting_before(min(made.values(), key=order.__getitem__)):
            new = dict(dtype=val.dtype, device=val.device)
            whole = graph.call_function(torch.ops.aten.empty.memory_format, ([*val.shape],), new)
            whole.meta = dict(node.meta)
        at = 0
        for x in parts:
            n, maker = x.meta["val"].shape[dim], made.get(x)
            with graph.inserting_before(maker or node):
                piece = emit(torch.ops.aten.slice.Tensor, (whole, dim, at, at := at + n), x)
                if maker is None:
                    emit(torch.ops.aten.copy_.default, (piece, x), x)
                    continue
                if x is not maker:
                    back = sorted(range(val.dim()), key=[i % val.dim() for i in arg(x, 1)].__getitem__)
                    piece = emit(_PERMUTE, (piece, back), x)
                graph.call_function(_EXACT[maker.target], maker.args, {"out": piece}).meta = maker.meta
                maker.replace_all_uses_with(piece)
                graph.erase_node(maker)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
    return module


def _made_for(part: Node, joined: Node, order: dict[Node, int]) -> Node | None:
    """The op that makes a value which is joined, once, if that and all that follows go element by element where it is,
    before, and with the same bits wherever that lies."""
    x = arg(part) if part.target is _PERMUTE else part
    alike = x.meta["val"].dtype == joined.meta["val"].dtype and x.target in _EXACT and not x.kwargs
    once = arg(joined).count(part) == 1 and (part is x or [*part.users] == [joined])
    others = [u for u in x.users if u is not part and (u is not joined or part is not x)]
    in_place = all(u.target in _EXACT.values() and u.kwargs == {"out": x} for u in others)
    return x if alike and once and in_place and all(order[u] < order[joined] for u in others) else None


def _give_to_calls(module: GraphModule, storages: _Storages) -> None:
    """Donate to the called graphs what no caller reads after a call, and write into that."""
    _give(module, [(module.graph, storages)])
    for child in module.children():
        if isinstance(child, Switch):
            _give(child, [(turn, _Storages(turn)) for turn in child.turns])


def _give(module: GraphModule, callers: list[tuple[Graph, _Storages]]) -> None:
    calls: dict[Any, list[tuple[Node, _Storages]]] = {}
    for graph, storages in callers:
        for node in graph.nodes:
            if node.op == "call_module" and not isinstance(module.get_submodule(node.target), (Island, Switch)):
                calls.setdefault(node.target, []).append((node, storages))
    for target, sites in calls.items():
        child: Any = module.get_submodule(target)
        for i, placeholder in enumerate(inputs(child.graph)):
            given = [(site.args[i], site, storages) for site, storages in sites]
            if all(storages.ends(x, site) and storages.within(x, site) == [x] for x, site, storages in given):
                placeholder.meta["donated"] = True
        module.set_submodule(target, in_place(child))
