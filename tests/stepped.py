"""One train step of a few numbers: parameters and batch in, new parameters and metrics out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import shardlib as sl

F64 = torch.float64


def mesh(**axes: Any) -> sl.Mesh:
    return sl.make_mesh(axes, simulate=True)


def f64(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


def updated(
    m: sl.Mesh,
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    optimizer: sl.optim.Optimizer | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """Parameters and metrics after one step, SGD of rate 1 by default; `params` and `batch`: name -> (tensor, spec)."""
    with m:
        step = sl.step(loss, optimizer or sl.optim.sgd(1.0), **options)
        state, metrics = step(step.init(entered(params)), entered(batch))
        return sl.gather(state.params), metrics


def entered(leaves: dict[str, tuple[Tensor, str]]) -> Any:
    return {name: sl.shard(x, spec) for name, (x, spec) in leaves.items()}


def scaled(p: dict[str, Tensor], batch: dict[str, Tensor], spec: str = "batch/dp seq/cp") -> sl.Mean:
    return sl.Mean.of(spec, p["w"] * batch["x"], batch["weight"])


def linear(p: dict[str, Tensor], batch: dict[str, Tensor]) -> sl.Mean:
    return sl.Mean.of("batch/dp", p["w"] * batch["x"])


BATCH = {"x": (f64(1, 2, 3, 6), "batch/dp")}
W = {"w": (f64(1)[0], "")}
