"""Pipelines in 16 bits: loss, norm, scale and state as one process has them, which takes the same micro-batches."""

from typing import Any

import pytest
import torch
from piped import BLOCK, batch, first, last, made, model, specs, stage, weights

import shardlib as sl
from shardlib import tree

HOW = {
    "bf16": sl.precision("bf16"),
    "bf16 at rest": sl.precision("bf16", params="bf16"),
    "f16": sl.precision("f16", scale=sl.dynamic_scale(2.0**21, hysteresis=1)),  # which overflows at first
}
MICROBATCHES, ROWS = 2, 8


def whole(p: Any, mb: Any) -> Any:
    """The loss without a pipeline."""
    return last(p, stage(p["blocks"], first(p, mb), mb), mb)


def trained(loss: Any, how: str, specs: Any, layout: Any, accumulate: int | None, **axes: int) -> tuple[Any, Any]:
    """The metrics of steps up to the first that is not skipped, and the state after it: parameters, momenta, scale."""
    step = sl.step(
        loss, sl.optim.sgd(0.1, momentum=0.5), layout=layout, accumulate=accumulate, precision=HOW[how], clip=1.0
    )
    step = sl.jit(step)
    with sl.make_mesh({"dp": 1, "tp": 1, "pp": 1} | axes, simulate=True):
        p = {k: x.float() for k, x in weights(4, False).items()}
        state, told = step.init(sl.shard(model(p, 1), specs)), []
        while not told or told[-1].get("skipped"):
            state, metrics = step(state, sl.shard(batch(ROWS, len(told)), "batch/dp seq"))
            told.append({k: x.item() for k, x in metrics.items()})
        return told, sl.gather(state)


@pytest.mark.parametrize(
    ("how", "schedule", "zero", "options"),
    [
        ("bf16", "one_f_one_b", 2, {}),
        ("bf16", "gpipe", 1, {"gather": "forward"}),
        ("bf16 at rest", "zero_bubble", 0, {}),
        ("f16", "zero_bubble", 3, {}),
        ("f16", "one_f_one_b", 2, {"reduce": "step"}),
    ],
)
def test_in_16_bits_as_one_process(how: str, schedule: str, zero: int, options: Any) -> None:
    """Every product is rounded as there; sums over micro-batches and ranks are made in float32, in another order, so
    1e-6; in ZeRO-3 those over ranks are the gradients of 16-bit leaves, so half a unit in the last place. One update:
    weights that differ by so little may round to neighbours in 16 bits, and then all differs."""
    near = 2.0**-11 if zero == 3 else 1e-6
    piped = specs(False, 1)
    layout = sl.zero(piped, "dp", zero, **options)
    loss = sl.pipeline(first, stage, last, made(schedule, MICROBATCHES))
    told, state = trained(loss, how, piped, layout, None, dp=2, pp=2)
    plain = piped | {"embed": "vocab model", "blocks": sl.stack(BLOCK, "layers")}
    wanted, reference = trained(whole, how, plain, None, 2 * MICROBATCHES)
    for a, b in zip(told, wanted, strict=True):
        assert a == pytest.approx(b, rel=near, nan_ok=True)
    for a, b in zip(tree.leaves(state), tree.leaves(reference), strict=True):
        assert a.dtype == b.dtype
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=0, atol=near * b.abs().max().item())
    assert len(told) > 1 or how != "f16"
