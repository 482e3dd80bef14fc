"""A linear whose weights' FP8 codes are kept from call to call instead of being made in every forward and backward."""

# Shapes: T tokens (all leading dimensions folded), K and N the widths of a linear.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepwell.engine.functional import _plain_gemm
from deepwell.engine.schemes import parse_scheme

ops = torch.ops.deepwell


def can_keep_codes(scheme: str) -> bool:
    """Whether both products with the weights read FP8 codes alone."""
    how = parse_scheme(scheme)
    return how.fwd.method == how.dgrad.method == "fp8_row"


def cached_linear(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, scheme: str, rows: Tensor, columns: Tensor, scale: Tensor
) -> Tensor:
    """`low_precision_linear` with the codes of `weights` given: `rows` [N, K], `columns` [K, N], one scale.

    The weights themselves are there for their gradients; their values are not read.
    """
    x_TK = x.reshape(-1, x.shape[-1])
    y_TN = _CachedLinear.apply(x_TK, scheme, rows, columns, scale, *weights)
    if bias is not None:
        y_TN = y_TN + bias
    return y_TN.view(*x.shape[:-1], y_TN.shape[-1])


class _CachedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, scheme: str, q_NK: Tensor, q_KN: Tensor, w_scale: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.how, ctx.widths = parse_scheme(scheme), [w.shape[0] for w in weights]
        q_TK, x_scale = ops.quantize_rows(x_TK)
        y_TN = ops.fp8_gemm(q_TK, x_scale, q_NK, w_scale, ctx.how.fwd.fast).to(x_TK.dtype)
        x = (q_TK, x_scale) if ctx.how.wgrad.method == "fp8_row" else (x_TK,)
        ctx.save_for_backward(q_KN, w_scale, *x)
        return y_TN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dy_TN = grads[0].contiguous()
        q_KN, w_scale, *x = ctx.saved_tensors
        wants_dx, wants_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[5:])
        is_wgrad_fp8 = ctx.how.wgrad.method == "fp8_row"
        dx_TK = dw_NK = None
        if wants_dx or (wants_dw and is_wgrad_fp8):
            q_TN, dy_scale = ops.quantize_rows(dy_TN)
        if wants_dx:
            dx_TK = ops.fp8_gemm(q_TN, dy_scale, q_KN, w_scale, ctx.how.dgrad.fast).to(dy_TN.dtype)
        if wants_dw and is_wgrad_fp8:
            operands = ops.wgrad_operands(q_TN, dy_scale, *x)
            dw_NK = ops.fp8_gemm(*operands, ctx.how.wgrad.fast).to(dy_TN.dtype)
        elif wants_dw:
            dw_NK = _plain_gemm(ctx.how.wgrad, dy_TN.T, x[0].T)
        parts = dw_NK.split(ctx.widths) if dw_NK is not None else [None] * len(ctx.widths)
        return dx_TK, None, None, None, None, *parts
