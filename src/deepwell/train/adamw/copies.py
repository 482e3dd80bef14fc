"""Quantized copies of weights, written by the pass that updates them: row-major and transposed, for FP8 GEMMs.

    w (R, C)  ->  row: codes (R, C) along C         col: codes (C, R) along R

`mxfp8` scales blocks of 32 along each axis, so that row and col differ; `fp8_e4m3_128x128[_pow2]` has one set of codes
and scales for both, transposed; `fp8_e4m3_tensor[_pow2]` has one scale. That scale comes from `amax`: with `is_delayed`
the amax of the weight before this step (an update moves it by about lr), and the new one is collected on the way; else
the copies take one more pass, when the new amax is known. `fp8_e4m3_row[_pow2]` has a scale for each row of each copy,
so that row and col differ; it takes that pass too: the update collects the maxima of rows and columns. Stacks of
matrices (experts) work as well.

Numerics: bit-equal to `deepwell.formats.quantize` of the new parameter as it is stored (bf16, or fp32).
Cost:     besides the update 1 byte written for each copy and weight, and scales: 16 bytes a bf16 weight with bf16
          moments and both copies instead of 14 + 4 in two passes. Not delayed, or row scales: 2 more to read the
          weight again.
"""

# Shapes: R rows and C columns of a matrix; a tile is ROWS x 128.

from dataclasses import dataclass

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.quantize import quantize_both
from deepwell.formats.spec import Format, get_format
from deepwell.formats.tensor import QuantizedTensor
from deepwell.kernels.device.fp8 import magnitude_bits, multiplier_from_bits, row_scale, saturate
from deepwell.kernels.device.triton_support import tl, triton
from deepwell.train.adamw.update import hyper_of, load_tile, pointers_of, update_tile

FORMATS = (
    "mxfp8",
    *("fp8_e4m3_128x128", "fp8_e4m3_128x128_pow2"),
    *("fp8_e4m3_tensor", "fp8_e4m3_tensor_pow2"),
    *("fp8_e4m3_row", "fp8_e4m3_row_pow2"),
)
TILE_COLUMNS = 128
_MX_BLOCK = 32
_CODES = torch.float8_e4m3fn

# Columns of the table of copies, int64.
COPY_COLUMNS = 14
_SCALE_DTYPES = {"e8m0": torch.float8_e8m0fnu, "fp32": torch.float32, "pow2": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Copies:
    """Where the quantized copies of one weight go. Codes may be slices of larger buffers; their rows are contiguous.

    Weights that share a GEMM may share `scale`, `amax` and `new_amax` (formats with one scale per tensor).
    """

    format: Format
    row: Tensor | None
    col: Tensor | None
    row_scales: Tensor | None = None
    col_scales: Tensor | None = None
    # One scale per tensor: the scale of the codes, the amax it comes from, and the amax collected from the new weight
    # (0 between steps where the copies are not delayed).
    scale: Tensor | None = None
    amax: Tensor | None = None
    new_amax: Tensor | None = None
    is_delayed: bool = True

    @staticmethod
    def empty_like(
        weight: Tensor, fmt: str | Format, *, row: bool = True, col: bool = True, is_delayed: bool = True
    ) -> "Copies":
        """Buffers for the copies of `weight` (R, C) or (E, R, C). `FusedAdamW.write_copies` fills them."""
        fmt = _check_format(fmt)
        if weight.dim() not in {2, 3}:
            raise ConfigError(f"weight has shape {tuple(weight.shape)}; copies are of matrices or stacks of them")
        *lead, rows, columns = weight.shape
        device = weight.device
        row_codes = torch.zeros((*lead, rows, columns), dtype=torch.uint8, device=device).view(_CODES) if row else None
        col_codes = torch.zeros((*lead, columns, rows), dtype=torch.uint8, device=device).view(_CODES) if col else None
        if fmt.scaling == "tensor":
            scale, amax, new_amax = (torch.zeros((), dtype=torch.float32, device=device) for _ in range(3))
            return Copies(
                format=fmt,
                row=row_codes,
                col=col_codes,
                scale=scale,
                amax=amax,
                new_amax=new_amax,
                is_delayed=is_delayed,
            )
        assert fmt.scale is not None
        dtype = _SCALE_DTYPES[fmt.scale]
        row_shape = fmt.scale_shape((*lead, rows), columns)
        col_shape = fmt.scale_shape((*lead, columns), rows)
        assert row_shape is not None and col_shape is not None
        return Copies(
            format=fmt,
            row=row_codes,
            col=col_codes,
            row_scales=_zero_bytes(row_shape, dtype, device) if row else None,
            col_scales=_zero_bytes(col_shape, dtype, device) if col else None,
            is_delayed=False,
        )

    def row_tensor(self, dtype: torch.dtype = torch.bfloat16) -> QuantizedTensor:
        """The row copy as a QuantizedTensor over the same memory; `dtype` is the weight's."""
        return self._as_tensor(self.row, self.row_scales, -1, dtype)

    def col_tensor(self, dtype: torch.dtype = torch.bfloat16) -> QuantizedTensor:
        """The column copy as a QuantizedTensor over the same memory; `dtype` is the weight's."""
        return self._as_tensor(self.col, self.col_scales, -2, dtype)

    def _as_tensor(self, codes: Tensor | None, scales: Tensor | None, axis: int, dtype: torch.dtype) -> QuantizedTensor:
        if codes is None:
            raise ConfigError(f"this copy ({'row' if axis == -1 else 'col'}) is not kept; ask for it in Copies")
        shape = tuple(codes.shape) if axis == -1 else tuple(codes.mT.shape)
        return QuantizedTensor(
            data=codes,
            scales=self.scale if self.format.scaling == "tensor" else scales,
            global_scale=None,
            format=self.format,
            axis=len(shape) + axis,
            shape=shape,
            dtype=dtype,
        )


def _zero_bytes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    num_bytes = torch.empty((), dtype=dtype).element_size()
    return torch.zeros((*shape[:-1], shape[-1] * num_bytes), dtype=torch.uint8, device=device).view(dtype)


def _check_format(fmt: str | Format) -> Format:
    fmt = get_format(fmt)
    if fmt.name not in FORMATS:
        raise UnsupportedError(f"format {fmt.name!r} has no copies with the update; choose one of {', '.join(FORMATS)}")
    return fmt


def check_copies(name: str, copies: Copies, weight: Tensor) -> None:
    """Raise ConfigError or UnsupportedError unless `copies` fits `weight`."""
    fmt = _check_format(copies.format)
    if weight.dim() not in {2, 3} or not weight.is_contiguous():
        raise ConfigError(
            f"{name} is for a weight of shape {tuple(weight.shape)}, strides {weight.stride()}; it must be "
            "a contiguous matrix or stack of matrices"
        )
    if copies.row is None and copies.col is None:
        raise ConfigError(f"{name} has neither row nor col; drop it")
    *lead, rows, columns = weight.shape
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...] | None]] = {}
    for side, shape in (("row", (*lead, rows, columns)), ("col", (*lead, columns, rows))):
        if getattr(copies, side) is None:
            continue
        wanted[side] = (_CODES, shape)
        if fmt.scaling != "tensor":
            assert fmt.scale is not None
            wanted[f"{side}_scales"] = (_SCALE_DTYPES[fmt.scale], fmt.scale_shape(shape[:-1], shape[-1]))
    if fmt.scaling == "tensor":
        wanted.update(dict.fromkeys(("scale", "amax", "new_amax"), (torch.float32, ())))
    for field, (dtype, wanted_shape) in wanted.items():
        tensor = getattr(copies, field)
        if tensor is None or (tensor.dtype, tuple(tensor.shape), tensor.device) != (dtype, wanted_shape, weight.device):
            found = "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            needed = f"{dtype} {wanted_shape} on {weight.device} for {fmt.name}"
            raise ConfigError(f"{name}.{field} must be {needed}, got {found}")
        if tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ConfigError(f"{name}.{field} has stride {tensor.stride(-1)} along its rows; they must be contiguous")


# ---- reference ----


def write_copies_ref(weight: Tensor, copies: Copies) -> None:
    """Reference: quantize the weight as it is into its copies, with `amax` as it is."""
    row, col = quantize_both(weight, copies.format, amax=copies.amax)
    for codes, scales, made in ((copies.row, copies.row_scales, row), (copies.col, copies.col_scales, col)):
        if codes is not None:
            codes.view(torch.uint8).copy_(made.data.view(torch.uint8))
        if scales is not None and made.scales is not None:
            scales.copy_(made.scales)
    if copies.scale is not None and row.scales is not None:
        copies.scale.copy_(row.scales)


def amax_ref(weights: list[Tensor], device: torch.device) -> Tensor:
    """The largest magnitude over all of the weights; NaN stays."""
    each = [weight.detach().float().abs().amax() for weight in weights if weight.numel()]
    return torch.stack(each).amax() if each else torch.zeros((), device=device)


# ---- configs ----


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """A tile of rows x 128, updated `strip` rows at a time and copied `copy_strip` rows at a time (32 at least)."""

    rows: int
    strip: int
    copy_strip: int
    num_warps: int
    max_registers: int | None = None


# Not measured yet. 128x128 blocks need their whole tile; the others may take less.
TILE_CONFIGS = (
    TileConfig(rows=64, strip=16, copy_strip=32, num_warps=8),
    TileConfig(rows=64, strip=16, copy_strip=32, num_warps=8, max_registers=80),
    TileConfig(rows=64, strip=16, copy_strip=64, num_warps=8),
    TileConfig(rows=32, strip=16, copy_strip=32, num_warps=8),
    TileConfig(rows=64, strip=8, copy_strip=64, num_warps=4),
    TileConfig(rows=128, strip=16, copy_strip=64, num_warps=8),
    TileConfig(rows=128, strip=16, copy_strip=64, num_warps=8, max_registers=80),
    TileConfig(rows=128, strip=16, copy_strip=128, num_warps=8),
    TileConfig(rows=128, strip=16, copy_strip=32, num_warps=8),
)


def configs_for(fmt: Format) -> tuple[TileConfig, ...]:
    """The configs that can serve a format."""
    return tuple(config for config in TILE_CONFIGS if fmt.block != (128, 128) or config.rows == 128)


# ---- kernels ----


@triton.jit
def e8m0_of(bits):
    """The E8M0 byte (int32) of amax bits rounded up, and the multiplier 2^(127 - byte)."""
    scaled = (bits.to(tl.float32, bitcast=True) * 0.002232142857142857).to(tl.int32, bitcast=True)
    # Any bit of the mantissa carries. Byte 0 is 2^-127, half of what fp32's exponent 1 says: its carry begins there.
    raised = scaled + tl.where(scaled < 0x800000, 0x3FFFFF, 0x7FFFFF)
    is_finite = bits < 0x7F800000
    # No finite amax / 448 comes near byte 254, whose inverse would be subnormal.
    multiplier = (0x7F000000 - (raised & -8388608)).to(tl.float32, bitcast=True)
    return tl.where(is_finite, raised >> 23, 255), tl.where(is_finite, multiplier, float("nan"))


@triton.jit
def _codes_of(x):
    return saturate(x, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _store_mx(x, copy, r, c, R, C, r0, c0, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr, ROWS: tl.constexpr):
    row_ptr, row_stride, col_ptr, col_stride, row_scale_ptr, row_scale_stride, col_scale_ptr, col_scale_stride = copy
    bits = magnitude_bits(x)
    if HAS_ROW:
        byte, enc = e8m0_of(tl.max(tl.reshape(bits, (ROWS, 4, 32)), axis=2))
        enc = tl.reshape(tl.broadcast_to(enc[:, :, None], (ROWS, 4, 32)), (ROWS, 128))
        is_live = (r[:, None] < R) & (c[None, :] < C)
        tl.store(row_ptr + r[:, None] * row_stride + c[None, :], _codes_of(x * enc), mask=is_live)
        b = tl.arange(0, 4)
        place = r[:, None] * row_scale_stride + c0 // 32 + b[None, :]
        tl.store(row_scale_ptr + place, byte.to(tl.uint8), mask=(r[:, None] < R) & (c0 + b[None, :] * 32 < C))
    if HAS_COL:
        byte, enc = e8m0_of(tl.max(tl.reshape(bits, (ROWS // 32, 32, 128)), axis=1))
        enc = tl.reshape(tl.broadcast_to(enc[:, None, :], (ROWS // 32, 32, 128)), (ROWS, 128))
        is_live = (c[:, None] < C) & (r[None, :] < R)
        tl.store(col_ptr + c[:, None] * col_stride + r[None, :], tl.trans(_codes_of(x * enc)), mask=is_live)
        b = tl.arange(0, ROWS // 32)
        place = c[None, :] * col_scale_stride + r0 // 32 + b[:, None]
        tl.store(col_scale_ptr + place, byte.to(tl.uint8), mask=(r0 + b[:, None] * 32 < R) & (c[None, :] < C))


@triton.jit
def _store_scaled(x, enc, copy, r, c, R, C, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr):
    """The codes of a tile times `enc`, in one copy or in both."""
    row_ptr, row_stride, col_ptr, col_stride, _, _, _, _ = copy
    codes = _codes_of(x * enc)
    if HAS_ROW:
        tl.store(row_ptr + r[:, None] * row_stride + c[None, :], codes, mask=(r[:, None] < R) & (c[None, :] < C))
    if HAS_COL:
        is_live = (c[:, None] < C) & (r[None, :] < R)
        tl.store(col_ptr + c[:, None] * col_stride + r[None, :], tl.trans(codes), mask=is_live)


@triton.jit
def line_multipliers(amax_ptr, i, count, out, is_first, POW2: tl.constexpr):
    """The multipliers of rows (or columns) `i` from their maxima; the first tile of each stores their scales `out`."""
    ptr, stride = out
    bits = tl.load(amax_ptr + i, mask=i < count, other=0)
    enc, scale = row_scale(bits, 448.0, POW2)
    if is_first:
        tl.store(ptr + i * stride, scale, mask=i < count)
    return enc


@triton.jit
def store_square_scale(scale, copy, pointers, i, j, HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr):
    """The scale of block (i, j), transposed for the transposed copy; `pointers` are those of `copy` as fp32."""
    _, _, _, _, _, row_stride, _, col_stride = copy
    row_ptr, col_ptr = pointers
    if HAS_ROW:
        tl.store(row_ptr + i * row_stride + j, scale)
    if HAS_COL:
        tl.store(col_ptr + j * col_stride + i, scale)


@triton.jit
def length_at(copy_ptr, COLUMN: tl.constexpr, ALIGNED: tl.constexpr):
    length = tl.load(copy_ptr + COLUMN)
    if ALIGNED:
        length = tl.multiple_of(length, 16)
    return length


@triton.jit
def pointer_of(copy_ptr, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(copy_ptr + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _copies_kernel(
    table_ptr,
    copies_ptr,
    chunk_row_ptr,
    chunk_place_ptr,
    hyper_ptr,
    step_ptr,
    control_ptr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    RANDOM_MOMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    COPY_STRIP: tl.constexpr,
    EACH: tl.constexpr,
    SCALING: tl.constexpr,
    POW2: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    UPDATES: tl.constexpr,
    WRITES: tl.constexpr,
    COLLECTS: tl.constexpr,
):
    # One program: a tile of ROWS x 128 of one matrix. It UPDATES it strip by strip, which takes few registers, and
    # COLLECTS its amax; then it reads the new weights again, from the cache, and WRITES their copies.
    if tl.load(control_ptr + 1) == 0:
        pid = tl.program_id(0)
        row = tl.load(chunk_row_ptr + pid)
        place = tl.load(chunk_place_ptr + pid).to(tl.int64)
        copy_ptr = copies_ptr + row * 14
        R = length_at(copy_ptr, 0, ALIGNED)
        C = length_at(copy_ptr, 1, ALIGNED)
        tiles = tl.maximum((C + 127) // 128, 1)
        r0 = place // tiles * ROWS
        c0 = place % tiles * 128
        c = c0 + tl.arange(0, 128)
        pointers = pointers_of(table_ptr, row, PARAM, GRAD, MOMENT, ALIGNED)
        # Where the amax is that is written with, and the one that is collected; of row scales: of rows, of columns.
        amax_ptr = pointer_of(copy_ptr, 12, tl.int32, False)
        new_amax_ptr = pointer_of(copy_ptr, 13, tl.int32, False)
        seen = tl.zeros((STRIP, 1, 128), tl.int32)
        if UPDATES or COLLECTS or SCALING == "square":
            slot = tl.load(table_ptr + row * 10 + 8)
            random = (tl.load(control_ptr), tl.load(table_ptr + row * 10 + 9), tl.load(step_ptr + slot))
            hyper = hyper_of(hyper_ptr + slot * 8)
            start = tl.load(copy_ptr + 2)
            for i in tl.range(ROWS // STRIP):
                r = r0 + i * STRIP + tl.arange(0, STRIP)[:, None, None]
                is_live = (r < R) & (c[None, None, :] < C)
                e = r * C + c[None, None, :]
                if UPDATES:
                    calls = start
                    if not EACH:
                        calls = (start + r * C + c0) // 8 + tl.arange(0, 16)[None, None, :]
                    at = (pointers, e, is_live, (r * C + c0) // 128, r < R)
                    x = update_tile(
                        load_tile(*at, MOMENT == tl.uint8, HAS_MASTER, "evict_first"),
                        *at,
                        calls,
                        hyper,
                        random,
                        PARAM,
                        MOMENT,
                        HAS_MASTER,
                        RANDOM_PARAM,
                        RANDOM_MOMENT,
                        "each" if EACH else "rows",
                        ASM,
                    )
                else:
                    x = tl.load(pointers[0] + e, mask=is_live, other=0.0)
                if COLLECTS or SCALING == "square":
                    # With eps = 0 what was masked is 0 / 0: it must not count.
                    bits = tl.where(is_live, magnitude_bits(x.to(tl.float32)), 0)
                    seen = tl.maximum(seen, bits)
                    if SCALING == "row" and HAS_ROW:
                        r = r0 + i * STRIP + tl.arange(0, STRIP)
                        largest = tl.max(tl.reshape(bits, (STRIP, 128)), axis=1)
                        tl.atomic_max(amax_ptr + r, largest, mask=r < R, sem="relaxed")
        amax = 0
        if SCALING == "row":
            if COLLECTS and HAS_COL:
                largest = tl.max(tl.reshape(seen, (STRIP, 128)), axis=0)
                tl.atomic_max(new_amax_ptr + c, largest, mask=c < C, sem="relaxed")
        elif COLLECTS or SCALING == "square":
            amax = tl.max(tl.reshape(seen, (STRIP * 128,)), axis=0)
            if COLLECTS:
                tl.atomic_max(new_amax_ptr, amax, sem="relaxed")
        if WRITES:
            copy = (
                pointer_of(copy_ptr, 3, tl.uint8, ALIGNED),
                length_at(copy_ptr, 4, ALIGNED),
                pointer_of(copy_ptr, 5, tl.uint8, ALIGNED),
                length_at(copy_ptr, 6, ALIGNED),
                pointer_of(copy_ptr, 7, tl.uint8, False),
                length_at(copy_ptr, 8, False),
                pointer_of(copy_ptr, 9, tl.uint8, False),
                length_at(copy_ptr, 10, False),
            )
            scale_ptrs = (pointer_of(copy_ptr, 7, tl.float32, False), pointer_of(copy_ptr, 9, tl.float32, False))
            enc = 1.0
            if SCALING == "tensor":
                enc = multiplier_from_bits(tl.load(amax_ptr) & 0x7FFFFFFF, 448.0, POW2)
            elif SCALING == "row" and HAS_COL:
                enc = line_multipliers(new_amax_ptr, c[None, :], C, (scale_ptrs[1], copy[7]), r0 == 0, POW2)
            elif SCALING == "square":
                enc = multiplier_from_bits(amax, 448.0, POW2)
                store_square_scale(tl.div_rn(1.0, enc), copy, scale_ptrs, r0 // 128, c0 // 128, HAS_ROW, HAS_COL)
            if UPDATES:
                # Other threads of this program wrote what is read now.
                tl.debug_barrier()
            for i in tl.range(ROWS // COPY_STRIP):
                r = r0 + i * COPY_STRIP + tl.arange(0, COPY_STRIP)
                is_live = (r[:, None] < R) & (c[None, :] < C)
                x = tl.load(pointers[0] + (r[:, None] * C + c[None, :]), mask=is_live, other=0.0).to(tl.float32)
                if SCALING == "mx":
                    _store_mx(x, copy, r, c, R, C, r0 + i * COPY_STRIP, c0, HAS_ROW, HAS_COL, COPY_STRIP)
                elif SCALING == "row":
                    if HAS_ROW:
                        row_enc = line_multipliers(amax_ptr, r[:, None], R, (scale_ptrs[0], copy[5]), c0 == 0, POW2)
                        _store_scaled(x, row_enc, copy, r, c, R, C, True, False)
                    if HAS_COL:
                        _store_scaled(x, enc, copy, r, c, R, C, False, True)
                else:
                    _store_scaled(x, enc, copy, r, c, R, C, HAS_ROW, HAS_COL)


@triton.jit(do_not_specialize=["count"])
def _roll_kernel(scales_ptr, count, control_ptr, POW2: tl.constexpr, ROWS: tl.constexpr):
    """The collected amax becomes the one to quantize with; its scale is written and collecting begins at 0."""
    if tl.load(control_ptr + 1) == 0:
        i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        is_live = i < count
        new_ptr = tl.load(scales_ptr + i * 3 + 2, mask=is_live, other=0).to(tl.pointer_type(tl.int32))
        amax_ptr = tl.load(scales_ptr + i * 3 + 1, mask=is_live, other=0).to(tl.pointer_type(tl.int32))
        scale_ptr = tl.load(scales_ptr + i * 3, mask=is_live, other=0).to(tl.pointer_type(tl.float32))
        bits = tl.load(new_ptr, mask=is_live, other=0)
        tl.store(amax_ptr, bits, mask=is_live)
        tl.store(scale_ptr, tl.div_rn(1.0, multiplier_from_bits(bits, 448.0, POW2)), mask=is_live)
        tl.store(new_ptr, tl.zeros_like(bits), mask=is_live)
