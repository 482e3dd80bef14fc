"""FP8 rows between the experts' products for any activation, and the biases' gradients, against torch."""

import pytest
import torch

from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.experts import biases as B
from deepwell.kernels.experts import hidden_codes as X
from deepwell.kernels.experts.activation import ExpertActivation
from deepwell.kernels.experts.swiglu import expert_swiglu, expert_swiglu_backward
from deepwell.kernels.quantize.fp8 import quantize_rows_ref
from launches import on_absent_gpu

HOW = {
    "swiglu": ExpertActivation(),
    "gpt_oss": ExpertActivation(interleaved=True, limit=0.9, alpha=1.702, up_shift=1.0),
    "clamped": ExpertActivation(limit=0.7),
    "relu2": ExpertActivation(function="relu2", gated=False),
}


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def operands(width, how, device, dtype=torch.bfloat16, rows=20, choices=20):
    """Rows whose slots are a mixed subset of the choices; every third row holds none."""
    torch.manual_seed(0)
    slot = torch.full((rows,), -1, dtype=torch.int32)
    live = torch.arange(rows) % 3 != 2
    slot[live] = torch.randperm(choices)[: int(live.sum())].int()
    gate_up, dh = torch.randn(rows, width * (1 + how.gated)), torch.randn(rows, width)
    made = (gate_up.to(dtype), torch.rand(choices).to(dtype), slot, dh.to(dtype))
    return [part.to(device) for part in made]


def values(q, scale):
    return q.double() * scale[:, None]


@pytest.mark.parametrize("width", [16, 136, 1100])
@pytest.mark.parametrize("name", HOW)
def test_the_kernels_are_the_references_but_for_their_exponential(device, name, width):
    how = HOW[name]
    gate_up, weight, slot, dh = operands(width, how, device)
    made = (*X.hidden_codes(gate_up, weight, slot, how), *X.grad_codes(dh, gate_up, weight, slot, how))
    wanted = (*X.hidden_codes_ref(gate_up, weight, slot, how), *X.grad_codes_ref(dh, gate_up, weight, slot, how))
    for q, q_ref in ((made[i], wanted[i]) for i in (0, 2, 4)):
        assert (q.view(torch.uint8) != q_ref.view(torch.uint8)).float().mean() < 0.005
    for scale, scale_ref in ((made[i], wanted[i]) for i in (1, 3, 5)):
        assert_bitwise_equal(scale, scale_ref, "scales")
    torch.testing.assert_close(made[6], wanted[6], rtol=1e-5, atol=1e-4)
    assert not made[0].float()[slot < 0].any()


@pytest.mark.parametrize("name", HOW)
def test_gradients_are_those_of_autograd(device, name):
    how = HOW[name]
    gate_up, weight, slot, dh = operands(200, how, device, torch.float32)
    leaf, w = gate_up.double().requires_grad_(), weight.double().requires_grad_()
    h = how.of_rows(leaf) * torch.where(slot >= 0, w[slot.clamp(min=0).long()], 0.0)[:, None]
    d_rows, d_weight = torch.autograd.grad(h, (leaf, w), dh.double())
    q, scale, q_h, scale_h, dw = X.grad_codes(dh, gate_up, weight, slot, how)
    assert sqnr_db(d_rows, values(q, scale)) > 30
    assert sqnr_db(h, values(q_h, scale_h)) > 30
    torch.testing.assert_close(dw.double(), d_weight, rtol=1e-5, atol=1e-4)


def test_of_swiglu_they_are_those_of_its_own_kernels(device):
    gate_up, weight, slot, dh = operands(136, HOW["swiglu"], device)
    wanted = (*expert_swiglu(gate_up, weight, slot), *expert_swiglu_backward(dh, gate_up, weight, slot))
    how = HOW["swiglu"]
    made = (*X.hidden_codes(gate_up, weight, slot, how), *X.grad_codes(dh, gate_up, weight, slot, how))
    for got, ref in zip(made[:6], wanted[:6], strict=True):
        assert sqnr_db(ref.double(), got.double()) > 45


def test_no_rows_and_wrong_columns(device):
    how = HOW["gpt_oss"]
    gate_up, weight, slot, _ = operands(16, how, device)
    assert X.hidden_codes(gate_up[:0], weight, slot[:0], how)[0].shape == (0, 16)
    with pytest.raises(ConfigError, match="columns for"):
        X.hidden_codes(gate_up[:, :-1].contiguous(), weight, slot, how)


@pytest.mark.parametrize("counts", [(70, 0, 3), (0, 0), (16,)])
def test_sums_of_fp8_rows_by_expert(device, counts):
    torch.manual_seed(0)
    ends = torch.tensor(counts).cumsum(0).int()
    q, scale = quantize_rows_ref(torch.randn(sum(counts) + 5, 136).bfloat16() * 3)
    got = B.code_sums(q.to(device), scale.to(device), ends.to(device)).cpu()
    rows, begin = values(q, scale), 0
    for e, end in enumerate(ends.tolist()):
        torch.testing.assert_close(got[e].double(), rows[begin:end].sum(0), rtol=1e-5, atol=1e-4)
        begin = end


def test_they_compile_for_hopper():
    how = HOW["gpt_oss"]
    gate_up, weight, slot, dh = operands(2880, how, "cpu")
    with on_absent_gpu(90) as launches:
        q, scale = X.hidden_codes(gate_up, weight, slot, how)
        X.grad_codes(dh, gate_up, weight, slot, how)
        B.code_sums(q, scale, torch.tensor([20], dtype=torch.int32))
    assert [launch.name for launch in launches] == ["_hidden_codes_kernel", "_grad_codes_kernel", "_code_sums_kernel"]
