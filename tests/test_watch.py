"""What ranks tell each other beside collectives: who failed, who is where, that all shall stop."""

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks

import shardlib as sl
from shardlib import watch

HERE = os.path.basename(__file__)
FORKS = torch.accelerator.current_accelerator() is None  # else ranks run code that has travelled, without its file
LINE = f"{HERE}:" if FORKS else " at "


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are looked at more often, and given less time."""
    monkeypatch.setattr(watch, "TICK", 0.05)
    monkeypatch.setattr(watch, "PATIENCE", 0.3)
    monkeypatch.setattr(watch, "ANSWER", 1.0)


def summed() -> Any:
    return sl.jit(sl.shard_map(lambda x: sl.psum(x, "dp"), in_specs=None, out_specs="n"))


def told(at: Callable[[int], None], *, timeout: float = 20, steps: int = 4, eager: bool = False) -> dict[int, str]:
    """What each of three ranks raises where rank 2 does `at(step)` before each step."""

    def body() -> str:
        mesh = sl.make_mesh(dp=3, timeout=timeout)
        try:
            with mesh:
                f = summed() if not eager else sl.shard_map(lambda x: sl.psum(x, "dp"), in_specs=None, out_specs="n")
                for step in range(steps):
                    if mesh.rank == 2:
                        at(step)
                    f(sl.from_local(torch.ones(1), "n/dp"))
        except sl.RankError as e:
            raise RuntimeError("\n".join([f"<rank {mesh.rank}>", str(e), *e.__notes__, "<end>"])) from None
        return ""

    with pytest.raises(AssertionError) as failed:
        on_ranks(3, body, seconds=40)
    said = str(failed.value)
    parts = [x.split("<end>")[0] for x in said.split("RuntimeError: <rank ")[1:]]
    return {int(x[0]): x[3:] for x in parts} | {-1: said}


def test_all_raise_what_one_raises() -> None:
    """Case C42: in the data. The others say where they waited; its traceback comes with it."""

    def bad_row(step: int) -> None:
        if step == 2:
            raise ValueError("bad row 17")

    said = told(bad_row)
    for rank in (0, 1):
        first, second, *more = said[rank].splitlines()
        assert first == "rank 2 failed: ValueError: bad row 17"
        assert second.startswith(f"rank {rank} waited for psum `") and "(#1 of step 3 of" in second
        assert "in bad_row" in "\n".join(more) and more[0] == "its traceback:"
    assert "rank 2 of 3 raised" in said[-1] and 2 not in said


@pytest.mark.parametrize("eager", [False, True])
def test_a_killed_rank_is_named(eager: bool) -> None:
    said = told(lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == 2 else None, eager=eager)
    assert said.keys() == {0, 1, -1} and "rank 2 of 3 died with exit code -9" in said[-1]
    first = said[0].splitlines()[0]
    assert first == said[1].splitlines()[0], "one verdict for all"
    assert first.startswith("rank 2 did not answer: killed, frozen, or cut off with the host; rank ")
    assert ("waited for psum `" in first and "(#1 of step 3 of" in first) if not eager else LINE in first
    assert f"the network said: {'[' if eager else 'rank 2 of this host closed the connection'}" in said[0]


def test_a_rank_that_does_not_come_is_named_with_its_line() -> None:
    began = time.monotonic()
    said = told(lambda step: time.sleep(60) if step == 1 else None, timeout=2)
    assert time.monotonic() - began < 30
    for rank in (0, 1):
        first = said[rank].splitlines()[0]
        assert first.startswith("rank 2 did not reach psum `") and "(#1 of step 2 of" in first
        assert LINE in first and (first.endswith("in <lambda>") or not FORKS)


def test_a_rank_that_ends_early_is_named() -> None:
    def leave(step: int) -> None:
        if step == 1:
            watch.watch().close()  # type: ignore[union-attr] # as at the end of a process
            os._exit(0)

    said = told(leave)
    assert all(said[r].splitlines()[0].startswith("rank 2 had ended; rank ") for r in (0, 1))


def test_who_holds_the_store_stays_until_the_others_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher the first rank holds it, and takes it along."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def env(rank: int) -> dict[str, str]:
        return dict(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

    def body() -> None:
        try:
            with sl.make_mesh(dp=2, timeout=20) as mesh:
                if mesh.rank == 0:
                    raise ValueError("bad row 17")
                torch.distributed.all_reduce(torch.ones(1))
        except Exception as e:
            watch.watch().close()  # type: ignore[union-attr] # as at the end of a process
            raise RuntimeError(f"rank {mesh.rank} raised {type(e).__name__}: {e}") from None

    with pytest.raises(AssertionError) as failed:
        on_ranks(2, body, env=env)
    assert "rank 0 raised ValueError: bad row 17" in str(failed.value)
    assert "rank 1 raised RankError: rank 0 failed: ValueError: bad row 17" in str(failed.value)


def test_an_error_of_ones_own_stays_what_it_is() -> None:
    def body() -> str:
        with pytest.raises(ValueError, match="mine") as e, sl.make_mesh(dp=2):
            raise ValueError("mine")
        return type(e.value).__name__

    assert on_ranks(2, body) == ["ValueError", "ValueError"]


def test_what_is_caught_inside_is_not_told() -> None:
    def body() -> Any:
        mesh = sl.make_mesh(dp=2)
        with pytest.raises(sl.SpecError):
            sl.shard(torch.ones(4), "n m", mesh)
        with mesh:
            with pytest.raises(sl.SpecError):
                sl.shard(torch.ones(4), "n m")
            return watch.watch().heard()  # type: ignore[union-attr]

    assert on_ranks(2, body) == [None, None]


def test_all_ranks_stop_at_one_step() -> None:
    """SIGTERM reaches one; the ranks are as far apart as they like."""

    def body() -> tuple[int, int]:
        mesh = sl.make_mesh(dp=3)
        for step in range(2000):
            if sl.preempted():
                return step, signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            if step == 5 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001 * (1 + mesh.rank))
        return -1, 0

    steps = on_ranks(3, body)
    assert len(set(steps)) == 1 and steps[0][0] > 5 and steps[0][1]


def test_preempted_alone() -> None:
    def body() -> list[bool]:
        sl.make_mesh(dp=1)
        said = [sl.preempted()]
        os.kill(os.getpid(), signal.SIGTERM)
        return [*said, sl.preempted(), sl.preempted()]

    assert on_ranks(1, body) == [[False, True, True]]


def test_words_of_the_network() -> None:
    assert watch.lost(RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert watch.lost(torch.distributed.DistNetworkError("x"))
    assert not watch.lost(RuntimeError("size mismatch")) and not watch.lost(sl.RankError("gloo/transport"))
