"""The experts' kernels as torch ops, with the shapes that tracing needs.

Ops of the backward that follow from the forward's values alone take a tensor `after` of the backward, which they do not
read: it keeps a compiler from making them in the forward, or sharing them with it, and keeping what they give.
"""

from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.activation.torch_ops import half
from deepwell.kernels.experts import stages
from deepwell.kernels.experts.activation import parse_activation
from deepwell.kernels.experts.biases import add_down_bias, code_sums
from deepwell.kernels.experts.group_rows import (
    GROUP_ALIGNMENT,
    choice_layout,
    combine_rows,
    copy_rows,
    gather_rows,
    group_columns,
    group_layout,
    padded_columns,
    padded_rows,
)
from deepwell.kernels.experts.grouped_gemm import grouped_gemm
from deepwell.kernels.experts.hidden_codes import grad_codes, hidden_codes
from deepwell.kernels.experts.quantize_weights import expert_scales, quantize_experts, quantize_experts_transposed
from deepwell.kernels.experts.row_tiles import Rows, groups
from deepwell.kernels.experts.spelled_out import is_spelled_out
from deepwell.kernels.experts.swiglu import expert_swiglu, expert_swiglu_backward, expert_swiglu_kept
from deepwell.kernels.experts.top_k import takes, top_k
from deepwell.kernels.quantize.torch_ops import rounded
from deepwell.kernels.torch_library import FP8, dense, fp8_rows_like, register_op

ops = torch.ops.deepwell

# ---- rows by expert ----


def _layout(offs: Tensor, order: Tensor | None, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(group_layout(offs.int(), None if order is None else order.contiguous(), choices))  # type: ignore[return-value]


def _fake_layout(offs: Tensor, order: Tensor | None, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = padded_rows(choices, offs.shape[0])
    sizes = (offs.shape[0], rows, choices)
    return tuple(offs.new_empty(size, dtype=torch.int32) for size in sizes)  # type: ignore[return-value]


register_op(
    "group_layout(Tensor offs, Tensor? order, SymInt choices) -> (Tensor, Tensor, Tensor)",
    _layout,
    _fake_layout,
    caches=True,
)


def _fake_choice_layout(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (experts, padded_rows(index.shape[0], experts), index.shape[0])
    return tuple(index.new_empty(size, dtype=torch.int32) for size in sizes)  # type: ignore[return-value]


register_op(
    "choice_layout(Tensor index, int experts) -> (Tensor, Tensor, Tensor)",
    lambda index, experts: tuple(choice_layout(dense(index), experts)),
    _fake_choice_layout,
    caches=True,
)
register_op(
    "group_columns(Tensor offs, SymInt rows) -> (Tensor, Tensor)",
    lambda offs, rows: tuple(group_columns(offs, rows)),
    lambda offs, rows: (
        offs.new_empty(offs.shape),
        offs.new_empty(padded_columns(rows, offs.shape[0]) // GROUP_ALIGNMENT),
    ),
    caches=True,
)
register_op(
    "gather_rows(Tensor q, Tensor scale, Tensor slot, int top_k, Tensor? after=None) -> (Tensor, Tensor)",
    lambda q, scale, slot, top_k, after=None: gather_rows(q, scale, slot, top_k),
    lambda q, scale, slot, *how: (q.new_empty((slot.shape[0], q.shape[1])), scale.new_empty(slot.shape[0])),
    caches=True,
)
# Numbers as they are. `after`: the rows of x are gathered in the backward alone.
register_op(
    "expert_rows(Tensor x, Tensor slot, Tensor place, int top_k, Tensor? after=None) -> Tensor",
    lambda x, slot, place, top_k, after=None: copy_rows(dense(x), slot, place, top_k),
    lambda x, slot, *how: x.new_empty((slot.shape[0], x.shape[1])),
    caches=True,
)
register_op(
    "combine_rows(Tensor x, Tensor place, int top_k, Tensor? weight=None) -> Tensor",
    lambda x, place, top_k, weight=None: combine_rows(x, place, top_k, None if weight is None else weight.contiguous()),
    lambda x, place, top_k, weight=None: x.new_empty((place.shape[0] // top_k, x.shape[1])),
    caches=True,
)


def _top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Of rows of any number of dimensions."""
    value, index = top_k(dense(x.reshape(-1, x.shape[-1])), k)
    return value.view(*x.shape[:-1], k), index.view(*x.shape[:-1], k)


register_op(
    "top_k(Tensor x, int k) -> (Tensor, Tensor)",
    _top_k,
    lambda x, k: tuple(x.new_empty((*x.shape[:-1], k), dtype=dtype) for dtype in (x.dtype, torch.int64)),
    caches=True,
)


def places_of_largest(x: Tensor, k: int) -> Tensor:
    """Where the k largest scores (fp32) of each row are, int64: a router's choices. On a CPU they are torch's own."""
    if x.is_cuda and takes(x.shape[-1], k) and not is_spelled_out():
        return ops.top_k(x.detach(), k)[1]
    return x.topk(k, dim=-1).indices


# ---- weights ----


def _transposed(w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(values [E, C, R], scales [E, C]) of a weight [E, R, C], from the scales of its rows."""
    scale_E = scale.amax(1)
    return quantize_experts_transposed(w.detach(), scale_E), scale_E[:, None].expand(-1, w.shape[2]).contiguous()


register_op(
    "quantize_experts(Tensor w, Tensor? after=None) -> (Tensor, Tensor)",
    lambda w, after=None: quantize_experts(w.detach()),
    lambda w, after=None: (w.new_empty(w.shape, dtype=FP8), w.new_empty(w.shape[:2], dtype=torch.float32)),
    caches=True,
)
register_op(
    "expert_scales(Tensor w, Tensor? after=None) -> Tensor",
    lambda w, after=None: expert_scales(w.detach()),
    lambda w, after=None: w.new_empty(w.shape[:2], dtype=torch.float32),
    caches=True,
)
register_op(
    "quantize_experts_transposed(Tensor w, Tensor scale, Tensor? after=None) -> (Tensor, Tensor)",
    lambda w, scale, after=None: _transposed(w, scale),
    lambda w, scale, after=None: (
        w.new_empty((w.shape[0], w.shape[2], w.shape[1]), dtype=FP8),
        w.new_empty((w.shape[0], w.shape[2]), dtype=torch.float32),
    ),
    caches=True,
)

# ---- activations between the products ----


def _fake_grads_of_hidden(dh: Tensor, gate_up: Tensor, weight: Tensor, *how: Any) -> tuple[Tensor, ...]:
    return *fp8_rows_like(gate_up), *fp8_rows_like(dh), weight.new_empty(weight.shape, dtype=torch.float32)


def _halves(act: str) -> int:
    return 1 + parse_activation(act).gated


register_op(
    "expert_swiglu(Tensor gate_up, Tensor weight, Tensor slot, str act) -> (Tensor, Tensor)",
    lambda gate_up, weight, slot, act: expert_swiglu(gate_up, weight.contiguous(), slot, act=act),
    lambda gate_up, weight, slot, act: fp8_rows_like(half(gate_up, act)),
    caches=True,
)
register_op(
    "expert_swiglu_kept(Tensor gate_up, Tensor weight, Tensor slot, str act) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda gate_up, weight, slot, act: expert_swiglu_kept(gate_up, weight.contiguous(), slot, act=act),
    lambda gate_up, weight, slot, act: (
        *fp8_rows_like(half(gate_up, act)),
        gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2 * 3), dtype=torch.uint8),
        gate_up.new_empty(gate_up.shape[0], dtype=torch.uint8),
    ),
    caches=True,
)
register_op(
    "expert_swiglu_backward_kept(Tensor dh, Tensor kept, Tensor top, Tensor weight, Tensor slot, str act)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda dh, kept, top, weight, slot, act: tuple(
        expert_swiglu_backward(dh, kept, weight.contiguous(), slot, top_P=top, act=act)
    ),
    lambda dh, kept, top, weight, slot, act: _fake_grads_of_hidden(
        dh, dh.new_empty((dh.shape[0], 2 * dh.shape[1])), weight
    ),
    caches=True,
)
register_op(
    "expert_swiglu_backward(Tensor dh, Tensor gate_up, Tensor weight, Tensor slot, str act)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda dh, gate_up, weight, slot, act: tuple(
        expert_swiglu_backward(dh, gate_up, weight.contiguous(), slot, act=act)
    ),
    _fake_grads_of_hidden,
    caches=True,
)

register_op(
    "expert_hidden_codes(Tensor gate_up, Tensor weight, Tensor slot, str act) -> (Tensor, Tensor)",
    lambda gate_up, weight, slot, act: hidden_codes(gate_up, weight.contiguous(), slot, parse_activation(act)),
    lambda gate_up, weight, slot, act: fp8_rows_like(gate_up[:, : gate_up.shape[1] // _halves(act)]),
    caches=True,
)
register_op(
    "expert_grad_codes(Tensor dh, Tensor gate_up, Tensor weight, Tensor slot, str act)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda dh, gate_up, weight, slot, act: tuple(
        grad_codes(dh, gate_up, weight.contiguous(), slot, parse_activation(act))
    ),
    _fake_grads_of_hidden,
    caches=True,
)
register_op(
    "add_down_bias(Tensor y, Tensor weight, Tensor bias) -> Tensor",
    add_down_bias,
    lambda y, weight, bias: y.new_empty(y.shape),
)
register_op(
    "expert_code_sums(Tensor q, Tensor scale, Tensor offs) -> Tensor",
    code_sums,
    lambda q, scale, offs: scale.new_empty((offs.shape[0], q.shape[1])),
    caches=True,
)

# ---- products ----

register_op(
    "grouped_gemm(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor offs) -> Tensor",
    grouped_gemm,
    lambda a, scale_a, b, scale_b, offs: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16),
)
register_op(
    "grouped_wgrad(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor offs) -> Tensor",
    stages.wgrad_of_codes,
    lambda a, scale_a, b, scale_b, offs: a.new_empty((offs.shape[0], a.shape[0], b.shape[0]), dtype=torch.bfloat16),
)

# ---- stages of a block: products with what comes before and after them ----


def _product(
    a: Tensor,
    scale_a: Tensor | None,
    w: Tensor,
    scale_w: Tensor | None,
    bias: Tensor | None,
    ends: Tensor,
    slot: Tensor | None,
    top_k: int,
) -> Tensor:
    scales = None if scale_a is None or scale_w is None else (scale_a, scale_w)
    return stages.product(dense(a), w, Rows(ends, slot, top_k), scales=scales, bias_EN=bias)


def _fake_product(
    a: Tensor, scale_a: Any, w: Tensor, scale_w: Any, bias: Any, ends: Any, slot: Any, top_k: int
) -> Tensor:
    rows = a.shape[0] if slot is None else slot.shape[0]
    return a.new_empty((rows, w.shape[1]), dtype=a.dtype if scale_a is None else torch.bfloat16)


register_op(
    "expert_product(Tensor a, Tensor? scale_a, Tensor w, Tensor? scale_w, Tensor? bias, Tensor offs, Tensor? slot,"
    " int top_k) -> Tensor",
    _product,
    _fake_product,
)
register_op(
    "expert_up(Tensor x, Tensor w, Tensor? bias, Tensor offs, Tensor slot, int top_k, str act) -> (Tensor, Tensor)",
    lambda x, w, bias, ends, slot, top_k, act: stages.up(
        dense(x), w, Rows(ends, slot, top_k), parse_activation(act), bias_EG=bias
    ),
    lambda x, w, bias, ends, slot, top_k, act: (
        x.new_empty((slot.shape[0], w.shape[1])),
        x.new_empty((slot.shape[0], w.shape[1] // _halves(act))),
    ),
)
register_op(
    "expert_grads(Tensor dy, Tensor w, Tensor gate_up, Tensor weight, Tensor offs, Tensor slot, str act)"
    " -> (Tensor, Tensor, Tensor)",
    lambda dy, w, gate_up, weight, ends, slot, act: tuple(
        stages.grads(dense(dy), w, gate_up, weight.contiguous(), Rows(ends, slot), parse_activation(act))
    ),
    lambda dy, w, gate_up, weight, ends, slot, act: (
        gate_up.new_empty(gate_up.shape),
        gate_up.new_empty((slot.shape[0], w.shape[1])),
        gate_up.new_empty(slot.shape[0], dtype=torch.float32),
    ),
)
register_op(
    "expert_wgrad(Tensor left, Tensor right, Tensor offs) -> Tensor",
    stages.wgrad,
    lambda left, right, ends: left.new_empty((ends.shape[0], left.shape[1], right.shape[1])),
)

# ---- products that are emulated ----


def _rounded(x: Tensor, fmt: str, rounding: str, hadamard: bool) -> Tensor:
    if fmt == "fp32":
        return x if x.dtype == torch.float64 else x.float()
    return rounded(x, fmt, rounding, hadamard)


def _grouped_emulated(a: Tensor, b: Tensor, offs: Tensor, lhs: str, rhs: str) -> Tensor:
    """`a[rows of e] @ b[e].T` with both operands of each expert rounded along the contraction, the product in fp32.

    a is [S, K] and b [E, N, K]. An operand is written "format,rounding,hadamard"; "fp32" rounds nothing. Rows past the
    last group are zeros.
    """
    out, left, right = a.new_zeros((a.shape[0], b.shape[1])), _operand(lhs), _operand(rhs)
    for e, part in groups(offs):
        if part.stop > part.start:
            out[part] = _rounded(a[part], *left) @ _rounded(b[e], *right).T
    return out


def _grouped_emulated_wgrad(a: Tensor, b: Tensor, offs: Tensor, lhs: str, rhs: str) -> Tensor:
    """`a[rows of e].T @ b[rows of e]`, [E, N, K], rounded along the rows; a is [S, N] and b [S, K]."""
    out, left, right = a.new_zeros((offs.shape[0], a.shape[1], b.shape[1])), _operand(lhs), _operand(rhs)
    for e, part in groups(offs):
        if part.stop > part.start:
            out[e] = _rounded(a[part].T, *left) @ _rounded(b[part].T, *right).T
    return out


def _operand(text: str) -> tuple[str, str, bool]:
    fmt, rounding, hadamard = text.split(",")
    return fmt, rounding, hadamard == "True"


register_op(
    "grouped_emulated(Tensor a, Tensor b, Tensor offs, str lhs, str rhs) -> Tensor",
    _grouped_emulated,
    lambda a, b, offs, lhs, rhs: a.new_empty((a.shape[0], b.shape[1])),
)
register_op(
    "grouped_emulated_wgrad(Tensor a, Tensor b, Tensor offs, str lhs, str rhs) -> Tensor",
    _grouped_emulated_wgrad,
    lambda a, b, offs, lhs, rhs: a.new_empty((offs.shape[0], a.shape[1], b.shape[1])),
)
