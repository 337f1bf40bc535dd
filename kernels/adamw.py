"""AdamW over one buffer or several: plain reference, CPU kernel, Triton bodies, registration as opaque ops.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
    update = -lr (m / (1 - b1^count) / (sqrt(v / (1 - b2^count)) + eps) + decay p)

(Loshchilov and Hutter 2019, arXiv:1711.05101; as torch.optim.AdamW and optax). `lr` (float) and `count` (integer: of
the updates with this one) are 0-d tensors, so that a traced step is the same for all of their values. A buffer has one
`decay`: leaves that decay and leaves that do not are two buffers. All is computed in the dtype of m and v, float32 or
float64, whatever those of p and g.
"""

import math
from collections.abc import Sequence
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
    _fused([update], [g], [m], [v], lr, count, b1, b2, eps, 0.0)
    return update.add_(p, alpha=-lr.item() * decay) if decay else update


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    m, v = (x.clone(memory_format=torch.contiguous_format) for x in (m, v))
    return advance(p, g, m, v, *options), m, v


def _adamw_(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *options: Any) -> None:
    _all([p], [g], [m], [v], *options)


def _all(ps: Sequence[Tensor], gs: Sequence[Tensor], ms: Sequence[Tensor], vs: Sequence[Tensor], *options: Any) -> None:
    whole = [i for i, p in enumerate(ps) if p.dtype == ms[i].dtype and p.is_contiguous()]
    if whole:
        p, g, m, v = ([xs[i] for i in whole] for xs in (ps, gs, ms, vs))
        _fused(p, g, m, v, *options)
    for i in {*range(len(ps))}.difference(whole):
        ps[i].add_(advance(ps[i], gs[i], ms[i], vs[i], *options))


def _fused(
    ps: list[Tensor],
    gs: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    lr: Tensor,
    count: Tensor,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
) -> None:
    """torch's own update, one pass in C++, in place; each leaf contiguous and of one dtype, but for its g.

    What is left over whole vectors torch rounds in another way. So it gets vectors of its own, filled up with zeros: an
    element's update does not depend on where in a leaf it lies, and stacked layers train as listed ones, bit for bit.
    """
    options: dict[str, Any] = dict(lr=lr.item(), beta1=b1, beta2=b2, weight_decay=decay, eps=eps)
    parts: tuple[list[Tensor], ...] = ([], [], [], [])  # p, g, m, v of each leaf, then of what is left over
    rest: list[tuple[Tensor, Tensor]] = []
    for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
        left = p.numel() % (VECTOR // p.itemsize)
        for i, x in enumerate((p, g.to(m.dtype).contiguous(), m, v)):
            flat = x.view(-1)
            parts[i].append(flat[: flat.numel() - left])
            if left:
                parts[i].append(F.pad(flat[-left:], (0, VECTOR // p.itemsize - left)))
                rest += [(flat[-left:], parts[i][-1][:left])] * (i != 1)
    steps = [count.to(torch.float32)] * len(parts[0])
    torch.ops.aten._fused_adamw_(*parts, [], steps, amsgrad=False, maximize=False, **options)
    for target, new in rest:
        target.copy_(new)


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
# the same for each of several leaves, which share dtypes and options; one launch on a GPU
_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define(f"adamw_all_(Tensor(a!)[] ps, Tensor[] gs, Tensor(b!)[] ms, Tensor(c!)[] vs, {OPTIONS}) -> ()")
_lib.impl("adamw_all_", _all, "CPU")
_lib.impl("adamw_all_", lambda *_: None, "Meta")
adamw_all_ = torch.ops.shardlib.adamw_all_.default


try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    from shardlib.kernels.rounding import rounded  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    pass  # without Triton there is the CPU
else:
    # LOG_B is the logarithm of b: the count is read on the device, its power taken in float64. The block `at` of `n`
    # elements; `Out` gets the update; where it is P itself (WHOLE), p + update.
    @triton.jit
    def block(
        P,
        G,
        M,
        V,
        Rate,
        Count,
        Out,
        NewM,
        NewV,
        at,
        n,
        B1: tl.constexpr,
        B2: tl.constexpr,
        LOG_B1: tl.constexpr,
        LOG_B2: tl.constexpr,
        EPS: tl.constexpr,
        DECAY: tl.constexpr,
        WHOLE: tl.constexpr,
    ):
        wide = M.dtype.element_ty
        rate, t = tl.load(Rate).to(tl.float64), tl.load(Count).to(tl.float64)
        fix1 = 1 - tl.exp(t * tl.full((), LOG_B1, tl.float64))
        fix2 = 1 - tl.exp(t * tl.full((), LOG_B2, tl.float64))
        alpha, root = (rate / fix1).to(wide), tl.sqrt(fix2).to(wide)
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

    # A block per program.
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
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        block(P, G, M, V, Rate, Count, Out, NewM, NewV, at, n, B1, B2, LOG_B1, LOG_B2, EPS, DECAY, WHOLE)

    # Leaf `program_id(1)`: a row of `Leaves` has the addresses of p, g, m, v and the number of elements. P, G and M are
    # those of the first leaf, for their types.
    @triton.jit
    def body_all(
        Leaves,
        P,
        G,
        M,
        Rate,
        Count,
        B1: tl.constexpr,
        B2: tl.constexpr,
        LOG_B1: tl.constexpr,
        LOG_B2: tl.constexpr,
        EPS: tl.constexpr,
        DECAY: tl.constexpr,
        WHOLE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = Leaves + tl.program_id(1) * 5
        at, n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.load(row + 4)
        p, g = tl.load(row).to(P.dtype), tl.load(row + 1).to(G.dtype)
        m, v = tl.load(row + 2).to(M.dtype), tl.load(row + 3).to(M.dtype)
        block(p, g, m, v, Rate, Count, p, m, v, at, n, B1, B2, LOG_B1, LOG_B2, EPS, DECAY, WHOLE)

    BLOCK, WARPS = 1024, 4

    def constants(whole: bool, b1: float, b2: float, eps: float, decay: float) -> dict[str, Any]:
        logs = [math.log(b) if b else -math.inf for b in (b1, b2)]
        # Fusion is stated because its default differs between Triton versions.
        options = dict(WHOLE=whole, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=True)
        return dict(B1=b1, B2=b2, LOG_B1=logs[0], LOG_B2=logs[1], EPS=eps, DECAY=decay) | options

    def launch(old: tuple[Tensor, ...], new: tuple[Tensor, ...], lr: Tensor, count: Tensor, *options: float) -> None:
        n = new[0].numel()
        if n:
            given: tuple[Any, ...] = (*old, lr, count, *new, n)
            body[(triton.cdiv(n, BLOCK),)](*given, **constants(new[0] is old[0], *options))

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

    def triton_adamw_all_(
        ps: Sequence[Tensor],
        gs: Sequence[Tensor],
        ms: Sequence[Tensor],
        vs: Sequence[Tensor],
        lr: Tensor,
        count: Tensor,
        *options: float,
    ) -> None:
        whole, gs = [p.contiguous() for p in ps], [g.contiguous() for g in gs]
        rows = [[x.data_ptr() for x in xs] + [xs[0].numel()] for xs in zip(whole, gs, ms, vs, strict=True)]
        blocks = triton.cdiv(max(n for *_, n in rows), BLOCK)
        if blocks:
            leaves = torch.tensor(rows).to(lr.device, non_blocking=True)
            body_all[blocks, len(rows)](leaves, whole[0], gs[0], ms[0], lr, count, **constants(True, *options))
        for p, x in zip(ps, whole, strict=True):
            if x is not p:
                p.copy_(x)

    _lib.impl("adamw_all_", triton_adamw_all_, "CUDA")
