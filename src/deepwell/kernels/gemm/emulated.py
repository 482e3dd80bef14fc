"""Products of exactly rounded operands through bf16 tensor cores: what an emulated GEMM computes on a GPU.

    C[m, n] = sum_k A[m, k] B[n, k] * scale_a * scale_b        A, B: elements times block scales (`round_to_bf16`)

Numerics: what bf16 cannot hold is the scale of a tensor (NVFP4's); it comes after the sum, as hardware has it. So do
    transformed operands: they stay transformed. Products of bf16 numbers are exact in fp32 and added there.
Cost: 2*M*N*K flops at bf16's rate, by the data sheet twice TF32's and fifteen times fp32's on Hopper; bytes
    2*(M*K + N*K) + 4*M*N besides the rounding.
"""

# Shapes: M rows of the result, N columns, K contraction.

import torch
from torch import Tensor

from deepwell.errors import ConfigError

# ---- reference: what the product must be, in the plainest torch ----


def emulated_mm_ref(a_MK: Tensor, scale_a: Tensor | None, b_NK: Tensor, scale_b: Tensor | None) -> Tensor:
    """Reference for `emulated_mm`: fp32 throughout."""
    return _scaled(a_MK.float() @ b_NK.float().T, scale_a, scale_b)


# ---- public wrapper ----


def emulated_mm(a_MK: Tensor, scale_a: Tensor | None, b_NK: Tensor, scale_b: Tensor | None) -> Tensor:
    """`a @ b.T * scale_a * scale_b` of bf16 matrices in fp32. Raises ConfigError on other dtypes."""
    if a_MK.dtype != torch.bfloat16 or b_NK.dtype != torch.bfloat16:
        raise ConfigError(f"emulated_mm takes bf16, got {a_MK.dtype} and {b_NK.dtype}: see round_to_bf16")
    if not a_MK.is_cuda:
        return emulated_mm_ref(a_MK, scale_a, b_NK, scale_b)
    return _scaled(torch.mm(a_MK, b_NK.T, out_dtype=torch.float32), scale_a, scale_b)


def _scaled(c_MN: Tensor, *scales: Tensor | None) -> Tensor:
    given = [scale for scale in scales if scale is not None]
    if len(given) == 2:
        return c_MN.mul_(given[0] * given[1])
    return c_MN.mul_(given[0]) if given else c_MN
