"""jit: what it takes and gives, programs and their graphs, backends."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from jitted import F64, arange, doubled, loss, mesh, started
from torch import Tensor

import shardlib as sl
from shardlib import tree
from shardlib.graph import program as programs


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
            assert calls == ["microbatch"] * (count - (stage == 0) if count > 1 else 0), "the last sums over ranks"
            if count > 1:
                sizes.append(len(program["microbatch"].graph.nodes))
                assert all(n.op != "call_module" for n in program["microbatch"].graph.nodes)
            texts.append(step.traces[0].as_text())
    assert sizes[0] == sizes[1]
    assert (
        texts[1].count("def microbatch(") == 1
        and texts[1].count(" = microbatch(") == 2 - (stage == 0)
        and texts[2].count(" = microbatch(") == 8 - (stage == 0)
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
@pytest.mark.parametrize("backend", ["regional", "inductor"])
def test_compiled_backends(backend):
    with mesh(dp=1):
        found = []
        for each in ("graph", backend):
            step = sl.step(loss, sl.optim.adamw(0.1), clip=0.01, accumulate=2)
            step = sl.jit(step, backend=each, donate_argnums=0)
            state, batch = started(step)
            for _ in range(2):
                state, metrics = step(state, batch)
            found.append(tree.leaves((sl.gather(state), metrics)))
        assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(*found, strict=True))


def test_generated_code_looks_no_op_up():
    """By its name an op takes longer to call than a small one to run."""
    with mesh(dp=1):
        x = sl.shard(torch.ones(2), "n")
        module = sl.jit(sl.shard_map(lambda x: (x * 2).sin(), in_specs="n", out_specs="n")).lower(x).module
        run: Any = programs._generated(module)
    assert re.search(r"= OP\d\(", run.__self__.code) and "torch.ops." not in run.__self__.code
    assert torch.equal(run([torch.ones(2)])[0], (torch.ones(2) * 2).sin())
