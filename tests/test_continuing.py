"""Going on from a file: C34, C38."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import tree

NET = Net(layers=2, attention=True, seq_parallel=True, dropout=0.25, remat="dots")
ROWS, SEQ = 8, 4


def trained(mesh: sl.Mesh, path: Path, steps: range, save: bool = False) -> tuple[Any, list[float]]:
    """The whole state after some steps, from the newest file in `path` where there is one, and their losses."""
    step = sl.jit(sl.step(NET.loss, sl.optim.adamw(1e-2), layout=sl.zero(specs(), stage=3), accumulate=2))
    losses = []
    with mesh:
        state = step.init(sl.shard(NET.params(), specs()), key=sl.random.key(7))
        if steps.start:
            newest = sl.latest(path)
            assert newest is not None
            state = sl.restore(newest, like=state)
        for i in steps:
            state, metrics = step(state, sl.shard(NET.batch(ROWS, SEQ, i), NET.batch_spec))
            losses.append(metrics["loss"].item())
        if save:
            sl.save(path, state, step=steps.stop)
        return sl.gather(state), losses


def specs() -> Any:
    shapes = NET.shapes()
    block = shapes.pop("block")
    return {n: s for n, (s, _) in shapes.items()} | {
        "blocks": {n: sl.stack(s, "layers") for n, (s, _) in block.items()}
    }


def test_c38_a_run_that_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """6 steps against 3 + save + restore + 3, with dropout; on another mesh with the same masks."""
    mesh = sl.make_mesh(dp=2, tp=2, simulate=True)
    whole, losses = trained(mesh, tmp_path, range(6))
    _, first = trained(mesh, tmp_path, range(3), save=True)
    again, rest = trained(mesh, tmp_path, range(3, 6))
    assert first + rest == losses
    for x, y in zip(tree.leaves(again), tree.leaves(whole), strict=True):
        assert torch.equal(x, y)
    _, other = trained(sl.make_mesh(dp=4, tp=1, simulate=True), tmp_path, range(3, 6))
    assert other == pytest.approx(rest, rel=1e-8)
    plain = dataclasses.replace(NET, dropout=0.0)
    assert first[0] != pytest.approx(plain.plain(NET.params(), NET.batch(ROWS, SEQ, 0))[0].item(), rel=1e-3)


def test_c34_moments_follow_the_path(tmp_path: Path) -> None:
    """Leaves of one shape, which rank 1 has in another order, before and after."""

    def loss(p: dict[str, Tensor], batch: Tensor) -> sl.Mean:
        p = sl.gather(p, "dp")
        return sl.Mean.of("batch/dp", batch * (p["a"] + 2 * p["b"]).sum())

    def body() -> Any:
        with sl.make_mesh(dp=2) as mesh:
            names = "ab" if mesh.rank == 0 else "ba"
            step = sl.step(loss, sl.optim.adamw(0.1))
            fresh = step.init(sl.shard({n: torch.ones(4) for n in names}, "n/dp"))
            state, _ = step(fresh, sl.shard(torch.ones(2), "batch/dp"))
            again = sl.restore(sl.save(tmp_path, state, step=1), like=fresh)
            return [sl.gather(dict(sorted(s.opt.mu.items()))) for s in (state, again)]

    for found in on_ranks(2, body):
        for mu in found:
            assert torch.allclose(mu["a"], torch.tensor(0.1)) and torch.allclose(mu["b"], torch.tensor(0.2))
