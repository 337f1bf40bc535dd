"""stream.py: what is written goes to the disk meanwhile, and no error of the disk is lost."""

import os
import threading
import zlib
from pathlib import Path

import pytest
import torch

import shardlib as sl
from shardlib import stream

FSYNC = os.fsync


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write is more than a step."""
    monkeypatch.setattr(stream, "_STEP", 0)


def test_it_goes_to_the_disk_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, came = [], threading.Event()

    def fsync(handle: int) -> None:
        lengths.append(os.fstat(handle).st_size)
        came.set()

    monkeypatch.setattr(os, "fsync", fsync)
    parts = [os.urandom(n) for n in (1 << 20, 5, 1 << 16)]
    with open(tmp_path / "x", "wb") as file:
        out = stream.Stream(file)
        for part in parts:
            assert out.tell() == file.tell()
            out.write(memoryview(part))
            assert came.wait(20) or part != parts[0], "before the end"
        assert out.tell() == sum(map(len, parts))
        os.fsync(out.fileno())
        assert not out.thread or not out.thread.is_alive()
        out.close()
    assert lengths[0] >= len(parts[0]) and lengths[-1] == sum(map(len, parts))
    starts = [0, len(parts[0]), len(parts[0]) + len(parts[1])]
    assert out.sums == dict(zip(starts, map(zlib.crc32, parts), strict=True))
    assert (tmp_path / "x").read_bytes() == b"".join(parts)


def test_what_the_disk_says_once_meanwhile_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, end = threading.Event(), stream.Stream.end

    def fsync(handle: int) -> None:
        if threading.current_thread().name == "shardlib-sync" and not said.is_set():
            said.set()
            raise OSError(28, "No space left on device")
        FSYNC(handle)

    old = sl.save(tmp_path, {"w": torch.ones(5)}, step=1)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(stream.Stream, "end", lambda self: (said.wait(20), end(self)))
    with pytest.raises(OSError, match=r"No space left on device: '.*__0_0.distcp'"):
        sl.save(tmp_path, {"w": torch.ones(300_000)}, step=2)
    assert said.is_set() and sl.latest(tmp_path) == old and [p.name for p in tmp_path.iterdir()] == [old.name]
    said.clear()
    monkeypatch.setattr(stream.Stream, "end", end)
    assert sl.save(tmp_path, {"w": torch.ones(5)}, step=2, wait=False).wait() == sl.latest(tmp_path)
    assert not said.is_set(), "nobody waits for a save beside the run: no thread"
