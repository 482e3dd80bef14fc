"""Activations with their gradients: gated (SwiGLU, GEGLU), plain, and of a linear's product and bias."""

# Shapes: T tokens (all leading dimensions folded), F the hidden width of an MLP.

from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.activation.torch_ops import ops


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
