"""The random Hadamard transform: against the explicit matrix, its inverse, and its place in the quantizers."""

import random

import pytest
import torch

from deepwell.errors import ConfigError
from deepwell.formats.hadamard import DEFAULT_SIGNS, hadamard16, inverse_hadamard16
from deepwell.formats.metrics import sqnr_db
from deepwell.formats.quantize import quantize


def random_signs(seed):
    return tuple(random.Random(seed).choices((1, -1), k=16))


def matrix(signs):
    """diag(signs) H / 4 in float64, H from the definition: (-1)^(number of common bits of row and column)."""
    h = [[(-1) ** bin(i & j).count("1") for j in range(16)] for i in range(16)]
    return torch.diag(torch.tensor(signs, dtype=torch.float64)) @ torch.tensor(h, dtype=torch.float64) / 4


@pytest.mark.parametrize("signs", [DEFAULT_SIGNS, random_signs(0), random_signs(1)])
def test_it_is_the_matrix_product(signs, device):
    # Small integers: every sum is exact, so the comparison is too.
    x = torch.randint(-64, 65, (5, 48), generator=torch.Generator().manual_seed(0)).float()
    want = (x.double().unflatten(-1, (3, 16)) @ matrix(signs)).flatten(-2)
    assert torch.equal(hadamard16(x.to(device), signs).cpu().double(), want)


def test_the_inverse_brings_back_what_went_in(device):
    x = torch.randint(-64, 65, (4, 32, 3), generator=torch.Generator().manual_seed(1)).float().to(device)
    for axis, signs in ((1, DEFAULT_SIGNS), (-2, random_signs(5))):
        assert torch.equal(inverse_hadamard16(hadamard16(x, signs, axis), signs, axis), x)


def test_another_axis_and_strides_do_not_matter(device):
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(2)).to(device)
    assert torch.equal(hadamard16(x, axis=0), hadamard16(x.T.contiguous()).T)


def test_bf16_is_rounded_once(device):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    got = hadamard16(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, hadamard16(x.float()).bfloat16())


def test_a_product_of_two_transformed_operands_is_the_product(device):
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randint(-8, 9, (12, 64), generator=generator).float().to(device) for _ in range(2))
    assert torch.equal(hadamard16(a) @ hadamard16(b).T, a @ b.T)


def test_quantize_keeps_the_signs_and_dequantize_undoes_them(device):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(7)).to(device)
    signs = random_signs(9)
    q = quantize(x, "nvfp4", axis=0, hadamard=signs)
    assert q.hadamard_signs == signs
    turned = quantize(hadamard16(x, signs, 0), "nvfp4", axis=0)
    assert torch.equal(q.data, turned.data)
    assert torch.equal(q.dequantize(undo_hadamard=False), turned.dequantize())
    assert sqnr_db(x, q.dequantize()) > 18


def test_the_global_scale_comes_after_the_transform(device):
    x = torch.zeros(1, 16, device=device)
    x[0, 0] = 16.0  # spreads to sixteen values of 4
    q = quantize(x, "nvfp4", hadamard=DEFAULT_SIGNS)
    assert q.global_scale.item() == pytest.approx(4 / 2688)


def test_wrong_signs_and_ragged_axes_are_refused():
    with pytest.raises(ConfigError, match=r"signs must be 16 values of \+1 and -1"):
        hadamard16(torch.ones(16), (1, 2))
    with pytest.raises(ConfigError, match=r"x has 20 elements along axis -1; .* needs a multiple of 16"):
        hadamard16(torch.ones(2, 20))
    with pytest.raises(ConfigError, match="axis 3 is not an axis"):
        hadamard16(torch.ones(2, 16), axis=3)
    with pytest.raises(ConfigError, match="multiple of 16"):
        quantize(torch.ones(2, 20), "nvfp4", hadamard=DEFAULT_SIGNS)
