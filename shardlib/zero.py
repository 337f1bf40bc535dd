"""Layouts: where parameters, gradients and optimizer state are cut. ZeRO stages are four spec trees."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardlib import tree
from shardlib.errors import SpecError
from shardlib.mesh import Axes, Mesh, current_mesh
from shardlib.parts import places
from shardlib.shard_map import global_spec
from shardlib.spec import MEMORIES, Cut, Spec, as_spec


@dataclass(frozen=True)
class Layout:
    """Four spec trees: what a micro-batch computes with, what is kept between steps, the accumulator of gradients
    (`+dp`: reduced once a step; `/dp`: scattered every micro-batch), and the optimizer's state and update."""

    compute: Any
    params: Any
    grads: Any
    opt: Any

    def resolve(self, params: Any) -> "Layout":
        """Every spec for its leaf of `params` (arrays): `...` expanded, cuts made, groups as axes."""
        flat, treedef = tree.flatten(params)
        mesh, paths, first = current_mesh(), tree.paths(params), places(flat)

        def concrete(specs: Any, name: str) -> Any:
            wanted = tree.broadcast(specs, params, f"layout.{name}")
            found = [_concrete(as_spec(s), x, mesh) for s, x in zip(wanted, flat, strict=True)]
            for i, at in enumerate(first):
                a, b = found[at], found[i]
                if (a.chains, a.pending, a.memory) != (b.chains, b.pending, b.memory):
                    raise SpecError(
                        f"layout.{name}: `{paths[i]}` is the same array as `{paths[at]}`, hence cut the same way: "
                        f"found `{b}` for the one and `{a}` for the other"
                    )
            return tree.unflatten(treedef, [found[at] for at in first])

        return Layout(*(concrete(getattr(self, n), n) for n in ("compute", "params", "grads", "opt")))


def _concrete(spec: Spec, x: Any, mesh: Mesh) -> Spec:
    """The spec for the leaf `x`; of a group that is pending, the axes that the leaf is not split over."""
    bare = global_spec(replace(spec, pending=()).noting(x.spec), x.shape, mesh)
    return replace(bare, pending=tuple(a for a in mesh.expand(spec.pending) if a not in bare.split))


def layout_of(specs: Any) -> Layout:
    """One spec tree for all four: what `step` uses without `layout=`."""
    return Layout(specs, specs, specs, specs)


def zero(
    specs: Any,
    axis: Axes = "dp",
    stage: int = 3,
    *,
    reduce: str = "microbatch",
    gather: str = "update",
    min_size: int = 0,
) -> Layout:
    """The layout of a ZeRO stage over `axis`: 1 cuts the optimizer state, 2 gradients too, 3 parameters too.

    In `specs`, `/dp` says where a leaf is cut when it is cut: where it names `axis`, or a group that holds it (`/dp`
    with `axis="fsdp"`, hybrid sharding). A leaf that names neither is cut at its largest dimension that divides, else
    left whole, as are leaves of fewer than `min_size` elements. Of a group, a leaf is cut over the axes that it does
    not use otherwise.

    With stage 2, `reduce="step"` keeps whole gradients until the end of the step. With stages 1 and 2,
    `gather="forward"` keeps parameters cut between steps and gathers them when the next step begins, where
    that hides behind compute, instead of after the update. Source: Rajbhandari et al. 2020.
    """
    if stage not in (0, 1, 2, 3):
        raise SpecError(f"zero: stage is 0, 1, 2 or 3, not {stage!r}")
    if reduce not in ("microbatch", "step"):
        raise SpecError(f"zero: reduce is 'microbatch' or 'step', not {reduce!r}")
    if gather not in ("update", "forward"):
        raise SpecError(f"zero: gather is 'update' or 'forward', not {gather!r}")
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    cut, whole = _changed(specs, Cut(axes, axes, min_size)), _changed(specs, Cut(axes, ()))
    summed = tree.map_(lambda s: s.with_pending(axes), whole)
    return Layout(
        compute=cut if stage == 3 else whole,
        params=cut if stage == 3 or (stage and gather == "forward") else whole,
        grads=cut if stage == 3 or (stage == 2 and reduce == "microbatch") else summed,
        opt=cut if stage else whole,
    )


def split(specs: Any, *axes: str, where: tree.Chooser | None = None) -> Any:
    """The spec tree with every leaf cut over `axes`, major to minor, at the place that `zero` takes.

    `where` (globs over paths, or `(path, spec) -> bool`) chooses the leaves; others stay as they are. Write the axis
    that is gathered last first: `split(specs, "gpu", "node")` gathers over nodes, then inside one.
    """
    return _changed(specs, Cut(axes, axes), where)


def place(specs: Any, memory: str, where: tree.Chooser | None = None) -> Any:
    """The spec tree with the leaves that `where` chooses kept in a memory: `"device"`, `"host"` or `"disk"`."""
    if memory not in MEMORIES:
        raise SpecError(f"place: memory is {', '.join(map(repr, MEMORIES))}, not {memory!r}")
    return _changed(specs, lambda s: replace(s, memory=memory, text=""), where)


def _changed(specs: Any, change: Cut | Callable[[Spec], Spec], where: tree.Chooser | None = None) -> Any:
    """The spec tree with a cut added to, or a function applied to, the leaves that are chosen."""
    specs = tree.specs(specs)
    flat, treedef = tree.flatten(specs)
    chosen = [True] * len(flat) if where is None else tree.choose(where, tree.paths(specs), flat)

    def one(s: Spec) -> Spec:
        if not isinstance(change, Cut):
            return change(s)
        shown = s if change.axes else s.without(change.over)  # groups that hold one of them are known with the mesh
        return replace(shown, cuts=(*s.cuts, change), text=s.text if change.axes else "")

    return tree.unflatten(treedef, [one(s) if c else s for s, c in zip(flat, chosen, strict=True)])
