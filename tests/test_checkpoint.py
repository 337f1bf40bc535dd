"""checkpoint.py: what any mesh saved any other restores bitwise; torn, damaged and misfitting saves never pass."""

import json
import os
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import shardlib as sl
from shardlib import chunks, saves
from shardlib import tree as trees

DOUBLE = torch.float64


def simulated(**axes: int) -> sl.Mesh:
    return sl.make_mesh(axes, simulate=True)


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold equal bits (arrays: as whole tensors) in equal structures."""
    xs, ys = trees.leaves(a), trees.match(a, b)
    return all(equal(whole(x), whole(y)) for x, y in zip(xs, ys, strict=True))


def whole(x: Any) -> Any:
    return sl.gather(x) if isinstance(x, sl.Array) else x


def equal(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor):
        return type(x) is type(y) and x == y
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8) if x.numel() else x


# ---- any mesh, any specs

LENGTHS = {"a": 5, "b": 3, "c": 7}


def moments(seed: int = 0) -> dict[str, Any]:
    """Parameters and moments of uneven lengths, a matrix, a 0-d and an empty leaf."""
    g = torch.Generator().manual_seed(seed)

    def one() -> dict[str, Tensor]:
        return {n: torch.randn(k, generator=g) for n, k in LENGTHS.items()} | {"w": torch.randn(7, 5, generator=g)}

    return {"p": one(), "m": one(), "v": one(), "count": torch.tensor(12), "none": torch.zeros(4, 0)}


def cut(tree: dict[str, Any], vector: str, matrix: str) -> dict[str, Any]:
    """Vectors and matrices sharded by these specs."""
    specs = trees.map_(lambda x: matrix if x.dim() == 2 else vector if x.dim() else "", tree)
    return sl.shard(tree, specs)


def zeros(tree: Any) -> Any:
    return trees.map_(torch.zeros_like, tree)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save by four gloo processes."""
    root = tmp_path_factory.mktemp("four")

    def run() -> str:
        with sl.make_mesh(dp=2, tp=2):
            state = cut(moments(), "n/dp/tp", "n/tp k/dp")
            more = {"epoch": 3, "name": "four", "best": float("inf"), "no": None}
            return str(sl.save(root, {"state": state, **more}, step=7))

    assert on_ranks(4, run) == [str(root / "step-00000007")] * 4
    return root / "step-00000007"


SPECS = [("n/dp", "n/dp k"), ("n/dp", "n k/dp"), ("n", "n k")]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("specs", SPECS)
def test_c39_four_ranks_restore_on_any_simulated_mesh(four: Path, size: int, specs: tuple[str, str]) -> None:
    with simulated(dp=size):
        like = {"state": cut(zeros(moments()), *specs), "epoch": 0, "name": "", "best": 0.0, "no": None}
        got = sl.restore(four, like)
        assert sl.compare(four, like) == []
        assert same(got, {"state": moments(), "epoch": 3, "name": "four", "best": float("inf"), "no": None})
        assert same(like["state"], zeros(moments()))  # left alone
        assert [x.spec for x in trees.leaves(got["state"])] == [x.spec for x in trees.leaves(like["state"])]
        # padding is zero, as `shard` makes it
        fresh = cut(moments(), *specs)
        for x, y in zip(trees.leaves(got["state"]), trees.leaves(fresh), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(x.shards, y.shards, strict=True))


def test_one_process_without_a_group(four: Path, tmp_path: Path) -> None:
    with sl.make_mesh(dp=1):
        got = sl.restore(four, {"state": cut(moments(1), "n/dp", "n/dp k")}, only="**")
        assert same(got["state"], moments())
        path = sl.save(tmp_path, got, step=1)
        assert sl.latest(tmp_path) == path and same(sl.restore(path, got), got)
    assert sl.latest(tmp_path) == path


@pytest.mark.parametrize("axes", [dict(tp=3, dp=2), dict(dp=2, tp=3)])
def test_orders_of_two_axes(four: Path, axes: dict[str, int]) -> None:
    with simulated(**axes):
        like = {"state": cut(zeros(moments()), "n/tp/dp", "n/tp k/dp"), "epoch": 0, "name": "", "best": 0.0, "no": None}
        assert same(sl.restore(four, like)["state"], moments())


@pytest.mark.parametrize("count", [2, 3])
def test_simulated_save_restores_on_processes_and_back(tmp_path: Path, count: int) -> None:
    with simulated(dp=4):
        path = sl.save(tmp_path, cut(moments(3), "n/dp", "n k/dp"), step=1)

    def run() -> tuple[bool, str]:
        with sl.make_mesh(dp=count):
            got = sl.restore(path, cut(zeros(moments()), "n/dp", "n/dp k"))
            return same(got, moments(3)), str(sl.save(tmp_path, got, step=2))

    assert on_ranks(count, run) == [(True, str(tmp_path / "step-00000002"))] * count
    with simulated(a=2, b=2):
        assert same(sl.restore(tmp_path / "step-00000002", cut(zeros(moments()), "n/b/a", "n/a k/b")), moments(3))


def test_replicas_are_written_once_and_padding_never(four: Path) -> None:
    metadata = FileSystemReader(four).read_metadata()
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            sizes = [torch.Size(c.sizes).numel() for c in saved.chunks]
            assert sum(sizes) == saved.size.numel(), name
    assert len(list(four.glob("*.distcp"))) == 4


def test_dtypes_stay(tmp_path: Path) -> None:
    kinds = "int64 int32 uint8 bool float64 float32 bfloat16 float16 float8_e4m3fn complex64".split()
    tree = {k: torch.arange(11).to(getattr(torch, k)) for k in kinds}
    tree |= {"position": torch.tensor([4097]), "frequencies": 1 / torch.arange(1.0, 6), "key": sl.random.key(7)}
    with simulated(dp=3):
        path = sl.save(tmp_path, sl.shard(tree, "n/dp"), step=0)
        assert same(sl.restore(path, sl.shard(zeros(tree), "n")), tree)


def test_views_of_the_user(tmp_path: Path) -> None:
    w = torch.randn(6, 4)
    tree = {"t": w.t(), "strided": w[:, ::2], "expanded": torch.randn(5, 1).expand(5, 3), "plain": w.t()[1:]}
    with simulated(dp=2):
        state = {k: v if k == "plain" else sl.shard(v, "n/dp k") for k, v in tree.items()}
        path = sl.save(tmp_path, state, step=0)
        w.zero_()  # the files, and the arrays, hold copies
        like = {k: torch.zeros(v.shape) if k == "plain" else state[k] for k, v in tree.items()}
        got = sl.restore(path, like)
    assert same({k: v for k, v in got.items() if k != "plain"}, {k: v for k, v in state.items() if k != "plain"})
    assert got["t"].shape == (4, 6) and got["plain"].any()


def test_c34_moments_follow_paths_not_insertion_order(tmp_path: Path) -> None:
    a, b = torch.arange(6.0), torch.arange(6.0) + 10

    def run() -> bool:
        with sl.make_mesh(dp=2):
            names = [("a", a), ("b", b)][:: 1 if dist.get_rank() else -1]
            path = sl.save(tmp_path, sl.shard(dict(names), "n/dp"), step=1)
            got = sl.gather(sl.restore(path, sl.shard({n: torch.zeros(6) for n, _ in reversed(names)}, "n/dp")))
            return torch.equal(got["a"], a) and torch.equal(got["b"], b)

    assert on_ranks(2, run) == [True, True]


# ---- stacked leaves are one leaf per layer


@sl.pytree
class Block:
    norm: Tensor = sl.spec("model", dtype=DOUBLE)
    w_in: Tensor = sl.spec("model/dp hidden/tp", dtype=DOUBLE)
    w_out: Tensor = sl.spec("hidden/tp model/dp", dtype=DOUBLE)


@sl.pytree
class Model:
    embed: Tensor = sl.spec("vocab model/dp", dtype=DOUBLE)
    nothing: Tensor = sl.spec("four none", dtype=DOUBLE)
    blocks: list[Block] = sl.stack("layers")


@sl.pytree
class Stacked:
    embed: Tensor = sl.spec("vocab model/dp", dtype=DOUBLE)
    nothing: Tensor = sl.spec("four none", dtype=DOUBLE)
    blocks: Block = sl.stack("layers/pp")
    name: str = sl.static()


SIZES: dict[str, Any] = dict(vocab=16, model=8, hidden=12, layers=3, four=4, none=0, name="stacked")
KEY = sl.random.key(0)


def test_stack_and_list_restore_into_each_other(tmp_path: Path) -> None:
    with simulated(pp=2, dp=2, tp=1):  # three layers over two stages: one shard is short
        stacked = sl.init(Stacked, sizes=SIZES, key=KEY)
        path = sl.save(tmp_path, stacked, step=1)
    names = json.loads((path / "shardlib.json").read_text())["leaves"]
    assert names["blocks.1.w_in"] == {"dtype": "float64", "shape": [8, 12]} and "blocks.*.w_in" not in names
    with simulated(dp=1, tp=2):
        listed = sl.restore(path, sl.abstract(Model, SIZES))
        assert same([b.w_out for b in listed.blocks], list(sl.gather(stacked.blocks.w_out)))
        other = sl.save(tmp_path, listed, step=2)
    with simulated(pp=3, dp=1, tp=2):
        assert same(sl.restore(other, sl.abstract(Stacked, SIZES)), stacked)


def test_stacked_by_processes(tmp_path: Path) -> None:
    with simulated(pp=1, dp=1, tp=1):
        stacked = sl.init(Stacked, sizes=SIZES, key=KEY)
        whole = sl.gather(stacked)

    def run() -> bool:
        with sl.make_mesh(pp=2, dp=1, tp=2):
            path = sl.save(tmp_path, sl.shard(whole), step=4)
            return same(sl.restore(path, sl.abstract(Stacked, SIZES)), whole)

    assert on_ranks(4, run) == [True] * 4
    with simulated(dp=1, tp=1):
        listed = sl.restore(sl.latest(tmp_path) or "", sl.abstract(Model, SIZES))
        assert same(listed.blocks[2].w_in, whole.blocks.w_in[2])


@sl.pytree
class Staged:
    blocks: Block = sl.stack("stages/pp layers")


@sl.pytree
class Nested:
    groups: Staged = sl.stack("groups")


def test_several_stacked_dimensions(tmp_path: Path) -> None:
    sizes = SIZES | dict(stages=2, groups=2)
    with simulated(pp=2, dp=1, tp=1):
        staged = sl.init(Staged, sizes=sizes, key=KEY)
        path = sl.save(tmp_path, staged, step=1)
        names = json.loads((path / "shardlib.json").read_text())["leaves"]
        assert sorted(n for n in names if n.endswith("norm")) == [f"blocks.{i}.norm" for i in range(6)]
        assert same(sl.restore(path, staged), staged)
        flat = sl.restore(path, {"blocks": sl.abstract(Model, sizes | dict(layers=6)).blocks})
        assert same(flat["blocks"][4].norm, sl.gather(staged.blocks.norm)[1, 1])
        nested = sl.init(Nested, sizes=sizes, key=KEY)
        path = sl.save(tmp_path, nested, step=2)
        listed = sl.restore(path, {"groups": [sl.abstract(Staged, sizes) for _ in range(2)]})
        assert same([g.blocks.w_in for g in listed["groups"]], list(sl.gather(nested.groups.blocks.w_in)))


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


def test_a_path_that_is_no_save(tmp_path: Path) -> None:
    with simulated(dp=1):
        state = sl.shard({"a": torch.ones(2)}, "n")
        sl.save(tmp_path, state, step=3)
        with pytest.raises(sl.TreeError, match=r"is not a save: it holds `step-00000003`; sl.latest gives the newest"):
            sl.restore(tmp_path, state)
        with pytest.raises(sl.TreeError, match="is not a save: it does not exist"):
            sl.restore(tmp_path / "x", state)


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


# ---- parts and other names


def test_only_and_rename(tmp_path: Path) -> None:
    with simulated(dp=2, tp=1):
        layers = [{"w": torch.ones(3) * i, "b": torch.ones(2) * i} for i in (1, 2)]
        old: dict[str, Any] = {"enc": layers, "n": 5, "head": torch.ones(4)}
        arrays = trees.map_(lambda x: sl.shard(x, "n/dp") if isinstance(x, Tensor) else x, old)
        path = sl.save(tmp_path, arrays, step=1)
        part = {"enc": arrays["enc"], "n": 0, "extra": sl.shard(torch.full((2,), 7.0), "n")}
        got = sl.restore(path, zeros_of(part), only=["enc.*.w", "n"])
        assert same(got["enc"][1], {"w": old["enc"][1]["w"], "b": torch.zeros(2)}) and got["n"] == 5
        assert same(got["extra"], torch.zeros(2))
        assert same(sl.restore(path, zeros_of(part), only=lambda p, spec: p == "enc.0.b")["enc"][0]["b"], torch.ones(2))

        new = {"encoder": [{"weight": b["w"], "b": b["b"]} for b in arrays["enc"]], "count": 0, "head": arrays["head"]}
        rename = {"encoder.*.weight": "enc.*.w", "encoder": "enc", "count": "n"}
        got = sl.restore(path, zeros_of(new), rename=rename)
        assert same(got["encoder"][1], {"weight": old["enc"][1]["w"], "b": old["enc"][1]["b"]}) and got["count"] == 5
        with pytest.raises(sl.TreeError, match=r"`encoder.0.weight` \(`enc.0.v` in the files\): missing"):
            sl.restore(path, new, rename=rename | {"encoder.*.weight": "enc.*.v"})
        with pytest.raises(sl.TreeError, match="rename: `decoder` matches no path"):
            sl.restore(path, new, rename={"decoder": "enc"})
        with pytest.raises(sl.TreeError, match="must have as many"):
            sl.restore(path, new, rename={"encoder.*": "enc"})
        with pytest.raises(sl.TreeError, match=r"`enk\.\*` matches no path"):
            sl.restore(path, part, only="enk.*")
        with pytest.raises(sl.TreeError, match="`b` out, but `like` is abstract"):
            sl.restore(path, {"head": arrays["head"], "b": sl.abstract(Model, SIZES).embed}, only="head")


def zeros_of(tree: Any) -> Any:
    return trees.map_(lambda x: sl.shard(torch.zeros(x.shape), x.spec) if isinstance(x, sl.Array) else x, tree)


# ---- whole train states


@sl.pytree
class Batch:
    tokens: Tensor = sl.spec("batch/dp seq")
    targets: Tensor = sl.spec("batch/dp seq")


def block(w: Block, x: Tensor) -> Tensor:
    w = sl.gather(w, "dp")
    h = F.rms_norm(x, x.shape[-1:]) * w.norm
    h = F.gelu(sl.einsum("batch/dp seq model, model hidden/tp -> batch/dp seq hidden/tp", h, w.w_in))
    h = sl.einsum("batch/dp seq hidden/tp, hidden/tp model -> batch/dp seq model +tp", h, w.w_out)
    return x + sl.psum("batch/dp seq model +tp -> batch/dp seq model", h)


def loss(model: Model, batch: Batch, key: Tensor) -> sl.Mean:
    embed = sl.gather(model.embed, "dp")
    x = F.embedding(batch.tokens, embed) * (1 + 0.1 * sl.random.normal(key, (), DOUBLE))
    for w in model.blocks:
        x = block(w, x)
    logits = sl.einsum("batch/dp seq model, vocab model -> batch/dp seq vocab", x, embed)
    logits = logits + sl.gather(model.nothing, "dp").sum()
    return sl.token_loss("batch/dp seq vocab, batch/dp seq", logits, batch.targets)


def batches(count: int) -> list[Batch]:
    g = torch.Generator().manual_seed(0)
    draws = [torch.randint(0, 16, (2, 4, 6), generator=g) for _ in range(count)]
    return [Batch(tokens=t, targets=y) for t, y in draws]


def trainer(stage: int) -> Any:
    layout = sl.zero(sl.specs(Model), axis="dp", stage=stage)
    return sl.jit(sl.step(loss, sl.optim.adamw(0.01, weight_decay=0.1), layout=layout))


def start(step: Any) -> Any:
    return step.init(sl.init(Model, sizes=SIZES | dict(layers=1), key=KEY), key=sl.random.key(5))


def train(step: Any, state: Any, data: list[Batch]) -> Any:
    for b in data:
        state, _ = step(state, sl.shard(b))
    return state


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Three steps on dp=2, tp=2 with ZeRO-3: the save, the state gathered, and the arrays after three steps more."""
    with simulated(dp=2, tp=2):
        step = trainer(3)
        state = train(step, start(step), batches(3))
        path = sl.save(tmp_path_factory.mktemp("trained"), state)
        return path, trees.map_(whole, state), train(step, state, batches(6)[3:])


TARGETS = [
    (dict(dp=4, tp=1), 1),
    (dict(dp=1, tp=1), 0),
    (dict(dp=1, tp=4), 3),
    (dict(dp=3, tp=1), 2),
    (dict(dp=2, tp=2), 3),
]


@pytest.mark.parametrize(("axes", "stage"), TARGETS)
def test_train_state_restores_under_other_meshes_and_stages(trained: Any, axes: dict[str, int], stage: int) -> None:
    path, want, _ = trained
    assert path.name == "step-00000003"
    with simulated(**axes):
        step = trainer(stage)
        fresh = start(step)
        got = sl.restore(path, sl.abstract(lambda: start(step)))
        assert same(got, want)
        for x, y in zip(trees.leaves(got), trees.leaves(fresh), strict=True):
            assert (x.spec, x.shape, len(x.shards)) == (y.spec, y.shape, len(y.shards))


def test_six_steps_are_three_and_three(trained: Any, tmp_path: Path) -> None:
    """The second three from the save, and from what four processes with ZeRO-1 made of it."""
    saved = trained[0]

    def run() -> str:
        with sl.make_mesh(dp=2, tp=2):
            step = trainer(1)
            return str(sl.save(tmp_path, sl.restore(saved, sl.abstract(lambda: start(step)))))

    paths = {saved, *map(Path, on_ranks(4, run))}
    assert len(paths) == 2
    with simulated(dp=2, tp=2):
        step = trainer(3)
        like = sl.abstract(lambda: start(step))
        for path in paths:
            resumed = train(step, sl.restore(path, like), batches(6)[3:])
            for x, y in zip(trees.leaves(trained[2]), trees.leaves(resumed), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(x.shards, y.shards, strict=True))


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
        load, calls = torch.load, []

        def slow(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                sl.save(tmp_path, states[1], step=1)
            return load(*args, **kwargs)

        monkeypatch.setattr(torch, "load", slow)
        with pytest.raises(sl.TreeError, match="was replaced while it was read: restore it again"):
            sl.restore(path, states[0])
        assert same(sl.restore(path, states[0]), states[1])


# ---- the format of torch.distributed.checkpoint


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_other_readers_and_writers_of_the_format(four: Path, tmp_path: Path) -> None:
    want = moments()
    plain = {"state.p.a": torch.zeros(5), "state.v.w": torch.zeros(7, 5), "epoch": 0}
    state_dict_loader.load(plain, checkpoint_id=four, no_dist=True)
    assert same(plain, {"state.p.a": want["p"]["a"], "state.v.w": want["v"]["w"], "epoch": 3})
    # arrays as they are, through the methods that the planner asks for
    with simulated(dp=4):
        arrays = {"a": sl.shard(want["p"]["c"], "n/dp"), "w": sl.shard(want["p"]["w"], "n k/dp")}
        state_dict_saver.save(dict(arrays), storage_writer=FileSystemWriter(tmp_path / "x"), no_dist=True)
    with simulated(dp=3, tp=2):
        empty = {"a": sl.shard(torch.zeros(7), "n/dp/tp"), "w": sl.shard(torch.zeros(7, 5), "n/tp k/dp")}
        state_dict_loader.load(empty, checkpoint_id=tmp_path / "x", no_dist=True)
        assert same(empty, {"a": want["p"]["c"], "w": want["p"]["w"]})


def test_metadata_is_for_people_too(four: Path) -> None:
    info = json.loads((four / "shardlib.json").read_text())
    assert (info["step"], info["mesh"], info["torch"]) == (7, "dp=2,tp=2", torch.__version__)
    assert info["leaves"]["state.p.w"] == {"dtype": "float32", "shape": [7, 5]}
    assert info["leaves"]["name"] == {"type": "str"} and "no" not in info["leaves"]


@sl.pytree
class Row:
    w: Tensor = sl.spec("m/dp")


@sl.pytree
class Rows:
    blocks: Row = sl.stack("layers")


def test_a_stack_that_also_stands_where_it_is_one_leaf(tmp_path):
    with sl.make_mesh(dp=2, simulate=True):
        net = sl.init(Rows, sizes=dict(layers=3, m=4), key=sl.random.key(0))
        for like in ({"alias": net.blocks.w, "net": net}, {"net": net, "alias": net.blocks.w}):
            found = sl.restore(sl.save(tmp_path, like, step=0), like=like)
            assert found["alias"] is found["net"].blocks.w
            assert torch.equal(sl.gather(found["alias"]), sl.gather(net.blocks.w))


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
