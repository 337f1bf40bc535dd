"""Ops with patterns: against plain torch on one process, values and gradients."""

from typing import Any

import pytest
import torch
from patterned import MESHES, X, check, run
from torch import Tensor

import shardlib as sl

R = torch.Generator().manual_seed(1)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=R, dtype=torch.float64)


def einsum(pattern: str, plain: str, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    left, right = pattern.split("->")
    args = [(draw(*s), spec.strip()) for s, spec in zip(shapes, left.split(","), strict=True)]
    return lambda *xs: sl.einsum(pattern, *xs), lambda *xs: torch.einsum(plain, *xs), args, right.strip()


SUM = "b/dp s d/tp -> b/dp s +tp"
RIGHT: dict[str, Any] = {
    "einsum, nothing split": einsum("a b, b c -> a c", "ab,bc->ac", (3, 5), (5, 7)),
    "einsum, rows": einsum("a/dp b, b c -> a/dp c", "ab,bc->ac", (4, 5), (5, 7)),
    "einsum, columns": einsum("a/dp b, b c/tp -> a/dp c/tp", "ab,bc->ac", (4, 5), (5, 8)),
    "einsum, contracted": einsum("a/dp b/tp, b/tp c -> a/dp c +tp", "ab,bc->ac", (4, 8), (8, 3)),
    "einsum, contracted over a chain": einsum("a b/tp/dp, b/tp/dp c -> a c +dp +tp", "ab,bc->ac", (3, 8), (8, 3)),
    "einsum, two contracted": einsum("a/dp b/tp, a/dp b/tp -> +dp +tp", "ab,ab->", (4, 8), (4, 8)),
    "einsum, one operand": einsum("a/dp b/tp -> b/tp +dp", "ab->b", (4, 8)),
    "einsum, three operands": einsum("a/dp b, b c/tp, c/tp d -> a/dp d +tp", "ab,bc,cd->ad", (2, 3), (3, 4), (4, 5)),
    "einsum, batched": einsum("h/tp a b, h/tp b c -> h/tp a c", "hab,hbc->hac", (4, 2, 3), (4, 3, 5)),
    "einsum, outer": einsum("a/dp, b/tp -> a/dp b/tp", "a,b->ab", (2,), (4,)),
    "einsum, ellipsis": einsum("... b/tp, b/tp c -> ... c +tp", "...b,bc->...c", (2, 3, 8), (8, 3)),
    "einsum, diagonal": einsum("a a b/dp -> a b/dp", "aab->ab", (3, 3, 4)),
    "rearrange": (
        lambda x: sl.rearrange("b/dp s (h d)/tp -> b/dp h/tp s d", x, h=4),
        lambda x: x.view(4, 6, 4, 2).transpose(1, 2),
        [(X, "b/dp s d/tp")],
        "b/dp h/tp s d",
    ),
    "rearrange back": (
        lambda x: sl.rearrange("b/dp h/tp s d -> b/dp s (h d)/tp", x),
        lambda x: x.transpose(1, 2).flatten(2),
        [(draw(2, 4, 3, 5), "b/dp h/tp s d")],
        "b/dp s e/tp",
    ),
    "rearrange integers": (
        lambda x: sl.rearrange("b/dp (3 d) -> 3 b/dp d", x, **{"3": 3}),
        lambda x: x.view(4, 3, 2).transpose(0, 1),
        [(draw(4, 6), "b/dp d")],
        "3 b/dp d",
    ),
    "rearrange a pending sum": (
        lambda x: sl.rearrange("b d +tp -> d b +tp", sl.pending(x.sum(0), "tp")),
        lambda x: x.sum(0).t(),
        [(draw(4, 3, 5), "q/tp b d")],
        "d b +tp",
    ),
    "reduce, sum": (lambda x: sl.reduce(SUM, x, "sum"), lambda x: x.sum(-1), [(X, "b/dp s d/tp")], "b/dp s +tp"),
    "reduce, mean": (lambda x: sl.reduce(SUM, x, "mean"), lambda x: x.mean(-1), [(X, "b/dp s d/tp")], "b/dp s +tp"),
    "reduce, mean of all": (
        lambda x: sl.reduce("b/dp s d/tp -> +dp +tp", x, "mean"),
        lambda x: x.mean(),
        [(X, "b/dp s d/tp")],
        "+dp +tp",
    ),
    "reduce, max": (
        lambda x: sl.reduce("b/dp s d -> b/dp d", x, "max"),
        lambda x: x.amax(1),
        [(X, "b/dp s d")],
        "b/dp d",
    ),
    "reduce, groups": (
        lambda x: sl.reduce("b/dp (s t) d -> b/dp s d", x, "mean", t=3),
        lambda x: x.view(4, 2, 3, 8).mean(2),
        [(X, "b/dp s d")],
        "b/dp s d",
    ),
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_against_one_process(name: str, mesh: dict[str, int]) -> None:
    check(RIGHT[name], mesh)


def test_trees() -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        got = sl.all_gather("b/dp ... -> b ...", {"a": x, "b": [x * 2, None]}, invariant=True)
        return sl.psum("q s d +tp -> q s d", {}) or [got["a"], got["b"][0] / 2, got["b"][1]]

    a, b, none = run(body, "b s d/tp")
    assert torch.equal(a, X) and torch.equal(b, X) and none is None


CONSTANT = torch.arange(5, dtype=torch.float64)


def test_assume() -> None:
    """A captured constant, a leaf that gather reads, a gradient through it; and a lie, found on a simulated mesh."""

    def body(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        constant = sl.assume("e", CONSTANT)
        again = sl.assume("b/dp s d/tp", x.detach() * 1)
        summed = sl.psum(sl.assume("b/dp s q +tp", x), "tp")
        whole = sl.gather(again, ("dp", "tp"))
        g = sl.grad(lambda w: sl.psum((sl.assume("d e", w * 2) * constant).sum() * x.sum(), ("dp", "tp")))(w)
        return constant + 0 * w[0], summed, sl.pmax(whole, ("dp", "tp")), g

    constant, summed, whole, g = run(body, ("e", "b/dp s q", "b s d", "d e"))
    assert torch.equal(constant, CONSTANT) and torch.equal(whole, X)
    torch.testing.assert_close(summed, X[..., :4] + X[..., 4:])
    torch.testing.assert_close(g, (2 * X.sum() * CONSTANT).expand(8, 5))
    with pytest.raises(sl.RankError, match="says equal over `dp`, but this rank's value is not that of index"):
        run(lambda x, w: sl.pmax(sl.assume("q s d/tp", x), "tp"))
