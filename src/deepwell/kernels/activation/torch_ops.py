"""Activations as torch ops, gated (SwiGLU, GEGLU) and plain, with the shapes that tracing needs.

Each has a twin `_quantize` that gives FP8 rows instead of the result.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from deepwell.kernels.activation import bias_activation, swiglu
from deepwell.kernels.library import _FP8, NAMESPACE, _dense, _register, _rows_of

__all__ = ["NAMESPACE", "half"]


def _rows(act: str) -> swiglu.Options:
    """FP8 rows instead of the result itself."""
    return swiglu.Options(act=act, write=False, fp8=_FP8)


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

    def call(given: Sequence[Any], make: Callable[[str], swiglu.Options]) -> Any:
        return run(*map(_dense, given[:count]), options=make(given[count]), **_factors(given[count + 1 :]))

    _register(f"{name}{schema} -> Tensor", lambda *given: call(given, lambda act: swiglu.Options(act=act))[0], like)
    _register(
        f"{name}_quantize{schema} -> (Tensor, Tensor)",
        lambda *given: call(given, _rows)[1:3],
        lambda *given: _rows_of(like(*given)),
    )


def _swiglu_backward_recompute(dh: Tensor, gate_up: Tensor, act: str, *factors: Tensor | None) -> tuple[Any, ...]:
    options = swiglu.Options(act=act, write=False, fp8=_FP8, recompute_h=True)
    dense = (_dense(dh), _dense(gate_up))
    return swiglu.swiglu_backward(*dense, options=options, factors=swiglu.RowFactors(*factors))[1:]


_register_activation("swiglu", "Tensor gate_up", swiglu.swiglu, half, _FACTOR)
_register_activation("swiglu_backward", "Tensor dh, Tensor gate_up", swiglu.swiglu_backward, _like_second, _FACTORS)
_register_activation("activation", "Tensor x", swiglu.activation, _like_first, _FACTOR)
_register_activation("activation_backward", "Tensor dh, Tensor x", swiglu.activation_backward, _like_second, _FACTORS)
_register_activation("bias_activation", "Tensor x, Tensor bias", bias_activation.bias_activation, _like_first)
_register(
    f"swiglu_backward_recompute(Tensor dh, Tensor gate_up, str act, {_FACTORS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _swiglu_backward_recompute,
    lambda dh, gate_up, *how: (*_rows_of(gate_up), *_rows_of(dh)),
)
_register(
    "swiglu_pair(Tensor gate, Tensor up, str act) -> Tensor",
    lambda gate, up, act: swiglu.swiglu(_dense(gate), _dense(up), options=swiglu.Options(act=act)).h,
    _like_first,
)
_register(
    "swiglu_pair_backward(Tensor dh, Tensor gate, Tensor up, str act) -> Tensor",
    lambda dh, gate, up, act: (
        swiglu.swiglu_backward(_dense(dh), _dense(gate), _dense(up), options=swiglu.Options(act=act)).grad
    ),
    lambda dh, gate, up, act: gate.new_empty((gate.shape[0], 2 * gate.shape[1])),
)


def _bias_activation_grads(
    dh: Tensor, x: Tensor, bias: Tensor, options: swiglu.Options
) -> bias_activation.BiasActivationGrads:
    return bias_activation.bias_activation_backward(_dense(dh), _dense(x), _dense(bias), options=options)


_register(
    "bias_activation_backward(Tensor dh, Tensor x, Tensor bias, str act) -> (Tensor, Tensor)",
    lambda dh, x, bias, act: _bias_activation_grads(dh, x, bias, swiglu.Options(act=act))[0::3],
    lambda dh, x, bias, act: (x.new_empty(x.shape), bias.new_empty(bias.shape)),
)
_register(
    "bias_activation_backward_quantize(Tensor dh, Tensor x, Tensor bias, str act) -> (Tensor, Tensor, Tensor)",
    lambda dh, x, bias, act: _bias_activation_grads(dh, x, bias, _rows(act))[1:],
    lambda dh, x, bias, act: (*_rows_of(x), bias.new_empty(bias.shape)),
)
