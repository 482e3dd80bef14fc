"""Activations as torch ops, gated (SwiGLU, GEGLU) and plain, with the shapes that tracing needs.

Each has a twin `_quantize` that gives FP8 rows instead of the result.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.activation import bias_activation, swiglu
from deepwell.kernels.torch_library import FP8, dense, fp8_rows_like, register_op, register_rows

ops = torch.ops.deepwell


def half(gate_up: Tensor, *how: Any) -> Tensor:
    """Shaped as the result of a gated activation."""
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _like_first(x: Tensor, *others: Any) -> tuple[Tensor]:
    return (x.new_empty(x.shape),)


def _like_second(dh: Tensor, x: Tensor, *how: Any) -> tuple[Tensor]:
    return (x.new_empty(x.shape),)


# Factors of the rows of an activation's input and, in the backward, of its result's gradient.
_FACTOR, _FACTORS = ", Tensor? factor=None", ", Tensor? factor=None, Tensor? dh_factor=None"


def _register_activation(
    name: str, operands: str, run: Callable[..., Any], like: Callable[..., Any], factors: str = "", others: int = 0
) -> None:
    """An op whose rows are shaped as the first that `like` gives, and its twin that gives FP8 rows of them instead."""
    count = operands.count("Tensor")

    def call(written: dict[str, Any], *given: Any) -> Any:
        by_row = {"factors": swiglu.RowFactors(*given[count + 1 :])} if given[count + 1 :] else {}
        return run(*map(dense, given[:count]), options=swiglu.GluOptions(act=given[count], **written), **by_row)

    register_rows(f"{name}({operands}, str act{factors})", call, like, others=others)


def _swiglu_backward_recompute(dh: Tensor, gate_up: Tensor, act: str, *factors: Tensor | None) -> tuple[Any, ...]:
    options = swiglu.GluOptions(act=act, write=False, fp8=FP8, recompute_h=True)
    tensors = (dense(dh), dense(gate_up))
    return swiglu.swiglu_backward(*tensors, options=options, factors=swiglu.RowFactors(*factors))[1:]


_register_activation("swiglu", "Tensor gate_up", swiglu.swiglu, lambda *given: (half(*given),), _FACTOR)
_register_activation("swiglu_backward", "Tensor dh, Tensor gate_up", swiglu.swiglu_backward, _like_second, _FACTORS)
_register_activation("activation", "Tensor x", swiglu.activation, _like_first, _FACTOR)
_register_activation("activation_backward", "Tensor dh, Tensor x", swiglu.activation_backward, _like_second, _FACTORS)
_register_activation("bias_activation", "Tensor x, Tensor bias", bias_activation.bias_activation, _like_first)
_register_activation(
    "bias_activation_backward",
    "Tensor dh, Tensor x, Tensor bias",
    bias_activation.bias_activation_backward,
    lambda dh, x, bias, act: (x.new_empty(x.shape), bias.new_empty(bias.shape)),
    others=1,
)
register_op(
    f"swiglu_backward_recompute(Tensor dh, Tensor gate_up, str act{_FACTORS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _swiglu_backward_recompute,
    lambda dh, gate_up, *how: (*fp8_rows_like(gate_up), *fp8_rows_like(dh)),
    caches=True,
)
register_op(
    "swiglu_pair(Tensor gate, Tensor up, str act) -> Tensor",
    lambda gate, up, act: swiglu.swiglu(dense(gate), dense(up), options=swiglu.GluOptions(act=act)).h,
    lambda gate, up, act: gate.new_empty(gate.shape),
    caches=True,
)
register_op(
    "swiglu_pair_backward(Tensor dh, Tensor gate, Tensor up, str act) -> Tensor",
    lambda dh, gate, up, act: (
        swiglu.swiglu_backward(dense(dh), dense(gate), dense(up), options=swiglu.GluOptions(act=act)).grad
    ),
    lambda dh, gate, up, act: gate.new_empty((gate.shape[0], 2 * gate.shape[1])),
    caches=True,
)
