"""Programs as users write them in a typed region: those that are right, and those that are refused."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jacrev, vmap

import shardlib as sl
from shardlib.types import inside

N = 4
R = torch.Generator().manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=R, dtype=torch.float64)


W1, W2, X, K = draw(6, 5), draw(5, 3), draw(8, 6), torch.randint(0, 5, (8,), generator=R)
LAYER = torch.nn.Linear(6, 5, device="meta", dtype=torch.float64)
OUTER = torch.full((5,), 0.5, dtype=torch.float64)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(x, w):  # type: ignore[override]
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class Two(torch.autograd.Function):
    @staticmethod
    def forward(x, w):  # type: ignore[override]
        return x @ w, (x @ w).sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g, h):  # type: ignore[override]
        x, w = ctx.saved_tensors
        g = g + h * (x @ w).cos()
        return g @ w.t(), x.t() @ g


class Constant(torch.autograd.Function):
    """A backward that mixes in a constant."""

    @staticmethod
    def forward(x):  # type: ignore[override]
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * x.cos() * torch.ones((), dtype=x.dtype)


def net(p, x):
    return torch.tanh(x @ p[0]) @ p[1]


def square(x):
    return x.pow(2).sum()


# Each takes parameters (invariant), rows and classes (varying) and gives the local term of a total: what one process
# adds over the pieces of the batch. RIGHT ones give that total's value and gradients, WRONG ones an error that says so.
RIGHT: dict[str, Callable[..., Any]] = {}
WRONG: dict[str, tuple[Callable[..., Any], str]] = {}


def right(f):
    RIGHT[f.__name__] = f
    return f


def wrong(message: str):
    def note(f):
        WRONG[f.__name__] = f, message
        return f

    return note


@right
def plain(p, x, k):
    return square(net(p, x))


@right
def user_function(p, x, k):
    return square(Product.apply(torch.tanh(Product.apply(x, p[0])), p[1]))


@right
def user_function_with_two_results(p, x, k):
    a, b = Two.apply(x, p[0])
    return square((a + b) @ p[1])


@right
def in_place_on_own_values(p, x, k):
    h = x @ p[0]
    h.mul_(2.0).add_(1.0)
    return square(h.tanh() @ p[1])


@wrong("setitem writes in place a value that is varying over dp into one that is equal there.*pvary")
def buffer(p, x, k):
    h = torch.zeros(x.shape[0], 5, dtype=x.dtype)
    h[:, :] = x @ p[0]
    return square(h.tanh() @ p[1])


@right
def buffer_made_with_pvary(p, x, k):
    h = (
        sl.pvary(torch.zeros(x.shape[0], 5, dtype=x.dtype), "dp")
        if inside()
        else torch.zeros(x.shape[0], 5, dtype=x.dtype)
    )
    h[:, :] = x @ p[0]
    return square(h.tanh() @ p[1])


@wrong("add writes in place")
def view_of_a_buffer(p, x, k):
    h = torch.zeros(x.shape[0], 5, dtype=x.dtype)
    h[:, 1:3].add_((x @ p[0])[:, 1:3])
    return square(h.tanh() @ p[1])


@right
def in_place_invariant_into_varying(p, x, k):
    h = x @ p[0]
    h.add_(p[0].sum(0))
    return square(h.tanh() @ p[1])


@right
def views(p, x, k):
    h = (x @ p[0]).view(-1, 5).t().contiguous().t()[:, :4]
    return square(h.tanh() @ p[1][:4])


@right
def vmap_over_rows(p, x, k):
    return square(vmap(lambda r: torch.tanh(r @ p[0]) @ p[1])(x))


@right
def vmap_over_columns(p, x, k):
    return square(vmap(lambda w: torch.tanh(x @ p[0]) @ w)(p[1].t()))


@right
def vmap_then_mixed(p, x, k):
    h = vmap(lambda r: torch.tanh(r @ p[0]))(x)
    return square((h + x[:, :5]) @ p[1])


@right
def vmap_with_in_dims(p, x, k):
    return square(vmap(lambda r, c: (r * p[0].t()).sum(1) + c, in_dims=(0, None))(x, p[1][:, 0]) @ p[1])


@right
def gradient_within(p, x, k):
    return square(grad(lambda x: square(net(p, x)))(x))


@right
def gradient_within_then_mixed(p, x, k):
    h = grad(lambda x: torch.tanh(x @ p[0]).sum())(x)
    return square((h * x) @ p[0])


@right
def per_row_gradients(p, x, k):
    w = sl.pvary(p[0], "dp") if inside() else p[0]  # else each gradient would be summed over ranks
    return square(vmap(grad(lambda w, r: square(torch.tanh(r @ w))), in_dims=(None, 0))(w, x).sum(1) @ p[1])


@right
def second_order_through_a_user_function(p, x, k):
    gx = grad(lambda x: Product.apply(x, p[0]).tanh().sum())(x)
    return square(gx * x)


@right
def second_order_through_a_constant(p, x, k):
    gx = grad(lambda x: (Constant.apply(x) @ p[0]).sum())(x)
    return square(gx * x)


@right
def jacobian(p, x, k):
    return square(jacrev(lambda x: torch.tanh(x[0] @ p[0]))(x))


@right
def hessian_by_two_reverse_passes(p, x, k):
    return square(jacrev(jacrev(lambda r: square(net(p, r))))(x[0]))


@right
def remat(p, x, k):
    return square(rematted(net)(p, x))


@right
def remat_within_remat(p, x, k):
    return square(rematted(lambda p, x: rematted(net)(p, x).sin())(p, x))


@right
def remat_then_mixed(p, x, k):
    h = rematted(lambda w, x: torch.tanh(x @ w))(p[0], x)
    return square((h + x[:, :5]) @ p[1])


@right
def remat_of_integers_and_tuples(p, x, k):
    def f(w, x, k, scale, flag):
        h = x @ w * scale
        return (h.topk(2), k + 1) if flag else (h, k)

    (top, at), shifted = rematted(f)(p[0], x, k, 2.0, True)
    return square(top @ p[1][:2]) + (at + shifted[:, None]).sum() * p[1].sum()


@right
def gradient_of_remat(p, x, k):
    return square(grad(lambda x: square(rematted(net)(p, x)))(x))


@wrong("remat captured a value that is being differentiated")
def remat_with_a_closure(p, x, k):
    return square(rematted(lambda x: net(p, x))(x) * p[1][0])


@right
def loop(p, x, k):
    c = torch.zeros(5, dtype=x.dtype)
    for _ in range(3):
        c = torch.tanh(c + x @ p[0])
    return square(c @ p[1])


@right
def several_results(p, x, k):
    v, _ = (x @ p[0]).sort(-1)
    a, b = v.split([2, 3], -1)
    return a.sum() + square(b) + torch.topk(v, 2).values.sum() + square(v @ p[1])


@right
def created_inside(p, x, k):
    pos = torch.arange(5.0, dtype=x.dtype)
    m = torch.tensor([1.0, 0, 1, 1, 1], dtype=x.dtype)
    return square((x @ p[0] * m + pos).tanh() @ p[1])


@wrong("draws from torch's generator")
def dropout(p, x, k):
    return square(x @ F.dropout(p[0], 0.5))


@wrong(r"\.item\(\).* varying over dp: ranks would go different ways")
def item_of_varying(p, x, k):
    return square(x @ p[0]) * x.sum().item()


@right
def item_of_invariant(p, x, k):
    return square(x @ p[0]) * p[1].detach().sum().item()


@right
def integers_and_masks(p, x, k):
    return (p[0][:, k].t() * x).sum() + torch.where(x > 0, x, 0.0).matmul(p[0]).sum() + square(F.embedding(k, p[0].t()))


@right
def one_hot(p, x, k):
    return (p[0].sum(0) * F.one_hot(k, 5)).sum()


@right
def nested_index(p, x, k):
    return square(p[0][:, [[k[0], k[1]]]]) if not inside() else square(p[0][(slice(None), torch.stack([k[0], k[1]]))])


@wrong("has no type: it was made outside")
def captured_constant(p, x, k):
    return square((x @ p[0] * OUTER).tanh() @ p[1])


@right
def einsum(p, x, k):
    return square(torch.einsum("bi,ij,jk->bk", x, p[0], p[1]))


@right
def norm_and_cross_entropy(p, x, k):
    return F.cross_entropy(F.rms_norm(x @ p[0], (5,), p[1][:, 0]), k, reduction="sum")


@right
def layer_norm(p, x, k):
    return square(F.layer_norm(x @ p[0], (5,), weight=p[1][:, 0], bias=p[1][:, 1]) @ p[1])


@right
def attention(p, x, k):
    q = (x @ p[0])[None, None]
    return square(F.scaled_dot_product_attention(q, q * p[1][:, 0], q))


@right
def detached(p, x, k):
    return ((x @ p[0]).detach() * (x @ p[0])).sum()


@right
def foreach(p, x, k):
    a = torch._foreach_mul([x @ p[0], x @ p[0]], 2.0)  # type: ignore
    b = torch._foreach_add(a, [p[0].sum(0), p[0].sum(0)])  # type: ignore
    return square((b[0] + b[1]).tanh().matmul(p[1]))


@right
def stack_of_rows(p, x, k):
    return square(torch.stack([r @ p[0] for r in x]).tanh().matmul(p[1]))


@right
def cat_of_both(p, x, k):
    return square(torch.cat([x @ p[0], p[0][:2]]).tanh() @ p[1])


@right
def where_of_both(p, x, k):
    return square(torch.where(x[:, :5] > 0, p[0][:1], x[:, :5]) @ p[1])


@right
def module_called_functionally(p, x, k):
    return square(torch.func.functional_call(LAYER, {"weight": p[0].t(), "bias": p[1][:, 0]}, (x,)))


@right
def convolution(p, x, k):
    return square(F.conv1d(x[:, None], p[0].t()[:, None, :3], p[1][:, 0]))


@right
def in_place_relu(p, x, k):
    return square(F.relu(x @ p[0], inplace=True) @ p[1])


@right
def solve(p, x, k):
    a = x.t() @ x + 5 * torch.eye(6, dtype=x.dtype)
    return square(torch.linalg.solve(a, p[0]) @ p[1])


@right
def checkpointed_by_gradient_of_gradient(p, x, k):
    return square(grad(lambda x: square(grad(lambda y: square(net(p, y)))(x)))(x))


def rematted(f):
    return sl.remat(f) if inside() else f
