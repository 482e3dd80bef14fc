"""FP8 values of a linear's weights under one scale, all of them by two launches: partial maxima, then FP8 values.

    partial[p] = max |w| over the p-th share of every weight       amax = max_p partial[p]
    q = RNE(w * enc(amax)) of all weights side by side, [N, K] or transposed [K, N]       scale = 1 / enc(amax)

One by one, three weights of a merged linear are eight launches forward (a cleared maximum, three maxima, three times
FP8 values, one that spreads the scale for the GEMM) and four backward: 540 of the 1,464 of a step of 16 such layers.
Numerics: bit for bit `quantize_weight` of each weight with the amax of all; a maximum is the same in any order.
Cost: memory bound; bytes per bf16 weight 2 for the maxima, 2 + 1 for the FP8 values, which find smaller weights in L2.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

# Shapes: N rows and K columns of a weight as a linear has it, P partial maxima.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.device.bf16_words import bits_of, encoded
from deepwell.kernels.device.fp8 import magnitude_bits, row_scale, word_of_codes
from deepwell.kernels.device.triton_support import (
    cdiv,
    constant,
    is_interpreted,
    launch,
    next_power_of_2,
    on_device,
    runs_kernel,
    runs_ptx,
    tl,
    triton,
)
from deepwell.kernels.quantize.fp8 import amax, amax_ref, quantize_both_ref, quantize_weight

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0

MAX_WEIGHTS = 4
MAX_PARTIALS = 256
_SHARE = 8192  # elements of a partial maximum at least
_MAX_SIZE = 1 << 30  # of a weight whose elements are counted in 32 bits
_MAX_STRIDE = 1 << 23  # a tile of up to 128 rows has offsets of 32 bits

# ---- reference: what the kernels must compute, in the plainest torch ----


def partial_maxima_ref(weights: Sequence[Tensor]) -> Tensor:
    """Reference for `partial_maxima`, whose maximum alone matters: all of it in the first one."""
    partials = weights[0].new_zeros(num_partials(weights), dtype=torch.float32)
    partials[0] = amax_ref(weights)
    return partials


def quantize_group_ref(weights: Sequence[Tensor], partials_P: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor]:
    """Reference for `quantize_group`: FP8 values and scale."""
    made = [quantize_both_ref(w, partials_P.amax(), dtype=_FP8) for w in weights]
    codes = torch.cat([codes.view(torch.uint8) for codes, _, _ in made])
    return (codes.T.contiguous() if transposed else codes).view(_FP8), made[0][2]


# ---- configs ----


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """A tile of rows x columns. FP8 values: at most `tiles` of them make a program."""

    rows: int
    columns: int
    num_warps: int = 4
    tiles: int = 4
    # Maxima: how many tiles of a program are in flight. A tile of fp32 has half the columns.
    stages: int = 1


# The first ones serve. A maximum waits for its tile, and programs are few: copies to shared memory run ahead of it.
# Loads to registers do not: the assembler moves the maxima of the first tile ahead of the loads of the second.
PARTIALS_CONFIGS = (
    GroupConfig(rows=1, columns=4096, num_warps=4, stages=6),
    GroupConfig(rows=1, columns=8192, num_warps=8, stages=4),
)
# Along K a tile is rows of 1 KiB; transposed it goes through shared memory in words of four FP8 values.
ALONG_CONFIGS = (GroupConfig(rows=8, columns=512), GroupConfig(rows=8, columns=1024, num_warps=8))
TRANSPOSED_CONFIGS = (GroupConfig(rows=64, columns=64), GroupConfig(rows=128, columns=64, tiles=2))
_ENOUGH_PROGRAMS = 1024


def tiles_per_program(num_tiles: int) -> int:
    """Every program reads all partial maxima: four tiles share that where there are programs enough."""
    return 4 if num_tiles >= 4 * _ENOUGH_PROGRAMS else 2 if num_tiles >= 2 * _ENOUGH_PROGRAMS else 1


# ---- kernels: weights and their sizes in fours, of which NUM are there ----


@triton.jit
def _either(is_first, first, second):
    """One of two weights, each given by address, size, its first tile and the sizes ahead of it."""
    return (
        tl.where(is_first, first[0], second[0]),
        tl.where(is_first, first[1], second[1]),
        tl.where(is_first, first[2], second[2]),
        tl.where(is_first, first[3], second[3]),
    )


@triton.jit
def _weight_of(tile, pointers, sizes, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Which weight a tile is of, or a row of tiles: the last one whose first is not behind. Past all, it is empty."""
    weight = (pointers[0], sizes[0], 0, 0)
    if NUM > 1:
        end = tl.cdiv(sizes[0], BLOCK)
        weight = _either(tile >= end, (pointers[1], sizes[1], end, sizes[0]), weight)
    if NUM > 2:
        end += tl.cdiv(sizes[1], BLOCK)
        weight = _either(tile >= end, (pointers[2], sizes[2], end, sizes[0] + sizes[1]), weight)
    if NUM > 3:
        end += tl.cdiv(sizes[2], BLOCK)
        weight = _either(tile >= end, (pointers[3], sizes[3], end, sizes[0] + sizes[1] + sizes[2]), weight)
    return weight


@triton.jit
def _place(
    tile, pointers, rows, K, stride,
    NUM: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile by its number among all weights: addresses, which of them there are, its first row in q and column.

    Rows are in groups of GROUP: the addresses are those of the first one of each. Within a tile 32 bits are enough.
    """
    tiles_k = tl.cdiv(K, BLOCK_K)
    n_tile, k_tile = tile // tiles_k, tile % tiles_k
    w_ptr, N, first, before = _weight_of(n_tile, pointers, rows, NUM, BLOCK_N)
    n, k = (n_tile - first) * BLOCK_N, k_tile * BLOCK_K
    i, j = tl.arange(0, BLOCK_N // GROUP)[:, None], tl.arange(0, BLOCK_K)[None, :]
    place = w_ptr + n.to(tl.int64) * stride + k + (i * GROUP * stride + j)
    return place, (i < (N - n) // GROUP) & (j < K - k), before + n, k


# Two magnitudes of bf16 in a word are ordered as integers too: inf and NaN above all.
_LARGER = constant("""{
    .reg .b32 w;
    and.b32 w, $2, 0x7FFF7FFF;
    max.u16x2 $0, $1, w;
}""")


@triton.jit
def _larger(largest, x, ASM: tl.constexpr):
    """The larger of a magnitude, in bf16 or as bits of fp32, and |x|."""
    if ASM and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_LARGER, "=r,r,r", [largest, x], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.maximum(largest, magnitude_bits(x.to(tl.float32)))


@triton.jit
def _partials_kernel(
    w0_ptr, w1_ptr, w2_ptr, w3_ptr, partials_ptr, size0, size1, size2, size3,
    NUM: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pointers, sizes = (w0_ptr, w1_ptr, w2_ptr, w3_ptr), (size0, size1, size2, size3)
    IN_WORDS: tl.constexpr = ASM and w0_ptr.dtype.element_ty == tl.bfloat16
    largest = tl.zeros([BLOCK], dtype=tl.bfloat16 if IN_WORDS else tl.int32)
    i = tl.arange(0, BLOCK)
    # Tiles of all weights are one list, dealt to the programs in turn: none has two more than another.
    num_tiles = tl.cdiv(size0, BLOCK) + tl.cdiv(size1, BLOCK) + tl.cdiv(size2, BLOCK) + tl.cdiv(size3, BLOCK)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        w_ptr, size, first, _ = _weight_of(tile, pointers, sizes, NUM, BLOCK)
        start = (tile - first) * BLOCK
        largest = _larger(largest, tl.load(w_ptr + start + i, mask=i < size - start, other=0.0), ASM)
    bits = tl.max(bits_of(largest, ASM), axis=0)
    tl.store(partials_ptr + tl.program_id(0), bits.to(tl.float32, bitcast=True))


# Four rows of two columns: a word of four values for each column. The multiplier is a power of two: exact in bf16, but
# for what is 0 in FP8 anyhow.
_ONE_ROW = """    mul.rn.bf16x2 x, $IN, $6;
    shl.b32 w, x, 16;
    mov.b32 ROW0, w;
    and.b32 w, x, 0xFFFF0000;
    mov.b32 ROW1, w;
"""
_ONE_WORD = """    cvt.rn.satfinite.e4m3x2.f32 low, b0, a0;
    cvt.rn.satfinite.e4m3x2.f32 high, d0, c0;
    mov.b32 $0, {low, high};
"""
_WORDS = constant(
    "{\n    .reg .b32 w, x;\n    .reg .f32 a0, a1, b0, b1, c0, c1, d0, d1;\n    .reg .b16 low, high;\n"
    + "".join(_ONE_ROW.replace("ROW", row).replace("IN", str(i)) for i, row in enumerate("abcd", 2))
    + _ONE_WORD + _ONE_WORD.replace("0,", "1,").replace("0;", "1;") + "}"
)  # fmt: skip


@triton.jit
def _words(a, b, c, d, enc, FP8_MAX: tl.constexpr, PACKING: tl.constexpr, ASM: tl.constexpr):
    """The FP8 values of four rows times `enc`, which lets none saturate, four of a column in a word."""
    if ASM and a.dtype == tl.bfloat16:
        enc = tl.broadcast_to(enc.to(tl.bfloat16), a.shape)
        return tl.inline_asm_elementwise(
            _WORDS, "=r,=r,r,r,r,r,r", [a, b, c, d, enc], dtype=tl.int32, is_pure=True, pack=2
        )
    else:
        a, b, c, d = a.to(tl.float32) * enc, b.to(tl.float32) * enc, c.to(tl.float32) * enc, d.to(tl.float32) * enc
        return word_of_codes(a, b, c, d, tl.float8e4nv, FP8_MAX, PACKING)


@triton.jit
def _load_tile(place, mask, stride, TRANSPOSED: tl.constexpr):
    """The numbers of a tile: transposed, four rows of each group apart."""
    a = tl.load(place, mask=mask, other=0.0)
    if TRANSPOSED:
        b = tl.load(place + stride, mask=mask, other=0.0)
        c = tl.load(place + 2 * stride, mask=mask, other=0.0)
        return a, b, c, tl.load(place + 3 * stride, mask=mask, other=0.0)
    else:
        return a, a, a, a


@triton.jit
def _store_tile(
    x, enc, q_ptr, stride_q, mask, n, k,
    TRANSPOSED: tl.constexpr, PACKING: tl.constexpr, ASM: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Write the FP8 values of a tile. Transposed, q_ptr and stride_q count words of four FP8 values."""
    if TRANSPOSED:
        word = tl.trans(_words(x[0], x[1], x[2], x[3], enc, FP8_MAX, PACKING, ASM))
        i, j = tl.arange(0, word.shape[0])[:, None], tl.arange(0, word.shape[1])[None, :]
        tl.store(q_ptr + k.to(tl.int64) * stride_q + n // 4 + (i * stride_q + j), word, mask=tl.trans(mask))
    else:
        codes = encoded(x[0], enc, q_ptr.dtype.element_ty, ASM, True)
        i, j = tl.arange(0, codes.shape[0])[:, None], tl.arange(0, codes.shape[1])[None, :]
        tl.store(q_ptr + n.to(tl.int64) * stride_q + k + (i * stride_q + j), codes, mask=mask)


@triton.jit
def _codes_kernel(
    w0_ptr, w1_ptr, w2_ptr, w3_ptr, partials_ptr, q_ptr, scale_ptr, N0, N1, N2, N3, K, stride, stride_q, num_partials,
    num_scales,
    NUM: tl.constexpr, TRANSPOSED: tl.constexpr, PACKING: tl.constexpr, ASM: tl.constexpr, FP8_MAX: tl.constexpr,
    PARTIALS: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pointers, rows = (w0_ptr, w1_ptr, w2_ptr, w3_ptr), (N0, N1, N2, N3)
    GROUP: tl.constexpr = 4 if TRANSPOSED else 1
    tile = tl.program_id(0) * TILES
    # What does not wait for the maximum is under way while it is found.
    place, mask, n, k = _place(tile, pointers, rows, K, stride, NUM, GROUP, BLOCK_N, BLOCK_K)
    x = _load_tile(place, mask, stride, TRANSPOSED)
    p = tl.arange(0, PARTIALS)
    bits = tl.load(partials_ptr + p, mask=p < num_partials, other=0.0).to(tl.int32, bitcast=True)
    largest = tl.max(bits, axis=0)
    enc, scale = row_scale(largest, FP8_MAX)
    enc, scale = tl.where(largest == 0, 1.0, enc), tl.where(largest == 0, 1.0, scale)
    for step in tl.static_range(TILES):
        if step + 1 < TILES:
            place, next_mask, next_n, next_k = _place(
                tile + step + 1, pointers, rows, K, stride, NUM, GROUP, BLOCK_N, BLOCK_K
            )
            next_x = _load_tile(place, next_mask, stride, TRANSPOSED)
        _store_tile(x, enc, q_ptr, stride_q, mask, n, k, TRANSPOSED, PACKING, ASM, FP8_MAX)
        if step + 1 < TILES:
            x, mask, n, k = next_x, next_mask, next_n, next_k
    # Program i spreads the scale over its share of the rows of q.
    each = tl.cdiv(num_scales, tl.num_programs(0))
    begin = tl.program_id(0) * each
    for start in range(begin, tl.minimum(begin + each, num_scales), 32):
        r = start + tl.arange(0, 32)
        tl.store(scale_ptr + r, scale, mask=r < tl.minimum(begin + each, num_scales))


# ---- wrappers: check, allocate, launch ----


def num_partials(weights: Sequence[Tensor]) -> int:
    """How many partial maxima there are, whichever way they are made."""
    return max(1, min(MAX_PARTIALS, -(-sum(w.shape[0] * w.shape[1] for w in weights) // _SHARE)))


def partial_maxima(weights: Sequence[Tensor], *, config: GroupConfig | None = None) -> Tensor:
    """Numbers of fp32 whose maximum is the largest magnitude of all weights [N, K], NaN where one holds a NaN."""
    if len(weights) == 1 and is_kn(weights[0]):
        weights = [as_stored(weights[0])]
    if not _in_two_launches(weights) or not all(w.is_contiguous() and w.numel() <= _MAX_SIZE for w in weights):
        if runs_kernel(weights[0], _codes_kernel):
            return amax([as_stored(w) for w in weights]).expand(num_partials(weights)).contiguous()
        return partial_maxima_ref(weights)
    partials = weights[0].new_empty(num_partials(weights), dtype=torch.float32)
    config = config or PARTIALS_CONFIGS[0]
    with on_device(weights[0]):
        launch(_partials_kernel, (partials.numel(),))(
            *_fours(weights),
            partials,
            *(weights[i].numel() if i < len(weights) else 0 for i in range(MAX_WEIGHTS)),
            NUM=len(weights),
            ASM=runs_ptx(partials, _partials_kernel),
            STAGES=config.stages,
            BLOCK=config.rows * config.columns * 2 // weights[0].element_size(),
            num_warps=config.num_warps,
        )
    return partials


def quantize_group(
    weights: Sequence[Tensor],
    partials_P: Tensor,
    *,
    transposed: bool,
    scale_per_row: bool,
    config: GroupConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """FP8 weights [N, K] side by side, [N, K] or `transposed` [K, N], and their scale: one number or one a row of q.

    `partials_P` are those of the same weights, or any number of others whose maximum is their amax.
    """
    if len(weights) == 1 and is_kn(weights[0]):  # what lies transposed is written the other way
        weights, transposed = [as_stored(weights[0])], not transposed
    n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
    q = weights[0].new_empty((k, n) if transposed else (n, k), dtype=_FP8)
    if not _in_two_launches(weights) or partials_P.numel() > MAX_PARTIALS:
        scale = _one_by_one(weights, partials_P, q, transposed=transposed)
        return q, scale.expand(q.shape[0]).contiguous() if scale_per_row else scale
    scale = weights[0].new_empty(q.shape[0] if scale_per_row else (), dtype=torch.float32)
    config = config or (TRANSPOSED_CONFIGS if transposed else ALONG_CONFIGS)[0]
    num_tiles = sum(cdiv(w.shape[0], config.rows) for w in weights) * cdiv(k, config.columns)
    tiles = min(config.tiles, tiles_per_program(num_tiles))
    words = q.view(torch.int32) if transposed else q
    with on_device(q):
        launch(_codes_kernel, (cdiv(num_tiles, tiles),))(
            *_fours(weights),
            partials_P,
            words,
            scale,
            *_sizes(weights),
            words.stride(0),
            partials_P.numel(),
            scale.numel(),
            NUM=len(weights),
            TRANSPOSED=transposed,
            PACKING="words" if is_interpreted(_codes_kernel) else "asm",
            ASM=runs_ptx(q, _codes_kernel),
            FP8_MAX=_FP8_MAX,
            PARTIALS=next_power_of_2(partials_P.numel()),
            TILES=tiles,
            BLOCK_N=config.rows,
            BLOCK_K=config.columns,
            num_warps=config.num_warps,
        )
    return q, scale


def as_stored(w: Tensor) -> Tensor:
    """A weight with its lines contiguous: one that the model stores as [K, N] is read as it lies."""
    return w.detach() if w.stride(1) == 1 or w.shape[1] == 1 else w.detach().T


def is_kn(weight: Tensor) -> bool:
    """Whether the model stores a weight [N, K] as [K, N]: GPT-2's."""
    return weight.stride(0) == 1 and weight.stride(1) != 1


def _in_two_launches(weights: Sequence[Tensor]) -> bool:
    """Whether the kernels here can read them: few, rows dense and alike, in whole words of values, tiles in 32 bits."""
    return (
        len(weights) <= MAX_WEIGHTS
        and weights[0].stride(0) < _MAX_STRIDE
        and sum(w.shape[0] for w in weights) < _MAX_STRIDE
        and runs_kernel(weights[0], _codes_kernel)
        and all(
            w.stride(1) == 1
            and w.shape[0]
            and w.shape[1]
            and w.shape[0] % 16 == 0
            and w.dtype == weights[0].dtype
            and w.stride(0) == weights[0].stride(0)
            for w in weights
        )
    )


def _one_by_one(weights: Sequence[Tensor], partials_P: Tensor, q: Tensor, *, transposed: bool) -> Tensor:
    """Write the FP8 values of each weight where they go in `q`, however it is stored. Returns their scale."""
    if not runs_kernel(q, _codes_kernel):
        codes, scale = quantize_group_ref(weights, partials_P, transposed=transposed)
        q.view(torch.uint8).copy_(codes.view(torch.uint8))
        return scale
    largest, start = partials_P.amax(), 0
    for w in weights:
        rows = slice(start, start + w.shape[0])
        part = q[:, rows] if transposed else q[rows]
        stored = as_stored(w)
        is_kn = stored.shape != w.shape or stored.stride() != w.stride()
        if transposed == is_kn:
            scale = quantize_weight(stored, largest, out=part, write="rows")[2]
        else:
            scale = quantize_weight(stored, largest, out_t=part, write="columns")[2]
        start = rows.stop
    return scale


def _fours(weights: Sequence[Tensor]) -> list[Any]:
    """Four weights, the last one again for those that are not there."""
    return [weights[min(i, len(weights) - 1)].detach() for i in range(MAX_WEIGHTS)]


def _sizes(weights: Sequence[Tensor]) -> list[int]:
    """N of four weights, K and the stride of all."""
    four = _fours(weights)
    rows = [w.shape[0] if i < len(weights) else 0 for i, w in enumerate(four)]
    return [*rows, weights[0].shape[1], weights[0].stride(0)]
