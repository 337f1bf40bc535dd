"""DeepSpeed configs: batch sizes, "auto", errors, the command."""

import json
import re
from typing import Any

import pytest
from configs import BASE, BF16, CYCLE, FP16, OFFLOAD, THREE, TWO, explain, load, made, merged, refused, scheduled

import shardlib as sl
from shardlib.cli import main

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
            '`optimizer.type` = "AdamX" is rejected: there are `Adam`, `AdamW`, `Lamb`, `Lion`, `Muon` and `SGD` (did '
            "you mean `Adam`?)",
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
        (
            '{"a": 1,}',
            r"ds.json is no JSON: .*line 1 .*\n  Comments, .* \(Hjson\) have to go: python -m hjson.tool -j ",
        ),
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


def test_offload_is_rejected_by_name():
    problem = f'`{OFFLOAD}.device` = "cpu" is rejected: there is no offload yet'
    assert refused(THREE) == [problem]
    notes = load(THREE, dp=2, without=f"{OFFLOAD}*").notes
    assert {k for k, v in notes.items() if v == "left out, as asked"} == {f"{OFFLOAD}.device", f"{OFFLOAD}.pin_memory"}


def test_monitors_write_where_the_config_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = {"enabled": True, "output_path": "runs", "job_name": "a"}
    (log,) = load(BASE | {"csv_monitor": folder}, dp=1).monitors()
    with log:
        log(1, {"loss": 2.0})
    assert (tmp_path / "runs" / "a" / "metrics.csv").read_text() == "step,loss\n1,2.0\n"
    both = load(BASE | {"csv_monitor": folder, "tensorboard": folder}, dp=1)
    assert '[sl.monitor("runs/a", ["tensorboard", "csv"])]' in explain(both)


def test_strings_of_a_config_are_strings_in_the_code(tmp_path):
    """Quotes, backslashes and line ends, also in names of keys, whose comments stay on their lines."""
    odd = 'it\'s "a"\\n\n\u2028{x}\t'
    folder = {"enabled": True, "output_path": str(tmp_path), "job_name": odd}
    config = load(BASE | {"csv_monitor": folder, "x\nraise OSError": 1}, dp=1, without="x*")
    scope: dict[str, Any] = {}
    exec(explain(config), scope)
    (log,) = scope["monitors"]()
    with log:
        log(1, {"loss": 2.0})
    assert (tmp_path / odd / "metrics.csv").exists()
    assert "\n# x\\nraise OSError: left out, as asked\n" in explain(config)


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
    assert scope["train_step"](lambda w, b: w, {"w": "n/dp"}).init
    assert "# zero_optimization.overlap_comm: the layout says what is scattered and gathered" in printed

    file.write_text(json.dumps(merged(THREE, {"zero_optimization": {"zero_quantized_weights": True}})))
    assert main([*command, "--dp", "2"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count(" is rejected: ") == 2
    assert main([*command, "--dp", "2", "--without", f"{OFFLOAD}.*", "*.zero_quantized_weights"]) == 0
    assert "_weights: left out, as asked" in capsys.readouterr().out
    assert main(["config", "explain", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read: No such file" in capsys.readouterr().err
