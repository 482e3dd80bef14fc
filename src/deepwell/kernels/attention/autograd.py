"""Attention in a causal window, with sinks, and its gradient."""

from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.attention.torch_ops import ops


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int) -> Tensor:
    """Causal attention of [B, H, S, D] over the last `window` keys (-1: all), `sinks` a logit for each head."""
    return _WindowedAttention.apply(q, k, v, sinks, scale, window)


class _WindowedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int) -> Tensor:
        out, lse = ops.attention(q, k, v, sinks, scale, window)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.how = scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dq, dk, dv = ops.attention_backward(grads[0], q, k, v, out, lse, *ctx.how)
        dsinks = None
        if sinks is not None:
            delta = (grads[0].float() * out.float()).sum(-1)
            dsinks = -((sinks.float()[None, :, None] - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None
