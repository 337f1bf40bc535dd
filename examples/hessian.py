"""The top eigenvalue of the Hessian of the demo model's loss, under ZeRO-3 and tensor parallelism.

    python examples/hessian.py

Power iteration on Hessian-vector products: the collectives of the loss are differentiated twice, and weights and
vectors stay cut over the ranks.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch.func import vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpt
import shardlib as sl
from shardlib.tree import map_

SIZES = gpt.sizes(vocab=32, layers=2, model=16, heads=2)


def product(w: gpt.GPT, v: gpt.GPT, batch: gpt.Batch) -> gpt.GPT:
    """The Hessian times `v`: the gradient of the gradient, weighted by `v`."""
    with sdpa_kernel(SDPBackend.MATH):  # whose backward can be differentiated
        return vjp(lambda w: sl.grad(gpt.loss)(w, batch), w)[1](v)[0]


def unit(v: gpt.GPT) -> tuple[gpt.GPT, torch.Tensor]:
    """`v` with length 1, and its length."""
    length = sl.global_norm(v)
    return map_(lambda x: x / length, v), length


def top(mesh: sl.Mesh, steps: int = 20) -> tuple[float, float, gpt.GPT]:
    """The eigenvalue of the Hessian that is largest in size; how far the last step has turned its eigenvector; that
    vector, whole. In float64."""
    specs, numbers = sl.specs(gpt.GPT), torch.arange(4 * 8).view(4, 8)
    times = sl.jit(sl.shard_map(product, in_specs=None, out_specs=specs))
    scaled = sl.shard_map(unit, in_specs=None, out_specs=(specs, ""))
    changed = sl.shard_map(partial(map_, torch.sub), in_specs=None, out_specs=specs)
    with mesh:
        w, v = (sl.init(gpt.GPT, sizes=SIZES, key=sl.random.key(k), dtype=torch.float64) for k in (0, 1))
        batch = sl.shard(gpt.Batch(tokens=numbers * 7 % 32, targets=numbers * 5 % 31))
        old, new, size = v, scaled(v)[0], torch.zeros(())
        for _ in range(steps):
            old, (new, size) = new, scaled(times(w, new, batch))
        turned = scaled(changed(new, old))[1].item()  # 0, or 2 where the eigenvalue is negative
        return size.item() * (1 if turned < 1 else -1), min(turned, 2 - turned), sl.gather(new)


def main(argv: Sequence[str] = ()) -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--steps", type=int, default=20)
    args = cli.parse_args(argv)
    for axes in (dict(dp=2, tp=2), dict(dp=1, tp=1)):
        value, turned, _ = top(sl.make_mesh(axes, simulate=True), args.steps)
        print(f"{axes}: top eigenvalue {value:.9f}, its vector turned by {turned:.1e} in the last step")


if __name__ == "__main__":
    main(sys.argv[1:])
