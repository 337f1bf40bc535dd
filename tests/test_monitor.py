"""What a run tells of itself: files, a bar, a callback; one rank writes; a run goes on in the files of another."""

import csv
import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ranks import on_ranks

import shardlib as sl
from shardlib import meter
from shardlib.monitor import _split


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_files_and_callback_get_the_same_records(tmp_path):
    got: list[dict[str, float]] = []
    with sl.monitor(tmp_path / "new", to=("jsonl", "csv", got.append)) as log:
        for step in (1, 2):
            log(step, {"loss": torch.tensor(3.5 - step), "skipped": torch.tensor(0)})
        log(2, {"val_loss": 1.25})
    wanted = [dict(step=1, loss=2.5, skipped=0), dict(step=2, loss=1.5, skipped=0), dict(step=2, val_loss=1.25)]
    assert got == lines(tmp_path / "new") == wanted
    names = ["step", "loss", "skipped", "val_loss"]
    assert [list(map(r.get, names)) for r in rows(tmp_path / "new")] == [
        ["1", "2.5", "0.0", ""], ["2", "1.5", "0.0", ""], ["2", "", "", "1.25"],
    ]  # fmt: skip


def test_a_run_that_goes_on_has_no_step_twice(tmp_path):
    def run(first: int, last: int) -> None:
        with sl.monitor(tmp_path, to=("jsonl", "csv")) as log:
            for step in range(first, last):
                log(step, {"loss": 10.0 * first + step})

    run(1, 6)
    for name in ("metrics.jsonl", "metrics.csv"):
        with open(tmp_path / name, "a") as file:
            file.write('{"step": 1' if name.endswith("l") else "4")  # cut off, as the run was
    run(4, 8)
    wanted = [11, 12, 13, 44, 45, 46, 47]
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert [r["loss"] for r in lines(tmp_path)] == wanted == [float(r["loss"]) for r in rows(tmp_path)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_speed_is_that_of_the_steps_between(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    got: list[dict[str, float]] = []
    log = sl.monitor("nowhere", to=got.append, flops=6e3, peak=1e6)
    for step, at in ((10, 100.0), (20, 104.0), (20, 105.0), (25, 106.0)):
        now[0] = at
        log(step, {"tokens": torch.tensor(50.0)} if at != 105 else {"val_loss": 1.0})
    assert "step_time" not in got[0] and got[0]["memory"] > 1e6, "the first step traces"
    assert (got[1]["step_time"], got[1]["tokens_per_s"], got[1]["mfu"]) == (0.4, 125.0, 0.75)
    assert got[2] == {"step": 20, "val_loss": 1.0}
    assert got[3]["step_time"] == 0.4, "two seconds, in which a validation was, for five steps"


def test_a_step_is_computing_waiting_and_the_rest():
    nap = 0.1

    def body() -> Any:
        @torch.library.custom_op("shardlib_test::late", mutates_args=())
        def late(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            time.sleep(nap * by.item())
            return x.clone()

        late.register_fake(lambda x, by: torch.empty_like(x))

        def summed(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            return sl.psum(sl.pending(late(x, by[0]).sum(), "dp"), "dp")

        got: list[dict[str, float]] = []
        with sl.make_mesh(dp=2), sl.monitor("nowhere", to=got.append) as log:
            f = sl.jit(sl.shard_map(summed, in_specs=None, out_specs=""))
            x = sl.shard(torch.ones(4), "n/dp")
            for step, (by, idle) in enumerate([([0, 0], 0), ([2, 0], 0), ([1, 4], 0), ([0, 0], 2)]):
                f(x, sl.shard(torch.tensor(by), "n/dp"))
                time.sleep(nap * idle)
                log(step, {"tokens": 1.0})
        return got

    first, *got = on_ranks(2, body)[0]
    assert "compute" not in first, "which traces"
    split = [tuple(r[k] / nap for k in ("compute", "communication", "idle")) for r in got]
    for found, wanted in zip(split, [(2, 0, 0), (1, 3, 0), (0, 0, 2)], strict=True):
        for naps, least in zip(found, wanted, strict=True):  # of a machine that does other things, too
            assert least - 0.5 < naps < least + 1.5
    assert all(r["step_time"] == pytest.approx(r["compute"] + r["communication"] + r["idle"]) for r in got)


class Event:
    """Stands for an event of CUDA: `at` milliseconds, once the device has come there."""

    device: ClassVar[float] = 0

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at <= self.device

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


def test_what_a_device_has_not_done_is_counted_later(monkeypatch):
    events = map(Event, (1000, 1250, 1500, 3000, 3000, 4000))
    monkeypatch.setattr(meter, "_event", lambda: next(events))
    found = meter.Meter()
    with found.program(cuda=True, marked=True):
        found.mark()
        found.mark()
    with found.program(cuda=True, marked=False):
        pass
    assert found.read() == (0, 0, 0, 0)
    Event.device = 3500
    assert found.read() == (2.0, 0.25, 1, 0)
    Event.device = 4000
    assert found.read() == (3.0, 0.25, 2, 1)
    assert _split(4.0, meter.Spent(), found.read()) == {"compute": 3.0, "idle": 1.0}, "not all is marked"


class Late(torch.Tensor):
    """Stands for a tensor on a device: reading it is noted."""

    reads: ClassVar[list[float]] = []
    device = torch.device("meta")  # type: ignore[assignment]

    def __float__(self) -> float:
        self.reads.append(super().item())
        return self.reads[-1]


def test_what_a_device_computes_is_read_at_the_next_call():
    got: list[dict[str, float]] = []
    log = sl.monitor("nowhere", to=[got.append])
    log(1, {"loss": torch.tensor(1.5).as_subclass(Late)})
    assert not Late.reads and not got
    log(2, {"loss": torch.tensor(2.5).as_subclass(Late)})
    assert Late.reads == [1.5] and [r["step"] for r in got] == [1]
    log.close()
    assert [r["loss"] for r in got] == [1.5, 2.5]
    log.close()
    assert len(got) == 2


def test_one_rank_writes(tmp_path):
    def body() -> int:
        got: list[Any] = []
        with sl.monitor(tmp_path, to=("jsonl", got.append)) as log, sl.make_mesh(dp=2) as mesh:
            log(1, {"rank": mesh.rank})
        return len(got)

    assert on_ranks(2, body) == [1, 0]
    assert lines(tmp_path) == [{"step": 1, "rank": 0}]


def test_without_a_terminal_the_bar_is_lines(capsys):
    with sl.monitor("nowhere", to="bar", steps=30) as log:
        for step in range(1, 31):
            log(step, {"loss": 2.0, "skipped": 1.0, "scale": 1024.0, "memory": 3e6, "unknown": 1.0})
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "step 30: loss 2.0000  scale 1024  1 skipped  3 MB" and len(said) <= 2


def test_what_cannot_be(monkeypatch, tmp_path):
    with pytest.raises(sl.ShardError, match=r"monitor knows no `json` \(did you mean `jsonl`\?\); there are `bar`, "):
        sl.monitor(tmp_path, to="json")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(sl.ShardError, match='"tensorboard" needs that package: pip install tensorboard'):
        sl.monitor(tmp_path, to=("jsonl", "tensorboard"))


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore

    for first, last in ((1, 5), (3, 6)):
        with sl.monitor(tmp_path, to="tensorboard") as log:
            for step in range(first, last):
                log(step, {"loss": float(first + step)})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(x.step, x.value) for x in events.Scalars("loss")] == [(1, 2), (2, 3), (3, 6), (4, 7), (5, 8)]
