"""A step of two layers over dp and tp, lowered with the passes of one's choice."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

import shardlib as sl
from shardlib import passes, tree
from shardlib.graph.nodes import STARTS, aliased

MESH = dict(dp=4, tp=2)


@sl.pytree
class Layer:
    w_in: Tensor = sl.spec("model/dp hidden/tp")
    bias: Tensor = sl.spec("hidden/tp")
    w_out: Tensor = sl.spec("hidden/tp model/dp")


@sl.pytree
class Net:
    layers: list[Layer] = sl.stack("layers")
    head: Tensor = sl.spec("model/dp classes")


def block(w: Layer, x: Tensor) -> Tensor:
    w = sl.gather(w, "dp")
    h = sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", x, w.w_in) + w.bias
    y = sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", torch.tanh(h), w.w_out)
    return x + sl.psum("batch/dp model +tp -> batch/dp model", y)


def loss(w: Net, batch: Tensor) -> sl.Mean:
    x = batch
    for layer in w.layers:
        x = block(layer, x)
    return sl.Mean.of("batch/dp classes", torch.tanh(x @ sl.gather(w.head, "dp")) ** 2)


def rematted(w: Net, batch: Tensor) -> sl.Mean:
    x = batch
    for layer in w.layers:
        x = sl.remat(block)(layer, x)
    return sl.Mean.of("batch/dp classes", torch.tanh(x @ sl.gather(w.head, "dp")) ** 2)


def lowered(f: Callable[..., Any], *args: Any, use: Sequence[passes.Pass] = ()) -> GraphModule:
    return sl.jit(f, passes=use).lower(*args).module


def ops(module: GraphModule) -> list[str]:
    """The collectives of a graph in the order in which they are issued."""
    return [STARTS[n.target] for n in module.graph.nodes if n.target in STARTS]


def train(stage: int = 3, f: Callable[..., Any] = loss, **options: Any) -> Any:
    return sl.step(f, sl.optim.sgd(0.1), layout=sl.zero(sl.specs(Net), stage=stage), **options)


def state_and_batch(step: Any, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    params = sl.init(Net, sizes=dict(layers=2, model=8, hidden=6, classes=4), key=sl.random.key(1))
    params = tree.map_(lambda x: sl.shard(sl.gather(x).to(dtype), str(x.spec)), params)
    return step.init(params), sl.shard(torch.arange(16 * 8, dtype=dtype).view(16, 8) / 100, "batch/dp model")


def values(run: Any, state: Any, batch: Any) -> list[Tensor]:
    state, metrics = run(state, batch)
    return [*tree.leaves(sl.gather(state.params)), metrics["loss"], metrics["grad_norm"]]


def compared(
    step: Any, *uses: Sequence[passes.Pass], bitwise: bool = True, dtype: torch.dtype = torch.float64
) -> list[GraphModule]:
    """The program without passes, and after each list of them, all of which give the same values."""
    state, batch = state_and_batch(step, dtype)
    runs = [sl.jit(step, passes=use) for use in ([], *uses)]
    plain, *others = (values(run, state, batch) for run in runs)
    close = 1e-12 if dtype == torch.float64 else 5e-6
    for got in others:
        for a, b in zip(plain, got, strict=True):
            assert torch.equal(a, b) if bitwise else (a - b).abs().max() <= close * a.abs().max()
    return [run.traces[0].module for run in runs]


def bucketed(limit: int) -> passes.Pass:
    return lambda module: passes.bucket(module, limit=limit)


def is_write(node: Any) -> bool:
    return bool(aliased(node, written=True))
