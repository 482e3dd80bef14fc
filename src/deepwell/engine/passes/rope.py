"""Find rotary embedding written out and put one op in its place: of q, k and v at once where one linear made them.

    x * cos + cat((-x[R/2:], x[:R/2])) * sin          "half": Llama, Mistral, Qwen, GPT-NeoX, Phi
    x * cos + stack((-x[1::2], x[0::2])) * sin        "interleaved": GPT-J, Cohere, GLM
    cat((the above of x[:R], x[R:]))                  partial rotation

Where q, k and v are column ranges of one tensor the op reads its rows and writes three buffers, so that the merged rows
need not outlive the forward; the backward writes one gradient, as FP8 rows where the linear wants them. v costs a copy.
Runs after the linears were merged. Elsewhere q and k are rotated each by itself.
"""

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import fx

from deepwell.engine.passes.edit import KERNEL_DTYPES, erase_unread, replace, runs_in_kernels
from deepwell.graph.fx import (
    Writes,
    argument,
    arguments,
    memory_of,
    only_user,
    op_of,
    other_operand,
    skip_widening,
    value_of,
)
from deepwell.kernels.gemm.linear import split_columns
from deepwell.kernels.rope.autograd import rope, rope_qkv
from deepwell.kernels.rope.rope import MAX_WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSite:
    """One tensor's rotation. `heads_dim` is 1 where x is [B, H, S, D] and 2 where it is [B, S, H, D]."""

    last: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    convention: str
    heads_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where a tensor of heads lies in the rows of another: head h begins at column `start + h * step`."""

    source: fx.Node
    start: int
    step: int
    heads: int
    width: int
    heads_dim: int

    def covers(self, packing: str, start: int) -> bool:
        return self.start == start and self.step == (3 if packing == "heads" else 1) * self.width


def rewrite_rope(graph: fx.Graph, alone: bool = True) -> tuple[int, int]:
    """Replace every rotation. Returns how many tensors kernels rotate, and how many times q, k and v became one op.

    `alone=False` leaves q and k that no merged rows hold as they are: Inductor moves the same bytes for them.
    """
    writes = Writes(graph)
    found = [site for node in list(graph.nodes) if (site := find_rope(node)) is not None]
    sites = [site for site in found if not any(writes.while_read(t, site.last) for t in (site.x, site.cos, site.sin))]
    if not sites:
        return 0, 0
    groups: dict[tuple[Any, ...], list[tuple[RopeSite, Columns]]] = defaultdict(list)
    for site in sites:
        columns = columns_of(site.x)
        if columns is None or columns.heads_dim != site.heads_dim:
            continue  # the tables have rows for heads, not for tokens
        if not any(writes.between(t, t, site.last) for t in (site.cos, site.sin)):
            groups[(columns.source, *tables_of(site), site.convention)].append((site, columns))
    done: set[fx.Node] = set()
    for (source, *_), group in groups.items():
        if len(group) != 2 or memory_of(source) in writes.memory:  # the op reads all of it where it is made
            continue
        query, key = sorted(group, key=lambda item: item[1].start)
        if _replace_three(graph, query, key):
            done |= {query[0].last, key[0].last}
    others = [site for site in sites if alone and site.last not in done]
    for site in others:
        _replace_one(graph, site)
    erase_unread(graph)
    return len(done) + len(others), len(done) // 2


# ---- one rotation ----


def find_rope(node: fx.Node) -> RopeSite | None:
    """The rotation whose sum this node is."""
    if op_of(node) != "add" or arguments(node).keys() != {"input", "other"}:
        return None
    for rotated_product, plain_product in (node.args, node.args[::-1]):
        site = _match(node, plain_product, rotated_product)
        if site is not None:
            return site
    return None


def _match(total: fx.Node, plain: Any, rotated: Any) -> RopeSite | None:
    if any(op_of(product) != "mul" for product in (plain, rotated)):
        return None
    for rotation, sin in (rotated.args, rotated.args[::-1]):
        found = _rotated(rotation)
        if found is not None and found[0] in plain.args:
            source, convention = found
            return _site(total, source, other_operand(plain, source), sin, convention)
    return None


def _rotated(node: Any) -> tuple[fx.Node, str] | None:
    """(x, convention) where the node holds each pair (a, b) of x as (-b, a)."""
    if op_of(node) == "cat":
        convention, parts = "half", node.args[0]
    elif op_of(node) in ("flatten", "reshape", "view") and op_of(node.args[0]) == "stack":
        convention, parts = "interleaved", node.args[0].args[0]
        stack = node.args[0]
        if argument(stack, "dim", 0) not in (-1, value_of(stack).dim() - 1):
            return None
    else:
        return None
    if len(parts) != 2 or op_of(parts[0]) != "neg":
        return None
    first, second = slice_of(parts[1]), slice_of(parts[0].args[0])
    if first is None or second is None or first.source is not second.source:
        return None
    source = first.source
    value, own = value_of(source), value_of(node)
    if value is None or own is None or own.shape != value.shape or own.dim() != 4:
        return None
    if convention == "half" and argument(node, "dim", 0) not in (-1, own.dim() - 1):
        return None
    width = int(value.shape[-1])
    if convention == "half":
        wanted = (range(0, width // 2), range(width // 2, width))
    else:
        wanted = (range(0, width, 2), range(1, width, 2))
    return (source, convention) if width % 2 == 0 and (first.columns, second.columns) == wanted else None


def _site(total: fx.Node, source: fx.Node, cos: Any, sin: Any, convention: str) -> RopeSite | None:
    """The whole rotation around a matched sum: casts before and after it, columns that are passed by."""
    rotated = value_of(source)
    heads_dim = _heads_dim(rotated, cos, sin)
    if heads_dim is None:
        return None
    last, x = total, source
    part = slice_of(source)
    cat = only_user(total)
    if part is not None and cat is not None and op_of(cat) == "cat" and _passes_by(cat, total, part):
        last, x = cat, part.source
    last, high = _without_casts(last, x)
    if value_of(last).dtype != value_of(high).dtype:
        return None
    value = value_of(high)
    if not runs_in_kernels(high) or value.stride(-1) != 1 or value.shape[heads_dim] * value.shape[-1] > MAX_WIDTH:
        return None
    return RopeSite(last=last, x=high, cos=cos, sin=sin, convention=convention, heads_dim=heads_dim)


def _without_casts(last: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Last and first value where a rotation is computed in float32 between casts: those belong to it."""
    low, cast = skip_widening(x), only_user(last)
    is_cast = cast is not None and op_of(cast) == "to"
    if is_cast and value_of(cast).dtype == value_of(low).dtype != value_of(last).dtype:
        return cast, low
    return last, x


def _passes_by(cat: fx.Node, total: fx.Node, part: "Slice") -> bool:
    """Whether a cat puts the rest of a head behind its rotated columns."""
    parts = cat.args[0]
    if len(parts) != 2 or parts[0] is not total or argument(cat, "dim", 0) not in (-1, 3):
        return False
    rest = slice_of(parts[1])
    width = int(value_of(part.source).shape[-1])
    rotated = len(part.columns)
    return (
        rest is not None
        and rest.source is part.source
        and part.columns == range(rotated)
        and rest.columns == range(rotated, width)
    )


def _heads_dim(x: Any, cos: Any, sin: Any) -> int | None:
    """Which dimension of x [B, H, S, R] or [B, S, H, R] the tables are spread over; None where it is neither."""
    tables = [value_of(cos), value_of(sin)]
    if any(t is None or t.dtype not in KERNEL_DTYPES or t.requires_grad or t.dim() > 4 for t in tables):
        return None
    if tables[0].shape != tables[1].shape or tables[0].dim() < 2 or tables[0].shape[-1] != x.shape[-1]:
        return None
    shape = (1,) * (4 - tables[0].dim()) + tuple(tables[0].shape)
    if shape[0] != 1 and shape[0] != x.shape[0]:
        return None
    if shape[1] == 1 and shape[2] == x.shape[2]:
        return 1
    return 2 if shape[2] == 1 and shape[1] == x.shape[1] and tables[0].dim() == 4 else None


def tables_of(site: RopeSite) -> tuple[Any, ...]:
    """The key of a table: a model may spread the same ones over the heads once for q and once for k."""
    return tuple(_identity(node) for node in (site.cos, site.sin))


def _identity(node: fx.Node) -> Any:
    if op_of(node) not in ("unsqueeze", "getitem", "repeat_interleave", "to"):
        return node
    return op_of(node), _identity(node.args[0]), str(node.args[1:]), str(node.kwargs)


def _spread(node: fx.Node, heads_dim: int) -> fx.Node | None:
    is_spread = op_of(node) == "unsqueeze" and argument(node, "dim") == heads_dim and value_of(node).dim() == 4
    return node.args[0] if is_spread and value_of(node.args[0]) is not None else None


def _table_of(graph: fx.Graph, node: fx.Node, heads_dim: int) -> fx.Node:
    """The table as [S, R], [1, S, R] or [B, S, R]."""
    value = value_of(node)
    if value.dim() < 4:
        return node
    source = _spread(node, heads_dim)
    if source is not None:
        return source
    new = graph.call_method("squeeze", (node, heads_dim))
    new.meta["example_value"] = value.squeeze(heads_dim)
    return new


def _replace_one(graph: fx.Graph, site: RopeSite) -> None:
    with graph.inserting_before(site.last):
        tables = [_table_of(graph, table, site.heads_dim) for table in (site.cos, site.sin)]
        new = graph.call_function(rope, (site.x, *tables, site.convention, site.heads_dim))
    replace(site.last, new)


# ---- q, k and v of one tensor ----


def _replace_three(graph: fx.Graph, first: tuple[RopeSite, Columns], second: tuple[RopeSite, Columns]) -> bool:
    query, q = first
    packing = "heads" if q.step == 3 * q.width else "blocks"
    return replace_three(graph, first, second, packing, rope_qkv, how=(packing, query.convention))


def replace_three(
    graph: fx.Graph,
    first: tuple[RopeSite, Columns],
    second: tuple[RopeSite, Columns],
    packing: str,
    function: Any,
    *,
    weights: tuple[fx.Node, ...] | None = None,
    how: tuple[Any, ...],
) -> bool:
    """Put `function` of merged rows, `weights` if there are some, tables, heads and `how` in the place of q, k and v.

    False where the rows hold them otherwise than `packing` says, or one is read before all inputs are known.
    """
    (query, q), (key, k) = first, second
    behind_q = q.width if packing == "heads" else q.heads * q.width
    if q.width != k.width or not q.covers(packing, 0) or not k.covers(packing, behind_q):
        return False
    found = _find_value(graph, q, k, packing)
    if found is None:
        return False
    v_node, v = found
    place = _place_of(graph, (q.source, query.cos, query.sin, *(weights or ())), (query.last, key.last, v_node))
    if place is None:
        return False
    source = _only_three(graph, q.source, (q.heads + k.heads + v.heads) * q.width)
    with graph.inserting_before(place):
        tables = [_table_of(graph, table, query.heads_dim) for table in (query.cos, query.sin)]
        given = (source, *([] if weights is None else [weights]), *tables, (q.heads, k.heads, v.heads), *how)
        three = graph.call_function(function, given)
        new = []
        for i, heads_dim in enumerate((query.heads_dim, key.heads_dim, v.heads_dim)):
            item = graph.call_function(operator.getitem, (three, i))
            new.append(graph.call_method("transpose", (item, 1, 2)) if heads_dim == 1 else item)
    for old, item in zip((query.last, key.last, v_node), new, strict=True):
        replace(old, item)
    return True


def _find_value(graph: fx.Graph, q: Columns, k: Columns, packing: str) -> tuple[fx.Node, Columns] | None:
    """The node that holds v: the columns that q and k leave."""
    start = 2 * q.width if packing == "heads" else (q.heads + k.heads) * q.width
    for node in graph.nodes:
        v = columns_of(node) if node.users else None
        if v is None or v.source is not q.source or v.width != q.width or not v.covers(packing, start):
            continue
        total = (q.heads + k.heads + v.heads) * q.width
        # A reader that is again a tensor of heads is the one that attention reads.
        leads_on = any(columns_of(user) is not None for user in node.users)
        if total in _cuts(q.source) and total <= MAX_WIDTH and not leads_on:
            return node, v
    return None


def _place_of(graph: fx.Graph, inputs: tuple[fx.Node, ...], outputs: tuple[fx.Node, ...]) -> fx.Node | None:
    """The node before which all inputs are known and none of the outputs is read; None where there is no such place."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    known = max(order[node] for node in inputs)
    place = next(node for node, i in order.items() if i > known and node.op not in ("placeholder", "get_attr"))
    first_read = min(order[user] for node in outputs for user in (node, *node.users) if user is not node)
    return place if order[place] <= first_read else None


def _cuts(source: fx.Node) -> set[int]:
    """The columns at which q, k and v may end: the last, or one between two linears that were merged."""
    split = _merged_split(source)
    value = value_of(source)
    found = {int(value.shape[-1])} if value is not None else set()
    return found | ({sum(split.args[1][:i]) for i in range(1, len(split.args[1]) + 1)} if split is not None else set())


def _merged_split(source: fx.Node) -> fx.Node | None:
    return next((user for user in source.users if user.target is split_columns), None)


def _only_three(graph: fx.Graph, source: fx.Node, total: int) -> fx.Node:
    """The columns of q, k and v alone, where a parallel MLP's linear was merged with them (GPT-J, Phi, Cohere)."""
    split = _merged_split(source)
    if split is None or sum(split.args[1]) == total:
        return source
    widths: tuple[int, ...] = tuple(split.args[1])
    taken = next(i for i in range(len(widths)) if sum(widths[:i]) == total)
    with graph.inserting_before(split):
        again = graph.call_function(split_columns, (source, (total, *widths[taken:])))
        three = graph.call_function(operator.getitem, (again, 0))
    for item in list(split.users):
        index = item.args[1]
        if index >= taken:
            with graph.inserting_before(item):
                replace(item, graph.call_function(operator.getitem, (again, index - taken + 1)))
    return three


# ---- views ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A range of the last dimension of another tensor."""

    source: fx.Node
    columns: range


def slice_of(node: Any) -> Slice | None:
    """The columns that a node takes of another: `x[..., a:b:c]`, an item of chunk, split or a merged linear."""
    if op_of(node) != "getitem":
        return None
    source, index = node.args
    if isinstance(index, tuple):
        return _indexed(source, index)
    if not isinstance(index, int) or not isinstance(source, fx.Node):
        return None
    widths = _widths(source)
    if widths is None or not 0 <= index < len(widths):
        return None
    start = sum(widths[:index])
    return Slice(source=source.args[0], columns=range(start, start + widths[index]))


def _indexed(source: Any, index: tuple[Any, ...]) -> Slice | None:
    value = value_of(source)
    if value is None:
        return None
    *before, last = index
    whole = [item is Ellipsis or item == slice(None) for item in before]
    reaches = Ellipsis in before or len(index) == value.dim()
    if not all(whole) or not reaches or not isinstance(last, slice):
        return None
    if any(part is not None and not isinstance(part, int) for part in (last.start, last.stop, last.step)):
        return None
    return Slice(source=source, columns=range(*last.indices(int(value.shape[-1]))))


def _widths(node: fx.Node) -> list[int] | None:
    """The widths of the pieces that a node cuts the last dimension into."""
    if node.target is split_columns:
        return [int(width) for width in node.args[1]]
    name = op_of(node)
    if name not in ("chunk", "split") or value_of(node.args[0]) is None:
        return None
    value = value_of(node.args[0])
    width = int(value.shape[-1])
    if argument(node, "dim", 0) not in (-1, value.dim() - 1):
        return None
    how = argument(node, "chunks" if name == "chunk" else "sizes")
    if isinstance(how, (list, tuple)):
        return [int(piece) for piece in how] if all(isinstance(piece, int) for piece in how) else None
    if not isinstance(how, int) or how < 1 or not width:
        return None
    size = -(-width // how) if name == "chunk" else how
    return [min(size, width - start) for start in range(0, width, size)]


def columns_of(node: Any) -> Columns | None:
    """Where the heads of a 4D tensor lie in the rows of a 3D one, seen through views alone."""
    value = value_of(node)
    if value is None or value.dim() != 4:
        return None
    part = slice_of(node)  # GPT-NeoX cuts each head's q, k, v after it split the heads
    inner = part.source if part is not None else node
    heads_dim, inner = (1, inner.args[0]) if swaps_heads(inner) else (2, inner)
    if op_of(inner) not in ("view", "reshape") or not isinstance(inner.args[0], fx.Node):
        return None
    rows, apart = value_of(inner.args[0]), value_of(inner)
    if rows is None or apart is None or rows.dim() != 3 or apart.dim() != 4 or rows.shape[:2] != apart.shape[:2]:
        return None
    heads, step = (int(size) for size in apart.shape[2:])
    columns = part.columns if part is not None else range(step)
    if columns.step != 1:
        return None
    row = slice_of(inner.args[0])
    source, start = (row.source, row.columns) if row is not None else (inner.args[0], range(heads * step))
    if start.step != 1 or len(start) != heads * step:
        return None
    return Columns(
        source=source,
        start=start.start + columns.start,
        step=step,
        heads=heads,
        width=len(columns),
        heads_dim=heads_dim,
    )


def swaps_heads(node: Any) -> bool:
    """Whether a node is x.transpose(1, 2) of four dimensions."""
    value = value_of(node)
    if value is None or value.dim() != 4:
        return False
    if op_of(node) == "transpose":
        dims = {argument(node, "dim0"), argument(node, "dim1")}
        return dims in ({1, 2}, {-3, -2})
    if op_of(node) != "permute":
        return False
    return tuple(argument(node, "dims")) == (0, 2, 1, 3)
