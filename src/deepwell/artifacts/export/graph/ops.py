"""The ops that a graph in an exported file may name, and nothing else: pure functions of tensors, sizes and numbers.

A file names an op by a key of this table ("torch.cat", "nn.silu", "operator.add", ".view"); a key that is not here is
refused, so no file can reach another function. None of these reads files, imports, evaluates text or starts anything.
"""

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

_TORCH = """
abs acos acosh add addbmm addcdiv addcmul addmm addmv addr all allclose amax amin any arange argmax argmin argsort asin
asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d avg_pool1d baddbmm batch_norm bilinear bincount bitwise_and
bitwise_not bitwise_or bitwise_xor block_diag bmm broadcast_tensors broadcast_to bucketize cat cdist ceil celu chunk
clamp clamp_max clamp_min clip clone column_stack concat constant_pad_nd conv1d conv2d conv3d conv_transpose1d
conv_transpose2d conv_transpose3d cos cosh cosine_similarity count_nonzero cross cummax cummin cumprod cumsum deg2rad
diag diag_embed diagflat diagonal diff div divide dot dropout einsum embedding empty empty_like eq erf erfc erfinv exp
exp2 eye fft_fft flatten flip float_power floor floor_divide fmod frac full full_like gather ge gelu greater
greater_equal group_norm gt hstack index_add index_select instance_norm inverse isfinite isinf isnan kron layer_norm le
lerp less less_equal lgamma linspace log log10 log1p log2 log_softmax logaddexp logical_and logical_not logical_or
logical_xor logsumexp lt masked_fill masked_select matmul max max_pool1d max_pool2d maximum mean median meshgrid min
minimum mm moveaxis movedim mul multiply mv nan_to_num narrow ne neg negative nonzero norm normalize not_equal numel
ones ones_like outer permute pixel_shuffle pixel_unshuffle polar pow prelu prod quantile rad2deg ravel real reciprocal
relu remainder repeat_interleave reshape rms_norm roll rot90 round rsqrt rsub scatter scatter_add searchsorted select
selu sigmoid sign sin sinc sinh slice_scatter softmax sort split split_with_sizes sqrt square squeeze stack std
std_mean sub subtract sum swapaxes swapdims sym_float sym_int sym_ite sym_max sym_min sym_not t take take_along_dim tan
tanh tensor_split tensordot threshold tile topk trace transpose trapz tril triu true_divide trunc unbind unflatten
unique unsqueeze var var_mean view_as_complex view_as_real vstack where zeros zeros_like
_transformer_encoder_layer_fwd _native_multi_head_attention _grouped_mm
"""
_FUNCTIONAL = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d alpha_dropout
avg_pool1d avg_pool2d avg_pool3d batch_norm bilinear binary_cross_entropy binary_cross_entropy_with_logits celu conv1d
conv2d conv3d cosine_similarity cross_entropy dropout dropout1d dropout2d elu embedding embedding_bag fold gelu glu
group_norm hardsigmoid hardswish hardtanh huber_loss instance_norm interpolate kl_div l1_loss layer_norm leaky_relu
linear local_response_norm log_softmax logsigmoid lp_pool1d lp_pool2d max_pool1d max_pool2d max_pool3d mish mse_loss
multi_head_attention_forward nll_loss normalize one_hot pad pairwise_distance pixel_shuffle pixel_unshuffle prelu relu
relu6 rms_norm rrelu scaled_dot_product_attention selu sigmoid silu smooth_l1_loss softmax softmin softplus softshrink
softsign tanh tanhshrink threshold unfold upsample
"""
_OPERATOR = """
abs add and_ eq floordiv ge getitem gt iadd iand ifloordiv imul invert ior isub itruediv is_ is_not le lshift lt matmul
imatmul mod mul ne neg not_ or_ pos pow rshift setitem sub truediv xor
"""
_METHODS = """
abs add add_ addmm all amax amin any argmax argmin argsort baddbmm bfloat16 bitwise_and bitwise_not bitwise_or bmm bool
ceil chunk clamp clamp_ clamp_max clamp_min clip clone contiguous copy_ cos cumprod cumsum detach diagonal diff dim div
div_ double eq erf exp expand expand_as fill_ flatten flip float floor floor_divide gather ge gt half index_add
index_add_ index_copy index_copy_ index_fill index_put index_put_ index_select int isfinite isinf isnan item le log
log1p log2 log_softmax logical_and logical_not logical_or logsumexp long lt masked_fill masked_fill_ masked_scatter
masked_select matmul max maximum mean min minimum mm movedim mul mul_ narrow ndimension ne neg new_empty new_full
new_ones new_zeros nonzero norm numel permute pow prod ravel reciprocal relu remainder repeat repeat_interleave reshape
reshape_as roll round rsqrt scatter scatter_ scatter_add scatter_add_ scatter_reduce select short sigmoid sign sin size
softmax sort split split_with_sizes sqrt square squeeze std sub sub_ sum swapaxes t tan tanh tensor_split tile to topk
transpose transpose_ tril tril_ triu triu_ type type_as unbind unflatten unfold unique unsqueeze unsqueeze_ var view
view_as where zero_
"""
# Tensor attributes, read with getattr.
ATTRIBUTES = ("shape", "dtype", "device", "T", "mT", "H", "ndim", "real", "imag", "is_cuda", "data", "requires_grad")


def _named(prefix: str, owner: Any, names: str) -> dict[str, Callable[..., Any]]:
    found = {f"{prefix}.{name}": getattr(owner, name, None) for name in names.split()}
    return {key: function for key, function in found.items() if callable(function)}


@lru_cache(maxsize=1)
def functions() -> dict[str, Callable[..., Any]]:
    """Key -> function. Those that this torch does not have are left out."""
    return {
        **_named("torch", torch, _TORCH),
        **_named("nn", F, _FUNCTIONAL),
        **_named("operator", operator, _OPERATOR),
        **_named("special", torch.special, "erf erfc expit expm1 log1p logit logsumexp softmax xlogy"),
    }


@lru_cache(maxsize=1)
def keys() -> dict[Any, str]:
    """Function -> key."""
    found: dict[Any, str] = {function: key for key, function in functions().items()}
    # The same function under torch's private name, as Dynamo writes it.
    for name in ("linear", "gelu", "scaled_dot_product_attention", "softplus", "one_hot", "pad", "elu_"):
        private = getattr(torch._C._nn, name, None)
        if private is not None and f"nn.{name}" in functions():
            found.setdefault(private, f"nn.{name}")
    for name in functions():
        kind, _, short = name.partition(".")
        private = getattr(torch._C._VariableFunctions, short, None) if kind == "torch" else None
        if private is not None:
            found.setdefault(private, name)
    return found


METHODS = frozenset(_METHODS.split())
