"""Run causal attention with values narrower than keys (latent attention) by the fastest kernel on this GPU."""

import torch
from torch import fx

from deepwell.engine.passes.choose_kernels import size_of
from deepwell.engine.passes.edit import put_call
from deepwell.graph.fx import argument, op_of, value_of
from deepwell.kernels.attention.narrow_values import SDPA, NarrowShape, fastest_way, narrow_values_attention
from deepwell.kernels.attention.proof import is_timed


def rewrite_narrow_values(graph: fx.Graph) -> int:
    """Replace SDPA where another kernel was measured to be faster. Returns how often.

    Where algorithms have to be deterministic, torch chooses among its own.
    """
    count = 0
    if torch.are_deterministic_algorithms_enabled():
        return count
    for node in list(graph.nodes):
        shape = _shape(node) if op_of(node) == "scaled_dot_product_attention" else None
        if shape is None:
            continue
        query = value_of(node.args[0])
        way = fastest_way(shape, query.dtype, str(query.device))
        if way == SDPA:
            continue
        scale = argument(node, "scale")
        scale = shape.D**-0.5 if scale is None else scale
        put_call(node, narrow_values_attention, (*node.args[:3], scale, way))
        count += 1
    return count


def _shape(node: fx.Node) -> NarrowShape | None:
    """The sizes of plain causal attention on a GPU whose values are narrower than its keys; None for anything else."""
    query, key, value = operands = [value_of(arg) for arg in node.args[:3]]
    is_plain = argument(node, "is_causal", False) is True and argument(node, "attn_mask") is None
    if not is_plain or argument(node, "dropout_p", 0.0) or any(t is None or t.dim() != 4 for t in operands):
        return None
    if not is_timed(*operands) or not isinstance(argument(node, "scale"), (int, float, type(None))):
        return None
    batch, heads, size, width = (size_of(each) for each in query.shape)
    groups, of_values = size_of(key.shape[1]), size_of(value.shape[-1])
    is_grouped = groups > 0 and heads % groups == 0 and (heads == groups or argument(node, "enable_gqa", False))
    if not is_grouped or 0 in (batch, size, of_values):
        return None
    if tuple(key.shape) != (query.shape[0], key.shape[1], query.shape[2], query.shape[3]):
        return None  # broadcast, other lengths
    if tuple(value.shape[:3]) != tuple(key.shape[:3]) or of_values >= width:
        return None
    return NarrowShape(B=batch, H=heads, G=groups, S=size, D=width, V=of_values)
