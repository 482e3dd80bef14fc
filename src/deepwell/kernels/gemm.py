"""FP8 matrix products with the scales in the epilogue: `C[m, n] = (A[m, k] @ B[n, k]^T) * scale_a[m] * scale_b`.

Both operands lie along the contraction (Hopper's tensor cores take nothing else). Rows of A carry their own scale or
share one; B has one scale for the tensor or one per row. Numerics: products of codes are exact; cuBLASLt adds them in
fp32, with `fast` in the tensor cores' shorter accumulator (its floor in dB has not been measured yet).
Cost: 2*M*N*K flops; bytes M*K + N*K + 2*M*N.
"""

# Shapes: M rows of the result, N columns, K contraction.

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# cuBLASLt's FP8 rows are whole 16-byte lines.
ALIGNMENT = 16

# ---- reference: what the kernel must compute, in the plainest torch ----


def fp8_gemm_ref(a_MK: Tensor, scale_a: Tensor, b_NK: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Reference for `fp8_gemm`: fp32 products of the dequantized operands, rounded once."""
    a = a_MK.float() * _as_rows(scale_a, a_MK.shape[0])
    b = b_NK.float() * _as_rows(scale_b, b_NK.shape[0])
    return (a @ b.T).to(out_dtype)


def _as_rows(scale: Tensor, rows: int) -> Tensor:
    """One scale or one per row, as a column of `rows` scales."""
    return scale.reshape(-1, 1).expand(rows, 1)


# ---- public wrapper ----


def fp8_gemm(
    a_MK: Tensor,
    scale_a: Tensor,
    b_NK: Tensor,
    scale_b: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast: bool = True,
) -> Tensor:
    """`a @ b.T` of FP8 codes with fp32 scales (one per tensor, or one per row of either operand).

    Raises ConfigError on shapes or dtypes that do not fit, UnsupportedError where K or N is no multiple of 16 on a GPU.
    """
    check_operands(a_MK, scale_a, b_NK, scale_b)
    if not a_MK.is_cuda:
        return fp8_gemm_ref(a_MK, scale_a, b_NK, scale_b, out_dtype=out_dtype)
    m, k = a_MK.shape
    n = b_NK.shape[0]
    if k % ALIGNMENT or n % ALIGNMENT:
        raise UnsupportedError(f"fp8_gemm: K={k} and N={n} must be multiples of {ALIGNMENT}; pad the operands")
    if m == 0:
        return torch.empty((0, n), dtype=out_dtype, device=a_MK.device)
    if scale_a.numel() > 1 or scale_b.numel() > 1:
        scale_a = _as_rows(scale_a, m).contiguous()
        scale_b = _as_rows(scale_b, n).contiguous().T
    return torch._scaled_mm(a_MK, b_NK.T, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast)


def check_operands(a_MK: Tensor, scale_a: Tensor, b_NK: Tensor, scale_b: Tensor) -> None:
    """Raise ConfigError unless both are FP8 matrices of one contraction with fp32 scales, one or one per row."""
    for name, operand, scale in (("a_MK", a_MK, scale_a), ("b_NK", b_NK, scale_b)):
        if operand.dim() != 2 or operand.dtype not in _FP8:
            raise ConfigError(
                f"{name} is {operand.dtype} with {operand.dim()} dimensions; fp8_gemm takes an FP8 matrix"
            )
        if scale.dtype != torch.float32 or scale.numel() not in (1, operand.shape[0]):
            raise ConfigError(
                f"the scale of {name} is {scale.dtype} with {scale.numel()} entries; "
                f"it must be fp32 with 1 or {operand.shape[0]}"
            )
    if a_MK.shape[1] != b_NK.shape[1]:
        raise ConfigError(f"a_MK has K={a_MK.shape[1]} and b_NK has K={b_NK.shape[1]}; they must be equal")
