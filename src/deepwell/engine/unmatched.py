"""Which weights with a format a graph does not multiply in it, and why. Changes nothing: the report shows it.

A linear stays as the model has it where no kernel takes its dtypes (float64; an input that autocast made bf16 beside a
weight in fp32), and where its weight is read by another op than a linear: attention that is one op, a weight norm.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deepwell.engine.binding import LeftAlone
from deepwell.graph.fx import AUTOCAST, SHAPE_OPS, linear_parts, op_of, transposed, value_of
from deepwell.graph.parameters import dtype_name

# Ops that multiply by the weights of several linears at once.
_FUSED = ("multi_head_attention", "transformer_encoder")


def find_left_alone(
    graph: fx.Graph, weights: Mapping[str, tuple[str, ...]], schemes: Mapping[str, str]
) -> dict[str, LeftAlone]:
    """By path, why the linear of a weight with a scheme was left; to be asked when all products were rewritten."""
    found: dict[str, LeftAlone] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        paths = [path for name in weights.get(node.name, ()) if (path := name.removesuffix(".weight")) in schemes]
        # A nested graph that reads it speaks for itself.
        readers = [reader for reader in _readers(node) if not isinstance(reader.target, torch._ops.HigherOrderOperator)]
        if not paths or not readers:
            continue
        products = [reader for reader in readers if linear_parts(reader) is not None]
        found |= dict.fromkeys(paths, _why((products or readers)[0], node))
    return found


def has_autocast(graph: fx.Graph) -> bool:
    """Whether torch.autocast is on around the graph that is being compiled, or inside of it."""
    around = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    entered = [node for node in graph.nodes if node.target is AUTOCAST[0]]
    return around or any(node.args[2] is not False for node in entered)  # (device, dtype, enabled, cache)


def _readers(weight: fx.Node) -> list[fx.Node]:
    """The ops that compute with a weight, behind casts, views and transposes of it."""
    found = []
    for user in weight.users:
        only_describes = op_of(user) in {"to", *SHAPE_OPS} or transposed(user) is not None
        found += _readers(user) if only_describes else [user]
    return found


def _why(reader: fx.Node, weight: fx.Node) -> LeftAlone:
    parts, result = linear_parts(reader), _dtype_of(reader)
    if parts is None:
        op = reader.target if isinstance(reader.target, str) else getattr(reader.target, "__name__", str(reader.target))
        is_fused = any(word in op for word in _FUSED)
        return LeftAlone(dtype=result, reason=f"its weight is read by {op}, which is no linear", is_product=is_fused)
    x, w = _dtype_of(parts[0]), _dtype_of(weight)
    reason = f"its input is in {x} and its weight in {w}" if x != w else f"no kernel takes a linear like this in {w}"
    return LeftAlone(dtype=result, reason=reason if x else _why_no_dtype(parts[0]), is_product=True)


def _why_no_dtype(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        return f"its input is a {type(value).__name__}, which no kernel takes"
    return "torch.vmap or torch.func is around it, through which no kernel goes"


def _dtype_of(node: object) -> str:
    """The dtype of a node, or of the first tensor of those that it returns; "" where nobody knows."""
    values = [value_of(node), *(value_of(user) for user in (node.users if isinstance(node, fx.Node) else ()))]
    return next((dtype_name(value.dtype) for value in values if value is not None), "")
