"""Element rounding against ml_dtypes over every bf16 value and two million fp32 values; packing; hand vectors."""

import functools

import ml_dtypes
import numpy as np
import pytest
import torch

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.elements import (
    decode,
    encode,
    encode_stochastic,
    nan_code,
    pack4,
    stochastic_round_bf16,
    unpack4,
)
from deepwell.formats.spec import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0

ORACLES = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E2M1: ml_dtypes.float4_e2m1fn,
}
elements = pytest.mark.parametrize("element", ORACLES, ids=lambda element: element.name)


@functools.cache
def every_bf16():
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


@functools.cache
def two_million_fp32():
    """Every exponent alike, subnormals too: random bits are log-uniform. Infinities and NaN are for hand vectors."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 32, 2_000_000, dtype=np.uint32).view(np.float32)
    near_one = np.ldexp(rng.standard_normal(1_000_000), rng.integers(-20, 20, 1_000_000)).astype(np.float32)
    x[:1_000_000] = near_one  # half of them where the formats have their numbers
    return torch.from_numpy(x[np.isfinite(x)])


def positive_values(element):
    """All finite magnitudes of an element, from its own definition by way of ml_dtypes."""
    codes = np.arange(1 << (element.bits - 1), dtype=np.uint8).view(ORACLES[element]).astype(np.float32)
    return codes[np.isfinite(codes)]


def ties(element):
    """Every midpoint of two neighbours, one fp32 ulp to either side of it, and the values themselves; both signs."""
    values = positive_values(element)
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    around = [f(middle, np.float32(limit)) for f, limit in ((np.nextafter, 0), (np.nextafter, np.inf))]
    magnitudes = np.concatenate([values, middle, *around])
    return torch.from_numpy(np.concatenate([magnitudes, -magnitudes]))


def oracle_codes(x, element):
    """ml_dtypes' rounding of x clamped to the format's range: saturation is our rule, the rounding is theirs."""
    clamped = np.clip(np.nan_to_num(x.float().cpu().numpy(), nan=0.0), -element.max, element.max)
    return torch.from_numpy(clamped.astype(ORACLES[element]).view(np.uint8).copy())


@elements
def test_every_bf16_value_rounds_as_ml_dtypes_does(element, device):
    x = every_bf16().to(device)
    got = encode(x, element).cpu()
    is_nan = x.cpu().isnan()
    assert int((got != oracle_codes(x, element))[~is_nan].sum()) == 0
    assert (got[is_nan] == nan_code(element)).all()


@elements
def test_two_million_fp32_values_round_as_ml_dtypes_does(element, device):
    x = two_million_fp32().to(device)
    assert int((encode(x, element).cpu() != oracle_codes(x, element)).sum()) == 0


@elements
def test_ties_go_to_the_even_code(element, device):
    x = ties(element).to(device)
    assert int((encode(x, element).cpu() != oracle_codes(x, element)).sum()) == 0


def test_e2m1_thresholds_by_hand(device):
    # The seven ties of the format, ties to even code: 0.25->0, 0.75->1, 1.25->1, 1.75->2, 2.5->2, 3.5->4, 5->4.
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, 6.0, 7.0, -0.25, -5.0], device=device)
    want = [0, 1, 1, 2, 2, 4, 4, 6, 6, 6, -0.0, -4]
    assert decode(encode(x, E2M1), E2M1).tolist() == want


# torch 2.11 gives NaN from 464 on, ml_dtypes too; 464 itself is the tie with the missing 480.
@pytest.mark.parametrize(
    "element, x, code",
    [
        (E4M3, 464.0, 0x7E),
        (E4M3, 465.0, 0x7E),
        (E4M3, 480.0, 0x7E),
        (E4M3, -1e30, 0xFE),
        (E4M3, float("inf"), 0x7E),
        (E4M3, float("-inf"), 0xFE),
        (E4M3, float("nan"), 0x7F),
        (E5M2, 61440.0, 0x7B),
        (E5M2, float("inf"), 0x7B),
        (E5M2, float("-inf"), 0xFB),
        (E5M2, float("nan"), 0x7F),
        (E3M2, 1e9, 0x1F),
        (E3M2, float("nan"), 0x1F),
        (E2M3, float("-inf"), 0x3F),
        (E2M3, float("nan"), 0x1F),
        (E2M1, 1e9, 7),
        (E2M1, float("-inf"), 15),
        (E2M1, float("nan"), 7),
        (E2M1, -0.0, 8),
        (E4M3, 2.0**-10, 0),  # half of the smallest: a tie with zero
        (E4M3, 1.5 * 2.0**-10, 1),
        (E4M3, 1e-45, 0),
    ],
    ids=str,
)
def test_out_of_range_values_follow_the_stated_rule(element, x, code, device):
    assert encode(torch.tensor([x], device=device), element).item() == code


def test_the_sign_of_a_nan_does_not_matter():
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    assert negative_nan.isnan().all()
    for element in ORACLES:
        assert encode(negative_nan, element).item() == nan_code(element)


@elements
def test_every_code_decodes_to_its_value_and_encodes_back(element, device):
    codes = torch.arange(1 << element.bits, dtype=torch.uint8, device=device)
    values = decode(codes, element)
    want = codes.cpu().numpy().view(ORACLES[element]).astype(np.float32)
    assert np.array_equal(values.cpu().numpy(), want, equal_nan=True)
    finite = values.isfinite()
    assert torch.equal(encode(values[finite], element), codes[finite])


def test_wrong_inputs_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"x has dtype torch\.float64"):
        encode(torch.zeros(2, dtype=torch.float64), E4M3)
    with pytest.raises(ConfigError, match=r"x must be a torch\.Tensor, got list"):
        encode([1.0], E4M3)
    with pytest.raises(UnsupportedError, match="'bf16' has no byte codes"):
        encode(torch.zeros(2), BF16)
    with pytest.raises(UnsupportedError, match="'e8m0' has no byte codes"):
        encode(torch.zeros(2), E8M0)
    with pytest.raises(ConfigError, match="codes must be uint8"):
        decode(torch.zeros(2), E4M3)


def test_strided_inputs_and_gradients_do_not_matter():
    x = torch.randn(8, 10)
    assert torch.equal(encode(x.T[::2], E2M1), encode(x.T[::2].contiguous(), E2M1))
    assert torch.equal(encode(x.clone().requires_grad_(), E4M3), encode(x, E4M3))


# ---- packing ----


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64])
def test_pack4_puts_the_first_code_low_and_comes_back(length, device):
    codes = torch.randint(0, 16, (3, length), dtype=torch.uint8, device=device)
    packed = pack4(codes)
    assert packed.shape == (3, (length + 1) // 2)
    assert torch.equal(unpack4(packed, length), codes)


def test_pack4_by_hand():
    # 1, 2 -> 0x21; an odd end has 0 above it.
    assert pack4(torch.tensor([1, 2, 15], dtype=torch.uint8)).tolist() == [0x21, 0x0F]


def test_packing_refuses_what_does_not_fit():
    with pytest.raises(ConfigError, match="5 codes need 3"):
        unpack4(torch.zeros(2, dtype=torch.uint8), 5)
    with pytest.raises(ConfigError, match="codes must be uint8"):
        pack4(torch.zeros(4, dtype=torch.int32))


# ---- stochastic rounding ----


@elements
def test_stochastic_rounding_gives_one_of_the_two_neighbours(element, device):
    values = torch.from_numpy(positive_values(element))
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(1)) * 1.2 * element.max
    x = torch.cat([x, x * 2.0**-6, -x])
    got = decode(encode_stochastic(x.to(device), element), element).cpu()
    magnitude = x.abs().clamp(max=element.max)
    above = torch.searchsorted(values, magnitude)  # first value >= x
    upper = values[above]
    lower = torch.where(upper == magnitude, upper, values[(above - 1).clamp(min=0)])
    assert ((got.abs() == lower) | (got.abs() == upper)).all()
    assert (got.signbit() == x.signbit()).all()


@elements
def test_stochastic_rounding_leaves_exact_values_alone(element, device):
    codes = torch.arange(1 << element.bits, dtype=torch.uint8, device=device)
    values = decode(codes, element)
    codes, values = codes[values.isfinite()], values[values.isfinite()]
    for seed in range(20):
        generator = torch.Generator(device).manual_seed(seed)
        assert torch.equal(encode_stochastic(values, element, generator=generator), codes)
    # The largest draw there is must not push an exact value up either.
    highest = torch.full_like(codes, 255)
    assert torch.equal(encode_stochastic(values, element, random_bits=highest), codes)


# Between 0 and the first step, in the subnormals, across a binade, in the widest step; E2M1's grid.
@pytest.mark.parametrize("value", [0.01, 0.1, 0.4, 0.7, 1.3, 1.9, 2.2, 3.9, 4.1, 5.9, -2.7])
def test_stochastic_rounding_to_e2m1_is_unbiased(value, device):
    n = 200_000
    generator = torch.Generator(device).manual_seed(2)
    got = decode(encode_stochastic(torch.full((n,), value, device=device), E2M1, generator=generator), E2M1).double()
    x = float(torch.tensor(value))
    low, high = sorted({float(got.min()), float(got.max())})
    sigma = ((x - low) * (high - x) / n) ** 0.5
    assert low < x < high
    assert abs(float(got.mean()) - x) < 4 * sigma


@elements
def test_stochastic_rounding_is_unbiased_over_many_values(element, device):
    x = torch.randn(4_000, generator=torch.Generator().manual_seed(3)).to(device) * element.max / 8
    generator = torch.Generator(device).manual_seed(4)
    n = 256
    draws = encode_stochastic(x.expand(n, -1).contiguous(), element, generator=generator)
    got = decode(draws, element).double()
    inside = x.abs() <= element.max
    error = (got.mean(0) - x.double())[inside].sum()
    # Independent draws: the variance of the sum is the sum of the variances of the means.
    sigma = (got.var(0)[inside] / n).sum().sqrt()
    assert abs(float(error)) < 4 * float(sigma)


def test_stochastic_rounding_repeats_with_its_seed(device):
    x = torch.randn(1000, device=device)
    first, again, other = (
        encode_stochastic(x, E2M1, generator=torch.Generator(device).manual_seed(seed)) for seed in (5, 5, 6)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_given_random_bits_decide_as_the_hardware_formula_says(device):
    # t = |x| + u * step, then down to the grid of t: all 256 draws for points that cross a binade, and saturation.
    bits = torch.arange(256, dtype=torch.uint8, device=device)
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for x in (0.3, 1.75, 1.99, 2.5, 3.01, 3.99, 5.5, 6.0, 9.0):
        got = decode(encode_stochastic(torch.full((256,), x, device=device), E2M1, random_bits=bits), E2M1).tolist()
        x32 = min(float(torch.tensor(x)), 6.0)
        step = 0.5 if x32 < 2 else 1 if x32 < 4 else 2
        want = [max(v for v in grid if v <= min(x32 + u / 256 * step, 6.0)) for u in range(256)]
        assert got == want


def test_stochastic_nan_and_infinity_follow_the_rule_of_rounding():
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e30])
    assert encode_stochastic(x, E2M1).tolist() == [7, 7, 15, 7]
    assert encode_stochastic(x, E4M3).tolist() == [0x7F, 0x7E, 0xFE, 0x7E]


def test_random_bits_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match=r"random_bits must be uint8 of shape \(4,\)"):
        encode_stochastic(torch.zeros(4), E2M1, random_bits=torch.zeros(3, dtype=torch.uint8))


# ---- stochastic rounding to bf16 ----


def test_bf16_stochastic_rounding_is_unbiased_and_keeps_to_neighbours(device):
    x = torch.tensor([1 + 2**-9, 1.001, -3.3, 1e-40, 2.9e38, -7e-5], device=device)
    n = 100_000
    generator = torch.Generator(device).manual_seed(7)
    got = stochastic_round_bf16(x.expand(n, -1).contiguous(), generator).double()
    low, high = got.min(0).values, got.max(0).values
    x64 = x.double()
    assert (low <= x64).all() and (x64 <= high).all()
    assert all(len(got[:, i].unique()) == 2 for i in range(len(x)))
    sigma = ((x64 - low) * (high - x64) / n).sqrt()
    assert ((got.mean(0) - x64).abs() < 4 * sigma).all()


def test_bf16_stochastic_rounding_leaves_every_bf16_value_alone(device):
    x = every_bf16().to(device)
    got = stochastic_round_bf16(x.float())
    same = (got == x) | (got.isnan() & x.isnan())
    assert same.all()


def test_bf16_stochastic_rounding_never_makes_an_infinity():
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest]).repeat(1000)
    assert stochastic_round_bf16(x).abs().eq(torch.finfo(torch.bfloat16).max).all()


def test_bf16_stochastic_rounding_wants_float32():
    with pytest.raises(ConfigError, match=r"x must be a float32 tensor, got torch\.bfloat16"):
        stochastic_round_bf16(torch.zeros(2, dtype=torch.bfloat16))
