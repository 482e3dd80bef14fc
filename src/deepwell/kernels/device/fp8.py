"""Device functions of every kernel that writes FP8: amax as bits, the encoding multiplier, saturation, rows of values.

They are `deepwell.formats.quantize` bit for bit: IEEE division, no approximate reciprocal, NaN and inf kept.
"""

import torch

from deepwell.formats.quantize import ZERO_ROW_MULTIPLIER
from deepwell.formats.spec import E4M3, E5M2, ElementFormat
from deepwell.kernels.device.triton_support import constant, tl, triton

ELEMENTS: dict[torch.dtype, ElementFormat] = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}

FLT_MAX = constant(torch.finfo(torch.float32).max)
INF_BITS = constant(0x7F800000)
ZERO_ROW = constant(ZERO_ROW_MULTIPLIER)


@triton.jit
def magnitude_bits(x):
    """|x| of fp32 as an integer: ordered as the magnitudes are, inf and NaN above all, so that a maximum keeps them."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def multiplier_from_bits(bits, FP8_MAX: tl.constexpr, AT_ZERO: tl.constexpr = 1.0):
    """The encoding multiplier of an amax given by its bits, a power of two.

    AT_ZERO where the amax is 0: ZERO_ROW for rows, 1 elsewhere.
    """
    enc = tl.minimum(tl.div_rn(FP8_MAX, bits.to(tl.float32, bitcast=True)), FLT_MAX)
    # Dropping the mantissa rounds the scale up: nothing saturates.
    enc = (enc.to(tl.int32, bitcast=True) & -8388608).to(tl.float32, bitcast=True)
    enc = tl.where(bits == 0, AT_ZERO, enc)
    return tl.where(bits >= INF_BITS, float("nan"), enc)


@triton.jit
def row_scale(bits, FP8_MAX: tl.constexpr):
    """The encoding multiplier of a row, bit for bit `multiplier_from_bits`, and its scale, 1 / multiplier.

    A power of two is what a division's exponent would be: both largest elements are 1.75 * 2^k, so that k - e of
    amax = m * 2^e, one less where m > 1.75. Two divisions are some 40 instructions of every thread.
    """
    TOP: tl.constexpr = 262 if FP8_MAX == 448.0 else 269  # 127 + 127 + k
    field = tl.minimum(TOP - ((bits + 0x1FFFFF) >> 23), 254)
    field = tl.where(bits == 0, 253, field)
    enc = (field << 23).to(tl.float32, bitcast=True)
    # 2^-127 is subnormal.
    scale = tl.where(field == 254, 0x400000, (254 - field) << 23).to(tl.float32, bitcast=True)
    is_nan = bits >= INF_BITS
    return tl.where(is_nan, float("nan"), enc), tl.where(is_nan, float("nan"), scale)


@triton.jit
def saturate(x, FP8_MAX: tl.constexpr):
    """x within the element's range; NaN stays."""
    return tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_tile(y, FP8: tl.constexpr, FP8_MAX: tl.constexpr):
    """FP8 values and scales of whole rows in registers; masked columns of `y` must be 0. None saturates."""
    enc = multiplier_from_bits(tl.max(magnitude_bits(y), axis=1), FP8_MAX, ZERO_ROW)
    return (y * enc[:, None]).to(FP8), tl.div_rn(1.0, enc)


@triton.jit
def quantize_row(y, FP8: tl.constexpr, FP8_MAX: tl.constexpr):
    """FP8 values and scale of one row in registers; masked columns of `y` must be 0. None saturates."""
    enc = multiplier_from_bits(tl.max(magnitude_bits(y), axis=0), FP8_MAX, ZERO_ROW)
    return (y * enc).to(FP8), tl.div_rn(1.0, enc)


@triton.jit
def code_bytes(x, FP8: tl.constexpr, FP8_MAX: tl.constexpr):
    """The FP8 values of x as integers 0 .. 255."""
    return saturate(x, FP8_MAX).to(FP8).to(tl.uint8, bitcast=True).to(tl.int32)


_PACK_E4M3 = constant(
    """{ .reg .b16 lo, hi;
    cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
    mov.b32 $0, {lo, hi}; }"""
)
_PACK_E5M2 = constant(_PACK_E4M3.value.replace("e4m3", "e5m2"))


@triton.jit
def word_of_codes(a, b, c, d, FP8: tl.constexpr, FP8_MAX: tl.constexpr, PACKING: tl.constexpr):
    """The FP8 values of four saturated numbers in 32 bits, by PTX instructions ("asm") or shifts."""
    if PACKING == "asm":
        PACK: tl.constexpr = _PACK_E4M3 if FP8_MAX == 448.0 else _PACK_E5M2
        word = tl.inline_asm_elementwise(PACK, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        word = code_bytes(a, FP8, FP8_MAX) | (code_bytes(b, FP8, FP8_MAX) << 8)
        word |= (code_bytes(c, FP8, FP8_MAX) << 16) | (code_bytes(d, FP8, FP8_MAX) << 24)
    return word
