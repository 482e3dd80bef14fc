"""Find embeddings that learn and give them a gradient that is added up in a fixed order.

F.embedding(index, w, padding_idx, ...)      torch.embedding(w, index, padding_idx, ...)      nn.Embedding

The forward stays a gather. A frozen weight has no gradient, one with `max_norm`, `scale_grad_by_freq` or `sparse`
another: these are left as they are.
"""

from typing import Any

import torch
from torch import fx

from deepwell.engine.passes.edit import put_call, runs_in_kernels
from deepwell.graph.fx import arguments, op_of, value_of
from deepwell.kernels.head.autograd import embedding
from deepwell.kernels.head.embedding import NO_PADDING

_INDICES = (torch.int32, torch.int64)


def rewrite_embedding(graph: fx.Graph) -> int:
    """Replace every lookup in a weight that learns. Returns how many."""
    count = 0
    for node in list(graph.nodes):
        found = _lookup(node)
        if found is not None:
            put_call(node, embedding, found)
            count += 1
    return count


def _lookup(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """(index, weight, padding_idx) of a lookup whose gradient is the sum of rows, None for any other node."""
    if op_of(node) != "embedding":
        return None
    given = arguments(node)
    index, weight, padding_idx = given["input"], given["weight"], given.get("padding_idx")
    is_plain = given.get("max_norm") is None and not given.get("scale_grad_by_freq") and not given.get("sparse")
    if not is_plain or not _learns(weight) or value_of(index) is None or value_of(index).dtype not in _INDICES:
        return None
    if isinstance(padding_idx, fx.Node):
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += int(value_of(weight).shape[0])
    return index, weight, NO_PADDING if padding_idx is None else max(padding_idx, NO_PADDING)


def _learns(weight: Any) -> bool:
    return runs_in_kernels(weight) and value_of(weight).dim() == 2 and value_of(weight).requires_grad
