"""jit: what is traced again and what is not, donation, errors, programs and their graphs, backends."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import tree

F64 = torch.float64


def mesh(**axes: Any) -> sl.Mesh:
    return sl.make_mesh(axes, simulate=True)


def doubled(x: Any) -> Any:
    return sl.shard_map(lambda y: tree.map_(lambda z: z * 2, y), in_specs=None, out_specs=specs_of(x))(x)


def specs_of(x: Any) -> Any:
    return tree.map_(lambda leaf: leaf.spec if isinstance(leaf, sl.Array) else "...", x)


def arange(*shape: int, spec: str = "...", dtype: torch.dtype = F64) -> Any:
    return sl.shard(torch.arange(torch.Size(shape).numel()).view(shape).to(dtype), spec)


# ---- signatures


def test_what_is_traced_again(capsys):
    f = sl.jit(doubled)
    with mesh(dp=2):
        for x in (arange(4, spec="n/dp"), arange(4, spec="n/dp"), {"a": arange(4, spec="n/dp")}):
            f(x)
        assert len(f.traces) == 2
        for changed in (
            arange(6, spec="n/dp"),
            arange(4, spec="n"),
            arange(4, spec="m/dp"),
            arange(4, spec="n/dp", dtype=torch.float32),
        ):
            before = len(f.traces)
            for _ in range(2):
                f(changed)
            assert len(f.traces) == before + 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "shardlib: doubled was traced again: the arguments have another structure",
        "shardlib: doubled was traced again: the arguments have another structure",
        "shardlib: doubled was traced again: argument 0 is float64[4] `n`, it was float64[6] `n/dp`",
        "shardlib: doubled was traced again: argument 0 is float64[4] `m/dp`, it was float64[4] `n`",
        "shardlib: doubled was traced again: argument 0 is float32[4] `n/dp`, it was float64[4] `m/dp`",
    ]
    with mesh(dp=2):
        f(arange(4, spec="n/dp"))
        assert len(f.traces) == 6  # another mesh of the same axes has the same program
    with mesh(dp=4):
        f(arange(4, spec="n/dp"))
        assert len(f.traces) == 7
    assert capsys.readouterr().err == "shardlib: doubled was traced again: the mesh is dp=4, it was dp=2\n"


def test_meshes_that_differ_in_groups_only():
    def gathered(x: Tensor) -> Tensor:
        return sl.gather(x, "some").sum() * sl.axis_index(("a", "b"))

    f = sl.jit(sl.shard_map(gathered, in_specs=None, out_specs="+a +b"))
    gathers = []
    for groups in ({"some": "a"}, {"some": "a/b"}):
        with sl.make_mesh(a=2, b=2, groups=groups, simulate=True) as m:
            x = sl.shard(torch.ones(4, 4), "n/a m/b", m)
            gathers.append(sorted(c.axis for c in f.lower(x).collectives()))
    assert gathers == [["a"], ["a", "b"]]


def test_settings_are_part_of_the_signature():
    f = sl.jit(sl.shard_map(lambda x: x + torch.ones(()), in_specs=None, out_specs=None))
    with mesh(dp=1):
        x = arange(2, dtype=torch.float32)
        assert f(x).dtype == torch.float32
        try:
            torch.set_default_dtype(F64)
            f(x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert len(f.traces) == 2


def test_static_arguments_and_constants():
    seen = []

    def scaled(x: Any, how: str, by: float) -> Any:
        seen.append((how, by))
        return (
            sl.shard_map(lambda y: y * by if how == "times" else y / by, in_specs=None, out_specs="n/dp")(x),
            how,
            by,
            None,
        )

    f = sl.jit(scaled, static_argnums=1)
    with mesh(dp=2):
        x = arange(4, spec="n/dp")
        out, *rest = f(x, "times", 2.0)
        assert rest == ["times", 2.0, None]
        assert torch.equal(sl.gather(out), 2 * torch.arange(4.0, dtype=F64))
        assert torch.equal(sl.gather(f(x, "over", 2.0)[0]), torch.arange(4.0, dtype=F64) / 2)
        for how, by in (("times", 2.0), ("times", 3.0), ("times", 2), ("over", 0.5)):
            f(x, how, by)
        assert seen == [("times", 2.0), ("over", 2.0), ("times", 3.0), ("times", 2), ("over", 0.5)]
        zero = f(x, "over", 0.0)[0], f(x, "over", -0.0)[0]
        assert [z.local(1)[1].item() for z in zero] == [torch.inf, -torch.inf]


def test_static_arguments_in_any_order_and_defaults_left_out():
    def f(x: Any, a: int, b: int = 1, c: int = 0, *, flag: bool = False) -> Any:
        return x * a + 10 * b + 100 * c + 1000 * flag

    with mesh(dp=1):
        for numbers in ((2, 1), (3, 1, 2), (-1, 1)):
            g = sl.jit(f, static_argnums=numbers)
            for args, words in (((3,), {}), ((3, 2), {}), ((3,), {"c": 4}), ((3, 2), {"c": 4})):
                assert torch.equal(g(torch.ones(2), *args, **words), f(torch.ones(2), *args, **words))
        with pytest.raises(sl.SpecError, match="`flag` is taken by keyword alone"):
            sl.jit(f)(torch.ones(2), 3, flag=True)


def test_constants_are_known_by_type_and_value():
    """1, True, 1.0, 0.0 and -0.0 are programs of their own, NaN one; so they are in static arguments."""
    said = [1, True, 1.0, 0.0, -0.0, 1j, float("nan"), (1,), (1.0,)]
    for static in ((), 1):
        f = sl.jit(lambda x, by: x * (by[0] if isinstance(by, tuple) else by), static_argnums=static, max_traces=9)
        with mesh(dp=1):
            for _ in range(2):
                for by in [*said, float("nan")]:
                    want, got = f.f(torch.ones(1, dtype=torch.int64), by), f(torch.ones(1, dtype=torch.int64), by)
                    assert got.dtype == want.dtype and repr(got) == repr(want)
            assert len(f.traces) == 9
    with mesh(dp=1):
        same = sl.jit(lambda x: (x, 1, True, 1.0, 0.0, -0.0))(torch.ones(1))
        assert repr(same[1:]) == repr(doubled_constants(torch.ones(1))[1:]) == "(1, True, 1.0, 0.0, -0.0)"


def doubled_constants(x: Tensor) -> Any:
    return sl.shard_map(lambda x: (x, 1, True, 1.0, 0.0, -0.0), in_specs=None, out_specs=None)(x)


def test_arguments_by_keyword_default_and_number():
    def f(x: Any, by: float = 2.0, how: str = "times") -> Any:
        return x * by if how == "times" else x / by

    x = torch.full((2,), 3.0)
    with mesh(dp=1):
        run = sl.jit(f, static_argnums=-1)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((x,), {}),
            ((), {"x": x}),
            ((x, 2.0, "times"), {}),
            ((x,), {"how": "over"}),
        ]
        for args, words in calls:
            for _ in range(2):
                assert torch.equal(run(*args, **words), f(*args, **words))
        assert len(run.traces) == 3 and run.lower(x, how="over") is run.traces[-1]
        with pytest.raises(TypeError, match="unexpected keyword argument 'b'"):
            run(x, b=2)
        with pytest.raises(sl.SpecError, match="`by` is taken by keyword alone: bind it with functools"):
            sl.jit(lambda x, *, by: x * by)(x, by=2)
        with pytest.raises(sl.SpecError, match="the static argument 0 holds a tensor"):
            sl.jit(f, static_argnums=0)(x)
        donating = sl.jit(lambda n, x: doubled(x), donate_argnums=-1)
        gone = arange(4)
        donating(1, gone)
        with pytest.raises(sl.DonatedError):
            sl.gather(gone)
    wrong: list[tuple[dict[str, Any], str]] = [
        (dict(static_argnums=3), r"static_argnums=3: the function takes arguments 0 to 2"),
        (dict(donate_argnums=(0, -4)), r"donate_argnums=\(0, -4\): the function takes arguments 0 to 2"),
        (dict(donate_argnums=(0, 1), static_argnums=-2), "argument 1 is static, so that there is nothing of it to don"),
    ]
    for options, said in wrong:
        with pytest.raises(sl.SpecError, match=said):
            sl.jit(f, **options)
    with pytest.raises(sl.SpecError, match=r"static_argnums=-1: .* takes any number of arguments"):
        sl.jit(lambda *xs: xs, static_argnums=-1)


class Scaling:
    by = 3

    @sl.jit
    def method(self, x: Tensor) -> Tensor:
        return x * self.by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


class Keeps:
    """Keeps what it computes, as a trace knows it."""

    def __call__(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last


def test_what_is_kept_from_a_trace_has_no_values():
    keeps, x = Keeps(), torch.ones(2)
    with mesh(dp=2):
        sl.jit(keeps)(x)
        with pytest.raises(sl.SpecError, match=r"reads a value that was kept from an earlier trace at .*keeps\.last"):
            sl.jit(lambda x: x + keeps.last)(x)
        with pytest.raises(sl.SpecError, match=r"argument 0 has no values: it is abstract .*, or was kept from a"):
            sl.jit(doubled)(keeps.last)
        step = sl.jit(sl.step(loss, sl.optim.sgd(0.1)))
        abstract = sl.abstract(started, step)
        assert sl.abstract(step, *abstract)[0].params["w"].shape == (4, 3)
        with pytest.raises(sl.SpecError, match="argument 0, `step`, has no values"):
            step(*abstract)

        def boxed(x: Tensor) -> Any:
            keeps(x)
            return keeps

        with pytest.raises(
            sl.SpecError, match=r"boxed: result `` is a Keeps that holds tensors: make its class an sl.py"
        ):
            sl.jit(boxed)(x)
    for f in (3, lambda: (yield), run_later):
        with pytest.raises(sl.SpecError, match="jit takes a function that returns its results, not "):
            sl.jit(f)  # type: ignore[arg-type]


async def run_later() -> None: ...


def test_methods_partials_and_objects():
    x = torch.ones(2)
    with mesh(dp=1):
        for f, name in (
            (Scaling().method, "method"),
            (sl.jit(Scaling()), "Scaling"),
            (sl.jit(partial(partial(Scaling.__call__), Scaling())), "__call__"),
        ):
            assert f.__name__ == name and torch.equal(f(x), 3 * x)


def test_inside_a_per_device_function_it_is_the_function():
    inner = sl.jit(lambda y: y * 2)
    with mesh(dp=2):
        run = sl.shard_map(lambda x: inner(x) + 1, in_specs=None, out_specs="n/dp")
        for f in (run, sl.jit(run), sl.jit(lambda x: sl.jit(run)(x))):
            assert torch.equal(sl.gather(f(arange(4, spec="n/dp"))), 2 * torch.arange(4, dtype=F64) + 1)
    assert inner.traces == []


def test_too_many_traces():
    f = sl.jit(doubled, max_traces=2)
    with mesh(dp=1):
        f(arange(1))
        f(arange(2))
        with pytest.raises(sl.ShardError, match="doubled was traced for 2 signatures, which is max_traces"):
            f(arange(3))


def test_arguments_that_are_not_hashable():
    import numpy

    with mesh(dp=1), pytest.raises(sl.SpecError, match=r"doubled: argument 0, `a`, is a ndarray; jit takes tensors"):
        sl.jit(doubled)({"a": numpy.ones(2)})
    with mesh(dp=1):
        with pytest.raises(sl.SpecError, match=r"layout torch.sparse_coo goes into jit, which takes strided ones"):
            sl.jit(lambda x: x * 2)(torch.eye(2).to_sparse())
        with pytest.raises(
            sl.SpecError, match=r"<lambda>: result `a\.1` is a set; jit gives tensors, arrays and hashable"
        ):
            sl.jit(lambda x: {"a": [x, {x}]})(torch.ones(2))
        with pytest.raises(sl.SpecError, match="the pass `<lambda>` returns None: a pass returns the GraphModule"):
            sl.jit(lambda x: x * 2, passes=[lambda module: None])(torch.ones(2))  # type: ignore[arg-type, return-value]


def test_an_array_of_another_mesh():
    with mesh(dp=4):
        x = arange(4, spec="n/dp")
    said = r"lies on Mesh\(dp=4, simulated\), the current mesh is Mesh\(dp=2, simulated\): call it under `with`"
    with mesh(dp=2), pytest.raises(sl.ShardError, match=said):
        sl.jit(doubled)(x)


# ---- results


def test_results_are_arrays_plain_tensors_and_constants():
    def f(x: Any, plain: Tensor, n: int) -> Any:
        both = sl.shard_map(lambda a, b: (a + b.sum(), b + 1), in_specs=None, out_specs=("n/dp", "..."))(x, plain)
        return {"array": both[0], "whole": sl.gather(both[1]), "n": n, "none": None, "text": "as it is"}

    with mesh(dp=2):
        out = sl.jit(f)(arange(4, spec="n/dp"), torch.ones(3, dtype=F64), 7)
        assert type(out["whole"]) is Tensor and torch.equal(out["whole"], torch.full((3,), 2.0, dtype=F64))
        assert str(out["array"].spec) == "n/dp" and torch.equal(
            sl.gather(out["array"]), torch.arange(4.0, dtype=F64) + 3
        )
        assert (out["n"], out["none"], out["text"]) == (7, None, "as it is")


def test_attributes_of_the_function_stay():
    step = sl.jit(sl.step(loss, sl.optim.sgd(0.1)))
    assert step.__name__ == "loss" and callable(step.init)
    with pytest.raises(AttributeError):
        step.nothing  # noqa: B018


def test_gradients_are_not_recorded():
    w = torch.ones(2, dtype=F64, requires_grad=True)
    with mesh(dp=1):
        assert not sl.jit(lambda x: sl.gather(doubled(x)))(w).requires_grad


# ---- donation


def test_a_donated_tree_is_gone():
    f = sl.jit(doubled, donate_argnums=0)
    with mesh(dp=2):
        x, kept = {"a": arange(4, spec="n/dp")}, arange(4, spec="n/dp")
        y = f(x)
        assert torch.equal(sl.gather(y["a"]), 2 * torch.arange(4.0, dtype=F64))
        said = r"this array \(`n/dp`, shape \(4,\)\) was donated to a jitted function and is gone: use what"
        for use in (f, sl.gather, doubled, lambda t: sl.local(t, 0), lambda t: sl.reshard(t, "n")):
            with pytest.raises(sl.DonatedError, match=said):
                use(x)
        assert "donated" in repr(x["a"])
        assert torch.equal(sl.gather(f({"a": kept})["a"]), sl.gather(y["a"])) and len(f.traces) == 1


def test_what_is_not_donated_is_untouched():
    with mesh(dp=2):
        step = sl.jit(sl.step(loss, sl.optim.adamw(0.1, weight_decay=0.1), clip=0.1, accumulate=2))
        state = step.init(
            sl.shard({"w": torch.ones(4, 3, dtype=F64), "b": torch.ones((), dtype=F64)}, {"w": "m/dp n", "b": ""})
        )
        batch = arange(4, 4, spec="batch/dp m")
        before = [s.clone() for x in tree.leaves((state, batch)) for s in x.shards]
        one, _ = step(state, batch)
        two, _ = step(state, batch)
        assert all(
            torch.equal(a, b)
            for a, b in zip(before, [s for x in tree.leaves((state, batch)) for s in x.shards], strict=True)
        )
        assert all(
            torch.equal(a, b) for a, b in zip(tree.leaves(sl.gather(one)), tree.leaves(sl.gather(two)), strict=True)
        )
        held = {s.untyped_storage()._cdata for x in tree.leaves((state, batch)) for s in x.shards}
        assert not held & {s.untyped_storage()._cdata for x in tree.leaves((one.params, one.opt.mu)) for s in x.shards}


@pytest.mark.parametrize("donate", [(), 0])
def test_plain_arguments_are_not_written_into(donate):
    def f(x: Tensor) -> Tensor:
        x.view(-1)[1:].add_(1)  # the line that is named
        return x * 2

    x = torch.ones(3)
    with (
        mesh(dp=2),
        pytest.raises(sl.SpecError, match=r"f: `add_` writes in place into the argument `0` at .*test_jit") as e,
    ):
        sl.jit(f, donate_argnums=donate)(x)
    assert "x.view(-1)[1:].add_(1)" in str(e.value) and torch.equal(x, torch.ones(3))


def test_shared_storage_is_not_donated():
    f = sl.jit(doubled, donate_argnums=0)
    with mesh(dp=2):
        x = arange(4, spec="n/dp")
        alias = sl.Array([s.view(-1) for s in x.shards], x.spec, x.shape, x.mesh)
        said = r"doubled: argument 0, `b` shares storage with argument 0, `a`, which is donated: clone one of them"
        with pytest.raises(sl.ShardError, match=said):
            f({"a": x, "b": alias})
        two = sl.jit(lambda a, b: (doubled(a), doubled(b)), donate_argnums=(0, 1))
        with pytest.raises(sl.ShardError, match="argument 1 shares storage with argument 0, which is donated"):
            two(x, alias)
        kept = sl.jit(lambda a, b: (doubled(a), doubled(b)), donate_argnums=0)
        with pytest.raises(sl.ShardError, match="argument 1 shares storage with argument 0, which is donated"):
            kept(x, alias)
        with pytest.raises(sl.ShardError, match="argument 1 shares storage with argument 0, which is donated"):
            kept(x, x)
        assert torch.equal(sl.gather(x), torch.arange(4.0, dtype=F64))


def test_nothing_is_donated_when_tracing_fails():
    with mesh(dp=2):
        x = arange(4, spec="n/dp")
        with pytest.raises(ZeroDivisionError):
            sl.jit(lambda y: 1 // 0, donate_argnums=0)(x)
        assert sl.gather(x).sum() == 6


# ---- Python that looks at values


def test_decisions_on_values_are_errors():
    def looks(x: Tensor) -> Tensor:
        return x * 2 if sl.psum(x.sum(), "dp") > 0 else x

    f = sl.jit(sl.shard_map(looks, in_specs=None, out_specs=None))
    with mesh(dp=2):
        with pytest.raises(
            sl.SpecError,
            match=re.escape("looks takes a Python decision on a tensor's value (.item(), bool(), `if x > 0`)"),
        ) as e:
            f(arange(4, spec="n/dp"))
        assert 'in looks: return x * 2 if sl.psum(x.sum(), "dp") > 0 else x' in e.value.__notes__[0]
        assert f.traces == []

    def item(p: Any, batch: Tensor) -> sl.Mean:
        return sl.Mean.of("batch/dp m", (batch @ p["w"]) * float(p["b"]))

    with mesh(dp=2):
        step = sl.jit(sl.step(item, sl.optim.sgd(0.1)))
        state = step.init(sl.shard({"w": torch.ones(4, 3), "b": torch.ones(())}, {"w": "m n", "b": ""}))
        with pytest.raises(sl.SpecError, match="item takes a Python decision"):
            step(state, arange(4, 4, spec="batch/dp m", dtype=torch.float32))


# ---- programs


def loss(p: Any, batch: Tensor) -> sl.Mean:
    w = sl.gather(p["w"], "dp")
    return sl.Mean.of("batch/dp n", torch.tanh(batch @ w) * p["b"])


def started(step: Any, rows: int = 16) -> Any:
    params = {"w": torch.arange(12.0, dtype=F64).view(4, 3) / 12, "b": torch.ones((), dtype=F64)}
    return step.init(sl.shard(params, {"w": "m/dp n", "b": ""})), sl.shard(
        torch.arange(rows * 4, dtype=F64).view(rows, 4) / 50, "batch/dp m"
    )


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_micro_batches_are_calls_of_one_graph(stage):
    sizes, texts = [], []
    with mesh(dp=2):
        for count in (1, 2, 8):
            step = sl.jit(
                sl.step(
                    loss, sl.optim.sgd(0.1), layout=sl.zero({"w": "m/dp n", "b": ""}, stage=stage), accumulate=count
                )
            )
            program = step.lower(*started(step)).program
            assert list(program) == ["step", "microbatch"][: 1 + (count > 1)]
            calls = [n.target for n in program["step"].graph.nodes if n.op == "call_module"]
            assert calls == ["microbatch"] * (count if count > 1 else 0)
            if count > 1:
                sizes.append(len(program["microbatch"].graph.nodes))
                assert all(n.op != "call_module" for n in program["microbatch"].graph.nodes)
            texts.append(step.traces[0].as_text())
    assert sizes[0] == sizes[1]
    assert (
        texts[1].count("def microbatch(") == 1
        and texts[1].count(" = microbatch(") == 2
        and texts[2].count(" = microbatch(") == 8
    )


def test_two_steps_in_one_program():
    def other(p: Any, batch: Tensor) -> sl.Mean:
        return 2 * loss(p, batch)

    one, two = (sl.step(f, sl.optim.sgd(0.1), accumulate=2) for f in (loss, other))
    with mesh(dp=2):
        both = sl.jit(lambda state, batch: (one(state, batch)[0].params, two(state, batch)[0].params))
        state, batch = started(one)
        for found, step in zip(both(state, batch), (one, two), strict=True):
            want = step(state, batch)[0].params
            assert all(torch.equal(a, b) for a, b in zip(*map(tree.leaves, sl.gather((found, want))), strict=True))
        assert list(both.traces[0].program) == ["step", "microbatch", "microbatch_1"]


@pytest.mark.parametrize("axes", [dict(dp=1), dict(dp=2), dict(dp=4)])
def test_lockstep_gives_what_eager_gives(axes):
    with mesh(**axes):
        eager = sl.step(loss, sl.optim.adamw(0.1, weight_decay=0.1), clip=0.01, accumulate=2)
        found = []
        for step in (eager, sl.jit(eager)):
            state, batch = started(step)
            for _ in range(2):
                state, metrics = step(state, batch)
            found.append(tree.leaves((sl.gather(state), metrics)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_lower_takes_abstract_arrays():
    with mesh(dp=2):
        step = sl.jit(sl.step(loss, sl.optim.sgd(0.1), accumulate=2))
        abstract = sl.abstract(started, step)
        low = step.lower(*abstract)
        assert step.lower(*started(step)) is low and low.seconds > 0
        assert {c.op for c in low.collectives()} == {"psum", "all_gather", "psum_scatter"}
        assert {c.times for c in low.collectives()} == {1, 2}


def test_an_unknown_backend():
    with pytest.raises(sl.SpecError, match=r"unknown backend `triton`; there are .* and `cudagraph`"):
        sl.jit(doubled, backend="triton")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("backend", ["regional", "inductor"])
def test_compiled_backends(backend, accumulate):
    with mesh(dp=1):
        found = []
        for each in ("graph", backend):
            step = sl.step(loss, sl.optim.adamw(0.1), clip=0.01, accumulate=accumulate)
            step = sl.jit(step, backend=each, donate_argnums=0)
            state, batch = started(step)
            for _ in range(2):
                state, metrics = step(state, batch)
            found.append(tree.leaves((sl.gather(state), metrics)))
        assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(*found, strict=True))
