"""Transposed FP8 codes: bit for bit the tensor-scaled quantization of the dequantized rows."""

import re

import pytest
import torch
import triton.language as tl

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.formats.quantize import quantize
from deepwell.kernels.quantize import transpose as TR
from deepwell.kernels.quantize.fp8 import quantize_rows_ref

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def expected(q, scale_T, scale):
    """The formats' own answer: dequantize the rows, quantize the tensor with the amax that leads to `scale`."""
    x = q.float() * scale_T[:, None]
    found = quantize(x, f"fp8_{NAMES[q.dtype]}_tensor_pow2", amax=scale * LARGEST[q.dtype])
    return found.data.view(torch.uint8).T.contiguous().view(q.dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("packing", ["asm", "words", "bytes"])
def test_every_code_moves_by_every_ratio_exactly_or_rounds_to_even(device, dtype, packing):
    # All 256 codes (NaN and E5M2's infinities among them) in rows whose scales fall by an octave each, past underflow.
    q = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(40, 1).view(dtype).to(device)
    scale_T = torch.exp2(-torch.arange(40.0, device=device)) * 8
    config = TR.TileConfig(rows=64, columns=64, num_warps=4, packing=packing)
    q_NT, scale = TR.transpose_codes(q, scale_T, config=config)
    assert scale.item() == 8.0
    assert_bitwise_equal(q_NT, expected(q, scale_T, scale), "codes")


@pytest.mark.parametrize("config", TR.TRANSPOSE_CONFIGS, ids=str)
def test_every_config_transposes_ragged_tiles(device, config):
    # Larger than a tile both ways, ragged, whole words.
    x = torch.randn(260, 300) * torch.exp2(3 * torch.randn(260, 1))
    q, scale_T = quantize_rows_ref(x.to(device))
    q_NT, scale = TR.transpose_codes(q, scale_T, config=config)
    assert_bitwise_equal(scale, scale_T.amax(), "scale")
    assert_bitwise_equal(q_NT, expected(q, scale_T, scale), "codes")


# Sizes that are not whole words go through bytes, one row or column at a time too.
@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (8, 3), (130, 66), (65, 129), (4, 4)])
def test_any_size_is_transposed(device, shape):
    q, scale_T = quantize_rows_ref(torch.randn(shape, device=device))
    q_NT, scale = TR.transpose_codes(q, scale_T)
    assert_bitwise_equal(q_NT, expected(q, scale_T, scale), "codes")


def test_codes_may_be_columns_of_a_larger_tensor_and_go_into_a_slice(device):
    q, scale_T = quantize_rows_ref(torch.randn(64, 96, device=device))
    buffer = torch.zeros(48, 80, dtype=torch.uint8, device=device).view(E4M3)
    got, scale = TR.transpose_codes(q[:, 16:64], scale_T, out=buffer[:, 8:72])
    assert_bitwise_equal(got.contiguous(), expected(q[:, 16:64], scale_T, scale), "codes")
    raw = buffer.view(torch.uint8)
    assert not raw[:, :8].any()
    assert not raw[:, 72:].any()


def test_a_given_scale_is_used_and_larger_rows_saturate_nothing_when_it_is_the_maximum(device):
    q, scale_T = quantize_rows_ref(torch.randn(16, 32, device=device))
    given = scale_T.amax() * 4
    q_NT, scale = TR.transpose_codes(q, scale_T, scale=given)
    assert scale is given
    assert_bitwise_equal(q_NT, expected(q, scale_T, given), "codes")


def test_one_nan_scale_makes_the_whole_operand_nan(device):
    # A row that held NaN or inf: its tensor's product must not look healthy.
    x = torch.randn(8, 16, device=device)
    x[3, 3] = float("nan")
    q_NT, scale = TR.transpose_codes(*quantize_rows_ref(x))
    assert scale.isnan()
    assert q_NT.float().isnan().all()


def test_tokens_without_a_gradient_do_not_shift_the_others_out_of_range(device):
    # Ignored targets leave rows of zeros among gradients of 1e-6: their scale must not become the operand's.
    x = torch.randn(16, 32, device=device) * 1e-6
    x[::3] = 0
    q, scale_T = quantize_rows_ref(x)
    q_NT, scale = TR.transpose_codes(q, scale_T)
    assert scale == scale_T[x.any(1)].amax()
    torch.testing.assert_close(q_NT.float().T * scale, x, rtol=2**-4, atol=scale.item() * 2**-10)


def test_nothing_to_transpose_gives_empty_codes(device):
    for t, n in ((0, 8), (8, 0)):
        q_NT, scale = TR.transpose_codes(*quantize_rows_ref(torch.empty(t, n, device=device)))
        assert q_NT.shape == (n, t)
        assert scale.isfinite()


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda q, s: TR.transpose_codes(q.float(), s), "q_TN has dtype"),
        (lambda q, s: TR.transpose_codes(q, s[:2]), "scale_T must have shape"),
        (lambda q, s: TR.transpose_codes(q, s.double()), "scale_T has dtype"),
        (lambda q, s: TR.transpose_codes(q, s, scale=s), "scale must be one float32 number"),
        (lambda q, s: TR.transpose_codes(q, s, out=torch.empty(4, 8, dtype=E4M3)), "out must have shape"),
    ],
)
def test_wrong_arguments_are_named(call, names):
    with pytest.raises(ConfigError, match=names):
        call(*quantize_rows_ref(torch.randn(4, 8)))


# ---- the packed kernel's instructions: read here, run on a GPU only ----


def run_prmt(text: str, inputs: list[int]) -> list[int]:
    """Execute the prmt.b32 lines of an inline assembly text on four words; returns operands $0 to $3."""
    registers = {f"${4 + i}": word for i, word in enumerate(inputs)}
    for target, low, high, selector in re.findall(r"prmt\.b32 (\S+), (\S+), (\S+), (0x\w+);", text):
        both = registers[low] | registers[high] << 32
        picks = [int(selector, 16) >> 4 * i & 7 for i in range(4)]
        registers[target] = sum((both >> 8 * pick & 0xFF) << 8 * i for i, pick in enumerate(picks))
    return [registers[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("widths", [(64, 32), (96, 256), (20, 44), (3, 8), (0, 16)], ids=str)
def test_two_operands_of_the_same_tokens_are_transposed_as_each_alone(everywhere, widths):
    # Whole tiles and parts of them; 3 columns are no whole words, and none are nothing to turn.
    ratio, other_ratio = (torch.exp2(-torch.randint(0, 9, (64,)).float()).to(everywhere) for _ in range(2))
    q, other = (torch.randn(64, n).to(E4M3).to(everywhere) for n in widths)
    transposed, other_transposed = TR.transpose_two_by_ratio(q, ratio, other, other_ratio)
    for got, codes, by in ((transposed, q, ratio), (other_transposed, other, other_ratio)):
        assert_bitwise_equal(got.view(torch.uint8), TR.transpose_by_ratio_ref(codes, by).view(torch.uint8))


@pytest.mark.parametrize("widths", [(64, 32), (20, 44), (6, 8)], ids=str)
@pytest.mark.parametrize("is_other", [False, True])
def test_rows_of_one_operand_are_gathered_on_the_way_in(everywhere, widths, is_other):
    torch.manual_seed(0)
    slot = torch.randint(-1, 10, (32,), dtype=torch.int32)
    gathered = TR.Gathered(slot.to(everywhere), 2, is_other)
    ratio, other_ratio = (torch.exp2(-torch.randint(0, 9, (32,)).float()).to(everywhere) for _ in range(2))
    q, other = (
        torch.randn(5 if gathers else 32, n).to(E4M3).to(everywhere)
        for n, gathers in zip(widths, (not is_other, is_other), strict=True)
    )
    made = TR.transpose_two_by_ratio(q, ratio, other, other_ratio, gathered)
    q, other = (q, gathered.rows(other)) if is_other else (gathered.rows(q), other)
    for got, codes, by in ((made[0], q, ratio), (made[1], other, other_ratio)):
        assert_bitwise_equal(got.view(torch.uint8), TR.transpose_by_ratio_ref(codes, by).view(torch.uint8))


@pytest.mark.parametrize("widths", [(64, 32), (20, 44), (6, 8)], ids=str)
@pytest.mark.parametrize("gathers", [False, True])
def test_columns_are_blocks_of_rows_in_another_order_with_zeros_between(everywhere, widths, gathers):
    torch.manual_seed(0)
    blocks = torch.tensor([2, -1, 0, 1, -1, -1], dtype=torch.int32, device=everywhere)
    slot = torch.randint(-1, 10, (48,), dtype=torch.int32, device=everywhere)
    gathered = TR.Gathered(slot, 2, True) if gathers else None
    ratios = [torch.exp2(-torch.randint(0, 9, (48,)).float()).to(everywhere) for _ in range(2)]
    ratios[0][20] = float("nan")
    q = torch.randn(48, widths[0]).to(E4M3).to(everywhere)
    other = torch.randn(5 if gathers else 48, widths[1]).to(E4M3).to(everywhere)
    made = TR.transpose_two_by_ratio(q, ratios[0], other, ratios[1], gathered, blocks)
    other = other if gathered is None else gathered.rows(other)
    row = [16 * block + i if block >= 0 else None for block in blocks.tolist() for i in range(16)]
    for got, codes, by in zip(made, (q, other), ratios, strict=True):
        whole = TR.transpose_by_ratio_ref(codes, by).view(torch.uint8)
        assert got.shape == (codes.shape[1], 96)
        for column, source in enumerate(row):
            wanted = torch.zeros_like(whole[:, 0]) if source is None else whole[:, source]
            assert_bitwise_equal(got.view(torch.uint8)[:, column], wanted)


def test_the_byte_permutations_turn_a_four_by_four_block_over():
    # Byte n of word t is 16 t + n; transposed over, byte t of word n is.
    words = [sum((16 * t + n) << 8 * n for n in range(4)) for t in range(4)]
    transposed = [sum((16 * t + n) << 8 * t for t in range(4)) for n in range(4)]
    assert run_prmt(TR._TRANSPOSE_BYTES.value, words) == transposed


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize(("fp8", "largest"), [(tl.float8e4nv, 448.0), (tl.float8e5, 57344.0)], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("two", [False, True, "gathered"], ids=["one", "two", "gathered"])
def test_the_packed_kernel_moves_words_of_sixteen_bytes_and_spills_nothing(arch, fp8, largest, two):
    config = TR.default_config(16384, 4096)
    arguments = {
        **dict.fromkeys(("q_ptr", "out_ptr"), torch.int32),
        **dict.fromkeys(("scale_t_ptr", "scale_ptr"), torch.float32),
        **dict.fromkeys(("other_q_ptr", "other_out_ptr"), torch.int32 if two else None),
        "other_t_ptr": torch.float32 if two else None,
        **dict.fromkeys(("T4", "N4", "stride_qt", "stride_on"), "i32"),
        **dict.fromkeys(("other_N4", "other_stride_qt", "other_stride_on"), "i32"),
        "slot_ptr": torch.int32 if two == "gathered" else None,
        "blocks_ptr": torch.int32 if two == "gathered" else None,
        "TOP_K": 8,
        "GATHERS_OTHER": True,
        "FP8": fp8,
        "FP8_MAX": largest,
        "ASM": True,
        "BLOCK_T": config.rows,
        "BLOCK_N": config.columns,
        "BLOCK_ROWS": TR.BLOCK_ROWS,
    }
    made = aot.compile_kernel(TR._transpose_words_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0
    # Every load and store of codes is a vector: four a row group each way; only the scales are single words.
    codes = config.rows * config.columns
    vectors = codes // (16 * 32 * config.num_warps)
    assert made.count(r"ld\.global\S*\.v4\.b32") == vectors
    assert made.count(r"st\.global\S*\.v4\.b32") == vectors
    assert made.count(r"st\.global\S*\.b(8|16)\b") == 0
    assert made.count(r"prmt\.b32") >= codes // (2 * 32 * config.num_warps)
