"""Contractions: equal to torch.einsum, and one matrix product with gradients in memory order."""

import random

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardlib.contract import einsum

SIZES = dict(a=2, b=3, c=4, d=5, e=1, f=0)


def operand(letters: str) -> Tensor:
    return torch.randn([SIZES[n] for n in letters], dtype=torch.float64, requires_grad=True)


def equations(count: int) -> list[str]:
    """Two operands of any letters in any order, kept or summed."""
    make, found = random.Random(0), []
    while len(found) < count:
        letters = make.sample("abcdef", make.randint(0, 5))
        a = [n for n in letters if make.random() < 0.6]
        b = [n for n in letters if n not in a or make.random() < 0.5]
        out = [n for n in letters if make.random() < 0.6]
        for names in (a, b, out):
            make.shuffle(names)
        found.append(f"{''.join(a)},{''.join(b)}->{''.join(out)}")
    return found


def test_equals_torch():
    torch.manual_seed(0)
    for equation in equations(300):
        x, y = map(operand, equation.split("->")[0].split(","))
        got, wanted = einsum(equation, x, y), torch.einsum(equation, x, y)
        assert got.shape == wanted.shape, equation
        torch.testing.assert_close(got, wanted)
        g = torch.randn_like(wanted)
        torch.testing.assert_close(*(torch.autograd.grad(out, (x, y), g) for out in (got, wanted)))


@pytest.mark.parametrize("equation", ["ab->b", "a,a,a->", "aa,b->ab", "...a,ab->...b", "ab,b->b"])
def test_what_is_no_product_is_left_to_torch(equation):
    operands = [torch.randn([2] * len(t.replace("...", "xy"))) for t in equation.split("->")[0].split(",")]
    assert torch.equal(einsum(equation, *operands), torch.einsum(equation, *operands))


@pytest.mark.parametrize(
    ("equation", "op"),
    [("bsm,mhd->bhsd", "mm"), ("bhsd,hdm->bsm", "mm"), ("mf,bsm->bsf", "mm"), ("ebm,emf->ebf", "bmm")],
)
def test_one_product_each_way(equation, op):
    """A weight's gradient is contiguous: nobody copies it."""
    sizes = dict(b=2, s=3, m=4, h=2, d=5, f=6, e=3)
    x, w = (torch.randn([sizes[n] for n in t]) for t in equation.split("->")[0].split(","))
    if equation[0] == "m":
        x, w = w, x
    order = (lambda x, w: (w, x)) if equation[0] == "m" else (lambda x, w: (x, w))

    def gradient(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.grad(lambda w: einsum(equation, *order(x, w)).square().sum())(w)

    ops = [str(n.target) for n in make_fx(gradient)(x, w).graph.nodes if "mm" in str(n.target)]
    assert ops == [f"aten.{op}.default"] * 2
    assert gradient(x, w).is_contiguous()
