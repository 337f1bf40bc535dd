"""The mixture of experts of the examples: experts over ep, which is folded into dp. C10, C11, C28."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from moe import MoE, loss, route

F64, E, M, H, ROWS, SEQ = torch.float64, 4, 6, 10, 8, 3
R = torch.Generator().manual_seed(4)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=R, dtype=F64)


def plain(w: dict[str, Tensor], b: dict[str, Tensor], ranks: int, pieces: int) -> tuple[Tensor, Tensor]:
    """The loss and the share dropped in one process: every rank's rows of every micro-batch queue by themselves."""
    total, aux, dropped = torch.zeros((), dtype=F64), torch.zeros((), dtype=F64), 0.0
    rows = ROWS // ranks // pieces
    cut = {k: v.unflatten(0, (ranks, pieces, rows)) for k, v in b.items()}
    for m in range(pieces):
        fs, qs = [], []
        for r in range(ranks):
            x = cut["x"][r, m].flatten(0, 1)
            p = (x @ w["router"]).softmax(-1)
            weight, hot, _, keep, e = route(p, len(x) // 2)
            each = torch.stack([F.gelu(x @ w["w_in"][i]) @ w["w_out"][i] for i in range(E)])
            y = (each[e, torch.arange(len(x)).repeat(2)] * weight).unflatten(0, (2, -1)).sum(0)
            error = ((x + y).view_as(cut["x"][r, m]) - cut["y"][r, m]).square().sum(-1)
            total = total + (error * cut["weight"][r, m]).sum()
            fs.append(hot.double().mean(0))
            qs.append(p.mean(0))
            dropped += 1 - keep.double().mean().item()
        aux = aux + E * (torch.stack(fs).mean(0) * torch.stack(qs).mean(0)).sum()
    return total / b["weight"].sum() + 0.01 * aux / pieces, torch.tensor(dropped / ranks / pieces, dtype=F64)


PARAMS = {"router": draw(M, E) * 2, "w_in": draw(E, M, H), "w_out": draw(E, H, M)}
BATCH = {
    "x": draw(ROWS, SEQ, M),
    "y": draw(ROWS, SEQ, M),
    "weight": torch.randint(0, 3, (ROWS, SEQ), generator=R) * 0.5,
}
BATCH["weight"] = BATCH["weight"].double()


@pytest.mark.parametrize(
    ("axes", "count", "stage", "jitted"),
    [
        (dict(edp=2, ep=2, tp=2), 1, 3, True),
        (dict(edp=2, ep=2, tp=1), 2, 3, False),
        (dict(edp=1, ep=4, tp=1), 2, 1, True),
        (dict(edp=2, ep=1, tp=2), 4, 2, False),
    ],
    ids=str,
)
def test_program_of_experts(axes: dict[str, int], count: int, stage: int, jitted: bool) -> None:
    """Loss, gradients, metrics against one process with the same routing and capacity in each micro-batch."""
    ranks, specs = axes["edp"] * axes["ep"], sl.specs(MoE)
    grads, (value, dropped) = torch.func.grad_and_value(lambda w: plain(w, BATCH, ranks, count), has_aux=True)(PARAMS)
    assert 0 < dropped < 0.5
    with sl.make_mesh(dp=dict(edp=axes["edp"], ep=axes["ep"]), tp=axes["tp"], simulate=True):
        step = sl.step(loss, sl.optim.sgd(1.0), layout=sl.zero(specs, axis="dp", stage=stage), accumulate=count)
        state = step.init(sl.shard(MoE(**PARAMS), specs))
        state, metrics = (sl.jit(step) if jitted else step)(state, sl.shard(BATCH, "batch/dp ..."))
        new = sl.gather(state.params)
    torch.testing.assert_close((metrics["loss"], metrics["dropped"]), (value, dropped), rtol=1e-13, atol=1e-13)
    for name, g in grads.items():
        torch.testing.assert_close(PARAMS[name] - getattr(new, name), g, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_c10_gradients_of_experts(ep: int) -> None:
    """Fixed top-1 routing, token i to expert i mod 4, the mean over all tokens: no factor ep in experts' gradients."""
    x, w = draw(16, M), draw(E, M)

    def fixed(w: Tensor, b: Tensor) -> sl.Mean:
        send = b.unflatten(0, (-1, E)).transpose(0, 1)
        got = sl.all_to_all("experts slots/edp/ep model -> experts/ep slots/edp model", send)
        y = sl.einsum("experts/ep slots/edp model, experts/ep model -> experts/ep slots/edp", got, w).tanh()
        return sl.Mean.of("experts/ep slots/edp", y)

    wanted = torch.func.grad(lambda w: (x.unflatten(0, (-1, E)) * w).sum(-1).tanh().mean())(w)
    with sl.make_mesh(dp=dict(edp=4 // ep, ep=ep), simulate=True):
        step = sl.step(fixed, sl.optim.sgd(1.0))
        state, _ = step(step.init(sl.shard(w, "experts/ep model")), sl.shard(x, "tokens/dp model"))
        torch.testing.assert_close(w - sl.gather(state.params), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (1, 2)])
def test_c11_tokens_counted_over_context(dp: int, cp: int) -> None:
    """2 x 16 tokens: 32, however they are cut."""

    def counted(w: Tensor, x: Tensor) -> sl.Mean:
        return sl.Mean.of("batch/dp seq/cp", w * x)

    x = draw(2, 16)
    with sl.make_mesh(dp=dp, cp=cp, simulate=True):
        step = sl.step(counted, sl.optim.sgd(1.0))
        state, metrics = step(step.init(sl.shard(torch.zeros((), dtype=F64), "")), sl.shard(x, "batch/dp seq/cp"))
        assert metrics["tokens"].item() == 32
        torch.testing.assert_close(-sl.gather(state.params), x.mean())


def test_c28_heads_that_do_not_divide() -> None:
    x = torch.zeros(12)
    with sl.make_mesh(tp=4, simulate=True), pytest.raises(sl.SpecError) as error:
        f = sl.shard_map(lambda x: sl.rearrange("(h d)/tp -> h/tp d", x, h=6), in_specs="n/tp", out_specs="h/tp d")
        f(sl.shard(x, "n/tp"))
    assert "`h` is 6, which does not divide by 4, the size of `tp`" in str(error.value)
    assert "  pattern: (h d)/tp -> h/tp d\n" in str(error.value)
