"""Leave the scales of rows to whoever reads an FP8 product, so that the product itself has one scale.

cuBLASLt's kernels for products with one scale are faster than those with a scale per row (docs/gotchas.md). Weights
have one scale; the rows of x and dy have theirs, powers of two, which a reader can multiply as well, to the same bits
(`kernels/gemm/row_factors.py`). Works on AOTAutograd's joint graph, before it is split and before quantizations are
fused: what reads gate and up in the forward and again in the backward must agree.

    swiglu(fp8_gemm(q, scale, w, w_scale))     ->     swiglu(fp8_gemm(q, None, w, w_scale[0]), scale)

Only where every reader is one of READERS: attention, a bias or a graph's result need the numbers themselves.
"""

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from deepwell.engine.passes.fuse_quantize import call_with_value, is_row_view
from deepwell.engine.passes.recompute import backward_nodes, is_checkpointed
from deepwell.kernels.gemm.torch_ops import ops

# An op's operands that may come without their scales: (which operand, which argument takes the factors).
READERS: dict[str, tuple[tuple[int, int], ...]] = {
    "swiglu": ((0, 2),),
    "swiglu_backward": ((0, 4), (1, 3)),
    "activation": ((0, 2),),
    "activation_backward": ((0, 4), (1, 3)),
    "rms_norm_backward": ((0, 6),),
    "layer_norm_backward": ((0, 6),),
    "add_rms_norm": ((0, 5),),
    "add_layer_norm": ((0, 5),),
    "rope_qkv": ((0, 6),),
}
_WEIGHTS = ("quantize_weights", "quantize_weights_transposed")


def leave_row_scales(graph: fx.Graph, least_flops: float = 0.0) -> int:
    """Take the scales of rows out of products of at least so many operations. Returns how many."""
    readers = {getattr(ops, name).default: places for name, places in READERS.items()}
    backward = backward_nodes(graph)
    count = 0
    for node in list(graph.nodes):
        if node.target is not ops.fp8_gemm.default or not _has_row_scales(node) or _flops(node) < least_flops:
            continue
        uses = list(_uses(node, readers))
        if not uses or None in uses:
            continue
        codes, scale, weight, w_scale, fast = node.args
        _give(node, (codes, None, weight, _first_of(graph, node, w_scale), fast))
        _keep_scales(scale, backward)
        for reader, place in uses:  # type: ignore[misc]
            filled = (*reader.args, *[None] * (place + 1 - len(reader.args)))
            _give(reader, (*filled[:place], scale, *filled[place + 1 :]))
        count += 1
    return count


def _give(node: fx.Node, args: tuple[Any, ...]) -> None:
    """Change a call's arguments; results stay as they were."""
    node.args = args
    # What it was traced with: Inductor lays out its arguments as these were, one for one.
    node.meta.pop("eager_input_vals", None)


def _has_row_scales(node: fx.Node) -> bool:
    """Whether rows of the left operand have scales and the right one is a weight, whose scale is one number."""
    scale, w_scale = node.args[1], node.args[3]
    if scale is None or scale.meta["val"].dim() != 1:
        return False
    if w_scale.meta["val"].dim() == 0:
        return True
    names = [f"deepwell::{name}" for name in _WEIGHTS]
    made_by = w_scale.args[0] if w_scale.target is operator.getitem else None
    return made_by is not None and getattr(made_by.target, "_name", "").partition(".")[0] in names


def _flops(node: fx.Node) -> float:
    """Operations of a product; 0 where its rows are of an open number, for each of which nobody times algorithms."""
    a, b = node.args[0].meta["val"], node.args[2].meta["val"]
    sizes = (a.shape[0], a.shape[1], b.shape[0])
    return 2.0 * math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0.0


def _uses(node: fx.Node, readers: dict[Any, tuple[tuple[int, int], ...]]) -> Iterator[tuple[fx.Node, int] | None]:
    """Readers of a product behind views, each with the argument for its factors; None for one that takes none."""
    for user in node.users:
        if is_row_view(user):
            yield from _uses(user, readers)
            continue
        places = dict(readers.get(user.target, ()))
        for operand, arg in enumerate(user.args):
            if arg is node:
                yield (user, places[operand]) if operand in places else None
        if node not in user.args:
            yield None  # in a list, or by name


def _keep_scales(scale: fx.Node, backward: set[Any]) -> None:
    """Have scales kept for the backward, four bytes a row, where it reads no FP8 values beside them.

    Recomputed (passes/recompute.py) they would have tensors kept that nobody else needs: values are recomputed of a sum
    that is kept in any case, and these of its two summands.
    """
    quantize = scale.args[0] if scale.target is operator.getitem else None
    if quantize is None:
        return
    codes = [reader for item in quantize.users if item is not scale for reader in item.users]
    if not is_checkpointed(quantize) and not any(reader in backward for reader in codes):
        quantize.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _first_of(graph: fx.Graph, product: fx.Node, w_scale: fx.Node) -> fx.Node:
    """A weight's scale as the one number it is."""
    if w_scale.meta["val"].dim() == 0:
        return w_scale
    with graph.inserting_before(product):
        return call_with_value(graph, torch.ops.aten.select.int, (w_scale, 0, 0))
