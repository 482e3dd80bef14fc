"""An FP8 head makes dW in the backward, with the loss' gradient in a scale of the GEMM: any gradient, any backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import deepwell as dw
from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.binding import Target
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.head import autograd
from deepwell.kernels.head import torch_ops as library_head
from deepwell.kernels.head.linear_cross_entropy import HeadOptions, linear_cross_entropy
from deepwell.kernels.head.scale_by_scalar import scale_by_ref
from deepwell.kernels.norm import rms_norm

T, D, V = 48, 32, 64
FP8 = "fp8_row|fp8_row|fp8_row"


@pytest.fixture(params=["eager", "aot", "inductor"])
def way(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """How a function runs: op by op, as AOTAutograd's graphs, as Inductor's code."""
    if request.param == "inductor":
        request.getfixturevalue("cxx_compiler")
    if request.param == "eager":
        return lambda function: function
    options = BackendOptions(use_inductor=request.param == "inductor")
    return lambda function: torch.compile(
        function, backend=lambda graph, inputs: compile_graph(graph, inputs, options), dynamic=False
    )


def _leaves(device: str, dtype: torch.dtype = torch.bfloat16, tokens: int = T) -> tuple[list[Tensor], Tensor]:
    x, w, b = torch.randn(tokens, D), torch.randn(V, D) / 5, torch.randn(V)
    y = torch.randint(0, V, (tokens,), device=device)
    y[3] = -100
    return [t.to(device, dtype).requires_grad_() for t in (x, w, b)], y


def _loss(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, fp8: bool = True) -> Tensor:
    return autograd.linear_cross_entropy(x, w, b, y, -100, "mean", fp8, 1.0, 0.0)


def _grads(run: Callable[..., Tensor], leaves: list[Tensor], y: Tensor, factor: float) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(*leaves, y), leaves, torch.tensor(factor, device=y.device))


def test_the_gradient_of_one_is_the_kernels_own_bit_for_bit(device, way) -> None:
    leaves, y = _leaves(device)
    x, w, b = (t.detach() for t in leaves)
    whole = linear_cross_entropy(x, w, y, bias_V=b, head=HeadOptions(fp8=True))
    for mine, theirs in zip(_grads(way(_loss), leaves, y, 1.0), whole[1:], strict=True):
        assert_bitwise_equal(mine, theirs)


@pytest.mark.parametrize("factor", [0.25, -2.0, 65536.0, 2.0**-40])
def test_powers_of_two_scale_the_gradients_exactly(device, way, factor) -> None:
    # Gradient accumulation over four micro-batches, a loss that is subtracted, an fp16 loss scale, a far one.
    leaves, y = _leaves(device)
    run = way(_loss)
    for scaled, plain in zip(_grads(run, leaves, y, factor), _grads(run, leaves, y, 1.0), strict=True):
        assert_bitwise_equal(scaled, plain * factor)


@pytest.mark.parametrize("factor", [3.0, -1 / 3, 1e-20])
def test_any_other_factor_is_rounded_once_with_dw(way, factor) -> None:
    # Bounds of exact sums: a GPU's own, shorter than fp32 among 128 terms, would hide the rounding that is meant.
    leaves, y = _leaves("cpu")
    x, w, b = (t.detach() for t in leaves)
    codes = library_head.linear_cross_entropy_codes(x, w, y, bias_V=b, head=HeadOptions(fp8=True)).codes
    exact = (codes.qg_VT.double() * codes.g_scale) @ (codes.qx_DT.double() * codes.x_scale).T * factor

    def most(dw: Tensor) -> float:
        """The largest error, 1 for what one rounding to bf16 can do."""
        return float(((dw.double() - exact).abs() / exact.abs()).nan_to_num().max() / 2**-8)

    dx, dw_once, db = _grads(way(_loss), leaves, y, factor)
    one = _grads(_loss, leaves, y, 1.0)
    assert most(dw_once) <= 1.01  # and the sums' own roundings in fp32, where terms cancel
    assert most(one[1] * factor) > 1.2  # as a pass over dW would have it: rounded twice
    assert_bitwise_equal(dx, one[0] * torch.tensor(factor))
    assert_bitwise_equal(db, one[2] * torch.tensor(factor))


def test_any_other_factor_scales_dw_within_two_roundings(device, way) -> None:
    leaves, y = _leaves(device)
    three, one = (_grads(way(_loss), leaves, y, factor)[1] for factor in (3.0, 1.0))
    torch.testing.assert_close(three, 3 * one, rtol=2**-7, atol=0)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_factor_that_bf16_does_not_hold_is_not_rounded_to_it(device, way, fp8) -> None:
    # Torch's product on a GPU does: a loss over three micro-batches gave 0.334 of the gradient.
    leaves, y = _leaves(device)
    run = way(partial(_loss, fp8=fp8))
    third, one = (_grads(run, leaves, y, factor) for factor in (1 / 3, 1.0))
    for mine, whole in zip(third[::2] if fp8 else third, one[::2] if fp8 else one, strict=True):
        assert_bitwise_equal(mine, scale_by_ref(whole, torch.tensor(1 / 3, device=device)))


def test_no_gradient_and_none_that_is_a_number(device, way) -> None:
    # A loss that counts for nothing leaves zeros; an overflow must be seen in dW too, where loss scalers look for it.
    leaves, y = _leaves(device)
    run = way(_loss)
    assert not any(grad.any() for grad in _grads(run, leaves, y, 0.0))
    for factor in (float("inf"), float("-inf"), float("nan")):
        assert not _grads(run, leaves, y, factor)[1].isfinite().any()


def test_a_second_backward_of_a_retained_graph_gives_the_same_gradients(device, way) -> None:
    leaves, y = _leaves(device)
    loss = way(_loss)(*leaves, y)
    factor = torch.tensor(0.25, device=device)
    first, second = (torch.autograd.grad(loss, leaves, factor, retain_graph=True) for _ in range(2))
    whole = torch.autograd.grad(loss, leaves)
    for mine, again, all_of_it in zip(first, second, whole, strict=True):
        assert_bitwise_equal(mine, again)
        assert_bitwise_equal(4 * mine, all_of_it)


def test_gradients_accumulate_over_micro_batches(device, way) -> None:
    (x, w, b), y = _leaves(device)
    run = way(_loss)
    halves = [(x[:32], y[:32]), (x[16:], y[16:])]
    parts = [torch.autograd.grad(run(part, w, b, target) / 2, w)[0] for part, target in halves]
    for part, target in halves:
        (run(part, w, b, target) / 2).backward()
    assert_bitwise_equal(w.grad, parts[0] + parts[1])


@pytest.mark.parametrize("tokens", [T, 27])
@pytest.mark.parametrize("trained", ["all", "body", "bias", "head"])
def test_what_is_kept_for_the_backward(device, tokens, trained) -> None:
    # The codes of du and x where dW is wanted, never dW itself; nothing of either where the head is frozen.
    (x, w, b), y = _leaves(device, tokens=tokens)
    wanted = {"all": (x, w, b), "body": (x,), "bias": (b,), "head": (w,)}[trained]
    for leaf in (x, w, b):
        leaf.requires_grad_(any(leaf is t for t in wanted))
    kept: list[tuple[int, ...]] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = _loss(x, w, b, y)
    filled = -(-tokens // 16) * 16
    codes = [(V, filled), (), (D, filled), ()]
    assert kept == {"all": [*codes, (tokens, D), (V,)], "body": [(tokens, D)], "bias": [(V,)], "head": codes}[trained]
    loss.backward()
    assert [leaf.grad is not None for leaf in (x, w, b)] == [any(leaf is t for t in wanted) for leaf in (x, w, b)]


class Tiny(nn.Module):
    """A head whose sizes FP8 takes, its loss, and a norm whose backward comes after the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.lm_head = nn.Embedding(V, D), nn.RMSNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(self.norm(self.embed(x))), y)


def test_compiled_code_frees_the_codes_before_the_rest_of_the_backward(cxx_compiler, monkeypatch) -> None:
    # Nobody waits for dW: a compiler would put its GEMM last, and T x V bytes of codes would stand at the peak.
    model, (x, y) = Tiny().bfloat16(), torch.randint(0, V, (2, T))
    codes: list[StorageWeakRef] = []
    seen: list[bool] = []
    made, norm = library_head.linear_cross_entropy_codes, rms_norm.norm_backward

    def noting(*args: Any, **kwargs: Any) -> Any:
        out = made(*args, **kwargs)
        codes[:] = [StorageWeakRef(t.untyped_storage()) for t in (out.codes.qg_VT, out.codes.qx_DT)]
        return out

    def looking(*args: Any, **kwargs: Any) -> Any:
        seen.extend(code.expired() for code in codes)
        return norm(*args, **kwargs)

    monkeypatch.setattr(library_head, "linear_cross_entropy_codes", noting)
    monkeypatch.setattr(rms_norm, "norm_backward", looking)
    options = BackendOptions(schemes={"lm_head": FP8}, use_inductor=True, parameters=model.named_parameters)
    loss = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))(x, y)
    assert len(codes) == 2 and not any(code.expired() for code in codes)
    loss.backward()
    assert seen == [True, True]


def test_a_models_scaled_loss_scales_the_gradient_of_its_fp8_head(monkeypatch) -> None:
    # A CPU that is taken for a GPU: there the head's products are FP8's own, not emulated ones.
    hopper = Target(kind="cuda", capability=(9, 0))
    monkeypatch.setattr("deepwell.engine.compile.device_of", lambda tensors: hopper)
    monkeypatch.setattr("deepwell.engine.compile.use_inductor", lambda asked, device: False)
    model, (x, y) = Tiny(), torch.randint(0, V, (2, T))
    policy = dw.PrecisionPolicy("bf16")
    policy.set_layer_precision("path:lm_head", "fp8", scaling="row")
    engine = dw.compile(model, precision_policy=policy, measure=False)
    found = []
    for factor in (1.0, 4.0, 3.0):
        model.zero_grad()
        (engine(x, y) * factor).backward()
        found.append(model.lm_head.weight.grad.clone())
    names = {call.name for call in engine.options.calls}
    assert {"linear_cross_entropy_codes", "linear_cross_entropy_backward"} <= names
    assert_bitwise_equal(found[1], 4 * found[0])
    torch.testing.assert_close(found[2], 3 * found[0], rtol=1e-5, atol=1e-9)


def test_a_head_in_parts_of_an_odd_vocabulary(monkeypatch) -> None:
    # The forward as the model has it, gradients in FP8, 61 words padded to whole lines.
    monkeypatch.setattr("deepwell.engine.compile.device_of", lambda tensors: Target(kind="cuda", capability=(9, 0)))
    monkeypatch.setattr("deepwell.engine.compile.use_inductor", lambda asked, device: False)
    model, (x, y) = Tiny(), torch.randint(0, 61, (2, T))
    model.lm_head = nn.Linear(D, 61, bias=False)
    policy = dw.PrecisionPolicy("bf16")
    policy.set_layer_precision("path:lm_head", "mxfp8", gemms=("dgrad", "wgrad"))
    engine = dw.compile(model, precision_policy=policy, measure=False)
    wanted = model(x, y)
    wanted_grad = torch.autograd.grad(wanted, model.lm_head.weight)[0]
    loss = engine(x, y)
    loss.backward()
    assert "linear_cross_entropy_codes" in {call.name for call in engine.options.calls}
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    assert 20 < sqnr_db(wanted_grad, model.lm_head.weight.grad) < 45
