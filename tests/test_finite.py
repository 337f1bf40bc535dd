"""check_finite: what is an error, which node is named, and that all ranks stop."""

import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import tree

F64 = torch.float64
CHECKED = (*sl.passes.default, sl.passes.check_finite)


def loss(params: Any, batch: Any) -> sl.Mean:
    w = sl.gather(params["w"], "dp")
    h = torch.tanh(batch["x"] @ w)
    keep = torch.ones(h.shape[-1], h.shape[-1], dtype=torch.bool).tril()
    scores = (h[:, :, None] * h[:, None, :]).masked_fill(~keep, -torch.inf)
    late = torch.where(keep, 0.0, -torch.inf)  # masks by hand and as attention has them
    h = (torch.softmax(scores + late, -1) @ h[..., None]).squeeze(-1)
    h = h + F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=h[:, :1].T > -2)[0]
    root = torch.sqrt(params["v"])  # whose slope at zero is infinite
    return sl.Mean.of("batch/dp n", h * torch.log(batch["scale"]) * root)


@cache
def stepper(accumulate: int, passes: Any) -> Any:
    """A step and what it is jitted to: traced once for each mesh."""
    layout = sl.zero({"w": "m/dp n", "v": "n"}, stage=3)
    step = sl.step(loss, sl.optim.adamw(1e-2), layout=layout, accumulate=accumulate, clip=1.0)
    return step, sl.jit(step, passes=passes, donate_argnums=0)


def trained(mesh: sl.Mesh, accumulate: int = 1, passes: Any = CHECKED, **bad: Any) -> Any:
    """A step on a batch in which `bad` says what is put where: name=(index, value)."""
    g = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(6, 5, generator=g, dtype=F64), "v": torch.rand(5, generator=g, dtype=F64) + 0.5}
    batch = {"x": torch.randn(12, 6, generator=g, dtype=F64), "scale": 1 + torch.rand(12, 1, generator=g, dtype=F64)}
    for name, (index, value) in bad.items():
        (params | batch)[name][index] = value
    with mesh:
        step, run = stepper(accumulate, passes)
        state = step.init(sl.shard(params, {"w": "m/dp n", "v": "n"}))
        return run(state, sl.shard(batch, {"x": "batch/dp m", "scale": "batch/dp one"}))


# what is put where; on which of two ranks it is seen first; what the message says
CASES = {
    "log of a negative number": (
        dict(scale=(10, -1.0)),
        r"on rank 1 \(dp=1\): a NaN made by `log` in the forward pass at .*test_finite.py:\d+: return sl.Mean",
    ),
    "an infinity times zero": (
        dict(scale=(3, 0.0), w=(slice(None), 0.0)),
        r"on rank 0 \(dp=0\): a NaN made by `mul` in the forward pass .*\n"
        r"  of an infinity made by `log` in the forward pass at .*test_finite.py:\d+: return sl.Mean",
    ),
    "an infinite loss": (
        dict(scale=(10, 0.0)),
        r"on rank 1 \(dp=1\): (.|\n)*an infinity made by `log` in the forward pass at .*",
    ),
    "an infinite gradient": (
        dict(v=(2, 0.0)),
        r"on ranks? 0(.|\n)*an infinity in the gradient of `v`, made by `div` in the backward .*: root = torch.sqrt",
    ),
    "a NaN that comes in": (dict(x=((7, 3), torch.nan)), r"on rank 1 \(dp=1\): a NaN in the input `1.x`"),
    "a NaN in the state": (dict(v=(1, torch.nan)), r"on ranks 0, 1: a NaN in the input `0.params.v`"),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("bad, said", CASES.values(), ids=CASES)
def test_what_is_named(bad: Any, said: str, accumulate: int):
    with pytest.raises(sl.ShardError, match=rf"first value that is not finite, {said}"):
        trained(sl.make_mesh(dp=2, simulate=True), accumulate, **bad)


def test_a_gradient_is_named_by_its_leaf():
    def f(params: Any, x: Tensor) -> sl.Mean:
        return sl.Mean.of("batch/dp n", x * torch.sqrt(sl.gather(params, "dp")["blocks"][1]["w"]))

    params = {"blocks": [{"w": torch.ones(3)}, {"w": torch.tensor([1.0, 0.0, 2.0, 1.0])}]}
    specs = {"blocks": [{"w": "m"}, {"w": "n/dp"}]}
    with sl.make_mesh(dp=2, simulate=True):
        step = sl.step(f, sl.optim.sgd(0.1), layout=sl.zero(specs, stage=3))
        state = step.init(sl.shard(params, specs))
        said = r"an infinity in the gradient of `blocks.1.w`, made by `div` in the backward pass at .*: return sl.Mean"
        with pytest.raises(sl.ShardError, match=said):
            sl.jit(step, passes=CHECKED)(state, sl.shard(torch.ones(4, 4), "batch/dp n"))


def test_all_processes_raise_the_same():
    cases = [(bad, said) for bad, said in CASES.values() if "v" not in bad]

    def body() -> list[str]:
        found = []
        for bad, _ in cases:
            try:
                trained(sl.make_mesh(dp=2), 3, **bad)
            except sl.ShardError as e:
                found.append(str(e))
        return found

    first, second = on_ranks(2, body)
    assert first == second
    assert all(re.search(said, text) for text, (_, said) in zip(first, cases, strict=True))


def test_what_is_finite_stays_as_it_is():
    """-inf in masks is no error, and nothing else changes."""
    found, want = (trained(sl.make_mesh(dp=2, simulate=True), 3, p) for p in (CHECKED, sl.passes.default))
    for a, b in zip(*(tree.leaves((sl.gather(state), metrics)) for state, metrics in (found, want)), strict=True):
        assert torch.equal(a, b)


def test_one_more_collective():
    def sent(passes: Any) -> list[Any]:
        with sl.make_mesh(dp=2, tp=3, simulate=True):
            x = sl.shard(torch.ones(4, 4), "n/dp m")
            f = sl.shard_map(lambda x: sl.psum(sl.pending(x, "dp"), "dp"), in_specs=None, out_specs="n m")
            return sl.jit(f, passes=passes).lower(x).collectives()

    more = sent(CHECKED)[len(sent(sl.passes.default)) :]
    assert [(c.op, c.axis, c.shape) for c in more] == [("all_gather", "dp,tp", (1,))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64, torch.float64])
def test_dtypes(dtype: torch.dtype):
    run = sl.jit(sl.shard_map(lambda x, y: x / y, in_specs=None, out_specs="n/dp"), passes=CHECKED)
    x, y = torch.ones(6, dtype=dtype), torch.ones(6, dtype=dtype)
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        run(*(sl.shard(v, "n/dp") for v in (x, y)))
        run(*(sl.shard(v[:0], "n/dp") for v in (x, y)))
        y[5] = 0
        what = "a NaN" if dtype.is_complex else "an infinity"  # 1 / 0 has no direction
        with pytest.raises(sl.ShardError, match=f"on ranks 2, 3: {what} made by `div` at"):
            run(*(sl.shard(v, "n/dp") for v in (x, y)))
        with pytest.raises(sl.ShardError, match="on ranks 2, 3: a NaN made by `div` at"):
            run(*(sl.shard(v * (y != 0), "n/dp") for v in (x, y)))


def test_what_a_turn_sends_is_named():
    """The sum's wait has left the turn; the infinity is the turn's."""

    def f(x: Tensor, ws: Tensor) -> Tensor:
        _, ys = sl.scan(lambda c, w: (c, sl.psum(w / c, "dp")), x, ws)
        return ys

    with sl.make_mesh(dp=2, simulate=True):
        run = sl.jit(sl.shard_map(f, in_specs=("n/dp", "layers n/dp"), out_specs="layers n"), passes=CHECKED)
        args = sl.shard(torch.tensor([1.0, 2.0]), "n/dp"), sl.shard(torch.ones(3, 2), "layers n/dp")
        assert run(*args).shape == (3, 1)
        with pytest.raises(
            sl.ShardError, match=r"on rank 1 \(dp=1\): an infinity made by `div` in the forward pass at"
        ):
            run(sl.shard(torch.tensor([1.0, 0.0]), "n/dp"), args[1])
