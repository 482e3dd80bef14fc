"""The update with quantized copies where sizes and addresses are whole vectors: nothing is read twice.

A program loads all that its tile needs, updates it, and quantizes the new weights out of registers. A thread holds four
rows below each other, so that the four codes of a column make one word of the transposed copy: only whole words go
through shared memory. `adamw_copies` has the formats and the general kernel, which reads the new weights again.

Numerics: as `adamw_copies`. The conversion to E4M3 saturates by itself and keeps NaN, so nothing is clamped before it.
Cost:     bytes as `adamw_copies`. Bytes in flight bind it where instructions do not: 64 KB a program of 64 rows.
"""

# Shapes: R rows and C columns of a matrix. A part is 4 * G x 128, as four tensors (G, 1, 128): row 4 i + j is in the
# j-th; a thread has eight columns each.

from dataclasses import dataclass

from deepwell.formats.spec import Format
from deepwell.kernels._bf16_words import larger, row_bits
from deepwell.kernels._fp8 import code_bytes, multiplier_from_bits
from deepwell.kernels._stores import store_alike
from deepwell.kernels._triton import tl, triton
from deepwell.kernels.adamw import hyper_of, load_tile, pointers_from, pointers_of, update_tile
from deepwell.kernels.adamw_copies import e8m0_of, length_at, pointer_of, store_square_scale
from deepwell.kernels.adamw_moments import widen

# ---- configs ----


@dataclass(frozen=True, kw_only=True, slots=True)
class WordConfig:
    """Rows of a part (of 128 columns) and its warps; a 128x128 block is one or two parts."""

    rows: int
    num_warps: int
    max_registers: int | None = None


# 16 warps a multiprocessor have 96 to 128 KB of loads in flight and at most 128 registers each; without a limit the
# assembler takes fewer than that, or a few more.
_FREE = WordConfig(rows=32, num_warps=4)
_AT_120 = WordConfig(rows=32, num_warps=4, max_registers=120)
_AT_128 = WordConfig(rows=32, num_warps=4, max_registers=128)
_AT_160 = WordConfig(rows=32, num_warps=4, max_registers=160)
_TWICE = WordConfig(rows=64, num_warps=8, max_registers=128)
_WHOLE = WordConfig(rows=128, num_warps=16, max_registers=128)
WORD_CONFIGS = (_FREE, _AT_120, _AT_128, _AT_160, _TWICE, _WHOLE)


def word_configs_for(fmt: Format, *, has_fp8_moments: bool, is_delayed: bool = True) -> tuple[WordConfig, ...]:
    """The configs that can serve a format, the default first; `is_delayed` only matters with one scale per tensor."""
    if fmt.block == (128, 128):
        return _TWICE, _WHOLE
    if fmt.scaling == "tensor" and not is_delayed:
        return _FREE, _AT_160, _TWICE
    if fmt.scaling == "tensor":
        return (_AT_120, _TWICE, _FREE) if has_fp8_moments else (_FREE, _AT_120, _AT_128)
    # A column's scales of a part share a sector of memory, those of two columns never do: the more rows, the fewer.
    return _TWICE, _WHOLE, _AT_128


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


# The word of two bf16 numbers' magnitudes, the larger of two such words each, and the halves as bits of fp32.
_MAGNITUDES = tl.constexpr("{ .reg .b32 w; mov.b32 w, {$1, $2}; and.b32 $0, w, 0x7FFF7FFF; }")
_LARGER_WORD = tl.constexpr("max.u16x2 $0, $1, $2;")


@triton.jit
def _larger_word(a, b):
    return tl.inline_asm_elementwise(_LARGER_WORD, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _column_bits(x, G: tl.constexpr, ASM: tl.constexpr):
    """Bits of the largest magnitude of each block of 32 rows and each column, (G // 8, 128)."""
    if ASM and x[0].dtype == tl.bfloat16:
        each = larger(larger(x[0], x[1], ASM), larger(x[2], x[3], ASM), ASM)
        low, high = tl.split(tl.reshape(each, (G // 8, 8, 64, 2)))
        words = tl.inline_asm_elementwise(_MAGNITUDES, "=r,h,h", [low, high], dtype=tl.int32, is_pure=True, pack=1)
        words = tl.reduce(words, 1, _larger_word)
        return tl.reshape(tl.join(words << 16, words & -65536), (G // 8, 128))
    return _largest(tl.reshape(_largest_of_four(x, ASM), (G // 8, 8, 128)), 1)


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
    return 254 - (multiplier.to(tl.int32, bitcast=True) >> 23)


@triton.jit
def _row(G: tl.constexpr):
    """The first of four rows each, counted from the part's first one, (G, 1, 1)."""
    return tl.arange(0, G)[:, None, None] * 4


@triton.jit
def _column():
    """The 128 columns of a part, (1, 1, 128)."""
    return tl.arange(0, 128)[None, None, :]


@triton.jit
def _is_live(left, G: tl.constexpr):
    """Which elements of a part there are, and which rows: lengths are multiples of 16, so four rows are alike."""
    is_live_row = _row(G) < left[0]
    return is_live_row & (_column() < left[1]), is_live_row


@triton.jit
def _place(pointers, J: tl.constexpr, C, is_live, G: tl.constexpr):
    """Of the rows 4 i + J of a part whose first element the pointers point to: they, offsets from them, which are live,
    and blocks of FP8 moments with theirs."""
    e = (_row(G) + J) * C + _column()
    return pointers, tl.max_contiguous(e, [1, 1, 8]), is_live[0], (_row(G) + J) * (C // 128), is_live[1]


@triton.jit
def _update_row(
    loaded,
    pointers,
    place,
    J: tl.constexpr,
    first,
    C,
    hyper,
    random,
    PARAM: tl.constexpr,
    MOMENT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    RANDOM_MOMENT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Update the rows 4 i + J of a part that begins at the element `first` of its parameter."""
    column = tl.arange(0, 16)[None, None, :]
    x = update_tile(
        loaded,
        pointers,
        place[1],
        place[2],
        place[3],
        place[4],
        first // 8 + ((_row(place[1].shape[0]) + J) * (C // 8) + column),
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
    # With eps = 0 what was masked is 0 / 0 where roots may be 0: it must not count.
    if not ASM or (MOMENT != tl.uint8 and (HAS_MASTER or PARAM == tl.float32)):
        x = tl.where(place[2], x, 0.0)
    return x


@triton.jit
def _new_weights(
    table_ptr,
    row,
    slot,
    r0,
    c0,
    first,
    left,
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
    ASM: tl.constexpr,
):
    """The weights of a part as they are stored, after the update where it UPDATES: four tensors (G, 1, 128)."""
    pointers = pointers_of(table_ptr, row, PARAM, GRAD, MOMENT, True)
    is_live = _is_live(left, G)
    e = r0.to(tl.int64) * C + c0
    C = tl.multiple_of(C.to(tl.int32), 16)
    pointers = pointers_from(pointers, e, e // 128)
    at0 = _place(pointers, 0, C, is_live, G)
    at1 = _place(pointers, 1, C, is_live, G)
    at2 = _place(pointers, 2, C, is_live, G)
    at3 = _place(pointers, 3, C, is_live, G)
    if not UPDATES:
        x0 = tl.load(at0[0][0] + at0[1], mask=at0[2], other=0.0)
        x1 = tl.load(at1[0][0] + at1[1], mask=at1[2], other=0.0)
        x2 = tl.load(at2[0][0] + at2[1], mask=at2[2], other=0.0)
        x3 = tl.load(at3[0][0] + at3[1], mask=at3[2], other=0.0)
        return x0, x1, x2, x3
    # All loads before the first store: afterwards none may pass it.
    HAS_FP8: tl.constexpr = MOMENT == tl.uint8
    y0 = load_tile(*at0, HAS_FP8, HAS_MASTER)
    y1 = load_tile(*at1, HAS_FP8, HAS_MASTER)
    y2 = load_tile(*at2, HAS_FP8, HAS_MASTER)
    y3 = load_tile(*at3, HAS_FP8, HAS_MASTER)
    # No load may sink below it, amid the arithmetic, where each would wait; and what the arithmetic needs comes after
    # it, else the first row would be worked out before the others are loaded.
    tl.debug_barrier()
    rest = (first + e, C, hyper_of(hyper_ptr + slot * 8), random)
    # Slots count from 0: it is 0, but only we know. Addresses are worked out again instead of kept in registers.
    zero = tl.multiple_of(tl.minimum(slot, 0), 16)
    to = pointers_from(pointers, zero, zero)
    x0 = _update_row(y0, to, at0, 0, *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
    x1 = _update_row(y1, to, at1, 1, *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
    x2 = _update_row(y2, to, at2, 2, *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
    x3 = _update_row(y3, to, at3, 3, *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
    return x0, x1, x2, x3


@triton.jit
def _store_row(x, enc, J: tl.constexpr, copy, r0, c0, is_live, G: tl.constexpr, ASM: tl.constexpr):
    row_ptr, row_stride, _, _, _, _, _, _ = copy
    place = (_row(G) + J) * tl.multiple_of(row_stride.to(tl.int32), 16) + _column()
    out = row_ptr + (r0 * row_stride + c0) + tl.max_contiguous(place, [1, 1, 8])
    tl.store(out, _codes(widen(x, ASM) * enc, ASM), mask=is_live[0])


@triton.jit
def _store_words(x, enc, copy, r0, c0, left, G: tl.constexpr, ASM: tl.constexpr):
    """The transposed copy: a word has four codes of a column."""
    _, _, col_ptr, col_stride, _, _, _, _ = copy
    a, b, c, d = _as_fp32(x, ASM)
    word = tl.reshape(_word(a * enc, b * enc, c * enc, d * enc, ASM), (G, 128))
    i = tl.arange(0, G)[None, :]
    n = tl.arange(0, 128)[:, None]
    out = (col_ptr + (c0 * col_stride + r0)).to(tl.pointer_type(tl.int32)) + (n * (col_stride // 4).to(tl.int32) + i)
    tl.store(out, tl.trans(word), mask=(n < left[1]) & (i < left[0] // 4))


@triton.jit
def _store_mx_row(x, J: tl.constexpr, copy, r0, c0, left, is_live, G: tl.constexpr, ASM: tl.constexpr):
    _, _, _, _, scale_ptr, scale_stride, _, _ = copy
    scale = _multiplier_of(_largest(tl.reshape(tl.abs(widen(x, ASM)), (G, 4, 32)), 2), x.dtype)
    enc = tl.reshape(tl.broadcast_to(scale[:, :, None], (G, 4, 32)), x.shape)
    _store_row(x, enc, J, copy, r0, c0, is_live, G, ASM)
    r = tl.arange(0, G)[:, None] * 4
    b = tl.arange(0, 4)[None, :]
    out = scale_ptr + (r0 * scale_stride + c0 // 32) + ((r + J) * scale_stride.to(tl.int32) + b)
    store_alike(out, _byte_of(scale), (r < left[0]) & (b * 32 < left[1]), tl.uint8, ASM)


@triton.jit
def _store_mx_words(x, copy, r0, c0, left, G: tl.constexpr, ASM: tl.constexpr):
    _, _, _, _, _, _, scale_ptr, scale_stride = copy
    scale = _multiplier_of(_column_bits(x, G, ASM), x[0].dtype)
    enc = tl.reshape(tl.broadcast_to(scale[:, None, :], (G // 8, 8, 128)), x[0].shape)
    _store_words(x, enc, copy, r0, c0, left, G, ASM)
    # A column's scales lie side by side, those of two columns far apart: the bytes of a column go out together, each
    # once. From where they are, eight threads would store each of them, into a sector of its own every time.
    b = tl.arange(0, G // 8)[None, :]
    n = tl.arange(0, 128)[:, None]
    out = scale_ptr + (c0 * scale_stride + r0 // 32) + (n * scale_stride.to(tl.int32) + b)
    tl.store(out, _byte_of(tl.trans(scale)).to(tl.uint8), mask=(b * 32 < left[0]) & (n < left[1]))


@triton.jit
def _write_part(
    x,
    enc,
    copy,
    r0,
    c0,
    left,
    IS_MX: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    G: tl.constexpr,
    ASM: tl.constexpr,
):
    x0, x1, x2, x3 = x
    if HAS_ROW:
        is_live = _is_live(left, G)
        if IS_MX:
            _store_mx_row(x0, 0, copy, r0, c0, left, is_live, G, ASM)
            _store_mx_row(x1, 1, copy, r0, c0, left, is_live, G, ASM)
            _store_mx_row(x2, 2, copy, r0, c0, left, is_live, G, ASM)
            _store_mx_row(x3, 3, copy, r0, c0, left, is_live, G, ASM)
        else:
            _store_row(x0, enc, 0, copy, r0, c0, is_live, G, ASM)
            _store_row(x1, enc, 1, copy, r0, c0, is_live, G, ASM)
            _store_row(x2, enc, 2, copy, r0, c0, is_live, G, ASM)
            _store_row(x3, enc, 3, copy, r0, c0, is_live, G, ASM)
    if HAS_COL:
        if IS_MX:
            _store_mx_words(x, copy, r0, c0, left, G, ASM)
        else:
            _store_words(x, enc, copy, r0, c0, left, G, ASM)


@triton.jit
def _largest_in(x, ASM: tl.constexpr):
    """Bits of the largest magnitude of a part, bf16 two at a time."""
    if ASM and x[0].dtype == tl.bfloat16:
        each = larger(larger(x[0], x[1], ASM), larger(x[2], x[3], ASM), ASM)
        return tl.max(row_bits(tl.reshape(each, (each.shape[0], 128)), 8, ASM), axis=0)
    return _largest(tl.reshape(_largest_of_four(x, ASM), (x[0].shape[0] * 128,)), 0)


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
    pid = tl.program_id(0)
    row = tl.load(chunk_row_ptr + pid)
    place = tl.load(chunk_place_ptr + pid)
    # (Neither is negative. Asking for both loads them before the branch, not after another wait.)
    if tl.load(control_ptr + 1) == 0 and (row | place) >= 0:
        copy_ptr = copies_ptr + row * 14
        R = length_at(copy_ptr, 0, True)
        C = length_at(copy_ptr, 1, True)
        first = tl.multiple_of(tl.load(copy_ptr + 2), 16)
        slot = tl.load(table_ptr + row * 10 + 8)
        random = (tl.load(control_ptr), tl.load(table_ptr + row * 10 + 9), tl.load(step_ptr + slot))
        r0 = (place >> 16) * (ROWS * PARTS)
        c0 = (place & 0xFFFF) * 128
        # Rows and columns from there on, as far as a program looks.
        left_r = tl.multiple_of(tl.minimum(R - r0, 128).to(tl.int32), 16)
        left_c = tl.multiple_of(tl.minimum(C - c0, 128).to(tl.int32), 16)
        where = (table_ptr, row, slot, r0, c0, first, (left_r, left_c), C, hyper_ptr, random)
        x = _new_weights(*where, PARAM, GRAD, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, UPDATES, ROWS // 4, ASM)
        if PARTS == 2:
            where = (table_ptr, row, slot, r0 + ROWS, c0, first, (left_r - ROWS, left_c), C, hyper_ptr, random)
            y = _new_weights(
                *where, PARAM, GRAD, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, UPDATES, ROWS // 4, ASM
            )
        # Not before: where it waits, it takes registers.
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
        if COLLECTS:
            # Relaxed: else all of the program's stores are waited for.
            tl.atomic_max(amax_ptr, _largest_in(x, ASM), sem="relaxed")
        if SCALING == "square":
            bits = _largest_in(x, ASM)
            if PARTS == 2:
                bits = tl.maximum(bits, _largest_in(y, ASM))
            enc = multiplier_from_bits(bits, 448.0, POW2)
            store_square_scale(tl.div_rn(1.0, enc), copy, square_ptrs, r0 // 128, c0 // 128, HAS_ROW, HAS_COL)
        if WRITES:
            _write_part(x, enc, copy, r0, c0, (left_r, left_c), SCALING == "mx", HAS_ROW, HAS_COL, ROWS // 4, ASM)
            if PARTS == 2:
                left = (left_r - ROWS, left_c)
                _write_part(y, enc, copy, r0 + ROWS, c0, left, SCALING == "mx", HAS_ROW, HAS_COL, ROWS // 4, ASM)
