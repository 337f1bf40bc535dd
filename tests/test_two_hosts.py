"""Two hosts, which are network namespaces with a link between them: a run over both, and what a cut does to it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.link import HOSTS, Host, two_hosts

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")]
STEPS = 60

TRAIN = """
import os, sys, time, torch
import shardlib as sl
folder, steps = sys.argv[1], int(sys.argv[2])

def loss(w, x):
    return sl.Mean.of("batch/dp m", (x @ sl.gather(w, "dp")["w"]) ** 2)

with sl.make_mesh(dp=-1, timeout=5) as mesh:
    step = sl.jit(sl.step(loss, sl.optim.sgd(0.01), layout=sl.zero({"w": "n m"}, axis="dp", stage=3)))
    fresh = lambda: step.init(sl.shard({"w": torch.ones(4, 4, dtype=torch.float64)}, {"w": "n m"}))
    saved = sl.latest(folder)
    state = sl.restore(saved, like=sl.abstract(fresh)) if saved else fresh()
    with sl.monitor(folder, to="jsonl") as log:
        for i in range(int(state.step), steps):
            x = torch.arange(16.0, dtype=torch.float64).view(4, 4) * (1 + i % 3)
            state, m = step(state, sl.shard(x, "batch/dp m"))
            log(i + 1, m | {"ranks": mesh.total})
            sl.save(folder, state, keep=2)
            time.sleep(0.3)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts("1gbit") as found:
            (tmp_path / "hosts").write_text("".join(f"{h.namespace} slots=1\n" for h in found))
            (tmp_path / "ssh").write_text('#!/bin/sh\nexec ip netns exec "$1" sh -c "$2"\n')
            (tmp_path / "ssh").chmod(0o755)
            (tmp_path / "train.py").write_text(TRAIN)
            yield found
    except RuntimeError as e:
        pytest.skip(f"no namespaces here: {e}")


ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def shardlib(folder: Path, command: str, *options: str) -> subprocess.Popen[str]:
    """`shardlib run` or another command, over both hosts."""
    hosts = ["--hostfile", str(folder / "hosts"), "--ssh", str(folder / "ssh"), "--master", HOSTS[0].address]
    line = [sys.executable, "-m", "shardlib", command, *hosts, *options]
    return subprocess.Popen(line, cwd=folder, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def launched(folder: Path, *options: str) -> subprocess.Popen[str]:
    patience = ["--silence", "6", "--wait", "4", "--grace", "5"]
    return shardlib(folder, "run", *patience, *options, str(folder / "train.py"), str(folder / "run"), str(STEPS))


def listening(host: Host) -> set[str]:
    """Where anything of a host listens."""
    said = subprocess.run([*host.prefix, "ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    return {line.split()[3].rpartition(":")[0] for line in said.splitlines()}


def link(state: str) -> None:
    """Of the second host."""
    h = HOSTS[1]
    subprocess.run(["ip", "-n", h.namespace, "link", "set", h.interface, state], check=True)


def records(folder: Path) -> list[dict[str, float]]:
    file = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def reached(folder: Path, step: int, ranks: int, seconds: float = 100) -> float:
    """The seconds until a run of so many ranks has come to a step beyond `step`."""
    began = time.monotonic()
    while not any(r["step"] > step and r["ranks"] == ranks for r in records(folder)[-1:]):
        assert time.monotonic() - began < seconds, records(folder)[-3:]
        time.sleep(0.2)
    return time.monotonic() - began


def still(folder: Path, seconds: float) -> int:
    """The last step, when there has been no other for so long."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < seconds:
        found = int(records(folder)[-1]["step"])
        last, since = (found, time.monotonic()) if found != last else (last, since)
        time.sleep(0.2)
    return last


def finished(run: subprocess.Popen[str], folder: Path) -> str:
    """Wait for the end: all went well, and the curve is that of one process that nothing disturbed."""
    said, _ = run.communicate(timeout=150)
    assert run.returncode == 0, said
    quick = TRAIN.replace("time.sleep(0.3)", "")
    subprocess.run([sys.executable, "-c", quick, str(folder / "alone" / "run"), str(STEPS)], env=ENV, check=True)
    wanted, found = records(folder / "alone"), records(folder)
    assert [r["step"] for r in found] == [r["step"] for r in wanted] == [*range(1, STEPS + 1)]
    assert max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(found, wanted, strict=True)) < 1e-12
    return said


def test_a_run_over_two_hosts_waits_for_one_that_is_cut_off(hosts, tmp_path):
    run = launched(tmp_path, "--max-restarts", "5")
    try:
        reached(tmp_path, 5, ranks=2)
        link("down")
        stopped = still(tmp_path, 12)  # the deadline of a collective is 5 s; two hosts are needed
        link("up")
        reached(tmp_path, stopped, ranks=2)
        said = finished(run, tmp_path)
        assert "did not answer: killed, frozen, or cut off with the host" in said
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(30)


def test_a_run_goes_on_with_one_host_and_takes_the_other_back(hosts, tmp_path):
    run = launched(tmp_path, "--max-restarts", "5", "--nnodes", "1:2")
    try:
        reached(tmp_path, 5, ranks=2)
        link("down")
        reached(tmp_path, 5, ranks=1, seconds=60)
        link("up")
        reached(tmp_path, 6, ranks=2)
        finished(run, tmp_path)
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(30)


def test_a_cut_without_restarts_ends_the_run(hosts, tmp_path):
    run = launched(tmp_path)
    try:
        reached(tmp_path, 3, ranks=2)
        assert [listening(h) for h in hosts] == [{h.address} for h in hosts], "nowhere else"
        link("down")
        began = time.monotonic()
        said, _ = run.communicate(timeout=60)
        assert run.returncode not in (0, None) and time.monotonic() - began < 40
        assert "did not answer: killed, frozen, or cut off with the host; rank 0 waited for " in said
    finally:
        run.kill()


def test_the_demo_trains_over_two_hosts(hosts, tmp_path):
    options = "--size tiny --layers 1 --batch 4 --steps 12 --eval-every 0 --log-every 1 --sample 1 --dtype float64"
    demo = [str(ROOT / "examples" / "train_gpt.py"), *options.split(), "--out"]
    said, _ = (run := shardlib(tmp_path, "run", *demo, str(tmp_path / "run"), "--mesh", "dp=2,tp=1")).communicate(
        timeout=150
    )
    assert run.returncode == 0, said
    subprocess.run([sys.executable, *demo, str(tmp_path / "alone" / "run")], env=ENV, check=True)
    found, wanted = ([r["loss"] for r in records(x) if "loss" in r] for x in (tmp_path, tmp_path / "alone"))
    assert len(found) == 12 and found == pytest.approx(wanted, abs=1e-9)


def test_doctor_looks_at_the_hosts_and_the_link(hosts, tmp_path):
    said, _ = shardlib(tmp_path, "doctor", "--nproc", "1").communicate(timeout=120)
    assert all(re.search(rf"^ok +{h.namespace} +\d\d things looked at$", said, re.MULTILINE) for h in hosts), said
    speed = re.search(r" link +2 ranks reduce ([\d.]+) MB/s, or one number in", said)
    assert speed and float(speed[1]) < 130, said  # 1 Gbit/s
