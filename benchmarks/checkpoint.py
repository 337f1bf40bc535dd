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


def beside(step: Callable[[Any], Any], state: Any, folder: Path, rounds: int) -> tuple[list[float], list[float], float]:
    """Seconds of steps without a save, of those during saves (the call of `save` is part of the first), and the longest
    such call."""
    quiet, busy, calls = [], [], []
    for i in range(rounds):
        for _ in range(4):
            began = time.perf_counter()
            state = step(state)
            quiet.append(time.perf_counter() - began)
        began = time.perf_counter()
        saving = sl.save(folder, state, step=i, keep=1, wait=False)
        calls.append(time.perf_counter() - began)
        while not saving.done():
            state = step(state)
            busy.append(time.perf_counter() - began)
            began = time.perf_counter()
        saving.wait()
    return quiet, busy, max(calls)


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
        waited, aside = processor(state, folder / "cpu", args.rounds)
        quiet, busy, call = beside(lambda s: train(s, batch)[0], state, folder / "beside", args.rounds)
    median = {name: statistics.median(s) for name, s in seconds.items()}
    result = {
        "save": statistics.median(b / a for a, b in zip(seconds["shardlib save"], seconds["plain save"], strict=True)),
        "restore": statistics.median(
            b / a for a, b in zip(seconds["shardlib restore"], seconds["plain restore"], strict=True)
        ),
        "cpu": statistics.median(b / a for a, b in zip(waited, aside, strict=True)),
        "longest": max(busy) / statistics.median(quiet),
    }
    for name, value in median.items():
        print(f"{name:18}{value:8.3f} s")
    print(f"speed of plain torch.distributed.checkpoint: save {result['save']:.2f}, restore {result['restore']:.2f}")
    print(f"CPU of a save beside the run, over one that is waited for: {result['cpu']:.3f}")
    print(f"step: median {statistics.median(quiet):.3f} s, longest {max(quiet):.3f} s")
    print(
        f"longest of {len(busy)} steps during saves, with a copy of {call:.3f} s: {max(busy):.3f} s, "
        f"{result['longest']:.2f} of the median"
    )
    if args.json:
        print(json.dumps({"seconds": median, **result}))


if __name__ == "__main__":
    main()
