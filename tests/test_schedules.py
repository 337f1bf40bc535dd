"""Schedules are their formulas: the rows of SCHEDULES."""

import pytest
import torch
from optimizers import SCHEDULES

import shardlib as sl
from shardlib import optim

F64 = torch.float64


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_their_formulas(name):
    found = [SCHEDULES[name].ours(torch.tensor(t)) for t in range(40)]
    assert all(x.dtype == F64 and x.shape == () for x in found)
    assert [x.item() for x in found] == pytest.approx([SCHEDULES[name].value(t) for t in range(40)], rel=1e-12)


def test_schedules_trace():
    """All of them in one program, of the count as a tensor."""
    with sl.make_mesh(dp=1, simulate=True):
        f = sl.jit(sl.shard_map(lambda n: [s.ours(n) for s in SCHEDULES.values()], in_specs="", out_specs=None))
        for t in (0, 7, 33):
            found = [x.item() for x in sl.gather(f(sl.shard(torch.tensor(t), "")))]
            assert found == pytest.approx([s.value(t) for s in SCHEDULES.values()], rel=1e-12)
        assert len(f.traces) == 1


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: optim.polynomial(1.0, 0.0, steps=0), "polynomial: steps > 0"),
        (lambda: optim.exponential(1.0, steps=5, rate=0.0), "exponential: .*rate > 0"),
        (lambda: optim.cosine(1.0, steps=0), "cosine: steps > 0 is needed"),
        (lambda: optim.piecewise(1.0, {-1: 0.5}), "piecewise: counts >= 0"),
        (lambda: optim.join([1.0, 0.1], []), r"join: one boundary between each two .* found \[\] for 2"),
        (lambda: optim.join([1.0, 0.1, 0.2], [5, 3]), "ascending"),
        (lambda: optim.warmup(1.0, warmup=1, kind="log"), "a log warm-up takes at least 2 updates, found 1"),
        (lambda: optim.warmup(1.0, warmup=5, kind="cosine"), "kind is 'linear' or 'log', not 'cosine'"),
        (lambda: optim.warmup_decay(1.0, warmup=9, steps=9), "0 <= warmup < steps is needed, found warmup=9, steps=9"),
        (lambda: optim.warmup_stable_decay(1.0, warmup=5, steps=9, decay=5), "0 < decay <= steps - warmup"),
        (lambda: optim.warmup_stable_decay(1.0, warmup=5, steps=9, decay=2, shape="cubic"), "not 'cubic'"),
        (lambda: optim.one_cycle(1.0, start=0.1, up=0), "one_cycle: up > 0"),
        (lambda: optim.one_cycle(1.0, start=0.1, up=5, decay_rate=-1.0), "decay_rate >= 0"),
        (lambda: optim.one_cycle_momentum(0.9, 1.0, up=5), "one_cycle_momentum: 0 <= low, high < 1"),
        (lambda: optim.lr_range_test(1.0, steps=0), "lr_range_test: steps > 0"),
        (lambda: optim.lamb(1.0, min_coeff=2.0, max_coeff=1.0), "0 <= min_coeff <= max_coeff"),
        (lambda: optim.lion([0.1]), "a learning rate is a number or a schedule"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises((ValueError, TypeError), match=said):
        make()
