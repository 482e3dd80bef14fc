"""ProductionKernelManager: products on any device through one door."""

import json

import pytest
import torch
import torch.nn.functional as F

import user_kernels
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels import KernelRegistry, select
from deepwell.kernels.production_kernels import ProductionKernelManager

ACTIVATIONS = {None: lambda x: x, "gelu": F.gelu, "silu": F.silu, "relu": F.relu}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture
def manager() -> ProductionKernelManager:
    select.forget()
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


@pytest.mark.parametrize(("precision", "floor"), [("bf16", 40), ("fp8", 27), ("mxfp8", 27), ("nvfp4", 14), ("fp4", 14)])
def test_every_precision_runs_and_keeps_its_signal(manager, device, precision, floor):
    a, b = (x.bfloat16() for x in operands(device))
    assert sqnr_db(a.float() @ b.float(), manager.gemm(a, b, precision=precision)) > floor


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


def test_a_users_kernel_competes_and_a_broken_one_is_replaced_while_it_runs():
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
