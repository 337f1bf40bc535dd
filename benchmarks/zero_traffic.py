"""Bytes that a rank sends in one train step, counted in the traced program, against the formulas of the papers.

    python -m benchmarks.zero_traffic [--json]

psi is the number of bytes of all parameters, N the ranks of dp, M the micro-batches. Reductions and gathers of whole
parameters send (N-1)/N psi each: ZeRO 0-2 two of them (Rajbhandari et al. 2020), M + 1 where each micro-batch scatters;
ZeRO-3 three, each leaf being gathered in forward and in backward. HSDP moves over nodes a GPU's shard alone; hpZ (Wang
et al. 2023) gathers over nodes once a step. Nothing runs: the step is traced on abstract arrays.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shardlib as sl
from shardlib import tree

LIMIT = 0.01  # of the formula
SIZES = dict(layers=4, model=256, hidden=1024, vocab=512)


@sl.pytree
class Block:
    w_in: Tensor = sl.spec("model/dp hidden")
    w_out: Tensor = sl.spec("hidden model/dp")


@sl.pytree
class Model:
    embed: Tensor = sl.spec("vocab model/dp")
    blocks: list[Block] = sl.stack("layers")
    head: Tensor = sl.spec("model/dp vocab")


def block(w: Block, x: Tensor) -> Tensor:
    w = sl.gather(w, "dp")
    return x + torch.tanh(x @ w.w_in) @ w.w_out


def ends(w: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ sl.gather(w, "dp"))  # whose backward needs the leaf again


def loss(w: Model, batch: dict[str, Tensor]) -> sl.Mean:
    """Every leaf is gathered where it is used, and again in the backward pass."""
    x = sl.remat(ends)(w.embed, batch["x"])
    for each in w.blocks:
        x = sl.remat(block)(each, x)
    return sl.Mean.of("batch/dp vocab", sl.remat(ends)(w.head, x) ** 2)


class Row(NamedTuple):
    what: str
    mesh: dict[str, Any]
    layout: sl.Layout
    count: int
    formula: str
    wanted: float  # in psi


def rows() -> Iterator[Row]:
    specs = sl.specs(Model)
    for n in (2, 8, 64):
        part, mesh = (n - 1) / n, {"dp": n}
        for stage in (0, 1):
            for count in (1, 4):
                yield Row(f"ZeRO-{stage}", mesh, sl.zero(specs, stage=stage), count, "2 (N-1)/N", 2 * part)
        for count in (1, 4):
            yield Row("ZeRO-2", mesh, sl.zero(specs, stage=2), count, "(M+1) (N-1)/N", (count + 1) * part)
            once = sl.zero(specs, stage=2, reduce="step")
            yield Row("ZeRO-2, reduced once", mesh, once, count, "2 (N-1)/N", 2 * part)
            yield Row("ZeRO-3", mesh, sl.zero(specs, stage=3), count, "3 M (N-1)/N", 3 * count * part)
    nodes, gpus = 4, 8
    mesh = {"dp": {"node": nodes, "gpu": gpus}}
    inner, outer = (gpus - 1) / gpus, (nodes - 1) / nodes
    hsdp = sl.zero(specs, "gpu", 3)
    yield Row("HSDP", mesh, hsdp, 1, "3 (G-1)/G + 2/G (K-1)/K", 3 * inner + 2 / gpus * outer)
    every = sl.split(specs, "gpu", "node")
    hpz = sl.Layout(compute=sl.split(specs, "gpu"), params=every, grads=sl.split(specs, "gpu"), opt=every)
    yield Row("hpZ", mesh, hpz, 1, "3 (G-1)/G + 2/G (K-1)/K", 3 * inner + 2 / gpus * outer)


def sent(row: Row) -> float:
    """What a rank sends in a step, single numbers left out, in psi."""
    with sl.make_mesh(row.mesh, simulate=True) as mesh:
        train = sl.step(loss, sl.optim.sgd(0.1), layout=row.layout, accumulate=row.count)
        rows_ = mesh.size("dp") * row.count

        def made() -> Any:
            params = sl.abstract(Model, SIZES)
            x = sl.shard(torch.zeros(rows_, SIZES["vocab"]), "batch/dp vocab")
            return train.init(params), {"x": x}

        state, batch = sl.abstract(made)
        psi = sum(x.numel() * x.dtype.itemsize for x in tree.leaves(state.params))
        found = sl.jit(train).lower(state, batch).collectives()
        return sum(c.bytes * c.times for c in found if not c.scalar) / psi


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    print(f"{'':<22}{'mesh':<20}{'M':>3}  {'formula / psi':<26}{'formula':>9}{'traced':>9}{'ratio':>8}")
    worst, table = 0.0, []
    for row in rows():
        found = sent(row)
        ratio = found / row.wanted
        worst = max(worst, abs(ratio - 1))
        shape = sl.make_mesh(row.mesh, simulate=True).name
        table.append(dict(what=row.what, mesh=shape, count=row.count, wanted=row.wanted, found=found))
        print(f"{row.what:<22}{shape:<20}{row.count:>3}  {row.formula:<26}{row.wanted:>9.4f}{found:>9.4f}{ratio:>8.4f}")
    ok = worst <= LIMIT
    print(f"\nlargest difference {worst:.2%} of the formula; {'within' if ok else 'beyond'} {LIMIT:.0%}")
    if args.json:
        print(json.dumps(dict(ok=ok, worst=worst, limit=LIMIT, rows=table)))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
