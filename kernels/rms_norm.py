"""RMSNorm over the last dim, forward and backward: reference, CPU kernels, Triton bodies, registration as opaque ops.

`y = x / sqrt(mean(x^2) + eps) * scale`, computed in float32 (float64 for float64) and rounded once, at the end
(Zhang and Sennrich 2019, arXiv:1910.07467; rounding as `torch.nn.functional.rms_norm`). Neither op has an autograd
formula: a differentiable function around the pair belongs to the caller.
"""

from typing import Any

import torch
from torch import Tensor

from shardlib.kernels.rounding import compute_dtype

# defined by hand: what `custom_op` wraps around a kernel takes as long as a small kernel
_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("rms_norm(Tensor x, Tensor scale, float eps) -> (Tensor, Tensor)")
_lib.define("rms_norm_backward(Tensor dy, Tensor x, Tensor scale, Tensor rstd) -> (Tensor, Tensor)")


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


def _forward(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`reference` with fewer passes over memory."""
    wide = compute_dtype(x)
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=wide)
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = torch.mul(x, rstd[..., None]).mul_(scale)
    return y.to(x.dtype).contiguous(), rstd.contiguous()


def _backward(dy: Tensor, x: Tensor, scale: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """`reference_backward` with fewer passes: both sums are products of dy * x with a vector."""
    n, wide = x.shape[-1], rstd.dtype
    rows, dy, r, weight = x.reshape(-1, n).to(wide), dy.reshape(-1, n).to(wide), rstd.reshape(-1, 1), scale.to(wide)
    product = dy * rows
    along = (product @ weight)[:, None] * r.pow(3) / n
    dscale = (r.T @ product).view(n)
    dx = torch.mul(dy, weight, out=product).mul_(r).addcmul_(rows, along, value=-1)
    return dx.view(x.shape).to(x.dtype), dscale.to(scale.dtype)


def _shapes(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=compute_dtype(x))


def _backward_shapes(dy: Tensor, x: Tensor, scale: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), scale.new_empty(scale.shape)


_lib.impl("rms_norm", _forward, "CPU")
_lib.impl("rms_norm", _shapes, "Meta")
_lib.impl("rms_norm_backward", _backward, "CPU")
_lib.impl("rms_norm_backward", _backward_shapes, "Meta")
rms_norm = torch.ops.shardlib.rms_norm.default
rms_norm_backward = torch.ops.shardlib.rms_norm_backward.default


try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    from shardlib.kernels.rounding import rounded  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    pass  # without Triton there is the CPU
else:
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

    # Each program takes every `programs`-th row, TURNS of them, and keeps its own sum for dscale: no atomics, the same
    # bits every time. (A loop up to a tensor fails in the interpreter of Triton 3.6 with numpy 2.4.)
    @triton.jit
    def backward_body(
        DY, X, Scale, Rstd, DX, Partial, rows, programs, TURNS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
    ):
        program = tl.program_id(0).to(tl.int64)
        col = tl.arange(0, BLOCK)
        inside = col < N
        wide = Rstd.dtype.element_ty
        scale = tl.load(Scale + col, mask=inside, other=0).to(wide)
        dscale = tl.zeros((BLOCK,), wide)
        for turn in range(TURNS):
            row = program + turn * programs
            at = row * N + col
            there = inside & (at < tl.cast(rows, tl.int64) * N)
            rstd = tl.load(Rstd + tl.minimum(row, rows - 1))
            unit = tl.load(X + at, mask=there, other=0).to(wide) * rstd
            dy = tl.load(DY + at, mask=there, other=0).to(wide)
            dunit = dy * scale
            dx = rstd * (dunit - unit * (tl.sum(dunit * unit) / N))
            tl.store(DX + at, rounded(dx, DX.dtype.element_ty), mask=there)
            dscale += dy * unit
        tl.store(Partial + program * N + col, dscale, mask=inside)

    def blocks(n: int) -> dict[str, int]:
        """How a row of n is laid over threads."""
        block = triton.next_power_of_2(n)
        return dict(BLOCK=block, num_warps=min(16, max(1, block // 512)))

    def launch(body: Any, programs: int, n: int, *operands: Tensor | int, **constants: float) -> None:
        if programs:
            # Fusion is stated because its default differs between Triton versions.
            body[(programs,)](*operands, N=n, **blocks(n), enable_fp_fusion=True, **constants)

    def triton_forward(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, scale = x.contiguous(), scale.contiguous()
        y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=compute_dtype(x))
        launch(forward_body, rstd.numel(), x.shape[-1], x, scale, y, rstd, EPS=eps)
        return y, rstd

    def triton_backward(dy: Tensor, x: Tensor, scale: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        dy, x, scale, rstd = dy.contiguous(), x.contiguous(), scale.contiguous(), rstd.contiguous()
        rows, n, programs = rstd.numel(), x.shape[-1], min(rstd.numel(), 512)
        dx, partial = torch.empty_like(x), rstd.new_empty(programs, n)
        turns = triton.cdiv(rows, max(programs, 1))
        launch(backward_body, programs, n, dy, x, scale, rstd, dx, partial, rows, programs, TURNS=turns)
        return dx, partial.sum(0).to(scale.dtype)

    _lib.impl("rms_norm", triton_forward, "CUDA")
    _lib.impl("rms_norm_backward", triton_backward, "CUDA")
