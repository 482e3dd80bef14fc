"""Find RMSNorm written out in torch ops and put one op in its place.

x32 = x.float();  n = x32 * rsqrt(mean(x32 ** 2, -1, keepdim) + eps)
y = w * n.to(dtype)         "llama": Llama, Mistral, Qwen
y = (w * n).to(dtype)       "torch": F.rms_norm, GPT-OSS
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from deepwell.engine.passes.edit import put_call, runs_in_kernels
from deepwell.graph.fx import (
    Writes,
    argument,
    arguments,
    multiplies,
    only_user,
    op_of,
    other_operand,
    skip_widening,
    value_of,
)
from deepwell.kernels.norm.autograd import rms_norm
from deepwell.kernels.tune.choose import on_real_tensors


def rewrite_rms_norm(graph: fx.Graph) -> int:
    """Replace every RMSNorm whose inner values nobody else reads. Returns how many."""
    count = 0
    writes = Writes(graph)
    for node in list(graph.nodes):
        if op_of(node) == "rms_norm":
            count += _from_function(node, writes)
        elif op_of(node) == "rsqrt":
            count += _from_pattern(node, writes)
    return count


def _from_function(node: fx.Node, writes: Writes) -> bool:
    x, shape = node.args[0], argument(node, "normalized_shape")
    weight, eps = argument(node, "weight"), argument(node, "eps")
    if weight is None or not runs_in_kernels(x) or not runs_in_kernels(weight) or len(tuple(shape)) != 1:
        return False
    eps = _own_eps(value_of(x).dtype, value_of(x).device.type) if eps is None else eps
    return _put_norm(node, (x, weight), eps, "torch", writes)


@lru_cache(maxsize=16)
def _own_eps(dtype: torch.dtype, device: str) -> float:
    """What `F.rms_norm` takes where a model gives no eps: the dtype's or float32's, asked of torch itself.

    The documentation says the dtype's; torch 2.13 takes float32's for bf16 and fp16, on a CPU at least.
    """
    size = 2.0**-10
    with on_real_tensors():
        y = F.rms_norm(torch.full((8,), size, dtype=dtype, device=device), (8,))[0].item()
    known = (torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return min(known, key=lambda eps: abs(y - size * (size**2 + eps) ** -0.5))


def _from_pattern(rsqrt: fx.Node, writes: Writes) -> bool:
    found = _match_mean_square(rsqrt.args[0])
    scaled = only_user(rsqrt)
    if found is None or scaled is None or op_of(scaled) != "mul":
        return False
    x32, eps, square = found
    if other_operand(scaled, rsqrt) is not x32:
        return False
    x = skip_widening(x32)
    last = only_user(scaled)
    if last is None or not runs_in_kernels(x):
        return False
    first, end = square if x32 is x else x32, only_user(last) or last
    if any(writes.between(read, first, end) for read in (x, x32)):
        return False
    if op_of(last) == "to":  # cast, then times the weight
        product = only_user(last)
        if product is None or not multiplies(product, last) or not _is_weight(other_operand(product, last), x):
            return False
        if not _same_dtype(last, x):
            return False  # it is rounded to fewer bits
        return _put_norm(product, (x, other_operand(product, last)), eps, "llama", writes)
    if multiplies(last, scaled) and _is_weight(skip_widening(other_operand(last, scaled)), x):
        weight = skip_widening(other_operand(last, scaled))
        cast = only_user(last)
        if cast is not None and op_of(cast) == "to" and _same_dtype(cast, x):
            return _put_norm(cast, (x, weight), eps, "torch", writes)
        return _put_norm(last, (x, weight), eps, "torch", writes)
    return False


def _match_mean_square(node: Any) -> tuple[fx.Node, float, fx.Node] | None:
    """`mean(x ** 2, -1, keepdim=True) + eps` -> (x, eps, the square)."""
    if op_of(node) not in ("add", "add_") or arguments(node).keys() != {"input", "other"}:
        return None
    mean, eps = node.args
    if isinstance(mean, (int, float)):
        mean, eps = eps, mean
    if op_of(mean) != "mean" or not isinstance(eps, (int, float)):
        return None
    dim, keepdim = argument(mean, "dim"), argument(mean, "keepdim", False)
    if dim not in (-1, [-1], (-1,)) or not keepdim or argument(mean, "dtype") is not None:
        return None
    square = mean.args[0]
    is_power = op_of(square) == "pow" and argument(square, "exponent") == 2
    is_product = op_of(square) == "mul" and square.args[0] is square.args[1]
    return (square.args[0], float(eps), square) if is_power or is_product else None


def _is_weight(node: Any, x: fx.Node) -> bool:
    value, x_value = value_of(node), value_of(x)
    return runs_in_kernels(node) and value.dim() == 1 and value.shape[0] == x_value.shape[-1]


def _same_dtype(node: fx.Node, x: fx.Node) -> bool:
    ours, theirs = value_of(node), value_of(x)
    return ours is not None and theirs is not None and ours.dtype == theirs.dtype


def _put_norm(last: fx.Node, operands: tuple[fx.Node, fx.Node], eps: float, rounding: str, writes: Writes) -> bool:
    if not _same_dtype(last, operands[0]) or writes.spoils(last, *operands):  # another dtype: under autocast
        return False
    put_call(last, rms_norm, (*operands, eps, rounding))
    return True
