"""The experts' SwiGLU, weighted by the router: FP8 rows forward and backward, and the router's gradient."""

import pytest
import torch
import torch.nn.functional as F

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.experts import swiglu as X
from deepwell.kernels.quantize.fp8 import RowConfig, quantize_rows_ref

E4M3 = torch.float8_e4m3fn
TILED = RowConfig(tile=128, num_warps=4)


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def operands(rows, width, choices, device, dtype=torch.bfloat16):
    """Rows whose slots are a mixed subset of the choices; every third row holds none."""
    gate_up = torch.randn(rows, 2 * width)
    slot = torch.full((rows,), -1, dtype=torch.int32)
    live = torch.arange(rows) % 3 != 2
    slot[live] = torch.randperm(choices)[: int(live.sum())].int()
    gate_up[~live] = 0
    weight = torch.rand(choices)
    dh = torch.randn(rows, width)
    dh[~live] = 0
    made = (gate_up.to(dtype), weight.to(dtype), slot, dh.to(dtype))
    return [part.to(device) for part in made]


def values(q, scale):
    return q.float() * scale[:, None]


@pytest.mark.parametrize("config", [None, TILED], ids=["whole", "tiled"])
@pytest.mark.parametrize(("width", "act"), [(16, "silu"), (136, "gelu_tanh"), (300, "silu")])
def test_hidden_rows_are_quantized_from_what_torch_computes(device, config, width, act):
    gate_up, weight, slot, _ = operands(20, width, 20, device)
    q, scale = X.expert_swiglu(gate_up, weight, slot, act=act, config=config)
    g, u = gate_up.float().chunk(2, 1)
    gated = (F.silu(g) if act == "silu" else F.gelu(g, approximate="tanh")) * u
    w = torch.where(slot >= 0, weight.float()[slot.clamp(min=0).long()], 0.0)
    # Half a unit of E4M3 (3 bits of mantissa, 2^-9 the smallest number) after bf16's rounding, for every element.
    wanted = gated * w[:, None]
    bound = wanted.abs() * (2**-4 + 2**-7) + scale[:, None] * 2**-10
    assert ((values(q, scale) - wanted).abs() <= bound).all()
    assert not q.view(torch.uint8)[slot < 0].any()
    assert (scale.log2() % 1 == 0).all()


@pytest.mark.parametrize("config", [None, TILED], ids=["whole", "tiled"])
@pytest.mark.parametrize("width", [16, 136, 300])
def test_the_kernel_is_the_reference_but_for_its_exponential(device, config, width):
    # Triton's exp and torch's differ in the last bit; a bf16 rounding and a code may follow. Seen: under 1 in 1000.
    gate_up, weight, slot, dh = operands(11, width, 20, device)
    forward = X.expert_swiglu(gate_up, weight, slot, config=config), X.expert_swiglu_ref(gate_up, weight, slot, "silu")
    made = X.expert_swiglu_backward(dh, gate_up, weight, slot, config=config)
    wanted = X.expert_swiglu_backward_ref(dh, gate_up, weight, slot, "silu")
    for (q, scale), (q_ref, scale_ref) in (forward, (made[:2], wanted[:2]), (made[2:4], wanted[2:4])):
        assert_bitwise_equal(scale, scale_ref, "scales")
        assert (q.view(torch.uint8) != q_ref.view(torch.uint8)).float().mean() < 0.005
    torch.testing.assert_close(made.dw_S, wanted.dw_S, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [None, TILED], ids=["whole", "tiled"])
def test_gradients_are_those_of_autograd(device, config):
    gate_up, weight, slot, dh = operands(12, 200, 20, device, torch.float32)
    leaf, w = gate_up.double().requires_grad_(), weight.double().requires_grad_()
    g, u = leaf.chunk(2, 1)
    rows = torch.where(slot >= 0, w[slot.clamp(min=0).long()], 0.0)
    h = F.silu(g) * u * rows[:, None]
    d_gate_up, d_weight = torch.autograd.grad(h, (leaf, w), dh.double())
    made = X.expert_swiglu_backward(dh, gate_up, weight, slot, config=config)
    assert sqnr_db(d_gate_up, values(made.q, made.scale).double()) > 30
    assert sqnr_db(h, values(made.q_h, made.scale_h).double()) > 30
    torch.testing.assert_close(made.dw_S.double(), d_weight, rtol=1e-5, atol=1e-5)


def test_hidden_rows_made_again_are_those_of_the_forward(device):
    gate_up, weight, slot, dh = operands(9, 96, 9, device)
    made = X.expert_swiglu_backward(dh, gate_up, weight, slot)
    for name, got, ref in zip(("q", "scale"), made[2:4], X.expert_swiglu(gate_up, weight, slot), strict=True):
        assert_bitwise_equal(got, ref, name)


def test_choices_that_no_row_holds_get_no_gradient(device):
    gate_up, weight, slot, dh = operands(9, 16, 30, device)
    dw = X.expert_swiglu_backward(dh, gate_up, weight, slot).dw_S
    held = torch.zeros(30, dtype=torch.bool, device=device)
    held[slot[slot >= 0].long()] = True
    assert not dw[~held].any()
    assert dw[held].all()


def test_a_nan_row_stays_visible_and_alone(device):
    gate_up, weight, slot, dh = operands(6, 32, 6, device)
    gate_up[1, 5] = float("nan")
    _, scale = X.expert_swiglu(gate_up, weight, slot)
    assert scale.isnan().nonzero().flatten().tolist() == [1]
    made = X.expert_swiglu_backward(dh, gate_up, weight, slot)
    assert made.scale.isnan().nonzero().flatten().tolist() == [1]
    assert made.dw_S.isnan().nonzero().flatten().tolist() == [slot[1].item()]


def test_no_rows_give_no_rows(device):
    gate_up, weight, slot, dh = (t[:0] for t in operands(3, 16, 3, device))
    assert X.expert_swiglu(gate_up, weight, slot)[0].shape == (0, 16)
    assert X.expert_swiglu_backward(dh, gate_up, weight, slot).q.shape == (0, 32)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda g, w, s, d: X.expert_swiglu(g[:, :-1].contiguous(), w, s), "two equal halves"),
        (lambda g, w, s, d: X.expert_swiglu(g, w, s[:-1]), "slot_P must have shape"),
        (lambda g, w, s, d: X.expert_swiglu(g, w, s, act="tanh"), "act must be one of"),
        (lambda g, w, s, d: X.expert_swiglu_backward(d[:, :-1], g, w, s), "dh_PF must have shape"),
        (lambda g, w, s, d: X.expert_swiglu_backward(d.float(), g, w, s), "dh_PF has dtype"),
    ],
)
def test_wrong_arguments_are_named(call, names):
    with pytest.raises(ConfigError, match=names):
        call(*operands(6, 16, 6, "cpu"))


def test_quantized_rows_have_the_layout_of_row_quantization():
    gate_up, weight, slot, _ = operands(6, 16, 6, "cpu")
    q, scale = X.expert_swiglu(gate_up, weight, slot)
    plain, plain_scale = quantize_rows_ref(gate_up[:, :16].contiguous())
    assert (q.dtype, q.shape, scale.shape) == (plain.dtype, plain.shape, plain_scale.shape)


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("width", [768, 14336])
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_kernels_divide_exactly_and_read_lines_of_sixteen_bytes(arch, width, is_backward):
    # Widths of Qwen3-30B-A3B and Mixtral 8x7B with the configs they get there.
    config = X.expert_backward_config(width) if is_backward else X.default_forward_config(width)
    kernel = X._expert_swiglu_backward_kernel if is_backward else X._expert_swiglu_kernel
    types = {
        **dict.fromkeys(("dh_ptr", "gu_ptr", "weight_ptr"), torch.bfloat16),
        **dict.fromkeys(("kept_ptr", "top_ptr")),
        "slot_ptr": torch.int32,
        **dict.fromkeys(("q_ptr", "qh_ptr"), E4M3),
        **dict.fromkeys(("scale_ptr", "scale_h_ptr", "dw_ptr"), torch.float32),
        "F": "i32",
        "ACT": "silu",
        "BLOCK": config.block(width),
        "TWO_PASSES": config.tile > 0,
        "ASM": True,
    }
    arguments = {name: types[name] for name in kernel.arg_names}
    limits = {"num_warps": config.num_warps, "max_registers": config.max_registers}
    made = aot.compile_kernel(kernel, arguments, arch=arch, **limits)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"div\.rn\.f32") >= 1
    assert made.count(r"ld\.global[\w.:]*\.v4\.b32") >= 1
