"""The example that `make demo` runs: what it prints and writes, and that one run may go on as another."""

import contextlib
import functools
import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import on_ranks

import shardlib as sl
import text
import train_gpt

ROOT = Path(__file__).parents[1]
OPTIONS = "--size tiny --layers 1 --batch 4 --steps 4 --save-every 2 --eval-every 2 --log-every 3 --sample 3".split()
FOUR_RANKS = ["--simulate", "--mesh", "dp=2,tp=2"]


def said(out: Path, *options: str) -> str:
    """What it prints, run in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train_gpt.main([*OPTIONS, "--out", str(out), *options])
    return printed.getvalue()


def train(out: Path, *options: str) -> dict:
    """The JSON object of the last line."""
    return json.loads(said(out, *options).splitlines()[-1])


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [r["loss"] if "loss" in r else r["val_loss"] for r in records(out)]


@pytest.fixture(scope="module", autouse=True)
def sigterm_stays():
    """The example takes it over."""
    held = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, held)


@pytest.fixture(scope="module", autouse=True)
def one_text():
    """The text is cut into tokens once, and counted once."""
    once = functools.cache(functools.partial(text.load, cache=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "load", lambda vocab, cache: once(vocab))
        patch.setattr(text, "bigram_loss", functools.cache(text.bigram_loss))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted: its folder, and the JSON object."""
    out = tmp_path_factory.mktemp("whole")
    result = train(out, "--dtype", "float64", "--zero", "2", *FOUR_RANKS)
    assert sl.latest(out / "checkpoints") == out / "checkpoints" / "step-00000004", "waits for the save"
    return out, result


@pytest.fixture
def interrupted(whole, tmp_path):
    """The folder of the same run, had it stopped after step 3."""
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:4]))
    return tmp_path


def test_last_line_is_the_result(whole):
    _, result = whole
    assert {k: result[k] for k in ("mesh", "zero", "dtype", "backend", "steps")} == dict(
        mesh="dp=2,tp=2", zero=2, dtype="float64", backend="graph", steps=4
    )
    assert result["bigram_loss"] == pytest.approx(3.637, abs=1e-3)
    assert result["bigram_bpb"] == pytest.approx(2.778, abs=1e-3)
    assert result["val_bpb"] / result["val_loss"] == pytest.approx(result["bigram_bpb"] / result["bigram_loss"])
    assert 5 < result["val_loss"] < 7
    assert result["tokens_per_s"] > 0 and result["seconds"] > 0


def test_notes_every_step_and_plots(whole):
    out, result = whole
    assert [(r["step"], "val_loss" in r) for r in records(out)] == [
        (1, False), (2, False), (2, True), (3, False), (4, False), (4, True),
    ]  # fmt: skip
    assert losses(out)[-1] == result["val_loss"] < losses(out)[2]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_resume_equals_the_run_that_was_not_interrupted(whole, interrupted):
    result = train(interrupted, "--dtype", "float64", "--zero", "2", "--resume", *FOUR_RANKS)
    assert records(interrupted) == records(whole[0])
    assert result["val_loss"] == whole[1]["val_loss"]


def test_two_processes_resume_what_four_simulated_ranks_began(whole, interrupted):
    options = ["--dtype", "float64", "--zero", "3", "--resume", "--mesh", "dp=2,tp=-1", "--sample", "0"]
    result, nothing = on_ranks(2, lambda: said(interrupted, *options))
    assert nothing == "" and (result := json.loads(result.splitlines()[-1]))["zero"] == 3
    assert result["mesh"] == "dp=2,tp=1"
    assert losses(interrupted) == pytest.approx(losses(whole[0]), abs=1e-9)


@pytest.mark.slow
def test_a_launcher_starts_it(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "train_gpt.py"), *OPTIONS, "--out", str(tmp_path)]
    done = subprocess.run([*launch, *script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["mesh"] == "dp=1,tp=2"


TWO_RANKS = ("--mesh", "dp=2,tp=1", "--simulate")
ONCE = ("--save-every", "0", "--eval-every", "0", "--sample", "0")  # looked at once, at the end


def curve(out: Path) -> list[float]:
    """The losses of the steps, and that of validation at the end."""
    return [r["loss"] for r in records(out) if "loss" in r] + losses(out)[-1:]


def test_one_rank_eager_and_accumulating_has_the_same_curve(whole, tmp_path):
    options = ("--dtype", "float64", "--backend", "eager", "--zero", "0", "--accumulate", "2")
    assert train(tmp_path, *options, *ONCE)["mesh"] == "dp=1,tp=1"
    assert curve(tmp_path) == pytest.approx(curve(whole[0]), abs=1e-9)


def test_weights_in_bfloat16(whole, tmp_path):
    """Drawn in it, hence others."""
    assert train(tmp_path, "--dtype", "bfloat16", *TWO_RANKS, *ONCE)["dtype"] == "bfloat16"
    assert curve(tmp_path) == pytest.approx(curve(whole[0]), abs=0.2)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The curve in float32."""
    out = tmp_path_factory.mktemp("single")
    train(out, *TWO_RANKS, *ONCE)
    return curve(out)


@pytest.mark.parametrize("how", ["bf16", "f16"])
def test_precision(single, tmp_path, how):
    assert train(tmp_path, "--precision", how, *TWO_RANKS, *ONCE)["precision"] == how
    assert curve(tmp_path) == pytest.approx(single, abs=0.02) and curve(tmp_path) != single


def test_every_way_to_run_gives_one_curve():
    command = [sys.executable, "-m", "benchmarks.equivalence", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"] and result["largest"] <= 1e-7
    assert len(result["differences"]) == 3
