"""One flat graph: bodies of checkpointed or wrapped regions written out where they are called.

Activation checkpointing, autocast and no-grad regions arrive as calls of higher-order operators whose body is a graph
of its own. What they compute is what their bodies compute, so lifting reads a copy of the graph with the bodies in
place; the traced graph itself stays as it is.
"""

from typing import Any

from torch import fx

_REGIONS = {
    "wrap", "wrap_activation_checkpoint", "tag_activation_checkpoint", "wrap_with_set_grad_enabled",
    "wrap_with_autocast", "invoke_subgraph", "checkpoint",
}  # fmt: skip


def inlined(module: fx.GraphModule) -> fx.Graph:
    """The module's graph with every region written out; the graph itself where it has none."""
    if not any(_region(node, module) for node in module.graph.nodes):
        return module.graph
    graph = fx.Graph()
    placeholders = [graph.node_copy(node) for node in module.graph.nodes if node.op == "placeholder"]
    graph.output(_write(graph, module, placeholders))
    return graph


def _region(node: fx.Node, module: fx.GraphModule) -> fx.GraphModule | None:
    """The body that a call of a region operator runs."""
    if node.op != "call_function" or str(getattr(node.target, "__name__", node.target)) not in _REGIONS:
        return None
    return next((body for arg in node.args if (body := _body(arg, module)) is not None), None)


def _body(arg: Any, module: fx.GraphModule) -> fx.GraphModule | None:
    if not isinstance(arg, fx.Node) or arg.op != "get_attr":
        return None
    found = getattr(module, str(arg.target), None)
    return found if isinstance(found, fx.GraphModule) else None


def _write(graph: fx.Graph, module: fx.GraphModule, operands: list[Any]) -> Any:
    """Copy the nodes of `module` into `graph`, its placeholders standing for `operands`; returns its outputs."""
    values: dict[fx.Node, Any] = {}
    given = iter(operands)
    for node in module.graph.nodes:
        body = _region(node, module)
        if node.op == "placeholder":
            values[node] = next(given, None)
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], values.__getitem__)
        elif body is not None:
            at = next(i for i, arg in enumerate(node.args) if _body(arg, module) is body)
            inner = [values[a] if isinstance(a, fx.Node) else a for a in node.args[at + 1 :]]
            names = isinstance(inner[0], str) if inner else False  # invoke_subgraph names its body first
            values[node] = _write(graph, body, inner[1:] if names else inner)
        elif _picks(node, values):
            values[node] = values[node.args[0]][node.args[1]]
        elif _body(node, module) is None:
            values[node] = graph.node_copy(node, values.__getitem__)
    return None


def _picks(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Is it one of the results of a region?"""
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "getitem":
        return False
    source = node.args[0]
    return (
        isinstance(source, fx.Node) and isinstance(values.get(source), (tuple, list)) and isinstance(node.args[1], int)
    )
