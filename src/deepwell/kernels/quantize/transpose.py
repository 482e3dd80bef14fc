"""Transpose FP8 values with one scale per row into values with one scale for the tensor: the operand of a wgrad GEMM.

    scale = max_t scale[t]        q'[n, t] = RNE(q[t, n] * scale[t] / scale)
    by ratio                      q'[n, t] = RNE(q[t, n] * ratio[t])            (`wgrad_operands.py` says which)

Numerics: with scales that are powers of 2 the ratio is one too, so values move exactly but for underflow, which rounds
    to nearest even: bit for bit the quantization of the dequantized rows with that scale. The scales must be powers of
    two ("fp8_e4m3_row_pow2"); others round the ratio to fp16 in the packed kernel. A NaN scale makes every code NaN.
Cost: memory bound, one byte read and one written per code; 4 bytes per row of scales read once more for their maximum.
    Floors on one H200 (4.25 TB/s copied): 16384 x 4096 32 us, 16384 x 14336 111 us, 16384 x 28672 221 us.
"""

# Shapes: T tokens, N columns of the codes (rows of the result).

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.formats.elements import encode
from deepwell.kernels.checks import check_fp8, check_matrix, check_number, check_out, check_vector
from deepwell.kernels.device.fp8 import ELEMENTS, code_bytes, saturate
from deepwell.kernels.device.triton_support import (
    TileConfig,
    cdiv,
    constant,
    is_interpreted,
    launch,
    on_device,
    runs_kernel,
    tl,
    triton,
)

# ---- reference: what the kernel must compute, in the plainest torch ----


def transpose_codes_ref(q_TN: Tensor, scale_T: Tensor, scale: Tensor) -> Tensor:
    """Reference for `transpose_codes`, given the tensor's scale."""
    return transpose_by_ratio_ref(q_TN, scale_T / scale)


def transpose_by_ratio_ref(q_TN: Tensor, ratio_T: Tensor) -> Tensor:
    shifted = q_TN.float() * ratio_T[:, None]
    return encode(shifted, ELEMENTS[q_TN.dtype]).T.contiguous().view(q_TN.dtype)


class Gathered(NamedTuple):
    """Rows of one of two operands that are found through `slot`: row t is row slot[t] // top_k of it, zeros below 0."""

    slot_T: Tensor
    top_k: int
    is_other: bool

    def rows(self, q: Tensor) -> Tensor:
        """The rows as they are read, in plain torch."""
        if not q.shape[0]:
            return q.new_zeros((self.slot_T.shape[0], q.shape[1]), dtype=torch.uint8).view(q.dtype)
        codes = q.view(torch.uint8)[self.slot_T.clamp(min=0).long() // self.top_k]
        return codes.masked_fill((self.slot_T < 0)[:, None], 0).view(q.dtype)


# Rows of a block, where the columns of a result are blocks of rows in an order of their own.
BLOCK_ROWS = 16


def rows_of_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    """Blocks of `BLOCK_ROWS` rows as `blocks` names them, zeros below 0, in plain torch; values, or a number a row."""
    row = (blocks.long()[:, None] * BLOCK_ROWS + torch.arange(BLOCK_ROWS, device=x.device)).flatten()
    words = x.view(torch.uint8) if x.dim() == 2 else x
    there = (row >= 0).view(-1, *[1] * (x.dim() - 1))
    return words[row.clamp(min=0)].masked_fill(~there, 0).view(x.dtype)


# ---- configs: what the tuner may choose from ----


TRANSPOSE_CONFIGS = (
    TileConfig(rows=256, columns=128, num_warps=8, packing="asm"),
    TileConfig(rows=64, columns=128, num_warps=4, packing="asm"),
    TileConfig(rows=128, columns=128, num_warps=4, packing="words"),
    TileConfig(rows=64, columns=64, num_warps=4, packing="bytes"),
)

# ---- kernel ----

# Four E4M3 values of one word times an fp16 pair: exact where it matters, since E4M3 has 4 significant bits and what
# falls below fp16's smallest number is far below half of E4M3's (2^-10).
_SHIFT_E4M3 = constant(
    """{ .reg .b16 lo, hi; .reg .b32 a, b;
    mov.b32 {lo, hi}, $1;
    cvt.rn.f16x2.e4m3x2 a, lo;
    cvt.rn.f16x2.e4m3x2 b, hi;
    mul.rn.f16x2 a, a, $2;
    mul.rn.f16x2 b, b, $2;
    cvt.rn.satfinite.e4m3x2.f16x2 lo, a;
    cvt.rn.satfinite.e4m3x2.f16x2 hi, b;
    mov.b32 $0, {lo, hi}; }"""
)
# The same of E5M2, which spans 2^32: the ratio comes as two factors, neither below fp16's smallest number. Exact again:
# a product of 3 significant bits is inexact in fp16 only below 2^-22, and E5M2 rounds that to zero.
_TIMES_BOTH = "    mul.rn.f16x2 a, a, $2;\n    mul.rn.f16x2 b, b, $2;\n"
_SHIFT_E5M2 = constant(
    _SHIFT_E4M3.value.replace("e4m3", "e5m2").replace(_TIMES_BOTH, _TIMES_BOTH + _TIMES_BOTH.replace("$2", "$3"))
)
# Bytes of four words, transposed: result c holds byte c of each word.
_TRANSPOSE_BYTES = constant(
    """{ .reg .b32 ab, cd;
    prmt.b32 ab, $4, $5, 0x5140;
    prmt.b32 cd, $6, $7, 0x5140;
    prmt.b32 $0, ab, cd, 0x5410;
    prmt.b32 $1, ab, cd, 0x7632;
    prmt.b32 ab, $4, $5, 0x7362;
    prmt.b32 cd, $6, $7, 0x7362;
    prmt.b32 $2, ab, cd, 0x5410;
    prmt.b32 $3, ab, cd, 0x7632; }"""
)


@triton.jit
def _half_twice(x):
    """fp32 numbers as fp16, each in both halves of a word."""
    half = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return half | (half << 16)


@triton.jit
def _shift_word(word, ratio, FP8: tl.constexpr, FP8_MAX: tl.constexpr, ASM: tl.constexpr):
    """Four FP8 values of a word times a power of two <= 1, rounded to the nearest even code."""
    if ASM:
        if FP8_MAX == 448.0:
            pair = tl.broadcast_to(_half_twice(ratio), word.shape)
            return tl.inline_asm_elementwise(_SHIFT_E4M3, "=r,r,r", [word, pair], dtype=tl.int32, is_pure=True, pack=1)
        # 2^-24 is fp16's smallest number. (NaN passes through neither maximum: the second factor keeps it.)
        large = tl.maximum(ratio, 5.960464477539063e-08)
        first = tl.broadcast_to(_half_twice(large), word.shape)
        second = tl.broadcast_to(_half_twice(tl.div_rn(ratio, large)), word.shape)
        return tl.inline_asm_elementwise(
            _SHIFT_E5M2, "=r,r,r,r", [word, first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    shifted = tl.zeros_like(word)
    for byte in tl.static_range(4):
        code = ((word >> (8 * byte)) & 0xFF).to(tl.uint8).to(FP8, bitcast=True)
        shifted |= code_bytes(code.to(tl.float32) * ratio, FP8, FP8_MAX) << (8 * byte)
    return shifted


@triton.jit
def _ratio(scale_t_ptr, scale_ptr, mask):
    """What a row's values are multiplied by: its scale over the tensor's, or the number itself where there is none."""
    scale = tl.load(scale_t_ptr, mask=mask, other=0.0)
    if scale_ptr is not None:
        scale = tl.div_rn(scale, tl.load(scale_ptr))
    return scale


@triton.jit
def _gathered_words(q_ptr, t, stride_qt, n4, mask, is_row, slot_ptr, gathers, TOP_K: tl.constexpr):
    """Words of rows t; where `gathers`, of the rows that their slots name."""
    slot = tl.load(slot_ptr + t, mask=is_row, other=-1).to(tl.int64)
    is_there = (slot >= 0) | (gathers == 0)
    row = tl.where(gathers, tl.maximum(slot, 0) // TOP_K, t)
    return tl.load(q_ptr + row[:, None] * stride_qt + n4[None, :], mask=mask & is_there[:, None], other=0)


@triton.jit
def _byte_column(a, b, c, d, BYTE: tl.constexpr):
    """Byte BYTE of each of four words, as one word."""
    low = ((a >> (8 * BYTE)) & 0xFF) | (((b >> (8 * BYTE)) & 0xFF) << 8)
    return low | (((c >> (8 * BYTE)) & 0xFF) << 16) | (((d >> (8 * BYTE)) & 0xFF) << 24)


@triton.jit
def _transpose_words_kernel(
    q_ptr,
    scale_t_ptr,
    scale_ptr,
    out_ptr,
    other_q_ptr,
    other_t_ptr,
    other_out_ptr,
    slot_ptr,
    blocks_ptr,
    T4,
    N4,
    stride_qt,
    stride_on,
    other_N4,
    other_stride_qt,
    other_stride_on,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHERS_OTHER: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # Pointers, N4 and strides count words of four values, T4 groups of 4 tokens. A 4 x 4 block of bytes is transposed
    # over in registers, so that shared memory moves whole words. (The mask compares i, not 4 * i: so it stays constant
    # over a vector and the stores keep their 16 bytes.)
    i = tl.program_id(1).to(tl.int64) * (BLOCK_T // 4) + tl.arange(0, BLOCK_T // 4)
    tile_n = tl.program_id(0)
    if other_q_ptr is not None:
        # A second operand of the same tokens: the programs past the first one's columns.
        tiles = tl.cdiv(N4, BLOCK_N // 4)
        is_other = tile_n >= tiles
        tile_n -= tl.where(is_other, tiles, 0)
        q_ptr, out_ptr = tl.where(is_other, other_q_ptr, q_ptr), tl.where(is_other, other_out_ptr, out_ptr)
        scale_t_ptr = tl.where(is_other, other_t_ptr, scale_t_ptr)
        N4 = tl.where(is_other, other_N4, N4)
        stride_qt = tl.where(is_other, other_stride_qt, stride_qt)
    n4 = tile_n * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    t = i * 4
    mask = (i[:, None] < T4) & (n4[None, :] < N4)
    transposed = tl.trans(mask)
    is_row = i < T4
    if blocks_ptr is not None:
        # Columns that are blocks of rows in another order, or zeros.
        block = tl.load(blocks_ptr + t // BLOCK_ROWS, mask=is_row, other=-1).to(tl.int64)
        is_row = block >= 0
        t = tl.maximum(block, 0) * BLOCK_ROWS + t % BLOCK_ROWS
        mask = mask & is_row[:, None]
    if slot_ptr is not None:
        # Rows of one of the two operands are found through their slots.
        gathers = is_other == GATHERS_OTHER
        a = _gathered_words(q_ptr, t, stride_qt, n4, mask, is_row, slot_ptr, gathers, TOP_K)
        b = _gathered_words(q_ptr, t + 1, stride_qt, n4, mask, is_row, slot_ptr, gathers, TOP_K)
        c = _gathered_words(q_ptr, t + 2, stride_qt, n4, mask, is_row, slot_ptr, gathers, TOP_K)
        d = _gathered_words(q_ptr, t + 3, stride_qt, n4, mask, is_row, slot_ptr, gathers, TOP_K)
    else:
        tile = q_ptr + t[:, None] * stride_qt + n4[None, :]
        a = tl.load(tile, mask=mask, other=0)
        b = tl.load(tile + stride_qt, mask=mask, other=0)
        c = tl.load(tile + 2 * stride_qt, mask=mask, other=0)
        d = tl.load(tile + 3 * stride_qt, mask=mask, other=0)
    s_ptr = scale_t_ptr + t
    a = _shift_word(a, _ratio(s_ptr, scale_ptr, is_row)[:, None], FP8, FP8_MAX, ASM)
    b = _shift_word(b, _ratio(s_ptr + 1, scale_ptr, is_row)[:, None], FP8, FP8_MAX, ASM)
    c = _shift_word(c, _ratio(s_ptr + 2, scale_ptr, is_row)[:, None], FP8, FP8_MAX, ASM)
    d = _shift_word(d, _ratio(s_ptr + 3, scale_ptr, is_row)[:, None], FP8, FP8_MAX, ASM)
    if ASM:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _TRANSPOSE_BYTES,
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [a, b, c, d],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        w0 = _byte_column(a, b, c, d, 0)
        w1 = _byte_column(a, b, c, d, 1)
        w2 = _byte_column(a, b, c, d, 2)
        w3 = _byte_column(a, b, c, d, 3)
    if other_q_ptr is not None:
        stride_on = tl.where(is_other, other_stride_on, stride_on)
    out_tile = out_ptr + (n4.to(tl.int64) * 4)[:, None] * stride_on + i[None, :]
    tl.store(out_tile, tl.trans(w0), mask=transposed)
    tl.store(out_tile + stride_on, tl.trans(w1), mask=transposed)
    tl.store(out_tile + 2 * stride_on, tl.trans(w2), mask=transposed)
    tl.store(out_tile + 3 * stride_on, tl.trans(w3), mask=transposed)


@triton.jit
def _transpose_bytes_kernel(
    q_ptr,
    scale_t_ptr,
    scale_ptr,
    out_ptr,
    T,
    N,
    stride_qt,
    stride_on,
    FP8_MAX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (t[:, None] < T) & (n[None, :] < N)
    ratio = _ratio(scale_t_ptr + t, scale_ptr, t < T)
    q = tl.load(q_ptr + t[:, None] * stride_qt + n[None, :], mask=mask)
    q = saturate(q.to(tl.float32) * ratio[:, None], FP8_MAX).to(q_ptr.dtype.element_ty)
    tl.store(out_ptr + n[:, None] * stride_on + t[None, :], tl.trans(q), mask=tl.trans(mask))


# ---- public wrapper: check, allocate, launch ----


def transpose_codes(
    q_TN: Tensor,
    scale_T: Tensor,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    config: TileConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Transpose row-scaled FP8 values to `(q_NT, scale)` with one scale, the largest of `scale_T` (powers of two).

    `scale`, where the caller knows the largest already, saves a small launch. `out` may be a slice of a larger buffer.
    Raises ConfigError on a wrong argument.
    """
    t = _check_rows(q_TN, "scale_T", scale_T)
    if scale is None:
        scale = scale_T.amax() if t else scale_T.new_ones(())
    check_number("scale", scale, q_TN)
    return _transposed(q_TN, scale_T, scale, out, config), scale


def transpose_by_ratio(
    q_TN: Tensor, ratio_T: Tensor, *, out: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """Transpose values, each row times its own ratio (powers of two, at most 1). Raises as `transpose_codes` does."""
    _check_rows(q_TN, "ratio_T", ratio_T)
    return _transposed(q_TN, ratio_T, None, out, config)


def transpose_two_by_ratio(
    q_TN: Tensor,
    ratio_T: Tensor,
    other_TK: Tensor,
    other_ratio_T: Tensor,
    gathered: Gathered | None = None,
    blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`transpose_by_ratio` of two operands of the same tokens, in one launch where both lie in whole words.

    Rows of one of them may be `gathered` on the way in. With `blocks` (int32) the columns of the results are not rows
    0, 1, ...: 16 at a time they are those of a block, or zeros (`rows_of_blocks`).
    """
    if (gathered is not None or blocks is not None) and not _in_words(q_TN, other_TK, ratio_T):
        if gathered is not None:
            q_TN, other_TK = (
                gathered.rows(q) if is_other == gathered.is_other else q
                for q, is_other in ((q_TN, False), (other_TK, True))
            )
        if blocks is not None:
            q_TN, ratio_T, other_TK, other_ratio_T = (
                rows_of_blocks(x, blocks) for x in (q_TN, ratio_T, other_TK, other_ratio_T)
            )
        gathered = blocks = None
    n = q_TN.shape[1]
    t = ratio_T.shape[0] if blocks is None else BLOCK_ROWS * blocks.shape[0]
    for i, (q, name, ratio) in enumerate(((q_TN, "ratio_T", ratio_T), (other_TK, "other_ratio_T", other_ratio_T))):
        if gathered is None or gathered.is_other != bool(i):
            _check_rows(q, name, ratio)
    config = default_config(t, n + other_TK.shape[1])
    out_NT, out_KT = (torch.empty((q.shape[1], t), dtype=q.dtype, device=q.device) for q in (q_TN, other_TK))
    both = ((q_TN, ratio_T, out_NT), (other_TK, other_ratio_T, out_KT))
    is_pair = q_TN.dtype == other_TK.dtype and ratio_T.shape == other_ratio_T.shape and min(t, n, other_TK.shape[1]) > 0
    if not (is_pair and runs_kernel(q_TN, _transpose_words_kernel)) or any(
        _fit_packing(config, q, out).packing == "bytes" for q, _, out in both
    ):
        for q, ratio, out in both:
            transpose_by_ratio(q, ratio, out=out)
        return out_NT, out_KT
    with on_device(q_TN):
        _launch(q_TN, ratio_T, None, out_NT, config, other=both[1], gathered=gathered, blocks=blocks)
    return out_NT, out_KT


def _in_words(q_TN: Tensor, other_TK: Tensor, ratio_T: Tensor) -> bool:
    """Whether the kernel of words takes both operands, whose rows it can gather."""
    sizes = (ratio_T.shape[0], *q_TN.shape[1:], *other_TK.shape[1:], q_TN.stride(0), other_TK.stride(0))
    whole = all(size % 4 == 0 and size for size in sizes) and q_TN.shape[0] > 0 and other_TK.shape[0] > 0
    lies = all(q.stride(1) == 1 and q.storage_offset() % 4 == 0 and q.data_ptr() % 4 == 0 for q in (q_TN, other_TK))
    return whole and lies and q_TN.dtype == other_TK.dtype and runs_kernel(q_TN, _transpose_words_kernel)


def _check_rows(q_TN: Tensor, name: str, numbers_T: Tensor) -> int:
    check_matrix("q_TN", q_TN, tuple(ELEMENTS))
    check_vector(name, numbers_T, q_TN.shape[0], q_TN, torch.float32)
    return q_TN.shape[0]


def _transposed(
    q_TN: Tensor, scale_T: Tensor, scale: Tensor | None, out: Tensor | None, config: TileConfig | None
) -> Tensor:
    t, n = q_TN.shape
    q_NT = torch.empty((n, t), dtype=q_TN.dtype, device=q_TN.device) if out is None else out
    check_out("out", q_NT, (n, t), q_TN.dtype, q_TN)
    if not runs_kernel(q_TN, _transpose_words_kernel):
        codes = transpose_by_ratio_ref(q_TN, scale_T if scale is None else scale_T / scale)
        q_NT.view(torch.uint8).copy_(codes.view(torch.uint8))
    elif q_TN.numel():
        with on_device(q_TN):
            _launch(q_TN, scale_T, scale, q_NT, config or default_config(t, n))
    return q_NT


def default_config(t: int, n: int) -> TileConfig:
    """The config for FP8 values of that shape; small tiles where large ones would leave multiprocessors idle.

    One H200, 2026-11-15 (benchmarks/bench_rows.py): 256 x 128 takes 125 us at 16384 x 14336, 128 x 128 129.
    """
    return TRANSPOSE_CONFIGS[0] if t * n >= 1 << 22 else TRANSPOSE_CONFIGS[1]


def _launch(
    q_TN: Tensor,
    scale_T: Tensor,
    scale: Tensor | None,
    q_NT: Tensor,
    config: TileConfig,
    other: tuple[Tensor, Tensor, Tensor] | None = None,
    gathered: Gathered | None = None,
    blocks: Tensor | None = None,
) -> None:
    """`other` is a second operand (FP8 values, ratios, result) that takes its words in the same launch."""
    config = _fit_packing(config, q_TN, q_NT)
    n, t = q_NT.shape
    tiles = cdiv(n, config.columns) + (cdiv(other[0].shape[1], config.columns) if other else 0)
    grid = (tiles, cdiv(t, config.rows))
    fp8_max = check_fp8("q_TN.dtype", q_TN.dtype)
    tile = {"BLOCK_T": config.rows, "BLOCK_N": config.columns, "num_warps": config.num_warps}
    if config.packing == "bytes":
        strides = (q_TN.stride(0), q_NT.stride(0))
        launch(_transpose_bytes_kernel, grid)(q_TN, scale_T, scale, q_NT, t, n, *strides, FP8_MAX=fp8_max, **tile)
        return
    words, out_words = q_TN.view(torch.int32), q_NT.view(torch.int32)
    others: tuple[Tensor | None, ...] = (None, None, None)
    sizes = (0, 0, 0)
    if other is not None:
        others = (other[0].view(torch.int32), other[1], other[2].view(torch.int32))
        sizes = (other[0].shape[1] // 4, other[0].stride(0) // 4, other[2].stride(0) // 4)
    launch(_transpose_words_kernel, grid)(
        words,
        scale_T,
        scale,
        out_words,
        *others,
        None if gathered is None else gathered.slot_T,
        blocks,
        t // 4,
        n // 4,
        words.stride(0),
        out_words.stride(0),
        *sizes,
        FP8=tl.float8e4nv if q_TN.dtype == torch.float8_e4m3fn else tl.float8e5,
        FP8_MAX=fp8_max,
        TOP_K=1 if gathered is None else gathered.top_k,
        GATHERS_OTHER=gathered is not None and gathered.is_other,
        ASM=config.packing == "asm",
        BLOCK_ROWS=BLOCK_ROWS,
        **tile,
    )


def _fit_packing(config: TileConfig, q_TN: Tensor, q_NT: Tensor) -> TileConfig:
    """Words need sizes and rows of whole words; the interpreter reads no PTX."""
    in_words = all(size % 4 == 0 for size in (*q_NT.shape, q_TN.stride(0), q_NT.stride(0)))
    in_words = in_words and q_TN.data_ptr() % 4 == 0 and q_NT.data_ptr() % 4 == 0
    in_words = in_words and q_TN.storage_offset() % 4 == 0 and q_NT.storage_offset() % 4 == 0
    if config.packing != "bytes" and not in_words:
        return replace(config, packing="bytes")
    if config.packing == "asm" and is_interpreted(_transpose_words_kernel):
        return replace(config, packing="words")
    return config
