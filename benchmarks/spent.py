"""Where the CPU time of a step goes on one rank, by kind of work: for `benchmarks.compare --spent`."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode  # what sees every op, backward ones too

REST, THREADS, OTHER = "outside ops", "other threads", "element-wise"
# each op counts for the first kind one of whose words is in its name, in torch's words or shardlib's
KINDS = {
    "waits": "wait_tensor barrier",
    "collectives begun": "c10d gloo posted_gather posted_exchange posted_scatter",
    "attention": "attention",
    "products": "mm linear matmul",
    "optimizer": "adam",
    "norms, lookup, loss": "norm softmax nll cross_entropy loss embedding index gather",
    "copies": "copy clone cat stack pack fill zero empty",
}


def kind_of(op: str) -> str:
    """The kind of an op."""
    return next((kind for kind, words in KINDS.items() if any(w in op.lower() for w in words.split())), OTHER)


class _Timed(TorchDispatchMode):
    """CPU seconds of this thread inside ops, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.of: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.thread_time()
        out = func(*args, **(kwargs or {}))
        self.of[kind_of(str(func))] += time.thread_time() - began
        return out


def spent(step: Callable[[int], Any], numbers: Sequence[int]) -> dict[str, float]:
    """Milliseconds of CPU a step, means over steps of these numbers, taken twice: as they are, for all threads and for
    this one, then with a clock around every op (some 10 us each, so of large sizes).

    `outside ops` is what this thread spends beside: Python, dispatching, and what is compiled; `other threads` send,
    receive and add (gloo).
    """
    began = time.process_time(), time.thread_time()
    for n in numbers:
        step(n)
    whole, main = time.process_time() - began[0], time.thread_time() - began[1]
    with _Timed() as timed:
        for n in numbers:
            step(n)
    rest = {REST: main - sum(timed.of.values()), THREADS: whole - main}
    return {kind: 1e3 * s / len(numbers) for kind, s in {"CPU": whole, **timed.of, **rest}.items()}


def table(found: dict[str, dict[str, float]]) -> str:
    """A row for each kind, a column for each peer."""
    rows = ["CPU", *KINDS, OTHER, REST, THREADS]
    lines = [f"{'ms a step':<22}" + "".join(f"{name:>26}" for name in found)]
    return "\n".join(lines + [f"{k:<22}" + "".join(f"{f.get(k, 0):26.1f}" for f in found.values()) for k in rows])
