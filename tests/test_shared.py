"""Memory that processes of one host share: what is given, who is gone or late, and what becomes of the blocks."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardlib as sl
from shardlib import shared
from shardlib.graph.gloo import by_messages
from shardlib.graph.program import copied
from shardlib.mesh import Mesh
from shardlib.wire import REDUCE, combine
from tests.ranks import on_ranks

MINE, OPS = torch.ops.shardlib, torch.ops._c10d_functional
wait = OPS.wait_tensor


def memory(mesh: Mesh) -> shared.Shared:
    found = shared.shared(mesh.group(("dp",)))
    assert found is not None
    return found


def gather(x: Tensor, mesh: Mesh, own: bool = False) -> Tensor:
    """What waits for it."""
    return MINE.posted_gather([x], mesh.total, mesh.group(("dp",)), own)


# ---- what is given


def reduced() -> list[bool]:
    """All reductions of little and of much, into the operand and beside it: bit for bit in the order of ranks."""
    same = []
    with sl.make_mesh(dp=5) as mesh:
        group = mesh.group(("dp",))
        for op in REDUCE:
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                for shape in [(), (0,), (3, 1), (211, 311)]:
                    if op == "avg" and not dtype.is_floating_point:
                        continue
                    every = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(5)]
                    every = [(8 * x).to(dtype) for x in every]
                    wanted = combine(OPS.all_reduce.default, [(x, op, group) for x in every])[mesh.rank]
                    x = every[mesh.rank].clone()
                    other = wait(MINE.posted_reduce(x, op, group))
                    same += [torch.equal(other, wanted), torch.equal(x, every[mesh.rank])]
                    same += [torch.equal(wait(MINE.posted_reduce_(x, op, group)), wanted), torch.equal(x, wanted)]
    return same


def test_reductions_are_those_of_one_process():
    for same in on_ranks(5, reduced):
        assert len(same) == 4 * 4 * 14 and all(same)


def many() -> bool:
    """More than sockets hold are begun before the first is waited for, in another order; one rank comes late."""
    with sl.make_mesh(dp=2) as mesh:
        gather(torch.ones(1), mesh)
        time.sleep(mesh.rank)
        begun = [gather(torch.full((1,), float(i + mesh.rank)), mesh) for i in range(2000)]
        found = [wait(x) for x in reversed(begun)]
        return torch.equal(torch.stack(found).flip(0), torch.arange(2000.0)[:, None] + torch.arange(2))


def test_many_in_flight():
    assert all(on_ranks(2, many))


def written() -> list[float]:
    """One rank writes into what it has gathered before the other has looked."""
    with sl.make_mesh(dp=2) as mesh:
        x = torch.full((4,), float(mesh.rank))
        out, both = gather(x, mesh, own=True), MINE.posted_gather([x, x[1:]], 2, mesh.group(("dp",)), True)
        time.sleep(0.5 * mesh.rank)
        found = [*wait(out)[::4].tolist(), *wait(both).tolist()]
        out.zero_()
        return found


def test_what_is_written_into_is_in_memory_of_its_own():
    assert on_ranks(2, written) == [[0.0, 1.0, *[0.0] * 4, *[1.0] * 4, *[0.0] * 3, *[1.0] * 3]] * 2


def test_so_is_what_a_program_returns():
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        mine = sl.all_gather("n/dp -> n", x, invariant=True)
        return mine, sl.all_gather("n/dp -> n", 2 * x, invariant=True).sum()

    with sl.make_mesh(dp=2, simulate=True):
        f = sl.jit(sl.shard_map(body, in_specs="n/dp", out_specs=("n", "")), passes=[])
        module = by_messages(copied(f.lower(sl.shard(torch.ones(6), "n/dp")).module))
    gathers = [n for n in module.graph.nodes if n.target is MINE.posted_gather.default]
    assert [n.args[3:] for n in gathers] == [(True,), ()]


# ---- blocks


def blocks() -> list[Any]:
    """How many there are here, and mapped of others: in a loop, and after another size has come into use."""
    with sl.make_mesh(dp=2) as mesh:
        here, found = memory(mesh), []
        for size in (10_000, 20_000):
            for _ in range(50):
                flying = [wait(gather(torch.ones(n), mesh)) for n in (size, 3 * size)]
                del flying
            dist.barrier()
            wait(gather(torch.ones(1), mesh))
            found.append((len(here.at), len(here.maps), {b.fd for b in here.at.values()}))
        held = gather(torch.full((10,), float(mesh.rank)), mesh)
        wait(held)
        others = [wait(gather(torch.zeros(10), mesh)) for _ in range(20)]
        return [*found, held.tolist() == [0.0] * 10 + [1.0] * 10, len(others), len(here.open)]


def test_blocks_are_used_again_and_let_go():
    for (one, maps, open_), (two, later, _), kept, _, unfinished in on_ranks(2, blocks):
        assert one <= 7 and maps <= 7 and open_ == {-1}, "two at a time, of two sizes, and the last"
        assert two <= 14 and later <= 14
        assert kept and unfinished <= 2


# ---- who is gone, late, or elsewhere


def told(at: Any, timeout: float = 20) -> str:
    """What rank 0 of three raises when it gathers after rank 2 has done `at(mesh)`."""

    def body() -> None:
        with sl.make_mesh(dp=3, timeout=timeout) as mesh:
            wait(gather(torch.ones(3), mesh))
            dist.barrier()
            if mesh.rank == 2:
                at(mesh)
            began = time.monotonic()
            try:
                wait(gather(torch.ones(3), mesh))
            except (dist.DistNetworkError, sl.RankError) as e:
                raise ValueError("<", type(e).__name__, str(e), round(time.monotonic() - began), ">") from None

    with pytest.raises(AssertionError) as failed:
        on_ranks(3, body, seconds=40)
    said = str(failed.value).split("rank 1 of 3")[0]
    return said[said.rindex("('<'") :]


def test_a_rank_that_is_gone():
    said = told(lambda mesh: os.kill(os.getpid(), signal.SIGKILL))
    assert said.startswith("('<', 'DistNetworkError', 'rank 2 of this host closed the connection', 0, '>')")


def test_a_rank_that_is_gone_and_has_left_a_child():
    """Which would hold its sockets."""

    def leave(mesh: Mesh) -> None:
        if os.fork() == 0:
            time.sleep(15)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert told(leave).startswith("('<', 'DistNetworkError', 'rank 2 of this host closed the connection', 0, '>')")


def test_a_rank_that_is_late():
    said = told(lambda mesh: time.sleep(30), timeout=1)
    assert said.startswith("('<', 'DistNetworkError', 'timed out after 1 s waiting for rank 2 of this host', 1, '>')")


def test_a_rank_that_gives_something_else():
    def other(mesh: Mesh) -> None:
        wait(gather(torch.ones(4), mesh))

    assert told(other).startswith("('<', 'RankError', 'rank 2 gives 48 bytes, 36 are wanted from it', 0, '>')")


def ended() -> bool:
    """What a rank has given is there after it has gone."""
    with sl.make_mesh(dp=2) as mesh:
        wait(gather(torch.ones(1), mesh))
        out = gather(torch.full((1,), float(mesh.rank)), mesh)
        if mesh.rank == 1:
            for s in memory(mesh).sockets.values():
                s.close()
            return True
        time.sleep(0.5)
        return wait(out).tolist() == [0.0, 1.0]


def test_a_rank_that_has_ended():
    assert all(on_ranks(2, ended))


def where(how: str) -> tuple[bool, bool]:
    """Whether memory is shared, and a gather right, where rank 1 is different."""
    with sl.make_mesh(dp=3) as mesh:
        if mesh.rank == 1 and how == "said so":
            os.environ["SHARDLIB_SHARED_MEMORY"] = "0"
        if mesh.rank == 1 and how == "another host":
            shared._host = lambda: ("another", 1)
        if mesh.rank == 1 and how == "cannot connect":
            shared._MEET = 0.01
            shared._socket = lambda: (_ for _ in ()).throw(OSError(24, "too many open files"))
        found = wait(gather(torch.full((1,), float(mesh.rank)), mesh))
        return shared.shared(mesh.group(("dp",))) is not None, found.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("how", ["", "said so", "another host", "cannot connect"])
def test_all_share_or_none_does(how):
    assert on_ranks(3, where, how) == [(how == "", True)] * 3
