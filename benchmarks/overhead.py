"""What shardlib costs on one rank: CPU time per step of a small GPT (10.5M parameters) against the same arithmetic in
plain torch.func (but for shardlib's fused RMSNorm and AdamW), paired A B C A B C, with medians of ratios;
microseconds per op while types are on; and what `passes.join` gains, where AdamW updates many small leaves.

    python -m benchmarks.overhead [--rounds 7] [--json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from benchmarks.models import EPS, SIZES, Batch, Gpt, angles, loss, rotated, tokens
from shardlib import tree
from shardlib.optim.base import apply_updates

SIZE = SIZES["small"]

# ---- the same arithmetic without shardlib


def plain_loss(flat: tuple[Tensor, ...], b: Batch) -> Tensor:
    w: Gpt = tree.unflatten(STRUCTURE[0], flat)
    at = torch.where((b.tokens >= 0) & (b.tokens < w.embed.shape[0]), b.tokens, 0)
    found = F.embedding(at, w.embed)
    x = torch.where((b.tokens >= 0).unsqueeze(-1), found, torch.zeros(()))
    for m in w.blocks:
        h = F.rms_norm(x, x.shape[-1:], m.norm1, EPS)
        q, k, v = (torch.einsum("bsm,mhd->bhsd", h, p) for p in (m.w_q, m.w_k, m.w_v))
        o = F.scaled_dot_product_attention(rotated(q, b.cos, b.sin), rotated(k, b.cos, b.sin), v, is_causal=True)
        x = x + torch.einsum("bhsd,hdm->bsm", o, m.w_o)
        h = F.rms_norm(x, x.shape[-1:], m.norm2, EPS)
        gate, up = (torch.einsum("bsm,mf->bsf", h, p) for p in (m.w_gate, m.w_up))
        x = x + torch.einsum("bsf,fm->bsm", F.silu(gate) * up, m.w_down)
    x = F.rms_norm(x, x.shape[-1:], w.norm, EPS)
    logits = torch.einsum("bsm,mv->bsv", x, w.head)
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    norm = shifted.exp().sum(-1).log()
    picked = shifted.gather(-1, b.targets.unsqueeze(-1)).squeeze(-1)
    return (norm - picked).sum() / b.targets.numel()


def plain_step(state: Any, b: Batch) -> tuple[Any, Tensor]:
    flat, mu, nu, count = state
    grads, value = torch.func.grad_and_value(plain_loss)(flat, b)
    norm = sum((g * g).sum() for g in grads) ** 0.5
    factor = torch.where(norm < 1.0, torch.ones_like(norm), 1.0 / norm)
    count = count + 1
    fix1, fix2 = 1 - 0.9**count, 1 - 0.95**count
    out: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for p, g, m, v in zip(flat, grads, mu, nu, strict=True):
        g = g * factor
        m = 0.9 * m + (1 - 0.9) * g
        v = 0.95 * v + (1 - 0.95) * g * g
        u = -1e-3 * ((m / fix1) / ((v / fix2).sqrt() + 1e-8) + 0.1 * p)
        for held, new in zip(out, (p + u, m, v), strict=True):
            held.append(new)
    return (*map(tuple, out), count), value


STRUCTURE: list[Any] = []


def counted(run: Callable[[], Any]) -> int:
    """How many ops reach the dispatcher below autograd."""

    class Count(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.n += 1
            return func(*args, **(kwargs or {}))

    with Count():
        run()
    return Count.n


LEAVES, ELEMENTS = 200, 1000


def updates(rounds: int) -> dict[str, float]:
    """Median CPU seconds of AdamW's update of `LEAVES` leaves: one call for all (`passes.join`), a call for each."""
    optimizer = sl.optim.adamw(1e-3, weight_decay=0.1)

    def update(state: Any, grads: Any) -> Any:
        params, opt = state
        new, opt = optimizer.update(grads, opt, params)
        return apply_updates(params, new), opt

    f = sl.shard_map(update, in_specs=None, out_specs=None)
    apart = [p for p in sl.passes.default if p is not sl.passes.join]
    runs = {"joined": sl.jit(f, donate_argnums=0), "apart": sl.jit(f, donate_argnums=0, passes=apart)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with sl.make_mesh(dp=1, simulate=True):
        leaves = {str(i): torch.sin(torch.arange(ELEMENTS) + i) for i in range(LEAVES)}
        grads, init = sl.shard(leaves, "_"), sl.shard_map(optimizer.init, in_specs=None, out_specs=None)
        states = {name: (params, init(params)) for name in runs for params in [sl.shard(leaves, "_")]}
        for i in range(10 * rounds + 1):
            for name, run in runs.items():
                began = time.process_time()
                states[name] = run(states[name], grads)
                if i:  # the first traces
                    seconds[name].append(time.process_time() - began)
        for a, b in zip(*(tree.leaves(sl.gather(state)) for state in states.values()), strict=True):
            assert torch.equal(a, b)
    return {name: statistics.median(s) for name, s in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (x, y), (cos, sin) = tokens(SIZE, 0, 1), angles(SIZE)
    batch = Batch(tokens=x, targets=y, cos=cos, sin=sin)
    step = sl.step(loss, sl.optim.adamw(1e-3, b2=0.95, weight_decay=0.1), clip=1.0)
    runs: dict[str, Callable[[], Tensor]] = {}
    with sl.make_mesh(dp=1, tp=1, simulate=True):
        params = sl.init(Gpt, sizes=SIZE.sizes, key=sl.random.key(0))
        flat, structure = tree.flatten(sl.gather(params))
        STRUCTURE.append(structure)
        held: dict[str, Any] = {
            "plain": (tuple(flat), *(tuple(map(torch.zeros_like, flat)) for _ in range(2)), torch.zeros(())),
            "jit": step.init(params),
            "eager": step.init(params),
        }
        steps = {"plain": plain_step, "jit": sl.jit(step, donate_argnums=0), "eager": step}
        batches = {"plain": batch, "jit": sl.shard(batch), "eager": sl.shard(batch)}

        def runner(name: str) -> Callable[[], Tensor]:
            def run() -> Tensor:
                held[name], out = steps[name](held[name], batches[name])
                return out["loss"] if isinstance(out, dict) else out

            return run

        runs = {name: runner(name) for name in steps}
        first = {name: run().item() for name, run in runs.items()}
        assert max(first.values()) - min(first.values()) < 1e-4, first
        ops = counted(runs["plain"])
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                began = time.process_time()
                run()
                seconds[name].append(time.process_time() - began)
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)) for name in runs
    }
    extra = {n: 1e6 * (statistics.median(s) - statistics.median(seconds["plain"])) / ops for n, s in seconds.items()}
    print(f"{ops} ops a step, {args.rounds} rounds, one thread, CPU time")
    print(f"{'':8}{'s/step':>9}{'ratio':>8}{'us/op':>8}")
    for name in runs:
        print(f"{name:8}{statistics.median(seconds[name]):9.3f}{ratios[name]:8.3f}{extra[name]:8.1f}")
    adamw = updates(args.rounds)
    joined, apart = (1e3 * adamw[name] for name in ("joined", "apart"))
    ratio = f"{joined:.2f} ms joined, {apart:.2f} apart, ratio {joined / apart:.2f}"
    print(f"AdamW of {LEAVES} leaves of {ELEMENTS:,}: {ratio}")
    if args.json:
        medians = {name: statistics.median(s) for name, s in seconds.items()}
        print(json.dumps({"ops": ops, "seconds": medians, "ratio": ratios, "adamw": adamw}))


if __name__ == "__main__":
    main()
