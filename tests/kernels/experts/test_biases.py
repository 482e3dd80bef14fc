"""The down projection's biases: what they add to tokens and their gradients, near to sums in fp64."""

from functools import partial

import pytest
import torch

from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.experts import biases as B
from deepwell.kernels.experts.group_rows import choice_layout
from deepwell.kernels.gemm import product_in_fp32 as P

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
T, D, E, K = 70, 40, 6, 3


@pytest.fixture(params=["reference", "halves", pytest.param("cuda", marks=GPU)])
def device(request, monkeypatch):
    """By torch's products in fp32; as a GPU does it, with a CPU's products; on a GPU."""
    if request.param == "halves":
        for module in (B, P):
            monkeypatch.setattr(module, "runs_on_tensor_cores", lambda _a, b: b.dtype == torch.bfloat16)
        monkeypatch.setattr(P.torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    return "cuda" if request.param == "cuda" else "cpu"


def routing(device, dtype=torch.float32):
    """(choices, their weights, groups): one token of nobody, one that chose an expert twice."""
    torch.manual_seed(0)
    index = torch.rand(T, E).argsort(1)[:, :K]
    index[3], index[5, 1] = -1, index[5, 0]
    weight = torch.rand(T, K).to(dtype)
    return index, weight, choice_layout(index.flatten().to(device), E)


def exact(index, weight, bias):
    """[T, D] in fp64, choice by choice."""
    live = torch.where(index >= 0, weight.double(), 0.0)
    return (live[:, :, None] * bias.double()[index.clamp(min=0)]).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_get_their_choices_biases_and_are_rounded_once(device, dtype):
    index, weight, groups = routing(device)
    y, bias = torch.randn(T, D).to(dtype), torch.randn(E, D).to(dtype)
    by_expert = B.weights_by_expert(weight.flatten().to(device), *groups, K)
    got = B.add_down_bias(y.to(device), by_expert, bias.to(device)).cpu()
    added = exact(index, weight, bias)
    wanted = y.double() + added
    half = torch.finfo(dtype).eps / 2
    room = half * wanted.abs() + 2.0**-17 * exact(index, weight, bias.abs()) + 1e-6
    assert got.dtype == dtype and ((got.double() - wanted).abs() <= room).all()
    assert_bitwise_equal(got[3], y[3], "a token of nobody")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_each_choice(device, dtype):
    index, weight, groups = routing(device)
    bias = torch.randn(E, D).to(dtype).double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    dy = torch.randn(T, D).to(dtype)
    d_bias, d_weight = torch.autograd.grad(exact(index, exact_weight, bias), (bias, exact_weight), dy.double())
    given = dy.to(device)
    got = B.down_bias_grad(given, weight.flatten().to(device), *groups, K).cpu()
    room = partial(torch.testing.assert_close, rtol=2.0**-16, atol=2.0**-17 * T)
    room(got.double(), d_bias)
    got = B.down_bias_grad_of_weights(given, bias.detach().to(device, dtype), *groups, K).cpu()
    room(got.double(), d_weight.flatten())
    assert not got.view(T, K)[3].any()
