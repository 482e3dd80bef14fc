"""The FP8 quantizers: bit for bit the reference formats, interpreted on a CPU and compiled on a GPU."""

import subprocess
import sys

import pytest
import torch
from triton.runtime import JITFunction

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels.device.triton_support import is_interpreted, runs_kernel
from deepwell.kernels.quantize import fp8 as Q
from deepwell.kernels.quantize import transpose as TR

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}

# Whole rows that fill a block and that do not, more rows than a program takes, rows wider than a tile.
SHAPES = [(1, 1), (5, 96), (3, 1000), (17, 128), (2, 2500)]
SMALL_TILE = Q.RowConfig(tile=256, num_warps=4)


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def rows_of_many_magnitudes(t, k, dtype, device):
    """Rows from 2^-40 to 2^40, one of zeros, one of subnormals, one with a NaN, one with an inf."""
    x = torch.randn(t, k) * torch.logspace(-12, 12, t)[:, None]
    special = [0.0, 1e-40, None, None]
    for row, value in zip(range(1, t), special, strict=False):
        if value is not None:
            x[row] = value
    if t > 4:
        x[3, k // 2] = float("nan")
        x[4, 0] = -float("inf")
    return x.to(dtype).to(device)


def expected_rows(x, dtype):
    found = quantize(x, f"fp8_{NAMES[dtype]}_row_pow2")
    return found.data, found.scales[:, 0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantize_rows_equals_the_row_format_bit_for_bit(device, shape, dtype):
    for source in (torch.bfloat16, torch.float32, torch.float16):
        x = rows_of_many_magnitudes(*shape, source, device)
        wanted = expected_rows(x, dtype)
        for config in (None, SMALL_TILE):
            q, scale = Q.quantize_rows(x, dtype=dtype, config=config)
            assert_bitwise_equal(q, wanted[0], f"codes of {source}")
            assert_bitwise_equal(scale, wanted[1], f"scales of {source}")


def test_quantize_rows_rounds_every_bf16_number_as_the_format_does(device):
    # Every bit pattern up to 448, in rows that begin with 448 so that the multiplier is 1: the cast itself is on trial.
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.float().abs() <= 448]
    x = torch.cat([x, x.new_zeros(-len(x) % 1023)]).reshape(-1, 1023)
    x = torch.cat([x.new_full((len(x), 1), 448.0), x], dim=1).to(device)
    q, scale = Q.quantize_rows(x)
    assert bool((scale == 1).all())
    assert_bitwise_equal(q, expected_rows(x, E4M3)[0], "codes")


@pytest.mark.parametrize("config", Q.ROW_CONFIGS, ids=str)
def test_every_row_config_gives_the_same_bits(device, config):
    x = rows_of_many_magnitudes(9, 2100, torch.bfloat16, device)
    q, scale = Q.quantize_rows(x, config=config)
    wanted = expected_rows(x, E4M3)
    assert_bitwise_equal(q, wanted[0], "codes")
    assert_bitwise_equal(scale, wanted[1], "scales")


def test_quantize_rows_takes_rows_of_a_larger_tensor_and_empty_ones(device):
    # Columns of a merged projection and every other token: rows lie apart, only the last dimension is contiguous.
    x = rows_of_many_magnitudes(12, 300, torch.bfloat16, device)[::2, 7:207]
    q, scale = Q.quantize_rows(x)
    wanted = expected_rows(x, E4M3)
    assert_bitwise_equal(q, wanted[0], "codes")
    assert_bitwise_equal(scale, wanted[1], "scales")
    assert Q.quantize_rows(x[:0])[0].shape == (0, 200)
    q, scale = Q.quantize_rows(x[:, :0])
    assert q.shape == (6, 0)
    assert bool((scale == 2.0**-126).all())


def test_amax_sees_every_element_of_every_tensor_and_keeps_nan(device):
    a, b = torch.randn(33, 1500, device=device), torch.randn(2, 70, device=device, dtype=torch.bfloat16)
    for i, j in ((0, 0), (32, 1499), (17, 1024)):
        with_peak = a.clone()
        with_peak[i, j] = -50.0 - i
        assert Q.amax(with_peak).item() == 50.0 + i
    b[1, 69] = 77.0
    assert Q.amax([a, b]).item() == 77.0
    assert Q.amax([a[:0], a[:, :0]]).item() == 0.0
    a[5, 5] = float("nan")
    assert Q.amax([a, b]).isnan()
    b[0, 0] = float("inf")
    assert Q.amax(b).item() == float("inf")


# T % 4 == 0 goes through words, the others through bytes; ragged tiles in both directions.
@pytest.mark.parametrize("shape", [(4, 1), (64, 64), (68, 100), (30, 70), (129, 65)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantize_weight_writes_both_copies_of_the_tensor_format(device, shape, dtype):
    w = (torch.randn(shape, device=device) * 3).bfloat16()
    wanted = quantize(w, f"fp8_{NAMES[dtype]}_tensor_pow2")
    q, q_t, scale = Q.quantize_weight(w, dtype=dtype)
    assert_bitwise_equal(q, wanted.data, "row copy")
    assert_bitwise_equal(q_t, wanted.data.view(torch.uint8).T.contiguous().view(dtype), "transposed copy")
    assert_bitwise_equal(scale, wanted.scales, "scale")
    # Each copy alone is the same copy.
    rows, no_columns, rows_scale = Q.quantize_weight(w, dtype=dtype, write="rows")
    no_rows, columns, columns_scale = Q.quantize_weight(w, dtype=dtype, write="columns")
    assert no_columns is None and no_rows is None
    assert_bitwise_equal(rows, q, "rows alone")
    assert_bitwise_equal(columns, q_t, "columns alone")
    assert rows_scale.item() == columns_scale.item() == scale.item()


@pytest.mark.parametrize("config", Q.BOTH_CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_given_amax_below_the_true_one_saturates_in_every_config(device, config, dtype):
    # What exceeds it saturates, inf too, and NaN stays NaN.
    x = torch.randn(132, 140, device=device, dtype=torch.bfloat16)
    x[0, 0], x[131, 139], x[64, 65] = 1000.0, -1000.0, float("inf")
    x[1, 1] = float("nan")
    x[2, 2] = -0.0
    given = torch.tensor(2.0, device=device)
    wanted = quantize(x, f"fp8_{NAMES[dtype]}_tensor_pow2", amax=given)
    q, q_t, scale = Q.quantize_weight(x, given, dtype=dtype, config=config)
    assert_bitwise_equal(q, wanted.data, "row copy")
    assert_bitwise_equal(q_t, wanted.data.view(torch.uint8).T.contiguous().view(dtype), "transposed copy")
    assert_bitwise_equal(scale, wanted.scales, "scale")


def test_an_amax_that_is_not_finite_makes_every_code_nan(device):
    x = torch.randn(8, 16, device=device)
    for bad in (float("nan"), float("inf")):
        q, q_t, scale = Q.quantize_weight(x, torch.tensor(bad, device=device))
        assert scale.isnan()
        assert q.float().isnan().all()
        assert q_t.float().isnan().all()


def test_weights_lie_side_by_side_in_one_merged_operand(device):
    # q, k and v of grouped-query attention share one scale and one buffer, row-major and transposed.
    weights = [torch.randn(n, 48, device=device, dtype=torch.bfloat16) * s for n, s in ((32, 1.0), (8, 4.0), (8, 0.1))]
    merged = torch.empty(48, 48, dtype=E4M3, device=device)
    merged_t = torch.empty(48, 48, dtype=E4M3, device=device)
    biggest, start = Q.amax(weights), 0
    for w in weights:
        end = start + len(w)
        Q.quantize_weight(w, biggest, out=merged[start:end], out_t=merged_t[:, start:end])
        start = end
    wanted = quantize(torch.cat(weights), "fp8_e4m3_tensor_pow2")
    assert_bitwise_equal(merged, wanted.data, "merged")
    assert_bitwise_equal(merged_t, wanted.data.view(torch.uint8).T.contiguous().view(E4M3), "merged, transposed")


def test_slices_that_words_do_not_fit_are_written_as_bytes(device):
    # Two rows off alignment: a kernel that wrote words here would spill over its neighbours.
    w = torch.randn(8, 20, device=device)
    buffer = torch.zeros(20, 11, dtype=torch.uint8, device=device).view(E4M3)
    _, q_t, _ = Q.quantize_weight(w, out_t=buffer[:, 2:10])
    wanted = quantize(w, "fp8_e4m3_tensor_pow2").data.view(torch.uint8).T
    assert_bitwise_equal(q_t.view(torch.uint8), wanted, "transposed copy")
    edges = buffer.view(torch.uint8)[:, [0, 1, 10]]
    assert not edges.any()


def test_an_empty_weight_still_has_a_scale(device):
    q, q_t, scale = Q.quantize_weight(torch.empty(0, 16, device=device))
    assert (q.shape, q_t.shape, scale.item()) == ((0, 16), (16, 0), 1.0)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda x: Q.quantize_rows(x[0]), "x_TK must have two dimensions"),
        (lambda x: Q.quantize_rows(x.T), "x_TK has stride"),
        (lambda x: Q.quantize_rows(x.double()), "x_TK has dtype torch.float64"),
        (lambda x: Q.quantize_rows(x, dtype=torch.int8), "dtype must be"),
        (lambda x: Q.amax([]), "at least one tensor"),
        (lambda x: Q.quantize_weight(x, torch.ones(2)), "amax must be one float32 number"),
        (lambda x: Q.quantize_weight(x, write="row"), "write must be both, rows or columns"),
        (lambda x: Q.quantize_weight(x, out=torch.empty(3, 3, dtype=E4M3)), "out must have shape"),
        (lambda x: Q.quantize_weight(x, out_t=torch.empty(8, 6, dtype=E5M2)), "out_t has dtype"),
    ],
)
def test_wrong_arguments_are_named(call, names):
    with pytest.raises(ConfigError, match=names):
        call(torch.randn(6, 8))


# ---- the machinery of these tests, and of machines without Triton ----


def test_the_fixture_really_interprets_or_launches_the_kernels(request, device):
    # Without this, every comparison above could be the reference with itself.
    place = request.node.callspec.params["everywhere"]
    assert runs_kernel(torch.empty(0, device=device), Q._quantize_rows_kernel) == (place != "reference")
    assert is_interpreted(Q._quantize_rows_kernel) == (place == "interpreted")


def test_outside_the_fixture_kernels_are_compiled_and_cpu_tensors_use_the_reference():
    assert isinstance(Q._quantize_rows_kernel, JITFunction)
    assert not runs_kernel(torch.empty(0), Q._quantize_rows_kernel)


def test_without_triton_the_module_loads_computes_on_a_cpu_and_refuses_to_launch():
    program = """
import sys
sys.modules["triton"] = sys.modules["triton.language"] = None
import torch
from deepwell.errors import UnsupportedError
from deepwell.kernels.activation import swiglu
from deepwell.kernels.head import cross_entropy
from deepwell.kernels.norm import rms_norm
from deepwell.kernels.quantize import fp8
q, scale = fp8.quantize_rows(torch.ones(2, 16))
assert scale.tolist() == [2.0**-8] * 2, scale
try:
    fp8._quantize_rows_kernel[(1,)](q)
except UnsupportedError as error:
    assert "Triton" in str(error)
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "refused"


# ---- what the compiler makes of them, without a GPU ----


def compiled_rows(config, columns, arch, codes=E4M3):
    arguments = {
        "x_ptr": torch.bfloat16,
        "q_ptr": codes,
        "scale_ptr": torch.float32,
        **dict.fromkeys(("T", "K", "stride_xt", "stride_qt"), "i32"),
        "FP8_MAX": 448.0,
        "ROWS": config.rows_per_program(columns),
        "BLOCK": config.block(columns),
        "TWO_PASSES": config.tile > 0,
    }
    return aot.compile_kernel(Q._quantize_rows_kernel, arguments, arch=arch, num_warps=config.num_warps)


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("columns", [4096, 14336])
def test_row_kernels_compile_to_whole_vectors_exact_division_and_no_spills(arch, columns):
    made = compiled_rows(Q.default_row_config(columns), columns, arch)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"ld\.global\S*\.v4\.b32") > 0
    assert made.count(r"st\.global\S*\.v4\.b32") > 0
    assert made.count(r"div\.(full|approx)|rcp\.approx") == 0
    assert made.count(r"div\.rn\.f32") > 0
    assert made.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") > 0


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("columns", [4096, 20480])
def test_scales_alone_compile_to_a_kernel_that_reads(arch, columns):
    made = compiled_rows(Q.default_row_config(columns), columns, arch, codes=None)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"ld\.global\S*\.v4\.b32") > 0
    assert made.count(r"st\.global\S*\.v4\.b32") == made.count(r"cvt\.rn\.satfinite") == 0


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("packing", ["asm", "bytes"])
def test_the_weight_kernel_compiles_to_whole_vectors_both_ways_and_no_spills(arch, packing):
    config = next(config for config in Q.BOTH_CONFIGS if config.packing == packing)
    arguments = {
        **dict.fromkeys(("amax_ptr", "scale_ptr"), torch.float32),
        "x_ptr": torch.bfloat16,
        "q_ptr": E4M3,
        "qt_ptr": E4M3 if packing == "bytes" else torch.int32,
        **dict.fromkeys(("GROUPS", "K", "stride_xt", "stride_qt", "stride_tk"), "i32"),
        "FP8_MAX": 448.0,
        "ROWS": True,
        "COLUMNS": True,
        "PACKING": packing,
        "BLOCK_T": config.rows,
        "BLOCK_K": config.columns,
    }
    made = aot.compile_kernel(Q._quantize_both_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.shared_bytes <= aot.MAX_SHARED_BYTES
    assert made.count(r"ld\.global\S*\.v4\.b32") > 0
    assert made.count(r"st\.global\S*\.v4\.b32") > 0
    assert made.count(r"st\.global\S*\.b8") == 0
    if packing == "bytes":
        alone = Q.ROWS_ONLY
        arguments |= {"COLUMNS": False, "BLOCK_T": alone.rows, "BLOCK_K": alone.columns}
        made = aot.compile_kernel(Q._quantize_both_kernel, arguments, arch=arch, num_warps=alone.num_warps)
        # Rows alone cross no shared memory.
        assert made.spill_bytes == made.shared_bytes == 0
        assert made.count(r"ld\.global\S*\.v4\.b32") > 0 and made.count(r"st\.global\S*\.b8") == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_offsets_do_not_wrap_beyond_two_billion_elements():
    x = torch.zeros(70_000, 32_768, dtype=torch.bfloat16, device="cuda")
    x[-4:] = torch.randn(4, 32_768, device="cuda")
    q, scale = Q.quantize_rows(x)
    wanted = expected_rows(x[-4:], E4M3)
    assert_bitwise_equal(q[-4:], wanted[0], "codes")
    assert_bitwise_equal(scale[-4:], wanted[1], "scales")


def test_a_row_of_zeros_does_not_push_the_others_out_of_range(device):
    # The last token of a sequence has no target, so its gradient is zero: a scale of 1 for it would shift gradients of
    # 1e-6 below E4M3's smallest number, and the wgrad would be zero.
    x = (torch.randn(64, 32) * 1e-6).to(device)
    x[7] = 0.0
    q_NT, scale = TR.transpose_codes(*Q.quantize_rows(x))
    assert sqnr_db(x.T, q_NT.float() * scale) > 25
