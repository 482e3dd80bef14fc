"""The reference quantizers, in plain torch on any device: what every kernel of Deepwell must reproduce bit for bit.

FP8     enc = min(MAX / amax, FLT_MAX), 1 where amax is 0 (rows: 2^126); pow2: enc rounded down to a power of two
        scale = 1 / enc        q = RNE(x * enc)
MX      rceil: byte = 127 + ceil(log2(amax * (1 / MAX)));  floor: 127 + floor(log2 amax) - emax;
        even: 127 + floor(log2(RNE(amax) to the element's mantissa)) - emax;  byte within 0 .. 254
        q = RNE(x * 2^(127 - byte))
NVFP4   S_enc = min(2688 / amax, FLT_MAX), 1 where amax is 0;  S_dec = 1 / S_enc
        scale = E4M3(min(amax_block * (S_enc * (1/6)), 448));  q = RNE(x * min(1 / (scale * S_dec), FLT_MAX))

All in fp32 with IEEE division, in this order; q saturates at the element's maximum. FP8 and NVFP4 follow the order of
operations of NVIDIA's Transformer Engine, MX's rceil that of cuBLAS and the PTX conversion cvt.rp.ue8m0x2.

Inf and NaN are never hidden: a group (NVFP4: the tensor) that holds one gets a NaN scale, so that all of it dequantizes
to NaN. Its codes are NaN's (E4M3, E5M2: 0x7F; MXFP6, MXFP4, NVFP4: the positive maximum). bf16 and fp16 keep inf and
NaN and overflow to inf as IEEE casts do. Where the caller gives `amax`, an inf in x saturates like any value out of
range.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.blocks import group, group_amax, stored_scales, ungroup
from deepwell.formats.elements import (
    STORAGE_DTYPES,
    check_input,
    encode,
    encode_e8m0,
    encode_stochastic,
    pack_codes,
    reciprocal_e8m0,
    stochastic_round_bf16,
)
from deepwell.formats.hadamard import check_signs, hadamard16
from deepwell.formats.spec import E4M3, ElementFormat, Format, get_format
from deepwell.formats.tensor import QuantizedTensor, dequantize

__all__ = ["QuantizedTensor", "dequantize", "quantize"]

FLT_MAX = torch.finfo(torch.float32).max


def quantize(
    x: Tensor,
    fmt: str | Format,
    *,
    axis: int = -1,
    rounding: str = "nearest",
    scale_rounding: str = "rceil",
    generator: torch.Generator | Tensor | None = None,
    hadamard: Sequence[int] | None = None,
    amax: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize `x` (fp32, bf16 or fp16) to `fmt` with scale groups along `axis`.

    `rounding="stochastic"` draws from `generator` (torch's default one where it is None), or takes a uint8 tensor
    shaped like x with eight random bits per element, as the hardware does. `scale_rounding` is for MX scales.
    `hadamard` is the sign vector of a 16-point transform along the axis before quantizing. `amax` replaces the tensor's
    own for formats with one scale per tensor (a reduction over ranks, a delayed scale); larger values saturate.
    Raises ConfigError on a wrong argument (float64 too: round it once yourself), UnsupportedError where a format lacks
    the option.
    """
    check_input("x", x)
    x = x.detach()
    fmt = get_format(fmt)
    axis = _check_arguments(x, fmt, axis, rounding, scale_rounding, amax)
    x_moved = (x if hadamard is None else hadamard16(x, hadamard, axis)).movedim(axis, -1)
    random = generator.movedim(axis, -1) if isinstance(generator, Tensor) else generator
    if not fmt.is_scaled:
        data, scales, global_scale = _cast(x_moved, fmt, rounding, random), None, None
    else:
        grouped = group(x_moved.float().contiguous(), fmt)
        multiplier, scales, global_scale = _scales(grouped, fmt, scale_rounding, amax)
        codes = _round(grouped * multiplier, fmt, rounding, random)
        data = pack_codes(ungroup(codes, fmt, tuple(x_moved.shape)), fmt.element)
    return QuantizedTensor(
        data=data,
        scales=scales,
        global_scale=global_scale,
        format=fmt,
        axis=axis,
        shape=tuple(x.shape),
        dtype=x.dtype,
        hadamard_signs=None if hadamard is None else check_signs(hadamard),
    )


def _check_arguments(x: Tensor, fmt: Format, axis: int, rounding: str, scale_rounding: str, amax: Tensor | None) -> int:
    """Check what the signature cannot; returns the axis counted from the front."""
    if x.ndim == 0 or not -x.ndim <= axis < x.ndim:
        raise ConfigError(f"axis {axis} is not an axis of x with shape {tuple(x.shape)}")
    if rounding not in {"nearest", "stochastic"}:
        raise ConfigError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if scale_rounding not in {"rceil", "floor", "even"}:
        raise ConfigError(f"scale_rounding must be 'rceil', 'floor' or 'even', got {scale_rounding!r}")
    if scale_rounding != "rceil" and fmt.scale != "e8m0":
        raise UnsupportedError(
            f"scale_rounding={scale_rounding!r} is for MX formats; {fmt.name} has one rule for its scales"
        )
    if amax is not None and fmt.scaling != "tensor" and not fmt.has_global_scale:
        raise UnsupportedError(f"amax is for formats with one scale per tensor; {fmt.name} has none")
    if amax is not None and amax.numel() != 1:
        raise ConfigError(f"amax must hold one number, got shape {tuple(amax.shape)}")
    return axis % x.ndim


def _cast(x: Tensor, fmt: Format, rounding: str, random: torch.Generator | Tensor | None) -> Tensor:
    """bf16, fp16 and fp32: the IEEE cast, or bf16 rounded at random."""
    dtype = STORAGE_DTYPES[fmt.name]
    if rounding == "nearest" or fmt.name == "fp32":
        return x.to(dtype).contiguous()
    if fmt.name != "bf16" or isinstance(random, Tensor):
        raise UnsupportedError(f"stochastic rounding to {fmt.name} needs bf16 and a torch.Generator; use 'nearest'")
    return stochastic_round_bf16(x.float(), random)


def _round(scaled: Tensor, fmt: Format, rounding: str, random: torch.Generator | Tensor | None) -> Tensor:
    if rounding == "nearest":
        return encode(scaled, fmt.element)
    how = {"random_bits": group(random, fmt)} if isinstance(random, Tensor) else {"generator": random}
    return encode_stochastic(scaled, fmt.element, **how)


# ---- scales: each returns (multiplier for x, stored scales, global scale) ----


def _scales(
    grouped: Tensor, fmt: Format, scale_rounding: str, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factor that x is multiplied by, the scales that multiply back, and NVFP4's scale above them."""
    if fmt.has_global_scale:
        return _nvfp4_scales(grouped, fmt, amax)
    own = (
        group_amax(grouped, fmt) if amax is None else amax.to(grouped.device, torch.float32).reshape([1] * grouped.ndim)
    )
    if fmt.scale == "e8m0":
        byte = mx_scale_bytes(own, fmt.element, scale_rounding)
        return reciprocal_e8m0(byte), stored_scales(byte, fmt).view(torch.float8_e8m0fnu), None
    at_zero = ZERO_ROW_MULTIPLIER if fmt.scaling == "row" else 1.0
    multiplier = fp8_multiplier(own, fmt.element, pow2=fmt.scale == "pow2", at_zero=at_zero)
    return multiplier, stored_scales(multiplier.reciprocal(), fmt), None


# A row of zeros takes the smallest scale, not 1: whoever brings rows under their largest scale (the transposed operand
# of wgrad) would else shift every other row out of range because one token had no gradient.
ZERO_ROW_MULTIPLIER = 2.0**126


def fp8_multiplier(amax: Tensor, element: ElementFormat, *, pow2: bool, at_zero: float = 1.0) -> Tensor:
    """MAX / amax in fp32, at most FLT_MAX; `at_zero` for amax 0, NaN where it is not finite; `pow2` rounds down."""
    multiplier = _divide(element.max, amax).clamp(max=FLT_MAX)
    if pow2:
        # Dropping the mantissa of the multiplier rounds the scale up, so that nothing saturates.
        multiplier = (multiplier.view(torch.int32) & -0x800000).view(torch.float32)
    multiplier = torch.where(amax == 0, at_zero, multiplier)
    return torch.where(amax.isfinite(), multiplier, float("nan"))


def _divide(numerator: float, denominator: Tensor) -> Tensor:
    """IEEE division. torch's `number / tensor` is reciprocal and product, two roundings; tensor by tensor is one."""
    return torch.full_like(denominator, numerator) / denominator


def mx_scale_bytes(amax: Tensor, element: ElementFormat, scale_rounding: str) -> Tensor:
    """The E8M0 byte of a block with that largest magnitude; 255 where it is not finite."""
    if scale_rounding == "rceil":
        # One fp32 multiplication by the rounded reciprocal, not a division: it decides on which side of a power of two
        # we are.
        return encode_e8m0(amax * torch.tensor(1 / element.max, dtype=torch.float32, device=amax.device))
    bits = amax.view(torch.int32)
    if scale_rounding == "even":
        # Only the carry into the next binade matters, and there rounding half up and half to even agree.
        bits = bits + (1 << (22 - element.mantissa_bits))
    byte = ((bits >> 23) - element.max_exponent).clamp_(0, 254)
    return torch.where(amax.isfinite(), byte, 255).to(torch.uint8)


def _nvfp4_scales(grouped: Tensor, fmt: Format, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    amax_block = group_amax(grouped, fmt)
    if amax is None:
        amax = amax_block.amax() if amax_block.numel() else amax_block.new_zeros(())
    amax = amax.to(grouped.device, torch.float32).reshape(())
    element = fmt.element
    s_enc = _divide(E4M3.max * element.max, amax).clamp(max=FLT_MAX)
    s_enc = torch.where(amax == 0, 1.0, s_enc)
    s_enc = torch.where(amax.isfinite(), s_enc, float("nan"))
    s_dec = s_enc.reciprocal()
    # amax * (S_enc / 6) is not (amax / 6) * S_enc: they round differently and E4M3 ties fall apart.
    sixth = torch.tensor(1 / element.max, dtype=torch.float32, device=grouped.device)
    scale_codes = encode(amax_block * (s_enc * sixth), E4M3)
    scales = scale_codes.view(torch.float8_e4m3fn)
    multiplier = (scales.float() * s_dec).reciprocal().clamp(max=FLT_MAX)
    return multiplier, stored_scales(scales, fmt), s_dec
