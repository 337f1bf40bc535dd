"""scan inside jit: its body is traced once and called; values, gradients and types are those of the loop."""

import contextlib
import io
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import log, passes, tree
from shardlib.cli.hang import report
from shardlib.graph import program as programs
from shardlib.graph.nodes import STARTS, WAIT
from shardlib.scan import lifted

F64 = torch.float64
LAYERS = 5


@sl.pytree
class Layers:
    w: Tensor = sl.spec("layers model/dp hidden/tp")
    out: Tensor = sl.spec("layers hidden/tp model/dp")


def draw(*shape: int) -> Tensor:
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=F64) + len(shape)).view(shape)


class Counted:
    """A body that counts how often it runs."""

    def __init__(self) -> None:
        self.calls = 0

    def block(self, w: Layers, x: Tensor, scale: Tensor) -> Tensor:
        self.calls += 1
        w = sl.gather(w, "dp")
        h = sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", x * scale, w.w)
        y = sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", torch.tanh(h), w.out)
        return x + sl.psum("batch/dp model +tp -> batch/dp model", y)


def loss_of(counted: Counted, remat: bool) -> Callable[..., sl.Mean]:
    block = sl.remat(counted.block) if remat else counted.block

    def loss(params: Any, batch: Tensor) -> sl.Mean:
        layers, scale = params
        scale = sl.gather(scale, "dp") + 1  # a captured value with a gradient
        x, sums = sl.scan(lambda x, w: (block(w, x, scale), x.square().mean(1)), batch * 1, layers)
        total = sl.Mean.of("batch/dp model", x**2)
        return total + 0.1 * sl.Mean.of("layers batch/dp", sums)

    return loss


def trained(
    jitted: bool, stage: int, remat: bool, accumulate: int, layers: int = LAYERS, **options: Any
) -> tuple[Any, int, Any]:
    """State and loss after two steps, how often the body ran, and the program."""
    counted = Counted()
    specs = (sl.specs(Layers), "model")
    layout = sl.zero(specs, stage=stage)
    step = sl.step(loss_of(counted, remat), sl.optim.sgd(0.1), layout=layout, accumulate=accumulate)
    params = Layers(w=draw(layers, 6, 4), out=draw(layers, 4, 6)), draw(6)
    state, batch = step.init(sl.shard(params, specs)), sl.shard(draw(8, 6), "batch/dp model")
    run = sl.jit(step, donate_argnums=0, **options) if jitted else step
    for _ in range(2):
        state, metrics = run(state, batch)
    program = run.traces[0] if jitted else None
    return [*tree.leaves(sl.gather(state.params)), metrics["loss"]], counted.calls, program


@pytest.mark.parametrize(
    ("stage", "remat", "accumulate"), [(0, False, 1), (0, True, 1), (2, False, 2), (3, False, 2), (3, True, 2)]
)
def test_traced_once_and_equal_to_the_loop(stage, remat, accumulate):
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        plain, _, _ = trained(False, stage, remat, accumulate)
        got, calls, program = trained(True, stage, remat, accumulate)
    for a, b in zip(plain, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
    # looked at for its type; traced for the first carry, which has no gradient, and for others; again by remat
    assert calls == 1 + 2 * (1 + remat)
    assert {c.times for c in program.collectives() if c.graph == "layer"} == {accumulate}
    assert {c.times for c in program.collectives() if c.graph == "layer_2"} == {(LAYERS - 1) * accumulate}


def test_on_processes():
    """gloo's own form of a scatter, whose wait is the caller's."""
    with sl.make_mesh(dp=2, tp=1, simulate=True):
        plain = trained(False, 3, True, 2)[0]

    def body() -> Any:
        with sl.make_mesh(dp=2, tp=1):
            return trained(True, 3, True, 2)[0]

    for got in on_ranks(2, body):
        for a, b in zip(plain, got, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_logs_profiles_and_files_of_processes(monkeypatch, tmp_path):
    """What a turn starts and its caller waits for is running until then, also where turns overlap."""
    with sl.make_mesh(dp=2, tp=1, simulate=True):
        plain = trained(False, 3, True, 2)[0]

    def body() -> Any:
        with sl.make_mesh(dp=2, tp=1, timeout=30), contextlib.redirect_stderr(io.StringIO()) as said:
            runs = [trained(True, 3, True, 2, cache=tmp_path / "programs") for _ in range(2)]
            specs = (sl.specs(Layers), "model")
            step = sl.step(loss_of(Counted(), True), sl.optim.sgd(0.1), layout=sl.zero(specs, stage=3))
            state = step.init(sl.shard((Layers(w=draw(LAYERS, 6, 4), out=draw(LAYERS, 4, 6)), draw(6)), specs))
            found = sl.profile(sl.jit(step), state, sl.shard(draw(8, 6), "batch/dp model"), steps=1)
            return [r[0] for r in runs], [r[1] for r in runs], found.waits, said.getvalue()

    monkeypatch.setenv("SHARDLIB_LOG", str(tmp_path / "logs"))
    monkeypatch.setenv("SHARDLIB_DEBUG", "1")
    for rank, (runs, calls, waits, said) in enumerate(on_ranks(2, body)):
        for got in runs:
            for a, b in zip(plain, got, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
        assert calls == [0 if rank else 5, 0] and said == ""  # the first rank traces for all, the next run not at all
        kinds = {name.partition(" of ")[0] for name in waits}  # a turn scatters by an exchange
        assert kinds == {f"{op} over dp" for op in ("all_gather", "all_to_all", "psum_scatter", "psum")}
    logs = log.read(tmp_path / "logs")
    for lines in logs.values():
        running, most = [], 0
        for line in lines:
            running += [line.number] * (line.event == "start")
            if line.event == "done":
                running.remove(line.number)
            most = max(most, len(running))
        assert running == [] and most >= LAYERS - 1
    assert report(logs)[0] == "no rank waits for a collective"


def test_the_schedule_hides_what_turns_send():
    with sl.make_mesh(dp=2, tp=1, simulate=True):
        program = trained(True, 3, True, 1)[2]
    found = program.timeline(sl.Hardware(flops=1e6, memory=1e6, link=1e9, latency=0.0))
    sums = [c for c in found.collectives if c.op == "psum_scatter"]
    assert len(sums) == LAYERS + 1 and [c.exposed > 0 for c in sums[: LAYERS - 1]] == [False] * (LAYERS - 1)


def test_regional_compiles_one_layer(monkeypatch):
    """However many there are; here what would be compiled runs as it is."""
    made: list[Any] = []
    counts = [0]
    monkeypatch.setattr(programs, "_compiled", lambda island: made.append(island) or programs._generated(island))
    with sl.make_mesh(dp=1, tp=1):
        for layers in (3, LAYERS):
            plain, _, _ = trained(True, 0, False, 1, layers)
            got, _, _ = trained(True, 0, False, 1, layers, backend="regional")
            for a, b in zip(plain, got, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
            counts.append(len(made))
    assert 2 < counts[2] - counts[1] <= counts[1]


def test_the_next_layer_is_gathered_while_one_runs():
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        program = trained(True, 3, True, 1)[2]
    told = [
        n.target if n.op == "call_module" else STARTS[n.target]
        for n in program.module.graph.nodes
        if n.op == "call_module" or STARTS.get(n.target) == "all_gather"
    ]
    calls = [i for i, t in enumerate(told) if t.startswith("layer")]
    assert len(calls) == 2 * LAYERS and told.count("all_gather") == 2 * LAYERS + 1  # and `scale`
    for one, other in pairwise(calls[: LAYERS - 1]):
        assert told[one:other].count("all_gather") == 1
    assert told[: calls[0]].count("all_gather") == 3  # `scale`, the first layer, and the next, which it runs beside
    assert "all_gather" not in {c.op for c in program.collectives() if c.graph != "step" and c.axis == "dp"}


def on_dp(body: Callable[..., Any], *args: tuple[Tensor, str], out: Any, jitted: bool) -> Any:
    with sl.make_mesh(dp=2, simulate=True):
        f = sl.shard_map(body, in_specs=tuple(s for _, s in args), out_specs=out)
        return sl.gather((sl.jit(f) if jitted else f)(*(sl.shard(x, s) for x, s in args)))


BODIES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "carry becomes varying": lambda c, x: (c + x, c * 2),
    "integers beside": lambda c, x: (torch.where(torch.arange(3) > 0, c * x, c), None),
    "two results are one": lambda c, x: (c * x, c * x),
    "the carry as it was": lambda c, x: (c, c * x),
    "in place": lambda c, x: ((c * x).sin_().mul_(2), (x * 2).exp_()),
    "in place into views": lambda c, x: ((c * x).sin_(), (x * 1).view(3, 1)[1:].cos_()),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name):
    """Values, and gradients of what is carried, scanned and captured."""

    def body(start: Tensor, xs: Tensor, more: Tensor) -> Any:
        def loss(start: Tensor, xs: Tensor, more: Tensor) -> Tensor:
            last, ys = sl.scan(lambda c, x: BODIES[name](c + more, x), start, xs)
            total = last.sum() + (0 if ys is None else ys.square().sum())
            return sl.pending(total, "dp") if "varying" in sl.typeof(total) else total

        return sl.value_and_grad(loss, (0, 1, 2))(start, xs, more)

    args = (draw(3), "n"), (draw(4, 2, 3).view(4, 6), "layers n/dp"), (draw(3) / 3, "n")
    out = ("", ("n", "layers n/dp", "n"))
    copied = (
        r"scan: in a jitted program `<lambda>` is copied for each turn: `aten\..*_\.default` writes in place into a"
    )
    plain = on_dp(body, *args, out=out, jitted=False)
    with pytest.warns(UserWarning, match=copied) if "in place" in name else contextlib.nullcontext():
        got = on_dp(body, *args, out=out, jitted=True)
    for a, b in zip(tree.leaves(plain), tree.leaves(got), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def normed(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x @ w, (6,))


def attended(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w)[:, None]
    return x + F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]


def sorted_(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).topk(6).values - x.max(-1, keepdim=True).values


def scanned(x: Tensor, w: Tensor) -> Tensor:
    last, ys = sl.scan(lambda x, w: (torch.tanh(x @ w), x.sum(-1, keepdim=True)), x, torch.stack([w, w / 2, w.T]))
    return last + ys.sum(0)


ROWS = [normed, attended, sorted_, scanned, sl.remat(scanned), partial(sl.remat(attended))]


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_ops_of_several_results_and_loops_in_loops_are_traced_once(row):
    """What the backward pass alone reads (the statistics of a norm) is kept, one by one."""

    def body(x: Tensor, ws: Tensor) -> Any:
        def loss(x: Tensor, ws: Tensor) -> Tensor:
            return sl.psum(sl.scan(lambda x, w: (row(x, w), None), x, ws)[0].square().sum(), "dp")

        return sl.value_and_grad(loss, (0, 1))(x, ws)

    with sl.make_mesh(dp=2, simulate=True):
        specs = "b/dp s m", "layers m n"
        run = sl.shard_map(body, in_specs=specs, out_specs=("", specs))
        args = [sl.shard(x, s) for x, s in zip((draw(4, 3, 6), draw(3, 6, 6)), specs, strict=True)]
        jitted = sl.jit(run)
        for a, b in zip(*(tree.leaves(sl.gather(f(*args))) for f in (run, jitted)), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
        calls = [n.target for n in jitted.traces[0].module.graph.nodes if n.op == "call_module"]
    assert len(calls) == 2 * 3


def test_what_must_happen_in_every_turn_does():
    """A nonlocal variable, and a second derivative: the loop runs as it is written."""

    def body(x: Tensor, ws: Tensor) -> Any:
        turns = 0

        def counts(c: Tensor, w: Tensor) -> Any:
            nonlocal turns
            turns += 1
            return c * w + turns, None

        def cubed(w: Tensor) -> Tensor:
            return sl.psum(sl.scan(lambda c, w: (c * w**2, None), x, w)[0].sum(), "dp")

        second = sl.grad(lambda w: sl.grad(cubed)(w).square().sum())(ws)
        return sl.scan(counts, x, ws)[0], second

    args = (draw(4, 3), "b/dp n"), (draw(3, 3), "layers n")
    plain = on_dp(body, *args, out=("b/dp n", "layers n"), jitted=False)
    with pytest.warns(UserWarning, match="copied for each turn: `counts` assigns to a nonlocal variable.*: carry") as w:
        got = on_dp(body, *args, out=("b/dp n", "layers n"), jitted=True)
    assert w[0].filename == __file__
    for a, b in zip(plain, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


TABLE = draw(3)


@pytest.mark.parametrize(
    ("turn", "more", "said"),
    [
        (lambda c, w: ((c[0] * w, c[1] + 1), None), 0, "result `0.1` is 1, which is no tensor"),
        (lambda c, w: ((c[0] * w, c[1]), None), {1}, "a set goes into it, which has no hash"),
        (lambda c, w, t=TABLE: ((c[0] * sl.assume("n", t) * w, c[1]), None), 0, r"an operand f64\[3\] has no type"),
    ],
)
def test_a_body_that_is_copied_for_each_turn_says_why(turn, more, said):
    def body(x: Tensor, ws: Tensor) -> Tensor:
        return sl.scan(turn, (x, more), ws)[0][0]

    args = (draw(4, 3), "b/dp n"), (draw(3, 3), "layers n")
    with pytest.warns(UserWarning, match=f"scan: in a jitted program `<lambda>` is copied for each turn: .*{said}"):
        got = on_dp(body, *args, out="b/dp n", jitted=True)
    torch.testing.assert_close(got, on_dp(body, *args, out="b/dp n", jitted=False), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("derived", [False, True])
def test_what_fails_in_a_body_is_raised_at_its_line_without_another_try(derived):
    calls = []

    def turn(c: Tensor, w: Tensor) -> Any:
        calls.append(1)
        return c @ w.view(7, 1), None  # has 3 elements

    def body(x: Tensor, ws: Tensor) -> Any:
        def total(ws: Tensor) -> Tensor:
            return sl.psum(sl.scan(turn, x, ws)[0].sum(), "dp")

        return sl.grad(total)(ws) if derived else total(ws)

    with pytest.raises(RuntimeError, match="invalid for input of size 3") as e:
        on_dp(body, (draw(4, 3), "b/dp n"), (draw(3, 3), "layers n"), out="layers n", jitted=True)
    assert len(calls) == 1 and "in turn: return c @ w.view(7, 1), None" in e.value.__notes__[0]


def test_errors_are_those_of_the_loop():
    def body(x: Tensor, ws: Tensor) -> Tensor:
        return sl.scan(lambda c, w: (sl.psum("b/dp n +dp -> b/dp n", c), None), x, ws)[0]

    said = []
    for jitted in (False, True):
        with pytest.raises(sl.SpecError) as e:
            on_dp(body, (draw(4, 3), "b/dp n"), (draw(3, 3), "layers n"), out="b/dp n", jitted=jitted)
        said.append(str(e.value))
    assert said[0] == said[1]


def test_dropout_in_micro_batches():
    """The mask counts rows of the whole batch: the number of the micro-batch reaches the body."""

    def loss(w: Tensor, batch: Tensor, key: Tensor) -> sl.Mean:
        drop = partial(sl.dropout, p=0.5)
        x, _ = sl.scan(lambda x, m: (drop("batch/dp n", torch.tanh(x * m), key), None), batch, w)
        return sl.Mean.of("batch/dp n", x)

    found = []
    with sl.make_mesh(dp=2, simulate=True):
        for accumulate, jitted in ((1, False), (2, True), (4, True)):
            step = sl.step(loss, sl.optim.sgd(0.1), accumulate=accumulate)
            state = step.init(sl.shard(draw(3, 4), "layers n"), key=sl.random.key(3))
            state, metrics = (sl.jit(step) if jitted else step)(state, sl.shard(draw(16, 4), "batch/dp n"))
            found.append((sl.gather(state.params), metrics["loss"]))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_prints_of_every_turn(capsys):
    def body(x: Tensor, ws: Tensor) -> Any:
        def turn(c: Tensor, w: Tensor) -> Any:
            sl.debug.print("carry {:.2f}", c.sum())
            return (c * w).T.contiguous().T, None

        return sl.value_and_grad(lambda w: sl.psum(sl.scan(turn, x, w)[0].sum(), "dp"))(ws)

    args = (torch.ones(2, 3, dtype=F64), "b/dp n"), (torch.full((3, 3), 2.0, dtype=F64), "layers n")
    found = []
    for jitted in (False, True):
        value, gradient = on_dp(body, *args, out=("", "layers n"), jitted=jitted)
        assert value == 48 and torch.equal(gradient, torch.full((3, 3), 8.0, dtype=F64))
        found.append(
            sorted(line.split("carry ")[1] for line in capsys.readouterr().out.splitlines() if "carry" in line)
        )
    assert found[0] == found[1] == sorted(["3.00", "6.00", "12.00"] * 2)


def test_lifted_reaches_what_functions_capture():
    a, b, c = draw(1), draw(2), draw(3)

    def inner(x: Tensor, more: Tensor = c) -> Tensor:
        return x + a.sum() + more.sum()

    f = partial(lambda x, pair, g=inner: g(x) * pair["b"].sum(), pair={"b": b})
    found, remade = lifted(f)
    assert {id(x) for x in found} == {id(a), id(b), id(c)}
    other = remade([x * 2 for x in found])
    x = draw(4)
    assert torch.equal(other(x), (x + 2 * a.sum() + 2 * c.sum()) * (2 * b).sum())
    assert torch.equal(f(x), (x + a.sum() + c.sum()) * b.sum())


def test_hoist_is_bitwise():
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        found = []
        for use in ([], [passes.bucket], [passes.bucket, passes.hoist, passes.overlap]):
            counted = Counted()
            specs = (sl.specs(Layers), "model")
            step = sl.step(loss_of(counted, True), sl.optim.sgd(0.1), layout=sl.zero(specs, stage=3))
            params = Layers(w=draw(LAYERS, 6, 4), out=draw(LAYERS, 4, 6)), draw(6)
            state, batch = step.init(sl.shard(params, specs)), sl.shard(draw(8, 6), "batch/dp model")
            state, _ = sl.jit(step, passes=use)(state, batch)
            found.append(tree.leaves(sl.gather(state.params)))
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[2], strict=True))


def counting(nested: bool) -> Callable[..., sl.Mean]:
    """A loss whose weight is counted in a loop."""

    def count(seen: Tensor, x: Tensor) -> Any:
        return seen + (x.abs() > 0.25).double().sum() * torch.tensor(2.0), None

    def counts(seen: Tensor, x: Tensor) -> Any:
        return sl.scan(count, seen, torch.stack([x, x]))[0], None

    def loss(w: Tensor, batch: Tensor) -> sl.Mean:
        seen, _ = sl.scan(counts if nested else count, batch[0].sum() * 0, batch)
        h, _ = sl.scan(lambda h, x: (h + x * w, None), batch[0] * 0, batch)
        return sl.Mean(*sl.pending(((h**2).sum(), seen), "dp"))

    return loss


@pytest.mark.parametrize("nested", [False, True])
def test_a_weight_may_come_out_of_a_loop(nested: bool):
    with sl.make_mesh(dp=2, simulate=True):
        step = sl.step(counting(nested), sl.optim.sgd(0.1))
        state, batch = step.init(sl.shard(draw(3), "model")), sl.shard(draw(4, 8, 3), "seq batch/dp model")
        plain, got = step(state, batch), sl.jit(step)(state, batch)
        assert (
            float(got[1]["tokens"])
            == float(plain[1]["tokens"])
            == (1 + nested) * 2 * (draw(4, 8, 3).abs() > 0.25).sum()
        )
        torch.testing.assert_close(sl.gather(got[0].params), sl.gather(plain[0].params), rtol=1e-12, atol=1e-12)


def test_what_no_turn_takes_is_not_left_on_the_wire():
    """A scatter in the body whose result nobody reads."""

    def body(c: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        return torch.tanh(c), sl.psum_scatter("rows n +tp -> rows/tp n", c)

    def f(x: Tensor) -> Tensor:
        return sl.scan(body, x, None, length=3)[0]

    run = sl.shard_map(f, in_specs="batch model/tp", out_specs="batch model/tp")
    with sl.make_mesh(tp=2, simulate=True):
        x = sl.shard(torch.randn(4, 6, dtype=torch.float64), "batch model/tp")
        lowered = sl.jit(run).lower(x)
        for module in lowered.module.modules():
            for node in getattr(module, "graph", torch.fx.Graph()).nodes:
                if node.target in STARTS:
                    assert any(u.target is WAIT for u in node.users)
        assert lowered.memory().total > 0
        assert torch.equal(sl.gather(sl.jit(run)(x)), sl.gather(run(x)))
