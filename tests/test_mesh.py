"""mesh.py: axes, groups, coordinates, and what launchers say."""

import itertools
import os
import socket
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks

import shardlib as sl
from shardlib import wire
from shardlib.errors import MeshError, SpecError
from shardlib.mesh import _current, _launched
from shardlib.spec import parse

LAUNCHERS = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher started the tests."""
    for name in [*LAUNCHERS, *(n for n in os.environ if n.startswith("SLURM_"))]:
        monkeypatch.delenv(name, raising=False)


def mesh(**axes):
    return sl.make_mesh(**axes, simulate=True)


def test_axes_are_outermost_first():
    m = mesh(dp=2, tp=3)
    assert (m.axis_names, m.shape, m.total, m.name) == (("dp", "tp"), {"dp": 2, "tp": 3}, 6, "dp=2,tp=3")
    assert m.coordinates(4) == {"dp": 1, "tp": 1}
    assert (m.size("tp"), m.size(("dp", "tp")), m.size(())) == (3, 6, 1)
    assert m.ordered(("tp", "dp")) == ("dp", "tp")
    assert repr(m) == "Mesh(dp=2,tp=3, simulated)" and repr(sl.make_mesh()) == "Mesh(, rank 0)"
    assert sl.make_mesh({"dp": 1}, tp=1).shape == {"dp": 1, "tp": 1}
    assert sl.make_mesh({"simulate_": 2}, simulate=True).axis_names == ("simulate_",)


def test_groups():
    m = mesh(pp=2, dp={"replica": 2, "fsdp": 3}, tp=1)
    assert m.axis_names == ("pp", "replica", "fsdp", "tp") and m.groups == {"dp": ("replica", "fsdp")}
    assert m.expand("dp") == ("replica", "fsdp") and m.expand(("tp", "dp")) == ("tp", "replica", "fsdp")
    assert m.size("dp") == 6 and m.size(("dp", "pp")) == 12
    more = sl.make_mesh(edp=2, ep=2, cp=2, simulate=True, groups={"fsdp": "edp/ep/cp", "last": "fsdp", "two": "ep/cp"})
    assert more.groups == {"fsdp": ("edp", "ep", "cp"), "last": ("edp", "ep", "cp"), "two": ("ep", "cp")}


@st.composite
def meshes(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    m = sl.make_mesh(dict(zip("abcd", sizes, strict=False)), simulate=True)
    rank = draw(st.integers(0, m.total - 1))
    return m, rank, tuple(draw(st.lists(st.sampled_from(m.axis_names), unique=True)))


@settings(deadline=None)
@given(meshes())
def test_coordinates_indices_and_members_agree(drawn):
    m, rank, axes = drawn
    at = m.coordinates(rank)
    assert m.index_of(rank, m.axis_names) == rank
    assert list(itertools.product(*map(range, m.shape.values()))) == [
        tuple(m.coordinates(r).values()) for r in range(m.total)
    ]
    members = m.members(rank, axes)
    assert len(set(members)) == len(members) == m.size(axes)
    assert [m.index_of(r, axes) for r in members] == list(range(len(members)))  # in the order of the axes given
    assert members[m.index_of(rank, axes)] == rank
    assert all({a: n for a, n in m.coordinates(r).items() if a not in axes}
               == {a: n for a, n in at.items() if a not in axes} for r in members)  # fmt: skip
    assert all(set(m.members(r, axes)) == set(members) for r in members)
    if axes == m.ordered(axes):
        assert list(members) == sorted(members)


def test_group_names_are_enough_to_trace():
    assert mesh(dp=2, tp=4).group(("dp", "tp")) == "dp=2,tp=4/dp,tp"


@pytest.mark.parametrize(
    ("axes", "options", "told"),
    [
        ({"dp": 0}, {}, "axis `dp` has size 0: sizes are whole numbers from 1, or one -1"),
        ({"dp": 2.0}, {}, "axis `dp` has size 2.0"),
        ({"dp": True}, {}, "axis `dp` has size True"),
        ({"dp": -1}, {}, "`dp` = -1: a simulated mesh leaves nothing; give the size"),
        ({"a/b": 2}, {}, "`a/b` cannot name an axis: use letters, digits and _"),
        ({"dp": {"tp": 2}, "tp": 2}, {}, "axis `tp` is named twice; a group and an axis need names of their own"),
        ({"dp": {"dp": 2}}, {}, "axis `dp` is named twice"),
        ({"dp": {}}, {}, "group `dp` has no axes"),
        ({"dp": 2}, {"groups": {"dp": "dp"}}, "group `dp`: a group needs a name of its own"),
        (
            {"dp": 2},
            {"groups": {"a b": "dp"}},
            "group `a b`: a group needs a name of its own, of letters, digits and _",
        ),
        ({"dp": 2}, {"groups": {"all": "dpp/tp"}}, "group `all` names `dpp`, which is no axis (did you mean `dp`?)"),
        ({"dp": 2}, {"groups": {"all": "dp/dp"}}, "group `all` (`dp/dp`) names axis `dp` twice"),
    ],
)
def test_wrong_meshes(axes, options, told):
    with pytest.raises(MeshError) as e:
        sl.make_mesh(axes, simulate=True, **options)
    assert told in str(e.value)


def test_unknown_axes():
    m = mesh(dp={"replica": 2, "fsdp": 2}, tp=2)
    told = "the mesh has no axis `tpp` (did you mean `tp`?); its axes are `replica`, `fsdp`, `tp` and `dp`"
    with pytest.raises(MeshError) as e:
        m.size("tpp")
    assert str(e.value) == told
    with pytest.raises(MeshError) as e:
        m.resolve(parse("a/tp b/tpp"))
    assert str(e.value) == f"{told}\n  spec:    a/tp b/tpp\n                ^^^^^"
    with pytest.raises(MeshError, match="`dp` and `fsdp` name an axis twice: `replica`, `fsdp` and `fsdp`"):
        m.expand(("dp", "fsdp"))


def test_groups_in_specs():
    m = mesh(dp={"replica": 2, "fsdp": 2}, tp=2)
    assert str(m.resolve(parse("a/tp/dp b +fsdp").without(["fsdp"]))) == "a/tp/replica/fsdp b"
    assert str(m.resolve(parse("a/tp b +dp"))) == "a/tp b +replica +fsdp"
    for text, marks in (("a/dp b/fsdp", "     ^^^^^^"), ("a/fsdp +dp", "       ^^^")):
        with pytest.raises(SpecError) as e:
            m.resolve(parse(text))
        assert (
            str(e.value) == f"`{text}` names axis `fsdp` twice; the mesh is {m!r}\n  spec:    {text}\n{' ' * 11}{marks}"
        )


def test_the_current_mesh_is_the_innermost():
    a, b = mesh(x=1), mesh(y=1)
    with pytest.raises(MeshError, match=r"no mesh: use `with sl.make_mesh\(dp=2, tp=2\):`"):
        sl.current_mesh()
    with a:
        with b:
            with a:
                assert sl.current_mesh() is a
            assert sl.current_mesh() is b
        assert sl.current_mesh() is a
        sl.use_mesh(b)
        assert sl.current_mesh() is b
    assert sl.current_mesh() is b  # until changed
    with pytest.raises(KeyError), a:
        raise KeyError
    assert sl.current_mesh() is b
    _current.clear()


def test_an_index_belongs_to_a_process():
    with pytest.raises(MeshError, match="on a simulated mesh one process plays all ranks and has no index"):
        mesh(dp=2).index("dp")
    assert mesh(dp=1).index("dp") == 0
    with pytest.raises(MeshError, match="a simulated mesh has no DeviceMesh"):
        _ = mesh(dp=2).device_mesh


def test_no_process_acts_as_all(monkeypatch):
    """Case C29: what a launcher started never acts as one rank."""
    with pytest.raises(MeshError) as e:
        sl.make_mesh(dp=2, tp=2)
    assert str(e.value) == (
        "the mesh dp=2 x tp=2 needs 4 rank(s), there is 1: start it with `torchrun --nproc-per-node 4 ...`, or pass "
        "simulate=True to play all ranks in this process"
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    for axes in ({}, {"dp": 1}, {"dp": 4}, {"dp": -1}):
        with pytest.raises(MeshError, match="WORLD_SIZE=4 is set and RANK is not: a launcher sets both"):
            sl.make_mesh(axes)
    with pytest.raises(MeshError, match="no mesh"):
        sl.shard(torch.ones(4), "a")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(MeshError, match=r"needs 1 rank\(s\), there are 4: start it with `torchrun"):
        sl.make_mesh(dp=1)
    with pytest.raises(MeshError, match="4 ranks do not divide by 3, the product of the sizes given"):
        sl.make_mesh(dp=-1, tp=3)
    with pytest.raises(MeshError, match="`dp` and `tp` = -1: two axes cannot both take what is left"):
        sl.make_mesh(dp=-1, tp=-1)
    assert sl.make_mesh(dp=2, simulate=True).total == 2


def _port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return str(s.getsockname()[1])


def _shape():
    m = sl.make_mesh(dp=-1, tp=1, timeout=30)
    return m.shape, m.rank, m.index("dp"), dist.get_world_size(), dist.get_rank(), os.getpid()


def test_launchers():
    port = _port()

    def torchrun(r):
        return {
            "RANK": str(r),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(r),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }

    found = on_ranks(2, _shape, env=torchrun)
    assert [f[:-1] for f in found] == [({"dp": 2, "tp": 1}, r, r, 2, r) for r in range(2)]

    def srun(r):
        said = {"PROCID": r, "LOCALID": r, "STEP_NUM_TASKS": 2, "STEP_TASKS_PER_NODE": "1(x2)", "NTASKS": 8}
        return {f"SLURM_{k}": str(v) for k, v in {**said, "STEP_NODELIST": "localhost"}.items()} | {"MASTER_PORT": port}

    assert [f[:-1] for f in on_ranks(2, _shape, env=srun)] == [f[:-1] for f in found]


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[03-05,7],x1", "gpu03"), ("n1,n2", "n1"), ("a-b-[001-004]", "a-b-001"), ("host", "host")]
)
def test_srun_ranks_meet_on_the_first_node(monkeypatch, nodes, first):
    for name, value in {"PROCID": 3, "LOCALID": 1, "STEP_NUM_TASKS": 4, "JOB_ID": 1234567}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
    monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
    launch = _launched()
    assert launch is not None
    assert (launch.rank, launch.world, launch.local, launch.ranks_here) == (3, 4, 1, 2)
    assert launch.where == f"tcp://{first}:19567"


def test_an_innermost_axis_that_straddles_hosts_warns():
    def body():
        os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
        said = []
        for axes in ({"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}, {"dp": 4, "tp": 1}, {"pp": 1, "dp": 2, "tp": 2}):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                sl.make_mesh(axes)
            said.append([str(w.message) for w in found])
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        with pytest.warns(UserWarning, match=r"the innermost axis `tp` of size 2 straddles hosts of 1 rank\(s\) each"):
            sl.make_mesh(dp=2, tp=2)
        return said

    assert on_ranks(4, body) == [[[], [], [], []]] * 4


def test_on_real_ranks_groups_count_as_the_mesh_does():
    def body():
        m = sl.make_mesh(dp=2, tp=2)
        seen = {}
        for axes in (("dp",), ("tp",), ("dp", "tp")):
            group = wire.resolve(m.group(axes))
            assert m.group(axes) == m.group(axes)
            seen[axes] = dist.get_process_group_ranks(group), group.rank()
            assert seen[axes][0] == list(m.members(m.rank, axes))
        dm = m.device_mesh
        assert dm.mesh_dim_names == m.axis_names and list(dm.get_coordinate()) == list(m.coordinates(m.rank).values())
        with pytest.raises(MeshError, match="needs 2 rank"):
            sl.make_mesh(dp=2)
        return m.index("dp"), m.index("tp"), m.index(("tp", "dp")), seen[("dp",)], seen[("tp",)], seen[("dp", "tp")]

    assert on_ranks(4, body) == [
        (0, 0, 0, ([0, 2], 0), ([0, 1], 0), ([0, 1, 2, 3], 0)),
        (0, 1, 2, ([1, 3], 0), ([0, 1], 1), ([0, 1, 2, 3], 1)),
        (1, 0, 1, ([0, 2], 1), ([2, 3], 0), ([0, 1, 2, 3], 2)),
        (1, 1, 3, ([1, 3], 1), ([2, 3], 1), ([0, 1, 2, 3], 3)),
    ]


def test_process_groups_are_made_again_after_a_restart():
    def body(folder):
        sums = []
        for attempt in range(2):
            m = sl.make_mesh(dp=2)
            group = wire.resolve(m.group(("dp",)))
            x = torch.tensor(float(dist.get_rank() + 1 + attempt))
            dist.all_reduce(x, group=group)
            sums.append(x.item())
            dist.destroy_process_group()
            dist.init_process_group("gloo", f"file://{folder}/{attempt}", rank=m.rank, world_size=2)
        return sums

    with tempfile.TemporaryDirectory() as folder:
        assert on_ranks(2, body, folder) == [[3.0, 5.0]] * 2


def test_a_rank_that_fails_or_hangs_is_named():
    def body():
        if dist.get_rank() == 1:
            raise KeyError("lost")
        dist.barrier()

    with pytest.raises(AssertionError, match=r"rank 1 of 2 raised\n(.*\n)*KeyError: 'lost'"):
        on_ranks(2, body)
    with pytest.raises(AssertionError, match=r"rank 0 of 2 was not done after 0.5 s"):
        on_ranks(2, lambda: dist.get_rank() or __import__("time").sleep(60), seconds=0.5)
    with pytest.raises(AssertionError, match="rank 0 of 1 died with exit code 7"):
        on_ranks(1, lambda: os._exit(7))
