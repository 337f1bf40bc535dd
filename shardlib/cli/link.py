"""What `shardlib doctor` runs on ranks: how fast they reduce, as one line of JSON from the first."""

import json
import time

import torch
import torch.distributed as dist

from shardlib.mesh import make_mesh

LARGE, SMALL, ROUNDS = 4 << 20, 1, 5  # numbers in a tensor: 16 MiB for the speed, one for the delay


def main() -> None:
    """The median of some rounds of `all_reduce`, in seconds, by its length in numbers of 4 bytes."""
    mesh = make_mesh(ranks=-1, timeout=30)
    found = {}
    for length in (SMALL, LARGE):
        x, times = torch.ones(length, device=mesh.device), []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            dist.all_reduce(x)
            x[0].item()  # waits for the device
            times.append(time.perf_counter() - began)
        found[length] = sorted(times)[ROUNDS // 2]
    if mesh.rank == 0:
        n = mesh.total
        speed = LARGE * 4 * 2 * (n - 1) / n / found[LARGE]  # what a rank sends in a ring
        print(json.dumps({"ranks": n, "bytes_per_s": speed, "delay": found[SMALL]}), flush=True)


if __name__ == "__main__":
    main()
