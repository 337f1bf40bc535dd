"""RMSNorm over the last dim, forward and backward: plain reference, Triton body, registration as opaque ops.

`y = x / sqrt(mean(x^2) + eps) * scale`, computed in float32 (float64 for float64) and rounded once, at the end
(Zhang and Sennrich 2019, arXiv:1910.07467; rounding as `torch.nn.functional.rms_norm`). Neither op has an autograd
formula: a differentiable function around the pair belongs to the caller.
"""

from typing import Any

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def reference(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (..., n), scale (n) -> y (..., n) in the dtype of x, rstd (...) in the dtype of the computation."""
    wide = x.to(compute_dtype(x))
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * rstd[..., None] * scale.to(wide.dtype)
    return y.to(x.dtype).contiguous(), rstd.contiguous()


def reference_backward(dy: Tensor, x: Tensor, scale: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dy and x (..., n), scale (n), rstd (...) of the forward -> dx like x, dscale like scale."""
    unit = x.to(rstd.dtype) * rstd[..., None]
    dy = dy.to(rstd.dtype)
    dunit = dy * scale.to(rstd.dtype)
    dx = rstd[..., None] * (dunit - unit * (dunit * unit).mean(-1, keepdim=True))
    dscale = (dy * unit).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype).contiguous(), dscale.to(scale.dtype)


rms_norm = torch.library.custom_op("shardlib::rms_norm", reference, mutates_args=(), device_types="cpu")
rms_norm_backward = torch.library.custom_op(
    "shardlib::rms_norm_backward", reference_backward, mutates_args=(), device_types="cpu"
)


@rms_norm.register_fake
def _(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=compute_dtype(x))


@rms_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, scale: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), scale.new_empty(scale.shape)


try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:
    pass  # without Triton the reference is all there is
else:

    @triton.jit
    def rounded(x, dtype: tl.constexpr):
        """x in dtype, to nearest even. Triton's interpreter truncates float32 to bfloat16, so that is done in bits."""
        if dtype == tl.bfloat16:
            bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = tl.where(x != x, x, bits.to(tl.float32, bitcast=True))
        return x.to(dtype)

    # One row per turn, whole in registers: N is the length of the row, BLOCK the next power of two.
    @triton.jit
    def forward_body(X, Scale, Y, Rstd, N: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        col = tl.arange(0, BLOCK)
        inside = col < N
        wide = Rstd.dtype.element_ty
        x = tl.load(X + row * N + col, mask=inside, other=0).to(wide)
        scale = tl.load(Scale + col, mask=inside, other=0).to(wide)
        rstd = 1 / tl.sqrt(tl.sum(x * x) / N + EPS)
        tl.store(Rstd + row, rstd)
        tl.store(Y + row * N + col, rounded(x * rstd * scale, Y.dtype.element_ty), mask=inside)

    # Each program takes every `programs`-th row and keeps its own sum for dscale: no atomics, the same bits every time.
    @triton.jit
    def backward_body(DY, X, Scale, Rstd, DX, Partial, rows, programs, N: tl.constexpr, BLOCK: tl.constexpr):
        program = tl.program_id(0)
        col = tl.arange(0, BLOCK)
        inside = col < N
        wide = Rstd.dtype.element_ty
        scale = tl.load(Scale + col, mask=inside, other=0).to(wide)
        dscale = tl.zeros((BLOCK,), wide)
        for r in range(program, rows, programs):
            row = tl.cast(r, tl.int64)
            rstd = tl.load(Rstd + row)
            unit = tl.load(X + row * N + col, mask=inside, other=0).to(wide) * rstd
            dy = tl.load(DY + row * N + col, mask=inside, other=0).to(wide)
            dunit = dy * scale
            dx = rstd * (dunit - unit * (tl.sum(dunit * unit) / N))
            tl.store(DX + row * N + col, rounded(dx, DX.dtype.element_ty), mask=inside)
            dscale += dy * unit
        tl.store(Partial + program.to(tl.int64) * N + col, dscale, mask=inside)

    def launch(body: Any, programs: int, n: int, *operands: Tensor | int, **constants: float) -> None:
        block = triton.next_power_of_2(n)
        warps = min(16, max(1, block // 512))
        # Fusion is stated because its default differs between Triton versions.
        body[(programs,)](*operands, N=n, BLOCK=block, num_warps=warps, enable_fp_fusion=True, **constants)

    @rms_norm.register_kernel("cuda")
    def triton_forward(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, scale = x.contiguous(), scale.contiguous()
        y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=compute_dtype(x))
        launch(forward_body, rstd.numel(), x.shape[-1], x, scale, y, rstd, EPS=eps)
        return y, rstd

    @rms_norm_backward.register_kernel("cuda")
    def triton_backward(dy: Tensor, x: Tensor, scale: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        dy, x, scale, rstd = dy.contiguous(), x.contiguous(), scale.contiguous(), rstd.contiguous()
        rows, n, programs = rstd.numel(), x.shape[-1], min(rstd.numel(), 512)
        dx, partial = torch.empty_like(x), rstd.new_empty(programs, n)
        launch(backward_body, programs, n, dy, x, scale, rstd, dx, partial, rows, programs)
        return dx, partial.sum(0).to(scale.dtype)
