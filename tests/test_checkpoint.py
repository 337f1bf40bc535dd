"""checkpoint.py: what any mesh saved any other restores bitwise, whole or in part."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from saved import KEY, SIZES, Block, Model, Stacked, same, simulated, zeros_of
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import shardlib as sl
from shardlib import tree as trees

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
        path = sl.save(tmp_path, sl.shard(tree, "n/dp"), step=0, wait=False).wait()
        assert same(sl.restore(path, sl.shard(zeros(tree), "n")), tree)


def test_views_of_the_user(tmp_path: Path) -> None:
    w = torch.randn(6, 4)
    tree = {"t": w.t(), "strided": w[:, ::2], "expanded": torch.randn(5, 1).expand(5, 3), "plain": w.t()[1:]}
    want = {k: v.clone() for k, v in tree.items()}
    with simulated(dp=2):
        state = {k: v if k == "plain" else sl.shard(v, "n/dp k") for k, v in tree.items()}
        path = sl.save(tmp_path, state, step=0)
        w.zero_()  # the files hold copies
        like = {k: torch.zeros(v.shape) if k == "plain" else state[k] for k, v in tree.items()}
        assert same(sl.restore(path, like), want)


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
