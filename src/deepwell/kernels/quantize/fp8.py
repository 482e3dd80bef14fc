"""Quantize to FP8 in one pass: rows with their own scales, or a tensor with one scale and its transposed copy.

    rows     enc[t] = min(MAX / amax_k |x[t, k]|, FLT_MAX), 2^126 where amax is 0; pow2: rounded down to 2^n
             scale[t] = 1 / enc[t]      q[t, k] = RNE(x[t, k] * enc[t])
    tensor   the same with one amax for the whole tensor, given or measured (1 where it is 0); q and q^T from one read

Numerics: bit for bit `deepwell.formats.quantize` ("fp8_<element>_row[_pow2]", "fp8_<element>_tensor[_pow2]"). A row (a
    tensor) that holds inf or NaN gets a NaN scale and NaN codes. With a given amax, inf saturates and NaN stays NaN.
Cost: memory bound; bytes per element (bf16 in): rows 2 + 1; both copies 2 + 2; amax 2.
    Floors on one H200 (4.25 TB/s copied): rows of 16384 x 4096 47 us, of 16384 x 14336 166 us; both copies 63, 221 us.
"""

# Shapes: T tokens, K columns of a row (the contraction), N rows of a weight.

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.formats.elements import encode
from deepwell.formats.quantize import ZERO_ROW_MULTIPLIER, fp8_multiplier
from deepwell.kernels.checks import check_fp8, check_matrix, check_out, check_shape
from deepwell.kernels.device.fp8 import (
    ELEMENTS,
    ZERO_ROW,
    code_bytes,
    magnitude_bits,
    multiplier_from_bits,
    quantize_tile,
    saturate,
)
from deepwell.kernels.device.triton_support import is_interpreted, num_sms, on_device, runs_kernel, tl, triton
from deepwell.kernels.quantize.transpose import TileConfig, transpose_codes

__all__ = ["amax", "quantize_both_given_scale", "quantize_rows", "quantize_weight", "transpose_codes"]

# ---- reference: what the kernels must compute, in the plainest torch ----


def quantize_rows_ref(
    x_TK: Tensor, *, pow2: bool = True, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Reference for `quantize_rows`."""
    x = x_TK.float()
    amax_T = x.abs().amax(1) if x.shape[1] else x.new_zeros(x.shape[0])
    multiplier_T = fp8_multiplier(amax_T, ELEMENTS[dtype], pow2=pow2, at_zero=ZERO_ROW_MULTIPLIER)
    return encode(x * multiplier_T[:, None], ELEMENTS[dtype]).view(dtype), multiplier_T.reciprocal()


def amax_ref(tensors: Sequence[Tensor]) -> Tensor:
    """Reference for `amax`."""
    found = [x.float().abs().amax() for x in tensors if x.numel()]
    return torch.stack(found).amax() if found else tensors[0].new_zeros((), dtype=torch.float32)


def quantize_both_ref(
    x_TK: Tensor, amax_of_x: Tensor, *, pow2: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference for `quantize_weight` and `quantize_both_given_scale`: (q_TK, q_KT, scale)."""
    multiplier = fp8_multiplier(amax_of_x.float().reshape(()), ELEMENTS[dtype], pow2=pow2)
    codes = encode(x_TK.float() * multiplier, ELEMENTS[dtype]).view(dtype)
    return codes, codes.view(torch.uint8).T.contiguous().view(dtype), multiplier.reciprocal()


# ---- configs: what the tuner may choose from ----


@dataclass(frozen=True, kw_only=True, slots=True)
class RowConfig:
    """How a row is read: whole into registers (tile 0), or in two passes over tiles, the second from L2."""

    tile: int
    num_warps: int
    # Rows per program of a whole-row kernel; 0: as many as fill 4096 elements.
    rows: int = 0
    # Of kernels that can: registers of a thread at most, so that more programs share a multiprocessor.
    max_registers: int | None = None

    def block(self, columns: int) -> int:
        """Columns of one load."""
        return self.tile or max(128, triton.next_power_of_2(columns))

    def rows_per_program(self, columns: int) -> int:
        return 1 if self.tile else self.rows or max(1, min(16, 4096 // self.block(columns)))


ROW_CONFIGS = (
    RowConfig(tile=0, num_warps=4),
    RowConfig(tile=0, num_warps=8),
    RowConfig(tile=0, num_warps=16),
    RowConfig(tile=2048, num_warps=4),
    RowConfig(tile=4096, num_warps=8),
)
BOTH_CONFIGS = (
    TileConfig(rows=64, columns=64, num_warps=4, packing="asm"),
    TileConfig(rows=128, columns=64, num_warps=4, packing="asm"),
    TileConfig(rows=128, columns=128, num_warps=8, packing="asm"),
    TileConfig(rows=64, columns=64, num_warps=4, packing="words"),
    TileConfig(rows=128, columns=64, num_warps=4, packing="words"),
    TileConfig(rows=64, columns=64, num_warps=4, packing="bytes"),
    TileConfig(rows=128, columns=128, num_warps=8, packing="bytes"),
)
# One copy that is not transposed needs no square tiles: rows of 1 KiB.
ROWS_ONLY = TileConfig(rows=8, columns=512, num_warps=4, packing="bytes")


def default_row_config(columns: int) -> RowConfig:
    """Whole rows in registers up to 16384 columns, two passes beyond.

    One H200, 2026-11-15 (benchmarks/bench_rows.py): 4 warps 53 us at 16384 x 4096, 168 at x 14336; 16 warps 65, 182.
    """
    if columns > 16384:
        return ROW_CONFIGS[4]
    return ROW_CONFIGS[1] if columns > 8192 else ROW_CONFIGS[0]


PACK_E4M3 = tl.constexpr(
    """{ .reg .b16 lo, hi;
    cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
    mov.b32 $0, {lo, hi}; }"""
)
PACK_E5M2 = tl.constexpr(PACK_E4M3.value.replace("e4m3", "e5m2"))


# ---- kernels ----


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    T,
    K,
    stride_xt,
    stride_qt,
    FP8_MAX: tl.constexpr,
    POW2: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_PASSES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = t[:, None] < T
    columns = tl.arange(0, BLOCK)[None, :]
    x_row = x_ptr + t[:, None] * stride_xt
    q_row = q_ptr + t[:, None] * stride_qt
    if TWO_PASSES:
        bits = tl.zeros([ROWS, BLOCK], dtype=tl.int32)
        for start in range(0, K, BLOCK):
            k = start + columns
            x = tl.load(x_row + k, mask=live & (k < K), other=0.0, eviction_policy="evict_last")
            bits = tl.maximum(bits, magnitude_bits(x.to(tl.float32)))
        enc = multiplier_from_bits(tl.max(bits, axis=1), FP8_MAX, POW2, ZERO_ROW)
        for start in range(0, K, BLOCK):
            k = start + columns
            x = tl.load(x_row + k, mask=live & (k < K), other=0.0, eviction_policy="evict_first").to(tl.float32)
            q = saturate(x * enc[:, None], FP8_MAX).to(q_ptr.dtype.element_ty)
            tl.store(q_row + k, q, mask=live & (k < K))
        scale = tl.div_rn(1.0, enc)
    else:
        mask = live & (columns < K)
        x = tl.load(x_row + columns, mask=mask, other=0.0).to(tl.float32)
        q, scale = quantize_tile(x, q_ptr.dtype.element_ty, FP8_MAX, POW2)
        tl.store(q_row + columns, q, mask=mask)
    tl.store(scale_ptr + t, scale, mask=t < T)


@triton.jit
def _amax_kernel(x_ptr, bits_ptr, T, K, stride_xt, num_tiles, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    # Each program walks over tiles and meets the others once, in an integer maximum: any order gives the same bits.
    tiles_per_row = tl.cdiv(K, BLOCK_K)
    bits = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        t = (tile // tiles_per_row).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
        k = (tile % tiles_per_row) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_ptr + t * stride_xt + k, mask=(t < T) & (k < K), other=0.0).to(tl.float32)
        bits = tl.maximum(bits, magnitude_bits(x))
    tl.atomic_max(bits_ptr, tl.max(tl.max(bits, axis=1), axis=0))


@triton.jit
def word_of_codes(a, b, c, d, FP8: tl.constexpr, FP8_MAX: tl.constexpr, PACKING: tl.constexpr):
    """The codes of four saturated numbers in 32 bits, by PTX instructions ("asm") or shifts."""
    if PACKING == "asm":
        PACK: tl.constexpr = PACK_E4M3 if FP8_MAX == 448.0 else PACK_E5M2
        word = tl.inline_asm_elementwise(PACK, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        word = code_bytes(a, FP8, FP8_MAX) | (code_bytes(b, FP8, FP8_MAX) << 8)
        word |= (code_bytes(c, FP8, FP8_MAX) << 16) | (code_bytes(d, FP8, FP8_MAX) << 24)
    return word


@triton.jit
def _quantize_both_kernel(
    x_ptr,
    amax_ptr,
    q_ptr,
    qt_ptr,
    scale_ptr,
    bits_ptr,
    GROUPS,
    K,
    stride_xt,
    stride_qt,
    stride_tk,
    FP8_MAX: tl.constexpr,
    POW2: tl.constexpr,
    MEASURE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACKING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # ROWS and COLUMNS say which copies are written.
    # Four tokens of a column are neighbours in the transposed copy: as one word they cross shared memory four times
    # cheaper than as bytes. Unless PACKING is "bytes", qt_ptr and stride_tk count words, GROUPS groups of four tokens.
    FP8: tl.constexpr = q_ptr.dtype.element_ty
    GROUP: tl.constexpr = 1 if PACKING == "bytes" else 4
    i = tl.program_id(1).to(tl.int64) * (BLOCK_T // GROUP) + tl.arange(0, BLOCK_T // GROUP)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (i[:, None] < GROUPS) & (k[None, :] < K)
    enc = multiplier_from_bits(magnitude_bits(tl.load(amax_ptr)), FP8_MAX, POW2)
    x_tile = x_ptr + (i * GROUP)[:, None] * stride_xt + k[None, :]
    q_tile = q_ptr + (i * GROUP)[:, None] * stride_qt + k[None, :]
    t_tile = qt_ptr + k.to(tl.int64)[:, None] * stride_tk + i[None, :]

    a = tl.load(x_tile, mask=mask, other=0.0).to(tl.float32)
    if MEASURE:
        bits = magnitude_bits(a)
    a = saturate(a * enc, FP8_MAX)
    q = a.to(FP8)
    if ROWS:
        tl.store(q_tile, q, mask=mask)
    if PACKING == "bytes":
        if COLUMNS:
            tl.store(t_tile, tl.trans(q), mask=tl.trans(mask))
    else:
        b = tl.load(x_tile + stride_xt, mask=mask, other=0.0).to(tl.float32)
        c = tl.load(x_tile + 2 * stride_xt, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(x_tile + 3 * stride_xt, mask=mask, other=0.0).to(tl.float32)
        if MEASURE:
            bits = tl.maximum(tl.maximum(bits, magnitude_bits(b)), tl.maximum(magnitude_bits(c), magnitude_bits(d)))
        b = saturate(b * enc, FP8_MAX)
        c = saturate(c * enc, FP8_MAX)
        d = saturate(d * enc, FP8_MAX)
        if ROWS:
            tl.store(q_tile + stride_qt, b.to(FP8), mask=mask)
            tl.store(q_tile + 2 * stride_qt, c.to(FP8), mask=mask)
            tl.store(q_tile + 3 * stride_qt, d.to(FP8), mask=mask)
        word = word_of_codes(a, b, c, d, FP8, FP8_MAX, PACKING)
        tl.store(t_tile, tl.trans(word), mask=tl.trans(mask))
    if MEASURE:
        tl.atomic_max(bits_ptr, tl.max(tl.max(bits, axis=1), axis=0))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, tl.div_rn(1.0, enc))


# ---- public wrappers: check, allocate, launch ----


def quantize_rows(
    x_TK: Tensor, *, pow2: bool = True, dtype: torch.dtype = torch.float8_e4m3fn, config: RowConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize each row of `x_TK` (fp32, bf16, fp16) with its own scale. Returns `(q_TK, scale_T)`, scales in fp32.

    Raises ConfigError on a wrong argument.
    """
    check_matrix("x_TK", x_TK)
    fp8_max = check_fp8("dtype", dtype)
    if not runs_kernel(x_TK, _quantize_rows_kernel):
        return quantize_rows_ref(x_TK, pow2=pow2, dtype=dtype)
    t, k = x_TK.shape
    q_TK = torch.empty((t, k), dtype=dtype, device=x_TK.device)
    scale_T = torch.empty(t, dtype=torch.float32, device=x_TK.device)
    config = config or default_row_config(k)
    rows = config.rows_per_program(k)
    if t:
        with on_device(x_TK):
            _quantize_rows_kernel[(triton.cdiv(t, rows),)](
                x_TK,
                q_TK,
                scale_T,
                t,
                k,
                x_TK.stride(0),
                q_TK.stride(0),
                FP8_MAX=fp8_max,
                POW2=pow2,
                ROWS=rows,
                BLOCK=config.block(k),
                TWO_PASSES=config.tile > 0,
                num_warps=config.num_warps,
            )
    return q_TK, scale_T


def amax(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """The largest magnitude of one or several matrices as an fp32 scalar on their device, NaN where one holds a NaN."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not tensors:
        raise ConfigError("amax needs at least one tensor, got none")
    for i, x in enumerate(tensors):
        check_matrix(f"tensors[{i}]", x)
        check_shape(f"tensors[{i}]", x, tuple(x.shape), tensors[0])
    if not runs_kernel(tensors[0], _amax_kernel):
        return amax_ref(tensors)
    bits = torch.zeros((), dtype=torch.int32, device=tensors[0].device)
    block_t, block_k = 4, 1024
    with on_device(tensors[0]):
        for x in tensors:
            t, k = x.shape
            num_tiles = triton.cdiv(t, block_t) * triton.cdiv(k, block_k)
            if num_tiles:
                grid = (min(num_tiles, 8 * num_sms(x)),)
                _amax_kernel[grid](x, bits, t, k, x.stride(0), num_tiles, BLOCK_T=block_t, BLOCK_K=block_k, num_warps=4)
    return bits.view(torch.float32)


def quantize_weight(
    w_NK: Tensor,
    amax_of_w: Tensor | None = None,
    *,
    pow2: bool = True,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: Tensor | None = None,
    out_t: Tensor | None = None,
    write: str = "both",
    config: TileConfig | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Quantize a weight with one scale and write it both ways from one read. Returns `(q_NK, q_KN, scale)`.

    `amax_of_w` is the largest magnitude (`amax(w)`, or of several weights that share a scale); measured where None.
    `out` and `out_t` may be slices of larger buffers, so that several weights lie side by side in one operand. With
    `write` "rows" or "columns" only q_NK or only q_KN is made and the other is None.
    """
    check_matrix("w_NK", w_NK)
    if write not in ("both", "rows", "columns"):
        raise ConfigError(f"write must be both, rows or columns, got {write!r}")
    given = amax(w_NK) if amax_of_w is None else amax_of_w
    q, q_t, scale, _ = _quantize_both(
        w_NK, given, pow2=pow2, dtype=dtype, outs=(out, out_t), config=config, measure=False, write=write
    )
    return q, q_t, scale


def quantize_both_given_scale(
    x_TK: Tensor,
    amax_of_x: Tensor,
    *,
    pow2: bool = True,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out: Tensor | None = None,
    out_t: Tensor | None = None,
    config: TileConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize with a scale known beforehand (delayed scaling), both ways, and measure x's own amax in the same pass.

    Returns `(q_TK, q_KT, scale, measured_amax)`; what exceeds `amax_of_x` saturates.
    """
    check_matrix("x_TK", x_TK)
    q, q_t, scale, measured = _quantize_both(
        x_TK, amax_of_x, pow2=pow2, dtype=dtype, outs=(out, out_t), config=config, measure=True
    )
    assert q is not None and q_t is not None
    return q, q_t, scale, measured


def _quantize_both(
    x_TK: Tensor,
    given: Tensor,
    *,
    pow2: bool,
    dtype: torch.dtype,
    outs: tuple[Tensor | None, Tensor | None],
    config: TileConfig | None,
    measure: bool,
    write: str = "both",
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    fp8_max = check_fp8("dtype", dtype)
    if given.numel() != 1 or given.dtype != torch.float32 or given.device != x_TK.device:
        got = f"{given.dtype} {tuple(given.shape)} on {given.device}"
        raise ConfigError(f"amax must be one float32 number on {x_TK.device}, got {got}")
    t, k = x_TK.shape
    q, q_t = outs
    if write != "columns":
        q = torch.empty((t, k), dtype=dtype, device=x_TK.device) if q is None else q
        check_out("out", q, (t, k), dtype, x_TK)
    if write != "rows":
        q_t = torch.empty((k, t), dtype=dtype, device=x_TK.device) if q_t is None else q_t
        check_out("out_t", q_t, (k, t), dtype, x_TK)
    if not runs_kernel(x_TK, _quantize_both_kernel):
        codes, codes_t, scale = quantize_both_ref(x_TK, given, pow2=pow2, dtype=dtype)
        for copy, made in ((q, codes), (q_t, codes_t)):
            if copy is not None:
                copy.view(torch.uint8).copy_(made.view(torch.uint8))
        return q, q_t, scale, amax_ref([x_TK])
    scale = torch.empty((), dtype=torch.float32, device=x_TK.device)
    bits = torch.zeros((), dtype=torch.int32, device=x_TK.device) if measure else scale
    config = ROWS_ONLY if q_t is None else _fit_packing(config or BOTH_CONFIGS[0], x_TK, q_t)
    first, transposed = (q_t if q is None else q), (q if q_t is None else q_t)
    assert first is not None and transposed is not None
    # An empty tensor still has a scale: one program writes it.
    grid = (max(1, triton.cdiv(k, config.columns)), max(1, triton.cdiv(t, config.rows)))
    with on_device(x_TK):
        _quantize_both_kernel[grid](
            x_TK,
            given,
            first,
            transposed if config.packing == "bytes" else transposed.view(torch.int32),
            scale,
            bits,
            t if config.packing == "bytes" else t // 4,
            k,
            x_TK.stride(0),
            first.stride(0),
            transposed.stride(0) if config.packing == "bytes" else transposed.stride(0) // 4,
            FP8_MAX=fp8_max,
            POW2=pow2,
            MEASURE=measure,
            ROWS=q is not None,
            COLUMNS=q_t is not None,
            PACKING=config.packing,
            BLOCK_T=config.rows,
            BLOCK_K=config.columns,
            num_warps=config.num_warps,
        )
    return q, q_t, scale, bits.view(torch.float32)


def _fit_packing(config: TileConfig, x_TK: Tensor, q_t: Tensor) -> TileConfig:
    """Words need whole groups of four tokens in aligned memory; the interpreter reads no PTX."""
    aligned = q_t.storage_offset() % 4 == 0 and q_t.data_ptr() % 4 == 0 and q_t.stride(0) % 4 == 0
    if config.packing != "bytes" and (x_TK.shape[0] % 4 or not aligned):
        return replace(config, packing="bytes")
    if config.packing == "asm" and is_interpreted(_quantize_both_kernel):
        return replace(config, packing="words")
    return config
