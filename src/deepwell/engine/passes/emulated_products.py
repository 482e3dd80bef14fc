"""Emulated products on a GPU go through bf16's tensor cores, where bf16 holds the rounded operands.

    mm(round_to(x), round_to(w)^T)            emulated_mm(x, w): the same numbers, summed in another order

Runs after users' kernels had their turn, on AOTAutograd's graphs. On a CPU the products stay the formats' reference.
"""

from typing import Any

import torch
from torch import fx

from deepwell.engine.passes.choose_kernels import transposed_from
from deepwell.engine.passes.edit import replace_by_call
from deepwell.kernels.gemm.torch_ops import ops
from deepwell.kernels.quantize.round_to import FITS_BF16


def emulate_in_bf16(graph: fx.Graph) -> int:
    """Replace what fits. Returns how many products."""
    found = 0
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.mm.default or not node.meta["val"].is_cuda:
            continue
        left, right = _rounding(node.args[0]), _rounding(transposed_from(node.args[1]))
        if left is None or right is None or left[-1] != right[-1]:
            continue  # a transform cancels only where both sides have it
        (x, *lhs), (w, *rhs) = left, right
        replace_by_call(node, ops.emulated_mm.default, (x, w, *lhs, *rhs[:2]))
        found += 1
    graph.eliminate_dead_code()
    return found


def _rounding(node: Any) -> tuple[Any, str, str, bool] | None:
    """(what is rounded, format, rounding, transform) of a node that rounds to a format which bf16 can hold."""
    if not isinstance(node, fx.Node) or node.target is not ops.round_to.default:
        return None
    x, fmt, rounding, hadamard = node.args
    return (x, fmt, rounding, hadamard) if fmt in FITS_BF16 else None
