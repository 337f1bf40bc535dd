"""sl.testing.check: what is right passes, every kind of fault is found and named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.testing import functions
from shardlib.testing.compare import difference

GRID = dict(dp=2, tp=2)


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
