"""A mixture of experts: the best two of each token, room for so many in each expert, two all_to_alls.

Experts lie over `ep`, which is folded into data parallelism: `dp` is the group `edp/ep`, and cuts the batch. A leaf
that is split over `ep` is cut by ZeRO over the rest of the group.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl


@sl.pytree
class MoE:
    router: Tensor = sl.spec("model experts")
    w_in: Tensor = sl.spec("experts/ep model/edp hidden/tp")
    w_out: Tensor = sl.spec("experts/ep hidden/tp model/edp")


def route(p: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a rank does by itself with the probabilities of its tokens, `"tokens experts"`.

    Of each choice: its weight, expert (one-hot), slot of all experts' slots, whether it fits, and expert (number).
    """
    gate, expert = p.topk(2)
    e = expert.T.reshape(-1)  # first choices queue before second choices
    hot = F.one_hot(e, p.shape[-1])
    at = (hot.cumsum(0) * hot).sum(-1) - 1
    keep = at < capacity
    slot = torch.where(keep, e * capacity + at, p.shape[-1] * capacity)  # one past the last: dropped
    weight = keep * (gate / gate.sum(-1, keepdim=True)).T.reshape(-1)
    return weight[:, None], hot, slot, keep, e


def moe(w: MoE, x: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """`"tokens/dp model"` -> the same, the load-balance term (Fedus et al. 2021), and the share of choices dropped."""
    p = sl.einsum("tokens/dp model, model experts -> tokens/dp experts", x, sl.gather(w.router, "dp")).softmax(-1)
    weight, hot, slot, keep, _ = route(p, capacity)
    send = x.new_zeros(p.shape[-1] * capacity + 1, x.shape[-1]).index_add(0, slot, x.repeat(2, 1))[:-1]
    send = send.unflatten(0, (-1, capacity))
    got = sl.all_to_all("experts slots/edp/ep model -> experts/ep slots/edp model", send)
    w_in, w_out = sl.gather((w.w_in, w.w_out), "edp")
    h = F.gelu(
        sl.einsum("experts/ep slots/edp model, experts/ep model hidden/tp -> experts/ep slots/edp hidden/tp", got, w_in)
    )
    out = sl.einsum(
        "experts/ep slots/edp hidden/tp, experts/ep hidden/tp model -> experts/ep slots/edp model +tp", h, w_out
    )
    back = sl.all_to_all("experts/ep slots/edp model +tp -> experts slots/edp/ep model +tp", out).flatten(0, 1)
    y = back[slot.clamp(max=len(back) - 1)] * weight
    y = sl.psum("tokens/dp model +tp -> tokens/dp model", y.unflatten(0, (2, -1)).sum(0))  # tokens are fewer than slots
    f, q = sl.pmean((hot.to(p.dtype).mean(0), p.mean(0)), "dp")
    return y, p.shape[-1] * (f * q).sum(), sl.pmean(1 - keep.to(p.dtype).mean(), "dp")


def loss(w: MoE, b: dict[str, Tensor]) -> Any:
    """The squared error of tokens by their weight, plus the load-balance term of each micro-batch."""
    x = b["x"].flatten(0, 1)
    y, aux, dropped = moe(w, x, capacity=len(x) // 2)
    error = sl.Mean.of("batch/dp seq", ((x + y).view_as(b["x"]) - b["y"]).square().sum(-1), b["weight"])
    return error + 0.01 * sl.Mean(aux, 1.0), sl.Aux(metrics={"aux": aux, "dropped": dropped})


def main() -> None:
    """Eight ranks in this process learn to turn one random vector into another."""
    x, y = torch.randn(2, 16, 4, 8, generator=torch.Generator().manual_seed(0))
    with sl.make_mesh(dp=dict(edp=2, ep=2), tp=2, simulate=True):
        layout = sl.zero(sl.specs(MoE), axis="dp", stage=3)
        step = sl.jit(sl.step(loss, sl.optim.adamw(1e-2), layout=layout), donate_argnums=0)
        state = step.init(sl.init(MoE, sizes=dict(model=8, experts=4, hidden=16), key=sl.random.key(0)))
        batch = sl.shard({"x": x, "y": y, "weight": torch.ones(16, 4)}, "batch/dp ...")
        sl.show(state.params)
        for i in range(20):
            state, metrics = step(state, batch)
            if i % 10 == 9:
                print(f"step {i + 1}: " + ", ".join(f"{k} {metrics[k]:.3f}" for k in ("loss", "aux", "dropped")))


if __name__ == "__main__":
    main()
