"""The scores that cross-entropy takes of each row of logits: reference, CPU kernels, Triton bodies, registration.

    lse = log(sum(exp(row))),  picked = row[at] - lse, and 0 where `at` is -1

of a row of V logits, which may be one rank's piece of a longer row: where it is whole, the loss is -picked. Computed in
float32 (float64 for float64). Where all of a row is -inf, lse is; the rest is as if it were the least finite number.
`at` lies in -1..V-1: beyond, the CPU raises torch's IndexError and Triton gives NaN. No op has an autograd formula: a
differentiable function around them belongs to the caller.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.kernels.rounding import compute_dtype

CHUNK = 1 << 18  # how many logits the CPU takes at a time, so that they stay in its caches

_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("token_scores(Tensor logits, Tensor at) -> (Tensor, Tensor)")
_lib.define("token_scores_backward(Tensor dpicked, Tensor dlse, Tensor logits, Tensor at, Tensor lse) -> Tensor")
_lib.define("token_scores_backward_(Tensor dpicked, Tensor dlse, Tensor(a!) logits, Tensor at, Tensor lse) -> ()")


def reference(logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """logits (..., V), at (...) int64 -> picked (...), lse (...), in the dtype of the computation."""
    wide = logits.to(compute_dtype(logits))
    lse = wide.logsumexp(-1)
    found = wide.gather(-1, at.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(at >= 0, found - _finite(lse), 0), lse


def reference_backward(dpicked: Tensor, dlse: Tensor, logits: Tensor, at: Tensor, lse: Tensor) -> Tensor:
    """dpicked and dlse (...), logits and at of the forward, its lse -> dlogits like logits."""
    dpicked = torch.where(at >= 0, dpicked, 0).unsqueeze(-1)
    softmax = (logits.to(lse.dtype) - _finite(lse).unsqueeze(-1)).exp()
    dlogits = softmax * (dlse.unsqueeze(-1) - dpicked)
    return dlogits.scatter_add(-1, at.clamp(min=0).unsqueeze(-1), dpicked).to(logits.dtype)


def _finite(lse: Tensor) -> Tensor:
    return lse.clamp(min=torch.finfo(lse.dtype).min)


def _scores(logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """`reference` in chunks of rows, in one small buffer."""
    n, wide = logits.shape[-1], compute_dtype(logits)
    per, rows, ids = max(1, CHUNK // n), logits.reshape(-1, n), at.reshape(-1)
    lse, buffer = (rows.new_empty(size, dtype=wide) for size in (ids.shape, (min(per, len(rows)), n)))
    for x, out in zip(rows.split(per), lse.split(per), strict=True):
        peak = _finite(x.amax(-1, keepdim=True).to(wide))
        shifted = torch.sub(x, peak, out=buffer[: len(x)])
        torch.add(shifted.exp_().sum(-1).log_(), peak.squeeze(-1), out=out)
    found = F.nll_loss(rows, ids, ignore_index=-1, reduction="none").to(wide)  # -row[at]; raises for `at` beyond
    picked = torch.where(ids >= 0, -found - _finite(lse), 0)
    return picked.view(at.shape), lse.view(at.shape)


def _pull(dpicked: Tensor, dlse: Tensor, logits: Tensor, at: Tensor, lse: Tensor, out: Tensor) -> None:
    """`reference_backward` in chunks of rows, into `out`, which is contiguous and may be `logits`."""
    n = logits.shape[-1]
    per, ids = max(1, CHUNK // n), at.reshape(-1, 1)
    add = torch.where(ids >= 0, dpicked.reshape(-1, 1), 0)
    columns = ids.clamp(min=0), add, dlse.reshape(-1, 1) - add, _finite(lse).reshape(-1, 1)
    buffer = None if out.dtype == lse.dtype else lse.new_empty(min(per, len(ids)), n)
    chunks = (x.split(per) for x in (logits.reshape(-1, n), out.view(-1, n), *columns))
    for x, y, i, added, scale, shift in zip(*chunks, strict=True):
        wide = y if buffer is None else buffer[: len(y)]
        torch.sub(x, shift, out=wide).exp_().mul_(scale).scatter_add_(1, i, added)
        if buffer is not None:
            y.copy_(wide)


def _register(device: str, scores: Callable[..., Any], pull: Callable[..., None]) -> None:
    """The three ops on a device; `pull` writes into its last operand."""

    def backward(dpicked: Tensor, dlse: Tensor, logits: Tensor, at: Tensor, lse: Tensor) -> Tensor:
        out = logits.new_empty(logits.shape)
        pull(dpicked, dlse, logits, at, lse, out)
        return out

    def backward_(dpicked: Tensor, dlse: Tensor, logits: Tensor, at: Tensor, lse: Tensor) -> None:
        out = logits.contiguous()
        pull(dpicked, dlse, out, at, lse, out)
        if out is not logits:
            logits.copy_(out)

    for name, op in (
        ("token_scores", scores),
        ("token_scores_backward", backward),
        ("token_scores_backward_", backward_),
    ):
        _lib.impl(name, op, device)


def _shapes(logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(logits.new_empty(at.shape, dtype=compute_dtype(logits)) for _ in range(2))  # type: ignore[return-value]


_register("CPU", _scores, _pull)
_register("Meta", _shapes, lambda *_: None)
token_scores = torch.ops.shardlib.token_scores.default
token_scores_backward = torch.ops.shardlib.token_scores_backward.default
token_scores_backward_ = torch.ops.shardlib.token_scores_backward_.default


try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    from shardlib.kernels.rounding import rounded  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    pass  # without Triton there is the CPU
else:
    # One row of N per program, BLOCK columns per turn. Each lane keeps its own maximum and sum, with one exponential
    # per logit; LOWEST is the least finite number.
    @triton.jit
    def forward_body(Logits, At, Picked, Lse, N: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        lanes = tl.arange(0, BLOCK)
        wide = Lse.dtype.element_ty
        peak, total = tl.full((BLOCK,), LOWEST, wide), tl.zeros((BLOCK,), wide)
        for start in range(0, N, BLOCK):
            col = start + lanes
            x = tl.load(Logits + row * N + col, mask=col < N, other=-float("inf")).to(wide)
            higher = x > peak
            small = tl.exp(tl.where(higher, peak - x, x - peak))
            total = tl.where(higher, total * small + 1, total + small)
            peak = tl.where(higher, x, peak)
        top = tl.max(peak)
        lse = tl.log(tl.sum(total * tl.exp(peak - top))) + top
        at = tl.load(At + row)
        found = tl.load(Logits + row * N + at, mask=(at >= 0) & (at < N), other=float("nan")).to(wide)
        tl.store(Lse + row, lse)
        tl.store(Picked + row, tl.where(at < 0, 0.0, found - tl.where(lse < LOWEST, LOWEST, lse)))

    @triton.jit
    def backward_body(DPicked, DLse, Logits, At, Lse, Out, N: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        lanes = tl.arange(0, BLOCK)
        wide = Lse.dtype.element_ty
        at, lse = tl.load(At + row), tl.load(Lse + row)
        add = tl.where(at < 0, 0.0, tl.where(at < N, tl.load(DPicked + row), float("nan")))
        scale = tl.load(DLse + row) - add
        shift = tl.where(lse < LOWEST, LOWEST, lse)
        for start in range(0, N, BLOCK):
            col = start + lanes
            x = tl.load(Logits + row * N + col, mask=col < N, other=-float("inf")).to(wide)
            d = tl.exp(x - shift) * scale + tl.where(col == at, add, 0.0)
            tl.store(Out + row * N + col, rounded(d, Out.dtype.element_ty), mask=col < N)

    def blocks(n: int) -> dict[str, int]:
        """How a row of n is laid over threads."""
        block = min(4096, triton.next_power_of_2(n))
        return dict(BLOCK=block, num_warps=max(1, block // 512))

    def launch(body: Any, lse: Tensor, n: int, *operands: Tensor) -> None:
        if lse.numel():
            constants = dict(N=n, LOWEST=torch.finfo(lse.dtype).min, **blocks(n))
            # Fusion is stated because its default differs between Triton versions.
            body[(lse.numel(),)](*operands, enable_fp_fusion=True, **constants)

    def triton_scores(logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        picked, lse = _shapes(logits, at)
        launch(forward_body, lse, logits.shape[-1], logits.contiguous(), at.contiguous(), picked, lse)
        return picked, lse

    def triton_pull(*operands: Tensor) -> None:
        """As `_pull`."""
        dpicked, dlse, logits, at, lse, out = (x.contiguous() for x in operands)
        launch(backward_body, lse, logits.shape[-1], dpicked, dlse, logits, at, lse, out)

    _register("CUDA", triton_scores, triton_pull)
