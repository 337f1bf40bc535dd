"""bucket: many small collectives become few, with the same values."""

from typing import Any

import pytest
import torch
from lowered import MESH, Net, bucketed, compared, ops, rematted, state_and_batch, train, values
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import passes, tree

LIMITS = (1, 100, 10**9)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_c31_bucket(stage):
    """C31: within 5e-6 of the leaf's maximum in float32 whatever the limit; C25: leaves of several sizes."""
    with sl.make_mesh(MESH, simulate=True):
        made = compared(train(stage), *([bucketed(n)] for n in LIMITS), bitwise=False, dtype=torch.float32)
        plain, none, some, all_ = map(ops, made)
        assert len(plain) == len(none) >= len(some) >= len(all_) < len(plain)
        if stage == 3:
            assert all_.count("all_gather") == 1 and all_.count("psum_scatter") == 1


def test_c31_integer_valued_gradients_are_bitwise_the_same():
    """C31: a loss whose gradients are sums of small integers, in float32."""

    def counted(w: Net, batch: Tensor) -> sl.Mean:
        leaves = [sl.gather(x, "dp").sum() for x in tree.leaves(w)]
        return sl.Mean(sl.pending(batch.sum() * torch.stack(leaves).sum(), ("dp", "tp")), torch.ones(()))

    with sl.make_mesh(MESH, simulate=True):
        step = train(3, counted)
        state, batch = state_and_batch(step, torch.float32)
        batch = sl.shard(torch.arange(16.0 * 8).view(16, 8), "batch/dp model")
        plain, *others = (
            values(sl.jit(step, passes=use), state, batch) for use in ([], *([bucketed(n)] for n in LIMITS))
        )
        assert not all(torch.equal(a, b) for a, b in zip(plain, tree.leaves(sl.gather(state.params)), strict=False))
        for found in others:
            assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def c30_sums(simulate: bool) -> list[Any]:
    """Sums over 4 ranks: of 256, 1, 1, 1 in bfloat16, and of float32 values three times under one plan of buckets."""
    with sl.make_mesh(dp=4, simulate=simulate):
        run = sl.shard_map(lambda *xs: sl.psum(xs, "dp"), in_specs="n/dp", out_specs="n")
        (half,) = sl.gather(sl.jit(run)(sl.shard(torch.tensor([256.0, 1, 1, 1]).bfloat16(), "n/dp")))
        singles = [sl.shard(torch.sin(torch.arange(n * 4.0)), "n/dp") for n in (5, 3, 7)]
        plans = [sl.gather(sl.jit(run, passes=[bucketed(limit)])(*singles)) for limit in (10**9, 10**9, 1)]
        return [half.tolist(), *plans]


def test_c30_sums_of_16_bits_and_equal_plans():
    """C30: 260, the sum rounded once, not 256; equal plans give equal bits, others may differ by rounding."""
    for half, one, other, apart in (c30_sums(True), *on_ranks(4, lambda: c30_sums(False))):
        assert half == [260.0]
        for a, b, c in zip(one, other, apart, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(c, a, rtol=0, atol=5e-6 * a.abs().max().item())


def test_bucket_of_integers_is_exact_and_results_share_no_storage():
    """C31: sums of integers have the same bits under every plan."""

    def f(*xs: Tensor) -> Any:
        return sl.psum(xs, "dp")

    specs, shapes = ("n/dp", "n/dp k", "m k/dp"), ((20,), (8, 3), (7, 4))
    with sl.make_mesh(dp=4, simulate=True):
        args = [
            sl.shard(torch.arange(float(torch.Size(s).numel())).view(s), p) for s, p in zip(shapes, specs, strict=True)
        ]
        run = sl.shard_map(f, in_specs=specs, out_specs=("n", "n k", "m k"))
        plain, merged = sl.jit(run, passes=[]), sl.jit(run, passes=[bucketed(1 << 30)])
        out = merged(*args)
        for x, y in zip(sl.gather(plain(*args)), sl.gather(out), strict=True):
            assert torch.equal(x, y)
        assert ops(merged.traces[0].module) == ["psum"]
        assert len({x.shards[0].untyped_storage().data_ptr() for x in out}) == 3


def test_bucket_of_slices_of_one_leaf_that_are_cut_after_the_first_gather():
    def f(a: Tensor, w: Tensor) -> Tensor:
        total = sl.all_gather("m/dp -> m", a).sum()
        for piece in w.unbind(0):
            total = total + sl.all_gather("m/dp -> m", piece).square().sum()
        return total[None]

    run = sl.shard_map(f, in_specs=("m/dp", "layers m/dp"), out_specs="n/dp")
    with sl.make_mesh(dp=2, simulate=True):
        args = sl.shard(torch.arange(4.0), "m/dp"), sl.shard(torch.arange(12.0).view(3, 4), "layers m/dp")
        jitted = sl.jit(run, passes=[passes.bucket])
        assert [c.op for c in jitted.lower(*args).collectives()] == ["all_gather"]
        assert torch.equal(sl.gather(jitted(*args)), sl.gather(run(*args)))


def test_bucket_keeps_forward_backward_and_each_remat_apart():
    with sl.make_mesh(MESH, simulate=True):
        _, module = compared(train(f=rematted), [bucketed(1 << 30)], bitwise=False)
        assert ops(module).count("all_gather") == 1 + 2  # the forward's, and one for each layer computed again
