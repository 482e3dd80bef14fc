"""Join the norms of q's and k's heads with the rotation behind them, where q, k and v lie in one tensor's rows.

    q = rope(norm(rows[..., :Q].view(B, S, H, D)).transpose(1, 2)), k alike      Qwen3; Gemma 3 transposes, then norms

Runs after the linears were merged and before the rotations that are left (passes/rope.py). What is no norm of whole
heads (OLMo 2 norms the rows of all heads together), two different norms or a rotation of a part of each head stay.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from deepwell.engine.passes.edit import erase_unread
from deepwell.engine.passes.rope import Columns, RopeSite, columns_of, find_rope, replace_three, swaps_heads, tables_of
from deepwell.graph.fx import Writes, is_changed, memory_of, value_of
from deepwell.kernels.norm.autograd import rms_norm
from deepwell.kernels.rope.autograd import qk_norm_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedSite:
    """A rotation whose input is a norm of heads; `columns` is where those heads lie before the norm."""

    site: RopeSite
    norm: fx.Node
    columns: Columns


def rewrite_qk_norm_rope(graph: fx.Graph) -> int:
    """Replace every pair of them and its v. Returns how many."""
    groups: dict[tuple[Any, ...], list[NormedSite]] = defaultdict(list)
    writes = Writes(graph)
    for node in list(graph.nodes):
        found = _normed(find_rope(node))
        if found is not None and not any(writes.between(t, t, node) for t in _read_early(found)):
            _, eps, rounding = found.norm.args[1:]
            alike = (found.columns.source, *tables_of(found.site), found.site.convention, eps, rounding)
            groups[alike].append(found)
    if not groups:
        return 0
    count = 0
    for (source, *_), group in groups.items():
        if len(group) == 2 and memory_of(source) not in writes.memory:
            query, key = sorted(group, key=lambda item: item.columns.start)
            count += _replace(graph, query, key)
    erase_unread(graph)
    return count


def _read_early(found: NormedSite) -> tuple[fx.Node, ...]:
    """What the joined op reads where the merged rows are made."""
    return found.site.cos, found.site.sin, found.norm.args[1]


def _normed(site: RopeSite | None) -> NormedSite | None:
    """The norm before a rotation of whole heads, None where there is none."""
    if site is None:
        return None
    norm = site.x.args[0] if swaps_heads(site.x) else site.x
    if not isinstance(norm, fx.Node) or norm.target is not rms_norm or is_changed(norm):
        return None
    columns = columns_of(norm.args[0])
    if columns is None or value_of(site.cos).shape[-1] != columns.width:
        return None
    if value_of(norm.args[1]) is None or tuple(value_of(norm.args[1]).shape) != (columns.width,):
        return None
    return NormedSite(site=site, norm=norm, columns=replace(columns, heads_dim=site.heads_dim))


def _replace(graph: fx.Graph, query: NormedSite, key: NormedSite) -> bool:
    weights = (query.norm.args[1], key.norm.args[1])
    how = (*query.norm.args[2:], query.site.convention)
    first, second = ((part.site, part.columns) for part in (query, key))
    return replace_three(graph, first, second, "blocks", qk_norm_rope, weights=weights, how=how)
