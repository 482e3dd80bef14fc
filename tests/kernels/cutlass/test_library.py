"""The loader of CUTLASS libraries: bad files are reasons, good ones are called with the right struct.

A library with the same C ABI over host memory (abi_host.cc) stands in for a GPU's; on a GPU whose library is built the
real kernels run against cuBLASLt.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than, sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels.cutlass import library as cl
from deepwell.kernels.gemm.fp8 import fp8_gemm_ref
from deepwell.kernels.quantize.fp8 import quantize_rows

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def compile_host(target: Path, *flags: str) -> str:
    source = str(HERE / "abi_host.cc")
    command = ["g++", "-O1", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", *flags, source, "-o", str(target)]
    subprocess.run(command, check=True)
    return str(target)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return cl.load_library(compile_host(tmp_path_factory.mktemp("host") / "libhost.so"))


def operands(m=20, n=24, k=64):
    a, b = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(n, k, dtype=torch.bfloat16)
    return (*quantize_rows(a), *quantize_rows(b))


# ---- the struct and the call ----


def test_the_struct_is_the_headers_field_for_field(host):
    found = (ctypes.c_int64 * 64)()
    count = host.handle.dw_test_offsets(found)
    mine = [getattr(cl._GemmCall, name).offset for name, _ in cl._GemmCall._fields_] + [ctypes.sizeof(cl._GemmCall)]
    assert list(found)[:count] == mine


def test_a_product_with_row_scales_and_with_one_scale(host):
    a, scale_a, b, scale_b = operands()
    for left, right in ((scale_a, scale_b), (scale_a, scale_b[:1]), (scale_a[:1], scale_b), (scale_a[:1], scale_b[:1])):
        got = cl.gemm_rowwise(a, left, b, right, library=host)
        wanted = fp8_gemm_ref(a, left, b, right, out_dtype=torch.float32)
        assert sqnr_db(wanted.bfloat16(), got) > 80


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu", "relu"])
def test_bias_and_activation_go_into_the_epilogue(host, activation):
    a, scale_a, b, scale_b = operands()
    bias = torch.randn(24, dtype=torch.bfloat16)
    epilogue = cl.Epilogue(bias=bias, activation=activation)
    got = cl.gemm_rowwise(a, scale_a, b, scale_b, epilogue=epilogue, library=host)
    wanted = fp8_gemm_ref(a, scale_a, b, scale_b, out_dtype=torch.float32) + bias.float()
    if activation:
        function = {
            "gelu": F.gelu,
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            "silu": F.silu,
            "relu": F.relu,
        }
        wanted = function[activation](wanted)
    assert sqnr_db(wanted.bfloat16(), got) > 70


def test_strided_operands_and_a_given_output_are_used_where_they_lie(host):
    a, scale_a, b, scale_b = operands(k=128)
    wanted = cl.gemm_rowwise(a[:, :64].contiguous(), scale_a, b[:, :64].contiguous(), scale_b, library=host)
    out = torch.full((20, 32), 7.0, dtype=torch.bfloat16)
    got = cl.gemm_rowwise(a[:, :64], scale_a, b[:, :64], scale_b, out[:, :24], library=host)
    assert got.data_ptr() == out.data_ptr()
    assert_bitwise_equal(got.contiguous(), wanted)
    assert bool((out[:, 24:] == 7).all())


def test_configurations_go_by_number_and_name_and_get_their_workspace(host):
    a, scale_a, b, scale_b = operands()
    first = cl.gemm_rowwise(a, scale_a, b, scale_b, config=0, library=host)
    assert_bitwise_equal(cl.gemm_rowwise(a, scale_a, b, scale_b, config="wants_workspace", library=host), first)
    with pytest.raises(ConfigError, match="plain, wants_workspace, breaks"):
        cl.gemm_rowwise(a, scale_a, b, scale_b, config="fastest", library=host)


def test_errors_of_a_library_carry_its_words_the_shape_and_cudas(host):
    a, scale_a, b, scale_b = operands()
    with pytest.raises(UnsupportedError, match=r"\(breaks\) with M=20, N=24, K=64.*out of patience"):
        cl.gemm_rowwise(a, scale_a, b, scale_b, config="breaks", library=host)
    a, scale_a, b, scale_b = operands(k=40)
    with pytest.raises(UnsupportedError, match="words for the error"):
        cl.gemm_rowwise(a, scale_a, b, scale_b, library=host)
    with pytest.raises(UnsupportedError, match="no mxfp8 kernels"):
        q = quantize(torch.randn(16, 64), "mxfp8")
        cl.gemm_block_scaled(q.data, q.scale_swizzled(), q.data, q.scale_swizzled(), library=host)


def test_block_scales_that_tma_cannot_read_are_named(host):
    q = quantize(torch.randn(16, 64), "mxfp8")
    scale = q.scale_swizzled()
    shifted = torch.cat([scale.view(torch.uint8)[:1], scale.view(torch.uint8)])[1:].view(scale.dtype)
    assert shifted.data_ptr() % 16
    with pytest.raises(ConfigError, match=r"scale_b begins within a line.*clone"):
        cl.gemm_block_scaled(q.data, scale, q.data, shifted, library=host)


def test_wrong_arguments_are_named_before_the_library_sees_them(host):
    a, scale_a, b, scale_b = operands()
    for message, call in (
        ("scale_a", lambda: cl.gemm_rowwise(a, scale_a[:3], b, scale_b, library=host)),
        ("scale_b", lambda: cl.gemm_rowwise(a, scale_a, b, scale_b.double(), library=host)),
        ("a_MK is", lambda: cl.gemm_rowwise(a.float(), scale_a, b, scale_b, library=host)),
        ("stride", lambda: cl.gemm_rowwise(a.T.contiguous().T, scale_a, b, scale_b, library=host)),
        ("same contraction", lambda: cl.gemm_rowwise(a, scale_a, b[:, :32], scale_b, library=host)),
        ("out is", lambda: cl.gemm_rowwise(a, scale_a, b, scale_b, torch.empty(20, 24), library=host)),
        ("alpha", lambda: cl.gemm_rowwise(a, scale_a, b, scale_b, epilogue=cl.Epilogue(alpha=2.0), library=host)),
        (
            "activation",
            lambda: cl.gemm_rowwise(a, scale_a, b, scale_b, epilogue=cl.Epilogue(activation="x"), library=host),
        ),
        ("bias", lambda: cl.gemm_rowwise(a, scale_a, b, scale_b, epilogue=cl.Epilogue(bias=scale_b), library=host)),
        ("scale_a", lambda: cl.gemm_blockwise(a, scale_a, b, scale_b, library=host)),
        ("tile order", lambda: cl.gemm_block_scaled(a, scale_a.to(E4M3), b, scale_b.to(E4M3), library=host)),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


# ---- bad files ----


def test_junk_and_cut_files_are_reasons(host, tmp_path):
    data = Path(host.path).read_bytes()
    for name, content, reason in (
        ("empty.so", b"", "not a shared library"),
        ("text.so", b"hello" * 100, "not a shared library"),
        ("half.so", data[: len(data) // 2], "cut short"),
        ("header.so", data[:64], "cut short"),
        ("end.so", data[:-1], "cut short"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UnsupportedError, match=reason):
            cl.load_library(str(path))
    with pytest.raises(UnsupportedError, match="cannot be read"):
        cl.load_library(str(tmp_path / "nothing.so"))


@needs_compiler
def test_another_abi_version_is_refused_with_what_to_do(tmp_path):
    path = compile_host(tmp_path / "libold.so", "-DTEST_ABI_VERSION=77")
    with pytest.raises(UnsupportedError, match=r"ABI version 77.*deepwell build"):
        cl.load_library(path)


@needs_compiler
def test_a_library_of_somebody_else_is_refused(tmp_path):
    source = tmp_path / "other.cc"
    source.write_text('extern "C" int other() { return 1; }')
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libother.so")], check=True)
    with pytest.raises(UnsupportedError, match="no library of `deepwell build`"):
        cl.load_library(str(tmp_path / "libother.so"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_that():
    assert "need a CUDA GPU" in cl.why_unavailable()


def test_no_build_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPWELL_CACHE_DIR", str(tmp_path))
    cl.forget_libraries()
    assert "deepwell build --arch sm_90a" in cl._library_of((9, 0))
    assert "compute capability 8.0" in cl._library_of((8, 0))
    cl.forget_libraries()


# ---- the real kernels ----


@pytest.fixture
def gpu_library():
    """The library of the cache folder, or one that was brought along in .carry/ (a GPU host without CUTLASS)."""
    carried = ROOT / ".carry" / f"libdeepwell_{cl.arch_of(torch.cuda.get_device_capability())}.so"
    reason = cl.why_unavailable()
    if reason and not carried.is_file():
        pytest.skip(reason)
    return cl.load_library(str(carried)) if reason else cl.library_for()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 512, 384), (100, 272, 144), (1, 16, 16), (0, 16, 32)], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_rowwise_kernels_equal_the_reference_on_a_gpu(gpu_library, shape, dtype):
    if "fp8_rowwise" not in gpu_library.configs:
        pytest.skip(f"{gpu_library.arch} has no fp8_rowwise")
    m, n, k = shape
    a, scale_a = quantize_rows(torch.randn(m, k, dtype=torch.bfloat16, device="cuda"), dtype=dtype)
    b, scale_b = quantize_rows(torch.randn(n, k, dtype=torch.bfloat16, device="cuda"))
    bias = torch.randn(n, dtype=torch.bfloat16, device="cuda")
    plain = fp8_gemm_ref(a, scale_a, b, scale_b, out_dtype=torch.float32)
    for config in gpu_library.configs["fp8_rowwise"]:
        got = cl.gemm_rowwise(a, scale_a, b, scale_b, config=config, library=gpu_library)
        assert got.shape == (m, n)
        if not m:
            continue
        # cuBLASLt with the same accumulator is the measure: bf16's rounding, and what fast accumulation loses.
        fast = "exact" not in config
        rows = (scale_a[:, None], scale_b[None, :])
        vendor = torch._scaled_mm(a, b.T, *rows, out_dtype=torch.bfloat16, use_fast_accum=fast)
        assert_no_worse_than(got, vendor, plain)
        epilogue = cl.Epilogue(bias=bias, activation="silu")
        fused = cl.gemm_rowwise(a, scale_a, b, scale_b, epilogue=epilogue, config=config, library=gpu_library)
        vendor_fused = F.silu(vendor.float() + bias.float()).bfloat16()
        assert_no_worse_than(fused, vendor_fused, F.silu(plain + bias.float()))


@pytest.mark.gpu
def test_blockwise_kernels_equal_the_reference_on_a_gpu(gpu_library):
    if "fp8_blockwise" not in gpu_library.configs:
        pytest.skip(f"{gpu_library.arch} has no fp8_blockwise")
    x, w = (torch.randn(rows, 512, device="cuda") for rows in (132, 384))
    a, b = quantize(x, "fp8_1x128"), quantize(w, "fp8_128x128")
    wanted = a.dequantize() @ b.dequantize().T
    scale_a, scale_b = a.scales.T.contiguous(), b.scales.T.contiguous()
    for config in gpu_library.configs["fp8_blockwise"]:
        got = cl.gemm_blockwise(a.data, scale_a, b.data, scale_b, config=config, library=gpu_library)
        # Partial sums are added in fp32: what is lost is bf16's rounding.
        assert_no_worse_than(got, wanted.bfloat16(), wanted)
