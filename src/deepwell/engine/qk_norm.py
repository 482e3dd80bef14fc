"""The differentiable op that norms the heads of q and k and rotates them, reading merged rows once each way."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.rope import qk_norm_ops as _library  # registers the ops

assert _library.NAMESPACE == "deepwell"
ops = torch.ops.deepwell


def qk_norm_rope(
    qkv: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor, heads: Sequence[int], *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and rotated q and k, and v, of merged rows [B, S, W], each a buffer [B, S, H, D] of its own.

    `how`: eps, what is rounded before the weight ("llama", "torch"), the rotation's convention.
    """
    return _QkNormRope.apply(qkv, *weights, cos, sin, list(heads), *how)


class _QkNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, w_q: Tensor, w_k: Tensor, cos: Tensor, sin: Tensor, heads: list[int], *how: Any
    ) -> tuple[Tensor, ...]:
        q, k, v, rstd_q, rstd_k = ops.qk_norm_rope(qkv, w_q, w_k, cos, sin, heads, *how)
        ctx.save_for_backward(qkv, w_q, w_k, rstd_q, rstd_k, cos, sin)
        ctx.convention = how[2]
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        qkv, *others = ctx.saved_tensors
        d_qkv, dw_q, dw_k = ops.qk_norm_rope_backward(*grads, qkv, *others, ctx.convention)
        return d_qkv.view(qkv.shape), dw_q, dw_k, *[None] * 6
