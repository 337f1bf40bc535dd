"""A GPT over three axes: data (ZeRO-1), tensor and sequence parallel, and a pipeline, from one `step`.

    python examples/pipeline_3d.py                                       dp=2, tp=2, pp=2: eight ranks in this process
    python examples/pipeline_3d.py zbv                                   another schedule
    torchrun --nproc-per-node 4 examples/pipeline_3d.py                  a process per rank, dp = what is left of pp=2

The model is that of `tied_gpt.py`, whose one loss is here three functions; blocks and batches are those of `gpt.py`.
"""

import os
import sys
from typing import Any

from torch import Tensor

import gpt
import shardlib as sl
from gpt import Batch, Block, block, norm
from tied_gpt import data


@sl.pytree
class GPT:
    embed: Tensor = sl.spec("vocab/tp/pp model/dp")  # both ends use it: split over pp at rest, whole in a step
    blocks: Block = sl.stack("v layers/pp")  # v stages on every rank
    norm: Tensor = sl.spec("model/dp")


def first(w: GPT, b: Batch, key: Tensor | None) -> Tensor:
    e = sl.gather(w.embed, "dp")
    x = sl.embed("vocab/tp model, batch/dp seq -> batch/dp seq model +tp", e, b.tokens)
    x = sl.psum_scatter("batch/dp seq model +tp -> batch/dp seq/tp model", x)
    return sl.dropout("batch/dp seq/tp model", x, key, 0.1)


def stage(blocks: Block, x: Tensor, b: Batch) -> Tensor:
    rope = gpt.rotary(b.tokens.shape[1], blocks.w_qkv.shape[-1], x.device)
    return sl.scan(lambda x, w: (sl.remat(block)(w, x, rope), None), x, blocks)[0]


def last(w: GPT, x: Tensor, b: Batch) -> sl.Mean:
    h = sl.all_gather("batch/dp seq/tp model -> batch/dp seq model", norm(x, sl.gather(w.norm, "dp")))
    e = sl.gather(w.embed, "dp")
    logits = sl.einsum("batch/dp seq model, vocab/tp model -> batch/dp seq vocab/tp", h, e)
    return sl.token_loss("batch/dp seq vocab/tp, batch/dp seq", logits, b.targets)


SCHEDULES: dict[str, Any] = {
    "one_f_one_b": sl.schedules.one_f_one_b(4),
    "zero_bubble": sl.schedules.zero_bubble(4),
    "interleaved": sl.schedules.interleaved(4, v=2),
    "zbv": sl.schedules.zbv(4),
    "dualpipe_v": sl.schedules.dualpipe_v(4),
}


def train(mesh: sl.Mesh, schedule: Any, steps: int, layers: int = 4) -> tuple[float, float]:
    """The first and the last loss."""
    sizes = gpt.sizes(vocab=32, layers=layers, model=16, heads=2)
    v = schedule(mesh.size("pp")).stages // mesh.size("pp")
    loss = sl.pipeline(first, stage, last, schedule, axis="pp")
    layout = sl.zero(sl.specs(GPT), axis="dp", stage=1)
    step = sl.jit(sl.step(loss, sl.optim.adamw(2e-2), layout=layout, clip=1.0), donate_argnums=0)
    losses = []
    with mesh:
        params = sl.init(GPT, sizes=sizes | {"v": v, "layers": layers // v}, key=sl.random.key(0))
        state = step.init(params, key=sl.random.key(1))
        for i in range(steps):
            state, metrics = step(state, sl.shard(data(i, 16), Batch))
            losses.append(metrics["loss"].item())
    return losses[0], losses[-1]


def main(name: str = "one_f_one_b", steps: int = 10) -> None:
    launched = "WORLD_SIZE" in os.environ
    mesh = sl.make_mesh(dp=-1, tp=1, pp=2) if launched else sl.make_mesh(dp=2, tp=2, pp=2, simulate=True)
    schedule = SCHEDULES[name]
    if mesh.rank == 0:
        schedule(mesh.size("pp")).show()
    begin, end = train(mesh, schedule, steps)
    if mesh.rank == 0:
        print(f"{mesh.name}: loss {begin:.3f} -> {end:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "one_f_one_b")
