"""Fuse row quantization into the op that makes its input, and quantize a tensor once for all its readers.

Works on AOTAutograd's forward or backward graph, where producers and quantizations are separate primitives:

    rms_norm -> quantize_rows                 rms_norm_quantize             layer_norm and add_* alike
    swiglu -> quantize_rows                   swiglu_quantize               activation alike
    swiglu_backward -> quantize_rows          swiglu_backward_quantize      activation_backward alike
    rope_qkv_backward -> quantize_rows        rope_qkv_backward_rows        qk_norm_rope_backward alike
    rms_norm_backward -> quantize_rows        rms_norm_backward_quantize    layer_norm_backward alike

A fusion happens where nobody else reads the high-precision value; else the two stay apart and share one quantization,
but for the `_beside` ops, which write both then: a bias of q, k, v reads the gradient of rope_qkv in high precision,
and the gradient of a norm's input goes down the residual stream as well as into the linear before it.
"""

import operator
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.utils import _pytree as pytree

import deepwell.kernels.activation.torch_ops
import deepwell.kernels.norm.torch_ops
import deepwell.kernels.rope.torch_ops  # noqa: F401 (all three register their ops)
from deepwell.kernels.quantize.torch_ops import ops

# Ops whose first result may be written as FP8 rows instead, and those that may write them beside it.
_BESIDE = ("rope_qkv_backward", "rms_norm_backward", "layer_norm_backward", "qk_norm_rope_backward")
_QUANTIZED = (
    *("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", *_BESIDE[1:]),
    *("swiglu", "swiglu_backward", "activation", "activation_backward", "bias_activation", "bias_activation_backward"),
)
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def fuse_quantize(graph: fx.Graph) -> int:
    """Fuse and share. Returns how many quantizations disappeared into their producer."""
    alone = {getattr(ops, name).default: getattr(ops, f"{name}_quantize").default for name in _QUANTIZED}
    alone[ops.rope_qkv_backward.default] = ops.rope_qkv_backward_rows.default
    beside = {getattr(ops, name).default: getattr(ops, f"{name}_beside").default for name in _BESIDE}
    _share(graph, ops.quantize_rows.default)
    count = 0
    for node in list(graph.nodes):
        if node.target is not ops.quantize_rows.default:
            continue
        producer, index = _producer(node.args[0])
        if producer.target in alone and index == 0:
            count += _fuse(graph, node, producer, alone[producer.target], beside.get(producer.target))
    graph.eliminate_dead_code()
    return count


def _share(graph: fx.Graph, target: object) -> None:
    first: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not target:
            continue
        key = (through_views(node.args[0]), node.args[1:])
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        else:
            first[key] = node


def through_views(node: Any) -> Any:
    """The tensor behind views that keep the rows: [T, D] -> [B, S, D] -> [T, D]."""
    while is_row_view(node):
        node = node.args[0]
    return node


def is_row_view(node: Any) -> bool:
    """Whether a node shows another tensor with rows of the same length."""
    return node.target in VIEWS and _width(node) == _width(node.args[0])


def _width(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.shape[-1] if isinstance(value, torch.Tensor) and value.dim() else None


def _producer(node: fx.Node) -> tuple[fx.Node, int]:
    source = through_views(node)
    if source.target is operator.getitem:
        return source.args[0], source.args[1]
    return source, 0


def _read_only_by(node: fx.Node, quantize: fx.Node) -> bool:
    """Whether every path from a value leads, through views, to this quantization."""
    return all(user is quantize or (is_row_view(user) and _read_only_by(user, quantize)) for user in node.users)


def _fuse(graph: fx.Graph, quantize: fx.Node, producer: fx.Node, alone: Any, beside: Any) -> bool:
    """Let a fused op take the place of a producer and of the quantization of its first result.

    `alone` gives FP8 values and scales instead of that result, `beside`, if there is one, behind it: for other readers.
    """
    outputs: dict[Any, fx.Node] = {0: producer}
    if not isinstance(producer.meta["val"], torch.Tensor):
        outputs = {user.args[1]: user for user in producer.users if user.target is operator.getitem}
        if len(outputs) != len(producer.users) or 0 not in outputs:
            return False
    is_alone = _read_only_by(outputs[0], quantize)
    if not is_alone and beside is None:
        return False
    with graph.inserting_before(producer):
        parts = items_of(graph, call_with_value(graph, alone if is_alone else beside, producer.args))
    if not is_alone:
        outputs[0].replace_all_uses_with(parts.pop(0))
    _replace_items(quantize, parts[:2])
    for index, output in outputs.items():
        if index:
            output.replace_all_uses_with(parts[index + 1])
    return True


def call_with_value(graph: fx.Graph, op: Any, args: tuple[Any, ...]) -> fx.Node:
    """A call with the fake value that later compilation asks for."""
    node = graph.call_function(op, args)
    values = fx.node.map_arg(args, lambda n: n.meta["val"])
    with detect_fake_mode(pytree.tree_leaves(values)) or nullcontext():
        node.meta["val"] = op(*values)
    return node


def items_of(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    items = []
    for index, value in enumerate(node.meta["val"]):
        item = graph.call_function(operator.getitem, (node, index))
        item.meta["val"] = value
        items.append(item)
    return items


def fuse_recomputed_rows(graph: fx.Graph) -> int:
    """Recompute the FP8 rows of an MLP's hidden values inside the op that computes their gradient. Returns how many.

    The backward reads gate and up to compute their gradients from dh; h = act(gate) * up follows from the same two
    numbers. So where the backward recomputes h's rows (passes/recompute.py) they cost their own bytes, no second read:

        swiglu_quantize(gate_up), swiglu_backward_quantize(dh, gate_up)  ->  swiglu_backward_recompute(dh, gate_up)

    The wgrad that reads h's rows then waits for dh, which is ready one GEMM later. Where dh itself waits for h's rows
    they stay apart: a layer that is recomputed as a whole makes its output from them, and the gradient may need that.
    """
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
    """Let the readers of a quantization read FP8 values and scales that another op gives."""
    for user in list(node.users):
        assert user.target is operator.getitem, "FP8 values and scales are a pair"
        user.replace_all_uses_with(items[user.args[1]])
