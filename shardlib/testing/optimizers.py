"""`check_optimizer`: what every optimizer owes to the layouts that it runs under."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardlib import tree
from shardlib.accumulate import same_leaves
from shardlib.errors import ShardError
from shardlib.mesh import make_mesh
from shardlib.optim.base import Optimizer, apply_updates
from shardlib.shard_map import shard_map
from shardlib.state import gather, shard
from shardlib.testing.compare import difference, largest
from shardlib.tree import pytree, spec, stack
from shardlib.zero import zero

UPDATES = 3


@pytree
class _Layer:
    w: Tensor = spec("a/dp b")
    b: Tensor = spec("b/dp")


@pytree
class _Stacked:
    layers: _Layer = stack("layers")


@pytree
class _Listed:
    layers: list[_Layer] = stack("layers")


# Leaves of all kinds: spec, shape, dtype.
LEAVES = {
    "matrix": ("a/dp b/tp", (4, 6), torch.float64),
    "vector": ("n/dp", (8,), torch.float64),
    "uneven": ("u/dp v", (5, 3), torch.float64),
    "empty": ("e z", (4, 0), torch.float64),
    "scalar": ("", (), torch.float32),
    "half": ("h/dp i", (4, 2), torch.bfloat16),
    "half_scalar": ("", (), torch.float16),
}
SPECS = {name: spec for name, (spec, _, _) in LEAVES.items()}


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise AssertionError that says which rule an optimizer breaks. It runs by itself, a few updates on a few leaves.

    - Its state keeps structure, shapes and dtypes; parameters keep theirs.
    - Updates are the same on every mesh, with leaves whole (ZeRO-0) and cut (1-3): to 1e-8, one rounding in 16 bits.
      Leaves are matrices, vectors, 0-d, empty, 16-bit and such that do not divide, whose padding must not be read.
    - A stacked leaf trains as a list of its layers does.
    - A 16-bit leaf follows one in 32 bits: updates that it is too coarse for are not lost.
    - A gradient of zeros gives finite updates, first and later.
    """
    params, grads = _params(), [_params(seed) for seed in range(1, 1 + UPDATES)]
    with _rule("state and parameters keep their structure, shapes and dtypes"):
        first = _trained(optimizer, params, grads, SPECS)
    for axes, stage in ((dict(dp=2, tp=2), 0), (dict(dp=2, tp=2), 3), (dict(dp=4, tp=1), 3)):
        with _rule(f"updates are the same on every mesh and ZeRO stage, not on {axes} at stage {stage}"):
            _same(_trained(optimizer, params, grads, SPECS, axes, stage), first)
    with _rule("a stacked leaf trains as a list of its layers does"):
        listed = [_listed(x) for x in (params, *grads)]
        stacked = [_Stacked(layers=tree.map_(lambda *xs: torch.stack(xs), *x.layers)) for x in listed]
        layers = gather(_trained(optimizer, stacked[0], stacked[1:], _Stacked)).layers
        apart = _Listed(layers=[tree.map_(lambda x, i=i: x[i], layers) for i in range(3)])
        whole = _trained(optimizer, listed[0], listed[1:], _Listed)
        with make_mesh(dp=1, tp=1, simulate=True):
            _same(shard(apart, _Listed), whole)
    with _rule("a 16-bit leaf follows one in 32 bits"):
        _follows(optimizer)
    with _rule("a gradient of zeros gives finite updates"):
        zeros = tree.map_(torch.zeros_like, params)
        for steps in ([zeros], [grads[0], zeros]):
            found = _trained(optimizer, params, steps, SPECS)
            for path, x in zip(tree.paths(found), tree.leaves(gather(found)), strict=True):
                if not x.isfinite().all():
                    raise AssertionError(f"`{path}` becomes {x.flatten().tolist()}")


@contextmanager
def _rule(text: str) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        kind = "" if isinstance(e, (ShardError, AssertionError)) else f"{type(e).__name__}: "
        raise AssertionError(f"check_optimizer: {text}: {kind}{e}") from e


def _params(seed: int = 0) -> dict[str, Tensor]:
    """Parameters, or gradients for them."""
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g, dtype=torch.float64).to(d) for n, (_, s, d) in LEAVES.items()}


def _listed(leaves: dict[str, Tensor]) -> _Listed:
    """Three layers."""
    w, b = leaves["matrix"], leaves["vector"][:6]
    return _Listed(layers=[_Layer(w=w * k, b=b / k) for k in (1.0, 2.0, 3.0)])


def _trained(
    optimizer: Optimizer, params: Any, grads: Sequence[Any], specs: Any, axes: Any = None, stage: int = 0
) -> Any:
    """The parameters after an update for each of `grads`, as arrays, cut as the optimizer's leaves are."""

    def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, new = optimizer.update(grads, state, params)
        tree.match(params, updates, "the tree of updates")
        now = same_leaves("the optimizer", apply_updates(params, updates), params)
        return now, same_leaves("the optimizer", new, state)

    with make_mesh(axes or dict(dp=1, tp=1), simulate=True):
        cut = zero(specs, stage=stage).resolve(shard(params, specs)).opt
        now = shard(params, cut)
        state = shard_map(optimizer.init, in_specs=None, out_specs=None)(now)
        run = shard_map(update, in_specs=None, out_specs=None)
        for g in grads:
            now, state = run(now, state, shard(g, cut))
        return now


def _same(found: Any, wanted: Any) -> None:
    want = [x.shards[0] for x in tree.leaves(wanted)]
    for path, x, y in zip(tree.paths(found), tree.leaves(found), want, strict=True):
        said = difference(x, y, largest(want), 1e-8 if y.dtype == torch.float64 else 2 * torch.finfo(y.dtype).eps)
        if said:
            raise AssertionError(f"`{path}` differs: {said}")


def _follows(optimizer: Optimizer) -> None:
    """With values 1024 times the size of an update, of which 16 then make two steps of bfloat16."""
    shapes = {"half_matrix": (4, 2), "half_vector": (4,)}

    def run(start: dict[str, float], dtype: torch.dtype, updates: int) -> dict[str, Tensor]:
        leaves = {name: torch.full(shape, start[name], dtype=dtype) for name, shape in shapes.items()}
        return gather(_trained(optimizer, leaves, [tree.map_(torch.ones_like, leaves)] * updates, "..."))

    moved = run(dict.fromkeys(shapes, 1.0), torch.float32, 1)
    sizes = {name: (1 - x).abs().max().item() for name, x in moved.items()}
    start = {name: torch.tensor(1024 * size or 1.0).to(torch.bfloat16).item() for name, size in sizes.items()}
    wide, half = run(start, torch.float32, 16), run(start, torch.bfloat16, 16)
    for name, was in start.items():
        right, now = wide[name].to(torch.bfloat16), half[name]
        if (right - now).abs().max() > 2**-8 * right.abs().max():
            found, wanted = now.flatten()[0].item(), right.flatten()[0].item()
            raise AssertionError(
                f"`{name}` goes from {was} to {found}, in float32 to {wanted}: it needs a float32 master"
            )
