"""A block of experts in bf16 with its gradients; no copy of the tokens by choice is kept for the backward.

    forward    gate and up of gathered rows with their activation; down; each token's weighted sum
    backward   rows of dy, gathered once for dh and for down's gradient; from dh gradients of gate and up, the weighted
               hidden rows and the router's gradient; both weights' gradients; rows of dx and each token's sum

Kept beside the inputs: the rows of gate and up, and integers. The hidden rows are recomputed; the experts' outputs are
not needed: the router's gradient <dy, down h> is <dy down, h>. Nothing waits for the host, so that CUDA graphs can
record both directions.
"""

# Shapes: T tokens, S = T * top_k choices, P padded rows, E experts, D width of a token, F hidden width of an expert,
# G = 2F where experts are gated, else F.

from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.experts.activation import ExpertActivation
from deepwell.kernels.experts.biases import down_bias_grad, down_bias_grad_of_weights, sums_by_expert
from deepwell.kernels.experts.row_tiles import is_kn
from deepwell.kernels.experts.torch_ops import ops


def experts_chain(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    weight_S: Tensor,
    groups: tuple[Tensor, Tensor, Tensor],
    top_k: int,
    how: ExpertActivation,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """`y[t] = sum_j w[t, j] (down[e] act(gate_up[e] x[t]) + bias)` over the experts e that token t chose.

    `weights` are views [E, G, D] and [E, D, F]. `groups` say where the rows of each expert lie
    (`group_rows.RowGroups`).
    """
    return _Chain.apply(x, *weights, *biases, weight_S, *groups, top_k, str(how))


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, *operands: Any) -> Tensor:
        gate_up, down, bias_up, bias_down, weight_S, ends, slot, place, top_k, act = operands
        x_TD = x_TD.contiguous()
        rows_PG, hidden_PF = ops.expert_up(x_TD, gate_up, bias_up, ends, slot, top_k, act)
        y_PD = ops.expert_product(hidden_PF, None, down, None, bias_down, ends, None, 1)
        ctx.top_k, ctx.act = top_k, act
        ctx.dtypes = [None if bias is None else bias.dtype for bias in (bias_up, bias_down)]
        ctx.save_for_backward(x_TD, gate_up, down, bias_down, rows_PG, weight_S, ends, slot, place)
        return ops.combine_rows(y_PD, place, top_k, weight_S.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_TD, gate_up, down, bias_down, rows_PG, weight_S, ends, slot, place = ctx.saved_tensors
        wants_x, wants_up, wants_down, wants_bias_up, wants_bias_down, wants_weight = ctx.needs_input_grad[:6]
        top_k, dy_TD = ctx.top_k, grads[0].contiguous()
        dx = d_up = d_down = d_bias_up = d_bias_down = d_weight = None
        dy_PD = ops.expert_rows(dy_TD, slot, place, top_k)
        d_rows_PG, hidden_PF, dw_P = ops.expert_grads(
            dy_PD, down.transpose(1, 2), rows_PG, weight_S.contiguous(), ends, slot, ctx.act
        )
        del rows_PG
        if wants_down:
            d_down = _wgrad(down, dy_PD, hidden_PF, ends)
        del dy_PD, hidden_PF
        if wants_up:
            d_up = _wgrad(gate_up, d_rows_PG, ops.expert_rows(x_TD, slot, place, top_k, dy_TD), ends)
        if wants_x:
            dx_PD = ops.expert_product(d_rows_PG, None, gate_up.transpose(1, 2), None, None, ends, None, 1)
            dx = ops.combine_rows(dx_PD, place, top_k)
        if wants_bias_up:
            d_bias_up = sums_by_expert(d_rows_PG, ends, slot).to(ctx.dtypes[0])
        if wants_weight:
            d_weight = torch.where(place >= 0, dw_P[place.clamp(min=0)], 0.0)
        if bias_down is not None:
            if wants_bias_down:
                d_bias_down = down_bias_grad(dy_TD, weight_S, ends, slot, place, top_k).to(ctx.dtypes[1])
            if d_weight is not None:
                d_weight = d_weight + down_bias_grad_of_weights(dy_TD, bias_down, ends, slot, place, top_k)
        if d_weight is not None:
            d_weight = d_weight.to(weight_S.dtype)
        return dx, d_up, d_down, d_bias_up, d_bias_down, d_weight, None, None, None, None, None


def _wgrad(weight: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The gradient of a weight [E, N, K], laid out as the weight is stored."""
    if is_kn(weight):
        return ops.expert_wgrad(right, left, ends).transpose(1, 2)
    return ops.expert_wgrad(left, right, ends)
