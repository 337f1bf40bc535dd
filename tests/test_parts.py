"""Parts of trees: frozen leaves, tied leaves, and every kind of leaf that may stand among parameters."""

from typing import Any

import pytest
import torch
from models import Net
from torch import Tensor

import shardlib as sl
from shardlib import tree
from shardlib.parts import Part, firsts, once, part_of, places

F64 = torch.float64


def mesh(**axes: int) -> sl.Mesh:
    return sl.make_mesh(axes, simulate=True)


def arange(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=F64).reshape(shape)


def same(a: Any, b: Any) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.match(a, b), strict=True))


# ---- the tools


def test_a_part_is_taken_and_put_back():
    w, v = torch.ones(2), torch.ones(3)
    whole = {"a": w, "b": {"c": v, "d": w}, "e": None, "f": torch.ones(1)}
    part = part_of(whole, ["b.*"])
    assert part == Part((0, 1, 0, None)), "a tied leaf belongs where one of its places is chosen"
    taken = part.take(whole)
    assert tree.paths(taken) == ["a", "b.c"] and taken["f"] is None
    back = part.put(tree.map_(lambda x: -x, taken), whole)
    assert back["a"] is back["b"]["d"] and back["f"] is whole["f"] and torch.equal(back["b"]["c"], -v)
    assert part_of(whole) == Part((0, 1, 0, 3))
    with pytest.raises(sl.TreeError, match=r"`b\.x` matches no path"):
        part_of(whole, "b.x")


def test_places_and_once():
    x, y = torch.ones(1), torch.ones(1)
    assert firsts("abca") == (0, 1, 2, 0)
    assert places([x, 1, y, x, 1]) == (0, 1, 2, 0, 4)
    negated = once(lambda x, k: k * x)
    assert negated(x, 1) is negated(x, 1) and negated(x, 1) is not negated(x, 2) is not negated(y, 2)


# ---- frozen leaves


def is_trained(path: str) -> bool:
    return path in ("embed", "temperature") or path.endswith((".w_in", ".scale"))


TRAINED = ["embed", "temperature", "blocks.**.w_in", "blocks.**.scale"]
CASES = [(0, True, 2, False), (1, True, 1, True), (2, True, 2, True), (3, True, 1, False), (3, False, 1, False)]


@pytest.mark.parametrize("stage, jit, accumulate, listed", CASES)
def test_c32_frozen_leaves(stage, jit, accumulate, listed, tmp_path):
    """C32: half of the tree, under remat and scan: bitwise the same after 5 steps with decay; the rest as in torch."""
    net = Net(layers=2, listed=listed, remat=True)
    values = net.params() | {"positions": torch.tensor([1, 4097]), "mask": torch.tensor([True, False])}
    shapes = net.shapes()
    block = {k: spec for k, (spec, _) in shapes.pop("block").items()}
    specs: Any = {k: spec for k, (spec, _) in shapes.items()} | {"positions": "two", "mask": "two/dp"}
    specs["blocks"] = [block] * 2 if listed else sl.stack(block, "layers")
    batches = [net.batch(4, 3, seed) for seed in range(5)]

    with mesh(dp=2, tp=2) if jit else mesh(dp=2, tp=1):
        adamw = sl.optim.adamw(0.1, weight_decay=0.5, mask=sl.optim.matrices)
        layout = sl.zero(specs, stage=stage)
        step = sl.step(net.loss, adamw, layout=layout, accumulate=accumulate, clip=0.5, trainable=TRAINED)
        step = sl.jit(step, donate_argnums=0) if jit else step
        state = step.init(sl.shard(values, specs))
        for batch in batches:
            state, metrics = step(state, sl.shard(batch, net.batch_spec))
        assert tree.paths(state.opt.mu) == [p for p in tree.paths(values) if is_trained(p)]
        new = sl.gather(state.params)
        sl.save(tmp_path, state)
        found = sl.restore(sl.latest(tmp_path), like=sl.abstract(lambda: step.init(sl.shard(values, specs))))
        assert same(sl.gather(found), sl.gather(state))

    leaves = dict(zip(tree.paths(values), tree.leaves(values), strict=True))
    own = {p: x.clone().requires_grad_() for p, x in leaves.items() if is_trained(p)}
    full = tree.unflatten(tree.flatten(values)[1], [own.get(p, x) for p, x in leaves.items()])
    matrices = [x for p, x in own.items() if p == "embed" or p.endswith("w_in")]
    groups = [{"params": matrices}, {"params": [x for x in own.values() if all(x is not m for m in matrices)]}]
    ref = torch.optim.AdamW([groups[0] | {"weight_decay": 0.5}, groups[1] | {"weight_decay": 0.0}], lr=0.1)
    for batch in batches:
        ref.zero_grad()
        net.plain(full, batch)[0].backward()
        norm = torch.stack([x.grad.norm() for x in own.values()]).norm()
        for x in own.values():
            x.grad *= min(1.0, 0.5 / norm.item())
        ref.step()
    assert metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-9)
    for (p, old), x in zip(leaves.items(), tree.leaves(new), strict=True):
        if is_trained(p):
            assert torch.allclose(x, own[p], rtol=0, atol=1e-10) and not torch.equal(x, old), p
        else:
            assert x.dtype == old.dtype and torch.equal(x, old), p
