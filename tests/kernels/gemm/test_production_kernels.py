"""ProductionKernelManager: products on any device through one door."""

import json

import pytest
import torch
import torch.nn.functional as F

import user_kernels
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels import KernelRegistry
from deepwell.kernels.cutlass_bindings import CutlassConfig, CutlassKernel, MicroscaleManager
from deepwell.kernels.production_kernels import ProductionKernelManager
from deepwell.kernels.tune import choose
from deepwell.precision.gemm_format import POLICY_FORMATS

ACTIVATIONS = {None: lambda x: x, "gelu": F.gelu, "silu": F.silu, "relu": F.relu}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture
def manager() -> ProductionKernelManager:
    choose.forget()
    return ProductionKernelManager()


def operands(device, m=48, n=64, k=96):
    return torch.randn(m, k, device=device), 0.05 * torch.randn(n, k, device=device).T


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_documents_call_multiplies_and_activates(manager, device, activation):
    a, b = operands(device)
    bias = torch.randn(64, device=device)
    got = manager.gemm(a, b, activation=activation, bias=bias)
    assert got.dtype is torch.float32
    floor = 100 if device == "cpu" else 27  # a GPU may take FP8 for "auto"
    assert sqnr_db(ACTIVATIONS[activation](a @ b + bias), got) > floor


FLOORS = {"fp32": 40, "bf16": 40, "fp16": 40, "fp8": 27, "mxfp8": 27, "mxfp6": 20, "mxfp4": 14, "nvfp4": 14, "fp4": 14}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_precision_takes_every_dtype_and_keeps_its_signal(manager, device, dtype):
    a, b = (x.to(dtype) for x in operands(device))
    bias = torch.randn(64, device=device, dtype=dtype)
    wanted = F.gelu(a.float() @ b.float() + bias.float())
    assert set(POLICY_FORMATS) < set(FLOORS)
    for precision, floor in FLOORS.items():
        kernel = CutlassKernel().initialize(48, 64, 96, precision)
        for got in (
            manager.gemm(a, b, precision=precision, bias=bias, activation="gelu"),
            kernel.gemm(a, b, bias=bias, activation="gelu"),
        ):
            assert got.dtype == dtype
            assert sqnr_db(wanted, got) > floor, precision


def test_on_a_cpu_a_format_is_exactly_what_it_says(manager):
    a, b = operands("cpu")
    exact = quantize(a, "mxfp8").dequantize() @ quantize(b.T.contiguous(), "mxfp8").dequantize().T
    assert_bitwise_equal(manager.gemm(a, b, precision="mxfp8"), exact)


def test_leading_dimensions_ragged_sizes_and_no_rows(manager, device):
    a, b = operands(device, m=30, n=20, k=36)
    got = manager.gemm(a.view(2, 3, 5, 36), b)
    assert got.shape == (2, 3, 5, 20)
    assert sqnr_db((a @ b).view(2, 3, 5, 20), got) > 27
    bias = torch.ones(20, device=device)
    assert manager.gemm(a[:0], b, bias=bias).shape == (0, 20)
    # Nothing to add up: the bias alone is left.
    assert torch.equal(manager.gemm(a[:, :0], b[:0], bias=bias), bias.expand(30, 20))


def test_a_users_kernel_competes_and_a_broken_one_is_replaced_while_it_runs(monkeypatch):
    def decided(runners, device, rules):
        """A race that it wins, whatever else the machine does meanwhile."""
        for runner in runners:
            runner.times_us.append(1.0 if runner.candidate.origin == "user" else 2.0)
        return {}

    monkeypatch.setattr(choose, "_take_turns", decided)
    calls = []

    def breaks_later(a, b):
        calls.append(a.shape[0])
        if a.shape[0] == 50:
            raise RuntimeError("tile table exhausted")
        return a @ b

    registry = KernelRegistry()
    registry.register("breaks_later", breaks_later, precision="mxfp8", trusted=True)
    manager = ProductionKernelManager(registry)
    a, b = operands("cpu", m=50)
    # 50 and 64 share a bucket: chosen at 64, it fails at 50, and the product is computed all the same.
    assert manager.gemm(torch.randn(64, 96), b, precision="mxfp8").shape == (64, 64)
    assert calls
    assert sqnr_db(a @ b, manager.gemm(a, b, precision="mxfp8")) > 27
    assert "tile table exhausted" in registry.aside()["breaks_later"]
    count = len(calls)
    manager.gemm(a, b, precision="mxfp8")
    assert len(calls) == count


def test_what_was_decided_can_be_read(manager):
    a, b = operands("cpu")
    manager.gemm(a, b, precision="fp8")
    info = json.loads(json.dumps(manager.info()))
    assert {"device", "candidates", "choices", "activations"} <= set(info)
    assert info["choices"][0]["kernel"] == "emulated_fp8"
    assert "ProductionKernelManager(KernelRegistry(" in repr(manager)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"b": torch.zeros(64, 96)}, ConfigError, r"b is \[K, N\] as for torch.mm; pass weight.T"),
        ({"b": torch.zeros(96)}, ConfigError, r"b has shape \(96,\); it needs at least 2"),
        ({"b": torch.zeros(96, 64).double()}, ConfigError, r"operands of torch.float64"),
        ({"b": torch.zeros(96, 64).half()}, ConfigError, "a is torch.float32 on cpu and b torch.float16"),
        ({"b": [1.0]}, ConfigError, "b must be a torch.Tensor, got list"),
        ({"activation": "tanh"}, ConfigError, "activation is 'tanh'"),
        ({"bias": torch.zeros(3)}, ConfigError, r"bias must have shape \(64,\)"),
        ({"precision": "fp9"}, ConfigError, "format 'fp9' is not known"),
        ({"a": torch.zeros(4, 96, requires_grad=True)}, UnsupportedError, "train through dw.compile"),
    ],
)
def test_wrong_arguments_are_named(manager, arguments, error, message):
    given = {"a": torch.zeros(48, 96), "b": torch.zeros(96, 64), **arguments}
    with pytest.raises(error, match=message):
        manager.gemm(given.pop("a"), given.pop("b"), **given)


def test_a_kernel_without_epilogue_gets_one(manager):
    registry = KernelRegistry()
    registry.register("mine", user_kernels.right, precision="mxfp8")
    a, b = operands("cpu")
    bias = torch.randn(64)
    got = ProductionKernelManager(registry).gemm(a, b, activation="gelu", bias=bias, precision="mxfp8")
    assert sqnr_db(F.gelu(a @ b + bias), got) > 27


def test_what_is_no_registry_is_named():
    with pytest.raises(ConfigError, match="registry is a str"):
        ProductionKernelManager("fast")


# ---- the other doors: CutlassKernel and MicroscaleManager ----


def kernel_of(precision="mxfp8", **config):
    return CutlassKernel(CutlassConfig(**config)).initialize(48, 64, 96, precision)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CutlassConfig(tile="bogus"), "tile is 'bogus'; it is the name of a configuration"),
        (lambda: CutlassConfig(tile=3), "tile is 3"),
        (lambda: CutlassConfig(use_tcgen05="no"), "use_tcgen05 is 'no'"),
        (lambda: kernel_of("nvfp4", microscale_block_size=32), "is 32; nvfp4 has blocks of 16"),
        (lambda: kernel_of("mxfp8", microscale_block_size=16), "is 16; mxfp8 has blocks of 32"),
        (lambda: CutlassKernel().initialize(True, 64, 96), "m is True; it must be a whole number"),
        (lambda: CutlassKernel().initialize(48, 64, 96, "mxfp8", "no"), "use_microscaling is 'no'"),
    ],
)
def test_a_cutlass_kernel_that_cannot_be_is_refused_on_any_device(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_block_sizes_and_tiles_that_fit_are_taken():
    assert kernel_of("nvfp4", microscale_block_size=16).precision == "nvfp4"
    assert kernel_of("nvfp4").precision == "nvfp4"  # the format's own
    kernel = kernel_of(tile="128x128x128_1x1_1sm")
    kernel.gemm(*operands("cpu"))
    assert "tile 128x128x128_1x1_1sm is for block-scaled kernels" in kernel.reason


@pytest.mark.parametrize("precision", ["fp32", "mxfp8"])
def test_numbers_take_every_activation_that_codes_take(precision):
    a, b = operands("cpu")
    bias = torch.randn(64)
    plain = kernel_of(precision).gemm(a, b, bias=bias)
    assert_bitwise_equal(kernel_of(precision).gemm(a, b, bias=bias, activation="none"), plain)
    assert_bitwise_equal(
        kernel_of(precision).gemm(a, b, bias=bias, activation="gelu_tanh"), F.gelu(plain, approximate="tanh")
    )


@pytest.mark.parametrize(
    ("epilogue", "message"),
    [
        ({"bias": torch.zeros(3)}, r"bias must have shape \(64,\), got \(3,\)"),
        ({"bias": torch.zeros(48, 64)}, r"bias must have shape \(64,\), got \(48, 64\)"),
        ({"bias": "b"}, r"bias must have shape \(64,\), got str"),
        ({"bias": torch.zeros(64, dtype=torch.int32)}, "bias has dtype torch.int32"),
        ({"activation": "tanh"}, "activation is 'tanh'; it takes .*gelu_tanh"),
        ({"activation": ["gelu"]}, r"activation is \['gelu'\]"),
    ],
)
@pytest.mark.parametrize("of_codes", [True, False])
def test_a_wrong_epilogue_is_named_for_numbers_and_codes(of_codes, epilogue, message):
    a, b = operands("cpu")
    left, right = MicroscaleManager.quantize_mxfp8(a), MicroscaleManager.quantize_mxfp8(b.T.contiguous())
    given = (left[0], right[0], left[1], right[1]) if of_codes else (a, b)
    with pytest.raises(ConfigError, match=message):
        kernel_of().gemm(*given, **epilogue)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (lambda s: s[:, :2], r"scales is .* \(4, 2\) on cpu; it must be torch.float8_e8m0fnu \(4, 3\)"),
        (lambda s: s[:2], r"scales is .* \(2, 3\)"),
        (lambda s: s.float(), r"scales is torch.float32 \(4, 3\)"),
        (lambda s: None, "scales is a NoneType; it must be torch.float8_e8m0fnu"),
    ],
)
def test_scales_that_are_not_the_codes_own_are_named(scales, message):
    codes, own = MicroscaleManager.quantize_mxfp8(torch.randn(4, 96))
    with pytest.raises(ConfigError, match=message):
        MicroscaleManager.dequantize_mxfp8(codes, scales(own))
    kernel = CutlassKernel().initialize(4, 4, 96)
    if scales(own) is not None:
        with pytest.raises(ConfigError, match=f"a_{message}"):
            kernel.gemm(codes, codes, scales(own), own)
    with pytest.raises(ConfigError, match="dtype is 'bf16'"):
        MicroscaleManager.dequantize_mxfp8(codes, own, dtype="bf16")


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (2, 0, 64), (0,)], ids=str)
def test_nothing_comes_back_as_nothing(shape):
    made = MicroscaleManager.quantize_mxfp8(torch.zeros(shape))
    back = MicroscaleManager.dequantize_mxfp8(*made, dtype=torch.bfloat16)
    assert back.shape == shape and back.dtype is torch.bfloat16


def test_scales_may_be_of_flattened_rows():
    x = torch.randn(2, 3, 64)
    codes, scales = MicroscaleManager.quantize_mxfp8(x)
    flat = MicroscaleManager.dequantize_mxfp8(codes, scales.view(torch.uint8).reshape(6, 2).view(scales.dtype))
    assert_bitwise_equal(flat, MicroscaleManager.dequantize_mxfp8(codes, scales))
