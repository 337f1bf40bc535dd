"""What saving costs: the train state of a small GPT (10.5M parameters and two moments, 126 MB) in one process on one
thread, against plain torch.distributed.checkpoint on the same tensors, paired and interleaved, with medians of ratios;
and what a save beside the run costs: CPU time against one that is waited for, and the longest step meanwhile.

    python -m benchmarks.checkpoint [--rounds 5] [--size small] [--dir DIR] [--json]
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import shardlib as sl
from benchmarks.models import SIZES, Batch, Gpt, angles, loss, tokens
from shardlib.contents import contents

Clock = Callable[[], float]


def took(run: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    """Seconds."""
    began = clock()
    run()
    return clock() - began


def speeds(state: Any, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of saving, and of restoring into new tensors, ours and plain."""
    found: dict[str, list[float]] = {
        f"{who} {what}": [] for what in ("save", "restore") for who in ("shardlib", "plain")
    }
    path = sl.save(folder / "ours", state, step=0)
    held = contents(path)
    plain = dict(held.values(held.leaves))
    for i in range(1, rounds + 1):
        at, there = folder / "plain", folder / "ours" / f"step-{i:08d}"

        def load(at: Path = at) -> None:
            new = {name: torch.empty_like(x) for name, x in plain.items()}
            state_dict_loader.load(new, storage_reader=FileSystemReader(at), no_dist=True)

        runs = {
            "shardlib save": partial(sl.save, folder / "ours", state, step=i),
            "plain save": partial(state_dict_saver.save, plain, storage_writer=FileSystemWriter(at), no_dist=True),
            "shardlib restore": partial(sl.restore, there, state),
            "plain restore": load,
        }
        for name, run in runs.items():
            found[name].append(took(run))
        shutil.rmtree(at)
        shutil.rmtree(there)
    return found


def processor(state: Any, folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """CPU seconds of saves that are waited for, and of those beside the run, whose copy counts."""
    out: tuple[list[float], list[float]] = ([], [])

    def save(step: int, wait: bool) -> None:
        sl.save(folder, state, step=step, keep=1, wait=wait)  # type: ignore[call-overload]
        sl.latest(folder)  # waits

    for i in range(rounds):
        out[0].append(took(partial(save, 2 * i, True), time.process_time))
        out[1].append(took(partial(save, 2 * i + 1, False), time.process_time))
    return out


def beside(step: Callable[[Any], Any], state: Any, folder: Path, rounds: int) -> list[tuple[float, ...]]:
    """Of every round, in seconds: the median and the longest of steps without a save, the longest step while one is
    written (the call of `save`, which copies, is part of the first), and that call; and how many steps these are."""
    found = []

    def timed(began: float) -> float:
        nonlocal state
        state = step(state)
        return time.perf_counter() - began

    for i in range(rounds):
        quiet = [timed(time.perf_counter()) for _ in range(5)]
        began = time.perf_counter()
        saving = sl.save(folder, state, step=i, keep=1, wait=False)
        call = time.perf_counter() - began
        busy = [timed(began)]
        while not saving.done():
            busy.append(timed(time.perf_counter()))
        saving.wait()
        found.append((statistics.median(quiet), max(quiet), max(busy), call, len(busy)))
    return found[1:]  # the first copy's memory is new to the process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument(
        "--dir", type=Path, help="a folder on the disk to measure; by default where temporary files are"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    torch.set_num_threads(1)
    size = SIZES[args.size]
    (x, y), (cos, sin) = tokens(size, 0, 1), angles(size)
    train = sl.jit(sl.step(loss, sl.optim.adamw(1e-3, weight_decay=0.1), clip=1.0), donate_argnums=0)
    with tempfile.TemporaryDirectory(dir=args.dir) as made, sl.make_mesh(dp=1, tp=1, simulate=True):
        folder, batch = Path(made), sl.shard(Batch(tokens=x, targets=y, cos=cos, sin=sin))
        state = train.init(sl.init(Gpt, sizes=size.sizes, key=sl.random.key(0)))
        state, _ = train(state, batch)
        seconds = speeds(state, folder, args.rounds)
        waited, aside = processor(state, folder / "cpu", 3 * args.rounds)  # single ones differ by a tenth and more
        steps = beside(lambda s: train(s, batch)[0], state, folder / "beside", args.rounds + 1)
    median = {name: statistics.median(s) for name, s in seconds.items()}
    result = {
        "save": statistics.median(b / a for a, b in zip(seconds["shardlib save"], seconds["plain save"], strict=True)),
        "restore": statistics.median(
            b / a for a, b in zip(seconds["shardlib restore"], seconds["plain restore"], strict=True)
        ),
        "cpu": statistics.median(b / a for a, b in zip(waited, aside, strict=True)),
        "longest": statistics.median(busy / step for step, _, busy, *_ in steps),
        "longest_without": statistics.median(quiet / step for step, quiet, *_ in steps),
    }
    for name, value in median.items():
        print(f"{name:18}{value:8.3f} s")
    print(f"speed of plain torch.distributed.checkpoint: save {result['save']:.2f}, restore {result['restore']:.2f}")
    print(f"CPU of a save beside the run, over one that is waited for: {result['cpu']:.3f}")
    print(
        f"longest step over the median one: {result['longest']:.2f} of {sum(n for *_, n in steps)} while saves are "
        f"written, {result['longest_without']:.2f} without (medians of {len(steps)} rounds)"
    )
    print(
        "".join(
            f"\n  step {a:.3f} s, longest {b:.3f} s, beside a save {c:.3f} s, of which its call {d:.3f} s"
            for a, b, c, d, _ in steps
        )
    )
    if args.json:
        print(json.dumps({"seconds": median, **result}))


if __name__ == "__main__":
    main()
