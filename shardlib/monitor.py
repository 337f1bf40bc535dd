"""What a run tells of itself: a bar, files of metrics, a callback. One rank writes, and steps do not wait for it."""

import atexit
import csv
import importlib
import io
import json
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.errors import MeshError, ShardError, amount, listing, nearest
from shardlib.mesh import current_mesh
from shardlib.meter import Spent, meter

Record = dict[str, float]
LULL = 15.0  # seconds between lines where there is no terminal


class Writer(Protocol):
    """One way to tell a record. `begin` is called before the first, with its step: what an earlier run that went on to
    this step or beyond has told of it is void."""

    def begin(self, step: int) -> None: ...

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Monitor:
    """What `monitor` returns: call it with a step and its metrics. `with` it, or `close` it, to write the last one."""

    def __init__(self, writers: Sequence[Writer], flops: float | None, peak: float | None) -> None:
        self.writers, self.flops, self.peak = writers, flops, peak
        self.waiting: tuple[int, Mapping[str, Any]] | None = None
        self.last: tuple[int, float, Spent] | None = None  # a step whose metrics were there, when, and what was spent
        self.begun = False

    def __call__(self, step: int, metrics: Mapping[str, Tensor | float]) -> None:
        """Note the metrics of a step. What the device has not computed yet is read at the next call."""
        if not _writes():
            return
        self.flush()
        if not self.begun:
            self.begun = True
            atexit.register(self.close)  # the last metrics are not lost, nor is a terminal left without its cursor
            for writer in self.writers:
                writer.begin(step)
        self.waiting = step, dict(metrics)
        if not any(isinstance(x, Tensor) and x.device.type != "cpu" for x in metrics.values()):
            self.flush()

    def flush(self) -> None:
        """Write what waits, which waits for the device."""
        if self.waiting is None:
            return
        (step, metrics), self.waiting = self.waiting, None
        record = {"step": step} | {name: float(x) for name, x in metrics.items()}
        if "tokens" in metrics:
            record |= self._speed(step, record["tokens"])
        for writer in self.writers:
            writer.write(record)

    def _speed(self, step: int, tokens: float) -> Record:
        """Of the steps since the last record of a train step; nothing for the first, which traces."""
        now, spent, last = time.perf_counter(), meter().read(), self.last
        self.last = step, now, spent
        found = {"memory": float(_memory())}
        if last is None or step <= last[0]:
            return found
        steps = step - last[0]
        seconds = (now - last[1]) / steps
        found |= {"step_time": seconds, "tokens_per_s": tokens / seconds}
        found |= {name: x / steps for name, x in _split(now - last[1], last[2], spent).items()}
        if self.flops and self.peak:
            found["mfu"] = found["tokens_per_s"] * self.flops / self.peak
        return found

    def close(self) -> None:
        """Write the last metrics, and end the bar."""
        try:
            self.flush()
        finally:
            for writer in self.writers:
                writer.close()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def monitor(
    dir: str | os.PathLike[str],
    to: str | Callable[[Record], Any] | Sequence[str | Callable[[Record], Any]] = ("bar", "jsonl"),
    *,
    steps: int | None = None,
    flops: float | None = None,
    peak: float | None = None,
) -> Monitor:
    """`log(step, metrics)`, which notes the metrics of a step, or any numbers, on one rank; the others do nothing.

    `to`: `"bar"` (on a terminal; elsewhere a line now and then), `"jsonl"` (`dir/metrics.jsonl`), `"csv"`
    (`dir/metrics.csv`), `"tensorboard"` (needs that package), or a function of one record. A record is the step, its
    metrics, and, where `tokens` is among them, `step_time` (seconds), `tokens_per_s`, `memory` (bytes: the most so far)
    and `mfu`, if `flops` (per token; 6 per parameter, roughly) and `peak` (of all devices, per second) are given. Speed
    is that of the steps since the last record, all that came between included. `step_time` is `compute`, in jitted
    functions, plus `communication`, blocked there in collectives, plus `idle`, the rest (loading data, saving; eager
    code too): on this rank, on CUDA as the device sees it. The backends `inductor` and `cudagraph` of several processes
    have `communication` in `compute`, and the simulated ranks of one have none. Metrics on a device are read at the
    next call. A run that goes on replaces what was noted from its first step on. `steps`: how many the bar expects.
    Raises `ShardError` for an unknown name or a package that is not there.
    """
    folder = Path(dir)
    kinds: dict[str, Callable[[], Writer]] = {
        "bar": lambda: _Bar(steps),
        "jsonl": lambda: _Lines(folder / "metrics.jsonl"),
        "csv": lambda: _Table(folder / "metrics.csv"),
        "tensorboard": lambda: _Board(folder),
    }
    writers: list[Writer] = []
    for kind in [to] if isinstance(to, str) or callable(to) else to:
        if callable(kind):
            writers.append(_Call(kind))
        elif kind in kinds:
            writers.append(kinds[kind]())
        else:
            raise ShardError(f"monitor knows no `{kind}`{nearest(kind, kinds)}; there are {listing(kinds)}")
    return Monitor(writers, flops, peak)


def _split(seconds: float, before: Spent, after: Spent) -> Record:
    """What programs computed and waited in these seconds, and the rest; nothing where none ran."""
    programs, blocked, count, unmarked = (b - a for a, b in zip(before, after, strict=True))
    if not count:
        return {}
    split = {"compute": programs} if unmarked else {"compute": programs - blocked, "communication": blocked}
    return {**split, "idle": max(0.0, seconds - programs)}


def _writes() -> bool:
    """Whether this is the rank that writes: the first."""
    with suppress(MeshError):
        return current_mesh().rank == 0
    return not dist.is_initialized() or dist.get_rank() == 0


def _memory() -> int:
    """The most bytes that were in use: on the GPU where there is one, else by the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class _Call:
    """A function of the user's."""

    def __init__(self, f: Callable[[Record], Any]) -> None:
        self.f = f

    def begin(self, step: int) -> None: ...

    def write(self, record: Record) -> None:
        self.f(record)

    def close(self) -> None: ...


class _Lines:
    """A JSON object on each line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: int) -> None:
        kept = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            with suppress(ValueError):  # cut off, as the run was
                kept += [line] if json.loads(line)["step"] < step else []
        _replace(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, record: Record) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def close(self) -> None: ...


class _Table:
    """Comma-separated values; a name that comes later becomes a further column."""

    def __init__(self, path: Path) -> None:
        self.path, self.columns = path, list[str]()

    def begin(self, step: int) -> None:
        self._rewrite([r for r in self._read() if r["step"].isdigit() and int(r["step"]) < step], ["step"])

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        rows = csv.DictReader(io.StringIO(self.path.read_text(), newline=""))
        found = [row for row in rows if None not in row.values()]  # else cut off, as the run was
        self.columns = list(rows.fieldnames or ())
        return found

    def _rewrite(self, rows: list[dict[str, str]], more: Sequence[str]) -> None:
        self.columns += [c for c in more if c not in self.columns]
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        _replace(self.path, text.getvalue())

    def write(self, record: Record) -> None:
        if not record.keys() <= set(self.columns):
            self._rewrite(self._read(), list(record))
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns, restval="", lineterminator="\n").writerow(record)

    def close(self) -> None: ...


class _Board:
    """TensorBoard's files."""

    def __init__(self, folder: Path) -> None:
        try:
            self.module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as e:
            raise ShardError('monitor: "tensorboard" needs that package: pip install tensorboard') from e
        self.folder, self.file = folder, None

    def begin(self, step: int) -> None:
        self.file = self.module.SummaryWriter(str(self.folder), purge_step=step)

    def write(self, record: Record) -> None:
        assert self.file is not None
        for name, value in record.items():
            if name != "step":
                self.file.add_scalar(name, value, int(record["step"]))
        self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class _Bar:
    """A bar of rich on a terminal, elsewhere a line now and then."""

    def __init__(self, steps: int | None) -> None:
        from rich import progress  # rich takes a while to load: at first use
        from rich.console import Console

        self.steps, self.told, self.latest = steps, 0.0, dict[str, float]()
        self.console = Console(highlight=False, markup=False, soft_wrap=True)
        text = progress.TextColumn("{task.description}")
        columns = progress.MofNCompleteColumn(), progress.BarColumn(), text, progress.TimeElapsedColumn()
        self.bar = progress.Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=steps)

    def begin(self, step: int) -> None:
        self.bar.start()

    def write(self, record: Record) -> None:
        self.latest |= record
        now, step, said = time.monotonic(), int(record["step"]), told(self.latest)
        self.bar.update(self.task, completed=step, description=said)
        if self.bar.disable and (now - self.told > LULL or step == self.steps):
            self.told = now
            self.console.print(f"step {step}: {said}")

    def close(self) -> None:
        self.bar.stop()


def told(record: Mapping[str, float]) -> str:
    """A record in words: what people look at, in short."""
    forms: dict[str, Callable[[float], str]] = {
        "loss": "loss {:.4f}".format,
        "val_loss": "validation {:.4f}".format,
        "grad_norm": "norm {:.3g}".format,
        "lr": "lr {:.2e}".format,
        "tokens_per_s": "{:,.0f} tokens/s".format,
        "step_time": "{:.3g} s/step".format,
        "communication": "{:.2g} s of them communication".format,
        "idle": "{:.2g} s idle".format,
        "mfu": "MFU {:.1%}".format,
        "scale": "scale {:.0f}".format,
        "skipped": "{:.0f} skipped".format,
        "memory": lambda x: amount(int(x)),
    }
    return "  ".join(form(record[name]) for name, form in forms.items() if name in record)


def _replace(path: Path, text: str) -> None:
    """Write a file whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)
