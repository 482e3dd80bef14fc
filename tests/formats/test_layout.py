"""The scale layout of Blackwell's tensor cores against NVIDIA's own functions; grouped forms against plain loops."""

import pytest
import torch

from deepwell.errors import ConfigError
from deepwell.formats.layout import (
    padded_shape,
    swizzle,
    swizzle_column_groups,
    swizzle_row_groups,
    unswizzle,
    unswizzle_column_groups,
    unswizzle_row_groups,
)

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


# Group sizes: aligned; ragged; empty first, middle and last; all empty; one row each; more than a tile.
GROUPS = [[128, 256], [5, 130, 1], [0, 7, 0, 200, 0], [0, 0], [1, 1, 1], [300]]


def ends_of(sizes, dtype=torch.int32):
    return torch.tensor(sizes).cumsum(0).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_row_groups_are_each_swizzled_by_itself(sizes, dtype, device):
    scales, ends = numbered(sum(sizes), 6), ends_of(sizes, dtype)
    flat, padded_ends = swizzle_row_groups(scales.to(device), ends.to(device))
    want = torch.cat([swizzle_by_loop(part) for part in scales.split(sizes)])
    assert torch.equal(flat.cpu()[: want.numel()], want)
    assert int(flat[want.numel() :].sum()) == 0
    assert padded_ends.tolist() == torch.tensor([-(-n // 128) * 128 for n in sizes]).cumsum(0).tolist()
    back = unswizzle_row_groups(flat, ends.to(device), sum(sizes), 6)
    assert torch.equal(back.cpu(), scales)


@pytest.mark.parametrize("sizes", [[4, 8], [1, 5, 2], [0, 3, 0, 9, 0], [0, 0], [17]], ids=str)
@pytest.mark.parametrize("rows", [128, 200])
def test_column_groups_are_each_swizzled_by_itself(sizes, rows, device):
    scales, ends = numbered(rows, sum(sizes)), ends_of(sizes)
    flat, padded_ends = swizzle_column_groups(scales.to(device), ends.to(device))
    parts = [swizzle_by_loop(part) for part in scales.split(sizes, dim=1)]
    want = torch.cat(parts)
    assert torch.equal(flat.cpu()[: want.numel()], want)
    assert int(flat[want.numel() :].sum()) == 0
    assert padded_ends.tolist() == torch.tensor([-(-n // 4) * 4 for n in sizes]).cumsum(0).tolist()
    back = unswizzle_column_groups(flat, ends.to(device), rows, sum(sizes))
    assert torch.equal(back.cpu(), scales)


def test_rows_behind_the_last_group_are_left_out(device):
    # A token buffer with room to spare: what lies behind the last end belongs to nobody.
    scales, ends = numbered(20, 4).to(device), torch.tensor([3, 12], device=device)
    flat, _ = swizzle_row_groups(scales, ends)
    live, _ = swizzle_row_groups(scales[:12], ends)
    assert torch.equal(flat[: live.numel()], live)
    back = unswizzle_row_groups(flat, ends, 20, 4)
    assert torch.equal(back[:12], scales[:12]) and int(back[12:].sum()) == 0


def test_the_buffer_does_not_depend_on_how_tokens_fall():
    # Its size is known without asking the device, so that no launch waits for the router.
    sizes = [[50, 50, 50], [150, 0, 0], [1, 1, 148]]
    assert len({swizzle_row_groups(numbered(150, 4), ends_of(s))[0].numel() for s in sizes}) == 1


def test_group_ends_are_never_read_on_the_host():
    # On the meta device any wait for a value raises.
    scales, ends = (
        torch.empty(150, 6, dtype=torch.uint8, device="meta"),
        torch.empty(4, dtype=torch.int32, device="meta"),
    )
    flat, padded_ends = swizzle_row_groups(scales, ends)
    assert padded_ends.shape == (4,)
    assert unswizzle_row_groups(flat, ends, 150, 6).shape == (150, 6)
    flat, _ = swizzle_column_groups(scales, ends)
    assert unswizzle_column_groups(flat, ends, 150, 6).shape == (150, 6)


def test_wrong_arguments_are_refused_by_name():
    with pytest.raises(ConfigError, match="scales must hold one byte per scale"):
        swizzle(torch.ones(4, 4))
    with pytest.raises(ConfigError, match=r"scales has shape \(4,\); expected 2 dimensions"):
        swizzle(torch.ones(4, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="swizzled has 100 bytes; 128 x 4 scales in whole tiles take 512"):
        unswizzle(torch.zeros(100, dtype=torch.uint8), 128, 4)
    with pytest.raises(ConfigError, match="group_ends must hold the ends of at least one group"):
        swizzle_row_groups(numbered(4, 4), torch.tensor([4.0]))
    with pytest.raises(ConfigError, match="swizzled has 100 bytes"):
        unswizzle_column_groups(torch.zeros(100, dtype=torch.uint8), torch.tensor([4]), 128, 4)
