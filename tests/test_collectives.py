"""Every collective: its value, its types, the adjoint identity, twice transposed, mapped, its errors."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

import shardlib as sl
from shardlib import collectives as c
from shardlib.autodiff import as_gradient
from shardlib.broadcast import _PSumTo
from shardlib.types import region

DUAL = {"I": "I", "R": "P", "V": "V", "P": "R"}
TRANSPOSED = {"I": "I", "R": "PV", "V": "VR", "P": "R"}  # what data flow finds a cotangent to be
MESHES = (dict(a=2, b=3), dict(a=3, b=1))
ORDERS = (("a",), ("b",), ("a", "b"), ("b", "a"))


class Case(NamedTuple):
    """A collective over some axes: `takes` and `gives` are its letters there, `shape` a local shape that fits."""

    f: Callable[[Tensor], Tensor]
    takes: str
    gives: str
    shape: tuple[int, ...]


def cases(mesh: dict[str, int], axes: tuple[str, ...]) -> dict[str, Case]:
    n = 1
    for a in axes:
        n *= mesh[a]
    out = {
        "pvary": Case(lambda x: sl.pvary(x, axes), "I", "R", (5, 3)),
        "psum": Case(lambda x: sl.psum(x, axes), "P", "I", (5, 3)),
        "psum of varying": Case(lambda x: sl.psum(x, axes), "V", "I", ()),
        "pending": Case(lambda x: sl.pending(x, axes), "V", "P", (5, 0)),
        "ppermute by shift": Case(lambda x: sl.ppermute(x, axes, shift=1), "V", "V", (5, 3)),
        "ppermute to some": Case(lambda x: sl.ppermute(x, axes, [(n - 1, 0)]), "V", "V", (3,)),
        "ppermute of equal": Case(lambda x: sl.ppermute(x, axes, [(0, n - 1)]), "R", "V", (3,)),
        "pbroadcast": Case(lambda x: sl.pbroadcast(x, axes, source=n - 1), "V", "R", (5, 3)),
        "pbroadcast of replicated": Case(lambda x: sl.pbroadcast(x, axes, source=0), "R", "R", ()),
        "psum_to": Case(lambda x: c._apply(_PSumTo, x, axes, (n - 1,)), "P", "V", (5, 3)),
        "pmean": Case(lambda x: sl.pmean(x, axes), "V", "I", (5, 3)),
    }
    for dim in (0, 2):
        shape = tuple(n * 2 if i == dim else i + 3 for i in range(3))
        out |= {
            f"all_gather {dim}": Case(lambda x, d=dim: c._all_gather(x, axes, d), "V", "R", (5, 3, 7)),
            f"all_gather invariant {dim}": Case(lambda x, d=dim: c._all_gather(x, axes, d, True), "V", "I", (5, 3, 7)),
            f"psum_scatter {dim}": Case(lambda x, d=dim: c._psum_scatter(x, axes, d), "P", "V", shape),
            f"own_slice {dim}": Case(lambda x, d=dim: c._own_slice(x, axes, d), "I", "V", shape),
        }
    if axes in (("a",), ("b",), ("a", "b")) or 1 in mesh.values():
        for split, concat in ((0, 1), (2, 0)):
            shape = tuple(n if i == split else i + 2 for i in range(3))
            swap: Callable[..., Tensor] = lambda x, s=split, t=concat: c._all_to_all(x, axes, s, t)  # noqa: E731
            out[f"all_to_all {split} {concat}"] = Case(swap, "V", "V", shape)
    return out


def value(kind: str, shape: tuple[int, ...], seed: float) -> Tensor:
    """A value of a type, different on every rank where it may be, not contiguous where it has several dims."""
    here = region()
    x = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64)
    x = x.view(*reversed(shape)).permute(*reversed(range(len(shape)))) if shape else x.view(())
    x = torch.sin((x + seed) * (1.7 + sl.axis_index(("a", "b"))))
    for axis, letter in zip(here.mesh.shape, kind, strict=True):
        if letter in "IR":
            x = sl.psum(x, axis)
        if letter in "RP":
            x = sl.pvary(x, axis) if letter == "R" else sl.pending(x, axis)
    assert here.type_of(x) == kind
    return x


def dot(x: Tensor, y: Tensor) -> Tensor:
    """The dot product of a value and a cotangent: what is equal counts once, all else on every rank."""
    here, z = region(), (x * y).sum()
    return c._psum(z, here.axes_of(here.type_of(z), "VPR"))


def on(mesh: dict[str, int], body: Callable[[], Any]) -> Any:
    """What `body`, which takes nothing, gives: a tree of invariants."""
    with sl.make_mesh(mesh, simulate=True):
        return sl.gather(sl.shard_map(lambda _: body(), in_specs="", out_specs="...")(torch.zeros(())))


@pytest.mark.parametrize(
    ("mesh", "axes"), [*((MESHES[0], axes) for axes in ORDERS), (MESHES[1], ("b",)), (MESHES[1], ("b", "a"))], ids=str
)
def test_transposes(mesh: dict[str, int], axes: tuple[str, ...]) -> None:
    """<g, A dx> = <A^T g, dx>, A^T^T = A, and A mapped over a dimension is A of each slice."""

    def body() -> dict[str, tuple[Tensor, ...]]:
        here, out = region(), {}
        for name, case in cases(mesh, axes).items():
            kind = here.with_letter("VI", axes, case.takes)
            x, dx = value(kind, case.shape, 0.3), value(kind, case.shape, 2.9)
            y, pull = vjp(case.f, x)  # type: ignore[misc]
            given = here.type_of(y)
            assert given == here.with_letter(kind, axes, case.gives), name
            g = value("".join(DUAL[k] for k in given), tuple(y.shape), 1.1)
            (back,), ahead = pull(g), case.f(dx)
            assert back.shape == x.shape and here.type_of(ahead) == given, name
            found = zip(kind, here.type_of(back), strict=True)
            assert all(f in TRANSPOSED[k] for k, f in found), (name, kind, here.type_of(back))
            assert here.type_of(as_gradient(here, x, back, name)) == "".join(DUAL[k] for k in kind), name
            twice = vjp(lambda g, pull=pull: pull(g)[0], g)[1](dx)[0].clone()
            here.set_type(twice, given)  # that of `pending` is varying: its transpose is the identity
            many = (
                vmap(case.f, in_dims=1, out_dims=1)(torch.stack([x, dx], 1))
                if case.shape
                else vmap(case.f)(torch.stack([x, dx]))
            )
            apart = torch.stack([y, ahead], 1 if case.shape else 0)
            out[name] = (dot(g, ahead), dot(back, dx), largest(twice - ahead), largest(many - apart), largest(apart))
        return out

    for name, (left, right, twice, mapped, size) in on(mesh, body).items():
        assert abs(left - right) <= 1e-12 * max(1.0, abs(left)), name
        assert twice <= 1e-14 * size and mapped <= 1e-14 * size, name


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, on the first jvp
def test_forward_mode() -> None:
    """The tangent of a linear function is its value at the tangent, with the type of the result; mapped, too."""

    def body() -> dict[str, tuple[Tensor, ...]]:
        here, out = region(), {}
        for name, case in cases(MESHES[0], axes := ("a", "b")).items():
            kind = here.with_letter("VI", axes, case.takes)
            x, dx = value(kind, case.shape, 0.3), value(kind, case.shape, 2.9)
            y, ahead = jvp(case.f, (x,), (dx,))  # type: ignore[misc]
            given = here.with_letter(kind, axes, case.gives)
            assert here.type_of(y) == here.type_of(ahead) == given, name
            many = vmap(lambda d, f=case.f, x=x: jvp(f, (x,), (d,))[1])(torch.stack([dx, x]))
            wanted = case.f(dx)
            apart = largest(many - torch.stack([wanted, y]))
            out[name] = largest(ahead - wanted), apart, largest(y - case.f(x)), largest(wanted)
        return out

    with sl.make_mesh(MESHES[0], simulate=True):
        f = sl.jit(sl.shard_map(lambda _: body(), in_specs="", out_specs="..."))
        for name, (*apart, size) in sl.gather(f(torch.zeros(()))).items():
            assert max(apart) <= 1e-14 * size, name


def largest(x: Tensor) -> Tensor:
    """The largest absolute value on any rank, invariant."""
    here = region()
    y = x.abs().amax() if x.numel() else x.new_zeros(())
    y = c._psum(y, here.axes_of(here.type_of(y), "P"))
    return c._apply(c._PMax, y, here.axes_of(here.type_of(y), "VR"))


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_values(mesh: dict[str, int]) -> None:
    """Against plain torch on the global tensor."""
    a, b = mesh["a"], mesh["b"]
    x = torch.arange(a * b * 12 * 5, dtype=torch.float64).view(a * b * 12, 5).sin()

    def body(x: Tensor) -> tuple[Tensor, ...]:
        return (
            sl.all_gather("r/a/b s -> r s", x, invariant=True),
            sl.psum(x, ("a", "b")),
            sl.psum(x, "b"),
            sl.pmax(x, ("b", "a")),
            sl.psum_scatter("q s +a +b -> q/b/a s", x),
            sl.ppermute(x, ("b", "a"), shift=1),
            sl.all_to_all("r/a/b t -> r/a t/b", x[:, :3]),
            sl.pmean(x, "a"),
            sl.pbroadcast({"x": x}, ("b", "a"), source=a * b - 1)["x"],
            sl.pbroadcast(x, "a", source=1),
        )

    specs = ("r s", "r s", "r/a s", "r s", "q/b/a s", "r/b/a s", "r/a t/b", "r/b s", "r/a/b s", "r/a/b s")
    with sl.make_mesh(mesh, simulate=True):
        whole, both, one, top, part, moved, swapped, mean, last, second = sl.gather(
            sl.shard_map(body, in_specs="r/a/b s", out_specs=specs)(sl.shard(x, "r/a/b s"))
        )
    grid = x.view(a, b, 12, 5)
    by_b = grid.transpose(0, 1).reshape(a * b, 12, 5)  # the ranks in the order that b/a counts them
    assert torch.equal(whole, x)
    torch.testing.assert_close(both, grid.sum((0, 1)))
    torch.testing.assert_close(one, grid.sum(1).flatten(0, 1))
    assert torch.equal(top, grid.amax((0, 1)))
    torch.testing.assert_close(part, grid.sum((0, 1)))
    assert torch.equal(moved, by_b.roll(1, 0).flatten(0, 1))
    assert torch.equal(swapped, x[:, :3])
    torch.testing.assert_close(mean, grid.mean(0).flatten(0, 1))
    assert torch.equal(last, x[-12:].repeat(a * b, 1))
    assert torch.equal(second, grid[1:2].expand(a, b, 12, 5).flatten(0, 2))


def test_summa() -> None:
    """Blocks of a matmul: each panel is sent along its row or column (van de Geijn and Watts 1997)."""

    def summa(a: Tensor, b: Tensor) -> Any:
        return sum(
            sl.pbroadcast(a, "col", source=k) @ sl.pbroadcast(b, "row", source=k) for k in range(sl.axis_size("row"))
        )

    specs = ("m/row k/col", "k/row n/col")
    sl.testing.check(summa, torch.matmul, mesh=dict(row=2, col=2), in_specs=specs, out_specs="m/row n/col")


def test_broadcast_on_processes() -> None:
    """Values, and gradients: the sum of the weights of all ranks, on the source."""

    def run() -> Any:
        def body(x: Tensor, w: Tensor) -> Any:
            g = sl.grad(lambda x: sl.psum((sl.pbroadcast(x, ("tp", "dp"), source=1) * w).sum(), ("dp", "tp")))(x)
            return sl.pbroadcast(x, ("tp", "dp"), source=1), g

        with sl.make_mesh(dp=2, tp=2):
            x = sl.shard(torch.arange(8.0), "n/dp/tp")
            return sl.gather(sl.shard_map(body, in_specs="n/dp/tp", out_specs="n/dp/tp")(x, x))

    for values, g in on_ranks(4, run):
        assert values.tolist() == [4, 5] * 4 and g.tolist() == [0, 0, 0, 0, 12, 16, 0, 0]


def test_gradients_of_a_known_sum() -> None:
    """C12: y = psum(w x_r), x_r = r + 1: with w entering as invariant dw = 10, replicated outside r + 1 on rank r."""

    def body(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        def loss(w: Tensor) -> Tensor:
            return sl.psum((w * x).sum(), "dp")

        apart = grad(loss)(sl.pvary(w, "dp"))
        return grad(loss)(w), sl.grad(loss)(w), apart.reshape(1), sl.psum(apart, "dp")

    with sl.make_mesh(dp=4, simulate=True):
        w, x = torch.tensor(2.0), sl.shard(torch.arange(4.0) + 1, "x/dp")
        out = sl.gather(sl.shard_map(body, in_specs=("", "x/dp"), out_specs=("", "", "x/dp", ""))(w, x))
    assert [v.tolist() for v in out] == [10, 10, [1, 2, 3, 4], 10]


def run(body: Callable[[Tensor, Tensor], Any], out: str = "...") -> Any:
    """`body(x, w)` on dp=2, tp=2: x varying over dp, w invariant."""
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        x = sl.shard(torch.arange(12.0).view(4, 3), "b/dp d")
        return sl.gather(sl.shard_map(body, in_specs=("b/dp d", "d"), out_specs=out)(x, torch.ones(3)))


ERRORS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "psum of invariant": (
        lambda x, w: sl.psum(w, "dp"),
        r"psum over `dp`: the value is f32\[3\] equal on all ranks \(`d`\)",
    ),
    "second psum": (
        lambda x, w: sl.psum(sl.psum(x, "dp"), "dp"),
        r"leave the psum out; if 2 times the value is meant: x \* sl.axis_size\('dp'\)",
    ),
    "psum of replicated": (
        lambda x, w: sl.psum(sl.pvary(w, "tp"), "tp"),
        "psum over `tp`: the value is .* replicated over tp",
    ),
    "pmean of invariant": (lambda x, w: sl.pmean(w, "dp"), "pmean over `dp`: the value is f32.*leave the pmean out$"),
    "pending invariant": (
        lambda x, w: sl.pending(w, "dp"),
        "pending over `dp`: the value is .*the sum would count it once per rank",
    ),
    "pmax of pending": (
        lambda x, w: sl.pmax(sl.pending(x, "dp"), "dp"),
        "pmax over `dp`: the value is .*pending over dp",
    ),
    "pmax over another axis": (
        lambda x, w: sl.pmax(sl.pending(x, "dp"), "tp"),
        "psum it first: a maximum is not linear",
    ),
    "gradient of pmax": (
        lambda x, w: grad(lambda x: sl.pmax(x, "dp").sum())(x),
        "pmax has no gradient: detach its operand",
    ),
    "ppermute of pending": (
        lambda x, w: sl.ppermute(sl.pending(x, "dp"), "dp", shift=1),
        "ppermute over `dp`: the value",
    ),
    "ppermute of both": (
        lambda x, w: sl.ppermute(x, "dp", [(0, 1)], shift=1),
        "either a list of .source, destination. or shift=",
    ),
    "ppermute of neither": (lambda x, w: sl.ppermute(x, "dp"), "either a list of .source, destination. or shift="),
    "ppermute twice to one": (lambda x, w: sl.ppermute(x, "dp", [(0, 1), (1, 1)]), "1 stands twice on one side"),
    "ppermute twice from one": (lambda x, w: sl.ppermute(x, "dp", [(0, 1), (0, 0)]), "0 stands twice on one side"),
    "ppermute outside": (lambda x, w: sl.ppermute(x, "dp", [(0, 2)]), r"\(0, 2\) is outside 0..1"),
    "pbroadcast of pending": (lambda x, w: sl.pbroadcast(sl.pending(x, "dp"), "dp", source=0), "psum it first"),
    "pbroadcast from nowhere": (
        lambda x, w: sl.pbroadcast(x, ("dp", "tp"), source=4),
        "pbroadcast over `dp` and `tp`: there is no source 4 in 0..3",
    ),
    "no tensor": (lambda x, w: sl.psum({"a": 3}, "dp"), "psum takes tensors, found int"),
    "no axis": (lambda x, w: sl.axis_index(()), "axis_index needs an axis"),
    "forward mode": (
        lambda x, w: torch.func.jvp(lambda x: sl.psum(x, "dp"), (x,), (x,)),
        "forward mode .* Run it under sl.jit",
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, on the first jvp
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    body, message = ERRORS[name]
    with pytest.raises(sl.SpecError) as e:
        run(body)
    assert re.search(f"(?s){message}", str(e.value))  # the note shows the line, which may hold the message


@pytest.mark.parametrize("axis", ("ddp", "x"))
def test_unknown_axes(axis: str) -> None:
    with pytest.raises(sl.MeshError, match=f"the mesh has no axis `{axis}`.*its axes are `dp` and `tp`"):
        run(lambda x, w: sl.psum(x, axis))


def test_outside_a_region() -> None:
    for use in (lambda: sl.psum(torch.ones(1), "dp"), lambda: sl.axis_index("dp"), lambda: sl.typeof(torch.ones(1))):
        with pytest.raises(sl.SpecError, match="only inside a per-device function"):
            use()


def test_pvary_and_pending_take_what_is_so_already() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        assert sl.pvary(x, "dp") is x and sl.pending(sl.pending(x, "dp"), "dp").shape == x.shape
        twice = sl.pvary(sl.pvary(w, "tp"), ("dp", "tp"))
        assert region().type_of(twice) == "RR"
        assert sl.axis_size("dp") == 2 and sl.axis_size(("dp", "tp")) == 4
        return sl.psum({"a": x, "b": [x, None]}, "dp")["b"][0]

    assert torch.equal(run(body), torch.arange(12.0).view(2, 2, 3).sum(0))


def test_groups_stand_for_axes() -> None:
    x = torch.arange(8.0)
    with sl.make_mesh(dp=dict(r=2, f=2), tp=2, groups=dict(all="tp/r"), simulate=True):

        def body(x: Tensor) -> tuple[Tensor, ...]:
            return sl.all_gather("n/dp/tp -> n", x, invariant=True), sl.psum(x, "dp"), sl.axis_index("all").reshape(1)

        whole, total, index = sl.gather(
            sl.shard_map(body, in_specs="n/dp/tp", out_specs=("n", "n/tp", "n/all/f"))(sl.shard(x, "n/dp/tp"))
        )
    assert (
        torch.equal(whole, x) and torch.equal(total, x.view(4, 2).sum(0)) and index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    )
