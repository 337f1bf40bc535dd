"""Real ranks for tests: a function on n forked processes with gloo between them."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    seconds: float = 60,
    env: Callable[[int], Mapping[str, str]] | None = None,
) -> list[Any]:
    """`fn(*args)` on n ranks, each a fork of this process with one thread; the results in rank order.

    The process group is there already; with `env`, which gives each rank's environment, `make_mesh` must start it.
    Results are pickled. An AssertionError names every rank that raised, with its traceback, or was late.
    """
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")  # closures, and no second import of torch
        ranks = [fork.Process(target=_child, args=(r, n, Path(folder), fn, args, env)) for r in range(n)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads; children start none before
            for p in ranks:
                p.start()
        deadline = time.monotonic() + seconds
        for p in ranks:
            p.join(max(0.0, deadline - time.monotonic()))
            if p.exitcode != 0:
                deadline = min(deadline, time.monotonic() + 2)  # the others wait for a rank that failed or is late
        said = {}
        for r, p in enumerate(ranks):
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


def _child(r: int, n: int, folder: Path, fn: Callable[..., Any], args: Any, env: Any) -> None:
    try:
        torch.set_num_threads(1)  # OpenMP does not survive a fork
        if env is None:
            dist.init_process_group("gloo", f"file://{folder}/store", rank=r, world_size=n)
        else:
            os.environ.update(env(r))
        (folder / f"result{r}").write_bytes(pickle.dumps(fn(*args)))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another still needs it
    except BaseException:
        (folder / f"error{r}").write_text(f"raised\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # neither pytest's exit code nor gloo's destructors
