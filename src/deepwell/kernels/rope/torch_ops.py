"""Rotations of q and k, and their norm with the rotation, as torch ops, with the shapes that tracing needs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.quantize.fp8 import RowOptions
from deepwell.kernels.rope import rope
from deepwell.kernels.rope.qk_norm_rope import QkNorm, norms_of, qk_norm_rope, qk_norm_rope_backward
from deepwell.kernels.torch_library import dense, register_op, register_rows

ops = torch.ops.deepwell

# ---- rotation ----


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
    return rope.rope_qkv(dense(qkv), dense(cos), dense(sin), heads=how, factor_T=factor)


def _fake_rope_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int], *how: Any) -> tuple[Tensor, ...]:
    width = qkv.shape[-1] // sum(heads)
    return tuple(qkv.new_empty((*qkv.shape[:2], h, width)) for h in heads)


def _rope_grads(written: dict[str, Any], *operands: Any) -> rope.RopeGrads:
    *tensors, packing, convention = operands
    dq, dk, dv, cos, sin = (dense(t) for t in tensors)
    options = RowOptions(**written)
    return rope.rope_qkv_backward((dq, dk, dv), cos, sin, packing=packing, convention=convention, options=options)


def _fake_dqkv(dq: Tensor, dk: Tensor, dv: Tensor, *how: Any) -> tuple[Tensor]:
    heads = dq.shape[2] + dk.shape[2] + dv.shape[2]
    return (dq.new_empty((dq.shape[0] * dq.shape[1], heads * dq.shape[3])),)


register_op(
    "rope_qkv(Tensor qkv, Tensor cos, Tensor sin, int[] heads, str packing, str convention, Tensor? factor=None)"
    " -> (Tensor, Tensor, Tensor)",
    _rope_qkv,
    _fake_rope_qkv,
    caches=True,
)
register_rows(
    "rope_qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, str packing, str convention)",
    _rope_grads,
    _fake_dqkv,
    ends=("", "_rows", "_beside"),
)
register_op(
    "rope(Tensor x, Tensor cos, Tensor sin, str convention, bool backward) -> Tensor",
    lambda x, cos, sin, convention, backward: rope.rope(
        dense(x), dense(cos), dense(sin), convention=convention, backward=backward
    ),
    lambda x, cos, sin, convention, backward: x.new_empty(x.shape),
    caches=True,
)

# ---- norm and rotation ----


def _qk_norm_rope(
    qkv: Tensor, w_q: Tensor, w_k: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int], *how: Any
) -> tuple[Tensor, ...]:
    eps, rounding, convention = how
    q, k, v = heads
    tensors = [dense(t) for t in (qkv, w_q, w_k, cos, sin)]
    return tuple(
        qk_norm_rope(
            tensors[0],
            (tensors[1], tensors[2]),
            *tensors[3:],
            heads=rope.Heads(q=q, k=k, v=v, convention=convention),
            norm=QkNorm(eps=eps, rounding=rounding),
        )
    )


def _fake_qk_norm_rope(
    qkv: Tensor, w_q: Tensor, w_k: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int], *how: Any
) -> tuple[Tensor, ...]:
    b, s, w = qkv.shape
    out = (qkv.new_empty((b, s, h, w // sum(heads))) for h in heads)
    q, k, v = heads
    norms = norms_of(qkv, (w_q, w_k), rope.Heads(q=q, k=k, v=v))
    return *out, *(qkv.new_empty((b * s, n), dtype=torch.float32) for n in norms)


def _qk_norm_grads(written: dict[str, Any], *operands: Any) -> tuple[Any, ...]:
    """dqkv, its FP8 values and scales, and both weights' gradients."""
    *tensors, convention = operands
    dq, dk, dv, qkv, w_q, w_k, rstd_q, rstd_k, cos, sin = (dense(t) for t in tensors)
    rstds, options = (rstd_q, rstd_k), RowOptions(**written)
    return qk_norm_rope_backward(
        (dq, dk, dv), qkv, (w_q, w_k), rstds, (cos, sin), convention=convention, options=options
    )


def _fake_qk_norm_grads(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, w_q: Tensor, w_k: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows = qkv.new_empty((qkv.shape[0] * qkv.shape[1], qkv.shape[2]))
    return rows, w_q.new_empty(w_q.shape), w_k.new_empty(w_k.shape)


register_op(
    "qk_norm_rope(Tensor qkv, Tensor w_q, Tensor w_k, Tensor cos, Tensor sin, int[] heads, float eps, str rounding,"
    " str convention) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _qk_norm_rope,
    _fake_qk_norm_rope,
    caches=True,
)
register_rows(
    "qk_norm_rope_backward(Tensor dq, Tensor dk, Tensor dv, Tensor qkv, Tensor w_q, Tensor w_k, Tensor rstd_q,"
    " Tensor rstd_k, Tensor cos, Tensor sin, str convention)",
    _qk_norm_grads,
    _fake_qk_norm_grads,
    others=2,
    ends=("", "_quantize", "_beside"),
)
