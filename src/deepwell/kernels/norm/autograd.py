"""The norms with their gradients, also of a sum with the residual."""

# Shapes: T tokens (all leading dimensions folded), D width of a token.

from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.norm.torch_ops import ops


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
