"""Train steps to compare: shardlib's and those of its peers, each a function from a rank to a step.

A step takes its number, trains on that step's batch and returns the loss. Two ranks; the gradient is the mean over the
batch of both. `single` and `compiled` are one process each, on its own half of the batch, with no communication: what
the compute alone costs.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardlib as sl
from benchmarks.jax_peer import jax_gpt
from benchmarks.models import ADAMW, Batch, Gpt, Size, TorchGpt, angles, loss, tokens, torch_loss, weights

RANKS = 2
Step = Callable[[int], float]


def own(size: Size, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The rank's rows of a step's batch."""
    x, y = (t.chunk(RANKS)[rank] for t in tokens(size, step, RANKS))
    return x, y


def trained(model: nn.Module, optimizer: Any, batch: Callable[[int], tuple[Tensor, Tensor]]) -> Step:
    """The usual loop."""

    def step(number: int) -> float:
        x, y = batch(number)
        value = torch_loss(model(x), y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.item()

    return step


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **ADAMW)  # type: ignore[arg-type]


def single(size: Size, rank: int, compiled: bool = False) -> Step:
    model = TorchGpt(size)
    optimizer = adamw(model.parameters())
    return trained(torch.compile(model) if compiled else model, optimizer, lambda n: own(size, n, rank))  # type: ignore[arg-type]


def ddp(size: Size, rank: int, compiled: bool = False) -> Step:
    model = TorchGpt(size)
    wrapped: Any = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped = torch.compile(wrapped) if compiled else wrapped
    return trained(wrapped, adamw(model.parameters()), lambda n: own(size, n, rank))


def fsdp(size: Size, rank: int, compiled: bool = False) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = TorchGpt(size), init_device_mesh("cpu", (RANKS,))
    for each in model.blocks:
        if compiled:
            each.compile()
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, adamw(model.parameters()), lambda n: own(size, n, rank))


def dtensor_tp(size: Size, rank: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = TorchGpt(size), init_device_mesh("cpu", (RANKS,))
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(size.layers):
        plan |= {f"blocks.{i}.{n}": ColwiseParallel() for n in ("q", "k", "v", "gate", "up")}
        plan |= {f"blocks.{i}.{n}": RowwiseParallel() for n in ("o", "down")}
    parallelize_module(model, mesh, plan)
    split = [isinstance(p, DTensor) for p in model.parameters()]  # fused AdamW takes one kind in a group
    groups = [{"params": [p for p, s in zip(model.parameters(), split, strict=True) if s == k]} for k in (True, False)]
    return trained(model, adamw(groups), lambda n: tokens(size, n, RANKS))


def deepspeed_zero(size: Size, rank: int, stage: int) -> Step:
    import deepspeed  # pyright: ignore[reportMissingImports]

    model = TorchGpt(size)
    config = {
        "train_micro_batch_size_per_gpu": size.rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 2_000_000,
            "stage3_prefetch_bucket_size": 2_000_000,
            "stage3_param_persistence_threshold": 1000,
        },
    }
    engine: Any = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]

    def step(number: int) -> float:
        x, y = own(size, number, rank)
        value = torch_loss(engine(x), y)
        engine.backward(value)
        engine.step()
        return value.item()

    return step


def shardlib(size: Size, rank: int, stage: int = 0, tp: bool = False, backend: str = "graph", **options: Any) -> Step:
    sl.use_mesh(sl.make_mesh(dp=1 if tp else RANKS, tp=RANKS if tp else 1))
    adam: Any = ADAMW
    b1, b2 = adam["betas"]
    optimizer = sl.optim.adamw(adam["lr"], b1=b1, b2=b2, eps=adam["eps"], weight_decay=adam["weight_decay"])
    train = sl.step(loss, optimizer, layout=sl.zero(sl.specs(Gpt), stage=stage, **options))
    jitted = sl.jit(train, donate_argnums=0, backend=backend)
    held = [train.init(sl.shard(weights(size), sl.specs(Gpt)))]
    cos, sin = angles(size)

    def step(number: int) -> float:
        x, y = tokens(size, number, RANKS) if tp else own(size, number, rank)
        batch = sl.from_local(Batch(tokens=x, targets=y, cos=cos, sin=sin))
        held[0], metrics = jitted(held[0], batch)
        return metrics["loss"].item()

    return step


# name: (what makes the step, its options, the group of things that do the same)
PEERS: dict[str, tuple[Callable[..., Step], dict[str, Any], str]] = {
    "single": (single, {}, "compute alone"),
    "single compiled": (single, dict(compiled=True), "compute alone"),
    "DDP": (ddp, {}, "data parallel"),
    "DDP compiled": (ddp, dict(compiled=True), "data parallel"),
    "shardlib dp": (shardlib, {}, "data parallel"),
    "shardlib dp regional": (shardlib, dict(backend="regional"), "data parallel"),
    "JAX dp": (jax_gpt, dict(axis="dp", ranks=RANKS, split=False), "data parallel"),
    "DeepSpeed ZeRO-1": (deepspeed_zero, dict(stage=1), "ZeRO-1"),
    "shardlib ZeRO-1": (shardlib, dict(stage=1, gather="forward"), "ZeRO-1"),
    "shardlib ZeRO-1 regional": (shardlib, dict(stage=1, gather="forward", backend="regional"), "ZeRO-1"),
    "DeepSpeed ZeRO-2": (deepspeed_zero, dict(stage=2), "ZeRO-2"),
    "shardlib ZeRO-2": (shardlib, dict(stage=2, gather="forward"), "ZeRO-2"),
    "shardlib ZeRO-2 regional": (shardlib, dict(stage=2, gather="forward", backend="regional"), "ZeRO-2"),
    "FSDP2": (fsdp, {}, "ZeRO-3"),
    "FSDP2 compiled": (fsdp, dict(compiled=True), "ZeRO-3"),
    "JAX fsdp": (jax_gpt, dict(axis="dp", ranks=RANKS), "ZeRO-3"),
    "DeepSpeed ZeRO-3": (deepspeed_zero, dict(stage=3), "ZeRO-3"),
    "shardlib ZeRO-3": (shardlib, dict(stage=3), "ZeRO-3"),
    "shardlib ZeRO-3 regional": (shardlib, dict(stage=3, backend="regional"), "ZeRO-3"),
    "DTensor tp": (dtensor_tp, {}, "tensor parallel"),
    "JAX tp": (jax_gpt, dict(axis="tp", ranks=RANKS), "tensor parallel"),
    "shardlib tp": (shardlib, dict(tp=True), "tensor parallel"),
    "shardlib tp regional": (shardlib, dict(tp=True, backend="regional"), "tensor parallel"),
}


NEEDS: dict[Callable[..., Step], str] = {deepspeed_zero: "deepspeed", jax_gpt: "jax"}


def installed(name: str) -> bool:
    """Whether what a peer needs is there."""
    need = NEEDS.get(PEERS[name][0])
    return need is None or find_spec(need) is not None


def made(name: str, size: Size, rank: int) -> Step:
    """The step of a peer in this process; starts what communication it needs."""
    make, options, _ = PEERS[name]
    if make is deepspeed_zero:
        import deepspeed  # pyright: ignore[reportMissingImports]

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    elif make not in (single, shardlib, jax_gpt):  # which do it themselves
        dist.init_process_group("gloo")
    return make(size, rank, **options)
