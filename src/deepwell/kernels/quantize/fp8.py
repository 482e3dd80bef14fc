"""Quantize to FP8 in one pass: rows with their own scales, or a tensor with one scale and its transposed copy.

    rows     enc[t] = min(MAX / amax_k |x[t, k]|, FLT_MAX), 2^126 where amax is 0; rounded down to 2^n
             scale[t] = 1 / enc[t]      q[t, k] = RNE(x[t, k] * enc[t])
    tensor   the same with one amax for the whole tensor, given or measured (1 where it is 0); q and q^T from one read

Numerics: bit for bit `deepwell.formats.quantize` ("fp8_<element>_row_pow2", "fp8_<element>_tensor_pow2"). A row (a
    tensor) that holds inf or NaN gets a NaN scale and NaN values. With a given amax, inf saturates and NaN stays NaN.
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
from deepwell.kernels.checks import check_fp8, check_matrix, check_number, check_out, check_shape
from deepwell.kernels.device.fp8 import (
    ELEMENTS,
    ZERO_ROW,
    magnitude_bits,
    multiplier_from_bits,
    quantize_tile,
    saturate,
    word_of_codes,
)
from deepwell.kernels.device.triton_support import (
    TileConfig,
    cdiv,
    is_interpreted,
    launch,
    next_power_of_2,
    num_sms,
    on_device,
    runs_kernel,
    tl,
    triton,
)

# ---- reference: what the kernels must compute, in the plainest torch ----


def quantize_rows_ref(x_TK: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    multiplier_T = _row_multipliers(x_TK, dtype=dtype)
    return encode(x_TK.float() * multiplier_T[:, None], ELEMENTS[dtype]).view(dtype), multiplier_T.reciprocal()


def row_scales_ref(x_TK: Tensor) -> Tensor:
    return _row_multipliers(x_TK, dtype=torch.float8_e4m3fn).reciprocal()


def _row_multipliers(x_TK: Tensor, *, dtype: torch.dtype) -> Tensor:
    amax_T = x_TK.float().abs().amax(1) if x_TK.shape[1] else x_TK.new_zeros(x_TK.shape[0], dtype=torch.float32)
    return fp8_multiplier(amax_T, ELEMENTS[dtype], pow2=True, at_zero=ZERO_ROW_MULTIPLIER)


def amax_ref(tensors: Sequence[Tensor]) -> Tensor:
    found = [x.float().abs().amax() for x in tensors if x.numel()]
    return torch.stack(found).amax() if found else tensors[0].new_zeros((), dtype=torch.float32)


def quantize_both_ref(x_TK: Tensor, amax_of_x: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Reference for `quantize_weight`: (q_TK, q_KT, scale)."""
    multiplier = fp8_multiplier(amax_of_x.float().reshape(()), ELEMENTS[dtype], pow2=True)
    codes = encode(x_TK.float() * multiplier, ELEMENTS[dtype]).view(dtype)
    return codes, codes.view(torch.uint8).T.contiguous().view(dtype), multiplier.reciprocal()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptions:
    """What a kernel writes of its result: the rows in its input's dtype, FP8 rows of them, or both."""

    write: bool = True
    fp8: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.fp8 is not None:
            check_fp8("fp8", self.fp8)
        if not self.write and self.fp8 is None:
            raise ConfigError("nothing would be written: set write=True or give fp8 a dtype")

    @property
    def fp8_max(self) -> float:
        """The largest number of the FP8 dtype; 1 without one."""
        return 1.0 if self.fp8 is None else check_fp8("fp8", self.fp8)

    def rows_of(self, y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Reference: (y, its FP8 values and scales), None for what is not written."""
        q, scale = (None, None) if self.fp8 is None else quantize_rows_ref(y, dtype=self.fp8)
        return y if self.write else None, q, scale

    def empty_rows(self, like: Tensor, rows: int, columns: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Memory for what is written."""
        codes = (None, None) if self.fp8 is None else empty_codes(like, rows, columns, self.fp8)
        return like.new_empty((rows, columns)) if self.write else None, *codes


def empty_codes(
    like: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Memory for FP8 values and the scales of their rows."""
    return like.new_empty((rows, columns), dtype=dtype), like.new_empty(rows, dtype=torch.float32)


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
        return self.tile or max(128, next_power_of_2(columns))

    def rows_per_program(self, columns: int) -> int:
        return 1 if self.tile else self.rows or max(1, min(16, 4096 // self.block(columns)))


ROW_CONFIGS = (
    RowConfig(tile=0, num_warps=4),
    RowConfig(tile=0, num_warps=8),
    RowConfig(tile=4096, num_warps=8),
)
BOTH_CONFIGS = tuple(
    TileConfig(rows=64, columns=64, num_warps=4, packing=packing) for packing in ("asm", "words", "bytes")
)
# One copy that is not transposed needs no square tiles: rows of 1 KiB.
ROWS_ONLY = TileConfig(rows=8, columns=512, num_warps=4, packing="bytes")


def default_row_config(columns: int) -> RowConfig:
    """Whole rows in registers up to 16384 columns, two passes beyond.

    One H200, 2026-11-15 (benchmarks/bench_rows.py): 4 warps 53 us at 16384 x 4096, 168 at x 14336; 16 warps 65, 182.
    """
    if columns > 16384:
        return ROW_CONFIGS[2]
    return ROW_CONFIGS[1] if columns > 8192 else ROW_CONFIGS[0]


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_PASSES: tl.constexpr,
):
    # Without q_ptr only the scales are written.
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = t[:, None] < T
    columns = tl.arange(0, BLOCK)[None, :]
    x_row = x_ptr + t[:, None] * stride_xt
    if TWO_PASSES:
        bits = tl.zeros([ROWS, BLOCK], dtype=tl.int32)
        for start in range(0, K, BLOCK):
            k = start + columns
            x = tl.load(x_row + k, mask=live & (k < K), other=0.0, eviction_policy="evict_last")
            bits = tl.maximum(bits, magnitude_bits(x.to(tl.float32)))
        enc = multiplier_from_bits(tl.max(bits, axis=1), FP8_MAX, ZERO_ROW)
        if q_ptr is not None:
            for start in range(0, K, BLOCK):
                k = start + columns
                x = tl.load(x_row + k, mask=live & (k < K), other=0.0, eviction_policy="evict_first").to(tl.float32)
                q = saturate(x * enc[:, None], FP8_MAX).to(q_ptr.dtype.element_ty)
                tl.store(q_ptr + t[:, None] * stride_qt + k, q, mask=live & (k < K))
        scale = tl.div_rn(1.0, enc)
    else:
        mask = live & (columns < K)
        x = tl.load(x_row + columns, mask=mask, other=0.0).to(tl.float32)
        if q_ptr is not None:
            q, scale = quantize_tile(x, q_ptr.dtype.element_ty, FP8_MAX)
            tl.store(q_ptr + t[:, None] * stride_qt + columns, q, mask=mask)
        else:
            enc = multiplier_from_bits(tl.max(magnitude_bits(x), axis=1), FP8_MAX, ZERO_ROW)
            scale = tl.div_rn(1.0, enc)
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
def _quantize_both_kernel(
    x_ptr,
    amax_ptr,
    q_ptr,
    qt_ptr,
    scale_ptr,
    GROUPS,
    K,
    stride_xt,
    stride_qt,
    stride_tk,
    FP8_MAX: tl.constexpr,
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
    enc = multiplier_from_bits(magnitude_bits(tl.load(amax_ptr)), FP8_MAX)
    x_tile = x_ptr + (i * GROUP)[:, None] * stride_xt + k[None, :]
    q_tile = q_ptr + (i * GROUP)[:, None] * stride_qt + k[None, :]
    t_tile = qt_ptr + k.to(tl.int64)[:, None] * stride_tk + i[None, :]

    a = saturate(tl.load(x_tile, mask=mask, other=0.0).to(tl.float32) * enc, FP8_MAX)
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
        b = saturate(b * enc, FP8_MAX)
        c = saturate(c * enc, FP8_MAX)
        d = saturate(d * enc, FP8_MAX)
        if ROWS:
            tl.store(q_tile + stride_qt, b.to(FP8), mask=mask)
            tl.store(q_tile + 2 * stride_qt, c.to(FP8), mask=mask)
            tl.store(q_tile + 3 * stride_qt, d.to(FP8), mask=mask)
        word = word_of_codes(a, b, c, d, FP8, FP8_MAX, PACKING)
        tl.store(t_tile, tl.trans(word), mask=tl.trans(mask))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, tl.div_rn(1.0, enc))


# ---- public wrappers: check, allocate, launch ----


def quantize_rows(
    x_TK: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, config: RowConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize each row of `x_TK` (fp32, bf16, fp16) with its own scale. Returns `(q_TK, scale_T)`, scales in fp32."""
    check_matrix("x_TK", x_TK)
    fp8_max = check_fp8("dtype", dtype)
    if not runs_kernel(x_TK, _quantize_rows_kernel):
        return quantize_rows_ref(x_TK, dtype=dtype)
    q_TK = torch.empty(x_TK.shape, dtype=dtype, device=x_TK.device)
    return q_TK, _launch_rows(x_TK, q_TK, fp8_max, config)


def row_scales(x_TK: Tensor) -> Tensor:
    """The scales of `quantize_rows` alone, in two thirds of its traffic: for FP8 values that lie otherwise."""
    check_matrix("x_TK", x_TK)
    if not runs_kernel(x_TK, _quantize_rows_kernel):
        return row_scales_ref(x_TK)
    return _launch_rows(x_TK, None, check_fp8("dtype", torch.float8_e4m3fn))


def _launch_rows(x_TK: Tensor, q_TK: Tensor | None, fp8_max: float, config: RowConfig | None = None) -> Tensor:
    """Write the FP8 values, if there is memory for them; the scales."""
    t, k = x_TK.shape
    scale_T = torch.empty(t, dtype=torch.float32, device=x_TK.device)
    config = config or default_row_config(k)
    rows = config.rows_per_program(k)
    if t:
        with on_device(x_TK):
            launch(_quantize_rows_kernel, (cdiv(t, rows),))(
                x_TK,
                q_TK,
                scale_T,
                t,
                k,
                x_TK.stride(0),
                k,
                FP8_MAX=fp8_max,
                ROWS=rows,
                BLOCK=config.block(k),
                TWO_PASSES=config.tile > 0,
                num_warps=config.num_warps,
            )
    return scale_T


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
            num_tiles = cdiv(t, block_t) * cdiv(k, block_k)
            if num_tiles:
                grid = (min(num_tiles, 8 * num_sms(x)),)
                launch(_amax_kernel, grid)(
                    x, bits, t, k, x.stride(0), num_tiles, BLOCK_T=block_t, BLOCK_K=block_k, num_warps=4
                )
    return bits.view(torch.float32)


def quantize_weight(
    w_NK: Tensor,
    amax_of_w: Tensor | None = None,
    *,
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
    fp8_max = check_fp8("dtype", dtype)
    check_number("amax", given, w_NK)
    n, k = w_NK.shape
    q, q_t = out, out_t
    if write != "columns":
        q = torch.empty((n, k), dtype=dtype, device=w_NK.device) if q is None else q
        check_out("out", q, (n, k), dtype, w_NK)
    if write != "rows":
        q_t = torch.empty((k, n), dtype=dtype, device=w_NK.device) if q_t is None else q_t
        check_out("out_t", q_t, (k, n), dtype, w_NK)
    if not runs_kernel(w_NK, _quantize_both_kernel):
        codes, codes_t, scale = quantize_both_ref(w_NK, given, dtype=dtype)
        for copy, made in ((q, codes), (q_t, codes_t)):
            if copy is not None:
                copy.view(torch.uint8).copy_(made.view(torch.uint8))
        return q, q_t, scale
    scale = torch.empty((), dtype=torch.float32, device=w_NK.device)
    config = ROWS_ONLY if q_t is None else _fit_packing(config or BOTH_CONFIGS[0], w_NK, q_t)
    first, transposed = (q_t if q is None else q), (q if q_t is None else q_t)
    assert first is not None and transposed is not None
    # An empty tensor still has a scale: one program writes it.
    grid = (max(1, cdiv(k, config.columns)), max(1, cdiv(n, config.rows)))
    with on_device(w_NK):
        launch(_quantize_both_kernel, grid)(
            w_NK,
            given,
            first,
            transposed if config.packing == "bytes" else transposed.view(torch.int32),
            scale,
            n if config.packing == "bytes" else n // 4,
            k,
            w_NK.stride(0),
            first.stride(0),
            transposed.stride(0) if config.packing == "bytes" else transposed.stride(0) // 4,
            FP8_MAX=fp8_max,
            ROWS=q is not None,
            COLUMNS=q_t is not None,
            PACKING=config.packing,
            BLOCK_T=config.rows,
            BLOCK_K=config.columns,
            num_warps=config.num_warps,
        )
    return q, q_t, scale


def _fit_packing(config: TileConfig, x_TK: Tensor, q_t: Tensor) -> TileConfig:
    """Words need whole groups of four tokens in aligned memory; the interpreter reads no PTX."""
    aligned = q_t.storage_offset() % 4 == 0 and q_t.data_ptr() % 4 == 0 and q_t.stride(0) % 4 == 0
    if config.packing != "bytes" and (x_TK.shape[0] % 4 or not aligned):
        return replace(config, packing="bytes")
    if config.packing == "asm" and is_interpreted(_quantize_both_kernel):
        return replace(config, packing="words")
    return config
