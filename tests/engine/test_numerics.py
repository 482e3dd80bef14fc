"""On a CPU the engine is exact: each GEMM equals the formats' reference on the same operands; gradients hold."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepwell as dw
from deepwell.errors import ConfigError
from deepwell.formats.hadamard import DEFAULT_SIGNS
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than, sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels.activation.autograd import activation, bias_activation, swiglu, swiglu_packed
from deepwell.kernels.gemm import fp8 as gemm
from deepwell.kernels.gemm.fp8 import fp8_gemm_ref
from deepwell.kernels.gemm.linear import cached_linear, low_precision_linear
from deepwell.kernels.gemm.schemes import parse_scheme
from deepwell.kernels.head.autograd import linear_cross_entropy
from deepwell.kernels.norm.autograd import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from deepwell.kernels.quantize.fp8 import quantize_rows_ref
from deepwell.kernels.quantize.weight_cache_launches import Codes, CodesRefresh
from deepwell.kernels.rope.autograd import rope, rope_qkv
from deepwell.kernels.tune import fastest
from deepwell.precision.gemm_format import precision

# 48 tokens, widths that are whole blocks and widths that are not.
SHAPES = [(48, 64, 96), (37, 40, 24)]


class One(nn.Module):
    def __init__(self, k: int, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(k, n, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _rounded(x: Tensor, side) -> Tensor:
    signs = DEFAULT_SIGNS if side.hadamard else None
    if side.hadamard:
        x = F.pad(x, (0, -x.shape[-1] % 16))
    return quantize(x.contiguous(), side.format, rounding=side.rounding, hadamard=signs).dequantize()


def _product(name: str, step: str, left: Tensor, right: Tensor, options: dict) -> Tensor:
    """`left @ right.T` by the formats' reference alone."""
    how = precision(name, options).gemm(step)
    return (_rounded(left, how.lhs) @ _rounded(right, how.rhs).T).to(left.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mxfp8", {}),
        ("mxfp8", {"gradients": "e5m2"}),
        ("nvfp4", {"stochastic_rounding": False}),
        ("nvfp4", {"stochastic_rounding": False, "hadamard": False}),
        ("nvfp4", {}),  # stochastic: the same seed gives the same gradients
        ("fp8", {}),
        ("fp8", {"scaling": "row"}),
        ("fp8", {"scaling": "1x128"}),
        ("mxfp4", {"stochastic_rounding": False}),
        ("mxfp6", {}),
    ],
    ids=str,
)
def test_each_gemm_equals_the_formats_reference_bit_for_bit(name, options, shape, dtype) -> None:
    t, k, n = shape
    model = One(k, n, dtype)
    policy = dw.PrecisionPolicy()
    policy.set_default(name, **options)
    policy.set_layer_precision("path:linear", name, **options)  # the only linear looks like a head
    engine = dw.compile(model, precision_policy=policy)
    x = torch.randn(t, k, dtype=dtype, requires_grad=True)
    dy = torch.randn(t, n, dtype=dtype)
    y = engine(x)
    assert engine.options.rewritten == {"linear"}
    torch.manual_seed(7)
    y.backward(dy)
    w = model.linear.weight
    assert_bitwise_equal(y, _product(name, "fwd", x, w, options), "y")
    torch.manual_seed(7)
    assert_bitwise_equal(x.grad, _product(name, "dgrad", dy, w.T, options), "dx")
    assert_bitwise_equal(w.grad, _product(name, "wgrad", dy.T, x.T, options), "dw")


def test_stochastic_rounding_of_gradients_is_right_on_average() -> None:
    # 300 draws of one gradient: their mean comes near the exact product, far nearer than rounding to nearest does.
    torch.manual_seed(0)
    x, w, dy = torch.randn(32, 32), torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)
    scheme = "|".join(["emulate:nvfp4,hadamard=False"] * 3)

    def gradient(how: str) -> Tensor:
        return torch.autograd.grad(low_precision_linear(x, [w], None, how), w, dy)[0]

    draws = torch.stack([gradient(scheme) for _ in range(300)])
    nearest = gradient("|".join(["emulate:nvfp4,stochastic_rounding=False,hadamard=False"] * 3))
    # The activation is rounded to nearest in both: the mean converges to the product with that activation.
    target = dy.T @ _rounded(x.T, precision("nvfp4", {"hadamard": False}).gemm("wgrad").rhs).T
    assert draws.std(0).min() > 0
    assert sqnr_db(target, draws.mean(0)) > sqnr_db(target, nearest) + 10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_rows_equal_the_kernels_reference(shape) -> None:
    t, k, n = shape
    x = torch.randn(t, k, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(n, k, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(t, n, dtype=torch.bfloat16)
    y = low_precision_linear(x, [w], None, "fp8_row|fp8_row|fp8_row")
    y.backward(dy)
    q_x, s_x = quantize_rows_ref(x.detach())
    q_w, s_w, largest = torch.ops.deepwell.quantize_weights([w.detach()])
    q_wt, s_wt = torch.ops.deepwell.quantize_weights_transposed([w.detach()], largest, dy)
    # One scale, one set of codes: the backward multiplies by the weight that the forward multiplied by.
    assert_bitwise_equal(q_wt.view(torch.uint8), q_w.view(torch.uint8).T.contiguous(), "transposed codes")
    assert_bitwise_equal(s_wt, s_w, "scale")
    q_dy, s_dy = quantize_rows_ref(dy)
    assert_bitwise_equal(y, fp8_gemm_ref(q_x, s_x, q_w, s_w, out_dtype=torch.bfloat16), "y")
    assert_bitwise_equal(x.grad, fp8_gemm_ref(q_dy, s_dy, q_wt, s_w, out_dtype=torch.bfloat16), "dx")
    # Signal to noise against the exact products: DESIGN's floor for E4M3.
    for got, ref in (
        (y, x.float() @ w.float().T),
        (x.grad, dy.float() @ w.float()),
        (w.grad, dy.float().T @ x.float()),
    ):
        assert sqnr_db(ref, got) > 27


def test_merged_weights_give_the_products_of_their_parts() -> None:
    x = torch.randn(32, 48, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(n, 48, dtype=torch.bfloat16, requires_grad=True) for n in (32, 16, 24)]
    y = low_precision_linear(x, weights, None, "fp8_row|fp8_row|fp8_row")
    dy = torch.randn_like(y)
    y.backward(dy)
    assert sqnr_db(x.detach().float() @ torch.cat(weights).detach().float().T, y) > 27
    for w, part in zip(weights, dy.split([32, 16, 24], dim=1), strict=True):
        assert w.grad.shape == w.shape
        assert sqnr_db(part.float().T @ x.detach().float(), w.grad) > 27


def test_a_weight_stored_the_other_way_has_the_same_codes() -> None:
    w = torch.randn(24, 40)
    transposed = w.T.contiguous().T
    ops = torch.ops.deepwell
    largest = ops.quantize_weights([w])[2]
    for mine, ref in zip(ops.quantize_weights([transposed]), ops.quantize_weights([w]), strict=True):
        assert_bitwise_equal(mine, ref)
    for mine, ref in zip(
        ops.quantize_weights_transposed([transposed], largest, w),
        ops.quantize_weights_transposed([w], largest, w),
        strict=True,
    ):
        assert_bitwise_equal(mine, ref)


def test_mixed_schemes_run_each_gemm_by_itself() -> None:
    x = torch.randn(32, 48, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(64, 48, dtype=torch.bfloat16, requires_grad=True)
    y = low_precision_linear(x, [w], None, "fp8_row|bf16|emulate:mxfp8")
    dy = torch.randn_like(y)
    y.backward(dy)
    assert_bitwise_equal(x.grad, dy @ w, "dx")
    assert_bitwise_equal(w.grad, _product("mxfp8", "wgrad", dy.T, x.T, {}), "dw")


def test_a_scheme_that_is_none_says_what_is() -> None:
    with pytest.raises(ConfigError, match=r"fwd\|dgrad\|wgrad"):
        parse_scheme("fp8_row")
    with pytest.raises(ConfigError, match="bf16, fp8_row, <format>_native or emulate"):
        parse_scheme("fp9|fp9|fp9")


# ---- gradients of every differentiable op ----


def _against_fp32(function, reference, inputs: list[Tensor]) -> None:
    """Forward and gradients in bf16: no worse than twice torch's own error at bf16 against fp32."""

    def run(f, tensors: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
        out = f(*leaves)
        generator = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.is_floating_point())]

    exact = run(reference, [t.float() if t.is_floating_point() else t for t in inputs])
    for got, own, ref in zip(run(function, inputs), run(reference, inputs), exact, strict=True):
        assert_no_worse_than(got, own, ref)


def _bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("rounding", ["llama", "torch"])
def test_rms_norm_gradients(rounding) -> None:
    def reference(x: Tensor, w: Tensor) -> Tensor:
        n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (n.to(x.dtype) * w) if rounding == "llama" else (n * w.float()).to(x.dtype)

    _against_fp32(lambda x, w: rms_norm(x, w, 1e-6, rounding), reference, [_bf16(3, 7, 40), _bf16(40)])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, convention: str) -> Tensor:
    """Heads [B, S, H, D] transposed as complex numbers, pair by pair: what a rotation is, whoever writes it."""
    half = cos.shape[-1] // 2
    x, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    pairs = x.unflatten(-1, (2, half)).transpose(-2, -1) if convention == "half" else x.unflatten(-1, (half, 2))
    picked = slice(0, half) if convention == "half" else slice(0, None, 2)
    turn = torch.complex(cos[..., picked].float(), sin[..., picked].float()).unsqueeze(-2)
    transposed = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    y = transposed.transpose(-2, -1) if convention == "half" else transposed
    return torch.cat((y.flatten(-2).to(rest.dtype), rest), dim=-1)


def _angles(length: int, width: int, convention: str) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(length), 10.0 ** -torch.linspace(0, 4, width // 2))
    angle = torch.cat((angle, angle), -1) if convention == "half" else angle.repeat_interleave(2, -1)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


@pytest.mark.parametrize("convention", ["half", "interleaved"])
@pytest.mark.parametrize("width", [16, 8], ids=["whole heads", "half of each head"])
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_rotation_gradients(heads_dim, width, convention) -> None:
    cos, sin = _angles(7, width, convention)

    def reference(x: Tensor) -> Tensor:
        swapped = x.transpose(1, 2) if heads_dim == 1 else x
        y = _rotated(swapped, cos[None], sin[None], convention)
        return y.transpose(1, 2) if heads_dim == 1 else y

    x = _bf16(2, 3, 7, 16) if heads_dim == 1 else _bf16(2, 7, 3, 16)
    _against_fp32(lambda x: rope(x, cos[None], sin[None], convention, heads_dim), reference, [x])


@pytest.mark.parametrize("convention", ["half", "interleaved"])
@pytest.mark.parametrize(("packing", "heads"), [("blocks", (4, 2, 2)), ("heads", (3, 3, 3))])
def test_gradients_of_q_k_and_v_rotated_at_once(packing, heads, convention) -> None:
    cos, sin = (table[None] for table in _angles(7, 16, convention))

    def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat((q, k, v), dim=2)

    def reference(qkv: Tensor) -> Tensor:
        if packing == "heads":
            q, k, v = qkv.unflatten(-1, (heads[0], 3, 16)).unbind(-2)
        else:
            q, k, v = qkv.unflatten(-1, (-1, 16)).split(list(heads), dim=2)
        return joined(_rotated(q, cos, sin, convention), _rotated(k, cos, sin, convention), v)

    def mine(qkv: Tensor) -> Tensor:
        return joined(*rope_qkv(qkv, cos, sin, heads, packing, convention))

    _against_fp32(mine, reference, [_bf16(2, 7, sum(heads) * 16)])


def test_gradients_through_kept_codes() -> None:
    x, weights = _bf16(48, 64), [_bf16(32, 64), _bf16(16, 64)]
    codes = Codes.empty(64, [32, 16], [False, False], torch.device("cpu"))
    CodesRefresh([codes]).refresh([weights])

    def gradients(f) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, *weights)]
        y = f(leaves[0], leaves[1:])
        y.backward(torch.ones_like(y).cumsum(0))
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    fp8 = "fp8_row|fp8_row|fp8_row"
    kept = gradients(lambda x, ws: cached_linear(x, ws, None, fp8, codes.rows, codes.columns, codes.scale))
    made = gradients(lambda x, ws: low_precision_linear(x, ws, None, fp8))
    exact = gradients(lambda x, ws: F.linear(x.float(), torch.cat(ws).float()))
    for got, same, ref in zip(kept, made, exact, strict=True):
        assert_bitwise_equal(got, same)
        assert sqnr_db(ref, got) > 27


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activation_gradients(act) -> None:
    f = ACTIVATIONS[act]
    _against_fp32(lambda g, u: swiglu(g, u, act), lambda g, u: f(g) * u, [_bf16(3, 7, 24), _bf16(3, 7, 24)])
    _against_fp32(lambda x: swiglu_packed(x, act), lambda x: f(x[..., :24]) * x[..., 24:], [_bf16(3, 7, 48)])
    _against_fp32(lambda x: activation(x, act), f, [_bf16(3, 7, 24)])
    _against_fp32(lambda x, b: bias_activation(x, b, act), lambda x, b: f(x + b), [_bf16(3, 7, 24), _bf16(24)])


@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_gradients(has_bias) -> None:
    def ours(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return layer_norm(x, w, b, 1e-5)

    def reference(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, (40,), w, b, 1e-5)

    _against_fp32(ours, reference, [_bf16(3, 7, 40), _bf16(40), *([_bf16(40)] if has_bias else [])])


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("reads_sum", [True, False])
def test_norm_after_addition_gradients(kind, reads_sum) -> None:
    # The gradient that reaches the sum past the norm is added inside the norm's backward; at the end there is none.
    def together(total: Tensor, y: Tensor) -> Tensor:
        return torch.cat([total, y], dim=-1) if reads_sum else y

    def ours(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if kind == "rms":
            return together(*add_rms_norm(x, r, w, 1e-6, "torch")) + 0 * b.sum()
        return together(*add_layer_norm(x, r, w, b, 1e-6))

    def reference(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
        total = x + r
        y = F.rms_norm(total, (40,), w, 1e-6) + 0 * b.sum() if kind == "rms" else F.layer_norm(total, (40,), w, b, 1e-6)
        return together(total, y)

    _against_fp32(ours, reference, [_bf16(3, 7, 40), _bf16(3, 7, 40), _bf16(40), _bf16(40)])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_linear_cross_entropy_gradients(reduction) -> None:
    target = torch.randint(0, 50, (28,))
    target[3] = -100

    def reference(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        logits = F.linear(x, w).float()
        return F.cross_entropy(logits.view(-1, 50), y, ignore_index=-100, reduction=reduction)

    def ours(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, None, y, -100, reduction, False, 1.0, 0.0)

    _against_fp32(ours, reference, [_bf16(4, 7, 24), _bf16(50, 24), target])
    with torch.no_grad():  # the forward that makes no gradients gives the same loss
        x, w = _bf16(28, 24), _bf16(50, 24)
        torch.testing.assert_close(ours(x, w, target), reference(x, w, target), rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_second_backward_of_a_retained_head_gives_the_same_gradients(is_compiled) -> None:
    # They are made in the forward and kept: scaling them in place would scale them twice.
    x, w = _bf16(28, 24).requires_grad_(), _bf16(50, 24).requires_grad_()
    target = torch.randint(0, 50, (28,))

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, None, target, -100, "mean", False, 1.0, 0.0)

    loss = (torch.compile(ours, backend="aot_eager") if is_compiled else ours)(x, w)
    first, second = (torch.autograd.grad(loss, (x, w), torch.tensor(0.25), retain_graph=True) for _ in range(2))
    (whole,) = torch.autograd.grad(loss, w)
    for mine, theirs in zip(first, second, strict=True):
        assert_bitwise_equal(mine, theirs)
    assert_bitwise_equal(4 * first[1], whole)  # a power of two: exact


@pytest.mark.parametrize("scale", [1.0, 0.25, -2.0])
@pytest.mark.parametrize("cap", [0.0, 8.0])
def test_gradients_of_a_head_with_bias_scale_and_cap(scale, cap) -> None:
    target = torch.randint(0, 50, (28,))

    def reference(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        z = F.linear(x, w, b) * scale
        z = torch.tanh(z / cap) * cap if cap else z
        return F.cross_entropy(z.float(), y)

    def ours(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, b, y, -100, "mean", False, scale, cap)

    inputs = [_bf16(28, 24), _bf16(50, 24), _bf16(50)]

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
        loss = function(*leaves, target)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    got, own, exact = run(ours, torch.bfloat16), run(reference, torch.bfloat16), run(reference, torch.float32)
    # One number, which torch may hit by luck: what rounding the product to bf16 can do to it.
    largest = (inputs[0].float() @ inputs[1].float().T).abs().max() * abs(scale)
    assert abs(got[0] - exact[0]) <= 2**-9 * largest
    for mine, theirs, ref in zip(got[1:], own[1:], exact[1:], strict=True):
        assert_no_worse_than(mine, theirs, ref)


@pytest.mark.parametrize("tokens", [32, 27])
def test_an_fp8_head_takes_any_number_of_tokens(tokens) -> None:
    x, w = _bf16(tokens, 32), _bf16(48, 32) / 5
    y = torch.randint(0, 48, (tokens,))
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    loss = linear_cross_entropy(*leaves, None, y, -100, "mean", True, 1.0, 0.0)
    loss.backward()
    exact = [t.float().requires_grad_() for t in (x, w)]
    ref = F.cross_entropy(exact[0] @ exact[1].T, y)
    ref.backward()
    assert abs(loss - ref) < 0.02 * ref
    for mine, theirs in zip(leaves, exact, strict=True):
        assert mine.grad.shape == theirs.grad.shape
        assert sqnr_db(theirs.grad, mine.grad) > 20  # a layer's gradients (docs/numerics.md)
    with torch.no_grad():
        again = linear_cross_entropy(x, w, None, y, -100, "mean", True, 1.0, 0.0)
        torch.testing.assert_close(again, loss, rtol=1e-3, atol=0)


def test_bf16_linear_is_torchs_own() -> None:
    x, w, b = _bf16(9, 24), _bf16(40, 24), _bf16(40)
    _against_fp32(lambda x, w, b: low_precision_linear(x, [w], b, "bf16|bf16|bf16"), F.linear, [x, w, b])


@pytest.mark.parametrize("head", [False, True])
def test_sums_over_tokens_and_words_are_in_fp32(head, monkeypatch) -> None:
    # Fast accumulation cuts off what is added to a large sum: 20 % of the gradient of v in one model on an H200.
    seen: list[tuple[int, bool]] = []
    real = gemm.fp8_gemm

    def noting(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, *, fast: bool = True, **how: Any) -> Tensor:
        seen.append((a.shape[1], fast))
        return real(a, scale_a, b, scale_b, fast=fast, **how)

    monkeypatch.setattr(fastest, "fp8_gemm", noting)
    tokens, width, words = 48, 32, 64
    x, w = _bf16(tokens, width).requires_grad_(), _bf16(words, width).requires_grad_()
    if head:
        target = torch.randint(0, words, (tokens,))
        linear_cross_entropy(x, w, None, target, -100, "mean", True, 1.0, 0.0).backward()
        assert seen == [(width, True), (words, False), (tokens, False)]
    else:
        low_precision_linear(x, [w], None, "fp8_row|fp8_row|fp8_row").sum().backward()
        assert seen == [(width, True), (words, True), (tokens, False)]
