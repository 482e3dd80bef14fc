"""Quantize rows to FP8 with one scale per 128 columns (DeepSeek-V3's activations), in one pass.

    enc[t, b] = min(MAX / amax_k |x[t, k]|, FLT_MAX), k in 128b .. 128b+127; 1 where amax is 0; rounded down to 2^n
    scale[t, b] = 1 / enc[t, b]        q[t, k] = RNE(x[t, k] * enc[t, b])

Numerics: bit for bit `deepwell.formats.quantize(x, "fp8_e4m3_1x128_pow2")`, inf and NaN included.
Cost: memory bound, 3 bytes per bf16 element and 4 per block. Scales are written with the blocks outermost, as cuBLASLt
    reads them: scale_TB is the transpose of what lies in memory.
"""

# Shapes: T tokens, K columns (the contraction), B = K / 128 blocks.

from dataclasses import dataclass

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.formats.quantize import quantize
from deepwell.kernels._fp8 import magnitude_bits, multiplier_from_bits, saturate
from deepwell.kernels._triton import on_device, runs_kernel, tl, triton
from deepwell.kernels.checks import check_matrix

BLOCK = 128
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max

# ---- reference: what the kernel must compute, in the plainest torch ----


def quantize_1x128_ref(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Reference for `quantize_1x128`."""
    made = quantize(x_TK, "fp8_e4m3_1x128_pow2")
    assert made.scales is not None
    return made.data, made.scales


# ---- configs: what the tuner may choose from ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    rows: int
    blocks: int
    num_warps: int


CONFIGS = (
    Config(rows=16, blocks=2, num_warps=4),
    Config(rows=32, blocks=1, num_warps=4),
    Config(rows=16, blocks=4, num_warps=8),
)

# ---- kernel ----


@triton.jit
def _quantize_1x128_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    T,
    K,
    stride_xt,
    stride_qt,
    FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: ROWS tokens, BLOCKS blocks of columns; a line of the tile is one block of one token.
    line = tl.arange(0, ROWS * BLOCKS)
    t = tl.program_id(0).to(tl.int64) * ROWS + line // BLOCKS
    b = tl.program_id(1) * BLOCKS + line % BLOCKS
    k = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (t[:, None] < T) & (k < K)
    x = tl.load(x_ptr + t[:, None] * stride_xt + k, mask=mask, other=0.0).to(tl.float32)
    enc = multiplier_from_bits(tl.max(magnitude_bits(x), axis=1), FP8_MAX, True)
    q = saturate(x * enc[:, None], FP8_MAX).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + t[:, None] * stride_qt + k, q, mask=mask)
    tl.store(scale_ptr + b.to(tl.int64) * T + t, tl.div_rn(1.0, enc), mask=(t < T) & (b * BLOCK < K))


# ---- public wrapper: check, allocate, launch ----


def quantize_1x128(x_TK: Tensor, *, config: Config = CONFIGS[0]) -> tuple[Tensor, Tensor]:
    """Codes and scales `(q_TK, scale_TB)` of E4M3 with a power-of-two scale per 128 columns; K must be whole blocks."""
    check_matrix("x_TK", x_TK)
    t, k = x_TK.shape
    if k % BLOCK:
        raise ConfigError(f"x_TK has {k} columns; 1x128 scales need a multiple of {BLOCK}: pad it with zeros")
    if not runs_kernel(x_TK, _quantize_1x128_kernel):
        return quantize_1x128_ref(x_TK)
    q_TK = torch.empty((t, k), dtype=_FP8, device=x_TK.device)
    scale_BT = torch.empty((k // BLOCK, t), dtype=torch.float32, device=x_TK.device)
    if t and k:
        grid = (triton.cdiv(t, config.rows), triton.cdiv(k // BLOCK, config.blocks))
        with on_device(x_TK):
            _quantize_1x128_kernel[grid](
                x_TK,
                q_TK,
                scale_BT,
                t,
                k,
                x_TK.stride(0),
                q_TK.stride(0),
                FP8_MAX=_FP8_MAX,
                ROWS=config.rows,
                BLOCKS=config.blocks,
                BLOCK=BLOCK,
                num_warps=config.num_warps,
            )
    return q_TK, scale_BT.T
