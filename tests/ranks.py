"""Real ranks for the library's own tests: `sl.testing.ranks`, and launchers that set the environment."""

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

import shardlib as sl


@cache
def imported() -> None:
    """What tracing imports is imported before ranks are forked: seconds, which each would take."""
    with sl.make_mesh(dp=2, simulate=True):
        f = sl.jit(sl.shard_map(lambda x: sl.psum(x, "dp"), in_specs="n/dp", out_specs="n"))
        f.lower(sl.shard(torch.ones(2), "n/dp"))


def on_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    seconds: float = 60,
    env: Callable[[int], Mapping[str, str]] | None = None,
) -> list[Any]:
    """`fn(*args)` on n real ranks, as `sl.testing.ranks` runs it; the results in rank order.

    With `env`, which gives each rank's environment as a launcher would, `make_mesh` must start the process group.
    """
    imported()
    if env is None:
        return sl.testing.ranks(n, seconds=seconds)(fn)(*args) or [None] * n

    def launched(rank: int) -> Any:
        os.environ.update(env(rank))
        return fn(*args)

    return sl.testing.forked(n, launched, seconds=seconds)
