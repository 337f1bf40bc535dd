"""bfloat16 and float16 train as float32 does: the GPT of examples/ on Shakespeare, byte by byte, 300 steps.

    python -m benchmarks.precision [--quick] [--json]

The same weights and batches in every precision, for each seed: float32 on one rank, the others on two simulated ones
(dp=2, ZeRO-3). In float16, whose loss scale starts at 2**16, the gradient of one rank, each in turn, overflows every 20
steps: those steps are skipped. Prints the mean loss of the last 20 steps. Exits with 1 where bfloat16 is off by more
than 0.5 % of float32 or float16 by more than 1 %, where float32 falls by less than a nat, or where other steps than
those are skipped.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import shardlib as sl
from examples import gpt, text

STEPS, LAST, EVERY = 300, 20, 20
ROWS, SEQ = 16, 32
LIMITS = {"bf16": 0.005, "f16": 0.01}
SIZES = gpt.sizes(vocab=128, layers=2, model=32, heads=4)


@sl.pytree
class Batch:
    """What the model reads, and for each rank what the gradient that it has from a term without weight is made of."""

    text: gpt.Batch
    fault: Tensor = sl.spec("replica/dp")


def loss(w: gpt.GPT, batch: Batch) -> sl.Mean:
    """The model's, and nothing times a term that overflows in 16 bits where `fault` is large."""
    spoiled = batch.fault.to(w.norm.dtype) * sl.gather(w.norm, "dp").sum()
    return gpt.loss(w, batch.text) + 0.0 * sl.Mean.of("replica/dp", spoiled)


@dataclass
class Run:
    """Losses of the steps that were not skipped, how many were, and the scale at the end."""

    losses: list[float]
    skipped: int = 0
    scale: float | None = None

    @property
    def last(self) -> float:
        return sum(self.losses[-LAST:]) / LAST


def runs(compute: str, seeds: Sequence[int], steps: int, tokens: Tensor) -> list[Run]:
    """A run of `steps` batches in a precision for each seed; in float16 with planted overflows."""
    scale = sl.dynamic_scale(2.0**16, window=2 * EVERY, hysteresis=1) if compute == "f16" else None
    rate = sl.optim.warmup_cosine(5e-3, warmup=steps // 10, steps=steps, end=5e-4)
    train = sl.step(
        loss,
        sl.optim.adamw(rate, b2=0.95, weight_decay=0.1, mask=sl.optim.matrices),
        layout=sl.zero(sl.specs(gpt.GPT), stage=3),
        precision=sl.precision(compute, scale=scale),
        clip=1.0,
    )
    train, out = sl.jit(train, donate_argnums=0), []
    with sl.make_mesh(dp=1 if compute == "f32" else 2, tp=1, simulate=True) as mesh:
        for seed in seeds:
            state, found = train.init(sl.init(gpt.GPT, sizes=SIZES, key=sl.random.key(seed))), []
            for i in range(steps):
                fault = torch.ones(mesh.total)
                if compute == "f16" and i % EVERY == EVERY // 2:
                    fault[i // EVERY % mesh.total] = 1e9
                rows = gpt.Batch(**text.batch_at(tokens, i, ROWS, SEQ, seed))
                state, metrics = train(state, sl.shard(Batch(text=rows, fault=fault)))
                found.append(metrics)
            kept = [m["loss"].item() for m in found if not m.get("skipped", 0)]
            out.append(Run(kept, len(found) - len(kept), found[-1]["scale"].item() if scale else None))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and 60 steps, no limits")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)

    began, steps, seeds = time.perf_counter(), 60 if args.quick else STEPS, range(1 if args.quick else 3)
    tokens = torch.tensor(list(text.DATA.read_text(encoding="utf-8").encode()))
    made = {compute: runs(compute, seeds, steps, tokens) for compute in ("f32", "bf16", "f16")}
    planted = len(range(EVERY // 2, steps, EVERY))

    print(f"| seed | float32 | bfloat16 | float16 | skipped of {steps} | scale in the end |\n|---|---|---|---|---|---|")
    worst = dict.fromkeys(LIMITS, 0.0)
    for seed, base, bf16, f16 in zip(seeds, made["f32"], made["bf16"], made["f16"], strict=True):
        cells = []
        for name, found in (("bf16", bf16), ("f16", f16)):
            off = found.last / base.last - 1
            worst[name] = max(worst[name], abs(off))
            cells.append(f"{found.last:.4f} ({off:+.2%})")
        print(f"| {seed} | {base.last:.4f} | {' | '.join(cells)} | {f16.skipped} | {f16.scale:g} |")
    last = [r.last for r in made["f32"]]
    spread, fell = max(last) / min(last) - 1, min(r.losses[0] - r.last for r in made["f32"])
    seconds = time.perf_counter() - began
    print(
        f"\nmean loss of the last {LAST} of {steps} steps; float32 fell by {fell:.2f} nats, its seeds differ by "
        f"{spread:.2%}, from it {', '.join(f'{name} by {x:.2%}' for name, x in worst.items())}; {seconds:.0f} s"
    )
    close = all(worst[name] <= limit for name, limit in LIMITS.items())
    ok = args.quick or (fell >= 1 and close and all(r.skipped == planted for r in made["f16"]))
    if args.json:
        table = {name: [vars(r) | {"losses": r.losses[-LAST:]} for r in found] for name, found in made.items()}
        print(
            json.dumps(dict(ok=ok, worst=worst, limits=LIMITS, fell=fell, spread=spread, planted=planted, runs=table))
        )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
