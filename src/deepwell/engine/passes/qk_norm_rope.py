"""Join the norms of q and k with the rotation behind them, where q, k and v lie in one tensor's rows.

    q = rope(norm(rows[..., :Q].view(B, S, H, D)).transpose(1, 2)), k alike      Qwen3; Gemma 3 transposes, then norms
    q = rope(norm(rows[..., :Q]).view(B, S, H, D).transpose(1, 2)), k alike      OLMo 2, OLMoE: one norm of all heads

Runs after the linears were merged and before the rotations that are left (passes/rope.py). Norms of parts of a head,
of more columns than registers hold, two different norms or a rotation of a part of each head stay.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from deepwell.engine.passes.edit import erase_unread
from deepwell.engine.passes.rope import (
    Columns,
    RopeSite,
    columns_of,
    find_rope,
    replace_three,
    slice_of,
    swaps_heads,
    tables_of,
)
from deepwell.graph.fx import Writes, is_changed, memory_of, value_of
from deepwell.kernels.norm.autograd import rms_norm
from deepwell.kernels.rope.autograd import qk_norm_rope
from deepwell.kernels.rope.qk_norm_rope import MAX_WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedSite:
    """A rotation whose input is a norm of heads; `columns` is where those heads lie before the norm.

    `is_whole`: one norm of all heads.
    """

    site: RopeSite
    norm: fx.Node
    columns: Columns
    is_whole: bool = False


def rewrite_qk_norm_rope(graph: fx.Graph) -> int:
    """Replace every pair of them and its v. Returns how many."""
    groups: dict[tuple[Any, ...], list[NormedSite]] = defaultdict(list)
    writes = Writes(graph)
    for node in list(graph.nodes):
        site = find_rope(node)
        found = (_normed(site) or _normed_whole(site)) if site is not None else None
        if found is not None and not any(writes.between(t, t, node) for t in _read_early(found)):
            _, eps, rounding = found.norm.args[1:]
            alike = (found.columns.source, *tables_of(found.site), found.site.convention, eps, rounding, found.is_whole)
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


def _normed(site: RopeSite) -> NormedSite | None:
    """The norm of each head before a rotation of whole heads, None where there is none."""
    norm = site.x.args[0] if swaps_heads(site.x) else site.x
    columns = columns_of(norm.args[0]) if _is_norm(norm) else None
    if columns is not None and norm is not site.x:
        columns = replace(columns, heads_dim=3 - columns.heads_dim)
    if columns is None or not _fits(site, norm, columns, columns.width):
        return None
    return NormedSite(site=site, norm=norm, columns=columns)


def _normed_whole(site: RopeSite) -> NormedSite | None:
    """The norm of all heads together before a rotation of each, None where there is none."""
    columns = columns_of(site.x)
    if columns is None or columns.start != 0 or not _is_norm(columns.source):
        return None
    norm, width = columns.source, columns.heads * columns.width
    rows = slice_of(norm.args[0])
    if rows is None or columns.step != columns.width or width > MAX_WHOLE or not _fits(site, norm, columns, width):
        return None
    if rows.columns.step != 1 or len(rows.columns) != width:
        return None
    before = replace(columns, source=rows.source, start=rows.columns.start)
    return NormedSite(site=site, norm=norm, columns=before, is_whole=True)


def _is_norm(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is rms_norm and not is_changed(node)


def _fits(site: RopeSite, norm: fx.Node, columns: Columns, width: int) -> bool:
    """Whether whole heads are rotated, by tables with a row for each token, and the norm's weight is that wide."""
    weight = value_of(norm.args[1])
    is_by_token = columns.heads_dim == site.heads_dim and value_of(site.cos).shape[-1] == columns.width
    return is_by_token and weight is not None and tuple(weight.shape) == (width,)


def _replace(graph: fx.Graph, query: NormedSite, key: NormedSite) -> bool:
    weights = (query.norm.args[1], key.norm.args[1])
    how = (*query.norm.args[2:], query.site.convention)
    first, second = ((part.site, part.columns) for part in (query, key))
    return replace_three(graph, first, second, "blocks", qk_norm_rope, weights=weights, how=how)
