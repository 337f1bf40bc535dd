"""DeepSpeed configs for tests, and what becomes of them."""

from typing import Any

import pytest

import shardlib as sl

load, explain = sl.interop.deepspeed.load, sl.interop.deepspeed.explain
BASE = {"train_micro_batch_size_per_gpu": 2}
FP16, BF16 = {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}
CYCLE: dict[str, Any] = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "decay_lr_rate": 0.5, "decay_step_size": 3}
OFFLOAD = "zero_optimization.offload_optimizer"
TWO = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.3,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.05, "warmup_num_steps": 4}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 10, "hysteresis": 1},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
}
THREE = {
    "train_batch_size": 24,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "fp16": {"enabled": True, "loss_scale": 128},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}


def scheduled(kind: str, optimizer: str = "SGD", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": optimizer}, "scheduler": {"type": kind, "params": params}}


def merged(a: Any, b: Any) -> Any:
    """Both, `b` where they differ."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return b
    return a | {k: merged(a[k], v) if k in a else v for k, v in b.items()}


def made(config: dict[str, Any]) -> str:
    """The code of a config, without the notes."""
    return explain(load(merged(BASE, config), dp=2)).split("\n# ")[0]


def refused(config: Any, dp: int | None = 2, **options: Any) -> list[str]:
    """The problems of a config."""
    with pytest.raises(sl.ConfigError) as e:
        load(config, dp=dp, **options)
    head, *problems = str(e.value).split("\n  ")
    assert head == "this DeepSpeed config cannot be honoured:"
    return problems
