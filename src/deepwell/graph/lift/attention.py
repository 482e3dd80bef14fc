"""Attention and rotary embeddings: fused calls, softmax between two products, and the rotations in front of them."""

import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from deepwell.graph.fx import argument
from deepwell.graph.lift.flow import ARITHMETIC, FORMS
from deepwell.graph.lift.masks import MaskFacts, read_mask
from deepwell.graph.lift.site import LiftedSite, LiftState, joined
from deepwell.graph.ops import Extent

_PRODUCTS = ("matmul", "baddbmm", "einsum", "addbmm")
_SCORE_STEPS = (
    FORMS | ARITHMETIC | {"max", "amax", "cat", "tanh", "exp", "softplus", "logsumexp", "new_zeros", "zeros_like"}
)


@dataclass(frozen=True, slots=True)
class _Operands:
    q: fx.Node
    k: fx.Node  # [..., keys, dim] or transposed, as `k_dim_last` says
    v: fx.Node
    k_dim_last: bool = True
    seen: tuple[tuple[fx.Node, ...], ...] = ()  # q, k and v as the products find them, after in-place writes


def find_attention(found: LiftState) -> None:
    flow = found.flow
    for node in flow.nodes:
        if flow.op(node) == "scaled_dot_product_attention" and found.is_free(node):
            _fused(found, node)
        elif flow.op(node) == "softmax" and found.is_free(node):
            _spelled_out(found, node)
    for site in found.of("attention"):
        if "mask" in site.facts:  # from F.multi_head_attention_forward
            mask = site.facts.pop("mask")
            facts = read_mask(flow, site.node, None, mask) if isinstance(mask, fx.Node) else None
            if facts is not None:
                site.facts.update(causal=facts.causal, window=facts.window)
            q, kv = (found.sizes.rows(site.facts.pop(key)) for key in ("q", "kv"))
            site.facts.update(
                batch=Extent(1, q.batch), q_len=Extent(q.factor, 0, q.seq), kv_len=Extent(kv.factor, 0, kv.seq)
            )


def _fused(found: LiftState, node: fx.Node) -> None:
    flow = found.flow
    q, k, v = (argument(node, name) for name in ("query", "key", "value"))
    mask, is_causal = argument(node, "attn_mask"), bool(argument(node, "is_causal", False))
    facts: MaskFacts | None = MaskFacts(is_causal)
    if isinstance(mask, fx.Node):
        facts = read_mask(flow, node, None, mask)
    operands = _Operands(q, k, v, seen=tuple(flow.seen(node, operand) for operand in (q, k, v)))
    _add_attention(found, node, {node}, operands, facts, [])


def _spelled_out(found: LiftState, softmax: fx.Node) -> None:
    """softmax(q k^T ...) v in single steps: the products on both sides of a softmax over keys."""
    flow = found.flow

    def is_product(node: fx.Node) -> bool:
        operands = [a for a in flow.tensor_args(node) if found.is_activation(a)]
        return flow.op(node) in _PRODUCTS and found.is_free(node) and len(operands) >= 2

    def outside(node: fx.Node) -> bool:
        return (
            is_product(node) or not found.is_free(node) or (node is not softmax and flow.op(node) not in _SCORE_STEPS)
        )

    before = list(flow.back([softmax], outside))
    scores = [n for n in before if is_product(n)]
    after = list(flow.forward([softmax], outside))
    outputs = [n for n in after if is_product(n)]
    if len(scores) != 1 or not outputs:
        return
    first, last = scores[0], outputs[0]
    operands = _operands(found, first, last, softmax)
    if operands is None:
        return
    inner = {n for n in before if not outside(n) and n in found.live} | {
        n for n in after if not outside(n) and flow.index[n] < flow.index[last]
    }
    facts = read_mask(flow, softmax, first, None)
    _add_attention(found, last, inner | {first, softmax, last}, operands, facts, found.params_of(inner))


def _follows(found: LiftState, value: fx.Node, softmax: fx.Node) -> bool:
    """Does a value follow from the softmax without another product between?"""
    flow = found.flow
    behind = flow.back([value], lambda n: n is softmax or (flow.op(n) in _PRODUCTS and n is not value))
    return any(n is softmax for n in behind)


def _operands(found: LiftState, first: fx.Node, last: fx.Node, softmax: fx.Node) -> _Operands | None:
    flow = found.flow
    left = [a for a in flow.tensor_args(first) if found.is_activation(a)][-2:]
    right = [a for a in flow.tensor_args(last) if found.is_activation(a)][-2:]
    values = [operand for operand in right if not _follows(found, operand, softmax)]
    if len(left) != 2 or len(values) != 1:
        return None
    q, k = left
    seen = (flow.seen(first, q), flow.seen(first, k), flow.seen(last, values[0]))
    return _Operands(q, k, values[0], k_dim_last=flow.op(first) == "einsum", seen=seen)


def _add_attention(
    found: LiftState,
    node: fx.Node,
    nodes: set[fx.Node],
    operands: _Operands,
    mask: MaskFacts | None,
    params: list[fx.Node],
) -> None:
    flow, sizes = found.flow, found.sizes
    q, k, v = flow.shape(operands.q), flow.shape(operands.k), flow.shape(operands.v)
    if min(len(q), len(k), len(v)) < 3:
        return
    path = flow.path(node)
    keys = k[-2] if operands.k_dim_last else k[-1]
    lead = q[:-2]
    batch, heads = lead[:1], math.prod(lead[1:])
    if len(lead) == 1:  # [batch * heads, length, dim]
        entries = sizes.batch if sizes.batch and lead[0] % sizes.batch == 0 else 1
        batch, heads = (entries,), lead[0] // entries
    if mask is None:
        mask = MaskFacts(True)
        found.note(f"{joined(path, 'attention')}: its mask could not be computed; taken as causal")
    if mask.chunked:
        found.note(
            f"{joined(path, 'attention')}: attends in chunks of {mask.window}; counted as a window of that width"
        )
    window = mask.window or _window_of_module(found, path)
    found.add(
        LiftedSite(
            "attention", node, path, joined(path, "attention"), nodes, (operands.q, operands.k, operands.v),
            params=params, role="attention",
            facts={
                "q_heads": heads, "kv_heads": _kv_heads(found, operands, v, heads), "qk_dim": q[-1], "v_dim": v[-1],
                "causal": mask.causal, "window": window,
                "batch": sizes.rows(batch), "q_len": sizes.size(q[-2]), "kv_len": sizes.size(keys),
                "operands": operands,
            },
        )
    )  # fmt: skip


def _kv_heads(found: LiftState, operands: _Operands, v: tuple[int, ...], heads: int) -> int:
    """Value heads before they are repeated for the query heads: the least that the value's own chain holds."""
    flow = found.flow
    node, least = operands.v, flow.numel(operands.v)
    while found.is_free(node) and flow.op(node) in FORMS and flow.op(node) not in ("index", "gather", "pad"):
        sources = flow.sources[node]
        if len(sources) != 1:
            break
        node = sources[0]
        if not flow.is_tensor(node):
            continue
        if flow.shape(node)[-1] % v[-1] == 0 or v[-1] in flow.shape(node):
            least = min(least, flow.numel(node))
    batch = flow.numel(operands.q) // (heads * flow.shape(operands.q)[-2] * flow.shape(operands.q)[-1])
    per_head = batch * v[-2] * v[-1]
    return max(1, least // per_head)


def _window_of_module(found: LiftState, path: str) -> int | None:
    """A window that the attention module names itself: needed where the mask's values are not there (meta buffers)."""
    module = found.flow.module(path) if path else found.flow.model
    for name in ("sliding_window", "window_size", "attention_window"):
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            kind = getattr(module, "layer_type", getattr(module, "attention_type", None))
            sliding = getattr(module, "is_sliding", getattr(module, "is_local_attention", None))
            if kind in (None, "sliding_attention", "local") and sliding is not False:
                return value
    return None


# ---- rotary embeddings ----

_JOINS = ("mul", "add", "sub", "cat", "stack")


def find_rope(found: LiftState) -> None:
    """One site for each attention whose queries or keys are multiplied by tables of angles; others go by module."""
    tables = _angle_tables(found)
    turns = [n for n in found.flow.nodes if _is_turn(found, n, tables)]
    if not turns:
        return
    left = dict.fromkeys(turns)
    for site in found.of("attention"):
        operands = site.facts.get("operands")
        if operands is None:
            continue
        q_side = _turns_behind(found, operands.seen[0], left)
        k_side = _turns_behind(found, operands.seen[1], left)
        if q_side or k_side:
            _add_rope(found, site, q_side, k_side)
            for node in (*q_side, *k_side):
                left.pop(node, None)
    by_path: dict[str, list[fx.Node]] = {}
    for node in left:
        by_path.setdefault(found.flow.path(node), []).append(node)
    for path, nodes in by_path.items():
        _add_free_rope(found, path, nodes)


def _angle_tables(found: LiftState) -> set[fx.Node]:
    """Values without activations that hold sines or cosines: computed ones, and float tables along the sequence."""
    flow = found.flow
    tables: set[fx.Node] = set()
    for node in flow.nodes:
        if node in found.live or node in flow.weights or (not flow.is_tensor(node) and flow.op(node) not in FORMS):
            continue
        if flow.op(node) in ("cos", "sin", "polar") or any(s in tables for s in flow.sources[node]):
            tables.add(node)
        placeholder = flow.placeholder(node)
        if placeholder is not None and placeholder.kind in ("buffer", "constant") and flow.is_float(node):
            words = placeholder.name.lower()
            if (
                any(word in words for word in ("cos", "sin", "freqs_cis", "embed_positions", "rotary"))
                and "inv_freq" not in words
            ):
                tables.add(node)
    return tables


def _is_turn(found: LiftState, node: fx.Node, tables: set[fx.Node]) -> bool:
    flow = found.flow
    if flow.op(node) != "mul" or not found.is_free(node) or node not in found.live:
        return False
    sources = flow.sources[node]
    return (
        len(sources) == 2
        and any(s in tables and flow.numel(s) > 1 and flow.shape(s)[-1:] != (1,) for s in sources)
        and any(s in found.live for s in sources)
    )


def _turns_behind(found: LiftState, operand: tuple[fx.Node, ...], turns: dict[fx.Node, None]) -> list[fx.Node]:
    return [n for n in found.flow.back(operand, lambda n: not found.is_free(n)) if n in turns]


def _rotated(found: LiftState, turns: list[fx.Node]) -> tuple[set[fx.Node], int]:
    """What is made of rotated values alone (their sums, halves put together), and how many elements that is."""
    flow = found.flow
    region = set(turns)
    for node in flow.forward(turns, lambda n: n not in region):
        if flow.op(node) not in _JOINS and flow.op(node) not in ("flatten", "view", "reshape", "view_as_real", "to"):
            continue
        alive = [s for s in flow.sources[node] if s in found.live]
        if found.is_free(node) and alive and all(s in region for s in alive):
            region.add(node)
    size = max(
        (flow.numel(n) * (2 if flow.value(n).is_complex() else 1) for n in region if flow.is_tensor(n)), default=0
    )
    return region, size


def _add_rope(found: LiftState, attention: LiftedSite, q_side: list[fx.Node], k_side: list[fx.Node]) -> None:
    facts = attention.facts
    q_region, q_size = _rotated(found, q_side)
    k_region, k_size = _rotated(found, k_side)
    operands = facts["operands"]
    tokens = found.flow.numel(operands.q) // (facts["q_heads"] * facts["qk_dim"])
    rotary = q_size // (tokens * facts["q_heads"]) if q_side else k_size // (tokens * facts["kv_heads"])
    if set(q_side) == set(k_side):  # queries and keys are rotated together
        rotary = q_size // (tokens * (facts["q_heads"] + facts["kv_heads"])) or rotary
        q_size, k_size = tokens * rotary * facts["q_heads"], tokens * rotary * facts["kv_heads"]
    per_head = max(1, tokens * rotary)
    _rope_site(found, attention.path, q_region | k_region, q_size // per_head, k_size // per_head, rotary)


def _add_free_rope(found: LiftState, path: str, turns: list[fx.Node]) -> None:
    """Rotations that feed no softmax attention (linear attention, retention)."""
    region, size = _rotated(found, turns)
    shapes = [found.flow.shape(n) for n in region]
    rotary = max(shape[-1] for shape in shapes)
    tokens = (found.sizes.batch or 1) * (found.sizes.seq or 1)
    _rope_site(found, path, region, max(1, size // (rotary * tokens)), 0, rotary)


def _rope_site(found: LiftState, path: str, nodes: set[fx.Node], q_heads: int, kv_heads: int, rotary: int) -> None:
    flow = found.flow
    node = max((n for n in nodes if flow.op(n) in _JOINS), key=flow.index.__getitem__)
    reads: dict[Any, None] = {s: None for n in nodes for s in flow.sources[n] if s not in nodes and s in found.live}
    found.add(
        LiftedSite(
            "rope", node, path, joined(path, "rope"), nodes, tuple(reads), role="attention",
            facts={"q_heads": q_heads, "kv_heads": kv_heads, "rotary_dim": rotary, "dims": ()},
        )
    )  # fmt: skip
