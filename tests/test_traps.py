"""Programs that could go wrong without a word: each is right, eager and jitted, or a clear error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl

F64 = torch.float64


def two(axis: str = "dp") -> sl.Mesh:
    return sl.make_mesh({axis: 2}, simulate=True)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def both(f: Callable[..., Any]) -> list[Callable[..., Any]]:
    return [f, sl.jit(f)]


def linear(w: Any, b: Any) -> sl.Mean:
    return sl.Mean.of("batch/dp o", (b["x"] @ sl.gather(w["w"], "dp")) ** 2)


X, W = torch.arange(16, dtype=F64).reshape(8, 2), torch.arange(4, dtype=F64).reshape(2, 2)

# ---- what is traced for all ranks at once


def test_arrays_made_inside_jit_are_cut_for_every_rank():
    step = sl.step(linear, sl.optim.sgd(1.0))
    with two():
        state = step.init(sl.shard({"w": W}, "i/dp o"))
        for f in both(lambda s, x: step(s, sl.shard({"x": x}, "batch/dp i"))):
            assert f(state, X)[1]["loss"] == ((X @ W) ** 2).mean()
        for f in both(lambda x: sl.shard(sl.gather(x) * 2, "n/dp")):
            assert torch.equal(sl.gather(f(sl.shard(torch.arange(5.0), "n/dp"))), torch.arange(5.0) * 2)
        made = [
            f(sl.random.key(3)) for f in both(lambda k: sl.init(lambda k: sl.random.normal(k, (7,)), "n/dp", key=k))
        ]
        assert torch.equal(*map(sl.gather, made))


def test_arrays_captured_by_jit_are_refused():
    with two():
        params, batch = sl.shard({"w": W}, "i/dp o"), sl.shard({"x": X}, "batch/dp i")
        valid = sl.evaluate(linear)
        with pytest.raises(sl.SpecError, match=r"(?s)`1.w` is an array that a jitted function captured, .*Pass it"):
            sl.jit(lambda b: valid(params, b)[0].value)(batch)
        assert sl.jit(lambda p, b: valid(p, b)[0].value)(params, batch) == ((X @ W) ** 2).mean()


def test_a_class_is_not_drawn_inside_jit():
    @sl.pytree
    class Model:
        w: Tensor = sl.spec("n/dp")

    with two(), pytest.raises(sl.SpecError, match=r"init of a class .* call it outside of jit"):
        sl.jit(lambda k: sl.init(Model, sizes=dict(n=4), key=k))(sl.random.key(0))


def test_jit_inside_jit():
    with two():
        inner = sl.jit(sl.shard_map(lambda x: x * 2, in_specs=None, out_specs="n/dp"))
        x = sl.shard(torch.arange(4.0), "n/dp")
        assert torch.equal(sl.gather(sl.jit(lambda x: inner(inner(x)))(x)), torch.arange(4.0) * 4)


def test_what_one_rank_knew_of_a_result_may_change():
    chosen = [slice(0, 4)]
    with sl.make_mesh(dp=1, simulate=True):
        x = sl.shard(torch.arange(8.0), "n/dp")
        f = sl.shard_map(lambda x, s: x[s], in_specs=None, out_specs="n/dp")
        g = sl.shard_map(lambda x: [x[s] for s in chosen], in_specs=None, out_specs="n/dp")
        assert f(x, slice(0, 4)).shape == (4,) and f(x, slice(0, 2)).shape == (2,)
        assert len(g(x)) == 1
        chosen.append(slice(0, 3))
        assert [y.shape[0] for y in g(x)] == [4, 3]


def test_autocast_around_a_function_is_refused():
    with two():
        x = sl.shard(torch.ones(4, 2), "n/dp k")
        f = sl.shard_map(lambda x: x @ x.mT, in_specs=None, out_specs="n/dp k")
        for run in both(f):
            run(x)
            with torch.autocast("cpu", torch.bfloat16), pytest.raises(sl.SpecError, match=r"inside torch\.autocast"):
                run(x)

        def inside(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return x @ x.mT

        for run in both(sl.shard_map(inside, in_specs=None, out_specs="n/dp k")):
            assert run(x).dtype == torch.bfloat16


# ---- writes


@torch.library.custom_op("traps::add_one_", mutates_args=("x",))
def add_one_(x: Tensor) -> None:
    x.add_(1)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "an op that returns nothing": lambda y: add_one_(y) or y,
    "foreach": lambda y: (torch._foreach_add_([y[:1], y[1:]], 1.0), y)[1],  # type: ignore[attr-defined]
    "through unsafe_split": lambda y: torch.unsafe_split(y, 2)[0].add_(1) * 0 + y.sum(),
    "through chunks": lambda y: [c.mul_(3) for c in y.chunk(2)] and y,
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_kept(name):
    with two():
        x = sl.shard(torch.arange(8, dtype=F64), "n/dp")
        f = sl.shard_map(lambda x: WRITES[name](x * 2), in_specs=None, out_specs="n/dp")
        want = torch.cat([WRITES[name](c * 2) for c in torch.arange(8, dtype=F64).chunk(2)])
        for run in both(f):
            assert torch.equal(sl.gather(run(x)), want)


def running(w: Any, b: Any, extra: Any) -> Any:
    mean, var = (extra[k].clone() for k in ("mean", "var"))
    y = F.batch_norm(b["x"] * w["s"], mean, var, training=True, momentum=0.5)
    mean, var = (sl.pmean(v, "dp") for v in (mean, var))
    return sl.Mean.of("batch/dp i", y**4), sl.Aux(extra={"mean": mean, "var": var})


def test_batch_norm_writes_its_running_statistics():
    step = sl.step(running, sl.optim.sgd(1.0))
    start = {"mean": torch.zeros(2, dtype=F64), "var": torch.ones(2, dtype=F64)}
    want = (0.5 * torch.stack([x.mean(0) for x in X.chunk(2)])).mean(0)
    with two():
        state = step.init(sl.shard({"s": f64(1, 1)}, "i"), extra=sl.shard(start, "i"))
        for run in both(step):
            assert torch.equal(sl.gather(run(state, sl.shard({"x": X}, "batch/dp i"))[0].extra["mean"]), want)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda x: x, "writes in place into an argument"),
        (lambda x: x.clone(), "differs by rank over `dp`, which `i` does not name"),
    ],
)
def test_running_statistics_that_differ_by_rank_are_refused(change, said):
    def loss(w: Any, b: Any, extra: Any) -> Any:
        mean, var = change(extra["mean"]), change(extra["var"])
        y = F.batch_norm(b["x"] * w["s"], mean, var, training=True)
        return sl.Mean.of("batch/dp i", y), sl.Aux(extra={"mean": mean, "var": var})

    step = sl.step(loss, sl.optim.sgd(1.0))
    with two():
        state = step.init(sl.shard({"s": f64(1, 1)}, "i"), extra=sl.shard({"mean": f64(0, 0), "var": f64(1, 1)}, "i"))
        for run in both(step):
            with pytest.raises(sl.SpecError, match=said):
                run(state, sl.shard({"x": X}, "batch/dp i"))


def test_a_leaf_changed_in_place_is_no_leaf():
    with two():
        w = sl.shard(torch.ones(8, 4), "a/dp b")
        with pytest.raises(sl.SpecError, match="no spec says how it is split"):
            sl.shard_map(lambda w: w.clone().t_(), in_specs=None, out_specs=None)(w)


# ---- gradients


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_sum_lost_in_a_function_that_types_do_not_see_into():
    scripted: Any = torch.jit.script(product)

    def loss(w: Any, x: Tensor) -> Any:
        h = sl.psum("n k +tp -> n k", sl.einsum("n h/tp, h/tp k -> n k +tp", x, w["a"]))
        return sl.pending((scripted(h, w["c"]) ** 2).sum(), "tp")

    with two("tp"):
        w = sl.shard({"a": torch.ones(4, 2), "c": torch.ones(2, 4)}, {"a": "h/tp k", "c": "k h/tp"})
        x = sl.shard(torch.ones(3, 4), "n h/tp")
        with pytest.raises(sl.SpecError, match="the gradient of what a psum over `tp` gave differs by rank"):
            sl.shard_map(lambda w, x: sl.grad(loss)(w, x), in_specs=None, out_specs=None)(w, x)


class Copied(torch.autograd.Function):
    """Megatron's copy: sums its cotangent itself."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return sl.psum(g, "dp")


@pytest.mark.parametrize("stage", range(4))
def test_a_sum_made_in_a_custom_backward(stage):
    def loss(w: Any, b: Any) -> sl.Mean:
        return sl.Mean.of("n/dp", b["x"] * Copied.apply(sl.gather(w["w"], "dp")))

    layout = sl.zero({"w": "k"}, stage=stage)
    step = sl.step(loss, sl.optim.sgd(1.0), layout=layout)
    with two(), pytest.raises(sl.SpecError, match="should be pending, it is equal on all ranks: a sum was made"):
        step(step.init(sl.shard({"w": f64(1)}, "k")), sl.shard({"x": f64(1, 2, 3, 4)}, "n/dp"))


@pytest.mark.parametrize("stage", range(4))
def test_a_leaf_without_a_gradient_and_a_penalty(stage):
    def loss(w: Any, b: Any) -> sl.Mean:
        w = sl.gather(w, "dp")
        unused = torch.zeros_like(w["u"]) * 3 + w["u"].detach()
        penalty = sl.Mean((w["w"] ** 2).sum(), 1.0)
        return sl.Mean.of("n/dp", b["x"] * w["w"].sum() + unused.sum()) + 0.5 * penalty

    step = sl.step(loss, sl.optim.sgd(1.0), layout=sl.zero({"w": "k", "u": "k"}, stage=stage), accumulate=2)
    x, w = f64(1, 2, 3, 4), f64(1, 3)
    with two():
        state = step.init(sl.shard({"w": w, "u": f64(0, 0)}, "k"))
        for run in both(step):
            new, metrics = run(state, sl.shard({"x": x}, "n/dp"))
            assert metrics["loss"] == x.mean() * w.sum() + 0.5 * (w**2).sum()
            assert torch.equal(sl.gather(new.params)["w"], w - x.mean() - w)
            assert torch.equal(sl.gather(new.params)["u"], f64(0, 0))
        assert sl.evaluate(loss)(state.params, sl.shard({"x": x}, "n/dp"))[0].value == metrics["loss"]


def test_gather_inside_vmap_is_refused():
    def body(w: Tensor) -> Tensor:
        return torch.vmap(lambda w: sl.gather(w, "dp").sum())(w)

    with two(), pytest.raises(sl.SpecError, match=r"inside vmap one is hidden, .*gather it outside of vmap"):
        sl.shard_map(body, in_specs=None, out_specs=None)(sl.shard(torch.ones(3, 4, 2), "l i/dp o"))


# ---- steps


def test_a_weight_that_changes_between_micro_batches_is_refused():
    def loss(w: Any, b: Any, extra: Any) -> Any:
        n = extra["n"] + 1
        weight = sl.pending(n + 0 * b["x"].sum(), "dp")
        return sl.Mean(sl.pending((b["x"] * w["s"]).sum(), "dp"), weight), sl.Aux(extra={"n": n})

    with two():
        for count, said in ((1, None), (2, "the weight of the loss depends on `extra`")):
            step = sl.step(loss, sl.optim.sgd(1.0), accumulate=count)
            state = step.init(sl.shard({"s": f64(1)[0]}, ""), extra=sl.shard({"n": f64(0)[0]}, ""))
            batch = sl.shard({"x": f64(1, 2, 3, 4)}, "n/dp")
            if said is None:
                assert step(state, batch)[1]["loss"] == 10 / 2
                continue
            with pytest.raises(sl.SpecError, match=said):
                step(state, batch)


def test_coefficients_that_change_are_refused():
    scale = [1.0]
    with two():
        step = sl.step(lambda w, b: scale[0] * sl.Mean.of("n/dp", b["x"] * w["w"]), sl.optim.sgd(1.0))
        state, batch = step.init(sl.shard({"w": f64(1)[0]}, "")), sl.shard({"x": f64(1, 1)}, "n/dp")
        step(state, batch)
        scale[0] = 0.0
        with pytest.raises(sl.SpecError, match=r"coefficients of the loss's terms are \(0.0,\), they were \(1.0,\)"):
            step(state, batch)


def test_micro_batches_are_cut_where_the_batch_is():
    def loss(w: Any, b: Any) -> sl.Mean:
        return sl.Mean.of("batch/dp seq", (b["tokens"] * w["s"] + b["pos"]).cumsum(1) ** 2)

    batch = {"pos": f64(1, 2), "tokens": X}
    found = []
    with two():
        for count in (1, 2):
            step = sl.step(loss, sl.optim.sgd(1.0), accumulate=count)
            state = step.init(sl.shard({"s": f64(1)[0]}, ""))
            found.append(step(state, sl.shard(batch, {"pos": "seq", "tokens": "batch/dp seq"}))[1]["loss"].item())
    assert found[0] == pytest.approx(found[1], rel=1e-14) and found[0] == ((X + batch["pos"]).cumsum(1) ** 2).mean()


def test_arguments_of_the_wrong_kind():
    with two(), pytest.raises(sl.SpecError, match="step: accumulate= is a number of pieces, not '2'"):
        step = sl.step(linear, sl.optim.sgd(1.0), accumulate="2")  # type: ignore[arg-type]
        step(step.init(sl.shard({"w": W}, "i o")), sl.shard({"x": X}, "batch/dp i"))
    with pytest.raises(sl.SpecError, match="layout='zero3'"):
        sl.step(linear, sl.optim.sgd(1.0), layout="zero3")  # type: ignore[arg-type]
    with pytest.raises(sl.MeshError, match="found 'dp=2'"):
        sl.make_mesh("dp=2")  # type: ignore[arg-type]
    with two(), pytest.raises(sl.SpecError, match="psum of a bool tensor would be an `or`"):
        sl.shard_map(lambda x: sl.psum(x > 0, "dp"), in_specs=None, out_specs=None)(sl.shard(X, "n/dp k"))


def test_a_target_beyond_the_vocabulary_shows():
    logits, targets = torch.randn(3, 4, dtype=F64), torch.tensor([0, 4, -1])
    with two("tp"):
        f = sl.shard_map(
            lambda x, t: sl.token_loss("n v/tp, n", x, t, per_token=True), in_specs=("n v/tp", "n"), out_specs="n"
        )
        found = sl.gather(f(sl.shard(logits, "n v/tp"), sl.shard(targets, "n")))
    assert found.isnan().tolist() == [False, True, False] and found[2] == 0
