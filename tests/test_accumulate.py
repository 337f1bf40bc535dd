"""Micro-batches: how a batch is cut, that every token counts once, what does not fit."""

import re
from typing import Any

import pytest
import torch
from stepped import BATCH, W, entered, f64, linear, mesh, scaled, updated

import shardlib as sl
from shardlib.accumulate import cut
from shardlib.types import region


@pytest.mark.parametrize("axes, count", [((2, 1), 1), ((1, 1), 2), ((1, 3), 1), ((2, 3), 1), ((1, 1), 1), ((1, 3), 2)])
def test_c06_every_token_counts_once(axes, count):
    x = f64([4, 7, 9], [0, 0, 0])
    weight = f64([1, 0, 0], [1, 1, 1])
    batch = {"x": (x, "batch/dp seq/cp"), "weight": (weight, "batch/dp seq/cp")}
    new, metrics = updated(mesh(dp=axes[0], cp=axes[1]), scaled, {"w": (f64(1)[0], "")}, batch, accumulate=count)
    assert (metrics["loss"].item(), metrics["tokens"].item(), new["w"].item()) == (
        1.0,
        4.0,
        0.0,
    )  # a mean of means: 2.0


@pytest.mark.parametrize("rows", [[[0, 0, 0], [1, 1, 1]], [[0, 0, 0], [0, 0, 0]]])
@pytest.mark.parametrize("count", [1, 2])
def test_ranks_and_batches_without_tokens(rows, count):
    m, x, weight = (
        mesh(dp=2, cp=1),
        f64([4, 7, 9], [1, 2, 3]).repeat_interleave(count, 0),
        f64(*rows).repeat_interleave(count, 0),
    )
    batch = {"x": (x, "batch/dp seq/cp"), "weight": (weight, "batch/dp seq/cp")}
    new, metrics = updated(m, scaled, {"w": (f64(1)[0], "")}, batch, accumulate=count)
    assert metrics["loss"].item() == metrics["grad_norm"].item() == (2.0 if weight.any() else 0.0)
    assert new["w"].item() == 1 - metrics["loss"].item()


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"microbatch": 1}])
def test_c09_the_last_microbatch_is_reduced_too(options):
    def loss(p, batch):
        return sl.Mean.of("batch/dp", p["w"] * batch["x"])

    new, metrics = updated(mesh(dp=2), loss, {"w": (f64(0)[0], "")}, {"x": (f64(1, 2, 3, 6), "batch/dp")}, **options)
    assert new["w"].item() == -3.0  # rank 0 alone has 2 or 4 when a reduction is missed
    assert metrics["loss"].item() == 0


def test_terms_have_weights_of_their_own():
    def loss(p, batch):
        w = p["w"]
        return sl.Mean.of("batch/dp", w * batch["x"], batch["weight"]) + 0.5 * sl.Mean.of(
            "batch/dp", w * w * batch["x"]
        )

    batch = {"x": (f64(1, 2, 3, 6), "batch/dp"), "weight": (f64(0, 1, 0, 3), "batch/dp")}
    for count in (1, 2):
        new, metrics = updated(mesh(dp=2), loss, {"w": (f64(2)[0], "")}, batch, accumulate=count)
        assert metrics["loss"].item() == 2 * 20 / 4 + 0.5 * 4 * 12 / 4
        assert metrics["tokens"].item() == 4
        assert new["w"].item() == 2 - (20 / 4 + 0.5 * 4 * 12 / 4)


def test_micro_batches_are_contiguous_runs_of_local_rows():
    def pieces(batch: Any) -> Any:
        for p in cut(batch, "batch", 2):
            shapes = {name: region().leaves.get(x).shape for name, x in p.items()}  # type: ignore[union-attr]
            assert shapes == {"x": (4, 3), "late": (3, 4), "table": (5,)}
        return tuple((p["x"], p["late"]) for p in cut(batch, "batch", 2))

    x = torch.arange(24).view(8, 3)
    with mesh(dp=2):
        batch = entered({"x": (x, "batch/dp seq"), "late": (x.T, "seq batch/dp"), "table": (torch.arange(5), "n")})
        (a, late_a), (b, late_b) = sl.shard_map(pieces, in_specs=None, out_specs=None)(batch)
        assert torch.equal(sl.gather(a), x[[0, 1, 4, 5]]) and torch.equal(sl.gather(b), x[[2, 3, 6, 7]])
        assert torch.equal(sl.gather(late_a), x[[0, 1, 4, 5]].T) and torch.equal(sl.gather(late_b), x[[2, 3, 6, 7]].T)


@pytest.mark.parametrize(
    "options, said",
    [
        (
            dict(accumulate=3),
            "into 3 equal parts, but `batch.x` (`batch/dp`) has 4 rows, 2 on each rank of dp.\n"
            "  Take accumulate=1 or 2, or a number of rows that is a multiple of 6",
        ),
        (dict(accumulate=4), "step: accumulate=4 cuts the rows of each rank into 4 equal parts, but"),
        (dict(accumulate=0), "step: accumulate=0 cuts"),
        (
            dict(microbatch=3),
            "into parts of 3, but `batch.x` (`batch/dp`) has 4 rows, 2 on each rank of dp.\n"
            "  Take microbatch=1 or 2, or a number of rows that is a multiple of 6",
        ),
        (dict(microbatch=0), "step: microbatch=0 cuts"),
        (dict(microbatch=1, accumulate=2), "not both"),
    ],
)
def test_micro_batches_that_do_not_fit(options, said):
    with pytest.raises(sl.SpecError, match=re.escape(said)):
        updated(mesh(dp=2), linear, W, BATCH, **options)


def test_leaves_that_do_not_fit():
    for leaf, said in ((f64(1, 2, 3, 4, 5, 6), "6 rows, 3 on each rank"), (f64(1, 2, 3), "3 rows over 2 ranks")):
        with pytest.raises(sl.SpecError, match=rf"accumulate=2 cuts .*but `batch\.y` \(`batch/dp`\) has {said}"):
            updated(mesh(dp=2), linear, W, BATCH | {"y": (leaf, "batch/dp")}, accumulate=2)


def test_micro_batches_need_a_named_dimension():
    def loss(p, batch):
        return sl.Mean.of("batch", p["w"] * batch)

    with mesh(dp=2):
        step = sl.step(loss, sl.optim.sgd(1.0), accumulate=2)
        state = step.init(entered(W))
        for batch in (f64(1, 2), sl.shard(f64(1, 2), "...")):
            with pytest.raises(sl.SpecError, match=r"cut along the first dimension.*sl.shard\(batch, 'batch/dp ...'\)"):
                step(state, batch)
