"""The norms as torch ops, with the shapes that tracing needs.

Both norms have the same family of ops. `add_` normalises a sum with the residual and gives that sum too. `_quantize`
gives FP8 rows instead of the result, and `_beside`, of a backward, both.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.norm import layer_norm, rms_norm
from deepwell.kernels.torch_library import FP8, dense, dense_or_none, fp8_rows_like, not_none, register_op

ops = torch.ops.deepwell

# What is written, by the end of an op's name.
_WRITTEN: dict[str, dict[str, Any]] = {"": {}, "_quantize": {"write": False, "fp8": FP8}, "_beside": {"fp8": FP8}}


_NUM_WRITTEN = {"": 1, "_quantize": 2, "_beside": 3}


def _rms_norm(
    written: str, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rounding: str, factor: Any = None
) -> rms_norm.Normed:
    options = rms_norm.NormOptions(eps=eps, rounding=rounding, **_WRITTEN[written])
    past = dense_or_none(residual)
    return rms_norm.rms_norm(dense(x), dense(weight), residual_TD=past, factor_T=factor, options=options)


def _layer_norm(
    written: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Any, eps: float, factor: Any = None
) -> rms_norm.Normed:
    options = rms_norm.NormOptions(eps=eps, rounding="torch", **_WRITTEN[written])
    tensors = (dense(x), dense(weight), dense_or_none(bias))
    return layer_norm.layer_norm(*tensors, residual_TD=dense_or_none(residual), factor_T=factor, options=options)


# Of the backwards, `past` is the gradient that reaches x past the norm, which dx has added; `factor` is of dy's rows.


def _rms_norm_backward(
    written: str,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    rounding: str,
    past: Any = None,
    factor: Any = None,
) -> rms_norm.NormGrads:
    options = rms_norm.NormOptions(rounding=rounding, **_WRITTEN[written])
    tensors = (dense(dy), dense(x), dense(weight), rstd)
    return rms_norm.rms_norm_backward(*tensors, d_residual_TD=dense_or_none(past), factor_T=factor, options=options)


def _layer_norm_backward(
    written: str,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    past: Any = None,
    factor: Any = None,
) -> rms_norm.NormGrads:
    options = rms_norm.NormOptions(rounding="torch", **_WRITTEN[written])
    tensors = (dense(dy), dense(x), dense(weight), mean, rstd)
    return layer_norm.layer_norm_backward(*tensors, d_residual_TD=dense_or_none(past), factor_T=factor, options=options)


# ---- the ops ----


def _fake(x: Tensor, written: str) -> tuple[Tensor, ...]:
    y = () if written == "_quantize" else (x.new_empty(x.shape),)
    return y if not written else (*y, *fp8_rows_like(x))


def _register(name: str, run: Callable[..., Any], how: str, backward: Callable[..., Any], saved: str) -> None:
    """The ops of one norm. `how` are its arguments after the weight, `saved` those of its backward."""
    num_stats = saved.count("Tensor")  # a number per row each; as many gradients of parameters

    def define(
        op: str, schema: str, written: str, count: int, call: Callable[..., Any], fake: Callable[..., Any]
    ) -> None:
        types = ", ".join(["Tensor"] * (_NUM_WRITTEN[written] + count))
        register_op(f"{op}{written}({schema}) -> ({types})", call, fake)

    def stats(x: Tensor) -> list[Tensor]:
        return [x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(num_stats)]

    def forward(written: str, *given: Any) -> tuple[Any, ...]:
        y, q, scale, total, rstd, mean = run(written, *given)
        return not_none((y, q, scale, total, mean, rstd))

    for written in ("", "_quantize"):
        define(
            name, f"Tensor x, Tensor weight, {how}", written, num_stats,
            lambda x, *given, written=written: forward(written, x, None, *given),
            lambda x, *others, written=written: (*_fake(x, written), *stats(x)),
        )  # fmt: skip
        define(
            f"add_{name}", f"Tensor x, Tensor residual, Tensor weight, {how}, Tensor? factor=None", written,
            1 + num_stats, lambda *given, written=written: forward(written, *given),
            lambda x, *others, written=written: (*_fake(x, written), x.new_empty(x.shape), *stats(x)),
        )  # fmt: skip
    of_backward = f"Tensor dy, Tensor x, Tensor weight, {saved}, Tensor? d_residual=None, Tensor? factor=None"
    for written in _WRITTEN:
        define(
            f"{name}_backward", of_backward, written, num_stats,
            lambda *given, written=written: not_none(backward(written, *given)),
            lambda dy, x, weight, *others, written=written: (
                *_fake(x, written), *(weight.new_empty(weight.shape) for _ in range(num_stats))
            ),
        )  # fmt: skip


_register("rms_norm", _rms_norm, "float eps, str rounding", _rms_norm_backward, "Tensor rstd, str rounding")
_register("layer_norm", _layer_norm, "Tensor? bias, float eps", _layer_norm_backward, "Tensor mean, Tensor rstd")
