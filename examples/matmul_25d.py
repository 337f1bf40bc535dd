"""A matrix product on a cube of ranks (Solomonik and Demmel 2011), SUMMA, and how such a function is tested.

Inside a per-device function plain torch is always allowed: a product of two blocks is the rank's own, a term of a sum.
"""

import pytest
import torch
from torch import Tensor

import shardlib as sl


def matmul_25d(a: Tensor, b: Tensor) -> Tensor:
    """a `"m/row k/col"` @ b `"k/row n/col"`, copies of both on `depth`: each layer of ranks makes a part of the sum.

    As many rows as columns of ranks, a multiple of the depth.
    """
    q, c = sl.axis_size("row"), sl.axis_size("depth")
    ranks = [(d, i, j) for d in range(c) for i in range(q) for j in range(q)]

    def flat(d: int, i: int, j: int) -> int:
        return (d * q + i % q) * q + j % q

    a = sl.ppermute(a, ("depth", "row", "col"), [(flat(d, i, i + j + d * q // c), flat(d, i, j)) for d, i, j in ranks])
    b = sl.ppermute(b, ("depth", "row", "col"), [(flat(d, i + j + d * q // c, j), flat(d, i, j)) for d, i, j in ranks])
    y = torch.zeros(())
    for _ in range(q // c):
        y = y + a @ b  # a block of k, each rank its own: plain torch
        a, b = sl.ppermute(a, "col", shift=-1), sl.ppermute(b, "row", shift=-1)
    return sl.psum("m/row n/col +depth -> m/row n/col", y)


def summa(a: Tensor, b: Tensor) -> Tensor:
    """The same on a square of ranks: block by block of k, a column of `a` and a row of `b` go to all (van de Geijn)."""
    y = torch.zeros(())
    for i in range(sl.axis_size("row")):
        y = y + sl.pbroadcast(a, "col", source=i) @ sl.pbroadcast(b, "row", source=i)
    return y


IN, OUT = ("m/row k/col", "k/row n/col"), "m/row n/col"


CUBES = [m for n in (4, 8) for m in sl.testing.meshes(n, "depth", "row", "col") if m["row"] == m["col"] >= m["depth"]]


@pytest.mark.parametrize("mesh", CUBES, ids=str)
def test_matmul_25d(mesh: dict[str, int]) -> None:
    sl.testing.check(matmul_25d, torch.matmul, mesh=mesh, sizes=dict(m=12, k=12, n=8), in_specs=IN, out_specs=OUT)


def test_summa() -> None:
    sl.testing.check(summa, torch.matmul, mesh=dict(row=3, col=3), in_specs=IN, out_specs=OUT)


def test_traffic() -> None:
    """2 moves to begin, 2 between the 4 / 2 rounds, one sum. Those after the last round are dead, and not sent."""
    mesh = sl.make_mesh(depth=2, row=4, col=4, simulate=True)
    with mesh:
        a, b = sl.shard(torch.ones(8, 8), "m/row k/col"), sl.shard(torch.ones(8, 8), "k/row n/col")
    found = sl.testing.collectives(sl.shard_map(matmul_25d, in_specs=IN, out_specs=OUT), a, b, mesh=mesh)
    assert found == {"ppermute:depth,row,col": 2, "ppermute:col": 1, "ppermute:row": 1, "psum:depth": 1}


def main() -> None:
    """The product on 8 ranks in this process, and which of them holds what."""
    a, b = torch.arange(48.0).view(6, 8), torch.arange(32.0).view(8, 4)
    with sl.make_mesh(depth=2, row=2, col=2, simulate=True):
        y = sl.shard_map(matmul_25d, in_specs=IN, out_specs=OUT)(sl.shard(a, "m/row k/col"), sl.shard(b, "k/row n/col"))
        sl.show(y)
        print("equal to one process:", torch.equal(sl.gather(y), a @ b))


if __name__ == "__main__":
    main()
