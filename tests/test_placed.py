"""placed: what is sent is made where the others read it, and nothing writes there while they do."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import shardlib as sl
from shardlib import neighbours, posted, shared, tree
from shardlib.graph.nodes import STARTS, aliased, roots
from shardlib.graph.program import copied
from shardlib.passes import applied, for_processes
from tests.ranks import on_ranks

N = 300  # N * N floats are large


def summed(x: Tensor) -> Tensor:
    return sl.psum("a b +dp -> a b", x)


def scattered(x: Tensor) -> Tensor:
    return sl.psum_scatter("a b +dp -> a/dp b", x)


def returned(x: Tensor) -> Any:
    return scattered(y := x @ x), y


def gathered_later(x: Tensor) -> Any:
    y = scattered(x @ x.sin())
    return y, sl.all_gather("a/dp b -> a b", y, invariant=True).sum()


def written_later(x: Tensor) -> Tensor:
    y = x @ x
    z = scattered(y)
    return ((y * z.sum())[: len(z)] + z).sum()[None]


def two_sums(x: Tensor) -> Any:
    return summed(x @ x.sin()).sum(), summed(x.cos() @ x).sum()


def large_and_small(x: Tensor) -> Any:
    """In one bucket, the last of them where a product may not be made: no multiple of 64 bytes from its start."""
    return tuple(sl.psum(y, "dp") for y in (x @ x, x.t() @ x, x.sum(0), x[0].sum(), x @ x.t()))


def read_later(x: Tensor) -> Any:
    y = x @ x
    some = sl.psum(y, "dp"), sl.psum(x.t() @ x, "dp"), sl.psum(x.sum(0), "dp")
    return *some, sum(z.sum() for z in some) * y.sin().sum()[None]


def the_same_twice(x: Tensor) -> Any:
    y = x @ x
    return summed(y).sum(), scattered(y)


def overwritten(x: Tensor) -> Any:
    """Operands that are written into once they have been sent."""
    found = []
    for sent in (
        lambda y: sl.all_gather("a/dp b -> a b", y, invariant=True).sum(),
        lambda y: sl.psum(sl.all_to_all("a/dp b -> a b/dp", y)[:, 0].sum(), "dp"),
    ):
        y = x.sin()
        z = sent(y)
        y.mul_(2)
        found += [z, sl.psum(y.sum(), "dp")]
    return sum(found)


def overwritten_in_turns(x: Tensor) -> Any:
    def turn(c: Tensor, w: Tensor) -> Any:
        y = torch.sin(c * w)
        z = sl.all_gather("a/dp b -> a b", y, invariant=True)
        y.mul_(2)
        return c + y, z

    c, z = sl.scan(turn, x, torch.ones(3))
    return sl.psum(c.sum(), "dp") + z.sum()


ROWS, ALL = "a/dp b", "a b"
PROGRAMS: dict[str, tuple[Callable[[Tensor], Any], Any, str]] = {  # results, and what is made where others read it
    "a scatter": (lambda x: scattered(x @ x), ROWS, "mm"),
    "along the other dim": (lambda x: sl.psum_scatter("a b +dp -> a b/dp", x @ x), "a b/dp", "copy_"),
    "added up": (lambda x: scattered(x @ x + x.sin() @ x), ROWS, "mm addmm"),
    "a sum": (lambda x: summed(x @ x) / 2, ALL, "mm"),
    "a sum that is returned": (lambda x: summed(x @ x), ALL, ""),
    "two sums": (two_sums, ("", ""), "mm mm"),
    "large and small": (large_and_small, (ALL, ALL, "a", "", ALL), "mm mm copy_ copy_ copy_"),
    "gathered later": (gathered_later, (ROWS, ""), "mm"),
    "not a product": (lambda x: scattered(x.sin()), ROWS, ""),
    "small": (lambda x: scattered(x[:60] @ x[:, :60]), ROWS, ""),
    "a part": (lambda x: scattered((x @ x)[60:240]), ROWS, ""),
    "returned": (returned, (ROWS, "k/dp c"), ""),
    "written later": (written_later, "k/dp", ""),
    "read later": (read_later, (ALL, ALL, "a", "k/dp"), "mm copy_ copy_"),
    "overwritten": (overwritten, "", ""),
    "overwritten in turns": (overwritten_in_turns, "", ""),
    "the same twice": (the_same_twice, ("", ROWS), "mm"),
}


def program(name: str) -> Callable[[Tensor], Any]:
    f, results, _ = PROGRAMS[name]
    return sl.shard_map(lambda x: f(x[0]), in_specs="k/dp m n", out_specs=results)


def made(module: GraphModule) -> str:
    """The ops that make something where other ranks read it."""
    held = roots(module.graph)
    found = [n for n in module.graph.nodes if any(r.target is posted.EMPTY for x in aliased(n, True) for r in held[x])]
    return " ".join(str(n.target).split(".")[1] for n in found if n.target not in STARTS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_made_there(name):
    with sl.make_mesh(dp=2, simulate=True):
        module = sl.jit(program(name)).lower(sl.shard(torch.ones(2, N, N), "k/dp m n")).module
    assert made(applied(for_processes("cpu", "graph"), copied(module))) == PROGRAMS[name][2]


def ran(memory: str) -> list[str]:
    """The programs whose results are not those without passes; one rank is late to see what the others give."""
    os.environ["SHARDLIB_SHARED_MEMORY"] = memory
    wrong: list[str] = []
    wait: Any = shared.Shared.wait

    def late(self: shared.Shared, here: shared.Collective) -> Any:
        time.sleep(0.01)
        return wait(self, here)

    with sl.make_mesh(dp=3) as mesh:
        x = torch.randn(1, N, N, generator=torch.Generator().manual_seed(mesh.rank))
        x = sl.from_local(x, "k/dp m n")
        for name in PROGRAMS:
            plain, other = sl.jit(program(name), passes=[]), sl.jit(program(name))
            for i in range(4):
                shared.Shared.wait = late if mesh.rank == i else wait
                results = zip(tree.leaves(plain(x)), tree.leaves(other(x)), strict=True)
                close = (torch.allclose(a.shards[0], b.shards[0], rtol=1e-5, atol=1e-3) for a, b in results)
                wrong += [] if all(close) else [name]
    return wrong


@pytest.mark.parametrize("memory", "01")
def test_values_stay(memory):
    """By messages, and through memory that ranks share."""
    assert on_ranks(3, ran, memory, seconds=200) == [[]] * 3


def blocks() -> int:
    """How many there are after many steps."""
    with sl.make_mesh(dp=2) as mesh:
        x = sl.from_local(torch.ones(1, N, N), "k/dp m n")
        run = sl.jit(program("large and small"))
        for _ in range(20):
            run(x)
        found = neighbours.shared(mesh.group(("dp",)))
        assert found is not None and not found.sums
        return len(found.at)


def test_blocks_are_used_again():
    assert max(on_ranks(2, blocks)) <= 4
