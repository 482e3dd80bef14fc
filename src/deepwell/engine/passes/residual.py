"""Join the residual addition with the norm that reads its sum: `h = h + y; n = norm(h)` becomes one op.

The norm kernels add on the way in and, in the backward, add the gradient that reaches h past the norm. Apart, each
addition is a kernel of its own that reads two tensors and writes a third, since Inductor fuses nothing into ours.
"""

import operator
from typing import Any

import torch
from torch import fx

from deepwell.engine.passes.edit import replace, runs_in_kernels, width_of
from deepwell.engine.passes.fuse_quantize import VIEWS
from deepwell.engine.passes.recompute import backward_nodes, is_checkpointed
from deepwell.graph.fx import AUTOCAST, GRAD_MODE, PURE, SHAPE_OPS, Writes, arguments, op_of, value_of, written_by
from deepwell.kernels.norm.autograd import add_layer_norm, add_rms_norm, layer_norm, rms_norm

_JOINED = {rms_norm: add_rms_norm, layer_norm: add_layer_norm}


def rewrite_residual_norm(graph: fx.Graph) -> int:
    """Join norms with the sum before them, after the passes that made the norms. Returns how many."""
    count = 0
    order = {node: place for place, node in enumerate(graph.nodes)}
    writes = Writes(graph)
    borders = [place for node, place in order.items() if node.target in AUTOCAST]
    for norm in list(graph.nodes):
        if norm.target not in _JOINED:
            continue
        total, views = _behind_views(norm.args[0])
        if not _is_sum_of_two(total) or writes.between(total, total, norm):
            continue
        if total.meta.get(GRAD_MODE) != norm.meta.get(GRAD_MODE):
            continue  # the norm would move to where it learns nothing, or to where it does
        parameters = norm.args[1:]
        late = _computed_after(total, [p for p in parameters if isinstance(p, fx.Node)], order)
        if late is None or any(writes.between(node, total, norm) for node in _read_by(late, parameters)):
            continue
        if late and any(order[total] < place < order[norm] for place in borders):
            continue  # they would be computed in another dtype
        for node in late:  # Gemma's weight is 1 + w, computed beside each norm
            total.prepend(node)
            del order[node]  # early enough for every other sum, too
        _join(graph, total, views, norm)
        count += 1
    return count


def _behind_views(node: Any) -> tuple[Any, list[fx.Node]]:
    """The tensor whose rows a norm normalises, and the views of it on the way there, the last one first."""
    views = []
    while op_of(node) in SHAPE_OPS and width_of(node) is not None and width_of(node) == width_of(node.args[0]):
        views.append(node)
        node = node.args[0]
    return node, views


def _is_sum_of_two(node: Any) -> bool:
    """Whether a node adds two tensors of one shape and dtype that the kernels take, and leaves both as they were."""
    if op_of(node) != "add" or arguments(node).keys() != {"input", "other"}:
        return False
    left, right = map(value_of, node.args)
    if left is None or right is None or not runs_in_kernels(*node.args, node):
        return False
    return bool(left.shape == right.shape) and left.device == right.device


def _computed_after(total: fx.Node, parameters: list[fx.Node], order: dict[fx.Node, int]) -> list[fx.Node] | None:
    """The nodes behind the norm's parameters that come after the sum, in order; None where they cannot come earlier."""
    found: set[fx.Node] = set()
    stack = [node for node in parameters if order.get(node, -1) > order[total]]
    while stack:
        node = stack.pop()
        # Only what is known to be free of effects may move; the sum itself and what follows from it cannot.
        if node is total or op_of(node) not in PURE or written_by(node):
            return None
        if node in found:
            continue
        found.add(node)
        stack += [parent for parent in node.all_input_nodes if order.get(parent, -1) >= order[total]]
    return sorted(found, key=order.__getitem__)


def _read_by(late: list[fx.Node], parameters: tuple[Any, ...]) -> set[fx.Node]:
    """What is read earlier than it was where these nodes and the norm move up to the sum."""
    return {parent for node in late for parent in node.all_input_nodes} | {
        p for p in parameters if isinstance(p, fx.Node)
    }


def _join(graph: fx.Graph, total: fx.Node, views: list[fx.Node], norm: fx.Node) -> None:
    with graph.inserting_before(total):
        both = graph.call_function(_JOINED[norm.target], (total.args[1], total.args[0], *norm.args[1:]))
        new_total = graph.call_function(operator.getitem, (both, 0))
        normed = graph.call_function(operator.getitem, (both, 1))
    with graph.inserting_before(norm):
        for view in reversed(views):
            normed = graph.create_node(view.op, view.target, (normed, *view.args[1:]), view.kwargs)
            normed.meta["example_value"] = value_of(view)
    replace(norm, normed)
    replace(total, new_total)


def norm_again_from_sums(graph: fx.Graph) -> int:
    """In a joint graph, let the backward read its FP8 copies from a norm of the sum, which is kept in any case.

    For `recompute`: recomputed from the two summands, each sum would need the one before it. Returns how many.
    """
    ops = torch.ops.deepwell
    plain = {ops.add_rms_norm.default: ops.rms_norm.default, ops.add_layer_norm.default: ops.layer_norm.default}
    backward = backward_nodes(graph)
    count = 0
    for node in list(graph.nodes):
        if node.target not in plain or node in backward or is_checkpointed(node):
            continue
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if 0 not in items or 1 not in items:
            continue
        total, value = items[1], node.meta["val"]
        node.append(total)
        with graph.inserting_after(total):
            again = graph.call_function(plain[node.target], (total, *node.args[2:]))
        again.meta["val"] = (value[0], *value[2:])
        with graph.inserting_after(again):
            y = graph.call_function(operator.getitem, (again, 0))
        y.meta["val"] = value[0]
        count += _read_again(graph, items[0], y, backward)
        if not y.users:
            graph.erase_node(y)
            graph.erase_node(again)
    return count


def _read_again(graph: fx.Graph, old: fx.Node, new: fx.Node, backward: set[Any]) -> int:
    """Let the backward's readers of `old`, and of its views and quantizations, read `new` and theirs."""
    count = 0
    for user in list(old.users):
        if user in backward:
            user.replace_input_with(old, new)
            count += 1
        elif user.target in (*VIEWS, operator.getitem, torch.ops.deepwell.quantize_rows.default):
            with graph.inserting_after(user):
                copy = graph.node_copy(user, lambda n: new if n is old else n)
            found = _read_again(graph, user, copy, backward)
            if not found:
                graph.erase_node(copy)
            count += found
    return count
