"""A run that is interrupted anywhere and resumed anywhere goes on as if nothing had been."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import tree as trees
from shardlib.contents import contents

ROOT = Path(__file__).parent.parent
F64 = torch.float64


# ---- a train state, with dropout, a schedule, a scale that moves, and data of which a batch was skipped


@sl.pytree
class Net:
    w_in: Tensor = sl.spec("model/dp hidden/tp", dtype=F64)
    norm: Tensor = sl.spec("hidden", dtype=F64)
    w_out: Tensor = sl.spec("hidden/tp model/dp", dtype=F64)


SIZES = dict(model=8, hidden=12)


def loss(net: Net, x: Tensor, key: Tensor) -> sl.Mean:
    net = sl.gather(net, "dp")
    h = sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", x, net.w_in)
    h = sl.dropout("batch/dp hidden/tp", h.tanh(), key, 0.3)
    y = sl.psum(
        "batch/dp model +tp -> batch/dp model",
        sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", h, net.w_out),
    )
    return sl.Mean.of("batch/dp model", (y - x) ** 2 + 0.1 * (net.norm**2).sum())


def rows(number: int) -> sl.Array:
    """A batch; the second overflows."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number), dtype=F64)
    return sl.shard(x * (1e307 if number == 1 else 1), "batch/dp model")


class Run:
    """`state` is what is saved: the step's state and how many batches were read."""

    def __init__(self, stage: int) -> None:
        f64 = sl.precision(*["f64"] * 4, scale=sl.dynamic_scale(2.0**10, window=2, hysteresis=1))
        optimizer = sl.optim.adamw(sl.optim.warmup_cosine(0.1, warmup=2, steps=10), weight_decay=0.1)
        layout = sl.zero(sl.specs(Net), axis="dp", stage=stage)
        self.step = sl.jit(sl.step(loss, optimizer, layout=layout, precision=f64, clip=1.0), donate_argnums=0)
        self.losses: list[float] = []

    def fresh(self) -> Any:
        params = sl.init(Net, sizes=SIZES, key=sl.random.key(0))
        return {"train": self.step.init(params, key=sl.random.key(5)), "read": 0}

    def train(self, state: Any, until: int) -> Any:
        """To that many batches."""
        while state["read"] < until:
            new, metrics = self.step(state["train"], rows(state["read"]))
            state = {"train": new, "read": state["read"] + 1}
            self.losses.append(float(metrics["loss"]))
        return state


def whole(state: Any) -> Any:
    return trees.map_(lambda x: sl.gather(x) if isinstance(x, sl.Array) else x, state)


def equal(a: Any, b: Any) -> bool:
    pairs = zip(trees.leaves(a), trees.match(a, b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[float]]:
    """What was saved after three batches on dp=2, tp=2, ZeRO-3, and the losses of six."""
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        run = Run(3)
        state = run.train(run.fresh(), 3)
        saving = sl.save(tmp_path_factory.mktemp("runs"), state, step=3, wait=False)
        held = whole(state)
        run.train(state, 6)
        train = held["train"]
        assert (int(train.step), int(train.scale.skipped), held["read"]) == (2, 1, 3)
        assert float(train.scale.scale) == 2.0**9 and run.losses[1] == float("inf")
        return saving.wait(), held, run.losses


def test_c38_on_the_same_mesh_every_rank_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def rank() -> bool:
        with sl.make_mesh(dp=2, tp=2):
            run = Run(3)
            want = run.train(run.fresh(), 6)
            path = sl.save(tmp_path, run.train(run.fresh(), 3), step=3, wait=False).wait()
            got = run.train(sl.restore(path, like=sl.abstract(run.fresh)), 6)
            local = lambda s: trees.map_(lambda x: x.local() if isinstance(x, sl.Array) else x, s)  # noqa: E731
            return equal(local(want), local(got)) and run.losses[:6] == run.losses[6:]

    assert on_ranks(4, rank) == [True] * 4


OTHERS = [
    (dict(dp=1, tp=1), 0),
    (dict(dp=4, tp=1), 1),
    (dict(dp=8, tp=1), 2),
    (dict(dp=1, tp=4), 3),
    (dict(tp=2, dp=2), 1),
    (dict(dp=4, tp=2), 3),
]


@pytest.mark.parametrize(("axes", "stage"), OTHERS)
def test_c38_on_other_meshes_the_state_is_the_same_and_the_run_goes_on(
    interrupted: Any, axes: dict[str, int], stage: int
) -> None:
    path, held, losses = interrupted
    with sl.make_mesh(axes, simulate=True):
        run = Run(stage)
        state = sl.restore(path, like=sl.abstract(run.fresh))
        assert equal(whole(state), held)
        run.train(state, 6)
    assert run.losses == pytest.approx(losses[3:], rel=0, abs=1e-8)


# ---- faults at every call that touches the disk


class Fault:
    """What the n-th call that writes, syncs, renames, makes or removes something does, instead or half-way."""

    def __init__(self, at: int, how: Callable[[], None]) -> None:
        self.at, self.how, self.count = at, how, 0

    def due(self) -> bool:
        self.count += 1
        return self.count == self.at

    @contextmanager
    def injected(self) -> Iterator["Fault"]:
        fault = self

        class File:
            def __init__(self, file: Any) -> None:
                self.file = file

            def write(self, data: Any) -> int:
                if fault.due():
                    self.file.write(data[: len(data) // 2])
                    self.file.flush()
                    fault.how()
                return self.file.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.file, name)

            def __enter__(self) -> "File":
                return self

            def __exit__(self, *_: object) -> None:
                self.file.close()

        def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            file = open_(path, mode, *args, **options)
            return File(file) if "w" in mode else file

        def faulty(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                if fault.due():
                    fault.how()
                return call(*args, **options)

            return run

        open_ = Path.open
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "open", opened)
            for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
                patch.setattr(os, name, faulty(getattr(os, name)))
            yield self


def error() -> None:
    raise OSError(5, "Input/output error")


def killed() -> None:
    os._exit(9)


def numbers(step: int) -> dict[str, Any]:
    """The state of a run whose loss curve is the sum of what it reads."""
    return {"w": sl.shard(torch.full((4,), float(step)), "n/dp"), "sum": sum(range(step + 1))}


def go_on(folder: Path, until: int, wait: bool = True) -> int:
    """From the newest save to the end, with a save at each step; what the run has summed up."""
    saved = sl.latest(folder)
    state = sl.restore(saved, numbers(0)) if saved else numbers(0)
    step = int(sl.gather(state["w"])[0])
    while step < until:
        step += 1
        state = numbers(step) | {"sum": state["sum"] + step}
        sl.save(folder, state, step=step, keep=2, wait=wait)  # type: ignore[call-overload]
    sl.latest(folder)  # waits
    return state["sum"]


def check(folder: Path, step: int) -> None:
    """The newest save is whole, and of one of the last two steps; the run ends as it would have."""
    path = sl.latest(folder)
    assert path and contents(path).verify() == [] and contents(path).step in (step - 1, step)
    assert go_on(folder, 4) == 10 and sorted(p.name for p in folder.iterdir()) == ["step-00000003", "step-00000004"]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the saves of steps 1 and 2. Nothing is brought to the disk: no machine goes down here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    with sl.make_mesh(dp=1, simulate=True):
        go_on(tmp_path / "two", 2)
    return tmp_path / "two"


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "wait"),
    [(killed, True), (error, False), pytest.param(killed, False, marks=SLOW), pytest.param(error, True, marks=SLOW)],
)
def test_a_fault_at_every_write_sync_and_rename(two: Path, how: Callable[[], None], wait: bool) -> None:
    """The save of step 3 fails, which removes that of step 1."""
    with sl.make_mesh(dp=2, simulate=True):
        for at in range(1, 200):
            folder = Path(shutil.copytree(two, two.with_name(str(at))))
            fault = Fault(at, how)
            if how is killed:
                child = multiprocessing.get_context("fork").Process(target=faulted, args=(fault, folder, wait))
                child.start()
                child.join()
                assert child.exitcode in (0, 9)
                hit = child.exitcode == 9
            else:
                hit = faulted(fault, folder, wait)
            check(folder, 3)
            if not hit:
                break
        assert 40 < at < 199, "every call has had its turn"


def faulted(fault: Fault, folder: Path, wait: bool) -> bool:
    """Whether the fault came."""
    with fault.injected():
        try:
            go_on(folder, 3, wait)
        except OSError as e:
            assert e.errno == 5
    return fault.count >= fault.at


@pytest.mark.parametrize("bad", [1, pytest.param(0, marks=SLOW)])
def test_a_fault_on_one_of_two_ranks(two: Path, bad: int) -> None:
    def run() -> tuple[int, int]:
        errors = 0
        with sl.make_mesh(dp=2):
            for at in range(1, 200):
                folder = two.with_name(str(at))
                if dist.get_rank() == 0:
                    shutil.copytree(two, folder)
                sl.latest(folder)  # all meet
                fault = Fault(at if dist.get_rank() == bad else 0, error)
                with fault.injected():
                    try:
                        go_on(folder, 3, wait=bool(at % 2))
                    except sl.RankError as e:
                        errors += 1
                        assert f"rank {bad}: OSError: [Errno 5] Input/output error" in str(e)
                check_on_ranks(folder)
                counts = [None, None]
                dist.all_gather_object(counts, fault.count >= fault.at)
                if not counts[bad]:
                    return at, errors
        return at, errors

    def check_on_ranks(folder: Path) -> None:
        path = sl.latest(folder)
        assert path and contents(path).verify() == []
        assert go_on(folder, 4) == 10

    (at, errors), other = on_ranks(2, run, seconds=120)
    assert (at, errors) == other and 15 < errors <= at < 199


# ---- processes that are killed

SCRIPT = """
import sys, time, torch
import shardlib as sl

folder, steps = sys.argv[1], int(sys.argv[2])

def loss(w, x, key):
    w = sl.gather(w, "dp")
    return sl.Mean.of("batch/dp model", sl.dropout("batch/dp model", x @ w["w"], key, 0.2) ** 2)

def rows(step):
    return sl.shard(torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).double(), "batch/dp model")

with sl.make_mesh(dp=-1, timeout=20), sl.monitor(folder, to="jsonl") as log:
    step = sl.jit(sl.step(loss, sl.optim.adamw(1e-2)), donate_argnums=0)
    fresh = lambda: step.init(sl.shard({"w": torch.eye(4).double()}, {"w": "n/dp m"}), key=sl.random.key(1))
    saved = sl.latest(folder + "/saves")
    state = sl.restore(saved, like=sl.abstract(fresh)) if saved else fresh()
    for done in range(int(state.step) + 1, steps + 1):
        state, metrics = step(state, rows(done))
        log(done, metrics)
        time.sleep(0.03)
        sl.save(folder + "/saves", state, keep=3, wait=False)
"""


@SLOW
def test_kill_9_of_a_random_rank_at_ten_random_moments(tmp_path: Path) -> None:
    kills, steps, draw = 10, 120, random.Random(0)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "shardlib", "run", "--nproc", "2", "--max-restarts", str(kills)]
    run = subprocess.Popen(
        [*launch, str(script), str(tmp_path / "run"), str(steps)], env=env, stderr=subprocess.PIPE, text=True
    )

    def losses(folder: Path) -> dict[int, float]:
        file = folder / "metrics.jsonl"
        lines = file.read_text().splitlines()[:-1] if file.exists() and run.poll() is None else []
        lines = lines if run.poll() is None else file.read_text().splitlines()
        return {r["step"]: r["loss"] for r in map(json.loads, lines)}

    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    try:
        for kill in range(kills):
            last, due = max(losses(tmp_path / "run"), default=0), draw.randint(1, 9)
            held = children.read_text() if kill else ""
            while run.poll() is None and max(losses(tmp_path / "run"), default=0) < last + due:
                time.sleep(0.01)
            time.sleep(draw.random() * 0.05)
            ranks = children.read_text().split()
            assert len(ranks) == 2 and run.poll() is None and children.read_text() != held, "a round of its own"
            os.kill(int(draw.choice(ranks)), signal.SIGKILL)
            while children.read_text().split() == ranks and run.poll() is None:
                time.sleep(0.01)
        _, said = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 0 and said.count("was killed by SIGKILL") == kills, said
    alone = [sys.executable, str(script), str(tmp_path / "alone"), str(steps)]
    assert subprocess.run(alone, env=env).returncode == 0
    found, want = losses(tmp_path / "run"), losses(tmp_path / "alone")
    assert list(found) == list(want) == [*range(1, steps + 1)]
    assert list(found.values()) == pytest.approx(list(want.values()), rel=0, abs=1e-12)
