"""Find the head followed by its cross entropy and compute both without ever holding all logits.

The logits may be cast, viewed and flattened on the way to the loss. Where the model also returns them (Hugging Face
does), the graph returns the head's input instead, and the engine hands out logits that are computed when somebody
looks at them.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from deepwell.engine import functional
from deepwell.engine.passes.match import (
    CAST_OPS,
    SHAPE_OPS,
    argument,
    erase_unread,
    name_of,
    replace,
    runs_in_kernels,
    skip,
    value_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredOutput:
    """Output `index` of the graph is a head's input now; its logits are `outputs[index] @ weight.T`."""

    index: int
    weight_input: int  # which of the graph's inputs the weight is


def rewrite_cross_entropy(
    graph: fx.Graph, fp8_weights: Collection[str] = (), other_weights: Collection[str] = ()
) -> tuple[list[fx.Node], list[DeferredOutput]]:
    """Replace heads and their losses. Returns the weights of those heads, and which outputs are deferred logits.

    `fp8_weights` names the placeholders of heads whose GEMMs run in FP8, `other_weights` those of heads in formats
    that have no fused loss: they are left to the linear pass.
    """
    heads: list[fx.Node] = []
    deferred: list[DeferredOutput] = []
    for loss in list(graph.nodes):
        if name_of(loss) != "cross_entropy" or not _is_plain(loss):
            continue
        logits = skip(loss.args[0], CAST_OPS | SHAPE_OPS)
        if not _is_head(logits, loss):
            continue
        x, weight = logits.args[0], argument(logits, 1, "weight")
        if weight.name in other_weights:
            continue
        is_returned = any(node is not loss for node in _readers(logits, loss))
        if is_returned and (weight.op != "placeholder" or not _only_returned_itself(logits, loss)):
            continue
        _fuse(graph, loss, x, weight, weight.name in fp8_weights)
        if is_returned:
            deferred += _return_head_input(graph, logits, x, weight)
        heads.append(weight)
    erase_unread(graph)
    return heads, deferred


def _is_head(logits: fx.Node, loss: fx.Node) -> bool:
    """A linear without bias whose result reaches the loss as rows of a matrix."""
    if name_of(logits) != "linear" or argument(logits, 2, "bias") is not None:
        return False
    flat = value_of(loss.args[0])
    is_matrix = flat is not None and flat.dim() == 2 and flat.shape[-1] == value_of(logits).shape[-1]
    return is_matrix and runs_in_kernels(logits.args[0], argument(logits, 1, "weight"))


def _fuse(graph: fx.Graph, loss: fx.Node, x: fx.Node, weight: fx.Node, is_fp8: bool) -> None:
    ignore, reduction = argument(loss, 4, "ignore_index", -100), argument(loss, 6, "reduction", "mean")
    with graph.inserting_before(loss):
        new = graph.call_function(
            functional.linear_cross_entropy, (x, weight, argument(loss, 1, "target"), ignore, reduction, is_fp8)
        )
        if value_of(loss).dtype is not torch.float32:  # a loss of bf16 logits is bf16
            new = graph.call_method("to", (new, value_of(loss).dtype))
    replace(loss, new)


def _is_plain(loss: fx.Node) -> bool:
    """Neither class weights nor label smoothing, and class indices as targets."""
    target = argument(loss, 1, "target")
    value = value_of(target) if isinstance(target, fx.Node) else None
    return (
        argument(loss, 2, "weight") is None
        and not argument(loss, 7, "label_smoothing", 0.0)
        and argument(loss, 6, "reduction", "mean") in ("mean", "sum")
        and value is not None
        and value.dtype is torch.int64
        and value.dim() == 1
    )


def _readers(logits: fx.Node, loss: fx.Node) -> list[fx.Node]:
    """Nodes that read the logits, or a view of them."""
    readers = []
    for user in logits.users:
        readers += _readers(user, loss) if name_of(user) in CAST_OPS | SHAPE_OPS else [user]
    return readers


def _only_returned_itself(logits: fx.Node, loss: fx.Node) -> bool:
    """Whether all that reads the logits besides the loss is the graph's output, and it reads them as they are."""
    views = [user for user in logits.users if user is not loss and user.op != "output"]
    return all(
        name_of(view) in CAST_OPS | SHAPE_OPS and all(reader is loss for reader in _readers(view, loss))
        for view in views
    )


def _return_head_input(graph: fx.Graph, logits: fx.Node, x: fx.Node, weight: fx.Node) -> list[DeferredOutput]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    values = list(output.args[0])
    found = [i for i, value in enumerate(values) if value is logits]
    for index in found:
        values[index] = x
    output.args = (tuple(values),)
    return [DeferredOutput(index=index, weight_input=inputs.index(weight)) for index in found]
