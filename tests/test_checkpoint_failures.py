"""checkpoint.py: torn, damaged and misfitting saves never pass, and what one rank raises all raise."""

import os
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import on_ranks
from saved import same, simulated
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import shardlib as sl
from shardlib import chunks, contents, saves
from shardlib import tree as trees
from shardlib.chunk import Chunk

# ---- what does not fit


def test_c40_all_that_does_not_fit_is_listed_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(dp=2):
        saved = {"w": torch.ones(4, 3), "old": torch.ones(2), "scale": torch.ones(3), "n": 1, "x": 1.5}
        saved["same"] = torch.ones(1)
        state = {k: sl.shard(v, "...") if isinstance(v, Tensor) else v for k, v in saved.items()}
        path = sl.save(tmp_path, state, step=1)
        like = {k: v for k, v in state.items() if k != "old"}
        like |= {"w": sl.shard(torch.ones(4, 5), "a/dp b"), "new": sl.shard(torch.ones(2), "n/dp")}
        like |= {"scale": sl.shard(torch.ones(3).bfloat16(), "n"), "n": "1", "x": sl.shard(torch.ones(()), "")}
        want = [
            "`n`: found int, expected str",
            "`new`: missing, expected float32 (2,)",
            "`scale`: found float32 (3,), expected bfloat16 (3,)",
            "`w`: found float32 (4, 3), expected float32 (4, 5)",
            "`x`: found float, expected float32 ()",
            "`old`: unexpected, found float32 (2,)",
        ]
        assert sl.compare(path, like) == want
        monkeypatch.setattr(chunks, "read", lambda *_: pytest.fail("read before the check"))
        with pytest.raises(sl.TreeError) as error:
            sl.restore(path, like)
        assert str(error.value).splitlines() == [
            f"{path} does not fit `like`:",
            *("  " + line for line in want),
            '  only="params.**" restores some leaves, rename={"new.path": "old.path"} finds them by other names',
        ]


def test_c40_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with simulated(dp=2):
        state = sl.shard({"a": torch.arange(6.0), "b": torch.arange(4)}, "n/dp")
        path = sl.save(tmp_path, state, step=1)
        data = (path / "__0_0.distcp").read_bytes()

        def fails(match: str) -> None:
            with pytest.raises(sl.TreeError, match=match):
                sl.restore(path, state)

        for at in range(0, len(data), 97):  # any flipped byte
            (path / "__0_0.distcp").write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            fails("`[ab]`: .*distcp is damaged: the checksum of the")
        (path / "__0_0.distcp").write_bytes(data[:-1])
        assert sl.compare(path, state) == ["__0_0.distcp is cut short; it is needed for `a` and `b`"]
        fails("cut short")
        (path / "__0_0.distcp").unlink()
        assert sl.compare(path, state) == ["__0_0.distcp is missing; it is needed for `a` and `b`"]
        fails("missing")
        (path / "__0_0.distcp").write_bytes(data)
        assert same(sl.restore(path, state), state)
        index = (path / ".metadata").read_bytes()
        (path / ".metadata").write_bytes(index[:50] + b"!" + index[51:])
        fails("metadata is damaged")
        (path / ".metadata").unlink()
        fails("metadata is missing")


def test_a_path_that_is_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(dp=1):
        state = sl.shard({"a": torch.ones(2)}, "n")
        sl.save(tmp_path, state, step=3)
        with pytest.raises(sl.TreeError, match=r"is not a save: it holds `step-00000003`; sl.latest gives the newest"):
            sl.restore(tmp_path, state)
        with pytest.raises(sl.TreeError, match="is not a save: it does not exist"):
            sl.restore(tmp_path / "x", state)
        monkeypatch.setattr(contents, "FORMAT", 3)
        with pytest.raises(sl.TreeError, match=r"3 is in format 2, and this shardlib reads format 3: restore it with"):
            sl.restore(tmp_path / "step-00000003", state)


def test_leaves_that_cannot_be_saved(tmp_path: Path) -> None:
    with simulated(dp=2):
        x = sl.shard(torch.ones(4), "n/dp")
        pending = sl.Array(x.shards, sl.spec("n +dp").metadata["shardlib"].spec, (2,), x.mesh)
        for leaf, match in (
            (pending, r"`a` \(`n \+dp`\) waits for a sum over `dp`; sl.reshard it first"),
            (object(), "`a` is object; files hold tensors and `bool`, `int`, `float`, `complex`, `str` and `bytes`"),
            (sl.abstract(lambda: sl.shard(torch.ones(4), "n/dp")), "`a` is abstract: it has no values"),
        ):
            with pytest.raises(sl.TreeError, match=match):
                sl.save(tmp_path, {"a": leaf}, step=1)
        with pytest.raises(sl.TreeError, match=r"`a.b` and `a.b` both have the path `a.b`"):
            sl.save(tmp_path, {"a": {"b": x}, "a.b": x}, step=1)
        with pytest.raises(sl.TreeError, match=r"the tree has no `step`"):
            sl.save(tmp_path, {"a": x})
        with pytest.raises(ValueError, match="keep=0"):
            sl.save(tmp_path, {"a": x}, step=1, keep=0)
        gone = sl.shard(torch.ones(4), "n/dp")
        gone.donate()
        with pytest.raises(sl.DonatedError, match="was donated"):
            sl.save(tmp_path, {"a": gone}, step=1)
    assert not list(tmp_path.iterdir())


# ---- torn saves, failures, many saves


def test_a_save_killed_before_the_rename_is_never_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(dp=2):
        state = sl.shard({"a": torch.arange(6.0)}, "n/dp")
        assert sl.latest(tmp_path) is None and sl.latest(tmp_path / "none") is None
        first = sl.save(tmp_path, state, step=1)

        def killed(step: int) -> None:
            child = mp.get_context("fork").Process(target=lambda: sl.save(tmp_path, state, step=step))
            child.start()
            child.join()
            assert child.exitcode == 9

        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda p, to: os._exit(9) if ".tmp-" in p.name else rename(p, to))
        killed(2)
        assert len(list(tmp_path.glob(".step-00000002.tmp-*"))) == 1
        assert sl.latest(tmp_path) == first
        killed(1)  # while it replaces a save: the old one is moved away, the new one never appears
        old = sl.latest(tmp_path)
        assert old and ".old-" in old.name and same(sl.restore(old, state), state)
        monkeypatch.undo()
        assert sl.save(tmp_path, state, step=3) == sl.latest(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_keep_and_replace(tmp_path: Path) -> None:
    with simulated(dp=2):

        def save(step: int, value: float, keep: int | None = 2) -> list[str]:
            sl.save(tmp_path, {"a": sl.shard(torch.full((4,), float(value)), "n/dp")}, step=step, keep=keep)
            return sorted(p.name for p in tmp_path.iterdir())

        def names(*steps: int) -> list[str]:
            return [f"step-{n:08d}" for n in steps]

        assert [save(s, s, None) for s in (1, 2, 3)][-1] == names(1, 2, 3)
        assert save(10, 0) == names(3, 10)
        assert save(20, 0) == names(10, 20)
        assert save(20, 5) == names(10, 20)
        assert save(15, 6, keep=1) == names(15, 20)  # a run that went back: later steps are not its to remove
        like = {"a": sl.shard(torch.zeros(4), "n/dp")}
        assert same(sl.restore(sl.latest(tmp_path) or "", like), {"a": torch.full((4,), 5.0)})
        assert save(123456789, 1, keep=1) == ["step-123456789"]


def test_c42_an_error_on_one_rank_reaches_all(tmp_path: Path) -> None:
    write = FileSystemWriter.write_data

    def full(self: Any, plan: Any, planner: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == 2:
            raise OSError(28, "No space left on device")
        return write(self, plan, planner)

    def run() -> Any:
        rank = dist.get_rank()
        with sl.make_mesh(dp=4), pytest.MonkeyPatch.context() as patch:
            patch.setattr(FileSystemWriter, "write_data", full)
            state = sl.shard({"a": torch.arange(8.0), "b": torch.ones(())}, {"a": "n/dp", "b": ""})
            with pytest.raises(sl.RankError) as error:
                sl.save(tmp_path / "full", state, step=1)
            (tmp_path / "file").write_text("")
            with pytest.raises(sl.RankError) as blocked:  # the first rank cannot make the folder
                sl.save(tmp_path / "file" / "run", state, step=1)
            tree = state | ({"c": state["a"]} if rank == 1 else {}) | ({"n": rank} if rank else {"n": 0})
            with pytest.raises(sl.RankError) as differ:
                sl.save(tmp_path / "differ", tree, step=1)
            with pytest.raises(sl.TreeError) as bad:
                sl.save(tmp_path / "bad", {"a": object() if rank == 3 else 1}, step=1)
            return str(error.value), str(blocked.value), str(differ.value), str(bad.value)

    said = on_ranks(4, run)
    assert len({tuple(s) for s in said}) == 1
    error, blocked, differ, bad = said[0]
    assert error == "rank 2: OSError: [Errno 28] No space left on device\nmake room there, or keep fewer saves (keep=)"
    assert blocked.startswith("rank 0: NotADirectoryError")
    assert differ.splitlines() == [
        "save: the tree is not the same on all ranks",
        "  rank 1 has `c` (float32 (8,) tied to `a`), `n` (int 1); rank 0 has `n` (int 0)",
        "  rank 2 has `n` (int 2); rank 0 has `n` (int 0)",
        "  rank 3 has `n` (int 3); rank 0 has `n` (int 0)",
    ]
    assert bad.startswith("rank 3: save: `a` is object")
    assert not [p for d in ("full", "differ", "bad") for p in (tmp_path / d).glob("*")]


def test_c40_a_missing_file_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def run() -> Any:
        with sl.make_mesh(dp=2):
            state = sl.shard({"a": torch.arange(8.0)}, "n/dp")
            path = sl.save(tmp_path, state, step=1)
            assert sl.latest(tmp_path) == path
            dist.barrier()
            if dist.get_rank() == 0:
                (path / "__1_0.distcp").unlink()
            dist.barrier()
            with pytest.raises(sl.TreeError, match=r"__1_0.distcp is missing; it is needed for `a`"):
                sl.restore(path, state)

    on_ranks(2, run)


def test_readers_beside_a_writer(tmp_path: Path) -> None:
    mesh = simulated(dp=2)
    errors: list[str] = []
    seen: set[int] = set()
    done = threading.Event()

    def state(step: int) -> dict[str, Any]:
        return sl.shard({"a": torch.full((64, 8), float(step)), "b": torch.full((5,), step)}, "n/dp ...", mesh=mesh)

    like = state(0)

    def reader() -> None:
        while not done.is_set():
            path = sl.latest(tmp_path)
            try:
                got = trees.leaves(sl.restore(path, like)) if path else []
                values = {x.shards[1].flatten()[0].item() for x in got}
                assert not path or values == {float(path.name[-8:])}, (path, values)
                seen.update(int(v) for v in values)
            except Exception:
                if path and path.exists():  # else it was removed meanwhile
                    errors.append(traceback.format_exc())

    readers = [threading.Thread(target=reader) for _ in range(2)]
    for t in readers:
        t.start()
    for step in range(1, 21):
        sl.save(tmp_path, state(step), step=step, keep=5)
    done.set()
    for t in readers:
        t.join()
    assert not errors, errors[0]
    assert len(seen) > 1 and len(saves.whole(tmp_path)) == 5


def test_a_save_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(dp=2):
        states = [sl.shard({"a": torch.full((4,), v), "b": torch.full((4,), v)}, "n/dp") for v in (1.0, 2.0)]
        path = sl.save(tmp_path, states[0], step=1)
        fill, calls = Chunk.fill, []

        def slow(self: Chunk, x: Tensor) -> None:
            calls.append(x)
            if len(calls) == 2:
                sl.save(tmp_path, states[1], step=1)
            fill(self, x)

        monkeypatch.setattr(Chunk, "fill", slow)
        with pytest.raises(sl.TreeError, match="was replaced while it was read: restore it again"):
            sl.restore(path, states[0])
        assert same(sl.restore(path, states[0]), states[1])


def test_folders_of_their_own_are_refused(tmp_path):
    """As on hosts with disks of their own; nothing is published."""

    def body() -> str:
        with sl.make_mesh(dp=2, timeout=30) as mesh:
            here = tmp_path / str(mesh.rank)
            here.mkdir()
            os.chdir(here)
            with pytest.raises(sl.ShardError) as e:
                sl.save("saves", sl.shard(torch.ones(4), "n/dp"), step=0)
            assert not sl.latest("saves")
            return str(e.value)

    for said in on_ranks(2, body):
        assert "the first rank does not see `__1_0.distcp`, which others wrote; save into one folder" in said
