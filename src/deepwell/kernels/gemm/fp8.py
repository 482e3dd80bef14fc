"""FP8 matrix products with the scales in the epilogue: `C[m, n] = (A[m, k] @ B[n, k]^T) * scale_a[m] * scale_b`.

Both operands lie along the contraction (Hopper's tensor cores take nothing else). Rows of A carry their own scale or
share one; B has one scale for the tensor or one per row. Where A is given none, its reader multiplies rows by theirs:
cuBLASLt has faster kernels for products with one scale (docs/gotchas.md), and powers of two lose nothing.
Numerics: products of FP8 values are exact; cuBLASLt adds them in fp32, with `fast` in the tensor cores' shorter one,
which suits sums that wander and spoils sums that drift: 4096 terms without a mean keep 57 dB, with one as large as
their deviation 31, and 32768 of those 12 (docs/numerics.md).
Cost: 2*M*N*K flops; bytes M*K + N*K + 2*M*N.
"""

# Shapes: M rows of the result, N columns, K contraction.

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.hardware.capability import canonical_format, fp8_row_results

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# cuBLASLt's FP8 rows are whole 16-byte lines.
ALIGNMENT = 16

# ---- reference: what the kernel must compute, in the plainest torch ----


def fp8_gemm_ref(
    a_MK: Tensor,
    scale_a: Tensor | None,
    b_NK: Tensor,
    scale_b: Tensor,
    *,
    out_dtype: torch.dtype,
    bias_N: Tensor | None = None,
) -> Tensor:
    """Reference for `fp8_gemm`: fp32 products of the dequantized operands, the bias added, rounded once."""
    a = a_MK.float() if scale_a is None else a_MK.float() * _as_rows(scale_a, a_MK.shape[0])
    b = b_NK.float() * _as_rows(scale_b, b_NK.shape[0])
    product = a @ b.T
    return (product if bias_N is None else product + bias_N.float()).to(out_dtype)


def _as_rows(scale: Tensor, rows: int) -> Tensor:
    """One scale or one per row, as a column of `rows` scales."""
    column = scale.reshape(-1, 1)
    return column if column.shape[0] == rows else column.expand(rows, 1)


def padded_codes(q: Tensor, rows: int, columns: int = 0) -> Tensor:
    """FP8 values with so many rows and columns of zeros (the byte 0) appended."""
    return F.pad(q.view(torch.uint8), (0, columns, 0, rows)).view(q.dtype)


# ---- a scale of one ----

_ones: dict[torch.device, Tensor] = {}


def keep_one(device: torch.device) -> None:
    """Have a scale of 1 on a device for good. To be called while no CUDA graph is recorded: it would be its memory."""
    if device.type == "cuda" and device not in _ones:
        _ones[device] = torch.ones((), device=device)


def one_on(device: torch.device) -> Tensor:
    """The scale 1: the one that is kept, or a new one."""
    kept = _ones.get(device)
    return torch.ones((), device=device) if kept is None else kept


# ---- public wrapper ----


def fp8_gemm(
    a_MK: Tensor,
    scale_a: Tensor | None,
    b_NK: Tensor,
    scale_b: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast: bool = True,
    bias_N: Tensor | None = None,
) -> Tensor:
    """`a @ b.T + bias` of FP8 values with fp32 scales (one per tensor, or one per row of either operand).

    Without `scale_a` it is 1. The bias goes into the epilogue, before the one rounding: bf16, of a bf16 result (torch's
    own restriction).

    Raises ConfigError on shapes or dtypes that do not fit, UnsupportedError where K or N is no multiple of 16 on a GPU,
    or where that GPU does not write products with row scales in `out_dtype` (see `row_dtype`).
    """
    check_operands(a_MK, scale_a, b_NK, scale_b)
    if bias_N is not None:
        _check_bias(bias_N, b_NK, out_dtype)
    if not a_MK.is_cuda:
        return fp8_gemm_ref(a_MK, scale_a, b_NK, scale_b, out_dtype=out_dtype, bias_N=bias_N)
    scale_a = one_on(a_MK.device) if scale_a is None else scale_a
    m, k = a_MK.shape
    n = b_NK.shape[0]
    if k % ALIGNMENT or n % ALIGNMENT:
        raise UnsupportedError(f"fp8_gemm: K={k} and N={n} must be multiples of {ALIGNMENT}; pad the operands")
    if m == 0:
        return torch.empty((0, n), dtype=out_dtype, device=a_MK.device)
    if scale_a.numel() > 1 or scale_b.numel() > 1:
        if out_dtype != torch.bfloat16 and row_dtype(out_dtype, a_MK.device) != out_dtype:
            raise UnsupportedError(
                f"fp8_gemm: out_dtype is {out_dtype}, and products with row scales are written in bf16 alone on "
                f"{a_MK.device}; ask for torch.bfloat16 and cast, or use one scale per tensor"
            )
        scale_a = _as_rows(scale_a, m).contiguous()
        scale_b = _as_rows(scale_b, n).contiguous().T
    if bias_N is not None and (not bias_N.is_contiguous() or bias_N.data_ptr() % ALIGNMENT):
        bias_N = bias_N.clone(memory_format=torch.contiguous_format)  # the epilogue reads it in whole 16-byte lines
    return torch._scaled_mm(a_MK, b_NK.T, scale_a, scale_b, bias=bias_N, out_dtype=out_dtype, use_fast_accum=fast)


def row_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which dtype a product with row scales is written where `dtype` is wanted: that one, or bf16."""
    capability = _capability(device)
    if capability is None:
        return dtype
    name = canonical_format(str(dtype).removeprefix("torch."))
    return dtype if name in fp8_row_results(capability, torch.version.cuda) else torch.bfloat16


def _capability(device: torch.device) -> tuple[int, int] | None:
    """That of a GPU, None elsewhere."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _check_bias(bias_N: Tensor, b_NK: Tensor, out_dtype: torch.dtype) -> None:
    if bias_N.dtype != torch.bfloat16 or out_dtype != torch.bfloat16:
        raise ConfigError(
            f"bias_N is {bias_N.dtype} for a result of {out_dtype}; the epilogue adds bfloat16 to bfloat16"
        )
    if bias_N.shape != (b_NK.shape[0],) or bias_N.device != b_NK.device:
        got = f"{tuple(bias_N.shape)} on {bias_N.device}"
        raise ConfigError(f"bias_N must have shape ({b_NK.shape[0]},) on {b_NK.device}, got {got}")


def check_operands(a_MK: Tensor, scale_a: Tensor | None, b_NK: Tensor, scale_b: Tensor) -> None:
    """Raise ConfigError unless both are FP8 matrices of one contraction with fp32 scales, one or one per row."""
    for name, operand, scale in (("a_MK", a_MK, scale_a), ("b_NK", b_NK, scale_b)):
        if operand.dim() != 2 or operand.dtype not in _FP8:
            raise ConfigError(
                f"{name} is {operand.dtype} with {operand.dim()} dimensions; fp8_gemm takes an FP8 matrix"
            )
        if scale is None:
            continue
        if scale.dtype != torch.float32 or scale.numel() not in (1, operand.shape[0]):
            raise ConfigError(
                f"the scale of {name} is {scale.dtype} with {scale.numel()} entries; "
                f"it must be fp32 with 1 or {operand.shape[0]}"
            )
    if a_MK.shape[1] != b_NK.shape[1]:
        raise ConfigError(f"a_MK has K={a_MK.shape[1]} and b_NK has K={b_NK.shape[1]}; they must be equal")
