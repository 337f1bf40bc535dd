"""What a run tells, on rank 0: a bar on a terminal, elsewhere a line now and then; `metrics.jsonl`; a plot."""

import json
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import shardlib as sl
from shardlib import tree

LULL = 15  # seconds between lines where there is no terminal


class Journal:
    """Steps count from 1. Metrics stay on the device until `every` steps of them are read at once."""

    def __init__(self, folder: Path, mesh: sl.Mesh, steps: int, every: int) -> None:
        self.folder, self.file, self.mesh, self.steps, self.every = folder, folder / "metrics.jsonl", mesh, steps, every
        self.records: list[dict[str, float]] = []
        self.waiting: list[tuple[int, dict[str, Tensor]]] = []
        self.tokens = self.seconds = self.told = 0.0
        self.since: float | None = None  # when what waits began; None while the clock is stopped
        self.console = Console(quiet=mesh.rank != 0, highlight=False, markup=False, soft_wrap=True)
        columns = MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
        self.bar = Progress(*columns, console=self.console, disable=mesh.rank != 0 or not self.console.is_terminal)
        self.task = self.bar.add_task("the first step is traced", total=steps)

    def __enter__(self) -> "Journal":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    @property
    def tokens_per_s(self) -> float:
        """In training alone; the first step, which traces, is not counted, nor is the first after a pause."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def start(self, step: int, what: str, params: Any) -> None:
        """Say what is trained; of an earlier run that goes on, keep what it noted up to `step`."""
        if step and self.mesh.rank == 0 and self.file.exists():
            self.records = [r for r in map(json.loads, self.file.read_text().splitlines()) if r["step"] <= step]
        self._write(self.records, "w")
        count = sum(x.numel() for x in tree.leaves(params))
        ranks = f"{self.mesh.total} {'simulated' if self.mesh.simulate else self.mesh.device.type} rank(s)"
        self.console.print(f"{count:,} parameters, {what}, {ranks}: {self.mesh.name}, step {step} of {self.steps}")

    def step(self, step: int, metrics: dict[str, Tensor]) -> None:
        self.waiting.append((step, metrics))
        if self.since is None or len(self.waiting) == self.every or step == self.steps:
            self._read()

    def pause(self) -> None:
        """Stop the clock until the end of the next step: what comes now is no training."""
        self._read()
        self.since = None

    def validation(self, step: int, loss: float) -> None:
        self._note([dict(step=step, val_loss=loss)])
        self.console.print(f"step {step}: validation loss {loss:.3f}")

    def plot(self, bigram_loss: float) -> None:
        """`loss.png`: training, validation, and the bigram model's loss."""
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for key, label, marker in (("loss", "training", ""), ("val_loss", "validation", "o")):
            noted = [r for r in self.records if key in r]
            axes.plot([r["step"] for r in noted], [r[key] for r in noted], label=label, marker=marker)
        axes.axhline(bigram_loss, color="gray", ls="--", label="bigram on validation")
        axes.set(xlabel="step", ylabel="nats per token", title=f"mesh {self.mesh.name}")
        axes.legend()
        figure.savefig(self.folder / "loss.png", dpi=120)

    def _read(self) -> None:
        if not self.waiting:
            return
        read = [{"step": step} | {k: float(v) for k, v in m.items()} for step, m in self.waiting]  # waits for the GPU
        now, last, self.waiting = time.perf_counter(), read[-1], []
        if self.since is not None:
            self.tokens += sum(r["tokens"] for r in read)
            self.seconds += now - self.since
        self.since = now
        self._note(read)
        said = f"loss {last['loss']:.3f}" + (f"  {self.tokens_per_s:,.0f} tokens/s" if self.seconds else "")
        self.bar.update(self.task, completed=last["step"], description=said)
        if self.bar.disable and now - self.told > LULL:
            self.told = now
            self.console.print(f"step {last['step']}: {said}")

    def _note(self, records: list[dict[str, float]]) -> None:
        self.records += records
        self._write(records, "a")

    def _write(self, records: list[dict[str, float]], mode: str) -> None:
        if self.mesh.rank == 0:
            with open(self.file, mode) as file:
                file.writelines(json.dumps(r) + "\n" for r in records)
