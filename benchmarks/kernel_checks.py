"""Whether kernels give the right numbers on a device: checks that tests run in Triton's interpreter and `make gpu` on a
GPU. Each raises AssertionError."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.kernels import adamw, cross_entropy, threefry
from shardlib.kernels import rms_norm as kernel

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES: list[tuple[int, ...]] = [(3, 5, 96), (4, 128), (1, 1), (0, 8), (7,)]
EPS = 1e-5


def operands(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """dy, x and scale."""
    make = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(shape, generator=make, dtype=torch.float64).to(device, dtype) for _ in range(2))
    return dy, x, (torch.rand(shape[-1], generator=make, dtype=torch.float64) + 0.5).to(device, dtype)


def buffers(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Any, ...]:
    """p and g of a dtype, m and v, the rate, the count, and numbers that decay."""
    make = torch.Generator().manual_seed(1)
    p, g, m, v = (torch.randn(shape, generator=make, dtype=torch.float64).to(device) for _ in range(4))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rate, count = torch.tensor(0.02, dtype=torch.float64, device=device), torch.tensor(3, device=device)
    return p.to(dtype), g.to(dtype), m.to(wide), v.square().to(wide), rate, count, 0.8, 0.95, 1e-6, 0.1


def in_float64(dy: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dscale by torch's own RMSNorm and autograd."""
    x, scale = x.double().requires_grad_(), scale.double().requires_grad_()
    y = F.rms_norm(x, x.shape[-1:], scale, EPS)
    dx, dscale = torch.autograd.grad(y, (x, scale), dy.double())
    return y.detach(), dx, dscale


def assert_rounded_once(got: Tensor, exact: Tensor) -> None:
    """As close to the exact value as its dtype can be, but for the last bits of the computation in float32."""
    unit = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=unit, atol=16 * min(unit, 1.2e-7))


def check_triton(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    dy, x, scale = operands(shape, dtype, device)
    y, rstd = kernel.triton_forward(x, scale, EPS)
    dx, dscale = kernel.triton_backward(dy, x, scale, rstd)
    for got, exact in zip((y, dx, dscale), in_float64(dy, x, scale), strict=True):
        assert got.dtype == dtype
        assert_rounded_once(got, exact)


def check_triton_adamw(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    p, g, m, v, *options = buffers(shape, dtype, device)
    update, *moments = adamw.triton_adamw(p, g, m, v, *options)
    exact = adamw.reference(*(x.double() for x in (p, g, m, v)), *options)
    rtol = 1e-13 if dtype == torch.float64 else 2e-6
    for got, wanted in zip((update, *moments), exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=rtol / 10)
    new = (p.to(m.dtype) + update).to(dtype)
    adamw.triton_adamw_(p, g, m, v, *options)
    torch.testing.assert_close(p, new, rtol=torch.finfo(dtype).eps, atol=1e-8)
    assert torch.equal(m, moments[0]) and torch.equal(v, moments[1])


def check_several(one: Any, several: Any, dtype: torch.dtype, device: str) -> None:
    """Updates of leaves of all `SHAPES`, one transposed, bitwise those of each alone."""
    options = buffers((1,), dtype, device)[4:]
    found, wanted = ([list(buffers(shape, dtype, device)[:4]) for shape in SHAPES] for _ in range(2))
    for leaf in (found[1], wanted[1]):
        leaf[:2] = (x.T.contiguous().T for x in leaf[:2])
    several(*map(list, zip(*found, strict=True)), *options)
    for leaf in wanted:
        one(*leaf, *options)
    for a, b in zip(found, wanted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_first_update(device: str) -> None:
    """Where b is 0 its power is 0, and m and v are those of the gradient alone."""
    p, g, m, v, rate, *_ = buffers((5,), torch.float32, device)
    count = torch.ones((), dtype=torch.int64, device=device)
    got = adamw.triton_adamw(p, g, m, v, rate, count, 0.0, 0.0, 0.0, 0.0)
    torch.testing.assert_close(got, (-0.02 * g.sign(), g, g * g), rtol=1e-6, atol=0)


def scored(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """dpicked, dlse, logits, and where in a row, -1 among it; some rows are -inf in half, the last wholly."""
    make = torch.Generator().manual_seed(2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dpicked, dlse = (torch.randn(shape[:-1], generator=make, dtype=torch.float64).to(device, wide) for _ in range(2))
    logits = 5 * torch.randn(shape, generator=make, dtype=torch.float64)
    rows = logits.view(-1, shape[-1])
    rows[1::3, : shape[-1] // 2] = -torch.inf
    rows[2:][-1:] = -torch.inf
    at = torch.arange(rows.shape[0]).view(shape[:-1]) * 7 % (shape[-1] + 1) - 1
    return dpicked, dlse, logits.to(device, dtype), at.to(device)


def scores_in_float64(dpicked: Tensor, dlse: Tensor, logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """picked, lse and dlogits by torch's log-softmax and autograd; a row of -inf has the lowest number for its lse."""
    logits = logits.double()
    masked = logits.isneginf().all(-1)
    x = logits.clone().masked_fill_(masked[..., None], 0).requires_grad_()
    lse, column = x.logsumexp(-1), at.clamp(min=0)[..., None]
    picked = torch.where(at < 0, 0, x.log_softmax(-1).gather(-1, column)[..., 0])
    (dlogits,) = torch.autograd.grad((picked, lse), x, (dpicked.double(), dlse.double()))
    lost = torch.where(at < 0, 0, dpicked.double())[..., None]
    alone = torch.zeros_like(logits).scatter_(-1, column, lost)
    return (
        torch.where(masked & (at >= 0), -torch.inf, picked.detach()),
        torch.where(masked, -torch.inf, lse.detach()),
        torch.where(masked[..., None], alone, dlogits),
    )


def check_scores(ops: Any, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Forward, backward and backward in place against float64; `ops`: those three."""
    scores, backward, backward_ = ops
    dpicked, dlse, logits, at = scored(shape, dtype, device)
    before = logits.clone()
    picked, lse = scores(logits, at)
    dlogits = backward(dpicked, dlse, logits, at, lse)
    assert torch.equal(logits, before) and dlogits.dtype == dtype and picked.dtype == lse.dtype == dpicked.dtype
    exact = scores_in_float64(dpicked, dlse, logits, at)
    bound = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close((picked.double(), lse.double()), exact[:2], rtol=bound, atol=bound)
    unit = max(torch.finfo(dtype).eps, bound)
    torch.testing.assert_close(dlogits.double(), exact[2], rtol=unit, atol=bound)
    backward_(dpicked, dlse, logits, at, lse)
    assert torch.equal(logits, dlogits)


def check_triton_scores(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    def into(pull: Any, fresh: bool) -> Any:
        def run(*operands: Tensor) -> Tensor:
            out = torch.empty_like(operands[2]) if fresh else operands[2]
            pull(*operands, out)
            return out

        return run

    pull = cross_entropy.triton_pull
    check_scores((cross_entropy.triton_scores, into(pull, True), into(pull, False)), shape, dtype, device)


def check_bad_logits(device: str) -> None:
    """NaN stays NaN, in its row alone; so does an infinite logit, and `at` beyond the row gives NaN."""
    _, _, logits, at = scored((5, 37), torch.float32, device)
    at[:2] = torch.tensor([37, 5], device=device)
    logits[1, 3], logits[3, 2] = torch.nan, torch.inf
    picked, lse = cross_entropy.triton_scores(logits, at)
    out = torch.empty_like(logits)
    ones = torch.ones_like(lse)
    cross_entropy.triton_pull(ones, ones, logits, at, lse, out)
    assert picked.isnan().tolist() == [True, True, False, True, False], picked
    assert lse.isnan().tolist() == [False, True, False, True, False], lse
    assert out.isnan().all(-1).tolist() == [True, True, False, True, False], out


def check_triton_threefry(device: str) -> None:
    """Bit for bit as on the CPU: every width and number of bits, indices beyond 32 bits, one key and many."""
    index = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**40 + 3, 2**63 - 1, -1, *range(1030)], device=device)
    key = torch.tensor([2**32 - 1, 7], device=device)
    for keys, at in ((key, index), (torch.stack((key, key + 1, key ^ 5))[:, None], index), (key, index[:0])):
        for width, keep in ((8, 7), (16, 16), (16, 10), (32, 32), (32, 23), (64, 64), (64, 52)):
            want = threefry.threefry(keys.cpu(), at.cpu(), width, keep)
            got = threefry.triton_threefry(keys, at, width, keep)
            assert got.dtype == want.dtype and torch.equal(got.cpu(), want), (width, keep)


def check(device: str, shapes: list[tuple[int, ...]] = SHAPES) -> int:
    """All of the above, in every dtype; how many there were."""
    check_first_update(device)
    check_bad_logits(device)
    for dtype in DTYPES:
        check_several(adamw.triton_adamw_, adamw.triton_adamw_all_, dtype, device)
    check_triton_threefry(device)
    for shape in shapes:
        for dtype in DTYPES:
            check_triton(shape, dtype, device)
            check_triton_adamw(shape, dtype, device)
            check_triton_scores(shape, dtype, device)
    return (3 * len(shapes) + 1) * len(DTYPES) + 3
