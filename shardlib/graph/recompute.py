"""`recompute`: what the forward pass leaves for the backward pass is made again there, but for what a policy keeps."""

from collections.abc import Callable, Iterator
from functools import partial
from operator import getitem

from torch.fx import GraphModule, Node

from shardlib.errors import SpecError
from shardlib.graph.joint import Layer
from shardlib.graph.nodes import WAIT, acts, arg, dead_code, positions, roots, written
from shardlib.phases import again_for, part_of
from shardlib.policy import Policy, chosen, is_product, refuse_missing


def recompute(policy: Policy) -> Callable[[GraphModule], GraphModule]:
    """The pass of a policy: `jit(f, passes=[sl.passes.recompute("dots"), *sl.passes.default])`. It goes first.

        a = x @ w; b = tanh(a)                    a = x @ w; b = tanh(a)
        ...                               ->      ...
        dv = b.T @ dy                             c = tanh(a)
                                                  dv = c.T @ dy

    `"dots"` keeps what products of matrices and attention give, a collection of names what `save_name` names (and
    `"dots"`, if it holds that); beside them only inputs of the program are there for the backward pass. Every other
    value is made at most once more, right before its first use, from the nearest that are kept; collectives on the way
    run again. A body of `scan` is cut where it is traced: there the policy is that of `remat`. Bitwise the same.
    Raises `SpecError` for a policy that keeps nothing (all would be alive at once) and for a name that nothing has.
    """
    wanted = chosen(policy, "passes.recompute")
    if not wanted:
        raise SpecError("passes.recompute: a policy that keeps nothing saves nothing: give `dots`, or names")
    return partial(_recomputed, wanted=tuple(sorted(wanted)))


def _recomputed(module: GraphModule, wanted: tuple[str, ...]) -> GraphModule:
    if "paths" in module.graph.output_node().meta:  # the program itself, not one of the graphs that it calls
        found, looped = ({*_names(module, inside)} for inside in (False, True))
        if looped & {*wanted} - found:
            raise SpecError("passes.recompute: names in the body of a scan are for remat(body, policy), which it calls")
        refuse_missing("passes.recompute", wanted, found)
    pinned, kept = written(module.graph), _kept(module, wanted)
    order, copies = positions(module.graph), dict[Node, Node]()

    def again(n: Node) -> bool:
        made = n.op == "call_function" and part_of(n) == "forward" and not acts(n)
        return made and n not in kept and n not in pinned

    for user in [n for n in module.graph.nodes if part_of(n) in ("backward", "remat")]:
        here = again_for(user)
        for read in filter(again, user.all_input_nodes):
            chain, stack = set[Node](), [read]
            while stack:
                n = stack.pop()
                if n not in copies and n not in chain:
                    chain.add(n)
                    stack += filter(again, n.all_input_nodes)
            with module.graph.inserting_before(user):
                for n in sorted(chain, key=order.__getitem__):
                    copies[n] = module.graph.node_copy(n, lambda a: copies.get(a, a))
                    copies[n].meta = {k: v for k, v in n.meta.items() if k not in ("forward", "names")} | here
            user.replace_input_with(read, copies[read])
    return dead_code(module)


def _names(module: GraphModule, looped: bool) -> Iterator[str]:
    """The names that values of a program have, in graphs of a loop or in the others."""
    if isinstance(module, Layer) == looped:
        for node in module.graph.nodes:
            yield from node.meta.get("names", ())
    for child in module.children():
        if isinstance(child, GraphModule):
            yield from _names(child, looped)


def _kept(module: GraphModule, wanted: tuple[str, ...]) -> set[Node]:
    """What the policy keeps: the nodes that made it, and those that take a result out of them or wait for it."""
    held = roots(module.graph)
    found = {r for n in module.graph.nodes if {*wanted} & {*n.meta.get("names", ())} for r in held[n]}
    if "dots" in wanted:
        found |= {n for n in module.graph.nodes if is_product(n.target)}
    found |= {arg(n) for n in found if n.target is getitem}
    return found | {u for n in found for u in n.users if u.target in (getitem, WAIT)}
