"""What keyed random numbers cost on a CPU, beside torch's own generator: nanoseconds per element on one thread.

    python -m benchmarks.randomness [--json]

The fastest of some rounds, of 4 million float32 elements. On a GPU both are one kernel: kernels/threefry.py.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from shardlib import random

N, ROUNDS = 4_000_000, 7


def cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Ours and torch's."""
    key, x = random.key(0), torch.randn(N)
    return {
        "bits": (lambda: random.bits(key, (N,)), lambda: torch.randint(2**32, (N,))),
        "uniform": (lambda: random.uniform(key, (N,)), lambda: torch.rand(N)),
        "normal": (lambda: random.normal(key, (N,)), lambda: torch.randn(N)),
        "bernoulli": (lambda: random.bernoulli(key, 0.9, (N,)), lambda: torch.rand(N) < 0.9),
        "stochastic_round": (lambda: random.stochastic_round(key, x), lambda: x.to(torch.bfloat16)),
    }


def seconds(f: Callable[[], Any]) -> float:
    """The fastest of some calls."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        f()
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: [seconds(f) / N * 1e9 for f in pair] for name, pair in cases().items()}
    print("| float32 | shardlib, ns | torch, ns |\n|---|---:|---:|")
    for name, (ours, theirs) in rows.items():
        print(f"| {name} | {ours:.1f} | {theirs:.1f}{' (to nearest)' * (name == 'stochastic_round')} |")
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
