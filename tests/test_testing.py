"""sl.testing: what is right passes, every kind of fault is found and named."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Net
from torch import Tensor

import shardlib as sl
from shardlib import optim, tree
from shardlib.testing import functions
from shardlib.testing.compare import difference
from shardlib.testing.server import served

GRID = dict(dp=2, tp=2)


# ---- check


def matmul_25d(a: Tensor, b: Tensor) -> Tensor:
    """Blocks of a square grid, which copies on `depth` share among them (Solomonik and Demmel 2011)."""
    q, c = sl.axis_size("row"), sl.axis_size("depth")
    ranks = [(d, i, j) for d in range(c) for i in range(q) for j in range(q)]

    def flat(d: int, i: int, j: int) -> int:
        return (d * q + i % q) * q + j % q

    grid = ("depth", "row", "col")
    a = sl.ppermute(a, grid, [(flat(d, i, i + j + d * q // c), flat(d, i, j)) for d, i, j in ranks])
    b = sl.ppermute(b, grid, [(flat(d, i + j + d * q // c, j), flat(d, i, j)) for d, i, j in ranks])
    y: Any = 0
    for _ in range(q // c):
        y = y + a @ b
        a, b = sl.ppermute(a, "col", shift=-1), sl.ppermute(b, "row", shift=-1)
    return sl.psum("m/row n/col +depth -> m/row n/col", y)


SQUARE = [
    m
    for n in (1, 4, 8)
    for m in sl.testing.meshes(n, "depth", "row", "col")
    if m["row"] == m["col"] and m["row"] % m["depth"] == 0
]


@pytest.mark.parametrize("mesh", SQUARE)
def test_matmul(mesh: Any) -> None:
    sl.testing.check(
        matmul_25d,
        torch.matmul,
        mesh=mesh,
        in_specs=("m/row k/col", "k/row n/col"),
        out_specs="m/row n/col",
        sizes=dict(m=12, k=12, n=8),
    )


def test_meshes_are_all_there_the_most_even_first() -> None:
    found = sl.testing.meshes(8, "a", "b", "c")
    assert found[0] == dict(a=2, b=2, c=2) and found[-1] == dict(a=1, b=1, c=8) and len(found) == 10
    assert [getattr(m, "__name__", "") for m in sl.testing.meshes(6, "a", "b")] == [
        "a=3,b=2",
        "a=2,b=3",
        "a=6,b=1",
        "a=1,b=6",
    ]
    assert sl.testing.meshes(5, "a") == [dict(a=5)]


def test_sizes_are_odd_then_even_multiples_of_the_ways_and_distinct() -> None:
    seen = []

    def ref(x: Tensor, y: Tensor) -> Tensor:
        seen.append((*x.shape, *y.shape))
        return x.sum() * y

    def f(x: Tensor, y: Tensor) -> Tensor:
        return sl.psum(x.sum(), ("dp", "tp")) * sl.all_gather("b/tp/dp -> b", y, invariant=True)

    sl.testing.check(f, ref, mesh=GRID, in_specs=("a/dp 7 c/tp", "b/tp/dp"), out_specs="b")
    assert list(dict.fromkeys(seen)) == [(6, 7, 10, 28), (4, 7, 8, 24)]


def test_trees_classes_constants_and_sums_are_arguments_and_results() -> None:
    @sl.pytree
    class Layer:
        w: Tensor = sl.spec("model/dp hidden/tp")
        name: str = sl.static(default="x")

    @sl.pytree
    class Model:
        layers: list[Layer] = sl.stack("layers")

    def f(m: Model, x: dict[str, Tensor]) -> dict[str, Any]:
        ws = [sl.gather(layer, "dp").w for layer in m.layers]
        y = sl.psum_scatter("rows model +dp -> rows/dp model", x["sum"])
        made = [y @ w for w in ws]
        return {"top": y.argmax(1), "made": made, "part": sl.pending(made[0].sum(), ("dp", "tp")), "n": len(ws)}

    def ref(m: Model, x: dict[str, Tensor]) -> dict[str, Any]:
        y, ws = x["sum"], [layer.w for layer in m.layers]
        made = [y @ w for w in ws]
        return {"top": y.argmax(1), "made": made, "part": made[0].sum(), "n": len(ws)}

    out = {"top": "rows/dp", "made": "rows/dp hidden/tp", "part": "+dp +tp", "n": ""}
    specs = (Model, {"sum": "rows model +dp"})
    sl.testing.check(f, ref, mesh=GRID, in_specs=specs, out_specs=out, sizes=dict(layers=3))

    def lost(m: Model, x: dict[str, Tensor]) -> dict[str, Any]:
        return f(m, {"sum": x["sum"].detach()})

    with pytest.raises(AssertionError, match=r"(?s)is not `ref`: the gradient of argument `1.sum` differs.*layers=3"):
        sl.testing.check(lost, ref, mesh=GRID, in_specs=specs, out_specs=out, sizes=dict(layers=3))


def test_given_arguments_may_be_integers() -> None:
    table, at = torch.arange(21.0, dtype=torch.float64).view(7, 3).sin(), torch.tensor([[0, 6], [3, 3], [1, 5], [2, 6]])

    def f(table: Tensor, at: Tensor) -> Tensor:
        return F.embedding(at, table)

    sl.testing.check(
        f,
        lambda t, i: t[i],
        mesh=GRID,
        in_specs=("vocab model", "rows/dp seq/tp"),
        out_specs="rows/dp seq/tp model",
        args=(table, at),
    )
    with pytest.raises(
        AssertionError,
        match=r"(?s)the gradient of argument `0` differs.*at \[6, \d\].*sizes: vocab=7 model=3 rows=4 seq=2",
    ):
        sl.testing.check(
            f,
            lambda t, i: torch.where(i[..., None] == 6, t[i].detach(), t[i]),
            mesh=GRID,
            in_specs=("vocab model", "rows/dp seq/tp"),
            out_specs="rows/dp seq/tp model",
            args=(table, at),
        )
    with pytest.raises(sl.SpecError, match=r"sizes gives `node`, which no spec names .did you mean `nodes`"):
        sl.testing.check(f, f, mesh=GRID, in_specs="nodes/dp", out_specs="nodes/dp", sizes=dict(node=4))
    with pytest.raises(sl.SpecError, match="args= have their sizes"):
        sl.testing.check(f, f, mesh=GRID, in_specs="...", out_specs="...", args=(table, at), sizes=dict(vocab=7))


class Once(torch.autograd.Function):
    """A sine whose gradient is right, and wrong when differentiated again."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return (g.detach() + (g - g.detach()) / 2) * x.cos()


def one_rank_off(x: Tensor) -> Tensor:
    return x + 1e-9 * ((sl.axis_index("dp") == 1) & (torch.arange(x.shape[0]) == 1))[:, None]


FAULTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "value": (
        one_rank_off,
        lambda x: x.clone(),
        r"`one_rank_off` on Mesh\(dp=2,tp=2, simulated\) is not `<lambda>`: the result differs\n"
        r"  largest difference 1e-09 \(of values up to [\d.]+\) at \[4, \d\], held by rank [23]: .*, not .*\n"
        r"  sizes: m=6 n=10",
    ),
    "plain reduction over a split dimension": (lambda x: x.softmax(0), lambda x: x.softmax(0), "the result differs"),
    "gradient": (
        lambda x: x.detach() * x,
        lambda x: x * x,
        r"the gradient of argument `0` differs\n  largest difference .* at \[\d, \d\], held by rank",
    ),
    "transpose": (lambda x: Once.apply(x), torch.sin, r"adjoint identity differs\n  <J dx, c> is .*, <dx, J\^T c> is"),
    "dtype": (lambda x: x.float(), lambda x: x, r"shape \(6, 10\) and torch.float32, not \(6, 10\) and torch.float64"),
    "shape": (lambda x: x[:, :1], lambda x: x, r"it has shape \(6, 2\) and torch.float64, not \(6, 10\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    f, ref, message = FAULTS[name]
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        sl.testing.check(f, ref, mesh=GRID, in_specs="m/dp n/tp", out_specs="m/dp n/tp")


def test_a_fault_that_jit_alone_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda xs, cs: f([sl.shard(2 * sl.gather(x), x.spec) for x in xs], cs)

    monkeypatch.setattr(functions, "jit", doubled)
    with pytest.raises(
        AssertionError, match=r"on Mesh\(dp=2, simulated\) under jit is not `clone`: the result differs"
    ):
        sl.testing.check(lambda x: x + 0, torch.clone, mesh=dict(dp=2), in_specs="m/dp", out_specs="m/dp")


def test_a_backward_without_a_derivative() -> None:
    sl.testing.check(Once.apply, torch.sin, mesh=GRID, in_specs="m/dp n/tp", out_specs="m/dp n/tp", adjoint=False)


def test_other_errors_say_the_sizes() -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim") as error:
        sl.testing.check(
            lambda x: x @ x, torch.clone, mesh=GRID, in_specs="m/dp n/tp", out_specs="...", sizes=dict(m=2)
        )
    assert "in testing.check with sizes m=2 n=6 on Mesh(dp=2,tp=2, simulated)" in error.value.__notes__


def test_a_permuted_invariant_value_has_the_sum_as_gradient() -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        return sl.ppermute(w, ("dp", "tp"), shift=1) * x

    sl.testing.check(f, torch.mul, mesh=GRID, in_specs=("n", "m/dp/tp n"), out_specs="m/dp/tp n")


def test_ranks_that_differ_in_what_should_be_equal_are_named() -> None:
    with sl.make_mesh(dp=2, simulate=True) as mesh:
        one = sl.Array([torch.zeros(2), torch.tensor([0.0, 1.0])], sl.shard(torch.zeros(2), "n").spec, (2,), mesh)
    assert (
        difference(one, torch.zeros(2)) == "largest difference 1 (of values up to 0) at [1], held by rank 1: 1, not 0"
    )
    assert difference(one, torch.tensor([0.0, torch.nan])) == (
        "largest difference inf (of values up to 0) at [1], held by ranks 0 and 1: 0, not nan"
    )
    both = sl.Array([torch.tensor([torch.nan, torch.inf])] * 2, one.spec, (2,), mesh)
    assert difference(both, torch.tensor([torch.nan, torch.inf])) is None
    assert difference(3, 4) == "it is 3, not 4" and difference("a", "a") is None


# ---- check_loss

NET = Net(layers=1, split_vocab=True, vocab=8)


def net_specs() -> Any:
    shapes = NET.shapes()
    block = {n: sl.stack(s, "layers") for n, (s, _) in shapes.pop("block").items()}
    return {n: s for n, (s, _) in shapes.items()} | {"blocks": block}


def check_net(loss: Callable[..., Any], **options: Any) -> None:
    with sl.make_mesh(dp=3, tp=1, simulate=True):  # the arrays may lie on any mesh
        params, batch = sl.shard(NET.params(), net_specs()), sl.shard(NET.batch(12, 2), NET.batch_spec)
    sl.testing.check_loss(loss, params, batch, **options)


def test_a_loss_is_what_it_is_on_one_rank() -> None:
    check_net(NET.loss, mesh=GRID, layout=sl.zero(net_specs(), stage=2), accumulate=3)


def test_a_loss_that_is_not() -> None:
    def scaled(p: Any, b: Any) -> Any:
        return NET.loss(p, b) * sl.axis_size("tp")

    message = (
        r"(?s)`scaled` on Mesh\(dp=1,tp=2, simulated\) is not what it is on one rank\n  the loss differs: .*\n"
        r"  the gradient of `blocks.b_in` differs: largest difference .* held by rank \d: [^\n]*$"
    )
    with pytest.raises(AssertionError, match=message):
        check_net(scaled, mesh=dict(dp=1, tp=2))

    def lost(p: Any, b: Any) -> Any:
        head = p["embed"] if sl.axis_size("dp") == 1 else sl.gather(p["embed"], ()).detach()
        return NET.loss({**p, "embed": head}, b)

    with pytest.raises(AssertionError, match=r"one rank\n  the gradient of `embed` differs"):
        check_net(lost, mesh=dict(dp=2, tp=1))


@sl.pytree
class Mlp:
    w_in: Tensor = sl.spec("model/dp hidden/tp")
    w_out: Tensor = sl.spec("hidden/tp model/dp")


@sl.pytree
class Rows:
    x: Tensor = sl.spec("batch/dp model")


def mlp_loss(w: Mlp, batch: Rows) -> sl.Mean:
    w = sl.gather(w, "dp")
    h = sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", batch.x, w.w_in).tanh()
    y = sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", h, w.w_out)
    return sl.Mean.of("batch/dp model", sl.psum("batch/dp model +tp -> batch/dp model", y) ** 2)


MLP, ROWS = Mlp(w_in=torch.randn(4, 6), w_out=torch.randn(6, 4)), Rows(x=torch.randn(8, 4))


def test_a_loss_of_which_a_part_is_trained() -> None:
    """Leaves that have no gradient: integers, and what is frozen; the message names what is trained."""
    positions = torch.arange(4)

    def loss(p: Any, b: Any) -> sl.Mean:
        w_in = p["w_in"] * (1 + p["at"][:, None])
        h = sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", b.x, w_in).tanh()
        y = sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", h, p["w_out"])
        y = sl.psum("batch/dp model +tp -> batch/dp model", y) * sl.axis_size("dp")
        return sl.Mean.of("batch/dp model", y**2)

    specs = {"w_in": "model hidden/tp", "w_out": "hidden/tp model", "at": "model"}
    with sl.make_mesh(dp=1, tp=1, simulate=True):
        params = sl.shard({"w_in": MLP.w_in, "w_out": MLP.w_out, "at": positions}, specs)
    sl.testing.check_loss(loss, params, ROWS, mesh=dict(dp=1, tp=2), trainable="w_*")
    with pytest.raises(AssertionError, match="the gradient of `w_out` differs"):
        sl.testing.check_loss(loss, params, ROWS, mesh=dict(dp=2, tp=1), trainable="w_out")
    with pytest.raises(sl.TreeError, match="step: trainable: `v` matches no path"):
        sl.testing.check_loss(loss, params, ROWS, mesh=GRID, trainable="v")


def test_plain_trees_with_annotations() -> None:
    sl.testing.check_loss(mlp_loss, MLP, ROWS, mesh=GRID)
    assert type(MLP.w_in) is Tensor


# ---- collectives


def test_collectives_of_a_step_on_any_mesh() -> None:
    train = sl.jit(sl.step(mlp_loss, optim.sgd(0.1), clip=1.0, accumulate=2), donate_argnums=0)
    with sl.make_mesh(dp=1, tp=2, simulate=True):
        state = train.init(sl.shard(MLP))
        abstract = sl.abstract(lambda: state)
    count = {"all_gather:dp": 4, "psum_scatter:dp": 4}
    for s in (state, abstract):
        assert sl.testing.collectives(train, s, ROWS, mesh=dict(dp=4, tp=1)) == count
    assert sl.testing.collectives(train, state, ROWS, mesh=GRID) == count | {"psum:tp": 2}
    scalars = sl.testing.collectives(train, state, ROWS, mesh=dict(dp=4, tp=1), scalars=True)
    assert scalars.items() > count.items() and "psum:dp" in scalars
    assert train.traces == [] and tree.leaves(state.params)[0].shards[0].shape == (4, 3)
    with pytest.raises(sl.MeshError, match=r"argument 0, `params.w_in`: the mesh has no axis `tp`"):
        sl.testing.collectives(train, state, ROWS, mesh=dict(dp=4))


def test_collectives_of_a_function_on_arrays() -> None:
    total = sl.shard_map(lambda m, k: sl.psum(m.w_in.sum(0) * k, "dp"), in_specs=None, out_specs="hidden/tp")
    jitted = sl.jit(lambda m, k: total(m, k), static_argnums=1)
    assert sl.testing.collectives(total, MLP, 2.0, mesh=GRID) == {"psum:dp": 1}
    assert sl.testing.collectives(jitted, MLP, 2.0, mesh=GRID) == {"psum:dp": 1}


# ---- check_optimizer

SGD = optim.sgd(0.1)


def of_gradients(change: Callable[[Tensor, Tensor], Tensor]) -> optim.Optimizer:
    """SGD on changed gradients."""
    return optim.Optimizer(SGD.init, lambda g, s, p: SGD.update(tree.map_(change, g, p), s, p))


def plain(change: Callable[[Tensor], Tensor], init: Callable[[Any], Any] = lambda _: ()) -> optim.Optimizer:
    """SGD in the dtype of the leaf."""
    return optim.Optimizer(init, lambda g, s, p: (tree.map_(lambda g: -0.1 * change(g), g), s))


BROKEN = {
    "state and parameters keep": [
        optim.Optimizer(
            lambda p: {"n": torch.zeros((), dtype=torch.float64)}, lambda g, s, p: (g, {"n": s["n"].float()})
        ),
        optim.Optimizer(lambda p: (), lambda g, s, p: (g, tree.map_(torch.zeros_like, p))),
        plain(lambda g: g[None]),
        optim.Optimizer(lambda p: (), lambda g, s, p: (tree.leaves(g), s)),
    ],
    "updates are the same on every mesh and ZeRO stage, not on": [
        of_gradients(lambda g, p: g / (1 + g.float().norm()).to(g.dtype)),
        of_gradients(lambda g, p: g * p.numel() if p.dim() == 2 else g),
    ],
    "a stacked leaf trains as": [of_gradients(lambda g, p: g + p if p.dim() >= 2 else g)],
    "a 16-bit leaf follows": [plain(lambda g: g)],
    "a gradient of zeros": [of_gradients(lambda g, p: g / g.abs())],
}


@pytest.mark.parametrize(("rule", "number"), [(r, n) for r, made in BROKEN.items() for n in range(len(made))])
def test_broken_optimizers(rule: str, number: int) -> None:
    with pytest.raises(AssertionError, match=f"check_optimizer: {rule}"):
        sl.testing.check_optimizer(BROKEN[rule][number])


# ---- ranks


@sl.testing.ranks(2)
def test_a_test_on_real_ranks() -> None:
    """Everything here works on real ranks, too, and all of them fail together."""
    with sl.make_mesh(dp=2) as mesh:
        sl.testing.check(
            lambda x: sl.psum(x, "dp"),
            lambda x: x.unflatten(0, (2, -1)).sum(0),
            mesh=mesh,
            in_specs="m/dp n",
            out_specs="m n",
        )
        with pytest.raises(AssertionError, match=r"at .*, held by rank 1: "):
            sl.testing.check(one_rank_off, torch.clone, mesh=mesh, in_specs="m/dp n", out_specs="m/dp n")


def test_ranks_give_results_in_order_and_every_traceback() -> None:
    assert sl.testing.ranks(3)(lambda x, y: (dist.get_rank(), x + y))(1, y=2) == [(0, 3), (1, 3), (2, 3)]

    @sl.testing.ranks(3)
    def fails() -> None:
        if dist.get_rank():
            raise KeyError(f"lost {dist.get_rank()}")

    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 3 raised.*KeyError: 'lost 1'.*rank 2.*KeyError: 'lost 2'"):
        fails()


# ---- the server of ranks, which `ranks` asks where torch is built for GPUs


def over_server(n: int, body: Callable[[int], Any], seconds: float = 60) -> list[Any]:
    return [pickle.loads(result) for result in served(n, body, seconds)]


class Told(NamedTuple):
    """A class of this module, which no `sys.path` needs to find."""

    gradient: list[float]
    setting: tuple[Any, ...]


def told(line: Any) -> Told:
    """The gradient of a sum of powers, and what ranks see of the process that asked for them."""
    gradient = torch.func.grad(lambda t: (t.w**t.power).sum())(line)
    return Told(gradient.w.tolist(), (os.getcwd(), os.environ["SERVED"], torch.rand(3).tolist()))


def test_the_server_runs_what_forks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closures, local `@pytree` classes, autograd although it ran here; twice, each time with what was set here."""

    @sl.pytree
    class Line:
        w: Tensor = sl.spec("m/dp")
        power: int = sl.static(default=2)

    def body(rank: int) -> Any:
        with pytest.raises(TypeError, match="missing 1 required"):
            Line()  # type: ignore[call-arg]
        assert type(line) is Line and str(sl.specs(Line).w) == "m/dp"
        return rank, told(line)

    line = Line(w=torch.tensor([3.0, 5.0], dtype=torch.float64))
    monkeypatch.chdir(tmp_path)
    for seed in range(2):
        monkeypatch.setenv("SERVED", str(seed))
        torch.manual_seed(seed)
        found, here = over_server(3, body), told(line)
        assert found == [(rank, here) for rank in range(3)] and here.gradient == [6.0, 10.0]
        assert type(found[0][1]) is Told


def test_the_server_ends_with_its_parent_and_leaves_no_files(tmp_path: Path) -> None:
    """Its output is that of its parent, which is killed: both are gone when the output ends."""
    program = """if True:
        import os, signal
        from shardlib.testing.server import served
        served(1, lambda rank: print("ran", flush=True), 60)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    folder = dict(os.environ, TMPDIR=str(tmp_path), PYTHONPATH=os.pathsep.join(sys.path))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=folder, timeout=120)
    assert (ended.stdout, ended.returncode) == ("ran\n", -signal.SIGKILL), ended.stderr
    assert not [p for p in tmp_path.iterdir() if not p.name.startswith("torchinductor_")]  # torch makes that one


def test_what_cannot_be_sent_is_an_error_here(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"(?s)cannot be sent to their processes: .*lock.*make inside of it what cannot"
    ):
        served(1, lambda rank: lock, 60)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="built for GPUs need cloudpickle: pip install cloudpickle"):
        served(1, abs, 60)


def test_the_server_outlives_its_ranks_and_is_replaced(tmp_path: Path) -> None:
    def fails(rank: int) -> None:
        if rank == 2:
            raise KeyError("lost")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def hangs(rank: int) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        os.kill(here, signal.SIGUSR1)
        time.sleep(600)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 3 died with exit code -9\n.*rank 2 .*KeyError: 'lost'"):
        over_server(3, fails)
    with pytest.raises(AssertionError, match=r"rank 0 of 1 was not done after 0\.1 s"):
        over_server(1, lambda rank: time.sleep(60), seconds=0.1)
    server, here = over_server(1, lambda rank: os.getppid()), os.getpid()
    assert server == over_server(1, lambda rank: os.getppid()) != [here]

    before = signal.signal(signal.SIGUSR1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        over_server(1, hangs, seconds=600)
    signal.signal(signal.SIGUSR1, before)
    assert over_server(1, lambda rank: os.getppid()) != server  # nor the answer that is not wanted any more
    end, status = time.monotonic() + 60, Path("/proc", (tmp_path / "pid").read_text(), "status")
    while time.monotonic() < end and status.exists() and "State:\tZ" not in status.read_text():
        time.sleep(0.1)
    assert time.monotonic() < end
    with pytest.raises(RuntimeError, match="the process that forks the ranks has died; the next call starts another"):
        over_server(1, lambda rank: os.kill(os.getppid(), signal.SIGKILL))
