"""layout.py: which part of a global tensor each rank holds, for every length and chain (case C24)."""

from itertools import product

import pytest
import torch

import shardlib as sl
from shardlib import layout
from shardlib.errors import SpecError
from shardlib.spec import parse

CHAINS = [({"a": 4}, "x/a")] + [
    (mesh, chain) for mesh in ({"a": 2, "b": 4}, {"a": 3, "b": 2}) for chain in ("x/a", "x/b", "x/a/b", "x/b/a")
]
indices = pytest.mark.parametrize(("mesh", "chain"), CHAINS, ids=lambda v: v if isinstance(v, str) else sl.Mesh(v).name)


def _ranks(mesh):
    return [dict(zip(mesh, at, strict=True)) for at in product(*(range(n) for n in mesh.values()))]


@indices
def test_slices_partition_every_length(mesh, chain):
    axes = parse(chain).split
    for n in range(18):
        pieces = {tuple(at[a] for a in axes): layout.bounds(n, axes, mesh, at) for at in _ranks(mesh)}
        assert [i for _, (start, stop) in sorted(pieces.items()) for i in range(start, stop)] == list(range(n))
        length = layout.padded_length(n, axes, mesh)
        assert all(stop - start <= length for start, stop in pieces.values())
        assert length == max(stop - start for start, stop in pieces.values())


@indices
def test_gather_undoes_shard_for_every_length(mesh, chain):
    with sl.make_mesh(**mesh, simulate=True) as m:
        whole = {str(n): torch.arange(1.0, n + 1) for n in range(18)}
        arrays = sl.shard(whole, chain)
        for n, back in sl.gather(arrays).items():
            assert torch.equal(back, whole[n]), n
        for n, x in whole.items():
            for rank in range(m.total):
                start, stop = layout.bounds(int(n), parse(chain).split, m.shape, m.coordinates(rank))
                assert torch.equal(arrays[n].local(rank), x[start:stop])
                padding = arrays[n].shards[rank][stop - start :]
                assert not padding.count_nonzero()


def test_one_axis_is_cut_as_torch_chunk_does():
    for n in range(1, 18):
        chunks = torch.arange(n).chunk(4)
        for rank, chunk in enumerate(chunks):
            start, stop = layout.bounds(n, ["a"], {"a": 4}, {"a": rank})
            assert list(range(start, stop)) == chunk.tolist()


def test_shapes():
    sizes = {"a": 2, "b": 3}
    spec = parse("x/a y/b z")
    assert layout.padded_shape(spec, (5, 7, 2), sizes) == (3, 3, 2)
    assert layout.local_shape(spec, (5, 7, 2), sizes, {"a": 1, "b": 2}) == (2, 1, 2)
    assert layout.slices(spec, (5, 7, 2), sizes, {"a": 1, "b": 2}) == (slice(3, 5), slice(6, 7), slice(0, 2))
    assert layout.global_shape(spec, (3, 3, 2), sizes) == (6, 9, 2)
    assert layout.is_even(spec, (4, 9, 1), sizes) and not layout.is_even(spec, (4, 8, 1), sizes)
    assert layout.is_even(spec, (0, 0, 0), sizes)


def test_cut_takes_the_largest_dimension_that_divides():
    sizes = {"dp": 4, "tp": 2}
    assert str(layout.cut(parse("x y z"), (8, 12, 10), ["dp"], sizes)) == "x y/dp z"
    assert str(layout.cut(parse("x y/tp"), (8, 12), ["dp"], sizes)) == "x/dp y/tp"  # 12 does not divide by 2 * 4
    assert str(layout.cut(parse("x y/tp"), (8, 16), ["dp"], sizes)) == "x y/tp/dp"
    assert str(layout.cut(parse("x y"), (3, 0), ["dp"], sizes)) == "x y"  # none divides
    stacked = parse("x").prepend(parse("layers"))
    assert str(layout.cut(stacked, (16, 8), ["dp"], sizes)) == "layers x/dp"


@pytest.mark.parametrize(
    ("spec", "shape", "told"),
    [
        (
            "x/a y",
            (3,),
            "`x/a y` names 2 dimensions, the tensor has 1: (3,)\n"
            "  spec:    x/a y\n           ^^^^^ one name for each dimension",
        ),
        (
            "",
            (3,),
            "`` names 0 dimensions, the tensor has 1: (3,)\n  spec:    \n           ^ one name for each dimension",
        ),
        (
            "x y ... z",
            (3, 4),
            "`x y ... z` names 3 dimensions beside `...`, the tensor has 2\n  spec:    x y ... z\n           ^^^^^^^^^",
        ),
    ],
)
def test_number_of_dimensions(spec, shape, told):
    with pytest.raises(SpecError) as e:
        layout.check_rank(parse(spec), shape)
    assert str(e.value) == told
