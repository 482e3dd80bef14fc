"""A tensor times a number on its device: the product in fp32, rounded once."""

import pytest
import torch

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.head import scale_by_scalar as S


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [1.0, 1 / 3, -(2.0**-20), 0.0, float("inf"), float("nan")])
def test_every_element_is_the_fp32_product_rounded_once(everywhere, dtype, factor):
    # More than one program, the last of them ragged.
    x = torch.randn(3, 2801, device=everywhere).to(dtype)
    number = torch.tensor(factor, device=everywhere)
    y = S.scale_by(x, number)
    if number.isnan():
        assert bool(y.isnan().all())  # of any sign and payload
    else:
        # Not torch's own: on a GPU it rounds the number to the tensor's dtype first.
        assert_bitwise_equal(y, S.scale_by_ref(x, number))


def test_what_lies_in_pieces_or_is_nothing_is_scaled_too(everywhere):
    x = torch.randn(8, 6, device=everywhere)
    two = torch.tensor([2.0], device=everywhere)
    assert_bitwise_equal(S.scale_by(x.T, two), x.T * 2)
    assert S.scale_by(x[:0], two).shape == (0, 6)


def test_more_than_one_number_is_refused():
    with pytest.raises(ConfigError, match=r"factor must be one number on cpu, got \(2,\)"):
        S.scale_by(torch.ones(4), torch.ones(2))


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_elements_are_read_and_written_sixteen_bytes_at_a_time(arch):
    pointers = {"x_ptr": torch.bfloat16, "factor_ptr": torch.float32, "y_ptr": torch.bfloat16}
    made = aot.compile_kernel(S._scale_kernel, {**pointers, "numel": "i32", "BLOCK": 4096}, arch=arch, num_warps=8)
    assert made.count(r"ld\.global\S*\.v4\.b32") == made.count(r"st\.global\S*\.v4\.b32") == 2
