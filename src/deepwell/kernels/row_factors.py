"""Factors of rows that a product of FP8 codes has left to whoever reads it.

    y[t, n] = factor[t] * z[t, n]        z = (codes @ codes) * one scale, rounded to bf16: `fp8_gemm` without scale_a

Numerics: factors are the scales of quantized rows, powers of two: y has the bits that a product scaled by rows would
have been rounded to, but for numbers below bf16's normal ones.
Cost: four bytes a row and a multiplication an element, in a kernel that waits for memory; the product gains up to 10 %.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels._triton import tl, triton
from deepwell.kernels.checks import check_vector


def times_rows(x_TK: Tensor, factor_T: Tensor | None) -> Tensor:
    """Reference: x in fp32, its rows multiplied where there are factors."""
    return x_TK.float() if factor_T is None else x_TK.float() * factor_T[:, None]


def check_factor(name: str, factor_T: Tensor | None, rows: int, like: Tensor) -> None:
    """Raise ConfigError unless there is none, or one in fp32 for each row on the device of `like`."""
    if factor_T is None:
        return
    check_vector(name, factor_T, rows, like)
    if factor_T.dtype != torch.float32:
        raise ConfigError(f"{name} is {factor_T.dtype}; factors of rows are torch.float32")


@triton.jit
def times_factor(x, factor_ptr, t):
    """x (fp32, of row t) times the row's factor, x itself where there are none."""
    if factor_ptr is None:
        return x
    else:
        return x * tl.load(factor_ptr + t)
