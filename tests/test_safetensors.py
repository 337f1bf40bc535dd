"""interop.safetensors and interop.names: out and back bitwise, by other names, layers stacked or apart."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import shardlib as sl
from shardlib.contents import contents
from shardlib.interop.names import Names

safe = sl.interop.safetensors


@sl.pytree
class Block:
    w: Tensor = sl.spec("model hidden/tp", dtype=torch.float64)
    b: Tensor = sl.spec("hidden/tp", dtype=torch.bfloat16)


@sl.pytree
class Net:
    blocks: Block = sl.stack("layers")
    embed: Tensor = sl.spec("vocab model/dp", dtype=torch.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A save with stacked and tied leaves, plain values, integers, an empty leaf and one without dimensions."""
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        net = sl.init(Net, sizes=dict(layers=3, model=5, hidden=7, vocab=11), key=sl.random.key(0))
        none = sl.shard(torch.zeros(4, 0), "n/dp m")
        state = {"params": net, "tied": net.embed, "count": sl.shard(torch.tensor(12), ""), "none": none}
        return sl.save(tmp_path / "saves", state | {"name": "x", "best": float("inf"), "ok": True}, step=9)


def same(one: Path, two: Path) -> None:
    a, b = contents(one), contents(two)
    assert (a.step, a.leaves, a.tied) == (b.step, b.leaves, b.tied)
    for (name, x), (_, y) in zip(a.values(a.leaves), b.values(a.leaves), strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y, name


def test_out_and_back(path: Path, tmp_path: Path) -> None:
    (file,) = safe.save(path, tmp_path / "x.safetensors")
    found = load_file(file)
    assert set(found) == {f"params.blocks.{i}.{n}" for i in range(3) for n in "wb"} | {"params.embed", "count", "none"}
    assert found["params.blocks.1.w"].dtype == torch.float64 and found["count"].item() == 12
    same(path, safe.load(file, tmp_path / "back"))


TABLE = """
# ours                theirs
params.blocks.*.w     model.layers.*.mlp.weight   # a comment

params.blocks.*.b     model.biases
params.embed          lm_head.weight
params.**             rest.**
"""


def test_a_table_of_names(path: Path, tmp_path: Path) -> None:
    """Also layers that are one tensor there."""
    (tmp_path / "table.txt").write_text(TABLE.replace("params.**             rest.**", ""))
    files = safe.save(path, tmp_path / "hf", tmp_path / "table.txt", only="params.**")
    found = load_file(files[0])
    assert {k: tuple(v.shape) for k, v in found.items()} == {
        **{f"model.layers.{i}.mlp.weight": (5, 7) for i in range(3)},
        "model.biases": (3, 7),
        "lm_head.weight": (11, 5),
    }
    back = safe.load(tmp_path / "hf", tmp_path / "back", tmp_path / "table.txt")
    assert back.name == "step-00000009"
    with sl.make_mesh(dp=1, tp=4, simulate=True):
        like = {"params": sl.abstract(Net, dict(layers=3, model=5, hidden=7, vocab=11))}
        got, want = (sl.gather(sl.restore(p, like, only="**")) for p in (back, path))
        assert torch.equal(got["params"].blocks.b, want["params"].blocks.b)
        assert torch.equal(got["params"].embed, want["params"].embed)


def test_files_of_others(tmp_path: Path) -> None:
    """Several files, no metadata of ours; one layer that theirs stacks is one layer."""
    save_file({"m.w": torch.ones(1, 4)}, tmp_path / "a.safetensors")
    save_file({"m.v": torch.arange(3)}, tmp_path / "b.safetensors")
    path = safe.load(tmp_path, tmp_path / "saves", {"blocks.*.w": "m.w", "v": "m.v"}, step=4)
    assert path.name == "step-00000004"
    assert contents(path).leaves == {
        "blocks.0.w": {"dtype": "float32", "shape": [4]},
        "v": {"dtype": "int64", "shape": [3]},
    }
    (back,) = safe.save(path, tmp_path / "c.safetensors", {"blocks.*.w": "m.w", "v": "m.v"})
    assert load_file(back)["m.w"].shape == (1, 4)


def test_c23_several_files_with_an_index_and_another_dtype(path: Path, tmp_path: Path) -> None:
    """What is written as float32 leaves integers alone."""
    files = safe.save(path, tmp_path / "hf", dtype=torch.float32, limit=300)
    assert len(files) == 3 and files[0].name == "model-00001-of-00003.safetensors"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found = {name: load_file(tmp_path / "hf" / file)[name] for name, file in index["weight_map"].items()}
    assert {k: x.dtype for k, x in found.items() if x.dtype != torch.float32} == {"count": torch.int64}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    assert all(f.stat().st_size < 2000 for f in files) and sorted(
        p.name for p in (tmp_path / "hf").iterdir()
    ) == sorted([*(f.name for f in files), "model.safetensors.index.json"])
    with pytest.raises(sl.TreeError, match="would hold more than 300 bytes: name a folder, or give a larger limit="):
        safe.save(path, tmp_path / "x.safetensors", limit=300)


def test_what_cannot_be_written_or_read(path: Path, tmp_path: Path) -> None:
    for table, said in (
        ({"params.embd": "e"}, "names: `params.embd` fits no leaf (did you mean `params.embed`?)"),
        ({"params.**": "x"}, "names: `params.**` and `x` must have the same `*` and `**`, or ours a last `*` more"),
        ({"params.embed": "count"}, "names: `count` and `params.embed` would both be `count`"),
        ({"params.blocks.1.*": "b"}, "the last `*` of `params.blocks.1.*` counts layers; `params.blocks.1.w` has `w`"),
    ):
        with pytest.raises(sl.TreeError, match=re.escape(said)):
            safe.save(path, tmp_path / "x.safetensors", table)
    (tmp_path / "t").write_text("a b\na b c\n")
    with pytest.raises(sl.TreeError, match=r"line 2 of .*t is `a b c`; write two patterns: ours theirs"):
        Names.of(tmp_path / "t")
    with pytest.raises(sl.TreeError, match=r"`a` and `b` would all be `x\.0`"):
        Names((("x.0", "a"), ("x.0", "b"))).ours(["a", "b"])
    with sl.make_mesh(dp=1), pytest.raises(sl.TreeError, match="`z` is complex, which has no place in safetensors"):
        safe.save(sl.save(tmp_path / "z", {"z": 1j}, step=0), tmp_path / "z.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(sl.TreeError, match=r"bad.safetensors is no whole safetensors file"):
        safe.load(tmp_path / "bad.safetensors", tmp_path / "y")
    with pytest.raises(sl.TreeError, match=r"there is no \.safetensors file in"):
        safe.load(tmp_path / "z", tmp_path / "y")
    assert not (tmp_path / "x.safetensors").exists() and not (tmp_path / "y").exists()


def test_a_folder_of_an_older_export_is_left_alone(path: Path, tmp_path: Path) -> None:
    safe.save(path, tmp_path / "out", limit=64)
    with pytest.raises(sl.TreeError, match="holds safetensors files, which would be read with these"):
        safe.save(path, tmp_path / "out")


def test_what_cannot_be_stacked_or_written_is_named(tmp_path: Path) -> None:
    odd = {"a": [torch.ones(2), torch.ones(3)], "z": torch.ones(2, dtype=torch.complex128)}
    saved = sl.save(tmp_path / "saves", odd, step=0)
    with pytest.raises(sl.TreeError, match=r"`all` would stack layers of `float32 \(2,\)` and `float32 \(3,\)`"):
        safe.save(saved, tmp_path / "x.safetensors", {"a.*": "all"}, only="a.**")
    with pytest.raises(sl.TreeError, match="`z` is complex128, which has no place in safetensors"):
        safe.save(saved, tmp_path / "x.safetensors")
