"""Graphs that a node of another graph runs as a whole: activation checkpointing, regions that are compiled once.

Several nodes may run one graph, each with the parameters of its own layer (`torch.compiler.nested_compile_region`).
Those whose layers have other formats get a copy of it first.
"""

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

# The node behind each input of a nested graph, by the input's name.
Operands = dict[str, fx.Node]


def nested(graph_module: fx.GraphModule) -> list[tuple[fx.GraphModule, list[Operands]]]:
    """Each nested graph once, with the operands of each node that runs it."""
    found: dict[int, tuple[fx.GraphModule, list[Operands]]] = {}
    for _, body, operands in _calls(graph_module):
        found.setdefault(id(body), (body, []))[1].append(operands)
    return list(found.values())


def separate(graph_module: fx.GraphModule, kind_of: Callable[[fx.Node], Hashable]) -> None:
    """Copy nested graphs for nodes that run them with operands of other kinds; one copy for each combination."""
    taken: dict[tuple[int, Hashable], str] = {}
    first: dict[int, Hashable] = {}
    for node, body, operands in list(_calls(graph_module)):
        kinds = tuple((inner, kind_of(operand)) for inner, operand in operands.items())
        if first.setdefault(id(body), kinds) == kinds:
            continue
        read: Any = node.args[0]
        if (id(body), kinds) not in taken:
            taken[id(body), kinds] = name = _free_name(graph_module, str(read.target))
            graph_module.add_submodule(name, _copy_of(body))
        name = taken[id(body), kinds]
        with graph_module.graph.inserting_before(node):
            own = graph_module.graph.get_attr(name)
        # What is compiled of a region is kept by its name.
        rest = (name, *node.args[2:]) if isinstance(node.args[1], str) else node.args[1:]
        own.meta, node.args = dict(read.meta), (own, *rest)
        if not read.users:
            graph_module.graph.erase_node(read)


def in_common(calls: list[Operands]) -> Mapping[str, fx.Node]:
    """The operands that are the same node wherever a nested graph is run."""
    return {name: node for name, node in calls[0].items() if all(call.get(name) is node for call in calls)}


def _calls(graph_module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule, Operands]]:
    for node in graph_module.graph.nodes:
        if not isinstance(node.target, torch._ops.HigherOrderOperator) or not node.args:
            continue
        first, *operands = node.args
        body = getattr(graph_module, str(first.target), None) if isinstance(first, fx.Node) else None
        if not isinstance(body, fx.GraphModule):
            continue
        if operands and isinstance(operands[0], str):  # a region's name
            operands = operands[1:]
        inputs = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        pairs = zip(inputs, operands, strict=False)
        yield node, body, {inner.name: operand for inner, operand in pairs if isinstance(operand, fx.Node)}


def _free_name(graph_module: fx.GraphModule, name: str) -> str:
    number = 1
    while hasattr(graph_module, f"{name}_{number}_deepwell"):
        number += 1
    return f"{name}_{number}_deepwell"


def _copy_of(body: fx.GraphModule) -> fx.GraphModule:
    """A copy that can be rewritten by itself, its own nested graphs included; tensors are shared."""
    new = fx.GraphModule(body, copy.deepcopy(body.graph))
    new.meta = dict(body.meta)
    for name, child in body.named_children():
        if isinstance(child, fx.GraphModule):
            new.add_submodule(name, _copy_of(child))
    return new
