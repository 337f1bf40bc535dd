"""A function on forks of this process, and what each gave or raised."""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlib.watch import ANSWER


def forks(n: int, body: Callable[[int], Any], seconds: float) -> list[bytes]:
    """`body(rank)` on `n` forks of this process; the pickled results in rank order.

    Raises AssertionError with the traceback of every rank that raised, and the number of every rank that was not done
    after `seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")  # closures, and no second import of torch
        held = signal.getsignal(signal.SIGINT)
        children = [fork.Process(target=_child, args=(r, Path(folder), body, held)) for r in range(n)]
        try:
            with _uninterrupted(), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # forks beside threads; children start none before
                for p in children:
                    p.start()
            deadline = time.monotonic() + seconds
            for p in children:
                p.join(max(0.0, deadline - time.monotonic()))
                if p.exitcode != 0:
                    deadline = min(deadline, time.monotonic() + 2 * ANSWER)  # in which others say who failed
            said = {}
            for r, p in enumerate(children):
                if p.is_alive():
                    p.kill()
                    p.join()
                    said[r] = f"was not done after {seconds} s, or waited for a rank that failed"
                elif p.exitcode:
                    told = Path(folder, f"error{r}")
                    said[r] = told.read_text() if told.exists() else f"died with exit code {p.exitcode}"
        finally:  # none stays behind an interrupt
            for p in children:
                if p.pid is not None:
                    p.kill()
                    p.join()
        if said:
            raise AssertionError("\n".join(f"rank {r} of {n} {text}" for r, text in said.items()))
        return [Path(folder, f"result{r}").read_bytes() for r in range(n)]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Inside, an interrupt waits for the end. (Blocking the signal would not do: another thread might take it.)"""
    if threading.current_thread() is not threading.main_thread():  # which interrupts do not reach
        yield
        return
    came: list[int] = []
    held = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, held or signal.SIG_DFL)
        for number in came[:1]:
            signal.raise_signal(number)


def _compile_here() -> None:
    """Inductor compiles in this process: the workers that it has started before a fork answer to the parent alone."""
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None:
        config.compile_threads = 1


def _child(rank: int, folder: Path, body: Callable[[int], Any], interrupted: Any) -> None:
    try:
        signal.signal(signal.SIGINT, interrupted or signal.SIG_DFL)  # None: not set from Python
        torch.set_num_threads(1)  # OpenMP does not survive a fork
        _compile_here()
        (folder / f"result{rank}").write_bytes(pickle.dumps(body(rank)))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another still needs it
    except BaseException:
        (folder / f"error{rank}").write_text(f"raised\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # neither pytest's exit code nor gloo's destructors
