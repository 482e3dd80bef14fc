"""The norms as torch ops, with the shapes that tracing needs.

Both norms have the same family of ops. `add_` normalises a sum with the residual and gives that sum too. `_quantize`
gives FP8 rows instead of the result, and `_beside`, of a backward, both.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.norm import rms_norm
from deepwell.kernels.norm.rms_norm import NormOptions
from deepwell.kernels.torch_library import dense, dense_or_none, register_rows

ops = torch.ops.deepwell


# `past` is the gradient that reaches x past the norm, which dx has added; `factor` is of x's rows, or of dy's.


def _forward(options: NormOptions, x: Tensor, residual: Any, weight: Tensor, bias: Any, factor: Any) -> Any:
    tensors, past = (dense(x), dense(weight), dense_or_none(bias)), dense_or_none(residual)
    y, q, scale, total, rstd, mean = rms_norm.norm(*tensors, residual_TD=past, factor_T=factor, options=options)
    return y, q, scale, total, mean, rstd


def _backward(
    options: NormOptions, dy: Tensor, x: Tensor, weight: Tensor, mean: Any, rstd: Tensor, past: Any, factor: Any
) -> Any:
    tensors, past = (dense(dy), dense(x), dense(weight), rstd, mean), dense_or_none(past)
    return rms_norm.norm_backward(*tensors, d_residual_TD=past, factor_T=factor, options=options)


def _rms_norm(written: Any, x: Any, residual: Any, weight: Any, eps: float, rounding: str, factor: Any = None) -> Any:
    return _forward(NormOptions(eps=eps, rounding=rounding, **written), x, residual, weight, None, factor)


def _layer_norm(written: Any, x: Any, residual: Any, weight: Any, bias: Any, eps: float, factor: Any = None) -> Any:
    return _forward(NormOptions(eps=eps, center=True, rounding="torch", **written), x, residual, weight, bias, factor)


def _rms_norm_backward(
    written: Any, dy: Any, x: Any, weight: Any, rstd: Any, rounding: str, past: Any = None, factor: Any = None
) -> Any:
    return _backward(NormOptions(rounding=rounding, **written), dy, x, weight, None, rstd, past, factor)


def _layer_norm_backward(
    written: Any, dy: Any, x: Any, weight: Any, mean: Any, rstd: Any, past: Any = None, factor: Any = None
) -> Any:
    return _backward(NormOptions(center=True, rounding="torch", **written), dy, x, weight, mean, rstd, past, factor)


# ---- the ops ----


def _register(name: str, run: Callable[..., Any], how: str, backward: Callable[..., Any], saved: str) -> None:
    """The ops of one norm. `how` are its arguments after the weight, `saved` those of its backward."""
    num_stats = saved.count("Tensor")  # a number per row each; as many gradients of parameters

    def stats(x: Tensor) -> list[Tensor]:
        return [x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(num_stats)]

    register_rows(
        f"{name}(Tensor x, Tensor weight, {how})",
        lambda written, x, *given: run(written, x, None, *given),
        lambda x, *given: (x.new_empty(x.shape), *stats(x)),
        others=num_stats,
    )
    register_rows(
        f"add_{name}(Tensor x, Tensor residual, Tensor weight, {how}, Tensor? factor=None)",
        run,
        lambda x, *given: (x.new_empty(x.shape), x.new_empty(x.shape), *stats(x)),
        others=1 + num_stats,
    )
    register_rows(
        f"{name}_backward(Tensor dy, Tensor x, Tensor weight, {saved}, Tensor? d_residual=None, Tensor? factor=None)",
        backward,
        lambda dy, x, weight, *given: (x.new_empty(x.shape), *(weight.new_empty(weight.shape) for _ in stats(x))),
        others=num_stats,
        ends=("", "_quantize", "_beside"),
    )


_register("rms_norm", _rms_norm, "float eps, str rounding", _rms_norm_backward, "Tensor rstd, str rounding")
_register("layer_norm", _layer_norm, "Tensor? bias, float eps", _layer_norm_backward, "Tensor mean, Tensor rstd")
