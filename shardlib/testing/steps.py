"""A loss on a mesh against the same loss on one rank, and what a step sends."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardlib import layout as cuts
from shardlib import tree
from shardlib.array import Array
from shardlib.errors import located
from shardlib.jit import Jitted, jit
from shardlib.mesh import Mesh
from shardlib.optim.base import Optimizer, zeros32
from shardlib.spec import Spec
from shardlib.state import abstract, gather, shard
from shardlib.step import step
from shardlib.testing.compare import as_mesh, difference, largest
from shardlib.zero import Layout


def check_loss(
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    mesh: Mesh | Mapping[str, Any],
    layout: Layout | None = None,
    accumulate: int | None = None,
    trainable: tree.Chooser | None = None,
) -> None:
    """Raise AssertionError unless one step of `loss` gives, on `mesh`, the loss and the gradients that one rank gives.

    One rank: a mesh with the same axes, all of size 1, and no micro-batches. `params` and `batch`: trees of arrays of
    any mesh, or `@pytree` objects of plain tensors. `trainable`: as in `step`; other leaves have no gradient. Both
    steps run under `jit`. The message names the loss, if it differs, and the first leaf whose gradient does: by how
    much, where and on which rank.
    """
    m, name = as_mesh(mesh), getattr(loss, "__name__", "loss")
    one = Mesh(dict.fromkeys(m.shape, 1), m.groups, simulate=True)
    (value, grads), (right, wanted) = (
        _of_one_step(loss, _moved(params, "params", on), _moved(batch, "batch", on), on, layout, count, trainable)
        for on, count in ((m, accumulate), (one, None))
    )
    flat = [x.shards[0].cpu() for x in tree.leaves(wanted)]
    found = {"the loss": difference(value, right.shards[0].cpu())}
    for path, x, y in zip(tree.paths(grads), tree.leaves(grads), flat, strict=True):
        what = f"the gradient of `{path}`" if path else "the gradient"
        found[what] = difference(x, y, largest(flat))
        if found[what]:
            break
    differ = [f"{what} differs: {said}" for what, said in found.items() if said]
    if differ:
        raise AssertionError("\n  ".join([f"`{name}` on {m!r} is not what it is on one rank", *differ]))


def _of_one_step(
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    mesh: Mesh,
    layout: Layout | None,
    accumulate: int | None,
    trainable: tree.Chooser | None,
) -> tuple[Any, Any]:
    """The loss and the gradients, as arrays."""
    keep = Optimizer(  # whose state is the gradient
        lambda params: tree.map_(zeros32, params), lambda grads, _, params: (tree.map_(torch.zeros_like, params), grads)
    )
    with mesh:
        train = step(loss, keep, layout=layout, accumulate=accumulate, trainable=trainable)
        state, metrics = jit(train)(train.init(params), batch)
        return shard(metrics["loss"], "", mesh), state.opt


def collectives(
    f: Callable[..., Any], *args: Any, mesh: Mesh | Mapping[str, Any], scalars: bool = False
) -> dict[str, int]:
    """How often `f(*args)` calls each collective over each axis, as written: `{"psum_scatter:dp": 6}`. Nothing runs.

    Passes (`jit`), which merge collectives and gather again, are left out.

    `f`: a step or another function on arrays, jitted or plain. `args`: trees of arrays of any mesh (abstract ones too),
    or `@pytree` objects of plain tensors; they are taken as lying on `mesh`. A collective in a graph that is called n
    times counts n times. Those of single numbers (norms, loss, weights) count with `scalars=True`.
    """
    m = as_mesh(mesh)
    written = jit(f.f, static_argnums=f.static, passes=[]) if isinstance(f, Jitted) else jit(f, passes=[])
    with m:
        lying = abstract(lambda: tuple(_moved(x, f"argument {i}", m, _empty) for i, x in enumerate(args)))
        found: Counter[str] = Counter()
        for each in written.lower(*lying).collectives():
            found[f"{each.op}:{each.axis}"] += each.times * (scalars or not each.scalar)
    return {name: n for name, n in found.items() if n}


def _placed(x: Tensor, spec: Spec, mesh: Mesh) -> Array:
    """The values of an array of any mesh, or of a global tensor, on `mesh`; sums still to be made are made."""
    return shard(gather(x) if isinstance(x, Array) else x, spec.without(spec.pending), mesh)


def _empty(x: Tensor, spec: Spec, mesh: Mesh) -> Array:
    """An array of the shape and dtype of `x` on `mesh`."""
    shape = cuts.padded_shape(spec, x.shape, mesh.shape)
    return Array([torch.empty(shape, dtype=x.dtype, device=mesh.device)], spec, x.shape, mesh)


def _moved(x: Any, what: str, mesh: Mesh, place: Callable[[Tensor, Spec, Mesh], Array] = _placed) -> Any:
    """A tree of arrays of any mesh, or a `@pytree` object of plain tensors, as arrays on `mesh`; the rest as it is."""
    flat, treedef = tree.flatten(x)
    plain = not any(isinstance(leaf, Array) for leaf in flat) and tree.is_pytree_class(type(x))
    specs = tree.broadcast(type(x), x, what) if plain else [getattr(leaf, "spec", None) for leaf in flat]
    out = []
    for path, leaf, spec in zip(tree.paths(x), flat, specs, strict=True):
        if not isinstance(leaf, Tensor) or spec is None:
            out.append(leaf)
            continue
        with located(f"{what}, `{path}`" if path else what):
            out.append(place(leaf, cuts.check_rank(mesh.resolve(spec.expand(leaf.dim())), leaf.shape), mesh))
    return tree.unflatten(treedef, out)
