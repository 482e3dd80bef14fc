"""Head, loss and the gradient of embeddings as torch ops, with the shapes that tracing needs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.kernels.gemm.fp8 import ALIGNMENT
from deepwell.kernels.head.embedding import embedding_backward
from deepwell.kernels.head.linear_cross_entropy import (
    GRADIENT_FORMAT,
    HeadOptions,
    WeightCodes,
    linear_cross_entropy,
    linear_cross_entropy_codes,
    linear_cross_entropy_loss,
    padded_rows,
    weight_gradient,
)
from deepwell.kernels.head.scale_by_scalar import scale_by
from deepwell.kernels.torch_library import FP8, dense, dense_or_none, register_op

ops = torch.ops.deepwell


def _head(how: Sequence[Any], needs: Sequence[bool] = (True, True, True)) -> HeadOptions:
    """The arguments after the tensors; a soft cap of 0 is none."""
    ignore_index, reduction, fp8, logit_scale, soft_cap, *rest = how
    dx, dw, db = needs
    return HeadOptions(
        ignore_index=ignore_index,
        reduction=reduction,
        fp8=fp8,
        logit_scale=logit_scale,
        soft_cap=soft_cap or None,
        bf16_forward=bool(rest and rest[0]),
        dx=dx,
        dw=dw,
        db=db,
    )


def _of_any_length(
    run: Callable[..., Any], x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, head: HeadOptions
) -> Any:
    """What `run` gives of any number of tokens: FP8 gets rows that do not count, up to whole lines."""
    x, w, target = dense(x), dense(w), dense(target)
    more = -x.shape[0] % ALIGNMENT if head.fp8 else 0
    x_filled = F.pad(x, (0, 0, 0, more)) if more else x
    target_filled = F.pad(target, (0, more), value=head.ignore_index) if more else target
    made = run(x_filled, w, target_filled, bias_V=dense_or_none(bias), head=head)
    return made._replace(dx=made.dx[: x.shape[0]].contiguous()) if more and made.dx is not None else made


def _given(like: Tensor, *grads: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients as an op returns them: those that nobody asked for are empty."""
    return tuple(like.new_empty(0) if grad is None else grad for grad in grads)


# ---- loss and gradients ----


def _linear_cross_entropy(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, needs: Sequence[bool], *how: Any
) -> tuple[Tensor, ...]:
    loss, *grads = _of_any_length(linear_cross_entropy, x, w, bias, target, _head(how, needs))
    return loss, *_given(x, *grads)


def _fake_linear_cross_entropy(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, needs: Sequence[bool], *how: Any
) -> tuple[Tensor, ...]:
    wanted = [t if need else None for t, need in zip((x, w, bias), needs, strict=True)]
    return x.new_empty((), dtype=torch.float32), *(
        x.new_empty(0) if t is None else t.new_empty(t.shape) for t in wanted
    )


def _linear_cross_entropy_loss(x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, *how: Any) -> Tensor:
    tensors = (dense(x), dense(w), dense(target))
    return linear_cross_entropy_loss(*tensors, bias_V=dense_or_none(bias), head=_head(how))


_HOW = "int ignore_index, str reduction, bool fp8, float logit_scale, float soft_cap, bool bf16_forward=False"
register_op(
    f"linear_cross_entropy(Tensor x, Tensor w, Tensor? bias, Tensor target, bool[] needs, {_HOW})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _linear_cross_entropy,
    _fake_linear_cross_entropy,
)
register_op(
    f"linear_cross_entropy_loss(Tensor x, Tensor w, Tensor? bias, Tensor target, {_HOW}) -> Tensor",
    _linear_cross_entropy_loss,
    lambda x, w, bias, target, *how: x.new_empty((), dtype=torch.float32),
)

register_op(
    "scale_by(Tensor x, Tensor factor) -> Tensor",
    scale_by,
    lambda x, factor: x.new_empty_strided(x.shape, x.stride()),
    caches=True,
)

# ---- FP8: the weight's gradient waits for the loss' ----


def _linear_cross_entropy_codes(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, needs: Sequence[bool], *how: Any
) -> tuple[Tensor, ...]:
    """(loss, dx, db, and the operands of the GEMM that makes dW)."""
    head = _head(how, (needs[0], True, needs[1]))
    made = _of_any_length(linear_cross_entropy_codes, x, w, bias, target, head)
    return made.loss, *_given(x, made.dx, made.db), *made.codes


def _fake_linear_cross_entropy_codes(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, needs: Sequence[bool], *how: Any
) -> tuple[Tensor, ...]:
    loss, dx, _, db = _fake_linear_cross_entropy(x, w, bias, target, (needs[0], False, needs[1]), *how)
    t = (x.shape[0] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    qg_VT, g_scale = (
        x.new_empty((padded_rows(w.shape[0]), t), dtype=GRADIENT_FORMAT),
        x.new_empty((), dtype=torch.float32),
    )
    qx_DT, x_scale = x.new_empty((x.shape[1], t), dtype=FP8), x.new_empty((), dtype=torch.float32)
    return loss, dx, db, qg_VT, g_scale, qx_DT, x_scale


def _backward(*operands: Any) -> tuple[Tensor, ...]:
    """All gradients (dx, dW, db) in one op: what follows in a backward needs dx, so that no compiler moves the GEMM of
    dW, which nobody waits for, to the end and holds the FP8 values until then.
    """
    *codes, grad, dx, db, num_rows, dtype = operands
    dw = weight_gradient(WeightCodes(*codes), grad, dtype=dtype)[:num_rows]
    dx, db = (made if made is None else scale_by(made, grad) for made in (dx, db))
    return _given(dw, dx, dw, db)


def _fake_backward(*operands: Any) -> tuple[Tensor, ...]:
    _, _, qx, _, _, dx, db, num_rows, dtype = operands
    dw = qx.new_empty((num_rows, qx.shape[0]), dtype=dtype)
    dx, db = (made if made is None else made.new_empty(made.shape) for made in (dx, db))
    return _given(dw, dx, dw, db)


register_op(
    f"linear_cross_entropy_codes(Tensor x, Tensor w, Tensor? bias, Tensor target, bool[] needs, {_HOW})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _linear_cross_entropy_codes,
    _fake_linear_cross_entropy_codes,
)
register_op(
    "linear_cross_entropy_backward(Tensor qg, Tensor g_scale, Tensor qx, Tensor x_scale, Tensor grad, Tensor? dx,"
    " Tensor? db, SymInt num_rows, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)

# ---- embedding ----

register_op(
    "embedding_backward(Tensor grad, Tensor index, SymInt num_weights, int padding_idx) -> Tensor",
    lambda grad, index, num_weights, padding_idx: embedding_backward(dense(grad), index, num_weights, padding_idx),
    lambda grad, index, num_weights, padding_idx: grad.new_empty((num_weights, grad.shape[1])),
)
