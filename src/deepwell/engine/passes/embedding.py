"""Find embeddings that learn and give them a gradient that is added up in a fixed order.

F.embedding(index, w, padding_idx, ...)      torch.embedding(w, index, padding_idx, ...)      nn.Embedding

The forward stays a gather. A frozen weight has no gradient, one with `max_norm`, `scale_grad_by_freq` or `sparse`
another: these are left as they are.
"""

from typing import Any

import torch
from torch import fx

from deepwell.engine.passes.match import argument, name_of, replace, runs_in_kernels, value_of
from deepwell.kernels.head.autograd import embedding
from deepwell.kernels.head.embedding import NO_PADDING

# Spellings that name the weight first, and for which any negative `padding_idx` means none.
_WEIGHT_FIRST = (torch.embedding, torch.ops.aten.embedding.default, torch.ops.aten.embedding)
_INDICES = (torch.int32, torch.int64)


def rewrite_embedding(graph: fx.Graph) -> int:
    """Replace every lookup in a weight that learns. Returns how many."""
    count = 0
    for node in list(graph.nodes):
        found = _lookup(node)
        if found is None:
            continue
        index, weight, padding_idx = found
        with graph.inserting_before(node):
            new = graph.call_function(embedding, (index, weight, padding_idx))
        replace(node, new)
        count += 1
    return count


def _lookup(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """(index, weight, padding_idx) of a lookup whose gradient is the sum of rows, None for any other node."""
    is_function = name_of(node) == "embedding"
    if is_function:
        index, weight = argument(node, 0, "input"), argument(node, 1, "weight")
        others = argument(node, 3, "max_norm"), argument(node, 5, "scale_grad_by_freq"), argument(node, 6, "sparse")
    elif node.op == "call_function" and node.target in _WEIGHT_FIRST:
        weight, index = argument(node, 0, "weight"), argument(node, 1, "indices")
        others = None, argument(node, 3, "scale_grad_by_freq"), argument(node, 4, "sparse")
    else:
        return None
    is_plain = others[0] is None and not others[1] and not others[2]
    if not is_plain or not _learns(weight) or value_of(index) is None or value_of(index).dtype not in _INDICES:
        return None
    padding_idx = argument(node, 2, "padding_idx")
    if padding_idx is not None and padding_idx < 0 and is_function:
        padding_idx += int(value_of(weight).shape[0])
    return index, weight, NO_PADDING if padding_idx is None else max(padding_idx, NO_PADDING)


def _learns(weight: Any) -> bool:
    return runs_in_kernels(weight) and value_of(weight).dim() == 2 and value_of(weight).requires_grad
