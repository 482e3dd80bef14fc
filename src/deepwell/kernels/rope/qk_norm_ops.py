"""Norm and rotation of q and k as torch ops (`torch.ops.deepwell.*`), with the shapes that tracing needs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels import library
from deepwell.kernels.rope.qk_norm_rope import QkNorm, qk_norm_rope, qk_norm_rope_backward
from deepwell.kernels.rope.rope import GradOptions, Heads

NAMESPACE = library.NAMESPACE
_FP8 = torch.float8_e4m3fn


def _forward(
    qkv: Tensor, w_q: Tensor, w_k: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int], *how: Any
) -> tuple[Tensor, ...]:
    eps, rounding, convention = how
    q, k, v = heads
    tensors = [library._dense(t) for t in (qkv, w_q, w_k, cos, sin)]
    return tuple(
        qk_norm_rope(
            tensors[0],
            (tensors[1], tensors[2]),
            *tensors[3:],
            heads=Heads(q=q, k=k, v=v, convention=convention),
            norm=QkNorm(eps=eps, rounding=rounding),
        )
    )


def _fake_forward(
    qkv: Tensor, w_q: Tensor, w_k: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int], *how: Any
) -> tuple[Tensor, ...]:
    b, s, w = qkv.shape
    out = (qkv.new_empty((b, s, h, w // sum(heads))) for h in heads)
    return *out, *(qkv.new_empty((b * s, h), dtype=torch.float32) for h in heads[:2])


def _grads(options: GradOptions, *operands: Any) -> tuple[Any, ...]:
    """What was asked for of dqkv, its codes and scales, and both weights' gradients."""
    *tensors, convention = operands
    dq, dk, dv, qkv, w_q, w_k, rstd_q, rstd_k, cos, sin = (library._dense(t) for t in tensors)
    made = qk_norm_rope_backward(
        (dq, dk, dv), qkv, (w_q, w_k), (rstd_q, rstd_k), (cos, sin), convention=convention, options=options
    )
    return library._given(made)


def _fake_row(qkv: Tensor) -> Tensor:
    return qkv.new_empty((qkv.shape[0] * qkv.shape[1], qkv.shape[2]))


def _fake_dws(w_q: Tensor, w_k: Tensor) -> tuple[Tensor, Tensor]:
    return w_q.new_empty(w_q.shape), w_k.new_empty(w_k.shape)


library._register(
    "qk_norm_rope(Tensor qkv, Tensor w_q, Tensor w_k, Tensor cos, Tensor sin, int[] heads, float eps, str rounding,"
    " str convention) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
_GRADS = (
    "(Tensor dq, Tensor dk, Tensor dv, Tensor qkv, Tensor w_q, Tensor w_k, Tensor rstd_q, Tensor rstd_k, Tensor cos,"
    " Tensor sin, str convention)"
)
library._register(
    f"qk_norm_rope_backward{_GRADS} -> (Tensor, Tensor, Tensor)",
    lambda *operands: _grads(GradOptions(), *operands),
    lambda dq, dk, dv, qkv, w_q, w_k, *how: (_fake_row(qkv), *_fake_dws(w_q, w_k)),
)
library._register(
    f"qk_norm_rope_backward_quantize{_GRADS} -> (Tensor, Tensor, Tensor, Tensor)",
    lambda *operands: _grads(GradOptions(write=False, fp8=_FP8), *operands),
    lambda dq, dk, dv, qkv, w_q, w_k, *how: (*library._rows_of(_fake_row(qkv)), *_fake_dws(w_q, w_k)),
)
library._register(
    f"qk_norm_rope_backward_beside{_GRADS} -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda *operands: _grads(GradOptions(fp8=_FP8), *operands),
    lambda dq, dk, dv, qkv, w_q, w_k, *how: (
        _fake_row(qkv),
        *library._rows_of(_fake_row(qkv)),
        *_fake_dws(w_q, w_k),
    ),
)
