"""DeepSpeed configs: every key of the table, and the page that shows it."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

from configs import BASE, BF16, CYCLE, FP16, load, made, merged, refused, scheduled

from shardlib.interop.deepspeed.keys import HONOURED, KEYS, NOT_NEEDED, REJECTED

ROOT = Path(__file__).parent.parent


def nested(path: str, value: Any) -> dict[str, Any]:
    """`{"a": {"b": value}}` for `a.b`."""
    for name in reversed(path.replace("*", "0").split(".")):
        value = {name: value}
    return value


def test_the_table_has_every_key_of_deepspeed():
    pinned = [x for x in (ROOT / "tests" / "golden" / "deepspeed_keys.txt").read_text().splitlines() if x[0] != "#"]
    assert sorted(KEYS) == pinned and len(pinned) == 413
    for key in KEYS.values():
        assert key.status in (HONOURED, NOT_NEEDED, REJECTED) and key.text and (not key.under or key.under in KEYS), key


def test_the_page_has_the_table():
    """`python docs/make_deepspeed.py` writes it."""
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    assert runpy.run_path(str(ROOT / "docs" / "make_deepspeed.py"))["page"]() == page


ADAMW = {"optimizer": {"type": "AdamW"}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 3.0}}}
CASES: dict[str, list[tuple[Any, ...]]] = {  # honoured keys: a config, a value that changes what it makes, and how
    "train_batch_size": [({}, 8, "accumulate=2")],
    "train_micro_batch_size_per_gpu": [({}, 3, "BATCH = 6")],
    "gradient_accumulation_steps": [({}, 3, "accumulate=3")],
    "gradient_clipping": [({}, 0.5, "clip=0.5"), ({}, 0, "accumulate=1)")],
    "communication_data_type": [
        ({}, "FP16", 'precision(compute="f32", params="f32", reduce="f16")'),
        (FP16, "fp32", 'reduce="f32"'),
    ],
    "optimizer.type": [({}, "adam", "optim.adamw(0.001, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0)")],
    "optimizer.params.lr": [(ADAMW, 0.5, "adamw(0.5,")],
    "optimizer.params.betas": [({"optimizer": {"type": "Lion"}}, [0.5, 0.75], "lion(0.001, b1=0.5, b2=0.75,")],
    "optimizer.params.eps": [(ADAMW, 0.5, "eps=0.5")],
    "optimizer.params.weight_decay": [
        (ADAMW, 0.5, "weight_decay=0.5"),
        ({"optimizer": {"type": "SGD"}}, 0.5, "chain(sl.optim.add_decayed_weights(0.5), sl.optim.sgd(0.001,"),
    ],
    "optimizer.params.adam_w_mode": [({"optimizer": {"type": "Adam"}}, False, "optim.adam(")],
    "optimizer.params.torch_adam": [(ADAMW, True, "weight_decay=0.01")],
    "optimizer.params.momentum": [
        (MUON, 0.5, "momentum=0.5"),
        ({"optimizer": {"type": "SGD"}}, 0.5, "sgd(0.001, momentum=0.5, nesterov=False)"),
    ],
    "optimizer.params.nesterov": [
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}}, True, "momentum=0.5, nesterov=True")
    ],
    "optimizer.params.min_coeff": [({"optimizer": {"type": "Lamb"}}, 0.5, "min_coeff=0.5")],
    "optimizer.params.max_coeff": [({"optimizer": {"type": "Lamb"}}, 0.5, "max_coeff=0.5")],
    "optimizer.params.muon_lr": [(MUON, 0.5, "muon(0.5, momentum=0.95, weight_decay=0.0, eps=1e-07)")],
    "optimizer.params.adam_lr": [(MUON, 0.5, "adamw(0.5, b1=0.9, b2=0.95, eps=1e-10, weight_decay=0.0)")],
    "scheduler.type": [(ADAMW, "WarmupLR", "optimizer = sl.optim.adamw(schedule, ")],
    "scheduler.params.warmup_min_lr": [(scheduled("WarmupLR"), 0.5, "join([0.5,")],
    "scheduler.params.warmup_max_lr": [(scheduled("WarmupDecayLR", total_num_steps=9999), 0.5, "warmup_decay(0.5,")],
    "scheduler.params.warmup_num_steps": [(scheduled("WarmupLR"), 7, "warmup=7")],
    "scheduler.params.warmup_type": [(scheduled("WarmupLR"), "linear", 'kind="linear"')],
    "scheduler.params.total_num_steps": [(scheduled("WarmupCosineLR", total_num_steps=2000), 3000, "steps=3000")],
    "scheduler.params.warmup_min_ratio": [(scheduled("WarmupCosineLR", total_num_steps=2000), 0.5, "start=0.0005")],
    "scheduler.params.cos_min_ratio": [(scheduled("WarmupCosineLR", total_num_steps=2000), 0.5, "end=0.0005")],
    "scheduler.params.cycle_min_lr": [(scheduled("OneCycle", **CYCLE), 0.25, "start=0.25")],
    "scheduler.params.cycle_max_lr": [(scheduled("OneCycle", **CYCLE), 0.25, "one_cycle(0.25, ") ],
    "scheduler.params.cycle_first_step_size": [(scheduled("OneCycle", **CYCLE), 7, "up=7")],
    "scheduler.params.cycle_second_step_size": [(scheduled("OneCycle", **CYCLE), 7, "down=7")],
    "scheduler.params.cycle_first_stair_count": [(scheduled("OneCycle", **CYCLE), 7, "up_stairs=7")],
    "scheduler.params.cycle_second_stair_count": [(scheduled("OneCycle", **CYCLE), 7, "down_stairs=7")],
    "scheduler.params.decay_lr_rate": [(scheduled("OneCycle", **CYCLE), 7, "decay_rate=7")],
    "scheduler.params.cycle_momentum": [(scheduled("OneCycle", "Adam", **CYCLE), False, "b1=0.9, b2=0.999")],
    "scheduler.params.cycle_min_mom": [(scheduled("OneCycle", "Adam", **CYCLE), 0.5, "momentum(0.5, high=0.9,")],
    "scheduler.params.cycle_max_mom": [(scheduled("OneCycle", "Adam", **CYCLE), 0.95, "momentum(0.8, high=0.95,")],
    "scheduler.params.decay_mom_rate": [(scheduled("OneCycle", "Adam", **CYCLE), 7, "decay_rate=7")],
    "scheduler.params.decay_step_size": [(scheduled("OneCycle", **CYCLE), 7, "decay_steps=7")],
    "scheduler.params.lr_range_test_min_lr": [(scheduled("LRRangeTest"), 0.5, "lr_range_test(0.5,")],
    "scheduler.params.lr_range_test_step_size": [(scheduled("LRRangeTest"), 7, "steps=7")],
    "scheduler.params.lr_range_test_step_rate": [(scheduled("LRRangeTest"), 7, "rate=7")],
    "scheduler.params.lr_range_test_staircase": [(scheduled("LRRangeTest"), True, "staircase=True")],
    "fp16.enabled": [({}, True, 'precision(\n    compute="f16",\n    params="f16",\n    reduce="f16",')],
    "fp16.loss_scale": [(FP16, 128, "scale=128.0")],
    "fp16.initial_scale_power": [(FP16, 10, "dynamic_scale(1024.0, window=1000, hysteresis=1, minimum=1.0")],
    "fp16.loss_scale_window": [(FP16, 7, "window=7")],
    "fp16.hysteresis": [(FP16 | {"zero_optimization": {"stage": 1}}, 7, "hysteresis=7")],
    "fp16.consecutive_hysteresis": [(FP16, True, "consecutive=True")],
    "fp16.min_loss_scale": [(FP16, 7, "minimum=7.0")],
    "bf16.enabled": [({}, True, 'precision(compute="bf16", params="bf16", reduce="bf16", scale=1.0)')],
    "bf16.check_grad_overflow": [(BF16, False, 'reduce="bf16")')],
    "bfloat16.enabled": [({}, True, 'precision(compute="bf16", params="bf16", reduce="bf16", scale=1.0)')],
    "bfloat16.check_grad_overflow": [({"bfloat16": {"enabled": True}}, False, 'reduce="bf16")')],
    "zero_optimization.stage": [({}, n, f'sl.zero(specs, axis="dp", stage={n})') for n in (1, 2, 3)],
    "zero_optimization.zero_hpz_partition_size": [
        ({"zero_optimization": {"stage": 3}}, 2, 'MESH = {"dp": {"node": 1, "gpu": 2}}')
    ],
    "steps_per_print": [({}, 7, "EVERY = 7")],
    "tensorboard.enabled": [({}, True, 'sl.monitor("DeepSpeedJobName", ["tensorboard"])')],
    "csv_monitor.enabled": [({}, True, 'sl.monitor("DeepSpeedJobName", ["csv"])')],
}  # fmt: skip
for _name in ("stage3_param_persistence_threshold", "param_persistence_threshold"):
    CASES[f"zero_optimization.{_name}"] = [({"zero_optimization": {"stage": 3}}, 1e5, "min_size=100001).params")]
for _name in ("tensorboard", "csv_monitor"):
    CASES[f"{_name}.output_path"] = [({_name: {"enabled": True}}, "out", 'sl.monitor("out/DeepSpeedJobName", ')]
    CASES[f"{_name}.job_name"] = [({_name: {"enabled": True}}, "a", 'sl.monitor("a", ')]


def test_what_is_honoured_changes_the_step():
    assert sorted(CASES) == sorted(k.path for k in KEYS.values() if k.status == HONOURED)
    for path, cases in CASES.items():
        for config, value, said in cases:
            before, after = made(config), made(merged(config, nested(path, value)))
            assert said in after and said not in before, (path, after)


def test_what_does_not_fit_together_is_told_by_its_keys():
    config = BASE | {"optimizer": {"type": "SGD", "params": {"nesterov": True}}}
    assert refused(config) == ["`optimizer.params.nesterov` is true without `optimizer.params.momentum`"]


SAMPLES = {"bool": True, "bool?": True, "text": "x", "text?": "x", "list?": ["x"], "any": {"x": 1}}


def sample(kind: str) -> Any:
    """A value of this kind."""
    return SAMPLES.get(kind, 3 if re.match("int|number", kind) else kind.removesuffix("?").split("|")[0])


def test_what_is_rejected_is_named_and_what_is_not_needed_has_a_reason():
    """Every other key of the table, alone in a config."""
    for key in KEYS.values():
        config, path = BASE | nested(key.path, sample(key.kind)), key.path.replace("*", "0")
        if path.startswith("optimizer.params"):
            config = merged(config, {"optimizer": {"type": "AdamW"}})
        if key.under or key.status == NOT_NEEDED:
            assert load(config, dp=2).notes[path] == key.text
        elif key.status == REJECTED:
            value = False if True in key.harmless else sample(key.kind.replace("none|", "").replace("mean|", ""))
            problem = f"`{path}` = {json.dumps(value)} is rejected: {key.text}"
            assert refused(merged(config, nested(key.path, value))) == [problem]
            for harmless in key.harmless:
                assert path not in load(merged(config, nested(key.path, harmless)), dp=2).notes
            assert load(config, dp=2, without=path).notes[path] == "left out, as asked"
