"""`a @ b` with its sums and its result in fp32, on a GPU's tensor cores: torch's fp32 products leave them.

    bf16 @ bf16    a product of two bf16 numbers is exact in fp32
    fp32 @ bf16    a = high + low, both bf16, and the sum of their products

Numerics: bf16 @ bf16 as in fp32, in another order of sums. |a - high - low| <= 2^-17 |a|: each product of fp32 @ bf16
    is that near to the exact one. Other dtypes, and all on a CPU, are torch's product in fp32.
"""

# Shapes: M, N, K of the product.

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from deepwell.errors import ConfigError

# ---- reference ----


def product_in_fp32_ref(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    return a_MK.float() @ b_KN.float()


# ---- halves ----


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low): two bf16 numbers whose sum is x to 2^-17 of it."""
    high = x.bfloat16()
    return high, (x - high.float()).bfloat16()


def product_of_halves(a_MK: Tensor, b_KN: Tensor, mm: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`a @ b` of a in fp32 and b in bf16 by one product `mm` of bf16 operands."""
    m, k = a_MK.shape
    if m >= k:  # b twice is less than two results
        return mm(torch.cat(halves(a_MK), 1), torch.cat((b_KN, b_KN)))
    both = mm(torch.cat(halves(a_MK)), b_KN)
    return both[:m] + both[m:]


# ---- public wrapper ----


def runs_on_tensor_cores(a: Tensor, b: Tensor) -> bool:
    """Whether a product of the two is made of bf16 operands."""
    return a.is_cuda and a.dtype in (torch.bfloat16, torch.float32) and b.dtype == torch.bfloat16


def product_in_fp32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`a @ b` in fp32. Raises ConfigError on operands that do not fit."""
    if a_MK.dim() != 2 or b_KN.dim() != 2 or a_MK.shape[1] != b_KN.shape[0]:
        raise ConfigError(f"a_MK is {tuple(a_MK.shape)} and b_KN {tuple(b_KN.shape)}; they must be [M, K] and [K, N]")
    if not runs_on_tensor_cores(a_MK, b_KN):
        return product_in_fp32_ref(a_MK, b_KN)
    mm = partial(torch.mm, out_dtype=torch.float32)
    return mm(a_MK, b_KN) if a_MK.dtype == torch.bfloat16 else product_of_halves(a_MK, b_KN, mm)
