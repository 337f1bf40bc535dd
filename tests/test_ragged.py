"""ragged_all_to_all: values, the way back, transposes of every order, other offsets, what is dropped, errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor
from torch.func import jvp, vjp, vmap

import shardlib as sl
from shardlib import tree
from shardlib.types import region

N, ROWS, CAPACITY = 3, 7, 9
SIZES = torch.tensor([[2, 0, 4], [3, 3, 1], [0, 5, 2]])  # by source, then destination
X = torch.arange(N * ROWS * 2, dtype=torch.float64).view(N, ROWS, 2) + 1


def plain(x: Tensor, sizes: Tensor, starts: Tensor, goals: Tensor, capacity: int, limit: int = 100) -> Tensor:
    """By loops, in one process: (ranks, rows, ...) -> (ranks, capacity, ...)."""
    out = x.new_zeros(len(x), capacity, *x.shape[2:])
    for s in range(len(x)):
        for d in range(len(x)):
            for j in range(min(int(sizes[s, d]), limit)):
                if starts[s, d] + j < x.shape[1] and goals[s, d] + j < capacity:
                    out[d, goals[s, d] + j] = x[s, starts[s, d] + j]
    return out


def before(sizes: Tensor, dim: int) -> Tensor:
    return sizes.cumsum(dim) - sizes


def on(body: Callable[..., Any], *args: Tensor, mesh: sl.Mesh | None = None, jitted: bool = False) -> Any:
    """`body` of each rank's slice of `args` along their first dim; results gathered along theirs."""
    with mesh or sl.make_mesh(ep=N, simulate=True):
        each = sl.shard_map(
            lambda *xs: tree.map_(lambda y: y[None], body(*(x[0] for x in xs))),
            in_specs="r/ep ...",
            out_specs="r/ep ...",
        )
        return sl.gather((sl.jit(each) if jitted else each)(*(sl.shard(x, "r/ep ...") for x in args)))


def there_and_back(x: Tensor, sizes: Tensor) -> Any:
    y, got = sl.ragged_all_to_all({"x": x, "rank": x[:, 0].long()}, "ep", sizes, capacity=CAPACITY)
    back, sent = sl.ragged_all_to_all(y["x"], "ep", got, capacity=ROWS)
    return y, got, back, sent


def check_there_and_back(found: Any) -> None:
    y, got, back, sent = found
    wanted = plain(X, SIZES, before(SIZES, 1), before(SIZES, 0), CAPACITY)
    assert torch.equal(y["x"], wanted) and torch.equal(y["rank"], wanted[..., 0].long())
    assert torch.equal(got, SIZES.T) and torch.equal(sent, SIZES)
    assert torch.equal(back, X * (torch.arange(ROWS) < SIZES.sum(1, keepdim=True))[..., None])


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_there_and_back(jitted: bool) -> None:
    check_there_and_back(on(there_and_back, X, SIZES, jitted=jitted))


def test_on_processes() -> None:
    for found in on_ranks(N, lambda: on(there_and_back, X, SIZES.int(), mesh=sl.make_mesh(ep=N))):
        check_there_and_back(found)


STARTS, GOALS = torch.tensor([[5, 0, 1], [0, 0, 6], [3, 2, 0]]), torch.tensor([[6, 0, 0], [2, 7, 4], [0, 0, 6]])


@pytest.mark.parametrize(("capacity", "limit"), [(9, None), (9, 2), (5, None), (0, None), (9, 0)])
def test_offsets_capacity_and_limit(capacity: int, limit: int | None) -> None:
    """Rows beyond the capacity and the limit, and rows outside x, are dropped."""

    def body(x: Tensor, sizes: Tensor, starts: Tensor, goals: Tensor) -> Tensor:
        more = dict(input_offsets=starts, output_offsets=goals, limit=limit)
        return sl.ragged_all_to_all(x, "ep", sizes, capacity=capacity, **more)[0]  # type: ignore[arg-type]

    sizes = torch.tensor([[3, 0, 4], [3, 2, 2], [0, 5, 2]])
    wanted = plain(X, sizes, STARTS, GOALS, capacity, ROWS if limit is None else limit)
    assert torch.equal(on(body, X, sizes, STARTS, GOALS), wanted)


def test_derivatives_of_every_order() -> None:
    """C13: the adjoint identity, the transpose of the transpose, types, vmap."""

    def body(x: Tensor, sizes: Tensor) -> Any:
        def f(x: Tensor) -> Tensor:
            return sl.ragged_all_to_all(x, "ep", sizes, capacity=CAPACITY)[0]

        y, pull = vjp(f, x)  # type: ignore[misc]
        g, dx = (y + 1).sin(), x.cos()
        (back,), ahead = pull(g), f(dx)
        twice = vjp(lambda g: pull(g)[0], g)[1](dx)[0]
        many = vmap(f, in_dims=1, out_dims=1)(torch.stack([x, dx], 1))
        assert {region().type_of(v) for v in (y, back, ahead, twice, many)} == {"V"}
        equal = sl.grad(lambda w: sl.psum((f(w) * g).sum(), "ep"))(sl.psum(x, "ep"))
        assert region().type_of(equal) == "I"
        return (g * ahead).sum(), (back * dx).sum(), twice - ahead, many - torch.stack([y, ahead], 1), equal

    right, left, twice, many, equal = on(body, X, SIZES)
    torch.testing.assert_close(right.sum(), left.sum(), rtol=1e-13, atol=0)
    assert not twice.any() and not many.any()
    whole = X.sum(0).requires_grad_()
    y = plain(whole.expand(N, ROWS, 2), SIZES, before(SIZES, 1), before(SIZES, 0), CAPACITY)
    g = (plain(X, SIZES, before(SIZES, 1), before(SIZES, 0), CAPACITY) + 1).sin()
    (wanted,) = torch.autograd.grad((y * g).sum(), whole)
    torch.testing.assert_close(equal, wanted.expand(N, ROWS, 2), rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, on the first jvp
def test_forward_mode() -> None:
    def body(x: Tensor, sizes: Tensor) -> Any:
        return jvp(lambda x: sl.ragged_all_to_all(x * x, "ep", sizes, capacity=CAPACITY)[0], (x,), (x.sin(),))[1]

    wanted = plain(2 * X * X.sin(), SIZES, before(SIZES, 1), before(SIZES, 0), CAPACITY)
    assert torch.equal(on(body, X, SIZES, jitted=True), wanted)


def test_a_sum_over_another_axis_stays_pending() -> None:
    def body(x: Tensor, sizes: Tensor) -> Tensor:
        y = sl.ragged_all_to_all(sl.pending(x[0], "tp"), "ep", sizes[0], capacity=CAPACITY)[0]
        assert region().type_of(y) == "VP"
        return sl.psum(y, "tp")[None]

    with sl.make_mesh(ep=N, tp=2, simulate=True):
        f = sl.shard_map(body, in_specs=("r/ep rows d/tp", "r/ep n"), out_specs="r/ep rows d")
        found = sl.gather(f(sl.shard(X, "r/ep rows d/tp"), sl.shard(SIZES, "r/ep n")))
    wanted = plain(X.sum(-1, keepdim=True), SIZES, before(SIZES, 1), before(SIZES, 0), CAPACITY)
    assert torch.equal(found, wanted)


def test_experts_without_a_capacity() -> None:
    """Top-1 routing that drops nothing: tokens sorted by expert, and the results sent back."""

    def dropless(w: Tensor, x: Tensor, expert: Tensor) -> Tensor:
        n, e = sl.axis_size("ep"), w.shape[0]
        order = expert.argsort(stable=True)
        sizes = (expert[:, None] // e == torch.arange(n)).sum(0)
        (rows, which), got = sl.ragged_all_to_all((x[order], expert[order]), "ep", sizes, capacity=n * len(x))
        y = torch.einsum("te,tm,emn->tn", F.one_hot(which % e, e).to(x.dtype), rows, w)
        return sl.ragged_all_to_all(y, "ep", got, capacity=len(x))[0][order.argsort()].tanh()

    expert = torch.tensor([3, 3, 0, 1, 3, 2, 2, 3, 0, 3])
    w, x = torch.arange(60.0).view(4, 3, 5).double().sin(), torch.arange(30.0).view(10, 3).double().cos()
    sl.testing.check(
        dropless,
        lambda w, x, expert: torch.einsum("tm,tmn->tn", x, w[expert]).tanh(),
        mesh=dict(ep=2),
        args=(w, x, expert),
        in_specs=("experts/ep m n", "tokens/ep m", "tokens/ep"),
        out_specs="tokens/ep n",
    )


def test_bytes() -> None:
    """The sizes, and n pieces of `limit` rows."""

    def body(x: Tensor, sizes: Tensor) -> Tensor:
        return sl.ragged_all_to_all(x[0], "ep", sizes[0], capacity=CAPACITY, limit=4)[0][None]

    with sl.make_mesh(ep=N, simulate=True):
        f = sl.jit(sl.shard_map(body, in_specs="r/ep ...", out_specs="r/ep ..."))
        sent = f.lower(sl.shard(X, "r/ep ..."), sl.shard(SIZES, "r/ep ...")).collectives()
    assert [(s.op, s.bytes) for s in sent] == [("all_to_all", 2 * 2 * 8), ("all_to_all", 2 * 4 * 2 * 8)]


ERRORS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "too few sizes": (
        lambda x, k: sl.ragged_all_to_all(x, "ep", k[:2], capacity=9),
        r"send_sizes holds a number for each of the 3 ranks of `ep`, int64 or int32 of shape \(3,\); found i64\[2\]",
    ),
    "sizes that are no integers": (lambda x, k: sl.ragged_all_to_all(x, "ep", k * 1.0, capacity=9), r"found f32\[3\]"),
    "offsets": (
        lambda x, k: sl.ragged_all_to_all(x, "ep", k, capacity=9, output_offsets=k[None]),
        r"output_offsets holds .* found i64\[1, 3\]",
    ),
    "rows that differ": (
        lambda x, k: sl.ragged_all_to_all((x, x[1:]), "ep", k, capacity=9),
        "takes tensors of as many rows each; found `7` and `6`",
    ),
    "no rows": (lambda x, k: sl.ragged_all_to_all(x.sum(), "ep", k, capacity=9), "found `no tensor with rows`"),
    "capacity": (
        lambda x, k: sl.ragged_all_to_all(x, "ep", k, capacity=k.sum()),  # type: ignore[arg-type]
        "capacity= is a number of rows, known before it runs, not",
    ),
    "limit": (
        lambda x, k: sl.ragged_all_to_all(x, "ep", k, capacity=9, limit=-1),
        "limit= is a number of rows.*not -1",
    ),
    "pending": (lambda x, k: sl.ragged_all_to_all(sl.pending(x, "ep"), "ep", k, capacity=9), "psum it first"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    body, message = ERRORS[name]
    with pytest.raises(sl.SpecError, match=f"(?s){message}"):
        on(body, X, SIZES)
