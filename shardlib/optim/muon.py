"""Muon: momentum whose matrices are orthogonalized, each on one of the ranks that hold its pieces."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib import tree
from shardlib.optim.base import (
    Optimizer,
    bias_correction,
    chosen,
    counter,
    in_full,
    leaves_of,
    masters,
    rounded,
    zeros32,
)
from shardlib.optim.options import check
from shardlib.optim.schedules import Schedule, as_schedule
from shardlib.sharding import move, settle
from shardlib.spec import Dim, Spec
from shardlib.tree import pytree
from shardlib.types import Leaf, padding_allowed, region

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SCALES = {
    "original": lambda rows, columns: math.sqrt(max(1, columns / max(1, rows))),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


@pytree
class MuonState:
    """`count` of updates, the momentum, float32 masters of 16-bit leaves, the last learning rate."""

    count: Tensor
    mu: Any
    master: Any
    lr: Tensor


def muon(
    lr: float | Schedule,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    mask: tree.Chooser | None = None,
    *,
    scale: str = "original",
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-8,
    dtype: torch.dtype | None = None,
) -> Optimizer:
    """Muon (Jordan et al. 2024): `-lr (scale NewtonSchulz(momentum) + weight_decay p)`, for matrices, as optax.contrib.

    `sl.spec(..., matrix="model -> heads head")` says which dimensions are a matrix's inputs and outputs; of two the
    first is the input. Along other dimensions, and in a stack of layers, lie matrices of their own. Leaves that are no
    matrices go to another optimizer: `by_path({"embed": adamw(3e-4), optim.matrices: muon(0.02), "**": adamw(3e-4)})`.

    The momentum is an average with bias correction. A matrix is divided by its Frobenius norm + `eps`; `steps` times
    `X = a X + (b A + c A A) X` with `A = X X^T`. `scale` is `"original"`, `sqrt(max(1, outputs / inputs))`, or
    `"match_rms_adamw"`, `0.2 sqrt(max(inputs, outputs))` (Liu et al. 2025), with which rates of AdamW fit.
    torch.optim.Muon has no bias correction and works in bfloat16: `dtype=torch.bfloat16`, also half of the traffic; by
    default in the dtype of the state, at least float32.

    A leaf that is cut over n ranks is exchanged, so that each of them has 1/n of its matrices whole, and back: the work
    is split, and as many bytes are sent twice as a rank holds. Leaves cut alike, such as those of a list of layers,
    are shared out together; the last rank has less where their number does not divide.
    """
    if scale not in SCALES:
        raise ValueError(f"muon: scale is {' or '.join(map(repr, SCALES))}, not {scale!r}")
    check("muon", 0, 1, momentum=momentum)
    check("muon", 0, weight_decay=weight_decay, eps=eps)
    check("muon", **{f"coefficient {i}": x for i, x in enumerate(coefficients)})
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"muon: steps is a whole number of at least 0, not {steps!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"muon: dtype is a floating-point dtype, not {dtype!r}")
    rate = as_schedule(lr, "muon")

    def init(params: Any) -> MuonState:
        _matrices(params)
        zero = counter()
        return MuonState(count=zero, mu=tree.map_(zeros32, params), master=masters(params), lr=rate(zero))

    def update(grads: Any, state: MuonState, params: Any) -> tuple[Any, MuonState]:
        step, count, own = rate(state.count), state.count + 1, in_full(params, state.master)
        now, ahead = bias_correction(momentum, count), bias_correction(momentum, count + 1)
        mu = tree.map_(lambda g, m: momentum * m + (1 - momentum) * g.to(m.dtype), grads, state.mu)

        def aimed(g: Tensor, m: Tensor) -> Tensor:
            if not nesterov:
                return m / now.to(m.dtype)
            return momentum * m / ahead.to(m.dtype) + (1 - momentum) * g.to(m.dtype) / now.to(m.dtype)

        def one(p: Tensor, x: Tensor, matrix: _Matrix, decay: bool) -> Tensor:
            x = SCALES[scale](matrix.inputs, matrix.outputs) * x.to(p.dtype)
            return -step.to(p.dtype) * (x + weight_decay * p if decay else x)

        flat, treedef = tree.flatten(tree.map_(aimed, grads, mu))
        matrices = _matrices(params)
        found = _orthogonal([x.to(dtype or x.dtype) for x in flat], matrices, steps, coefficients, eps)
        each = tree.leaves(own), found, matrices, tree.leaves(chosen(mask, params))
        updates, master = rounded(params, own, tree.unflatten(treedef, map(one, *each)))
        return updates, MuonState(count=count, mu=mu, master=master, lr=step)

    return Optimizer(init, update)


def newton_schulz(
    x: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-8
) -> Tensor:
    """Matrices (..., m, n) with their singular values brought near 1; cheapest with m <= n."""
    a, b, c = coefficients
    x = x / ((x * x).sum((-2, -1), keepdim=True).sqrt() + eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


@dataclass(frozen=True)
class _Matrix:
    """What a leaf holds: matrices of `inputs` x `outputs` (global sizes), and which of its dimensions count them, are
    the shorter side and the longer one."""

    leaf: Leaf
    inputs: int
    outputs: int
    sides: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    def axes(self, side: int) -> tuple[str, ...]:
        """The axes that split a side, once its dimensions are one."""
        return tuple(a for i in self.sides[side] for a in self.leaf.spec.dims[i].axes)

    def flat(self, x: Tensor) -> Tensor:
        """A rank's piece, (count, short, long). Where a dimension inside a side is split, rows or columns stand in an
        order of their own, as they do in the result."""
        order = [i for side in self.sides for i in side]
        return x.permute(order).reshape([math.prod(x.shape[i] for i in side) for side in self.sides])

    def unflat(self, y: Tensor, like: Tensor) -> Tensor:
        """The inverse, in the shape of `like`."""
        order = [i for side in self.sides for i in side]
        return y.reshape([like.shape[i] for i in order]).permute([order.index(i) for i in range(len(order))])


def _matrices(params: Any) -> list[_Matrix]:
    return list(map(_matrix, leaves_of(params, "muon"), tree.paths(params)))


def _matrix(leaf: Leaf, path: str) -> _Matrix:
    spec, dims = leaf.spec, range(leaf.spec.stacked, len(leaf.spec.dims))
    if not any(spec.matrix) and len(dims) != 2:
        raise spec.error(
            f"muon: `{path}` is no matrix.\n  Name inputs and outputs, sl.spec(..., matrix='a -> b c'), or give it to "
            "another optimizer with optim.by_path"
        )
    if any(spec.matrix):
        ins, outs = (tuple(spec.names.index(name, spec.stacked) for name in side) for side in spec.matrix)
    else:
        ins, outs = (dims[0],), (dims[1],)
    inputs, outputs = (math.prod(leaf.shape[i] for i in side) for side in (ins, outs))
    count = tuple(i for i in range(len(spec.dims)) if i not in ins + outs)
    short, long = (ins, outs) if inputs <= outputs else (outs, ins)
    return _Matrix(leaf, inputs, outputs, (count, short, long))


def _orthogonal(
    values: list[Tensor], matrices: list[_Matrix], steps: int, coefficients: tuple[float, float, float], eps: float
) -> list[Tensor]:
    """Every value with its matrices orthogonalized, those of leaves that are cut alike shared out together."""
    out, mesh, groups = list(values), region().mesh, {}
    with padding_allowed():
        pieces = [m.flat(x) for m, x in zip(matrices, values, strict=True)]
        for i, (m, x) in enumerate(zip(matrices, pieces, strict=True)):
            groups.setdefault((x.shape[1:], x.dtype, *map(m.axes, range(3))), []).append(i)
        for (*_, lead, short, long), at in groups.items():
            all_ = torch.cat([pieces[i] for i in at])
            sizes = tuple(n * mesh.size(axes) for n, axes in zip(all_.shape, (lead, short, long), strict=True))
            cut = Spec((Dim("_", lead), Dim("_", short), Dim("_", long)))
            shared = Spec((Dim("_", (*lead, *reversed(short), *reversed(long))), Dim("_"), Dim("_")))
            whole = newton_schulz(move(settle(all_, Leaf(cut, sizes)), shared), steps, coefficients, eps)
            all_ = move(settle(whole, Leaf(shared, sizes)), cut)
            for i, y in zip(at, all_.split([pieces[i].shape[0] for i in at]), strict=True):
                out[i] = matrices[i].unflat(y, values[i])
    return out
