"""CutlassKernel and MicroscaleManager: exact on a CPU, the same doors on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels import KernelRegistry
from deepwell.kernels.cutlass import library as cutlass_library
from deepwell.kernels.cutlass_bindings import CutlassConfig, CutlassKernel, MicroscaleManager
from deepwell.kernels.gemm.candidates import register_library


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


def operands(device, m=40, n=48, k=96):
    return torch.randn(m, k, device=device).bfloat16(), 0.05 * torch.randn(n, k, device=device).bfloat16().T


def test_the_documents_lines_run(device):
    a, b = operands(device)
    (m, k), n = a.shape, b.shape[1]
    config = CutlassConfig(use_tcgen05=True, tmem_residency=True, microscale_block_size=32)
    kernel = CutlassKernel(config)
    kernel.initialize(m, n, k, "mxfp8", use_microscaling=True)
    result = kernel.gemm(a, b)
    assert result.shape == (m, n) and result.dtype is torch.bfloat16
    assert sqnr_db(a.float() @ b.float(), result) > 27
    assert kernel.binding in ("native", "substitute", "emulated") and kernel.reason
    assert "40x48x96 mxfp8" in repr(kernel)


@pytest.mark.parametrize(("precision", "microscaled"), [("mxfp8", True), ("nvfp4", True)])
def test_on_a_cpu_the_format_is_exact(precision, microscaled):
    a, b = operands("cpu")
    kernel = CutlassKernel().initialize(40, 48, 96, precision, use_microscaling=microscaled)
    weight = "nvfp4_16x16" if precision == "nvfp4" else precision
    exact = quantize(a, precision).dequantize() @ quantize(b.T.contiguous(), weight).dequantize().T
    assert_bitwise_equal(kernel.gemm(a, b), exact.bfloat16())
    assert kernel.binding == "emulated" and "exactly" in kernel.reason


def test_without_microscaling_eight_bits_are_fp8(device):
    a, b = operands(device)
    kernel = CutlassKernel().initialize(40, 48, 96, "mxfp8", use_microscaling=False)
    assert kernel.precision == "fp8"
    assert sqnr_db(a.float() @ b.float(), kernel.gemm(a, b)) > 27


def test_codes_with_their_scales_multiply_to_the_same(device):
    a, b = operands(device)
    kernel = CutlassKernel().initialize(40, 48, 96, "mxfp8")
    left, right = MicroscaleManager.quantize_mxfp8(a), MicroscaleManager.quantize_mxfp8(b.T)
    got = kernel.gemm(left[0], right[0], left[1], right[1])
    exact = MicroscaleManager.dequantize_mxfp8(*left) @ MicroscaleManager.dequantize_mxfp8(*right).T
    assert sqnr_db(exact.bfloat16(), got) > 60
    if device == "cpu":
        assert_bitwise_equal(got, exact.bfloat16())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu", None])
def test_codes_take_bias_and_activation(activation):
    a, b = operands("cpu")
    kernel = CutlassKernel().initialize(40, 48, 96)
    left, right = MicroscaleManager.quantize_mxfp8(a), MicroscaleManager.quantize_mxfp8(b.T)
    bias = torch.randn(48)
    got = kernel.gemm(left[0], right[0], left[1], right[1], bias=bias, activation=activation)
    c = MicroscaleManager.dequantize_mxfp8(*left) @ MicroscaleManager.dequantize_mxfp8(*right).T + bias
    functions = torch.nn.functional
    expected = {
        None: c,
        "gelu": functions.gelu(c),
        "gelu_tanh": functions.gelu(c, approximate="tanh"),
        "silu": functions.silu(c),
        "relu": functions.relu(c),
    }[activation]
    assert_bitwise_equal(got, expected.bfloat16())


@pytest.mark.parametrize("shape", [(4, 64), (3, 5, 96), (7, 40), (32,)], ids=str)
def test_mxfp8_comes_back_bit_for_bit_as_the_format_says(device, shape):
    x = torch.randn(shape, device=device) * 100
    codes, scales = MicroscaleManager.quantize_mxfp8(x)
    assert codes.dtype is torch.float8_e4m3fn and codes.shape == x.shape
    assert scales.dtype is torch.float8_e8m0fnu and scales.shape == (*shape[:-1], -(-shape[-1] // 32))
    back = MicroscaleManager.dequantize_mxfp8(codes, scales)
    assert_bitwise_equal(back, quantize(x, "mxfp8").dequantize())
    assert MicroscaleManager.dequantize_mxfp8(codes, scales, dtype=torch.bfloat16).dtype is torch.bfloat16


def test_nan_stays_visible(device):
    a, b = operands(device)
    a[3, 5] = float("nan")
    got = CutlassKernel().initialize(40, 48, 96, "mxfp8").gemm(a, b)
    assert got[3].isnan().all() and got[:3].isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k, a, b: CutlassKernel().gemm(a, b), "call initialize"),
        (lambda k, a, b: k.gemm(a[:3], b), r"a does not fit M=40, N=48, K=96 of initialize: its rows are \(3, 96\)"),
        (lambda k, a, b: k.gemm(a, b.T), r"b does not fit"),
        (lambda k, a, b: k.gemm(a, "b"), "b does not fit .* its rows are str"),
        (lambda k, a, b: k.gemm(a.double(), b), "a has dtype torch.float64"),
        (lambda k, a, b: k.gemm(a.to(torch.float8_e4m3fn), b), "FP8 values without scales"),
        (lambda k, a, b: k.gemm(a, b, a_scales=a), "b_scales is missing"),
        (
            lambda k, a, b: k.gemm(a, b.T, a, b),
            "a has dtype torch.bfloat16; with scales it must be torch.float8_e4m3fn",
        ),
        (lambda k, a, b: k.initialize(0, 1, 1), "m is 0"),
        (lambda k, a, b: k.initialize(1, 1, 1, "fp9"), "format 'fp9' is not known"),
        (lambda k, a, b: k.initialize(1, 1, 1, "nvfp4", use_microscaling=False), "use_microscaling is False; nvfp4"),
        (lambda k, a, b: CutlassKernel("fast"), "config is a str"),
        (lambda k, a, b: CutlassConfig(microscale_block_size=64), "microscale_block_size is 64"),
        (lambda k, a, b: CutlassConfig(tmem_residency=False), "tensor memory only"),
        (
            lambda k, a, b: CutlassKernel(CutlassConfig(microscale_block_size=16)).initialize(1, 1, 1, "mxfp8"),
            "microscale_block_size is 16; mxfp8 has blocks of 32",
        ),
        (lambda k, a, b: MicroscaleManager.quantize_mxfp8(a, block_size=16), "block_size is 16"),
        (lambda k, a, b: MicroscaleManager.dequantize_mxfp8(a, b), "pass the torch.float8_e4m3fn tensor"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    a, b = operands("cpu")
    with pytest.raises(ConfigError, match=message):
        call(CutlassKernel().initialize(40, 48, 96, "mxfp8"), a, b)


def test_each_configuration_of_a_library_is_a_candidate(monkeypatch, tmp_path):
    # A stand-in for what `deepwell build` makes: the names and the file's hash are all that the registry reads.
    configs = {"fp8_rowwise": ("128x256x128_fast", "128x128x128_exact"), "fp8_blockwise": ("a",)}
    library = SimpleNamespace(path=str(tmp_path / "kernels.so"), configs=configs)
    (tmp_path / "kernels.so").write_bytes(b"one build")
    monkeypatch.setattr(cutlass_library, "library_for", lambda device=None: library)
    first = cutlass_library.rowwise_gemms()
    assert [name for name, _, _ in first] == ["cutlass:128x256x128_fast", "cutlass:128x128x128_exact"]
    (tmp_path / "kernels.so").write_bytes(b"another build")
    assert cutlass_library.rowwise_gemms()[0][2] != first[0][2]


def test_a_library_that_lies_elsewhere_can_compete(monkeypatch, tmp_path):
    configs = {"fp8_rowwise": ("128x256x128_fast", "128x128x128_exact")}
    library = SimpleNamespace(path=str(tmp_path / "kernels.so"), configs=configs)
    (tmp_path / "kernels.so").write_bytes(b"one build")
    monkeypatch.setattr("deepwell.kernels.gemm.candidates.load_library", lambda path: library)
    registry = KernelRegistry()
    register_library(registry, "kernels.so")
    assert [(c.name, c.op, c.fast) for c in registry.users()] == [
        ("cutlass:128x256x128_fast (file)", "fp8_gemm", True),
        ("cutlass:128x256x128_fast (file)", "gemm", True),
        ("cutlass:128x128x128_exact (file)", "fp8_gemm", False),
        ("cutlass:128x128x128_exact (file)", "gemm", False),
    ]


def test_without_a_library_there_are_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cutlass_library.rowwise_gemms() == []
