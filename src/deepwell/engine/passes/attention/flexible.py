"""Give packed sequences and soft caps to FlexAttention where it was measured to gain: no mask or scores of all pairs.

    SDPA with a mask of one document and a causal band        (position_ids that restart, numbers of documents)
    softmax(cap * tanh(scale * q k^T / cap) + mask) v          (Gemma 2), causal or in a window, packed or not

Only in graphs that Inductor compiles: in eager mode FlexAttention holds all scores.
"""

from collections.abc import Mapping
from typing import Any

from torch import fx

from deepwell.engine.passes.attention.masks import MaskBand, band_of, packed_of
from deepwell.engine.passes.attention.rewrite import keep_kv_heads
from deepwell.engine.passes.attention.written import match_written
from deepwell.engine.passes.edit import replace
from deepwell.graph.fx import Writes, argument, op_of, value_of
from deepwell.kernels.attention.flash import NO_WINDOW
from deepwell.kernels.attention.flex import NO_CAP, FlexShape, flex_attention, gains
from deepwell.kernels.attention.proof import is_timed


def rewrite_flexible(graph: fx.Graph, outer: Mapping[str, fx.Node] | None = None) -> tuple[int, int]:
    """Returns how many packed attentions and how many soft caps were replaced."""
    outer, packed, caps, writes = outer or {}, 0, 0, Writes(graph)
    rules: dict[tuple[fx.Node, bool], tuple[MaskBand, fx.Node | None] | None] = {}
    for node in list(graph.nodes):
        call = _packed_sdpa(node) or _capped(node)
        if call is None:
            continue
        (query, key, value), mask, scale, cap = call
        key_of_rule = mask, bool(cap)
        if key_of_rule not in rules:
            rules[key_of_rule] = _rule(mask, outer, may_be_plain=bool(cap))
        found = rules[key_of_rule]
        window = None if found is None else _window(query, mask, found[0])
        if found is None or window is None:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(flex_attention, (query, key, value, found[1], scale, window, cap))
        keep_kv_heads(new, writes)
        shape = _shape(new)
        at = value_of(query)
        if shape is None or not gains(shape, at.dtype, str(at.device)):
            graph.erase_node(new)
            continue
        replace(node, new)
        packed, caps = packed + (not cap), caps + bool(cap)
    return packed, caps


def _packed_sdpa(node: fx.Node) -> tuple[tuple[Any, ...], fx.Node, float, float] | None:
    """Operands, mask, scale and no cap of SDPA with a mask."""
    mask = argument(node, "attn_mask") if op_of(node) == "scaled_dot_product_attention" else None
    query = value_of(node.args[0]) if isinstance(mask, fx.Node) else None
    if query is None or argument(node, "is_causal", False) or argument(node, "dropout_p", 0.0):
        return None
    scale = argument(node, "scale")
    if scale is None and isinstance(query.shape[-1], int):
        scale = query.shape[-1] ** -0.5
    return (tuple(node.args[:3]), mask, scale, NO_CAP) if isinstance(scale, (int, float)) else None


def _capped(node: fx.Node) -> tuple[tuple[Any, ...], fx.Node, float, float] | None:
    """Operands, mask, scale and cap of attention that is written out with a soft cap."""
    found = match_written(node)
    if found is None or not found.cap or found.mask is None or found.sinks is not None:
        return None
    return (found.query, found.key, found.value), found.mask, found.scale, found.cap


def _rule(mask: fx.Node, outer: Mapping[str, fx.Node], *, may_be_plain: bool) -> tuple[MaskBand, fx.Node | None] | None:
    """(band, documents or None). Documents that only the surrounding graph holds cannot be read here."""
    packed = packed_of(mask)
    if packed is not None:
        return packed.band, packed.documents
    band = band_of(outer.get(mask.name, mask) if mask.op == "placeholder" else mask) if may_be_plain else None
    return None if band is None else (band, None)


def _window(query: fx.Node, mask: fx.Node, band: MaskBand) -> int | None:
    """The causal window that a mask [.., S, S] opens, `NO_WINDOW` for all that came before; None for another band."""
    size = value_of(query).shape[-2]
    if not isinstance(size, int) or tuple(value_of(mask).shape[-2:]) != (size, size):
        return None
    return NO_WINDOW if band.is_causal(size) else band.window(size)


def _shape(call: fx.Node) -> FlexShape | None:
    """The sizes of a call of FlexAttention that can be timed here; None where it cannot."""
    query, key, value = operands = [value_of(arg) for arg in call.args[:3]]
    if any(t is None or t.dim() != 4 for t in operands) or not is_timed(*operands):
        return None
    if not all(isinstance(size, int) for t in operands for size in t.shape):
        return None
    (batch, heads, size, width), groups, of_values = query.shape, key.shape[1], value.shape[-1]
    if tuple(key.shape) != (batch, groups, size, width) or tuple(value.shape) != (batch, groups, size, of_values):
        return None
    documents, window, cap = value_of(call.args[3]), call.args[5], call.args[6]
    if heads % groups or (documents is not None and tuple(documents.shape) not in ((batch, size), (1, size), (size,))):
        return None
    return FlexShape(
        B=batch,
        H=heads,
        G=groups,
        S=size,
        D=width,
        V=of_values,
        window=window,
        cap=cap,
        has_documents=documents is not None,
    )
