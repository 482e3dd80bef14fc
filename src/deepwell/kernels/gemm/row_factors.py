"""Factors of rows that a product of FP8 values has left to whoever reads it.

    y[t, n] = factor[t] * z[t, n]        z = (values @ values) * one scale, rounded to bf16: `fp8_gemm` without scale_a

Numerics: factors are powers of two, the scales of quantized rows (of others bf16 numbers would see 8 bits): y has the
    bits that a product scaled by rows would have been rounded to, but for numbers below bf16's normal ones.
Cost: four bytes a row and half an instruction an element of bf16, none where a residual is added (it is the same one);
    the product gains up to 10 %.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.checks import check_vector
from deepwell.kernels.device.bf16_words import product
from deepwell.kernels.device.triton_support import tl, triton


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
def factor_like(x, factor):
    """A factor as what multiplies x: of bf16 also in bf16, which has all powers of two."""
    if x.dtype == tl.bfloat16:
        # Its upper half: no conversion, which would be a slow one of a single number.
        return (factor.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return factor


@triton.jit
def times_factor(x, factor_ptr, t, ASM: tl.constexpr):
    """x, as it was loaded, times the factor of its row t: in bf16 where it is, two at a time, else in fp32.

    x itself where there are no factors.
    """
    if factor_ptr is None:
        return x
    elif x.dtype == tl.bfloat16:
        return product(x, factor_like(x, tl.load(factor_ptr + t)), ASM)
    else:
        return x.to(tl.float32) * tl.load(factor_ptr + t)
