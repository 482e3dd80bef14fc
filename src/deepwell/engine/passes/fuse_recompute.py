"""Make the FP8 rows of an MLP's hidden values again inside the pass that computes their gradient.

The backward reads gate and up to turn dh into their gradients; h = act(gate) * up follows from the same two numbers. So
where the backward makes h's rows again (passes/recompute.py) they cost their own bytes and no second read:

    swiglu_quantize(gate_up), swiglu_backward_quantize(dh, gate_up)  ->  swiglu_backward_recompute(dh, gate_up)

The wgrad that reads h's rows then waits for dh, which is ready one GEMM later. Where dh itself waits for h's rows they
stay apart: a layer that is computed again as a whole makes its output from them, and the gradient may need that.
"""

import operator

import torch
from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort

from deepwell.engine.passes.fuse_quantize import call_with_value, items_of, through_views


def fuse_recomputed_rows(graph: fx.Graph) -> int:
    """Join the pairs of a backward graph. Returns how many."""
    ops = torch.ops.deepwell
    forwards = {_key(*node.args): node for node in graph.nodes if node.target is ops.swiglu_quantize.default}
    count = 0
    for node in list(graph.nodes):
        if node.target is not ops.swiglu_backward_quantize.default:
            continue
        dh, *forward = node.args[:4]  # a factor of dh's rows comes last
        again = forwards.pop(_key(*forward), None)
        if again is None or _follows_from(dh, again):
            continue
        with graph.inserting_before(node):
            joined = call_with_value(graph, ops.swiglu_backward_recompute.default, node.args)
            items = items_of(graph, joined)
        _replace_items(node, items[:2])
        _replace_items(again, items[2:])
        count += 1
    if count:
        stable_topological_sort(graph)
        graph.eliminate_dead_code()
    return count


def _key(gate_up: fx.Node, act: str, factor: fx.Node | None = None) -> tuple[object, ...]:
    return through_views(gate_up), act, factor


def _follows_from(node: fx.Node, other: fx.Node) -> bool:
    """Whether a value is computed from what another node gives."""
    seen, stack = set(), [node]
    while stack:
        one = stack.pop()
        if one is other:
            return True
        if one not in seen:
            seen.add(one)
            stack += one.all_input_nodes
    return False


def _replace_items(node: fx.Node, items: list[fx.Node]) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem, "codes and scales are a pair"
        user.replace_all_uses_with(items[user.args[1]])
