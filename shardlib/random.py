"""Random numbers as functions of a key and a global element index, with the values of `jax.random`.

Element n of a draw is `threefry(key, n)` and depends on nothing else: not on the mesh, the rank, the device or the
size of the array. So a rank draws its shard of a global array by asking for the global indices that it holds:

    index = global_index((vocab, model), starts=(0, rank * 64), sizes=(vocab, 64))
    shard = normal(key, (vocab, model), index=index)  # == normal(key, (vocab, model))[:, rank * 64 : rank * 64 + 64]

A key is an int64 tensor of shape (2,) that holds two unsigned 32-bit words; use each key once, for one draw or one
`split`. torch's own generators are neither read nor moved. A draw is one opaque operator, `shardlib::threefry`, with
fake and batching rules: it works under `make_fx`, fake tensors, modes and `torch.func`. Draws carry no gradient.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), Threefry-2x32 with 20 rounds; JAX 0.10.2
with `jax_threefry_partitionable` and `jax_enable_x64`. Bit-equal to JAX: keys, `split`, `fold_in`, `bits`, `uniform`
on (0, 1), `bernoulli`, `randint`. `normal` and `truncated_normal` agree to a few units in the last place.
"""

import functools
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.kernels import threefry as kernel

_WORD = 2**32 - 1

# dtype: (bits drawn, bits kept: the fraction of the significand, `struct` code)
_FLOATS = {
    torch.float64: (64, 52, "<d"),
    torch.float32: (32, 23, "<f"),
    torch.float16: (16, 10, "<e"),
    torch.bfloat16: (8, 7, "<f"),
}

# Giles, "Approximating the erfinv function" (2010), as XLA uses it; highest power first. dtype: rows of
# (upper end of w, take the square root of w, centre, coefficients), with w = -log(1 - u * u).
_GILES = {
    torch.float32: (
        (5.0, False, 2.5, (
            2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
            -0.00417768164, 0.246640727, 1.50140941)),
        (math.inf, True, 3.0, (
            -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
            0.00943887047, 1.00167406, 2.83297682)),
    ),
    torch.float64: (
        (6.25, False, 3.125, (
            -3.64441206401782e-21, -1.6850591381820166e-19, 1.28584807152564e-18, 1.1157877678025181e-17,
            -1.333171662854621e-16, 2.0972767875968562e-17, 6.637638134358324e-15, -4.054566272975207e-14,
            -8.151934197605472e-14, 2.6335093153082323e-12, -1.2975133253453532e-11, -5.415412054294628e-11,
            1.0512122733215323e-09, -4.112633980346984e-09, -2.9070369957882005e-08, 4.2347877827932404e-07,
            -1.3654692000834679e-06, -1.3882523362786469e-05, 0.00018673420803405714, -0.000740702534166267,
            -0.006033670871430149, 0.24015818242558962, 1.6536545626831027)),
        (16.0, True, 3.25, (
            2.2137376921775787e-09, 9.075656193888539e-08, -2.7517406297064545e-07, 1.8239629214389228e-08,
            1.5027403968909828e-06, -4.013867526981546e-06, 2.9234449089955446e-06, 1.2475304481671779e-05,
            -4.7318229009055734e-05, 6.828485145957318e-05, 2.4031110387097894e-05, -0.0003550375203628475,
            0.0009532893797373805, -0.0016882755560235047, 0.002491442096107851, -0.003751208507569241,
            0.005370914553590064, 1.0052589676941592, 3.0838856104922208)),
        (math.inf, True, 5.0, (
            -2.7109920616438573e-11, -2.555641816996525e-10, 1.5076572693500548e-09, -3.789465440126737e-09,
            7.61570120807834e-09, -1.496002662714924e-08, 2.914795345090108e-08, -6.771199775845234e-08,
            2.2900482228026655e-07, -9.9298272942317e-07, 4.526062597223154e-06, -1.968177810553167e-05,
            7.599527703001776e-05, -0.00021503011930044477, -0.00013871931833623122, 1.0103004648345344,
            4.849906401408584)),
    ),
}  # fmt: skip


@functools.cache
def _giles(dtype: torch.dtype) -> list[tuple[float, bool, float, tuple[Tensor, ...]]]:
    """The rows of `_GILES`, the outermost first, with 0-d coefficients, which are faster operands than numbers."""
    return [(*row[:3], torch.tensor(row[3], dtype=dtype, device="cpu").unbind()) for row in reversed(_GILES[dtype])]


def _erfinv(u: Tensor) -> Tensor:
    """The real kernel of `shardlib::erfinv`: u in [-1, 1] -> erfinv(u), in blocks; 16-bit types by way of float32."""
    flat, out = u.reshape(-1), torch.empty_like(u, memory_format=torch.contiguous_format)
    compute = torch.promote_types(u.dtype, torch.float32)
    for block in kernel.blocks(u):
        x = flat[block].to(compute)
        w = (x * x).neg_().log1p_().neg_()
        root, factor = w.sqrt(), None
        for end, takes_root, centre, coefficients in _giles(compute):
            z = (root if takes_root else w) - centre
            p = coefficients[0]
            for coefficient in coefficients[1:]:
                p = (p * z).add_(coefficient)
            factor = p if factor is None else torch.where(w < end, p, factor)
        assert factor is not None
        out.view(-1)[block] = torch.where(x.abs() == 1, x * math.inf, factor.mul_(x))
    return out


_OPS = torch.library.Library("shardlib", "FRAGMENT")
_OPS.define("erfinv(Tensor u) -> Tensor")
_OPS.impl("erfinv", _erfinv, "CompositeExplicitAutograd")
_OPS.impl("erfinv", lambda u: torch.empty_like(u, memory_format=torch.contiguous_format), "Meta")
torch.library.register_vmap("shardlib::erfinv", lambda _, dims, u: (torch.ops.shardlib.erfinv(u), dims[0]), lib=_OPS)


def _draw(key: Tensor, shape: Sequence[int], index: Tensor | None, width: int, keep: int) -> Tensor:
    if key.dtype != torch.int64 or key.shape != (2,):
        raise TypeError(
            f"a key is an int64 tensor of shape (2,), this one is {key.dtype} of shape {tuple(key.shape)}. "
            "Usual reason: the result of split(key, n) holds n keys; take one, as in `k1, k2 = split(key)`"
        )
    if index is None:
        index = torch.arange(math.prod(shape), device=key.device)
        index = index if len(shape) == 1 else index.view(tuple(shape))
    elif index.dtype != torch.int64:
        raise TypeError(f"index holds global flat element indices as int64 (see global_index), got {index.dtype}")
    return kernel.threefry(key, index, width, keep)


def _pair(x: Tensor) -> Tensor:
    return torch.stack((x >> 32, x), -1) & _WORD


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """The key of an integer seed: int64 (2,), the high and the low word of the seed as a 64-bit integer.

    Equals `jax.random.key_data(jax.random.key(seed))` with x64 enabled. Without x64 JAX cuts the seed to 32 bits first:
    the same for seeds in [0, 2**32). ValueError if the seed does not fit 64 bits.
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"a seed has 64 bits, from -2**63 to 2**64 - 1; got {seed}")
    return torch.tensor((seed >> 32 & _WORD, seed & _WORD), dtype=torch.int64, device=device)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key (2,) from a key (2,) and a number, such as a layer, a step or a rank.

    data is an int or a 0-d integer tensor, which may be traced; its low 32 bits count. `fold_in(key, n)` equals
    `split(key, m)[n]`, so use a key for one of the two. TypeError if data is a tensor of another shape or not integer.
    """
    if not isinstance(data, Tensor):
        index = torch.full((), data & _WORD, dtype=torch.int64, device=key.device)
    elif data.dim() or data.is_floating_point() or data.is_complex():
        raise TypeError(f"fold_in takes an int or a 0-d integer tensor, got {data.dtype} of shape {tuple(data.shape)}")
    else:
        index = data.to(key.device, torch.int64) & _WORD
    return _pair(_draw(key, (), index, 64, 64))


def split(key: Tensor, num_or_shape: int | Sequence[int] = 2) -> Tensor:
    """Independent keys from one: key (2,) -> (num, 2), or (*shape, 2) in row-major order.

    Key n does not depend on how many are asked for: `split(key, 3)` starts with `split(key, 2)`.
    """
    shape = (num_or_shape,) if isinstance(num_or_shape, int) else num_or_shape
    return _pair(_draw(key, shape, None, 64, 64))


def bits(key: Tensor, shape: Sequence[int], width: int = 32, *, index: Tensor | None = None) -> Tensor:
    """Random bits: key (2,) -> int64 of `shape`, or of `index.shape`.

    width is 8, 16, 32 or 64. Up to 32 the result holds the unsigned value, 0 to 2**width - 1; at 64 it holds the bit
    pattern, so half of the values are negative. index: int64, the global flat row-major indices (in the global `shape`)
    of the wanted elements; all by default. ValueError for another width.
    """
    if width not in (8, 16, 32, 64):
        raise ValueError(f"bits draws 8, 16, 32 or 64 bits per element, got width={width}")
    x = _draw(key, shape, index, width, width)
    return x if width == 64 else x.to(torch.int64) & 2**width - 1


def _round(x: float, dtype: torch.dtype) -> float:
    """x rounded to the nearest value of dtype; without a tensor, which would become a constant of a traced graph."""
    if dtype not in _FLOATS:
        raise TypeError(f"random floats are {', '.join(str(known) for known in _FLOATS)}; got {dtype}")
    code = _FLOATS[dtype][2]
    if dtype != torch.bfloat16 or math.isinf(x):
        return struct.unpack(code, struct.pack(code, x))[0]
    (pattern,) = struct.unpack("<I", struct.pack("<f", x))
    pattern += 0x7FFF + (pattern >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", pattern & 0xFFFF0000))[0]


def uniform(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, minval: float = 0.0,
            maxval: float = 1.0, *, index: Tensor | None = None) -> Tensor:  # fmt: skip
    """Uniform floats in [minval, maxval): key (2,) -> dtype of `shape`, or of `index.shape` (see `bits`).

    dtype is float64, float32, float16 or bfloat16 (128 distinct values only, as in JAX). Bit-equal to JAX on (0, 1) and
    wherever fraction * (maxval - minval) is exact; else within one unit in the last place of the larger bound, since
    XLA may fuse the multiply and the add. Where the bounds are far from 0 and close together, rounding can give maxval.
    TypeError for another dtype, ValueError if maxval < minval.
    """
    low, high = _round(minval, dtype), _round(maxval, dtype)
    if high < low:
        raise ValueError(f"uniform draws from [minval, maxval), but minval={minval} is above maxval={maxval}")
    width, fraction, _ = _FLOATS[dtype]
    # JAX puts the bits behind a leading one and subtracts one: the integer over 2**fraction, exactly. A power of two
    # commutes with rounding, so one product does the work of two, and it cannot fall below low.
    scaled = _draw(key, shape, index, width, fraction).to(dtype) * (_round(high - low, dtype) * 2.0**-fraction)
    return scaled + low if low else scaled


def normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *,
           index: Tensor | None = None) -> Tensor:  # fmt: skip
    """Standard normal floats: key (2,) -> dtype of `shape`, or of `index.shape` (see `bits`).

    sqrt(2) * erfinv(u) with u uniform on (-1, 1). Within 5e-7 (float32) and 5e-15 (float64) of JAX, relative; the
    16-bit types compute erfinv in float32. |x| is below 5.5 in float32, 8.4 in float64. TypeError for another dtype.
    """
    root = _round(math.sqrt(2), dtype)
    lowest = torch.finfo(dtype).eps / 2 - 1  # nextafter(-1, 0)
    return torch.ops.shardlib.erfinv.default(uniform(key, shape, dtype, lowest, 1.0, index=index)) * root


def _inside(bound: float, toward: float, dtype: torch.dtype) -> float:
    """The neighbour of `bound` in dtype, toward an infinity."""
    info = torch.finfo(dtype)
    if math.isinf(bound):
        return math.copysign(info.max, bound)
    step = (math.nextafter(bound, toward) - bound) * (info.eps / torch.finfo(torch.float64).eps)
    smallest = info.smallest_normal * info.eps
    return bound + (step if abs(step) > smallest else math.copysign(smallest, toward))


def truncated_normal(key: Tensor, lower: float, upper: float, shape: Sequence[int],
                     dtype: torch.dtype = torch.float32, *, index: Tensor | None = None) -> Tensor:  # fmt: skip
    """Normal floats given that they lie in (lower, upper): key (2,) -> dtype of `shape`, or of `index.shape`.

    The bounds are in standard deviations and may be infinite; the result lies strictly between them and isn't rescaled
    to unit variance. Within 8 eps (|x| + 0.25) of JAX. TypeError for another dtype, ValueError unless lower < upper.
    """
    root = _round(math.sqrt(2), dtype)
    low, high = _round(lower, dtype), _round(upper, dtype)
    if not low < high:
        raise ValueError(f"truncated_normal needs lower < upper, got lower={lower}, upper={upper} in {dtype}")
    erf_low, erf_high = (_round(math.erf(_round(bound / root, dtype)), dtype) for bound in (low, high))
    x = torch.ops.shardlib.erfinv.default(uniform(key, shape, dtype, erf_low, erf_high, index=index)) * root
    return x.clamp(_inside(low, math.inf, dtype), _inside(high, -math.inf, dtype))


def bernoulli(key: Tensor, p: float | Tensor, shape: Sequence[int], *, index: Tensor | None = None) -> Tensor:
    """True with probability p: key (2,) -> bool of `shape`, or of `index.shape` (see `bits`).

    Compares uniform draws in p's own type with p: float32 for a Python float, else the dtype of the tensor p, which
    must broadcast to the result. TypeError for a p of another dtype.
    """
    dtype = p.dtype if isinstance(p, Tensor) else torch.float32
    return uniform(key, shape, dtype, index=index) < (p if isinstance(p, Tensor) else _round(p, dtype))


def stochastic_round(key: Tensor, x: Tensor, *, index: Tensor | None = None) -> Tensor:
    """x in bfloat16, rounded up or down at random, so that its mean is x: key (2,), x float32 -> bfloat16 like x.

    Away from zero with probability (the 16 bits that bfloat16 lacks) / 2**16: what is a bfloat16 stays, as do
    infinities and NaN. float64 is rounded to float32 first. index: of the elements, like x (see `bits`); by default x
    is a whole array. TypeError for another dtype.
    """
    if not x.is_floating_point():
        raise TypeError(f"stochastic_round rounds float32 to bfloat16, got {x.dtype}")
    wide = x.to(torch.float32)
    rounded = (wide.view(torch.int32) + _draw(key, x.shape, index, 16, 16) & -(2**16)).view(torch.float32)
    return torch.where(wide.isfinite(), rounded, wide).to(torch.bfloat16)


def _unsigned_mod(x: Tensor, span: int, width: int) -> Tensor:
    """x mod span, 1 <= span <= 2**width, for unsigned numbers as `bits` gives them; torch divides signed ones only."""
    if width < 64:
        return x % span
    if span >= 2**63:  # x < 2 * span: subtract once, where x >= span, both seen as signed patterns
        pattern = span - 2**64
        return torch.where((x < 0) & (x >= pattern), x - pattern, x)
    half = x >> 1 & 2**63 - 1
    rest = half % span * 2 + (x & 1)  # below 2 * span; negative if it passed 2**63
    return torch.where((rest < 0) | (rest >= span), rest - span, rest)


def randint(key: Tensor, shape: Sequence[int], minval: int, maxval: int, dtype: torch.dtype = torch.int64, *,
            index: Tensor | None = None) -> Tensor:  # fmt: skip
    """Integers in [minval, maxval): key (2,) -> dtype of `shape`, or of `index.shape` (see `bits`).

    int64 reduces twice 64 bits modulo the span, the smaller types twice 32, so the numbers differ. ValueError if the
    range is empty (JAX returns minval) or does not fit dtype, TypeError unless dtype is a signed integer type or uint8.
    """
    if dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"randint draws int64, int32, int16, int8 and uint8, got {dtype}")
    info = torch.iinfo(dtype)
    if not info.min <= minval < maxval <= info.max + 1:
        raise ValueError(f"{dtype} needs {info.min} <= minval < maxval <= {info.max + 1}; got {minval} and {maxval}")
    width, span = 64 if dtype == torch.int64 else 32, maxval - minval
    high, low = (_unsigned_mod(bits(k, shape, width, index=index), span, width) for k in split(key).unbind())
    carry = (2 ** (width // 2) % span) ** 2 % 2**width % span  # 2**width mod span, the square wrapping as in JAX
    offset = high * carry + low if width == 64 else high * carry + low & _WORD
    return (_unsigned_mod(offset, span, width) + minval).to(dtype)


def global_index(shape: Sequence[int], starts: Sequence[int | Tensor], sizes: Sequence[int],
                 device: torch.device | str | None = None) -> Tensor:  # fmt: skip
    """Flat row-major indices, in a global array of `shape`, of the block at `starts` -> int64 of shape `sizes`.

    A start is an int or, where it comes from the rank in a traced program, a 0-d int64 tensor, whose range can't be
    checked. ValueError if the lengths differ or a block with known starts leaves the array.
    """
    if not len(shape) == len(starts) == len(sizes):
        raise ValueError(f"shape {tuple(shape)}, starts {tuple(starts)} and sizes {tuple(sizes)} differ in length")
    index, stride = None, 1
    for dim in reversed(range(len(shape))):
        start, size = starts[dim], sizes[dim]
        known = isinstance(start, int)
        if not 0 <= size <= shape[dim] or (known and not 0 <= start <= shape[dim] - size):
            raise ValueError(
                f"dim {dim} of the block leaves the array: start={start} size={size} of {shape[dim]}; "
                f"shape={tuple(shape)} starts={tuple(starts)} sizes={tuple(sizes)}"
            )
        steps = torch.arange(start, start + size, device=device) if known else torch.arange(size, device=device) + start
        index = steps if index is None else (steps * stride).view(-1, *(1,) * index.dim()) + index
        stride *= shape[dim]
    return torch.zeros((), dtype=torch.int64, device=device) if index is None else index
