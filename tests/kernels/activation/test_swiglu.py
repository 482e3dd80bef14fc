"""SwiGLU and plain activations: no worse than torch at the same dtype, FP8 rows bit-equal to quantizing the result."""

import pytest
import torch
import torch.nn.functional as F

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than
from deepwell.formats.quantize import quantize
from deepwell.kernels.activation import swiglu as S
from deepwell.kernels.activation.functions import ACTIVATIONS
from deepwell.kernels.quantize.fp8 import RowConfig

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}
# Whole rows and rows in tiles, the last tile ragged.
CONFIGS = [RowConfig(tile=0, num_warps=4), RowConfig(tile=128, num_warps=4)]


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def make(t, f, device):
    """Gates over the whole range where the activation bends, and far beyond it."""
    gate = torch.randn(t, f) * torch.tensor([0.1, 1.0, 4.0, 20.0]).repeat(t)[:t, None]
    tensors = (gate, torch.randn(t, f), torch.randn(t, f))
    return tuple(tensor.bfloat16().to(device) for tensor in tensors)


def torch_values(act, g, u, dh, dtype):
    g, u, dh = (None if tensor is None else tensor.to(dtype, copy=True) for tensor in (g, u, dh))
    inputs = [tensor.requires_grad_() for tensor in (g, u) if tensor is not None]
    h = TORCH[act](g) if u is None else TORCH[act](g) * u
    return h.detach(), torch.cat(torch.autograd.grad(h, inputs, dh), dim=1)


@pytest.mark.parametrize(
    ("act", "config"),
    [*((act, CONFIGS[0]) for act in ACTIVATIONS), *((act, CONFIGS[1]) for act in ("silu", "gelu_tanh"))],
)
@pytest.mark.parametrize("is_gated", [True, False])
def test_forward_and_gradients_are_no_worse_than_torch(device, act, config, is_gated):
    g, u, dh = make(6, 300, device)
    u = u if is_gated else None
    options = S.GluOptions(act=act)
    if is_gated:
        h = S.swiglu(torch.cat([g, u], dim=1), options=options, config=config).h
        grad = S.swiglu_backward(dh, torch.cat([g, u], dim=1), options=options, config=config).grad
    else:
        h = S.activation(g, options=options, config=config).h
        grad = S.activation_backward(dh, g, options=options, config=config).grad
    exact = torch_values(act, g, u, dh, torch.float64)
    own = torch_values(act, g, u, dh, torch.bfloat16)
    assert_no_worse_than(h, own[0], exact[0])
    assert_no_worse_than(grad, own[1], exact[1])


@pytest.mark.parametrize("config", CONFIGS, ids=["whole", "tiles"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_rows_are_the_quantized_results_bit_for_bit(device, config, dtype):
    g, u, dh = make(5, 200, device)
    g[3], u[4] = 0, 0
    gate_up = torch.cat([g, u], dim=1)
    name = f"fp8_{'e4m3' if dtype == E4M3 else 'e5m2'}_row_pow2"
    options = S.GluOptions(fp8=dtype, recompute_h=True)
    made = S.swiglu(gate_up, options=options, config=config)
    grads = S.swiglu_backward(dh, gate_up, options=options, config=config)
    # One scale serves a row's d gate and d up together; the h of backward is always E4M3, a forward operand.
    for q, scale, high, wanted_name in (
        (made.q, made.scale, made.h, name),
        (grads.q, grads.scale, grads.grad, name),
        (grads.q_h, grads.scale_h, made.h, "fp8_e4m3_row_pow2"),
    ):
        wanted = quantize(high, wanted_name)
        assert_bitwise_equal(q, wanted.data, "codes")
        assert_bitwise_equal(scale, wanted.scales[:, 0], "scales")


@pytest.mark.parametrize("config", CONFIGS, ids=["whole", "tiles"])
def test_codes_alone_are_those_written_beside_the_results(device, config):
    g, u, dh = make(4, 160, device)
    gate_up = torch.cat([g, u], dim=1)
    alone, beside = S.GluOptions(write=False, fp8=E4M3), S.GluOptions(fp8=E4M3, recompute_h=True)
    a, b = (S.swiglu(gate_up, options=options, config=config) for options in (alone, beside))
    assert a.h is None
    assert_bitwise_equal(a.q, b.q, "codes of h")
    c, d = (S.swiglu_backward(dh, gate_up, options=options, config=config) for options in (alone, beside))
    assert (c.grad, c.q_h) == (None, None)
    assert_bitwise_equal(c.q, d.q, "codes of the gradients")
    # As the engine's backward asks: both sets of rows, no gradient in high precision.
    both = S.GluOptions(write=False, fp8=E4M3, recompute_h=True)
    e = S.swiglu_backward(dh, gate_up, options=both, config=config)
    assert e.grad is None
    for name in ("q", "scale", "q_h", "scale_h"):
        assert_bitwise_equal(getattr(e, name), getattr(d, name), name)


def test_gate_and_up_may_lie_apart(device):
    g, u, dh = make(4, 96, device)
    merged, apart = S.swiglu(torch.cat([g, u], dim=1)), S.swiglu(g, u)
    assert_bitwise_equal(apart.h, merged.h, "h")
    grads = S.swiglu_backward(dh, g, u).grad
    assert_bitwise_equal(grads, S.swiglu_backward(dh, torch.cat([g, u], dim=1)).grad, "gradients")


@pytest.mark.parametrize("config", dict.fromkeys((*S.FORWARD_CONFIGS, *S.BACKWARD_CONFIGS)), ids=str)
def test_every_config_gives_the_same_bits(device, config):
    g, u, dh = make(3, 2300, device)
    options = S.GluOptions(fp8=E4M3, recompute_h=True)
    got = S.swiglu_backward(dh, g, u, options=options, config=config)
    ref = S.swiglu_backward(dh, g, u, options=options)
    for name in ("grad", "q", "scale", "q_h", "scale_h"):
        assert_bitwise_equal(getattr(got, name), getattr(ref, name), name)
    made, wanted = (S.swiglu(g, u, options=options, config=c) for c in (config, None))
    assert_bitwise_equal(made.q, wanted.q, "q")


@pytest.mark.parametrize("config", CONFIGS, ids=["whole", "tiles"])
def test_a_nan_shows_in_its_row_alone(device, config):
    g, u, dh = make(4, 140, device)
    g[2, 139] = float("nan")
    options = S.GluOptions(fp8=E4M3, recompute_h=True)
    only_two = [False, False, True, False]
    assert S.swiglu(g, u, options=options, config=config).scale.isnan().tolist() == only_two
    grads = S.swiglu_backward(dh, g, u, options=options, config=config)
    assert grads.scale.isnan().tolist() == only_two
    assert grads.scale_h.isnan().tolist() == only_two
    assert grads.q[2].float().isnan().all()


@pytest.mark.parametrize("config", CONFIGS, ids=["whole", "tiles"])
@pytest.mark.parametrize("is_gated", [True, False])
def test_factors_of_rows_give_the_bits_of_rows_multiplied_before(device, config, is_gated):
    # What a FP8 GEMM leaves to its reader: powers of two, another for every row, and NaN for a row that is NaN.
    gate, up, dh = make(5, 300, device)
    x = torch.cat([gate, up], dim=1) if is_gated else gate
    factors = S.RowFactors(
        gate_up=torch.tensor([1.0, 2.0**-3, 2.0**4, 2.0**-20, torch.nan], device=device),
        dh=torch.tensor([2.0**-9, 1.0, 2.0**-30, 2.0**2, 1.0], device=device),
    )
    scaled_x, scaled_dh = ((a.float() * b[:, None]).to(a.dtype) for a, b in ((x, factors.gate_up), (dh, factors.dh)))
    forward, backward = (S.swiglu, S.swiglu_backward) if is_gated else (S.activation, S.activation_backward)
    options = S.GluOptions(fp8=E4M3, recompute_h=is_gated)
    got = forward(x, factors=factors._replace(dh=None), options=options, config=config)
    got += backward(dh, x, factors=factors, options=options, config=config)
    wanted = forward(scaled_x, options=options, config=config)
    wanted += backward(scaled_dh, scaled_x, options=options, config=config)
    assert bool(got[1].view(torch.uint8)[0].any()) and bool(got[2][4].isnan())
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_bitwise_equal(one[:4], other[:4])  # a NaN may have either sign
            assert torch.equal(one[4].isnan(), other[4].isnan())


def test_no_tokens_give_empty_results(device):
    x = torch.empty(0, 64, device=device)
    assert S.swiglu(x, options=S.GluOptions(fp8=E4M3)).q.shape == (0, 32)
    assert S.swiglu_backward(x[:, :32], x).grad.shape == (0, 64)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda x: S.swiglu(x[:, :5]), "gate and up must be equally wide"),
        (lambda x: S.swiglu(x, x[:, :4]), "up_TF must have shape"),
        (lambda x: S.swiglu(x, x.half()), "up_TF has dtype"),
        (lambda x: S.swiglu_backward(x, x), "dh_TF must have shape"),
        (lambda x: S.GluOptions(act="mish"), "act must be one of"),
        (lambda x: S.GluOptions(write=False), "nothing would be written"),
        (lambda x: S.GluOptions(fp8=torch.int8), "fp8 must be"),
    ],
)
def test_wrong_arguments_are_named(call, names):
    with pytest.raises(ConfigError, match=names):
        call(torch.randn(2, 8))


# ---- what the compiler makes of them, without a GPU ----


FACTORS = [None, torch.float32]


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("columns", [3072, 14336])
@pytest.mark.parametrize("factor", FACTORS, ids=["scaled", "with factors"])
def test_the_forward_compiles_to_vectors_without_spills(arch, columns, factor):
    config = S.default_forward_config(columns)
    arguments = {
        **dict.fromkeys(("g_ptr", "u_ptr"), torch.bfloat16),
        "b_ptr": None,
        "factor_ptr": factor,
        "h_ptr": None,
        "q_ptr": E4M3,
        "scale_ptr": torch.float32,
        **dict.fromkeys(("F", "stride_gt", "stride_ut"), "i32"),
        "FP8_MAX": 448.0,
        "ACT": "silu",
        "BLOCK": config.block(columns),
        "TWO_PASSES": config.tile > 0,
        "ASM": True,
    }
    made = aot.compile_kernel(S._swiglu_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"ld\.global\S*\.v4\.b32") >= 2
    assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0


@pytest.mark.parametrize(("arch", "columns"), [(90, 3072), (90, 4096), (90, 8192), (90, 14336), (100, 4096)])
@pytest.mark.parametrize("factor", FACTORS, ids=["scaled", "with factors"])
def test_the_backward_with_three_rows_in_and_three_out_compiles_without_spills(arch, columns, factor):
    config = S.default_backward_config(columns)
    arguments = {
        **dict.fromkeys(("dh_ptr", "g_ptr", "u_ptr"), torch.bfloat16),
        **dict.fromkeys(("dh_factor_ptr", "factor_ptr"), factor),
        "grad_ptr": None,
        **dict.fromkeys(("q_ptr", "qh_ptr"), E4M3),
        **dict.fromkeys(("scale_ptr", "scale_h_ptr"), torch.float32),
        **dict.fromkeys(("F", "stride_dht", "stride_gt", "stride_ut"), "i32"),
        "FP8_MAX": 448.0,
        "ACT": "silu",
        "BLOCK": config.block(columns),
        "TWO_PASSES": config.tile > 0,
        "ASM": True,
    }
    made = aot.compile_kernel(
        S._swiglu_backward_kernel,
        arguments,
        arch=arch,
        num_warps=config.num_warps,
        max_registers=config.max_registers,
    )
    assert made.spill_bytes == made.stack_bytes == 0
    # Rounded two at a time, and no number waits for the slow unit but by exp2 and the reciprocal.
    assert made.count(r"cvt\.rn\.bf16x2\.f32") > 0 and made.count(r"cvt\.rn\.bf16\.f32") == 0
    assert made.count(r"div\.full") == 0
    # At least two rows on a multiprocessor at once.
    assert 2 * made.registers * 32 * config.num_warps <= 65536
    assert made.count(r"ld\.global\S*\.v4\.b32") >= 3
    assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0
