"""Roles from the graphs of a call: what really runs decides them, a capture is their preview."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from deepwell.graph.ir import IR
from deepwell.graph.lift.assemble import find_sites
from deepwell.graph.trace import Placeholder, Traced, note_modules

# Of a model that was traced only these change: the trace saw the same dataflow, perhaps without the loss.
_PROTECTED = ("head", "router")


def with_roles_of_call(ir: IR, graph_module: fx.GraphModule, tensors: Sequence[Any]) -> IR:
    """The IR with the roles that linears have in a graph of Dynamo's, itself where nothing changes.

    `tensors` are the graph's inputs. A graph may hold a part of the model; it says nothing of linears it does not hold.
    """
    model: nn.Module = ir.require_module()
    parameters = _names(model.named_parameters(remove_duplicate=False))
    buffers = _names(model.named_buffers(remove_duplicate=False))
    placeholders = []
    for node, value in zip((n for n in graph_module.graph.nodes if n.op == "placeholder"), tensors, strict=True):
        kinds = {"parameter": parameters, "buffer": buffers}
        kind = next((kind for kind, names in kinds.items() if id(value) in names), "input")
        names = kinds[kind][id(value)] if kind in kinds else (node.name,)
        placeholders.append(Placeholder(node=node.name, kind=kind, names=names))
    given = {id(value) for value in tensors}
    is_whole = all(id(p) in given for p in model.parameters() if p.dim() >= 2)
    note_modules(graph_module, model)
    traced = Traced(
        model_class=ir.name,
        graph_module=graph_module,
        tracer="call",
        specialized=True,
        training=model.training,
        placeholders=tuple(placeholders),
    )
    roles = {
        name.removesuffix(".weight"): (site.role, site.part)
        for site in find_sites(model, traced, is_whole=is_whole).of("linear")
        if site.role != "other" and (ir.source == "static" or site.role in _PROTECTED)
        for node in site.params[:1]
        for name in traced.by_node()[node.name].names
    }
    return ir.with_roles(roles)


def _names(named: Any) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    tensor: torch.Tensor
    for name, tensor in named:
        found[id(tensor)] = (*found.get(id(tensor), ()), name)
    return found
