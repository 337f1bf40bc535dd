"""What each optimizer computes, and what it owes to the layouts: the rows of OPTIMIZERS."""

import inspect
from typing import Any

import pytest
import torch
from optimizers import F64, OPTIMIZERS, SCHEDULES, SPECS, trained, values

import shardlib as sl
from shardlib import optim, tree
from shardlib.optim.base import kept

VARIANTS = [name for name in OPTIMIZERS if "," in name]
UPDATES, RATE = 20, 0.05
# What a rank holds of each leaf, with padding, on n x n ranks in a ZeRO stage.
LOCAL = {
    (1, 0): [(5, 7), (7,), (), (3, 4, 2), *[(5, 7)] * 6],
    (2, 0): [(5, 7), (7,), (), (3, 2, 2), *[(5, 4)] * 6],
    (2, 3): [(3, 7), (4,), (), (3, 2, 1), *[(3, 4)] * 6],
}


def published(name: str, params: Any, grads: list[Any]) -> dict[str, torch.Tensor]:
    """The parameters by path after all updates, by the row's rule; of the stacked leaf layer by layer."""
    want = {}
    for path, p, *gs in zip(tree.paths(params), *map(tree.leaves, [params, *grads]), strict=True):
        done = []
        for i, x in enumerate(p if path == "stacked" else [p]):
            own: dict[str, Any] = {}
            for t, g in enumerate(gs, 1):
                x = OPTIMIZERS[name].rule(x, g[i] if path == "stacked" else g, t, RATE, own)
            done.append(x)
        want[path] = torch.stack(done) if path == "stacked" else done[0]
    return want


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_what_was_published(name: str) -> None:
    """On one rank, on 2 x 2 with whole leaves (ZeRO-0) and with cut ones (the optimizer's tree is the same in ZeRO 1 to
    3; variants only so); stacked layers train as listed ones, and a rank holds the state of its part."""
    row, params, grads = OPTIMIZERS[name], values(0), [values(t) for t in range(1, UPDATES + 1)]
    want = published(name, params, grads)
    for n, stage in list(LOCAL)[2 * (name in VARIANTS) :]:
        found, state = trained(row.make(RATE), params, grads, SPECS, stage, dp=n, tp=n)
        for path, x in zip(tree.paths(found), tree.leaves(found), strict=True):
            assert torch.allclose(x, want[path], rtol=0, atol=1e-10), (path, n, stage)
        if not row.joint:
            assert torch.equal(found["stacked"], torch.stack(found["listed"]))
        assert {sl.gather(lr).item() for lr in kept(state, "lr")} == {RATE}
        held = sum(x.shards[0].numel() for x in tree.leaves(state) if x.dtype == F64) - len(kept(state, "lr"))
        assert held == sum(map(row.slots, LOCAL[n, stage])), "the state that a rank holds"


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - VARIANTS))
def test_the_contract_of_optimizers(name: str) -> None:
    sl.testing.check_optimizer(OPTIMIZERS[name].make(RATE))


def test_the_tables_are_whole() -> None:
    """Every public function that takes a rate first is in OPTIMIZERS, every schedule in SCHEDULES."""
    public = {n: f for n, f in vars(optim).items() if inspect.isfunction(f)}
    makers = {n for n, f in public.items() if next(iter(inspect.signature(f).parameters), "") == "lr"}
    assert makers == {name.split(",")[0] for name in OPTIMIZERS}
    of_counts = {n for n, f in public.items() if f.__module__ == "shardlib.optim.schedules"}
    assert of_counts == {name.split(",")[0] for name in SCHEDULES}


# ---- cases


DECAYED = {
    "adamw": optim.adamw(0.1, weight_decay=0.5, mask=optim.matrices),
    "lion": optim.lion(0.1, weight_decay=0.5, mask=optim.matrices),
    "lamb": optim.lamb(0.1, weight_decay=0.5, mask=optim.matrices, max_coeff=1.0),
    "adafactor": optim.adafactor(0.1, weight_decay_rate=0.05, mask=optim.matrices),
    "muon": optim.by_path({optim.matrices: optim.muon(0.1, weight_decay=0.5), "**": optim.sgd(0.1)}),
    "sgd": optim.chain(optim.add_decayed_weights(0.5, optim.matrices), optim.sgd(0.1)),
}


@pytest.mark.parametrize("name", DECAYED)
def test_c33_decay_is_decided_by_the_global_shape(name):
    """C33: gradients 0: W (4, 4) goes to 0.95 and a norm's scale stays, stacked ones too."""
    specs = {"w": "a/dp b/tp", "scale": "n/dp", "layers": sl.stack({"w": "a/dp b/tp", "scale": "n/dp"}, "layers")}
    ones = {"w": torch.ones(4, 4), "scale": torch.ones(4)}
    params = ones | {"layers": tree.map_(lambda x: x.expand(3, *x.shape).clone(), ones)}
    found, _ = trained(DECAYED[name], params, [tree.map_(torch.zeros_like, params)], specs)
    for part in (found, found["layers"]):
        assert torch.allclose(part["w"], torch.tensor(0.95)) and (part["scale"] == 1).all()


@pytest.mark.parametrize("ours", [optim.adam(0.1), optim.adamw(0.1)])
def test_c35_the_first_update_of_adam_is_the_rate(ours):
    one = torch.ones(3, dtype=F64)
    found, state = trained(ours, one, [one], "n/dp")
    assert torch.allclose(found, torch.tensor(0.9, dtype=F64), atol=1e-8)
    assert torch.allclose(sl.gather(state.mu), torch.tensor(0.1, dtype=F64))
    for decaying in (optim.adam(0.1, weight_decay=0.5), optim.adamw(0.1, weight_decay=0.5)):
        _, state = trained(decaying, torch.ones(3), [], "n/dp")
        assert not sl.gather(state.mu).any() and not sl.gather(state.nu).any()


def test_lamb_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="0 <= min_coeff <= max_coeff is needed, found 2 and 1"):
        optim.lamb(0.1, min_coeff=2, max_coeff=1)
    with pytest.raises(ValueError, match="correct='step' is none of `moments` and `rate`"):
        optim.lamb(0.1, correct="step")  # type: ignore[arg-type]
