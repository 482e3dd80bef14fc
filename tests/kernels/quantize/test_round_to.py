"""Exact rounding by kernels is the reference's, bit for bit: interpreted on a CPU and compiled on a GPU."""

import pytest
import torch

import aot
from deepwell.errors import ConfigError
from deepwell.formats.hadamard import DEFAULT_SIGNS, hadamard16, inverse_hadamard16
from deepwell.formats.metrics import sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels.gemm.emulated import emulated_mm
from deepwell.kernels.gemm.torch_ops import ops
from deepwell.kernels.quantize import round_to as module
from deepwell.kernels.quantize.round_to import FITS_BF16, round_to, round_to_bf16, round_to_ref


def sample(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Magnitudes over many binades, rows of zeros, and an outlier."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-12, 6, shape, generator=generator)
    x[..., 3, :] = 0.0
    x[..., 1, 5] = 300.0
    return x.to(device, dtype)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "nvfp4_16x16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hadamard", [None, DEFAULT_SIGNS], ids=["plain", "hadamard"])
def test_kernels_round_as_the_reference_does(fmt, dtype, hadamard, device) -> None:
    x = sample(48, 96, device=device, dtype=dtype)
    assert module._has_kernels(x, fmt, hadamard)
    got = round_to(x, fmt, hadamard=hadamard)
    assert got.dtype == torch.float32
    assert torch.equal(got.cpu(), round_to_ref(x.cpu(), fmt, hadamard=hadamard))


def test_leading_dimensions_are_rows(device) -> None:
    x = sample(2, 16, 64, device=device)
    assert torch.equal(round_to(x, "mxfp8").cpu(), round_to_ref(x.cpu(), "mxfp8"))
    # Square blocks of each matrix by itself: left to the reference.
    assert not module._has_kernels(x, "nvfp4_16x16", None)
    assert torch.equal(round_to(x, "nvfp4_16x16").cpu(), round_to_ref(x.cpu(), "nvfp4_16x16"))


def test_ragged_rows_and_other_formats_are_the_references(device) -> None:
    for fmt, width in (("mxfp8", 40), ("nvfp4", 40), ("mxfp4", 64), ("fp8_e4m3_row", 64)):
        x = sample(8, width, device=device)
        assert not module._has_kernels(x, fmt, None)
        assert torch.equal(round_to(x, fmt).cpu(), round_to_ref(x.cpu(), fmt))


def test_random_bits_round_as_the_reference_does_with_the_same_bits(device) -> None:
    x = sample(32, 64, device=device)
    bits = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    got = module._round_nvfp4(x, False, bits.to(device))
    want = quantize(x.cpu(), "nvfp4", rounding="stochastic", generator=bits).dequantize()
    assert torch.equal(got.cpu(), want)


def test_stochastic_rounding_is_unbiased_and_follows_torchs_seed(device) -> None:
    # 0.3 of the way between two neighbours (0.5 and 1): the mean over many draws is the number itself.
    x = torch.full((64, 1024), 0.65)
    x[:, ::16] = 6.0
    x = x.to(device)
    torch.manual_seed(5)
    first = round_to(x, "nvfp4", rounding="stochastic")
    torch.manual_seed(5)
    assert torch.equal(first, round_to(x, "nvfp4", rounding="stochastic"))
    rest = first[x < 1]
    assert set(rest.unique().tolist()) == {0.5, 1.0}
    assert rest.mean().item() == pytest.approx(0.65, abs=0.01)


def test_a_number_that_is_not_finite_stays_visible(device) -> None:
    x = sample(32, 64, device=device)
    x[0, 0] = float("inf")
    for fmt in ("mxfp8", "nvfp4"):
        assert torch.equal(round_to(x, fmt).cpu().isnan(), round_to_ref(x.cpu(), fmt).isnan())
        assert round_to(x, fmt).isnan().any()


def test_the_transform_and_its_inverse_are_the_formats_own(device) -> None:
    # More runs than one program takes, so that the last one is not full.
    x = sample(37, 128, device=device, dtype=torch.float32)
    forth = module._transform(x, DEFAULT_SIGNS, inverse=False)
    assert torch.equal(forth.cpu(), hadamard16(x.cpu()))
    assert torch.equal(module._transform(forth, DEFAULT_SIGNS, inverse=True).cpu(), inverse_hadamard16(forth.cpu()))


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("inverse", [False, True])
def test_the_transform_compiles_for_gpus_without_spilling(arch, inverse) -> None:
    arguments = {
        "x_ptr": torch.float32 if inverse else torch.bfloat16,
        "out_ptr": torch.float32 if inverse else torch.bfloat16,
        "N": "i32",
        "MINUS": 0b1010_0110_0000_1101,
        "INVERSE": inverse,
        "ROWS": module._ROWS,
    }
    made = aot.compile_kernel(module._hadamard_kernel, arguments, arch=arch)
    assert made.spill_bytes == 0 and made.shared_bytes <= aot.MAX_SHARED_BYTES


# ---- rounded numbers in bf16, and their products ----


@pytest.mark.parametrize("fmt", FITS_BF16)
@pytest.mark.parametrize("hadamard", [None, DEFAULT_SIGNS], ids=["plain", "hadamard"])
@pytest.mark.parametrize("width", [96, 40])
def test_bf16_holds_what_is_rounded(fmt, hadamard, width, device) -> None:
    if hadamard is not None and width % 16:
        pytest.skip("the transform takes whole runs")
    x = sample(48, width, device=device)
    values, scale = round_to_bf16(x, fmt, hadamard=hadamard)
    assert values.dtype == torch.bfloat16
    made = values.float().cpu() if scale is None else values.float().cpu() * scale.cpu()
    want = quantize(x.cpu(), fmt, hadamard=hadamard).dequantize(undo_hadamard=False)
    assert torch.equal(made, want)


@pytest.mark.parametrize("fmt", FITS_BF16)
@pytest.mark.parametrize("hadamard", [False, True])
def test_a_product_in_bf16_is_that_of_the_rounded_numbers(fmt, hadamard, device) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(32, 64, device=device).bfloat16(), 0.02 * torch.randn(48, 64, device=device).bfloat16()
    got = ops.emulated_mm(a, b, fmt, "nearest", hadamard, fmt, "nearest")
    signs = DEFAULT_SIGNS if hadamard else None
    left, right = (round_to_ref(t.cpu(), fmt, hadamard=signs).double() for t in (a, b))
    assert got.dtype == torch.float32
    assert sqnr_db(left @ right.T, got.cpu().double()) > 100


def test_products_take_bf16_alone() -> None:
    with pytest.raises(ConfigError, match="emulated_mm takes bf16"):
        emulated_mm(torch.ones(2, 2), None, torch.ones(2, 2), None)
