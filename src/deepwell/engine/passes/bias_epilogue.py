"""Add a linear's bias in the epilogue of its FP8 product.

    fp8_gemm(a, scale_a, b, scale_b) + bias      fp8_gemm_bias(a, scale_a, b, scale_b, bias)

Works on AOTAutograd's graphs, after kernels were chosen: a product that another kernel than cuBLASLt computes keeps its
bias apart, and so does one that an activation follows, whose kernel has taken the bias. Saves a pass over the product,
four bytes an element, and one rounding. What torch takes is a bf16 bias of a bf16 product, with scales of any kind
(ScaledBlas.cpp: cuBLASLt's epilogue on Hopper, CUTLASS's elsewhere).
"""

from typing import Any

import torch
from torch import fx

from deepwell.engine.passes.edit import replace_by_call
from deepwell.kernels.gemm.torch_ops import ops

_ADDITIONS = (torch.ops.aten.add.Tensor,)


def fuse_bias(graph: fx.Graph) -> int:
    """Replace products whose only reader adds a bias. Returns how many."""
    count = 0
    for node in list(graph.nodes):
        if node.target not in _ADDITIONS or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
            continue
        product, bias = node.args
        if not _is_product(product, ops.fp8_gemm.default):
            product, bias = bias, product
        if not _is_product(product, ops.fp8_gemm.default) or len(product.users) != 1 or not _is_bias(bias, product):
            continue
        *operands, fast = product.args
        replace_by_call(node, ops.fp8_gemm_bias.default, (*operands, bias, fast))
        graph.erase_node(product)
        count += 1
    return count


def _is_product(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _is_bias(bias: Any, product: fx.Node) -> bool:
    """Whether it is a bf16 row of the product's width."""
    value, of_product = (n.meta.get("val") if isinstance(n, fx.Node) else None for n in (bias, product))
    if not isinstance(value, torch.Tensor) or not isinstance(of_product, torch.Tensor):
        return False
    return (
        value.dtype is torch.bfloat16
        and of_product.dtype is torch.bfloat16
        and value.dim() == 1
        and value.shape[0] == of_product.shape[1]
    )
