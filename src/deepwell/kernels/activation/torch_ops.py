"""Activations as torch ops, gated (SwiGLU, GEGLU) and plain, with the shapes that tracing needs.

Each has a twin `_quantize` that gives FP8 rows instead of the result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.activation import bias_activation, swiglu
from deepwell.kernels.torch_library import FP8, dense, fp8_rows_like, register_op

ops = torch.ops.deepwell


def _rows(act: str) -> swiglu.GluOptions:
    """FP8 rows instead of the result itself."""
    return swiglu.GluOptions(act=act, write=False, fp8=FP8)


def half(gate_up: Tensor, *how: Any) -> Tensor:
    """Shaped as the result of a gated activation."""
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _like_first(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _like_second(dh: Tensor, x: Tensor, *how: Any) -> Tensor:
    return x.new_empty(x.shape)


# Factors of the rows of an activation's input and, in the backward, of its result's gradient.
_FACTOR, _FACTORS = "Tensor? factor=None", "Tensor? factor=None, Tensor? dh_factor=None"


def _factors(given: Sequence[Tensor | None]) -> dict[str, swiglu.RowFactors]:
    return {"factors": swiglu.RowFactors(*given)} if given else {}


def _register_activation(
    name: str, operands: str, run: Callable[..., Any], like: Callable[..., Tensor], factors: str = ""
) -> None:
    """An op that gives a tensor shaped as `like` says, and its twin that gives FP8 rows of it instead."""
    count = operands.count("Tensor")
    schema = f"({operands}, str act{', ' + factors if factors else ''})"

    def call(given: Sequence[Any], make: Callable[[str], swiglu.GluOptions]) -> Any:
        return run(*map(dense, given[:count]), options=make(given[count]), **_factors(given[count + 1 :]))

    register_op(
        f"{name}{schema} -> Tensor", lambda *given: call(given, lambda act: swiglu.GluOptions(act=act))[0], like
    )
    register_op(
        f"{name}_quantize{schema} -> (Tensor, Tensor)",
        lambda *given: call(given, _rows)[1:3],
        lambda *given: fp8_rows_like(like(*given)),
    )


def _swiglu_backward_recompute(dh: Tensor, gate_up: Tensor, act: str, *factors: Tensor | None) -> tuple[Any, ...]:
    options = swiglu.GluOptions(act=act, write=False, fp8=FP8, recompute_h=True)
    tensors = (dense(dh), dense(gate_up))
    return swiglu.swiglu_backward(*tensors, options=options, factors=swiglu.RowFactors(*factors))[1:]


_register_activation("swiglu", "Tensor gate_up", swiglu.swiglu, half, _FACTOR)
_register_activation("swiglu_backward", "Tensor dh, Tensor gate_up", swiglu.swiglu_backward, _like_second, _FACTORS)
_register_activation("activation", "Tensor x", swiglu.activation, _like_first, _FACTOR)
_register_activation("activation_backward", "Tensor dh, Tensor x", swiglu.activation_backward, _like_second, _FACTORS)
_register_activation("bias_activation", "Tensor x, Tensor bias", bias_activation.bias_activation, _like_first)
register_op(
    f"swiglu_backward_recompute(Tensor dh, Tensor gate_up, str act, {_FACTORS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _swiglu_backward_recompute,
    lambda dh, gate_up, *how: (*fp8_rows_like(gate_up), *fp8_rows_like(dh)),
)
register_op(
    "swiglu_pair(Tensor gate, Tensor up, str act) -> Tensor",
    lambda gate, up, act: swiglu.swiglu(dense(gate), dense(up), options=swiglu.GluOptions(act=act)).h,
    _like_first,
)
register_op(
    "swiglu_pair_backward(Tensor dh, Tensor gate, Tensor up, str act) -> Tensor",
    lambda dh, gate, up, act: (
        swiglu.swiglu_backward(dense(dh), dense(gate), dense(up), options=swiglu.GluOptions(act=act)).grad
    ),
    lambda dh, gate, up, act: gate.new_empty((gate.shape[0], 2 * gate.shape[1])),
)


def _bias_activation_grads(
    dh: Tensor, x: Tensor, bias: Tensor, options: swiglu.GluOptions
) -> bias_activation.BiasActivationGrads:
    return bias_activation.bias_activation_backward(dense(dh), dense(x), dense(bias), options=options)


register_op(
    "bias_activation_backward(Tensor dh, Tensor x, Tensor bias, str act) -> (Tensor, Tensor)",
    lambda dh, x, bias, act: _bias_activation_grads(dh, x, bias, swiglu.GluOptions(act=act))[0::3],
    lambda dh, x, bias, act: (x.new_empty(x.shape), bias.new_empty(bias.shape)),
)
register_op(
    "bias_activation_backward_quantize(Tensor dh, Tensor x, Tensor bias, str act) -> (Tensor, Tensor, Tensor)",
    lambda dh, x, bias, act: _bias_activation_grads(dh, x, bias, _rows(act))[1:],
    lambda dh, x, bias, act: (*fp8_rows_like(x), bias.new_empty(bias.shape)),
)
