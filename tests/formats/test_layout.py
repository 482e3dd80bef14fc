"""The scale layout of Blackwell's tensor cores against NVIDIA's own functions."""

import pytest
import torch

from deepwell.errors import ConfigError
from deepwell.formats.layout import padded_shape, swizzle, unswizzle

NVMATH = {"mxfp8": ("MXFP8", 32), "nvfp4": ("NVFP4", 16)}
# One tile; ragged rows; ragged columns; one scale; several tiles each way, ragged in both.
SHAPES = [(128, 4), (130, 4), (128, 5), (1, 1), (300, 13)]


@pytest.fixture
def nvmath_helpers():
    """NVIDIA's own functions; a GPU host may lack them, `make test` may not (tests/test_repository.py)."""
    return pytest.importorskip("nvmath.linalg.advanced.helpers.matmul")


def numbered(*shape):
    """Scales that never repeat nearby, so that a misplaced one shows."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 251 + 1).to(torch.uint8).reshape(shape)


def offset(r, c, columns):
    """The byte of scale (r, c), from the formula of the cuBLAS documentation."""
    tile = (r // 128) * -(-columns // 4) + c // 4
    return tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


def swizzle_by_loop(scales):
    rows, columns = scales.shape
    flat = torch.zeros(torch.Size(padded_shape(rows, columns)).numel(), dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            flat[offset(r, c, columns)] = scales[r, c]
    return flat


@pytest.mark.parametrize("name", NVMATH)
@pytest.mark.parametrize("rows, columns", [(128, 4), (256, 8), (384, 20), (128, 64)])
def test_it_is_the_layout_of_nvmath(rows, columns, name, nvmath_helpers):
    format_name, block = NVMATH[name]
    block_format = nvmath_helpers.BlockScalingFormat[format_name]
    scales = numbered(rows, columns)
    dtype = torch.uint8 if name == "mxfp8" else torch.float8_e4m3fn
    want = nvmath_helpers.to_block_scale(scales.view(dtype), (rows, columns * block), block_format, axis=-1)
    assert torch.equal(swizzle(scales), want.view(torch.uint8).flatten())


@pytest.mark.parametrize("name", NVMATH)
def test_every_offset_is_the_one_of_nvmath(name, nvmath_helpers):
    format_name, block = NVMATH[name]
    block_format = nvmath_helpers.BlockScalingFormat[format_name]
    rows, columns = 256, 12
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    where = nvmath_helpers.get_block_scale_offset((r, c), (rows, columns * block), block_format, axis=-1)
    scales = numbered(rows, columns)
    assert torch.equal(swizzle(scales)[where], scales)


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_it_is_the_documented_formula_with_zeros_for_padding(rows, columns, device):
    scales = numbered(rows, columns)
    assert torch.equal(swizzle(scales.to(device)).cpu(), swizzle_by_loop(scales))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 130, 5), (0, 4), (128, 0), (2, 0, 4)])
def test_it_comes_back(shape, dtype, device):
    scales = numbered(*shape).view(dtype).to(device)
    flat = swizzle(scales)
    assert flat.dtype == dtype
    back = unswizzle(flat, shape[-2], shape[-1])
    assert back.dtype == dtype and torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_a_weight_of_experts_is_swizzled_one_by_one():
    scales = numbered(3, 130, 5)
    assert torch.equal(swizzle(scales), torch.stack([swizzle_by_loop(matrix) for matrix in scales]))


def test_strided_scales_do_not_matter():
    scales = numbered(9, 140)
    assert torch.equal(swizzle(scales.T), swizzle(scales.T.contiguous()))


def test_wrong_arguments_are_refused_by_name():
    with pytest.raises(ConfigError, match="scales must hold one byte per scale"):
        swizzle(torch.ones(4, 4))
    with pytest.raises(ConfigError, match=r"scales has shape \(4,\); expected 2 dimensions"):
        swizzle(torch.ones(4, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="swizzled has 100 bytes; 128 x 4 scales in whole tiles take 512"):
        unswizzle(torch.zeros(100, dtype=torch.uint8), 128, 4)
