"""What goes between stages, and what a pipeline's state is: any tree, extra, files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from piped import batch, error, first, last, model, specs, stage, weights
from torch import Tensor

import shardlib as sl
from shardlib import schedules, tree
from shardlib.errors import ShardError

# ---- any tree between stages


def several(p: Any, mb: Any) -> Any:
    """Floats, integers, bools and a 0-d tensor; what no stage changes has a gradient, too."""
    x = first(p, mb)
    return {
        "x": x["x"],
        "ids": (mb["tokens"], [x["whole"]]),
        "scale": sl.gather(p["norm"], "dp").sum() * 0.1,
        "count": torch.zeros((), dtype=torch.int32),
    }


def wider(blocks: Any, x: Any, mb: Any) -> Any:
    """Another shape than it is given: a row is put before those that are there."""
    given = {"x": x["x"][:, -mb["tokens"].shape[1] :], "whole": x["ids"][1][0]}
    h = stage(blocks, given, mb)["x"] * x["scale"]
    return x | {"x": torch.cat([h[:, :1], h], 1), "count": x["count"] + 1}


def weighed(p: Any, x: Any, mb: Any) -> Any:
    h = x["x"][:, -mb["tokens"].shape[1] :] * (1 + x["count"]) + x["ids"][0].unsqueeze(-1) * x["scale"]
    return last(p, {"x": h, "whole": x["ids"][1][0]}, mb)


def outcome(functions: Any, schedule: Any, pp: int, layers: int = 4) -> tuple[dict[str, float], list[Tensor]]:
    """The metrics of a step and its parameters."""
    at_start, each, at_end = functions
    loss = sl.pipeline(at_start, each, at_end, schedule)
    step = sl.step(loss, sl.optim.sgd(0.1), layout=sl.zero(specs(True, 1), "dp", 2))
    with sl.make_mesh(dp=1, tp=1, pp=pp, simulate=True):
        state = step.init(sl.shard(model(weights(layers, True), 1), specs(True, 1)))
        state, metrics = step(state, sl.shard(batch(8, 0), "batch/dp seq"))
        return {k: v.item() for k, v in metrics.items()}, tree.leaves(sl.gather(state.params))


def by_number(blocks: Any, x: Any, mb: Any) -> Any:
    """The layers of a stage, without a `scan`: their gradients are no stack."""
    h = x["x"]
    for i in range(blocks["w_in"].shape[0]):
        y = torch.tanh(h @ blocks["w_in"][i]) @ blocks["w_out"][i]
        h = h + sl.psum("batch/dp seq model +tp -> batch/dp seq model", y)
    return x | {"x": h}


@pytest.mark.parametrize("schedule", [schedules.gpipe(2), schedules.zero_bubble(3)], ids=["gpipe", "zero_bubble"])
@pytest.mark.parametrize("layers", [3, 5])
def test_uneven_layers_taken_by_number(schedule: Any, layers: int) -> None:
    """What pads the stage of fewer layers counts neither in the norm nor in the parameters."""
    loss = sl.pipeline(first, by_number, last, schedule)
    assert error(schedule, pp=2, layers=layers, rows=6, clip=0.1, loss=loss) < 1e-12


def by_hand(layers: list[int]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of these functions in plain torch, layers in stages of so many."""
    p, mb = {k: x.requires_grad_() for k, x in weights(sum(layers), True).items()}, batch(8, 0)
    x, scale, at = p["embed"][mb["tokens"]], p["norm"].sum() * 0.1, 0
    for n in layers:
        for i in range(at, at + n):
            x = x + torch.tanh(x @ p["w_in"][i]) @ p["w_out"][i]
        x, at = x * scale, at + n
    x = x * (1 + len(layers)) + mb["tokens"].unsqueeze(-1) * scale
    x = x * p["norm"] * torch.where(mb["tokens"] > 0, 1.0, 0.5).double().unsqueeze(-1)
    logits, targets = x @ p["embed"].t(), mb["targets"].flatten()
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0), reduction="none")
    loss = (each * (targets >= 0)).sum() / (targets >= 0).sum()
    return loss.item(), dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b(4), schedules.zero_bubble(2)])
def test_any_tree_between_stages(schedule: Any) -> None:
    """Nested, of several dtypes, 0-d, of another shape after every stage; stages of 2, 2 and 1 layers."""
    metrics, params = outcome((several, wider, weighed), schedule, 3, layers=5)
    value, grads = by_hand([2, 2, 1])
    assert metrics["loss"] == pytest.approx(value, abs=1e-12)
    wanted = model({k: x - 0.1 * grads[k] for k, x in weights(5, True).items()}, 1)
    for a, b in zip(params, tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_nothing_that_has_a_gradient_between_stages() -> None:
    """Integers alone: the stages before the last learn nothing, and say so by gradients of zero."""

    def ids(p: Any, mb: Any) -> Any:
        return mb["tokens"]

    def same(blocks: Any, x: Any, mb: Any) -> Any:
        return x

    def read(p: Any, x: Any, mb: Any) -> Any:
        return last(p, first(p, {"tokens": x}), mb)

    metrics, params = outcome((ids, same, read), schedules.one_f_one_b(2), 2)
    p = weights(4, True)
    assert metrics["grad_norm"] > 0 and not torch.equal(params[1], p["embed"])
    for a, b in zip(params[:1], [model(p, 1)["blocks"]["w_in"]], strict=True):
        assert torch.equal(a, b)


# ---- extra


def counting(p: Any, x: Any, mb: Any, extra: Any) -> Any:
    """A running mean over micro-batches, an integer and a bool."""
    loss, aux = last(p, x, mb)
    now = sl.pmean(x["x"].mean((0, 1)), "dp")
    return loss, sl.Aux(aux.metrics, {"mean": extra["mean"] * 0.5 + now, "n": extra["n"] + 1, "odd": ~extra["odd"]})


def shifted(p: Any, mb: Any, extra: Any) -> Any:
    x = first(p, mb)
    return x | {"x": x["x"] + extra["mean"]}


EXTRA = {"mean": torch.arange(4.0).double(), "n": torch.zeros((), dtype=torch.int64), "odd": torch.tensor(False)}


@pytest.mark.parametrize("jit", [False, True])
def test_extra_goes_from_micro_batch_to_micro_batch(jit: bool) -> None:
    """`last` gets what the one before has left, `first` what the step began with; all ranks have it in the end."""
    loss = sl.pipeline(shifted, stage, counting, schedules.one_f_one_b(4))
    step = sl.step(loss, sl.optim.sgd(0.0), layout=sl.zero(specs(True, 1), "dp", 1))
    step = sl.jit(step) if jit else step
    extra, p, mean = EXTRA, weights(4, True), EXTRA["mean"]
    with sl.make_mesh(dp=2, tp=1, pp=2, simulate=True):
        at = {"mean": "model", "n": "", "odd": ""}
        state = step.init(sl.shard(model(p, 1), specs(True, 1)), extra=sl.shard(extra, at))
        for i in range(2):
            mb = batch(8, i)
            state, _ = step(state, sl.shard(mb, "batch/dp seq"))
            x = p["embed"][mb["tokens"]] + mean
            for a, b in zip(p["w_in"], p["w_out"], strict=True):
                x = x + torch.tanh(x @ a) @ b
            for k in range(4):  # rows k and 4 + k, one of either rank of dp
                mean = mean * 0.5 + x[[k, 4 + k]].mean((0, 1))
        got = sl.gather(state.extra)
        value = sl.evaluate(loss)(state.params, sl.shard(mb, "batch/dp seq"), extra=state.extra)[0].value
    assert got["n"] == 8 and not got["odd"] and value.isfinite()
    torch.testing.assert_close(got["mean"], mean, rtol=0, atol=1e-12)


def weighs_extra(p: Any, x: Any, mb: Any, extra: Any) -> Any:
    return sl.Mean.of("batch/dp seq", x["x"].sum(-1), weight=torch.ones_like(mb["tokens"]) * extra["n"])


def other_dtype(p: Any, x: Any, mb: Any, extra: Any) -> Any:
    return last(p, x, mb)[0], sl.Aux(extra=extra | {"n": extra["n"] * 1.0})


def by_rank(p: Any, x: Any, mb: Any, extra: Any) -> Any:
    return last(p, x, mb)[0], sl.Aux(extra=extra | {"mean": x["x"].mean((0, 1))})


@pytest.mark.parametrize(
    ("at_end", "given", "said"),
    [
        (weighs_extra, True, "the weight of the loss depends on `extra`, which changes from one micro-batch"),
        (other_dtype, True, r"the last function made `n` of its state f32\[\]; it was i64\[\]"),
        (
            by_rank,
            True,
            r"the last function made `mean` of its state f64\[4\] varying over dp.*; it was f64\[4\] equal",
        ),
        (counting, False, r"counting takes `extra=`, which was not given: step.init\(params, extra=...\)"),
    ],
)
def test_extra_that_cannot_be(at_end: Any, given: bool, said: str) -> None:
    step = sl.step(sl.pipeline(first, stage, at_end, schedules.gpipe(2)), sl.optim.sgd(0.1))
    with sl.make_mesh(dp=2, tp=1, pp=2, simulate=True):
        extra = sl.shard(EXTRA, {"mean": "model", "n": "", "odd": ""}) if given else None
        state = step.init(sl.shard(model(weights(4, True), 1), specs(True, 1)), extra=extra)
        with pytest.raises(ShardError, match=said):
            step(state, sl.shard(batch(4, 0), "batch/dp seq"))


# ---- files


@sl.pytree
class Block:
    w_in: Tensor = sl.spec("model/dp hidden/tp")
    w_out: Tensor = sl.spec("hidden/tp model/dp")


@sl.pytree
class Interleaved:
    embed: Tensor = sl.spec("vocab/pp model")
    blocks: Block = sl.stack("v layers/pp")


@sl.pytree
class Stages:
    embed: Tensor = sl.spec("vocab/pp model")
    blocks: Block = sl.stack("layers/pp")


@sl.pytree
class Layers:
    embed: Tensor = sl.spec("vocab model")
    blocks: list[Block] = sl.stack("layers")


def test_stages_restore_into_stages_of_other_numbers_and_into_lists(tmp_path: Path) -> None:
    """What interleaved stages have saved is what one stage a rank reads, and a list of layers, and back."""
    p = weights(4, True)
    stacked = Block(p["w_in"], p["w_out"])
    forms: dict[Any, Any] = {
        Interleaved: tree.map_(lambda x: x.unflatten(0, (2, 2)), stacked),
        Stages: stacked,
        Layers: [tree.map_(lambda x, i=i: x[i], stacked) for i in range(4)],
    }
    for form, blocks in forms.items():
        with sl.make_mesh(dp=2, tp=1, pp=2, simulate=True):
            sl.save(tmp_path / form.__name__, sl.shard(form(p["embed"], blocks)), step=1)
        for other, wanted in forms.items():
            with sl.make_mesh(dp=1, tp=2, pp=2, simulate=True):
                like = sl.shard(tree.map_(torch.zeros_like, other(p["embed"], wanted)))
                path = sl.latest(tmp_path / form.__name__)
                assert path is not None
                found = sl.gather(sl.restore(path, like=like))
            for a, b in zip(tree.leaves(found), [p["embed"], *tree.leaves(wanted)], strict=True):
                assert torch.equal(a, b), (form, other)


# ---- one leaf at both ends


@sl.pytree
class Ends:
    ends: dict[str, Tensor] = sl.stack("n")
    blocks: dict[str, Tensor] = sl.stack("layers/pp")


def test_both_ends_use_a_stacked_leaf_in_ways_of_their_own() -> None:
    """Layer by layer in the first function, whole in the last."""
    w, m = torch.randn(2, 3, dtype=torch.float64) / 2, torch.randn(4, 3, dtype=torch.float64) / 2
    x = torch.randn(8, 3, dtype=torch.float64)

    def begin(p: Any, mb: Tensor) -> Tensor:
        return sl.scan(lambda h, w: (torch.tanh(h * w["w"]), None), mb, p.ends)[0]

    def each(blocks: Any, h: Tensor, mb: Tensor) -> Tensor:
        return sl.scan(lambda h, w: (h + torch.tanh(h * w["m"]), None), h, blocks)[0]

    def end(p: Any, h: Tensor, mb: Tensor) -> sl.Mean:
        return sl.Mean.of("batch/dp model", (h * p.ends["w"].sum(0)) ** 2)

    leaves = w.clone().requires_grad_(), m.clone().requires_grad_()
    h = x
    for one in leaves[0]:
        h = torch.tanh(h * one)
    for one in leaves[1]:
        h = h + torch.tanh(h * one)
    wanted = torch.autograd.grad(((h * leaves[0].sum(0)) ** 2).mean(), leaves)
    step = sl.step(sl.pipeline(begin, each, end, schedules.one_f_one_b(2)), sl.optim.sgd(1.0))
    specs = Ends(ends={"w": sl.stack("model", "n")}, blocks={"m": sl.stack("model", "layers/pp")})
    with sl.make_mesh(dp=1, pp=1, simulate=True):
        state = step.init(sl.shard(Ends(ends={"w": w}, blocks={"m": m}), specs))
        new, _ = step(state, sl.shard(x, "batch/dp model"))
        for old, now, g in zip((w, m), tree.leaves(sl.gather(new.params)), wanted, strict=True):
            torch.testing.assert_close(old - now, g, rtol=0, atol=1e-12)
