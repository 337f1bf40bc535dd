"""`regather`: ZeRO-3's gathered weights are not kept from the forward to the backward pass."""

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from shardlib.graph.forms import arranged, at_rest
from shardlib.graph.nodes import (
    STARTS,
    WAIT,
    arg,
    dead_code,
    positions,
    written,
)


def regather(module: GraphModule) -> GraphModule:
    """Gather a parameter again for the backward pass, where it was gathered in the forward pass.

        a = all_gather(w); y = x @ a              a = all_gather(w); y = x @ a
        ...                               ->      ...
        dx = dy @ a.T                             b = all_gather(w); dx = dy @ b.T

    So a gathered weight lives for one use. What a loss gathers is meant, not what `step` gathers before it (ZeRO-1 and
    2), nor what a policy of `remat` keeps; and the weight that the forward pass uses last is kept, since the backward
    pass needs it first.
    """
    graph, pinned = module.graph, written(module.graph)
    order = positions(graph)
    gathers = [w for w in graph.nodes if w.target is WAIT and STARTS.get(arg(w).target) == "all_gather"]
    gathers = [w for w in gathers if "forward" in w.meta and at_rest(arg(arg(w))) is not None and w not in pinned]
    families = {w: [n for n in arranged(w) if "backward" not in n.meta] for w in gathers}
    users = {w: [u for n in family for u in n.users if u not in family] for w, family in families.items()}
    now = {w: [order[u] for u in us if "backward" not in u.meta] for w, us in users.items()}
    last = max((min(at) for at in now.values() if at), default=-1)  # of the first uses
    for wait, family in families.items():
        later, kept = [u for u in users[wait] if "backward" in u.meta], any("kept" in n.meta for n in family)
        if later and now[wait] and not kept and max(now[wait]) < last:
            _again([arg(wait), *family], later, min(later, key=order.__getitem__))
    return dead_code(module)


def _again(chain: Sequence[Node], users: Sequence[Node], first: Node) -> None:
    """Copies of the chain before `first`, for the `users`."""
    copies: dict[Node, Node] = {}
    phases = {k: first.meta[k] for k in ("backward", "remat") if k in first.meta}
    with first.graph.inserting_before(first):
        for n in chain:
            copies[n] = first.graph.node_copy(n, lambda a: copies.get(a, a))
            copies[n].meta = {k: v for k, v in n.meta.items() if k != "forward"} | phases
    for user in users:
        for n in chain[1:]:
            user.replace_input_with(n, copies[n])
