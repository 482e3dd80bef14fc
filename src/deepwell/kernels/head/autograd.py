"""Embedding, and head with its loss, with their gradients."""

# Shapes: T tokens (all leading dimensions folded), D width of a token.

from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.head.torch_ops import ops


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


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *how: Any) -> Tensor:
    """Cross entropy of `x @ weight.T + bias` without holding all logits.

    `how`: ignore_index, reduction, whether the GEMMs are FP8, the logits' scale, their soft cap (0: none), and whether
    the logits of an FP8 head stay in the model's dtype. Gradients are made only where somebody wants them.
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
        ctx.needs, ctx.like, ctx.others = needs, (weight.shape[0], weight.dtype), 2 + len(how)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *codes, dx, db = ctx.saved_tensors
        made = ops.linear_cross_entropy_backward(*codes, grads[0], dx, db, *ctx.like)
        wanted = [grad if need else None for grad, need in zip(made, ctx.needs, strict=True)]
        return *wanted, *[None] * ctx.others
