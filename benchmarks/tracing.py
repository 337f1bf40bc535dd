"""What it takes to trace a train step and to pass over its graphs: CPU seconds by depth, layers as a list and scanned.

    python -m benchmarks.tracing [--json]

The GPT of the other benchmarks (a list of blocks, dp=2) and that of examples/ (`scan` over a stack, remat, dp=2 tp=2),
both under ZeRO-3; every depth in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import shardlib as sl
from benchmarks.models import SIZES, Batch, Gpt, angles, loss, tokens, weights

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import gpt

CASES = [("list", 12), ("scan", 8), ("scan", 12), ("scan", 32)]


def listed(layers: int) -> Any:
    """The step, a state and a batch of the GPT whose blocks are a list."""
    size = replace(SIZES["tiny"], layers=layers)
    step = sl.step(loss, sl.optim.adamw(1e-3), layout=sl.zero(sl.specs(Gpt), stage=3))
    x, y = tokens(size, 0, 2)
    cos, sin = angles(size)
    return step, step.init(sl.shard(weights(size), sl.specs(Gpt))), sl.shard(Batch(x, y, cos, sin))


def scanned(layers: int) -> Any:
    sizes = gpt.sizes(vocab=64, layers=layers, model=32, heads=2)
    step = sl.step(gpt.loss, sl.optim.adamw(1e-3), layout=sl.zero(sl.specs(gpt.GPT), stage=3), clip=1.0)
    rows = torch.zeros(4, 8, dtype=torch.int64)
    return step, step.init(sl.init(gpt.GPT, sizes=sizes, key=sl.random.key(0))), sl.shard(gpt.Batch(rows, rows))


def traced(kind: str, layers: int) -> dict[str, Any]:
    """CPU seconds, and nodes of all graphs."""
    with sl.make_mesh(dp=2, tp=1 if kind == "list" else 2, simulate=True):
        step, state, batch = (listed if kind == "list" else scanned)(layers)
        began = time.process_time()
        program = sl.jit(step, donate_argnums=0).lower(state, batch)
        seconds = time.process_time() - began
    return dict(
        kind=kind, layers=layers, seconds=seconds, nodes=sum(len(m.graph.nodes) for m in program.program.values())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "LAYERS"), help="of these alone")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    if args.one:
        return print(json.dumps(traced(args.one[0], int(args.one[1]))))
    rows = []
    print("| layers | | CPU s | nodes |\n|---|---|---|---|")
    for kind, layers in CASES:
        command = [sys.executable, "-m", "benchmarks.tracing", "--one", kind, str(layers)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(f"| {layers} | {kind} | {rows[-1]['seconds']:.1f} | {rows[-1]['nodes']} |")
    if args.json:
        print(json.dumps(rows))
    return None


if __name__ == "__main__":
    main()
