"""`shardlib checkpoint`: what it prints, and its exit codes."""

from pathlib import Path

import pytest
import torch

import shardlib as sl
from shardlib.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two saves, and what a third left when it was cut off."""
    with sl.make_mesh(dp=2, tp=1, simulate=True):
        for step in (1, 20):
            w = sl.shard(torch.arange(12.0).view(4, 3) + (step == 20) * torch.eye(4, 3), "n/dp m/tp")
            blocks = [{"w": w, "b": sl.shard(torch.ones(5), "m/tp")}, {"w": w, "b": sl.shard(torch.zeros(5), "m/tp")}]
            sl.save(tmp_path / "a", {"blocks": blocks, "epoch": step, "n": sl.shard(torch.tensor(3), "")}, step=step)
    torn = tmp_path / "a" / ".step-00000021.tmp-12345678"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"12345")
    return tmp_path / "a"


def said(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out + err


def test_ls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-00000001" / "__0_0.distcp").unlink()
    code, out = said(capsys, "ls", folder)
    first, second, third = out.splitlines()
    assert code == 0 and first.startswith("step 1 ") and "__0_0.distcp is missing; it is needed for" in first
    assert second.startswith("step 20 ") and second.endswith("dp=2,tp=1  whole") and " kB " in second
    assert third.startswith(".step-00000021.tmp-12345678  5 B ") and "torn: being written, or cut off" in third


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = said(capsys, "inspect", folder)
    head, *lines = out.splitlines()
    assert code == 0 and head.startswith(f"{folder}/step-00000020: step 20, ") and head.endswith("saved on dp=2,tp=1")
    assert lines == [
        "blocks.*.b  float32 (5,)    x 2  m/tp",
        "blocks.*.w  float32 (4, 3)       n/dp m/tp",
        "blocks.1.w  float32 (4, 3)       n/dp m/tp  tied to blocks.0.w",
        "epoch       int",
        "n           int64 ()",
    ]


def test_diff(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = said(capsys, "diff", folder / "step-00000001", folder)
    assert code == 1 and out.splitlines() == [
        "blocks.0.w  3 of 12 differ, by at most 1, relatively 1",
        "blocks.1.w  3 of 12 differ, by at most 1, relatively 1",
        "epoch       1, then 20",
    ]
    assert said(capsys, "diff", folder, folder) == (0, "6 leaves, all equal\n")
    with sl.make_mesh(dp=1):
        nan = torch.tensor([1.0, float("nan"), 2.0])
        for name, x in (("b", nan), ("c", nan + torch.tensor([0, 0, 1e-6])), ("d", torch.ones(3, dtype=torch.bool))):
            sl.save(folder / name, {"n": x, name: 1}, step=1)
    assert said(capsys, "diff", folder / "b", folder / "b")[0] == 0
    assert said(capsys, "diff", folder / "b", folder / "c") == (
        1,
        f"b  only in {folder}/b/step-00000001\nc  only in {folder}/c/step-00000001\n"
        "n  1 of 3 differ, by at most 9.54e-07, relatively 4.77e-07\n",
    )
    assert "n  float32 (3,), then bool (3,)" in said(capsys, "diff", folder / "b", folder / "d")[1]


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = said(capsys, "verify", folder)
    assert code == 0 and [line.split(": ")[1] for line in out.splitlines()] == ["whole", "whole"]
    file = folder / "step-00000020" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, out = said(capsys, "verify", folder)
    lines = out.splitlines()
    assert code == 1 and len(lines) == 3 and lines[1] == f"{file.parent}: damaged" and f"{file} is damaged" in lines[2]
    assert said(capsys, "verify", folder / "step-00000001")[0] == 0


def test_convert(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text("blocks.*.w layers.*.weight\n")
    out = tmp_path / "x.safetensors"
    assert said(capsys, "convert", folder, out, "--names", table) == (0, f"{out}\n")
    back = tmp_path / "back"
    assert said(capsys, "convert", out, back, "--names", table) == (0, f"{back}/step-00000020\n")
    assert said(capsys, "diff", folder, back) == (0, "6 leaves, all equal\n")
    half = tmp_path / "half"
    said(capsys, "convert", folder, half, "--only", "blocks.*.w", "n", "--dtype", "bfloat16")
    assert said(capsys, "convert", half, back, "--step", "30") == (0, f"{back}/step-00000030\n")
    _, out_ = said(capsys, "inspect", back)
    assert "bfloat16 (4, 3)" in out_ and "int64 ()" in out_ and "epoch" not in out_


def test_what_cannot_be_done(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for args, words in (
        (("ls", tmp_path / "none"), "none is no folder"),
        (("inspect", tmp_path), "holds no saves"),
        (("convert", folder, tmp_path / "x.safetensors", "--dtype", "f99"), "--dtype f99: write one of torch's"),
        (("convert", folder, tmp_path / "x.safetensors", "--step", "3"), "--step says what step a save is"),
        (("convert", folder, tmp_path / "x.safetensors", "--names", tmp_path / "t"), "No such file"),
    ):
        code, out = said(capsys, *args)
        assert code == 2 and out.startswith(f"shardlib checkpoint {args[0]}: ") and words in out, out


def test_integers_are_compared_as_such_and_torn_saves_are_no_proof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (sl.save(tmp_path / str(i), {"n": torch.tensor([2**60 + i, 3])}, step=0) for i in (0, 1))
    code, out = said(capsys, "diff", one, two)
    assert code == 1 and out.startswith("n  1 of 2 differ, by at most 0, ")
    torn = tmp_path / "c" / ".step-00000021.tmp-12345678"
    torn.mkdir(parents=True)
    assert said(capsys, "verify", tmp_path / "c") == (2, "shardlib checkpoint verify: there are torn saves only\n")
