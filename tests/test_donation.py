"""Donation: what is gone, what is untouched, what is refused."""

import pytest
import torch
from jitted import F64, arange, doubled, loss, mesh
from torch import Tensor

import shardlib as sl
from shardlib import tree


def test_a_donated_tree_is_gone():
    f = sl.jit(doubled, donate_argnums=0)
    with mesh(dp=2):
        x, kept = {"a": arange(4, spec="n/dp")}, arange(4, spec="n/dp")
        y = f(x)
        assert torch.equal(sl.gather(y["a"]), 2 * torch.arange(4.0, dtype=F64))
        said = r"this array \(`n/dp`, shape \(4,\)\) was donated to a jitted function and is gone: use what"
        for use in (f, sl.gather, doubled, lambda t: sl.local(t, 0), lambda t: sl.reshard(t, "n")):
            with pytest.raises(sl.DonatedError, match=said):
                use(x)
        assert "donated" in repr(x["a"])
        assert torch.equal(sl.gather(f({"a": kept})["a"]), sl.gather(y["a"])) and len(f.traces) == 1


def test_what_is_not_donated_is_untouched():
    with mesh(dp=2):
        step = sl.jit(sl.step(loss, sl.optim.adamw(0.1, weight_decay=0.1), clip=0.1, accumulate=2))
        state = step.init(
            sl.shard({"w": torch.ones(4, 3, dtype=F64), "b": torch.ones((), dtype=F64)}, {"w": "m/dp n", "b": ""})
        )
        batch = arange(4, 4, spec="batch/dp m")
        before = [s.clone() for x in tree.leaves((state, batch)) for s in x.shards]
        one, _ = step(state, batch)
        two, _ = step(state, batch)
        assert all(
            torch.equal(a, b)
            for a, b in zip(before, [s for x in tree.leaves((state, batch)) for s in x.shards], strict=True)
        )
        assert all(
            torch.equal(a, b) for a, b in zip(tree.leaves(sl.gather(one)), tree.leaves(sl.gather(two)), strict=True)
        )
        held = {s.untyped_storage()._cdata for x in tree.leaves((state, batch)) for s in x.shards}
        assert not held & {s.untyped_storage()._cdata for x in tree.leaves((one.params, one.opt.mu)) for s in x.shards}


@pytest.mark.parametrize("donate", [(), 0])
def test_plain_arguments_are_not_written_into(donate):
    def f(x: Tensor) -> Tensor:
        x.view(-1)[1:].add_(1)  # the line that is named
        return x * 2

    x = torch.ones(3)
    with (
        mesh(dp=2),
        pytest.raises(sl.SpecError, match=r"f: `add_` writes in place into the argument `0` at .*test_donation") as e,
    ):
        sl.jit(f, donate_argnums=donate)(x)
    assert "x.view(-1)[1:].add_(1)" in str(e.value) and torch.equal(x, torch.ones(3))


def test_shared_storage_is_not_donated():
    f = sl.jit(doubled, donate_argnums=0)
    with mesh(dp=2):
        x = arange(4, spec="n/dp")
        alias = sl.Array([s.view(-1) for s in x.shards], x.spec, x.shape, x.mesh)
        said = r"doubled: argument 0, `b` shares storage with argument 0, `a`, which is donated: clone one of them"
        with pytest.raises(sl.ShardError, match=said):
            f({"a": x, "b": alias})
        two = sl.jit(lambda a, b: (doubled(a), doubled(b)), donate_argnums=(0, 1))
        with pytest.raises(sl.ShardError, match="argument 1 shares storage with argument 0, which is donated"):
            two(x, alias)
        kept = sl.jit(lambda a, b: (doubled(a), doubled(b)), donate_argnums=0)
        with pytest.raises(sl.ShardError, match="argument 1 shares storage with argument 0, which is donated"):
            kept(x, alias)
        with pytest.raises(sl.ShardError, match="argument 1 shares storage with argument 0, which is donated"):
            kept(x, x)
        assert torch.equal(sl.gather(x), torch.arange(4.0, dtype=F64))


def test_nothing_is_donated_when_tracing_fails():
    with mesh(dp=2):
        x = arange(4, spec="n/dp")
        with pytest.raises(ZeroDivisionError):
            sl.jit(lambda y: 1 // 0, donate_argnums=0)(x)
        assert sl.gather(x).sum() == 6
