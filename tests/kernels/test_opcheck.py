"""Every op of `torch.ops.deepwell` against what tracing believes of it: schema, fake tensors, AOT dispatch.

Compiled code trusts an op's fake: a stride that differs is memory read at the wrong place, a result that shares memory
with an operand is overwritten when that operand's memory is used again. So each op runs in two sizes: whole lines of
contiguous operands, and sizes that end inside them with operands that a model transposed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import deepwell.kernels.activation.torch_ops
import deepwell.kernels.experts.torch_ops
import deepwell.kernels.gemm.torch_ops
import deepwell.kernels.head.torch_ops
import deepwell.kernels.norm.torch_ops
import deepwell.kernels.quantize.torch_ops
import deepwell.kernels.rope.torch_ops  # noqa: F401 (all register their ops)
from deepwell.kernels.experts.kept_rows import pack_rows_ref
from deepwell.kernels.gemm import chosen
from deepwell.kernels.quantize.fp8 import quantize_rows
from deepwell.kernels.registry import KernelRegistry
from deepwell.kernels.torch_library import NAMESPACE

ops = torch.ops.deepwell
EXPERTS, TOP_K = 4, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """T tokens, D and F widths, V words; `is_transposed`: matrices come as a model's transposes."""

    t: int
    d: int
    f: int
    v: int
    is_transposed: bool

    def matrix(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(columns, rows).to(dtype).T if self.is_transposed else torch.randn(rows, columns).to(dtype)

    def tokens(self, columns: int) -> Tensor:
        return self.matrix(self.t, columns)

    def vector(self, length: int) -> Tensor:
        return torch.randn(length, 2).bfloat16()[:, 0] if self.is_transposed else torch.randn(length).bfloat16()

    def heads(self, *shape: int) -> Tensor:
        """[B, S, H, D] as attention gives gradients: heads before positions."""
        b, s, h, d = shape
        return (
            torch.randn(b, h, s, d).bfloat16().transpose(1, 2) if self.is_transposed else torch.randn(shape).bfloat16()
        )


SIZES = {
    "whole": Sizes(t=32, d=32, f=48, v=64, is_transposed=False),
    "ragged": Sizes(t=7, d=20, f=36, v=50, is_transposed=True),
}


def _codes(s: Sizes, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return quantize_rows(s.matrix(rows, columns).contiguous())


def _rms_grads(s: Sizes) -> tuple[Any, ...]:
    return s.tokens(s.d), s.tokens(s.d), s.vector(s.d), torch.rand(s.t), "llama", s.tokens(s.d)


def _layer_grads(s: Sizes) -> tuple[Any, ...]:
    return s.tokens(s.d), s.tokens(s.d), s.vector(s.d), torch.rand(s.t), torch.rand(s.t), s.tokens(s.d)


def _add_rms(s: Sizes) -> tuple[Any, ...]:
    return s.tokens(s.d), s.tokens(s.d), s.vector(s.d), 1e-6, "llama"


def _add_layer(s: Sizes) -> tuple[Any, ...]:
    return s.tokens(s.d), s.tokens(s.d), s.vector(s.d), s.vector(s.d), 1e-5


def _gated_grads(s: Sizes) -> tuple[Any, ...]:
    return s.tokens(s.f), s.tokens(2 * s.f), "silu"


def _bias_grads(s: Sizes) -> tuple[Any, ...]:
    return s.tokens(s.f), s.tokens(s.f), s.vector(s.f), "gelu"


def _tables(s: Sizes, length: int, width: int) -> tuple[Tensor, Tensor]:
    return s.matrix(length, width, torch.float32), s.matrix(length, width, torch.float32)


def _rope_grads(s: Sizes) -> tuple[Any, ...]:
    return s.heads(2, s.t, 4, 8), s.heads(2, s.t, 2, 8), s.heads(2, s.t, 2, 8), *_tables(s, s.t, 8), "blocks", "half"


def _merged_rows(s: Sizes) -> Tensor:
    return (
        torch.randn(64, s.t, 2).bfloat16().permute(2, 1, 0) if s.is_transposed else torch.randn(2, s.t, 64).bfloat16()
    )


def _qk_norm_grads(s: Sizes) -> tuple[Any, ...]:
    grads = s.heads(2, s.t, 4, 8), s.heads(2, s.t, 2, 8), s.heads(2, s.t, 2, 8)
    rstds = torch.rand(2 * s.t, 4), torch.rand(2 * s.t, 2)
    return *grads, _merged_rows(s), s.vector(8), s.vector(8), *rstds, *_tables(s, s.t, 8), "interleaved"


def _head(s: Sizes, *, fp8: bool, bias: bool) -> tuple[Any, ...]:
    v, d = s.v, -(-s.d // 16) * 16 if fp8 else s.d
    target = torch.randint(0, v, (s.t, 2))[:, 0] if s.is_transposed else torch.randint(0, v, (s.t,))
    return s.tokens(d), s.matrix(v, d), s.vector(v) if bias else None, target


def _how(*, fp8: bool) -> tuple[Any, ...]:
    return -100, "mean", fp8, 0.5, 0.0


def _head_grads(s: Sizes, needs: list[bool], dtype: torch.dtype) -> tuple[Any, ...]:
    """What a head's forward left for the backward, with the loss' gradient and the weight's dtype."""
    operands = _head(s, fp8=True, bias=True)
    _, *made = ops.linear_cross_entropy_codes(*operands, needs, *_how(fp8=True))
    dx, db = (grad if need else None for grad, need in zip(made[:2], needs, strict=True))
    return *made[2:], torch.tensor(0.5), dx, db, operands[1].shape[0], dtype


def _attention(s: Sizes, window: int) -> tuple[Any, ...]:
    q, k, v = (s.heads(2, s.t, heads, 8).transpose(1, 2) for heads in (4, 2, 2))
    return q, k, v, s.vector(4), 0.3, window


def _attention_grads(s: Sizes) -> tuple[Any, ...]:
    given = _attention(s, 5)
    return s.heads(2, s.t, 4, 8).transpose(1, 2), *given[:3], *ops.attention(*given), *given[4:]


def _routing(s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """(ends, slot, place) of tokens that each chose two of four experts, one of which nobody chose."""
    choices = torch.arange(s.t * TOP_K) * 7 % 3
    offs = torch.bincount(choices, minlength=EXPERTS).cumsum(0).int()
    return ops.group_layout(offs, choices.argsort(stable=True), s.t * TOP_K)


def _expert_rows(s: Sizes, width: int) -> tuple[Tensor, Tensor]:
    return _codes(s, _routing(s)[1].shape[0], width)


def _expert_weight(s: Sizes) -> Tensor:
    return torch.randn(EXPERTS, s.f, s.d).bfloat16()


def _weights_of(s: Sizes) -> list[Tensor]:
    return [s.matrix(16, s.d), s.matrix(12, s.d)]


def _grouped(s: Sizes, *, wgrad: bool) -> tuple[Any, ...]:
    ends = _routing(s)[0]
    if wgrad:
        rows = int(ends[-1])
        a, b = _codes(s, s.f, rows)[0], _codes(s, s.d, rows)[0]
        return a, torch.rand(EXPERTS), b, torch.rand(EXPERTS), ends
    return *_expert_rows(s, s.d), *ops.quantize_experts(_expert_weight(s)), ends


def _emulated(s: Sizes) -> tuple[Any, ...]:
    offs = torch.tensor([2, 2, s.t - 1, s.t], dtype=torch.int32)
    return offs, "mxfp8,nearest,False", "fp32,nearest,False"


def _block_scaled(s: Sizes, fmt: str) -> tuple[Any, ...]:
    a, b = s.tokens(s.d), s.matrix(s.f, s.d)
    if fmt == "mxfp8":
        return *ops.mx_quantize_rows(a, fmt), None, *ops.mx_quantize_rows(b, fmt), None, torch.bfloat16
    made = [ops.nv_quantize_rows(x, fmt, "nearest", False) for x in (a, b)]
    return *made[0], *made[1], torch.float32


def _squares(s: Sizes) -> list[Tensor]:
    """Weights that end at whole squares but for the last."""
    return [s.matrix(256, s.d), s.matrix(72, s.d)]


def _block_products(s: Sizes, *, square: bool) -> tuple[Any, ...]:
    if square:
        weights = ops.quantize_weights_128x128([s.matrix(s.f, s.d)])
        return *ops.quantize_1x128(s.tokens(s.d)), *weights, True
    return *ops.quantize_1x128_both(s.tokens(s.f))[2:], *ops.quantize_1x128_both(s.tokens(s.d))[2:], False


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """A user's kernel whose result lies column by column."""
    return (b.T @ a.T).T


def _transposed_codes(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    left, right = a.float() * scale_a.reshape(-1, 1), b.float() * scale_b.reshape(-1, 1)
    return (right @ left.T).T


def _kernel(op: str, fn: Callable[..., Tensor]) -> str:
    registry = KernelRegistry()
    registry.register("transposed", fn, precision="fp8", op=op, trusted=True)
    return chosen.install(registry, registry.candidate(op, "transposed"))


def _chosen(s: Sizes) -> tuple[Any, ...]:
    formats = "fp8_e4m3_row_pow2", "fp8_e4m3_tensor_pow2"
    return s.tokens(s.d), s.matrix(s.d, s.f), _kernel("gemm", _transposed_product), *formats, torch.bfloat16


# Op -> its operands in one size; where an op's operands decide what it does, several rows under "op, what".
OPERANDS: dict[str, Callable[[Sizes], tuple[Any, ...]]] = {
    "quantize_rows": lambda s: (s.tokens(s.d),),
    "quantize_weights": lambda s: (_weights_of(s),),
    "quantize_weights, a scale per row": lambda s: (_weights_of(s), True),
    "quantize_weights_transposed": lambda s: (_weights_of(s), torch.tensor([4.0]), s.tokens(1)),
    "quantize_weights_transposed, a scale per row": lambda s: (_weights_of(s), torch.ones(3), s.tokens(1), True),
    "wgrad_operands": lambda s: (*_codes(s, s.t, s.d), *_codes(s, s.t, s.f)),
    "wgrad_operands, experts": lambda s: (*_expert_rows(s, s.d), *_expert_rows(s, s.f), _routing(s)[0]),
    "round_to": lambda s: (s.tokens(s.d), "mxfp8", "nearest", False),
    "round_to, transformed": lambda s: (s.tokens(s.d), "nvfp4", "nearest", True),
    "emulated_mm": lambda s: (s.tokens(s.d), s.tokens(s.d), "mxfp8", "nearest", False, "nvfp4", "nearest"),
    "fp8_gemm": lambda s: (*_codes(s, s.t, s.d), *_codes(s, s.f, s.d), True),
    "fp8_gemm, one scale": lambda s: (_codes(s, s.t, s.d)[0], torch.ones(()), *_codes(s, s.f, s.d), False),
    "fp8_gemm, scales left to the reader": lambda s: (
        _codes(s, s.t, s.d)[0],
        None,
        _codes(s, s.f, s.d)[0],
        torch.ones(()),
        True,
    ),
    "fp8_gemm_bias": lambda s: (*_codes(s, s.t, s.d), *_codes(s, s.f, s.d), s.vector(s.f), True),
    "rms_norm": lambda s: (s.tokens(s.d), s.vector(s.d), 1e-6, "llama"),
    "rms_norm_quantize": lambda s: (s.tokens(s.d), s.vector(s.d), 1e-6, "torch"),
    "add_rms_norm": _add_rms,
    "add_rms_norm, with factors": lambda s: (*_add_rms(s), torch.rand(s.t)),
    "add_rms_norm_quantize": _add_rms,
    "rms_norm_backward": _rms_grads,
    "rms_norm_backward, alone": lambda s: _rms_grads(s)[:-1],
    "rms_norm_backward_quantize": _rms_grads,
    "rms_norm_backward_beside": _rms_grads,
    "rms_norm_backward_beside, with factors": lambda s: (*_rms_grads(s), torch.rand(s.t)),
    "layer_norm": lambda s: (s.tokens(s.d), s.vector(s.d), None, 1e-5),
    "layer_norm_quantize": lambda s: (s.tokens(s.d), s.vector(s.d), s.vector(s.d), 1e-5),
    "add_layer_norm": _add_layer,
    "add_layer_norm, with factors": lambda s: (*_add_layer(s), torch.rand(s.t)),
    "add_layer_norm_quantize": _add_layer,
    "layer_norm_backward": _layer_grads,
    "layer_norm_backward, with factors": lambda s: (*_layer_grads(s), torch.rand(s.t)),
    "layer_norm_backward, alone": lambda s: _layer_grads(s)[:-1],
    "layer_norm_backward_quantize": _layer_grads,
    "layer_norm_backward_beside": _layer_grads,
    "attention": lambda s: _attention(s, -1),
    "attention, windowed": lambda s: _attention(s, 5),
    "attention_backward": _attention_grads,
    "swiglu": lambda s: (s.tokens(2 * s.f), "silu"),
    "swiglu, with factors": lambda s: (s.tokens(2 * s.f), "silu", torch.rand(s.t)),
    "swiglu_quantize": lambda s: (s.tokens(2 * s.f), "gelu_tanh"),
    "swiglu_backward": _gated_grads,
    "swiglu_backward_quantize": _gated_grads,
    "swiglu_backward_recompute": _gated_grads,
    "swiglu_backward_recompute, with factors": lambda s: (*_gated_grads(s), torch.rand(s.t), torch.rand(s.t)),
    "swiglu_pair": lambda s: (s.tokens(s.f), s.tokens(s.f), "silu"),
    "swiglu_pair_backward": lambda s: (s.tokens(s.f), s.tokens(s.f), s.tokens(s.f), "gelu"),
    "activation": lambda s: (s.tokens(s.f), "relu"),
    "activation_quantize": lambda s: (s.tokens(s.f), "quick_gelu"),
    "activation_backward": lambda s: (s.tokens(s.f), s.tokens(s.f), "silu"),
    "activation_backward_quantize": lambda s: (s.tokens(s.f), s.tokens(s.f), "gelu"),
    "bias_activation": lambda s: (s.tokens(s.f), s.vector(s.f), "gelu"),
    "bias_activation_quantize": lambda s: (s.tokens(s.f), s.vector(s.f), "relu"),
    "bias_activation_backward": _bias_grads,
    "bias_activation_backward_quantize": _bias_grads,
    "rope": lambda s: (s.heads(2, s.t, 4, 8), *_tables(s, s.t, 8), "half", False),
    "rope, part of a head": lambda s: (s.heads(2, s.t, 4, 8), *_tables(s, s.t, 4), "interleaved", True),
    "rope_qkv": lambda s: (_merged_rows(s), *_tables(s, s.t, 8), [4, 2, 2], "blocks", "half"),
    "rope_qkv, with factors": lambda s: (
        *(_merged_rows(s), *_tables(s, s.t, 8), [4, 2, 2], "blocks", "half"),
        torch.rand(2 * s.t),
    ),
    "rope_qkv_backward": _rope_grads,
    "rope_qkv_backward_rows": _rope_grads,
    "rope_qkv_backward_beside": _rope_grads,
    "qk_norm_rope": lambda s: (
        *(_merged_rows(s), s.vector(8), s.vector(8), *_tables(s, s.t, 8), [4, 2, 2]),
        *(1e-6, "llama", "half"),
    ),
    "qk_norm_rope_backward": _qk_norm_grads,
    "qk_norm_rope_backward_quantize": _qk_norm_grads,
    "qk_norm_rope_backward_beside": _qk_norm_grads,
    "linear_cross_entropy": lambda s: (*_head(s, fp8=False, bias=True), [True] * 3, *_how(fp8=False)),
    "linear_cross_entropy, fp8": lambda s: (*_head(s, fp8=True, bias=True), [True] * 3, *_how(fp8=True)),
    "linear_cross_entropy, frozen head": lambda s: (
        *(*_head(s, fp8=True, bias=False), [True, False, False]),
        *_how(fp8=True),
    ),
    "linear_cross_entropy_codes": lambda s: (*_head(s, fp8=True, bias=True), [True, True], *_how(fp8=True)),
    "linear_cross_entropy_codes, frozen body": lambda s: (
        *(*_head(s, fp8=True, bias=False), [False, False]),
        *_how(fp8=True),
    ),
    "linear_cross_entropy_backward": lambda s: _head_grads(s, [True, True], torch.bfloat16),
    "linear_cross_entropy_backward, frozen body": lambda s: _head_grads(s, [False, False], torch.float32),
    "linear_cross_entropy_loss": lambda s: (*_head(s, fp8=False, bias=True), *_how(fp8=False)),
    "linear_cross_entropy_loss, fp8": lambda s: (*_head(s, fp8=True, bias=False), *_how(fp8=True)),
    "scale_by": lambda s: (s.tokens(s.d), torch.tensor(1 / 3)),
    "scale_by, transposed": lambda s: (s.tokens(s.d).T, torch.tensor([2.0])),
    "embedding_backward": lambda s: (s.tokens(s.d), torch.arange(s.t) * 5 % 3, s.v, -1),
    "embedding_backward, padding": lambda s: (s.tokens(s.d), (torch.arange(2 * s.t) % 4).int()[::2], s.v, 2),
    "group_layout": lambda s: (torch.tensor([3, 3, 4, s.t], dtype=torch.int64), None, s.t),
    "group_layout, in an order": lambda s: (
        *(torch.tensor([3, 3, 4, s.t], dtype=torch.int32), torch.stack([torch.arange(s.t).flip(0)] * 2, 1)[:, 0]),
        s.t,
    ),
    "gather_rows": lambda s: (*_codes(s, s.t, s.d), _routing(s)[1], TOP_K, s.tokens(1)),
    "combine_rows": lambda s: (s.matrix(_routing(s)[1].shape[0], s.d).contiguous(), _routing(s)[2], TOP_K),
    "quantize_experts": lambda s: (_expert_weight(s),),
    "expert_scales": lambda s: (_expert_weight(s),),
    "quantize_experts_transposed": lambda s: (_expert_weight(s), ops.quantize_experts(_expert_weight(s))[1]),
    "expert_swiglu": lambda s: (
        *(torch.randn(_routing(s)[1].shape[0], 2 * s.f).bfloat16(), s.vector(s.t * TOP_K)),
        *(_routing(s)[1], "silu"),
    ),
    "expert_swiglu_backward": lambda s: (
        *(s.matrix(_routing(s)[1].shape[0], s.f).contiguous(),),
        *(torch.randn(_routing(s)[1].shape[0], 2 * s.f).bfloat16(), s.vector(s.t * TOP_K), _routing(s)[1], "silu"),
    ),
    "expert_swiglu_kept": lambda s: (
        *(torch.randn(_routing(s)[1].shape[0], 2 * s.f).bfloat16(), s.vector(s.t * TOP_K)),
        *(_routing(s)[1], "silu"),
    ),
    "expert_swiglu_backward_kept": lambda s: (
        *(s.matrix(_routing(s)[1].shape[0], s.f).contiguous(),),
        *pack_rows_ref(torch.randn(_routing(s)[1].shape[0], 2 * s.f)),
        *(s.vector(s.t * TOP_K), _routing(s)[1], "silu"),
    ),
    "quantize_rows_again": lambda s: (s.tokens(s.d), s.tokens(1)),
    "expert_hidden_codes": lambda s: (
        *(torch.randn(_routing(s)[1].shape[0], 2 * s.f).bfloat16(), s.vector(s.t * TOP_K)),
        *(_routing(s)[1], "silu,True,True,7.0,1.702,1.0"),
    ),
    "expert_grad_codes": lambda s: (
        *(s.matrix(_routing(s)[1].shape[0], s.f).contiguous(),),
        *(torch.randn(_routing(s)[1].shape[0], s.f).bfloat16(), s.vector(s.t * TOP_K), _routing(s)[1]),
        "relu2,False,False,None,None,0.0",
    ),
    "product_in_fp32": lambda s: (torch.randn(s.t, s.d), s.matrix(s.d, s.f)),
    "add_down_bias": lambda s: (s.tokens(s.d).contiguous(), torch.rand(s.t, EXPERTS), s.matrix(EXPERTS, s.d)),
    "expert_code_sums": lambda s: (*_codes(s, _routing(s)[1].shape[0], s.f), _routing(s)[0]),
    "combine_rows, weighted": lambda s: (
        *(s.matrix(_routing(s)[1].shape[0], s.d).contiguous(), _routing(s)[2], TOP_K),
        s.vector(s.t * TOP_K),
    ),
    "expert_product": lambda s: (s.tokens(s.d), None, _expert_weight(s), None, None, *_routing(s)[:2], TOP_K),
    "expert_product, codes": lambda s: (*_grouped(s, wgrad=False)[:4], None, _routing(s)[0], None, 1),
    "expert_up": lambda s: (
        *(s.tokens(s.d), _expert_weight(s), torch.randn(EXPERTS, s.f), *_routing(s)[:2], TOP_K),
        "silu,True,True,7.0,1.702,1.0",
    ),
    "expert_rows": lambda s: (s.tokens(s.d), *_routing(s)[1:], TOP_K, s.tokens(1)),
    "expert_grads": lambda s: (
        s.matrix(_routing(s)[1].shape[0], s.d).contiguous(),
        *(_expert_weight(s), torch.randn(_routing(s)[1].shape[0], 2 * s.f).bfloat16()),
        *(s.vector(s.t * TOP_K), *_routing(s)[:2], "silu,True,False,None,None,0.0"),
    ),
    "expert_wgrad": lambda s: (
        *(s.matrix(_routing(s)[1].shape[0], width) for width in (s.d, s.f)),
        _routing(s)[0],
    ),
    "choice_layout": lambda s: (torch.arange(s.t * TOP_K) * 7 % (EXPERTS + 1) - 1, EXPERTS),
    "group_columns": lambda s: (_routing(s)[0], _routing(s)[1].shape[0]),
    "top_k": lambda s: (s.tokens(s.d), TOP_K),
    "wgrad_operands, whole columns": lambda s: (
        *(*_codes(s, s.t, s.d), *_codes(s, _routing(s)[1].shape[0], s.f), *_routing(s)[:2], TOP_K, False),
        ops.group_columns(_routing(s)[0], _routing(s)[1].shape[0])[1],
    ),
    "wgrad_operands, gathered": lambda s: (
        *(*_codes(s, s.t, s.d), *_codes(s, _routing(s)[1].shape[0], s.f), *_routing(s)[:2], TOP_K, False),
    ),
    "grouped_gemm": lambda s: _grouped(s, wgrad=False),
    "grouped_wgrad": lambda s: _grouped(s, wgrad=True),
    "grouped_emulated": lambda s: (s.tokens(s.d), torch.randn(EXPERTS, s.f, s.d).bfloat16(), *_emulated(s)),
    "grouped_emulated_wgrad": lambda s: (s.tokens(s.f), s.tokens(s.d), *_emulated(s)),
    "mx_quantize_rows": lambda s: (s.tokens(s.d), "mxfp8_e5m2"),
    "mx_quantize_both": lambda s: (s.tokens(s.d), "mxfp8"),
    "nv_quantize_rows": lambda s: (s.tokens(s.d), "nvfp4", "nearest", False),
    "nv_quantize_rows, transformed": lambda s: (s.tokens(s.d), "nvfp4", "nearest", True),
    "block_scaled_gemm": lambda s: _block_scaled(s, "mxfp8"),
    "block_scaled_gemm, nvfp4": lambda s: _block_scaled(s, "nvfp4"),
    "quantize_tensor": lambda s: (s.tokens(s.d), False),
    "quantize_tensor, e5m2": lambda s: (s.tokens(s.d), True),
    "quantize_tensor_both": lambda s: (s.tokens(s.d), False),
    "quantize_tensor_both, e5m2": lambda s: (s.tokens(s.d), True),
    "quantize_1x128": lambda s: (s.tokens(s.d),),
    "quantize_1x128, whole blocks": lambda s: (s.tokens(256),),
    "quantize_1x128_both": lambda s: (s.tokens(s.d),),
    "quantize_weights_128x128": lambda s: (_weights_of(s),),
    "quantize_weights_128x128, squares": lambda s: (_squares(s),),
    "quantize_weights_128x128_transposed": lambda s: (_weights_of(s), s.tokens(1)),
    "quantize_weights_128x128_transposed, squares": lambda s: (_squares(s), s.tokens(1)),
    "fp8_gemm_blocks": lambda s: _block_products(s, square=True),
    "fp8_gemm_blocks, along tokens": lambda s: _block_products(s, square=False),
    "chosen_gemm": _chosen,
    "chosen_fp8_gemm": lambda s: (
        *(*_codes(s, s.t, s.d), *_codes(s, s.f, s.d), True),
        _kernel("fp8_gemm", _transposed_codes),
    ),
    "chosen_fp8_gemm, scales left to the reader": lambda s: (
        *(_codes(s, s.t, s.d)[0], None, *_codes(s, s.f, s.d), True),
        _kernel("fp8_gemm", _transposed_codes),
    ),
}


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def _bytes(x: Tensor) -> bytes:
    return x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_op_is_in_the_table() -> None:
    # An op that is not checked here is one whose fake nobody compared with what it does.
    prefix = f"{NAMESPACE}::"
    known = {name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)}
    assert known == {name.partition(",")[0] for name in OPERANDS}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPERANDS)
def test_an_op_does_what_tracing_believes_of_it(name, size) -> None:
    torch.manual_seed(0)
    op = getattr(ops, name.partition(",")[0]).default
    operands = OPERANDS[name](SIZES[size])
    before = [_bytes(x) for x in _tensors(operands)]
    results = op(*operands)
    assert [_bytes(x) for x in _tensors(operands)] == before  # it writes into no operand
    storages = [x.untyped_storage().data_ptr() for x in _tensors(operands) if x.numel()]
    made = [x.untyped_storage().data_ptr() for x in _tensors(results) if x.numel()]
    assert not set(storages) & set(made)  # and hands out none of their memory,
    assert len(set(made)) == len(made)  # nor one result twice
    # torch's check of the schema adds its operands up, which it cannot do with FP8; the lines above are that check.
    torch.library.opcheck(op, operands, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))
