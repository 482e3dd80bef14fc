"""FP8 with a scale per 128 numbers or per square of 128: bit for bit the references, both ways at once."""

import pytest
import torch
import triton.language as tl

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.formats.quantize import quantize
from deepwell.kernels.quantize import fp8_blocks as quantize_blocks
from deepwell.kernels.quantize.fp8_blocks import (
    Blocks,
    empty_128x128,
    quantize_1x128,
    quantize_1x128_both,
    quantize_1x128_both_ref,
    quantize_1x128_ref,
    quantize_128x128,
    quantize_128x128_ref,
)


# One block, several, rows and blocks that end inside a program, and no rows.
@pytest.mark.parametrize("shape", [(16, 128), (37, 384), (5, 640), (0, 128)], ids=str)
def test_codes_and_scales_are_the_references(device, shape):
    x = (torch.randn(shape, device=device) * torch.logspace(-6, 6, shape[1], device=device)).bfloat16()
    if shape[0]:
        x[1, :128] = 0
        x[2, 3], x[3, 130 % shape[1]] = float("nan"), float("-inf")
    q, scale = quantize_1x128(x)
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
def test_it_compiles_to_wide_loads_without_spills(arch):
    arguments = {
        "x_ptr": torch.bfloat16,
        "q_ptr": torch.float8_e4m3fn,
        "scale_ptr": torch.float32,
        "T": "i32:any",
        "K": "i32",
        "stride_xt": "i32",
        "stride_qt": "i32",
        "FP8_MAX": 448.0,
        "ROWS": quantize_blocks._ROWS,
        "BLOCKS": quantize_blocks._BLOCKS,
        "BLOCK": 128,
    }
    made = aot.compile_kernel(quantize_blocks._quantize_1x128_kernel, arguments, arch=arch, num_warps=4)
    assert made.spill_bytes == 0
    assert made.count(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64") > 0
    assert made.count(r"div\.rn\.f32") > 0 and made.count(r"div\.(approx|full)") == 0


# ---- both copies from one read ----

# One tile, several, ends inside a tile both ways, tokens that are no whole words, single numbers, and nothing.
TILES = [(128, 128), (256, 384), (200, 144), (37, 130), (131, 48), (1, 1), (0, 128)]


def numbers(t: int, k: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Magnitudes that differ from column to column and from token to token, a block of zeros, NaN and inf."""
    x = torch.randn(t, k, device=device) * torch.logspace(-6, 6, k, device=device)
    x = x * torch.logspace(3, -3, t, device=device)[:, None]
    if t > 32:
        x[:, 2] = 0
        x[3], x[5, 7], x[9, k - 1] = 0, float("nan"), float("-inf")
    return x.to(dtype)


def assert_same(found: Blocks, wanted: Blocks) -> None:
    for name, mine, ref in zip(Blocks._fields, found, wanted, strict=True):
        assert (mine is None) == (ref is None), name
        if mine is None or ref is None:
            continue
        assert mine.shape == ref.shape, name
        if mine.dtype == torch.float32:
            # NaN has many bit patterns; where it stands is what counts.
            assert torch.equal(mine.isnan(), ref.isnan()), name
            assert_bitwise_equal(mine.nan_to_num(nan=0.0), ref.nan_to_num(nan=0.0), name)
        else:
            assert_bitwise_equal(mine, ref, name)


@pytest.mark.parametrize("shape", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_of_rows_and_of_tokens_are_the_references(device, shape, dtype):
    x = numbers(*shape, device, dtype)
    assert_same(quantize_1x128_both(x), quantize_1x128_both_ref(x))


@pytest.mark.parametrize("shape", TILES, ids=str)
def test_squares_are_the_references(device, shape):
    w = numbers(*shape, device)
    assert_same(quantize_128x128(w), quantize_128x128_ref(w))


def test_the_references_are_the_formats(device):
    # What the kernels are held to above, said once more in the formats' own words, fillings apart.
    x = numbers(200, 144, device).nan_to_num(nan=1.0, neginf=-1.0)  # a filling beside NaN is NaN too
    found = quantize_1x128_both_ref(x)
    for q, scale, source in ((found.q, found.scale, x), (found.q_t, found.scale_t, x.T.contiguous())):
        wanted = quantize(source, "fp8_e4m3_1x128_pow2")
        assert_bitwise_equal(q[:, : source.shape[1]].contiguous(), wanted.data)
        assert (q.view(torch.uint8)[:, source.shape[1] :] == 0).all()
        assert_bitwise_equal(scale.T.contiguous(), wanted.scales)
    squares = quantize_128x128_ref(x)
    wanted = quantize(x, "fp8_e4m3_128x128_pow2")
    assert_bitwise_equal(squares.q[:, :144].contiguous(), wanted.data)
    # One set of codes serves both directions.
    assert_bitwise_equal(squares.q_t[:, :200].view(torch.uint8).T, squares.q[:, :144].view(torch.uint8))
    assert squares.scale.shape == (2, 4) and squares.scale_t.shape == (2, 4)


@pytest.mark.parametrize("make", [quantize_1x128_both, quantize_128x128])
def test_one_copy_alone_is_that_copy(device, make):
    # A layer whose weights are frozen has no wgrad, evaluation has neither: no copy is written for nothing.
    x = numbers(200, 144, device)
    whole = make(x)
    assert_same(make(x, columns=False), Blocks(*whole[:2], None, None))
    assert_same(make(x, rows=False), Blocks(None, None, *whole[2:]))


def test_rows_of_the_tile_kernel_may_lie_apart(device):
    x = numbers(140, 512, device)
    assert_same(quantize_1x128_both(x[:, 128:400]), quantize_1x128_both(x[:, 128:400].contiguous()))


def test_weights_lie_side_by_side_in_one_operand(device):
    # q, k and v in one buffer: rows below one another, and beside one another in the transposed copy.
    weights = [numbers(n, 200, device) for n in (256, 128, 72)]
    whole = empty_128x128(456, 200, weights[0])
    start = 0
    for w in weights:
        rows, blocks = slice(start, start + w.shape[0]), slice(start // 128, -(-(start + w.shape[0]) // 128))
        columns = slice(start, blocks.stop * 128)
        out = Blocks(whole.q[rows], whole.scale[blocks], whole.q_t[:, columns], whole.scale_t[:, blocks])
        quantize_128x128(w, out=out)
        start += w.shape[0]
    assert_same(whole, quantize_128x128_ref(torch.cat(weights)))


def test_room_of_the_wrong_shape_is_refused(device):
    w = torch.zeros(128, 128, device=device)
    with pytest.raises(ConfigError, match=r"out\.q must have shape \(128, 128\)"):
        quantize_128x128(w, out=empty_128x128(64, 128, w))


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("copies", ["both", "rows", "columns"])
@pytest.mark.parametrize("square", [False, True])
def test_the_tile_kernel_compiles_to_wide_accesses_without_spills(square, copies, arch):
    arguments = {
        "x_ptr": torch.bfloat16,
        "q_ptr": torch.float8_e4m3fn,
        "qt_ptr": torch.int32,
        **dict.fromkeys(("scale_ptr", "scale_t_ptr"), torch.float32),
        **dict.fromkeys(("T", "K", "stride_xt", "stride_qt", "stride_tk", "stride_s", "stride_st"), "i32"),
        "FP8": tl.float8e4nv,
        "FP8_MAX": 448.0,
        "SQUARE": square,
        "ROWS": copies != "columns",
        "COLUMNS": copies != "rows",
        "ASM": True,
        "BLOCK": 128,
    }
    kernel = quantize_blocks._quantize_tiles_kernel
    made = aot.compile_kernel(kernel, arguments, arch=arch, num_warps=8)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.shared_bytes <= aot.MAX_SHARED_BYTES
    assert made.count(r"ld\.global\S*\.v4\.b32") > 0 and made.count(r"ld\.global\S*\.b16") == 0
    assert made.count(r"st\.global\S*\.v[24]\.b32") > 0 and made.count(r"st\.global\S*\.b8") == 0
    assert made.count(r"div\.rn\.f32") > 0 and made.count(r"div\.(approx|full)|rcp\.approx") == 0
    assert made.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") > 0
