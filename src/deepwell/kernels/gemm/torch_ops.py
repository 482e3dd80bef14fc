"""GEMMs as torch ops, with the shapes that tracing needs: FP8, block-scaled, emulated, and in fp32."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import UnsupportedError
from deepwell.kernels.gemm import fp8 as gemm
from deepwell.kernels.gemm.block_scaled import ScaledOperand, block_scaled_gemm
from deepwell.kernels.gemm.emulated import emulated_mm
from deepwell.kernels.gemm.fp8_blocks import fp8_gemm_blocks
from deepwell.kernels.gemm.native_candidates import native_kernel
from deepwell.kernels.gemm.product_in_fp32 import product_in_fp32
from deepwell.kernels.quantize.round_to import round_to_bf16
from deepwell.kernels.quantize.torch_ops import hadamard_operand
from deepwell.kernels.torch_library import register_op
from deepwell.kernels.tune.fastest import fastest_fp8_gemm

ops = torch.ops.deepwell

# ---- FP8 ----


def _fp8_gemm(
    a_MK: Tensor, scale_a: Tensor | None, b_NK: Tensor, scale_b: Tensor, fast: bool, bias_N: Tensor | None = None
) -> Tensor:
    """`gemm.fp8_gemm` of any shape: K and N are padded with zeros to whole 16-byte lines.

    Without `scale_a` the reader multiplies the rows (`row_factors`).
    """
    n, k = b_NK.shape
    more_n, more_k = -n % gemm.ALIGNMENT, -k % gemm.ALIGNMENT
    if not (more_n or more_k):
        if bias_N is None:
            return fastest_fp8_gemm(a_MK, scale_a, b_NK, scale_b, fast=fast)
        return gemm.fp8_gemm(a_MK, scale_a, b_NK, scale_b, fast=fast, bias_N=bias_N)
    a, b = gemm.padded_codes(a_MK, 0, more_k), gemm.padded_codes(b_NK, more_n, more_k)
    if scale_b.numel() > 1:
        scale_b = F.pad(scale_b.reshape(-1), (0, more_n), value=1.0)
    bias = None if bias_N is None else F.pad(bias_N, (0, more_n))
    return gemm.fp8_gemm(a, scale_a, b, scale_b, fast=fast, bias_N=bias)[:, :n].contiguous()


register_op(
    "fp8_gemm(Tensor a, Tensor? scale_a, Tensor b, Tensor scale_b, bool fast) -> Tensor",
    _fp8_gemm,
    lambda a, scale_a, b, scale_b, fast: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16),
)
register_op(
    "fp8_gemm_bias(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor bias, bool fast) -> Tensor",
    lambda a, scale_a, b, scale_b, bias, fast: _fp8_gemm(a, scale_a, b, scale_b, fast, bias),
    lambda a, scale_a, b, scale_b, bias, fast: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16),
)
register_op(
    "fp8_gemm_blocks(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, bool square) -> Tensor",
    lambda a, scale_a, b, scale_b, square: fp8_gemm_blocks(a, scale_a, b, scale_b, square=square),
    lambda a, scale_a, b, scale_b, square: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16),
)

# ---- block-scaled ----


def _block_scaled_gemm(
    a: Tensor,
    scale_a: Tensor,
    global_a: Tensor | None,
    b: Tensor,
    scale_b: Tensor,
    global_b: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    left, right = ScaledOperand(a, scale_a, global_a), ScaledOperand(b, scale_b, global_b)
    if not a.is_cuda:
        return block_scaled_gemm(left, right, out_dtype=dtype)
    fmt = "mxfp8" if global_a is None else "nvfp4"
    kernel, reason = native_kernel(fmt, a.device)
    if kernel is None:
        raise UnsupportedError(f"no {fmt} kernel passed its self-check on {a.device}: {reason}")
    return block_scaled_gemm(left, right, out_dtype=dtype, candidate=kernel)


register_op(
    "block_scaled_gemm(Tensor a, Tensor scale_a, Tensor? global_a, Tensor b, Tensor scale_b, Tensor? global_b, "
    "ScalarType dtype) -> Tensor",
    _block_scaled_gemm,
    lambda a, scale_a, global_a, b, scale_b, global_b, dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype),
)

# ---- emulated ----


def _emulated_mm(
    a: Tensor, b: Tensor, lhs: str, lhs_rounding: str, hadamard: bool, rhs: str, rhs_rounding: str
) -> Tensor:
    """`round(a) @ round(b).T` in fp32 through bf16, see `emulated_mm`; both under the transform or neither."""
    sides: list[Any] = []
    for x, fmt, rounding in ((a, lhs, lhs_rounding), (b, rhs, rhs_rounding)):
        operand, signs = hadamard_operand(x, hadamard)
        sides += round_to_bf16(operand, fmt, rounding=rounding, hadamard=signs)
    return emulated_mm(*sides)


register_op(
    "emulated_mm(Tensor a, Tensor b, str lhs, str lhs_rounding, bool hadamard, str rhs, str rhs_rounding) -> Tensor",
    _emulated_mm,
    lambda a, b, *how: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32),
)

# ---- in fp32 ----

register_op(
    "product_in_fp32(Tensor a, Tensor b) -> Tensor",
    product_in_fp32,
    lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32),
)
