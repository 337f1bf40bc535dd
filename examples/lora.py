"""Fine-tuning a part: low-rank additions (Hu et al. 2021) to a frozen model, two learning rates, an average of weights.

Whatever chooses leaves takes the same globs over paths: what is trained, which optimizer has it, what a file restores.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl

# ---- a model, trained before


@sl.pytree
class Block:
    norm: Tensor = sl.spec("model/dp")
    w_in: Tensor = sl.spec("model/dp hidden/tp")
    w_out: Tensor = sl.spec("hidden/tp model/dp")


@sl.pytree
class Net:
    embed: Tensor = sl.spec("vocab/tp model/dp")
    blocks: Block = sl.stack("layers")
    head: Tensor = sl.spec("vocab/tp model/dp")


@sl.pytree
class Batch:
    tokens: Tensor = sl.spec("batch/dp")
    targets: Tensor = sl.spec("batch/dp")


def tied(w: Net) -> Net:
    """One array at two places: one parameter, kept, trained and saved once."""
    return replace(w, head=w.embed)


def block(w: Block, x: Tensor) -> Tensor:
    """Of weights that are whole over dp; x is "batch/dp model"."""
    h = F.rms_norm(x, x.shape[-1:]) * w.norm
    h = F.gelu(sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", h, w.w_in))
    o = sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", h, w.w_out)
    return x + sl.psum("batch/dp model +tp -> batch/dp model", o)


def net_loss(w: Net, b: Batch, layer: Callable[[Any, Tensor], Tensor], layers: Any) -> sl.Mean:
    """With `layer` of each of `layers` for the blocks."""
    embed, head = sl.gather((w.embed, w.head), "dp")
    x = sl.embed("vocab/tp model, batch/dp -> batch/dp model +tp", embed, b.tokens)
    x = sl.psum("batch/dp model +tp -> batch/dp model", x)
    x, _ = sl.scan(lambda x, w: (sl.remat(layer)(w, x), None), x, layers)
    logits = sl.einsum("batch/dp model, vocab/tp model -> batch/dp vocab/tp", x, head)
    return sl.token_loss("batch/dp vocab/tp, batch/dp", logits, b.targets)


# ---- LoRA, all of it


@sl.pytree
class Lora:
    a: Tensor = sl.spec("model/dp rank")
    b: Tensor = sl.spec("rank hidden/tp", init="zeros")


@sl.pytree
class Tuned:
    base: Net
    lora: Lora = sl.stack("layers")


def layer(both: tuple[Block, Lora], x: Tensor) -> Tensor:
    w, lora = sl.gather(both, "dp")
    added = sl.einsum("model rank, rank hidden/tp -> model hidden/tp", lora.a, lora.b)
    return block(replace(w, w_in=w.w_in + added), x)


def loss(w: Tuned, b: Batch) -> sl.Mean:
    return net_loss(w.base, b, layer, (w.base.blocks, w.lora))


opt = sl.optim.by_path({"lora.**.b": sl.optim.adamw(4e-2), "lora.**": sl.optim.adamw(4e-3)})
opt = sl.optim.chain(opt, sl.optim.weight_ema(0.9))
step = sl.step(loss, opt, trainable="lora.**")


# ---- a run

SIZES = dict(vocab=16, model=12, hidden=24, layers=2, rank=3)
valid = sl.evaluate(loss)


def main() -> None:
    """Tune a saved model to add 5 to a number, on four ranks in this process."""
    numbers = torch.arange(16)
    with sl.make_mesh(dp=2, tp=2, simulate=True), tempfile.TemporaryDirectory() as folder:
        batch = sl.shard(Batch(tokens=numbers, targets=(numbers + 5) % 16))
        saved = sl.save(Path(folder) / "base", tied(sl.init(Net, sizes=SIZES, key=sl.random.key(0))), step=0)

        tuned = sl.init(Tuned, sizes=SIZES, key=sl.random.key(1))
        tuned = replace(tuned, base=sl.restore(saved, like=tied(tuned.base)))  # a subtree is a tree, too
        train, state = sl.jit(step, donate_argnums=0), step.init(tuned)
        for i in range(20):
            state, metrics = train(state, batch)
            if i % 10 == 9:
                print(f"step {i + 1}: loss {metrics['loss']:.3f}")
        averaged, _ = valid(sl.optim.get(state, "weight_ema"), batch)
        print(f"loss with averaged weights {averaged.value:.3f}")
        sl.show(state.opt)  # only what is trained has optimizer state


if __name__ == "__main__":
    main()
