"""The norms with their gradients, also of a sum with the residual."""

# Shapes: T tokens (all leading dimensions folded), D width of a token.

from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.norm.torch_ops import ops


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: str) -> Tensor:
    """RMSNorm over the last dimension, rounded before the weight ("llama") or after it ("torch")."""
    return _normed("rms_norm", (x,), weight, eps, rounding)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension."""
    return _normed("layer_norm", (x,), weight, bias, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: str) -> tuple[Tensor, ...]:
    """(x + residual, RMSNorm of that sum) in one pass; in the backward both gradients meet in one kernel."""
    return _normed("rms_norm", (x, residual), weight, eps, rounding)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    """(x + residual, LayerNorm of that sum), as `add_rms_norm`."""
    return _normed("layer_norm", (x, residual), weight, bias, eps)


def _normed(name: str, summands: tuple[Tensor, ...], *how: Any) -> tuple[Tensor, ...]:
    shape = summands[0].shape
    rows = (x.reshape(-1, shape[-1]) for x in summands)
    return tuple(made.view(shape) for made in _Norm.apply(name, len(summands), *rows, *how))


class _Norm(torch.autograd.Function):
    """The norm of one tensor, or of the sum of two, which is given out first; then the weight and what the op takes."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *operands: Any) -> tuple[Tensor, ...]:
        y_TD, *stats = getattr(ops, name if count == 1 else f"add_{name}")(*operands)
        x_TD = operands[0] if count == 1 else stats.pop(0)
        weight, *how = operands[count:]
        ctx.save_for_backward(x_TD, weight, *stats)
        ctx.name, ctx.count, ctx.wants_bias = name, count, isinstance(how[0], Tensor)
        ctx.rounding = how[1:] if name == "rms_norm" else ()
        ctx.set_materialize_grads(False)  # nobody may read the sum past the last norm: no zeros for it
        return (y_TD,) if count == 1 else (x_TD, y_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        *past, dy = grads  # what reaches the sum past the norm
        if dy is None:
            return None, None, *[past[0]] * ctx.count, None, None, None
        x_TD, weight, *stats = ctx.saved_tensors
        op = getattr(ops, f"{ctx.name}_backward")
        dx_TD, dw, *db = op(dy.contiguous(), x_TD, weight, *stats, *ctx.rounding, *past)
        return None, None, *[dx_TD] * ctx.count, dw, db[0] if ctx.wants_bias else None, None
