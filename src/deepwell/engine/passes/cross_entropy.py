"""Find the head followed by its cross entropy and compute both without ever holding all logits.

Between them the logits may be cast, viewed, given a bias (BART), scaled by a number (Granite, Cohere) and bent by a
soft cap, which is `cap * tanh(logits / cap)` (Gemma 2). Where the model also returns them (Hugging Face does), the
graph returns the head's input instead, and the engine hands out logits that are computed, by the same steps, when
somebody looks at them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from deepwell.engine.deferred import HeadLoss, Step
from deepwell.engine.passes.edit import erase_unread, is_row, replace, runs_in_kernels
from deepwell.graph.fx import SHAPE_OPS, Writes, argument, is_widened, op_of, value_of
from deepwell.kernels.head.autograd import linear_cross_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredOutput:
    """Outputs `indices` of the graph are a head's input now, in the place of its logits; one more is its target."""

    indices: tuple[int, ...]
    weight_input: int  # which of the graph's inputs the weight is
    bias_input: int | None = None  # [V] or [1, V]
    loss: int  # the output that the loss becomes
    # ("mul" | "div", a number or None, which of the graph's inputs it is instead) on the way there
    factors: tuple[tuple[str, float | None, int], ...] = ()
    how: HeadLoss

    def factor(self, inputs: Sequence[Any]) -> Any:
        """What the cross entropy is multiplied by in a call with these inputs: a number or a tensor of one."""
        found: Any = 1.0
        for name, number, place in self.factors:
            value = inputs[place] if number is None else number
            found = found * value if name == "mul" else found / value
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """A linear, what is done to its logits on the way to the loss, and what that amounts to."""

    loss: fx.Node
    path: tuple[fx.Node, ...]  # from the linear to what the loss reads
    bias: fx.Node | None  # the linear's own, or a row that is added to its result
    logit_scale: float
    soft_cap: float  # 0: none

    @property
    def linear(self) -> fx.Node:
        return self.path[0]

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        return self.linear.args[0], argument(self.linear, "weight"), self.bias


def rewrite_cross_entropy(
    graph: fx.Graph, fp8_weights: Mapping[str, bool] | None = None, other_weights: Collection[str] = ()
) -> tuple[list[fx.Node], list[DeferredOutput]]:
    """Replace heads and their losses. Returns the weights of those heads, and which outputs are deferred logits.

    `fp8_weights` names the placeholders of heads with FP8 GEMMs, and whether the forward is none of them;
    `other_weights` those of heads in formats that have no fused loss: they are left to the linear pass.
    """
    fp8_weights = fp8_weights or {}
    heads: list[fx.Node] = []
    deferred: list[DeferredOutput] = []
    writes = Writes(graph)
    for loss in list(graph.nodes):
        head = _find_head(loss) if op_of(loss) == "cross_entropy" and not _unusual(loss) else None
        if head is None:
            continue
        x, weight, bias = head.operands
        returned = _returned(head)
        # The loss reads the head's operands where it stands, whoever looks at deferred logits after the call.
        last = None if returned else loss
        is_written = any(writes.between(n, head.linear, last) for n in (x, bias) if n is not None)
        if weight.name in other_weights or is_written:
            continue
        if returned is None or len(returned) > 1:
            continue
        if returned:
            way = _way_out(loss)
            if way is None or not all(p is None or p.op == "placeholder" for p in (weight, bias)):
                continue
            if not _has_own_dtype(head):
                continue
            deferred.append(_return_head_input(graph, head, returned[0], way))
        _fuse(graph, head, weight.name in fp8_weights, fp8_weights.get(weight.name, False))
        heads.append(weight)
    erase_unread(graph)
    return heads, deferred


def unfused_losses(graph: fx.Graph) -> list[str]:
    """Why the losses of heads that stay as they are do so, in words for the report."""
    losses = [node for node in graph.nodes if op_of(node) == "cross_entropy" and _find_head(node) is not None]
    return [reason for loss in losses if (reason := _unusual(loss))]


def _unusual(loss: fx.Node) -> str:
    """Why a cross entropy is computed as it stands: "" where it is the plain mean or sum over class indices."""
    target = argument(loss, "target")
    value = value_of(target) if isinstance(target, fx.Node) else None
    if argument(loss, "weight") is not None:
        return "class weights"
    if argument(loss, "size_average") is not None or argument(loss, "reduce") is not None:
        return "size_average or reduce, the old words for reduction"
    if argument(loss, "label_smoothing", 0.0):
        return "label smoothing"
    reduction = argument(loss, "reduction", "mean")
    if reduction not in ("mean", "sum"):
        return f"reduction {reduction!r}"
    if value is None or value.dtype is not torch.int64 or value.dim() != 1:
        return "targets that are no vector of class indices"
    return ""


def _find_head(loss: fx.Node) -> _Head | None:
    """The linear whose logits reach the loss as rows of a matrix, and what is done to them on the way."""
    path: list[fx.Node] = []
    node = loss.args[0]
    while isinstance(node, fx.Node):
        path.append(node)
        if op_of(node) == "linear":
            break
        is_step = _step(node) is not None or op_of(node) in SHAPE_OPS or _added_row(node) is not None
        node = _operand(node) if is_step else None
    if node is None or not path:
        return None
    path.reverse()
    amount = _amount([step for node in path[1:] if (step := _step(node)) is not None])
    operands = (path[0].args[0], argument(path[0], "weight"))
    flat = value_of(loss.args[0])
    is_matrix = flat is not None and flat.dim() == 2 and flat.shape[-1] == value_of(path[0]).shape[-1]
    own, row = argument(path[0], "bias"), _added_row(path[1]) if len(path) > 1 else None
    is_biased = own is None or is_row(own, flat.shape[-1] if is_matrix else 0)
    if amount is None or not is_matrix or not is_biased:
        return None
    bias = own if row is None else row
    if not runs_in_kernels(*operands, *([] if bias is None else [bias])):
        return None
    return _Head(loss=loss, path=tuple(path), bias=bias, logit_scale=amount[0], soft_cap=amount[1])


def _added_row(node: fx.Node) -> fx.Node | None:
    """The row [V] or [1, V] that a node adds to all results of a linear without a bias: BART's `final_logits_bias`."""
    if op_of(node) != "add" or len(node.args) != 2 or node.kwargs:
        return None
    linear, row = node.args
    if op_of(linear) != "linear" or argument(linear, "bias") is not None or set(linear.users) != {node}:
        return None
    while op_of(row) == "to" and _is_alike(row, row.args[0]):
        row = row.args[0]
    value, logits = value_of(row), value_of(linear)
    is_one = value is not None and value.shape in (logits.shape[-1:], (1, *logits.shape[-1:]))
    return row if is_one and value.dtype == logits.dtype else None


def _is_alike(one: Any, other: Any) -> bool:
    a, b = value_of(one), value_of(other)
    return a is not None and b is not None and (a.dtype, a.device) == (b.dtype, b.device)


def _operand(node: fx.Node) -> Any:
    """The tensor that a step works on: the first one of `0.5 * logits`, too."""
    return next((arg for arg in node.args if isinstance(arg, fx.Node)), None)


def _step(node: fx.Node) -> Step | None:
    """What a node does to the logits, as something that can be done again; None where it is no such step."""
    name = op_of(node)
    if name == "to" and value_of(node) is not None:
        before, dtype = value_of(node.args[0]), value_of(node).dtype
        is_exact = is_widened(node) or (before is not None and before.dtype == dtype)
        return ("to", dtype) if is_exact else None  # one that rounds is computed as it is written
    if name == "contiguous":
        return "contiguous", None
    if name == "tanh":
        return "tanh", None
    numbers = [arg for arg in node.args if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
    if name in ("mul", "div") and len(node.args) == 2 and len(numbers) == 1 and not node.kwargs:
        if name == "div" and node.args[1] is not numbers[0]:
            return None
        return name, float(numbers[0])
    return None


def _amount(steps: list[Step]) -> tuple[float, float] | None:
    """(scale, cap) of steps that amount to `cap * tanh(scale * u / cap)`, or to `scale * u` with a cap of 0."""
    factors, bends = [1.0, 1.0], 0
    for name, value in steps:
        if name == "tanh":
            bends += 1
        elif name == "mul" and bends < 2:
            factors[bends] *= value
        elif name == "div" and bends < 2 and value:
            factors[bends] /= value
        elif name not in ("to", "contiguous"):
            return None
    scale = factors[0] * factors[1]
    if bends > 1 or scale == 0 or not abs(scale) < float("inf"):
        return None
    # tanh is odd: a negative cap is a negative scale.
    return (scale, abs(factors[1])) if bends else (scale, 0.0)


def _returned(head: _Head) -> list[fx.Node] | None:
    """The nodes of the path that the graph returns; None where something but the loss and the output reads one."""
    found = []
    for node, after in zip(head.path, (*head.path[1:], head.loss), strict=True):
        others = {reader for user in node.users if user is not after for reader in _readers(user)}
        others.discard(head.loss)
        if any(reader.op != "output" for reader in others):
            return None
        if not others:
            continue
        is_shaped = any(op_of(n) in SHAPE_OPS - {"contiguous"} for n in head.path[1 : head.path.index(node) + 1])
        if is_shaped or not all(user.op == "output" for user in node.users if user is not after and _readers(user)):
            return None  # a view of the logits is returned: it would have to be viewed again
        found.append(node)
    return found


def _readers(node: fx.Node) -> set[fx.Node]:
    """Who reads a node in the end, through casts and views."""
    if op_of(node) not in {"to", *SHAPE_OPS}:
        return {node}
    return {reader for user in node.users for reader in _readers(user)}


def _fuse(graph: fx.Graph, head: _Head, is_fp8: bool, bf16_forward: bool) -> None:
    loss, (x, weight, bias) = head.loss, head.operands
    ignore, reduction = argument(loss, "ignore_index", -100), argument(loss, "reduction", "mean")
    how = (ignore, reduction, is_fp8, head.logit_scale, head.soft_cap, bf16_forward)
    with graph.inserting_before(loss):
        if bias is not None and value_of(bias).dim() > 1:
            bias = graph.call_method("view", (bias, -1))
        if not _has_own_dtype(head):  # autocast computes the logits in another dtype
            own = value_of(head.linear).dtype
            x, weight, bias = (
                None if operand is None else graph.call_method("to", (operand, own)) for operand in (x, weight, bias)
            )
        new = graph.call_function(linear_cross_entropy, (x, weight, bias, argument(loss, "target"), *how))
        if value_of(loss).dtype is not torch.float32:  # a loss of bf16 logits is bf16
            new = graph.call_method("to", (new, value_of(loss).dtype))
    replace(loss, new)


def _has_own_dtype(head: _Head) -> bool:
    """Whether the logits have the dtype of what they are made of."""
    return bool(value_of(head.linear).dtype == value_of(head.linear.args[0]).dtype)


def _way_out(loss: fx.Node) -> tuple[int, tuple[tuple[str, Any], ...]] | None:
    """Which output a loss becomes, and what it is multiplied by on the way; None where that is not so simple.

    Terms may be added to it: they do not depend on the logits.
    """
    node, factors = loss, list[tuple[str, Any]]()
    while len(node.users) == 1:
        (user,) = node.users
        name = op_of(user).removesuffix("_")
        others = [arg for arg in user.args if arg is not node]
        if user.op == "output":
            found = [i for i, value in enumerate(user.args[0]) if value is node]
            return (found[0], tuple(factors)) if len(found) == 1 else None
        if name in ("add", "sub", "mul", "div") and (len(user.args) != 2 or len(others) != 1 or user.kwargs):
            return None
        if name in ("sub", "div") and user.args[0] is not node:
            return None
        if name in ("mul", "div"):
            by = others[0]
            while isinstance(by, fx.Node) and op_of(by) == "to":
                by = by.args[0]
            if isinstance(by, bool) or not (isinstance(by, (int, float)) or getattr(by, "op", "") == "placeholder"):
                return None
            factors.append((name, by))
        elif name not in ("to", "add", "sub"):
            return None
        node = user
    return None


def _return_head_input(graph: fx.Graph, head: _Head, node: fx.Node, way: tuple[int, Any]) -> DeferredOutput:
    """Return the head's input in the place of a node of the path, and behind all outputs the loss' target."""
    x, weight, bias = head.operands
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    place = head.path.index(node) + 1
    steps, later = ([step for n in part if (step := _step(n))] for part in (head.path[1:place], head.path[place:]))
    values = list(output.args[0])
    found = tuple(i for i, value in enumerate(values) if value is node)
    for index in found:
        values[index] = x
    output.args = ((*values, argument(head.loss, "target")),)
    loss, by = way
    factors = [(op, None, inputs.index(f)) if isinstance(f, fx.Node) else (op, float(f), -1) for op, f in by]
    return DeferredOutput(
        indices=found,
        weight_input=inputs.index(weight),
        bias_input=None if bias is None else inputs.index(bias),
        loss=loss,
        factors=tuple(factors),
        how=HeadLoss(
            steps=tuple(steps),
            later=tuple(later),
            ignore_index=argument(head.loss, "ignore_index", -100),
            reduction=argument(head.loss, "reduction", "mean"),
        ),
    )
