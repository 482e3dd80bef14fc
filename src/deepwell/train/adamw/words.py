"""The update with quantized copies where sizes and addresses are whole vectors: nothing is read twice.

A program loads all that its tile needs, updates it, and quantizes the new weights out of registers, as
`adamw_word_copies` does. `adamw_copies` has the formats and the general kernel, which reads the new weights again.

Numerics: as `adamw_copies`.
Cost:     bytes as `adamw_copies`. Bytes in flight bind it where instructions do not: 64 KB a program of 64 rows.
"""

# Shapes: R rows and C columns of a matrix. A part is 4 * G x 128, as four tensors (G, 1, 128): row 4 i + j is in the
# j-th; a thread has eight columns each.

from dataclasses import dataclass

from deepwell.formats.spec import Format
from deepwell.kernels.device.fp8 import multiplier_from_bits
from deepwell.kernels.device.triton_support import tl, triton
from deepwell.train.adamw.copies import length_at, pointer_of, store_square_scale
from deepwell.train.adamw.update import hyper_of, load_tile, pointers_from, pointers_of, update_pair_fp8, update_tile
from deepwell.train.adamw.word_copies import (
    column_of,
    is_live_part,
    largest_in,
    raise_maxima,
    row_of,
    write_lines_part,
    write_mx_part,
    write_part,
)

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
        return _WHOLE, _TWICE
    if fmt.scaling == "row":
        return _FREE, _TWICE  # not measured yet
    if fmt.scaling == "tensor" and not is_delayed:
        return _FREE, _AT_160, _TWICE
    if fmt.scaling == "tensor":
        return (_AT_128, _TWICE) if has_fp8_moments else (_FREE, _AT_120, _AT_128)
    # A column's scales of a part share a sector of memory, those of two columns never do: the more rows, the fewer.
    return _TWICE, _WHOLE, _AT_128


# ---- kernels ----


@triton.jit
def _instead(i, left):
    """A live row or column for each: itself, or where it is not live one that is, of the same 32 if there is any."""
    near = tl.where(i < left, i, i & -17)
    return tl.where(near < left, near, i & 15)


@triton.jit
def _lines(left, G: tl.constexpr, IS_FULL: tl.constexpr):
    """Rows (G, 1, 1), columns and first columns of a draw (1, 1, 16) that a part works on, and which of them are live.

    Masks take an instruction for every word they clear. Where IS_FULL all are live: what lies beyond the matrix does
    again what a thread of the same program does, to the same bits, so that it raises no maximum of a block that is
    stored either. (All of a program's loads come before its first store.) A part that may have no live row needs masks.
    """
    row = row_of(G)
    column = column_of()
    eights = tl.arange(0, 16)[None, None, :] * 8
    if IS_FULL:
        row = _instead(row, left[0])
        column = tl.multiple_of(_instead(column, left[1]), [1, 1, 8])
        eights = _instead(eights, left[1])
        is_live = tl.full((G, 1, 128), 1, tl.int1), tl.full((G, 1, 1), 1, tl.int1)
    else:
        is_live = is_live_part(left, G)
    return row, column, eights // 8, is_live


@triton.jit
def _place(pointers, lines, J: tl.constexpr, C):
    """Of the rows 4 i + J of a part whose first element the pointers point to: they, offsets from them, which are live,
    and blocks of FP8 moments with theirs; and draws of random bits."""
    row, column, call, is_live = lines
    e = tl.max_contiguous(tl.multiple_of((row + J) * C + column, [1, 1, 8]), [1, 1, 8])
    return pointers, e, is_live[0], (row + J) * (C // 128), is_live[1], (row + J) * (C // 8) + call


@triton.jit
def _update_row(
    loaded,
    pointers,
    place,
    first,
    hyper,
    random,
    PARAM: tl.constexpr,
    MOMENT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    RANDOM_MOMENT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Update the rows of `place` in a part that begins at the element `first` of its parameter."""
    x = update_tile(
        loaded,
        pointers,
        place[1],
        place[2],
        place[3],
        place[4],
        first // 8 + place[5],
        hyper,
        random,
        PARAM,
        MOMENT,
        HAS_MASTER,
        RANDOM_PARAM,
        RANDOM_MOMENT,
        "pairs",
        ASM,
    )
    # With eps = 0 what was masked is 0 / 0 where roots may be 0: it must not count.
    if not ASM or (MOMENT != tl.uint8 and (HAS_MASTER or PARAM == tl.float32)):
        x = tl.where(place[2], x, 0.0)
    return x


@triton.jit
def _update_pair(
    loaded,
    pointers,
    at,
    first,
    hyper,
    random,
    PARAM: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    RANDOM_MOMENT: tl.constexpr,
):
    """`_update_row` of two places, with FP8 moments."""
    at0, at1 = at
    return update_pair_fp8(
        loaded,
        pointers,
        ((at0[1], at0[2], at0[3], at0[4]), (at1[1], at1[2], at1[3], at1[4])),
        (first // 8 + at0[5], first // 8 + at1[5]),
        hyper,
        random,
        PARAM,
        HAS_MASTER,
        RANDOM_PARAM,
        RANDOM_MOMENT,
    )


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
    IS_FULL: tl.constexpr,
    G: tl.constexpr,
    ASM: tl.constexpr,
):
    """The weights of a part as they are stored, after the update where it UPDATES: four tensors (G, 1, 128)."""
    pointers = pointers_of(table_ptr, row, PARAM, GRAD, MOMENT, True)
    lines = _lines(left, G, IS_FULL and UPDATES)
    e = r0.to(tl.int64) * C + c0
    C = tl.multiple_of(C.to(tl.int32), 16)
    pointers = pointers_from(pointers, e, e // 128)
    at0 = _place(pointers, lines, 0, C)
    at1 = _place(pointers, lines, 1, C)
    at2 = _place(pointers, lines, 2, C)
    at3 = _place(pointers, lines, 3, C)
    if not UPDATES:
        x0 = tl.load(at0[0][0] + at0[1], mask=at0[2], other=0.0)
        x1 = tl.load(at1[0][0] + at1[1], mask=at1[2], other=0.0)
        x2 = tl.load(at2[0][0] + at2[1], mask=at2[2], other=0.0)
        x3 = tl.load(at3[0][0] + at3[1], mask=at3[2], other=0.0)
        return x0, x1, x2, x3
    # All loads before the first store: afterwards none may pass it.
    HAS_FP8: tl.constexpr = MOMENT == tl.uint8
    y0 = load_tile(*at0[:5], HAS_FP8, HAS_MASTER, "")
    y1 = load_tile(*at1[:5], HAS_FP8, HAS_MASTER, "")
    y2 = load_tile(*at2[:5], HAS_FP8, HAS_MASTER, "")
    y3 = load_tile(*at3[:5], HAS_FP8, HAS_MASTER, "")
    # No load may sink below it, amid the arithmetic, where each would wait; and what the arithmetic needs comes after
    # it, else the first row would be worked out before the others are loaded.
    tl.debug_barrier()
    rest = (first + e, hyper_of(hyper_ptr + slot * 8), random)
    # Slots count from 0: it is 0, but only we know. Addresses are worked out again instead of kept in registers.
    zero = tl.multiple_of(tl.minimum(slot, 0), 16)
    to = pointers_from(pointers, zero, zero)
    if ASM and MOMENT == tl.uint8:
        x0, x1 = _update_pair((y0, y1), to, (at0, at1), *rest, PARAM, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT)
        x2, x3 = _update_pair((y2, y3), to, (at2, at3), *rest, PARAM, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT)
    else:
        x0 = _update_row(y0, to, at0, *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
        x1 = _update_row(y1, to, at1, *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
        x2 = _update_row(y2, to, at2, *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
        x3 = _update_row(y3, to, at3, *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
    return x0, x1, x2, x3


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
        x = _new_weights(
            *where,
            PARAM,
            GRAD,
            MOMENT,
            HAS_MASTER,
            RANDOM_PARAM,
            RANDOM_MOMENT,
            UPDATES,
            PARTS == 1,
            ROWS // 4,
            ASM,
        )
        if PARTS == 2:
            where = (table_ptr, row, slot, r0 + ROWS, c0, first, (left_r - ROWS, left_c), C, hyper_ptr, random)
            y = _new_weights(
                *where,
                PARAM,
                GRAD,
                MOMENT,
                HAS_MASTER,
                RANDOM_PARAM,
                RANDOM_MOMENT,
                UPDATES,
                PARTS == 1,
                ROWS // 4,
                ASM,
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
        scale_ptrs = (pointer_of(copy_ptr, 7, tl.float32, False), pointer_of(copy_ptr, 9, tl.float32, False))
        enc = 1.0
        if SCALING == "tensor" and WRITES:
            bits = tl.load(tl.load(copy_ptr + 12).to(tl.pointer_type(tl.int32))) & 0x7FFFFFFF
            enc = multiplier_from_bits(bits, 448.0, POW2)
        amax_ptr = tl.load(copy_ptr + 13).to(tl.pointer_type(tl.int32))
        line_ptrs = (tl.load(copy_ptr + 12).to(tl.pointer_type(tl.int32)), amax_ptr)
        # Maxima are collected relaxed: else all of the program's stores are waited for.
        if COLLECTS and SCALING == "row":
            raise_maxima(x, line_ptrs, r0, c0, (left_r, left_c), HAS_ROW, HAS_COL, ROWS // 4, ASM)
        elif COLLECTS:
            tl.atomic_max(amax_ptr, largest_in(x, ASM), sem="relaxed")
        if SCALING == "square":
            bits = largest_in(x, ASM)
            if PARTS == 2:
                bits = tl.maximum(bits, largest_in(y, ASM))
            enc = multiplier_from_bits(bits, 448.0, POW2)
            store_square_scale(tl.div_rn(1.0, enc), copy, scale_ptrs, r0 // 128, c0 // 128, HAS_ROW, HAS_COL)
        if WRITES:
            if SCALING == "mx":
                write_mx_part(x, copy, r0, c0, (left_r, left_c), HAS_ROW, HAS_COL, ROWS // 4, ASM)
            elif SCALING == "row":
                left = (left_r, left_c)
                write_lines_part(x, line_ptrs, scale_ptrs, copy, r0, c0, left, POW2, HAS_ROW, HAS_COL, ROWS // 4, ASM)
            else:
                write_part(x, enc, copy, r0, c0, (left_r, left_c), POW2, HAS_ROW, HAS_COL, ROWS // 4, ASM)
                if PARTS == 2:
                    left = (left_r - ROWS, left_c)
                    write_part(y, enc, copy, r0 + ROWS, c0, left, POW2, HAS_ROW, HAS_COL, ROWS // 4, ASM)
