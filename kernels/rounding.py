"""What kernels share: the dtype to compute in, and rounding to the dtype to store."""

import torch
from torch import Tensor

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:
    pass  # without Triton no body needs it
else:

    @triton.jit
    def rounded(x, dtype: tl.constexpr):
        """x in dtype, to nearest even. Triton's interpreter truncates float32 to bfloat16, so that is done in bits."""
        if dtype == tl.bfloat16:
            bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = tl.where(x != x, x, bits.to(tl.float32, bitcast=True))
        return x.to(dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
