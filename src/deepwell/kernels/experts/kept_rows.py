"""Rows of gate and up in 12 bits a number, for the backward: bf16's significand with a short exponent.

    code = sign, 4 bits of exponent below the row's largest, 7 bits of mantissa
    row of 3 F bytes = upper 8 bits of the gate's codes, those of up's, and the lower 4 bits of both in a byte

Numerics: numbers from the row's largest down to 2^-14 of its power of two come back bit for bit; smaller ones keep the
    distance of those, 2^-21 of it, rounded to nearest. Infinities and NaN stay. In FP8 instead, the gradients of the
    down projection and of the router lose 1.5 dB; so not a hundredth (docs/gotchas.md).
Cost: three bytes written beside the hidden row, where bf16 takes four; three read in the backward.
"""

# Shapes: P rows, F hidden width.

import torch
from torch import Tensor

from deepwell.kernels.device.triton_support import tl, triton

# Of a row's largest biased exponent: below it the smallest code would be no normal number of fp32.
_LEAST_TOP = 22
_LEAST = tl.constexpr(_LEAST_TOP)

# ---- reference ----


def pack_rows_ref(gate_up_P2F: Tensor) -> tuple[Tensor, Tensor]:
    """`(kept_P3F, top_P)`: bytes, and each row's largest biased exponent."""
    bits = gate_up_P2F.bfloat16().view(torch.int16).int()
    exponent, mantissa = (bits >> 7) & 255, bits & 127
    width = gate_up_P2F.shape[1]
    top = exponent.amax(1).clamp(min=_LEAST_TOP) if width else exponent.new_full(exponent.shape[:1], _LEAST_TOP)
    below = top[:, None] - exponent
    shift = (below - 14).clamp(min=1, max=9)
    small = ((128 | mantissa) + (1 << (shift - 1))) >> shift
    small = torch.where(exponent > 0, small, 0)
    code = torch.where(below <= 14, ((15 - below) << 7) | mantissa, small) | ((bits >> 15) & 1) << 11
    gate, up = code.chunk(2, 1)
    return torch.cat([gate >> 4, up >> 4, (gate & 15) | (up & 15) << 4], 1).to(torch.uint8), top.to(torch.uint8)


def unpack_rows_ref(kept_P3F: Tensor, top_P: Tensor) -> Tensor:
    """`gate_up_P2F` in bf16."""
    gate, up, low = kept_P3F.int().chunk(3, 1)
    code = torch.cat([gate << 4 | low & 15, up << 4 | low >> 4], 1)
    exponent, mantissa, top = (code >> 7) & 15, code & 127, top_P.int()[:, None]
    normal = ((exponent + top - 15) << 23 | mantissa << 16).view(torch.float32)
    small = mantissa.float() * ((top - 21) << 23).view(torch.float32)
    values = torch.where(exponent > 0, normal, small)
    return (values * torch.where((code >> 11) > 0, -1.0, 1.0)).bfloat16()


# ---- in Triton ----


@triton.jit
def exponents(x):
    """The biased exponents of bf16 numbers."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) >> 7) & 255


@triton.jit
def top_of(largest):
    return tl.maximum(largest, _LEAST)


@triton.jit
def packed(x, top):
    """Codes of bf16 numbers under a row's largest exponent."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    exponent = (bits >> 7) & 255
    mantissa = bits & 127
    below = top - exponent
    shift = tl.minimum(tl.maximum(below - 14, 1), 9)
    small = ((128 | mantissa) + (1 << (shift - 1))) >> shift
    small = tl.where(exponent > 0, small, 0)
    return tl.where(below <= 14, ((15 - below) << 7) | mantissa, small) | (((bits >> 15) & 1) << 11)


@triton.jit
def store_packed(row, g, u, f, F, top):
    """Columns f of a row of bytes."""
    gate = packed(g, top)
    up = packed(u, top)
    tl.store(row + f, (gate >> 4).to(tl.uint8), mask=f < F)
    tl.store(row + F + f, (up >> 4).to(tl.uint8), mask=f < F)
    tl.store(row + 2 * F + f, ((gate & 15) | ((up & 15) << 4)).to(tl.uint8), mask=f < F)


@triton.jit
def _unpacked(code, top):
    exponent = (code >> 7) & 15
    mantissa = code & 127
    normal = (((exponent + top - 15) << 23) | (mantissa << 16)).to(tl.float32, bitcast=True)
    small = mantissa.to(tl.float32) * ((top - 21) << 23).to(tl.float32, bitcast=True)
    values = tl.where(exponent > 0, normal, small)
    return values * tl.where((code >> 11) > 0, -1.0, 1.0)  # a minus would lose the sign of zero


@triton.jit
def load_packed(row, f, F, top, EVICT: tl.constexpr):
    """(gate, up) of columns f in fp32."""
    low = tl.load(row + 2 * F + f, mask=f < F, other=0, eviction_policy=EVICT).to(tl.int32)
    gate = tl.load(row + f, mask=f < F, other=0, eviction_policy=EVICT).to(tl.int32)
    up = tl.load(row + F + f, mask=f < F, other=0, eviction_policy=EVICT).to(tl.int32)
    return _unpacked((gate << 4) | (low & 15), top), _unpacked((up << 4) | (low >> 4), top)
