"""Scale rules by hand: E8M0 at every boundary, the three MX roundings, FP8's fp32 and power-of-two scales."""

import numpy as np
import pytest
import torch

from deepwell.formats.elements import decode_e8m0, encode_e8m0, reciprocal_e8m0
from deepwell.formats.quantize import FLT_MAX, fp8_multiplier, mx_scale_bytes, quantize
from deepwell.formats.spec import E2M1, E2M3, E3M2, E4M3, E5M2


def above(value):
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def below(value):
    return float(np.nextafter(np.float32(value), np.float32(0)))


# ---- E8M0 ----

# Rounding up: a power stays, one ulp above it moves; 2^-127 (mantissa 0x400000) is the last value of byte 0.
UP = [
    (1.0, 127),
    (above(1.0), 128),
    (below(1.0), 127),
    (1.5, 128),
    (0.0, 0),
    (2.0**-149, 0),
    (2.0**-127, 0),
    (above(2.0**-127), 1),
    (below(2.0**-126), 1),
    (2.0**-126, 1),
    (above(2.0**-126), 2),
    (2.0**127, 254),
    (above(2.0**127), 254),
    (FLT_MAX, 254),
    (float("inf"), 255),
    (float("nan"), 255),
]


@pytest.mark.parametrize("value, byte", UP, ids=lambda v: f"{v:.9g}")
def test_e8m0_rounds_up_at_each_boundary(value, byte, device):
    assert encode_e8m0(torch.tensor([value], device=device)).item() == byte


def test_rounding_up_is_not_the_cast_of_torch():
    # torch's own cast rounds to nearest: 1.25 -> 1 and 1.5 -> 2.
    x = torch.tensor([1.25, 1.5])
    assert x.to(torch.float8_e8m0fnu).view(torch.uint8).tolist() == [127, 128]
    assert encode_e8m0(x).tolist() == [128, 128]


def test_every_e8m0_byte_decodes_and_its_reciprocal_is_exact(device):
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    values, inverse = decode_e8m0(byte).double().cpu(), reciprocal_e8m0(byte).double().cpu()
    exponent = torch.arange(255, dtype=torch.float64) - 127
    assert torch.equal(values[:255], torch.exp2(exponent))
    assert torch.equal(inverse[:255], torch.exp2(-exponent))  # byte 254: 2^-127, an fp32 subnormal
    assert values[255].isnan() and inverse[255].isnan()


# ---- MX: which byte a largest magnitude gives ----

# emax: 448 = 1.75 * 2^8 fills a block at scale 1; the floor rule saturates what lies in (448, 512).
MX_BYTES = [
    (E4M3, 448.0, "rceil", 127),
    (E4M3, above(448.0), "rceil", 128),
    (E4M3, below(448.0), "rceil", 127),
    (E4M3, 224.0, "rceil", 126),
    (E4M3, 256.0, "rceil", 127),
    (E4M3, 448.0, "floor", 127),
    (E4M3, below(512.0), "floor", 127),
    (E4M3, 512.0, "floor", 128),
    (E4M3, below(256.0), "floor", 126),
    # even: 1.9375 = 1.1111b is the tie of a three-bit mantissa and carries into the next binade.
    (E4M3, 256 * 1.9375, "even", 128),
    (E4M3, below(256 * 1.9375), "even", 127),
    (E4M3, 256.0, "even", 127),
    (E5M2, 57344.0, "rceil", 127),
    (E5M2, above(57344.0), "rceil", 128),
    (E5M2, 32768 * 1.875, "even", 128),
    (E5M2, below(32768 * 1.875), "even", 127),
    (E3M2, 28.0, "rceil", 127),
    (E3M2, 16.0, "floor", 127),
    (E2M3, 7.5, "rceil", 127),
    (E2M3, above(7.5), "rceil", 128),
    (E2M1, 6.0, "rceil", 127),
    (E2M1, above(6.0), "rceil", 128),
    (E2M1, below(8.0), "floor", 127),
    (E2M1, 7.0, "even", 128),
    (E2M1, below(7.0), "even", 127),
    # the two ends of fp32
    (E4M3, FLT_MAX, "rceil", 247),
    (E4M3, FLT_MAX, "floor", 246),
    (E4M3, FLT_MAX, "even", 247),
    (E2M1, FLT_MAX, "rceil", 253),
    (E4M3, 2.0**-119, "rceil", 0),  # / 448 lies below 2^-127: the smallest scale there is
    (E4M3, 2.0**-118, "rceil", 1),  # / 448 = 1.14 * 2^-127
    (E4M3, 2.0**-149, "rceil", 0),
    (E4M3, 2.0**-149, "floor", 0),
    (E4M3, 2.0**-149, "even", 0),
    (E4M3, 0.0, "rceil", 0),
    (E4M3, 0.0, "floor", 0),
    (E4M3, 0.0, "even", 0),
]


@pytest.mark.parametrize("element, amax, rule, byte", MX_BYTES, ids=lambda v: getattr(v, "name", str(v)))
def test_the_mx_scale_byte_by_hand(element, amax, rule, byte, device):
    assert mx_scale_bytes(torch.tensor([amax], device=device), element, rule).item() == byte


@pytest.mark.parametrize("rule", ["rceil", "floor", "even"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_inf_or_nan_makes_the_scale_nan(rule, bad, device):
    assert mx_scale_bytes(torch.tensor([bad], device=device), E4M3, rule).item() == 255


def test_round_up_never_saturates_and_floor_does():
    # 480 in a block: the floor rule keeps scale 1 and clamps to 448, round-up takes scale 2 and keeps 480.
    x = torch.full((1, 32), 480.0)
    assert quantize(x, "mxfp8", scale_rounding="floor").dequantize().unique().tolist() == [448.0]
    assert quantize(x, "mxfp8").dequantize().unique().tolist() == [480.0]


# ---- FP8 ----


def test_the_fp8_multiplier_by_hand(device):
    tiny = 1e-40
    amax = torch.tensor([448.0, 1.0, 0.0, 3.0, tiny, FLT_MAX, float("inf"), float("nan")], device=device)
    got = fp8_multiplier(amax, E4M3, pow2=False).cpu()
    third = float(np.float32(448.0) / np.float32(3.0))
    smallest = float(np.float32(448.0) / np.float32(FLT_MAX))
    assert got[:6].tolist() == [1.0, 448.0, 1.0, third, FLT_MAX, smallest]
    assert got[6:].isnan().all()


def test_the_fp8_multiplier_is_one_ieee_division(device):
    # torch computes `number / tensor` as reciprocal times number, which is a bit off for some of these.
    amax = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 0.5
    want = np.float32(448.0) / amax.numpy()
    assert np.array_equal(fp8_multiplier(amax.to(device), E4M3, pow2=False).cpu().numpy(), want)
    assert not np.array_equal((448.0 / amax).numpy(), want)


def test_power_of_two_multipliers_round_down_so_that_scales_round_up(device):
    amax = torch.tensor([448.0, above(448.0), below(448.0), 1.0, 0.0, 1e-45, float("inf")], device=device)
    got = fp8_multiplier(amax, E4M3, pow2=True).cpu()
    assert got[:6].tolist() == [1.0, 0.5, 1.0, 256.0, 1.0, 2.0**127]
    assert got[6].isnan()


def test_power_of_two_scales_are_the_mx_scales(device):
    # For magnitudes away from E8M0's smallest byte, an FP8 1x128 pow2 scale and MXFP8's round-up scale are one number.
    amax = torch.exp(torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * 20).to(device)
    assert torch.equal(fp8_multiplier(amax, E4M3, pow2=True), reciprocal_e8m0(mx_scale_bytes(amax, E4M3, "rceil")))
