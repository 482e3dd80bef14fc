"""The norms as torch ops, with the shapes that tracing needs.

Both norms have the same family of ops. `add_` normalises a sum with the residual and gives that sum too. `_quantize`
gives FP8 rows instead of the result, and `_beside`, of a backward, both.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.norm import layer_norm, rms_norm
from deepwell.kernels.torch_library import dense, dense_or_none, register_rows

ops = torch.ops.deepwell


def _rms_norm(
    written: dict[str, Any],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    rounding: str,
    factor: Any = None,
) -> rms_norm.Normed:
    options = rms_norm.NormOptions(eps=eps, rounding=rounding, **written)
    past = dense_or_none(residual)
    return rms_norm.rms_norm(dense(x), dense(weight), residual_TD=past, factor_T=factor, options=options)


def _layer_norm(
    written: dict[str, Any],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Any,
    eps: float,
    factor: Any = None,
) -> rms_norm.Normed:
    options = rms_norm.NormOptions(eps=eps, rounding="torch", **written)
    tensors = (dense(x), dense(weight), dense_or_none(bias))
    return layer_norm.layer_norm(*tensors, residual_TD=dense_or_none(residual), factor_T=factor, options=options)


# Of the backwards, `past` is the gradient that reaches x past the norm, which dx has added; `factor` is of dy's rows.


def _rms_norm_backward(
    written: dict[str, Any],
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    rounding: str,
    past: Any = None,
    factor: Any = None,
) -> rms_norm.NormGrads:
    options = rms_norm.NormOptions(rounding=rounding, **written)
    tensors = (dense(dy), dense(x), dense(weight), rstd)
    return rms_norm.rms_norm_backward(*tensors, d_residual_TD=dense_or_none(past), factor_T=factor, options=options)


def _layer_norm_backward(
    written: dict[str, Any],
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    past: Any = None,
    factor: Any = None,
) -> rms_norm.NormGrads:
    options = rms_norm.NormOptions(rounding="torch", **written)
    tensors = (dense(dy), dense(x), dense(weight), mean, rstd)
    return layer_norm.layer_norm_backward(*tensors, d_residual_TD=dense_or_none(past), factor_T=factor, options=options)


# ---- the ops ----


def _register(name: str, run: Callable[..., Any], how: str, backward: Callable[..., Any], saved: str) -> None:
    """The ops of one norm. `how` are its arguments after the weight, `saved` those of its backward."""
    num_stats = saved.count("Tensor")  # a number per row each; as many gradients of parameters

    def stats(x: Tensor) -> list[Tensor]:
        return [x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(num_stats)]

    def forward(*given: Any) -> tuple[Any, ...]:
        y, q, scale, total, rstd, mean = run(*given)
        return y, q, scale, total, mean, rstd

    register_rows(
        f"{name}(Tensor x, Tensor weight, {how})",
        lambda written, x, *given: forward(written, x, None, *given),
        lambda x, *given: (x.new_empty(x.shape), *stats(x)),
        others=num_stats,
    )
    register_rows(
        f"add_{name}(Tensor x, Tensor residual, Tensor weight, {how}, Tensor? factor=None)",
        forward,
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
