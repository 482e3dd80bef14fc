"""FP8 codes of a linear's weights under one scale, all of them by two launches: partial maxima, then codes.

    partial[p] = max |w| over the p-th share of every weight       amax = max_p partial[p]
    q = RNE(w * enc(amax)) of all weights side by side, [N, K] or turned [K, N]       scale = 1 / enc(amax)

One by one, three weights of a merged linear are eight launches forward (a cleared maximum, three maxima, three times
codes, one that spreads the scale for the GEMM) and four backward: 540 of the 1,464 of a step of 16 such layers.
Numerics: bit for bit `quantize_weight` of each weight with the amax of all; a maximum is the same in any order.
Cost: memory bound; bytes per bf16 weight 2 for the maxima, 2 + 1 for the codes, which find smaller weights in L2.
"""

# Shapes: N rows and K columns of a weight as a linear has it, P partial maxima.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels._fp8 import magnitude_bits, multiplier_from_bits, saturate
from deepwell.kernels._triton import is_interpreted, on_device, runs_kernel, tl, triton
from deepwell.kernels.quantize import amax, amax_ref, quantize_both_ref, quantize_weight, word_of_codes

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0

MAX_WEIGHTS = 4
MAX_PARTIALS = 256
_SHARE = 8192  # elements of a partial maximum at least

# ---- reference: what the kernels must compute, in the plainest torch ----


def partial_maxima_ref(weights: Sequence[Tensor]) -> Tensor:
    """Reference for `partial_maxima`, whose maximum alone matters: all of it in the first one."""
    partials = weights[0].new_zeros(num_partials(weights), dtype=torch.float32)
    partials[0] = amax_ref(weights)
    return partials


def quantize_group_ref(weights: Sequence[Tensor], partials_P: Tensor, *, turned: bool) -> tuple[Tensor, Tensor]:
    """Reference for `quantize_group`: codes and scale."""
    made = [quantize_both_ref(w, partials_P.amax(), pow2=True, dtype=_FP8) for w in weights]
    codes = torch.cat([codes.view(torch.uint8) for codes, _, _ in made])
    return (codes.T.contiguous() if turned else codes).view(_FP8), made[0][2]


# ---- configs ----


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """A tile of rows x columns; `tiles` of them, one after the other, make a program."""

    rows: int
    columns: int
    num_warps: int = 4
    tiles: int = 1


PARTIALS_CONFIG = GroupConfig(rows=8, columns=1024, num_warps=8)
# Along K a tile is rows of 1 KiB; turned it is a square, through shared memory in words of four codes.
ALONG_CONFIG = GroupConfig(rows=8, columns=512)
TURNED_CONFIG = GroupConfig(rows=64, columns=64)
_ENOUGH_PROGRAMS = 1024


def tiles_per_program(num_tiles: int) -> int:
    """Every program reads all partial maxima: four tiles share that where there are programs enough."""
    return 4 if num_tiles >= 4 * _ENOUGH_PROGRAMS else 2 if num_tiles >= 2 * _ENOUGH_PROGRAMS else 1


# ---- kernels: weights and their sizes in fours, of which NUM are there ----


@triton.jit
def _share_of(bits, w_ptr, N, K, stride, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The larger of `bits` and this program's tiles of one weight."""
    tiles_k = tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), tl.cdiv(N, BLOCK_N) * tiles_k, tl.num_programs(0)):
        n = (tile // tiles_k).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        k = (tile % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(w_ptr + n * stride + k, mask=(n < N) & (k < K), other=0.0).to(tl.float32)
        bits = tl.maximum(bits, magnitude_bits(x))
    return bits


@triton.jit
def _partials_kernel(
    w0_ptr, w1_ptr, w2_ptr, w3_ptr, partials_ptr, N0, N1, N2, N3, K, stride0, stride1, stride2, stride3,
    NUM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    bits = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.int32)
    bits = _share_of(bits, w0_ptr, N0, K, stride0, BLOCK_N, BLOCK_K)
    if NUM > 1:
        bits = _share_of(bits, w1_ptr, N1, K, stride1, BLOCK_N, BLOCK_K)
    if NUM > 2:
        bits = _share_of(bits, w2_ptr, N2, K, stride2, BLOCK_N, BLOCK_K)
    if NUM > 3:
        bits = _share_of(bits, w3_ptr, N3, K, stride3, BLOCK_N, BLOCK_K)
    largest = tl.max(tl.max(bits, axis=1), axis=0)
    tl.store(partials_ptr + tl.program_id(0), largest.to(tl.float32, bitcast=True))


@triton.jit
def _write_tile(
    w_ptr, q_ptr, enc, n_tile, k_tile, before, N, K, stride, stride_q,
    TURNED: tl.constexpr, PACKING: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Codes of one tile of one weight, whose rows follow `before` others. Turned, q_ptr and stride_q count words."""
    k = k_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    if TURNED:
        i = n_tile.to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
        mask = (i[:, None] < N // 4) & (k[None, :] < K)
        tile = w_ptr + (4 * i)[:, None] * stride + k[None, :]
        a = saturate(tl.load(tile, mask=mask, other=0.0).to(tl.float32) * enc, FP8_MAX)
        b = saturate(tl.load(tile + stride, mask=mask, other=0.0).to(tl.float32) * enc, FP8_MAX)
        c = saturate(tl.load(tile + 2 * stride, mask=mask, other=0.0).to(tl.float32) * enc, FP8_MAX)
        d = saturate(tl.load(tile + 3 * stride, mask=mask, other=0.0).to(tl.float32) * enc, FP8_MAX)
        word = word_of_codes(a, b, c, d, tl.float8e4nv, FP8_MAX, PACKING)
        target = q_ptr + k.to(tl.int64)[:, None] * stride_q + (before // 4 + i)[None, :]
        tl.store(target, tl.trans(word), mask=tl.trans(mask))
    else:
        n = n_tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (n[:, None] < N) & (k[None, :] < K)
        x = tl.load(w_ptr + n[:, None] * stride + k[None, :], mask=mask, other=0.0).to(tl.float32)
        q = saturate(x * enc, FP8_MAX).to(q_ptr.dtype.element_ty)
        tl.store(q_ptr + (before + n)[:, None] * stride_q + k[None, :], q, mask=mask)


@triton.jit
def _either(is_first, first, second):
    """One of two weights, each given by address, rows, stride, its first tile and the rows ahead of it."""
    return (
        tl.where(is_first, first[0], second[0]),
        tl.where(is_first, first[1], second[1]),
        tl.where(is_first, first[2], second[2]),
        tl.where(is_first, first[3], second[3]),
        tl.where(is_first, first[4], second[4]),
    )


@triton.jit
def _codes_kernel(
    w0_ptr, w1_ptr, w2_ptr, w3_ptr, partials_ptr, q_ptr, scale_ptr, N0, N1, N2, N3, K, stride0, stride1, stride2,
    stride3, stride_q, num_partials, num_scales,
    NUM: tl.constexpr, TURNED: tl.constexpr, PACKING: tl.constexpr, FP8_MAX: tl.constexpr, PARTIALS: tl.constexpr,
    TILES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    p = tl.arange(0, PARTIALS)
    bits = tl.load(partials_ptr + p, mask=p < num_partials, other=0.0).to(tl.int32, bitcast=True)
    enc = multiplier_from_bits(tl.max(bits, axis=0), FP8_MAX, True)
    # Program i spreads the scale over its share of the rows of q.
    each = tl.cdiv(num_scales, tl.num_programs(0))
    begin = tl.program_id(0) * each
    for start in range(begin, tl.minimum(begin + each, num_scales), 256):
        r = start + tl.arange(0, 256)
        tl.store(scale_ptr + r, tl.div_rn(1.0, enc), mask=r < tl.minimum(begin + each, num_scales))

    tiles_k = tl.cdiv(K, BLOCK_K)
    for step in range(TILES):
        tile = tl.program_id(0) * TILES + step
        n_tile, k_tile = tile // tiles_k, tile % tiles_k
        # Which weight: the last one whose first tile is not behind. A tile past all of them has no rows.
        weight = (w0_ptr, N0, stride0, 0, 0)
        if NUM > 1:
            end = tl.cdiv(N0, BLOCK_N)
            weight = _either(n_tile >= end, (w1_ptr, N1, stride1, end, N0), weight)
        if NUM > 2:
            end += tl.cdiv(N1, BLOCK_N)
            weight = _either(n_tile >= end, (w2_ptr, N2, stride2, end, N0 + N1), weight)
        if NUM > 3:
            end += tl.cdiv(N2, BLOCK_N)
            weight = _either(n_tile >= end, (w3_ptr, N3, stride3, end, N0 + N1 + N2), weight)
        w_ptr, N, stride, first, before = weight
        _write_tile(
            w_ptr, q_ptr, enc, n_tile - first, k_tile, before, N, K, stride, stride_q,
            TURNED, PACKING, FP8_MAX, BLOCK_N, BLOCK_K,
        )  # fmt: skip


# ---- wrappers: check, allocate, launch ----


def num_partials(weights: Sequence[Tensor]) -> int:
    """How many partial maxima there are, whichever way they are made."""
    return max(1, min(MAX_PARTIALS, -(-sum(w.shape[0] * w.shape[1] for w in weights) // _SHARE)))


def partial_maxima(weights: Sequence[Tensor]) -> Tensor:
    """Numbers of fp32 whose maximum is the largest magnitude of all weights [N, K], NaN where one holds a NaN."""
    if not _in_two_launches(weights):
        if runs_kernel(weights[0], _codes_kernel):
            return amax([as_stored(w) for w in weights]).expand(num_partials(weights)).contiguous()
        return partial_maxima_ref(weights)
    partials = weights[0].new_empty(num_partials(weights), dtype=torch.float32)
    config = PARTIALS_CONFIG
    with on_device(weights[0]):
        _partials_kernel[(partials.numel(),)](
            *_fours(weights),
            partials,
            *_sizes(weights),
            NUM=len(weights),
            BLOCK_N=config.rows,
            BLOCK_K=config.columns,
            num_warps=config.num_warps,
        )
    return partials


def quantize_group(
    weights: Sequence[Tensor], partials_P: Tensor, *, turned: bool, scale_per_row: bool
) -> tuple[Tensor, Tensor]:
    """Codes of weights [N, K] side by side, [N, K] or `turned` [K, N], and their scale: one number or one a row of q.

    `partials_P` are those of the same weights, or any number of others whose maximum is their amax.
    """
    n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
    q = weights[0].new_empty((k, n) if turned else (n, k), dtype=_FP8)
    if not _in_two_launches(weights) or partials_P.numel() > MAX_PARTIALS:
        scale = _one_by_one(weights, partials_P, q, turned=turned)
        return q, scale.expand(q.shape[0]).contiguous() if scale_per_row else scale
    scale = weights[0].new_empty(q.shape[0] if scale_per_row else (), dtype=torch.float32)
    config = TURNED_CONFIG if turned else ALONG_CONFIG
    num_tiles = sum(triton.cdiv(w.shape[0], config.rows) for w in weights) * triton.cdiv(k, config.columns)
    tiles = tiles_per_program(num_tiles)
    words = q.view(torch.int32) if turned else q
    with on_device(q):
        _codes_kernel[(triton.cdiv(num_tiles, tiles),)](
            *_fours(weights),
            partials_P,
            words,
            scale,
            *_sizes(weights),
            words.stride(0),
            partials_P.numel(),
            scale.numel(),
            NUM=len(weights),
            TURNED=turned,
            PACKING="words" if is_interpreted(_codes_kernel) else "asm",
            FP8_MAX=_FP8_MAX,
            PARTIALS=triton.next_power_of_2(partials_P.numel()),
            TILES=tiles,
            BLOCK_N=config.rows,
            BLOCK_K=config.columns,
            num_warps=config.num_warps,
        )
    return q, scale


def as_stored(w: Tensor) -> Tensor:
    """A weight with its lines contiguous: one that the model stores as [K, N] is read as it lies."""
    return w.detach() if w.stride(1) == 1 or w.shape[1] == 1 else w.detach().T


def _in_two_launches(weights: Sequence[Tensor]) -> bool:
    """Whether the kernels here can read them: few, rows dense and aligned, so that words of codes are whole."""
    return (
        len(weights) <= MAX_WEIGHTS
        and runs_kernel(weights[0], _codes_kernel)
        and all(
            w.stride(1) == 1 and w.shape[0] and w.shape[1] and w.shape[0] % 16 == 0 and w.dtype == weights[0].dtype
            for w in weights
        )
    )


def _one_by_one(weights: Sequence[Tensor], partials_P: Tensor, q: Tensor, *, turned: bool) -> Tensor:
    """Write the codes of each weight where they go in `q`, however it is stored. Returns their scale."""
    if not runs_kernel(q, _codes_kernel):
        codes, scale = quantize_group_ref(weights, partials_P, turned=turned)
        q.view(torch.uint8).copy_(codes.view(torch.uint8))
        return scale
    largest, start = partials_P.amax(), 0
    for w in weights:
        rows = slice(start, start + w.shape[0])
        part = q[:, rows] if turned else q[rows]
        stored = as_stored(w)
        is_kn = stored.shape != w.shape or stored.stride() != w.stride()
        if turned == is_kn:
            scale = quantize_weight(stored, largest, out=part, write="rows")[2]
        else:
            scale = quantize_weight(stored, largest, out_t=part, write="columns")[2]
        start = rows.stop
    return scale


def _fours(weights: Sequence[Tensor]) -> list[Any]:
    """Four weights, the last one again for those that are not there."""
    return [weights[min(i, len(weights) - 1)].detach() for i in range(MAX_WEIGHTS)]


def _sizes(weights: Sequence[Tensor]) -> list[int]:
    """N of four weights, K, strides of four."""
    four = _fours(weights)
    rows = [w.shape[0] if i < len(weights) else 0 for i, w in enumerate(four)]
    return [*rows, weights[0].shape[1], *(w.stride(0) for w in four)]
