"""The parts of a train step: how parameters enter, how a batch is cut, how gradients of micro-batches add up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardlib import collectives as c
from shardlib import layout as cuts
from shardlib import tree
from shardlib.analysis import Analysis, analyse, leaf_meta
from shardlib.array import Array
from shardlib.autodiff import Aux, GradFn, aux_of, aux_tree
from shardlib.errors import SpecError
from shardlib.graph.trace import called, meta
from shardlib.mean import Mean, whole
from shardlib.mesh import Mesh, current_mesh
from shardlib.parts import Memo, Part, once, part_of, places
from shardlib.phases import noted, phase
from shardlib.precision import Precision
from shardlib.shard_map import borders
from shardlib.sharding import leaf_of, move, plan, settle
from shardlib.spec import Dim, Spec
from shardlib.types import Leaf, padding_allowed, region, short
from shardlib.zero import Layout, layout_of


@dataclass(frozen=True)
class Plan:
    """What `step` knows before it runs: the layout of every leaf (`grads`: what the gradients of the trained ones are
    summed up as), which of them are trained, the batch dimension that is cut and into how many micro-batches, the
    loss's analysis on one of them, and the dtypes.
    """

    layout: Layout
    trained: Part
    dim: Dim | None
    count: int
    loss: Analysis
    precision: Precision

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the loss is a sum."""
        return self.loss.axes

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The factor of every term of the loss."""
        return self.loss.coefficients

    def pieces(self, batch: Any) -> list[Any]:
        """The micro-batches, each with its number (None where there is one)."""
        parts = cut(batch, self.dim and self.dim.name, self.count)
        return [(part, number(i) if self.dim else None) for i, part in enumerate(parts)]

    def weights(self, params: Any, pieces: Sequence[Any], key: Any, extra: Any) -> list[Tensor]:
        """The weight of every term, summed over micro-batches and ranks."""
        each = [self.loss.weights(params, piece, key, extra, at) for piece, at in pieces]
        return [whole(added(self.precision.given(ws))) for ws in zip(*each, strict=True)]


def number(i: int) -> Tensor:
    """A number as a 0-d tensor, so that all micro-batches share a graph."""
    return torch.full((), i, dtype=torch.int64, device=current_mesh().device)


def same_leaves(what: str, new: Any, old: Any) -> Any:
    """`new`, every value the leaf that the one in its place in `old` is. State keeps its structure and dtypes."""
    here = region()

    def same(path: str, x: Tensor, y: Tensor) -> Tensor:
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise SpecError(f"step: {what} made `{path}` of its state {short(x)}; it was {short(y)}")
        leaf = here.leaves.get(y)
        return x if leaf is None else settle(x, leaf)

    flat = tree.match(old, new, f"the state that {what} returns")
    return tree.unflatten(tree.flatten(old)[1], map(same, tree.paths(old), flat, tree.leaves(old)))


def added(xs: Sequence[Tensor]) -> Tensor:
    """The sum of some tensors."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def planned(
    grad_fn: GradFn,
    layout: Layout | None,
    accumulate: int | None,
    microbatch: int | None,
    trainable: tree.Chooser | None,
    precision: Precision,
) -> Callable[[Any, Any], Plan]:
    """`plan_for(state, batch)`, cached by the specs, shapes and dtypes of both, and which parameters are tied."""
    plans: dict[Any, Plan] = Memo()

    def plan_for(state: Any, batch: Any) -> Plan:
        mesh = current_mesh()
        trees = (state.params, batch, state.key, state.extra)
        flat = [tree.leaves(t) for t in trees]
        for what, t in zip(("params", "batch", "key", "extra"), trees, strict=True):
            other = [(p, x) for p, x in zip(tree.paths(t), tree.leaves(t), strict=True) if not isinstance(x, Tensor)]
            if other:
                raise SpecError(
                    f"step: `{what}.{other[0][0]}` is {type(other[0][1]).__name__}; state and batch are tensors"
                )
        if (state.scale is None) != (precision.scale is None):
            has, what = ("no loss scale", "scales") if state.scale is None else ("a loss scale", "does not scale")
            raise SpecError(f"step: the state has {has}, the step's precision {what}: make it with this step's init")
        leaves = [[leaf for leaf in borders(None, t, mesh, "step") if leaf] for t in trees]
        dtypes = [precision.dtypes(state.params, precision.compute), *([x.dtype for x in xs] for xs in flat[1:])]
        structures = tuple(tree.flatten(t)[1] for t in trees)
        where = (mesh.name, tuple(mesh.groups.items()), torch.get_default_dtype())
        key = (where, tuple(map(tuple, leaves)), tuple(map(tuple, dtypes)), structures, places(flat[0]))
        if key not in plans:
            lay = grad_fn.laid_out((layout or layout_of(tree.specs(state.params))).resolve(state.params))
            dim, count = micro_batches(batch, accumulate, microbatch, mesh)
            enter = [[Leaf(s, x.shape) for s, x in zip(tree.leaves(grad_fn.taken(lay)), flat[0], strict=True)]]
            enter += [[cut_leaf(leaf, dim and dim.name, count) for leaf in leaves[1]], *leaves[2:]]
            metas = [[leaf_meta(*x, mesh) for x in zip(*pair, strict=True)] for pair in zip(enter, dtypes, strict=True)]
            at = number(0) if dim else None
            metas.append([meta(x) for x in tree.leaves(at)])
            trained = part_of(state.params, trainable, "step: trainable")
            loss = analyse(grad_fn, mesh, (*trees, at), metas, trained, lay, dim, count)
            if loss.weighs_extra and count > 1:
                raise SpecError(
                    "step: the weight of the loss depends on `extra`, which changes from one micro-batch to the next; "
                    "weights of all are summed first"
                )
            sums = trained.take(tree.map_(lambda s, c: _summed(s, c, loss.axes), lay.grads, lay.compute))
            plans[key] = Plan(replace(lay, grads=sums), trained, dim, count, loss, precision)
        return plans[key]

    return plan_for


def _summed(grads: Spec, compute: Spec, axes: Sequence[str]) -> Spec:
    """The accumulator's spec: gradients are pending where the loss is and the leaf was not cut."""
    return replace(grads, pending=tuple(a for a in axes if a not in grads.split + compute.split))


def entering(params: Any, axes: Sequence[str]) -> Any:
    """Parameters as `step` gives them to a loss: replicated over the axes that the loss is a sum over.

    So their gradients are pending there and are reduced once, however often a leaf is used, in all micro-batches.
    """
    here = region()

    def one(x: Tensor) -> Tensor:
        leaf, padded = here.leaves.get(x), here.padded.get(x) is not None
        out = c._pvary(x, tuple(a for a in axes if here.over(x, a) == "I"))
        return out if leaf is None else here.mark(out, leaf, padded)

    with padding_allowed():
        return tree.map_(once(one), params)


def accumulated(
    grad_fn: GradFn, plan: Plan, params: Any, pieces: Sequence[Any], key: Any, extra: Any, seeds: Sequence[Tensor]
) -> tuple[list[Tensor], Aux, Any]:
    """Totals, `Aux` and gradients of what is trained (cut as `plan.layout.grads` says) of all `plan.pieces`.

    Gradients of several micro-batches add up in float32 or wider; those of one stay in the parameters' dtype. While a
    program is traced the micro-batch is one graph that is called once for each; but the last is part of the program
    where most gradients are still to be summed over ranks, which so begins while its backward pass runs.
    """
    reduce = plan.precision.reduce

    def micro(acc: Any, params: Any, piece: Any, key: Any, extra: Any, seeds: Sequence[Tensor]) -> Any:
        batch, at = piece
        with region().running(plan.dim, at, plan.count, reduce):
            (mean, aux), grads = grad_fn(
                params, batch, key=key, extra=extra, seeds=seeds, part=plan.trained, layout=plan.layout
            )
        if (found := tuple(t.coefficient for t in mean.terms)) != plan.coefficients:
            raise SpecError(
                f"step: the coefficients of the loss's terms are {found}, they were {plan.coefficients} when it was "
                "checked: what changes from step to step comes in as a tensor, in the batch or in extra"
            )
        with padding_allowed(), phase("early"):
            if acc is None:
                grads = summed(grads, plan.layout.grads, reduce)
            else:
                more = summed(tree.map_(wide, grads), plan.layout.grads, reduce)
                grads = noted("kind", "gradients", tree.map_(_accumulate, acc, more))
        aux = replace(aux, metrics=plan.precision.given(aux.metrics))
        return plan.precision.given([t.total for t in mean.terms]), aux_tree(aux), grads

    if len(pieces) == 1:
        totals, aux, grads = micro(None, params, pieces[0], key, extra, seeds)
        return totals, _merged([aux]), grads
    grads = noted("kind", "gradients", tree.map_(blank, plan.trained.take(params), plan.layout.grads))
    both = zip(tree.leaves(grads), tree.leaves(plan.layout.grads), strict=True)
    unsummed = sum(g.numel() if _pending(spec) else -g.numel() for g, spec in both) > 0
    all_totals, all_aux = [], []
    for i, piece in enumerate(pieces, 1):
        run = micro if unsummed and i == len(pieces) else called("microbatch", micro)
        totals, aux, grads = run(grads, params, piece, key, extra, list(seeds))
        extra = extra if aux[1] is None else same_leaves("the loss", aux[1], extra)
        all_totals.append(totals)
        all_aux.append(aux)
    return [added(ts) for ts in zip(*all_totals, strict=True)], _merged(all_aux), grads


def _pending(spec: Spec) -> bool:
    return region().mesh.size(spec.pending) > 1


def _accumulate(acc: Tensor, g: Tensor) -> Tensor:
    leaf = region().leaves.get(acc)
    assert leaf is not None
    return settle(acc + wide(g), leaf)


def reduced(grads: Any, specs: Any, dtype: torch.dtype | None = None) -> Any:
    """Gradients `summed` to how the optimizer takes them, which from there on are state."""
    return noted("kind", "gradients", summed(grads, specs, dtype))


def summed(grads: Any, specs: Any, dtype: torch.dtype | None = None) -> Any:
    """Gradients brought to `specs`, each as soon as the backward pass has made it; what several ranks add up on the way
    is added up in `dtype` (None: its own)."""
    mesh = region().mesh

    def one(g: Tensor, spec: Spec) -> Tensor:
        leaf = leaf_of(g, "a gradient")
        moves = plan(leaf.spec, spec, leaf.shape, mesh) if dtype not in (None, g.dtype) and mesh.total > 1 else ()
        if any(m.op in ("sum", "scatter") and mesh.size(m.axes) > 1 for m in moves):
            g = settle(g.to(dtype), leaf)
        return move(g, spec)

    with padding_allowed(), phase("backward"), phase("early"):
        return tree.map_(one, grads, specs)


def wide(g: Tensor) -> Tensor:
    """A gradient in at least float32, the same leaf."""
    dtype = torch.promote_types(g.dtype, torch.float32)
    return g if g.dtype == dtype else settle(g.to(dtype), leaf_of(g, "a gradient"))


def blank(param: Tensor, spec: Any) -> Tensor:
    """An accumulator of zeros of the type that gradients of spec `spec` have."""
    here = region()
    leaf = here.leaves.get(param)
    assert leaf is not None
    shape = cuts.padded_shape(spec, leaf.shape, here.mesh.shape)
    zeros = torch.zeros(shape, dtype=torch.promote_types(param.dtype, torch.float32), device=param.device)
    return settle(here.set_type(zeros, here.make(V=spec.split, P=spec.pending)), Leaf(spec, leaf.shape))


def _merged(auxes: Sequence[Any]) -> Aux:
    """Metrics of all micro-batches as 0-d values: means by total and weight, scalars averaged; the last `extra`."""
    found = [aux_of(a) for a in auxes]
    out: dict[str, Tensor] = {}
    for k in found[0].metrics or {}:
        vs = [(a.metrics or {})[k] for a in found]
        if isinstance(vs[0], Mean):
            out[k] = Mean.merged(vs).value
        else:
            out[k] = added([whole(v) for v in vs]) / len(vs)
    return Aux(out, found[-1].extra)


# ---- micro-batches


def cut_leaf(leaf: Leaf, name: str | None, n: int) -> Leaf:
    """The leaf with its dimension `name` cut into `n` micro-batches."""
    if name not in leaf.spec.names:
        return leaf
    at = leaf.spec.names.index(name)
    return Leaf(leaf.spec, tuple(size // n if i == at else size for i, size in enumerate(leaf.shape)))


def micro_batches(batch: Any, accumulate: int | None, microbatch: int | None, mesh: Mesh) -> tuple[Dim | None, int]:
    """The batch dimension and how many micro-batches to cut it into.

    It is the first dimension of the first leaf in which that is split (of the first leaf, where none is).
    `accumulate`: how many; `microbatch`: rows per rank in each.
    """
    for what, of, asked in (("accumulate", "pieces", accumulate), ("microbatch", "rows", microbatch)):
        if asked is not None and not isinstance(asked, int):
            raise SpecError(f"step: {what}= is a number of {of}, not {asked!r}")
    if accumulate is not None and microbatch is not None:
        raise SpecError("step: give accumulate= (how many micro-batches) or microbatch= (rows per rank), not both")
    if accumulate in (None, 1) and microbatch is None:
        return None, 1
    flat = [x for x in tree.leaves(batch) if isinstance(x, Array) and x.dim()]
    first = next((x for x in flat if x.spec.dims[0].axes), flat[0] if flat else None)
    if first is None or first.spec.dims[0].name == "_":
        raise SpecError(
            "step: micro-batches are cut along the first dimension of the batch's first leaf that is split there; "
            "none has a name: sl.shard(batch, 'batch/dp ...')"
        )
    dim = first.spec.dims[0]
    n, asked = accumulate or 0, "accumulate" if microbatch is None else "microbatch"
    said = f"accumulate={accumulate} cuts the rows of each rank into {accumulate} equal parts"
    if microbatch is not None:
        here = first.shape[0] // mesh.size(dim.axes)
        said = f"microbatch={microbatch} cuts the rows of each rank into parts of {microbatch}"
        n = here // microbatch if microbatch > 0 and here % microbatch == 0 else 0
    for path, leaf in zip(tree.paths(batch), tree.leaves(batch), strict=True):
        for d, rows in zip(leaf.spec.dims, leaf.shape, strict=True) if isinstance(leaf, Array) else ():
            ways = mesh.size(d.axes)
            each, left = divmod(rows, ways)
            if d.name == dim.name and (n < 1 or left or each % n):
                at, least = f"`batch.{path}`" if path else "the batch", max(1, accumulate or microbatch or 1)
                of = f" over {ways} ranks" if left else f", {each} on each rank of {'/'.join(d.axes)}" * bool(d.axes)
                near = sorted((k for k in range(1, each + 1) if not each % k), key=lambda k: abs(k - least))[:2]
                take = f"{asked}={' or '.join(map(str, sorted(near)))}, or " if near and not left else ""
                raise SpecError(
                    f"step: {said}, but {at} (`{d}`) has {rows} rows{of}.\n"
                    f"  Take {take}a number of rows that is a multiple of {least * ways}"
                )
    return (dim, n) if n > 1 else (None, 1)


def cut(batch: Any, name: str | None, n: int) -> list[Any]:
    """The batch's `n` micro-batches: leaves that name the dimension in contiguous local runs, others whole."""
    if name is None or n == 1:
        return [batch]
    here = region()
    flat, treedef = tree.flatten(batch)
    pieces: list[list[Any]] = [[] for _ in range(n)]
    for x in flat:
        leaf = here.leaves.get(x)
        if leaf is None or name not in leaf.spec.names:
            parts = (x,) * n
        else:
            parts = tuple(p.contiguous() for p in x.chunk(n, leaf.spec.names.index(name)))
            for p in parts:
                here.mark(p, cut_leaf(leaf, name, n))
        for piece, part in zip(pieces, parts, strict=True):
            piece.append(part)
    return [tree.unflatten(treedef, p) for p in pieces]
