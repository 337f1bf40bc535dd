"""Real ranks for the library's own tests: `sl.testing.ranks`, and launchers that set the environment."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import shardlib as sl


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
    if env is None:
        return sl.testing.ranks(n, seconds=seconds)(fn)(*args) or [None] * n

    def launched(rank: int) -> Any:
        os.environ.update(env(rank))
        return fn(*args)

    return sl.testing.forked(n, launched, seconds=seconds)
