"""Functions that are one node of a graph and one kernel: Triton's on CUDA, torch's own on the CPU.

Each is an opaque op (kernels/) and here gets what an op lacks: a derivative of any order, vmap, checks. Types need no
rule: `Insert` treats it as any function that is not linear.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack  # how many transforms are forward mode
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.errors import SpecError
from shardlib.kernels import adamw as _adamw
from shardlib.kernels import cross_entropy as _cross_entropy
from shardlib.kernels import rms_norm as _rms_norm
from shardlib.types import short


def rms_norm(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * scale` over the last dim, computed in float32 or wider and rounded once.

    x (..., n), any float dtype; scale (n). The result is like x. No operand may be pending; the last dim is
    whole, not split. Zhang and Sennrich 2019 (arXiv:1910.07467), as `torch.nn.functional.rms_norm`. Derivatives
    of second order and forward mode are plain torch ops. Raises `SpecError`.
    """
    if has_torch_function((x, scale)):  # function modes, so that `Insert` sees it as one function
        return handle_torch_function(rms_norm, (x, scale), x, scale, eps)
    if not x.dim() or not x.shape[-1] or scale.shape != x.shape[-1:] or not _floats(x, scale):
        raise SpecError(
            f"rms_norm takes x (..., n) and scale (n), floats with n > 0; found {short(x)} and {short(scale)}"
        )
    refuse_nested("rms_norm")
    return _RmsNorm.apply(x, scale, eps)[0]  # type: ignore[index]


def token_scores(logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """`(log_softmax(logits)[at], logsumexp(logits))` over the last dim, the first 0 where `at` is -1.

    logits (..., n), any float dtype; at (...), int64 in -1..n-1 -> two tensors (...), computed in float32 or wider
    without a copy of the logits. No operand may be pending. Derivatives of second order and forward mode are plain
    torch ops. Raises `SpecError`, in the name of `token_loss`, and torch's IndexError.
    """
    if has_torch_function((logits, at)):
        return handle_torch_function(token_scores, (logits, at), logits, at)
    if not logits.dim() or not logits.shape[-1] or at.shape != logits.shape[:-1] or not _floats(logits):
        raise SpecError(f"token_loss takes logits (..., n), floats with n > 0; found {short(logits)} for {short(at)}")
    if at.dtype != torch.int64:
        raise SpecError(f"token_loss takes int64 targets, found {short(at)}")
    refuse_nested("token_loss")
    return _TokenScores.apply(logits, at)  # type: ignore[return-value]


def adamw(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    lr: Tensor,
    count: Tensor,
    b1: float | Tensor = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW update of a buffer: (update, new m, new v), in the dtype of m; the new parameters are `p + update`.

    p, g, m, v: any one shape; p and g of any float dtypes, m and v float32 or float64. `lr` and `count` (of the updates
    with this one) are 0-d tensors, whose values a traced step does not keep. `b1` may be one, too: then it is made of
    plain ops. Raises `SpecError`.
    """
    _check_adamw("adamw", p, g, m, v, lr, count)
    if isinstance(b1, Tensor):
        return _adamw.reference(p, g, m, v, lr, count, b1, b2, eps, weight_decay)
    return _adamw.adamw(p, g, m, v, lr, count, b1, b2, eps, weight_decay)


def adamw_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    lr: Tensor,
    count: Tensor,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """`adamw` in place: p, m and v become the new ones, but for the rounding of p. m and v are contiguous."""
    _check_adamw("adamw_", p, g, m, v, lr, count)
    if not (m.is_contiguous() and v.is_contiguous()):
        raise SpecError("adamw_ writes m and v in one pass over memory: make them contiguous")
    _adamw.adamw_(p, g, m, v, lr, count, b1, b2, eps, weight_decay)


def forward_modes() -> int:
    """How many forward derivatives are being taken."""
    return [i.key() for i in get_interpreter_stack() or ()].count(TransformType.Jvp)


def refuse_nested(name: str) -> None:
    """Raise within forward mode within forward mode."""
    if forward_modes() > 1:
        raise SpecError(f"{name}: torch loses terms of Functions where forward mode is nested; use jacrev for one")


def _floats(*tensors: Tensor) -> bool:
    return all(x.is_floating_point() for x in tensors)


def _check_adamw(name: str, p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: Tensor, count: Tensor) -> None:
    wide = m.dtype == v.dtype and m.dtype in (torch.float32, torch.float64)
    if not (p.shape == g.shape == m.shape == v.shape and wide and _floats(p, g)):
        raise SpecError(
            f"{name} takes p, g, m, v of one shape, floats, m and v both float32 or float64; found "
            + ", ".join(map(short, (p, g, m, v)))
        )
    if lr.dim() or count.dim() or not lr.is_floating_point() or count.is_floating_point():
        raise SpecError(
            f"{name} takes lr, a float, and count, an integer, as 0-d tensors; found {short(lr)}, {short(count)}"
        )


# ---- derivatives


def pushed(f: Callable[..., Any], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Any:
    """The forward derivative, as the transpose of the transpose: torch nests `vjp`, not `jvp`."""
    out, pull = torch.func.vjp(f, *primals)  # type: ignore[misc]
    many = isinstance(out, tuple)
    zeros = tuple(torch.zeros_like(y) for y in (out if many else (out,)))
    transpose = torch.func.vjp(lambda *g: pull(g if many else g[0]), *zeros)[1]
    out = transpose(tangents)
    return out if many else out[0]


def or_zeros(tangents: Sequence[Any], primals: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(p) if t is None else t for t, p in zip(tangents, primals, strict=False))


# ---- of rms_norm


def _value(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain ops, to be differentiated again."""
    return _rms_norm.reference(x, scale, eps)[0]


def _pulled(dy: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(dx, dscale) in plain ops, as functions of all three."""
    return _rms_norm.reference_backward(dy, x, scale, _rms_norm.reference(x, scale, eps)[1])


class _RmsNorm(torch.autograd.Function):
    """(x, scale, eps) -> (y, rstd)."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return _rms_norm.rms_norm(x, scale, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, scale, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, scale, output[1])
        ctx.save_for_forward(x, scale)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, scale, rstd = ctx.saved_tensors
        dx, dscale = _Gradient.apply(dy, x, scale, rstd, ctx.eps)  # type: ignore[misc]
        return dx, dscale, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, scale = ctx.saved_tensors
        ty = pushed(partial(_value, eps=ctx.eps), (x, scale), or_zeros(tangents, (x, scale)))
        return ty, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, scale: Tensor, eps: float) -> Any:
        if in_dims[1] is None:  # rows of x are alone anyhow
            return _RmsNorm.apply(x.movedim(in_dims[0] or 0, 0), scale, eps), (0, 0)
        f = partial(_rms_norm.reference, eps=eps)
        return torch.func.vmap(f, in_dims[:2])(x, scale), (0, 0)


class _Gradient(torch.autograd.Function):
    """(dy, x, scale, rstd, eps) -> (dx, dscale)."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, scale: Tensor, rstd: Tensor, eps: float) -> Any:  # type: ignore[override]
        return _rms_norm.rms_norm_backward(dy, x, scale, rstd)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *primals, _, ctx.eps = inputs
        ctx.save_for_backward(*primals)
        ctx.save_for_forward(*primals)

    @staticmethod
    def backward(ctx: Any, *duals: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *torch.func.vjp(partial(_pulled, eps=ctx.eps), *ctx.saved_tensors)[1](duals), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        primals = ctx.saved_tensors
        return pushed(partial(_pulled, eps=ctx.eps), primals, or_zeros(tangents, primals))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        f = partial(_pulled, eps=args[4])  # dscale is a sum of each sample
        return torch.func.vmap(f, in_dims[:3])(*args[:3]), (0, 0)


# ---- of token_scores


class _TokenScores(torch.autograd.Function):
    """(logits, at) -> (picked, lse)."""

    @staticmethod
    def forward(logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return _cross_entropy.token_scores(logits, at)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, dpicked: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _ScoresGradient.apply(dpicked, dlse, *ctx.saved_tensors), None  # type: ignore[return-value]

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _: Any) -> Any:
        logits, at = ctx.saved_tensors
        return pushed(partial(_cross_entropy.reference, at=at), (logits,), (tangent,))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *operands: Tensor) -> Any:
        return _TokenScores.apply(*_as_rows(info.batch_size, in_dims, operands)), (0, 0)


class _ScoresGradient(torch.autograd.Function):
    """(dpicked, dlse, logits, at, lse) -> dlogits."""

    @staticmethod
    def forward(*operands: Tensor) -> Tensor:  # type: ignore[override]
        return _cross_entropy.token_scores_backward(*operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.save_for_forward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, dual: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *primals, at = ctx.saved_tensors
        return *torch.func.vjp(partial(_scores_pulled, at=at), *primals)[1](dual), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *primals, at = ctx.saved_tensors
        return pushed(partial(_scores_pulled, at=at), (*primals,), or_zeros(tangents, (*primals,)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *operands: Tensor) -> Any:
        return _ScoresGradient.apply(*_as_rows(info.batch_size, in_dims, operands)), 0


def _scores_pulled(dpicked: Tensor, dlse: Tensor, logits: Tensor, at: Tensor) -> Tensor:
    """dlogits in plain ops, as a function of the first three."""
    return _cross_entropy.reference_backward(dpicked, dlse, logits, at, _cross_entropy.reference(logits, at)[1])


def _as_rows(size: int, in_dims: tuple[int | None, ...], operands: tuple[Tensor, ...]) -> list[Tensor]:
    """What is mapped over, as more rows: each row is alone anyhow."""
    pairs = zip(operands, in_dims, strict=True)
    return [x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in pairs]
