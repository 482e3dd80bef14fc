"""Bias and activation at once: no worse than torch, FP8 rows bit-equal, the bias's gradient a sum over tokens."""

import pytest
import torch
import torch.nn.functional as F

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than
from deepwell.formats.quantize import quantize
from deepwell.kernels.activation import bias_activation as B
from deepwell.kernels.activation.functions import ACTIVATIONS
from deepwell.kernels.activation.swiglu import GluOptions
from deepwell.kernels.device.triton_support import next_power_of_2
from deepwell.kernels.norm.rms_norm import BackwardConfig

E4M3 = torch.float8_e4m3fn
CONFIGS = [
    BackwardConfig(num_warps=32, programs_per_sm=1, num_stages=2),
    BackwardConfig(num_warps=16, programs_per_sm=2),
]
TORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def make(t, f, device):
    x = torch.randn(t, f) * torch.tensor([0.1, 1.0, 4.0, 20.0]).repeat(t)[:t, None]
    return tuple(tensor.bfloat16().to(device) for tensor in (x, torch.randn(f), torch.randn(t, f)))


def torch_values(act, x, b, dh, dtype):
    x, b, dh = (tensor.to(dtype, copy=True) for tensor in (x, b, dh))
    x.requires_grad_()
    b.requires_grad_()
    h = TORCH[act](x + b)
    return h.detach(), *torch.autograd.grad(h, (x, b), dh)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(9, 300), (1, 128), (5, 40), (2, 8200)], ids=str)
def test_forward_and_gradients_are_no_worse_than_torch(device, act, shape):
    x, b, dh = make(*shape, device)
    options = GluOptions(act=act)
    h = B.bias_activation(x, b, options=options).h
    grads = B.bias_activation_backward(dh, x, b, options=options)
    exact = torch_values(act, x, b, dh, torch.float64)
    own = torch_values(act, x, b, dh, torch.bfloat16)
    for got, theirs, ref in zip((h, grads.grad, grads.db), own, exact, strict=True):
        assert_no_worse_than(got, theirs, ref)


def test_fp8_rows_are_the_quantized_results_bit_for_bit(device):
    x, b, dh = make(6, 200, device)
    dh[2] = 0
    both, alone = GluOptions(act="gelu", fp8=E4M3), GluOptions(act="gelu", fp8=E4M3, write=False)
    made, grads = B.bias_activation(x, b, options=both), B.bias_activation_backward(dh, x, b, options=both)
    for q, scale, high in ((made.q, made.scale, made.h), (grads.q, grads.scale, grads.grad)):
        wanted = quantize(high, "fp8_e4m3_row_pow2")
        assert_bitwise_equal(q, wanted.data, "codes")
        assert_bitwise_equal(scale, wanted.scales[:, 0], "scales")
    only = B.bias_activation_backward(dh, x, b, options=alone)
    assert only.grad is None
    assert_bitwise_equal(only.q, grads.q, "codes alone")
    assert_bitwise_equal(only.db, grads.db, "db alone")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_config_agrees(device, config):
    x, b, dh = make(7, 1100, device)
    options = GluOptions(act="gelu_tanh", fp8=E4M3)
    got = B.bias_activation_backward(dh, x, b, options=options, config=config)
    ref = B.bias_activation_backward(dh, x, b, options=options)
    assert_bitwise_equal(got.q, ref.q, "codes")
    torch.testing.assert_close(got.db, ref.db, rtol=2**-7, atol=1e-3)  # programs may add up in another order


def test_rows_too_wide_for_registers_take_steps(device):
    x, b, dh = make(3, B.MAX_COLUMNS + 8, device)
    got = B.bias_activation_backward(dh, x, b, options=GluOptions(act="gelu", fp8=E4M3, write=False))
    assert got.grad is None
    exact, own = (torch_values("gelu", x, b, dh, dtype) for dtype in (torch.float64, torch.bfloat16))
    assert_no_worse_than(got.db, own[2], exact[2])
    codes = got.q.float() * got.scale[:, None]
    assert (codes - exact[1]).norm() < 0.04 * exact[1].norm()


def test_a_nan_shows_in_its_row_and_its_column(device):
    x, b, dh = make(4, 140, device)
    x[2, 13] = float("nan")
    options = GluOptions(act="relu", fp8=E4M3)
    assert B.bias_activation(x, b, options=options).scale.isnan().tolist() == [False, False, True, False]
    x[2, 13], dh[1, 7] = 0, float("nan")
    grads = B.bias_activation_backward(dh, x, b, options=GluOptions(act="gelu", fp8=E4M3))
    assert grads.scale.isnan().tolist() == [False, True, False, False]
    assert grads.db.isnan().nonzero().flatten().tolist() == [7]


def test_strided_rows_and_no_rows_are_taken(device):
    x, b, dh = make(4, 96, device)
    wide = torch.zeros(4, 128, dtype=torch.bfloat16, device=device)
    wide[:, :96] = x
    ref = B.bias_activation_backward(dh, x, b)
    assert_bitwise_equal(B.bias_activation_backward(dh, wide[:, :96], b).grad, ref.grad, "grad")
    assert_bitwise_equal(B.bias_activation(wide[:, :96], b).h, B.bias_activation(x, b).h, "h")
    none = B.bias_activation_backward(dh[:0], x[:0], b, options=GluOptions(act="gelu", fp8=E4M3))
    assert (none.grad.shape, none.q.shape) == ((0, 96), (0, 96))
    assert not none.db.any()


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda x, b: B.bias_activation(x, b[:3]), "b_F must have shape"),
        (lambda x, b: B.bias_activation(x[0], b), "x_TF must have two dimensions"),
        (lambda x, b: B.bias_activation_backward(x[:1], x, b), "dh_TF must have shape"),
    ],
)
def test_wrong_arguments_are_named(call, names):
    with pytest.raises(ConfigError, match=names):
        call(torch.randn(2, 8), torch.randn(8))


# ---- what the compiler makes of it, without a GPU ----


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("columns", [3072, 6144, 8192, 16384])
def test_the_backward_compiles_to_vectors_without_spills(arch, act, columns):
    config = B.default_backward_config(columns)
    arguments = {
        **dict.fromkeys(("dh_ptr", "x_ptr", "b_ptr"), torch.bfloat16),
        "grad_ptr": None,
        "q_ptr": E4M3,
        **dict.fromkeys(("scale_ptr", "db_ptr"), torch.float32),
        **dict.fromkeys(("T", "F", "stride_dht", "stride_xt"), "i32"),
        "FP8_MAX": 448.0,
        "ACT": act,
        "BLOCK": next_power_of_2(columns),
        "NUM_STAGES": config.num_stages,
    }
    made = aot.compile_kernel(B._bias_activation_backward_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.shared_bytes <= aot.MAX_SHARED_BYTES
    # Loads go through shared memory in lines of 16 bytes, codes out in lines of 8 or more.
    assert made.count(r"cp\.async\S* \[[^\]]*\], \[[^\]]*\], 0x10|ld\.global\S*\.v4\.b32") >= 2
    assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0
