"""The same loss curve on every mesh, under every ZeRO stage, eager and jitted, in one process and in many.

    python -m benchmarks.equivalence [--quick | --all] [--json]

Trains the GPT of examples/ in float64 for 20 steps and prints, for every way to run it, the largest difference of the
loss to an eager run on one rank. Exits with 1 where one is above 1e-7. On the CPU, also where there are GPUs.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

import shardlib as sl
from examples import gpt

LIMIT = 1e-7
WAYS = ("simulated, eager", "simulated, jit", "processes, eager", "processes, jit")
MOST = {  # (dp, tp): the ZeRO stages that are run, for each way; all of them, --all, take a quarter of an hour
    (1, 1): ("03", "0123", "0", "3"),
    (4, 1): ("1", "0123", "", "2"),
    (1, 4): ("0", "0123", "", "0"),
    (2, 2): ("3", "0123", "1", "3"),
}
QUICK = {(1, 1): ("", "0", "", ""), (2, 2): ("", "3", "3", "")}
SCALES = (None, 2.0**7, sl.dynamic_scale(2.0**16, window=3), sl.dynamic_scale(2.0**10))  # by stage: no difference
VOCAB, ROWS, SEQ = 32, 8, 16
HOURS = 4 * 3600.0
SIZES = gpt.sizes(vocab=VOCAB, layers=2, model=16, heads=4)


class Run(NamedTuple):
    """One way to train, on a mesh and with a ZeRO stage."""

    dp: int
    tp: int
    stage: int
    way: str

    def curve(self, steps: int) -> list[float]:
        """The losses of `steps` updates; in processes, each of the mesh's ranks calls it."""
        layout = sl.zero(sl.specs(gpt.GPT), axis="dp", stage=self.stage)
        adamw = sl.optim.adamw(1e-2, weight_decay=0.1, mask=sl.optim.matrices)
        how = sl.precision("f64", "f64", "f64", "f64", scale=SCALES[self.stage])
        train = sl.step(gpt.loss, adamw, layout=layout, precision=how, clip=1.0)
        train = sl.jit(train, donate_argnums=0) if self.way.endswith("jit") else train
        data, losses = torch.Generator().manual_seed(0), []
        with sl.make_mesh(dp=self.dp, tp=self.tp, simulate=self.way.startswith("simulated")):
            state = train.init(sl.init(gpt.GPT, sizes=SIZES, key=sl.random.key(0), dtype=torch.float64))
            for _ in range(steps):
                tokens = torch.randint(VOCAB, (ROWS, SEQ), generator=data)
                counts = torch.rand(ROWS, SEQ, generator=data) < 0.7  # so that ranks have unequal numbers of tokens
                targets = torch.where(counts, (5 * tokens + 1) % VOCAB, -1)
                state, metrics = train(state, sl.shard(gpt.Batch(tokens=tokens, targets=targets)))
                losses.append(metrics["loss"])
        return torch.stack(losses).tolist()


def curves(runs: Sequence[Run], steps: int) -> dict[Run, list[float]]:
    """Every run's curve. Simulated runs share the cores; runs in processes take turns, each rank a process."""
    simulated = [run for run in runs if run.way.startswith("simulated")]
    cores = os.cpu_count() or 1
    shares = [simulated[core::cores] for core in range(cores)]
    found = sl.testing.forked(cores, lambda core: [run.curve(steps) for run in shares[core]], seconds=HOURS)
    out = {
        run: curve for share, made in zip(shares, found, strict=True) for run, curve in zip(share, made, strict=True)
    }
    for world in sorted({run.dp * run.tp for run in runs if run not in out}):
        group = [run for run in runs if run not in out and run.dp * run.tp == world]
        made = sl.testing.ranks(world, seconds=HOURS)(lambda group=group: [run.curve(steps) for run in group])()
        out |= zip(group, made[0], strict=True)
    return out


def largest(differences: Iterable[float]) -> float:
    """The largest, infinity where one is no number."""
    return max(d if math.isfinite(d) else math.inf for d in differences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two meshes, 2 steps")
    parser.add_argument("--all", action="store_true", help="every stage in every way")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)

    began, steps, chosen = time.perf_counter(), 2 if args.quick else 20, QUICK if args.quick else MOST
    first = Run(1, 1, 0, "simulated, eager")
    runs = [
        Run(*mesh, stage, way)
        for mesh, columns in chosen.items()
        for way, stages in zip(WAYS, columns, strict=True)
        for stage in range(4)
        if args.all or str(stage) in stages
    ]
    reference, found = first.curve(steps), curves(runs, steps)
    worst = {run: largest(abs(a - b) for a, b in zip(losses, reference, strict=True)) for run, losses in found.items()}

    print(f"| mesh | ZeRO | {' | '.join(WAYS)} |\n|---|---|{'---|' * len(WAYS)}")
    for dp, tp in chosen:
        for stage in range(4):
            cells = [worst.get(Run(dp, tp, stage, way)) for way in WAYS]
            if any(cell is not None for cell in cells):
                said = " | ".join("" if cell is None else f"{cell:.1e}" for cell in cells)
                print(f"| dp={dp} tp={tp} | {stage} | {said} |")
    seconds, most = time.perf_counter() - began, largest(worst.values())
    fell = f"the loss went from {reference[0]:.3f} to {reference[-1]:.3f}"
    print(f"\n{len(runs)} runs of {steps} steps in {seconds:.0f} s; {fell}; largest difference {most:.1e}")
    ok = most <= LIMIT
    if args.json:
        table = {f"dp={r.dp},tp={r.tp},zero={r.stage},{r.way}": d for r, d in worst.items()}
        print(json.dumps(dict(ok=ok, largest=most, limit=LIMIT, steps=steps, seconds=seconds, differences=table)))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
