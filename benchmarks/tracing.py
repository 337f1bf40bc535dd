"""What it takes to trace a train step, pass over its graphs and compile them: CPU seconds, and how depth changes them.

    python -m benchmarks.tracing [--only list,scan,regional] [--rounds 3] [--json]

The GPT of the other benchmarks (a list of blocks, dp=2) and that of examples/ (`scan` over a stack, remat, dp=2 tp=2),
both under ZeRO-3; each figure from a process of its own. `list`: 12 layers traced. `scan`: 32 layers over 8, traced.
`regional`: 32 over 8, in the backend: what compiling takes, compiler processes included, with empty caches, after one
small graph has paid for what every first compilation takes (imports, precompiled headers).
Of a ratio each round measures both depths, one right after the other.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import shardlib as sl
from benchmarks.models import SIZES, Batch, Gpt, angles, loss, tokens, weights
from shardlib.graph.program import runner

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import gpt

# kind: (depths, what may be reached: seconds for one depth, the ratio of the second to the first for two)
CASES: dict[str, tuple[tuple[int, ...], float]] = {
    "list": ((12,), 10.0),
    "scan": ((8, 32), 1.3),
    "regional": ((8, 32), 1.3),
}


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


def cpu(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process and of those that it waited for, and the result."""

    def spent() -> float:
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(u.ru_utime + u.ru_stime for u in used)

    began = spent()
    out = run()
    return spent() - began, out


def measured(kind: str, layers: int) -> dict[str, float]:
    """CPU seconds, and nodes of all graphs."""
    backend = "regional" if kind == "regional" else "graph"
    with sl.make_mesh(dp=2, tp=1 if kind == "list" else 2, simulate=True):
        step, state, batch = (listed if kind == "list" else scanned)(layers)
        seconds, lowered = cpu(lambda: sl.jit(step, donate_argnums=0, backend=backend).lower(state, batch))
        if kind == "regional":
            with sl.make_mesh(dp=1):
                sl.jit(lambda x: (x * 2).sin(), backend=backend)(torch.ones(8))
            seconds, _ = cpu(lambda: runner(lowered.module, backend))
    return dict(seconds=seconds, nodes=sum(len(m.graph.nodes) for m in lowered.program.values()))


def apart(kind: str, layers: int) -> dict[str, float]:
    """`measured` in a process of its own, with empty caches of compiled code."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | dict(TORCHINDUCTOR_CACHE_DIR=cache, TORCHINDUCTOR_COMPILE_THREADS="1")
        command = [sys.executable, "-m", "benchmarks.tracing", "--one", kind, str(layers)]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    if args.one:
        return print(json.dumps(measured(args.one[0], int(args.one[1]))))
    found = {}
    print("| | layers | nodes | CPU s | ratio | at most |\n|---|---|---|---|---|---|")
    for kind in args.only.split(","):
        depths, limit = CASES[kind]
        rounds = [[apart(kind, n) for n in depths] for _ in range(args.rounds)]
        ratios = [pair[1]["seconds"] / pair[0]["seconds"] for pair in rounds if len(pair) > 1]
        for i, n in enumerate(depths):
            seconds = [r[i]["seconds"] for r in rounds]
            ratio = said(ratios) if i else ""
            most = f"{limit} s" if len(depths) == 1 else f"{limit}" if i else ""
            print(f"| {kind} | {n} | {rounds[0][i]['nodes']} | {said(seconds)} | {ratio} | {most} |", flush=True)
        found[kind] = dict(depths=depths, limit=limit, rounds=rounds, ratios=ratios)
    if args.json:
        print(json.dumps(found))
    return None


def said(values: list[float]) -> str:
    """The median, the least and the largest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
