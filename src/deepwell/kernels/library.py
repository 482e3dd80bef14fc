"""The kernels as torch ops (`torch.ops.deepwell.*`), with the shapes that tracing needs.

Primitives without autograd: the engine's autograd functions call them, so that forward and backward graphs show each
quantization, GEMM and norm as a node that passes can move and fuse.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.formats.hadamard import DEFAULT_SIGNS
from deepwell.kernels.gemm import fp8 as gemm
from deepwell.kernels.gemm.emulated import emulated_mm
from deepwell.kernels.head.embedding import embedding_backward
from deepwell.kernels.norm import layer_norm, rms_norm
from deepwell.kernels.quantize.fp8 import quantize_rows
from deepwell.kernels.quantize.round_to import round_to, round_to_bf16
from deepwell.kernels.quantize.weights import num_partials, partial_maxima, quantize_group
from deepwell.kernels.quantize.wgrad_operands import wgrad_operands
from deepwell.kernels.rope import rope
from deepwell.kernels.tune.fastest import fastest_fp8_gemm

NAMESPACE = "deepwell"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_FP8 = torch.float8_e4m3fn


def _register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(", maxsplit=1)[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _dense(x: Tensor) -> Tensor:
    """x with contiguous rows, as the kernels read them: itself, or a copy where a model transposed it."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _packed(x: Tensor | None) -> Tensor | None:
    return None if x is None else _dense(x)


def _rows_of(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    return x_TK.new_empty(x_TK.shape, dtype=_FP8), x_TK.new_empty(x_TK.shape[0], dtype=torch.float32)


# ---- quantization ----


def _quantize_weights(weights: Sequence[Tensor], scale_per_row: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Several weights side by side under one scale, for the forward: (q [N, K], scale, partial maxima)."""
    partials = partial_maxima(weights)
    return *quantize_group(weights, partials, turned=False, scale_per_row=scale_per_row), partials


def _quantize_weights_transposed(
    weights: Sequence[Tensor], partials: Tensor, after: Tensor, scale_per_row: bool = False
) -> tuple[Tensor, Tensor]:
    """The transposed copy of the same codes, for the backward: (q [K, N], scale).

    Made when the backward asks for it, from weights that are there anyway: kept from the forward it would cost a byte
    per parameter at the peak. `after` is any tensor of the backward: it keeps a compiler from moving this forward.
    """
    return quantize_group(weights, partials, turned=True, scale_per_row=scale_per_row)


def _fake_quantize_weights(weights: Sequence[Tensor], scale_per_row: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    k, n = weights[0].shape[1], sum(w.shape[0] for w in weights)
    scale, partials = (
        weights[0].new_empty(shape, dtype=torch.float32)
        for shape in (n if scale_per_row else (), num_partials(weights))
    )
    return weights[0].new_empty((n, k), dtype=_FP8), scale, partials


def _fake_quantize_weights_transposed(
    weights: Sequence[Tensor], partials: Tensor, after: Tensor, scale_per_row: bool = False
) -> tuple[Tensor, Tensor]:
    k, n = weights[0].shape[1], sum(w.shape[0] for w in weights)
    scale = weights[0].new_empty(k if scale_per_row else (), dtype=torch.float32)
    return weights[0].new_empty((k, n), dtype=_FP8), scale


def _round_to(x: Tensor, fmt: str, rounding: str, hadamard: bool) -> Tensor:
    """x rounded along its last dimension; zeros fill up the last run of the Hadamard transform and stay."""
    signs = DEFAULT_SIGNS if hadamard else None
    if hadamard:
        x = F.pad(x, (0, _hadamard_width(x) - x.shape[-1]))
    return round_to(x.contiguous(), fmt, rounding=rounding, hadamard=signs)


def _hadamard_width(x: Tensor) -> int:
    run = len(DEFAULT_SIGNS)
    return -(-x.shape[-1] // run) * run


def _fake_round_to(x: Tensor, fmt: str, rounding: str, hadamard: bool) -> Tensor:
    width = _hadamard_width(x) if hadamard else x.shape[-1]
    return x.new_empty((*x.shape[:-1], width), dtype=torch.float32)


def _fake_wgrad_operands(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = () if offs is None else (offs.shape[0],)
    turned = (q.new_empty((q.shape[1], q.shape[0])) for q in (a, b))
    return next(turned), scale_a.new_empty(shape), next(turned), scale_b.new_empty(shape)


_register("quantize_rows(Tensor x) -> (Tensor, Tensor)", lambda x: quantize_rows(_dense(x)), _rows_of)
_register(
    "quantize_weights(Tensor[] weights, bool scale_per_row=False) -> (Tensor, Tensor, Tensor)",
    _quantize_weights,
    _fake_quantize_weights,
)
_register(
    "quantize_weights_transposed(Tensor[] weights, Tensor partials, Tensor after, bool scale_per_row=False)"
    " -> (Tensor, Tensor)",
    _quantize_weights_transposed,
    _fake_quantize_weights_transposed,
)
_register(
    "wgrad_operands(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor? offs=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    wgrad_operands,
    _fake_wgrad_operands,
)
_register(
    "round_to(Tensor x, str fmt, str rounding, bool hadamard) -> Tensor",
    _round_to,
    _fake_round_to,
)


def _emulated_mm(
    a: Tensor, b: Tensor, lhs: str, lhs_rounding: str, hadamard: bool, rhs: str, rhs_rounding: str
) -> Tensor:
    """`round(a) @ round(b).T` in fp32 through bf16, see `emulated_mm`; both under the transform or neither."""
    left = _rounded_in_bf16(a, lhs, lhs_rounding, hadamard)
    return emulated_mm(*left, *_rounded_in_bf16(b, rhs, rhs_rounding, hadamard))


def _rounded_in_bf16(x: Tensor, fmt: str, rounding: str, hadamard: bool) -> tuple[Tensor, Tensor | None]:
    signs = DEFAULT_SIGNS if hadamard else None
    if hadamard:
        x = F.pad(x, (0, _hadamard_width(x) - x.shape[-1]))
    return round_to_bf16(x.contiguous(), fmt, rounding=rounding, hadamard=signs)


_register(
    "emulated_mm(Tensor a, Tensor b, str lhs, str lhs_rounding, bool hadamard, str rhs, str rhs_rounding) -> Tensor",
    _emulated_mm,
    lambda a, b, *how: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32),
)

# ---- GEMM ----


def _fp8_gemm(
    a_MK: Tensor, scale_a: Tensor | None, b_NK: Tensor, scale_b: Tensor, fast: bool, bias_N: Tensor | None = None
) -> Tensor:
    """`gemm.fp8_gemm` of any shape: K and N are filled up with zeros to whole 16-byte lines.

    Without `scale_a` the reader multiplies the rows (`row_factors`).
    """
    n, k = b_NK.shape
    more_n, more_k = -n % gemm.ALIGNMENT, -k % gemm.ALIGNMENT
    if not (more_n or more_k):
        if bias_N is None:
            return fastest_fp8_gemm(a_MK, scale_a, b_NK, scale_b, fast=fast)
        return gemm.fp8_gemm(a_MK, scale_a, b_NK, scale_b, fast=fast, bias_N=bias_N)
    a, b = _filled(a_MK, 0, more_k), _filled(b_NK, more_n, more_k)
    if scale_b.numel() > 1:
        scale_b = F.pad(scale_b.reshape(-1), (0, more_n), value=1.0)
    bias = None if bias_N is None else F.pad(bias_N, (0, more_n))
    return gemm.fp8_gemm(a, scale_a, b, scale_b, fast=fast, bias_N=bias)[:, :n].contiguous()


def _filled(q: Tensor, rows: int, columns: int) -> Tensor:
    """FP8 codes with zeros (the byte 0) appended."""
    return F.pad(q.view(torch.uint8), (0, columns, 0, rows)).view(q.dtype)


_register(
    "fp8_gemm(Tensor a, Tensor? scale_a, Tensor b, Tensor scale_b, bool fast) -> Tensor",
    _fp8_gemm,
    lambda a, scale_a, b, scale_b, fast: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16),
)
_register(
    "fp8_gemm_bias(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor bias, bool fast) -> Tensor",
    lambda a, scale_a, b, scale_b, bias, fast: _fp8_gemm(a, scale_a, b, scale_b, fast, bias),
    lambda a, scale_a, b, scale_b, bias, fast: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16),
)

# ---- norms ----


def _rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: str) -> tuple[Any, ...]:
    out = rms_norm.rms_norm(_dense(x), _dense(weight), options=rms_norm.Options(eps=eps, rounding=rounding))
    return out.y, out.rstd


def _rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, rounding: str) -> tuple[Any, ...]:
    options = rms_norm.Options(eps=eps, rounding=rounding, write=False, fp8=_FP8)
    out = rms_norm.rms_norm(_dense(x), _dense(weight), options=options)
    return out.q, out.scale, out.rstd


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: str, factor: Tensor | None = None
) -> tuple[Any, ...]:
    options = rms_norm.Options(eps=eps, rounding=rounding)
    dense = (_dense(x), _dense(weight))
    out = rms_norm.rms_norm(*dense, residual_TD=_dense(residual), factor_T=factor, options=options)
    return out.y, out.total, out.rstd


def _add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: str, factor: Tensor | None = None
) -> tuple[Any, ...]:
    options = rms_norm.Options(eps=eps, rounding=rounding, write=False, fp8=_FP8)
    dense = (_dense(x), _dense(weight))
    out = rms_norm.rms_norm(*dense, residual_TD=_dense(residual), factor_T=factor, options=options)
    return out.q, out.scale, out.total, out.rstd


# What a norm's backward writes: dx, FP8 rows of it for the linear before the norm, or both.
_Written = dict[str, Any]
_DX: _Written = {}
_DX_ROWS: _Written = {"write": False, "fp8": _FP8}
_DX_AND_ROWS: _Written = {"fp8": _FP8}


def _given(grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(grad for grad in grads if grad is not None)


def _rms_norm_grads(
    written: _Written, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *how: Any
) -> tuple[Any, ...]:
    """`how` is the rounding and, where there are any, the gradient that reaches x past the norm (dx has it added) and
    factors of dy's rows."""
    rounding, past, factor = (*how, None, None)[:3]
    options = rms_norm.Options(rounding=rounding, **written)
    dense = (_dense(dy), _dense(x), _dense(weight), rstd)
    return _given(rms_norm.rms_norm_backward(*dense, d_residual_TD=_packed(past), factor_T=factor, options=options))


def _fake_rstd(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


_register(
    "rms_norm(Tensor x, Tensor weight, float eps, str rounding) -> (Tensor, Tensor)",
    _rms_norm,
    lambda x, weight, eps, rounding: (x.new_empty(x.shape), _fake_rstd(x)),
)
_register(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, str rounding) -> (Tensor, Tensor, Tensor)",
    _rms_norm_quantize,
    lambda x, weight, eps, rounding: (*_rows_of(x), _fake_rstd(x)),
)
_ADD_RMS_NORM = "(Tensor x, Tensor residual, Tensor weight, float eps, str rounding, Tensor? factor=None)"
_register(
    f"add_rms_norm{_ADD_RMS_NORM} -> (Tensor, Tensor, Tensor)",
    _add_rms_norm,
    lambda x, *others: (x.new_empty(x.shape), x.new_empty(x.shape), _fake_rstd(x)),
)
_register(
    f"add_rms_norm_quantize{_ADD_RMS_NORM} -> (Tensor, Tensor, Tensor, Tensor)",
    _add_rms_norm_quantize,
    lambda x, *others: (*_rows_of(x), x.new_empty(x.shape), _fake_rstd(x)),
)
_RMS_NORM_GRADS = (
    "(Tensor dy, Tensor x, Tensor weight, Tensor rstd, str rounding, Tensor? d_residual=None, Tensor? factor=None)"
)
_register(
    f"rms_norm_backward{_RMS_NORM_GRADS} -> (Tensor, Tensor)",
    lambda *operands: _rms_norm_grads(_DX, *operands),
    lambda dy, x, weight, *how: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
_register(
    f"rms_norm_backward_quantize{_RMS_NORM_GRADS} -> (Tensor, Tensor, Tensor)",
    lambda *operands: _rms_norm_grads(_DX_ROWS, *operands),
    lambda dy, x, weight, *how: (*_rows_of(x), weight.new_empty(weight.shape)),
)
_register(
    f"rms_norm_backward_beside{_RMS_NORM_GRADS} -> (Tensor, Tensor, Tensor, Tensor)",
    lambda *operands: _rms_norm_grads(_DX_AND_ROWS, *operands),
    lambda dy, x, weight, *how: (x.new_empty(x.shape), *_rows_of(x), weight.new_empty(weight.shape)),
)

# ---- LayerNorm ----


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Any, ...]:
    options = rms_norm.Options(eps=eps, rounding="torch")
    out = layer_norm.layer_norm(_dense(x), _dense(weight), _packed(bias), options=options)
    return out.y, out.mean, out.rstd


def _layer_norm_quantize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Any, ...]:
    options = rms_norm.Options(eps=eps, rounding="torch", write=False, fp8=_FP8)
    out = layer_norm.layer_norm(_dense(x), _dense(weight), _packed(bias), options=options)
    return out.q, out.scale, out.mean, out.rstd


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, factor: Tensor | None = None
) -> tuple[Any, ...]:
    options = rms_norm.Options(eps=eps, rounding="torch")
    dense = (_dense(x), _dense(weight), _packed(bias))
    out = layer_norm.layer_norm(*dense, residual_TD=_dense(residual), factor_T=factor, options=options)
    return out.y, out.total, out.mean, out.rstd


def _add_layer_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, factor: Tensor | None = None
) -> tuple[Any, ...]:
    options = rms_norm.Options(eps=eps, rounding="torch", write=False, fp8=_FP8)
    dense = (_dense(x), _dense(weight), _packed(bias))
    out = layer_norm.layer_norm(*dense, residual_TD=_dense(residual), factor_T=factor, options=options)
    return out.q, out.scale, out.total, out.mean, out.rstd


def _layer_norm_grads(
    written: _Written, dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *how: Any
) -> tuple[Any, ...]:
    """`how`: where there are any, the gradient that reaches x past the norm and factors of dy's rows."""
    past, factor = (*how, None, None)[:2]
    options = rms_norm.Options(rounding="torch", **written)
    dense = (_dense(dy), _dense(x), _dense(weight), mean, rstd)
    return _given(layer_norm.layer_norm_backward(*dense, d_residual_TD=_packed(past), factor_T=factor, options=options))


def _fake_dw_db(weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight.new_empty(weight.shape), weight.new_empty(weight.shape)


_register(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm,
    lambda x, weight, bias, eps: (x.new_empty(x.shape), _fake_rstd(x), _fake_rstd(x)),
)
_register(
    "layer_norm_quantize(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    _layer_norm_quantize,
    lambda x, weight, bias, eps: (*_rows_of(x), _fake_rstd(x), _fake_rstd(x)),
)
_ADD_LAYER_NORM = "(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, Tensor? factor=None)"
_register(
    f"add_layer_norm{_ADD_LAYER_NORM} -> (Tensor, Tensor, Tensor, Tensor)",
    _add_layer_norm,
    lambda x, *others: (x.new_empty(x.shape), x.new_empty(x.shape), _fake_rstd(x), _fake_rstd(x)),
)
_register(
    f"add_layer_norm_quantize{_ADD_LAYER_NORM} -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _add_layer_norm_quantize,
    lambda x, *others: (*_rows_of(x), x.new_empty(x.shape), _fake_rstd(x), _fake_rstd(x)),
)
_LAYER_NORM_GRADS = (
    "(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor? d_residual=None, Tensor? factor=None)"
)
_register(
    f"layer_norm_backward{_LAYER_NORM_GRADS} -> (Tensor, Tensor, Tensor)",
    lambda *operands: _layer_norm_grads(_DX, *operands),
    lambda dy, x, weight, *how: (x.new_empty(x.shape), *_fake_dw_db(weight)),
)
_register(
    f"layer_norm_backward_quantize{_LAYER_NORM_GRADS} -> (Tensor, Tensor, Tensor, Tensor)",
    lambda *operands: _layer_norm_grads(_DX_ROWS, *operands),
    lambda dy, x, weight, *how: (*_rows_of(x), *_fake_dw_db(weight)),
)
_register(
    f"layer_norm_backward_beside{_LAYER_NORM_GRADS} -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda *operands: _layer_norm_grads(_DX_AND_ROWS, *operands),
    lambda dy, x, weight, *how: (x.new_empty(x.shape), *_rows_of(x), *_fake_dw_db(weight)),
)

# ---- rotary embedding ----


def _rope_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: Sequence[int],
    packing: str,
    convention: str,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = heads
    how = rope.Heads(q=q, k=k, v=v, packing=packing, convention=convention)
    return rope.rope_qkv(_dense(qkv), _dense(cos), _dense(sin), heads=how, factor_T=factor)


def _fake_rope_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int], *how: Any) -> tuple[Tensor, ...]:
    width = qkv.shape[-1] // sum(heads)
    return tuple(qkv.new_empty((*qkv.shape[:2], h, width)) for h in heads)


def _rope_grads(
    options: rope.GradOptions, grads: Sequence[Tensor], cos: Tensor, sin: Tensor, packing: str, convention: str
) -> rope.RopeGrads:
    dq, dk, dv = (_dense(grad) for grad in grads)
    return rope.rope_qkv_backward(
        (dq, dk, dv), _dense(cos), _dense(sin), packing=packing, convention=convention, options=options
    )


def _fake_dqkv(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, packing: str, convention: str) -> Tensor:
    heads = dq.shape[2] + dk.shape[2] + dv.shape[2]
    return dq.new_empty((dq.shape[0] * dq.shape[1], heads * dq.shape[3]))


_register(
    "rope_qkv(Tensor qkv, Tensor cos, Tensor sin, int[] heads, str packing, str convention, Tensor? factor=None)"
    " -> (Tensor, Tensor, Tensor)",
    _rope_qkv,
    _fake_rope_qkv,
)
_ROPE_GRADS = "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, str packing, str convention)"
_register(
    f"rope_qkv_backward{_ROPE_GRADS} -> Tensor",
    lambda dq, dk, dv, *how: _rope_grads(rope.GradOptions(), (dq, dk, dv), *how).grad,
    _fake_dqkv,
)
_register(
    f"rope_qkv_backward_rows{_ROPE_GRADS} -> (Tensor, Tensor)",
    lambda dq, dk, dv, *how: _rope_grads(rope.GradOptions(write=False, fp8=_FP8), (dq, dk, dv), *how)[1:3],
    lambda *operands: _rows_of(_fake_dqkv(*operands)),
)
_register(
    f"rope_qkv_backward_beside{_ROPE_GRADS} -> (Tensor, Tensor, Tensor)",
    lambda dq, dk, dv, *how: tuple(_rope_grads(rope.GradOptions(fp8=_FP8), (dq, dk, dv), *how)),
    lambda *operands: (_fake_dqkv(*operands), *_rows_of(_fake_dqkv(*operands))),
)
_register(
    "rope(Tensor x, Tensor cos, Tensor sin, str convention, bool backward) -> Tensor",
    lambda x, cos, sin, convention, backward: rope.rope(
        _dense(x), _dense(cos), _dense(sin), convention=convention, backward=backward
    ),
    lambda x, cos, sin, convention, backward: x.new_empty(x.shape),
)

# ---- embedding ----

_register(
    "embedding_backward(Tensor grad, Tensor index, SymInt num_weights, int padding_idx) -> Tensor",
    lambda grad, index, num_weights, padding_idx: embedding_backward(_dense(grad), index, num_weights, padding_idx),
    lambda grad, index, num_weights, padding_idx: grad.new_empty((num_weights, grad.shape[1])),
)
