"""A router's largest scores on a GPU, in a kernel that holds rows in registers.

    topk(x, k), largest, along the last dimension            top_k(x, k): the same values; of equal scores the first

Runs on AOTAutograd's graphs, where the gradient is a scatter already.
"""

import torch
from torch import fx

from deepwell.engine.passes.edit import KERNEL_DTYPES, replace_by_call
from deepwell.graph.fx import arguments
from deepwell.kernels.experts.top_k import takes
from deepwell.kernels.experts.torch_ops import ops

# Numbers below which torch's kernel costs no time to speak of.
_LEAST = 1 << 16


def rewrite_top_k(graph: fx.Graph) -> int:
    """Replace what fits. Returns how many."""
    found = 0
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.topk.default and _fits(node):
            replace_by_call(node, ops.top_k.default, (node.args[0], node.args[1]))
            found += 1
    return found


def _fits(node: fx.Node) -> bool:
    given = arguments(node)
    value, k = given["input"].meta["val"], given["k"]
    sizes = value.shape
    # At a fixed size, of which it is known that it is large.
    if not (sizes and all(isinstance(size, int) for size in (*sizes, k))):
        return False
    last = given.get("dim", -1) in (-1, len(sizes) - 1) and given.get("largest", True) is True
    return last and takes(sizes[-1], k) and value.is_cuda and value.dtype in KERNEL_DTYPES and value.numel() >= _LEAST
