"""Activations that models write out become one op, whatever their spelling, and nothing else does."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor

import deepwell as dw
from deepwell.engine.passes.gelu import rewrite_gelu

C = math.sqrt(2 / math.pi)


def _new(x: Tensor) -> Tensor:  # GPT-2, Phi, GPT-J
    return 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0))))


def _bloom(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def _fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _quick(x: Tensor) -> Tensor:  # CLIP
    return x * torch.sigmoid(1.702 * x)


def _swish(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def _in_fp32(x: Tensor) -> Tensor:
    y = x.float()
    return (y * 0.5 * (1 + torch.erf(y / 2**0.5))).to(x.dtype)


TANH, ERF = (lambda x: F.gelu(x, approximate="tanh")), F.gelu
SPELLINGS = {_new: TANH, _bloom: TANH, _fast: TANH, _erf: ERF, _quick: _quick, _swish: F.silu, _in_fp32: ERF}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_written_out_activation_becomes_one_op(run_pass, spelling: Callable, dtype) -> None:
    # After a linear and before a sum, as in a model: x and the result are read and made by other pointwise ops too.
    def block(x: Tensor) -> Tensor:
        return spelling(x * 3 + 1) * 2

    x = torch.randn(5, 32, dtype=dtype)
    done = run_pass(block, rewrite_gelu, x)
    assert done.found == 1
    assert len(done.names()) == 4
    exact = SPELLINGS[spelling]((x * 3 + 1).double()) * 2
    torch.testing.assert_close(done.out.double(), exact, rtol=2**-6 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def _other_constant(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.79 * (x + 0.044715 * torch.pow(x, 3.0))))


def _other_sigmoid(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.5 * x)


def _tanh_alone(x: Tensor) -> Tensor:
    return torch.tanh(x) * x


def _two_tensors(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * (x.roll(1) + x))


def _read_inside(x: Tensor) -> Tensor:
    bent = torch.sigmoid(1.702 * x)
    return x * bent + bent.sum()


def _written_into(x: Tensor) -> Tensor:
    bent = torch.sigmoid(1.702 * x)
    bent.mul_(x)
    return bent


def _of_whole_numbers(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x.to(torch.int32))


def _of_signs(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.bool().to(x.dtype) * 1.702)


@pytest.mark.parametrize(
    "function",
    [
        _other_constant, _other_sigmoid, _tanh_alone, _two_tensors, _read_inside, _written_into, _of_whole_numbers,
        _of_signs,
    ],
)  # fmt: skip
def test_another_expression_stays(run_pass, function) -> None:
    x = 3 * torch.randn(5, 32)
    done = run_pass(function, rewrite_gelu, x)
    assert done.found == 0
    torch.testing.assert_close(done.out, function(x))


def test_a_float64_model_keeps_its_own(run_pass) -> None:
    assert run_pass(_new, rewrite_gelu, torch.randn(3, 8, dtype=torch.float64)).found == 0


@pytest.mark.parametrize("model_type", ["gpt2", "phi", "gptj", "gpt_neo"])
def test_it_fires_on_published_architectures(model_type, batch) -> None:
    model = zoo_models.tiny_model(model_type).eval()
    engine = dw.compile(model, precision="bf16")
    loss = engine(**batch).loss
    loss.backward()
    assert engine.report().passes["gelu"] == 2
    torch.testing.assert_close(loss, model(**batch).loss, rtol=1e-5, atol=0)
