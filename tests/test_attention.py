"""`attention` against softmax written out, values and gradients; blocks joined by their log-sum-exp."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl

R = torch.Generator().manual_seed(3)
Q, K, V = (torch.randn(2, h, n, d, generator=R, dtype=torch.float64) for h, n, d in ((4, 5, 6), (2, 7, 6), (2, 7, 3)))
SEEN = torch.rand(2, 1, 5, 7, generator=R) > 0.4
SEEN[0, 0, 2] = False  # this query sees nothing
WHOLE = "batch/dp heads/cp seq head"  # a rank has some heads, and all of the sequence
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(causal=True),
    "scale": dict(scale=0.3),
    "mask": dict(mask=SEEN),
    "mask and causal": dict(mask=SEEN, causal=True),
    "bias": dict(mask=torch.randn(4, 5, 7, generator=R, dtype=torch.float64)),
    "bias and causal": dict(mask=torch.randn(5, 7, generator=R, dtype=torch.float64), causal=True),
}


def reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Row by row, in the words of the definition."""
    scores = torch.einsum("bgrqd,bgkd->bgrqk", q.unflatten(1, (k.shape[1], -1)), k).flatten(1, 2)
    scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if mask is not None:
        seen, scores = (seen & mask, scores) if mask.dtype == torch.bool else (seen, scores + mask)
    if causal:
        seen = seen & (torch.arange(q.shape[-2])[:, None] >= torch.arange(k.shape[-2]))
    weights = torch.where(seen, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return weights / torch.where(total > 0, total, 1.0) @ v, total.log().squeeze(-1)


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name):
    wanted, total = reference(Q, K, V, **OPTIONS[name])
    found, lse = sl.attention(Q, K, V, lse=True, **OPTIONS[name])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sl.attention(Q, K, V, **OPTIONS[name]), wanted, rtol=1e-12, atol=1e-12)

    def gradients(f: Any) -> Any:
        def total(*args: Tensor) -> Tensor:
            out = f(*args, **OPTIONS[name])
            return (out[0] if isinstance(out, tuple) else out).square().sum()

        return torch.func.grad(total, (0, 1, 2))(Q, K, V)

    rows = gradients(reference)
    torch.testing.assert_close(gradients(sl.attention), rows, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(partial(sl.attention, lse=True)), rows, rtol=1e-10, atol=1e-10)


def test_the_gradient_of_lse_and_second_derivatives():
    some = dict(mask=SEEN[1:])
    q, k, v = Q[1:], K[1:], V[1:]

    def total(f: Any) -> Any:
        return lambda q: sum((x.sin().sum() for x in f(q, k, v, **some)), q.new_zeros(()))

    ours, theirs = total(partial(sl.attention, lse=True)), total(reference)
    torch.testing.assert_close(torch.func.grad(ours)(q), torch.func.grad(theirs)(q), rtol=1e-10, atol=1e-10)
    found, wanted = (torch.func.jacrev(torch.func.grad(f))(q) for f in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, on the first jvp
@pytest.mark.parametrize("jit", [False, True])
def test_forward_mode_is_the_gradient_times_the_direction(jit):
    """Which torch's fused kernels do not have."""

    def both(q: Tensor, t: Tensor) -> Any:
        def total(q: Tensor) -> Any:
            return sl.attention(q, q, q, causal=True).sin().sum()  # type: ignore[union-attr]

        return torch.func.jvp(total, (q,), (t,))[1], (torch.func.grad(total)(q) * t).sum()  # type: ignore[misc]

    q, t = torch.randn(2, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    with sl.make_mesh(dp=1, simulate=True):
        f = sl.shard_map(both, in_specs=None, out_specs="")
        slope, along = (sl.jit(f) if jit else f)(sl.shard(q, "batch h s d"), sl.shard(t, "batch h s d"))
    assert slope.item() == pytest.approx(along.item(), rel=1e-12) and abs(slope.item()) > 0.1


def test_a_query_that_sees_nothing_has_no_gradient():
    def f(q: Tensor) -> Tensor:
        out, lse = sl.attention(q, K, V, mask=SEEN, lse=True)
        return out.sum() + torch.where(lse > -torch.inf, lse, 0.0).sum()

    assert sl.attention(Q, K, V, mask=SEEN, lse=True)[1][0, :, 2].eq(-torch.inf).all()
    g = torch.func.grad(f)(Q)
    assert g.isfinite().all() and not g[0, :, 2].any() and g[1].all()


def test_16_bit_scores_are_float32():
    q, k, v = (x.to(torch.bfloat16) for x in (Q * 4, K * 4, V))
    out, lse = sl.attention(q, k, v, lse=True)
    wanted, total = reference(q.double(), k.double(), v.double())
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(out.double(), wanted, rtol=0.01, atol=0.01)


def test_a_bias_may_be_wider_than_the_scores():
    q, k, v, bias = Q.float(), K.float(), V.float(), OPTIONS["bias"]["mask"]
    out, _ = sl.attention(q, k, v, mask=bias, lse=True)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, sl.attention(q, k, v, mask=bias), rtol=1e-5, atol=1e-5)


def test_a_ring_of_blocks_is_attention_to_all():
    """Program 4: keys and values go round, each block is joined by its log-sum-exp; blocks that none sees too."""

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = sl.iota("seq/cp", q.shape[2])
        block = k, v, at
        out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
        for turn in range(sl.axis_size("cp")):
            if turn:
                block = sl.ppermute(block, "cp", shift=1)
            new, more = sl.attention(q, *block[:2], mask=at[:, None] >= block[2], lse=True)
            both = torch.logaddexp(lse, more)
            out = out * (lse - both).exp()[..., None] + new * (more - both).exp()[..., None]
            lse = both
        return out

    q, k, v = (torch.randn(2, 3, 8, 4, generator=R, dtype=torch.float64) for _ in range(3))
    cut = "batch/dp heads seq/cp head"
    with sl.make_mesh(dp=2, cp=4, simulate=True):
        args = sl.shard((q, k, v), cut)
        split = sl.gather(sl.shard_map(ring, in_specs=cut, out_specs=cut)(*args))
        plain = sl.shard_map(lambda *a: sl.attention(*a, causal=True), in_specs=WHOLE, out_specs=WHOLE)
        heads = sl.gather(sl.jit(plain)(*sl.shard([x.repeat(1, 4, 1, 1) for x in (q, k, v)], WHOLE)))
    wanted = reference(q, k, v, causal=True)[0]
    torch.testing.assert_close(split, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(heads, wanted.repeat(1, 4, 1, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lse", [False, True])
def test_a_sum_still_to_be_made_is_refused(lse):
    def f(x: Tensor) -> Any:
        return sl.attention(sl.pending(x, "tp"), x, x, lse=lse)

    with sl.make_mesh(tp=2, simulate=True), pytest.raises(sl.SpecError, match="still waits for a sum over `tp`"):
        sl.shard_map(f, in_specs="b h s/tp d", out_specs=None)(sl.shard(torch.randn(1, 1, 4, 2), "b h s/tp d"))


@pytest.mark.parametrize(
    ("operands", "options", "said"),
    [
        ((Q, K[..., :5], V), {}, "q and k have one length of a head"),
        ((Q, K, V[:, :, :6]), {}, "k and v the same keys"),
        ((Q[:1], K, V), {}, "all the same batch"),
        ((Q[:, :3], K, V), {}, "3 heads of q cannot share 2 of k evenly"),
        ((Q.float(), K, V), {}, "floats of one dtype"),
        ((Q[0, 0], K[0, 0], V[0, 0]), {}, r"\(..., heads, length, head\)"),
        ((Q, K, V), dict(mask=SEEN.long()), "mask is bool"),
        ((Q, K, V), dict(mask=SEEN[..., :3]), r"mask \(2, 1, 5, 3\) does not broadcast to the scores, \(2, 4, 5, 7\)"),
    ],
)
def test_what_does_not_fit_is_named(operands, options, said):
    with pytest.raises(sl.SpecError, match=said):
        sl.attention(*operands, **options)
