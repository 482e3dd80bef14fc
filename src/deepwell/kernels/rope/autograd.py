"""The rotation of q and k with its gradient, alone or after their norm."""

# Shapes: B batch, S sequence, H heads, D width of a head, W all heads of q, k and v.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.rope.torch_ops import ops


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
        ctx.shapes, ctx.convention = [part.shape for part in (q, k, v)], how[2]
        ctx.set_materialize_grads(False)  # where q has no gradient, the weight of its norm has none
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        qkv, *others = ctx.saved_tensors
        found = [qkv.new_zeros(s) if grad is None else grad for grad, s in zip(grads, ctx.shapes, strict=True)]
        d_qkv, *dws = ops.qk_norm_rope_backward(*found, qkv, *others, ctx.convention)
        dw_q, dw_k = (None if grad is None else dw for grad, dw in zip(grads, dws, strict=False))
        return d_qkv.view(qkv.shape), dw_q, dw_k, *[None] * 6
