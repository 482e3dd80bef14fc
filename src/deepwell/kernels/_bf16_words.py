"""bf16 numbers two in a register, in PTX: what the compiler does one by one, with moves and slow conversions between.

A row kernel on Hopper waits for its instructions rather than for memory once the clock is down to what tensor cores
leave it: each function here has the plain form beside it, for the interpreter and for other dtypes.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

from deepwell.kernels._fp8 import magnitude_bits
from deepwell.kernels._triton import tl, triton

# ---- rounding ----

_ROUND = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@triton.jit
def rounded(x, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """fp32 x in DTYPE, to nearest. One number alone goes through a slower unit (F2F in the SASS) than two (F2FP)."""
    if ASM and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(_ROUND, "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return x.to(DTYPE)


# ---- magnitudes: |x| as bits of fp32, so that a maximum keeps inf and NaN ----

_BITS = tl.constexpr("""{
    .reg .b32 w;
    and.b32 w, $2, 0x7FFF7FFF;
    shl.b32 $0, w, 16;
    and.b32 $1, w, 0x7FFF0000;
}""")
_LARGER_BITS = tl.constexpr("""{
    .reg .b32 w, z;
    and.b32 w, $2, 0x7FFF7FFF;
    and.b32 z, $3, 0x7FFF7FFF;
    max.u16x2 w, w, z;
    shl.b32 $0, w, 16;
    and.b32 $1, w, 0x7FFF0000;
}""")


@triton.jit
def bits_of(x, ASM: tl.constexpr):
    """|x| as bits of fp32."""
    if ASM and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_BITS, "=r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2)
    else:
        return magnitude_bits(x.to(tl.float32))


@triton.jit
def larger_bits(x, y, ASM: tl.constexpr):
    """The larger of |x| and |y| as bits of fp32."""
    if ASM and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_LARGER_BITS, "=r,=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=2)
    else:
        return tl.maximum(magnitude_bits(x.to(tl.float32)), magnitude_bits(y.to(tl.float32)))


# ---- codes ----

_ENCODE = """{
    .reg .b32 w;
    .reg .f32 a, b, c, d;
    .reg .b16 low, high;
    shl.b32 w, $1, 16;
    mov.b32 a, w;
    and.b32 w, $1, 0xFFFF0000;
    mov.b32 b, w;
    shl.b32 w, $2, 16;
    mov.b32 c, w;
    and.b32 w, $2, 0xFFFF0000;
    mov.b32 d, w;
    mul.f32 a, a, $3;
    mul.f32 b, b, $4;
    mul.f32 c, c, $5;
    mul.f32 d, d, $6;
    cvt.rn.satfinite.KINDx2.f32 low, b, a;
    cvt.rn.satfinite.KINDx2.f32 high, d, c;
    mov.b32 $0, {low, high};
}"""
_ENCODE_E4M3 = tl.constexpr(_ENCODE.replace("KIND", "e4m3"))
_ENCODE_E5M2 = tl.constexpr(_ENCODE.replace("KIND", "e5m2"))


@triton.jit
def encoded(x, enc, FP8: tl.constexpr, ASM: tl.constexpr):
    """Codes of x times `enc`, a number for all of x that lets none saturate."""
    if ASM and x.dtype == tl.bfloat16:
        enc = tl.broadcast_to(enc, x.shape)
        if FP8 == tl.float8e5:
            codes = tl.inline_asm_elementwise(
                _ENCODE_E5M2, "=r,r,r,f,f,f,f", [x, enc], dtype=tl.int8, is_pure=True, pack=4
            )
        else:
            codes = tl.inline_asm_elementwise(
                _ENCODE_E4M3, "=r,r,r,f,f,f,f", [x, enc], dtype=tl.int8, is_pure=True, pack=4
            )
        return codes.to(FP8, bitcast=True)
    else:
        return (x.to(tl.float32) * enc).to(FP8)
