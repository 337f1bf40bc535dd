"""How fast a step could be on a link of a given rate: a list schedule of measured compute and the bytes on the wire.

    python -m benchmarks.bound [--size small] [--link 1gbit] [--compute 1.0] [--json]

Two resources, one rank: compute runs the blocks of the model forward, then backward, then their updates; the wire takes
one collective at a time, at the rate of the link, in packets of 1514 bytes that carry 1448. Nothing else costs time: no
latency, no CPU for sending, memory for all gathers ahead. Times of blocks are measured here, in plain torch, alone.
`--compute`: what compute costs beside that. Bounds are in units of a step of one process without communication.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import SIZES, Size, TorchGpt, tokens, torch_loss
from benchmarks.peers import RANKS, adamw

PACKET = 1514 / 1448  # bytes on the wire for each that is sent: Ethernet, IP and TCP have headers
LAYOUTS = {"data parallel": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}
UNITS = {"gbit": 1e9 / 8, "mbit": 1e6 / 8}


@dataclass(frozen=True)
class Block:
    """A part of the model with parameters of its own: seconds of its passes and of its update, bytes of parameters."""

    name: str
    forward: float
    backward: float
    update: float
    bytes: int


def rate_of(link: str) -> float:
    """Bytes per second of a rate as `tc` writes it."""
    unit = next(u for u in UNITS if link.endswith(u))
    return float(link.removesuffix(unit)) * UNITS[unit]


def schedule(blocks: list[Block], stage: int, rate: float, ranks: int = RANKS) -> float:
    """Seconds of a step: ZeRO stage 0 sums gradients whole; 1 and 2 gather at the start of the forward pass and scatter
    gradients; 3 gathers in both passes, the first block, a lookup, in the forward pass alone. A rank sends (n-1)/n of
    the bytes in a gather or scatter, twice that in a sum.
    """
    piece = (ranks - 1) / ranks / rate
    wire = 0.0  # when it is free
    ready = [0.0] * len(blocks)  # when weights are whole
    if stage:
        for i, b in enumerate(blocks):
            wire += b.bytes * piece
            ready[i] = wire
    now = 0.0
    for i, b in enumerate(blocks):
        now = max(now, ready[i]) + b.forward
    waiting: list[tuple[float, float, int]] = []  # scatters and sums: ready, seconds, block
    done = [0.0] * len(blocks)

    def send(until: float) -> None:
        """What waits goes out while the wire is free before `until`."""
        nonlocal wire
        while waiting and max(wire, waiting[0][0]) < until:
            at, seconds, i = waiting.pop(0)
            wire = done[i] = max(wire, at) + seconds

    gathered = [0.0] * len(blocks)
    if stage == 3:  # the last block's weights are still there; others come again, in order, before anything else
        gather = wire
        for i in reversed(range(1, len(blocks) - 1)):
            gather = gathered[i] = gather + blocks[i].bytes * piece
        wire = gather
    for i in reversed(range(len(blocks))):
        now = max(now, gathered[i]) + blocks[i].backward
        waiting.append((now, blocks[i].bytes * piece * (1 if stage else 2), i))
        send(now)
    send(float("inf"))
    for i in sorted(range(len(blocks)), key=done.__getitem__):
        now = max(now, done[i]) + blocks[i].update / (ranks if stage else 1)
    return now


def measured(size: Size, rounds: int = 5) -> tuple[list[Block], float]:
    """The blocks of the GPT, and the seconds of a whole step."""
    model = TorchGpt(size)
    x, y = (t.chunk(RANKS)[0] for t in tokens(size, 0, RANKS))
    optimizer = adamw(model.parameters())

    def step() -> None:
        torch_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    whole = statistics.median(_seconds(step) for _ in range(rounds))
    cos, sin = model.cos, model.sin
    parts: list[tuple[str, list[nn.Module], Callable[[Tensor], Tensor]]] = [("embed", [model.embed], model.embed)]
    for i, block in enumerate(model.blocks):
        parts.append((f"block {i}", [block], lambda h, block=block: block(h, cos, sin)))
    parts.append(("head", [model.norm, model.head], lambda h: torch_loss(model.head(model.norm(h)), y)))
    return [_measured(*part, given, rounds) for part, given in zip(parts, _inputs(parts, x), strict=True)], whole


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _inputs(parts: list[Any], x: Tensor) -> Iterator[Tensor]:
    for _, _, run in parts:
        yield x
        x = run(x).detach()


def _measured(name: str, modules: list[nn.Module], run: Any, given: Tensor, rounds: int) -> Block:
    params = [p for m in modules for p in m.parameters()]
    optimizer = adamw(params)
    if given.is_floating_point():
        given = given.requires_grad_()
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        began = time.perf_counter()
        y = run(given)
        middle = time.perf_counter()
        y.backward(torch.ones_like(y))
        end = time.perf_counter()
        for found, took in zip(times, (middle - began, end - middle, _seconds(optimizer.step)), strict=True):
            found.append(took)
        optimizer.zero_grad(set_to_none=True)
    return Block(name, *map(statistics.median, times), sum(p.numel() * p.element_size() for p in params))  # type: ignore[misc]


def bounds(blocks: list[Block], whole: float, link: str, compute: float = 1.0) -> dict[str, float]:
    """By layout: the bound over a step of one process. Blocks are scaled so that together they take that long."""
    scale = compute * whole / sum(b.forward + b.backward + b.update for b in blocks)
    scaled = [Block(b.name, b.forward * scale, b.backward * scale, b.update * scale, b.bytes) for b in blocks]
    return {name: schedule(scaled, stage, rate_of(link) / PACKET) / whole for name, stage in LAYOUTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--link", default="1gbit", help="as tc writes it")
    parser.add_argument("--compute", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    blocks, whole = measured(SIZES[args.size])
    print(f"{args.size}: a step of one process takes {whole:.3f} s; ms forward, backward, update; MB of parameters")
    for b in blocks:
        times = "".join(f"{1e3 * t:8.1f}" for t in (b.forward, b.backward, b.update))
        print(f"  {b.name:<10}{times}{b.bytes / 1e6:8.1f}")
    found = bounds(blocks, whole, args.link, args.compute)
    print(
        f"lower bounds at {args.link}, in steps of one process: " + ", ".join(f"{k} {v:.2f}" for k, v in found.items())
    )
    if args.json:
        print(json.dumps(dict(size=args.size, link=args.link, seconds=whole, bounds=found)))


if __name__ == "__main__":
    main()
