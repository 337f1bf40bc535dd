"""recompute: what a policy keeps, and what the backward pass makes again."""

from collections import Counter

import pytest
import torch
from lowered import MESH, Net, block, compared, state_and_batch, train
from torch import Tensor

import shardlib as sl
from shardlib import passes
from shardlib.graph.nodes import op_name


def named(w: Net, batch: Tensor) -> sl.Mean:
    x = batch
    for layer in w.layers:
        x = sl.save_name(block(layer, x), "x")
    return sl.Mean.of("batch/dp classes", torch.tanh(x @ sl.gather(w.head, "dp")) ** 2)


def test_recompute_keeps_what_the_policy_says_bit_for_bit():
    """Before the pass one product, one tanh of each layer and the last tanh are left for the backward pass."""
    with sl.make_mesh(MESH, simulate=True):
        step = train(f=named)
        state, batch = state_and_batch(step)
        plain = sl.jit(step, passes=[]).lower(state, batch)
        uses = []
        for policy, products, tanhs in (("dots", 0, 3), (("x",), 3, 3), ({"x", "dots"}, 0, 3)):
            uses.append([passes.recompute(policy), *passes.default])
            program = sl.jit(step, passes=uses[-1][:1]).lower(state, batch)
            more = [Counter(op_name(n) for n in p.module.graph.nodes) for p in (plain, program)]
            assert (more[1]["mm"] - more[0]["mm"], more[1]["tanh"] - more[0]["tanh"]) == (products, tanhs)
            assert program.memory().total < plain.memory().total
        compared(step, *uses)
        compared(train(f=named, accumulate=2), *uses[:2])


def test_recompute_refuses_what_keeps_nothing_and_names_that_nothing_has():
    def scanned(w: Tensor, x: Tensor) -> sl.Mean:
        x, _ = sl.scan(lambda x, w: (sl.save_name(torch.tanh(x * w), "x"), None), x * 1, w)
        return sl.Mean.of("batch/dp model", x)

    with pytest.raises(sl.SpecError, match=r"passes\.recompute: a policy that keeps nothing saves nothing"):
        passes.recompute("nothing")
    with sl.make_mesh(MESH, simulate=True):
        step = train(f=named)
        with pytest.raises(sl.SpecError, match=r"recompute: the policy keeps `y`, .* it names `x`"):
            sl.jit(step, passes=[passes.recompute(("x", "y"))]).lower(*state_and_batch(step))
        looped = sl.jit(sl.step(scanned, sl.optim.sgd(0.1)), passes=[passes.recompute(("x",))])
        state = looped.init(sl.shard(torch.ones(3, 8), "layers model"))
        with pytest.raises(sl.SpecError, match="names in the body of a scan are for remat"):
            looped.lower(state, sl.shard(torch.ones(8, 8), "batch/dp model"))
