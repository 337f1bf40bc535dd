"""saving.py: saves beside the run hold what was there when they began, and none that fails is forgotten."""

import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import shardlib as sl
from shardlib import chunks

ROOT = Path(__file__).parent.parent


class Held:
    """While it lasts no save writes: each waits for `go`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go, write = threading.Event(), chunks.Plan.write

        def held(plan: chunks.Plan, exchange: Any) -> None:
            assert self.go.wait(30)
            write(plan, exchange)

        patch.setattr(chunks.Plan, "write", held)


def state_of(value: float, n: int = 6) -> dict[str, sl.Array]:
    return sl.shard({"w": torch.full((n, 3), value), "v": torch.arange(n) + value}, {"w": "n/dp m", "v": "n/dp"})


def test_c41_what_is_donated_or_overwritten_meanwhile_is_saved_as_it_was(tmp_path: Path) -> None:
    """On two ranks and on a simulated mesh: the step writes into the donated storage before the thread begins."""

    def run() -> list[Any]:
        with pytest.MonkeyPatch.context() as patch, sl.make_mesh(dp=2, simulate=not dist.is_initialized()):
            held = Held(patch)
            specs = {"w": "n/dp m", "v": "n/dp"}
            rise = sl.shard_map(lambda t: {k: x + 1 for k, x in t.items()}, in_specs=(specs,), out_specs=specs)
            add = sl.jit(rise, donate_argnums=0)
            state = add(state_of(1.0))
            at = [x.shards[0].data_ptr() for x in state.values()]
            folder = tmp_path / ("ranks" if dist.is_initialized() else "simulated")
            saving = sl.save(folder, state, step=4, wait=False)
            assert isinstance(saving, sl.Saving) and not saving.done() and "under way" in repr(saving)
            gc.collect()  # what is held is copied, were it by garbage
            state = add(state)
            assert [x.shards[0].data_ptr() for x in state.values()] == at, "written in place"
            for x in state.values():
                x.shards[0].zero_()
            held.go.set()
            assert saving.wait() == folder / "step-00000004" and saving.done() and "done" in repr(saving)
            found = sl.gather(sl.restore(saving.path, like=state_of(0.0)))
            return [found["w"].tolist(), found["v"].tolist()]

    want = [[[2.0] * 3] * 6, [float(i + 2) for i in range(6)]]
    assert on_ranks(2, run) == [want, want]
    assert run() == want


def test_calls_wait_for_the_save_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    with sl.make_mesh(dp=2, simulate=True):
        first = sl.save(tmp_path, state_of(1.0), step=1, wait=False)
        threading.Timer(0.2, held.go.set).start()
        second = sl.save(tmp_path, state_of(2.0), step=2, wait=False)
        assert first.done(), "one at a time"
        assert sl.latest(tmp_path) == second.path and second.done()
        held.go.clear()
        third = sl.save(tmp_path, state_of(3.0), step=3, keep=2, wait=False)
        threading.Timer(0.2, held.go.set).start()
        assert sl.restore(third.path, like=state_of(0.0))["v"].shards[0][0] == 3.0
        assert sl.save(tmp_path, state_of(4.0), step=4, keep=2) == tmp_path / "step-00000004"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_the_run_goes_on_while_it_is_saved(tmp_path: Path) -> None:
    """Collectives of the run and those of the saving thread do not meet."""

    def run() -> list[float]:
        with sl.make_mesh(dp=3):
            specs = {"w": "n/dp m", "v": "n/dp"}
            rise = lambda t: {k: x + sl.pmax(x.sum() * 0 + 1, "dp") for k, x in t.items()}  # noqa: E731
            add = sl.jit(sl.shard_map(rise, in_specs=(specs,), out_specs=specs), donate_argnums=0)
            state, found = state_of(0.0), []
            for step in range(1, 31):
                state = add(state)
                if step % 6 == 0:
                    sl.save(tmp_path, state, step=step, wait=False, keep=9)
            for step in range(6, 31, 6):
                got = sl.gather(sl.restore(tmp_path / f"step-{step:08d}", like=state_of(0.0)))
                assert (got["w"] == step).all()
                found.append(got["v"][0].item())
            return found

    assert on_ranks(3, run) == [[6.0, 12.0, 18.0, 24.0, 30.0]] * 3


def test_what_a_save_raises_is_raised_once_where_the_process_next_asks(tmp_path: Path) -> None:
    def run() -> list[str]:
        rank, said, write = dist.get_rank(), [], chunks._Writer.write_data

        def full(*args: Any) -> Any:
            raise OSError(28, "No space left on device", f"/disk/{rank}")

        with sl.make_mesh(dp=3), pytest.MonkeyPatch.context() as patch:
            first = sl.save(tmp_path, state_of(1.0), step=1)
            for ask in (
                lambda _: sl.save(tmp_path, state_of(3.0), step=3),
                lambda _: sl.latest(tmp_path),
                lambda _: sl.restore(first, like=state_of(0.0)),
                lambda saving: saving.wait(),
            ):
                patch.setattr(chunks._Writer, "write_data", full if rank == 2 else write)
                saving = sl.save(tmp_path, state_of(2.0), step=2, wait=False)
                with pytest.raises(sl.RankError) as error:
                    ask(saving)
                patch.setattr(chunks._Writer, "write_data", write)
                said.append(
                    re.sub(r" \(\d+ MB are free there\)", "", "\n".join([str(error.value), *error.value.__notes__]))
                )
                assert sl.latest(tmp_path) == first and "failed" in repr(saving), "nothing is published"
            assert sl.save(tmp_path, state_of(4.0), step=4, wait=False).wait() == sl.latest(tmp_path)
        return said

    said = (
        "rank 2: OSError: [Errno 28] No space left on device: '/disk/2'\nmake room there, or keep fewer saves (keep=)"
        f"\nwhile {tmp_path}/step-00000002 was saved; older saves are as they were"
    )
    assert on_ranks(3, run) == [[said] * 4] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000004"]


def test_bad_calls_fail_at_once(tmp_path: Path) -> None:
    with sl.make_mesh(dp=2, simulate=True), pytest.raises(sl.TreeError, match="`a` is object"):
        sl.save(tmp_path, {"a": object()}, step=1, wait=False)

    def differ() -> None:
        with sl.make_mesh(dp=2), pytest.raises(sl.RankError, match="rank 1 has wait False; rank 0 has wait True"):
            sl.save(tmp_path, state_of(1.0), step=1, wait=not dist.get_rank())  # type: ignore[call-overload]

    on_ranks(2, differ)
    assert not list(tmp_path.iterdir())


def test_a_rank_copies_what_it_writes(tmp_path: Path) -> None:
    """Of what all hold each rank copies a part: all together the state once."""

    def run() -> tuple[int, bool]:
        copied, copy = [], chunks._copied
        with sl.make_mesh(dp=2), pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunks, "_copied", lambda xs: (copied.extend(x.numel() for x in xs), copy(xs))[1])
            whole = {str(i): sl.shard(torch.full((5,), i), "n") for i in range(4)} | {"cut": state_of(1.0)["w"]}
            path = sl.save(tmp_path, whole, step=1, wait=False).wait()
            found = sl.restore(path, whole)
            return sum(copied), all(torch.equal(sl.gather(found[k]), sl.gather(x)) for k, x in whole.items())

    assert on_ranks(2, run) == [(19, True)] * 2, "two of the four whole leaves, and half of the other"


def test_the_process_ends_after_its_save_and_tells_if_it_failed(tmp_path: Path) -> None:
    script = """
    import sys, time, torch
    import shardlib as sl
    from shardlib import chunks
    write, how, folder = chunks.Plan.write, *sys.argv[1:]
    def slow(*args):
        time.sleep(1)
        if how == "fails":
            raise OSError(28, "No space left on device", "/disk/0")
        write(*args)
    chunks.Plan.write = slow
    with sl.make_mesh(dp=1):
        sl.save(folder, {"w": torch.ones(5)}, step=1, wait=False)
        if how == "raises":
            raise ValueError("in the loop")
    """
    cases = ("raises", "fails")
    command = [sys.executable, "-c", textwrap.dedent(script)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    runs = {
        how: subprocess.Popen([*command, how, str(tmp_path / how)], env=env, stderr=subprocess.PIPE, text=True)
        for how in cases
    }
    said = {how: run.communicate(timeout=60)[1] for how, run in runs.items()}
    assert {how: run.returncode for how, run in runs.items()} == {"raises": 1, "fails": 1}, said
    assert [[p.name for p in (tmp_path / how).iterdir()] for how in cases] == [["step-00000001"], []]
    assert "older saves are as they were" in said["fails"] and "No space left on device: '/disk/0'" in said["fails"]
    assert "in the loop" in said["raises"]
