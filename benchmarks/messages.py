"""What collectives take on a link, over the time that the wire needs: gloo's own, and shardlib's messages. And on one
host: gloo's own, messages, and shared memory.

    python -m benchmarks.messages [--link 215mbit] [--mb 4] [--count 8] [--rounds 5] [--json]
    python -m benchmarks.messages --local

Two ranks, each of which sends half of `mb` megabytes (of a reduction all), `count` times one after the other, with 1, 2
or all in flight. In turn one of them is `late` by some milliseconds, as ranks that compute are. Medians over rounds,
and the largest. They run on two hosts (network namespaces) joined by a link of that rate, which needs root; the wire
carries packets of 1514 bytes with 1448 of them payload. With `--local` on this one, and none is late: milliseconds for
one, and of CPU on both ranks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bound import PACKET, rate_of
from benchmarks.link import two_hosts
from shardlib import make_mesh
from shardlib.mesh import Mesh
from shardlib.neighbours import shared

Way = tuple[Callable[[], Tensor], Callable[[Tensor], Any]]  # what starts a collective, and what makes use of its result


def ways(mesh: Mesh, mb: int, local: bool) -> dict[str, Way]:
    """By name."""
    theirs, mine = torch.ops._c10d_functional, torch.ops.shardlib
    x = torch.randn((mb << 20) // 8)
    both = torch.randn(2, len(x))

    def of(way: str, g: str) -> dict[str, Way]:
        if way == "gloo's":
            starts = (
                lambda: theirs.all_gather_into_tensor(x, 2, g),
                lambda: theirs.all_to_all_single(both, [1, 1], [1, 1], g),
                lambda: theirs.reduce_scatter_tensor(both, "sum", 2, g),
                lambda: theirs.all_reduce(both, "sum", g),
            )
        else:
            starts = (
                lambda: mine.posted_gather([x], 2, g),
                lambda: mine.posted_exchange(both, [1, 1], [1, 1], g),
                lambda: mine.posted_scatter([both], 2, g),
                lambda: mine.posted_reduce(both, "sum", g),
            )
        found: dict[str, Way] = {}
        for name, start in zip(("all_gather", "exchange", "scatter", "all_reduce"), starts, strict=True):
            sums = name == "scatter" and way != "gloo's"
            found[f"{name}, {way}"] = start, lambda out, s=sums: mine.posted_sum(out, [both], 2, g) if s else None
        return found

    found: dict[str, Way] = {}
    for way, axes in {"gloo's": ("dp",), "messages": ("dp",), "shared memory": ("dp", "tp")}.items():
        group = mesh.group(axes)  # one for memory, one for messages, of the same ranks
        os.environ["SHARDLIB_SHARED_MEMORY"] = str(int(way == "shared memory"))
        shared(group)
        found |= of(way, group) if local or way != "shared memory" else {}
    found.pop("all_reduce, messages")  # which are gloo's
    return dict(sorted(found.items(), key=lambda item: item[0].split(",")[0]))


def serve(mb: int, count: int, rounds: int, late: float, local: bool) -> None:
    """A rank: the seconds of every round, and those of CPU on both, by what was done and how many were in flight."""
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {}
    with make_mesh(dp=2, tp=1) as mesh:
        for number in range(rounds + 1):
            for name, (start, end) in ways(mesh, mb, local).items():
                for flying in (1, 2, count):
                    dist.barrier()
                    wall, cpu = time.perf_counter(), time.process_time()
                    waiting: list[Tensor] = []
                    for i in range(count):
                        waiting.append(start())
                        time.sleep((mesh.rank + i) % 2 * late / 1e3)
                        if len(waiting) == flying:
                            end(torch.ops._c10d_functional.wait_tensor(waiting.pop(0)))
                    for x in waiting:
                        end(torch.ops._c10d_functional.wait_tensor(x))
                    took = time.perf_counter() - wall
                    busy = torch.tensor(time.process_time() - cpu)
                    dist.all_reduce(busy)
                    if number:  # the first is not counted
                        found.setdefault(f"{name}|{flying}", []).append((took, busy.item()))
        if mesh.rank == 0:
            print(json.dumps(found))


def measured(link: str | None, mb: int, count: int, rounds: int, late: float) -> dict[str, list[tuple[float, float]]]:
    """What rank 0 says, of two on hosts joined by a link, or on this one."""
    command = [sys.executable, "-m", "benchmarks.messages", "--serve", f"--mb={mb}", f"--count={count}"]
    command += [f"--rounds={rounds}", f"--late={late}"] + ["--local"] * (link is None)
    with two_hosts(link, burst="128kb") if link else nullcontext((None, None)) as hosts:
        ranks = []
        for rank, host in enumerate(hosts):
            own = dict(RANK=rank, LOCAL_RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=1, MASTER_PORT=29500, OMP_NUM_THREADS=1)
            words = {k: str(v) for k, v in own.items()}
            address, interface = (hosts[0].address, host.interface) if host and hosts[0] else ("127.0.0.1", "lo")
            words |= dict(MASTER_ADDR=address, GLOO_SOCKET_IFNAME=interface)
            prefix = host.prefix if host else []
            ranks.append(subprocess.Popen(prefix + command, env=os.environ | words, stdout=subprocess.PIPE, text=True))
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return json.loads(said[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="215mbit", help="as tc writes it")
    parser.add_argument("--local", action="store_true", help="on this host")
    parser.add_argument("--mb", type=int, default=4)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--late", type=float, help="milliseconds; 4 on a link")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    late = args.late if args.late is not None else 0.0 if args.local else 4.0
    if args.serve:
        return serve(args.mb, args.count, args.rounds, late, args.local)
    took = measured(None if args.local else args.link, args.mb, args.count, args.rounds, late)
    if args.local:
        print(f"{args.count} times {args.mb} MB on one host: milliseconds for one, and of CPU on both ranks")
        unit, columns = args.count / 1e3, (0, 1)
    else:
        unit, columns = args.count * (args.mb << 19) * PACKET / rate_of(args.link), (0,)
        print(f"{args.count} times {args.mb} MB, link {args.link}: seconds over the wire's {unit:.3f}")
    found = {key: [[one[c] / unit for one in each] for c in columns] for key, each in took.items()}
    print(f"{'':<26}{'in flight':>9}" + "".join(f"{'median':>8}{'largest':>8}" for _ in columns))
    for key, series in found.items():
        name, flying = key.split("|")
        ends = "".join(f"{statistics.median(s):>8.2f}{max(s):>8.2f}" for s in series)
        print(f"{name:<26}{flying:>9}{ends}")
    if args.json:
        print(json.dumps(dict(link=args.link, local=args.local, mb=args.mb, count=args.count, found=found)))
    return None


if __name__ == "__main__":
    main()
