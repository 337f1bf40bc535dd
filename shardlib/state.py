"""State at rest: trees of `Array`s made, taken apart and moved between specs."""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # shapes without storage

from shardlib import errors, layout, random, tree
from shardlib.array import Array
from shardlib.dtensor import from_dtensor, is_dtensor
from shardlib.errors import MeshError, SpecError, TreeError, located, nearest
from shardlib.mesh import Axes, Mesh, current_mesh
from shardlib.parts import once
from shardlib.shard_map import global_spec, shard_map, tracing
from shardlib.sharding import gather_local, move, plan, reshard_local
from shardlib.spec import Spec
from shardlib.types import inside


def specs_for(tree_: Any, specs: Any, what: str) -> list[Any]:
    """The spec of every leaf: those given, or of the annotations of a `@pytree` object."""
    if specs is None:
        if not tree.is_pytree_class(type(tree_)):
            raise SpecError(f"{what}: give specs; only a @pytree object brings its own, found {type(tree_).__name__}")
        specs = type(tree_)
    return tree.broadcast(specs, tree_, f"{what}: specs")


def _each(tree_: Any, specs: Any, what: str, make: Callable[[Tensor, Spec], Array], mesh: Mesh) -> Any:
    flat, treedef = tree.flatten(tree_)
    out, make = [], once(make)
    for path, x, said in zip(tree.paths(tree_), flat, specs_for(tree_, specs, what), strict=True):
        at = f"{what}: `{path}`" if path else what
        if not isinstance(x, Tensor):
            raise SpecError(f"{at} is a {type(x).__name__}; a tensor is needed")
        if isinstance(x, Array):
            raise SpecError(f"{at} is an array at rest already (`{x.spec}`): sl.reshard changes its spec")
        with located(at):
            spec = global_spec(said, x.shape, mesh)
            if spec.pending:
                raise spec.error("a global value is no sum still to be made", spec.pending[0], "leave it out")
            out.append(make(x, spec))
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
    do not divide give short or empty last shards (`torch.chunk`'s ceilings). One tensor at several places with one spec
    is one array, tied, and stays one in all that the library does. A `DTensor` on the same ranks is taken as it lies,
    then brought to its spec as `reshard` would. Raises `SpecError`, `MeshError`.
    """
    m = mesh or current_mesh()

    def make(x: Tensor, spec: Spec) -> Array:
        if is_dtensor(x):
            mine, found = from_dtensor(x, spec, m)
            plan(found, spec, x.shape, m)
            taken = Array([_pad(mine.detach(), layout.padded_shape(found, x.shape, m.shape))], found, x.shape, m)
            return _move([spec], [taken], m)[0]
        if tracing() and m.total > 1:  # one program for all ranks: each takes its slice as it runs
            whole = replace(spec, dims=tuple(replace(d, axes=()) for d in spec.dims))
            return _move([spec], [Array([x.to(m.device).clone()], whole, x.shape, m)], m)[0]
        padded = layout.padded_shape(spec, x.shape, m.shape)
        x = x.detach()
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

    Ranks along axes that a spec does not name must pass equal tensors. Not for simulated meshes: one process holds all.
    """
    m = mesh or current_mesh()
    if m.simulate and m.total > 1:
        raise MeshError("from_local on a simulated mesh: this process is every rank; pass the global batch to sl.shard")

    def make(x: Tensor, spec: Spec) -> Array:
        local = x.detach().to(m.device, copy=True, memory_format=torch.contiguous_format)
        return Array([local], spec, layout.global_shape(spec, x.shape, m.shape), m)

    return _each(tree_, specs, "from_local", make, m)


def local(tree_: Any, rank: int | None = None) -> Any:
    """Arrays -> this rank's shards (on a simulated mesh, those of `rank`) without padding: views, not copies."""
    flat, treedef = _arrays(tree_, "local")
    return tree.unflatten(treedef, [x.local(rank) for x in flat])


def _arrays(tree_: Any, what: str) -> tuple[list[Array], Any]:
    """The leaves, which must be arrays of one mesh, and the structure."""
    flat, treedef = tree.flatten(tree_)
    for path, x in zip(tree.paths(tree_), flat, strict=True):
        at = f"{what}: `{path}`" if path else f"{what}: the value"
        if not isinstance(x, Array):
            raise SpecError(f"{at} is a {type(x).__name__}, not an array at rest: sl.shard makes one")
        if x.mesh.shape != flat[0].mesh.shape:
            raise MeshError(f"{at} lies on {x.mesh!r}, others on {flat[0].mesh!r}: one call moves leaves of one mesh")
    return flat, treedef


def gather(tree_: Any, axes: Axes | None = None) -> Any:
    """Remove `axes` (None: all) from the spec of every leaf; leaves that are not split over them stay as they are.

    At rest, with all axes removed, plain global tensors come back on every rank; with some, arrays. Inside a per-device
    function, gathered leaves are replicated: their gradient is scattered back (`psum_scatter`).
    """
    if inside():
        return gather_local(tree_, axes)
    flat, treedef = _arrays(tree_, "gather")
    if not flat:
        return tree_
    mesh = flat[0].mesh
    drop = tuple(mesh.shape) if axes is None else mesh.expand(axes)
    arrays = _move([x.spec.without(drop) for x in flat], flat, mesh)
    return tree.unflatten(treedef, list(map(once(_whole), arrays)) if axes is None else arrays)


def _whole(x: Array) -> Tensor:
    """An unsplit array as a plain tensor, not an alias of the state."""
    return x.shards[0].clone()


def _move(specs: list[Spec], flat: list[Array], mesh: Mesh) -> list[Array]:
    if all(x.spec == s for x, s in zip(flat, specs, strict=True)):
        return flat
    return _mover(tuple(specs), mesh)(flat)


@lru_cache(maxsize=64)
def _mover(specs: tuple[Spec, ...], mesh: Mesh) -> Callable[[list[Array]], list[Array]]:
    """Cached, so that a move that is made again is not checked on shapes again."""

    def moved(xs: list[Tensor]) -> list[Tensor]:
        return list(map(once(move), xs, specs))

    return shard_map(moved, in_specs=None, out_specs=None, mesh=mesh)


def reshard(tree_: Any, specs: Any) -> Any:
    """Bring every leaf to another spec with the cheapest collectives; at rest or inside a per-device function.

    Inside, gathers and sums give invariant values. Pending leaves of `tree_` are summed or scattered. Names of
    dimensions stay: a spec says where to cut.
    """
    if inside():
        return reshard_local(tree_, specs)
    flat, treedef = _arrays(tree_, "reshard")
    if not flat:
        return tree_
    mesh, wanted = flat[0].mesh, []
    for path, x, said in zip(tree.paths(tree_), flat, tree.broadcast(specs, tree_, "reshard: specs"), strict=True):
        with located(f"reshard: `{path}`" if path else "reshard"):
            spec = global_spec(said, x.shape, mesh).noting(x.spec)
            plan(x.spec, spec, x.shape, mesh)
        wanted.append(spec)
    return tree.unflatten(treedef, _move(wanted, flat, mesh))


# ---- made from nothing


def _shape(spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    for i, d in enumerate(spec.dims):
        if d.name not in sizes and not d.name.isdigit():
            has = f"sizes has {errors.sizes(sizes)}{nearest(d.name, sizes)}"
            raise spec.error(f"a size is needed for `{d.name}`; {has}", i)
    return tuple(sizes[d.name] if d.name in sizes else int(d.name) for d in spec.dims)


def _default_init(field: tree.Field, shape: tuple[int, ...]) -> Any:
    """Ones for vectors and scalars, else a normal of variance 1/fan-in (LeCun et al. 1998).

    The fan-in is that of the dimensions named as inputs; unsaid, the first of two, the largest of more.
    """
    inner, names = shape[field.spec.stacked :], field.spec.names[field.spec.stacked :]
    if len(inner) < 2:
        return "ones"
    inputs = field.spec.matrix[0]
    named = [n for n, name in zip(inner, names, strict=True) if name in inputs]
    fan_in = math.prod(named) if inputs else inner[0] if len(inner) == 2 else max(inner)
    return 1.0 / math.sqrt(max(1, fan_in))


def _draw(key: Tensor, how: Any, shape: tuple[int, ...], dtype: torch.dtype, index: Tensor) -> Tensor:
    if how in ("zeros", "ones"):
        return torch.full(index.shape, float(how == "ones"), dtype=dtype, device=index.device)
    if isinstance(how, (int, float)):
        return random.normal(key, shape, dtype, index=index) * how
    return how(key, shape, dtype, index=index)


def _make_shard(field: tree.Field, shape: tuple[int, ...], path: str, key: Tensor, at: tuple[slice, ...]) -> Tensor:
    """One rank's true shard of a leaf. A stacked leaf is drawn layer by layer, each with the key of its own path."""
    dtype, how = field.dtype or torch.float32, field.init
    how = _default_init(field, shape) if how is None else how
    k, inner = field.spec.stacked, shape[field.spec.stacked :]
    index = random.global_index(inner, [s.start for s in at[k:]], [s.stop - s.start for s in at[k:]])
    layers = [range(s.start, s.stop) for s in at[:k]]
    out = torch.empty([len(r) for r in layers] + list(index.shape), dtype=dtype)
    for place in itertools.product(*(range(len(r)) for r in layers)):
        layer = [r[i] for r, i in zip(layers, place, strict=True)]
        own = random.fold_in(key, zlib.crc32(_layer_path(path, field.levels, layer, shape).encode()))
        out[place] = _draw(own, how, inner, dtype, index)
    return out


def _layer_path(path: str, levels: tuple[int, ...], layer: list[int], shape: tuple[int, ...]) -> str:
    """The path of one layer of a stacked leaf, as if stacks were lists: each `*` a number, row-major in its level."""
    done = 0
    for n in levels:
        number = 0
        for i, length in zip(layer[done : done + n], shape[done : done + n], strict=True):
            number = number * length + i
        path, done = path.replace("*", str(number), 1), done + n
    return path


def init(
    model: Any,
    specs: Any = None,
    *,
    sizes: Mapping[str, Any] | None = None,
    key: Tensor,
    dtype: torch.dtype = torch.float32,
    mesh: Mesh | None = None,
) -> Any:
    """Fresh arrays, each rank making its shard only; the values do not depend on the mesh.

    `init(Model, sizes=dict(vocab=256, ...), key=key)` draws every leaf of a `@pytree` class (or a tree of classes, such
    as `[Attention, Mlp]`) as its `init=` says, with the key `fold_in(key, crc32(path))`; a list is as long as the size
    that its `stack` names, a static field is what `sizes` or its default says. `dtype` is that of leaves whose
    annotation names none. `init(f, specs, key=key)` shards the global tensors that `f(key)` makes.
    """
    m = mesh or current_mesh()
    check_key(key, "init")
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"init: dtype is one of torch's, such as torch.bfloat16, not {dtype!r}")
    if _classes(model):
        return _of_class(model, sizes or {}, key, m, dtype)
    if not callable(model) or isinstance(model, torch.nn.Module):
        raise SpecError(
            f"init makes a @pytree class, a tree of them, or what a function of the key returns; found {model!r}"
        )
    return shard(model(key), specs, m)


def check_key(key: Any, what: str) -> None:
    """Raise where `key` is none."""
    if not isinstance(key, Tensor) or key.shape != (2,) or key.dtype != torch.int64:
        raise SpecError(f"{what}: a key is what sl.random.key(seed) and its like make, not {key!r}")


def _classes(model: Any) -> bool:
    """Whether `model` is a `@pytree` class, or a tree of them."""
    flat = tree.leaves(model)
    return bool(flat) and all(map(tree.is_pytree_class, flat))


def _of_class(
    model: Any, sizes: Mapping[str, Any], key: Tensor | None, mesh: Mesh, dtype: torch.dtype = torch.float32
) -> Any:
    flat, treedef = tree.flatten(fields := tree.map_(lambda cls: _sized(tree.fields(cls), sizes), model))
    out = []
    for field, path in zip(flat, tree.paths(fields), strict=True):
        with located(f"{getattr(model, '__name__', 'init')}: `{path}`"):
            out.append(_leaf(replace(field, dtype=field.dtype or dtype), path, sizes, key, mesh))
    return tree.unflatten(treedef, out)


def _leaf(field: tree.Field, path: str, sizes: Mapping[str, int], key: Tensor | None, mesh: Mesh) -> Array:
    """One array, drawn where there is a key, else empty."""
    shape = _shape(field.spec, sizes)
    spec = global_spec(field.spec, shape, mesh)
    padded = layout.padded_shape(spec, shape, mesh.shape)
    if key is None:
        return Array([torch.empty(padded, dtype=field.dtype or torch.float32, device=mesh.device)], spec, shape, mesh)
    if tracing() and mesh.total > 1:
        raise SpecError("init of a class draws each rank's own shard, which one program cannot: call it outside of jit")
    made: dict[Any, Tensor] = {}
    shards = []
    for r in _ranks(mesh):
        at = layout.slices(spec, shape, mesh.shape, mesh.coordinates(r))
        where = tuple((s.start, s.stop) for s in at)
        if where not in made:
            made[where] = _pad(_make_shard(field, shape, path, key.cpu(), at).to(mesh.device), padded)
        shards.append(made[where])
    return Array(shards, spec, shape, mesh)


def _sized(x: Any, sizes: Mapping[str, Any], at: str = "") -> Any:
    """A tree of fields with every list as long as the size that its `stack` names, and static fields filled in."""
    if isinstance(x, tree.Each):
        if x.dim not in sizes:
            raise TreeError(f"{at} is a list, give the size of `{x.dim}`: sizes has {errors.sizes(sizes)}")
        return x.kind(_sized(x.item, sizes, at) for _ in range(sizes[x.dim]))
    if type(x) is tuple:
        return tuple(_sized(y, sizes, at) for y in x)
    if not tree.is_pytree_class(cls := type(x)):
        return x
    out = {}
    for f in dataclasses.fields(cls):
        here = f"{at or cls.__name__}.{f.name}"
        if f.name in tree.children_of(cls):
            out[f.name] = _sized(getattr(x, f.name), sizes, here)
        elif f.name not in sizes and f.default is dataclasses.MISSING:
            raise TreeError(f"{here} is static: give its value in sizes, or as static(default=)")
        else:
            out[f.name] = sizes.get(f.name, f.default)
    return tree.rebuild(cls, out)


def abstract(f: Any, *args: Any, mesh: Mesh | None = None) -> Any:
    """What `f(*args)` would return, as arrays without storage (as `jax.eval_shape`). Of a `@pytree` class and sizes: as
    `init` would return it."""
    m = mesh or current_mesh()
    with FakeTensorMode(allow_non_fake_inputs=True), m:
        return _of_class(f, args[0] if args else {}, None, m) if _classes(f) else f(*args)
