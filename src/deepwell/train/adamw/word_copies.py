"""Quantized copies of new weights that a thread still holds: codes and scales of a part, row-major and transposed.

`adamw_words` updates a part of a matrix and hands it over in registers. A thread holds four rows below each other, so
that the four codes of a column make one word of the transposed copy: only whole words go through shared memory.

Numerics: `deepwell.formats.quantize`, bit for bit. The conversion to E4M3 saturates by itself and keeps NaN, so nothing
is clamped before it. bf16 weights are worked on two at a time: magnitudes, the powers of two of MX blocks and products
with them are exact in bf16.
"""

# Shapes: a part is 4 * G x 128, as four tensors (G, 1, 128): row 4 i + j is in the j-th; a thread has eight columns
# each. `left` are the rows and columns of the matrix from the part's first element on.

from deepwell.kernels.device.bf16_words import encoded, larger, row_bits
from deepwell.kernels.device.fp8 import code_bytes
from deepwell.kernels.device.stores import store_alike
from deepwell.kernels.device.triton_support import tl, triton
from deepwell.train.adamw.copies import e8m0_of, line_multipliers
from deepwell.train.adamw.moments import widen

_WORD = tl.constexpr(
    """{ .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high}; }"""
)


@triton.jit
def _word(a, b, c, d, ASM: tl.constexpr):
    """The codes of four numbers as one word, the first lowest."""
    if ASM:
        return tl.inline_asm_elementwise(_WORD, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    low = code_bytes(a, tl.float8e4nv, 448.0) | (code_bytes(b, tl.float8e4nv, 448.0) << 8)
    return low | (code_bytes(c, tl.float8e4nv, 448.0) << 16) | (code_bytes(d, tl.float8e4nv, 448.0) << 24)


@triton.jit
def _codes(x, ASM: tl.constexpr):
    if ASM:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return code_bytes(x, tl.float8e4nv, 448.0).to(tl.uint8)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, AXIS: tl.constexpr):
    """Bits of the largest number along an axis; NaN is not lost."""
    return tl.reduce(x, AXIS, _larger).to(tl.int32, bitcast=True) & 0x7FFFFFFF


# The word of two bf16 numbers' magnitudes, the larger of two such words each, and the halves as bits of fp32.
_MAGNITUDES = tl.constexpr("{ .reg .b32 w; mov.b32 w, {$1, $2}; and.b32 $0, w, 0x7FFF7FFF; }")
_LARGER_WORD = tl.constexpr("max.u16x2 $0, $1, $2;")


@triton.jit
def _larger_word(a, b):
    return tl.inline_asm_elementwise(_LARGER_WORD, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _magnitudes(low, high):
    return tl.inline_asm_elementwise(_MAGNITUDES, "=r,h,h", [low, high], dtype=tl.int32, is_pure=True, pack=1)


# `_multiplier_of` two at a time, in bf16. What is finite adds zero times itself, what is not becomes NaN.
_MULTIPLIERS = tl.constexpr(
    """{ .reg .b32 w, z;
    mov.b32 z, 0x04000400;
    add.u32 w, $2, 0x001F001F;
    max.u16x2 w, w, z;
    and.b32 w, w, 0xFF80FF80;
    sub.u32 w, 0x83008300, w;
    mov.b32 z, 0;
    fma.rn.bf16x2 w, $2, z, w;
    mov.b32 {$0, $1}, w; }"""
)


@triton.jit
def _multipliers_of(words):
    """MX multipliers, bf16, of the lower and of the upper of two magnitudes in a word."""
    return tl.inline_asm_elementwise(
        _MULTIPLIERS, "=h,=h,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
    )


@triton.jit
def _column_multipliers(x, G: tl.constexpr, ASM: tl.constexpr):
    """The multiplier of each block of 32 rows and each column, (G // 8, 128); bf16 where that holds it."""
    if ASM and x[0].dtype == tl.bfloat16:
        each = larger(larger(x[0], x[1], ASM), larger(x[2], x[3], ASM), ASM)
        low, high = tl.split(tl.reshape(each, (G // 8, 8, 64, 2)))
        low, high = _multipliers_of(tl.reduce(_magnitudes(low, high), 1, _larger_word))
        scale = tl.reshape(tl.join(low, high), (G // 8, 128))
    else:
        bits = _largest(tl.reshape(_largest_of_four(x, ASM), (G // 8, 8, 128)), 1)
        scale = _multiplier_of(bits, x[0].dtype)
    return scale


@triton.jit
def _two_largest(x, G: tl.constexpr):
    """Of each thread's eight columns of bf16 the largest magnitude of the even ones and of the odd ones, (G, 4, 4)."""
    first, second = tl.split(tl.permute(tl.reshape(x, (G, 16, 2, 4)), (0, 1, 3, 2)))
    four = larger(first, second, True)
    first, second = tl.split(tl.permute(tl.reshape(four, (G, 16, 2, 2)), (0, 1, 3, 2)))
    low, high = tl.split(larger(first, second, True))
    return tl.reshape(low, (G, 4, 4)), tl.reshape(high, (G, 4, 4))


@triton.jit
def _row_multipliers(x, y, G: tl.constexpr):
    """The multipliers, bf16, of each 32 columns of two rows of bf16, (G, 4) each; in PTX, of both rows at once."""
    low_x, high_x = _two_largest(x, G)
    low_y, high_y = _two_largest(y, G)
    words = _larger_word(_magnitudes(low_x, low_y), _magnitudes(high_x, high_y))
    return _multipliers_of(tl.reduce(words, 2, _larger_word))


@triton.jit
def _as_fp32(x, ASM: tl.constexpr):
    # As late as this: what waits for it takes half the registers.
    return widen(x[0], ASM), widen(x[1], ASM), widen(x[2], ASM), widen(x[3], ASM)


@triton.jit
def _largest_of_four(x, ASM: tl.constexpr):
    a, b, c, d = _as_fp32(x, ASM)
    return _larger(_larger(tl.abs(a), tl.abs(b)), _larger(tl.abs(c), tl.abs(d)))


@triton.jit
def _multiplier_of(bits, DTYPE: tl.constexpr):
    """2^(127 - byte) of `e8m0_of`, NaN where the largest is not finite."""
    if DTYPE != tl.bfloat16:
        return e8m0_of(bits)[1]
    # 448 is 1.75 * 2^8: a mantissa above 1.75 carries, and eight exponents down is the scale's. Of bf16 that is exact,
    # also where amax / 448 is subnormal.
    raised = tl.maximum(bits + 0x1FFFFF, 8 << 23) & -8388608
    multiplier = (-2097152000 - raised).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, multiplier, float("nan"))


@triton.jit
def _byte_of(multiplier):
    """The E8M0 byte of its multiplier 2^(127 - byte); of NaN it is 255."""
    if multiplier.dtype == tl.bfloat16:
        byte = 254 - (multiplier.to(tl.int16, bitcast=True).to(tl.int32) >> 7)
    else:
        byte = 254 - (multiplier.to(tl.int32, bitcast=True) >> 23)
    return byte


@triton.jit
def row_of(G: tl.constexpr):
    """The first of four rows each, counted from the part's first one, (G, 1, 1)."""
    return tl.arange(0, G)[:, None, None] * 4


@triton.jit
def column_of():
    """The 128 columns of a part, (1, 1, 128)."""
    return tl.arange(0, 128)[None, None, :]


@triton.jit
def is_live_part(left, G: tl.constexpr):
    """Which elements of a part there are, and which rows: lengths are multiples of 16, so four rows are alike."""
    is_live_row = row_of(G) < left[0]
    return is_live_row & (column_of() < left[1]), is_live_row


# Four rows of four codes each, turned: the word of each column.
_TURN = tl.constexpr(
    """{ .reg .b32 a, b, c, d;
    prmt.b32 a, $4, $5, 0x5140;
    prmt.b32 b, $4, $5, 0x7362;
    prmt.b32 c, $6, $7, 0x5140;
    prmt.b32 d, $6, $7, 0x7362;
    prmt.b32 $0, a, c, 0x5410;
    prmt.b32 $1, a, c, 0x7632;
    prmt.b32 $2, b, d, 0x5410;
    prmt.b32 $3, b, d, 0x7632; }"""
)
# Words of two columns of bf16 times their powers of two: exact, but for what is 0 in FP8 anyhow.
_WORDS_POW2 = tl.constexpr(
    """{ .reg .b32 w<4>; .reg .f32 a<4>, b<4>; .reg .b16 low, high;
    mul.rn.bf16x2 w0, $2, $6;
    mul.rn.bf16x2 w1, $3, $6;
    mul.rn.bf16x2 w2, $4, $6;
    mul.rn.bf16x2 w3, $5, $6;
    { .reg .b32 t;
    shl.b32 t, w0, 16; mov.b32 a0, t;
    shl.b32 t, w1, 16; mov.b32 a1, t;
    shl.b32 t, w2, 16; mov.b32 a2, t;
    shl.b32 t, w3, 16; mov.b32 a3, t;
    and.b32 t, w0, 0xFFFF0000; mov.b32 b0, t;
    and.b32 t, w1, 0xFFFF0000; mov.b32 b1, t;
    and.b32 t, w2, 0xFFFF0000; mov.b32 b2, t;
    and.b32 t, w3, 0xFFFF0000; mov.b32 b3, t; }
    cvt.rn.satfinite.e4m3x2.f32 low, a1, a0;
    cvt.rn.satfinite.e4m3x2.f32 high, a3, a2;
    mov.b32 $0, {low, high};
    cvt.rn.satfinite.e4m3x2.f32 low, b1, b0;
    cvt.rn.satfinite.e4m3x2.f32 high, b3, b2;
    mov.b32 $1, {low, high}; }"""
)


@triton.jit
def _row_codes(x, enc, ASM: tl.constexpr):
    """Codes of a row times `enc`, for all of it or for each element; of bf16 it is a power of two where it is bf16."""
    if ASM and x.dtype == tl.bfloat16:
        codes = encoded(x, enc, tl.float8e4nv, True, enc.dtype == tl.bfloat16).to(tl.uint8, bitcast=True)
    else:
        codes = _codes(widen(x, ASM) * enc, ASM)
    return codes


@triton.jit
def _store_row(codes, J: tl.constexpr, copy, r0, c0, is_live, G: tl.constexpr):
    row_ptr, row_stride, _, _, _, _, _, _ = copy
    place = (row_of(G) + J) * tl.multiple_of(row_stride.to(tl.int32), 16) + column_of()
    out = row_ptr + (r0 * row_stride + c0) + tl.max_contiguous(place, [1, 1, 8])
    tl.store(out, codes, mask=is_live[0])


@triton.jit
def _words_of(x, enc, ASM: tl.constexpr):
    """The four codes of each column times `enc` as one word."""
    if ASM and enc.dtype == tl.bfloat16:
        word = tl.inline_asm_elementwise(
            _WORDS_POW2, "=r,=r,r,r,r,r,r", [x[0], x[1], x[2], x[3], enc], dtype=tl.int32, is_pure=True, pack=2
        )
    else:
        a, b, c, d = _as_fp32(x, ASM)
        word = _word(a * enc, b * enc, c * enc, d * enc, ASM)
    return word


@triton.jit
def _store_words(word, copy, r0, c0, left, G: tl.constexpr):
    """The transposed copy: a word has four codes of a column."""
    _, _, col_ptr, col_stride, _, _, _, _ = copy
    i = tl.arange(0, G)[None, :]
    n = tl.arange(0, 128)[:, None]
    out = (col_ptr + (c0 * col_stride + r0)).to(tl.pointer_type(tl.int32)) + (n * (col_stride // 4).to(tl.int32) + i)
    tl.store(out, tl.trans(tl.reshape(word, (G, 128))), mask=(n < left[1]) & (i < left[0] // 4))


@triton.jit
def _scales_of_two_rows(x, y, G: tl.constexpr, ASM: tl.constexpr):
    """The multipliers of each 32 columns of two rows, (G, 4) each."""
    if ASM and x.dtype == tl.bfloat16:
        a, b = _row_multipliers(x, y, G)
    else:
        a = _multiplier_of(_largest(tl.reshape(tl.abs(widen(x, ASM)), (G, 4, 32)), 2), x.dtype)
        b = _multiplier_of(_largest(tl.reshape(tl.abs(widen(y, ASM)), (G, 4, 32)), 2), y.dtype)
    return a, b


@triton.jit
def _mx_codes(x, scale, G: tl.constexpr, ASM: tl.constexpr):
    return _row_codes(x, tl.reshape(tl.broadcast_to(scale[:, :, None], (G, 4, 32)), x.shape), ASM)


@triton.jit
def _store_mx_rows(x, copy, r0, c0, left, G: tl.constexpr, ASM: tl.constexpr):
    _, _, _, _, scale_ptr, scale_stride, _, _ = copy
    is_live = is_live_part(left, G)
    a, b = _scales_of_two_rows(x[0], x[1], G, ASM)
    _store_row(_mx_codes(x[0], a, G, ASM), 0, copy, r0, c0, is_live, G)
    _store_row(_mx_codes(x[1], b, G, ASM), 1, copy, r0, c0, is_live, G)
    c, d = _scales_of_two_rows(x[2], x[3], G, ASM)
    _store_row(_mx_codes(x[2], c, G, ASM), 2, copy, r0, c0, is_live, G)
    _store_row(_mx_codes(x[3], d, G, ASM), 3, copy, r0, c0, is_live, G)
    # The four threads of a block have the scales of all four rows: each stores that of one.
    j = tl.arange(0, 4)[None, None, :]
    upper = tl.where(j == 2, c[:, :, None], d[:, :, None])
    scale = tl.where(j == 0, a[:, :, None], tl.where(j == 1, b[:, :, None], upper))
    r = tl.arange(0, G)[:, None, None] * 4
    n = tl.arange(0, 4)[None, :, None]
    out = scale_ptr + (r0 * scale_stride + c0 // 32) + ((r + j) * scale_stride.to(tl.int32) + n)
    is_live_block = tl.broadcast_to((r < left[0]) & (n * 32 < left[1]), (G, 4, 4))
    store_alike(out, _byte_of(scale), is_live_block, tl.uint8, ASM)


@triton.jit
def _store_mx_words(x, copy, r0, c0, left, G: tl.constexpr, ASM: tl.constexpr):
    _, _, _, _, _, _, scale_ptr, scale_stride = copy
    scale = _column_multipliers(x, G, ASM)
    enc = tl.reshape(tl.broadcast_to(scale[:, None, :], (G // 8, 8, 128)), x[0].shape)
    _store_words(_words_of(x, enc, ASM), copy, r0, c0, left, G)
    # A column's scales lie side by side, those of two columns far apart: the bytes of a column go out together, each
    # once. From where they are, eight threads would store each of them, into a sector of its own every time.
    b = tl.arange(0, G // 8)[None, :]
    n = tl.arange(0, 128)[:, None]
    out = scale_ptr + (c0 * scale_stride + r0 // 32) + (n * scale_stride.to(tl.int32) + b)
    tl.store(out, _byte_of(tl.trans(scale)).to(tl.uint8), mask=(b * 32 < left[0]) & (n < left[1]))


@triton.jit
def write_mx_part(
    x, copy, r0, c0, left, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr
):
    if HAS_ROW:
        _store_mx_rows(x, copy, r0, c0, left, G, ASM)
    if HAS_COL:
        _store_mx_words(x, copy, r0, c0, left, G, ASM)


@triton.jit
def write_part(
    x,
    enc,
    copy,
    r0,
    c0,
    left,
    POW2: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    G: tl.constexpr,
    ASM: tl.constexpr,
):
    """Both copies of a part with one multiplier for all of it: they have the same codes."""
    if ASM and POW2 and x[0].dtype == tl.bfloat16:
        enc = enc.to(tl.bfloat16)
    if HAS_ROW or ASM:
        a, b = _row_codes(x[0], enc, ASM), _row_codes(x[1], enc, ASM)
        c, d = _row_codes(x[2], enc, ASM), _row_codes(x[3], enc, ASM)
    if HAS_ROW:
        is_live = is_live_part(left, G)
        _store_row(a, 0, copy, r0, c0, is_live, G)
        _store_row(b, 1, copy, r0, c0, is_live, G)
        _store_row(c, 2, copy, r0, c0, is_live, G)
        _store_row(d, 3, copy, r0, c0, is_live, G)
    if HAS_COL:
        if ASM:
            word = tl.inline_asm_elementwise(
                _TURN, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=4
            )
        else:
            word = _words_of(x, enc, ASM)
        _store_words(word, copy, r0, c0, left, G)


@triton.jit
def raise_maxima(
    x, amax_ptrs, r0, c0, left, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr
):
    """Raise the maxima of rows and of columns (bits; addresses are the matrix's) to those of a part."""
    row_ptr, col_ptr = amax_ptrs
    if HAS_ROW:
        a, b = row_bits(tl.reshape(x[0], (G, 128)), 8, ASM), row_bits(tl.reshape(x[1], (G, 128)), 8, ASM)
        c, d = row_bits(tl.reshape(x[2], (G, 128)), 8, ASM), row_bits(tl.reshape(x[3], (G, 128)), 8, ASM)
        four = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (4 * G,))
        r = tl.arange(0, 4 * G)
        tl.atomic_max(row_ptr + r0 + r, four, mask=r < left[0], sem="relaxed")
    if HAS_COL:
        each = _largest(tl.reshape(_largest_of_four(x, ASM), (G, 128)), 0)
        n = tl.arange(0, 128)
        tl.atomic_max(col_ptr + c0 + n, each, mask=n < left[1], sem="relaxed")


@triton.jit
def _narrowed(enc, x, POW2: tl.constexpr, ASM: tl.constexpr):
    """Multipliers as `_row_codes` and `_words_of` take them: powers of two for bf16 in bf16."""
    if ASM and POW2 and x.dtype == tl.bfloat16:
        enc = enc.to(tl.bfloat16)
    return tl.broadcast_to(enc, x.shape)


@triton.jit
def write_lines_part(
    x,
    amax_ptrs,
    scale_ptrs,
    copy,
    r0,
    c0,
    left,
    POW2: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    G: tl.constexpr,
    ASM: tl.constexpr,
):
    """Both copies of a part with a multiplier for each row, or for each column, from their maxima."""
    _, _, _, _, _, row_stride, _, col_stride = copy
    if HAS_ROW:
        is_live = is_live_part(left, G)
        out = (scale_ptrs[0], row_stride)
        for j in tl.static_range(4):
            enc = line_multipliers(amax_ptrs[0], r0 + row_of(G) + j, r0 + left[0], out, c0 == 0, POW2)
            _store_row(_row_codes(x[j], _narrowed(enc, x[j], POW2, ASM), ASM), j, copy, r0, c0, is_live, G)
    if HAS_COL:
        out = (scale_ptrs[1], col_stride)
        enc = line_multipliers(amax_ptrs[1], c0 + column_of(), c0 + left[1], out, r0 == 0, POW2)
        _store_words(_words_of(x, _narrowed(enc, x[0], POW2, ASM), ASM), copy, r0, c0, left, G)


@triton.jit
def largest_in(x, ASM: tl.constexpr):
    """Bits of the largest magnitude of a part, bf16 two at a time."""
    if ASM and x[0].dtype == tl.bfloat16:
        each = larger(larger(x[0], x[1], ASM), larger(x[2], x[3], ASM), ASM)
        return tl.max(row_bits(tl.reshape(each, (each.shape[0], 128)), 8, ASM), axis=0)
    return _largest(tl.reshape(_largest_of_four(x, ASM), (x[0].shape[0] * 128,)), 0)
