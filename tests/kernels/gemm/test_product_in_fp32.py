"""Products in fp32 of bf16 operands: how near the halves of an fp32 operand are to it, and what tensor cores make."""

import pytest
import torch

from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.gemm import product_in_fp32 as P

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
SIZES = [(64, 8, 24), (8, 64, 24), (1, 1, 1), (0, 4, 8), (5, 0, 3)]


def operands(m, k, n, dtype=torch.float32, device="cpu"):
    torch.manual_seed(m)
    loud = torch.exp2(torch.randint(-12, 12, (m, k)).float())
    return (torch.randn(m, k) * loud).to(device, dtype), torch.randn(k, n).to(device, torch.bfloat16)


def error(got, a, b):
    """Of each result, relative to the sum of its products' magnitudes."""
    a, b = a.double(), b.double()
    return ((got.double() - a @ b).abs() / (a.abs() @ b.abs()).clamp(min=1e-30)).max().item() if got.numel() else 0.0


def test_halves_are_the_number_to_2_to_the_minus_17():
    x = torch.cat([torch.randn(1 << 16), torch.tensor([0.0, -0.0, 1 + 2.0**-9 + 2.0**-18, 3e38, -1e-30])])
    high, low = P.halves(x)
    assert high.dtype == low.dtype == torch.bfloat16
    left = (x.double() - high.double() - low.double()).abs()
    assert (left <= 2.0**-17 * x.double().abs()).all()
    assert left.max() > 0  # and no nearer: three would be needed
    exact = torch.randn(64).bfloat16()
    assert_bitwise_equal(P.halves(exact.float())[0], exact, "a number that is one half")


@pytest.mark.parametrize("size", SIZES)
def test_the_product_of_halves_is_as_near(size):
    a, b = operands(*size)
    exact = P.product_of_halves(a, b, lambda left, right: left.double() @ right.double())
    assert exact.shape == (size[0], size[2]) and error(exact, a, b) <= 2.0**-17
    if 0 not in size and a.numel() > 1:
        alone = P.halves(a)[0].double() @ b.double()
        assert error(alone, a, b) > 2.0**-14  # what the low half is for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_it_is_torchs_product(dtype):
    a, b = operands(16, 8, 4, dtype)
    assert_bitwise_equal(P.product_in_fp32(a, b), a.float() @ b.float())


def test_operands_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match="must be"):
        P.product_in_fp32(torch.zeros(2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [*SIZES, (4096, 32, 2880), (32, 4096, 2880)])
def test_tensor_cores_give_sums_in_fp32(device, dtype, size):
    a, b = operands(*size, dtype, device)
    got = P.product_in_fp32(a, b)
    assert got.dtype == torch.float32 and got.is_contiguous() and error(got, a, b) <= 2.0**-17
    assert error(P.product_in_fp32(a.T.contiguous().T, b.T.contiguous().T), a, b) <= 2.0**-17
