"""shardlib beside DDP, FSDP2, DeepSpeed and DTensor on the same GPT, weights and batches; two ranks of one thread each.

    python -m benchmarks.compare [--size small] [--peers "DDP,shardlib dp"] [--rounds 5] [--link 1gbit] [--spent]

Layout after layout, the peers of one are set up once, stay alive and take turns, a few steps each round (A B C A B C
...); a peer's time in a round is divided by that of `single` in the same round: one process per core, the local batch,
no communication. Medians of these ratios, with the least and the largest. CPU time is that of both processes; it does
not see waiting, and is the steadier of the two on a shared machine. `--link`: on two hosts (network namespaces) joined
by a link of that rate; then `bound` is what benchmarks/bound.py computes for the layout.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.bound import bounds, measured
from benchmarks.link import Host, two_hosts
from benchmarks.models import SIZES
from benchmarks.peers import PEERS, RANKS, installed, made
from benchmarks.spent import spent, table

BASE = "single"


class Peer:
    """The processes of one peer. Raises RuntimeError, with the end of its log, when one of them dies."""

    def __init__(self, name: str, size: str, hosts: tuple[Host, Host] | None, logs: Path) -> None:
        self.name, self.children, self.answers, self.logs = name, [], [], []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(RANKS):
            read, write = os.pipe()
            host = hosts[rank] if hosts else None
            environment = os.environ | dict(
                RANK=str(rank),
                LOCAL_RANK="0" if host else str(rank),
                WORLD_SIZE=str(RANKS),
                LOCAL_WORLD_SIZE="1" if host else str(RANKS),
                MASTER_ADDR=hosts[0].address if hosts else "127.0.0.1",
                MASTER_PORT=str(port),
                GLOO_SOCKET_IFNAME=host.interface if host else "lo",
                OMP_NUM_THREADS="1",
                DS_ACCELERATOR="cpu",
                TORCHINDUCTOR_COMPILE_THREADS="1",
            )
            command = [sys.executable, "-m", "benchmarks.compare", "--size", size, "--serve", name, str(write)]
            self.logs.append(logs / f"{name.replace(' ', '_')}.{rank}")
            with self.logs[-1].open("w") as log:
                child = subprocess.Popen(
                    (host.prefix if host else []) + command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=[write],
                    text=True,
                )
            os.close(write)
            self.children.append(child)
            self.answers.append(os.fdopen(read))

    def ask(self, steps: int, what: str = "take") -> list[dict[str, Any]]:
        """Take some steps on every rank, or say what is `spent` in them; what each says."""
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write(f"{what} {steps}\n")
            child.stdin.flush()
        return self.hear()

    def hear(self) -> list[dict[str, Any]]:
        lines = [answer.readline() for answer in self.answers]
        for line, log, child in zip(lines, self.logs, self.children, strict=True):
            if not line:
                child.wait()
                raise RuntimeError(f"{self.name} died:\n{log.read_text()[-2000:]}")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()


def serve(name: str, size: str, fd: int) -> None:
    """A rank of a peer: says when it is ready, then takes the steps that each line on stdin asks for."""
    import torch

    torch.set_num_threads(1)
    with os.fdopen(fd, "w") as out:

        def say(**what: Any) -> None:
            print(json.dumps(what), file=out, flush=True)

        began = time.perf_counter()
        step, number = made(name, SIZES[size], int(os.environ["RANK"])), 0
        for _ in range(2):
            value = step(number)
            number += 1
            if number == 1:
                first = time.perf_counter() - began
        say(first=first, loss=value)
        for line in sys.stdin:
            what, steps = line.split()
            if what == "spent":
                say(**spent(step, range(number, number := number + int(steps))))
                continue
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(int(steps)):
                value = step(number)
                number += 1
            say(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu, loss=value)


def measure(
    names: list[str], size: str, rounds: int, steps: int, rate: str | None, logs: Path, where: bool = False
) -> dict[str, Any]:
    """Ratios to `single` by peer: wall and CPU in every round, seconds to the first step, the last loss; with `where`
    what the CPU time of rank 0 was `spent` on."""
    with two_hosts(rate) if rate else nullcontext() as hosts:
        peers: dict[str, Peer] = {}
        try:
            found: dict[str, Any] = {}
            for name in names:
                peers[name] = Peer(name, size, hosts, logs)
                ready = peers[name].hear()
                found[name] = dict(first=max(r["first"] for r in ready), wall=[], cpu=[], seconds=[])
            for _ in range(rounds):
                took = {name: peer.ask(steps) for name, peer in peers.items()}
                base = took[BASE]
                for name, ranks in took.items():
                    wall, cpu = max(r["wall"] for r in ranks), sum(r["cpu"] for r in ranks)
                    found[name]["wall"].append(wall / max(r["wall"] for r in base))
                    found[name]["cpu"].append(cpu / sum(r["cpu"] for r in base))
                    found[name]["seconds"].append(wall / steps)
                    found[name]["loss"] = statistics.mean(r["loss"] for r in ranks)
            for name, peer in peers.items() if where else ():
                found[name]["spent"] = peer.ask(steps, "spent")[0]
            return found
        finally:
            for peer in peers.values():
                peer.close()


def said(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--peers", help="names, separated by commas; those that are installed by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of each peer in a round")
    parser.add_argument("--link", metavar="RATE", help="two hosts joined by a link of this rate, as tc writes it")
    parser.add_argument("--spent", action="store_true", help="and where the CPU time of a step goes, by kind of work")
    parser.add_argument("--logs", type=Path, default=Path("runs/compare"))
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve[0], args.size, int(args.serve[1]))
    names = [n.strip() for n in args.peers.split(",")] if args.peers else [n for n in PEERS if installed(n)]
    unknown = [n for n in names if n not in PEERS]
    if unknown:
        parser.error(f"unknown peers {unknown}; there are {list(PEERS)}")
    layouts = dict.fromkeys(PEERS[n][2] for n in names)
    args.logs.mkdir(parents=True, exist_ok=True)
    blocks = measured(SIZES[args.size])[0] if args.link else []
    found: dict[str, Any] = {}
    lower: dict[str, float] = {}
    for layout in layouts:
        group = [BASE, *(n for n in names if PEERS[n][2] == layout and n != BASE)]
        took = measure(group, args.size, args.rounds, args.steps, args.link, args.logs, args.spent)
        found[f"{BASE}, {layout}"] = took.pop(BASE) | {"layout": PEERS[BASE][2]}
        found |= {name: f | {"layout": layout} for name, f in took.items()}
        if args.link:  # of compute as it is here, beside another process
            each = bounds(blocks, statistics.median(found[f"{BASE}, {layout}"]["seconds"]), args.link)
            lower |= {name: bound for name, bound in each.items() if name == layout}
    print(
        f"{args.size}, {args.rounds} rounds of {args.steps} steps, "
        + (f"link {args.link}" if args.link else "loopback")
    )
    print(
        f"{'':<26}{'':<17}{'wall / single':>22}{'CPU / single':>22}{'s/step':>8}{'first s':>9}{'loss':>9}{'bound':>7}"
    )
    for name, f in found.items():
        times = f"{statistics.median(f['seconds']):>8.2f}{f['first']:>9.1f}{f['loss']:>9.4f}"
        bound = f"{lower[f['layout']]:7.2f}" if f["layout"] in lower else ""
        print(f"{name:<26}{f['layout']:<17}{said(f['wall']):>22}{said(f['cpu']):>22}{times}{bound}")
    if args.spent:
        print(table({name: f["spent"] for name, f in found.items()}))
    if args.json:
        print(
            json.dumps(
                dict(size=args.size, link=args.link, rounds=args.rounds, steps=args.steps, bounds=lower, peers=found)
            )
        )
    return None


if __name__ == "__main__":
    main()
