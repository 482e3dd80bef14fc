"""The update with quantized copies by programs that stay: the next tile is on its way while the present one is updated.

`adamw_words` has a program load its tile into registers, wait, and compute: what a multiprocessor loads and what it
computes are at the same time only as far as its programs happen to differ. Here a program walks over tiles. Those of
the next turn are copied to shared memory (cp.async) while it computes, and a row is taken from there when its turn
comes, not all of a tile at once. The same functions do the rest, to the same bits.

Numerics: as `adamw_words`.
Cost:     bytes as `adamw_words`. Shared memory: two tiles and what the copies take, 105 KB for 64 rows of FP8 moments.
"""

# Shapes: as adamw_words; a tile is one part, ROWS x 128.

import torch

from deepwell.kernels._triton import tl, triton
from deepwell.kernels.adamw import hyper_of, load_tile
from deepwell.kernels.adamw_scalars import read
from deepwell.kernels.adamw_words import (
    WordConfig,
    places_of,
    random_at,
    tile_at,
    update_part,
    write_copies,
)

# Of Hopper and Blackwell: shared memory of a multiprocessor, of which each program takes 1 KB more than it asks for.
_SHARED_BYTES = 233472
_WARPS = 16  # that have 128 registers a thread


def programs_per_sm(config: WordConfig, weight: torch.dtype, grad: torch.dtype, moment: torch.dtype) -> int:
    """Programs that stay on a multiprocessor; `weight` is what is updated. 0 where none should.

    None for fp32 weights: with their exact quotients in the loop 3 KB of registers are spilled (ptxas for sm_90).
    """
    if config.stages == 1 or weight == torch.float32:
        return 0
    elements = config.rows * 128
    tile = elements * (weight.itemsize + grad.itemsize + 2 * moment.itemsize) + config.rows * 8
    # Besides the tiles: codes to be transposed.
    return min(_WARPS // config.num_warps, _SHARED_BYTES // (config.stages * tile + elements + 1024))


_SAME = tl.constexpr("mov.b32 $0, $1;")


@triton.jit
def _again(number, ASM: tl.constexpr):
    """The same number, but only we know: what follows from it is worked out again and not kept for two turns."""
    if ASM:
        number = tl.inline_asm_elementwise(_SAME, "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1)
    return number


# A number that all threads have alike, from another one: the assembler knows no more that they do.
_OTHERS = tl.constexpr("shfl.sync.bfly.b32 $0, $1, 16, 0x1F, 0xFFFFFFFF;")


@triton.jit
def _is_any(number, ASM: tl.constexpr):
    """True of a number that is not negative.

    Of loads with such a mask the assembler keeps one predicate, whether there is a next tile; it knows that all threads
    have it alike, and would copy it out of a uniform register before each load.
    """
    if ASM:
        number = tl.inline_asm_elementwise(_OTHERS, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
    return number >= 0


@triton.jit
def _row_by_row(x):
    """The four (G, 1, 1) of (4, G, 1, 1)."""
    both = tl.permute(tl.reshape(x, (2, 2, x.shape[1], 1, 1)), (2, 3, 4, 1, 0))
    upper, lower = tl.split(both)
    a, b = tl.split(upper)
    c, d = tl.split(lower)
    return a, b, c, d


@triton.jit
def _load_scales(pointer, place, C, is_any, G: tl.constexpr):
    """Scales of FP8 moments of a part, by rows as `load_part` has them; each load waits in a group of its own."""
    blocks = place[3][None] + tl.arange(0, 4)[:, None, None, None] * (C // 128).to(tl.int32)
    return _row_by_row(tl.load(pointer + blocks, mask=tl.broadcast_to(is_any, (4, G, 1, 1)), other=0.0))


@triton.jit
def _load_row(place, is_any, m_scale, v_scale, G: tl.constexpr, HAS_MASTER: tl.constexpr):
    is_live = tl.broadcast_to(is_any, (G, 1, 128))
    p, g, m, v, _, _ = load_tile(place[0], place[1], is_live, place[3], place[4], False, HAS_MASTER, "")
    return p, g, m, v, m_scale, v_scale


@triton.jit
def _load_ahead(at, C, is_any, G: tl.constexpr, HAS_FP8: tl.constexpr, HAS_MASTER: tl.constexpr):
    """`load_part` of a part all of which is live, where `is_any`."""
    m, v = (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)
    if HAS_FP8:
        m = _load_scales(at[0][0][4], at[0], C, is_any, G)
        v = _load_scales(at[0][0][5], at[0], C, is_any, G)
    y0 = _load_row(at[0], is_any, m[0], v[0], G, HAS_MASTER)
    y1 = _load_row(at[1], is_any, m[1], v[1], G, HAS_MASTER)
    y2 = _load_row(at[2], is_any, m[2], v[2], G, HAS_MASTER)
    y3 = _load_row(at[3], is_any, m[3], v[3], G, HAS_MASTER)
    return y0, y1, y2, y3


@triton.jit(do_not_specialize=["num_tiles"])
def _staged_kernel(
    table_ptr,
    copies_ptr,
    chunk_row_ptr,
    chunk_place_ptr,
    hyper_ptr,
    step_ptr,
    control_ptr,
    num_tiles,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    RANDOM_MOMENT: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    SCALING: tl.constexpr,
    POW2: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    COLLECTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # One program: every so-manyth tile. Triton's loop of N stages holds N - 1 tiles.
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    if tl.load(control_ptr + 1) == 0:
        row = tl.load(chunk_row_ptr + pid)
        place = tl.load(chunk_place_ptr + pid)
        is_any = _is_any(row, ASM)
        for i in tl.range(pid, num_tiles, step, num_stages=STAGES + 1):
            # One turn before its loads need it. (What is read is read also where the loop ends before.)
            later = tl.minimum(i + step, num_tiles - 1)
            next_row = read(chunk_row_ptr + later, ASM)
            next_place = read(chunk_place_ptr + later, ASM)
            # Two turns before the rest: no tile is stored that another one loads.
            tile = tile_at(copies_ptr + row * 14, place, ROWS, ASM)
            _, at = places_of(table_ptr, row, tile, PARAM, GRAD, MOMENT, True, ROWS // 4, ASM)
            loaded = _load_ahead(at, tile[0], is_any, ROWS // 4, MOMENT == tl.uint8, HAS_MASTER)

            now = _again(row, ASM)
            copy_ptr = copies_ptr + now * 14
            tile = tile_at(copy_ptr, _again(place, ASM), ROWS, ASM)
            e, at = places_of(table_ptr, now, tile, PARAM, GRAD, MOMENT, True, ROWS // 4, ASM)
            first = read(copy_ptr + 2, ASM, True)
            slot = read(table_ptr + now * 10 + 8, ASM)
            random = random_at(table_ptr, now, slot, step_ptr, control_ptr, ASM)
            rest = (first + e, hyper_of(hyper_ptr + slot * 8, ASM), random)
            x = update_part(loaded, at, at[0][0], *rest, PARAM, MOMENT, HAS_MASTER, RANDOM_PARAM, RANDOM_MOMENT, ASM)
            write_copies(x, x, copy_ptr, tile, ASM, ROWS, 1, SCALING, POW2, HAS_ROW, HAS_COL, True, COLLECTS, ASM)
            row = next_row
            place = next_place
