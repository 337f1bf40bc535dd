"""`check`: a per-device function against the same on global tensors in plain torch, and meshes to try it on."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardlib import collectives as c
from shardlib import errors, tree
from shardlib.autodiff import Aux, grad, value_and_grad
from shardlib.errors import SpecError, located
from shardlib.jit import jit
from shardlib.mesh import Mesh
from shardlib.shard_map import global_spec, shard_map
from shardlib.sharding import settle
from shardlib.spec import Dim, Spec
from shardlib.state import abstract, shard
from shardlib.testing.compare import as_mesh, difference, largest, tolerance
from shardlib.types import Leaf, region


class _Axes(dict[str, int]):
    """Axes and sizes. pytest takes the name of a parameter that has one as its id."""

    @property
    def __name__(self) -> str:
        return ",".join(f"{a}={n}" for a, n in self.items())


def meshes(n: int, *axes: str) -> list[dict[str, int]]:
    """All sizes of `axes` whose product is `n`, the most even first: what `pytest.mark.parametrize` goes through."""

    def cut(n: int, count: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (n,)
        for first in (k for k in range(n, 0, -1) if n % k == 0) if count > 1 else ():
            yield from ((first, *rest) for rest in cut(n // first, count - 1))

    found = sorted(cut(n, len(axes)), key=lambda sizes: sorted(sizes, reverse=True))
    return [_Axes(zip(axes, sizes, strict=True)) for sizes in found]


def check(
    f: Callable[..., Any],
    ref: Callable[..., Any],
    *,
    mesh: Mesh | Mapping[str, Any],
    in_specs: Any,
    out_specs: Any,
    sizes: Mapping[str, Any] | None = None,
    args: Sequence[Any] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    adjoint: bool = True,
) -> None:
    """Raise AssertionError unless `f`, a per-device function, does on `mesh` what `ref` does on global tensors.

    Compared are the results; the gradients of every float argument for random cotangents of the results, with those of
    `ref`; and <J dx, c> with <dx, J^T c>, where J dx is the transpose of the gradient (`adjoint=False` leaves that out:
    it needs a backward that has a derivative). Results and gradients are compared under `jit`, too.

    `mesh`: axes and sizes stand for a simulated one. `in_specs`, `out_specs`: as `shard_map` takes them, without `args`
    a tuple with one entry per argument. Arguments are random, of `dtype`; sizes that `sizes` does not give are odd
    multiples of the ways that a name is cut, then even ones. A leaf with `+axis` is a sum of random terms, one per rank
    (its gradient has them in front); a result with `+axis` counts summed. `args`: global tensors (integers, say)
    instead. The message says what differs, the sizes and the mesh, by how much, where and on which rank.
    """
    m = as_mesh(mesh)
    if args is not None and sizes is not None:
        raise SpecError("check: args= have their sizes; leave sizes= out")
    entries = in_specs if isinstance(in_specs, tuple) else (in_specs,) * (1 if args is None else len(args))
    rounds = [{}] if args is not None else _rounds((entries, out_specs), sizes or {}, m)
    for chosen in rounds:
        values = _drawn(entries, chosen, dtype, seed, m) if args is None else tuple(args)
        inputs = _inputs(values, entries, m, seed)
        found = chosen or {name: n for i in inputs for name, n in i.bound()}
        with m, _noted(f"in testing.check with sizes {errors.sizes(found)} on {m!r}"):
            _Case(f, ref, m, inputs, tree.flatten(values)[1], out_specs, found, seed).compare(adjoint)


@contextmanager
def _noted(where: str) -> Iterator[None]:
    try:
        yield
    except AssertionError:
        raise
    except Exception as e:
        e.add_note(where)
        raise


# ---- arguments


def _rounds(specs: Any, given: Mapping[str, Any], mesh: Mesh) -> list[dict[str, Any]]:
    """The sizes of every name: as given, else odd multiples of the ways that it is cut; then even ones."""
    ways: dict[str, int] = {}
    for spec in tree.leaves(tree.specs(specs)):
        for d in mesh.resolve(spec).dims:
            if not d.name.isdigit() and d.name not in ("_", "..."):
                ways[d.name] = math.lcm(ways.get(d.name, 1), mesh.size(d.axes))
    unknown = [n for n in given if n not in ways]
    if unknown and not any(tree.is_pytree_class(x) for x in tree.leaves(specs)):  # which have lists and static fields
        raise SpecError(f"check: sizes gives `{unknown[0]}`, which no spec names{errors.nearest(unknown[0], ways)}")
    rounds = []
    for k in (3, 2):
        sizes = dict(given)
        for name in (n for n in ways if n not in given):
            k = next(k for k in range(k, k + 2000, 2) if k * ways[name] not in sizes.values())
            sizes[name], k = k * ways[name], k + 2
        rounds.append(sizes)
    return rounds if rounds[0] != rounds[1] else rounds[:1]


def _drawn(entries: Sequence[Any], sizes: Mapping[str, Any], dtype: torch.dtype, seed: int, mesh: Mesh) -> Any:
    """Random arguments for spec trees and `@pytree` classes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)

    def leaf(said: Any) -> Any:
        if tree.is_pytree_class(said):
            return tree.map_(of_class, abstract(said, sizes, mesh=mesh))
        spec = tree.specs(said)
        dims = spec.expand(len(spec.dims)).dims  # `...` as one dimension
        return draw([3 if d.name == "_" else int(d.name) if d.name.isdigit() else sizes[d.name] for d in dims])

    def of_class(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise SpecError(f"check draws floats, a leaf is {x.dtype}: give the arguments, args=(...)")
        return draw(x.shape)

    return tree.map_(leaf, tuple(entries))


@dataclass(frozen=True)
class _Input:
    """A leaf of the arguments. Of one with sums to make, `value` has the terms in front, and `pending` is the leaf."""

    path: str
    value: Any
    spec: Spec | None
    pending: Leaf | None = None

    def bound(self) -> list[tuple[str, int]]:
        """The names of dimensions and their sizes."""
        pairs = zip(self.spec.dims, self.value.shape, strict=True) if self.spec else ()
        return [(d.name, n) for d, n in pairs if d.name != "_" and not d.name.isdigit()]

    def local(self, x: Any) -> Any:
        """What a per-device function gets."""
        if self.pending is None:
            return x
        return settle(c.pending(x[0], self.pending.spec.pending), self.pending)

    def whole(self, x: Any) -> Any:
        """What the reference gets."""
        return x if self.pending is None else x.sum(0)


def _inputs(args: Any, in_specs: Any, mesh: Mesh, seed: int) -> list[_Input]:
    generator, out = torch.Generator().manual_seed(seed + 1), []
    specs = tree.broadcast(in_specs, args, "check: in_specs")
    for path, x, said in zip(tree.paths(args), tree.leaves(args), specs, strict=True):
        if not isinstance(x, Tensor):
            out.append(_Input(path, x, None))
            continue
        with located(f"check: argument `{path}`"):
            spec = global_spec(said, x.shape, mesh)
            if not spec.pending:
                out.append(_Input(path, x, spec))
                continue
            shares = torch.rand(mesh.size(spec.pending), *x.shape, generator=generator, dtype=torch.float64) + 0.5
            terms = (shares / shares.sum(0) * x).to(x.dtype)
            split = replace(spec, dims=(Dim("_", spec.pending), *spec.dims), pending=(), text="")
            out.append(_Input(path, terms, split, Leaf(spec, tuple(x.shape))))
    return out


# ---- comparing


@dataclass(frozen=True)
class _Case:
    """One set of arguments."""

    f: Callable[..., Any]
    ref: Callable[..., Any]
    mesh: Mesh
    inputs: list[_Input]
    structure: Any
    out_specs: Any
    sizes: Mapping[str, Any]
    seed: int

    def compare(self, adjoint: bool) -> None:
        xs = [i.value if i.spec is None else shard(i.value, i.spec) for i in self.inputs]
        wanted = self._reference([i.value for i in self.inputs])
        found = self._mapped(self._values, self.out_specs)(xs)
        self._results("", found, wanted)
        outputs = zip(tree.leaves(wanted), tree.leaves(found), strict=True)
        specs = [x.spec for y, x in outputs if isinstance(y, Tensor) and y.is_floating_point()]
        generator = torch.Generator().manual_seed(self.seed + 2)

        def random(like: Sequence[Tensor]) -> list[Tensor]:
            return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in like]

        plain_cs = random(_floats(wanted))
        cs = [shard(x, s.without(s.pending)) for x, s in zip(plain_cs, specs, strict=True)]
        gradients = self._gradients_of_reference(plain_cs) if cs and self._differentiable else []
        if gradients:
            plain_dxs = random(gradients)
            dxs = [shard(x, self.inputs[n].spec) for n, x in zip(self._differentiable, plain_dxs, strict=True)]
            grads, products = self._mapped(self._derivatives)(xs, cs, dxs if adjoint else None)
            self._gradients("", grads, gradients)
            size = sum((a * b).abs().sum().item() for a, b in zip(gradients, plain_dxs, strict=True))
            self._adjoint([x.shards[0].item() for x in products], size * tolerance(plain_dxs[0].dtype))

        def traced(xs: Any, cs: Any) -> Any:
            values = self._mapped(self._values, self.out_specs)(xs)
            return values, self._mapped(self._backward)(xs, cs) if gradients else []

        found, grads = jit(traced)(xs, cs)
        self._results(" under jit", found, wanted)
        self._gradients(" under jit", grads, gradients)

    def _mapped(self, body: Callable[..., Any], out_specs: Any = None) -> Callable[..., Any]:
        def device(*args: Any) -> Any:
            return body(*args)

        device.__name__ = getattr(self.f, "__name__", "f")  # for messages
        return shard_map(device, in_specs=None, out_specs=out_specs)

    @cached_property
    def _differentiable(self) -> list[int]:
        """The inputs that have gradients."""
        return [n for n, i in enumerate(self.inputs) if i.spec is not None and i.value.is_floating_point()]

    # per-device

    def _values(self, xs: Sequence[Any]) -> Any:
        return self.f(*tree.unflatten(self.structure, [i.local(x) for i, x in zip(self.inputs, xs, strict=True)]))

    def _paired(self, floats: Sequence[Tensor], xs: Sequence[Any], cs: Sequence[Tensor]) -> Tensor:
        """<f(x), c>, whose gradient is J^T c."""
        full = dict(enumerate(xs)) | dict(zip(self._differentiable, floats, strict=True))
        return _dots(_floats(self._values(list(full.values()))), cs)

    def _backward(self, xs: Sequence[Any], cs: Sequence[Tensor]) -> list[Tensor]:
        """J^T c."""
        return grad(self._paired)([xs[n] for n in self._differentiable], xs, cs)

    def _derivatives(self, xs: Sequence[Any], cs: Sequence[Tensor], dxs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """J^T c and, for given dx, <J dx, c> and <dx, J^T c>. J dx is the gradient of <dx, J^T c> with respect to c."""
        if dxs is None:
            return self._backward(xs, cs), []

        def back(cs: Sequence[Tensor], xs: Sequence[Any], dxs: Sequence[Tensor]) -> tuple[Tensor, Aux]:
            grads = self._backward(xs, cs)
            return _dots(grads, dxs), Aux(extra=grads)

        (right, aux), ahead = value_and_grad(back)(cs, xs, dxs)
        return aux.extra, [_dots(ahead, cs), right]

    # in one process

    def _reference(self, values: Sequence[Any]) -> Any:
        whole = [i.whole(x) for i, x in zip(self.inputs, values, strict=True)]
        return self.ref(*tree.unflatten(self.structure, whole))

    def _gradients_of_reference(self, cs: Sequence[Tensor]) -> list[Tensor]:
        values = [i.value for i in self.inputs]
        xs = [values[n].detach().clone().requires_grad_() for n in self._differentiable]
        for n, x in zip(self._differentiable, xs, strict=True):
            values[n] = x
        used = [(y, c) for y, c in zip(_floats(self._reference(values)), cs, strict=True) if y.requires_grad]
        if not used:
            return [torch.zeros_like(x) for x in xs]
        ys, cs = zip(*used, strict=True)
        return list(torch.autograd.grad(ys, xs, cs, allow_unused=True, materialize_grads=True))

    # what differs

    def _results(self, how: str, found: Any, wanted: Any) -> None:
        flat = tree.match(wanted, found, f"the result of `{_name(self.f)}`, beside that of `{_name(self.ref)}`,")
        top = largest(tree.leaves(wanted))
        for path, x, y in zip(tree.paths(wanted), flat, tree.leaves(wanted), strict=True):
            self._differs(f"result `{path}`" if path else "the result", how, difference(x, y, top))

    def _gradients(self, how: str, found: Sequence[Any], wanted: Sequence[Tensor]) -> None:
        top = largest(wanted)
        for n, x, y in zip(self._differentiable if wanted else [], found, wanted, strict=True):
            self._differs(f"the gradient of argument `{self.inputs[n].path}`", how, difference(x, y, top))

    def _adjoint(self, products: Sequence[float], allowed: float) -> None:
        if products and not abs(products[0] - products[1]) <= allowed:
            said = "<J dx, c> is {:.6g}, <dx, J^T c> is {:.6g}: the gradient has a wrong transpose".format(*products)
            self._differs("the adjoint identity", "", said)

    def _differs(self, what: str, how: str, said: str | None) -> None:
        if said is not None:
            raise AssertionError(
                f"`{_name(self.f)}` on {self.mesh!r}{how} is not `{_name(self.ref)}`: {what} differs\n  {said}\n"
                f"  sizes: {errors.sizes(self.sizes)}"
            )


def _name(f: Any) -> str:
    return getattr(f, "__name__", type(f).__name__)


def _floats(values: Any) -> list[Tensor]:
    return [x for x in tree.leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]


def _dots(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """The sum of the inner products of some values with cotangents of theirs, invariant."""
    here, out = region(), None
    for x, y in zip(xs, ys, strict=True):
        z = (x * y).sum()
        z = c._psum(z, here.axes_of(here.type_of(z), "VP"))
        out = z if out is None else out + z
    assert out is not None
    return out
