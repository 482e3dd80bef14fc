"""Put each linear's GEMMs into the formats that the policy and this machine decided; merge those that share an input.

Merging q, k, v (and gate, up) costs nothing in low precision: the weights stay the model's own parameters, only their
quantized copies lie side by side. One quantization of the input serves all, and each product of the backward is one
GEMM.
"""

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from deepwell.engine import functional
from deepwell.engine.passes.match import argument, name_of, replace, value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSite:
    """A linear of the graph that leaves bf16."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    scheme: str
    path: str


def find_linears(graph: fx.Graph, weights: Mapping[str, str], schemes: Mapping[str, str]) -> list[LinearSite]:
    """Linears whose weight is a parameter with a scheme. `weights` maps placeholder names to parameter names."""
    sites = []
    for node in graph.nodes:
        if name_of(node) != "linear":
            continue
        x, weight = node.args[0], argument(node, 1, "weight")
        path = weights.get(weight.name, "").removesuffix(".weight") if isinstance(weight, fx.Node) else ""
        if path in schemes and value_of(x) is not None:
            bias = argument(node, 2, "bias")
            sites.append(LinearSite(node=node, x=x, weight=weight, bias=bias, scheme=schemes[path], path=path))
    return sites


def rewrite_linears(graph: fx.Graph, sites: list[LinearSite]) -> tuple[int, int]:
    """Replace the sites, merging those of one input and scheme. Returns (linears replaced, groups merged)."""
    groups: dict[tuple[fx.Node, str, bool], list[LinearSite]] = defaultdict(list)
    for site in sites:
        groups[site.x, site.scheme, site.bias is None].append(site)
    merged = 0
    for (_, _, mergeable), group in groups.items():
        if mergeable and len(group) > 1:
            _merge(graph, group)
            merged += 1
            continue
        for site in group:
            with graph.inserting_before(site.node):
                new = graph.call_function(
                    functional.low_precision_linear, (site.x, [site.weight], site.bias, site.scheme)
                )
            replace(site.node, new)
    return len(sites), merged


def _merge(graph: fx.Graph, group: list[LinearSite]) -> None:
    widths = tuple(int(value_of(site.weight).shape[0]) for site in group)
    # All read one input and parameters only, so the first one's place is early enough for every user.
    with graph.inserting_before(group[0].node):
        packed = graph.call_function(
            functional.low_precision_linear, (group[0].x, [site.weight for site in group], None, group[0].scheme)
        )
        split = graph.call_function(functional.split_columns, (packed, widths))
        parts = [graph.call_function(operator.getitem, (split, i)) for i in range(len(group))]
    for site, part in zip(group, parts, strict=True):
        replace(site.node, part)
