"""Linears in Blackwell's own formats: MXFP8 with both copies from one read, and any native GEMM of two operands.

The MXFP8 linear reads each of x, w and dy once and writes it twice (along its rows and along its columns), since 1x32
blocks of the two directions differ. What the backward needs of x is its transposed copy: one byte an element instead of
two.
"""

# Shapes: T tokens (all leading dimensions folded), K and N the widths of a linear.

from typing import Any

import torch
from torch import Tensor

from deepwell.engine.schemes import GemmScheme, LinearScheme
from deepwell.kernels.gemm import native_ops as _library  # registers the ops
from deepwell.precision.gemm_format import Operand

assert _library.library.NAMESPACE == "deepwell"
ops = torch.ops.deepwell


def is_mxfp8_throughout(how: LinearScheme) -> bool:
    """Whether all three GEMMs are native MXFP8 in E4M3, so that two copies of each operand serve all of them."""
    gemms = (how.fwd, how.dgrad, how.wgrad)
    return all(
        gemm.method == "native"
        and gemm.format is not None
        and gemm.format.lhs.format == gemm.format.rhs.format == "mxfp8"
        for gemm in gemms
    )


class MxLinear(torch.autograd.Function):
    """`x @ w.T`, its three GEMMs in native MXFP8."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad
        q_KT = x_t_scale = q_KN = w_t_scale = None
        if needs_dw:
            q_TK, x_scale, q_KT, x_t_scale = ops.mx_quantize_both(x_TK, "mxfp8")
        else:
            q_TK, x_scale = ops.mx_quantize_rows(x_TK, "mxfp8")
        if needs_dx:
            q_NK, w_scale, q_KN, w_t_scale = ops.mx_quantize_both(w_NK, "mxfp8")
        else:
            q_NK, w_scale = ops.mx_quantize_rows(w_NK, "mxfp8")
        ctx.save_for_backward(q_KT, x_t_scale, q_KN, w_t_scale)
        return ops.block_scaled_gemm(q_TK, x_scale, None, q_NK, w_scale, None, x_TK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dy_TN = grads[0].contiguous()
        q_KT, x_t_scale, q_KN, w_t_scale = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad
        dx_TK = dw_NK = None
        if needs_dw:
            q_TN, dy_scale, q_NT, dy_t_scale = ops.mx_quantize_both(dy_TN, "mxfp8")
            dw_NK = ops.block_scaled_gemm(q_NT, dy_t_scale, None, q_KT, x_t_scale, None, dy_TN.dtype)
        else:
            q_TN, dy_scale = ops.mx_quantize_rows(dy_TN, "mxfp8")
        if needs_dx:
            dx_TK = ops.block_scaled_gemm(q_TN, dy_scale, None, q_KN, w_t_scale, None, dy_TN.dtype)
        return dx_TK, dw_NK


def native_gemm(how: GemmScheme, left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` with both operands quantized along the contraction as the scheme says."""
    assert how.format is not None
    # The transform cancels in the product only where both sides have it.
    assert how.format.lhs.hadamard == how.format.rhs.hadamard
    a, b = _quantized(left, how.format.lhs), _quantized(right, how.format.rhs)
    return ops.block_scaled_gemm(*a, *b, left.dtype)


def _quantized(x: Tensor, side: Operand) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scales in tile order, global scale)."""
    if side.format.startswith("nvfp4"):
        return ops.nv_quantize_rows(x, side.format, side.rounding, side.hadamard)
    return (*ops.mx_quantize_rows(x, side.format), None)
