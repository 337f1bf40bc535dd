"""Schedules are their formulas: the rows of SCHEDULES."""

import math

import pytest
import torch
from optimizers import SCHEDULES, trained

import shardlib as sl
from shardlib import optim
from shardlib.optim.schedules import as_schedule

F64 = torch.float64


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_their_formulas(name):
    found = [SCHEDULES[name].ours(torch.tensor(t)) for t in range(40)]
    assert all(x.dtype == F64 and x.shape == () for x in found)
    assert [x.item() for x in found] == pytest.approx([SCHEDULES[name].value(t) for t in range(40)], rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_take_python_ints(name):
    assert [SCHEDULES[name].ours(t).item() for t in (0, 7)] == [
        SCHEDULES[name].ours(torch.tensor(t)).item() for t in (0, 7)
    ]


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
        (lambda: optim.polynomial(1.0, 0.0, steps=0), "polynomial: steps is a number above 0, not 0"),
        (lambda: optim.exponential(1.0, steps=5, rate=0.0), "exponential: rate is a number above 0, not 0.0"),
        (lambda: optim.cosine(1.0, steps=0), "cosine: steps is a number above 0, not 0"),
        (lambda: optim.piecewise(1.0, {-1: 0.5}), "piecewise: the count -1 is a number of at least 0, not -1"),
        (lambda: optim.join([1.0, 0.1], []), r"join: one boundary between each two .* found \[\] for 2"),
        (lambda: optim.join([1.0, 0.1, 0.2], [5, 3]), "ascending"),
        (lambda: optim.join([1.0, 0.1], [0]), "join: boundary 0 is a number above 0, not 0"),
        (lambda: optim.one_cycle(1.0, start=0.1, up=5, decay_rate=math.inf), "decay_rate is a number of at least 0"),
        (lambda: optim.warmup(1.0, warmup=1, kind="log"), "a log warm-up takes at least 2 updates, found 1"),
        (lambda: optim.warmup(1.0, warmup=5, kind="cosine"), "kind is 'linear' or 'log', not 'cosine'"),
        (lambda: optim.warmup_decay(1.0, warmup=9, steps=9), "0 <= warmup < steps is needed, found warmup=9, steps=9"),
        (
            lambda: optim.warmup_stable_decay(1.0, warmup=5, steps=9, decay=5),
            "warmup \\+ decay <= steps is needed, found decay=5, ",
        ),
        (lambda: optim.warmup_stable_decay(1.0, warmup=5, steps=9, decay=2, shape="cubic"), "not 'cubic'"),
        (lambda: optim.one_cycle(1.0, start=0.1, up=0), "one_cycle: up is a number above 0, not 0"),
        (
            lambda: optim.one_cycle(1.0, start=0.1, up=5, decay_rate=-1.0),
            "one_cycle: decay_rate is a number of at least 0, not -1.0",
        ),
        (
            lambda: optim.one_cycle_momentum(0.9, 1.0, up=5),
            "one_cycle_momentum: high is a number of at least 0 and below 1, not 1.0",
        ),
        (lambda: optim.lr_range_test(1.0, steps=0), "lr_range_test: steps is a number above 0, not 0"),
        (lambda: optim.lamb(1.0, min_coeff=2.0, max_coeff=1.0), "0 <= min_coeff <= max_coeff"),
        (lambda: optim.lion([0.1]), "lion: a rate .or a schedule, count -> rate. is a number of at least 0, not"),  # type: ignore[arg-type]
        (lambda: optim.adam(math.nan), "adam: a rate .* is a number of at least 0, not nan"),
        (lambda: optim.sgd(-0.1), "sgd: a rate .* is a number of at least 0, not -0.1"),
        (lambda: optim.adam(0.1, b1=1.0), "adam: b1 is a number of at least 0 and below 1, not 1.0"),
        (lambda: optim.adamw(0.1, b2=-0.1), "adamw: b2 is a number of at least 0 and below 1, not -0.1"),
        (lambda: optim.adamw(0.1, eps="1e-8"), "adamw: eps is a number of at least 0, not '1e-8'"),  # type: ignore[arg-type]
        (lambda: optim.adam(0.1, weight_decay=-1.0), "adam: weight_decay is a number of at least 0, not -1.0"),
        (lambda: optim.sgd(0.1, momentum=-1), "sgd: momentum is a number of at least 0, not -1"),
        (lambda: optim.sgd(0.1, nesterov=True), "sgd: nesterov=True looks ahead along the momentum: give momentum="),
        (lambda: optim.lion(0.1, b2=1.5), "lion: b2 is a number"),
        (lambda: optim.lamb(0.1, eps=-1.0), "lamb: eps is a number"),
        (lambda: optim.adafactor(0.1, momentum=1.0), "adafactor: momentum is a number"),
        (lambda: optim.adafactor(0.1, min_dim_size_to_factor=0), "min_dim_size_to_factor is a number of at least 1"),
        (
            lambda: optim.adafactor(0.1, clipping_threshold=0.0),
            "adafactor: clipping_threshold is a number above 0, not 0.0",
        ),
        (lambda: optim.muon(0.1, momentum=None), "muon: momentum is a number"),  # type: ignore[arg-type]
        (lambda: optim.muon(0.1, dtype=torch.int64), "muon: dtype is a floating-point dtype, not torch.int64"),
        (lambda: optim.muon(0.1, dtype="bf16"), "muon: dtype is a floating-point dtype, not 'bf16'"),  # type: ignore[arg-type]
        (lambda: optim.muon(0.1, steps=2.5), "muon: steps is a whole number of at least 0, not 2.5"),  # type: ignore[arg-type]
        (lambda: optim.muon(0.1, coefficients=(1, 2, math.nan)), "muon: coefficient 2 is a number, not nan"),
        (lambda: optim.lamb(0.1, max_coeff="10"), "lamb: max_coeff is a number of at least 0, not '10'"),  # type: ignore[arg-type]
        (lambda: optim.clip_by_global_norm("1"), "a norm above 0 is needed, found '1'"),  # type: ignore[arg-type]
        (lambda: optim.clip(-1.0), "clip: max_delta is a number of at least 0, not -1.0"),
        (lambda: optim.scale("2"), "scale: factor is a number, not '2'"),  # type: ignore[arg-type]
        (lambda: optim.add_decayed_weights(True), "weight_decay is a number, not True"),
        (lambda: optim.inject(optim.sgd, lr="fast"), "inject: lr is a number, not 'fast'"),  # type: ignore[arg-type]
        (lambda: optim.chain(optim.sgd), "chain takes optimizers, such as .*, not <function sgd"),  # type: ignore[arg-type]
        (lambda: optim.by_path({"**": 0.1}), "by_path takes optimizers, .*, not 0.1"),  # type: ignore[dict-item]
        (lambda: optim.by_path([optim.sgd(0.1)]), r"by_path takes a mapping, \{'\*\*': "),  # type: ignore[arg-type]
        (lambda: optim.accumulate(optim.sgd, 2), "accumulate takes optimizers"),  # type: ignore[arg-type]
        (lambda: optim.warmup_cosine("1", warmup=1, steps=2), "warmup_cosine: peak is a number, not '1'"),  # type: ignore[arg-type]
        (lambda: optim.polynomial(math.inf, 0.0, steps=2), "polynomial: start is a number, not inf"),
        (lambda: optim.piecewise(1.0, {3: None}), "piecewise: the factor at 3 is a number, not None"),  # type: ignore[dict-item]
        (
            lambda: as_schedule(lambda count: count, "sgd")(torch.tensor(0)),
            r"sgd: a schedule .* 0-d float tensor for a count, not i64\[\]",
        ),
        (
            lambda: as_schedule(lambda count: "fast", "sgd")(torch.tensor(0)),
            "gives a number or a 0-d float .*, not 'fast'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises((ValueError, TypeError), match=said):
        make()


def test_a_schedule_of_ones_own_may_give_numbers() -> None:
    assert as_schedule(lambda count: 0.25, "sgd")(torch.tensor(3)).item() == 0.25
    assert as_schedule(lambda count: 0.5**count, "sgd")(torch.tensor(3)).item() == 0.125


@pytest.mark.parametrize(
    "optimizer, said",
    [
        (
            optim.adamw(0.1, b1=lambda count: torch.full((2,), 0.9)),
            r"adamw: b1: a schedule gives a number .*, not f32\[2\]",
        ),
        (optim.sgd(0.1, momentum=lambda count: None), "sgd: momentum: a schedule gives a number .*, not None"),  # type: ignore[arg-type, return-value]
    ],
)
def test_a_momentum_is_one_number(optimizer: optim.Optimizer, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        trained(optimizer, torch.ones(3), [torch.ones(3)], "n/dp")
