"""Experts as one differentiable function: tokens and the router's choices in, tokens out."""

from __future__ import annotations

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.experts.activation import SWIGLU, ExpertActivation, parse_activation
from deepwell.kernels.experts.autograd import FP8_METHOD, experts_in_fp8, in_dtype
from deepwell.kernels.experts.chain import experts_chain
from deepwell.kernels.experts.reference import PLAIN_SCHEME, Biases, GateUp, experts_mlp_ref
from deepwell.kernels.experts.spelled_out import is_spelled_out
from deepwell.kernels.experts.torch_ops import ops

FP8_SCHEME = "|".join([FP8_METHOD] * 3)
_SHORT = {"bf16": PLAIN_SCHEME, "fp8": FP8_SCHEME}


def experts_mlp(
    x_TH: Tensor,
    w_gate_up: GateUp,
    w_down: Tensor,
    top_index: Tensor,
    top_weight: Tensor,
    *,
    biases: Biases = (None, None),
    activation: ExpertActivation = SWIGLU,
    precision: str = "bf16",
) -> Tensor:
    """`y[t] = sum_j top_weight[t, j] * expert(top_index[t, j])(x[t])`, [T, H] in the dtype of x.

    `w_gate_up` is [E, 2F, H], of experts without a gate [E, F, H], `w_down` [E, H, F]: views of any strides, so that
    weights stored [E, K, N] are given transposed; gate and up may be two weights [E, F, H], which are multiplied one by
    one. Choices with a negative index take no part. `precision` is "bf16" (operands as they are, whatever their dtype),
    "fp8", or how each GEMM runs, "fwd|dgrad|wgrad" for both projections or two of them with a semicolon between; under
    autocast "bf16" is in autocast's dtype, as any product. Gradients go to x, weights, biases and `top_weight`.
    """
    _check(x_TH, w_gate_up, w_down, top_index, top_weight, activation)
    given = (x_TH, w_gate_up, w_down, top_index, top_weight)
    if is_spelled_out():
        return experts_mlp_ref(*given, biases=biases, activation=activation)
    return run_experts(*given, biases, str(activation), precision)


def run_experts(
    x_TH: Tensor,
    w_gate_up: GateUp,
    w_down: Tensor,
    top_index: Tensor,
    top_weight: Tensor,
    biases: Biases,
    activation: str,
    precision: str,
) -> Tensor:
    """`experts_mlp` with arguments that a graph can hold: the engine keeps it as one node and decides its precision."""
    how, schemes, dtype = parse_activation(activation), schemes_of(precision), x_TH.dtype
    if schemes == (PLAIN_SCHEME, PLAIN_SCHEME) and (autocast := _autocast_dtype(x_TH)) is not None:
        x_TH, w_down = x_TH.to(autocast), w_down.to(autocast)
        if isinstance(w_gate_up, tuple):
            w_gate_up = w_gate_up[0].to(autocast), w_gate_up[1].to(autocast)
        else:
            w_gate_up = w_gate_up.to(autocast)
        biases = _in(autocast, biases[0]), _in(autocast, biases[1])
    is_fp8 = schemes == (FP8_SCHEME, FP8_SCHEME) and is_fused_in_fp8(w_gate_up, w_down)
    is_bf16 = schemes == (PLAIN_SCHEME, PLAIN_SCHEME) and x_TH.is_cuda and is_fused_in_bf16(x_TH, w_gate_up, w_down)
    if not isinstance(w_gate_up, tuple) and (is_fp8 or is_bf16):
        groups = ops.choice_layout(top_index.reshape(-1), w_gate_up.shape[0])
        weights, weight_S, top_k = (w_gate_up, w_down), top_weight.reshape(-1), top_index.shape[-1]
        if is_fp8:
            return experts_in_fp8(x_TH, weights, weight_S, groups, top_k, str(how), biases)
        return in_dtype(dtype, experts_chain(x_TH, weights, weight_S, groups, top_k, how, biases))
    y_TH = experts_mlp_ref(
        x_TH, w_gate_up, w_down, top_index, top_weight, biases=biases, activation=how, schemes=schemes
    )
    return in_dtype(dtype, y_TH)


def _in(dtype: torch.dtype, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast multiplies such rows in, None outside of it; fp64 it leaves as it is."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def schemes_of(precision: str) -> tuple[str, str]:
    """How the GEMMs of the two projections run."""
    first, _, second = precision.partition(";")
    schemes = _SHORT.get(first, first), _SHORT.get(second or first, second or first)
    for scheme in schemes:
        if scheme.count("|") != 2:
            raise ConfigError(f'precision is {precision!r}; it must be "bf16", "fp8" or "fwd|dgrad|wgrad"')
    return schemes


def is_fused_in_fp8(w_gate_up: GateUp, w_down: Tensor) -> bool:
    """Whether the whole block is one FP8 op: gate and up in one, weights stored [E, N, K] or [E, K, N]."""
    return not isinstance(w_gate_up, tuple) and all(_lies(weight) for weight in (w_gate_up, w_down))


def _lies(weight: Tensor) -> bool:
    return weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()


def is_fused_in_bf16(x: Tensor, w_gate_up: GateUp, w_down: Tensor) -> bool:
    """Whether a GPU runs the whole block by `experts_chain`: bf16 rows of whole 16-byte lines, weights as they lie."""
    if isinstance(w_gate_up, tuple):
        return False
    whole = all(size % 8 == 0 for size in (*w_gate_up.shape[1:], *w_down.shape[1:]))
    return (
        whole
        and all(map(_lies, (w_gate_up, w_down)))
        and all(tensor.dtype == torch.bfloat16 for tensor in (x, w_gate_up, w_down))
    )


def _check(
    x: Tensor, w_gate_up: GateUp, w_down: Tensor, index: Tensor, weight: Tensor, activation: ExpertActivation
) -> None:
    first = w_gate_up if isinstance(w_gate_up, tuple) else (w_gate_up,)
    shapes = [tuple(w.shape) for w in first]
    if any(len(shape) != 3 for shape in shapes) or w_down.dim() != 3 or x.dim() != 2:
        raise ConfigError(
            f"experts_mlp takes x [T, H] and weights [E, N, K], got {tuple(x.shape)}, {shapes} and "
            f"{tuple(w_down.shape)}"
        )
    experts, hidden, ffn = w_down.shape
    wanted = (experts, ffn * (1 + activation.gated) // len(first), hidden)
    if set(shapes) != {wanted} or len(first) > 1 + activation.gated or x.shape[1] != hidden:
        raise ConfigError(
            f"w_gate_up is {shapes} and x {tuple(x.shape)}; with w_down {tuple(w_down.shape)} they "
            f"must be {wanted} and [T, {hidden}]"
        )
    if index.dim() != 2 or index.shape != weight.shape or index.shape[0] != x.shape[0]:
        raise ConfigError(
            f"top_index is {tuple(index.shape)} and top_weight {tuple(weight.shape)}; both must be "
            f"[{x.shape[0]}, top_k]"
        )
