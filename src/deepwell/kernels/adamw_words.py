"""The update with quantized copies where sizes and addresses are whole vectors: nothing is read twice.

A program loads all that its tile needs, updates it, and quantizes the new weights out of registers. A thread holds four
rows below each other, so that the four codes of a column make one word of the transposed copy: only whole words go
through shared memory. `adamw_copies` has the formats and the general kernel, which reads the new weights again.

Numerics: as `adamw_copies`. The conversion to E4M3 saturates by itself and keeps NaN, so nothing is clamped before it.
Cost:     bytes as `adamw_copies`. Bytes in flight bind it where instructions do not: 64 KB a program of 64 rows.
"""

# Shapes: R rows and C columns of a matrix. A part is 4 * G x 128, as four tensors (G, P, 128 / P): row 4 i + j is in
# the j-th, its columns in P pieces, of which a thread has eight columns each.

from dataclasses import dataclass

from deepwell.formats.spec import Format
from deepwell.kernels._fp8 import code_bytes, multiplier_from_bits
from deepwell.kernels._triton import tl, triton
from deepwell.kernels.adamw import hyper_of, load_tile, pointers_of, update_tile
from deepwell.kernels.adamw_copies import e8m0_of, length_at, pointer_of, store_square_scale

# ---- configs ----


@dataclass(frozen=True, kw_only=True, slots=True)
class WordConfig:
    """Rows of a part (of 128 columns) and its warps; a 128x128 block is one or two parts."""

    rows: int
    # FP8 moments have a scale for 128 columns: the more of them a thread holds, the less it works twice.
    pieces: int
    num_warps: int
    max_registers: int | None = None


WORD_CONFIGS = (
    WordConfig(rows=32, pieces=1, num_warps=4, max_registers=128),
    WordConfig(rows=32, pieces=1, num_warps=4, max_registers=160),
    WordConfig(rows=64, pieces=1, num_warps=8, max_registers=128),
    WordConfig(rows=64, pieces=1, num_warps=8),
    WordConfig(rows=64, pieces=1, num_warps=16),
    WordConfig(rows=128, pieces=1, num_warps=16, max_registers=128),
    WordConfig(rows=64, pieces=2, num_warps=4),
    WordConfig(rows=64, pieces=2, num_warps=8, max_registers=128),
    WordConfig(rows=128, pieces=2, num_warps=8),
)


def word_configs_for(fmt: Format, *, has_fp8_moments: bool) -> tuple[WordConfig, ...]:
    """The configs that can serve a format, the best one first."""
    fits = [config for config in WORD_CONFIGS if fmt.block != (128, 128) or config.rows >= 64]
    return tuple(sorted(fits, key=lambda config: (config.pieces > 1) != has_fp8_moments))


# ---- kernels ----

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


@triton.jit
def _as_fp32(x):
    # As late as this: what waits for it takes half the registers.
    return x[0].to(tl.float32), x[1].to(tl.float32), x[2].to(tl.float32), x[3].to(tl.float32)


@triton.jit
def _largest_of_four(x):
    a, b, c, d = _as_fp32(x)
    return _larger(_larger(tl.abs(a), tl.abs(b)), _larger(tl.abs(c), tl.abs(d)))


@triton.jit
def _row(r0, J: tl.constexpr, G: tl.constexpr):
    return r0 + J + tl.arange(0, G)[:, None, None] * 4


@triton.jit
def _column(c0, P: tl.constexpr):
    """The 128 columns of a part in P pieces, (1, P, 128 / P)."""
    return c0 + tl.arange(0, P)[None, :, None] * (128 // P) + tl.arange(0, 128 // P)[None, None, :]


@triton.jit
def _place(r0, J: tl.constexpr, c0, R, C, G: tl.constexpr, P: tl.constexpr):
    """Of the rows 4 i + J of a part: offsets, which are live, and the blocks of FP8 moments with theirs."""
    r = _row(r0, J, G)
    c = _column(c0, P)
    # (Comparing the first of four rows keeps the mask the same for all of them.)
    return tl.max_contiguous(r * C + c, [1, 1, 8]), (r - J < R) & (c < C), (r * C + c0) // 128, r - J < R


@triton.jit
def _update_row(
    loaded,
    place,
    r,
    first,
    c0,
    C,
    pointers,
    hyper,
    random,
    PARAM: tl.constexpr,
    MOMENT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    RANDOM_MOMENT: tl.constexpr,
    P: tl.constexpr,
    ASM: tl.constexpr,
):
    column = tl.arange(0, P)[None, :, None] * (16 // P) + tl.arange(0, 16 // P)[None, None, :]
    calls = (first + r * C + c0) // 8 + column
    e, is_live, block, is_live_block = place
    x = update_tile(
        loaded,
        pointers,
        e,
        is_live,
        block,
        is_live_block,
        calls,
        hyper,
        random,
        PARAM,
        MOMENT,
        HAS_MASTER,
        RANDOM_PARAM,
        RANDOM_MOMENT,
        False,
        ASM,
    )
    # With eps = 0 what was masked is 0 / 0: it must not count.
    return tl.where(is_live, x, 0.0)


@triton.jit
def _new_weights(
    table_ptr,
    row,
    slot,
    r0,
    c0,
    first,
    R,
    C,
    hyper_ptr,
    random,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    RANDOM_MOMENT: tl.constexpr,
    UPDATES: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    ASM: tl.constexpr,
):
    """The weights of a part as they are stored, after the update where it UPDATES: four tensors (G, P, 128 / P)."""
    pointers = pointers_of(table_ptr, row, PARAM, GRAD, MOMENT, True)
    at0 = _place(r0, 0, c0, R, C, G, P)
    at1 = _place(r0, 1, c0, R, C, G, P)
    at2 = _place(r0, 2, c0, R, C, G, P)
    at3 = _place(r0, 3, c0, R, C, G, P)
    if not UPDATES:
        x0 = tl.load(pointers[0] + at0[0], mask=at0[1], other=0.0)
        x1 = tl.load(pointers[0] + at1[0], mask=at1[1], other=0.0)
        x2 = tl.load(pointers[0] + at2[0], mask=at2[1], other=0.0)
        x3 = tl.load(pointers[0] + at3[0], mask=at3[1], other=0.0)
        return x0, x1, x2, x3
    # All loads before the first store: afterwards none may pass it.
    HAS_FP8: tl.constexpr = MOMENT == tl.uint8
    hyper = hyper_of(hyper_ptr + slot * 8)
    y0 = load_tile(pointers, *at0, HAS_FP8, HAS_MASTER)
    y1 = load_tile(pointers, *at1, HAS_FP8, HAS_MASTER)
    y2 = load_tile(pointers, *at2, HAS_FP8, HAS_MASTER)
    y3 = load_tile(pointers, *at3, HAS_FP8, HAS_MASTER)
    rest = (first, c0, C, pointers, hyper, random)
    x0 = _update_row(y0, at0, _row(r0, 0, G), *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, P, ASM)
    x1 = _update_row(y1, at1, _row(r0, 1, G), *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, P, ASM)
    x2 = _update_row(y2, at2, _row(r0, 2, G), *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, P, ASM)
    x3 = _update_row(y3, at3, _row(r0, 3, G), *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, P, ASM)
    return x0, x1, x2, x3


@triton.jit
def _store_row(x, enc, J: tl.constexpr, copy, r0, c0, R, C, G: tl.constexpr, ASM: tl.constexpr):
    row_ptr, row_stride, _, _, _, _, _, _ = copy
    r = _row(r0, J, G)
    c = _column(c0, x.shape[1])
    place = tl.max_contiguous(r * row_stride + c, [1, 1, 8])
    tl.store(row_ptr + place, _codes(x.to(tl.float32) * enc, ASM), mask=(r - J < R) & (c < C))


@triton.jit
def _store_words(x, enc, copy, r0, c0, R, C, G: tl.constexpr, ASM: tl.constexpr):
    """The transposed copy: a word has four codes of a column."""
    _, _, col_ptr, col_stride, _, _, _, _ = copy
    a, b, c, d = _as_fp32(x)
    word = tl.reshape(_word(a * enc, b * enc, c * enc, d * enc, ASM), (G, 128))
    i = r0 // 4 + tl.arange(0, G)
    n = c0 + tl.arange(0, 128)
    out = col_ptr.to(tl.pointer_type(tl.int32)) + n[:, None] * (col_stride // 4) + i[None, :]
    tl.store(out, tl.trans(word), mask=(n[:, None] < C) & (i[None, :] < R // 4))


@triton.jit
def _store_mx_row(x, J: tl.constexpr, copy, r0, c0, R, C, G: tl.constexpr, ASM: tl.constexpr):
    _, _, _, _, scale_ptr, scale_stride, _, _ = copy
    byte, enc = e8m0_of(_largest(tl.reshape(tl.abs(x.to(tl.float32)), (G, 4, 32)), 2))
    enc = tl.reshape(tl.broadcast_to(enc[:, :, None], (G, 4, 32)), x.shape)
    _store_row(x, enc, J, copy, r0, c0, R, C, G, ASM)
    r = r0 + J + tl.arange(0, G)[:, None] * 4
    b = tl.arange(0, 4)[None, :]
    tl.store(scale_ptr + r * scale_stride + c0 // 32 + b, byte.to(tl.uint8), mask=(r - J < R) & (c0 + b * 32 < C))


@triton.jit
def _store_mx_words(x, copy, r0, c0, R, C, G: tl.constexpr, ASM: tl.constexpr):
    _, _, _, _, _, _, scale_ptr, scale_stride = copy
    byte, enc = e8m0_of(_largest(tl.reshape(_largest_of_four(x), (G // 8, 8, 128)), 1))
    enc = tl.reshape(tl.broadcast_to(enc[:, None, :], (G // 8, 8, 128)), x[0].shape)
    _store_words(x, enc, copy, r0, c0, R, C, G, ASM)
    b = tl.arange(0, G // 8)[:, None]
    n = c0 + tl.arange(0, 128)[None, :]
    tl.store(scale_ptr + n * scale_stride + r0 // 32 + b, byte.to(tl.uint8), mask=(r0 + b * 32 < R) & (n < C))


@triton.jit
def _write_part(
    x,
    enc,
    copy,
    r0,
    c0,
    R,
    C,
    IS_MX: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    G: tl.constexpr,
    ASM: tl.constexpr,
):
    x0, x1, x2, x3 = x
    if HAS_ROW:
        if IS_MX:
            _store_mx_row(x0, 0, copy, r0, c0, R, C, G, ASM)
            _store_mx_row(x1, 1, copy, r0, c0, R, C, G, ASM)
            _store_mx_row(x2, 2, copy, r0, c0, R, C, G, ASM)
            _store_mx_row(x3, 3, copy, r0, c0, R, C, G, ASM)
        else:
            _store_row(x0, enc, 0, copy, r0, c0, R, C, G, ASM)
            _store_row(x1, enc, 1, copy, r0, c0, R, C, G, ASM)
            _store_row(x2, enc, 2, copy, r0, c0, R, C, G, ASM)
            _store_row(x3, enc, 3, copy, r0, c0, R, C, G, ASM)
    if HAS_COL:
        if IS_MX:
            _store_mx_words(x, copy, r0, c0, R, C, G, ASM)
        else:
            _store_words(x, enc, copy, r0, c0, R, C, G, ASM)


@triton.jit
def _largest_in(x):
    return _largest(tl.reshape(_largest_of_four(x), (x[0].shape[0] * 128,)), 0)


@triton.jit
def _words_kernel(
    table_ptr,
    copies_ptr,
    chunk_row_ptr,
    chunk_place_ptr,
    hyper_ptr,
    step_ptr,
    control_ptr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    RANDOM_MOMENT: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    PARTS: tl.constexpr,
    SCALING: tl.constexpr,
    POW2: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    UPDATES: tl.constexpr,
    WRITES: tl.constexpr,
    COLLECTS: tl.constexpr,
):
    # One program: PARTS parts of ROWS x 128 below each other, two only for a 128x128 block with its one scale.
    if tl.load(control_ptr + 1) == 0:
        pid = tl.program_id(0)
        row = tl.load(chunk_row_ptr + pid)
        place = tl.load(chunk_place_ptr + pid).to(tl.int64)
        copy_ptr = copies_ptr + row * 14
        R = length_at(copy_ptr, 0, True)
        C = length_at(copy_ptr, 1, True)
        first = tl.multiple_of(tl.load(copy_ptr + 2), 16)
        slot = tl.load(table_ptr + row * 10 + 8)
        random = (tl.load(control_ptr), tl.load(table_ptr + row * 10 + 9), tl.load(step_ptr + slot))
        copy = (
            pointer_of(copy_ptr, 3, tl.uint8, True),
            length_at(copy_ptr, 4, True),
            pointer_of(copy_ptr, 5, tl.uint8, True),
            length_at(copy_ptr, 6, True),
            pointer_of(copy_ptr, 7, tl.uint8, False),
            length_at(copy_ptr, 8, False),
            pointer_of(copy_ptr, 9, tl.uint8, False),
            length_at(copy_ptr, 10, False),
        )
        square_ptrs = (pointer_of(copy_ptr, 7, tl.float32, False), pointer_of(copy_ptr, 9, tl.float32, False))
        enc = 1.0
        if SCALING == "tensor" and WRITES:
            bits = tl.load(tl.load(copy_ptr + 12).to(tl.pointer_type(tl.int32))) & 0x7FFFFFFF
            enc = multiplier_from_bits(bits, 448.0, POW2)
        amax_ptr = tl.load(copy_ptr + 13).to(tl.pointer_type(tl.int32))
        tiles = (C + 127) // 128
        r0 = place // tiles * (ROWS * PARTS)
        c0 = place % tiles * 128
        where = (table_ptr, row, slot, r0, c0, first, R, C, hyper_ptr, random)
        x = _new_weights(
            *where, PARAM, GRAD, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, UPDATES, ROWS // 4, PIECES, ASM
        )
        if PARTS == 2:
            where = (table_ptr, row, slot, r0 + ROWS, c0, first, R, C, hyper_ptr, random)
            y = _new_weights(
                *where, PARAM, GRAD, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, UPDATES, ROWS // 4, PIECES, ASM
            )
        if COLLECTS:
            tl.atomic_max(amax_ptr, _largest_in(x))
        if SCALING == "square":
            bits = _largest_in(x)
            if PARTS == 2:
                bits = tl.maximum(bits, _largest_in(y))
            enc = multiplier_from_bits(bits, 448.0, POW2)
            store_square_scale(tl.div_rn(1.0, enc), copy, square_ptrs, r0 // 128, c0 // 128, HAS_ROW, HAS_COL)
        if WRITES:
            _write_part(x, enc, copy, r0, c0, R, C, SCALING == "mx", HAS_ROW, HAS_COL, ROWS // 4, ASM)
            if PARTS == 2:
                _write_part(y, enc, copy, r0 + ROWS, c0, R, C, SCALING == "mx", HAS_ROW, HAS_COL, ROWS // 4, ASM)
