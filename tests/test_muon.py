"""Muon: what a matrix is, and who works on it."""

import math
from typing import Any

import pytest
import torch
from optimizers import F64, muon, original, trained
from torch import Tensor

import shardlib as sl
from shardlib import optim, tree
from shardlib.graph.program import graphs
from shardlib.optim.base import apply_updates


@sl.pytree
class Attention:
    qkv: Tensor = sl.spec("3 model/dp heads/tp head", matrix="model -> heads head")
    out: Tensor = sl.spec("heads/tp head model/dp", matrix="heads head -> model")


@sl.pytree
class Blocks:
    layers: Attention = sl.stack("layers")


def test_muon_takes_inputs_and_outputs_as_said():
    sizes = dict(model=6, heads=4, head=2, layers=2)
    with sl.make_mesh(dp=1, simulate=True, tp=1):
        params, grads = (sl.gather(sl.init(Blocks, sizes=sizes, key=sl.random.key(k), dtype=F64)) for k in range(2))
    rule, want = muon(original), tree.map_(torch.clone, params)
    for i in range(2):
        for j in range(3):
            p, g = (x.layers.qkv[i, j].reshape(6, 8) for x in (params, grads))
            want.layers.qkv[i, j] = rule(p, g, 1, 0.05, {}).view(6, 4, 2)
        p, g = (x.layers.out[i].reshape(8, 6) for x in (params, grads))
        want.layers.out[i] = rule(p, g, 1, 0.05, {}).view(4, 2, 6)
    for stage in (0, 3):
        found, _ = trained(optim.muon(0.05, weight_decay=0.1), params, [grads], Blocks, stage)
        for x, y in zip(tree.leaves(found), tree.leaves(want), strict=True):
            assert torch.allclose(x, y, rtol=0, atol=1e-12)
    said = r"muon: `w` is no matrix.\n  Name inputs and outputs, sl.spec\(..., matrix='a -> b c'\), or give it to"
    with pytest.raises(sl.SpecError, match=said):
        trained(optim.muon(0.1), {"w": torch.ones(2, 2, 2)}, [], {"w": "a b c"})
    with pytest.raises(ValueError, match="scale is 'original' or 'match_rms_adamw', not 'rms'"):
        optim.muon(0.1, scale="rms")


def test_muon_in_bfloat16_is_near() -> None:
    """Newton-Schulz in 16 bits, in which matrices are exchanged: the same on every mesh, within a few percent."""
    w = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1), dtype=F64)
    params, grads, specs = {"w": w}, {"w": w.sin()}, {"w": sl.stack("a/dp b/tp", "layers")}
    exact, _ = trained(optim.muon(1.0), params, [grads], specs, 0, dp=1, tp=1)
    found = [
        trained(optim.muon(1.0, dtype=torch.bfloat16), params, [grads], specs, n, dp=d)[0] for n, d in ((0, 1), (3, 2))
    ]
    for x in found:
        off = (x["w"] - exact["w"]).norm() / (exact["w"] - w).norm()
        assert x["w"].dtype == F64 and 1e-4 < off < 5e-2
    assert torch.allclose(found[0]["w"], found[1]["w"], rtol=0, atol=2e-2)


def products(specs: Any, params: Any, dp: int, tp: int = 1, stage: int = 3) -> int:
    """The multiply-adds of matrix products that a rank does in an update with Muon."""
    ours = optim.muon(0.1)

    def update(params: Any, grads: Any) -> Any:
        return apply_updates(params, ours.update(grads, ours.init(params), params)[0])

    with sl.make_mesh(dp=dp, tp=tp, simulate=True):
        now = sl.shard(params, sl.zero(specs, stage=stage).resolve(sl.shard(params, specs)).opt)
        module = sl.jit(sl.shard_map(update, in_specs=None, out_specs=None)).lower(now, now).module
    total = 0
    for _, graph in graphs(module):
        for node in graph.graph.nodes:
            if getattr(node.target, "__name__", "") in ("mm.default", "bmm.default"):
                left = node.args[0].meta["val"]
                total += math.prod(node.meta["val"].shape) * left.shape[-1]
    return total


def test_muon_does_its_part_of_the_work_under_zero():
    """1/N of the Newton-Schulz products on each of N ranks, for stacked, listed and tensor-parallel matrices."""
    specs = {"stacked": sl.stack("a/dp b/tp", "layers"), "listed": [{"i": "a/dp b/tp", "o": "b/tp a/dp"}] * 4}
    w = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=F64)
    params = {"stacked": w.expand(8, 8, 16), "listed": [{"i": w, "o": w.T}] * 4}
    params = tree.map_(torch.clone, params)
    whole = products(specs, params, dp=1)
    assert whole == 16 * 5 * (8 * 8 * 16 + 8 * 8 * 8 + 8 * 8 * 16)
    assert products(specs, params, dp=4) * 4 == whole
    assert products(specs, params, dp=2, tp=2) * 4 == whole
    assert products(specs, params, dp=4, stage=0) == whole
    five = {"w": sl.stack("a/dp b", "layers")}, {"w": params["stacked"][:5].clone()}
    assert products(*five, dp=4) == whole // 16 * 2, "5 matrices on 4 ranks: 2 at most"
