"""sl.testing: losses, the collectives of steps and optimizers, on any mesh; every kind of fault is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Net
from torch import Tensor

import shardlib as sl
from shardlib import optim, tree

GRID = dict(dp=2, tp=2)

# ---- check_loss

NET = Net(layers=1, split_vocab=True, vocab=8)


def net_specs() -> Any:
    shapes = NET.shapes()
    block = {n: sl.stack(s, "layers") for n, (s, _) in shapes.pop("block").items()}
    return {n: s for n, (s, _) in shapes.items()} | {"blocks": block}


def check_net(loss: Callable[..., Any], **options: Any) -> None:
    with sl.make_mesh(dp=3, tp=1, simulate=True):  # the arrays may lie on any mesh
        params, batch = sl.shard(NET.params(), net_specs()), sl.shard(NET.batch(12, 2), NET.batch_spec)
    sl.testing.check_loss(loss, params, batch, **options)


def test_a_loss_is_what_it_is_on_one_rank() -> None:
    check_net(NET.loss, mesh=GRID, layout=sl.zero(net_specs(), stage=2), accumulate=3)


def test_a_loss_that_is_not() -> None:
    def scaled(p: Any, b: Any) -> Any:
        return NET.loss(p, b) * sl.axis_size("tp")

    message = (
        r"(?s)`scaled` on Mesh\(dp=1,tp=2, simulated\) is not what it is on one rank\n  the loss differs: .*\n"
        r"  the gradient of `blocks.b_in` differs: largest difference .* held by rank \d: [^\n]*$"
    )
    with pytest.raises(AssertionError, match=message):
        check_net(scaled, mesh=dict(dp=1, tp=2))

    def lost(p: Any, b: Any) -> Any:
        head = p["embed"] if sl.axis_size("dp") == 1 else sl.gather(p["embed"], ()).detach()
        return NET.loss({**p, "embed": head}, b)

    with pytest.raises(AssertionError, match=r"one rank\n  the gradient of `embed` differs"):
        check_net(lost, mesh=dict(dp=2, tp=1))


@sl.pytree
class Mlp:
    w_in: Tensor = sl.spec("model/dp hidden/tp")
    w_out: Tensor = sl.spec("hidden/tp model/dp")


@sl.pytree
class Rows:
    x: Tensor = sl.spec("batch/dp model")


def mlp_loss(w: Mlp, batch: Rows) -> sl.Mean:
    w = sl.gather(w, "dp")
    h = sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", batch.x, w.w_in).tanh()
    y = sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", h, w.w_out)
    return sl.Mean.of("batch/dp model", sl.psum("batch/dp model +tp -> batch/dp model", y) ** 2)


MLP, ROWS = Mlp(w_in=torch.randn(4, 6), w_out=torch.randn(6, 4)), Rows(x=torch.randn(8, 4))


def test_a_loss_of_which_a_part_is_trained() -> None:
    """Leaves that have no gradient: integers, and what is frozen; the message names what is trained."""
    positions = torch.arange(4)

    def loss(p: Any, b: Any) -> sl.Mean:
        w_in = p["w_in"] * (1 + p["at"][:, None])
        h = sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", b.x, w_in).tanh()
        y = sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", h, p["w_out"])
        y = sl.psum("batch/dp model +tp -> batch/dp model", y) * sl.axis_size("dp")
        return sl.Mean.of("batch/dp model", y**2)

    specs = {"w_in": "model hidden/tp", "w_out": "hidden/tp model", "at": "model"}
    with sl.make_mesh(dp=1, tp=1, simulate=True):
        params = sl.shard({"w_in": MLP.w_in, "w_out": MLP.w_out, "at": positions}, specs)
    sl.testing.check_loss(loss, params, ROWS, mesh=dict(dp=1, tp=2), trainable="w_*")
    with pytest.raises(AssertionError, match="the gradient of `w_out` differs"):
        sl.testing.check_loss(loss, params, ROWS, mesh=dict(dp=2, tp=1), trainable="w_out")
    with pytest.raises(sl.TreeError, match="step: trainable: `v` matches no path"):
        sl.testing.check_loss(loss, params, ROWS, mesh=GRID, trainable="v")


def test_plain_trees_with_annotations() -> None:
    sl.testing.check_loss(mlp_loss, MLP, ROWS, mesh=GRID)
    assert type(MLP.w_in) is Tensor


# ---- collectives


def test_collectives_of_a_step_on_any_mesh() -> None:
    train = sl.jit(sl.step(mlp_loss, optim.sgd(0.1), clip=1.0, accumulate=2), donate_argnums=0)
    with sl.make_mesh(dp=1, tp=2, simulate=True):
        state = train.init(sl.shard(MLP))
        abstract = sl.abstract(lambda: state)
    count = {"all_gather:dp": 4, "psum_scatter:dp": 4}
    for s in (state, abstract):
        assert sl.testing.collectives(train, s, ROWS, mesh=dict(dp=4, tp=1)) == count
    assert sl.testing.collectives(train, state, ROWS, mesh=GRID) == count | {"psum:tp": 2}
    scalars = sl.testing.collectives(train, state, ROWS, mesh=dict(dp=4, tp=1), scalars=True)
    assert scalars.items() > count.items() and "psum:dp" in scalars
    assert train.traces == [] and tree.leaves(state.params)[0].shards[0].shape == (4, 3)
    with pytest.raises(sl.MeshError, match=r"argument 0, `params.w_in`: the mesh has no axis `tp`"):
        sl.testing.collectives(train, state, ROWS, mesh=dict(dp=4))


def test_collectives_of_a_function_on_arrays() -> None:
    total = sl.shard_map(lambda m, k: sl.psum(m.w_in.sum(0) * k, "dp"), in_specs=None, out_specs="hidden/tp")
    jitted = sl.jit(lambda m, k: total(m, k), static_argnums=1)
    assert sl.testing.collectives(total, MLP, 2.0, mesh=GRID) == {"psum:dp": 1}
    assert sl.testing.collectives(jitted, MLP, 2.0, mesh=GRID) == {"psum:dp": 1}


# ---- check_optimizer

SGD = optim.sgd(0.1)


def of_gradients(change: Callable[[Tensor, Tensor], Tensor]) -> optim.Optimizer:
    """SGD on changed gradients."""
    return optim.Optimizer(SGD.init, lambda g, s, p: SGD.update(tree.map_(change, g, p), s, p))


def plain(change: Callable[[Tensor], Tensor], init: Callable[[Any], Any] = lambda _: ()) -> optim.Optimizer:
    """SGD in the dtype of the leaf."""
    return optim.Optimizer(init, lambda g, s, p: (tree.map_(lambda g: -0.1 * change(g), g), s))


BROKEN = {
    "state and parameters keep": [
        optim.Optimizer(
            lambda p: {"n": torch.zeros((), dtype=torch.float64)}, lambda g, s, p: (g, {"n": s["n"].float()})
        ),
        optim.Optimizer(lambda p: (), lambda g, s, p: (g, tree.map_(torch.zeros_like, p))),
        plain(lambda g: g[None]),
        optim.Optimizer(lambda p: (), lambda g, s, p: (tree.leaves(g), s)),
    ],
    "updates are the same on every mesh and ZeRO stage, not on": [
        of_gradients(lambda g, p: g / (1 + g.float().norm()).to(g.dtype)),
        of_gradients(lambda g, p: g * p.numel() if p.dim() == 2 else g),
    ],
    "a stacked leaf trains as": [of_gradients(lambda g, p: g + p if p.dim() >= 2 else g)],
    "a 16-bit leaf follows": [plain(lambda g: g)],
    "a gradient of zeros": [of_gradients(lambda g, p: g / g.abs())],
}


@pytest.mark.parametrize(("rule", "number"), [(r, n) for r, made in BROKEN.items() for n in range(len(made))])
def test_broken_optimizers(rule: str, number: int) -> None:
    with pytest.raises(AssertionError, match=f"check_optimizer: {rule}"):
        sl.testing.check_optimizer(BROKEN[rule][number])
