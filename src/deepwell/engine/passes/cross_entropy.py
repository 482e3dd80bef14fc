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
from deepwell.engine.passes.match import CAST_OPS, SHAPE_OPS, argument, name_of, replace, skip, value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredOutput:
    """Output `index` of the graph is a head's input now; its logits are `outputs[index] @ weight.T`."""

    index: int
    weight_input: int  # which of the graph's inputs the weight is


def rewrite_cross_entropy(graph: fx.Graph, fp8_weights: Collection[str] = ()) -> tuple[int, list[DeferredOutput]]:
    """Replace heads and their losses. Returns how many, and which outputs are deferred logits.

    `fp8_weights` names the placeholders of heads whose GEMMs run in FP8.
    """
    count, deferred = 0, []
    for loss in list(graph.nodes):
        if name_of(loss) != "cross_entropy" or not _is_plain(loss):
            continue
        logits = skip(loss.args[0], CAST_OPS | SHAPE_OPS)
        if name_of(logits) != "linear" or argument(logits, 2, "bias") is not None:
            continue
        flat = value_of(loss.args[0])
        if flat is None or flat.dim() != 2 or flat.shape[-1] != value_of(logits).shape[-1]:
            continue
        others = _readers_outside(logits, loss)
        if any(node.op != "output" for node in others):
            continue
        x, weight = logits.args[0], argument(logits, 1, "weight")
        if others and weight.op != "placeholder":
            continue
        ignore, reduction = argument(loss, 4, "ignore_index", -100), argument(loss, 6, "reduction", "mean")
        with graph.inserting_before(loss):
            new = graph.call_function(
                functional.linear_cross_entropy,
                (x, weight, argument(loss, 1, "target"), ignore, reduction, weight.name in fp8_weights),
            )
        replace(loss, new)
        if others:
            deferred += _return_head_input(graph, logits, x, weight)
        count += 1
    graph.eliminate_dead_code()
    return count, deferred


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


def _readers_outside(logits: fx.Node, loss: fx.Node) -> list[fx.Node]:
    """Nodes that read the logits, or a view of them, besides the loss."""
    readers = []
    for user in logits.users:
        if user is loss:
            continue
        if name_of(user) in CAST_OPS | SHAPE_OPS:
            readers += _readers_outside(user, loss)
        else:
            readers.append(user)
    return readers


def _return_head_input(graph: fx.Graph, logits: fx.Node, x: fx.Node, weight: fx.Node) -> list[DeferredOutput]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    values = list(output.args[0])
    found = [i for i, value in enumerate(values) if value is logits]
    for index in found:
        values[index] = x
    output.args = (tuple(values),)
    return [DeferredOutput(index=index, weight_input=inputs.index(weight)) for index in found]
