"""What gathers and exchanges take on a link, over the time that the wire needs: gloo's own, and shardlib's messages.

    python -m benchmarks.messages [--link 215mbit] [--mb 4] [--count 8] [--rounds 5] [--json]

Two ranks on two hosts (network namespaces) joined by a link of that rate, each of which sends half of `mb` megabytes,
`count` times one after the other, with 1, 2 or all in flight. In turn one of them is `late` by some milliseconds, as
ranks that compute are. Medians over rounds, and the largest; the wire carries packets of 1514 bytes with 1448 of them
payload. Needs root.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bound import PACKET, rate_of
from benchmarks.link import two_hosts
from shardlib import make_mesh
from shardlib.mesh import Mesh


def begun(mesh: Mesh, mb: int) -> dict[str, Any]:
    """By name, what starts a collective and gives what `wait_tensor` waits for."""
    group, theirs, mine = mesh.group(("dp",)), torch.ops._c10d_functional, torch.ops.shardlib
    x = torch.randn((mb << 20) // 8)
    whole = torch.randn(2, len(x))
    return {
        "all_gather, gloo's": lambda: theirs.all_gather_into_tensor(x, 2, group),
        "all_gather, messages": lambda: mine.posted_gather([x], 2, group),
        "exchange, gloo's": lambda: theirs.all_to_all_single(whole, [1, 1], [1, 1], group),
        "exchange, messages": lambda: mine.posted_exchange(whole, [1, 1], [1, 1], group),
        "scatter, messages": lambda: mine.posted_scatter([whole], 2, group),
    }


def serve(mb: int, count: int, rounds: int, late: float) -> None:
    """A rank: the seconds of every round, by what was done and how many were in flight."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    with make_mesh(dp=2) as mesh:
        starts = begun(mesh, mb)
        for number in range(rounds + 1):
            for name, start in starts.items():
                for flying in (1, 2, count):
                    dist.barrier()
                    began = time.perf_counter()
                    waiting = []
                    for i in range(count):
                        waiting.append(start())
                        time.sleep((mesh.rank + i) % 2 * late / 1e3)
                        if len(waiting) == flying:
                            torch.ops._c10d_functional.wait_tensor(waiting.pop(0))
                    for x in waiting:
                        torch.ops._c10d_functional.wait_tensor(x)
                    if number:  # the first is not counted
                        found.setdefault(f"{name}|{flying}", []).append(time.perf_counter() - began)
        if mesh.rank == 0:
            print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="215mbit", help="as tc writes it")
    parser.add_argument("--mb", type=int, default=4)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--late", type=float, default=4, help="milliseconds")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.mb, args.count, args.rounds, args.late)
    command = [sys.executable, "-m", "benchmarks.messages", "--serve"]
    command += [f"--{k}={getattr(args, k)}" for k in ("mb", "count", "rounds", "late")]
    with two_hosts(args.link, burst="128kb") as hosts:
        ranks = []
        for rank, host in enumerate(hosts):
            own = dict(RANK=rank, LOCAL_RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=1, MASTER_PORT=29500)
            words = {k: str(v) for k, v in own.items()}
            words |= dict(MASTER_ADDR=hosts[0].address, GLOO_SOCKET_IFNAME=host.interface, OMP_NUM_THREADS="1")
            ranks.append(
                subprocess.Popen(host.prefix + command, env=os.environ | words, stdout=subprocess.PIPE, text=True)
            )
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    wire = args.count * (args.mb << 19) * PACKET / rate_of(args.link)
    found = {key: [s / wire for s in seconds] for key, seconds in json.loads(said[0]).items()}
    print(f"{args.count} times {args.mb} MB, link {args.link}: seconds over the wire's {wire:.3f}")
    print(f"{'':<24}{'in flight':>9}{'median':>8}{'largest':>8}")
    for key, ratios in found.items():
        name, flying = key.split("|")
        print(f"{name:<24}{flying:>9}{statistics.median(ratios):>8.2f}{max(ratios):>8.2f}")
    if args.json:
        print(json.dumps(dict(link=args.link, mb=args.mb, count=args.count, ratios=found)))
    return None


if __name__ == "__main__":
    main()
