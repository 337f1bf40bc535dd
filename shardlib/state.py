"""State at rest: trees of `Array`s made, taken apart and moved between specs."""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # shapes without storage

from shardlib import layout, random, tree
from shardlib.array import Array
from shardlib.errors import MeshError, SpecError, TreeError
from shardlib.mesh import Axes, Mesh, current_mesh
from shardlib.shard_map import global_spec, shard_map
from shardlib.sharding import gather_local, move, reshard_local
from shardlib.spec import Spec
from shardlib.types import inside


def _specs_for(tree_: Any, specs: Any, what: str) -> list[Any]:
    if specs is None:
        if not tree.is_pytree_class(type(tree_)):
            raise SpecError(f"{what}: give specs; only a @pytree object brings its own, found {type(tree_).__name__}")
        specs = type(tree_)
    return tree.broadcast(specs, tree_, what)


def _each(tree_: Any, specs: Any, what: str, make: Callable[[Tensor, Spec, str], Any], mesh: Mesh) -> Any:
    flat, treedef = tree.flatten(tree_)
    out = []
    for path, x, said in zip(tree.paths(tree_), flat, _specs_for(tree_, specs, what), strict=True):
        at = f"{what}: `{path}`" if path else what
        if not isinstance(x, Tensor):
            raise SpecError(f"{at} is {type(x).__name__}; a tensor is needed")
        if isinstance(x, Array):
            raise SpecError(f"{at} is an array at rest already: sl.reshard changes its spec")
        try:
            spec = layout.check_rank(global_spec(said, x.dim(), mesh), x.shape)
        except SpecError as e:
            raise SpecError(f"{at}: {e}") from None
        if spec.pending:
            raise SpecError(f"{at}: `{spec}` says that a sum is pending, which a global value is not")
        out.append(make(x.detach(), spec, at))
    return tree.unflatten(treedef, out)


def _ranks(mesh: Mesh) -> range:
    """The ranks whose shards this process holds."""
    return range(mesh.total) if mesh.simulate else range(mesh.rank, mesh.rank + 1)


def _pad(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x` zero-padded to `shape`, contiguous and never an alias of what the user holds."""
    if tuple(x.shape) == shape:
        return x.clone(memory_format=torch.contiguous_format)
    out = x.new_zeros(shape)
    out[tuple(slice(0, n) for n in x.shape)] = x
    return out


def shard(tree_: Any, specs: Any = None, mesh: Mesh | None = None) -> Any:
    """Global tensors -> arrays. Every rank passes the same tensors and keeps its shard.

    `specs`: a spec tree, a `@pytree` class, or one spec for all; None where `tree_` is a `@pytree` object. Lengths that
    do not divide give short or empty last shards (`torch.chunk`'s ceilings). Raises `SpecError`, `MeshError`.
    """
    m = mesh or current_mesh()

    def make(x: Tensor, spec: Spec, _: str) -> Array:
        padded = layout.padded_shape(spec, x.shape, m.shape)
        made: dict[tuple[slice, ...] | Any, Tensor] = {}
        shards = []
        for r in _ranks(m):
            at = layout.slices(spec, x.shape, m.shape, m.coordinates(r))
            key = tuple((s.start, s.stop) for s in at)
            if key not in made:
                made[key] = _pad(x[at].to(m.device), padded)
            shards.append(made[key])
        return Array(shards, spec, x.shape, m)

    return _each(tree_, specs, "shard", make, m)


def from_local(tree_: Any, specs: Any = None, mesh: Mesh | None = None) -> Any:
    """Each rank's own tensors -> arrays: the global shape is the local one times the axes of each dimension.

    Ranks along axes that a spec does not name must pass equal tensors. Not for simulated meshes (one process holds all).
    """
    m = mesh or current_mesh()
    if m.simulate and m.total > 1:
        raise MeshError("from_local on a simulated mesh: this process is every rank; pass the global batch to sl.shard")

    def make(x: Tensor, spec: Spec, _: str) -> Array:
        local = x.to(m.device)
        local = local.clone() if local.data_ptr() == x.data_ptr() else local
        return Array([local.contiguous()], spec, layout.global_shape(spec, x.shape, m.shape), m)

    return _each(tree_, specs, "from_local", make, m)


def local(tree_: Any, rank: int | None = None) -> Any:
    """Arrays -> this rank's shards without padding (on a simulated mesh, those of `rank`)."""
    return tree.map_(lambda x: x.local(rank), tree_)


def gather(tree_: Any, axes: Axes | None = None) -> Any:
    """Remove `axes` (None: all) from the spec of every leaf; leaves that are not split over them stay as they are.

    At rest, with all axes removed, plain global tensors come back on every rank; with some, arrays. Inside a per-device
    function, gathered leaves are replicated: their gradient is scattered back (`psum_scatter`).
    """
    if inside():
        return gather_local(tree_, axes)
    flat, treedef = tree.flatten(tree_)
    for path, x in zip(tree.paths(tree_), flat):
        if not isinstance(x, Array):
            raise SpecError(f"gather: `{path}` is {type(x).__name__}, not an array at rest")
    if not flat:
        return tree_
    mesh = flat[0].mesh
    drop = tuple(mesh.shape) if axes is None else mesh.expand(axes)
    arrays = _move([x.spec.without(drop) for x in flat], flat, mesh)
    return tree.unflatten(treedef, [_whole(x) for x in arrays] if axes is None else arrays)


def _whole(x: Array) -> Tensor:
    """An unsplit array as a plain tensor, not an alias of the state."""
    return x.shards[0].clone()


def _move(specs: list[Spec], flat: list[Array], mesh: Mesh) -> list[Array]:
    if all(x.spec == s for x, s in zip(flat, specs)):
        return flat
    return shard_map(
        lambda xs: [move(x, s) for x, s in zip(xs, specs)], in_specs=None, out_specs=None, mesh=mesh
    )(flat)


def reshard(tree_: Any, specs: Any) -> Any:
    """Bring every leaf to another spec with the cheapest collectives; at rest or inside a per-device function.

    Inside, gathers and sums give invariant values. Pending leaves of `tree_` are summed or scattered.
    """
    if inside():
        return reshard_local(tree_, specs)
    flat, treedef = tree.flatten(tree_)
    if not flat:
        return tree_
    mesh = flat[0].mesh
    wanted = [global_spec(s, x.dim(), mesh) for s, x in zip(tree.broadcast(specs, tree_, "reshard"), flat)]
    kept = [replace(s, stacked=x.spec.stacked) for s, x in zip(wanted, flat)]
    return tree.unflatten(treedef, _move(kept, flat, mesh))


# ---- made from nothing


def _shape(spec: Spec, sizes: Mapping[str, int], path: str) -> tuple[int, ...]:
    missing = [d.name for d in spec.dims if d.name not in sizes and not d.name.isdigit()]
    if missing:
        raise SpecError(f"init: `{path}` (`{spec}`) needs a size for `{missing[0]}`; sizes has {', '.join(sizes) or 'none'}")
    return tuple(sizes[d.name] if d.name in sizes else int(d.name) for d in spec.dims)


def _default_init(spec: Spec, shape: tuple[int, ...]) -> Any:
    """Ones for vectors; else a normal whose variance is 1 / (all dimensions but the largest... of the layer's inputs)."""
    inner = shape[spec.stacked :]
    return "ones" if len(inner) < 2 else 1.0 / math.sqrt(max(1, inner[0]))


def _draw(key: Tensor, how: Any, shape: tuple[int, ...], dtype: torch.dtype, index: Tensor) -> Tensor:
    if how in ("zeros", "ones"):
        return torch.full(index.shape, float(how == "ones"), dtype=dtype, device=index.device)
    if callable(how):
        return how(key, shape, dtype, index=index)
    return random.normal(key, shape, dtype, index=index) * how


def _make_shard(field: tree.Field, spec: Spec, shape: tuple[int, ...], path: str, key: Tensor, at: tuple[slice, ...]) -> Tensor:
    """One rank's true shard of a leaf. A stacked leaf is drawn layer by layer, each with the key of its own path."""
    dtype, how = field.dtype or torch.float32, _default_init(spec, shape) if field.init is None else field.init
    k, inner = spec.stacked, shape[spec.stacked :]
    index = random.global_index(inner, [s.start for s in at[k:]], [s.stop - s.start for s in at[k:]])
    layers = [range(s.start, s.stop) for s in at[:k]]
    out = torch.empty([len(r) for r in layers] + list(index.shape), dtype=dtype)
    for place in _places([len(r) for r in layers]):
        flat = 0
        for n, r, i in zip(shape, layers, place):
            flat = flat * n + r[i]
        own = path.replace("*", str(flat), 1) if k else path
        out[place] = _draw(random.fold_in(key, zlib.crc32(own.encode())), how, inner, dtype, index)
    return out


def _places(lengths: list[int]) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for n in lengths:
        out = [(*p, i) for p in out for i in range(n)]
    return out


def init(model: Any, sizes: Mapping[str, int] | None = None, *, key: Tensor, specs: Any = None, mesh: Mesh | None = None) -> Any:
    """Fresh arrays, each rank making its shard only; the values do not depend on the mesh.

    `init(Model, sizes=dict(vocab=256, ...), key=key)` draws every leaf of a `@pytree` class as its `init=` says, with
    the key `fold_in(key, crc32(path))`; a list field's length is the size named by its `stack`. `init(f, specs=specs,
    key=key)` shards the global tensors that `f(key)` makes.
    """
    m = mesh or current_mesh()
    if not tree.is_pytree_class(model):
        return shard(model(key), specs, m)
    fields = lengthened(tree.fields(model), model, sizes or {})
    flat, treedef = tree.flatten(fields)
    return tree.unflatten(treedef, [_leaf(f, p, sizes or {}, key, m) for f, p in zip(flat, tree.paths(fields))])


def _leaf(field: tree.Field, path: str, sizes: Mapping[str, int], key: Tensor | None, mesh: Mesh) -> Array:
    """One array, drawn where there is a key, else empty."""
    shape = _shape(field.spec, sizes, path)
    spec = global_spec(field.spec, len(shape), mesh)
    padded = layout.padded_shape(spec, shape, mesh.shape)
    if key is None:
        return Array([torch.empty(padded, dtype=field.dtype or torch.float32, device=mesh.device)], spec, shape, mesh)
    made: dict[Any, Tensor] = {}
    shards = []
    for r in _ranks(mesh):
        at = layout.slices(spec, shape, mesh.shape, mesh.coordinates(r))
        where = tuple((s.start, s.stop) for s in at)
        if where not in made:
            made[where] = _pad(_make_shard(field, spec, shape, path, key.cpu(), at).to(mesh.device), padded)
        shards.append(made[where])
    return Array(shards, spec, shape, mesh)


def lengthened(fields: Any, cls: Any, sizes: Mapping[str, int]) -> Any:
    """A field tree with every list field as long as the size its `stack` names says."""
    import dataclasses

    out = {}
    for f in dataclasses.fields(cls):
        value, said = getattr(fields, f.name), f.metadata.get("shardlib")
        if isinstance(value, tree.Each):
            name = said.dims.dims[0].name
            if name not in sizes:
                raise TreeError(f"init: {cls.__name__}.{f.name} is a list along `{name}`; give its size")
            inner = type(value.item)
            value = [lengthened(value.item, inner, sizes) for _ in range(sizes[name])]
        elif dataclasses.is_dataclass(value) and tree.is_pytree_class(type(value)):
            value = lengthened(value, type(value), sizes)
        out[f.name] = value
    return tree.rebuild(cls, out)


def abstract(f: Any, *args: Any, mesh: Mesh | None = None) -> Any:
    """What `f(*args)` would return, as arrays without storage (as `jax.eval_shape`); of a `@pytree` class and sizes, its tree."""
    m = mesh or current_mesh()
    with FakeTensorMode(allow_non_fake_inputs=True):
        if tree.is_pytree_class(f):
            (sizes,) = args
            fields = lengthened(tree.fields(f), f, sizes)
            flat, treedef = tree.flatten(fields)
            return tree.unflatten(treedef, [_leaf(x, p, sizes, None, m) for x, p in zip(flat, tree.paths(fields))])
        with m:
            return f(*args)


