"""Bytes of model state that a rank holds in a train step, counted in the traced program, against Table 1 of ZeRO.

    python -m benchmarks.zero_memory [--json]

The setting of the paper (Rajbhandari et al. 2020): parameters and gradients in 16 bits; float32 master, momentum and
variance in the optimizer's state, as `optim.adamw` keeps them for 16-bit parameters: 16 bytes per parameter. `counted`
is the most that is alive at any node of parameters at rest, gradients and optimizer state, which is what the paper
counts; `peak` the most of everything: gathered parameters, activations and what an op needs too. The state is donated.
Nothing runs: the step is traced on abstract arrays, for two layers as wide as the total asks for, which takes seconds
where the paper's depth takes minutes (and makes what is gathered at once, half of the model, more than it is there).
"""

import argparse
import json
import sys
from typing import Any

import torch
from torch import Tensor

import shardlib as sl
from shardlib.graph.memory import Point, alive

LIMIT = 0.01  # of the formula
SEQ, BF16 = 128, torch.bfloat16
SHAPES = {"7.5B": (7.5e9, 17408), "128B": (128e9, 72704), "1T": (1e12, 203776)}  # parameters; width, of two layers
DEGREES = (1, 4, 16, 64, 256, 1024)
STAGES = ("Pos", "Pos+g", "Pos+g+p")
# Table 1 of the paper: GB at each degree of data parallelism.
PAPER = {
    ("7.5B", 1): (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    ("7.5B", 2): (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    ("7.5B", 3): (120, 30, 7.5, 1.88, 0.47, 0.12),
    ("128B", 1): (2048, 896, 608, 536, 518, 513),
    ("128B", 2): (2048, 704, 368, 284, 263, 257),
    ("128B", 3): (2048, 512, 128, 32, 8, 2),
    ("1T", 1): (16000, 7000, 4750, 4187, 4046, 4011),
    ("1T", 2): (16000, 5500, 2875, 2218, 2054, 2013),
    ("1T", 3): (16000, 4000, 1000, 250, 62.5, 15.6),
}


@sl.pytree
class Block:
    w_q: Tensor = sl.spec("model/dp inner", dtype=BF16)
    w_k: Tensor = sl.spec("model/dp inner", dtype=BF16)
    w_v: Tensor = sl.spec("model/dp inner", dtype=BF16)
    w_o: Tensor = sl.spec("inner model/dp", dtype=BF16)
    w_in: Tensor = sl.spec("model/dp hidden", dtype=BF16)
    w_out: Tensor = sl.spec("hidden model/dp", dtype=BF16)


@sl.pytree
class Model:
    blocks: list[Block] = sl.stack("layers")


def block(w: Block, x: Tensor) -> Tensor:
    w = sl.gather(w, "dp")
    weights = torch.softmax((x @ w.w_q) @ (x @ w.w_k).mT, -1)
    x = x + weights @ (x @ w.w_v) @ w.w_o
    return x + torch.relu(x @ w.w_in) @ w.w_out


def loss(w: Model, batch: dict[str, Tensor]) -> sl.Mean:
    x = batch["x"]
    for each in w.blocks:
        x = sl.remat(block)(each, x)
    return sl.Mean.of("batch/dp seq model", x.float() ** 2)


def points(model: str, degree: int, stage: int, count: int = 1) -> list[Point]:
    """What the traced step keeps alive at every node; `count` micro-batches."""
    total, width = SHAPES[model]
    sizes = dict(layers=2, model=width, inner=width, hidden=round((total / 2 - 4 * width**2) / (2 * width)))
    with sl.make_mesh(dp=degree, simulate=True):
        train = sl.step(loss, sl.optim.adamw(1e-3), layout=sl.zero(sl.specs(Model), stage=stage), accumulate=count)

        def made() -> Any:
            x = sl.shard(torch.zeros(degree * count, SEQ, width, dtype=BF16), "batch/dp seq model")
            return train.init(sl.abstract(Model, sizes)), {"x": x}

        return alive(sl.jit(train, donate_argnums=0).lower(*sl.abstract(made)).module, donated=(0,))


def formula(model: str, degree: int, stage: int, count: int = 1) -> float:
    """Bytes of state by Table 1; but stage 1 scatters the gradients of one micro-batch as they are made, as stage 2
    does. Several micro-batches add up in float32."""
    split = [degree if stage >= least else 1 for least in (3, 1 if count == 1 else 2, 1)]
    return SHAPES[model][0] * sum(b / n for b, n in zip((2, 2 if count == 1 else 4, 12), split, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    cases = [(m, n, stage, 1) for m in SHAPES for n in DEGREES for stage in (1, 2, 3)]
    cases += [("7.5B", 64, stage, 2) for stage in (1, 2, 3)]
    print(f"{'GB':<8}{'ranks':>6}{'M':>3}  {'':<8}{'paper':>9}{'formula':>10}{'counted':>10}{'ratio':>8}{'peak':>10}")
    table, worst = [], 0.0
    for model, degree, stage, count in cases:
        found = points(model, degree, stage, count)
        state, peak = max(p.state for p in found), max(p.total for p in found)
        wanted = formula(model, degree, stage, count)
        said = PAPER[model, stage][DEGREES.index(degree)] if count == 1 else None
        worst = max(worst, abs(state / wanted - 1))
        row = dict(model=model, ranks=degree, count=count, what=STAGES[stage - 1], paper=said)
        table.append(row | dict(wanted=wanted, found=state, peak=peak))
        print(
            f"{model:<8}{degree:>6}{count:>3}  {STAGES[stage - 1]:<8}{said or '':>9}{wanted / 1e9:>10.2f}"
            f"{state / 1e9:>10.2f}{state / wanted:>8.4f}{peak / 1e9:>10.2f}",
            flush=True,
        )
    ok = worst <= LIMIT
    print(f"\nlargest difference {worst:.2%} of the formula; {'within' if ok else 'beyond'} {LIMIT:.0%}")
    if args.json:
        print(json.dumps(dict(ok=ok, worst=worst, limit=LIMIT, rows=table)))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
