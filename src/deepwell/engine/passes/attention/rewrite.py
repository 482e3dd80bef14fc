"""Rewrite softmax attention as what it is: causal, windowed, with its key-value heads unrepeated.

Under compile, Hugging Face builds masks from positions and passes them to SDPA, and repeats key-value heads to the
number of query heads. cuDNN then computes the whole square and reads every head's copy. A mask that is the lower
triangle is dropped for `is_causal`; on a GPU one that is a causal window goes to a kernel that skips what lies outside.
"""

from collections.abc import Mapping
from typing import Any

from torch import fx

from deepwell.engine.passes.attention.masks import MaskBand, band_of
from deepwell.engine.passes.attention.written import rewrite_written
from deepwell.engine.passes.edit import put_call
from deepwell.graph.fx import SHAPE_OPS, Writes, argument, has_index_tensor, op_of, value_of
from deepwell.kernels.attention.autograd import windowed_attention
from deepwell.kernels.attention.flash import why_not_flash
from deepwell.kernels.tune.choose import why_rejected


def rewrite_attention(graph: fx.Graph, outer: Mapping[str, fx.Node] | None = None) -> tuple[int, int, int, int]:
    """Drop causal masks and repeated heads, take windows from masks, fuse what is written out. Returns how many each.

    `outer` names the nodes of the surrounding graph that a nested graph's inputs are: a mask may be made there.
    """
    outer = outer or {}
    written = rewrite_written(graph, outer)
    masks = heads = windows = 0
    writes = Writes(graph)
    bands: dict[fx.Node, MaskBand | None] = {}
    for node in list(graph.nodes):
        if op_of(node) != "scaled_dot_product_attention" and node.target is not windowed_attention:
            continue
        heads += keep_kv_heads(node, writes)
        if node.target is windowed_attention:
            continue
        mask = argument(node, "attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        mask = outer.get(mask.name, mask) if mask.op == "placeholder" else mask
        if mask not in bands:
            bands[mask] = band_of(mask)
        size = _size(node, mask)
        if bands[mask] is None or size is None:
            continue
        if bands[mask].is_causal(size if isinstance(size, int) else None):
            _set(node, attn_mask=None, is_causal=True)
            masks += 1
        elif isinstance(size, int) and (window := bands[mask].window(size)) is not None:
            windows += _windowed(node, window)
    return masks, heads, windows, written


def _size(node: fx.Node, mask: fx.Node) -> Any:
    """Queries, which are as many as keys and have a row of the mask each; None where that is not so."""
    query, key, value = value_of(node.args[0]), value_of(node.args[1]), value_of(mask)
    if query is None or key is None or argument(node, "is_causal", False):
        return None
    size = query.shape[-2]
    return size if tuple(value.shape[-2:]) == (size, key.shape[-2]) == (size, size) else None


def _windowed(node: fx.Node, window: int) -> bool:
    """Put the kernel for causal windows in the place of SDPA where it takes these operands."""
    operands = [value_of(arg) for arg in node.args[:3]]
    if any(operand is None for operand in operands) or argument(node, "dropout_p", 0.0) or why_not_flash(*operands):
        return False
    if operands[0].is_cuda and why_rejected("attention", operands[0].device, "bf16"):
        return False
    scale = argument(node, "scale")
    scale = operands[0].shape[-1] ** -0.5 if scale is None else scale
    put_call(node, windowed_attention, (*node.args[:3], None, scale, window))
    return True


def _set(node: fx.Node, **kwargs: Any) -> None:
    """Give SDPA's options by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names[3:], node.args[3:], strict=False))
    node.args = tuple(node.args[:3])
    merged = {**given, **node.kwargs, **kwargs}
    node.kwargs = {key: value for key, value in merged.items() if value is not None or key == "scale"}


def keep_kv_heads(node: fx.Node, writes: Writes) -> bool:
    """Undo repeat_kv on key and value where both were repeated alike."""
    key, value = (_unrepeated(node.args[i]) for i in (1, 2))
    query = value_of(node.args[0])
    if key is None or value is None or query is None or query.dim() != 4:
        return False
    if value_of(key).shape[1] != value_of(value).shape[1]:
        return False
    if query.shape[1] != value_of(node.args[1]).shape[1]:
        return False  # one head of queries for all of the keys'
    if any(writes.between(source, node.args[i], node) for i, source in ((1, key), (2, value))):
        return False  # what was repeated is a copy from before the write
    if writes.spoils(node, key, value):
        return False
    node.args = (node.args[0], key, value, *node.args[3:])
    if op_of(node) == "scaled_dot_product_attention":
        _set(node, enable_gqa=True)
    return True


def _unrepeated(node: Any) -> fx.Node | None:
    """The tensor [B, G, S, C] behind `x[:, :, None].expand(B, G, R, S, C).reshape(B, G*R, S, C)`."""
    if op_of(node) not in SHAPE_OPS or value_of(node) is None or value_of(node).dim() != 4:
        return None
    expand = node.args[0]
    if op_of(expand) != "expand":
        return None
    grown = expand.args[0]
    if op_of(grown) not in {"getitem", "unsqueeze"} or value_of(grown) is None or value_of(grown).dim() != 5:
        return None
    if op_of(grown) == "getitem" and has_index_tensor(grown):
        return None  # heads in another order
    source = grown.args[0]
    small, big = value_of(source), value_of(node)
    if small is None or small.dim() != 4 or value_of(grown).shape != (*small.shape[:2], 1, *small.shape[2:]):
        return None  # some of the heads, or another axis
    same = small.shape[0] == big.shape[0] and small.shape[2:] == big.shape[2:]
    return source if same and big.shape[1] % small.shape[1] == 0 else None
