"""Optimizers around optimizers, and changes of gradients to chain with them."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from optimizers import SPECS, trained, values

import shardlib as sl
from shardlib import optim, tree


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_skip_nonfinite_changes_nothing(bad):
    """Whatever rank has it, in a leaf that is cut or whole; the good ones count as if it had not been."""
    specs, zero = {"w": "a/dp b/tp", "b": "n"}, {"w": torch.ones(4, 4), "b": torch.ones(3)}
    good = [tree.map_(lambda x, k=k: k * x, zero) for k in (1.0, 2.0)]
    want, _ = trained(optim.adamw(0.1), zero, good, specs)
    planted = []
    for path, at in (("w", (0, 0)), ("w", (3, 0)), ("w", (0, 3)), ("w", (3, 3)), ("b", (1,))):
        planted.append(tree.map_(torch.clone, good[0]))
        planted[-1][path][at] = bad
    found, state = trained(optim.skip_nonfinite(optim.adamw(0.1)), zero, [good[0], *planted, good[1]], specs)
    assert all(torch.equal(found[k], want[k]) for k in want)
    assert sl.gather(state.skipped) == 5 and sl.gather(optim.get(state, "count")) == 2


def test_accumulate_updates_once_for_the_mean():
    params, grads = values(0), [values(t) for t in range(1, 7)]
    ours = optim.accumulate(optim.lamb(0.05), every=3)
    means = [tree.map_(lambda *xs: sum(xs) / 3, *grads[i : i + 3]) for i in (0, 3)]
    for n in (2, 6):
        found, state = trained(ours, params, grads[:n], SPECS)
        want, _ = trained(optim.lamb(0.05), params, means[: n // 3], SPECS)
        pairs = zip(tree.leaves(found), tree.leaves(want), strict=True)
        assert all(torch.allclose(x, y, rtol=0, atol=1e-14) for x, y in pairs)
        assert sl.gather(state.since) == n % 3 and sl.gather(state.inner.count) == n // 3
    with pytest.raises(ValueError, match="at least 1, not 0"):
        optim.accumulate(optim.sgd(0.1), every=0)


def test_clip_by_global_norm_and_masked():
    params, g = values(0), values(1)
    norm = torch.cat([x.flatten() for x in tree.leaves(g)]).norm()
    found, _ = trained(optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(1.0)), params, [g], SPECS)
    for p, x, y in zip(*map(tree.leaves, (params, g, found)), strict=True):
        assert torch.allclose(p - y, 0.5 * x / norm, rtol=1e-12)
    part = optim.chain(optim.masked(optim.clip_by_global_norm(0.5), ["w", "b"]), optim.sgd(1.0))
    found, _ = trained(part, params, [g], SPECS)
    norm = torch.cat([g["w"].flatten(), g["b"]]).norm()
    assert torch.allclose(params["w"] - found["w"], 0.5 * g["w"] / norm, rtol=1e-12)
    assert torch.allclose(params["e"] - found["e"], g["e"], rtol=1e-12)
    with pytest.raises(ValueError, match="a norm above 0 is needed, found 0"):
        optim.clip_by_global_norm(0)
    with pytest.raises(sl.TreeError, match=r"masked: `<function .*` chooses no leaf"):
        trained(optim.masked(optim.sgd(0.1), lambda path, spec: False), params, [g], SPECS)


def test_clip_and_scale():
    params, g = values(0), values(1)
    found, _ = trained(optim.chain(optim.clip(0.25), optim.sgd(1.0), optim.scale(-0.5)), params, [g], SPECS)
    for p, x, y in zip(*map(tree.leaves, (params, g, found)), strict=True):
        assert torch.equal(y, p + 0.5 * x.clamp(-0.25, 0.25))


def test_injected_numbers_change_without_a_new_trace():
    """Also through a chain; what they were counts for what is done."""
    ours = optim.inject(
        lambda lr, b1: optim.chain(optim.clip(1.0), optim.adamw(lr, b1, weight_decay=0.1)), lr=0.1, b1=0.8
    )
    specs, start = {"w": "a/dp"}, {"w": torch.linspace(-1, 1, 4)}
    with sl.make_mesh(dp=2, simulate=True):
        step = sl.jit(sl.step(lambda p, b: sl.Mean.of("batch/dp", b * (sl.gather(p, "dp")["w"] ** 2).sum()), ours))
        state, batch = step.init(sl.shard(start, specs)), sl.shard(torch.ones(2), "batch/dp")
        for rate in (0.1, 0.1, 0.3):
            hyper = {**state.opt.hyper, "lr": sl.shard(torch.tensor(rate, dtype=torch.float64), "")}
            state = dataclasses.replace(state, opt=dataclasses.replace(state.opt, hyper=hyper))
            state, metrics = step(state, batch)
            assert metrics["lr"] == rate and len(step.traces) == 1
        found = sl.gather(state.params)["w"]
    own = start["w"].clone().requires_grad_()
    ref = torch.optim.AdamW([own], betas=(0.8, 0.999), weight_decay=0.1)
    for rate in (0.1, 0.1, 0.3):
        ref.param_groups[0]["lr"], own.grad = rate, (2 * own).clamp(-1, 1).detach()
        ref.step()
    assert torch.allclose(found, own, rtol=1e-5) and sl.gather(optim.get(state.opt, "count")) == 3


def test_what_cannot_be_injected_is_refused_where_it_is_given():
    with pytest.raises(ValueError, match="adamw: weight_decay is a number of at least 0, not <function"):
        optim.inject(optim.adamw, lr=1e-3, weight_decay=0.1)
    with pytest.raises(TypeError, match="inject takes optimizers, such as"):
        optim.inject(lambda lr: lr, lr=1e-3)  # type: ignore[arg-type, return-value]


def test_stochastic_rounding_needs_no_masters() -> None:
    """Updates of an eighth of a bfloat16's unit add up in the mean; alike on every mesh, stacked and listed."""
    ones, ours = (
        torch.ones(3, 33, 35, dtype=torch.bfloat16),
        optim.stochastic_rounding(optim.sgd(2.0**-11, momentum=0.5)),
    )
    whole: dict[str, Any] = {"w": ones, "wide": torch.ones(5)}
    forms = (
        (whole, {"w": sl.stack("a/dp b/tp", "layers"), "wide": "n/dp"}),
        (
            {**whole, "w": list(ones.unbind())},
            {"w": ["a/dp b/tp"] * 3, "wide": "n/dp"},
        ),
    )
    found = []
    for (params, specs), n, stage in zip(forms * 2, (1, 2, 2, 1), (0, 0, 3, 3), strict=True):
        x, state = trained(ours, params, [tree.map_(torch.ones_like, params)] * 4, specs, stage, dp=n, tp=n)
        assert not tree.leaves(state.inner.master)
        assert {t.dtype for t in tree.leaves(state.inner.trace)} == {torch.float32}
        found.append(x["w"] if isinstance(x["w"], torch.Tensor) else torch.stack(x["w"]))
        steps = 4 + 3 * 0.5 + 2 * 0.25 + 0.125  # with momentum
        assert torch.equal(x["wide"], torch.full((5,), 1 - steps * 2.0**-11))
    assert all(torch.equal(x, found[0]) for x in found) and found[0].dtype == torch.bfloat16
    assert not torch.equal(found[0][0], found[0][1])
    mean = found[0].double().mean().item()
    assert mean == pytest.approx(1 - steps * 2.0**-11, abs=4 * 2.0**-9 / ones.numel() ** 0.5)
    plain = optim.Optimizer(lambda p: (), lambda g, s, p: (tree.map_(lambda g: -(2.0**-11) * g.float(), g), s))
    params, specs = forms[0]
    nearest, _ = trained(plain, params, [tree.map_(torch.ones_like, params)] * 4, specs)
    assert torch.equal(nearest["w"], ones), "to nearest they are lost"


@sl.pytree
class Line:
    w: torch.Tensor = sl.spec("a/dp b", dtype=torch.bfloat16)


@sl.pytree
class Lines:
    lines: Line = sl.stack("layers")


def test_stochastic_rounding_draws_for_every_layer_its_own() -> None:
    """A stack of a class as a list of its layers; layers of a list that have other shapes."""
    ours = optim.stochastic_rounding(optim.sgd(2.0**-11))
    ones = torch.ones(3, 16, 64, dtype=torch.bfloat16)

    def rounded(params: Any, specs: Any) -> list[torch.Tensor]:
        return tree.leaves(trained(ours, params, [tree.map_(torch.ones_like, params)], specs)[0])

    (stacked,) = rounded(Lines(lines=Line(w=ones)), sl.specs(Lines))
    listed = {"lines": [Line(w=w) for w in ones]}
    assert torch.equal(stacked, torch.stack(rounded(listed, {"lines": [sl.specs(Line)] * 3})))
    a, b = rounded([ones[0], ones[0].view(8, 128)], ["a b", "a b"])
    assert not torch.equal(a.flatten(), b.flatten()) and not torch.equal(a.flatten()[512:], b.flatten()[:512])
