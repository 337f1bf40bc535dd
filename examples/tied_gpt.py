"""A GPT whose ends share one table: tensor and sequence parallel, ZeRO-1, accumulation, dropout, saved and resumed.

    python examples/tied_gpt.py                              four ranks in this process
    torchrun --nproc-per-node 4 examples/tied_gpt.py         a process per rank

A second run goes on from the last save in `runs/tied`, on any number of ranks. Blocks and batches are those of
`gpt.py`.
"""

import math
import os
from pathlib import Path

import torch
from torch import Tensor

import gpt
import shardlib as sl
from gpt import Batch, Block, block, norm


@sl.pytree
class GPT:
    embed: Tensor = sl.spec("vocab/tp model/dp")  # the table of tokens, and the last matrix
    blocks: Block = sl.stack("layers")
    norm: Tensor = sl.spec("model/dp")


def loss(w: GPT, b: Batch, key: Tensor | None = None) -> sl.Mean:
    """`step` gives a key; without one, as in `evaluate`, nothing is dropped."""
    e = sl.gather(w.embed, "dp")
    rope = gpt.rotary(b.tokens.shape[1], w.blocks.w_qkv.shape[-1], e.device)
    x = sl.embed("vocab/tp model, batch/dp seq -> batch/dp seq model +tp", e, b.tokens)
    x = sl.psum_scatter("batch/dp seq model +tp -> batch/dp seq/tp model", x)
    x = sl.dropout("batch/dp seq/tp model", x, key, 0.1)
    x, _ = sl.scan(lambda x, w: (sl.remat(block)(w, x, rope), None), x, w.blocks)
    h = sl.all_gather("batch/dp seq/tp model -> batch/dp seq model", norm(x, sl.gather(w.norm, "dp")))
    logits = sl.einsum("batch/dp seq model, vocab/tp model -> batch/dp seq vocab/tp", h, e)  # tied: the same leaf
    return sl.token_loss("batch/dp seq vocab/tp, batch/dp seq", logits, b.targets)


def data(step: int, rows: int, rank: int = 0, of: int = 1) -> Batch:
    """Sequences that count in steps of 1, 2 or 3, of 32 tokens: this rank's share of the `rows` of a step."""
    start, stride = sl.random.randint(sl.random.key(step), (2, rows, 1), 0, 32)
    counted = (start + (1 + stride % 3) * torch.arange(17)) % 32
    own = counted.unflatten(0, (of, -1))[rank]
    return Batch(tokens=own[:, :-1], targets=own[:, 1:])


def train(folder: Path, mesh: sl.Mesh, steps: int, save_every: int = 10) -> sl.Mean:
    """Train to `steps` updates, from the last save in `folder` if there is one; the loss on sequences not seen."""
    specs, sizes = sl.specs(GPT), gpt.sizes(vocab=32, layers=2, model=32, heads=4)
    opt = sl.optim.adamw(sl.optim.warmup_cosine(2e-2, warmup=3, steps=20), b2=0.95, weight_decay=0.1, mask="**.w_*")
    layout = sl.zero(specs, axis="dp", stage=1)
    step = sl.jit(sl.step(loss, opt, accumulate=8, clip=1.0, layout=layout), donate_argnums=0)
    valid = sl.jit(sl.evaluate(loss, layout=layout))

    def fresh() -> sl.State:
        return step.init(sl.init(GPT, sizes=sizes, key=sl.random.key(0)), key=sl.random.key(1))

    def rows(i: int) -> Batch:
        if mesh.simulate:  # this process is every rank
            return sl.shard(data(i, 32))
        return sl.from_local(data(i, 32, mesh.index("dp"), mesh.size("dp")), Batch)

    with mesh:
        saved = sl.latest(folder)
        state = sl.restore(saved, like=sl.abstract(fresh)) if saved else fresh()
        for i in range(int(state.step), steps):
            state, metrics = step(state, rows(i))
            if mesh.rank == 0 and i % 5 == 4:
                print(f"step {i + 1}: " + ", ".join(f"{k} {v.item():.3g}" for k, v in metrics.items()))
            if (i + 1) % save_every == 0:
                sl.save(folder, state, keep=3, wait=False)
        return sl.Mean.merged([valid(state.params, rows(i))[0] for i in (-1, -2)])


def main(folder: Path = Path("runs/tied")) -> None:
    launched = "WORLD_SIZE" in os.environ
    mesh = sl.make_mesh(dp=-1, tp=2) if launched else sl.make_mesh(dp=2, tp=2, simulate=True)
    unseen = train(folder, mesh, steps=20)
    if mesh.rank == 0:
        print(f"on sequences not seen, without dropout: loss {unseen.value:.3f}, chance {math.log(32):.3f}")


if __name__ == "__main__":
    main()
