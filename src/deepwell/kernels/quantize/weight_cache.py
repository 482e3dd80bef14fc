"""FP8 values of many weights, kept from call to call and recomputed only where a weight changed: two launches for all.

    fingerprint   F(group) = sum over words of mix(word + position * G) mod 2^64,     amax(group) = max |w|
    quantize      nothing where F is that of the values. Else scale = 1 / enc(amax), q = RNE(w * enc), both ways

A group is what shares one scale: the weights of a merged linear, side by side in `rows` [N, K] and `columns` [K, N].
Numerics: values, scale are bit for bit those of `quantize_weight` with the group's amax. Everything is decided on the
    device, from the weights' contents: nothing that edits a weight can go unseen, and nothing waits for the host.
    `mix` is a bijection of 64-bit words, so an edit within one word (four bf16, two fp32) always changes F; any other
    is missed with odds of 2^-64. Integer sums: the same F in any order.
Cost: memory bound. Bytes per bf16 weight: 2 where nothing changed, 2 + 2 + 2 where it did; amax, rows and columns made
    apart cost 2 + 3 + 3 in every call. 7e9 weights at 4.25 TB/s: 3.3 ms unchanged, 9.9 ms changed, 13.2 ms apart.
"""

# Shapes: R, C rows and columns of a weight as stored; N, K those of a linear; P slots of partial results of a group.

from dataclasses import dataclass

import torch
from torch import Tensor

from deepwell.kernels.device.fp8 import multiplier_from_bits, saturate, word_of_codes
from deepwell.kernels.device.triton_support import constant, tl, triton
from deepwell.kernels.quantize.fp8 import amax_ref, quantize_both_ref

# The odd constants of splitmix64 (Steele, Lea, Flood 2014: its increment and its finalizer), as signed words.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
GAMMA, MIX_1, MIX_2 = constant(_GAMMA), constant(_MIX_1), constant(_MIX_2)
# Positions of a group's second weight begin here: no weight has as many words.
PLACE_BITS = 44

# Words of a group's state: the fingerprint of its FP8 values, whether there are any, programs done, times quantized.
STATE_WORDS = 4
MAX_SLOTS = 256
# Columns of the table of weights: address, R, C, stride; rows and columns of codes (address, stride); group, place.
WEIGHT_COLUMNS = 10
# The table of groups has seven: first weight, weights, first slot, slots, state, scale, tiles.

INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


# ---- reference: what the kernels must compute, in the plainest torch ----


def fingerprint_ref(weights: list[Tensor], *, is_aligned: bool) -> Tensor:
    """Reference for a group's fingerprint, int64: `is_aligned` groups are read as 64-bit words, others by element."""
    total = torch.zeros((), dtype=torch.int64, device=weights[0].device)
    for number, w in enumerate(weights):
        bits = w.detach().contiguous().reshape(-1).view(INTEGERS[w.dtype])
        words = bits.view(torch.int64) if is_aligned else bits.long() & (2 ** (8 * w.element_size()) - 1)
        place = torch.arange(words.numel(), device=w.device) + (number << PLACE_BITS)
        total += _mix_ref(words + place * _GAMMA).sum()
    return total


def _mix_ref(z: Tensor) -> Tensor:
    """splitmix64's finalizer; torch multiplies int64 modulo 2^64 and shifts their sign in."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))


def quantize_group_ref(weights: list[Tensor], rows: list[Tensor], columns: list[Tensor]) -> Tensor:
    """Reference for a group's values, written in place; `rows` lie as each weight is stored, `columns` transposed."""
    largest = amax_ref(weights)
    for w, row, column in zip(weights, rows, columns, strict=True):
        codes, codes_t, scale = quantize_both_ref(w, largest, dtype=torch.float8_e4m3fn)
        row.view(torch.uint8).copy_(codes.view(torch.uint8))
        column.view(torch.uint8).copy_(codes_t.view(torch.uint8))
    return scale


# ---- configs ----


@dataclass(frozen=True, kw_only=True, slots=True)
class CodesConfig:
    """A quantizing program takes `tiles` tiles of rows x columns, side by side; `block` words are hashed at once."""

    rows: int = 128
    columns: int = 64
    tiles: int = 8
    num_warps: int = 4
    block: int = 512
    hash_warps: int = 4
    packing: str = "asm"


# The first is the best of each on an H200, 2026-11-16 (benchmarks/bench_weight_codes.py --model 1b --layers 16): 0.97e9
# weights, all changed, 2.13 ms with 64 rows, 1.88 with 128; fingerprints alone 0.69 ms with 1024 words, 0.62 with 512.
CODES_CONFIGS = (CodesConfig(), CodesConfig(tiles=16, block=1024), CodesConfig(rows=64))

# ---- kernels ----


@triton.jit
def _mix(z):
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _halves(word, HALF: tl.constexpr):
    """The largest magnitude in 32 bits, in the upper half where two numbers share them; what is below is noise."""
    first = word & 0x7FFFFFFF
    if HALF:
        first = tl.maximum(first, (word << 16) & 0x7FFFFFFF)
    return first


@triton.jit
def _as_fp32_bits(bits, DTYPE: tl.constexpr):
    """Magnitude bits of DTYPE as those of the same number in fp32."""
    if DTYPE == tl.bfloat16:
        bits = bits << 16
    elif DTYPE == tl.float16:
        bits = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _fingerprint_kernel(
    weights_ptr,
    groups_ptr,
    slot_group_ptr,
    hash_ptr,
    amax_ptr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program, one slot of a group: its share of each of the group's weights. It writes what it found, so that
    # nothing has to be cleared between two calls; the quantizing programs add the slots up.
    HALF: tl.constexpr = DTYPE != tl.float32
    pid = tl.program_id(0)
    group_ptr = groups_ptr + tl.load(slot_group_ptr + pid) * 7
    first = tl.load(group_ptr)
    slot = pid - tl.load(group_ptr + 2)
    slots = tl.load(group_ptr + 3)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    bits = tl.zeros([BLOCK], dtype=tl.int32)
    for number in range(0, tl.load(group_ptr + 1)):
        w_ptr = weights_ptr + (first + number) * 10
        address = tl.load(w_ptr)
        columns = tl.load(w_ptr + 2)
        words = tl.load(w_ptr + 1) * columns
        if ALIGNED:
            words = tl.multiple_of(words // (4 if HALF else 2), 16)
        share = tl.cdiv(tl.cdiv(words, slots), BLOCK) * BLOCK
        begin = slot * share
        begin_place = tl.cast(number, tl.int64) << 44
        for start in range(begin, tl.minimum(begin + share, words), BLOCK):
            i = start + lane
            live = i < words
            if ALIGNED:
                source = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
                word = tl.load(source + i, mask=live, other=0)
                low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
                bits = tl.maximum(bits, tl.maximum(_halves(low, HALF), _halves(high, HALF)))
            else:
                place = (i // columns) * tl.load(w_ptr + 3) + i % columns
                if HALF:
                    half = tl.load(address.to(tl.pointer_type(tl.int16)) + place, mask=live, other=0)
                    word = half.to(tl.int64) & 0xFFFF
                    bits = tl.maximum(bits, (word << 16).to(tl.int32) & 0x7FFFFFFF)
                else:
                    single = tl.load(address.to(tl.pointer_type(tl.int32)) + place, mask=live, other=0)
                    word = single.to(tl.int64) & 0xFFFFFFFF
                    bits = tl.maximum(bits, single & 0x7FFFFFFF)
            total += tl.where(live, _mix(word + (i + begin_place) * GAMMA), 0)
    largest = tl.max(bits, axis=0)
    if HALF:
        largest = _as_fp32_bits(largest >> 16, DTYPE)
    tl.store(hash_ptr + pid, tl.sum(total, axis=0))
    tl.store(amax_ptr + pid, largest)


@triton.jit
def _pointer(table_ptr, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table_ptr + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _length(table_ptr, COLUMN: tl.constexpr, ALIGNED: tl.constexpr):
    length = tl.load(table_ptr + COLUMN)
    if ALIGNED:
        length = tl.multiple_of(length, 16)
    return length


@triton.jit
def _encoded(source, mask, enc):
    return saturate(tl.load(source, mask=mask, other=0.0).to(tl.float32) * enc, 448.0)


@triton.jit
def _codes(x):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _write_tile(w_ptr, r0, c0, enc, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, PACKING: tl.constexpr,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """One tile of a weight as FP8 values, as it lies and transposed; there four rows of a column are one word."""
    GROUP: tl.constexpr = 1 if PACKING == "bytes" else 4
    i = r0 // GROUP + tl.arange(0, ROWS // GROUP)
    c = c0 + tl.arange(0, COLUMNS)
    mask = (i[:, None] < _length(w_ptr, 1, ALIGNED) // GROUP) & (c[None, :] < _length(w_ptr, 2, ALIGNED))
    stride, row_stride = _length(w_ptr, 3, ALIGNED), _length(w_ptr, 5, ALIGNED)
    source = _pointer(w_ptr, 0, DTYPE, ALIGNED) + (i * GROUP)[:, None] * stride + c[None, :]
    row = _pointer(w_ptr, 4, tl.uint8, ALIGNED) + (i * GROUP)[:, None] * row_stride + c[None, :]
    a = _encoded(source, mask, enc)
    tl.store(row, _codes(a), mask=mask)
    transposed_stride = _length(w_ptr, 7, ALIGNED)
    if PACKING == "bytes":
        transposed = _pointer(w_ptr, 6, tl.uint8, ALIGNED) + c[:, None] * transposed_stride + i[None, :]
        tl.store(transposed, tl.trans(_codes(a)), mask=tl.trans(mask))
    else:
        b = _encoded(source + stride, mask, enc)
        tl.store(row + row_stride, _codes(b), mask=mask)
        d = _encoded(source + 2 * stride, mask, enc)
        tl.store(row + 2 * row_stride, _codes(d), mask=mask)
        e = _encoded(source + 3 * stride, mask, enc)
        tl.store(row + 3 * row_stride, _codes(e), mask=mask)
        word = word_of_codes(a, b, d, e, tl.float8e4nv, 448.0, PACKING)
        transposed = _pointer(w_ptr, 6, tl.int32, ALIGNED) + c[:, None] * (transposed_stride // 4) + i[None, :]
        tl.store(transposed, tl.trans(word), mask=tl.trans(mask))


@triton.jit
def _refresh_kernel(
    weights_ptr,
    groups_ptr,
    tile_weight_ptr,
    tile_place_ptr,
    hash_ptr,
    amax_ptr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PACKING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # One program: TILES tiles of one weight, beside one another; none where the group's FP8 values are of this content.
    pid = tl.program_id(0)
    w_ptr = weights_ptr + tl.load(tile_weight_ptr + pid) * 10
    group_ptr = groups_ptr + tl.load(w_ptr + 8) * 7
    p = tl.arange(0, SLOTS)
    live = p < tl.load(group_ptr + 3)
    p += tl.load(group_ptr + 2)
    found = tl.sum(tl.load(hash_ptr + p, mask=live, other=0), axis=0)
    state_ptr = tl.load(group_ptr + 4).to(tl.pointer_type(tl.int64))
    if (tl.load(state_ptr) != found) | (tl.load(state_ptr + 1) == 0):
        bits = tl.max(tl.load(amax_ptr + p, mask=live, other=0), axis=0)
        enc = multiplier_from_bits(bits, 448.0)
        place = tl.load(tile_place_ptr + pid).to(tl.int64)
        width: tl.constexpr = COLUMNS * TILES
        across = tl.cdiv(tl.load(w_ptr + 2), width)
        r0 = place // across * ROWS
        c0 = place % across * width
        for tile in range(0, tl.minimum(TILES, tl.cdiv(tl.load(w_ptr + 2) - c0, COLUMNS))):
            _write_tile(w_ptr, r0, c0 + tile * COLUMNS, enc, DTYPE, ALIGNED, PACKING, ROWS, COLUMNS)
        # The state changes when the group's last program is done, so that all of them decide alike.
        done = tl.atomic_add(state_ptr + 2, 1, sem="relaxed")
        if done == tl.load(group_ptr + 6) - 1:
            tl.store(tl.load(group_ptr + 5).to(tl.pointer_type(tl.float32)), tl.div_rn(1.0, enc))
            tl.store(state_ptr, found)
            tl.store(state_ptr + 1, 1)
            tl.store(state_ptr + 2, 0)
            tl.atomic_add(state_ptr + 3, 1, sem="relaxed")
