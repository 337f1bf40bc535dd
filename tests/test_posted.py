"""Messages whose receivers are ready, beside the collectives that they stand for."""

from itertools import product

import pytest
import torch

import shardlib as sl
from shardlib.graph.program import copied
from shardlib.passes import applied, for_processes
from tests.ranks import on_ranks

RANKS = 3


def both(op: str, x: torch.Tensor, *how: object) -> tuple[torch.Tensor, torch.Tensor]:
    """What the functional collective gives, and what the messages do."""
    from shardlib.posted import POSTED  # ops are not sent to processes

    theirs = getattr(torch.ops._c10d_functional, op).default
    wait = torch.ops._c10d_functional.wait_tensor
    return wait(theirs(x, *how)), wait(POSTED[theirs](x, *how))


def gathered() -> list[bool]:
    same = []
    with sl.make_mesh(dp=RANKS) as mesh:
        for rows, dtype in product((0, 1, 5, 200_001), (torch.float32, torch.float64, torch.int64, torch.bfloat16)):
            x = torch.arange(2 * rows).view(rows, 2).add(7 * mesh.rank).to(dtype)
            theirs, mine = both("all_gather_into_tensor", x, RANKS, mesh.group(("dp",)))
            same.append(torch.equal(theirs, mine))
    return same


def exchanged() -> list[bool]:
    gives = [[1, 2, 3], [2, 0, 4], [3, 1, 200_000]]  # by rank, the rows for each
    same = []
    with sl.make_mesh(dp=RANKS) as mesh:
        takes = [rows[mesh.rank] for rows in gives]
        for dtype in (torch.float32, torch.int64):
            x = torch.arange(3 * sum(gives[mesh.rank])).view(-1, 3).mul(mesh.rank + 1).to(dtype)
            theirs, mine = both("all_to_all_single", x, takes, gives[mesh.rank], mesh.group(("dp",)))
            same.append(torch.equal(theirs, mine))
    return same


@pytest.mark.parametrize("body", [gathered, exchanged])
def test_the_same_as_the_collective(body):
    """For empty operands, pieces of several messages, and unequal pieces."""
    assert all(all(same) for same in on_ranks(RANKS, body))


def crossing() -> bool:
    """Each rank starts several of each before it waits for the first."""
    from shardlib.posted import POSTED

    gather, exchange = POSTED.values()
    wait = torch.ops._c10d_functional.wait_tensor
    with sl.make_mesh(dp=RANKS) as mesh:
        g, ones = mesh.group(("dp",)), [1] * RANKS
        xs = [torch.full((RANKS, 3), 10.0 * i + mesh.rank) for i in range(4)]
        begun = [(gather(x, RANKS, g), exchange(x, ones, ones, g)) for x in xs]
        ranks = torch.arange(float(RANKS))
        for i, (a, b) in reversed([*enumerate(begun)]):
            wanted = (10.0 * i + ranks).view(RANKS, 1).expand(RANKS, 3)
            if not torch.equal(wait(b), wanted) or not torch.equal(wait(a), wanted.repeat_interleave(RANKS, 0)):
                return False
    return True


def test_many_at_once_keep_their_order():
    assert all(on_ranks(RANKS, crossing))


@pytest.mark.parametrize("backend, mine", [("graph", True), ("regional", True), ("inductor", False)])
def test_programs_of_processes_use_them(backend, mine):
    """But one that is compiled as a whole, where a message's operand would be taken to be free."""
    from shardlib.posted import POSTED

    def body(x):
        return sl.all_to_all("a/dp b -> a b/dp", x), x * sl.gather(x, "dp").sum()

    with sl.make_mesh(dp=2, simulate=True):
        f = sl.jit(sl.shard_map(body, in_specs="a/dp b", out_specs=("a b/dp", "a/dp b")))
        module = f.lower(sl.shard(torch.ones(4, 4), "a/dp b")).module
    found = {n.target for n in applied(for_processes("cpu", backend), copied(module)).graph.nodes}
    assert found >= {*(POSTED.values() if mine else POSTED)}
    assert found.isdisjoint(POSTED if mine else POSTED.values())
