"""FP8 with a scale per 128 columns: bit for bit the format's reference."""

import pytest
import torch

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels import quantize_blocks
from deepwell.kernels.quantize_blocks import CONFIGS, quantize_1x128, quantize_1x128_ref


# One block, several, rows and blocks that end inside a program, and no rows.
@pytest.mark.parametrize("shape", [(16, 128), (37, 384), (5, 640), (0, 128)], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_codes_and_scales_are_the_references(device, shape, config):
    x = (torch.randn(shape, device=device) * torch.logspace(-6, 6, shape[1], device=device)).bfloat16()
    if shape[0]:
        x[1, :128] = 0
        x[2, 3], x[3, 130 % shape[1]] = float("nan"), float("-inf")
    q, scale = quantize_1x128(x, config=config)
    ref_q, ref_scale = quantize_1x128_ref(x)
    assert_bitwise_equal(q.view(torch.uint8), ref_q.view(torch.uint8))
    # NaN has many bit patterns; where it stands is what counts.
    assert torch.equal(scale.isnan(), ref_scale.isnan())
    assert_bitwise_equal(scale.nan_to_num(nan=0.0).contiguous(), ref_scale.nan_to_num(nan=0.0).contiguous())


def test_rows_may_lie_apart(device):
    x = torch.randn(24, 512, device=device).bfloat16()
    assert_bitwise_equal(quantize_1x128(x[:, 128:384])[0], quantize_1x128(x[:, 128:384].contiguous())[0])


def test_columns_that_are_no_whole_blocks_are_refused(device):
    with pytest.raises(ConfigError, match="130 columns; 1x128 scales need a multiple of 128"):
        quantize_1x128(torch.zeros(4, 130, device=device))


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_compiles_to_wide_loads_without_spills(config, arch):
    arguments = {
        "x_ptr": torch.bfloat16,
        "q_ptr": torch.float8_e4m3fn,
        "scale_ptr": torch.float32,
        "T": "i32:any",
        "K": "i32",
        "stride_xt": "i32",
        "stride_qt": "i32",
        "FP8_MAX": 448.0,
        "ROWS": config.rows,
        "BLOCKS": config.blocks,
        "BLOCK": 128,
    }
    made = aot.compile_kernel(quantize_blocks._quantize_1x128_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == 0
    assert made.count(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64") > 0
    assert made.count(r"div\.rn\.f32") > 0 and made.count(r"div\.(approx|full)") == 0
