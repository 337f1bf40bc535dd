"""contents.py: what is damaged is found, whichever file it is in; disks that are full or not to be written to."""

import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import shardlib as sl
from shardlib import chunks
from shardlib.chunk import Chunk
from shardlib.contents import contents


def tree(value: float = 1.0, n: int = 7) -> dict[str, Any]:
    g = torch.Generator().manual_seed(int(value))
    return {
        "w": sl.shard(torch.randn(n, 3, generator=g), "n/dp m"),
        "v": sl.shard(torch.ones(n) * value, "n/dp"),
        "k": 3,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with sl.make_mesh(dp=2, simulate=True):
        return sl.save(tmp_path / "saves", tree(), step=5)


def test_it_says_what_it_holds(path: Path) -> None:
    found = contents(path)
    assert (found.step, found.mesh, found.specs) == (5, "dp=2", {"w": "n/dp m", "v": "n/dp"})
    assert found.verify() == [] and found.size == sum(p.stat().st_size for p in path.iterdir())
    values = dict(found.values(found.leaves))
    assert values["k"] == 3 and values["v"].tolist() == [1.0] * 7 and values["w"].shape == (7, 3)


@pytest.mark.parametrize("wait", [True, False])
def test_views_that_only_say_how_to_read_are_saved_as_they_read(tmp_path: Path, wait: bool) -> None:
    """Conjugate, negative and transposed ones, whose memory holds something else."""
    x = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).view(2, 3)
    values = {"conj": x.conj(), "negative": x.conj().imag, "t": x.T}
    assert values["conj"].is_conj() and values["negative"].is_neg()
    sl.save(tmp_path, values, step=1, wait=wait)
    path = sl.latest(tmp_path)
    assert path is not None
    found = sl.restore(path, {k: torch.zeros_like(v) for k, v in values.items()})
    assert all(torch.equal(found[k], v) for k, v in values.items())


def test_a_file_system_may_give_less_than_it_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:7])

    with sl.make_mesh(dp=1, simulate=True):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", lambda self, *_, **__: Slow(self))
            assert contents(path).verify() == []
        with Slow(path / "__0_0.distcp") as file:
            monkeypatch.setattr(Chunk, "_compare", lambda self, crc: None)
            assert bytes(Chunk("w", file, 5, 40, {}).value()) == (path / "__0_0.distcp").read_bytes()[5:45]


def test_c41_any_flipped_byte_of_any_file_is_found(path: Path) -> None:
    """By `verify`, and where it is read by `restore`, which names the file and how to go on."""
    with sl.make_mesh(dp=1, simulate=True):
        like = tree(2.0)
        files = sorted(path.iterdir())
        assert [p.name for p in files] == [".metadata", "__0_0.distcp", "__0_0.distcp.crc32", "shardlib.json"]
        for file in files:
            data = file.read_bytes()
            for at in range(0, len(data), max(1, len(data) // 40)):
                file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                try:
                    lines = contents(path).verify()
                except sl.TreeError as e:
                    lines = [str(e)]
                assert lines and all(f"{file} is damaged" in x and "restore an older save" in x for x in lines), at
                with pytest.raises(sl.TreeError, match="restore an older save"):
                    sl.restore(path, like)
            file.write_bytes(data)
        assert torch.equal(sl.gather(sl.restore(path, like)["v"]), torch.ones(7))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__0_0.distcp.crc32", "shardlib.json"])
def test_a_file_that_is_missing_or_cut_short_is_named(path: Path, name: str) -> None:
    with sl.make_mesh(dp=1, simulate=True):
        whole = (path / name).read_bytes()
        for damage in (lambda: (path / name).write_bytes(whole[:-3]), lambda: (path / name).unlink()):
            damage()
            with pytest.raises(
                sl.TreeError, match=rf"{name}.*(is cut short|is missing|damaged)|it has no shardlib.json"
            ):
                sl.restore(path, tree())


def test_damage_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """Rank 1 alone reads the byte that is flipped."""

    def run() -> tuple[str, float]:
        with sl.make_mesh(dp=2):
            old, new = (sl.save(tmp_path, tree(v, 8), step=int(v)) for v in (1.0, 2.0))
            file = new / "__1_0.distcp"
            if dist.get_rank() == 1:
                at = contents(new)
                places = chunks.index(new, at.crc).storage_data
                offset = next(
                    p.offset + p.length // 2 for i, p in places.items() if i.fqn == "w" and "1_" in p.relative_path
                )
                data = bytearray(file.read_bytes())
                data[offset] ^= 255
                file.write_bytes(data)
            dist.barrier()
            with pytest.raises(sl.TreeError) as error:
                sl.restore(new, tree(0.0, 8))
            return str(error.value), sl.local(sl.restore(old, tree(0.0, 8))["v"])[0].item()

    said = on_ranks(2, run)
    assert said[0] == said[1] and said[0][1] == 1.0
    assert f"rank 1: `w`: {tmp_path}/step-00000002/__1_0.distcp is damaged: the checksum of the" in said[0][0]


# ---- disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A folder on a disk of its own of 1 MB, and how to mount it anew."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "shardlib", str(folder)]
        return not subprocess.run(command, capture_output=True).returncode

    if os.geteuid() or not shutil.which("mount") or not mount("size=1m"):
        pytest.skip("only root may mount a disk of 1 MB")
    try:
        yield folder, lambda options: (mount(options), None)[1]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk(disk: tuple[Path, Any], wait: bool) -> None:
    def run() -> tuple[str, list[str], float]:
        folder = disk[0]
        with sl.make_mesh(dp=2):
            old = sl.save(folder, tree(1.0), step=1, keep=1)
            with pytest.raises(sl.RankError) as error:
                saved: Any = sl.save(folder, tree(2.0, 200_000), step=2, keep=1, wait=wait)  # type: ignore[call-overload]
                saved.wait()
            dist.barrier()
            names = sorted(p.name for p in folder.iterdir())
            assert sl.latest(folder) == old and contents(old).verify() == []
            again = sl.save(folder, tree(3.0), step=2, keep=1)
            value = sl.local(sl.restore(again, tree(0.0))["v"])[0].item()
            return "\n".join([str(error.value), *error.value.__notes__]), names, value

    found = on_ranks(2, run)
    for said, names, value in found:
        assert "OSError: [Errno 28] No space left on device: " in said and ".distcp" in said, said
        assert "make room there, or keep fewer saves (keep=)" in said and "older saves are as they were" in said
        assert (names, value) == (["step-00000001"], 3.0)
    assert found[0][0].splitlines()[0] == found[1][0].splitlines()[0]


def test_a_disk_that_is_not_to_be_written_to(disk: tuple[Path, Any]) -> None:
    folder, mount = disk
    with sl.make_mesh(dp=2, simulate=True):
        old = sl.save(folder, tree(1.0), step=1)
        mount("remount,ro")
        for wait in (True, False):
            with pytest.raises(OSError, match="Read-only file system: ") as error:
                sl.save(folder, tree(2.0), step=2, wait=wait)  # type: ignore[call-overload]
            assert "let this user write there, or save into another folder" in error.value.__notes__
        assert sl.latest(folder) == old and contents(old).verify() == []
