"""shorten, and the products that reuse adds up: fewer ops, the same values."""

from collections import Counter
from typing import Any

import pytest
import torch
from lowered import lowered
from torch import Tensor
from torch.fx import GraphModule

import shardlib as sl
from shardlib import passes

X = torch.arange(48, dtype=torch.float64).sin().view(2, 3, 2, 4)


def after(f: Any, one: passes.Pass, *given: Tensor) -> tuple[Counter[str], Tensor, Tensor]:
    """The ops that a pass leaves of a function, and its result without and with it."""
    with sl.make_mesh(dp=1, simulate=True):
        specs = tuple(" ".join(map(str, x.shape)) for x in given)
        run = sl.shard_map(f, in_specs=specs, out_specs="...")
        args = [sl.shard(x, spec) for x, spec in zip(given, specs, strict=True)]
        module = lowered(run, *args, use=[one])
        plain, short = (sl.gather(sl.jit(run, passes=use)(*args)) for use in ([], [one]))
    return counted(module), plain, short


def counted(module: GraphModule) -> Counter[str]:
    targets = [str(n.target).removeprefix("aten.") for n in module.graph.nodes if n.op == "call_function"]
    return Counter(t for t in targets if not t.startswith(("view", "_unsafe_view", "permute", "t.")))


@pytest.mark.parametrize("turned", [False, True])
def test_a_negative_factor_is_a_difference(turned):
    def f(x: Tensor) -> Tensor:
        product, z = torch.neg(x) * x.exp(), x.cos()
        return product + z if turned else z + product

    ops, plain, short = after(f, passes.shorten, X)
    assert ops == Counter({"exp.default": 1, "cos.default": 1, "mul.Tensor": 1, "sub.Tensor": 1})
    assert torch.equal(plain, short)


def written(x: Tensor) -> Tensor:
    a = x.sin()
    product = torch.neg(a) * x
    a.mul_(2)
    return x.cos() + product


OTHERS = {
    "a factor is written into": written,
    "a mask": lambda x: (x > 0) + torch.neg(x) * x,
    "small integers": lambda x: x.cos() + torch.neg((x * 9).to(torch.int8)) * x,
    "read twice": lambda x: (y := torch.neg(x) * x) + y,
    "laid out otherwise": lambda x: torch.neg(x.transpose(0, 1)) * x.transpose(0, 1).cos() + x.view(3, 2, 2, 4),
    "neg read again": lambda x: x.cos() + (y := torch.neg(x)) * x + y,
    "product read again": lambda x: x.cos() + (y := torch.neg(x) * x) + y,
    "another factor": lambda x: torch.add(x, torch.neg(x) * x, alpha=2),
    "a number": lambda x: torch.neg(x) * x + 2,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_negatives_stay(name):
    ops, plain, short = after(OTHERS[name], passes.shorten, X)
    assert ops["neg.default"] == 1
    assert torch.equal(plain, short)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 2, 1, -1), (3, 0, 1, 2)])
@pytest.mark.parametrize("dim", [-1, 2, 0])
def test_what_is_joined_in_order_is_not_copied(order, dim):
    def f(x: Tensor) -> Tensor:
        return torch.cat([x.sin(), x.cos()], dim).permute(order).contiguous() * 2

    ops, plain, short = after(f, passes.shorten, X)
    assert ops["cat.default"] == 1 and ops["clone.default"] == 0
    assert torch.equal(plain, short)


def test_what_is_joined_and_read_in_both_orders_is_copied():
    def f(x: Tensor) -> Tensor:
        joined = torch.cat([x.sin(), x.cos()], -1)
        return joined.permute(0, 2, 1, 3).contiguous() * 2 + joined.permute(0, 2, 1, 3)

    ops, plain, short = after(f, passes.shorten, X)
    assert ops["clone.default"] == 1
    assert torch.equal(plain, short)


def rows_of(x: Tensor, height: int = 6, width: int = 8, many: int = 2) -> Tensor:
    """Of a table that was gathered along its features."""
    parts = x.sin().view(2, 6, 4)
    at = (x.view(-1)[:many] * 3).long().abs().view(2, -1)
    return torch.nn.functional.embedding(at, parts.permute(1, 0, 2).contiguous().view(height, width))


@pytest.mark.parametrize("many", [2, 4])
def test_rows_are_taken_before_a_table_is_put_in_order(many):
    ops, plain, short = after(lambda x: rows_of(x, many=many), passes.shorten, X)
    assert ops["embedding.default"] == 0 and ops["index_select.default"] == 1
    assert torch.equal(plain, short) and plain.shape == (2, many // 2, 8)


TABLES = {
    "more rows than there are": lambda x: rows_of(x, many=8),
    "another shape": lambda x: rows_of(x, 12, 4),
    "read besides": lambda x: (
        torch.nn.functional.embedding(
            (x.view(-1)[:2] * 3).long().abs(), y := x.view(2, 6, 4).permute(1, 0, 2).contiguous().view(6, 8)
        )
        + y.sum()
    ),
    "in another order": lambda x: torch.nn.functional.embedding(
        (x.view(-1)[:2] * 3).long().abs(), x.view(2, 6, 4).permute(1, 2, 0).contiguous().view(6, 8)
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_other_tables_stay(name):
    ops, plain, short = after(TABLES[name], passes.shorten, X)
    assert ops["clone.default"] == ops["embedding.default"] == 1
    assert torch.equal(plain, short)


A, B, C = (torch.arange(n, dtype=torch.float64).cos() for n in (24, 16, 20))


def test_products_are_added_where_the_first_is():
    """Of rows in two dims, which are one while they are multiplied."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w) + (x.cos() @ w.t()) + (x.sin() @ w) + 1

    ops, plain, short = after(f, passes.reuse, A.view(2, 3, 4), B.view(4, 4))
    assert (ops["mm.default"], ops["addmm.out"], ops["add.Tensor"], ops["add.out"]) == (1, 2, 0, 1)
    torch.testing.assert_close(short, plain, rtol=1e-14, atol=1e-14)


APART = {
    "read again": lambda x, w: (y := x @ w) + x.cos() @ w + y.sin(),
    "the second too": lambda x, w: x @ w + (y := x.cos() @ w) + y.sin(),
    "itself": lambda x, w: (y := x @ w) + y,
    "twice as much": lambda x, w: torch.add(x @ w, x.cos() @ w, alpha=2),
    "of another shape": lambda x, w: x @ w + (x[:1] @ w),
    "in another order": lambda x, w: (x[:4] @ w).t() + x[:4].cos() @ w,
}


@pytest.mark.parametrize("name", APART)
def test_other_products_stay(name):
    ops, plain, short = after(APART[name], passes.reuse, A.view(6, 4), B.view(4, 4))
    assert ops["addmm.out"] == 0
    assert torch.equal(plain, short)
