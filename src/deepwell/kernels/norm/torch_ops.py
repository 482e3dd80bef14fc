"""The norms as torch ops, with the shapes that tracing needs."""

from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.norm import layer_norm, rms_norm
from deepwell.kernels.torch_library import FP8, dense, dense_or_none, fp8_rows_like, not_none, register_op

ops = torch.ops.deepwell

# ---- RMSNorm ----


def _rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: str) -> tuple[Any, ...]:
    out = rms_norm.rms_norm(dense(x), dense(weight), options=rms_norm.NormOptions(eps=eps, rounding=rounding))
    return out.y, out.rstd


def _rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, rounding: str) -> tuple[Any, ...]:
    options = rms_norm.NormOptions(eps=eps, rounding=rounding, write=False, fp8=FP8)
    out = rms_norm.rms_norm(dense(x), dense(weight), options=options)
    return out.q, out.scale, out.rstd


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: str, factor: Tensor | None = None
) -> tuple[Any, ...]:
    options = rms_norm.NormOptions(eps=eps, rounding=rounding)
    tensors = (dense(x), dense(weight))
    out = rms_norm.rms_norm(*tensors, residual_TD=dense(residual), factor_T=factor, options=options)
    return out.y, out.total, out.rstd


def _add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: str, factor: Tensor | None = None
) -> tuple[Any, ...]:
    options = rms_norm.NormOptions(eps=eps, rounding=rounding, write=False, fp8=FP8)
    tensors = (dense(x), dense(weight))
    out = rms_norm.rms_norm(*tensors, residual_TD=dense(residual), factor_T=factor, options=options)
    return out.q, out.scale, out.total, out.rstd


# What a norm's backward writes: dx, FP8 rows of it for the linear before the norm, or both.
_Written = dict[str, Any]
_DX: _Written = {}
_DX_ROWS: _Written = {"write": False, "fp8": FP8}
_DX_AND_ROWS: _Written = {"fp8": FP8}


def _rms_norm_grads(
    written: _Written, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *how: Any
) -> tuple[Any, ...]:
    """`how` is the rounding and, where there are any, the gradient that reaches x past the norm (dx has it added) and
    factors of dy's rows."""
    rounding, past, factor = (*how, None, None)[:3]
    options = rms_norm.NormOptions(rounding=rounding, **written)
    tensors = (dense(dy), dense(x), dense(weight), rstd)
    return not_none(
        rms_norm.rms_norm_backward(*tensors, d_residual_TD=dense_or_none(past), factor_T=factor, options=options)
    )


def _fake_rstd(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


register_op(
    "rms_norm(Tensor x, Tensor weight, float eps, str rounding) -> (Tensor, Tensor)",
    _rms_norm,
    lambda x, weight, eps, rounding: (x.new_empty(x.shape), _fake_rstd(x)),
)
register_op(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, str rounding) -> (Tensor, Tensor, Tensor)",
    _rms_norm_quantize,
    lambda x, weight, eps, rounding: (*fp8_rows_like(x), _fake_rstd(x)),
)
_ADD_RMS_NORM = "(Tensor x, Tensor residual, Tensor weight, float eps, str rounding, Tensor? factor=None)"
register_op(
    f"add_rms_norm{_ADD_RMS_NORM} -> (Tensor, Tensor, Tensor)",
    _add_rms_norm,
    lambda x, *others: (x.new_empty(x.shape), x.new_empty(x.shape), _fake_rstd(x)),
)
register_op(
    f"add_rms_norm_quantize{_ADD_RMS_NORM} -> (Tensor, Tensor, Tensor, Tensor)",
    _add_rms_norm_quantize,
    lambda x, *others: (*fp8_rows_like(x), x.new_empty(x.shape), _fake_rstd(x)),
)
_RMS_NORM_GRADS = (
    "(Tensor dy, Tensor x, Tensor weight, Tensor rstd, str rounding, Tensor? d_residual=None, Tensor? factor=None)"
)
register_op(
    f"rms_norm_backward{_RMS_NORM_GRADS} -> (Tensor, Tensor)",
    lambda *operands: _rms_norm_grads(_DX, *operands),
    lambda dy, x, weight, *how: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
register_op(
    f"rms_norm_backward_quantize{_RMS_NORM_GRADS} -> (Tensor, Tensor, Tensor)",
    lambda *operands: _rms_norm_grads(_DX_ROWS, *operands),
    lambda dy, x, weight, *how: (*fp8_rows_like(x), weight.new_empty(weight.shape)),
)
register_op(
    f"rms_norm_backward_beside{_RMS_NORM_GRADS} -> (Tensor, Tensor, Tensor, Tensor)",
    lambda *operands: _rms_norm_grads(_DX_AND_ROWS, *operands),
    lambda dy, x, weight, *how: (x.new_empty(x.shape), *fp8_rows_like(x), weight.new_empty(weight.shape)),
)

# ---- LayerNorm ----


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Any, ...]:
    options = rms_norm.NormOptions(eps=eps, rounding="torch")
    out = layer_norm.layer_norm(dense(x), dense(weight), dense_or_none(bias), options=options)
    return out.y, out.mean, out.rstd


def _layer_norm_quantize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Any, ...]:
    options = rms_norm.NormOptions(eps=eps, rounding="torch", write=False, fp8=FP8)
    out = layer_norm.layer_norm(dense(x), dense(weight), dense_or_none(bias), options=options)
    return out.q, out.scale, out.mean, out.rstd


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, factor: Tensor | None = None
) -> tuple[Any, ...]:
    options = rms_norm.NormOptions(eps=eps, rounding="torch")
    tensors = (dense(x), dense(weight), dense_or_none(bias))
    out = layer_norm.layer_norm(*tensors, residual_TD=dense(residual), factor_T=factor, options=options)
    return out.y, out.total, out.mean, out.rstd


def _add_layer_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, factor: Tensor | None = None
) -> tuple[Any, ...]:
    options = rms_norm.NormOptions(eps=eps, rounding="torch", write=False, fp8=FP8)
    tensors = (dense(x), dense(weight), dense_or_none(bias))
    out = layer_norm.layer_norm(*tensors, residual_TD=dense(residual), factor_T=factor, options=options)
    return out.q, out.scale, out.total, out.mean, out.rstd


def _layer_norm_grads(
    written: _Written, dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *how: Any
) -> tuple[Any, ...]:
    """`how`: where there are any, the gradient that reaches x past the norm and factors of dy's rows."""
    past, factor = (*how, None, None)[:2]
    options = rms_norm.NormOptions(rounding="torch", **written)
    tensors = (dense(dy), dense(x), dense(weight), mean, rstd)
    return not_none(
        layer_norm.layer_norm_backward(*tensors, d_residual_TD=dense_or_none(past), factor_T=factor, options=options)
    )


def _fake_dw_db(weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight.new_empty(weight.shape), weight.new_empty(weight.shape)


register_op(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm,
    lambda x, weight, bias, eps: (x.new_empty(x.shape), _fake_rstd(x), _fake_rstd(x)),
)
register_op(
    "layer_norm_quantize(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    _layer_norm_quantize,
    lambda x, weight, bias, eps: (*fp8_rows_like(x), _fake_rstd(x), _fake_rstd(x)),
)
_ADD_LAYER_NORM = "(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, Tensor? factor=None)"
register_op(
    f"add_layer_norm{_ADD_LAYER_NORM} -> (Tensor, Tensor, Tensor, Tensor)",
    _add_layer_norm,
    lambda x, *others: (x.new_empty(x.shape), x.new_empty(x.shape), _fake_rstd(x), _fake_rstd(x)),
)
register_op(
    f"add_layer_norm_quantize{_ADD_LAYER_NORM} -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _add_layer_norm_quantize,
    lambda x, *others: (*fp8_rows_like(x), x.new_empty(x.shape), _fake_rstd(x), _fake_rstd(x)),
)
_LAYER_NORM_GRADS = (
    "(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor? d_residual=None, Tensor? factor=None)"
)
register_op(
    f"layer_norm_backward{_LAYER_NORM_GRADS} -> (Tensor, Tensor, Tensor)",
    lambda *operands: _layer_norm_grads(_DX, *operands),
    lambda dy, x, weight, *how: (x.new_empty(x.shape), *_fake_dw_db(weight)),
)
register_op(
    f"layer_norm_backward_quantize{_LAYER_NORM_GRADS} -> (Tensor, Tensor, Tensor, Tensor)",
    lambda *operands: _layer_norm_grads(_DX_ROWS, *operands),
    lambda dy, x, weight, *how: (*fp8_rows_like(x), *_fake_dw_db(weight)),
)
register_op(
    f"layer_norm_backward_beside{_LAYER_NORM_GRADS} -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda *operands: _layer_norm_grads(_DX_AND_ROWS, *operands),
    lambda dy, x, weight, *how: (x.new_empty(x.shape), *fp8_rows_like(x), *_fake_dw_db(weight)),
)
