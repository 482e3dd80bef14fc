"""Make cheap values again in the backward instead of keeping them: FP8 copies whose sources are kept anyway.

A layer's normalised input, its MLP's hidden values and their FP8 rows follow from tensors that the backward needs in
any case (the residual stream, attention's output, gate and up). Which of them are recomputed is a choice of WHAT:

    nothing   all are kept: 1 byte per element from the forward to the backward
    hidden    the hidden values alone, the widest: their rows come with the gradients of gate and up (fuse_quantize.py)
    copies    the inputs of all linears: the least memory, for one more pass over the stream and attention's output

AOTAutograd's partitioner reads the same marks that activation checkpointing sets; what lies under checkpointing
has its marks already, and is recomputed with the whole of its region.
"""

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from deepwell.engine.passes.fuse_quantize import through_views
from deepwell.graph.fx import VIEWS, op_of, written_by

WHAT = ("nothing", "hidden", "copies")
_HIDDEN = ("swiglu", "swiglu_pair", "activation", "bias_activation")
_INPUTS = ("rms_norm", "layer_norm", "quantize_rows")


def save_readers_of_written(graph: fx.Graph) -> None:
    """Have what reads an input kept for the backward where the graph writes into that input in the end.

    The partitioner takes inputs for there and free: it has what reads them recomputed, of what was written since.
    """
    written = {node for writer in graph.nodes for node in written_by(writer) if node.op == "placeholder"}
    stack = [(node, reader) for node in written for reader in node.users]
    while stack:
        node, reader = stack.pop()
        if op_of(reader) in VIEWS:
            stack += [(reader, user) for user in reader.users]
        elif node not in written_by(reader) and not is_checkpointed(reader):
            reader.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def mark_recomputed(graph: fx.Graph, what: str) -> int:
    """Mark the forward's cheap primitives in a joint graph; `what` is one of WHAT. Returns how many nodes."""
    ops = torch.ops.deepwell
    hidden = {getattr(ops, name).default for name in _HIDDEN}
    inputs = {getattr(ops, name).default for name in _INPUTS}
    cheap = {"nothing": set(), "hidden": hidden, "copies": hidden | inputs}[what]
    taken = backward_nodes(graph) | {node for node in graph.nodes if is_checkpointed(node)}
    marked = 0
    for node in graph.nodes:
        owner = node.args[0] if _is_item(node) else node
        is_hidden_rows = owner.target is ops.quantize_rows.default and _owner(owner.args[0]).target in cheap
        if (owner.target in cheap or is_hidden_rows) and not taken & {node, owner}:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0
            marked += 1
    return marked


def is_checkpointed(node: fx.Node) -> bool:
    """Whether a node has a mark already: mostly it lies in a region that the model itself has computed again.

    Our mark on it would put it into another region than its neighbours: the partitioner then keeps what crosses over,
    and what it cannot keep (the results of an op as a whole) leaves it without a way.
    """
    return "recompute" in node.meta


def _owner(node: Any) -> Any:
    """The op that a value is a result of, views aside."""
    source = through_views(node)
    return source.args[0] if _is_item(source) else source


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node)


def backward_nodes(graph: fx.Graph) -> set[Any]:
    """Nodes of a joint graph that no result of the forward needs.

    What follows from an incoming gradient, and what only the backward reads though it follows from none: the transposed
    FP8 values of an input, for instance.
    """
    after: set[Any] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.name
        if is_tangent or any(parent in after for parent in node.all_input_nodes):
            after.add(node)
    results = next(node for node in reversed(graph.nodes) if node.op == "output").all_input_nodes
    needed, stack = set(), [node for node in results if node not in after]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    return {node for node in graph.nodes if node not in needed}
