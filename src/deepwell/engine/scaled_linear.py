"""Linears in FP8 with one scale per tensor ("fp8_tensor") or per 1x128 block ("fp8_1x128"), beside those by rows.

             x, dy                                   w                           products
    tensor   amax; both copies from one read         amax; a copy each way       cuBLASLt, fast but for wgrad
    1x128    both copies from one read               squares; a copy each way    cuBLASLt, promoted every 128

What is read and written of x or dy in bf16, bytes per element: tensor 2 for the amax, then 2 + 2; 1x128 2 + 2; rows,
where no kernel before writes them, 2 + 1 and 1 + 1 more to turn the codes. A wgrad along tokens needs blocks of its own
in 1x128, made of the numbers, not of the codes. What the backward needs of x is its transposed copy, one byte an
element. These quantizations stay ops of their own: no norm or activation writes them.
"""

# Shapes: T tokens (all leading dimensions folded), K and N the widths of a linear.

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepwell.engine.schemes import SCALED, GemmScheme, LinearScheme, parse_scheme
from deepwell.formats.spec import E5M2, get_format
from deepwell.kernels.gemm import scaled_ops as _library  # registers the ops

assert _library.library.NAMESPACE == "deepwell"
ops = torch.ops.deepwell

# How a GEMM of another scheme runs: (scheme, left, right) -> left @ right.T.
OtherGemm = Callable[[GemmScheme, Tensor, Tensor], Tensor]
# Codes along the contraction and their scales.
_Codes = tuple[Tensor, Tensor]


def is_scaled(how: LinearScheme) -> bool:
    """Whether one of the three GEMMs has tensor or 1x128 scales."""
    return any(gemm.method in SCALED for gemm in (how.fwd, how.dgrad, how.wgrad))


def scaled_linear(x_TK: Tensor, weights: Sequence[Tensor], scheme: str, other: OtherGemm) -> Tensor:
    """`x @ cat(weights).T`; GEMMs that have neither tensor nor 1x128 scales run as `other` does them."""
    return _ScaledLinear.apply(x_TK, scheme, other, *weights)


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, scheme: str, other: OtherGemm, *weights: Tensor) -> Tensor:
        how = parse_scheme(scheme)
        needs_dw = any(ctx.needs_input_grad[3:])
        rows, columns = _quantize(x_TK, how.fwd, how.wgrad if needs_dw else None, "activation")
        largest = None
        if rows is None:
            y_TN = _other_gemm(other, how.fwd, x_TK, _joined(weights))
        elif how.fwd.method == "fp8_tensor":
            q_NK, w_scale, largest = ops.quantize_weights(list(weights))
            y_TN = ops.fp8_gemm(*rows, q_NK, w_scale, True)
        else:
            y_TN = ops.fp8_gemm_blocks(*rows, *ops.quantize_weights_128x128(list(weights)), True)
        kept = [] if not needs_dw else [x_TK] if columns is None else [*columns]
        ctx.how, ctx.other, ctx.widths = how, other, [w.shape[0] for w in weights]
        ctx.has_amax, ctx.num_kept = largest is not None, len(kept)
        ctx.save_for_backward(*([] if largest is None else [largest]), *kept, *weights)
        return y_TN.to(x_TK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        how: LinearScheme = ctx.how
        dy_TN = grads[0].contiguous()
        weights = list(ctx.saved_tensors)
        largest = weights.pop(0) if ctx.has_amax else None
        x = [weights.pop(0) for _ in range(ctx.num_kept)]
        needs_dx, needs_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:])
        rows, columns = _quantize(dy_TN, how.dgrad if needs_dx else None, how.wgrad if needs_dw else None, "gradient")
        dx_TK = dw_NK = None
        if rows is not None:
            dx_TK = _dgrad(how.dgrad, rows, weights, largest).to(dy_TN.dtype)
        elif needs_dx:
            dx_TK = _other_gemm(ctx.other, how.dgrad, dy_TN, _joined(weights).T).to(dy_TN.dtype)
        if columns is not None:
            is_tensor = how.wgrad.method == "fp8_tensor"
            dw_NK = ops.fp8_gemm(*columns, *x, False) if is_tensor else ops.fp8_gemm_blocks(*columns, *x, False)
        elif needs_dw:
            dw_NK = _other_gemm(ctx.other, how.wgrad, dy_TN.T, x[0].T)
        parts = [None] * len(ctx.widths) if dw_NK is None else dw_NK.to(dy_TN.dtype).split(ctx.widths)
        return dx_TK, None, None, *parts


# ---- operands ----


def _quantize(
    x: Tensor, along: GemmScheme | None, across: GemmScheme | None, role: str
) -> tuple[_Codes | None, _Codes | None]:
    """The copies of x for a GEMM that contracts its columns and for one that contracts its tokens; None for others."""
    first, second = _kind(along, role), _kind(across, role)
    if first is not None and first == second:
        return _both(x, *first)
    rows = None if first is None else _rows(x, *first)
    return rows, None if second is None else _both(x, *second)[1]


def _kind(how: GemmScheme | None, role: str) -> tuple[str, bool] | None:
    """(method, whether its elements are E5M2) of the operand of that role, None where another scheme makes it."""
    if how is None or how.method not in SCALED:
        return None
    assert how.format is not None
    operand = how.format.lhs if how.format.lhs.role == role else how.format.rhs
    return how.method, get_format(operand.format).element is E5M2


def _rows(x: Tensor, method: str, e5m2: bool) -> _Codes:
    if method == "fp8_tensor":
        q, scale = ops.quantize_tensor(x, e5m2)
    else:
        q, scale = ops.quantize_1x128(x)
    return q, scale


def _both(x: Tensor, method: str, e5m2: bool) -> tuple[_Codes, _Codes]:
    if method == "fp8_tensor":
        q, q_t, scale = ops.quantize_tensor_both(x, e5m2)
        return (q, scale), (q_t, scale)
    q, scale, q_t, scale_t = ops.quantize_1x128_both(x)
    return (q, scale), (q_t, scale_t)


def _dgrad(how: GemmScheme, rows: _Codes, weights: list[Tensor], largest: Tensor | None) -> Tensor:
    """dy @ w; the transposed copy of the weights is made now, from weights that are there anyway."""
    if how.method == "fp8_1x128":
        return ops.fp8_gemm_blocks(*rows, *ops.quantize_weights_128x128_transposed(weights, rows[0]), True)
    if largest is None:
        largest = ops.quantize_weights(weights)[2]
    return ops.fp8_gemm(*rows, *ops.quantize_weights_transposed(weights, largest, rows[0]), True)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def _other_gemm(other: OtherGemm, how: GemmScheme, left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` of another scheme; one by rows beside these has both operands quantized for it alone."""
    if how.method == "fp8_row":
        return ops.fp8_gemm(*ops.quantize_rows(left), *ops.quantize_rows(right), False)
    return other(how, left, right)
