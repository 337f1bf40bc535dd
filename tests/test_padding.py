"""`pad_to`: plain batches lengthened to few lengths; the loss does not see what was added."""

import pytest
import torch
from torch import Tensor

import shardlib as sl


@sl.pytree
class Batch:
    tokens: Tensor = sl.spec("batch/dp seq")
    targets: Tensor = sl.spec("batch/dp seq")
    weight: Tensor = sl.spec("batch/dp")


def batch(n: int) -> Batch:
    return Batch(torch.arange(2 * n).view(2, n), torch.arange(2 * n).view(2, n) % 5, torch.ones(2))


def test_to_a_multiple_and_to_a_size():
    b = batch(5)
    found = sl.pad_to(b, "seq", multiple=4, value={"targets": -1, "**": 0})
    assert torch.equal(found.tokens, torch.cat([b.tokens, torch.zeros(2, 3, dtype=torch.int64)], 1))
    assert torch.equal(found.targets, torch.cat([b.targets, -torch.ones(2, 3, dtype=torch.int64)], 1))
    assert found.weight is b.weight
    assert sl.pad_to(b, "seq", multiple=5).tokens is b.tokens
    assert sl.pad_to(b, "seq", size=9, value=7).tokens[:, 5:].eq(7).all()
    assert sl.pad_to(b, "batch", size=3).weight.tolist() == [1, 1, 0]


def test_dicts_middle_dimensions_and_bools():
    tree = {"x": torch.ones(2, 3, 4), "seen": torch.ones(3, dtype=torch.bool)}
    found = sl.pad_to(tree, "seq", multiple=8, specs={"x": "batch seq model", "seen": "seq"})
    assert found["x"].shape == (2, 8, 4) and found["x"].sum() == 24
    assert found["seen"].tolist() == [True] * 3 + [False] * 5
    assert sl.pad_to([torch.ones(0, 2)], "seq", multiple=4, specs="seq ...")[0].shape == (0, 2)
    assert sl.pad_to([], "seq", specs="seq") == []


def test_few_shapes_are_traced_and_the_loss_is_the_same():
    logits = torch.randn(8, 5, dtype=torch.float64)

    def loss(w: Tensor, b: Batch) -> sl.Mean:
        return sl.token_loss("batch/dp seq vocab, batch/dp seq", sl.gather(w, "dp")[b.tokens % 8], b.targets)

    with sl.make_mesh(dp=2, simulate=True):
        w = sl.shard(logits, "rows vocab")
        f = sl.jit(sl.evaluate(loss))
        for n in (5, 6, 7, 8, 3):
            plain = sl.evaluate(loss)(w, sl.shard(batch(n)))[0].value
            padded = f(w, sl.shard(sl.pad_to(batch(n), "seq", multiple=8, value={"targets": -1, "**": 0})))[0].value
            torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
        assert len(f.traces) == 1


def test_errors_say_what_and_where():
    with pytest.raises(sl.SpecError, match="pad_to: `tokens`: `seq` has length 5, more than size=4"):
        sl.pad_to(batch(5), "seq", size=4)
    with pytest.raises(
        sl.SpecError, match=r"no leaf names `sec` \(did you mean `seq`\?\); they name `batch` and `seq`"
    ):
        sl.pad_to(batch(5), "sec", multiple=4)
    with pytest.raises(sl.SpecError, match="pad_to: `tokens`: value has no glob for it, only `targets`: add"):
        sl.pad_to(batch(5), "seq", multiple=4, value={"targets": -1})
    with pytest.raises(sl.TreeError, match="`target` matches no path"):
        sl.pad_to(batch(5), "seq", multiple=4, value={"target": -1, "**": 0})
    with pytest.raises(sl.SpecError, match="give multiple, at least 1, or size"):
        sl.pad_to(batch(5), "seq", multiple=2, size=8)
    with pytest.raises(sl.SpecError, match="give specs"):
        sl.pad_to([torch.ones(2)], "seq")
    with pytest.raises(sl.SpecError, match="`0`: plain tensors are padded, this is a int"):
        sl.pad_to([3], "seq", specs=["seq"])
    with sl.make_mesh(simulate=True), pytest.raises(sl.SpecError, match="an array at rest: pad before"):
        sl.pad_to(sl.shard([torch.ones(3)], "seq"), "seq", multiple=2, specs="seq")
