"""Where the CPU time of a step goes on one rank, by kind of work: for `benchmarks.compare --spent`."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

WAITS, REST, THREADS = "waits (wall)", "Python, dispatch", "other threads"
# each op counts for the first kind one of whose words is in its name, in torch's words or shardlib's
KINDS = {
    WAITS: "wait_tensor barrier",
    "collectives begun": "c10d gloo",
    "attention": "attention",
    "products": "mm linear matmul",
    "optimizer": "adam",
    "norms, lookup, loss": "norm softmax nll cross_entropy loss embedding index gather",
    "copies": "copy clone cat stack pack fill zero empty",
}
OTHER = "element-wise"


def kind_of(op: str) -> str:
    """The kind of an op."""
    return next((kind for kind, words in KINDS.items() if any(w in op.lower() for w in words.split())), OTHER)


def spent(step: Callable[[int], Any], numbers: Sequence[int]) -> dict[str, float]:
    """Milliseconds a step, means over steps of these numbers, taken twice: as they are, for CPU time of all threads and
    of this one, then under torch's profiler, for seconds inside ops (wall time: this one's CPU time, but for waits).

    `Python, dispatch` is what this thread spends outside ops; `other threads` send, receive and add (gloo).
    """
    began = time.process_time(), time.thread_time()
    for n in numbers:
        step(n)
    whole, main = time.process_time() - began[0], time.thread_time() - began[1]
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for n in numbers:
            step(n)
    of: defaultdict[str, float] = defaultdict(float)
    for event in found.key_averages():
        of[kind_of(event.key)] += event.self_cpu_time_total / 1e6  # type: ignore[attr-defined]
    of[REST], of[THREADS] = main - sum(s for kind, s in of.items() if kind != WAITS), whole - main
    return {"CPU": 1e3 * whole / len(numbers)} | {k: 1e3 * s / len(numbers) for k, s in of.items()}


def table(found: dict[str, dict[str, float]]) -> str:
    """A row for each kind, a column for each peer."""
    rows = ["CPU", *KINDS, OTHER, REST, THREADS]
    lines = [f"{'ms a step':<22}" + "".join(f"{name:>26}" for name in found)]
    return "\n".join(lines + [f"{k:<22}" + "".join(f"{f.get(k, 0):26.1f}" for f in found.values()) for k in rows])
