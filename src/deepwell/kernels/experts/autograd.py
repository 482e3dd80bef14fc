"""Experts with their gradients: one grouped linear, or a whole block.

    grouped_linear    x [S, K] sorted by expert, times the weight of each group's expert
    batched_linear    x [E, T, K], as many rows for each expert
    fused_experts     tokens in, tokens out: gather, gate and up, activation, down, sum over each token's choices

The fused block runs in FP8 from end to end in rows padded by expert, and keeps, beside its inputs, the rows of gate and
up, of SwiGLU in 12 bits a number (`kept_rows`): gathered tokens, hidden rows and the experts' outputs are recomputed or
not needed (`expert_swiglu`, `hidden_codes`).
"""

# Shapes: T tokens, S = T * top_k choices, P padded rows, E experts, K and N the widths of a grouped linear, D width of
# a token, F hidden width of an expert.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.experts.activation import ExpertActivation, parse_activation
from deepwell.kernels.experts.biases import down_bias_grad, down_bias_grad_of_weights, weights_by_expert
from deepwell.kernels.experts.row_tiles import is_kn
from deepwell.kernels.experts.torch_ops import ops
from deepwell.kernels.gemm.linear import low_precision_linear
from deepwell.kernels.gemm.schemes import GemmScheme, LinearScheme, parse_scheme
from deepwell.precision.gemm_format import OperandFormat

FP8_METHOD = "grouped_fp8"
# An operand that is multiplied as it is, in fp32 or fp64.
AS_IS = "fp32,nearest,False"

# ---- one grouped linear ----


def grouped_linear(x: Tensor, weight: Tensor, offs: Tensor, is_kn: bool, scheme: str) -> Tensor:
    """Rows of group e times the weight of expert e, [N, K] or as stored [K, N], each GEMM run as `scheme` says.

    `offs` are the ends of the groups. Rows past the last one give zeros; in bf16 whatever torch leaves there.
    """
    return _GroupedLinear.apply(x, weight, offs, is_kn, scheme)


def batched_linear(x_ETK: Tensor, weight: Tensor, is_kn: bool, scheme: str) -> Tensor:
    """`grouped_linear` of groups that are equally long and lie behind one another: a batch of products, [E, T, N].

    A batch of one is bound as the linear that it is.
    """
    experts, t, k = x_ETK.shape
    if experts == 1 and FP8_METHOD not in scheme:
        return low_precision_linear(x_ETK, [weight[0].t() if is_kn else weight[0]], None, scheme)
    y_SN = grouped_linear(x_ETK.reshape(experts * t, k), weight, even_ends(x_ETK), is_kn, scheme)
    return y_SN.view(experts, t, y_SN.shape[-1])


def even_ends(x_ETK: Tensor) -> Tensor:
    """The ends of E groups of T rows, int32."""
    return torch.arange(1, x_ETK.shape[0] + 1, dtype=torch.int32, device=x_ETK.device) * x_ETK.shape[1]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SK: Tensor, weight: Tensor, offs: Tensor, is_kn: bool, scheme: str) -> Tensor:
        how = parse_scheme(scheme)
        ctx.how, ctx.is_kn = how, is_kn
        uses_fp8 = any(gemm.method == FP8_METHOD for gemm in (how.fwd, how.dgrad, how.wgrad))
        row_scale = ends = slot = place = None
        if uses_fp8:
            ends, slot, place = ops.group_layout(offs, None, x_SK.shape[0])
        if FP8_METHOD in (how.fwd.method, how.wgrad.method):
            q_SK, x_scale = ops.quantize_rows(x_SK)
        if how.fwd.method == FP8_METHOD:
            q_w, w_scale, row_scale = _along_k(weight, is_kn)
            padded = ops.gather_rows(q_SK, x_scale, slot, 1)
            y_SN = in_dtype(x_SK.dtype, ops.combine_rows(ops.grouped_gemm(*padded, q_w, w_scale, ends), place, 1))
        else:
            w_ENK = weight.transpose(1, 2) if is_kn else weight
            y_SN = _grouped(how.fwd, x_SK, w_ENK, offs)
        ctx.codes_of_x = how.wgrad.method == FP8_METHOD
        kept = (q_SK, x_scale) if ctx.codes_of_x else (x_SK, None)
        ctx.save_for_backward(weight, offs, row_scale, *kept, ends, slot, place)
        return y_SN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weight, offs, row_scale, x, x_scale, ends, slot, place = ctx.saved_tensors
        how: LinearScheme = ctx.how
        dy_SN = grads[0].contiguous()
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dx_SK = dw = None
        if (wants_dx and how.dgrad.method == FP8_METHOD) or (wants_dw and ctx.codes_of_x):
            dy_rows = ops.gather_rows(*ops.quantize_rows(dy_SN), slot, 1)
        if wants_dx:
            if how.dgrad.method == FP8_METHOD:
                q_w, w_scale = _along_n(weight, ctx.is_kn, row_scale, dy_SN)
                dx_SK = ops.combine_rows(ops.grouped_gemm(*dy_rows, q_w, w_scale, ends), place, 1).to(dy_SN.dtype)
            else:
                w_EKN = weight if ctx.is_kn else weight.transpose(1, 2)
                dx_SK = _grouped(how.dgrad, dy_SN, w_EKN, offs)
        if wants_dw:
            if ctx.codes_of_x:
                x_rows = ops.gather_rows(x, x_scale, slot, 1, dy_SN)
                # The gradient as the weight is stored: [E, N, K], or [E, K, N].
                sides = (*x_rows, *dy_rows) if ctx.is_kn else (*dy_rows, *x_rows)
                columns = ops.group_columns(ends, slot.shape[0])
                dw = _wgrad_of_rows(weight, sides, ends, columns=columns)
            else:
                dw = _plain_wgrad(how.wgrad, dy_SN, x, offs)
                dw = dw.transpose(1, 2) if ctx.is_kn else dw
        return dx_SK, dw, None, None, None


def in_dtype(dtype: torch.dtype, made: Tensor) -> Tensor:
    """`made` in a dtype. Without a change there is no `.to`: Dynamo of torch 2.11 would lose the gradient."""
    return made if made.dtype == dtype else made.to(dtype)


def _along_k(weight: Tensor, is_kn: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(values [E, N, K], scales [E, N], the scales of the rows as stored) for the forward."""
    if is_kn:
        row_scale = ops.expert_scales(weight)
        return *ops.quantize_experts_transposed(weight, row_scale), row_scale
    q, row_scale = ops.quantize_experts(weight)
    return q, row_scale, row_scale


def _along_n(weight: Tensor, is_kn: bool, row_scale: Tensor | None, after: Tensor) -> tuple[Tensor, Tensor]:
    """(values [E, K, N], scales [E, K]) for dgrad: made when the backward asks for them, from the weight itself."""
    if is_kn:
        return ops.quantize_experts(weight, after)
    if row_scale is None:
        row_scale = ops.expert_scales(weight, after)
    return ops.quantize_experts_transposed(weight, row_scale, after)


def _grouped(how: GemmScheme, a_SK: Tensor, b_ENK: Tensor, offs: Tensor) -> Tensor:
    """`a[rows of e] @ b[e].T` in high precision or emulated."""
    if how.method == "bf16" and _torch_takes(a_SK, b_ENK):
        return torch.ops.aten._grouped_mm(a_SK, b_ENK.transpose(1, 2), offs)
    lhs, rhs = _operands(how)
    return ops.grouped_emulated(a_SK, b_ENK, offs, lhs, rhs)


def _plain_wgrad(how: GemmScheme, dy_SN: Tensor, x_SK: Tensor, offs: Tensor) -> Tensor:
    if how.method == "bf16" and _torch_takes(dy_SN, x_SK):
        return torch.ops.aten._grouped_mm(dy_SN.T, x_SK, offs)
    lhs, rhs = _operands(how)
    return ops.grouped_emulated_wgrad(dy_SN, x_SK, offs, lhs, rhs)


def _torch_takes(*operands: Tensor) -> bool:
    """Whether torch has the grouped product: of bf16, with rows of whole lines of 16 bytes."""
    sizes = [size for operand in operands for size in operand.shape[-2 if operand.dim() == 3 else -1 :]]
    return all(operand.dtype == torch.bfloat16 for operand in operands) and all(size % 8 == 0 for size in sizes)


def _operands(how: GemmScheme) -> tuple[str, str]:
    if how.method == "bf16":
        return AS_IS, AS_IS
    assert how.method == "emulate" and how.format is not None
    # The transform cancels in the product only where both sides have it.
    assert how.format.lhs.hadamard == how.format.rhs.hadamard
    return _text(how.format.lhs), _text(how.format.rhs)


def _text(side: OperandFormat) -> str:
    return f"{side.format},{side.rounding},{side.hadamard}"


# ---- a whole block ----


def fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: tuple[Tensor | None, Tensor | None, Tensor],
    top_k: int,
    act: str,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """`experts_in_fp8` of sorted choices, as Hugging Face's graphs have them.

    `routing` holds the choices t * top_k + j sorted by expert, their weights [S] in the order of tokens, and the ends
    of the experts' groups; without the first two x are rows sorted by expert. `act` may be the name of SwiGLU's
    function.
    """
    order, weight, offs = routing
    weight = x.new_ones(x.shape[0]) if weight is None else weight
    how = act if "," in act else str(ExpertActivation(function=act))
    groups = ops.group_layout(offs, order, weight.shape[0])
    return experts_in_fp8(x, (gate_up, down), weight, groups, top_k, how, biases)


def experts_in_fp8(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    weight_S: Tensor,
    groups: tuple[Tensor, Tensor, Tensor],
    top_k: int,
    act: str,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """`y[t] = sum_j w[t, j] (down[e] act(gate_up[e] x[t]) + bias)` over the experts e that token t chose, in FP8.

    `weights` are views [E, G, D] and [E, D, F], stored so or the other way round. `act` is an activation as its `str()`
    writes it. `groups` say where the rows of each expert lie (`group_rows.RowGroups`).
    """
    return _FusedExperts.apply(x, *weights, *biases, weight_S, *groups, top_k, act)


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, *operands: Any) -> Tensor:
        gate_up, down, bias_up, bias_down, weight_S, ends, slot, place, top_k, act = operands
        q_TD, x_scale = ops.quantize_rows(x_TD)
        q_gate_up, gate_up_scale, gate_up_rows = _along_k(*_stored(gate_up))
        q_down, down_scale, down_rows = _along_k(*_stored(down))
        gate_up_PG = ops.expert_product(q_TD, x_scale, q_gate_up, gate_up_scale, bias_up, ends, slot, top_k)
        gate_up_PG = in_dtype(x_TD.dtype, gate_up_PG)
        hidden, kept = _hidden_codes(gate_up_PG, weight_S, slot, act)
        y_PD = ops.expert_product(*hidden, q_down, down_scale, None, ends, None, 1)
        y_TD = in_dtype(x_TD.dtype, ops.combine_rows(y_PD, place, top_k))
        if bias_down is not None:
            y_TD = ops.add_down_bias(y_TD, weights_by_expert(weight_S, ends, slot, place, top_k), bias_down)
        ctx.top_k, ctx.act = top_k, act
        ctx.dtypes = [None if bias is None else bias.dtype for bias in (bias_up, bias_down)]
        ctx.save_for_backward(
            *(x_TD, gate_up, gate_up_rows, down, down_rows, bias_down),
            *(*kept, weight_S, ends, slot, place),
        )
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_TD, gate_up, gate_up_rows, down, down_rows, bias_down, *rest = ctx.saved_tensors
        *kept, weight_S, ends, slot, place = rest
        dy_TD, top_k = grads[0].contiguous(), ctx.top_k
        wants_x, wants_gate_up, wants_down, wants_bias_up, wants_bias_down, wants_weight = ctx.needs_input_grad[:6]
        dx = d_gate_up = d_down = d_bias_up = d_bias_down = d_weight = None
        columns = ops.group_columns(ends, slot.shape[0])
        dy_codes = ops.quantize_rows(dy_TD)
        transposed_down = _along_n(*_stored(down), down_rows, dy_TD)
        dh_PF = ops.expert_product(*dy_codes, *transposed_down, None, ends, slot, top_k).to(x_TD.dtype)
        q, scale, q_h, scale_h, dw_S = _grad_codes(dh_PF, kept, weight_S, slot, ctx.act)
        # The order that needs the least memory: rows of dx and the larger gradient before the other one is there.
        if wants_x:
            transposed_gate_up = _along_n(*_stored(gate_up), gate_up_rows, dy_TD)
            dx_PD = ops.expert_product(q, scale, *transposed_gate_up, None, ends, None, 1)
            dx = ops.combine_rows(dx_PD, place, top_k).to(dy_TD.dtype)
        if wants_gate_up:
            x_codes = ops.quantize_rows_again(x_TD, dy_TD)
            d_gate_up = _fused_wgrad(gate_up, (q, scale), x_codes, (ends, slot, top_k), columns, gathers_right=True)
        if wants_down:
            d_down = _fused_wgrad(down, dy_codes, (q_h, scale_h), (ends, slot, top_k), columns, gathers_right=False)
        if wants_bias_up:
            d_bias_up = ops.expert_code_sums(q, scale, ends).to(ctx.dtypes[0])
        if wants_bias_down:
            d_bias_down = down_bias_grad(dy_TD, weight_S, ends, slot, place, top_k).to(ctx.dtypes[1])
        if wants_weight:
            if bias_down is not None:
                dw_S = dw_S + down_bias_grad_of_weights(dy_TD, bias_down, ends, slot, place, top_k)
            d_weight = dw_S.to(weight_S.dtype)
        return dx, d_gate_up, d_down, d_bias_up, d_bias_down, d_weight, None, None, None, None, None


def _stored(weight: Tensor) -> tuple[Tensor, bool]:
    """(a weight [E, N, K] as it is stored, whether that is [E, K, N])."""
    return (weight.transpose(1, 2), True) if is_kn(weight) else (weight, False)


def _is_plain_swiglu(act: str) -> bool:
    how = parse_activation(act)
    return how.is_swiglu and how.function != "relu2"


def _hidden_codes(
    gate_up_PG: Tensor, weight_S: Tensor, slot: Tensor, act: str
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """(FP8 rows of the weighted hidden rows, what the backward needs of gate and up)."""
    if not _is_plain_swiglu(act):
        return ops.expert_hidden_codes(gate_up_PG, weight_S, slot, act), (gate_up_PG,)
    function = parse_activation(act).function
    if gate_up_PG.dtype != torch.bfloat16:
        return ops.expert_swiglu(gate_up_PG, weight_S, slot, function), (gate_up_PG,)
    q, scale, kept, top = ops.expert_swiglu_kept(gate_up_PG, weight_S, slot, function)
    return (q, scale), (kept, top)


def _grad_codes(dh_PF: Tensor, kept: Sequence[Tensor], weight_S: Tensor, slot: Tensor, act: str) -> tuple[Tensor, ...]:
    if not _is_plain_swiglu(act):
        return ops.expert_grad_codes(dh_PF, *kept, weight_S, slot, act)
    op = ops.expert_swiglu_backward if len(kept) == 1 else ops.expert_swiglu_backward_kept
    return op(dh_PF, *kept, weight_S, slot, parse_activation(act).function)


def _fused_wgrad(
    weight: Tensor,
    left: tuple[Tensor, Tensor],
    right: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor, int],
    columns: tuple[Tensor, Tensor],
    *,
    gathers_right: bool,
) -> Tensor:
    """The gradient of a weight [E, N, K] of FP8 rows [., N] and [., K], laid out as the weight is stored.

    One side lies by row, the other by token.
    """
    if is_kn(weight):
        swapped = _fused_wgrad(weight.transpose(1, 2), right, left, rows, columns, gathers_right=not gathers_right)
        return swapped.transpose(1, 2)
    return _wgrad_of_rows(weight, (*left, *right), *rows, gathers_right, columns=columns)


def _wgrad_of_rows(weight: Tensor, sides: tuple[Tensor, ...], *how: Any, columns: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of FP8 rows of both sides, transposed to whole blocks of each expert's columns."""
    column_ends, blocks = columns
    return in_dtype(weight.dtype, ops.grouped_wgrad(*ops.wgrad_operands(*sides, *how, blocks=blocks), column_ends))
