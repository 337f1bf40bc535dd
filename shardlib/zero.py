"""Layouts: where parameters, gradients and optimizer state are cut. ZeRO stages are four spec trees."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardlib import layout as cuts
from shardlib import tree
from shardlib.errors import SpecError
from shardlib.mesh import Mesh, current_mesh
from shardlib.parts import places
from shardlib.shard_map import global_spec
from shardlib.spec import Spec, as_spec


@dataclass(frozen=True)
class Layout:
    """Four spec trees: what a micro-batch computes with, what is kept between steps, the accumulator of gradients
    (`+dp`: reduced once a step; `/dp`: scattered every micro-batch), and the optimizer's state and update."""

    compute: Any
    params: Any
    grads: Any
    opt: Any

    def resolve(self, params: Any) -> "Layout":
        """Every spec for its leaf of `params` (arrays): `...` expanded, groups as axes, leaves that name none cut."""
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
    """The spec for the leaf `x`: of a group, the axes that the leaf is not split over cut it, or are pending."""
    bare = cuts.check_rank(global_spec(replace(spec, auto=(), pending=()), x.dim(), mesh), x.shape)

    def rest(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(a for a in mesh.expand(axes) if a not in bare.split)

    bare = replace(bare, pending=rest(spec.pending), stacked=x.spec.stacked)
    return cuts.cut(bare, x.shape, rest(spec.auto), mesh.shape)


def layout_of(specs: Any) -> Layout:
    """One spec tree for all four: what `step` uses without `layout=`."""
    return Layout(specs, specs, specs, specs)


def zero(specs: Any, axis: str = "dp", stage: int = 3, *, reduce: str = "microbatch") -> Layout:
    """The layout of a ZeRO stage over `axis`: 1 cuts the optimizer state, 2 gradients too, 3 parameters too.

    In `specs`, `/dp` says where a leaf is cut when it is cut; a leaf that does not name the axis is cut at its largest
    dimension that divides, else left whole. `reduce="step"` with stage 2 keeps whole gradients until the end of the
    step. Source: Rajbhandari et al. 2020.
    """
    if stage not in (0, 1, 2, 3):
        raise SpecError(f"zero: stage is 0, 1, 2 or 3, not {stage!r}")
    if reduce not in ("microbatch", "step"):
        raise SpecError(f"zero: reduce is 'microbatch' or 'step', not {reduce!r}")
    specs = tree.specs(specs)

    def each(change: Callable[[Spec], Spec]) -> Any:
        return tree.map_(change, specs)

    def whole(s: Spec) -> Spec:
        return s.without((axis,))

    def cut(s: Spec) -> Spec:
        return s if axis in s.axes else replace(s, auto=(axis,))

    def summed(s: Spec) -> Spec:
        return whole(s).with_pending((axis,))

    return Layout(
        compute=each(cut if stage >= 3 else whole),
        params=each(cut if stage >= 3 else whole),
        grads=each(cut if stage >= 3 or (stage == 2 and reduce == "microbatch") else summed),
        opt=each(cut if stage >= 1 else whole),
    )
