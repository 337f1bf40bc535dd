"""`jit(cache=)`: one rank traces, the others and the next run load; nothing that differs is ever taken."""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.fx import GraphModule

import shardlib as sl
from shardlib import tree
from shardlib.graph import trace

F64 = torch.float64
SPECS = {"w": "m/dp n", "b": ""}
JIT: Any = sys.modules["shardlib.jit"]


def counted() -> list[str]:
    """A list that grows with every program that this process traces from now on."""
    made: list[str] = []

    def counting(f: Any, metas: Any, name: str) -> GraphModule:
        made.append(name)
        return trace.trace(f, metas, name)

    JIT.trace = counting
    return made


@pytest.fixture
def traces():
    held = JIT.trace
    yield counted()
    JIT.trace = held


def loss(p: Any, batch: Tensor) -> sl.Mean:
    half = torch.tensor([0.5], dtype=F64)  # a constant of the program
    return sl.Mean.of("batch/dp n", torch.tanh(batch @ sl.gather(p["w"], "dp")) * p["b"] + half)


def started(train: Any) -> Any:
    params = {"w": torch.arange(12.0, dtype=F64).view(4, 3) / 12, "b": torch.ones((), dtype=F64)}
    return train.init(sl.shard(params, SPECS)), sl.shard(torch.arange(32, dtype=F64).view(8, 4) / 50, "batch/dp m")


def trained(cache: Any, passes: Any = sl.passes.default, optimizer: Any = None, of: Any = loss, **options: Any) -> Any:
    """What two steps gave."""
    step = sl.step(of, optimizer or sl.optim.adamw(0.1, weight_decay=0.1), **options)
    train = sl.jit(step, donate_argnums=0, passes=passes, cache=cache)
    state, batch = started(train)
    for _ in range(2):
        state, metrics = train(state, batch)
    return tree.leaves((sl.gather(state), metrics))


def equal(one: Any, other: Any) -> bool:
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("options", [{}, dict(layout=sl.zero(SPECS, stage=3), accumulate=2, clip=0.01)])
def test_the_same_bits_from_a_file(tmp_path, traces, options):
    with sl.make_mesh(dp=2, simulate=True):
        want = trained(None, **options)
        assert len(traces) == 1
        assert equal(trained(tmp_path / "new", **options), want) and len(traces) == 2
        assert equal(trained(tmp_path / "new", **options), want) and len(traces) == 2


def test_a_loaded_program_is_the_one_that_was_written(tmp_path):
    with sl.make_mesh(dp=2, simulate=True):
        one, two = (sl.jit(sl.step(loss, sl.optim.sgd(0.1), accumulate=2), cache=tmp_path) for _ in range(2))
        a, b = (train.lower(*started(train)) for train in (one, two))
        assert b.as_text() == a.as_text() and b.collectives() == a.collectives() and b.memory() == a.memory()
        assert b.structure == a.structure and b.results == a.results and b.module is not a.module
        pairs = [zip(p.graph.nodes, q.graph.nodes, strict=True) for p, q in zip(graphs(a), graphs(b), strict=True)]
        numbers: dict[Any, Any] = {}
        for n, m in (pair for nodes in pairs for pair in nodes):
            assert all(m.meta.get(k) == n.meta.get(k) for k in ("path", "donated", "kind", "paths"))
            phases = ("forward", "backward", "remat", "early")
            for k in phases:  # numbered anew
                assert (k in m.meta) == (k in n.meta) and numbers.setdefault(
                    n.meta.get(k), m.meta.get(k)
                ) == m.meta.get(k)
            assert [(x.shape, x.stride(), x.dtype) for x in values(n)] == [
                (x.shape, x.stride(), x.dtype) for x in values(m)
            ]


def graphs(program: Any) -> list[GraphModule]:
    return list(program.program.values())


def values(node: Any) -> list[Tensor]:
    return [x for x in tree.leaves(node.meta.get("val")) if isinstance(x, Tensor)]


def test_results_are_classes_constants_and_plain_tensors(tmp_path, traces):
    @sl.pytree
    class Pair:
        one: Tensor = sl.spec("n/dp")
        two: Any = sl.spec("n")
        how: int = sl.static(default=3)

    def f(x: Any, pair: Any) -> Any:
        both = sl.shard_map(lambda a: (a * 2, a.sum()), in_specs=None, out_specs=("n/dp", "+dp"))(x)
        out = Pair(one=both[0], two=None, how=4)
        return {"pair": out, "all": sl.gather(both[1]), "more": [(1.5, "text"), None, pair.how]}

    with sl.make_mesh(dp=2, simulate=True):
        x = sl.shard(torch.arange(4.0), "n/dp")
        for _ in range(2):
            out = sl.jit(f, cache=tmp_path)(x, Pair(one=x, two=x, how=5))
            assert out["more"] == [(1.5, "text"), None, 5] and out["all"].item() == 6 and type(out["all"]) is Tensor
            assert (type(out["pair"]), out["pair"].two, out["pair"].how) == (Pair, None, 4)
            assert sl.gather(out["pair"].one).tolist() == [0, 2, 4, 6] and str(out["pair"].one.spec) == "n/dp"
    assert traces == ["f"]


# ---- one rank traces for all


def test_the_first_rank_traces_for_all(tmp_path):
    def body() -> Any:
        traces = counted()
        with sl.make_mesh(dp=2, timeout=20) as mesh:
            x = sl.shard(torch.arange(4.0), "n/dp")
            whole = sl.jit(sl.gather, cache=tmp_path / "shared")(
                x
            )  # at rest, on a group that no other program has made
            assert torch.equal(whole, torch.arange(4.0))
            options = dict(layout=sl.zero(SPECS, stage=3), accumulate=2)
            found = trained(tmp_path / "shared", **options)
            own = trained(tmp_path / f"of_rank{mesh.rank}", **options)  # a folder of each host's own
            return equal(found, trained(None, **options)), equal(found, own), len(traces)

    assert on_ranks(2, body) == [(True, True, 4), (True, True, 1)]
    assert on_ranks(2, body) == [(True, True, 1)] * 2
    files = sorted(f"{p.parent.name} {p.name.split('-')[0]}" for p in tmp_path.glob("*/*"))
    assert files == ["of_rank0 loss", "of_rank1 loss", "shared gather", "shared loss"]


def test_the_first_rank_fails_or_has_no_key(tmp_path):
    def body() -> list[Any]:
        with sl.make_mesh(dp=2, timeout=20) as mesh, contextlib.redirect_stderr(io.StringIO()) as said:

            def f(x: Tensor) -> Tensor:
                if mesh.rank == 0:
                    raise ValueError("no")
                return sl.psum(x, "dp")

            table = torch.tensor(2.0)
            x = sl.shard(torch.ones(4), "n/dp")
            out = []
            for g in (
                f,
                lambda x: sl.psum(x * sl.assume("", table), "dp"),
                lambda x: x * sl.current_mesh().index("dp"),
            ):
                try:
                    out.append(sl.jit(sl.shard_map(g, in_specs=None, out_specs="..."), cache=tmp_path)(x).local())
                except Exception as e:
                    out.append(str(e).split(":")[0])
            return [*(x if isinstance(x, str) else x.tolist() for x in out), said.getvalue()]

    def pairs() -> list[Any]:
        traces = counted()
        with sl.make_mesh(dp=2, timeout=20) as mesh, contextlib.redirect_stderr(io.StringIO()) as said:

            def own(x: Tensor) -> Tensor:
                return x * sl.current_mesh().index("dp")

            x = sl.shard(torch.ones(4), "n/dp")
            f = sl.jit(sl.shard_map(own, in_specs="n/dp", out_specs="n/dp"), cache=tmp_path)
            return [mesh.rank, f(x).local().tolist(), len(traces), said.getvalue()]

    first, second = on_ranks(2, body)
    assert first[:2] == ["no", [4.0, 4.0]] and second[:2] == ["rank 0 failed in its first call of `f`", [4.0, 4.0]]
    said = first[-1] + second[-1]
    assert "shardlib: <lambda> is not cached: `table` in " in said and said.count("a tensor") == 1
    first, second = on_ranks(2, pairs)
    assert first[:3] == [0, [0.0, 0.0], 1] and second[:3] == [1, [1.0, 1.0], 1]
    assert "own is not cached: its program holds the rank, from mesh.index" in first[-1] + second[-1]
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import {module} as t
made = t.counted()
with t.sl.make_mesh(dp=2, simulate=True):
    found = t.trained({folder!r}, accumulate=2)
print(len(made), [float(x.sum()) for x in found])
"""


def test_another_process_does_not_trace(tmp_path, traces):
    """Nor one whose strings hash otherwise."""
    with sl.make_mesh(dp=2, simulate=True):
        found = trained(tmp_path, accumulate=2)
    program = PROGRAM.format(module=__name__, folder=str(tmp_path))
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(traces) == 1 and done.stdout == f"0 {[float(x.sum()) for x in found]}\n"


# ---- what is not taken


def of_module(text: str) -> Any:
    """`loss` of a module that calls a helper of another, whose text this is."""
    helper, user = types.ModuleType("a_helper"), types.ModuleType("a_user")
    exec(
        compile(f"import torch\nCONSTANT = 2.0\ndef scaled(x):\n    return {text}\n", "a_helper.py", "exec"),
        vars(helper),
    )
    vars(user).update(sl=sl, a_helper=helper)
    source = "def loss(p, batch):\n    w = sl.gather(p['w'], 'dp')\n"
    source += "    return sl.Mean.of('batch/dp n', a_helper.scaled(batch @ w) * p['b'])\n"
    exec(compile(source, "a_user.py", "exec"), vars(user))
    return vars(user)["loss"]


def closed(by: float) -> Callable[..., sl.Mean]:
    return lambda p, batch: sl.Mean.of("batch/dp n", (batch @ sl.gather(p["w"], "dp")) * p["b"] * by)


def own_pass(module: GraphModule) -> GraphModule:
    return module


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a helper's source": (dict(of=of_module("x * CONSTANT")), dict(of=of_module("x + CONSTANT"))),
    "a constant of a closure": (dict(of=closed(2.0)), dict(of=closed(3.0))),
    "a hyperparameter": (dict(optimizer=sl.optim.sgd(0.1)), dict(optimizer=sl.optim.sgd(0.2))),
    "a pass": (dict(), dict(passes=[*sl.passes.default, own_pass])),
    "a pass's limit": (
        dict(passes=[functools.partial(sl.passes.bucket, limit=1)]),
        dict(passes=[functools.partial(sl.passes.bucket, limit=2)]),
    ),
    "the layout": (dict(layout=sl.zero(SPECS, stage=2)), dict(layout=sl.zero(SPECS, stage=3))),
    "micro-batches": (dict(accumulate=2), dict(accumulate=4)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_traced(tmp_path, traces, what):
    one, other = CHANGES[what]
    with sl.make_mesh(dp=2, simulate=True):
        for options, count in ((one, 1), (one, 1), (other, 2), (other, 2)):
            found = trained(tmp_path, **options)
            assert len(traces) == count
        assert equal(found, trained(None, **other))


def test_another_torch_mesh_or_setting_is_traced(tmp_path, traces, monkeypatch):
    with sl.make_mesh(dp=2, simulate=True):
        trained(tmp_path)
        with monkeypatch.context() as m:
            m.setattr(torch, "__version__", "2.99")
            trained(tmp_path)
        with monkeypatch.context() as m:
            m.setattr("shardlib.cache.sources", lambda: "other sources")
            trained(tmp_path)
        torch.use_deterministic_algorithms(True)
        try:
            trained(tmp_path)
        finally:
            torch.use_deterministic_algorithms(False)
        assert len(traces) == 4
        trained(tmp_path)
    with sl.make_mesh(dp=2, tp=1, simulate=True):
        trained(tmp_path)
    assert len(traces) == 5 == len(list(tmp_path.iterdir()))


def broken(text: str) -> list[tuple[str, str]]:
    """Texts that are not a program's, with what is said of them."""
    head, _, body = text.partition("\n")
    sums = json.loads(head) | {"key": {**json.loads(head)["key"], "mesh": "another"}}
    return [
        (text[: len(text) // 2], "checksum is not the one that was written"),
        (text.replace("aten::tanh", "aten::sinh"), "checksum is not the one that was written"),
        ("not a program", "JSONDecodeError"),
        ("{}\n", "KeyError"),
        (f"{json.dumps(sums)}\n{body}", "is not used, since it was made for other: mesh"),
        ("", ""),
    ]


def test_what_cannot_be_read_is_traced_again(tmp_path, traces, capsys):
    with sl.make_mesh(dp=2, simulate=True):
        want = trained(tmp_path)
        (file,) = tmp_path.iterdir()
        whole = file.read_text()
        for n, (text, said) in enumerate(broken(whole)):
            file.write_text(text)
            capsys.readouterr()
            assert equal(trained(tmp_path), want) and len(traces) == n + 2
            err = capsys.readouterr().err
            assert said in err and err.count("\n") == (said != "")
            assert file.read_text().splitlines()[1] == whole.splitlines()[1]
            assert [p.name for p in tmp_path.iterdir()] == [file.name]
        file.write_bytes(b"\xff\xfe")
        assert equal(trained(tmp_path), want) and "cannot be read" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    taken = tmp_path / "file"
    taken.write_text("")
    with sl.make_mesh(dp=2, simulate=True):
        assert equal(trained(taken / "below"), trained(None))
    assert "cannot be read" in (said := capsys.readouterr().err) and "is not kept" in said
