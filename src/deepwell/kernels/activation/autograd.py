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
    h_TF = _Activation.apply("swiglu", act, gate_up.reshape(-1, gate_up.shape[-1]))
    return h_TF.view(*gate_up.shape[:-1], h_TF.shape[-1])


def quick_gelu(x: Tensor) -> Tensor:
    """`x * sigmoid(1.702 x)`, which torch has no name for; rounded once, as torch's own activations are."""
    x32 = x.float()
    return (x32 * torch.sigmoid(1.702 * x32)).to(x.dtype)


def activation(x: Tensor, act: str) -> Tensor:
    """The plain activation of a tensor."""
    return _Activation.apply("activation", act, x.reshape(-1, x.shape[-1])).view(x.shape)


def bias_activation(x: Tensor, bias: Tensor, act: str) -> Tensor:
    """The activation of a linear's product and its bias."""
    return _Activation.apply("bias_activation", act, x.reshape(-1, x.shape[-1]), bias).view(x.shape)


class _Activation(torch.autograd.Function):
    """The op of a name, whose gradients `<name>_backward` gives."""

    @staticmethod
    def forward(ctx: Any, name: str, act: str, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.how = name, act
        return getattr(ops, name)(*tensors, act)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        name, act = ctx.how
        made = getattr(ops, f"{name}_backward")(grads[0].contiguous(), *ctx.saved_tensors, act)
        return None, None, *([made] if isinstance(made, Tensor) else made)
