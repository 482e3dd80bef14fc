"""`torch.compile(model, backend="deepwell", options={"precision": "mxfp8"})`: the engine's passes without an IR.

A backend sees one graph and no model, so the linears are read from the graph: a head by the embedding or the loss it
belongs to, a router by the top-k behind it, the rest by the names of their modules. From there on it is the same: a
policy, its resolution, this device's bindings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from deepwell.engine.backend import BackendOptions, compile_graph, parameter_names
from deepwell.engine.binding import bind
from deepwell.engine.compile import check_fallback, device_of, measured_fallback, registry_for, use_inductor
from deepwell.engine.passes.linear import linear_parts
from deepwell.engine.passes.match import CAST_OPS, SHAPE_OPS, argument, give_operands_by_position, name_of, value_of
from deepwell.errors import ConfigError
from deepwell.graph.ir import IR, Block, Layer
from deepwell.graph.ops import Linear
from deepwell.precision.policy import PrecisionPolicy

OPTIONS = (
    "precision",
    "precision_policy",
    "fallback",
    "inductor",
    "fuse_head",
    "use_cutlass",
    "kernel_registry",
    "measure",
)
# Ops between a router's product and its top-k: a cast, a score function, a bias, a view.
_ROUTER_REACH = 6


def deepwell(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's. `options` are those of `dw.compile`: precision, precision_policy, fallback ..."""
    chosen = dict(options or {})
    unknown = sorted(set(chosen) - set(OPTIONS))
    if unknown:
        raise ConfigError(f"options has {unknown[0]!r}; backend='deepwell' takes {', '.join(OPTIONS)}")
    policy = chosen.get("precision_policy") or PrecisionPolicy.recipe(chosen.get("precision", "mxfp8"))
    fallback = check_fallback(chosen.get("fallback", "safe"))
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    device = device_of(tensors)
    names = parameter_names(graph_module.graph, example_inputs)
    ir = ir_of_graph(graph_module.graph, names)
    bound = bind(ir, policy.copy().freeze().resolve(ir), device, fallback=fallback)
    registry, _ = registry_for(chosen.get("kernel_registry"), chosen.get("use_cutlass", False), device)
    backend_options = BackendOptions(
        schemes=bound.schemes,
        registry=registry,
        measure=measured_fallback(chosen.get("measure"), fallback, device),
        use_inductor=use_inductor(chosen.get("inductor"), device),
        fuse_head=chosen.get("fuse_head", True),
    )
    return compile_graph(graph_module, example_inputs, backend_options)


def ir_of_graph(graph: fx.Graph, names: Mapping[str, tuple[str, ...]]) -> IR:
    """The linears of a graph as an IR: enough for a policy to decide, without edges and costs."""
    give_operands_by_position(graph)
    vocabularies = {
        int(value_of(weight).shape[0])
        for node in graph.nodes
        if name_of(node) == "embedding" and value_of(weight := argument(node, 1, "weight")) is not None
    }
    found: dict[str, tuple[str, Linear]] = {}
    for node in graph.nodes:
        parts = linear_parts(node)
        weight = parts[1] if parts else None
        if parts is None or not isinstance(weight, fx.Node) or weight.name not in names:
            continue
        value = value_of(weight)
        if value is None or value.dim() != 2:
            continue
        path = names[weight.name][0].removesuffix(".weight")
        n, k = (int(size) for size in (value.T.shape if parts[3] else value.shape))
        layer, op = _layer_of(path)
        role = _role(node, path, n, vocabularies)
        found[path] = (layer, Linear(name=op, role=role, k=k, n=n, bias=parts[2] is not None))
    layers: dict[str, list[Linear]] = {}
    for layer, linear in found.values():
        layers.setdefault(layer, []).append(linear)
    outside = tuple(layers.pop("", ()))
    blocks = tuple(Block(ops=tuple(ops)) for ops in layers.values())
    places = tuple(Layer(path=path, block=index) for index, path in enumerate(layers))
    return IR(name="graph", dtype="bf16", stem=(), blocks=blocks, layers=places, tail=outside)


def _layer_of(path: str) -> tuple[str, str]:
    """(path of the numbered layer, path inside it); ("", path) outside of any."""
    match = re.match(r"((?:.*?\.)?\d+)\.(.+)", path)
    return (match[1], match[2]) if match else ("", path)


def _role(node: fx.Node, path: str, n: int, vocabularies: set[int]) -> str:
    if n in vocabularies or _feeds_a_loss(node):
        return "head"
    if _reaches_topk(node, _ROUTER_REACH):
        return "router"
    if re.search(r"attn|attention", path):
        return "attention"
    return "mlp" if re.search(r"mlp|ffn|feed_?forward", path) else "other"


def _feeds_a_loss(node: fx.Node) -> bool:
    return any(
        name_of(user) == "cross_entropy" or (name_of(user) in CAST_OPS | SHAPE_OPS and _feeds_a_loss(user))
        for user in node.users
    )


def _reaches_topk(node: fx.Node, steps: int) -> bool:
    """Whether a few ops that mix no other products lead to a top-k."""
    if steps == 0:
        return False
    for user in node.users:
        target = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
        if target == "topk":
            return True
        is_pointwise = linear_parts(user) is None and name_of(user) != "attention"
        if is_pointwise and value_of(user) is not None and _reaches_topk(user, steps - 1):
            return True
    return False


__all__ = ["OPTIONS", "deepwell", "ir_of_graph"]
