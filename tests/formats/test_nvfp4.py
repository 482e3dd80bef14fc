"""NVFP4 by hand and against a plain numpy quantizer that was written for these tests alone."""

import ml_dtypes
import numpy as np
import pytest
import torch

from deepwell.errors import ConfigError
from deepwell.formats.quantize import FLT_MAX, quantize

F = np.float32
SIXTH = F(1) / F(6)


def nvfp4_oracle(x, rows):
    """Codes, block scale bytes and decode scale of a 2-D fp32 array, one block of `rows` x 16 after the other."""
    amax = np.abs(x).max()
    with np.errstate(over="ignore"):
        s_enc = F(1) if amax == 0 else min(F(2688) / amax, F(FLT_MAX))
    s_dec = F(1) / s_enc
    height, width = x.shape
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-height // rows), -(-width // 16)), np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = (slice(i * rows, (i + 1) * rows), slice(j * 16, (j + 1) * 16))
            block = x[where]
            s = np.minimum(np.abs(block).max() * (s_enc * SIXTH), F(448)).astype(ml_dtypes.float8_e4m3fn)
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                enc = min(F(1) / (s.astype(F) * s_dec), F(FLT_MAX))
                scaled = np.clip(block * enc, F(-6), F(6))
            codes[where] = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
            scales[i, j] = s.view(np.uint8)
    return codes, scales, s_dec


def inputs(name):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((80, 112)).astype(F)
    return {
        "gauss": x,
        "heavy tails": x * np.exp(2 * rng.standard_normal(x.shape)).astype(F),
        "rows over 40 octaves": np.ldexp(x, np.linspace(-40, 0, 80).astype(int)[:, None]).astype(F),
        "elements over 40 octaves": np.ldexp(x, rng.integers(-40, 1, x.shape)).astype(F),
        "tiny": x * F(1e-38),
        "subnormal": x * F(1e-43),
        "huge": x * F(5e37),
        "ragged": x[:37, :53],
        "one element": x[:1, :1],
        "zeros": np.zeros_like(x),
        "a zero block": np.where(np.arange(112) < 16, 0, x).astype(F),
    }[name]


CASES = [
    "gauss",
    "heavy tails",
    "rows over 40 octaves",
    "elements over 40 octaves",
    "tiny",
    "subnormal",
    "huge",
    "ragged",
    "one element",
    "zeros",
    "a zero block",
]


@pytest.mark.parametrize("rows, fmt", [(1, "nvfp4"), (16, "nvfp4_16x16")])
@pytest.mark.parametrize("case", CASES)
def test_bits_equal_the_numpy_oracle(case, rows, fmt, device):
    x = inputs(case)
    codes, scales, s_dec = nvfp4_oracle(x, rows)
    q = quantize(torch.from_numpy(x).to(device), fmt)
    assert np.array_equal(q.scales.view(torch.uint8).cpu().numpy(), scales)
    assert np.array_equal(q.codes().cpu().numpy(), codes)
    assert q.global_scale.item() == s_dec


def test_one_block_by_hand(device):
    # amax 6 in the tensor: S_enc = 448, the block's scale is 448, the encode factor 1: codes are E2M1 of x itself.
    x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.3, -0.8, -5.1, 0, 0.5, 1.0, 1.5, 2.0]])
    q = quantize(x.to(device), "nvfp4")
    assert q.global_scale.item() == float(F(1) / F(448))
    assert q.scales.float().item() == 448
    assert q.codes().tolist() == [[0, 2, 2, 4, 4, 6, 6, 7, 9, 10, 15, 0, 1, 2, 3, 4]]
    # Two to a byte, the first in the low nibble.
    assert q.data.tolist() == [[0x20, 0x42, 0x64, 0x76, 0xA9, 0x0F, 0x21, 0x43]]


def test_the_association_of_the_scale_product_matters():
    # amax_block * (S_enc / 6) and (amax_block / 6) * S_enc round apart; on E4M3 ties the two bytes differ.
    rng = np.random.default_rng(0)
    differs = 0
    for _ in range(400):
        amax_tensor = F(rng.uniform(1, 2))
        s_enc = F(2688) / amax_tensor
        # A block maximum whose scale falls on the midpoint of two E4M3 values: 17 * 2^k / 16 has one bit too many.
        amax_block = F(17 * 8 / float(s_enc * SIXTH))
        ours = (amax_block * (s_enc * SIXTH)).astype(ml_dtypes.float8_e4m3fn)
        other = ((amax_block * SIXTH) * s_enc).astype(ml_dtypes.float8_e4m3fn)
        if ours.view(np.uint8) == other.view(np.uint8):
            continue
        differs += 1
        x = torch.zeros(1, 32)
        x[0, 0], x[0, 16] = float(amax_tensor), float(amax_block)
        assert quantize(x, "nvfp4").scales.view(torch.uint8)[0, 1].item() == ours.view(np.uint8)
    assert differs > 10


def test_small_blocks_have_subnormal_and_zero_scales(device):
    # Scales of 448 * 2^-k: down to E4M3's smallest 2^-9 they live, below half of it they are zero. No lower clamp.
    exponents = torch.arange(0, 24, dtype=torch.float32)
    x = torch.zeros(24, 16)
    x[:, 3] = 6 * torch.exp2(-exponents)
    q = quantize(x.to(device), "nvfp4")
    scales = q.scales.float().cpu().flatten()
    exact = 448 * torch.exp2(-exponents)
    assert torch.equal(scales[:15], exact[:15])  # normal numbers
    assert scales[18].item() == 2.0**-9  # 448 * 2^-18 = 0.875 * 2^-9, a subnormal
    assert scales[19].item() == 0.0  # 0.4375 * 2^-9
    # A zero scale drives the codes to the maximum and decodes to zero: exactly what the formula says.
    assert q.codes()[19, 3].item() == 7
    assert q.dequantize()[19:].abs().max().item() == 0


def test_zero_tensor_has_scale_one_and_zero_codes(device):
    q = quantize(torch.zeros(4, 32, device=device), "nvfp4")
    assert q.global_scale.item() == 1.0
    assert q.scales.view(torch.uint8).max().item() == 0
    assert q.data.max().item() == 0
    assert q.dequantize().abs().max().item() == 0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_16x16"])
def test_an_inf_or_nan_anywhere_makes_the_tensor_nan(bad, fmt, device):
    x = torch.ones(32, 32, device=device)
    x[5, 7] = bad
    q = quantize(x, fmt)
    assert q.global_scale.isnan().item()
    assert (q.scales.view(torch.uint8) == 0x7F).all()
    assert (q.codes() == 7).all()
    assert q.dequantize().isnan().all()


def test_a_given_amax_replaces_the_tensors_own(device):
    # What a tensor-parallel rank does: the maximum over all ranks, not its own.
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    whole = quantize(x, "nvfp4")
    half = quantize(x[:32], "nvfp4", amax=x.abs().max())
    assert torch.equal(half.data, whole.data[:32])
    assert torch.equal(half.scales.view(torch.uint8), whole.scales.view(torch.uint8)[:32])
    # One that is too small: scales saturate at 448.
    small = quantize(x, "nvfp4", amax=x.abs().max() / 4)
    assert small.scales.float().max().item() == 448
    with pytest.raises(ConfigError, match=r"amax must hold one number, got shape \(2,\)"):
        quantize(x, "nvfp4", amax=torch.ones(2))


def test_square_blocks_give_one_set_of_codes_for_both_directions(device):
    x = torch.randn(50, 70, generator=torch.Generator().manual_seed(1)).to(device)
    row, column = quantize(x, "nvfp4_16x16"), quantize(x, "nvfp4_16x16", axis=0)
    assert torch.equal(row.codes().T, column.codes())
    assert torch.equal(row.scales.view(torch.uint8).T, column.scales.view(torch.uint8))
    assert torch.equal(row.dequantize(), column.dequantize())


def test_stochastic_rounding_is_unbiased_through_the_whole_quantizer(device):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).to(device)
    generator = torch.Generator(device).manual_seed(3)
    n = 400
    draws = torch.stack(
        [quantize(x, "nvfp4", rounding="stochastic", generator=generator).dequantize() for _ in range(n)]
    ).double()
    # Only neighbours: the spread of each element is at most one step of its block's grid.
    nearest = quantize(x, "nvfp4")
    step = nearest.scales.float().repeat_interleave(16, 1) * nearest.global_scale * 2
    assert ((draws.amax(0) - draws.amin(0)) <= step.double() * (1 + 1e-6)).all()
    # A block's maximum may scale to a hair beyond 6 and saturates there: leave out what lies beyond the grid's end.
    inside = x.double().abs() < step.double() * 3 * (1 - 1e-6)
    error, sigma = (draws.mean(0) - x.double())[inside], (draws.var(0)[inside] / n).sqrt()
    assert abs(float(error.sum())) < 4 * float(sigma.square().sum().sqrt())


def test_given_random_bits_follow_the_axis(device):
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(4)).to(device)
    bits = torch.randint(0, 256, x.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5)).to(device)
    down = quantize(x, "nvfp4", axis=0, rounding="stochastic", generator=bits)
    along = quantize(x.T.contiguous(), "nvfp4", rounding="stochastic", generator=bits.T.contiguous())
    assert torch.equal(down.data, along.data)
