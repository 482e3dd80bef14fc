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
from deepwell.kernels._fp8 import multiplier_from_bits
from deepwell.kernels._triton import tl, triton
from deepwell.kernels.adamw import hyper_of, load_tile, pointers_from, pointers_of, update_pair_fp8, update_tile
from deepwell.kernels.adamw_copies import length_at, pointer_of, store_square_scale
from deepwell.kernels.adamw_scalars import read, read_two
from deepwell.kernels.adamw_word_copies import column_of, is_live_part, largest_in, row_of, write_mx_part, write_part

# ---- configs ----


@dataclass(frozen=True, kw_only=True, slots=True)
class WordConfig:
    """Rows of a part (of 128 columns) and its warps; a 128x128 block is one or two parts.

    With two `stages` and one part `adamw_staged` updates: programs stay and have a second tile on its way.
    """

    rows: int
    num_warps: int
    max_registers: int | None = None
    stages: int = 1


# 16 warps a multiprocessor have 96 to 128 KB of loads in flight and at most 128 registers each; without a limit the
# assembler takes fewer than that, or a few more.
_FREE = WordConfig(rows=32, num_warps=4)
_AT_120 = WordConfig(rows=32, num_warps=4, max_registers=120)
_AT_128 = WordConfig(rows=32, num_warps=4, max_registers=128)
_AT_160 = WordConfig(rows=32, num_warps=4, max_registers=160)
_TWICE = WordConfig(rows=64, num_warps=8, max_registers=128)
_WHOLE = WordConfig(rows=128, num_warps=16, max_registers=128)
# Not measured yet, so neither is a default.
_STAGED = WordConfig(rows=32, num_warps=4, max_registers=128, stages=2)
_TWICE_STAGED = WordConfig(rows=64, num_warps=8, max_registers=128, stages=2)
WORD_CONFIGS = (_FREE, _AT_120, _AT_128, _AT_160, _TWICE, _WHOLE, _STAGED, _TWICE_STAGED)


def word_configs_for(fmt: Format, *, has_fp8_moments: bool, is_delayed: bool = True) -> tuple[WordConfig, ...]:
    """The configs that can serve a format, the default first; `is_delayed` only matters with one scale per tensor."""
    if fmt.block == (128, 128):
        return _WHOLE, _TWICE
    if fmt.scaling == "tensor" and not is_delayed:
        return _FREE, _AT_160, _TWICE
    if fmt.scaling == "tensor":
        return (_AT_128, _STAGED, _TWICE_STAGED, _TWICE) if has_fp8_moments else (_FREE, _AT_120, _AT_128)
    # A column's scales of a part share a sector of memory, those of two columns never do: the more rows, the fewer.
    return (_TWICE, _TWICE_STAGED, _STAGED, _AT_128, _WHOLE) if has_fp8_moments else (_TWICE, _STAGED, _AT_128, _WHOLE)


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
def tile_at(copy_ptr, place, ROWS: tl.constexpr, IS_HIDDEN: tl.constexpr):
    """Columns of the matrix, first row and column of a tile of ROWS x 128, and how many of each it has from there on,
    as far as a program looks."""
    R, C = read_two(copy_ptr, IS_HIDDEN, True)
    r0 = (place >> 16) * ROWS
    c0 = (place & 0xFFFF) * 128
    left_r = tl.multiple_of(tl.minimum(R - r0, 128).to(tl.int32), 16)
    left_c = tl.multiple_of(tl.minimum(C - c0, 128).to(tl.int32), 16)
    return C, r0, c0, (left_r, left_c)


@triton.jit
def random_at(table_ptr, row, slot, step_ptr, control_ptr, IS_HIDDEN: tl.constexpr):
    """Seed, number of the parameter and step: the key of its random bits."""
    index = read(table_ptr + row * 10 + 9, IS_HIDDEN)
    return read(control_ptr, IS_HIDDEN), index, read(step_ptr + slot, IS_HIDDEN)


@triton.jit
def places_of(
    table_ptr,
    row,
    tile,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    IS_FULL: tl.constexpr,
    G: tl.constexpr,
    IS_HIDDEN: tl.constexpr,
):
    """The first element of a part, and `_place` of its four rows each."""
    C, r0, c0, left = tile
    pointers = pointers_of(table_ptr, row, PARAM, GRAD, MOMENT, True, IS_HIDDEN)
    lines = _lines(left, G, IS_FULL)
    e = r0.to(tl.int64) * C + c0
    C = tl.multiple_of(C.to(tl.int32), 16)
    pointers = pointers_from(pointers, e, e // 128)
    at = (_place(pointers, lines, 0, C), _place(pointers, lines, 1, C))
    return e, (at[0], at[1], _place(pointers, lines, 2, C), _place(pointers, lines, 3, C))


@triton.jit
def load_part(at, HAS_FP8: tl.constexpr, HAS_MASTER: tl.constexpr):
    y0 = load_tile(*at[0][:5], HAS_FP8, HAS_MASTER, "")
    y1 = load_tile(*at[1][:5], HAS_FP8, HAS_MASTER, "")
    y2 = load_tile(*at[2][:5], HAS_FP8, HAS_MASTER, "")
    y3 = load_tile(*at[3][:5], HAS_FP8, HAS_MASTER, "")
    return y0, y1, y2, y3


@triton.jit
def update_part(
    y,
    at,
    to,
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
    """Update what `load_part` gave of a part that begins at the element `first`, where `to` points to."""
    rest = (first, hyper, random)
    if ASM and MOMENT == tl.uint8:
        x0, x1 = _update_pair((y[0], y[1]), to, (at[0], at[1]), *rest, PARAM, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT)
        x2, x3 = _update_pair((y[2], y[3]), to, (at[2], at[3]), *rest, PARAM, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT)
    else:
        x0 = _update_row(y[0], to, at[0], *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
        x1 = _update_row(y[1], to, at[1], *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
        x2 = _update_row(y[2], to, at[2], *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
        x3 = _update_row(y[3], to, at[3], *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
    return x0, x1, x2, x3


@triton.jit
def _new_weights(
    table_ptr,
    row,
    slot,
    tile,
    first,
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
    e, at = places_of(table_ptr, row, tile, PARAM, GRAD, MOMENT, IS_FULL and UPDATES, G, False)
    if not UPDATES:
        x0 = tl.load(at[0][0][0] + at[0][1], mask=at[0][2], other=0.0)
        x1 = tl.load(at[1][0][0] + at[1][1], mask=at[1][2], other=0.0)
        x2 = tl.load(at[2][0][0] + at[2][1], mask=at[2][2], other=0.0)
        x3 = tl.load(at[3][0][0] + at[3][1], mask=at[3][2], other=0.0)
        return x0, x1, x2, x3
    # All loads before the first store: afterwards none may pass it.
    y = load_part(at, MOMENT == tl.uint8, HAS_MASTER)
    # No load may sink below it, amid the arithmetic, where each would wait; and what the arithmetic needs comes after
    # it, else the first row would be worked out before the others are loaded.
    tl.debug_barrier()
    hyper = hyper_of(hyper_ptr + slot * 8)
    # Slots count from 0: it is 0, but only we know. Addresses are worked out again instead of kept in registers.
    zero = tl.multiple_of(tl.minimum(slot, 0), 16)
    to = pointers_from(at[0][0], zero, zero)
    return update_part(y, at, to, first + e, hyper, random, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)


@triton.jit
def write_copies(
    x,
    y,
    copy_ptr,
    tile,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALING: tl.constexpr,
    POW2: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    WRITES: tl.constexpr,
    COLLECTS: tl.constexpr,
    IS_HIDDEN: tl.constexpr,
):
    """The copies of a tile's new weights, x and where it has two PARTS y below it, and their largest magnitude."""
    _, r0, c0, left = tile
    copy = (
        pointer_of(copy_ptr, 3, tl.uint8, True, IS_HIDDEN),
        length_at(copy_ptr, 4, True, IS_HIDDEN),
        pointer_of(copy_ptr, 5, tl.uint8, True, IS_HIDDEN),
        length_at(copy_ptr, 6, True, IS_HIDDEN),
        pointer_of(copy_ptr, 7, tl.uint8, False, IS_HIDDEN),
        length_at(copy_ptr, 8, False, IS_HIDDEN),
        pointer_of(copy_ptr, 9, tl.uint8, False, IS_HIDDEN),
        length_at(copy_ptr, 10, False, IS_HIDDEN),
    )
    enc = 1.0
    if SCALING == "tensor" and WRITES:
        bits = read(pointer_of(copy_ptr, 12, tl.int32, False, IS_HIDDEN), IS_HIDDEN) & 0x7FFFFFFF
        enc = multiplier_from_bits(bits, 448.0, POW2)
    if COLLECTS:
        # Relaxed: else all of the program's stores are waited for.
        tl.atomic_max(pointer_of(copy_ptr, 13, tl.int32, False, IS_HIDDEN), largest_in(x, ASM), sem="relaxed")
    if SCALING == "square":
        bits = largest_in(x, ASM)
        if PARTS == 2:
            bits = tl.maximum(bits, largest_in(y, ASM))
        enc = multiplier_from_bits(bits, 448.0, POW2)
        scale_ptrs = (
            pointer_of(copy_ptr, 7, tl.float32, False, IS_HIDDEN),
            pointer_of(copy_ptr, 9, tl.float32, False, IS_HIDDEN),
        )
        store_square_scale(tl.div_rn(1.0, enc), copy, scale_ptrs, r0 // 128, c0 // 128, HAS_ROW, HAS_COL)
    if WRITES:
        if SCALING == "mx":
            write_mx_part(x, copy, r0, c0, left, HAS_ROW, HAS_COL, ROWS // 4, ASM)
        else:
            write_part(x, enc, copy, r0, c0, left, POW2, HAS_ROW, HAS_COL, ROWS // 4, ASM)
            if PARTS == 2:
                below = (left[0] - ROWS, left[1])
                write_part(y, enc, copy, r0 + ROWS, c0, below, POW2, HAS_ROW, HAS_COL, ROWS // 4, ASM)


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
        tile = tile_at(copy_ptr, place, ROWS * PARTS, False)
        first = tl.multiple_of(tl.load(copy_ptr + 2), 16)
        slot = tl.load(table_ptr + row * 10 + 8)
        random = random_at(table_ptr, row, slot, step_ptr, control_ptr, False)
        rest = (first, hyper_ptr, random)
        x = _new_weights(
            table_ptr,
            row,
            slot,
            tile,
            *rest,
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
        y = x
        if PARTS == 2:
            C, r0, c0, left = tile
            below = (C, r0 + ROWS, c0, (left[0] - ROWS, left[1]))
            y = _new_weights(
                table_ptr,
                row,
                slot,
                below,
                *rest,
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
        write_copies(x, y, copy_ptr, tile, ASM, ROWS, PARTS, SCALING, POW2, HAS_ROW, HAS_COL, WRITES, COLLECTS, False)
