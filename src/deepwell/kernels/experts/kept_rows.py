"""Rows of gate and up in 12 bits a number, for the backward: bf16's significand with a short exponent.

    code = sign, 4 bits of exponent below the row's largest, 7 bits of mantissa
    row of 3 F bytes = lower 8 bits of the gate's codes, those of up's, and the upper 4 bits of both in a byte

A code is a bf16 number whose upper four bits of exponent are 0, with these left out: x times 2^(15 - top), where top is
the row's largest biased exponent. Numbers too small for the short exponent are subnormal ones of bf16.

Numerics: numbers from the row's largest down to 2^-14 of its power of two come back bit for bit; smaller ones keep the
    distance of those, 2^-21 of it, rounded to nearest even. A row that holds inf or NaN comes back as NaN: its FP8
    values are NaN too. In FP8 instead, the gradients of the down projection and of the router lose 1.5 dB; so not a
    hundredth (docs/gotchas.md).
Cost: three bytes written beside the hidden row, where bf16 takes four; three read in the backward. 13 and 16
    instructions on words for eight numbers: the SM has half as many units for integers as for fp32, so that codes
    are not built number by number.
"""

# Shapes: P rows, F hidden width.

import torch
from torch import Tensor

from deepwell.kernels.device.triton_support import constant, tl, triton

# Of a row's largest biased exponent: below it the smallest code would be no normal number of bf16.
_LEAST_TOP = 22
_LEAST = constant(_LEAST_TOP)
_NOT_FINITE = constant(255)

# ---- reference ----


def pack_rows_ref(gate_up_P2F: Tensor) -> tuple[Tensor, Tensor]:
    """`(kept_P3F, top_P)`: bytes, and each row's largest biased exponent."""
    exponent = (gate_up_P2F.bfloat16().view(torch.int16).int() >> 7) & 255
    has_columns = gate_up_P2F.shape[1] > 0
    top = exponent.amax(1).clamp(min=_LEAST_TOP) if has_columns else exponent.new_full(exponent.shape[:1], _LEAST_TOP)
    small = _by_powers_of_two(gate_up_P2F.bfloat16(), 15 - top)
    bits = small.view(torch.int16).int() & 0xFFFF
    gate, up = ((bits >> 15) << 11 | bits & 0x7FF).chunk(2, 1)
    return torch.cat([gate & 255, up & 255, gate >> 8 | (up >> 8) << 4], 1).to(torch.uint8), top.to(torch.uint8)


def unpack_rows_ref(kept_P3F: Tensor, top_P: Tensor) -> Tensor:
    """`gate_up_P2F` in bf16."""
    gate, up, high = kept_P3F.int().chunk(3, 1)
    code = torch.cat([gate | (high & 15) << 8, up | (high >> 4) << 8], 1)
    bits = (code >> 11) << 15 | code & 0x7FF
    top = top_P.int()
    rows = _by_powers_of_two(bits.to(torch.int16).view(torch.bfloat16), top - 15)
    return rows.masked_fill((top == 255)[:, None], float("nan"))


def _by_powers_of_two(x_PF: Tensor, power_P: Tensor) -> Tensor:
    """x times 2^power, each row its own, in bf16. By two factors: 2^-239 is no number of fp32."""
    half = power_P >> 1
    first, second = torch.exp2(half.float())[:, None], torch.exp2((power_P - half).float())[:, None]
    return (x_PF.float() * first * second).bfloat16()


# ---- in Triton ----

# Four numbers of gate and four of up, as fp32, to four bytes of each plane.
_PACK = constant("""{
    .reg .b32 a, b, c, d;
    cvt.rn.bf16x2.f32 a, $4, $3;
    cvt.rn.bf16x2.f32 b, $6, $5;
    cvt.rn.bf16x2.f32 c, $8, $7;
    cvt.rn.bf16x2.f32 d, $10, $9;
    prmt.b32 $0, a, b, 0x6420;
    prmt.b32 $1, c, d, 0x6420;
    prmt.b32 a, a, b, 0x7531;
    prmt.b32 c, c, d, 0x7531;
    shr.u32 b, a, 4;
    and.b32 b, b, 0x08080808;
    and.b32 a, a, 0x07070707;
    or.b32 a, a, b;
    shl.b32 d, c, 4;
    and.b32 d, d, 0x70707070;
    and.b32 c, c, 0x80808080;
    or.b32 c, c, d;
    or.b32 $2, a, c;
}""")
_UNPACK = constant("""{
    .reg .b32 g, u, w;
    shl.b32 g, $10, 4;
    and.b32 g, g, 0x80808080;
    and.b32 w, $10, 0x07070707;
    or.b32 g, g, w;
    shr.u32 u, $10, 4;
    and.b32 u, u, 0x07070707;
    and.b32 w, $10, 0x80808080;
    or.b32 u, u, w;
    prmt.b32 w, $8, g, 0x5140; shl.b32 $0, w, 16; and.b32 $1, w, 0xFFFF0000;
    prmt.b32 w, $8, g, 0x7362; shl.b32 $2, w, 16; and.b32 $3, w, 0xFFFF0000;
    prmt.b32 w, $9, u, 0x5140; shl.b32 $4, w, 16; and.b32 $5, w, 0xFFFF0000;
    prmt.b32 w, $9, u, 0x7362; shl.b32 $6, w, 16; and.b32 $7, w, 0xFFFF0000;
}""")


@triton.jit
def top_of(bits):
    """The largest biased exponent of a row, whose largest magnitude comes as the bits of an fp32 number."""
    return tl.maximum(bits >> 23, _LEAST)


@triton.jit
def _powers_of_two(power):
    """Two numbers of fp32 whose product is 2^power."""
    half = power >> 1
    return ((half + 127) << 23).to(tl.float32, bitcast=True), ((power - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _code(x):
    bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return ((bits >> 15) << 11) | (bits & 0x7FF)


@triton.jit
def _number(code):
    return (((code >> 11) << 31) | ((code & 0x7FF) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def store_packed(row, g, u, f, F, top, ASM: tl.constexpr):
    """Columns f of a row of bytes, of numbers in fp32."""
    first, second = _powers_of_two(15 - top)
    g = g * first * second
    u = u * first * second
    if ASM:
        gate, up, high = tl.inline_asm_elementwise(
            _PACK, "=&r,=&r,=&r,f,f,f,f,f,f,f,f", [g, u],
            dtype=(tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        gate = _code(g)
        up = _code(u)
        high = (gate >> 8) | ((up >> 8) << 4)
    tl.store(row + f, gate.to(tl.uint8), mask=f < F)
    tl.store(row + F + f, up.to(tl.uint8), mask=f < F)
    tl.store(row + 2 * F + f, high.to(tl.uint8), mask=f < F)


@triton.jit
def load_packed(row, f, F, top, EVICT: tl.constexpr, ASM: tl.constexpr):
    """(gate, up) of columns f in fp32."""
    gate = tl.load(row + f, mask=f < F, other=0, eviction_policy=EVICT)
    up = tl.load(row + F + f, mask=f < F, other=0, eviction_policy=EVICT)
    high = tl.load(row + 2 * F + f, mask=f < F, other=0, eviction_policy=EVICT)
    if ASM:
        g, u = tl.inline_asm_elementwise(
            _UNPACK, "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r", [gate, up, high],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        nibbles = high.to(tl.int32)
        g = _number(gate.to(tl.int32) | ((nibbles & 15) << 8))
        u = _number(up.to(tl.int32) | ((nibbles >> 4) << 8))
    first, second = _powers_of_two(top - 15)
    second = tl.where(top == _NOT_FINITE, float("nan"), second)
    return g * first * second, u * first * second
