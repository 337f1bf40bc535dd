"""What `step` must know of a loss before it runs it: over which axes it is a sum, and what its tokens weigh."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from shardlib import layout as cuts
from shardlib import tree
from shardlib.autodiff import GradFn, aux_tree
from shardlib.errors import SpecError, defined, listing
from shardlib.graph.nodes import sliced, used_placeholders
from shardlib.graph.trace import Meta, analysing, typed
from shardlib.mesh import Mesh
from shardlib.parts import Part
from shardlib.spec import Dim
from shardlib.types import Leaf, paused, region


@dataclass(frozen=True)
class Analysis:
    """A loss on a micro-batch: the axes its total is pending over, its coefficients, and the graph of its weights."""

    axes: tuple[str, ...]
    coefficients: tuple[float, ...]
    weighs_extra: bool  # whether weights depend on `extra`
    _weights: GraphModule
    _metas: Sequence[Meta]

    def weights(self, *args: Any) -> list[Tensor]:
        """The weight of every term for the loss's arguments, without running the loss."""
        here = region()
        flat = [x for x in tree.leaves(args) if isinstance(x, Tensor)]
        with paused():
            found = self._weights(*flat)
        return [m.label(here, x) for m, x in zip(self._metas, found, strict=True)]


def leaf_meta(leaf: Leaf, dtype: Any, mesh: Mesh, letters: dict[str, str] | None = None) -> Meta:
    """A leaf as it lies on one rank: contiguous, padded, varying over the axes that split it."""
    shape = cuts.padded_shape(leaf.spec, leaf.shape, mesh.shape)
    strides, n = [], 1
    for size in reversed(shape):
        strides.append(n)
        n *= max(1, size)
    kind = "".join(
        (letters or {}).get(a) or ("V" if a in leaf.spec.split else "P" if a in leaf.spec.pending else "I")
        for a in mesh.shape
    )
    padded = not cuts.is_even(leaf.spec, leaf.shape, mesh.shape)
    return Meta(shape, tuple(reversed(strides)), dtype, mesh.device, kind, leaf, padded)


def analyse(
    grad_fn: GradFn,
    mesh: Mesh,
    trees: Sequence[Any],
    metas: Sequence[Sequence[Meta]],
    trained: Part,
    dim: Dim | None,
    count: int,
) -> Analysis:
    """Trace the loss once, parameters entering as invariant.

    `trees`: params, batch, key, extra, and the number of the micro-batch (None where `dim`, along which the batch is
    cut in `count`, is); `metas`: of their leaves. Raises every error of specs and types in the loss, and refuses
    weights that depend on parameters that are `trained`.
    """
    structures = [tree.flatten(t)[1] for t in trees]
    counts = [len(m) for m in metas]
    kept: list[Any] = []

    def run(*xs: Tensor) -> Any:
        at, parts = 0, []
        for n, structure in zip(counts, structures, strict=True):
            parts.append(tree.unflatten(structure, xs[at : at + n]))
            at += n
        params, batch, key, extra, number = parts
        with region().running(dim, number, count):
            mean, aux = grad_fn.forward(params, batch, key=key, extra=extra)
        kept[:] = [tuple(t.coefficient for t in mean.terms)]
        return [t.total for t in mean.terms], [t.weight for t in mean.terms], aux_tree(aux)

    name = getattr(grad_fn.f, "__name__", "loss")
    with analysing():
        module, results, _ = typed(run, mesh, [m for ms in metas for m in ms], name, lines=False)
    n = len(kept[0])
    kinds = [m.kind or "I" * len(mesh.shape) for m in results[:n]]
    axes = [a for a, letters in zip(mesh.shape, zip(*kinds, strict=True), strict=True) if "P" in letters]
    weights = sliced(module, range(n, 2 * n))
    reads = used_placeholders(weights)
    uses = zip(tree.paths(trees[0]), reads, trained.sources, strict=False)
    culprits = [path for path, read, source in uses if read and source is not None]
    with defined(grad_fn.f):
        if culprits:
            which = f" ({listing(culprits)})" * any(culprits)
            raise SpecError(
                f"{name}: the weight of the loss depends on parameters{which}: a weight says how much each element "
                "counts, and comes from the batch alone.\n"
                "  For a learned factor multiply the value: sl.Mean.of(spec, x * s)"
            )
    return Analysis(tuple(axes), kept[0], any(reads[sum(counts[:3]) : sum(counts[:4])]), weights, results[n : 2 * n])
