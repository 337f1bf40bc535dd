"""Real ranks in a test: a function on forks of this process, with gloo between them."""

import functools
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def ranks(n: int, *, seconds: float = 60) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: `f` runs on `n` real ranks, processes that talk gloo; `f(...)` gives their results in rank order.

    Each is a fork of this process with one thread, so `f` may be a closure; results are pickled. The process group is
    there already: `f` calls `make_mesh`. Where no rank returns anything, the result is None: a test may be decorated.
    Raises AssertionError with the traceback of every rank that raised, and the number of every rank that was not done
    after `seconds`.
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
    """`body(rank)` on `n` forks of this process, which have no process group yet; the results in rank order.

    For launchers of one's own; `ranks` is the usual way. Raises as `ranks` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")  # closures, and no second import of torch
        children = [fork.Process(target=_child, args=(r, Path(folder), body)) for r in range(n)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads; children start none before
            for p in children:
                p.start()
        deadline = time.monotonic() + seconds
        for p in children:
            p.join(max(0.0, deadline - time.monotonic()))
            if p.exitcode != 0:
                deadline = min(deadline, time.monotonic() + 2)  # the others wait for a rank that failed or is late
        said = {}
        for r, p in enumerate(children):
            if p.is_alive():
                p.kill()
                p.join()
                said[r] = f"was not done after {seconds} s, or waited for a rank that failed"
            elif p.exitcode:
                told = Path(folder, f"error{r}")
                said[r] = told.read_text() if told.exists() else f"died with exit code {p.exitcode}"
        if said:
            raise AssertionError("\n".join(f"rank {r} of {n} {text}" for r, text in said.items()))
        return [pickle.loads(Path(folder, f"result{r}").read_bytes()) for r in range(n)]


def _child(rank: int, folder: Path, body: Callable[[int], Any]) -> None:
    try:
        torch.set_num_threads(1)  # OpenMP does not survive a fork
        (folder / f"result{rank}").write_bytes(pickle.dumps(body(rank)))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another still needs it
    except BaseException:
        (folder / f"error{rank}").write_text(f"raised\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # neither pytest's exit code nor gloo's destructors
