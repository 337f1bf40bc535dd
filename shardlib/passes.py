"""Passes: functions from graph to graph that make a traced program fast and keep what it computes.

`jit(f, passes=[...])` applies a list of them to every graph of a program, in order; one's own is any function of a
`torch.fx.GraphModule` that returns one.
"""

from collections.abc import Callable, Sequence

from torch.fx import GraphModule

from shardlib.errors import SpecError
from shardlib.graph.buckets import bucket as bucket
from shardlib.graph.dedupe import dedupe as dedupe
from shardlib.graph.finite import check_finite as check_finite
from shardlib.graph.fuse import Island
from shardlib.graph.fuse import fuse as fuse
from shardlib.graph.gloo import by_messages, for_gloo
from shardlib.graph.hoist import hoist as hoist
from shardlib.graph.in_place import in_place as in_place
from shardlib.graph.in_place import reuse as reuse
from shardlib.graph.in_place import sums_in_place
from shardlib.graph.join import join as join
from shardlib.graph.overlap import overlap as overlap
from shardlib.graph.recompute import recompute as recompute
from shardlib.graph.regather import regather as regather
from shardlib.graph.shorten import shorten as shorten
from shardlib.graph.squares import squares as squares
from shardlib.switch import Switch

Pass = Callable[[GraphModule], GraphModule]
default: tuple[Pass, ...] = (dedupe, shorten, squares, regather, bucket, hoist, overlap, in_place, reuse, join)


def for_backend(passes: Sequence[Pass], backend: str) -> tuple[Pass, ...]:
    """With `fuse` where regions are compiled, before what writes in place, and without `squares`; without `reuse` and
    `join` where all is, since a compiler places values itself; without `join`, which sends addresses to the GPU, where
    that is recorded."""
    out = {"regional": (squares,), "inductor": (squares, reuse, join), "cudagraph": (join,)}.get(backend, ())
    found = [one for one in passes if one not in out]
    if backend == "regional" and fuse not in found:
        found.insert(next((i for i, one in enumerate(found) if one in (in_place, reuse)), len(found)), fuse)
    return tuple(found)


def for_processes(device: str, backend: str) -> tuple[Pass, ...]:
    """What suits ranks that are processes: on the CPU collectives as gloo does them best. Unless a compiler takes the
    whole, sums where their operands are, and messages of our own, which it would take to be over when they begin."""
    mine = backend in ("graph", "regional")
    gloo = (by_messages if mine else for_gloo,)
    return (sums_in_place,) * mine + gloo * (device == "cpu")


def applied(passes: Sequence[Pass], module: GraphModule) -> GraphModule:
    """The program after the passes, the graphs that it calls included. From the first that writes in place each goes
    through all graphs before the next: what a call is given decides where its graph may write."""
    n = next((i for i, one in enumerate(passes) if one in (in_place, reuse)), len(passes))
    for some in (passes[:n], *([one] for one in passes[n:])):
        module = _through(some, module)
    return module


def _through(passes: Sequence[Pass], module: GraphModule) -> GraphModule:
    for name, child in list(module.named_children()):
        if isinstance(child, GraphModule) and not isinstance(child, Island):  # which a compiler takes as it is
            setattr(module, name, _through(passes, child))
    if isinstance(module, Switch):
        return module  # its turns keep their order
    for one in passes:
        module = one(module)
        if not isinstance(module, GraphModule):
            raise SpecError(
                f"the pass `{getattr(one, '__name__', one)}` returns {module!r}: a pass returns the GraphModule"
            )
    return module
