"""Real ranks in a test: a function on processes of this machine, with gloo between them."""

import functools
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardlib.testing.forks import forks
from shardlib.testing.server import served


def ranks(n: int, *, seconds: float = 60) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: `f` runs on `n` real ranks, processes that talk gloo; `f(...)` gives their results in rank order.

    Each has one thread; `f` may be a closure; results are pickled. The process group is there already: `f` calls
    `make_mesh`. Where no rank returns anything, the result is None: a test may be decorated. Raises AssertionError with
    the traceback of every rank that raised, and the number of every rank that was not done after `seconds`.
    """

    def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def run(*args: Any, **options: Any) -> list[Any] | None:
            with tempfile.TemporaryDirectory() as folder:

                def body(rank: int) -> Any:
                    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=n)
                    return f(*args, **options)

                results = forked(n, body, seconds=seconds)
            return None if all(x is None for x in results) else results

        return run

    return decorate


def forked(n: int, body: Callable[[int], Any], *, seconds: float = 60) -> list[Any]:
    """`body(rank)` on `n` forked processes, which have no process group yet; the results in rank order.

    For launchers of one's own; `ranks` is the usual way. Raises as `ranks` does. They are forks of this process, or,
    where torch is built for GPUs, of a server (`testing.server`): `body` then travels by cloudpickle, and ranks see the
    environment, directory, default dtype and random state of this process, but nothing else that changed since it ran.
    """
    # A GPU build starts threads for backward, even without a GPU once a step was traced; then no fork can run any.
    run = forks if torch.accelerator.current_accelerator() is None else served
    return [pickle.loads(result) for result in run(n, body, seconds)]
