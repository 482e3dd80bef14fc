"""Make cheap values again in the backward instead of keeping them: FP8 copies whose sources are kept anyway.

A layer's normalised input, its SwiGLU output and their FP8 rows follow from tensors that the backward needs in any case
(the residual stream, gate and up). Made again they cost one pass at copy speed; kept, they cost 1 byte per element from
the forward to the backward. AOTAutograd's partitioner is told by the same marks that activation checkpointing uses.
"""

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy


def mark_recomputed(graph: fx.Graph) -> int:
    """Mark the forward's cheap primitives in a joint graph. Returns how many nodes."""
    ops = torch.ops.deepwell
    cheap = {ops.rms_norm.default, ops.swiglu.default, ops.quantize_rows.default}
    backward = after_tangents(graph)
    marked = 0
    for node in graph.nodes:
        owner = node.args[0] if _is_item(node) else node
        if owner.target in cheap and node not in backward:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0
            marked += 1
    return marked


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node)


def after_tangents(graph: fx.Graph) -> set[Any]:
    """Nodes of the backward: all that follows from an incoming gradient."""
    found: set[Any] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.name
        if is_tangent or any(parent in found for parent in node.all_input_nodes):
            found.add(node)
    return found
