"""Train a small GPT on Shakespeare, on any mesh and with any ZeRO stage: `make demo`, or

    shardlib run --nproc 4 examples/train_gpt.py --zero 3          a process per rank, on GPUs where there are some
    python examples/train_gpt.py --simulate --mesh dp=2,tp=2       the same four ranks in one process

The curve does not depend on how the work is cut. The last line printed is one JSON object.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import gpt
import shardlib as sl
import text
from journal import Journal

SIZES = dict(
    tiny=dict(layers=2, model=32, heads=4, seq=32, lr=3e-3),
    small=dict(layers=2, model=128, heads=4, seq=64, lr=5e-3),  # two minutes on two CPU cores
    medium=dict(layers=8, model=512, heads=8, seq=256, lr=1e-3),
    large=dict(layers=12, model=768, heads=12, seq=1024, lr=6e-4),
)


def main(argv: Sequence[str] | None = None) -> None:
    begun, args = time.perf_counter(), arguments(argv)
    mesh = sl.make_mesh(args.mesh, simulate=args.simulate, timeout=args.timeout)
    data = text.load(args.vocab, cache=args.out)
    shape = dict(batch=args.batch, seq=args.seq)
    wide = dict(batch=args.batch * max(1, 8192 // (args.batch * args.seq)), seq=args.seq)  # without gradients more fits
    checkpoints = args.out / "checkpoints"

    rate = sl.optim.warmup_cosine(args.lr, warmup=args.steps // 10, steps=args.steps, end=args.lr / 10)
    adamw = sl.optim.adamw(rate, b2=0.95, weight_decay=0.1, mask=sl.optim.matrices)
    layout = sl.zero(sl.specs(gpt.GPT), axis="dp", stage=args.zero)
    how = sl.precision(args.precision) if args.precision else None  # f16 comes with a scale that follows overflows
    train = sl.step(gpt.loss, adamw, layout=layout, precision=how, accumulate=args.accumulate, clip=1.0)
    valid = sl.evaluate(gpt.loss, layout=layout, precision=how)
    predict = sl.shard_map(gpt.logits, in_specs=None, out_specs="batch/dp seq vocab/tp")
    if args.backend != "eager":
        train = sl.jit(train, donate_argnums=0, backend=args.backend)
        valid, predict = (sl.jit(f, backend=args.backend) for f in (valid, predict))

    def fresh() -> sl.State:
        key, dtype = sl.random.key(args.seed), getattr(torch, args.dtype)
        sizes = gpt.sizes(vocab=args.vocab, layers=args.layers, model=args.model, heads=args.heads)
        return train.init(sl.init(gpt.GPT, sizes=sizes, key=key, dtype=dtype), key=key)

    def validation_loss(params: gpt.GPT) -> float:
        batches = (sl.shard(gpt.Batch(**b)) for b in text.windows(data.val, **wide))
        return sl.Mean.merged([valid(params, b)[0] for b in batches]).value.item()

    with mesh, Journal(args.out, mesh, args.steps, args.log_every) as journal:
        saved = sl.latest(checkpoints) if args.resume else None
        state = sl.restore(saved, like=sl.abstract(fresh)) if saved else fresh()
        start = int(state.step)
        journal.start(start, f"{args.precision or args.dtype}, ZeRO stage {args.zero}", state.params)
        for done in range(start + 1, args.steps + 1):
            batch = gpt.Batch(**text.batch_at(data.train, done - 1, seed=args.seed, **shape))
            state, metrics = train(state, sl.shard(batch))
            journal.step(done, metrics)
            if args.eval_every and done % args.eval_every == 0 and done < args.steps:
                journal.pause()
                journal.validation(done, validation_loss(state.params))
            stop = sl.preempted() and done < args.steps
            if stop or (args.save_every and done % args.save_every == 0):
                journal.pause()
                sl.save(checkpoints, state, keep=2, wait=False)
            if stop:
                return
        val_loss = validation_loss(state.params)
        journal.validation(args.steps, val_loss)
        written = sample(predict, state.params, data, args)

    if mesh.rank == 0:
        bigram_loss = text.bigram_loss(data.train, data.val, args.vocab)
        bpb = 1 / (data.bytes_per_val_token * math.log(2))  # bits per byte of a nat per token
        journal.plot(bigram_loss)
        print(f"\n{written}\n\nvalidation  {val_loss:.3f} nats/token  {val_loss * bpb:.3f} bits/byte")
        print(f"bigram      {bigram_loss:.3f} nats/token  {bigram_loss * bpb:.3f} bits/byte\n\nsee {args.out}/loss.png")
        result = dict(val_loss=val_loss, bigram_loss=bigram_loss, val_bpb=val_loss * bpb, bigram_bpb=bigram_loss * bpb)
        result |= dict(tokens_per_s=journal.tokens_per_s, seconds=time.perf_counter() - begun, steps=args.steps)
        result |= dict(mesh=mesh.name, zero=args.zero, dtype=args.dtype, precision=args.precision, backend=args.backend)
        print(json.dumps(result), flush=True)


def sample(predict: Callable[..., Any], params: gpt.GPT, data: text.Text, args: argparse.Namespace) -> str:
    """The first words of the validation text, and what the model writes after them.

    All ranks draw the same tokens. `dp` cuts the batch, so it is one copy of the text for each of its ranks.
    """
    tokens, copies = data.val[: args.seq // 4].tolist(), sl.current_mesh().size("dp")
    for i in range(args.sample):
        seen = torch.tensor(tokens[-args.seq :])
        window = F.pad(seen, (0, args.seq - len(seen))).expand(copies, -1)
        scores = sl.gather(predict(params, sl.shard(window, "batch/dp seq")))[0, len(seen) - 1].double().cpu() / 0.8
        noise = sl.random.uniform(sl.random.fold_in(sl.random.key(args.seed), i), scores.shape, scores.dtype)
        tokens.append(int((scores - (-noise.log()).log()).argmax()))  # a draw from softmax(scores): Gumbel's trick
    return data.tokenizer.decode(tokens)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = cli.add_argument
    add("--mesh", default="auto", help="such as dp=-1,tp=4; by default tp=2 if the number of ranks is even")
    add("--simulate", action="store_true", help="all ranks in this process; four by default")
    add("--zero", type=int, default=3, choices=range(4), help="dp cuts: 1 optimizer state, 2 gradients, 3 weights too")
    add("--size", default="small", choices=SIZES, help="the values of these five where they are not given")
    for name in ("layers", "model", "heads", "seq"):
        add(f"--{name}", type=int)
    add("--lr", type=float)
    add("--vocab", type=int, default=512, help="tokens of the byte-pair encoding, from 256")
    add("--batch", type=int, default=24, help="sequences per step, over all ranks and micro-batches")
    add("--accumulate", type=int, default=1, help="micro-batches per step")
    add("--steps", type=int, default=250)
    add("--dtype", default="float32", choices=("float32", "float64", "bfloat16"), help="of weights and activations")
    add("--precision", choices=("bf16", "f16"), help="compute in 16 bits, with weights in float32")
    add("--backend", default="graph", choices=("graph", "inductor", "eager"))
    add("--out", type=Path, default=Path("runs/gpt"), help="folder for the log, the plot and checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    add("--timeout", type=float, metavar="SECONDS", help="how long a collective may wait for a rank")
    add("--save-every", type=int, default=0, metavar="STEPS")
    add("--eval-every", type=int, default=100, metavar="STEPS")
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--sample", type=int, default=64, metavar="TOKENS")
    add("--seed", type=int, default=0)
    args = cli.parse_args(argv)
    for name, value in SIZES[args.size].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    ranks = int(os.environ.get("WORLD_SIZE", 4 if args.simulate else 1))
    tp = 2 - ranks % 2
    said = f"dp={ranks // tp},tp={tp}" if args.mesh == "auto" else args.mesh
    args.mesh = {axis: int(size) for axis, size in (pair.split("=") for pair in said.split(","))}
    args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
