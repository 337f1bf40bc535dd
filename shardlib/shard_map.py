"""`shard_map`: a function on global arrays from a function on one rank's tensors.

The first call for each signature runs under fake tensors, so that every error of specs and types comes before anything
is sent. On a simulated mesh every rank then runs in a thread of its own (simulate.py); under `jit` the function is traced once.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (  # no public way to run on shapes alone
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from shardlib import layout, tree
from shardlib.array import Array
from shardlib.errors import MeshError, SpecError
from shardlib.insert import per_device
from shardlib.mesh import Mesh, current_mesh
from shardlib.simulate import run_threads
from shardlib.spec import Dim, Spec, as_spec
from shardlib.types import Leaf, Region

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def global_spec(spec: Any, ndim: int, mesh: Mesh) -> Spec:
    """A spec at a border: `...` expanded, groups as axes; every axis must be one of the mesh."""
    return mesh.resolve(as_spec(spec).expand(ndim))


def borders(specs: Any, args: Any, mesh: Mesh, what: str) -> list[Leaf | None]:
    """For every leaf of `args`, the leaf it enters as; None for what is not a tensor. Raises before anything runs."""
    flat, where = tree.leaves(args), tree.paths(args)
    wanted = [None] * len(flat) if specs is None else tree.broadcast(specs, args, what)
    out: list[Leaf | None] = []
    for path, x, said in zip(where, flat, wanted, strict=True):
        if not isinstance(x, Tensor):
            out.append(None)
            continue
        at = f"{what}: argument `{path}`"
        if isinstance(x, Array) and x.mesh.shape != mesh.shape:
            raise MeshError(f"{at} lies on {x.mesh!r}, the current mesh is {mesh!r}")
        has = x.spec if isinstance(x, Array) else Spec(tuple(Dim("_") for _ in x.shape))
        try:
            spec = has if said is None else layout.check_rank(global_spec(said, x.dim(), mesh), x.shape)
        except SpecError as e:
            raise SpecError(f"{at}: {e}") from None
        if [d.axes for d in spec.dims] != [d.axes for d in has.dims] or set(spec.pending) != set(has.pending):
            mend = (
                f"sl.reshard(x, '{spec}') first: nothing is redistributed by itself"
                if isinstance(x, Array)
                else f"sl.shard(x, '{spec}') first (a plain tensor counts as equal on all ranks)"
            )
            raise SpecError(f"{at} has spec `{has}`, shape {tuple(x.shape)}; expected `{spec}`.\n  {mend}")
        if isinstance(x, Array):
            spec = Spec(spec.dims, spec.pending, spec.memory, stacked=has.stacked)
        out.append(Leaf(spec, tuple(x.shape)))
    return out


def shards_of(x: Any) -> list[Any]:
    """The padded shards of an array; what is equal everywhere as one."""
    return x.shards if isinstance(x, Array) else [x]


@contextmanager
def device_code(mesh: Mesh, where: str) -> Iterator[Region]:
    """A region named for messages."""
    with per_device(mesh) as here:
        here.where = where
        yield here


def enter(here: Region, locals_: Sequence[Any], leaves: Sequence[Leaf | None]) -> list[Any]:
    """One rank's tensors, typed; the names of their specs bound."""
    for leaf in leaves:
        if leaf is not None:
            here.bind(leaf)
    return [
        x if leaf is None else here.enter(x, leaf, not layout.is_even(leaf.spec, leaf.shape, here.mesh.shape))
        for x, leaf in zip(locals_, leaves, strict=True)
    ]


def leave(here: Region, specs: Any, out: Any, what: str) -> tuple[list[Any], list[Leaf | None]]:
    """The local tensors of a result and the leaves they are, checked against `specs` (None: what each leaf brought)."""
    flat, where = tree.leaves(out), tree.paths(out)
    wanted = [None] * len(flat) if specs is None else tree.broadcast(specs, out, what)
    leaves: list[Leaf | None] = []
    for path, x, said in zip(where, flat, wanted, strict=True):
        leaves.append(_result(here, x, said, f"{what}: result `{path}`") if isinstance(x, Tensor) else None)
    return [x.contiguous() if isinstance(x, Tensor) else x for x in flat], leaves


def _result(here: Region, x: Tensor, said: Any, at: str) -> Leaf:
    mesh, kind, known = here.mesh, here.type_of(x), here.leaves.get(x)
    if said is None:
        if known is not None:
            spec = known.spec
        elif kind.strip("IR"):
            raise SpecError(f"{at} is {here.describe(x)} and no spec says how it is split: give out_specs")
        else:
            spec = Spec(tuple(Dim("_") for _ in x.shape))
    else:
        try:
            spec = layout.check_rank(global_spec(said, x.dim(), mesh), x.shape)
        except SpecError as e:
            raise SpecError(f"{at}: {e}") from None
    for axis, letter in zip(mesh.shape, kind):
        if axis in spec.split:
            if letter == "P":
                raise SpecError(f"{at} still waits for a sum over `{axis}` ({here.describe(x)}), `{spec}` says it is split there:\n  psum_scatter it")
        elif axis in spec.pending:
            if letter in "IR":
                raise SpecError(f"{at} is equal over `{axis}` ({here.describe(x)}), `{spec}` says it is a sum still to be made")
        elif letter == "V":
            raise SpecError(
                f"{at} differs by rank over `{axis}` ({here.describe(x)}), but `{spec}` does not name that axis.\n"
                f"  Split it there (`dim/{axis}`), all_gather(..., invariant=True) it, or psum it"
            )
        elif letter == "P":
            raise SpecError(f"{at} still waits for a sum over `{axis}` ({here.describe(x)}): psum it, or write `+{axis}` in its spec")
        elif letter == "R" and said is not None:
            raise SpecError(
                f"{at} is replicated over `{axis}` ({here.describe(x)}) and `{spec}` says invariant: gather it with "
                "invariant=True, so that its gradient is counted once"
            )
    if known is not None and [d.axes for d in known.spec.dims] == [d.axes for d in spec.dims]:
        return Leaf(Spec(spec.dims, spec.pending, spec.memory, stacked=known.spec.stacked), known.shape)
    return Leaf(spec, layout.global_shape(spec, x.shape, mesh.shape))


def shard_map(
    f: Callable[..., Any], *, in_specs: Any, out_specs: Any, mesh: Mesh | None = None
) -> Callable[..., Any]:
    """Run `f`, written for one rank on plain tensors, on arrays.

    `in_specs`: a spec, or a tuple of spec trees, one per argument (None: as the arrays are); a spec stands for a whole
    subtree. `out_specs`: the same for the result; None takes the spec each result leaf brought along, invariants whole.
    Results are `Array`s; what is not a tensor comes back as it is. Raises `SpecError` before anything is sent when specs,
    shapes or types do not fit. As `jax.shard_map`.
    """
    seen: set[Any] = set()

    def run(*args: Any) -> Any:
        m = mesh or current_mesh()
        name = getattr(f, "__name__", "function")
        leaves = borders(in_specs, args, m, name)
        flat, treedef = tree.flatten(args)

        def body(*local: Any) -> tuple[list[Any], list[Leaf | None], Any]:
            with device_code(m, name) as here:
                out = f(*tree.unflatten(treedef, enter(here, local, leaves)))
                return *leave(here, out_specs, out, name), tree.flatten(out)[1]

        shards = [shards_of(x) for x in flat]
        if any(isinstance(s[0], FakeTensor) for s in shards):
            return _wrap([body(*(s[0] for s in shards))], m)
        key = (treedef, m.name, tuple(_signature(x, leaf) for x, leaf in zip(flat, leaves)))
        if key not in seen:
            _first_run(body, [s[0] for s in shards], name)
            seen.add(key)
        if m.simulate and m.total > 1:
            return _wrap(run_threads(m, body, [[s[r if len(s) > 1 else 0] for s in shards] for r in range(m.total)]), m)
        return _wrap([body(*(s[0] for s in shards))], m)

    run.__name__ = getattr(f, "__name__", "shard_map")
    return run


def _signature(x: Any, leaf: Leaf | None) -> Any:
    if leaf is None or not isinstance(x, Tensor):
        return x if isinstance(x, (int, float, str, bool)) else type(x)
    return leaf, x.dtype


def fake_like(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """A tensor of the same shape, strides, dtype and device without storage."""
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _first_run(body: Callable[..., Any], local: Sequence[Any], name: str) -> None:
    mode = FakeTensorMode()
    fake = [fake_like(mode, x) if isinstance(x, Tensor) else x for x in local]
    try:
        with mode:
            body(*fake)
    except DATA_DEPENDENT:
        warnings.warn(
            f"{name} takes a Python decision on a tensor's value, so it could not be checked before it ran; "
            "types are checked as it runs. Under jit this is an error: use torch.where",
            stacklevel=3,
        )


def _wrap(results: Sequence[tuple[list[Any], list[Leaf | None], Any]], mesh: Mesh) -> Any:
    """The ranks' results as one tree of arrays."""
    flats, leaves, treedef = [r[0] for r in results], results[0][1], results[0][2]
    out = []
    for i, leaf in enumerate(leaves):
        values = [flat[i] for flat in flats]
        out.append(values[0] if leaf is None else Array(values, leaf.spec, leaf.shape, mesh))
    return tree.unflatten(treedef, out)
