"""Where to cut what on nodes of GPUs: ZeRO-3, HSDP, MiCS and hpZ are layouts of one loss. What each sends, and where.

The annotation says at which dimension a leaf is cut; a layout says over which axes, tree by tree. `split(specs, "gpu",
"node")` cuts over GPUs first, then each piece over nodes, so that the gather inside a node is the last one.
"""

from collections import Counter
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl


@sl.pytree
class Mlp:
    w_in: Tensor = sl.spec("model/dp hidden")
    w_out: Tensor = sl.spec("hidden model/dp")


@sl.pytree
class Net:
    layers: Mlp = sl.stack("layers")


@sl.pytree
class Batch:
    x: Tensor = sl.spec("batch/dp model")
    y: Tensor = sl.spec("batch/dp model")


def layer(w: Mlp, x: Tensor) -> Tensor:
    w = sl.gather(w, "dp")  # whatever of dp the layout's `compute` cuts: node and GPU, the GPU alone, or nothing
    return x + F.gelu(x @ w.w_in) @ w.w_out


def loss(w: Net, b: Batch) -> sl.Mean:
    x, _ = sl.scan(lambda x, w: (sl.remat(layer)(w, x), None), b.x, w.layers)
    return sl.Mean.of("batch/dp model", (x - b.y) ** 2)


specs = sl.specs(Net)
hsdp = sl.zero(specs, axis="gpu", stage=3)  # gradients: scattered over GPUs, then the shard summed over nodes
LAYOUTS = {
    "ZeRO-3": sl.zero(specs, axis="dp", stage=3),
    "HSDP": hsdp,
    "MiCS": replace(hsdp, opt=sl.split(specs, "gpu", "node")),  # and the optimizer's state over all ranks
    "hpZ": sl.Layout(  # kept cut over all, gathered over nodes once a step, inside the node layer by layer
        compute=sl.split(specs, "gpu"),
        params=sl.split(specs, "gpu", "node"),
        grads=sl.split(specs, "gpu"),
        opt=sl.split(specs, "gpu", "node"),
    ),
}


def sent(layout: sl.Layout, params: Net, batch: Batch, accumulate: int) -> Counter[str]:
    """The bytes of leaves that a rank sends in a step, by axis."""
    step = sl.jit(sl.step(loss, sl.optim.adamw(1e-3), layout=layout, accumulate=accumulate))
    found: Counter[str] = Counter()
    for c in step.lower(step.init(params), batch).collectives():
        found[c.axis] += 0 if c.scalar else c.bytes * c.times
    return found


def main() -> None:
    """Two nodes of four GPUs, in this process: the traffic of four micro-batches."""
    with sl.make_mesh(dp=dict(node=2, gpu=4), simulate=True):
        sizes = dict(layers=3, model=16, hidden=64)
        params = sl.abstract(lambda: sl.init(Net, sizes=sizes, key=sl.random.key(0)))
        batch = sl.abstract(lambda: sl.shard(Batch(x=torch.zeros(32, 16), y=torch.zeros(32, 16))))
        for name, layout in LAYOUTS.items():
            by_axis = sent(layout, params, batch, accumulate=4)
            print(f"{name:8}" + ", ".join(f"{n:,} bytes over {axis}" for axis, n in sorted(by_axis.items()) if n))


if __name__ == "__main__":
    main()
