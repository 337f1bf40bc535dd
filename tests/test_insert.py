"""What `Insert` and `Flow` do with single functions: `pvary` put in, pending values, writes, reads."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from shardlib import tree
from shardlib.types import region

Body = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x):  # type: ignore[override]
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(x):  # type: ignore[override]
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def run(body: Body) -> Any:
    """`body(x, w, p, k)` on dp=2, tp=2: x varies over dp, p is x pending, w is invariant, k are varying integers."""
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        x, k = sl.shard(torch.arange(24.0).view(4, 2, 3), "b/dp s d"), sl.shard(torch.tensor([0, 1, 1, 0]), "b/dp")
        specs = ("b/dp s d", "d", "b/dp")
        f = sl.shard_map(lambda x, w, k: body(x, w, sl.pending(x, "dp"), k), in_specs=specs, out_specs="...")
        return f(x, torch.ones(3), k)


def refused(body: Body, message: str) -> None:
    with pytest.raises(sl.SpecError) as e:
        run(body)
    assert re.search(f"(?s){message}", str(e.value))  # the note shows the line, which may hold the message


def over_dp(body: Body) -> str:
    """The letters over dp of the tensors that `body` gives."""
    found: list[str] = []

    def noting(*args: Tensor) -> None:
        out = body(*args)
        found[:] = [region().over(y, "dp") for y in tree.leaves(out) if isinstance(y, Tensor)]

    run(noting)
    return "".join(found)


LINEAR: dict[str, Body] = {
    "scaled by a number": lambda x, w, p, k: (2 * p, p * 2, p / 2, -p, +p),
    "scaled by an invariant": lambda x, w, p, k: (p * w, w * p, p / w, p.mul(w), torch.div(p, w)),
    "scaled by a replicated": lambda x, w, p, k: (p * sl.pvary(w, "dp"), p @ sl.pvary(w, "dp")),
    "scaled by what varies over another axis": lambda x, w, p, k: p * (w + sl.axis_index("tp")),
    "added": lambda x, w, p, k: (p + p, p - p, sum([p, p]), torch.add(p, p, alpha=2), p + 0, 0 + p, torch.sub(p, p)),
    "matmul": lambda x, w, p, k: (
        p @ w,
        p.transpose(1, 2).mT @ w.diag(),
        torch.einsum("bsd,d->bs", p, w),
        F.linear(p, w[None]),
    ),
    "products": lambda x, w, p, k: (
        p[0, 0].dot(w),
        p[0].mv(w),
        p[0].mm(w.diag()),
        p.bmm(w.diag().expand(2, 3, 3)),
        torch.outer(p[0, 0], w),
    ),
    "tensordot": lambda x, w, p, k: (torch.tensordot(p, w, 1), torch.inner(p, w), torch.addmm(p[0], p[0], w.diag())),
    "reduced": lambda x, w, p, k: (p.sum(), p.sum(0), p.mean(), p.mean((0, 2)), p.cumsum(0), p.sum(-1)),
    "moved": lambda x, w, p, k: (
        p[0].T,
        p.mT,
        p.view(4, 3),
        p.reshape(-1),
        p.flatten(),
        p.permute(2, 0, 1),
        p.unflatten(2, (3, 1)),
    ),
    "cut": lambda x, w, p, k: (
        p[0],
        p[:, 1:],
        p[..., None],
        p.chunk(2),
        p.split(1),
        p.unbind(),
        p.narrow(0, 0, 1),
        p.select(0, 0),
    ),
    "indexed by equal": lambda x, w, p, k: (
        p[torch.tensor([0, 1])],
        p.index_select(0, torch.tensor([1])),
        p.gather(0, torch.zeros(1, 2, 3, dtype=torch.int64)),
    ),
    "arranged": lambda x, w, p, k: (
        p.roll(1),
        p.flip(0),
        p.repeat(2, 1, 1),
        p.expand(2, 2, 2, 3),
        p[0].tril(),
        p[0].diagonal(),
        p.unfold(0, 1, 1),
        p.tile(2),
    ),
    "joined": lambda x, w, p, k: (
        torch.cat([p, p]),
        torch.stack([p, p]),
        torch.hstack([p, p]),
        torch.where(w > 0, p, p),
    ),
    "cast": lambda x, w, p, k: (
        p.double(),
        p.to(torch.bfloat16),
        p.half().float(),
        p.type(torch.float64),
        p.clone(),
        p.detach(),
        p.contiguous(),
        p.data,
    ),
    "padded with zeros": lambda x, w, p, k: (F.pad(p, (1, 1)), p.masked_fill(w > 0, 0)),
    "shaped after another": lambda x, w, p, k: (
        p.view_as(x),
        p.reshape_as(x),
        p[0].expand_as(x),
        p.type_as(x),
        torch.broadcast_tensors(p, p),
    ),
    "looked up": lambda x, w, p, k: F.embedding(torch.tensor([0]), p[0]),
    "in place": lambda x, w, p, k: [q := p.clone(), q.mul_(2), q.add_(p), q.div_(w), q],
    "a view written": lambda x, w, p, k: [q := p.clone(), q[0].add_(p[0]), q],
    "a slice assigned": lambda x, w, p, k: [q := p.clone(), q.__setitem__(0, p[1]), q],
    "mapped": lambda x, w, p, k: torch.vmap(lambda r: r * 2 + r)(p),
    "through a linear function of the user": lambda x, w, p, k: torch.func.vjp(Twice.apply, p)[0],
    "through remat": lambda x, w, p, k: (sl.remat(lambda q: q)(p), sl.remat(lambda q, w: q @ w)(p, w)),
    "moved over another axis": lambda x, w, p, k: sl.all_gather("i s e/tp -> i s e", p * (1 + sl.axis_index("tp"))),
}


@pytest.mark.parametrize("name", LINEAR)
def test_stays_pending(name: str) -> None:
    assert set(over_dp(LINEAR[name])) == {"P"}


def test_what_a_pending_value_is_asked() -> None:
    def body(x: Tensor, w: Tensor, p: Tensor, k: Tensor) -> Tensor:
        assert p.shape == (2, 2, 3) and p.dtype == torch.float32 and p.size(0) == len(p) == 2 and p.dim() == p.ndim == 3
        assert p.is_floating_point() and p.numel() == 12 and p.stride() == (6, 3, 1) and p.device.type == "cpu"
        assert region().over(torch.zeros_like(p), "dp") == region().over(p.new_zeros(2), "dp") == "I"
        return w

    run(body)


STILL = r"a value that still waits for a sum over `dp` \(f32\[.*\] pending over dp\)"
SUM_FIRST = r"\.\n  Make the sum first: psum or psum_scatter it over `dp`"
REFUSED: dict[str, tuple[Body, str]] = {
    "gelu": (lambda x, w, p, k: F.gelu(p), f"gelu of {STILL}: it is not linear{SUM_FIRST}"),
    "a bias": (
        lambda x, w, p, k: p + w,
        f"add: {STILL} plus one that does not would add the second once per rank"
        r"\.\n  Make the sum first: sl.psum\(a, 'dp'\) \+ b",
    ),
    "a number": (lambda x, w, p, k: p + 1, f"add: {STILL} plus one that does not"),
    "subtracted from a number": (lambda x, w, p, k: 1 - p, "sub: .* plus one that does not"),
    "in place": (lambda x, w, p, k: p.clone().add_(w), "add: .* plus one that does not"),
    "varying": (lambda x, w, p, k: p + x, "add: .* plus one that does not"),
    "times varying": (lambda x, w, p, k: p * x, f"mul: {STILL} meets one that differs by rank there"),
    "times pending": (lambda x, w, p, k: p * p, f"mul: {STILL} times another: the product of two sums"),
    "einsum of two": (lambda x, w, p, k: torch.einsum("bsd,bsd->b", p, p), "einsum: .* times another: the"),
    "divided by": (lambda x, w, p, k: w / p, f"div: the divisor is {STILL}: x / "),
    "one over": (lambda x, w, p, k: 1 / p, "rdiv: the divisor is .*psum the divisor"),
    "floor": (lambda x, w, p, k: p // 2, "is not linear"),
    "rounded": (lambda x, w, p, k: torch.div(p, 2, rounding_mode="floor"), "div of .* it is not linear"),
    "linear with a bias": (lambda x, w, p, k: F.linear(p, w.diag(), w), f"linear: {STILL} gets a bias once per rank"),
    "power": (lambda x, w, p, k: p**2, f"pow of {STILL}"),
    "softmax": (lambda x, w, p, k: p.softmax(-1), f"softmax of {STILL}"),
    "norm": (lambda x, w, p, k: p.norm(), "norm of"),
    "layer norm": (lambda x, w, p, k: F.layer_norm(p, (3,)), "layer_norm of"),
    "abs": (lambda x, w, p, k: p.abs(), "abs of"),
    "amax": (lambda x, w, p, k: p.amax(), "amax of"),
    "compared": (lambda x, w, p, k: p > 0, "gt of"),
    "to integers": (lambda x, w, p, k: p.to(torch.int64), "to of .* it is not linear"),
    "type": (lambda x, w, p, k: p.type(torch.int32), "type of"),
    "seen as integers": (lambda x, w, p, k: p.view(torch.int32), "view of .* it is not linear"),
    "sorted": (lambda x, w, p, k: p.sort(), "sort of"),
    "joined with another": (lambda x, w, p, k: torch.cat([p, x]), f"cat mixes {STILL} with one that does not"),
    "stacked with an invariant": (lambda x, w, p, k: torch.stack([p[0, 0], w]), "stack mixes"),
    "where with another": (lambda x, w, p, k: torch.where(w > 0, p, w), "where of"),
    "where by varying": (lambda x, w, p, k: torch.where(x > 0, p, p), "where of"),
    "padded with ones": (lambda x, w, p, k: F.pad(p, (1, 1), value=1.0), "pad of"),
    "filled": (lambda x, w, p, k: p.masked_fill(w > 0, 1), "masked_fill of"),
    "filled by a varying mask": (lambda x, w, p, k: p.masked_fill(x > 0, 0), "masked_fill of"),
    "indexed by varying": (lambda x, w, p, k: p[k], "getitem of"),
    "gathered by varying": (lambda x, w, p, k: p.index_select(0, k), "index_select of"),
    "as an index": (lambda x, w, p, k: torch.ones(4)[sl.pending(k, "dp")], "getitem of"),
    "assigned varying": (lambda x, w, p, k: [q := p.clone(), q.__setitem__(0, x[0])], "setitem of"),
    "assigned to varying": (lambda x, w, p, k: [q := x.clone(), q.__setitem__(0, p[0])], "setitem of"),
    "user function": (lambda x, w, p, k: torch.func.vjp(Square.apply, p)[0], "custom_function_call of"),
    "user function without transforms": (lambda x, w, p, k: F.gelu(Square.apply(p)), "mul: .* times another|gelu of"),
    "mapped": (lambda x, w, p, k: torch.vmap(torch.tanh)(p), "tanh of"),
    "out": (lambda x, w, p, k: torch.tanh(p, out=p.clone()), "tanh of"),
    "foreach": (lambda x, w, p, k: torch._foreach_tanh([p, p]), "_foreach_tanh of"),  # type: ignore
    "lerp": (lambda x, w, p, k: torch.lerp(p, x, 0.5), "lerp of"),
    "item": (lambda x, w, p, k: p.sum().item(), "ranks would go different ways"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_pending(name: str) -> None:
    refused(*REFUSED[name])


class Psums(TorchDispatchMode):
    """Counts all_reduces."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops._c10d_functional.all_reduce.default
        return func(*args, **(kwargs or {}))


MIXES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, w: x + w,
    "matmul": lambda x, w: x @ w,
    "where": lambda x, w: torch.where(x > 3, w, x),
    "cat": lambda x, w: torch.cat([x.flatten(), w]),
    "nested": lambda x, w: torch.block_diag(x[0], *[w, x[0]]),
    "keyword": lambda x, w: F.linear(input=x, weight=w[None]),
    "index": lambda x, w: w[(x[0] > 3).long()],
    "clamp": lambda x, w: torch.clamp(x, min=w),
    "einsum": lambda x, w: torch.einsum("bsd,d", x, w),
    "rms_norm": lambda x, w: F.rms_norm(x, (3,), weight=w),
    "setitem": lambda x, w: [y := x.clone(), y.__setitem__(0, w)][0],
    "iadd": lambda x, w: [y := x.clone(), y.__iadd__(w)][0],
    "addcmul": lambda x, w: torch.addcmul(x, w, w),
    "aten": lambda x, w: torch.ops.aten.mul.Tensor(x, w),
}


@pytest.mark.parametrize("name", MIXES)
def test_inserts_the_sum_of_gradients(name: str) -> None:
    """The gradient of an invariant that meets a varying value is summed over dp, and equals that of one process."""
    f, x = MIXES[name], torch.arange(24.0).view(4, 2, 3) / 7

    def body(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.grad(lambda w: sl.psum(f(x, w).square().sum(), "dp"))(w)

    with sl.make_mesh(dp=2, tp=2, simulate=True):
        found = sl.gather(
            sl.shard_map(body, in_specs=("b/dp s d", "d"), out_specs="d")(sl.shard(x, "b/dp s d"), torch.ones(3))
        )
    wanted = torch.func.grad(lambda w: sum(f(part, w).square().sum() for part in x.chunk(2)))(torch.ones(3))
    torch.testing.assert_close(found, wanted)


def test_inserts_nothing_where_values_do_not_meet() -> None:
    def body(x: Tensor, w: Tensor, p: Tensor, k: Tensor) -> Tensor:
        letters = region().type_of
        assert letters(w.expand_as(x)) == letters(torch.broadcast_tensors(w, x)[0]) == letters(w.type_as(x)) == "II"
        assert letters(w * 2 + torch.ones(3)) == letters(torch.stack([w, w])) == "II"
        assert letters(x + w) == "VI" and letters(w + sl.pvary(w, "dp")) == "RI"
        assert letters(torch.zeros_like(x)) == letters(torch.arange(3)) == letters(torch.tensor([1.0, 2.0])) == "II"
        return w

    run(body)


WRITES: dict[str, tuple[Body, str]] = {
    "varying into invariant": (
        lambda x, w, p, k: w.clone().add_(x[0, 0]),
        "add writes in place a value that is varying over dp",
    ),
    "pending into invariant": (
        lambda x, w, p, k: torch.zeros(3).add_(p[0, 0]),
        "add writes in place a value that is pending over dp",
    ),
    "replicated into invariant": (
        lambda x, w, p, k: torch.zeros(3).copy_(sl.pvary(w, "dp")),
        "copy writes in place a value .* replicated",
    ),
    "setitem": (
        lambda x, w, p, k: torch.zeros(3).__setitem__(0, x[0, 0, 0]),
        r"setitem writes .* sl.pvary\(buffer, 'dp'\)",
    ),
    "out": (lambda x, w, p, k: torch.add(x[0, 0], w, out=torch.empty(3)), "add writes in place"),
    "foreach": (
        lambda x, w, p, k: torch._foreach_add_([w.clone()], [x[0, 0]]),  # type: ignore
        "_foreach_add writes in place",
    ),
    "augmented": (lambda x, w, p, k: exec("y = w.clone()\ny += x[0, 0]", dict(w=w, x=x)), "add writes in place"),
    "data": (
        lambda x, w, p, k: setattr(w.clone(), "data", x[0, 0]),
        "assigning `.data` puts another value behind the type",
    ),
    "argument": (
        lambda x, w, p, k: x.mul_(2),
        "mul writes in place into an argument of the per-device function: clone it first",
    ),
    "view of an argument": (lambda x, w, p, k: x[0].zero_(), "zero writes in place into an argument"),
    "argument, in a derivative": (
        lambda x, w, p, k: torch.func.grad(lambda w: x.mul_(2).sum() * w.sum())(w),
        "mul writes in place into an argument",
    ),
    "argument, by a function": (lambda x, w, p, k: F.relu(x, inplace=True), "relu_ writes in place into an argument"),
    "result": (
        lambda x, w, p, k: exec("y = sl.psum(x, 'dp')\ny += 1", dict(sl=sl, x=x)),
        "add writes in place into the result of a collective",
    ),
    "view of a result": (
        lambda x, w, p, k: sl.all_gather("b/dp s d -> b s d", x)[0].zero_(),
        "zero writes in place into the result of a",
    ),
    "result, in a derivative": (
        lambda x, w, p, k: torch.func.grad(lambda x: sl.psum(x, "dp").mul_(2).sum())(x),
        "mul writes in place into the result of a collective, which over an axis of size 1 shares memory",
    ),
    "pending": (
        lambda x, w, p, k: sl.pending(x * 2, "dp").mul_(2),
        "mul writes in place into the result of a collective",
    ),
    "out is an argument": (lambda x, w, p, k: torch.add(x, x, out=x), "add writes in place into an argument"),
}


@pytest.mark.parametrize("name", WRITES)
def test_refused_writes(name: str) -> None:
    refused(*WRITES[name])


def test_a_write_changes_the_type_of_all_views() -> None:
    def body(x: Tensor, w: Tensor, p: Tensor, k: Tensor) -> Tensor:
        letters = region().type_of
        buffer = sl.pvary(torch.zeros(2, 3), "dp")
        view, other = buffer[:1], buffer[1:]
        assert letters(other) == "RI"
        view.copy_(x[0, :1])
        assert letters(buffer) == letters(view) == letters(other) == "VI"
        grown = p.clone()
        part, rest = grown[0], grown.flatten()
        part.add_(p[0])
        assert letters(part) == letters(rest) == letters(grown) == "PI"
        counts = x.clone()
        counts[0] = w
        assert letters(counts) == "VI"
        return w

    run(body)


def test_values_and_numpy() -> None:
    """What is made from Python and numpy is invariant; what reads values asks for invariant ones."""

    def body(x: Tensor, w: Tensor, p: Tensor, k: Tensor) -> Tensor:
        letters = region().type_of
        assert letters(torch.tensor(3)) == letters(torch.as_tensor([1, 2])) == "II"
        assert letters(copy.deepcopy(x)) == "VI"
        assert letters(F.one_hot(k, 2)) == "VI" and F.one_hot(k, num_classes=5).shape == (2, 5)
        assert repr(x) and f"{w.sum():.3f} {p}" and str(p)
        assert letters(x.to("cpu", torch.float64)) == letters(x.data) == "VI"
        return w

    import numpy

    def made(x: Tensor, w: Tensor, p: Tensor, k: Tensor) -> Tensor:
        for y in (torch.tensor(numpy.ones(2)), torch.as_tensor(numpy.ones(2))):
            assert region().type_of(y) == "II"
        return w

    run(body)
    run(made)


LEAVES: dict[str, tuple[Body, str]] = {
    "item": (lambda x, w, p, k: x.sum().item(), "ranks would go different ways. Reduce it first"),
    "bool": (lambda x, w, p, k: 1 if x.sum() > 0 else 2, "ranks would go different ways"),
    "float": (lambda x, w, p, k: float(x[0, 0, 0]), "ranks would go different ways"),
    "tolist": (lambda x, w, p, k: x.tolist(), "ranks would go different ways"),
    "allclose": (lambda x, w, p, k: torch.allclose(x, x), "ranks would go different ways"),
    "equal": (lambda x, w, p, k: torch.equal(x, x), "ranks would go different ways"),
    "nonzero": (lambda x, w, p, k: x.nonzero(), "ranks would go different ways"),
    "unique": (lambda x, w, p, k: x.unique(), "ranks would go different ways"),
    "mask": (lambda x, w, p, k: x[x > 0], "ranks would go different ways"),
    "mask of an invariant": (lambda x, w, p, k: w[x[0, 0] > 0], "ranks would go different ways"),
    "bincount": (lambda x, w, p, k: k.bincount(), "ranks would go different ways"),
    "repeat_interleave": (lambda x, w, p, k: w.repeat_interleave(k[:1]), "ranks would go different ways"),
    "one_hot of as many as there are": (lambda x, w, p, k: F.one_hot(k), "ranks would go different ways"),
    "numpy": (lambda x, w, p, k: w.numpy(), "numpy cannot follow a per-device function"),
    "array": (lambda x, w, p, k: __import__("numpy").asarray(w), "numpy cannot follow"),
    "tensor of tensors": (lambda x, w, p, k: torch.tensor([w[0], w[1]]), "reads their values: use torch.stack"),
    "rand": (
        lambda x, w, p, k: torch.rand(3),
        r"rand draws from torch's generator, whose numbers differ by rank.*sl.random.normal\(key, shape\)",
    ),
    "randint": (lambda x, w, p, k: torch.randint(0, 3, (2,)), "draws from torch's generator"),
    "init": (lambda x, w, p, k: torch.nn.init.normal_(torch.empty(3)), "draws from torch's generator"),
    "multinomial": (lambda x, w, p, k: torch.multinomial(w, 1), "draws from torch's generator"),
    "normal_": (lambda x, w, p, k: torch.empty(3).normal_(), "draws from torch's generator"),
    "dropout in attention": (
        lambda x, w, p, k: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        "draws from torch's generator",
    ),
    "backward": (lambda x, w, p, k: w.clone().requires_grad_().sum().backward(), r"plain autograd \(backward\)"),
}


@pytest.mark.parametrize("name", LEAVES)
def test_refused_reads(name: str) -> None:
    refused(*LEAVES[name])


def test_invariant_values_may_decide() -> None:
    def body(x: Tensor, w: Tensor, p: Tensor, k: Tensor) -> Tensor:
        return w * 2 if w.sum() > 0 and w.sum().item() == 3 and w.tolist() == [1, 1, 1] and len(w[w > 0]) == 3 else w

    with pytest.warns(UserWarning, match="takes a Python decision on a tensor's value"):
        assert sl.gather(run(body)).tolist() == [2, 2, 2]


CAPTURED = torch.ones(3)
UNKNOWN: dict[str, Body] = {
    "add": lambda x, w, p, k: x + CAPTURED,
    "alone": lambda x, w, p, k: CAPTURED * 2,
    "in a list": lambda x, w, p, k: torch.cat([w, CAPTURED]),
    "as an index": lambda x, w, p, k: w[CAPTURED.long()],
    "by keyword": lambda x, w, p, k: F.linear(x, weight=CAPTURED[None]),
    "view": lambda x, w, p, k: CAPTURED.view(1, 3) @ w,
    "psum": lambda x, w, p, k: sl.psum(CAPTURED, "dp"),
    "pattern": lambda x, w, p, k: sl.einsum("d, d -> ", w, CAPTURED),
    "returned": lambda x, w, p, k: CAPTURED,
    "written into": lambda x, w, p, k: CAPTURED.add_(w),
    "copied by torch.tensor": lambda x, w, p, k: torch.tensor(CAPTURED),
    "deep copied": lambda x, w, p, k: copy.deepcopy(CAPTURED),
    "in remat": lambda x, w, p, k: sl.remat(lambda x: x * CAPTURED)(x),
    "in vmap": lambda x, w, p, k: torch.vmap(lambda r: r * CAPTURED)(x),
    "in a derivative": lambda x, w, p, k: torch.func.grad(lambda w: (w * CAPTURED).sum())(w),
    "gathered": lambda x, w, p, k: sl.gather(CAPTURED, "dp"),
    "a user's function": lambda x, w, p, k: torch.func.grad(lambda w: (Twice.apply(CAPTURED) * w).sum())(w),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_unknown_is_an_error(name: str) -> None:
    with (
        warnings.catch_warnings(),
        pytest.raises(sl.SpecError, match=r"has no type: it was made outside|of unknown type"),
    ):
        warnings.simplefilter("ignore")  # torch.tensor of a tensor warns
        run(UNKNOWN[name])


def test_functions_of_functions_are_refused() -> None:
    with pytest.raises(
        sl.SpecError, match=r"cond runs functions of its own, which types do not see through: use torch.where"
    ):
        run(lambda x, w, p, k: torch.ops.higher_order.cond(w.sum() > 0, lambda a: a, lambda a: a * 2, (w,)))


def test_an_error_names_the_line_and_the_leaf_that_is_cut(capfd: pytest.CaptureFixture[str]) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y

    with sl.make_mesh(dp=2, simulate=True):
        x, w = sl.shard(torch.ones(4, 8), "batch/dp model"), sl.shard(torch.ones(8, 6), "model/dp hidden")
        with pytest.raises(RuntimeError) as e:
            sl.shard_map(body, in_specs=None, out_specs=None)(x, w)
    said = "\n".join(e.value.__notes__)
    assert "matmul: an operand of shape [4, 6] is this rank's piece of `model/dp hidden`" in said
    assert "global shape is [8, 6]: sl.gather(x, 'dp') first" in said
    assert "test_insert.py" in said and said.endswith("in body: y = x @ w")
    assert capfd.readouterr().err == ""  # torch's own log of it is off
