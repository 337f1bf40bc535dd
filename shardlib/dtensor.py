"""`Array`s to and from torch's `DTensor`, for code that speaks that: what each rank holds stays where it is."""

import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

from shardlib import layout, tree
from shardlib.array import Array
from shardlib.errors import MeshError, SpecError, located
from shardlib.mesh import Mesh
from shardlib.spec import Spec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: Any) -> TypeGuard["DTensor"]:
    """Whether `x` is one; a process that never made one need not load that part of torch, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def to_dtensor(tree_: Any) -> Any:
    """Arrays -> `DTensor`s over `mesh.device_mesh`, of the same local tensors: views, nothing is sent.

    `"m/dp n/tp"` is `[Shard(0), Shard(1)]`, `+dp` is `Partial()`, an axis that is not named `Replicate()`. A dimension
    cut over `/tp/dp` on a mesh with dp first is torch's strided shard, if it divides. Raises `MeshError` on a simulated
    mesh, `SpecError` for a cut that DTensor does not have.
    """
    flat, treedef = tree.flatten(tree_)
    out = []
    for path, x in zip(tree.paths(tree_), flat, strict=True):
        with located(f"to_dtensor: `{path}`" if path else "to_dtensor"):
            if not isinstance(x, Array):
                raise SpecError(f"a {type(x).__name__}, not an array at rest: sl.shard makes one")
            out.append(_made(x))
    return tree.unflatten(treedef, out)


def _made(x: Array) -> "DTensor":
    from torch.distributed.tensor import DTensor

    device_mesh = x.mesh.device_mesh
    places = [_placement(x, axis) for axis in x.mesh.axis_names]
    local = x.local().contiguous()
    strides = tuple(math.prod(x.shape[i + 1 :]) for i in range(x.dim()))
    return DTensor.from_local(local, device_mesh, places, run_check=False, shape=x.shape, stride=strides)


def _placement(x: Array, axis: str) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard  # a dimension cut over a later axis first

    if axis in x.spec.pending:
        return Partial()
    for at, dim in enumerate(x.spec.dims):
        if axis in dim.axes:
            order = x.mesh.axis_names
            before = [a for a in dim.axes[: dim.axes.index(axis)] if order.index(a) > order.index(axis)]
            ways = math.prod(x.mesh.shape[a] for a in before)
            if ways == 1:
                return Shard(at)
            if x.shape[at] % layout.parts(dim, x.mesh.shape):
                chain = "/".join(sorted(dim.axes, key=order.index))
                raise SpecError(
                    f"`{x.spec}`, {tuple(x.shape)}: DTensor cuts unevenly in the order of the mesh alone: sl.reshard "
                    f"`{dim.name}` to `{dim.name}/{chain}` first"
                )
            return _StridedShard(at, split_factor=ways)
    return Replicate()


def from_dtensor(x: "DTensor", names: Spec, mesh: Mesh) -> tuple[Tensor, Spec]:
    """This rank's tensor, and its spec with the dimensions of `names`. Raises `MeshError`, `SpecError`."""
    if x.device_mesh.mesh.tolist() != mesh.device_mesh.mesh.tolist():
        raise MeshError(
            f"the DTensor lies on {x.device_mesh}, the mesh is {mesh!r}: they need the same ranks in the same places"
        )
    chains: list[list[str]] = [[] for _ in names.dims]
    pending = []
    for axis, place in reversed(list(zip(mesh.axis_names, x.placements, strict=True))):
        if place.is_partial():
            if str(getattr(place, "reduce_op", "sum")) != "sum":
                raise SpecError(f"{place} over `{axis}`: only sums can wait in a spec")
            pending.insert(0, axis)
        elif not place.is_replicate():
            _insert(chains[place.dim], axis, getattr(place, "split_factor", 1), mesh)  # type: ignore[attr-defined]
    dims = tuple(replace(d, axes=tuple(c)) for d, c in zip(names.dims, chains, strict=True))
    spec, local = replace(names, dims=dims, pending=tuple(pending)), x.to_local()
    true = layout.local_shape(spec, x.shape, mesh.shape, mesh.coordinates(mesh.rank))
    if tuple(local.shape) != true:
        raise SpecError(
            f"the DTensor {tuple(x.shape)} with {x.placements} has {tuple(local.shape)} here, `{spec}` {true}"
        )
    return local, spec


def _insert(chain: list[str], axis: str, ways: int, mesh: Mesh) -> None:
    """Put an axis where `ways` pieces are made before it; axes that come later in the mesh stand there already."""
    for at in range(len(chain) + 1):
        if math.prod(mesh.shape[a] for a in chain[:at]) == ways:
            return chain.insert(at, axis)
    raise SpecError(f"a strided shard of {ways} over `{axis}`: no axis of {mesh!r} makes so many pieces first")
