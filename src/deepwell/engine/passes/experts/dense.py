"""Compute experts for the tokens that chose them where a model computes every token for every expert (Llama 4).

    dense = sigmoid(full_like(logits, -inf).scatter(1, index, values))         index: of a top-k
    rows = (x.repeat(E, 1) * dense.T.reshape(-1, 1)).view(E, T, K)
    y = bmm(act(gate) * up, down).sum(0)                                       gate, up: halves of bmm(rows, gate_up)

A score that was not chosen is zero, so is its row, and without a bias so is what an expert makes of that row: the sum
has top_k terms that are not zero, and `experts_mlp` computes those. Gradients are the same too: that of a score which
was not chosen goes back through a sigmoid that is flat there. The dense scores stay for whoever reads them; a token
with a NaN or infinity makes one of its own row, as before, but no longer one of the weights that it did not choose.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from deepwell.engine.passes.edit import (
    erase_unread,
    in_dtype_of,
    put_with_value,
    replace,
    rows_first,
    runs_in_kernels,
)
from deepwell.graph.fx import (
    SHAPE_OPS,
    Writes,
    argument,
    arguments,
    grouped_parts,
    only_user,
    op_of,
    other_operand,
    skip_casts,
    transposed,
    value_of,
)
from deepwell.kernels.activation.autograd import swiglu_packed
from deepwell.kernels.experts.activation import ExpertActivation
from deepwell.kernels.experts.mlp import is_fused_in_bf16, run_experts
from deepwell.kernels.experts.reference import PLAIN_SCHEME


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dense:
    """What such a block reads, and the nodes that nobody else does, the last first."""

    x: fx.Node
    scores: fx.Node  # [T, E], zero where an expert was not chosen
    index: fx.Node  # [T, top_k]
    gate_up: tuple[fx.Node, bool]  # the weight, and whether it is stored [E, K, N]
    down: tuple[fx.Node, bool]
    act: str
    inside: tuple[fx.Node, ...]


def rewrite_dense_experts(graph: fx.Graph) -> int:
    """Replace each such block by one call of `run_experts`, which the pass on experts gives its precision."""
    erase_unread(graph)  # what the pass on SwiGLU left has no say in who reads a product
    writes, found = Writes(graph), 0
    for node in list(graph.nodes):
        dense = _dense_around(node)
        if dense is None or _is_written(writes, dense):
            continue
        _put_chosen(graph, dense)
        found += 1
    return found


def _put_chosen(graph: fx.Graph, dense: _Dense) -> None:
    total, *inside = dense.inside
    width, top_k = value_of(dense.x).shape[1], value_of(dense.index).shape[1]
    put = partial(put_with_value, graph)
    with graph.inserting_before(total):
        chosen = put(torch.gather, dense.scores, 1, dense.index)
        rows = put(torch.mul, put(torch.unsqueeze, dense.x, 1), put(torch.unsqueeze, chosen, 2))
        rows = put(torch.flatten, rows, 0, 1)
        index = put(torch.reshape, dense.index, (-1, 1))
        ones = put(torch.ones_like, index, dtype=value_of(rows).dtype)
        weights = [rows_first(graph, *weight) for weight in (dense.gate_up, dense.down)]
        args = (rows, *weights, index, ones, (None, None), str(ExpertActivation(function=dense.act)), PLAIN_SCHEME)
        y = graph.call_function(run_experts, args)
        y.meta["example_value"] = torch.empty_like(value_of(rows))
        if top_k > 1:
            y = put(torch.sum, put(torch.reshape, y, (-1, top_k, width)), 1)
    replace(total, in_dtype_of(total, y, dense.x))
    for node in inside:
        if not node.users:
            graph.erase_node(node)


# ---- recognising a block ----


def _dense_around(total: fx.Node) -> _Dense | None:
    """The block whose sum over experts a node is."""
    if op_of(total) != "sum" or not arguments(total).keys() <= {"input", "dim", "keepdim"}:
        return None
    if argument(total, "dim") not in (0, [0], (0,)) or argument(total, "keepdim", False):
        return None
    below = _behind_shapes(argument(total, "input"))
    down = _batch(below[-1])
    hidden = below[-1].args[0] if down else None
    if down is None or not isinstance(hidden, fx.Node) or hidden.target is not swiglu_packed or not only_user(hidden):
        return None
    gate_up = _batch(hidden.args[0])
    above = _behind_shapes(hidden.args[0].args[0]) if gate_up else []
    routed = _routed(above[-1]) if above else None
    if gate_up is None or routed is None:
        return None
    x, scores, repeated = routed
    index = _chosen(scores)
    inside = (total, *below, hidden, hidden.args[0], *above, repeated)
    if index is None or any(only_user(node) is None for node in inside[1:]):
        return None
    dense = _Dense(x=x, scores=scores, index=index, gate_up=gate_up, down=down, act=hidden.args[1], inside=inside)
    return dense if _fits(dense, value_of(argument(total, "input")), value_of(hidden.args[0].args[0])) else None


def _behind_shapes(node: Any) -> list[fx.Node]:
    """A node and, behind views of it, what they show."""
    found = [node]
    while op_of(found[-1]) in SHAPE_OPS:
        found.append(found[-1].args[0])
    return found


def _batch(node: Any) -> tuple[fx.Node, bool] | None:
    """(weight, whether it is stored [E, K, N]) where a node is a batch of products, one for each expert."""
    parts = grouped_parts(node) if op_of(node) == "matmul" else None
    return None if parts is None else (parts[1], parts[3])


def _routed(rows: Any) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(x, scores, x repeated) where the rows are every token times its score for each expert, expert by expert."""
    repeated = next((node for node in rows.args if op_of(node) == "repeat"), None) if op_of(rows) == "mul" else None
    if repeated is None:
        return None
    column = other_operand(rows, repeated)
    x, scores = repeated.args[0], transposed(_behind_shapes(column)[-1])
    if any(value_of(node) is None or value_of(node).dim() != 2 for node in (x, scores, column)):
        return None
    is_column = _is(value_of(column).shape[1], 1)
    repeats = tuple(argument(repeated, "repeats"))
    is_whole = repeats == (value_of(scores).shape[1], 1) and value_of(x).shape[0] == value_of(scores).shape[0]
    return (x, scores, repeated) if is_column and is_whole else None


def _chosen(scores: fx.Node) -> fx.Node | None:
    """The experts that have a score, [T, top_k], none of them twice, where all others' is zero."""
    sigmoid = skip_casts(scores)
    spread = skip_casts(sigmoid.args[0]) if op_of(sigmoid) == "sigmoid" else None
    if op_of(spread) not in ("scatter", "scatter_") or argument(spread, "dim") not in (1, -1):
        return None
    base, index = argument(spread, "input"), argument(spread, "index")
    is_empty = op_of(base) == "full_like" and argument(base, "fill_value") == float("-inf")
    top = index.args[0] if op_of(index) == "getitem" and index.args[1] == 1 else None
    if not is_empty or op_of(top) != "topk" or argument(top, "dim", -1) not in (1, -1):
        return None
    value = value_of(index)
    is_matrix = value is not None and value.dim() == 2 and isinstance(value.shape[1], int)
    return index if is_matrix and value.shape[0] == value_of(scores).shape[0] else None


def _fits(dense: _Dense, summed: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether views keep experts and columns apart, and kernels are there."""
    x, up, down = value_of(dense.x), *(_rows_first(*weight) for weight in (dense.gate_up, dense.down))
    experts, width = down.shape[0], down.shape[1]
    is_kept = summed.dim() == 3 and _is(summed.shape[0], experts) and _is(summed.shape[2], width)
    is_wide = all(_is(size, width) for size in (x.shape[1], rows.shape[2]))
    is_known = runs_in_kernels(dense.x, dense.gate_up[0], dense.down[0]) and has_kernels(x, up, down)
    return is_kept and is_wide and is_known and _is(value_of(dense.scores).shape[1], experts)


def has_kernels(x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor) -> bool:
    """Whether grouped products run where the model's do: a GPU has them for bf16 rows of whole 16-byte lines.

    Others run in fp32 there, in which the model's own would be faster unless they are fp32 too.
    """
    return not x.is_cuda or x.dtype == torch.float32 or is_fused_in_bf16(x, w_gate_up, w_down)


def _rows_first(weight: fx.Node, is_kn: bool) -> torch.Tensor:
    value = value_of(weight)
    return value.transpose(1, 2) if is_kn else value


def _is(size: Any, number: int) -> bool:
    """Whether a size is fixed and this number: to ask an open one would fix it."""
    return isinstance(size, int) and size == number


def _is_written(writes: Writes, dense: _Dense) -> bool:
    """Whether something that a block reads is another when its sum is computed."""
    begin, total = dense.index, dense.inside[0]
    read = (dense.x, dense.scores, dense.index, dense.gate_up[0], dense.down[0])
    return any(writes.between(node, begin, total) for node in read)
