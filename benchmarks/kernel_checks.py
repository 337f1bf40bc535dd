"""Whether kernels give the right numbers on a device: checks that tests run in Triton's interpreter and `make gpu` on a
GPU. Each raises AssertionError."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.kernels import adamw
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


def check_first_update(device: str) -> None:
    """Where b is 0 its power is 0, and m and v are those of the gradient alone."""
    p, g, m, v, rate, *_ = buffers((5,), torch.float32, device)
    count = torch.ones((), dtype=torch.int64, device=device)
    got = adamw.triton_adamw(p, g, m, v, rate, count, 0.0, 0.0, 0.0, 0.0)
    torch.testing.assert_close(got, (-0.02 * g.sign(), g, g * g), rtol=1e-6, atol=0)


def check(device: str, shapes: list[tuple[int, ...]] = SHAPES) -> int:
    """All of the above, in every dtype; how many there were."""
    check_first_update(device)
    for shape in shapes:
        for dtype in DTYPES:
            check_triton(shape, dtype, device)
            check_triton_adamw(shape, dtype, device)
    return 2 * len(shapes) * len(DTYPES) + 1
