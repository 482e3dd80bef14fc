"""Round a tensor exactly to a block-scaled format and back to fp32: what an emulated GEMM multiplies.

    round_to(x) = dequantize(quantize(x, fmt))        along the last dimension, through the Hadamard transform if asked

Numerics: bit for bit `deepwell.formats.quantize` and its `dequantize`, on any device. Stochastic rounding on a GPU
    draws eight random bits an element from torch's generator, as the hardware does; the reference draws a whole number.
Cost: memory bound. Bytes per element (bf16 in, fp32 out): mxfp8 about 16, nvfp4 about 28, either way of the Hadamard
    transform 6 to 8; the reference, sixty passes of plain torch, takes some 500.
"""

# Shapes: T rows, K columns (the contraction), C scale blocks of a row.

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepwell.formats.elements import decode_e8m0
from deepwell.formats.hadamard import SIZE, check_signs
from deepwell.formats.quantize import quantize
from deepwell.kernels.device.triton_support import cdiv, launch, on_device, runs_kernel, tl, triton
from deepwell.kernels.quantize.microscaled import MX_BLOCK, NV_BLOCK, quantize_mxfp8, quantize_nvfp4

_ROWS = 256  # runs of sixteen that one program transforms
# E4M3 times a power of two has four significant bits, E2M1 times E4M3 six.
FITS_BF16 = ("mxfp8", "nvfp4", "nvfp4_16x16")

# ---- reference: what every way must compute ----


def round_to_ref(x: Tensor, fmt: str, *, rounding: str = "nearest", hadamard: Sequence[int] | None = None) -> Tensor:
    return quantize(x.contiguous(), fmt, rounding=rounding, hadamard=hadamard).dequantize()


def round_to_bf16_ref(
    x: Tensor, fmt: str, *, rounding: str = "nearest", hadamard: Sequence[int] | None = None
) -> tuple[Tensor, Tensor | None]:
    found = quantize(x.contiguous(), fmt, rounding=rounding, hadamard=hadamard)
    values = replace(found, global_scale=None).dequantize(torch.bfloat16, undo_hadamard=False)
    return values, found.global_scale


# ---- kernel ----


@triton.jit
def _stage(x, ROWS: tl.constexpr, STRIDE: tl.constexpr):
    """One stage of the butterfly: sums and differences of elements that lie STRIDE apart."""
    pairs = tl.permute(tl.reshape(x, [ROWS, 8 // STRIDE, 2, STRIDE]), (0, 1, 3, 2))
    first, second = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2)), [ROWS, 16])


@triton.jit
def _hadamard_kernel(x_ptr, out_ptr, N, MINUS: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr):
    """Transforms ROWS of the N runs of sixteen, or undoes it. Bit i of MINUS: sign i is -1."""
    run = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = run[:, None] * 16 + tl.arange(0, 16)[None, :]
    live = (run < N)[:, None]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    signs = 1.0 - 2.0 * ((MINUS >> tl.arange(0, 16)) & 1).to(tl.float32)[None, :]
    if not INVERSE:
        x = x * signs
    x = _stage(x, ROWS, 1)
    x = _stage(x, ROWS, 2)
    x = _stage(x, ROWS, 4)
    x = _stage(x, ROWS, 8) * 0.25
    if INVERSE:
        x = x * signs
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=live)


# ---- public wrapper ----


def round_to(x: Tensor, fmt: str, *, rounding: str = "nearest", hadamard: Sequence[int] | None = None) -> Tensor:
    """x rounded to `fmt` along its last dimension, in fp32; `hadamard` are the signs of a transform to round under."""
    if not _has_kernels(x, fmt, hadamard) or (fmt == "mxfp8" and rounding != "nearest"):
        return round_to_ref(x, fmt, rounding=rounding, hadamard=hadamard)
    x_TK = x.contiguous().flatten(0, -2)
    if hadamard is not None:
        x_TK = _transform(x_TK, check_signs(hadamard), inverse=False)
    if fmt == "mxfp8":
        values = _mxfp8_values(x_TK, torch.float32)
    else:
        values = _round_nvfp4(x_TK, fmt == "nvfp4_16x16", _random_bits(x_TK, rounding))
    if hadamard is not None:
        values = _transform(values, check_signs(hadamard), inverse=True)
    return values.view(x.shape)


def round_to_bf16(
    x: Tensor, fmt: str, *, rounding: str = "nearest", hadamard: Sequence[int] | None = None
) -> tuple[Tensor, Tensor | None]:
    """`(values, scale)`: bf16 numbers that times `scale` (one, or None for 1) are x rounded, under the transform still.

    Of formats in FITS_BF16: their elements times block scales have at most eight significant bits.
    """
    assert fmt in FITS_BF16
    if not _has_kernels(x, fmt, hadamard) or (fmt == "mxfp8" and rounding != "nearest"):
        return round_to_bf16_ref(x, fmt, rounding=rounding, hadamard=hadamard)
    x_TK = x.contiguous().flatten(0, -2)
    if hadamard is not None:
        x_TK = _transform(x_TK, check_signs(hadamard), inverse=False)
    scale = None
    if fmt == "mxfp8":
        values = _mxfp8_values(x_TK, torch.bfloat16)
    else:
        values, scale = _nvfp4_values(x_TK, fmt == "nvfp4_16x16", _random_bits(x_TK, rounding), torch.bfloat16)
    return values.view(x.shape), scale


def _random_bits(x_TK: Tensor, rounding: str) -> Tensor | None:
    if rounding != "stochastic":
        return None
    return torch.randint(0, 256, x_TK.shape, dtype=torch.uint8, device=x_TK.device)


def _has_kernels(x: Tensor, fmt: str, hadamard: Sequence[int] | None) -> bool:
    """Whether the kernels take this: whole blocks, on a GPU (or interpreted). The rest is the reference's."""
    if x.ndim < 2 or not x.numel() or not runs_kernel(x, _hadamard_kernel):
        return False
    length, rows = x.shape[-1], x.numel() // x.shape[-1]
    if hadamard is not None and length % SIZE:
        return False
    if fmt == "mxfp8":
        return length % MX_BLOCK == 0
    # Square blocks reach over the last two dimensions and no further.
    is_square = fmt == "nvfp4_16x16" and x.ndim == 2 and rows % NV_BLOCK == 0
    return length % NV_BLOCK == 0 and (fmt == "nvfp4" or is_square)


def _mxfp8_values(x_TK: Tensor, dtype: torch.dtype) -> Tensor:
    q_TK, scale, _, _ = quantize_mxfp8(x_TK, columns=False, swizzled=False)
    assert q_TK is not None and scale is not None
    values = q_TK.to(dtype)
    values.view(-1, MX_BLOCK).mul_(decode_e8m0(scale).to(dtype).view(-1, 1))
    return values


def _round_nvfp4(x_TK: Tensor, is_square: bool, random_bits: Tensor | None) -> Tensor:
    values, global_scale = _nvfp4_values(x_TK, is_square, random_bits, torch.float32)
    # Element times block scale is exact; the tensor's scale comes last and rounds once.
    return values.mul_(global_scale)


def _nvfp4_values(
    x_TK: Tensor, is_square: bool, random_bits: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(elements times block scales, the scale of the tensor)."""
    t, k = x_TK.shape
    q, scale, global_scale = quantize_nvfp4(x_TK, square=is_square, swizzled=False, random_bits=random_bits)
    values = _unpacked(q).to(dtype)
    scales = scale.to(dtype)
    if is_square:
        grouped, scales = values.view(-1, NV_BLOCK, k // NV_BLOCK, NV_BLOCK), scales[:, None, :, None]
    else:
        grouped, scales = values.view(t, -1, NV_BLOCK), scales[:, :, None]
    grouped.mul_(scales)
    return values, global_scale


def _transform(x_TK: Tensor, signs: tuple[int, ...], *, inverse: bool) -> Tensor:
    out = torch.empty_like(x_TK)
    runs = x_TK.numel() // SIZE
    minus = sum(1 << i for i, sign in enumerate(signs) if sign < 0)
    with on_device(x_TK):
        launch(_hadamard_kernel, (cdiv(runs, _ROWS),))(
            x_TK, out, runs, MINUS=minus, INVERSE=inverse, ROWS=_ROWS, num_warps=4
        )
    return out


def _unpacked(q: Tensor) -> Tensor:
    """The two E2M1 numbers of every packed byte, the low half first.

    Bits s eem of E2M1 are E5M2's s 000ee m0 times 2^14, subnormals too. (No table: a tensor that is kept from call to
    call must not come from the memory of a recorded CUDA graph, and the first call may be the recording.)
    """
    nibbles = torch.stack((q & 15, q >> 4), dim=-1).flatten(-2)
    return (((nibbles & 8) << 4) | ((nibbles & 7) << 1)).view(torch.float8_e5m2).to(torch.bfloat16).mul_(2.0**14)
