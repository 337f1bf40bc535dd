"""squares: sums of squares in one reading."""

import math

import pytest
import torch
from lowered import lowered, state_and_batch, train
from torch import Tensor

import shardlib as sl
from shardlib import passes
from shardlib.graph.squares import SQUARES


def written(x: Tensor) -> Tensor:
    y = x.sin()
    product = y * y
    y.mul_(2)
    return product.sum() + y.sum()


FORMS = {
    "a sum": (lambda x: (x * x).sum() + 1, 1),
    "of many": (lambda x: sum((y * y).sum() for y in (x, x.sin(), x.view(-1), x[:0])), 4),
    "of a transpose": (lambda x: ((y := x.t()) * y).sum(), 0),
    "in double": (lambda x: ((y := x.double()) * y).sum(), 1),
    "in bfloat16": (lambda x: ((y := x.bfloat16()) * y).sum(), 0),
    "of integers": (lambda x: ((y := x.int()) * y).sum(), 0),
    "of a dim": (lambda x: (x * x).sum(0), 0),
    "in another dtype": (lambda x: (x * x).sum(dtype=torch.float64), 0),
    "of other factors": (lambda x: (x * x.sin()).sum(), 0),
    "read again": (lambda x: (y := x * x).sum() + y.max(), 0),
    "written into": (written, 0),
}


@pytest.mark.parametrize("name", FORMS)
def test_sums_of_squares(name):
    f, count = FORMS[name]
    x = torch.sin(torch.arange(35.0)).view(5, 7)
    with sl.make_mesh(dp=1, simulate=True):
        run = sl.shard_map(f, in_specs="a b", out_specs="...")
        args = sl.shard(x, "a b")
        found = sl.gather(sl.jit(run, passes=[passes.squares])(args))
        module = lowered(run, args, use=[passes.squares])
    torch.testing.assert_close(found, f(x))
    assert len(module.graph.find_nodes(op="call_function", target=SQUARES)) == count


@pytest.mark.parametrize("n", [0, 1, 65_536, 65_537, 3_000_001])
@pytest.mark.parametrize("dtype, close", [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_sums_of_many_stay_exact(n, dtype, close):
    """Of many that are alike, where one running sum would lose digits."""
    x = torch.full((n,), 1.1, dtype=dtype)
    wanted = n * float(x[0]) ** 2 if n else 0.0
    assert math.isclose(float(torch.ops.shardlib.sum_of_squares(x)), wanted, rel_tol=close)


def test_what_is_not_finite():
    x = torch.ones(70_000)
    x[69_999] = math.inf
    assert float(torch.ops.shardlib.sum_of_squares(x)) == math.inf
    x[3] = math.nan
    assert math.isnan(float(torch.ops.shardlib.sum_of_squares(x)))


def test_the_norm_of_gradients_is_made_of_them():
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        step = train(2)
        module = lowered(step, *state_and_batch(step), use=passes.default)
    assert len(module.graph.find_nodes(op="call_function", target=SQUARES)) == 7
