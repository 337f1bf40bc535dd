"""`shard_map`: a function on global arrays from a function on one rank's tensors.

The first call for each signature runs under fake tensors, so that every error of specs and types comes before anything
is sent. On a simulated mesh every rank then runs in a thread of its own; under `jit` the function is traced.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (  # no public way to run on shapes alone
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from shardlib import layout, tree
from shardlib.array import Array
from shardlib.errors import MeshError, SpecError, defined, located
from shardlib.insert import per_device, refuse_autocast
from shardlib.mesh import Mesh, current_mesh
from shardlib.parts import Memo, firsts, once
from shardlib.simulate import run_threads
from shardlib.spec import Cut, Dim, Spec, as_spec
from shardlib.types import Leaf, Region

_Known = tuple[list[Leaf | None], Any] | None  # the leaves of a result, and its structure
_Returned = tuple[list[Any], list[Leaf | None], Any, bool]
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def global_spec(said: Any, shape: Sequence[int], mesh: Mesh) -> Spec:
    """The spec of a tensor at a border: `...` expanded, cuts made, groups as axes; every axis must be of the mesh."""
    spec = layout.check_rank(as_spec(said), shape)
    for one in spec.cuts:
        spec = _cut(spec, one, shape, mesh)
    return mesh.resolve(replace(spec, cuts=()) if spec.cuts else spec)


def _cut(spec: Spec, one: Cut, shape: Sequence[int], mesh: Mesh) -> Spec:
    """The spec with one of its cuts made."""

    def replaced(name: str) -> bool:
        inner = mesh.expand(name)
        return name in one.over or (name in mesh.groups and any({*mesh.expand(a)} <= {*inner} for a in one.over))

    kept = [tuple(a for a in d.axes if not replaced(a)) for d in spec.dims]
    used = mesh.expand(tuple(a for axes in kept for a in axes))
    axes = tuple(a for a in mesh.expand(one.axes) if a not in used) if math.prod(shape) >= one.least else ()
    at = next((i for i, d in enumerate(spec.dims) if d.axes != kept[i]), None)
    if at is None:
        return layout.cut(mesh.resolve(spec), shape, axes, mesh.shape)
    first = next(k for k, a in enumerate(spec.dims[at].axes) if replaced(a))
    kept[at] = (*kept[at][:first], *axes, *kept[at][first:])
    return replace(spec, dims=tuple(replace(d, axes=a) for d, a in zip(spec.dims, kept, strict=True)))


def borders(specs: Any, args: Any, mesh: Mesh, what: str, given: bool = False) -> list[Leaf | None]:
    """For every leaf of `args`, the leaf it enters as; None for what is not a tensor. Raises before anything runs.
    `given`: whether the mesh is not the current one but the function's own."""
    flat, where = tree.leaves(args), tree.paths(args)
    wanted = [None] * len(flat) if specs is None else tree.broadcast(specs, args, f"{what}: in_specs")
    out: list[Leaf | None] = []
    for path, x, said in zip(where, flat, wanted, strict=True):
        if not isinstance(x, Tensor):
            out.append(None)
            continue
        with located(f"{what}: argument `{path}`"):
            out.append(Leaf(_enters_as(x, said, mesh, given), tuple(x.shape)))
    return out


def _enters_as(x: Tensor, said: Any, mesh: Mesh, given: bool) -> Spec:
    if isinstance(x, Array) and x.mesh.shape != mesh.shape:
        own, mend = ("the function has mesh=", "Leave mesh= out and run") if given else ("the current mesh is ", "Run")
        raise MeshError(
            f"it lies on {x.mesh!r}, {own}{mesh!r}.\n"
            f"  {mend} it under `with` the array's mesh, or move the array: sl.shard(sl.gather(x), spec, mesh)"
        )
    has = x.spec if isinstance(x, Array) else Spec(tuple(Dim("_") for _ in x.shape))
    spec = has if said is None else global_spec(said, x.shape, mesh)
    if spec.chains != has.chains or set(spec.pending) != set(has.pending):
        at = next((i for i, (a, b) in enumerate(zip(spec.chains, has.chains, strict=True)) if a != b), None)
        if isinstance(x, Array):
            held, mend = f"split as `{has}`", f"sl.reshard(x, '{spec}') first: nothing is redistributed by itself"
        else:
            held, mend = "plain, hence equal on all ranks", f"sl.shard(x, '{spec}') first"
        raise spec.error(f"a value of shape {tuple(x.shape)}, {held}, is not `{spec}`", at, mend)
    return Spec(spec.dims, spec.pending, spec.memory).noting(has) if isinstance(x, Array) else spec


def tracing() -> bool:
    """Whether a program is being traced."""
    return get_proxy_mode() is not None


def shards_of(x: Any) -> list[Any]:
    """The padded shards of an array; what is equal everywhere as one."""
    return x.shards if isinstance(x, Array) else [x]


@contextmanager
def device_code(mesh: Mesh, where: str, typed: bool = True) -> Iterator[Region]:
    """A region named for messages."""
    with per_device(mesh, typed) as here:
        here.where = where
        yield here


def enter(here: Region, locals_: Sequence[Any], leaves: Sequence[Leaf | None], places: Sequence[int]) -> list[Any]:
    """One rank's tensors, typed; the names of their specs bound. `places`: where each array stands first."""
    out: list[Any] = []
    for i, (x, leaf, at) in enumerate(zip(locals_, leaves, places, strict=True)):
        if leaf is not None and at == i:
            here.bind(leaf)
            x = here.enter(x, leaf, not layout.is_even(leaf.spec, leaf.shape, here.mesh.shape))
        out.append(x if at == i else out[at])
    return out


def leave(here: Region, specs: Any, out: Any, what: str) -> tuple[list[Any], list[Leaf | None]]:
    """The local tensors of a result and the leaves they are, checked against `specs` (None: what each leaf brought)."""
    flat, where = tree.leaves(out), tree.paths(out)
    wanted = [None] * len(flat) if specs is None else tree.broadcast(specs, out, f"{what}: out_specs")
    leaves: list[Leaf | None] = []
    for path, x, said in zip(where, flat, wanted, strict=True):
        with located(f"{what}: result `{path}`" if path else f"{what}: the result"):
            leaves.append(_result(here, x, said) if isinstance(x, Tensor) else None)
    return _values(out), leaves


def _result(here: Region, x: Tensor, said: Any) -> Leaf:
    mesh, kind, known, is_ = here.mesh, here.type_of(x), here.leaves.get(x), here.describe(x)
    if said is not None:
        spec = global_spec(said, x.shape, mesh)
    elif known is not None:
        spec = known.spec
    elif kind.strip("IR"):
        raise SpecError(f"{is_}: no spec says how it is split; give out_specs")
    else:
        spec = Spec(tuple(Dim("_") for _ in x.shape))
    for axis, letter in zip(mesh.shape, kind, strict=True):
        if axis in spec.split:
            if letter == "P":
                raise spec.error(f"{is_} still waits for a sum over `{axis}`", axis, "psum_scatter it there")
        elif axis in spec.pending:
            if letter in "IR":
                raise spec.error(f"{is_} is equal over `{axis}`: no sum is to be made", axis, "leave it out")
        elif letter == "V":
            mend = f"split a dimension (`/{axis}`), all_gather(..., invariant=True) it, or psum it"
            raise spec.error(f"{is_} differs by rank over `{axis}`, which `{spec}` does not name", None, mend)
        elif letter == "P":
            raise spec.error(f"{is_} still waits for a sum over `{axis}`", None, f"psum it, or write `+{axis}` here")
        elif letter == "R" and said is not None:
            mend = "gather it with invariant=True, so that its gradient is counted once"
            raise spec.error(f"{is_} is replicated over `{axis}`, `{spec}` says invariant", None, mend)
    if known is not None and known.spec.chains == spec.chains:
        return Leaf(Spec(spec.dims, spec.pending, spec.memory).noting(known.spec), known.shape)
    return Leaf(spec, layout.global_shape(spec, x.shape, mesh.shape))


def shard_map(f: Callable[..., Any], *, in_specs: Any, out_specs: Any, mesh: Mesh | None = None) -> Callable[..., Any]:
    """Run `f`, written for one rank on plain tensors, on arrays.

    `in_specs`: a spec, or a tuple of spec trees, one per argument (None: as the arrays are); a spec stands for a whole
    subtree. `out_specs`: the same for the result; None takes the spec each result leaf brought along, invariants whole.
    Results are `Array`s; what is not a tensor comes back as it is. An array that stands at several places of the
    arguments is one tensor inside, and a tensor that stands at several places of the result is one array. Raises
    `SpecError` before anything is sent when specs, shapes or types do not fit. As `jax.shard_map`.
    """
    seen: dict[Any, _Known] = Memo()

    def run(*args: Any) -> Any:
        refuse_autocast()
        m = mesh or current_mesh()
        name = getattr(f, "__name__", "function")
        leaves = borders(in_specs, args, m, name, mesh is not None)
        flat, treedef = tree.flatten(args)
        places = firsts((id(x), leaf) if leaf else i for i, (x, leaf) in enumerate(zip(flat, leaves, strict=True)))

        def body(*local: Any, known: _Known = None) -> _Returned:
            with device_code(m, name, typed=known is None) as here:
                out = f(*tree.unflatten(treedef, enter(here, local, leaves, places)))
                with defined(f):
                    values, found = leave(here, out_specs, out, name) if known is None else (_values(out), known[0])
                return values, found, tree.flatten(out)[1], here.asked

        shards = [shards_of(x) for x in flat]
        local = [s[0] for s in shards]
        if tracing() or any(isinstance(x, FakeTensor) for x in local):
            _refuse_captured(args, m, name)
            return _wrap([body(*local)], m)
        key = (treedef, m.name, places, tuple(_signature(x, leaf) for x, leaf in zip(flat, leaves, strict=True)))
        if key not in seen:
            seen[key] = _first_run(body, local, name)
        if m.simulate and m.total > 1:
            return _wrap(run_threads(m, body, [[s[r if len(s) > 1 else 0] for s in shards] for r in range(m.total)]), m)
        known = seen[key]
        if m.total == 1 and known is not None:
            result = body(*local, known=known)
            if _as_known(result, known):
                return _wrap([result], m)
        return _wrap([body(*local)], m)

    run.__name__ = getattr(f, "__name__", "shard_map")
    return run


def _signature(x: Any, leaf: Leaf | None) -> Any:
    if leaf is None or not isinstance(x, Tensor):
        return x if isinstance(x, (int, float, str, bool)) else type(x)
    return leaf, x.dtype


def _as_known(result: _Returned, known: tuple[list[Leaf | None], Any]) -> bool:
    """Whether a run gave what the first one did: other arguments, or what it captured, may have changed that."""
    values, leaves, structure, _ = result
    pairs = zip(values, leaves, strict=True) if structure == known[1] else ()
    return structure == known[1] and all(leaf is None or leaf.shape == tuple(x.shape) for x, leaf in pairs)


def _refuse_captured(args: Any, mesh: Mesh, name: str) -> None:
    """While a program of several ranks is traced: raise for an array that is no argument of it."""
    for path, x in zip(tree.paths(args), tree.leaves(args), strict=True) if tracing() and mesh.total > 1 else ():
        if isinstance(x, Array) and not isinstance(x.shards[0], FakeTensor):
            raise SpecError(
                f"{name}: argument `{path}` is an array that a jitted function captured, {x!r}: one program cannot "
                "hold every rank's shard of it.\n  Pass it as an argument of the jitted function"
            )


def fake_like(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """A tensor of the same shape, strides, dtype and device without storage."""
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _first_run(body: Callable[..., Any], local: Sequence[Any], name: str) -> _Known:
    """Run on shapes alone. What is known then: which leaves the results are; None where types matter as the code runs
    (it could not be checked to the end, or looks at types itself)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # captured constants, which assume() may declare
    fake = [fake_like(mode, x) if isinstance(x, Tensor) else x for x in local]
    try:
        with mode:
            _, leaves, structure, asked = body(*fake)
        return None if asked else (leaves, structure)
    except DATA_DEPENDENT:
        warnings.warn(
            f"{name} takes a Python decision on a tensor's value, so it could not be checked before it ran; "
            "types are checked as it runs. Under jit this is an error: use torch.where",
            stacklevel=3,
        )
        return None


def _values(out: Any) -> list[Any]:
    whole = once(Tensor.contiguous)
    return [whole(x) if isinstance(x, Tensor) else x for x in tree.leaves(out)]


def _wrap(results: Sequence[_Returned], mesh: Mesh) -> Any:
    """The ranks' results as one tree of arrays; what is one tensor and one leaf is one array."""
    leaves, treedef = results[0][1], results[0][2]
    array = once(lambda leaf, *values: Array(values, leaf.spec, leaf.shape, mesh))
    columns = zip(*(r[0] for r in results), strict=True)
    pairs = zip(leaves, columns, strict=True)
    return tree.unflatten(treedef, [xs[0] if leaf is None else array(leaf, *xs) for leaf, xs in pairs])
