"""`pad_to`: batches of any length brought to few lengths, so that a step is traced for few shapes."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shardlib import layout, tree
from shardlib.array import Array
from shardlib.errors import SpecError, listing, located, nearest
from shardlib.spec import as_spec
from shardlib.state import specs_for


def pad_to(
    tree_: Any,
    dim: str,
    *,
    multiple: int = 1,
    size: int | None = None,
    value: float | Mapping[str, float] = 0,
    specs: Any = None,
) -> Any:
    """Plain tensors, lengthened at the end of the dimension `dim` to the next multiple of `multiple`, or to `size`.

    For batches of one's own loader, before `from_local` or `shard`: `pad_to(batch, "seq", multiple=128,
    value={"targets": -1, "**": 0})`, where `token_loss` gives negative targets no weight. `value`: what is added, or by
    globs of paths, the first that matches. `specs` name the dimensions: a spec tree, a `@pytree` class, one spec for
    all; None where `tree_` is a `@pytree` object. Leaves that do not name `dim` stay as they are. Where every rank
    loads its own rows, all need one length: give `size`. Raises `SpecError`, `TreeError`.
    """
    if multiple < 1 or (size is not None and multiple != 1):
        raise SpecError(f"pad_to: give multiple, at least 1, or size; found multiple={multiple}, size={size}")
    flat, treedef = tree.flatten(tree_)
    paths, said = tree.paths(tree_), specs_for(tree_, specs, "pad_to")
    fills = value if isinstance(value, Mapping) else {"**": value}
    picks = {glob: tree.choose(glob, paths) for glob in fills} if flat else {}
    out, names = [], set[str]()
    for i, (path, x, spec) in enumerate(zip(paths, flat, said, strict=True)):
        with located(f"pad_to: `{path}`" if path else "pad_to"):
            if isinstance(x, Array) or not isinstance(x, Tensor):
                what = "an array at rest: pad before sl.shard" if isinstance(x, Array) else f"a {type(x).__name__}"
                raise SpecError(f"plain tensors are padded, this is {what}")
            dims = layout.check_rank(as_spec(spec), x.shape).names
            names.update(dims)
            if dim in dims:
                glob = next((g for g in fills if picks[g][i]), None)
                if glob is None:
                    raise SpecError(f"value has no glob for it, only {listing(fills)}: add '**'")
                x = _longer(x, dims.index(dim), dim, multiple, size, fills[glob])
        out.append(x)
    if flat and dim not in names:
        raise SpecError(f"pad_to: no leaf names `{dim}`{nearest(dim, names)}; they name {listing(sorted(names))}")
    return tree.unflatten(treedef, out)


def _longer(x: Tensor, at: int, dim: str, multiple: int, size: int | None, fill: float) -> Tensor:
    n = x.shape[at]
    length = -(-n // multiple) * multiple if size is None else size
    if length < n:
        raise SpecError(f"`{dim}` has length {n}, more than size={size}")
    if length == n:
        return x
    return F.pad(x, [0, 0] * (x.dim() - 1 - at) + [0, length - n], value=fill)
