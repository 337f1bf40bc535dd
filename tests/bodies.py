"""Per-device functions on a small simulated mesh, for tests of derivatives."""

from collections.abc import Callable
from typing import Any

import torch

import shardlib as sl


def on(body: Callable[..., Any], *args: tuple[Any, Any], out: Any = "...", mesh: dict[str, int] | None = None) -> Any:
    """The global result of `body` on dp=2, tp=1 or `mesh`, of arguments with their specs (None: as they are)."""
    with sl.make_mesh(mesh or dict(dp=2, tp=1), simulate=True):
        given = [sl.shard(x, spec) if spec is not None else x for x, spec in args]
        return sl.gather(sl.shard_map(body, in_specs=None, out_specs=out)(*given))


def assert_close(found: Any, wanted: Any) -> None:
    """But for rounding in float64."""
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
