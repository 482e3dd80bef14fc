"""bf16 numbers two in a register, in PTX: what the compiler does one by one, with moves and slow conversions between.

A row kernel on Hopper waits for its instructions rather than for memory once the clock is down to what tensor cores
leave it: each function here has the plain form beside it, for the interpreter and for other dtypes.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

from deepwell.kernels.device.fp8 import magnitude_bits
from deepwell.kernels.device.triton_support import constant, tl, triton

# ---- to fp32 and back ----

_FLOATS = constant("""{
    .reg .b32 w;
    shl.b32 w, $2, 16;
    mov.b32 $0, w;
    and.b32 w, $2, 0xFFFF0000;
    mov.b32 $1, w;
}""")


@triton.jit
def floats(x, ASM: tl.constexpr):
    """x in fp32, one instruction a number; the compiler's own takes two for the upper one of a word."""
    if ASM and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_FLOATS, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return x.to(tl.float32)


_ROUND = constant("cvt.rn.bf16x2.f32 $0, $2, $1;")


@triton.jit
def rounded(x, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """fp32 x in DTYPE, to nearest. One number alone goes through a slower unit (F2F in the SASS) than two (F2FP)."""
    if ASM and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(_ROUND, "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return x.to(DTYPE)


_PRODUCT = constant("mul.rn.bf16x2 $0, $1, $2;")


@triton.jit
def product(x, y, ASM: tl.constexpr):
    """x times y, both of one dtype, rounded to it once: bf16's product is exact in fp32 (above its subnormals)."""
    if ASM and x.dtype == tl.bfloat16:
        y = tl.broadcast_to(y, x.shape)
        return tl.inline_asm_elementwise(_PRODUCT, "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)


_SUM = constant("fma.rn.bf16x2 $0, $1, $2, $3;")


@triton.jit
def product_plus(x, y, z, ASM: tl.constexpr):
    """x times y, exactly, plus z, all of one dtype, rounded to it: of bf16 the sum in fp32 rounds to the same bits."""
    if ASM and x.dtype == tl.bfloat16:
        y = tl.broadcast_to(y, x.shape)
        return tl.inline_asm_elementwise(_SUM, "=r,r,r,r", [x, y, z], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return (x.to(tl.float32) * y.to(tl.float32) + z.to(tl.float32)).to(x.dtype)


# ---- magnitudes: |x| as bits of fp32, so that a maximum keeps inf and NaN ----

_BITS = constant("""{
    .reg .b32 w;
    and.b32 w, $2, 0x7FFF7FFF;
    shl.b32 $0, w, 16;
    and.b32 $1, w, 0x7FFF0000;
}""")
_LARGER = constant("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
_LARGER_BITS = constant("""{
    .reg .b32 w, z;
    and.b32 w, $2, 0x7FFF7FFF;
    and.b32 z, $3, 0x7FFF7FFF;
    max.u16x2 w, w, z;
    shl.b32 $0, w, 16;
    and.b32 $1, w, 0x7FFF0000;
}""")


@triton.jit
def bits_of(x, ASM: tl.constexpr):
    """|x| as bits of fp32, which x may be already."""
    if ASM and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_BITS, "=r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2)
    elif x.dtype == tl.int32:
        return x
    else:
        return magnitude_bits(x.to(tl.float32))


@triton.jit
def larger(x, y, ASM: tl.constexpr):
    """The larger of |x| and |y|: in bf16, NaN where one of them is and of any sign, or else as bits of fp32."""
    if ASM and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_LARGER, "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif x.dtype == tl.int32:
        return tl.maximum(x, y)
    else:
        return tl.maximum(magnitude_bits(x.to(tl.float32)), magnitude_bits(y.to(tl.float32)))


@triton.jit
def larger_bits(x, y, ASM: tl.constexpr):
    """The larger of |x| and |y| as bits of fp32."""
    if ASM and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_LARGER_BITS, "=r,=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=2)
    else:
        return tl.maximum(magnitude_bits(x.to(tl.float32)), magnitude_bits(y.to(tl.float32)))


@triton.jit
def row_bits(x, RUN: tl.constexpr, ASM: tl.constexpr):
    """The largest |x| of each row of [rows, columns], as bits of fp32. A thread has at least RUN columns in a row."""
    if ASM and x.dtype == tl.bfloat16:
        m = tl.reshape(x, [x.shape[0], x.shape[1] // RUN, RUN])
        for _ in tl.static_range(3):
            if m.shape[2] > 2:
                halves = tl.reshape(m, [m.shape[0], m.shape[1], 2, m.shape[2] // 2])
                first, second = tl.split(tl.permute(halves, (0, 1, 3, 2)))
                m = larger(first, second, ASM)
        return tl.max(tl.reshape(bits_of(m, ASM), [m.shape[0], m.shape[1] * m.shape[2]]), axis=1)
    else:
        return tl.max(magnitude_bits(x.to(tl.float32)), axis=1)


# ---- FP8 values ----

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
# By a power of two two at a time: exact, but for what is 0 in FP8 anyhow.
_ENCODE_POW2 = """{
    .reg .b32 w, x;
    .reg .f32 a, b, c, d;
    .reg .b16 low, high;
    mul.rn.bf16x2 x, $1, $3;
    shl.b32 w, x, 16;
    mov.b32 a, w;
    and.b32 w, x, 0xFFFF0000;
    mov.b32 b, w;
    mul.rn.bf16x2 x, $2, $4;
    shl.b32 w, x, 16;
    mov.b32 c, w;
    and.b32 w, x, 0xFFFF0000;
    mov.b32 d, w;
    cvt.rn.satfinite.KINDx2.f32 low, b, a;
    cvt.rn.satfinite.KINDx2.f32 high, d, c;
    mov.b32 $0, {low, high};
}"""
_POW2_E4M3 = constant(_ENCODE_POW2.replace("KIND", "e4m3"))
_POW2_E5M2 = constant(_ENCODE_POW2.replace("KIND", "e5m2"))
_ENCODE_E4M3 = constant(_ENCODE.replace("KIND", "e4m3"))
_ENCODE_E5M2 = constant(_ENCODE.replace("KIND", "e5m2"))


@triton.jit
def encoded(x, enc, FP8: tl.constexpr, ASM: tl.constexpr, POW2: tl.constexpr = False):
    """Values of x times `enc`, a number for all of x that lets none saturate; POW2: it is a power of two, or NaN."""
    if ASM and x.dtype == tl.bfloat16 and POW2:
        enc = tl.broadcast_to(enc.to(tl.bfloat16), x.shape)
        if FP8 == tl.float8e5:
            codes = tl.inline_asm_elementwise(_POW2_E5M2, "=r,r,r,r,r", [x, enc], dtype=tl.int8, is_pure=True, pack=4)
        else:
            codes = tl.inline_asm_elementwise(_POW2_E4M3, "=r,r,r,r,r", [x, enc], dtype=tl.int8, is_pure=True, pack=4)
        return codes.to(FP8, bitcast=True)
    elif ASM and x.dtype == tl.bfloat16:
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
