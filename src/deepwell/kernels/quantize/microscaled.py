"""Quantize to MXFP8 and NVFP4 in one pass, scales in the tile order that Blackwell's tensor cores read.

    mxfp8   byte[t, b]  = 127 + ceil(log2(amax_32 |x| * (1/448))), within 0 .. 254      q = RNE(x * 2^(127 - byte))
            the row copy (blocks along k) and the transposed copy (blocks along t) from one read of x
    nvfp4   S_enc = min(2688 / amax, FLT_MAX), 1 where amax is 0;   S_dec = 1 / S_enc
            scale = E4M3(min(amax_block * (S_enc * (1/6)), 448))    q = E2M1(x * min(1 / (scale * S_dec), FLT_MAX))
            blocks of 1x16 or 16x16; amax is the tensor's own or the caller's; nearest or stochastic rounding

Numerics: bit for bit `deepwell.formats.quantize` ("mxfp8", "mxfp8_e5m2", "nvfp4", "nvfp4_16x16"), inf and NaN included;
    stochastic with the same random bytes. Swizzled scales are `deepwell.formats.layout.swizzle` of the plain ones.
Cost: memory bound; bytes per element (bf16 in): mxfp8 rows 2 + 1.03, both copies 2 + 2.06; nvfp4 2 + 0.56 (and 1 for
    random bytes).
"""

# Shapes: T tokens, K columns of a row (the contraction), C scale blocks of a row.

from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.formats import layout
from deepwell.formats.quantize import quantize
from deepwell.kernels.checks import check_fp8, check_matrix, check_number
from deepwell.kernels.device.fp8 import FLT_MAX, INF_BITS, magnitude_bits, saturate
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
from deepwell.kernels.quantize.fp8 import amax as measure_amax

MX_BLOCK = 32
NV_BLOCK = 16
_MX_FORMATS = {torch.float8_e4m3fn: "mxfp8", torch.float8_e5m2: "mxfp8_e5m2"}

_MX = constant(MX_BLOCK)
_NV = constant(NV_BLOCK)


class MxCopies(NamedTuple):
    """Values and E8M0 scales of the row copy (T, K) and of the transposed copy (K, T); None where it was not asked for.

    Scales are (rows, blocks), or flat in tile order where `swizzled`.
    """

    q_TK: Tensor | None
    scale: Tensor | None
    q_KT: Tensor | None
    scale_t: Tensor | None


class NvRows(NamedTuple):
    """Packed E2M1 codes (T, ceil(K / 2)) as uint8, E4M3 scales, and the fp32 scale of the tensor."""

    q: Tensor
    scale: Tensor
    global_scale: Tensor


# ---- reference: what the kernels must compute, in the plainest torch ----


def quantize_mxfp8_ref(
    x_TK: Tensor, *, rows: bool = True, columns: bool = True, swizzled: bool = True, dtype: torch.dtype
) -> MxCopies:
    found: list[Tensor | None] = []
    for asked, axis in ((rows, 1), (columns, 0)):
        if not asked:
            found += [None, None]
            continue
        q = quantize(x_TK, _MX_FORMATS[dtype], axis=axis)
        assert q.scales is not None
        found += [q.data, layout.swizzle(q.scales) if swizzled else q.scales]
    return MxCopies(*found)


def quantize_nvfp4_ref(
    x_TK: Tensor, amax: Tensor, *, square: bool, swizzled: bool, random_bits: Tensor | None = None
) -> NvRows:
    rounding = "nearest" if random_bits is None else "stochastic"
    fmt = "nvfp4_16x16" if square else "nvfp4"
    q = quantize(x_TK, fmt, rounding=rounding, generator=random_bits, amax=amax)
    assert q.scales is not None and q.global_scale is not None
    return NvRows(q.data, q.scale_swizzled() if swizzled else q.scales, q.global_scale)


# ---- configs: what the tuner may choose from ----


# Both sides are multiples of 32.
MX_CONFIGS = (
    TileConfig(rows=128, columns=128, num_warps=8),
    TileConfig(rows=64, columns=128, num_warps=4),
    TileConfig(rows=128, columns=64, num_warps=4),
)
# Rows are multiples of 16. "asm" is Blackwell's conversion of two numbers to a byte; the others count thresholds.
NV_CONFIGS = (
    TileConfig(rows=16, columns=256, num_warps=4),
    TileConfig(rows=64, columns=128, num_warps=8),
    TileConfig(rows=16, columns=256, num_warps=4, packing="asm"),
)


# ---- device functions ----


@triton.jit
def _e8m0_byte(bits, INV_MAX: tl.constexpr):
    """The rounded-up E8M0 byte of a block whose largest magnitude has these bits; 255 where it is not finite."""
    d = (bits.to(tl.float32, bitcast=True) * INV_MAX).to(tl.int32, bitcast=True)
    exponent = d >> 23
    mantissa = d & 0x7FFFFF
    # 2^-127 lies among fp32's subnormals, with mantissa 0x400000: byte 0 holds everything up to it.
    carry = tl.where(exponent == 0, mantissa > 0x400000, mantissa > 0).to(tl.int32)
    return tl.where(bits >= INF_BITS, 255, tl.minimum(exponent + carry, 254))


@triton.jit
def _e8m0_multiplier(byte):
    """2^(127 - byte) in fp32, exact; NaN for 255."""
    biased = 254 - byte
    power = tl.where(biased == 0, 0x400000, biased << 23).to(tl.float32, bitcast=True)
    return tl.where(byte == 255, float("nan"), power)


@triton.jit
def _scale_offset(row, column, num_columns, SWIZZLED: tl.constexpr):
    """Where the scale of (row, column) lies: row by row, or in tiles of 128 x 4 (`deepwell.formats.layout`)."""
    if SWIZZLED:
        tile = (row // 128) * ((num_columns + 3) // 4) + column // 4
        return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
    return row * num_columns + column


@triton.jit
def _e2m1_nearest(x):
    """E2M1 values 0 .. 15 of x to nearest even, saturating; NaN becomes +6."""
    m = tl.abs(x)
    # Thresholds lie halfway between neighbours; a tie goes to the even code.
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32) + (m >= 1.75).to(tl.int32)
    code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(magnitude_bits(x) > INF_BITS, 7, code + sign)


@triton.jit
def _e2m1_stochastic(x, random):
    """E2M1 values of x rounded up where its fraction of a step is at least 1 - random / 256; exact values stay."""
    m = tl.minimum(tl.abs(x), 6.0)
    per_step = tl.where(m < 2.0, 2.0, tl.where(m < 4.0, 1.0, 0.5))
    first = tl.where(m < 2.0, 0, tl.where(m < 4.0, 2, 4))
    scaled = m * per_step
    lower = tl.floor(scaled)
    up = (scaled - lower) >= 1.0 - random.to(tl.float32) * 0.00390625
    code = lower.to(tl.int32) + up.to(tl.int32) + first
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(magnitude_bits(x) > INF_BITS, 7, code + sign)


# ---- kernels ----


@triton.jit
def _quantize_mx_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    T,
    K,
    stride_xt,
    MAX: tl.constexpr,
    INV_MAX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (t < T)[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + t[:, None] * stride_xt + k[None, :], mask=mask, other=0.0).to(tl.float32)
    # Blocks past the end are all zero: byte 0, what the tile order is padded with.
    if ROWS:
        _mx_row(x, t, k, mask, q_ptr, scale_ptr, T, K, MAX, INV_MAX, SWIZZLED)
    if COLUMNS:
        amax_t = tl.max(tl.reshape(magnitude_bits(x), [BLOCK_T // _MX, _MX, BLOCK_K]), axis=1)
        byte_t = _e8m0_byte(amax_t, INV_MAX)
        blocks_t = tl.reshape(x, [BLOCK_T // _MX, _MX, BLOCK_K]) * _e8m0_multiplier(byte_t)[:, None, :]
        q_t = saturate(tl.reshape(blocks_t, [BLOCK_T, BLOCK_K]), MAX).to(qt_ptr.dtype.element_ty)
        tl.store(qt_ptr + k[:, None] * T + t[None, :], tl.trans(q_t), mask=tl.trans(mask))
        CT = tl.cdiv(T, _MX)
        ct = tl.program_id(1).to(tl.int64) * (BLOCK_T // _MX) + tl.arange(0, BLOCK_T // _MX)
        at_t = _scale_offset(k[:, None], ct[None, :], CT, SWIZZLED)
        if SWIZZLED:
            inside_t = (k < tl.cdiv(K, 128) * 128)[:, None] & (ct < tl.cdiv(CT, 4) * 4)[None, :]
        else:
            inside_t = (k < K)[:, None] & (ct < CT)[None, :]
        tl.store(scale_t_ptr + at_t, tl.trans(byte_t).to(tl.uint8), mask=inside_t)


@triton.jit
def _mx_row(x, t, k, mask, q_ptr, scale_ptr, T, K, MAX, INV_MAX, SWIZZLED: tl.constexpr):
    """Values and scales along the rows of a tile."""
    ROWS: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = x.shape[1] // _MX
    byte = _e8m0_byte(tl.max(tl.reshape(magnitude_bits(x), [ROWS, BLOCKS, _MX]), axis=2), INV_MAX)
    blocks = tl.reshape(x, [ROWS, BLOCKS, _MX]) * _e8m0_multiplier(byte)[:, :, None]
    q = saturate(tl.reshape(blocks, [ROWS, BLOCKS * _MX]), MAX).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + t[:, None] * K + k[None, :], q, mask=mask)
    C = tl.cdiv(K, _MX)
    c = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = _scale_offset(t[:, None], c[None, :], C, SWIZZLED)
    if SWIZZLED:
        inside = (t < tl.cdiv(T, 128) * 128)[:, None] & (c < tl.cdiv(C, 4) * 4)[None, :]
    else:
        inside = (t < T)[:, None] & (c < C)[None, :]
    tl.store(scale_ptr + at, byte.to(tl.uint8), mask=inside)


@triton.jit
def _quantize_nv_kernel(
    x_ptr,
    amax_ptr,
    random_ptr,
    q_ptr,
    scale_ptr,
    global_ptr,
    T,
    K,
    stride_xt,
    stride_rt,
    SQUARE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (t < T)[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + t[:, None] * stride_xt + k[None, :], mask=mask, other=0.0).to(tl.float32)

    amax = tl.load(amax_ptr)
    s_enc = tl.minimum(tl.div_rn(2688.0, amax), FLT_MAX)
    s_enc = tl.where(amax == 0.0, 1.0, s_enc)
    s_enc = tl.where(magnitude_bits(amax) >= INF_BITS, float("nan"), s_enc)
    s_dec = tl.div_rn(1.0, s_enc)
    sixth: tl.constexpr = 1.0 / 6.0

    bits = tl.max(tl.reshape(magnitude_bits(x), [BLOCK_T, BLOCK_K // _NV, _NV]), axis=2)
    if SQUARE:
        square = tl.max(tl.reshape(bits, [BLOCK_T // _NV, _NV, BLOCK_K // _NV]), axis=1)
        bits = tl.reshape(
            tl.broadcast_to(square[:, None, :], [BLOCK_T // _NV, _NV, BLOCK_K // _NV]), [BLOCK_T, BLOCK_K // _NV]
        )
    # amax * (S_enc / 6), in this association: another one rounds E4M3's ties elsewhere.
    scale = saturate(bits.to(tl.float32, bitcast=True) * (s_enc * sixth), 448.0).to(tl.float8e4nv)
    enc = tl.div_rn(1.0, scale.to(tl.float32) * s_dec)
    enc = tl.minimum(enc, FLT_MAX, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.reshape(tl.reshape(x, [BLOCK_T, BLOCK_K // _NV, _NV]) * enc[:, :, None], [BLOCK_T, BLOCK_K])
    # An odd row ends in half a byte: code 0, also where the multiplier is NaN.
    scaled = tl.where(mask, scaled, 0.0)

    if STOCHASTIC:
        random = tl.load(random_ptr + t[:, None] * stride_rt + k[None, :], mask=mask, other=0)
        code = _e2m1_stochastic(scaled, random)
        low, high = tl.split(tl.reshape(code, [BLOCK_T, BLOCK_K // 2, 2]))
        packed = low | (high << 4)
    elif ASM:
        a, b = tl.split(tl.reshape(scaled, [BLOCK_T, BLOCK_K // 2, 2]))
        packed = tl.inline_asm_elementwise(
            """{ .reg .b8 two; .reg .b16 wide;
            cvt.rn.satfinite.e2m1x2.f32 two, $2, $1;
            mov.b16 wide, {two, 0};
            cvt.u32.u16 $0, wide; }""",
            "=r,f,f",
            [a, b],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        code = _e2m1_nearest(scaled)
        low, high = tl.split(tl.reshape(code, [BLOCK_T, BLOCK_K // 2, 2]))
        packed = low | (high << 4)
    half = tl.program_id(0).to(tl.int64) * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    width = (K + 1) // 2
    inside = (t < T)[:, None] & (half < width)[None, :]
    tl.store(q_ptr + t[:, None] * width + half[None, :], packed.to(tl.uint8), mask=inside)

    C = tl.cdiv(K, _NV)
    c = tl.program_id(0).to(tl.int64) * (BLOCK_K // _NV) + tl.arange(0, BLOCK_K // _NV)
    live = (t < T)[:, None] & (c < C)[None, :]
    scale_bits = scale.to(tl.uint8, bitcast=True)
    if SWIZZLED:
        # A scale for every row, also of a square block; the filling is the byte 0, also where the tensor holds NaN.
        at = _scale_offset(t[:, None], c[None, :], C, True)
        padded = (t < tl.cdiv(T, 128) * 128)[:, None] & (c < tl.cdiv(C, 4) * 4)[None, :]
        tl.store(scale_ptr + at, tl.where(live, scale_bits, 0).to(tl.uint8), mask=padded)
    elif SQUARE:
        at = (t // _NV)[:, None] * C + c[None, :]
        tl.store(scale_ptr + at, scale_bits, mask=live & (t % _NV == 0)[:, None])
    else:
        tl.store(scale_ptr + t[:, None] * C + c[None, :], scale_bits, mask=live)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(global_ptr, s_dec)


# ---- public wrappers: check, allocate, launch ----


def quantize_mxfp8(
    x_TK: Tensor,
    *,
    rows: bool = True,
    columns: bool = True,
    swizzled: bool = True,
    dtype: torch.dtype = torch.float8_e4m3fn,
    config: TileConfig | None = None,
) -> MxCopies:
    """Quantize `x_TK` (fp32, bf16, fp16) to MXFP8 along its rows, along its columns (transposed), or both in one pass.

    `swizzled` writes the scales in Blackwell's tile order, flat and padded; else as (rows, blocks). Raises ConfigError
    on a wrong argument.
    """
    check_matrix("x_TK", x_TK)
    fp8_max = check_fp8("dtype", dtype)
    if not (rows or columns):
        raise ConfigError("rows and columns are both False; quantize_mxfp8 would write nothing")
    if not runs_kernel(x_TK, _quantize_mx_kernel):
        return quantize_mxfp8_ref(x_TK, rows=rows, columns=columns, swizzled=swizzled, dtype=dtype)
    t, k = x_TK.shape
    q_TK, scale = _mx_outputs(x_TK, t, k, dtype, swizzled) if rows else (None, None)
    q_KT, scale_t = _mx_outputs(x_TK, k, t, dtype, swizzled) if columns else (None, None)
    copies = MxCopies(q_TK, scale, q_KT, scale_t)
    if t and k:
        _launch_mx(x_TK, copies, swizzled, fp8_max, config or MX_CONFIGS[0])
    return copies


def _launch_mx(x_TK: Tensor, copies: MxCopies, swizzled: bool, fp8_max: float, config: TileConfig) -> None:
    t, k = x_TK.shape
    # The tile order is padded to 128 rows and 4 blocks of 32 either way.
    grid_t, grid_k = (layout.padded_shape(n, 0)[0] if swizzled else n for n in (t, k))
    grid = (cdiv(grid_k, config.columns), cdiv(grid_t, config.rows))
    scale, scale_t = (None if s is None else s.view(torch.uint8) for s in (copies.scale, copies.scale_t))
    with on_device(x_TK):
        launch(_quantize_mx_kernel, grid)(
            x_TK,
            copies.q_TK,
            scale,
            copies.q_KT,
            scale_t,
            t,
            k,
            x_TK.stride(0),
            MAX=fp8_max,
            INV_MAX=1 / fp8_max,
            ROWS=copies.q_TK is not None,
            COLUMNS=copies.q_KT is not None,
            SWIZZLED=swizzled,
            BLOCK_T=config.rows,
            BLOCK_K=config.columns,
            num_warps=config.num_warps,
        )


def _mx_outputs(x: Tensor, rows: int, length: int, dtype: torch.dtype, swizzled: bool) -> tuple[Tensor, Tensor]:
    codes = torch.empty((rows, length), dtype=dtype, device=x.device)
    return codes, _scales(x, rows, -(-length // MX_BLOCK), torch.float8_e8m0fnu, swizzled)


def _scales(x: Tensor, rows: int, blocks: int, dtype: torch.dtype, swizzled: bool) -> Tensor:
    """Room for scales. An empty tensor has no program that would write the filling of its tiles, so it is zero."""
    if not swizzled:
        return torch.empty((rows, blocks), dtype=dtype, device=x.device)
    high, wide = layout.padded_shape(rows, blocks)
    make = torch.empty if x.numel() else torch.zeros
    return make(high * wide, dtype=torch.uint8, device=x.device).view(dtype)


def quantize_nvfp4(
    x_TK: Tensor,
    amax: Tensor | None = None,
    *,
    square: bool = False,
    swizzled: bool = True,
    random_bits: Tensor | None = None,
    config: TileConfig | None = None,
) -> NvRows:
    """Quantize the rows of `x_TK` (fp32, bf16, fp16) to NVFP4: 1x16 blocks, or 16x16 ones where `square`.

    `amax` is the largest magnitude of the tensor (one fp32 number; of all ranks, say), measured where None. With
    `random_bits` (uint8, shaped like x) rounding is stochastic. Raises ConfigError on a wrong argument.
    """
    check_matrix("x_TK", x_TK)
    if amax is None:
        amax = measure_amax(x_TK)
    check_number("amax", amax, x_TK)
    if random_bits is not None:
        check_matrix("random_bits", random_bits, (torch.uint8,))
        if random_bits.shape != x_TK.shape or random_bits.device != x_TK.device:
            got = f"{tuple(random_bits.shape)} on {random_bits.device}"
            raise ConfigError(f"random_bits must have the shape of x_TK {tuple(x_TK.shape)} on its device, got {got}")
    if not runs_kernel(x_TK, _quantize_nv_kernel):
        return quantize_nvfp4_ref(x_TK, amax, square=square, swizzled=swizzled, random_bits=random_bits)
    return _launch_nv(x_TK, amax, square, swizzled, random_bits, config or NV_CONFIGS[0])


def _launch_nv(
    x_TK: Tensor, amax: Tensor, square: bool, swizzled: bool, random_bits: Tensor | None, config: TileConfig
) -> NvRows:
    t, k = x_TK.shape
    blocks = -(-k // NV_BLOCK)
    q = torch.empty((t, -(-k // 2)), dtype=torch.uint8, device=x_TK.device)
    scale_rows = -(-t // NV_BLOCK) if square and not swizzled else t
    scale = _scales(x_TK, scale_rows, blocks, torch.float8_e4m3fn, swizzled)
    global_scale = torch.empty((), dtype=torch.float32, device=x_TK.device)
    # Tiles are padded to 128 rows and 4 blocks of 16; an empty tensor still has a scale, which one program writes.
    grid_t, grid_k = (t + -t % 128, k + -k % (4 * NV_BLOCK)) if swizzled else (t, k)
    grid = (max(1, cdiv(grid_k, config.columns)), max(1, cdiv(grid_t, config.rows)))
    asm = config.packing == "asm" and not is_interpreted(_quantize_nv_kernel)
    with on_device(x_TK):
        launch(_quantize_nv_kernel, grid)(
            x_TK,
            amax,
            random_bits,
            q,
            scale.view(torch.uint8),
            global_scale,
            t,
            k,
            x_TK.stride(0),
            0 if random_bits is None else random_bits.stride(0),
            SQUARE=square,
            STOCHASTIC=random_bits is not None,
            SWIZZLED=swizzled,
            ASM=asm,
            BLOCK_T=config.rows,
            BLOCK_K=config.columns,
            num_warps=config.num_warps,
        )
    return NvRows(q, scale, global_scale)
