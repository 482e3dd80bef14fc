"""Exact rounding of numbers to element codes and back: E4M3, E5M2, E3M2, E2M3, E2M1 and the E8M0 scale.

A code is the bit pattern of one element in a byte. Rounding is done in integer and exact fp32 arithmetic, never by a
cast to a float8 dtype: torch 2.11 turns what lies beyond 464 into NaN where 2.13 saturates, and its cast to E8M0 rounds
to nearest.

Out of range: finite values and infinities saturate to the largest magnitude. NaN becomes the positive canonical NaN
(E4M3 and E5M2: 0x7F); where a format has no NaN it becomes the positive maximum, as the hardware's conversion does.
"""

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.spec import E2M1, ElementFormat

# The torch dtype that holds an element's codes; a format without one lies in uint8.
STORAGE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
}
_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT8_NAN = 0x7F
_E8M0_NAN = 255


def check_input(name: str, x: Tensor) -> None:
    """Raise ConfigError unless `x` is fp32, bf16 or fp16: float64 would be rounded twice without a word."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in _INPUT_DTYPES:
        raise ConfigError(f"{name} has dtype {x.dtype}; pass float32, bfloat16 or float16 (convert it first)")


def _check_coded(element: ElementFormat) -> None:
    if element.bits > 8 or not element.is_signed:
        raise UnsupportedError(f"element {element.name!r} has no byte codes here; use e4m3, e5m2, e3m2, e2m3 or e2m1")


def _magnitude_and_exponent(x: Tensor, element: ElementFormat) -> tuple[Tensor, Tensor, int]:
    """|x| clamped to the maximum, its biased fp32 exponent (not below the smallest normal's), and that smallest."""
    magnitude = x.detach().float().abs().clamp_(max=element.max)
    smallest = 128 - element.bias  # biased fp32 exponent of min_normal = 2^(1 - bias)
    # The upper bound is for NaN alone, whose code is replaced at the end: it keeps the shifts below from overflowing.
    exponent = (magnitude.view(torch.int32) >> 23).clamp_(min=smallest, max=127 + element.max_exponent)
    return magnitude, exponent, smallest


def _finish(steps: Tensor, exponent: Tensor, smallest: int, x: Tensor, element: ElementFormat) -> Tensor:
    """Put a code together from the count of steps within a binade, the binade, the sign, and the rule for NaN.

    Subnormals and the first binade share one step size, so `steps` needs no case of its own: a carry out of the
    mantissa moves the code to the next binade by itself.
    """
    code = steps.add_(exponent.sub_(smallest).bitwise_left_shift_(element.mantissa_bits))
    code = code.to(torch.uint8)
    code += torch.signbit(x).to(torch.uint8) << (element.bits - 1)
    return torch.where(x.isnan(), nan_code(element), code)


def nan_code(element: ElementFormat) -> int:
    """The code that NaN becomes: canonical NaN, or the positive maximum where the format has none."""
    return _FLOAT8_NAN if element.has_nan else (1 << (element.bits - 1)) - 1


def encode(x: Tensor, element: ElementFormat) -> Tensor:
    """Round `x` to the nearest element, ties to the even code. Returns uint8 codes of the same shape."""
    check_input("x", x)
    _check_coded(element)
    magnitude, exponent, smallest = _magnitude_and_exponent(x, element)
    # Adding 2^(23 - mantissa_bits) binades up leaves exactly the element's mantissa in fp32's last bits: the adder's
    # own round-to-nearest-even is the rounding wanted, and the difference of the bit patterns counts the steps.
    magic = (exponent + (23 - element.mantissa_bits)).bitwise_left_shift_(23)
    steps = magnitude.add_(magic.view(torch.float32)).view(torch.int32).sub_(magic)
    return _finish(steps, exponent, smallest, x, element)


def encode_stochastic(
    x: Tensor, element: ElementFormat, *, generator: torch.Generator | None = None, random_bits: Tensor | None = None
) -> Tensor:
    """Round `x` to one of its two neighbours, up with the probability of its distance from the lower one.

    With u uniform in [0, 1) the magnitude goes up where fraction >= 1 - u, so exact values stay and the mean is x.
    `random_bits` (uint8, shaped like x) gives u = bits / 256 as the hardware's conversion takes it; else u has 24 bits
    from `generator`. Returns uint8 codes.
    """
    check_input("x", x)
    _check_coded(element)
    u = _uniform(x, generator, random_bits)
    magnitude, exponent, smallest = _magnitude_and_exponent(x, element)
    per_step = (254 + element.mantissa_bits - exponent).bitwise_left_shift_(23).view(torch.float32)
    scaled = magnitude.mul_(per_step)  # exact: a power of two
    lower = scaled.floor()
    # 1 - u and the fraction are both exact in fp32, so the comparison is: nothing rounds up that should not.
    goes_up = scaled.sub_(lower) >= u.neg_().add_(1)
    steps = lower.nan_to_num_(nan=0.0).to(torch.int32).add_(goes_up.to(torch.int32))
    return _finish(steps, exponent, smallest, x, element)


def _uniform(x: Tensor, generator: torch.Generator | None, random_bits: Tensor | None) -> Tensor:
    if random_bits is None:
        return torch.rand(x.shape, dtype=torch.float32, device=x.device, generator=generator)
    if random_bits.dtype != torch.uint8 or random_bits.shape != x.shape:
        got = f"{random_bits.dtype} {tuple(random_bits.shape)}"
        raise ConfigError(f"random_bits must be uint8 of shape {tuple(x.shape)}, got {got}")
    return random_bits.to(torch.float32).mul_(1 / 256)


def decode(codes: Tensor, element: ElementFormat) -> Tensor:
    """The fp32 values of uint8 `codes`; exact. Bits above the element's width are ignored."""
    _check_coded(element)
    if codes.dtype != torch.uint8:
        raise ConfigError(f"codes must be uint8, got {codes.dtype}; view the tensor as torch.uint8")
    if element.name in STORAGE_DTYPES:
        # Widening casts of float8 are exact in every torch version.
        return codes.view(STORAGE_DTYPES[element.name]).float()
    table = _decode_table(element).to(codes.device)
    return table[(codes & ((1 << element.bits) - 1)).int()]


def _decode_table(element: ElementFormat) -> Tensor:
    """Value of every code of an element without inf and NaN."""
    codes, first = torch.arange(1 << (element.bits - 1)), 1 << element.mantissa_bits
    binade, mantissa = codes // first, codes % first
    steps = (mantissa + first * (binade > 0)).float()
    values = torch.ldexp(steps * element.min_subnormal, (binade - 1).clamp(min=0))
    return torch.cat((values, -values))


def stochastic_round_bf16(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round fp32 `x` to bf16 at random, up with the probability of the distance from the neighbour below; unbiased.

    Exact values, infinities and NaN stay. What lies beyond bf16's largest number becomes that number, never an
    infinity.
    """
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        raise ConfigError(f"x must be a float32 tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    bits = x.detach().contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    # The lower 16 bits are the distance in units of 2^-16 of a step: adding 16 random bits carries with that
    # probability.
    rounded = (bits + noise).bitwise_and_(-65536).view(torch.float32)
    largest = torch.finfo(torch.bfloat16).max
    return torch.where(x.isfinite(), rounded.clamp_(-largest, largest), x).to(torch.bfloat16)


# ---- packed codes ----


def pack4(codes: Tensor) -> Tensor:
    """Pack 4-bit codes two to a byte along the last dimension, the first one low; an odd end is padded with 0."""
    _check_packable("codes", codes)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    codes = codes & 15
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack4(packed: Tensor, length: int) -> Tensor:
    """The first `length` 4-bit codes of each row that `pack4` packed."""
    _check_packable("packed", packed)
    if packed.shape[-1] != -(-length // 2):
        raise ConfigError(f"packed has {packed.shape[-1]} bytes a row; {length} codes need {-(-length // 2)}")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :length]


def _check_packable(name: str, codes: Tensor) -> None:
    if codes.dtype != torch.uint8 or codes.ndim == 0:
        raise ConfigError(
            f"{name} must be uint8 with a dimension to pack along, got {codes.dtype} {tuple(codes.shape)}"
        )


def pack_codes(codes: Tensor, element: ElementFormat) -> Tensor:
    if element == E2M1:
        return pack4(codes)
    return codes.view(STORAGE_DTYPES.get(element.name, torch.uint8))


def unpack_codes(data: Tensor, element: ElementFormat, length: int) -> Tensor:
    data = data.view(torch.uint8)
    return unpack4(data, length) if element == E2M1 else data


# ---- E8M0: powers of two as a biased exponent ----


def encode_e8m0(x: Tensor) -> Tensor:
    """The byte whose 2^(byte - 127) is `x` rounded up, to 254 at the most; a cast of torch's rounds to nearest.

    The sign is ignored. Zero gives byte 0, infinity and NaN give 255 (NaN).
    """
    check_input("x", x)
    bits = x.detach().float().abs().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # 2^-127 lies among fp32's subnormals, with mantissa 0x400000: byte 0 holds everything up to it, byte 1 is 2^-126.
    carry = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    byte = (exponent + carry.int()).clamp_(max=254)
    return torch.where(exponent == 255, _E8M0_NAN, byte).to(torch.uint8)


def decode_e8m0(byte: Tensor) -> Tensor:
    """2^(byte - 127) in fp32, NaN for 255; exact, byte 0 (2^-127) included."""
    return _power_of_two(byte.view(torch.uint8).int())


def reciprocal_e8m0(byte: Tensor) -> Tensor:
    """2^(127 - byte) in fp32, NaN for 255; exact, byte 254 (2^-127) included."""
    byte = byte.view(torch.uint8).int()
    return _power_of_two(torch.where(byte == _E8M0_NAN, _E8M0_NAN, 254 - byte))


def _power_of_two(biased: Tensor) -> Tensor:
    bits = torch.where(biased == 0, 0x400000, biased << 23)  # 2^-127 is subnormal: its bit stands in the mantissa
    return torch.where(biased == _E8M0_NAN, float("nan"), bits.view(torch.float32))
