"""The differentiable ops that the passes put into a captured graph.

Each is a small autograd function over the primitives of `deepwell.kernels.library`, so that AOTAutograd sees
quantization, GEMM and norm as separate nodes in forward and backward and later passes can fuse and share them.
"""

# Shapes: T tokens (all leading dimensions folded), K and N the widths of a linear, F the hidden width of an MLP.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepwell.engine.native_linear import MxLinear, is_mxfp8_throughout, native_gemm
from deepwell.engine.scaled_linear import is_scaled, scaled_linear
from deepwell.engine.schemes import GemmScheme, LinearScheme, parse_scheme
from deepwell.kernels import library as _library  # registers torch.ops.deepwell
from deepwell.kernels.activation import torch_ops as _activations  # registers those of activations
from deepwell.kernels.head import torch_ops as _head  # registers the ops of head and loss

assert _library.NAMESPACE == _activations.NAMESPACE == _head.NAMESPACE == "deepwell"
ops = torch.ops.deepwell

# ---- linear ----


def low_precision_linear(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    """`x @ cat(weights).T + bias` with each of its three GEMMs run as `scheme` says."""
    x_TK = x.reshape(-1, x.shape[-1])
    if is_mxfp8_throughout(parse_scheme(scheme)):
        y_TN = MxLinear.apply(x_TK, weights[0] if len(weights) == 1 else torch.cat(list(weights)))
    elif is_scaled(parse_scheme(scheme)):
        y_TN = scaled_linear(x_TK, weights, scheme, _plain_gemm)
    else:
        y_TN = _Linear.apply(x_TK, scheme, *weights)
    if bias is not None:
        y_TN = y_TN + bias
    return y_TN.view(*x.shape[:-1], y_TN.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, scheme: str, *weights: Tensor) -> Tensor:
        how = parse_scheme(scheme)
        ctx.how, ctx.widths = how, [w.shape[0] for w in weights]
        # The backward reads x as codes or as values, and the weights, whose transposed codes it makes itself.
        ctx.codes_of_x = how.wgrad.method == "fp8_row"
        saved = []
        uses_fp8 = any(gemm.method == "fp8_row" for gemm in (how.fwd, how.dgrad))
        if uses_fp8:
            q_NK, w_scale, partials = ops.quantize_weights(list(weights), True)
            saved += [partials]
        if how.fwd.method == "fp8_row" or ctx.codes_of_x:
            q_TK, x_scale = ops.quantize_rows(x_TK)
        if how.fwd.method == "fp8_row":
            y_TN = ops.fp8_gemm(q_TK, x_scale, q_NK, w_scale, how.fwd.fast).to(x_TK.dtype)
        else:
            w_NK = weights[0] if len(weights) == 1 else torch.cat(list(weights))
            y_TN = _plain_gemm(how.fwd, x_TK, w_NK)
        ctx.has_amax = uses_fp8
        saved += [q_TK, x_scale] if ctx.codes_of_x else [x_TK]
        ctx.save_for_backward(*saved, *weights)
        return y_TN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (dy_TN,) = grads
        how: LinearScheme = ctx.how
        saved = list(ctx.saved_tensors)
        partials = saved.pop(0) if ctx.has_amax else None
        x = [saved.pop(0) for _ in range(2 if ctx.codes_of_x else 1)]
        dy_TN = dy_TN.contiguous()
        wants_dx, wants_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        dx_TK = dw_NK = None
        if (wants_dx and how.dgrad.method == "fp8_row") or (wants_dw and ctx.codes_of_x):
            q_TN, dy_scale = ops.quantize_rows(dy_TN)
        if wants_dx:
            if how.dgrad.method == "fp8_row":
                q_KN, w_scale = ops.quantize_weights_transposed(saved, partials, q_TN, True)
                dx_TK = ops.fp8_gemm(q_TN, dy_scale, q_KN, w_scale, how.dgrad.fast).to(dy_TN.dtype)
            else:
                w_NK = saved[0] if len(saved) == 1 else torch.cat(saved)
                dx_TK = _plain_gemm(how.dgrad, dy_TN, w_NK.T)
        if wants_dw:
            if ctx.codes_of_x:
                operands = ops.wgrad_operands(q_TN, dy_scale, *x)
                dw_NK = ops.fp8_gemm(*operands, how.wgrad.fast).to(dy_TN.dtype)
            else:
                dw_NK = _plain_gemm(how.wgrad, dy_TN.T, x[0].T)
        parts = dw_NK.split(ctx.widths) if dw_NK is not None else [None] * len(ctx.widths)
        return dx_TK, None, *parts


def _plain_gemm(how: GemmScheme, left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T`, as the model wrote it, in a native format, or with both operands rounded exactly."""
    if how.method == "bf16":
        return left @ right.T
    if how.method == "native":
        return native_gemm(how, left, right)
    assert how.format is not None
    # The transform cancels in the product only where both sides have it.
    assert how.format.lhs.hadamard == how.format.rhs.hadamard
    operands = (
        ops.round_to(t, side.format, side.rounding, side.hadamard)
        for t, side in ((left, how.format.lhs), (right, how.format.rhs))
    )
    lhs, rhs = operands
    return (lhs @ rhs.T).to(left.dtype)


def split_columns(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """The column ranges of a merged linear's output, as views."""
    return torch.split(x, list(widths), dim=-1)


# ---- norms ----


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: str) -> Tensor:
    """RMSNorm over the last dimension, rounded before the weight ("llama") or after it ("torch")."""
    return _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps, rounding).view(x.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight: Tensor, eps: float, rounding: str) -> Tensor:
        y_TD, rstd = ops.rms_norm(x_TD, weight, eps, rounding)
        ctx.save_for_backward(x_TD, weight, rstd)
        ctx.rounding = rounding
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_TD, weight, rstd = ctx.saved_tensors
        dx_TD, dw = ops.rms_norm_backward(grads[0].contiguous(), x_TD, weight, rstd, ctx.rounding)
        return dx_TD, dw, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension."""
    return _LayerNorm.apply(x.reshape(-1, x.shape[-1]), weight, bias, eps).view(x.shape)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y_TD, mean, rstd = ops.layer_norm(x_TD, weight, bias, eps)
        ctx.save_for_backward(x_TD, weight, mean, rstd)
        ctx.has_bias = bias is not None
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_TD, weight, mean, rstd = ctx.saved_tensors
        dx_TD, dw, db = ops.layer_norm_backward(grads[0].contiguous(), x_TD, weight, mean, rstd)
        return dx_TD, dw, db if ctx.has_bias else None, None


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: str) -> tuple[Tensor, Tensor]:
    """(x + residual, RMSNorm of that sum) in one pass; in the backward both gradients meet in one kernel."""
    width = x.shape[-1]
    total, y = _AddRMSNorm.apply(x.reshape(-1, width), residual.reshape(-1, width), weight, eps, rounding)
    return total.view(x.shape), y.view(x.shape)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float, rounding: str
    ) -> tuple[Tensor, Tensor]:
        y_TD, total_TD, rstd = ops.add_rms_norm(x_TD, residual_TD, weight, eps, rounding)
        ctx.save_for_backward(total_TD, weight, rstd)
        ctx.rounding = rounding
        ctx.set_materialize_grads(False)  # nobody may read the sum past the last norm: no zeros for it
        return total_TD, y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        d_total, dy = grads
        if dy is None:
            return d_total, d_total, None, None, None
        total_TD, weight, rstd = ctx.saved_tensors
        dx_TD, dw = ops.rms_norm_backward(dy.contiguous(), total_TD, weight, rstd, ctx.rounding, d_total)
        return dx_TD, dx_TD, dw, None, None


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + residual, LayerNorm of that sum), as `add_rms_norm`."""
    width = x.shape[-1]
    total, y = _AddLayerNorm.apply(x.reshape(-1, width), residual.reshape(-1, width), weight, bias, eps)
    return total.view(x.shape), y.view(x.shape)


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, residual_TD: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        y_TD, total_TD, mean, rstd = ops.add_layer_norm(x_TD, residual_TD, weight, bias, eps)
        ctx.save_for_backward(total_TD, weight, mean, rstd)
        ctx.has_bias = bias is not None
        ctx.set_materialize_grads(False)
        return total_TD, y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        d_total, dy = grads
        if dy is None:
            return d_total, d_total, None, None, None
        total_TD, weight, mean, rstd = ctx.saved_tensors
        dx_TD, dw, db = ops.layer_norm_backward(dy.contiguous(), total_TD, weight, mean, rstd, d_total)
        return dx_TD, dx_TD, dw, db if ctx.has_bias else None, None


# ---- activations ----


def swiglu(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """`act(gate) * up` of two tensors, read where they lie."""
    width = gate.shape[-1]
    return _SwiGLUPair.apply(gate.reshape(-1, width), up.reshape(-1, width), act).view(gate.shape)


class _SwiGLUPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        ctx.act = act
        return ops.swiglu_pair(gate_TF, up_TF, act)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate_TF, up_TF = ctx.saved_tensors
        both = ops.swiglu_pair_backward(grads[0].contiguous(), gate_TF, up_TF, ctx.act)
        d_gate, d_up = both.split(gate_TF.shape[1], dim=1)
        return d_gate, d_up, None


def swiglu_packed(gate_up: Tensor, act: str) -> Tensor:
    """`act(gate) * up` where gate is the first half of the columns and up the second."""
    h_TF = _SwiGLU.apply(gate_up.reshape(-1, gate_up.shape[-1]), act)
    return h_TF.view(*gate_up.shape[:-1], h_TF.shape[-1])


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        ctx.act = act
        return ops.swiglu(gate_up_T2F, act)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (gate_up_T2F,) = ctx.saved_tensors
        return ops.swiglu_backward(grads[0].contiguous(), gate_up_T2F, ctx.act), None


def quick_gelu(x: Tensor) -> Tensor:
    """`x * sigmoid(1.702 x)`, which torch has no name for; rounded once, as torch's own activations are."""
    x32 = x.float()
    return (x32 * torch.sigmoid(1.702 * x32)).to(x.dtype)


def activation(x: Tensor, act: str) -> Tensor:
    """The plain activation of a tensor."""
    return _Activation.apply(x.reshape(-1, x.shape[-1]), act).view(x.shape)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(x_TF)
        ctx.act = act
        return ops.activation(x_TF, act)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x_TF,) = ctx.saved_tensors
        return ops.activation_backward(grads[0].contiguous(), x_TF, ctx.act), None


def bias_activation(x: Tensor, bias: Tensor, act: str) -> Tensor:
    """The activation of a linear's product and its bias."""
    return _BiasActivation.apply(x.reshape(-1, x.shape[-1]), bias, act).view(x.shape)


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, bias: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(x_TF, bias)
        ctx.act = act
        return ops.bias_activation(x_TF, bias, act)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_TF, bias = ctx.saved_tensors
        return *ops.bias_activation_backward(grads[0].contiguous(), x_TF, bias, ctx.act), None


# ---- embedding ----


def embedding(index: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    """Rows of the weight, as `F.embedding` gives them; `padding_idx` of -1 leaves no row without a gradient.

    The forward stays torch's own gather, which a compiler fuses into what reads it.
    """
    return _Embedding.apply(index, weight, padding_idx)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.padding_idx = weight.shape, padding_idx
        return torch.embedding(weight, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        num_weights, width = ctx.shape
        grad_TD = grads[0].reshape(index.numel(), width)
        return None, ops.embedding_backward(grad_TD, index.reshape(-1), num_weights, ctx.padding_idx), None


# ---- rotary embedding ----


def rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int], packing: str, convention: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q and k, and v, of merged rows [B, S, W], each a buffer [B, S, H, D] of its own."""
    return _RopeQKV.apply(qkv, cos, sin, list(heads), packing, convention)


class _RopeQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, *how: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.how = how[1:]
        return ops.rope_qkv(qkv, cos, sin, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        d_qkv = ops.rope_qkv_backward(*grads, cos, sin, *ctx.how)
        return d_qkv.view(*grads[0].shape[:2], d_qkv.shape[-1]), None, None, None, None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor, convention: str, heads_dim: int) -> Tensor:
    """The rotation of one tensor whose heads are dimension 1 or 2; the result lies as [B, S, H, D]."""
    if heads_dim == 1:
        return _Rope.apply(x.transpose(1, 2), cos, sin, convention).transpose(1, 2)
    return _Rope.apply(x, cos, sin, convention)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHD: Tensor, cos: Tensor, sin: Tensor, convention: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.convention = convention
        return ops.rope(x_BSHD, cos, sin, convention, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return ops.rope(grads[0], cos, sin, ctx.convention, True), None, None, None


# ---- head and loss ----


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *how: Any) -> Tensor:
    """Cross entropy of `x @ weight.T + bias` without holding all logits.

    `how`: ignore_index, reduction, whether the GEMMs are FP8, the logits' scale, their soft cap (0: none). Gradients
    are made only where somebody wants them.
    """
    x_TD = x.reshape(-1, x.shape[-1])
    needs = [t is not None and t.requires_grad for t in (x, weight, bias)]
    if not torch.is_grad_enabled() or not any(needs):
        return ops.linear_cross_entropy_loss(x_TD, weight, bias, target, *how)
    is_fp8 = how[2]
    function = _Fp8LinearCrossEntropy if is_fp8 and weight.requires_grad else _LinearCrossEntropy
    return function.apply(x_TD, weight, bias, target, needs, *how)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, needs: list[bool], *how: Any
    ) -> Tensor:
        loss, *made = ops.linear_cross_entropy(x_TD, weight, bias, target, needs, *how)
        ctx.save_for_backward(*(grad for grad, need in zip(made, needs, strict=True) if need))
        ctx.needs, ctx.others = needs, 2 + len(how)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # A pass over dx and dW also where the scalar is 1, which the host does not know: an op cannot hand back its own
        # operand, whose memory compiled code may reuse, and scaled in place they would be scaled again by a second
        # backward of a retained graph.
        scale, made = grads[0], iter(ctx.saved_tensors)
        found = [next(made) if need else None for need in ctx.needs]
        scaled = [None if grad is None else ops.scale_by(grad, scale) for grad in found]
        return *scaled, *[None] * ctx.others


class _Fp8LinearCrossEntropy(torch.autograd.Function):
    """In FP8 the GEMM that makes dW waits for the backward, with the loss' gradient in a scale: no pass over dW."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, needs: list[bool], *how: Any
    ) -> Tensor:
        loss, dx, db, *codes = ops.linear_cross_entropy_codes(x_TD, weight, bias, target, needs[::2], *how)
        kept = [grad if need else None for grad, need in zip((dx, db), needs[::2], strict=True)]
        ctx.save_for_backward(*codes, *kept)
        ctx.needs, ctx.dtype, ctx.others = needs, weight.dtype, 2 + len(how)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *codes, dx, db = ctx.saved_tensors
        made = ops.linear_cross_entropy_backward(*codes, grads[0], dx, db, ctx.dtype)
        wanted = [grad if need else None for grad, need in zip(made, ctx.needs, strict=True)]
        return *wanted, *[None] * ctx.others
