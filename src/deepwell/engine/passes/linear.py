"""Put each linear's GEMMs into the formats that the policy and this machine decided; merge those that share an input.

A linear is `F.linear`, `torch.addmm` with a [K, N] weight (GPT-2's Conv1D) or a product with a parameter. Merging q, k,
v (and gate, up) costs nothing in FP8: the weights stay the model's own parameters, only their quantized copies lie side
by side; one quantization of the input serves all, and each product of the backward is one GEMM. Emulated linears are
never merged: each computes what its format says of its own operands.
"""

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from deepwell.engine.passes.edit import in_dtype_of, is_row, replace, runs_in_kernels, scheme_of
from deepwell.graph.fx import CHANGED, GRAD_MODE, Writes, linear_parts, memory_of, value_of
from deepwell.kernels.gemm.linear import low_precision_linear, split_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSite:
    """A linear of the graph that leaves bf16. `is_kn`: the weight is stored [K, N]."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    is_kn: bool
    scheme: str
    path: str


def find_linears(
    graph: fx.Graph, weights: Mapping[str, tuple[str, ...]], schemes: Mapping[str, str]
) -> list[LinearSite]:
    """Linears whose weight is a parameter with a scheme. `weights` maps placeholders to their parameters' names."""
    sites = []
    for node in list(graph.nodes):
        parts = linear_parts(node)
        if parts is None:
            continue
        product = node
        x, weight, bias, is_kn = parts
        names = weights.get(weight.name, ()) if isinstance(weight, fx.Node) else ()
        path, scheme = scheme_of(names, schemes)
        if not path or not runs_in_kernels(x, weight) or value_of(weight).dim() != 2:
            continue
        if bias is not None and not is_row(bias, value_of(weight).shape[1 if is_kn else 0]):
            product, bias = _without_bias(graph, node, bias), None
        sites.append(LinearSite(node=product, x=x, weight=weight, bias=bias, is_kn=is_kn, scheme=scheme, path=path))
    return sites


def _without_bias(graph: fx.Graph, node: fx.Node, bias: Any) -> fx.Node:
    """Add what is no row of the product's width, but broadcast to it, by itself. Returns the product."""
    x, weight, _, is_kn = linear_parts(node)  # type: ignore[misc]
    width = value_of(weight).shape[1 if is_kn else 0]
    with graph.inserting_before(node):
        product = graph.call_function(torch.matmul if is_kn else F.linear, (x, weight))
        added = graph.call_function(operator.add, (product, bias))
    product.meta |= {key: node.meta[key] for key in (CHANGED, GRAD_MODE) if key in node.meta}
    product.meta["example_value"] = value_of(node).new_empty((*value_of(x).shape[:-1], width))
    replace(node, added)
    return product


def rewrite_linears(graph: fx.Graph, sites: list[LinearSite]) -> tuple[int, int]:
    """Replace the sites, merging those of one input and scheme. Returns (linears replaced, groups merged)."""
    groups: dict[tuple[fx.Node, str, fx.Node | tuple[bool, bool]], list[LinearSite]] = defaultdict(list)
    writes = Writes(graph)
    for site in sites:
        is_written = memory_of(site.node) in writes.memory  # columns of a merged result share memory
        # What no_grad cuts off learns nothing beside what learns.
        kind = site.node if is_written else (site.bias is None, CHANGED in site.node.meta)
        groups[site.x, site.scheme, kind].append(site)
    merged = 0
    for (_, scheme, _), group in groups.items():
        are_ready = all(site.bias is None or site.bias.op == "placeholder" for site in group)
        read = [node for site in group for node in (site.x, site.weight, site.bias)]
        are_ready = are_ready and not any(writes.between(node, group[0].node, group[-1].node) for node in read)
        if len(group) > 1 and "emulate" not in scheme and "native" not in scheme and are_ready:
            _merge(graph, group)
            merged += 1
            continue
        for site in group:
            with graph.inserting_before(site.node):
                new = graph.call_function(
                    low_precision_linear, (_input_of(site), [_weight_nk(graph, site)], site.bias, site.scheme)
                )
            replace(site.node, in_dtype_of(site.node, new, site.x))
    return len(sites), merged


def _input_of(site: LinearSite) -> Any:
    """What the linear reads now: where that was another linear's output (LoRA), the one in its place."""
    parts = linear_parts(site.node)
    assert parts is not None
    return parts[0]


def _weight_nk(graph: fx.Graph, site: LinearSite) -> fx.Node:
    """The weight as [N, K], a view where the model stores [K, N]."""
    if not site.is_kn:
        return site.weight
    view = graph.call_method("t", (site.weight,))
    view.meta["example_value"] = value_of(site.weight).t()
    return view


def _merge(graph: fx.Graph, group: list[LinearSite]) -> None:
    widths = tuple(int(value_of(site.node).shape[-1]) for site in group)
    # All read one input and parameters only, so the first one's place is early enough for every user.
    with graph.inserting_before(group[0].node):
        weights = [_weight_nk(graph, site) for site in group]
        biases = [site.bias for site in group]
        bias = None if biases[0] is None else graph.call_function(torch.cat, (biases,))
        packed = graph.call_function(low_precision_linear, (_input_of(group[0]), weights, bias, group[0].scheme))
        split = graph.call_function(split_columns, (packed, widths))
        parts = [graph.call_function(operator.getitem, (split, i)) for i in range(len(group))]
    for site, part in zip(group, parts, strict=True):
        replace(site.node, in_dtype_of(site.node, part, site.x))
