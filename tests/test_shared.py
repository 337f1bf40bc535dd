"""Memory that processes of one host share: what is given, who is gone or late, and what becomes of the blocks."""

import os
import resource
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardlib as sl
from shardlib import neighbours, shared
from shardlib.graph.gloo import by_messages
from shardlib.graph.program import copied
from shardlib.mesh import Mesh
from shardlib.wire import REDUCE, combine
from tests.ranks import on_ranks

MINE, OPS = torch.ops.shardlib, torch.ops._c10d_functional
wait = OPS.wait_tensor


def memory(mesh: Mesh) -> shared.Shared:
    found = neighbours.shared(mesh.group(("dp",)))
    assert found is not None
    return found


def gather(x: Tensor, mesh: Mesh, own: bool = False) -> Tensor:
    """What waits for it."""
    return MINE.posted_gather([x], mesh.total, mesh.group(("dp",)), own)


# ---- what is given


def reduced() -> list[bool]:
    """All reductions of little and of much, into the operand, which may lie where others read it, and beside it: bit
    for bit in the order of ranks."""
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
                    there = MINE.posted_empty(shape, dtype, group).copy_(x)
                    for y in (x, there):
                        same += [torch.equal(wait(MINE.posted_reduce_(y, op, group)), wanted), torch.equal(y, wanted)]
    return same


def test_reductions_are_those_of_one_process():
    for same in on_ranks(5, reduced):
        assert len(same) == 6 * 4 * 14 and all(same)


def kinds() -> list[bool]:
    """Gathers of any dtype, and four reductions in flight."""
    with sl.make_mesh(dp=4) as mesh:
        same = []
        for dtype in (torch.bool, torch.int8, torch.complex64, torch.float16, torch.float8_e5m2):
            x = torch.tensor([mesh.rank % 2, 1, 0]).to(dtype)
            found, wanted = wait(gather(x, mesh)), torch.tensor([[r % 2, 1, 0] for r in range(4)]).view(-1).to(dtype)
            same.append(torch.equal(found.to(torch.complex64), wanted.to(torch.complex64)))
        xs = [torch.full((n,), float(mesh.rank + 1)) for n in (5, 40_000, 1, 70_001)]
        begun = [MINE.posted_reduce(x, "sum", mesh.group(("dp",))) for x in xs]
        same += [torch.equal(wait(b), torch.full_like(x, 10.0)) for x, b in zip(xs, begun, strict=True)]
        turned = torch.arange(12.0).view(3, 4).T
        same.append(torch.equal(wait(MINE.posted_reduce(turned, "sum", mesh.group(("dp",)))), 4 * turned))
        return same


def test_other_values():
    for same in on_ranks(4, kinds):
        assert len(same) == 10 and all(same)


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
        kept = held.tolist() == [0.0] * 10 + [1.0] * 10 and len(here.open) >= len(others) // 2
        dist.barrier()  # the other has looked, too
        del others
        wait(gather(torch.ones(1), mesh))  # says what is not read any more
        dist.barrier()
        wait(gather(torch.ones(1), mesh))
        return [*found, kept, len(here.open)]


def test_blocks_are_used_again_and_let_go():
    for (one, maps, open_), (two, later, _), kept, unfinished in on_ranks(2, blocks):
        assert one <= 7 and maps <= 7 and open_ == {-1}, "two at a time, of two sizes, and the last"
        assert two <= 14 and later <= 14
        assert kept and unfinished <= 3


def sizes() -> list[int]:
    """Of the blocks of a rank after a gather of 4 MB, into memory of each and of all."""
    with sl.make_mesh(dp=4) as mesh:
        found = []
        for own in (True, False):
            out = wait(gather(torch.full((1 << 18,), float(mesh.rank)), mesh, own))
            assert out[:: 1 << 18].tolist() == [0.0, 1.0, 2.0, 3.0]
            found.append(sum(b.size for b in memory(mesh).at.values() if b.size > 1 << 20))
            dist.barrier()
        return found


def test_what_is_gathered_lies_on_a_host_once():
    each, once = (sum(some) for some in zip(*on_ranks(4, sizes), strict=True))
    assert (each, once) == (0, 4 << 20)


# ---- who is gone, late, or elsewhere


def leave_a_child(mesh: Mesh) -> None:
    """Which would hold this rank's sockets."""
    if os.fork() == 0:
        time.sleep(15)
        os._exit(0)
    gone(mesh)


def gone(mesh: Mesh) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def late(mesh: Mesh) -> None:
    time.sleep(30)


def another(mesh: Mesh) -> None:
    wait(gather(torch.ones(4), mesh))


def disturbed(how: str, timeout: float) -> None:
    """Three ranks gather after rank 2 has done something."""
    with sl.make_mesh(dp=3, timeout=timeout) as mesh:
        wait(gather(torch.ones(3), mesh))
        dist.barrier()
        if mesh.rank == 2:
            globals()[how](mesh)
        began = time.monotonic()
        try:
            wait(gather(torch.ones(3), mesh))
        except (dist.DistNetworkError, sl.RankError) as e:
            raise ValueError("<", type(e).__name__, str(e), round(time.monotonic() - began), ">") from None


@pytest.mark.parametrize(
    "how, timeout, kind, message",
    [
        ("gone", 20, "DistNetworkError", "rank 2 of this host closed the connection"),
        ("leave_a_child", 20, "DistNetworkError", "rank 2 of this host closed the connection"),
        ("late", 1, "DistNetworkError", "timed out after 1 s waiting for rank 2 of this host"),
        ("another", 20, "RankError", "rank 2 gives 48 bytes, 36 are wanted from it"),
    ],
)
def test_a_rank_that(how, timeout, kind, message):
    """What rank 0 raises, and after how many seconds."""
    with pytest.raises(AssertionError) as failed:
        on_ranks(3, disturbed, how, timeout, seconds=40)
    said = str(failed.value).split("rank 1 of 3")[0]
    assert said[said.rindex("('<'") :].startswith(f"('<', '{kind}', '{message}', {int(how == 'late')}, '>')")


def ended() -> bool:
    """What a rank has given is there after it has gone."""
    with sl.make_mesh(dp=2) as mesh:
        wait(gather(torch.ones(1), mesh))
        out = gather(torch.full((1,), float(mesh.rank)), mesh)
        if mesh.rank == 1:
            wait(out)
            for s in memory(mesh).sockets.values():
                s.close()
            return True
        time.sleep(0.5)
        return wait(out).tolist() == [0.0, 1.0]


def test_a_rank_that_has_ended():
    assert all(on_ranks(2, ended))


def where(how: str) -> tuple[bool, bool, float]:
    """Whether memory is shared, whether a gather is right where rank 1 is different, and the seconds it took."""
    with sl.make_mesh(dp=3, timeout=8) as mesh:
        wait(OPS.all_reduce(torch.ones(1), "sum", mesh.group(("dp",))))
        if mesh.rank == 1 and how == "said so":
            os.environ["SHARDLIB_SHARED_MEMORY"] = "0"
        if mesh.rank == 1 and how == "another host":
            neighbours._host = lambda: ("another", 1, 1, 1)
        if mesh.rank == 1 and how == "cannot connect":
            neighbours._socket = lambda deadline: (_ for _ in ()).throw(OSError(24, "too many open files"))
        began = time.monotonic()
        found = wait(gather(torch.full((1,), float(mesh.rank)), mesh))
        took = time.monotonic() - began
        return neighbours.shared(mesh.group(("dp",))) is not None, found.tolist() == [0.0, 1.0, 2.0], took


@pytest.mark.parametrize("how", ["", "said so", "another host", "cannot connect"])
def test_all_share_or_none_does(how):
    for here, right, took in on_ranks(3, where, how):
        assert (here, right) == (how == "", True) and took < 4


def files() -> tuple[int, int]:
    """How many this process has open, before and after forty blocks have come into use."""
    with sl.make_mesh(dp=2) as mesh:
        wait(gather(torch.ones(1), mesh))
        before = len(os.listdir("/proc/self/fd"))
        held = [wait(gather(torch.ones(1000), mesh)) for _ in range(40)]
        dist.barrier()
        assert len(held) <= len(memory(mesh).at) + len(memory(mesh).maps)
        return before, len(os.listdir("/proc/self/fd")) - before


def test_blocks_hold_no_files_open():
    for before, more in on_ranks(2, files):
        assert before and more <= 2


def few_files() -> bool:
    """More files are on their way than a process may have open."""
    with sl.make_mesh(dp=2) as mesh:
        wait(gather(torch.ones(1), mesh))
        have = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (have + 20, have + 20))
        begun = [gather(torch.full((1000,), float(mesh.rank)), mesh) for _ in range(60)]
        return all(wait(x)[::1000].tolist() == [0.0, 1.0] for x in begun)


def test_few_files():
    assert all(on_ranks(2, few_files))
