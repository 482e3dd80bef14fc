"""Attention in a window as torch ops, with the shapes that tracing needs."""

from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.attention.flash import attention, attention_backward
from deepwell.kernels.torch_library import register_op

ops = torch.ops.deepwell


def _like_tokens(x: Tensor, width: int | None = None) -> Tensor:
    """[B, H, S, D], or another width, that lies in memory as [B, S, H, D], as the kernels write it."""
    batch, heads, size, own = x.shape
    return x.new_empty((batch, size, heads, own if width is None else width)).transpose(1, 2)


def _laid_out(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t if t.transpose(1, 2).is_contiguous() else _like_tokens(t).copy_(t) for t in tensors)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    out, lse = attention(q, k, v, sinks, scale, window)
    return _laid_out(out)[0], lse.float()


def _attention_backward(*operands: Any) -> tuple[Tensor, ...]:
    return _laid_out(*attention_backward(*operands))


register_op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, int window) -> (Tensor, Tensor)",
    _attention,
    lambda q, k, v, sinks, scale, window: (
        _like_tokens(q, v.shape[-1]),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    ),
)
register_op(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, int window)"
    " -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    lambda dout, q, k, v, out, lse, scale, window: tuple(_like_tokens(t) for t in (q, k, v)),
)
