"""DeepSpeed configs: the table of keys, what is honoured, errors, printed code, numbers of schedules and runs."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.cli import main
from shardlib.interop.deepspeed.keys import HONOURED, KEYS, NOT_NEEDED, REJECTED

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
load, explain = sl.interop.deepspeed.load, sl.interop.deepspeed.explain
BASE = {"train_micro_batch_size_per_gpu": 2}


def nested(path: str, value: Any) -> dict[str, Any]:
    """`{"a": {"b": value}}` for `a.b`."""
    for name in reversed(path.replace("*", "0").split(".")):
        value = {name: value}
    return value


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


# ---- the table


def test_the_table_has_every_key_of_deepspeed():
    pinned = [x for x in (GOLDEN / "deepspeed_keys.txt").read_text().splitlines() if x[0] != "#"]
    assert sorted(KEYS) == pinned and len(pinned) == 413
    for key in KEYS.values():
        assert key.status in (HONOURED, NOT_NEEDED, REJECTED) and key.text and (not key.under or key.under in KEYS), key


def test_the_page_has_the_table():
    """`python docs/make_deepspeed.py` writes it."""
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    assert runpy.run_path(str(ROOT / "docs" / "make_deepspeed.py"))["page"]() == page


ADAMW = {"optimizer": {"type": "AdamW"}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 3.0}}}
FP16, BF16 = {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}
CYCLE: dict[str, Any] = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "decay_lr_rate": 0.5, "decay_step_size": 3}


def scheduled(kind: str, optimizer: str = "SGD", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": optimizer}, "scheduler": {"type": kind, "params": params}}


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


# ---- batches, "auto", errors


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ((32, 4, 4), (32, 4, 4)),
        ((32, 4, None), (32, 4, 4)),
        ((32, None, 4), (32, 4, 4)),
        ((None, 4, 4), (32, 4, 4)),
        ((32, None, None), (32, 16, 1)),
        ((None, 4, None), (8, 4, 1)),
    ],
)
def test_any_batch_size_follows_from_the_others(sizes, found):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for absent in (None, "auto"):
        config = load({k: absent if v is None else v for k, v in zip(names, sizes, strict=True)}, dp=2)
        assert (config.batch, config.microbatch, config.accumulate, config.mesh) == (*found, {"dp": 2})


def test_ranks_come_from_the_sizes_or_from_the_mesh():
    full = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    assert load(full).dp == 3
    with sl.make_mesh(dp=dict(node=2, gpu=2), tp=3, simulate=True):
        assert load(BASE).batch == 8
        assert refused(full, dp=None) == [
            "`train_batch_size` = 24, `train_micro_batch_size_per_gpu` = 2, `gradient_accumulation_steps` = 4 on 4 "
            "ranks: 24 is not micro-batch x accumulation x ranks = 2 x 4 x 4 = 32"
        ]


def test_batch_sizes_that_contradict_each_other():
    two = {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}
    assert refused(two) == [
        "`train_batch_size` = 30, `train_micro_batch_size_per_gpu` = 4 on 2 ranks: 30 is not micro-batch x "
        "accumulation x ranks = 4 x 3 x 2 = 24"
    ]
    assert "ranks is not known: load(..., dp=8), --dp 8, or" in refused(two, dp=None)[0]
    assert "one of `train_batch_size` and `train_micro_batch" in refused({"gradient_accumulation_steps": 2})[0]


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "auto_cast": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {k: "auto" for k in ("lr", "betas", "eps", "weight_decay")}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {k: "auto" for k in ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")},
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}  # as the integration of Hugging Face has it


def test_auto_is_what_the_arguments_say():
    auto: dict[str, Any] = dict(lr=2e-5, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, warmup=10, steps=100)
    auto |= dict(microbatch=4, accumulate=8, clip=0.5, fp16=False, bf16=True, nobody=1)
    assert refused(AUTO, auto=auto)[0].startswith("auto: there is no `nobody`; there are `accumulate`, ")
    del auto["nobody"]
    text = explain(load(AUTO, dp=2, auto=auto))
    for said in (
        "warmup_decay(2e-05, warmup=10, steps=100, start=0.0",
        "b1=0.9, b2=0.95, eps=1e-06, weight_decay=0.1",
        'compute="bf16"',
        "BATCH = 64",
        "clip=0.5",
        "# zero_optimization.reduce_bucket_size: ",
    ):
        assert said in text
    assert "steps=9" in explain(load(AUTO, dp=2, auto=auto | {"scheduler.params.total_num_steps": 99}))


def test_auto_that_is_not_given_is_named_with_the_argument_that_gives_it():
    problems = refused(AUTO)
    names = ["clip", "bf16", "fp16", "lr", "betas", "eps", "weight_decay", "steps", "warmup"]
    assert [re.findall(r"auto=dict\((\w+)=", p)[-1] for p in problems[:-1]] == names
    assert problems[0] == '`gradient_clipping` is "auto": give its value with auto=dict(clip=...)'
    assert 'auto={"zero_optimization.stage": ...}' in refused(BASE | {"zero_optimization": {"stage": "auto"}})[0]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"gradient_cliping": 1},
            "`gradient_cliping` is no key of DeepSpeed 0.19.8 (did you mean `gradient_clipping`?)",
        ),
        (
            {"zero_optimization": {"stge": 1}},
            "`zero_optimization.stge` is no key of DeepSpeed 0.19.8 (did you mean `stage`?)",
        ),
        ({"stage": 1}, "`stage` is no key of DeepSpeed 0.19.8 (did you mean `zero_optimization.stage`?)"),
        ({"zzz": 1}, "`zzz` is no key of DeepSpeed 0.19.8"),
        ({"fp16": True}, "`fp16` = true: an object with keys of its own is expected"),
        ({"fp16": {"enabled": 1}}, "`fp16.enabled` = 1: true or false is expected"),
        ({"gradient_clipping": -1}, "`gradient_clipping` = -1: a number >= 0 is expected"),
        ({"gradient_clipping": True}, "`gradient_clipping` = true: a number >= 0 is expected"),
        ({"gradient_accumulation_steps": 1.5}, "`gradient_accumulation_steps` = 1.5: a whole number > 0 is expected"),
        (
            {"zero_optimization": {"stage": 4}},
            "`zero_optimization.stage` = 4: one of `0`, `1`, `2` and `3` is expected",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
            "`optimizer.params.betas` = [0.9]: two numbers from 0 to below 1 is expected",
        ),
        (
            {"optimizer": {"type": "AdamX"}},
            '`optimizer.type` = "AdamX" is rejected: there are `Adam`, `AdamW`, `Lion`, `Muon` and `SGD` (did you '
            "mean `Adam`?)",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}},
            '`optimizer.type` = "OneBitAdam" is rejected: removed from DeepSpeed; `communication_data_type` of 16 '
            "bits halves what gradients send",
        ),
        ({"optimizer": {"params": {"lr": 1}}}, "`optimizer.params.lr`: `optimizer.type` is missing"),
        (
            {"optimizer": {"type": "SGD", "params": {"betas": [0, 0]}}},
            "`optimizer.params.betas`: SGD takes `lr`, `weight_decay`, `momentum` and `nesterov`",
        ),
        (
            {"scheduler": {"params": {"warmup_type": "log"}}},
            "`scheduler.params.warmup_type`: `scheduler.type` is missing",
        ),
        (
            scheduled("WarmupLR", total_num_steps=5),
            "`scheduler.params.total_num_steps`: WarmupLR takes `warmup_min_lr`, `warmup_max_lr`, `warmup_num_steps` "
            "and `warmup_type` (did you mean `warmup_num_steps`?)",
        ),
        (scheduled("WarmupDecayLR"), "`scheduler.params.total_num_steps` is missing: WarmupDecayLR needs it"),
        (
            scheduled("WarmupDecayLR", total_num_steps=9),
            "`scheduler.params.total_num_steps` = 9: a number above the 1000 of the warm-up is expected",
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            "`scheduler.type` = WarmupLR: the optimizer's rate is not known; give optimizer.params.lr",
        ),
        (
            scheduled("OneCycle", "Lion", **CYCLE),
            "`scheduler.params.cycle_momentum` is true where it is not given, and rejected: Lion's b1 is a constant "
            "here",
        ),
        (FP16 | BF16, "`fp16.enabled` and `bf16.enabled` are both true: one of them is possible"),
        ({"fp16": {"enabled": True, "initial_scale_power": 200}}, None),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
            "`zero_optimization.zero_hpz_partition_size` = 3 does not divide the 2 data-parallel ranks",
        ),
    ],
)
def test_errors_say_where_what_and_how(config, said):
    problems = refused(BASE | config)
    assert problems == [said] if said else "initial <= 2**126" in problems[0]


def test_files_that_cannot_be_read(tmp_path):
    file = tmp_path / "ds.json"
    for text, said in (
        ('{"fp16": {"enabled": true, "enabled": false}}', "gives `enabled` twice in one object"),
        ('{"a": 1,}', r"ds.json is no JSON: .*line 1"),
        ("[]", "holds no JSON object, but list"),
    ):
        file.write_text(text)
        with pytest.raises(sl.ConfigError, match=said):
            load(file, dp=2)
    assert refused(BASE, without="optimizer.*") == ["without: no key of the config matches `optimizer.*`"]


def test_old_forms_and_sections_that_are_null():
    assert "stage=1)" in made({"zero_optimization": True}) and "stage=0)" in made({"zero_optimization": False})
    assert made({"optimizer": None, "zero_optimization": None}) == made({})
    assert made({"zero_optimization": {"reduce_bucket_size": 5e8}}) == made({}), "whole, though written as a float"


def test_without_an_optimizer_the_caller_gives_one():
    config = load(BASE, dp=1)
    with pytest.raises(sl.ConfigError, match=r"has no optimizer: give one, config.step\(specs, optimizer=...\)"):
        config.step({"w": "n/dp"})
    assert config.step({"w": "n/dp"}, optimizer=sl.optim.sgd(1.0), clip=None)["clip"] is None
    assert config.optimizer is config.schedule is config.precision is None
    scope: dict[str, Any] = {}
    exec(explain(config), scope)
    assert scope["train_step"](loss, sl.specs(Mlp), sl.optim.sgd(1.0)).init


# ---- numbers


@pytest.mark.parametrize(
    "case", json.loads((GOLDEN / "deepspeed_schedules.json").read_text())["schedules"], ids=lambda case: case["type"]
)
def test_rates_are_those_of_deepspeed(case):
    """Those that its own schedulers gave the optimizer, update by update."""
    scheduler = {k: case[k] for k in ("type", "params")}
    schedule = load(
        BASE | {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}, "scheduler": scheduler}, dp=1
    ).schedule
    assert schedule is not None
    rates = [schedule(torch.tensor(n)).item() for n in range(len(case["rates"]))]
    assert rates == pytest.approx(case["rates"], rel=1e-12, abs=1e-18)


@sl.pytree
class Mlp:
    w_in: Tensor = sl.spec("model/dp hidden")
    bias: Tensor = sl.spec("hidden/dp")
    w_out: Tensor = sl.spec("hidden/dp out")


def loss(w: Mlp, batch: dict[str, Tensor]) -> sl.Mean:
    w = sl.gather(w, "dp")
    y = torch.tanh(batch["x"].to(w.w_in.dtype) @ w.w_in + w.bias) @ w.w_out
    return sl.Mean.of("batch/dp out", (y.float() if y.dtype == torch.float16 else y).sub(batch["y"]) ** 2)


def start(dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((5, 7), (7,), (7, 3))]


def batches(dtype: torch.dtype, n: int, rows: int, spike: float = 1.0) -> list[dict[str, Tensor]]:
    """The same for all, but that the fourth asks for `spike` times as much."""
    g = torch.Generator().manual_seed(1)
    sides = [[torch.randn(rows, k, generator=g, dtype=torch.float64).to(dtype) for k in (5, 3)] for _ in range(n)]
    for _, y in sides[3:4]:
        y *= spike
    return [dict(zip("xy", pair, strict=True)) for pair in sides]


def trained(
    config: Any, mesh: Any, dtype: torch.dtype, n: int = 8, spike: float = 1.0, **changed: Any
) -> tuple[list[Any], Any]:
    """Losses, the scales they had, and the parameters, on simulated ranks."""
    found = []
    with sl.make_mesh(mesh, simulate=True):
        train = sl.jit(sl.step(loss, **config.step(sl.specs(Mlp), **changed)), donate_argnums=0)
        state = train.init(sl.shard(Mlp(*start(dtype))))
        for batch in batches(dtype, n, config.batch, spike):
            state, metrics = train(state, sl.shard(batch, "batch/dp n"))
            found.append((metrics["loss"].item(), metrics["scale"].item() if "scale" in metrics else 1.0))
        params = sl.gather(state.params)
    return found, [params.w_in, params.bias, params.w_out]


def plainly(
    dtype: torch.dtype,
    n: int,
    rows: int,
    *,
    rates: list[float],
    decay: float,
    clip: float,
    scale: float,
    power: bool,
    spike: float = 1.0,
) -> tuple[list[Any], list[Tensor]]:
    """The same by hand in one process: masters, AdamW, clipping, a scale that halves at every overflow."""
    half = dtype == torch.float32  # what the config then computes in float16
    master = [(p.half() if half else p).to(dtype).requires_grad_() for p in start(dtype)]
    adam = torch.optim.AdamW(master, lr=1.0, betas=(0.8, 0.95), eps=1e-8, weight_decay=decay)
    found, good = [], 0
    for batch in batches(dtype, n, rows, spike):
        w = [(p.half() if half else p).detach().requires_grad_() for p in master]
        y = torch.tanh(batch["x"].to(w[0].dtype) @ w[0] + w[1]) @ w[2]
        value = ((y.to(dtype) - batch["y"]) ** 2).mean()
        grads = [g.to(dtype) / scale for g in torch.autograd.grad(value * scale, w)]
        finite = all(bool(g.isfinite().all()) for g in grads)
        found.append((value.item(), scale))
        if not finite:
            scale = scale / 2 if power else scale
            continue
        norm = torch.stack([g.norm() for g in grads]).norm()
        for p, g in zip(master, grads, strict=True):
            p.grad = g * min(1.0, clip / norm.item())
        adam.param_groups[0]["lr"] = rates[good]
        adam.step()
        good += 1
    return found, [p.detach() for p in master]


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
RUN = json.loads((GOLDEN / "deepspeed_run.json").read_text())
OFFLOAD = "zero_optimization.offload_optimizer"
WARM = [0.0, 0.0, 0.025, 0.05 * 0.7924812503605781, 0.05, 0.05, 0.05, 0.05]  # log(n) / log(4) for n = 1, 2, 3, 4


@pytest.mark.parametrize(
    ("config", "options", "plain"),
    [
        (TWO, {}, dict(rates=WARM, decay=0.0, scale=2.0**10, power=True)),
        (THREE, {"without": OFFLOAD}, dict(rates=[0.02] * 8, decay=0.1, scale=128.0, power=False)),
    ],
    ids=["fp16, WarmupLR, stage 2", "static scale, decay, stage 3"],
)
def test_usual_configs_train_as_one_process_does(config, options, plain):
    """In float64 without rounding; then in float16, as the config has it, with gradients once that float16 has not."""
    cfg = load(config, dp=3, **options)
    wanted, params = plainly(torch.float64, 8, 24, **plain | {"scale": 1.0}, clip=0.3)
    found, got = trained(cfg, cfg.mesh, torch.float64, precision=None)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in wanted], rel=1e-9)
    for a, b in zip(got, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)

    wanted, params = plainly(torch.float32, 8, 24, **plain, clip=0.3, spike=1e6)
    found, got = trained(cfg, cfg.mesh, torch.float32, spike=1e6)
    assert [scale for _, scale in found] == [scale for _, scale in wanted]
    assert [x for x, _ in found] == pytest.approx([x for x, _ in wanted], rel=5e-3)
    assert [a.dtype for a in got] == [torch.float16] * 3
    for a, b in zip(got, params, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("run", RUN["runs"], ids=lambda run: run["config"]["optimizer"]["type"])
def test_losses_are_those_of_deepspeed(run):
    """Those that DeepSpeed itself had, in float32 on one rank."""
    found, _ = trained(load(run["config"], dp=3, without="train_micro_batch_size_per_gpu"), {"dp": 3}, torch.float32)
    assert [x for x, _ in found] == pytest.approx(run["losses"], rel=2e-5)


def test_offload_is_rejected_by_name():
    problem = f'`{OFFLOAD}.device` = "cpu" is rejected: there is no offload yet'
    assert refused(THREE) == [problem]
    notes = load(THREE, dp=2, without=f"{OFFLOAD}*").notes
    assert {k for k, v in notes.items() if v == "left out, as asked"} == {f"{OFFLOAD}.device", f"{OFFLOAD}.pin_memory"}


def test_persistent_parameters_and_groups_of_ranks():
    """Small leaves stay whole, but for their optimizer state; hpZ's mesh and layout give the numbers of ZeRO-3."""
    three = merged(TWO, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20}})
    cfg = load(three, dp=2)
    with sl.make_mesh(cfg.mesh, simulate=True):
        layout = cfg.layout(sl.specs(Mlp)).resolve(sl.shard(Mlp(*start(torch.float64))))
    whole = {name: getattr(layout, name).bias.split for name in ("compute", "params", "grads", "opt")}
    assert whole == {"compute": (), "params": (), "grads": ("dp",), "opt": ("dp",)}
    assert layout.params.w_out.split == ("dp",), "21 elements are more than 20"
    wanted, _ = trained(cfg, cfg.mesh, torch.float64, n=3, precision=None)
    nodes = load(merged(TWO, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}), dp=6)
    assert nodes.mesh == {"dp": {"node": 2, "gpu": 3}}
    found, _ = trained(nodes, nodes.mesh, torch.float64, n=3, precision=None)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in wanted], rel=1e-9)


@pytest.mark.parametrize("name", ["Adam", "Lion", "Muon", "SGD"])
def test_every_optimizer_runs_in_the_code_that_is_printed(name):
    config = merged(TWO, {"optimizer": {"type": name, "params": {}}})
    params = ["lr", *(["momentum"] if name in ("Muon", "SGD") else ["betas"])]
    config["optimizer"]["params"] = {p: {"lr": 0.01, "momentum": 0.5, "betas": [0.8, 0.95]}[p] for p in params}
    config.pop("fp16")
    cfg, scope = load(config, dp=2), dict[str, Any]()
    exec(explain(cfg), scope)
    with sl.make_mesh(scope["MESH"], simulate=True):
        train, state = scope["train_step"](loss, sl.specs(Mlp)), None
        state = train.init(sl.shard(Mlp(*start(torch.float64))))
        found = []
        for batch in batches(torch.float64, 4, scope["BATCH"]):
            state, metrics = train(state, sl.shard(batch, "batch/dp n"))
            found.append(metrics["loss"].item())
    wanted, params = trained(cfg, cfg.mesh, torch.float64, n=4)
    assert found == [x for x, _ in wanted]
    assert not torch.equal(params[1], start(torch.float64)[1])


def test_monitors_write_where_the_config_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = {"enabled": True, "output_path": "runs", "job_name": "a"}
    (log,) = load(BASE | {"csv_monitor": folder}, dp=1).monitors()
    with log:
        log(1, {"loss": 2.0})
    assert (tmp_path / "runs" / "a" / "metrics.csv").read_text() == "step,loss\n1,2.0\n"
    both = load(BASE | {"csv_monitor": folder, "tensorboard": folder}, dp=1)
    assert '[sl.monitor("runs/a", ["tensorboard", "csv"])]' in explain(both)


# ---- the command


def test_config_explain(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(merged(TWO, {"optimizer": {"params": {"lr": "auto"}}})))
    command = ["config", "explain", str(file)]
    assert main([*command, "--dp", "3", "--auto", "lr=0.01"]) == 0
    printed = capsys.readouterr().out
    assert printed == explain(load(TWO, dp=3))
    scope: dict[str, Any] = {}
    exec(printed, scope)
    assert callable(scope["train_step"](loss, sl.specs(Mlp)).init)
    assert "# zero_optimization.overlap_comm: the layout says what is scattered and gathered" in printed

    file.write_text(json.dumps(merged(THREE, {"zero_optimization": {"zero_quantized_weights": True}})))
    assert main([*command, "--dp", "2"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count(" is rejected: ") == 2
    assert main([*command, "--dp", "2", "--without", f"{OFFLOAD}.*", "*.zero_quantized_weights"]) == 0
    assert "_weights: left out, as asked" in capsys.readouterr().out
    assert main(["config", "explain", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read: No such file" in capsys.readouterr().err
