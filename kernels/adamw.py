"""AdamW over one buffer: plain reference, CPU kernel, Triton body, registration as opaque ops.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
    update = -lr (m / (1 - b1^count) / (sqrt(v / (1 - b2^count)) + eps) + decay p)

(Loshchilov and Hutter 2019, arXiv:1711.05101; as torch.optim.AdamW and optax). `lr` (float) and `count` (integer: of
the updates with this one) are 0-d tensors, so that a traced step is the same for all of their values. A buffer has one
`decay`: leaves that decay and leaves that do not are two buffers. All is computed in the dtype of m and v, float32 or
float64, whatever those of p and g.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VECTOR = 64  # bytes: of the widest vectors that torch computes in
OPTIONS = "Tensor lr, Tensor count, float b1, float b2, float eps, float decay"


def reference(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    lr: Tensor,
    count: Tensor,
    b1: float | Tensor,
    b2: float,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """p, g, m, v of one shape -> (update, m, v) in the dtype of m. The new parameters are `p + update`."""
    t, g = count.to(torch.float64), g.to(m.dtype)
    alpha, fix1, fix2 = (x.to(m.dtype) for x in (lr, 1 - b1**t, 1 - b2**t))
    b1 = b1.to(m.dtype) if isinstance(b1, Tensor) else b1
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    return -alpha * (m / fix1 / ((v / fix2).sqrt() + eps) + decay * p.to(m.dtype)), m, v


def advance(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    lr: Tensor,
    count: Tensor,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
) -> Tensor:
    """The update; m and v, which are contiguous, are written in place. One pass in torch's C++, one more for decay.

    torch updates a buffer of zeros here: the update then has all of its bits, where (p + update) - p would not.
    """
    update = torch.zeros_like(m)
    _fused(update, g, m, v, lr, count, b1, b2, eps, 0.0)
    return update.add_(p, alpha=-lr.item() * decay) if decay else update


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    m, v = (x.clone(memory_format=torch.contiguous_format) for x in (m, v))
    return advance(p, g, m, v, *options), m, v


def _adamw_(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *options: Any) -> None:
    if p.dtype == m.dtype and p.is_contiguous():
        _fused(p, g, m, v, *options)
    else:
        p.add_(advance(p, g, m, v, *options))


def _fused(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    lr: Tensor,
    count: Tensor,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
) -> None:
    """torch's own update, one pass in C++, in place; all contiguous and of one dtype, but for g.

    What is left over whole vectors torch rounds in another way. So it gets vectors of its own, filled up with zeros: an
    element's update does not depend on where in a leaf it lies, and stacked layers train as listed ones, bit for bit.
    """
    options: dict[str, Any] = dict(lr=lr.item(), beta1=b1, beta2=b2, weight_decay=decay, eps=eps)
    operands = [x.view(-1) for x in (p, g.to(m.dtype).contiguous(), m, v)]
    n, width = p.numel(), VECTOR // p.itemsize
    end = n - n % width
    parts = [[x[:end]] if end == n else [x[:end], F.pad(x[end:], (0, end + width - n))] for x in operands]
    steps = [count.to(torch.float32)] * len(parts[0])
    torch.ops.aten._fused_adamw_(*parts, [], steps, amsgrad=False, maximize=False, **options)
    if end < n:
        for i in (0, 2, 3):
            operands[i][end:] = parts[i][1][: n - end]


def _shapes(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return m.new_empty(m.shape), m.new_empty(m.shape), m.new_empty(m.shape)


adamw = torch.library.custom_op(
    "shardlib::adamw",
    _adamw,
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor p, Tensor g, Tensor m, Tensor v, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
adamw.register_fake(_shapes)
# p + update goes into p, rounded once (on the CPU decay is rounded by itself); m and v, contiguous, are written, too
adamw_ = torch.library.custom_op(
    "shardlib::adamw_",
    _adamw_,
    mutates_args=("p", "m", "v"),
    device_types="cpu",
    schema=f"(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) v, {OPTIONS}) -> ()",
)
adamw_.register_fake(lambda *_: None)


try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    from shardlib.kernels.rounding import rounded  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    pass  # without Triton there is the CPU
else:
    # A block per program. LOG_B is the logarithm of b: the count is read on the device, its power taken in float64.
    # `Out` gets the update; where it is P itself (WHOLE), p + update.
    @triton.jit
    def body(
        P,
        G,
        M,
        V,
        Rate,
        Count,
        Out,
        NewM,
        NewV,
        n,
        B1: tl.constexpr,
        B2: tl.constexpr,
        LOG_B1: tl.constexpr,
        LOG_B2: tl.constexpr,
        EPS: tl.constexpr,
        DECAY: tl.constexpr,
        WHOLE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        wide = M.dtype.element_ty
        rate, t = tl.load(Rate).to(tl.float64), tl.load(Count).to(tl.float64)
        fix1 = 1 - tl.exp(t * tl.full((), LOG_B1, tl.float64))
        fix2 = 1 - tl.exp(t * tl.full((), LOG_B2, tl.float64))
        alpha, root = (rate / fix1).to(wide), tl.sqrt(fix2).to(wide)
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        p = tl.load(P + at, mask=inside, other=0).to(wide)
        g = tl.load(G + at, mask=inside, other=0).to(wide)
        m = B1 * tl.load(M + at, mask=inside, other=0) + (1 - B1) * g
        v = B2 * tl.load(V + at, mask=inside, other=0) + (1 - B2) * g * g
        out = -(alpha * m / (tl.sqrt(v) / root + EPS) + (rate * DECAY).to(wide) * p)
        if WHOLE:
            out += p
        tl.store(Out + at, rounded(out, Out.dtype.element_ty), mask=inside)
        tl.store(NewM + at, m, mask=inside)
        tl.store(NewV + at, v, mask=inside)

    BLOCK, WARPS = 1024, 4

    def launch(
        old: tuple[Tensor, ...],
        new: tuple[Tensor, ...],
        lr: Tensor,
        count: Tensor,
        b1: float,
        b2: float,
        eps: float,
        decay: float,
    ) -> None:
        n, logs = new[0].numel(), [math.log(b) if b else -math.inf for b in (b1, b2)]
        if n:
            constants = dict(B1=b1, B2=b2, LOG_B1=logs[0], LOG_B2=logs[1], EPS=eps, DECAY=decay, BLOCK=BLOCK)
            whole = new[0] is old[0]
            # Fusion is stated because its default differs between Triton versions.
            body[(triton.cdiv(n, BLOCK),)](
                *old, lr, count, *new, n, WHOLE=whole, num_warps=WARPS, enable_fp_fusion=True, **constants
            )

    @adamw.register_kernel("cuda")
    def triton_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
        new = _shapes(p, g, m, v)
        launch((p.contiguous(), g.contiguous(), m.contiguous(), v.contiguous()), new, *options)
        return new

    @adamw_.register_kernel("cuda")
    def triton_adamw_(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *options: Any) -> None:
        whole = p.contiguous()
        launch((whole, g.contiguous(), m, v), (whole, m, v), *options)
        if whole is not p:
            p.copy_(whole)
