"""Make one grouped product of experts that a model multiplies one by one (JetMoE).

    cat([linear(rows, weight[e]) for e, rows in enumerate(x.split(sizes))])

with a parameter [E, N, K] that has a scheme and rows sorted by expert is what `torch._grouped_mm` computes; the passes
on experts take it from there. The sizes are numbers of the graph, read from the GPU before it begins, so the ends of
the groups are made of them without another wait.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from deepwell.engine.passes.edit import put_with_value, replace, runs_in_kernels, scheme_of
from deepwell.graph.fx import Writes, argument, op_of, value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """The operands of all products that a `cat` joins."""

    x: fx.Node
    weight: fx.Node
    sizes: tuple[Any, ...]
    split: fx.Node


def group_loops(graph: fx.Graph, weights: Mapping[str, tuple[str, ...]], schemes: Mapping[str, str]) -> int:
    """Replace the loops whose weight has a scheme. Returns how many."""
    writes, found = Writes(graph), 0
    ends: dict[tuple[Any, ...], fx.Node] = {}  # by sizes: products of the same groups read the same ends
    for node in list(graph.nodes):
        loop = _loop_of(node)
        if loop is None or writes.between(loop.x, loop.split, node) or writes.between(loop.weight, loop.split, node):
            continue
        path, _ = scheme_of(weights.get(loop.weight.name, ()), schemes)
        if path and runs_in_kernels(loop.x, loop.weight):
            if loop.sizes not in ends:
                with graph.inserting_before(node):
                    ends[loop.sizes] = _ends(graph, loop.sizes, value_of(loop.x))
            _group(graph, node, loop, ends[loop.sizes])
            found += 1
    return found


def _group(graph: fx.Graph, joined: fx.Node, loop: _Loop, offs: fx.Node) -> None:
    inside: list[fx.Node] = list(argument(joined, "tensors"))
    with graph.inserting_before(joined):
        transposed = put_with_value(graph, torch.transpose, loop.weight, -2, -1)
        new = graph.call_function(torch._grouped_mm, (loop.x, transposed), {"offs": offs})
    replace(joined, new)
    for product in inside:
        for node in (product, *product.all_input_nodes):
            graph.erase_node(node)
    graph.erase_node(loop.split)


def _ends(graph: fx.Graph, sizes: tuple[Any, ...], x: torch.Tensor) -> fx.Node:
    """Where each expert's rows end, as a tensor beside x; sizes may be open, so that they are no constant."""
    end, ends = sizes[0], []
    for size in (0, *sizes[1:]):
        end = _sum(graph, end, size)
        scalar = graph.call_function(torch.scalar_tensor, (end,), {"dtype": torch.int32, "device": x.device})
        scalar.meta["example_value"] = x.new_empty((), dtype=torch.int32)
        ends.append(scalar)
    stacked = graph.call_function(torch.stack, (ends,))
    stacked.meta["example_value"] = x.new_empty((len(ends),), dtype=torch.int32)
    return stacked


def _sum(graph: fx.Graph, a: Any, b: Any) -> Any:
    """a + b, as a node where one of them is one."""
    if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
        return a + b
    node = graph.call_function(operator.add, (a, b))
    node.meta["example_value"] = operator.add(
        *(n.meta["example_value"] if isinstance(n, fx.Node) else n for n in (a, b))
    )
    return node


# ---- recognising a loop ----


def _loop_of(node: fx.Node) -> _Loop | None:
    """The loop whose results a node lays one below the other, None where it is none."""
    if op_of(node) != "cat":
        return None
    parts = argument(node, "tensors")
    if argument(node, "dim", 0) != 0 or not isinstance(parts, list | tuple) or len(set(parts)) != len(parts):
        return None
    operands = [_product_of(part, expert) for expert, part in enumerate(parts)]
    sources = {(pair[0], pair[1]) for pair in operands if pair is not None}
    if None in operands or len(sources) != 1:
        return None
    split, weight = sources.pop()
    x, sizes = split.args[0], argument(split, "sizes")
    is_rows = value_of(x) is not None and value_of(x).dim() == 2 and argument(split, "dim", 0) in (0, -2)
    if not is_rows or not isinstance(sizes, list | tuple) or len(sizes) != len(parts) or len(split.users) != len(parts):
        return None
    value = value_of(weight)
    is_all = value is not None and value.dim() == 3 and value.shape[0] == len(parts)
    return _Loop(x=x, weight=weight, sizes=tuple(sizes), split=split) if is_all else None


def _product_of(part: Any, expert: int) -> tuple[fx.Node, fx.Node] | None:
    """(split, weight) where a node is `linear(split[expert], weight[expert])` and the loop alone reads all of it."""
    if op_of(part) != "linear" or argument(part, "bias") is not None or len(part.users) != 1:
        return None
    rows, one = part.args[:2]
    if any(op_of(item) != "getitem" or item.args[1] != expert or len(item.users) != 1 for item in (rows, one)):
        return None
    split = rows.args[0]
    return (split, one.args[0]) if op_of(split) == "split" else None
