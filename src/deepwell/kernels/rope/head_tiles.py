"""Tiles of heads for rotary embeddings: which thread has what, loads and stores, rotation, magnitudes, FP8 values.

A tile is [rows, heads of a group, groups, columns]. Columns of half a head, rows and heads of a group take all threads,
in this order (Triton's own, of dimensions that follow columns), so that tables, q, k and v lie alike: a thread has the
same columns of each, groups are its registers, and nothing is exchanged but one maximum.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

from deepwell.kernels.device.bf16_words import bits_of, encoded, floats, larger, rounded
from deepwell.kernels.device.stores import store_alike
from deepwell.kernels.device.triton_support import tl, triton


@triton.jit
def heads_of(BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Numbers of heads. 64 bits: heads before positions, the last one begins past 2^31 elements from half a million
    tokens on."""
    h = tl.arange(0, GROUP)[None, :, None, None] + GROUP * tl.arange(0, BLOCK // GROUP)[None, None, :, None]
    return h.to(tl.int64)


@triton.jit
def columns(START: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr):
    """Columns, of which a thread has RUN in a row: FP8 values stay with the thread whose numbers they are."""
    WIDTH: tl.constexpr = RUN if RUN < BLOCK else BLOCK
    return START + tl.max_contiguous(tl.arange(0, BLOCK), WIDTH)[None, None, None, :]


@triton.jit
def within(live, index, LIMIT: tl.constexpr, END: tl.constexpr):
    """The mask of what is live and below LIMIT, of indices that end at END."""
    if LIMIT >= END:
        return live
    else:
        return live & (index < LIMIT)


@triton.jit
def load_columns(
    row, h, stride_h, live, START: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr
):
    """Columns START .. END of heads."""
    d = columns(START, BLOCK, RUN)
    return tl.load(row + h * stride_h + d, mask=within(live, d, END, START + BLOCK), other=0.0)


@triton.jit
def store_columns(
    row, h, stride_h, live, y, START: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr
):
    d = columns(START, BLOCK, RUN)
    tl.store(row + h * stride_h + d, y, mask=within(live, d, END, START + BLOCK))


@triton.jit
def load_two(
    row, h, stride_h, live, SECOND: tl.constexpr, END: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Columns 0 .. END of heads in two tiles, the second from SECOND on; twice the one tile where interleaved."""
    if INTERLEAVED:
        x = load_columns(row, h, stride_h, live, 0, END, 2 * P, RUN)
        return x, x
    else:
        x1 = load_columns(row, h, stride_h, live, 0, SECOND, P, RUN)
        return x1, load_columns(row, h, stride_h, live, SECOND, END, P, RUN)


@triton.jit
def pairs_of(x1, x2, INTERLEAVED: tl.constexpr, ASM: tl.constexpr):
    """Two tiles, or the one that holds both, as fp32: first and second of each pair."""
    x1 = floats(x1, ASM)
    if INTERLEAVED:
        return tl.split(tl.reshape(x1, [x1.shape[0], x1.shape[1], x1.shape[2], x1.shape[3] // 2, 2]))
    else:
        return x1, floats(x2, ASM)


@triton.jit
def load_pairs(
    row, h, stride_h, live, R: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, RUN: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The rotated columns of heads as fp32: first and second of each pair."""
    x1, x2 = load_two(row, h, stride_h, live, R // 2, R, P, INTERLEAVED, RUN)
    return pairs_of(x1, x2, INTERLEAVED, ASM)


@triton.jit
def load_of_heads(ptr, h, H: tl.constexpr, DIRECT: tl.constexpr):
    """One fp32 number a head, read by every thread that has columns of it; any number for heads past the last.

    A load of Triton's own lies otherwise than the tiles and goes to them through shared memory: it is for the
    interpreter, and for a pipelined loop, which puts it there ahead anyhow.
    """
    place = ptr + tl.minimum(h, H - 1)
    if DIRECT:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [place.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.load(place)


@triton.jit
def store_of_heads(ptr, h, live, x, ASM: tl.constexpr):
    """Store one fp32 number a head, by every thread that has it: they agree, and nothing goes through shared memory."""
    store_alike(ptr + h, x, live, tl.float32, ASM)


@triton.jit
def store_two(
    row, h, stride_h, live, y1, y2, SECOND: tl.constexpr, END: tl.constexpr, P: tl.constexpr,
    INTERLEAVED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Store columns 0 .. END of heads that lie in two tiles, the second from SECOND on; in one where interleaved."""
    if INTERLEAVED:
        store_columns(row, h, stride_h, live, y1, 0, END, 2 * P, RUN)
    else:
        store_columns(row, h, stride_h, live, y1, 0, SECOND, P, RUN)
        store_columns(row, h, stride_h, live, y2, SECOND, END, P, RUN)


@triton.jit
def turn(x1, x2, c1, c2, s1, s2, BACKWARD: tl.constexpr):
    """One rotation. The explicit fma leaves the compiler no choice: every variant has these bits."""
    if BACKWARD:
        return tl.fma(x1, c1, x2 * s2), tl.fma(x2, c2, -(x1 * s1))
    else:
        return tl.fma(x1, c1, -(x2 * s1)), tl.fma(x2, c2, x1 * s2)


@triton.jit
def rotated(
    x1, x2, c1, c2, s1, s2, DTYPE: tl.constexpr, BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr, ASM: tl.constexpr
):
    """One rotation in DTYPE: first and second of each pair, or twice the tile that holds both where they alternate."""
    y1, y2 = turn(x1, x2, c1, c2, s1, s2, BACKWARD)
    if INTERLEAVED:
        y = tl.reshape(tl.join(y1, y2), [y1.shape[0], y1.shape[1], y1.shape[2], 2 * y1.shape[3]])
        y = rounded(y, DTYPE, ASM)
        return y, y
    else:
        return rounded(y1, DTYPE, ASM), rounded(y2, DTYPE, ASM)


@triton.jit
def magnitudes(y1, y2, ASM: tl.constexpr):
    """The larger magnitudes of two tiles, the largest of all groups: [rows, heads, 1, columns] as `larger` has them."""
    m = larger(y1, y2, ASM)
    for _ in tl.static_range(15):
        if m.shape[2] > 1:
            halves = tl.reshape(m, [m.shape[0], m.shape[1], 2, m.shape[2] // 2, m.shape[3]])
            first, second = tl.split(tl.permute(halves, (0, 1, 3, 4, 2)))
            m = larger(first, second, ASM)
    return m


@triton.jit
def largest(m, ASM: tl.constexpr):
    """The largest of each row, as bits of fp32.

    Columns and heads one after the other: rows lie between them in a warp, and Triton 3.6 exchanges neighbouring lanes
    only, so that one maximum of both would mix rows.
    """
    of_heads = tl.max(bits_of(m, ASM), axis=3)
    return tl.reshape(tl.max(of_heads, axis=1), [m.shape[0]])


@triton.jit
def store_codes(
    row, h, stride_h, live, y1, y2, enc, SECOND: tl.constexpr, END: tl.constexpr, P: tl.constexpr,
    INTERLEAVED: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Store the FP8 values of two tiles, or of the one that holds both; `enc` lets none of them saturate."""
    FP8: tl.constexpr = row.dtype.element_ty
    c1 = encoded(y1, enc, FP8, ASM, True)
    if INTERLEAVED:
        store_two(row, h, stride_h, live, c1, c1, SECOND, END, P, True, RUN)
    else:
        store_two(row, h, stride_h, live, c1, encoded(y2, enc, FP8, ASM, True), SECOND, END, P, False, RUN)


# ---- heads a group at a time, each two tiles, or twice the one where interleaved: few are in fp32 at once ----


@triton.jit
def row_of(ptr, t, b, s, stride_b, stride_s):
    """Where a row begins: of sequence b and position s, or row t of rows that are all equally far apart."""
    if stride_b is None:
        return ptr + t * stride_s
    else:
        return ptr + b * stride_b + s * stride_s


@triton.jit
def of_group(live, h, START: tl.constexpr, H: tl.constexpr):
    """Which of the heads h from START on there are; a group that is whole asks nothing."""
    if START + h.shape[1] > H:
        return live & (h < H - START)
    else:
        return live


@triton.jit
def load_group(
    row, h, stride_h, live, START: tl.constexpr, H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Heads h, those of a group, from START on of H; None for a stride is D."""
    # What is the same for all threads is added to the pointer: products with all heads would stay in registers.
    is_live = of_group(live, h, START, H)
    if stride_h is None:
        return load_two(row + START * D, h, D, is_live, D // 2, D, PAIRS, INTERLEAVED, RUN)
    else:
        row += START * tl.cast(stride_h, tl.int64)
        return load_two(row, h, stride_h, is_live, D // 2, D, PAIRS, INTERLEAVED, RUN)


@triton.jit
def load_groups(
    row, h, stride_h, live, H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """All heads of q, k or v."""
    x = ()
    for start in tl.static_range(0, H, h.shape[1]):
        x = x + load_group(row, h, stride_h, live, start, H, D, PAIRS, INTERLEAVED, RUN)
    return x


@triton.jit
def store_groups(
    row, h, live, y, H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    for i in tl.static_range(0, len(y), 2):
        start = i // 2 * h.shape[1]
        is_live = of_group(live, h, i // 2 * h.shape[1], H)
        store_two(row + start * D, h, D, is_live, y[i], y[i + 1], D // 2, D, PAIRS, INTERLEAVED, RUN)


@triton.jit
def store_groups_codes(
    row, h, live, y, enc, H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    RUN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    for i in tl.static_range(0, len(y), 2):
        start = i // 2 * h.shape[1]
        is_live = of_group(live, h, i // 2 * h.shape[1], H)
        store_codes(row + start * D, h, D, is_live, y[i], y[i + 1], enc, D // 2, D, PAIRS, INTERLEAVED, RUN, ASM)


@triton.jit
def largest_of_groups(tiles, ASM: tl.constexpr):
    """The largest of each row of all tiles, as bits of fp32."""
    m = larger(tiles[0], tiles[1], ASM)
    for i in tl.static_range(2, len(tiles), 2):
        m = larger(m, larger(tiles[i], tiles[i + 1], ASM), ASM)
    return largest(m, ASM)
