"""Quantize to FP8 with one scale per 128 numbers of a row or per 128 x 128 square (DeepSeek-V3), in one pass.

    1x128      enc[t, b] = min(MAX / amax_k |x[t, k]|, FLT_MAX), k in 128b .. 128b+127; 1 where amax is 0
               rounded down to 2^n        scale[t, b] = 1 / enc[t, b]        q[t, k] = RNE(x[t, k] * enc[t, b])
    both       the same along the rows and along the columns (128 tokens share a scale there), from one read of x
    128x128    one amax for a square: the FP8 values of the two copies are each other's transposes

Numerics: bit for bit `deepwell.formats.quantize` ("fp8_e4m3_1x128_pow2" of x and of x^T, "fp8_e4m3_128x128_pow2"), inf
    and NaN included. Copies made together are padded to whole blocks along their contraction, with zeros.
Cost: memory bound, 3 bytes per bf16 element for one copy, 4 for both; 4 bytes per block. Scales lie as cuBLASLt reads
    them: 1x128 with the blocks outermost, 128x128 with the blocks of the contraction innermost, in lines of 4.
"""

# Shapes: T tokens, K columns (the contraction), B = K / 128 blocks; N rows of a weight. Of a copy made together with
# another, K' and T' are K and T padded to whole blocks.

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.formats.quantize import quantize
from deepwell.kernels.checks import check_matrix, check_out
from deepwell.kernels.device.fp8 import magnitude_bits, multiplier_from_bits, saturate, word_of_codes
from deepwell.kernels.device.triton_support import cdiv, is_interpreted, launch, on_device, runs_kernel, tl, triton

BLOCK = 128
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
# cuBLASLt reads the scales of squares in lines of 16 bytes.
SCALE_LINE = 4


class Blocks(NamedTuple):
    """FP8 values along the rows and along the columns, each with its scales; None where a copy was not asked for."""

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None


# ---- reference: what the kernels must compute, in the plainest torch ----


def quantize_1x128_ref(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    made = quantize(x_TK, "fp8_e4m3_1x128_pow2")
    assert made.scales is not None
    return made.data, made.scales


def quantize_1x128_both_ref(x_TK: Tensor) -> Blocks:
    copies = []
    for x in (x_TK, x_TK.T.contiguous()):
        codes, scale = quantize_1x128_ref(_whole(x))
        copies += [codes, scale.T.contiguous()]
    return Blocks(*copies)


def quantize_128x128_ref(w_NK: Tensor) -> Blocks:
    copies = []
    for w in (w_NK, w_NK.T.contiguous()):
        made = quantize(_whole(w), "fp8_e4m3_128x128_pow2")
        assert made.scales is not None
        copies += [made.data, F.pad(made.scales, (0, -made.scales.shape[1] % SCALE_LINE))]
    return Blocks(*copies)


def _whole(x: Tensor) -> Tensor:
    """x padded to whole blocks along its rows."""
    return F.pad(x, (0, -x.shape[1] % BLOCK))


# Rows and blocks that a program quantizes along the rows, and its warps; warps of a square, the least that holds whole
# blocks both ways.
_ROWS, _BLOCKS, _WARPS, _SQUARE_WARPS = 16, 2, 4, 8

# ---- kernels ----


@triton.jit
def _quantize_1x128_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    T,
    K,
    stride_xt,
    stride_qt,
    FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: ROWS tokens, BLOCKS blocks of columns; a line of the tile is one block of one token.
    line = tl.arange(0, ROWS * BLOCKS)
    t = tl.program_id(0).to(tl.int64) * ROWS + line // BLOCKS
    b = tl.program_id(1) * BLOCKS + line % BLOCKS
    k = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (t[:, None] < T) & (k < K)
    x = tl.load(x_ptr + t[:, None] * stride_xt + k, mask=mask, other=0.0).to(tl.float32)
    enc = multiplier_from_bits(tl.max(magnitude_bits(x), axis=1), FP8_MAX)
    q = saturate(x * enc[:, None], FP8_MAX).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + t[:, None] * stride_qt + k, q, mask=mask)
    tl.store(scale_ptr + b.to(tl.int64) * T + t, tl.div_rn(1.0, enc), mask=(t < T) & (b * BLOCK < K))


@triton.jit
def _row_copy(x, enc, q_tile, live, FP8: tl.constexpr, FP8_MAX: tl.constexpr):
    tl.store(q_tile, saturate(x * enc, FP8_MAX).to(FP8), mask=live[:, None])


@triton.jit
def _own_rows(x, scale, q_tile, live, FP8: tl.constexpr, FP8_MAX: tl.constexpr):
    enc = multiplier_from_bits(tl.max(magnitude_bits(x), axis=1), FP8_MAX)
    tl.store(scale, tl.div_rn(1.0, enc), mask=live)
    _row_copy(x, enc[:, None], q_tile, live, FP8, FP8_MAX)


@triton.jit
def _column_bits(a, b, c, d):
    bits = tl.maximum(tl.maximum(magnitude_bits(a), magnitude_bits(b)), magnitude_bits(c))
    return tl.max(tl.maximum(bits, magnitude_bits(d)), axis=0)


@triton.jit
def _quantize_tiles_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    T,
    K,
    stride_xt,
    stride_qt,
    stride_s,
    stride_tk,
    stride_st,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    SQUARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: 128 tokens x 128 columns, read as four times 32 tokens, so that four neighbours of the transposed
    # copy make one word in registers. qt_ptr and stride_tk count words. What lies outside x is zero, and is written
    # into the filled-up ends of both copies.
    GROUPS: tl.constexpr = BLOCK // 4
    PACKING: tl.constexpr = "asm" if ASM else "words"
    tile_t, tile_k = tl.program_id(1).to(tl.int64), tl.program_id(0)
    i = tile_t * GROUPS + tl.arange(0, GROUPS)
    k = tile_k * BLOCK + tl.arange(0, BLOCK)
    t = i * 4
    inside = k[None, :] < K
    x_tile = x_ptr + t[:, None] * stride_xt + k[None, :]
    a = tl.load(x_tile, mask=(t < T)[:, None] & inside, other=0.0).to(tl.float32)
    b = tl.load(x_tile + stride_xt, mask=(t + 1 < T)[:, None] & inside, other=0.0).to(tl.float32)
    c = tl.load(x_tile + 2 * stride_xt, mask=(t + 2 < T)[:, None] & inside, other=0.0).to(tl.float32)
    d = tl.load(x_tile + 3 * stride_xt, mask=(t + 3 < T)[:, None] & inside, other=0.0).to(tl.float32)
    q_tile = q_ptr + t[:, None] * stride_qt + k[None, :]
    t_tile = qt_ptr + k.to(tl.int64)[:, None] * stride_tk + i[None, :]
    if SQUARE:
        enc = multiplier_from_bits(tl.max(_column_bits(a, b, c, d), axis=0), FP8_MAX)
        scale = tl.div_rn(1.0, enc)
        if ROWS:
            tl.store(scale_ptr + tile_t * stride_s + tile_k, scale)
            _row_copy(a, enc, q_tile, t < T, FP8, FP8_MAX)
            _row_copy(b, enc, q_tile + stride_qt, t + 1 < T, FP8, FP8_MAX)
            _row_copy(c, enc, q_tile + 2 * stride_qt, t + 2 < T, FP8, FP8_MAX)
            _row_copy(d, enc, q_tile + 3 * stride_qt, t + 3 < T, FP8, FP8_MAX)
        if COLUMNS:
            tl.store(scale_t_ptr + tile_k.to(tl.int64) * stride_st + tile_t, scale)
            word = word_of_codes(a * enc, b * enc, c * enc, d * enc, FP8, FP8_MAX, PACKING)
            tl.store(t_tile, tl.trans(word), mask=k[:, None] < K)
    else:
        if ROWS:
            s_tile = scale_ptr + tile_k.to(tl.int64) * stride_s + t
            _own_rows(a, s_tile, q_tile, t < T, FP8, FP8_MAX)
            _own_rows(b, s_tile + 1, q_tile + stride_qt, t + 1 < T, FP8, FP8_MAX)
            _own_rows(c, s_tile + 2, q_tile + 2 * stride_qt, t + 2 < T, FP8, FP8_MAX)
            _own_rows(d, s_tile + 3, q_tile + 3 * stride_qt, t + 3 < T, FP8, FP8_MAX)
        if COLUMNS:
            enc = multiplier_from_bits(_column_bits(a, b, c, d), FP8_MAX)
            tl.store(scale_t_ptr + tile_t * stride_st + k, tl.div_rn(1.0, enc), mask=k < K)
            row = enc[None, :]
            word = word_of_codes(a * row, b * row, c * row, d * row, FP8, FP8_MAX, PACKING)
            tl.store(t_tile, tl.trans(word), mask=k[:, None] < K)


# ---- public wrappers: check, allocate, launch ----


def quantize_1x128(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales `(q_TK, scale_TB)`: E4M3 with a power-of-two scale per 128 columns; K must be whole blocks."""
    check_matrix("x_TK", x_TK)
    t, k = x_TK.shape
    if k % BLOCK:
        raise ConfigError(f"x_TK has {k} columns; 1x128 scales need a multiple of {BLOCK}: pad it with zeros")
    if not runs_kernel(x_TK, _quantize_1x128_kernel):
        return quantize_1x128_ref(x_TK)
    q_TK = torch.empty((t, k), dtype=_FP8, device=x_TK.device)
    scale_BT = torch.empty((k // BLOCK, t), dtype=torch.float32, device=x_TK.device)
    if t and k:
        grid = (cdiv(t, _ROWS), cdiv(k // BLOCK, _BLOCKS))
        with on_device(x_TK):
            launch(_quantize_1x128_kernel, grid)(
                x_TK,
                q_TK,
                scale_BT,
                t,
                k,
                x_TK.stride(0),
                q_TK.stride(0),
                FP8_MAX=_FP8_MAX,
                ROWS=_ROWS,
                BLOCKS=_BLOCKS,
                BLOCK=BLOCK,
                num_warps=_WARPS,
            )
    return q_TK, scale_BT.T


def quantize_1x128_both(x_TK: Tensor, *, rows: bool = True, columns: bool = True) -> Blocks:
    """E4M3 with a power-of-two scale per 128 numbers, along the rows and along the columns, from one read.

    Returns `q` [T, K'] with `scale` [K'/128, T] and `q_t` [K, T'] with `scale_t` [T'/128, K]; a copy that is not asked
    for is None. Raises ConfigError on a wrong argument.
    """
    check_matrix("x_TK", x_TK)
    if not runs_kernel(x_TK, _quantize_tiles_kernel):
        return _asked(quantize_1x128_both_ref(x_TK), rows, columns)
    t, k = x_TK.shape
    t_blocks, k_blocks = num_blocks(t), num_blocks(k)
    empty = x_TK.new_empty
    made = Blocks(
        empty((t, k_blocks * BLOCK), dtype=_FP8) if rows else None,
        empty((k_blocks, t), dtype=torch.float32) if rows else None,
        empty((k, t_blocks * BLOCK), dtype=_FP8) if columns else None,
        empty((t_blocks, k), dtype=torch.float32) if columns else None,
    )
    _launch(x_TK, made, square=False)
    return made


def quantize_128x128(w_NK: Tensor, *, rows: bool = True, columns: bool = True, out: Blocks | None = None) -> Blocks:
    """E4M3 with a power-of-two scale per 128 x 128 square, row-major and transposed, from one read.

    Returns `q` [N, K'] with `scale` [N'/128, .] and `q_t` [K, N'] with `scale_t` [K'/128, .]; rows of scales are filled
    up with zeros to a multiple of four. `out` may be slices of larger buffers, its q_t at a multiple of 128 columns.
    Raises ConfigError on a wrong argument.
    """
    check_matrix("w_NK", w_NK)
    n, k = w_NK.shape
    made = out or empty_128x128(n, k, w_NK, rows=rows, columns=columns)
    for name, codes, shape in (
        ("q", made.q, (n, num_blocks(k) * BLOCK)),
        ("q_t", made.q_t, (k, num_blocks(n) * BLOCK)),
    ):
        if codes is not None:
            check_out(f"out.{name}", codes, shape, _FP8, w_NK)
    if runs_kernel(w_NK, _quantize_tiles_kernel):
        _launch(w_NK, made, square=True)
        return made
    for mine, ref in zip(made, quantize_128x128_ref(w_NK), strict=True):
        if mine is not None and ref is not None:
            # A slice of merged scales is as wide as its blocks; the filling belongs to the whole.
            part = ref[:, : mine.shape[1]]
            mine.view(torch.uint8).copy_(part.contiguous().view(torch.uint8))
    return made


def empty_128x128(n: int, k: int, like: Tensor, *, rows: bool = True, columns: bool = True) -> Blocks:
    """Room for the copies of a weight [N, K]: the scales are zeros, since their filling is never written."""
    n_blocks, k_blocks = num_blocks(n), num_blocks(k)
    return Blocks(
        like.new_empty((n, k_blocks * BLOCK), dtype=_FP8) if rows else None,
        like.new_zeros((n_blocks, num_lines(k_blocks)), dtype=torch.float32) if rows else None,
        like.new_empty((k, n_blocks * BLOCK), dtype=_FP8) if columns else None,
        like.new_zeros((k_blocks, num_lines(n_blocks)), dtype=torch.float32) if columns else None,
    )


def num_blocks(size: int) -> int:
    """Blocks of that many numbers in a row."""
    return -(-size // BLOCK)


def num_lines(blocks: int) -> int:
    """Scales of that many blocks, padded to whole lines."""
    return -(-blocks // SCALE_LINE) * SCALE_LINE


def _asked(made: Blocks, rows: bool, columns: bool) -> Blocks:
    first = (made.q, made.scale) if rows else (None, None)
    return Blocks(*first, *((made.q_t, made.scale_t) if columns else (None, None)))


def _launch(x_TK: Tensor, made: Blocks, *, square: bool) -> None:
    t, k = x_TK.shape
    rows, columns = made.q is not None, made.q_t is not None
    if not (t and k and (rows or columns)):
        return
    # A copy that is not written still needs a pointer of the right kind.
    q, scale, q_t, scale_t = (
        mine if mine is not None else other for mine, other in zip(made, (*made[2:], *made[:2]), strict=True)
    )
    assert q is not None and scale is not None and q_t is not None and scale_t is not None
    words = q_t.view(torch.int32)
    with on_device(x_TK):
        launch(_quantize_tiles_kernel, (num_blocks(k), num_blocks(t)))(
            x_TK,
            q,
            scale,
            words,
            scale_t,
            t,
            k,
            x_TK.stride(0),
            q.stride(0),
            scale.stride(0),
            words.stride(0),
            scale_t.stride(0),
            FP8=tl.float8e4nv,
            FP8_MAX=_FP8_MAX,
            SQUARE=square,
            ROWS=rows,
            COLUMNS=columns,
            ASM=not is_interpreted(_quantize_tiles_kernel),
            BLOCK=BLOCK,
            num_warps=_SQUARE_WARPS,
        )
