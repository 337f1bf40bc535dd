"""A pipeline of two ranks beside torch.distributed.pipelining, on one GPT with the same weights and micro-batches.

    python -m benchmarks.pipeline_peers [--rounds 20] [--size small] [--microbatches 4] [--json]

Two processes of one thread talk gloo; each contestant computes loss and gradients once a round, in turn (A B C A B C
...). `alone` runs the actions of shardlib's 1F1B without what is between them: nothing is sent, a receive gives numbers
that are at hand. Wall time is that until both are done, CPU time that of both. Quartiles of ratios within a round.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardlib as sl
from benchmarks.models import EPS, SIZES, Batch, Block, Size, TorchGpt, angles, block, tokens, weights
from shardlib import tree
from shardlib.graph.program import copied
from shardlib.switch import Switch
from shardlib.wire import RECEIVE, SEND, SENT

RANKS = 2
SIZES = SIZES | {"even": Size(model=256, layers=8, heads=4, vocab=512, seq=128, rows=8)}
Step = Callable[[], float]


@sl.pytree
class Gpt:
    embed: Tensor = sl.spec("vocab/tp model")
    blocks: Block = sl.stack("layers/pp")
    norm: Tensor = sl.spec("model")
    head: Tensor = sl.spec("model vocab/tp")


def first(w: Any, mb: Batch) -> Tensor:
    x = sl.embed("vocab/tp model, batch/dp seq -> batch/dp seq model +tp", w.embed, mb.tokens)
    return sl.psum("batch/dp seq model +tp -> batch/dp seq model", x)


def stage(blocks: Block, x: Tensor, mb: Batch) -> Tensor:
    return sl.scan(lambda x, w: (block(w, x, mb), None), x, blocks)[0]


def last(w: Any, x: Tensor, mb: Batch) -> sl.Mean:
    into = "batch/dp seq model, model vocab/tp -> batch/dp seq vocab/tp"
    logits = sl.einsum(into, sl.rms_norm(x, w.norm, EPS), w.head)
    return sl.token_loss("batch/dp seq vocab/tp, batch/dp seq", logits, mb.targets)


class Ours:
    """shardlib, on any schedule."""

    def __init__(self, size: Size, schedule: Any) -> None:
        w = weights(size)
        stacked = tree.map_(lambda *xs: torch.stack(xs), *w.blocks)
        loss = sl.pipeline(first, stage, last, schedule)
        f = sl.shard_map(lambda p, b: sl.value_and_grad(loss)(p, b), in_specs=None, out_specs=None)
        self.f = sl.jit(f)
        self.mesh = sl.make_mesh(dp=1, tp=1, pp=RANKS)
        with self.mesh:
            self.params = sl.shard(Gpt(w.embed, stacked, w.norm, w.head), Gpt)
            x, y = tokens(size, 0, 1)
            self.batch = sl.shard(Batch(x, y, *angles(size)), Batch)
        self.gradients: Any = None

    def __call__(self) -> float:
        with self.mesh:
            value, self.gradients = self.f(self.params, self.batch)
            return sl.gather(value).item()

    def alone(self) -> Step:
        """The rank's actions with nothing between them."""
        with self.mesh:
            program, inputs = self.f.given(self.params, self.batch)
        module = copied(program.module)
        (switch,) = (m for m in module.modules() if isinstance(m, Switch))
        for graph in switch.turns:
            _unwired(graph)
        program.module = module
        program._run = None

        def run() -> float:
            with self.mesh:
                return sl.gather(program([list(inputs[0])])[0]).item()

        return run


def _unwired(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is RECEIVE:
            shape, dtype = node.args[:2]
            node.target, node.args = torch.ops.aten.full.default, (shape, 0.01)
            node.kwargs = {"dtype": dtype}
        elif node.target is SEND:
            node.target, node.args = torch.ops.aten.new_empty.default, (node.args[0], [0])
        elif node.target is SENT:
            graph.erase_node(node)


class Part(nn.Module):
    """One stage of torch's model."""

    def __init__(self, size: Size, index: int) -> None:
        super().__init__()
        whole = TorchGpt(size)
        n = size.layers // RANKS
        self.embed = whole.embed if index == 0 else None
        self.blocks = whole.blocks[index * n : (index + 1) * n]
        self.norm, self.head = (whole.norm, whole.head) if index == RANKS - 1 else (None, None)
        for name, x in zip(("cos", "sin"), angles(size), strict=True):
            self.register_buffer(name, x, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for each in self.blocks:
            x = each(x, self.cos, self.sin)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def theirs(size: Size, name: str, microbatches: int) -> Step:
    """torch.distributed.pipelining."""
    from torch.distributed import pipelining

    rank, device = dist.get_rank(), torch.device("cpu")
    part = Part(size, rank)
    made = pipelining.PipelineStage(part, rank, RANKS, device)
    kind = {"gpipe": pipelining.ScheduleGPipe, "one_f_one_b": pipelining.Schedule1F1B}[name]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = kind(made, microbatches, loss_fn=loss)
    x, y = tokens(size, 0, 1)

    def run() -> float:
        part.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)
        return sum(x.item() for x in losses) / microbatches

    return run


def contestants(size: Size, m: int) -> dict[str, Step]:
    made: dict[str, Any] = {
        "gpipe": Ours(size, sl.schedules.gpipe(m)),
        "one_f_one_b": Ours(size, sl.schedules.one_f_one_b(m)),
        "zero_bubble": Ours(size, sl.schedules.zero_bubble(m)),
    }
    made["alone"] = Ours(size, sl.schedules.one_f_one_b(m)).alone()
    return made | {f"torch {name}": theirs(size, name, m) for name in ("gpipe", "one_f_one_b")}


def rounds(size: Size, m: int, n: int) -> tuple[dict[str, float], list[dict[str, tuple[float, float]]]]:
    """On one rank: the loss of each contestant, and by round the wall and CPU time of each."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        sl.make_mesh(dp=1, tp=1, pp=RANKS)
    made = contestants(size, m)
    losses = {name: step() for name, step in made.items()}
    out = []
    for _ in range(n + 1):
        one = {}
        for name, step in made.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            cpu = time.process_time() - cpu
            dist.barrier()
            one[name] = time.perf_counter() - wall, cpu
        out.append(one)
    return losses, out[1:]


RATIOS = [
    ("CPU of 1F1B over its actions alone", 1, "one_f_one_b", "alone", 1.03),
    ("wall of 1F1B over torch's", 0, "one_f_one_b", "torch one_f_one_b", 1.0),
    ("wall of GPipe over torch's", 0, "gpipe", "torch gpipe", 1.0),
    ("CPU of 1F1B over torch's", 1, "one_f_one_b", "torch one_f_one_b", None),
    ("wall of ZB-H1 over 1F1B", 0, "zero_bubble", "one_f_one_b", 0.97),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", default="even", choices=SIZES)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    size, m, n = SIZES[args.size], args.microbatches, args.rounds
    ranks = sl.testing.ranks(RANKS, seconds=3600)(rounds)(size, m, n)
    print("loss", {name: round(max(r[0][name] for r in ranks), 5) for name in ranks[0][0]})
    by_round = [
        {name: (max(r[1][i][name][0] for r in ranks), sum(r[1][i][name][1] for r in ranks)) for name in ranks[0][1][i]}
        for i in range(n)
    ]
    for name in by_round[0]:
        wall, cpu = (statistics.median(r[name][k] for r in by_round) for k in (0, 1))
        print(f"{name:<20} {wall * 1e3:8.1f} ms wall {cpu * 1e3:8.1f} ms CPU")
    found = {}
    for said, k, a, b, bound in RATIOS:
        low, mid, high = statistics.quantiles([r[a][k] / r[b][k] for r in by_round], n=4)
        found[said] = [low, mid, high]
        print(f"{said:<40} {mid:.3f} ({low:.3f} to {high:.3f}){f', at most {bound}' if bound else ''}")
    if args.json:
        print(json.dumps({"size": args.size, "microbatches": m, "rounds": n, "ratios": found}))


if __name__ == "__main__":
    main()
