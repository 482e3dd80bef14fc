"""Which pairs of positions a mask lets through, read from the graph that makes it.

A mask of causal attention or of a sliding window depends on d, the query's position less the key's, and on nothing
else. Where a mask is made of positions (`arange`), constants and elementwise ops, it is followed as a step function of
d, which holds at every size. So is Hugging Face's search for sequences that were packed behind one another: the places
where positions do not rise by 1, counted, are one number everywhere where there are none. At fixed sizes, other parts
that are no larger than rows of positions are computed. Where all that fails and sizes are fixed, the whole mask is
computed once and looked at; a mask that draws random numbers, or reads a tensor from outside, has no rule.

One thing may come from outside: numbers of documents, [B, S] or [S], that are compared for equality along both axes.
Such a mask is two step functions of d: one for pairs of one document, one for all other pairs (`packed_of`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from deepwell.engine.passes.edit import run_node
from deepwell.graph.fx import memory_of, op_of, value_of, written_by

# A mask of that many entries is computed to look at it: 64M booleans.
_LARGEST = 1 << 26
# A part of a mask that is computed: positions of all sequences of a batch, not of pairs.
_SMALL = 1 << 20
_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "dropout", "poisson", "exponential", "geometric", "uniform")
_FORBIDDEN = {"get_attr", "call_module", "output"}
# Ops that give each entry of their result from the same entries of their operands.
_ELEMENTWISE = {
    "add", "sub", "mul", "div", "neg", "and_", "or_", "xor", "xor_", "invert", "not_", "bitwise_and", "bitwise_or",
    "bitwise_not", "bitwise_xor", "logical_and", "logical_or", "logical_not", "logical_xor", "where", "masked_fill",
    "eq", "ne", "lt", "le", "gt", "ge", "to", "convert", "contiguous", "clone",
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "lt": int.__lt__,
    "le": int.__le__,
    "gt": int.__gt__,
    "ge": int.__ge__,
    "eq": int.__eq__,
    "ne": int.__ne__,
}
_CONSTANTS = {"ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"}


@dataclass(frozen=True, slots=True)
class MaskBand:
    """Open where `first <= d <= last`, d being the query's position less the key's; infinite where there is no end."""

    first: float
    last: float

    def is_causal(self, size: int | None) -> bool:
        """Whether it is the lower triangle at a size, None: at every size."""
        return self.first == 0 and self.last >= (math.inf if size is None else size - 1)

    def window(self, size: int | None) -> int | None:
        """How many keys, its own among them, a query sees at most in a causal window; None for another mask."""
        is_window = self.first == 0 and 0 <= self.last < math.inf and not self.is_causal(size)
        return int(self.last) + 1 if is_window else None


@dataclass(frozen=True, slots=True)
class _Line:
    """An integer tensor that is `sum(slope * position) + offset`; axes are counted from the end, the last one is 1."""

    slopes: tuple[tuple[int, int], ...]  # (axis, slope)
    offset: int


@dataclass(frozen=True, slots=True)
class _Steps:
    """A tensor that is a step function of d over its last two axes: the value from each d on, the first from -inf."""

    starts: tuple[float, ...]
    values: tuple[Tensor, ...]

    def at(self, d: float) -> Tensor:
        return next(v for s, v in zip(reversed(self.starts), reversed(self.values), strict=True) if s <= d)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A node's whole numbers, [B, S] or [S], and where its axes lie in a view of it, counted from the end."""

    node: fx.Node
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Split:
    """A tensor that is a step function of d for pairs whose numbers in `rows` are equal, and another for the rest."""

    rows: fx.Node
    batch: int | None  # the axis of sequences, where rows has one
    same: _Steps
    other: _Steps


_Known = _Line | _Steps | _Rows | _Split


@dataclass(frozen=True, slots=True)
class PackedMask:
    """Open in a band, for pairs of one document: equal numbers of `documents`, [B, S], [1, S] or [S]."""

    documents: fx.Node
    band: MaskBand


def packed_of(mask: fx.Node) -> PackedMask | None:
    """The documents and the band that a mask [B, H, S, S] opens; None where it has no such rule."""
    value = value_of(mask)
    if value is None or value.dim() != 4 or (value.dtype is not torch.bool and not value.dtype.is_floating_point):
        return None
    order = _subgraph(mask, reads_inputs=True)
    if order is None or _is_written(order) or any(written_by(node) for node in order):
        return None
    found = _follow(order, has_rows=True)
    if not isinstance(found, _Split) or found.batch not in (None, 4):
        return None
    band = _band_of_steps(found.same, value.dtype)
    is_shut = all(_is_open(value_there.to(value.dtype)) is False for value_there in found.other.values)
    return PackedMask(found.rows, band) if band is not None and is_shut else None


def band_of(mask: fx.Node) -> MaskBand | None:
    """The band that a mask opens, at every size that its symbols may have; None where it has no such rule."""
    value = value_of(mask)
    if value is None or value.dim() < 2 or (value.dtype is not torch.bool and not value.dtype.is_floating_point):
        return None
    order = _subgraph(mask)
    if order is None or _is_written(order):
        return None
    found = _follow(order)
    if isinstance(found, _Steps):
        return _band_of_steps(found, value.dtype)
    sizes = [*value.shape, *(node.meta["example_value"] for node in order if _is_size(node))]
    if all(isinstance(size, int) for size in sizes) and not any(_is_random(node) for node in order):
        return _band_of_matrix(_computed(order)) if math.prod(value.shape) <= _LARGEST else None
    return None


def _is_open(value: Tensor) -> bool | None:
    """Whether an entry lets its pair through; None where it does something else to the score."""
    if value.dtype is torch.bool:
        return bool(value)
    # -inf, finfo.min, and what a model makes of them by addition: no score outweighs it.
    shut = bool(value <= torch.finfo(value.dtype).min / 2)
    return True if value == 0 else (False if shut else None)


def _band_of_steps(steps: _Steps, dtype: torch.dtype) -> MaskBand | None:
    opens = [_is_open(value.to(dtype)) for value in steps.values]
    ends = (*(start - 1 for start in steps.starts[1:]), math.inf)
    pieces = [(a, b) for a, b, is_open in zip(steps.starts, ends, opens, strict=True) if is_open and a <= b]
    joined = all(a == b + 1 for (_, b), (a, _) in pairwise(pieces))
    return MaskBand(pieces[0][0], pieces[-1][1]) if None not in opens and pieces and joined else None


def _band_of_matrix(mask: Tensor) -> MaskBand | None:
    queries, keys = mask.shape[-2:]
    if mask.dtype.is_floating_point:
        shut = mask <= torch.finfo(mask.dtype).min / 2
        if not bool(((mask == 0) | shut).all()):
            return None  # a bias of positions (ALiBi) is none
        mask = ~shut
    d = torch.arange(queries, device=mask.device)[:, None] - torch.arange(keys, device=mask.device)[None, :]
    seen = d[mask.reshape(-1, queries, keys)[0]] if mask.numel() else d[:0]
    if not seen.numel():
        return None
    first, last = int(seen.min()), int(seen.max())
    return MaskBand(first, last) if bool((mask == ((d >= first) & (d <= last))).all()) else None


# ---- the graph behind a mask ----


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymInt)


def _subgraph(node: fx.Node, *, reads_inputs: bool = False) -> list[fx.Node] | None:
    """All that a node is computed from, in order; None where it reads a tensor that is not made here, and may not."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in found:
            continue
        found.add(current)
        is_size = _is_size(current)
        if current.op in _FORBIDDEN or (current.op == "placeholder" and not is_size and not reads_inputs):
            return None
        if not is_size:  # a size is known from its symbol, whatever tensor it was read from
            stack += current.all_input_nodes
    return [each for each in node.graph.nodes if each in found]  # reads and writes of one tensor as the model has them


def _is_written(order: list[fx.Node]) -> bool:
    """Whether something writes into a part of the subgraph, or into a view of it, beside the graph's edges."""
    parts = {node for node in order if value_of(node) is not None}
    memory = {memory_of(node) for node in parts}
    others = (node for node in order[-1].graph.nodes if node not in parts)
    return any(memory_of(target) in memory for node in others for target in written_by(node))


def _is_random(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return any(word in name for word in _RANDOM)


def _computed(order: list[fx.Node]) -> Tensor:
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in order:
            values[node] = run_node(node, values)
    return values[order[-1]]


# ---- the mask as a function of d ----


def _follow(order: list[fx.Node], *, has_rows: bool = False) -> _Known | None:
    """What the last node is. With `has_rows` what cannot be followed may be numbers of documents."""
    known: dict[fx.Node, _Known | None] = {}
    small = _small_parts(order)
    with torch.no_grad():
        for node in order:
            if value_of(node) is None:
                known[node] = None
                continue
            known[node] = _next(node, known) or _everywhere(small.get(node)) or (_rows(node) if has_rows else None)
    return known[order[-1]]


def _rows(node: fx.Node) -> _Rows | None:
    value = value_of(node)
    is_whole = not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype is not torch.bool
    return _Rows(node, tuple(range(value.dim(), 0, -1))) if is_whole and value.dim() in (1, 2) else None


def _small_parts(order: list[fx.Node]) -> dict[fx.Node, Tensor]:
    """The values of small tensors of fixed sizes; none where one of them is written into."""
    values: dict[fx.Node, Tensor] = {}
    if any(written_by(node) for node in order):
        return values
    with torch.no_grad():
        for node in order:
            value, parents = value_of(node), node.all_input_nodes
            if value is None or node.op == "placeholder" or any(parent not in values for parent in parents):
                continue
            is_fixed = all(isinstance(size, int) for size in value.shape)
            if is_fixed and value.numel() <= _SMALL and not _is_random(node):
                values[node] = run_node(node, values)
    return values


def _everywhere(value: Tensor | None) -> _Steps | None:
    """A tensor that is one number."""
    if value is None or not value.numel() or not bool((value == value.flatten()[0]).all()):
        return None
    return _Steps((-math.inf,), (value.flatten()[0].cpu(),))


def _next(node: fx.Node, known: Mapping[fx.Node, _Known | None]) -> _Known | None:
    op, source = op_of(node), node.args[0] if node.args else None
    if op == "arange":
        return _positions(node)
    if op in _CONSTANTS:
        return _constant(node)
    made = [known.get(parent) for parent in node.all_input_nodes if not _is_size(parent)]
    if node.op == "placeholder" or any(item is None for item in made):
        return None
    if any(isinstance(item, (_Rows, _Split)) for item in made):
        return _of_documents(node, op, known)
    first = known.get(source) if isinstance(source, fx.Node) else None
    if isinstance(first, _Steps) and len(first.values) == 1:  # one number everywhere, whichever part is taken
        if op == "getitem":
            return first
        if op == "cumsum" and not first.values[0]:
            return _Steps(first.starts, (torch.zeros((), dtype=value_of(node).dtype),))
    if any(isinstance(item, _Line) for item in made):
        return _of_lines(node, op, known)
    if op in _ELEMENTWISE and not node.kwargs.get("out"):
        return _elementwise(node, known)
    steps = known.get(source) if isinstance(source, fx.Node) else None
    if not isinstance(steps, _Steps):
        return None
    if op in ("tril", "triu") and value_of(node).shape[-2:] != (1, 1):
        diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
        return _triangle(steps, op, diagonal) if isinstance(diagonal, int) else None
    is_same = op in ("getitem", "unsqueeze", "expand", "expand_as", "view", "reshape") and _keeps_last_axes(node, op)
    return steps if is_same else None


# ---- documents ----


def _of_documents(node: fx.Node, op: str, known: Mapping[fx.Node, Any]) -> _Known | None:
    """Numbers of documents moved, taken by positions or compared, and masks made of that."""
    operands = [known.get(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
    first = operands[0] if operands else None
    if isinstance(first, _Rows):
        if op in ("eq", "ne") and len(operands) == 2 and not node.kwargs:
            return _compared_rows(first, operands[1], op)
        if op == "getitem" and isinstance(node.args[1], tuple) and any(isinstance(i, fx.Node) for i in node.args[1]):
            return _taken(node, first, [known.get(i) if isinstance(i, fx.Node) else i for i in node.args[1]])
        is_same = op in ("to", "convert", "contiguous", "clone") and value_of(node).dtype == value_of(first.node).dtype
        axes = first.axes if is_same else _axes_after(node, op, first.axes)
        return _Rows(first.node, axes) if axes is not None else None
    made = [known[parent] for parent in node.all_input_nodes if not _is_size(parent)]
    split = next((item for item in made if isinstance(item, _Split)), None)
    if split is None or not all(isinstance(item, (_Steps, _Split)) for item in made):
        return None
    if any(isinstance(item, _Split) and (item.rows, item.batch) != (split.rows, split.batch) for item in made):
        return None
    if op in _ELEMENTWISE and not node.kwargs.get("out"):
        return _halves(split, lambda pick: _elementwise(node, pick), node, known)
    if op in ("tril", "triu") and first is split:
        diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
        if not isinstance(diagonal, int):
            return None
        return _halves(split, lambda pick: _triangle(pick[node.args[0]], op, diagonal), node, known)
    axes = _axes_after(node, op, (2, 1) if split.batch is None else (split.batch, 2, 1)) if first is split else None
    if axes is None or axes[-2:] != (2, 1):
        return None
    return _Split(split.rows, None if split.batch is None else axes[0], split.same, split.other)


def _halves(
    split: _Split, run: Callable[[Any], _Steps | None], node: fx.Node, known: Mapping[fx.Node, Any]
) -> _Split | None:
    """A node's value for pairs of one document and for the others."""
    parents = node.all_input_nodes
    picks = (
        {
            parent: getattr(known[parent], half) if isinstance(known[parent], _Split) else known[parent]
            for parent in parents
        }
        for half in ("same", "other")
        if all(parent in known for parent in parents)
    )
    made = [run(pick) for pick in picks]
    if len(made) != 2 or made[0] is None or made[1] is None:
        return None
    return _Split(split.rows, split.batch, made[0], made[1])


def _compared_rows(a: _Rows, b: Any, op: str) -> _Split | None:
    """`a == b` or `a != b`, where both are the same numbers, along queries and along keys."""
    if not isinstance(b, _Rows) or a.node is not b.node or {a.axes[-1], b.axes[-1]} != {1, 2}:
        return None
    if a.axes[:-1] != b.axes[:-1] or any(axis < 3 for axis in a.axes[:-1]):
        return None
    same, other = (_Steps((-math.inf,), (torch.tensor(is_true),)) for is_true in (op == "eq", op == "ne"))
    return _Split(a.node, a.axes[0] if len(a.axes) == 2 else None, same, other)


def _taken(node: fx.Node, rows: _Rows, index: list[Any]) -> _Rows | None:
    """`rows[sequence, position]`, where both indices count all of an axis from 0 on."""
    value, axes = value_of(rows.node), list[int]()
    if rows.axes != tuple(range(value.dim(), 0, -1)) or len(index) != value.dim():
        return None
    for line, part, size in zip(index, node.args[1], value.shape, strict=True):
        if isinstance(line, _Steps) and _is_one(size) and len(line.values) == 1 and not line.values[0]:
            axes.append(4)  # the only sequence, wherever its axis lies
            continue
        if not isinstance(line, _Line) or line.offset or len(line.slopes) != 1 or line.slopes[0][1] != 1:
            return None
        axis = line.slopes[0][0]
        if value_of(part).shape[-axis] != size:
            return None
        axes.append(axis)
    return _Rows(rows.node, tuple(axes)) if len(set(axes)) == len(axes) else None


def _axes_after(node: fx.Node, op: str, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Where axes lie after a view that adds some, counted from the end; None for any other."""
    before, after = value_of(node.args[0]), value_of(node)
    order: list[int | None] = list(range(before.dim()))
    if op == "unsqueeze":
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        if not isinstance(dim, int):
            return None
        order.insert(dim % after.dim(), None)
    elif op == "getitem" and _is_plain_index(node.args[1]):
        order = _indexed(node.args[1], before.dim())
    elif op in ("expand", "expand_as"):
        order[:0] = [None] * (after.dim() - before.dim())
    elif op not in ("view", "reshape", "contiguous", "clone") or tuple(before.shape) != tuple(after.shape):
        return None
    return tuple(len(order) - order.index(before.dim() - axis) for axis in axes)


def _indexed(index: Any, count: int) -> list[int | None]:
    """The axes that an index of `None`, `:` and `...` leaves, None for each new one."""
    parts = list(index) if isinstance(index, tuple) else [index]
    given = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    parts[at : at + 1] = [slice(None)] * (count - given)
    axes = iter(range(count))
    return [None if part is None else next(axes) for part in parts]


def _positions(node: fx.Node) -> _Line | None:
    """`arange(n)`, or from a number on: 0, 1, 2, ... along the last axis."""
    start = node.args[0] if len(node.args) > 1 else node.kwargs.get("start", 0)
    step = node.args[2] if len(node.args) > 2 else node.kwargs.get("step", 1)
    is_plain = type(start) is int and type(step) is int and step == 1
    return _Line(((1, 1),), start) if is_plain and not value_of(node).dtype.is_floating_point else None


def _constant(node: fx.Node) -> _Steps | None:
    """One number everywhere, in the dtype of the result."""
    name, value = op_of(node), value_of(node)
    number: Any = 1.0 if "ones" in name else 0.0
    if "full" in name:
        given = node.args[1:] if name == "full" else node.args[2:] if name == "new_full" else node.args[1:]
        number = given[0] if given else node.kwargs.get("fill_value")
    is_number = isinstance(number, (int, float))
    return _Steps((-math.inf,), (torch.full((), number, dtype=value.dtype),)) if is_number else None


def _of_lines(node: fx.Node, op: str, known: Mapping[fx.Node, Any]) -> _Line | _Steps | None:
    """Positions moved, reshaped or compared."""
    operands = [known.get(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
    line = operands[0] if operands else None
    if op in ("add", "sub") and len(operands) == 2 and not node.kwargs:
        return _sum(*operands, sign=1 if op == "add" else -1)
    if op == "neg":
        return _sum(0, line, sign=-1)
    if op in _COMPARISONS and len(operands) == 2:
        return _compared(_sum(*operands, sign=-1), _COMPARISONS[op])
    if op in ("to", "convert", "contiguous", "clone") and isinstance(line, _Line):
        dtype = value_of(node).dtype
        return line if dtype in (torch.int64, torch.int32) else None
    if isinstance(line, _Line) and op == "diff":
        return _rise(line, node, known)
    if isinstance(line, _Line) and op == "getitem" and _is_first_column(line, node.args[1]):
        return _Steps((-math.inf,), (torch.tensor(line.offset),))
    if isinstance(line, _Line) and op in ("getitem", "unsqueeze", "view", "reshape", "expand"):
        return _moved(line, value_of(node.args[0]), value_of(node), node, op)
    return None


def _is_first_column(line: _Line, index: Any) -> bool:
    """Whether an index takes the first entry along the axis of positions, the last one, and all of the others."""
    parts = index if isinstance(index, tuple) else (index,)
    return (
        dict(line.slopes).keys() == {1}
        and isinstance(parts[-1], slice)
        and (parts[-1].start, parts[-1].stop, parts[-1].step) in ((None, 1, None), (0, 1, None))
        and all(part == slice(None) for part in parts[:-1])
        and len(parts) > 1
    )


def _rise(line: _Line, node: fx.Node, known: Mapping[fx.Node, Any]) -> _Steps | None:
    """`diff(positions, prepend=...)` along them, where what is put ahead goes on with them: how much they rise."""
    given = {**dict(zip(("n", "dim", "prepend", "append"), node.args[1:], strict=False)), **node.kwargs}
    ahead = known.get(given.get("prepend"))
    is_plain = given.get("n", 1) == 1 and given.get("dim", -1) == -1 and given.get("append") is None
    if not is_plain or len(line.slopes) != 1 or line.slopes[0][0] != 1:
        return None
    if not isinstance(ahead, _Steps) or len(ahead.values) != 1 or value_of(given["prepend"]).shape[-1] != 1:
        return None
    rise = line.slopes[0][1]
    return _Steps((-math.inf,), (torch.tensor(rise),)) if int(ahead.values[0]) == line.offset - rise else None


def _sum(a: Any, b: Any, *, sign: int) -> _Line | None:
    lines = [_Line((), item) if type(item) is int else item for item in (a, b)]
    if not all(isinstance(line, _Line) for line in lines):
        return None
    slopes = dict(lines[0].slopes)
    for axis, slope in lines[1].slopes:
        slopes[axis] = slopes.get(axis, 0) + sign * slope
    kept = tuple(sorted((axis, slope) for axis, slope in slopes.items() if slope))
    return _Line(kept, lines[0].offset + sign * lines[1].offset)


def _compared(line: _Line | None, compare: Callable[[int, int], bool]) -> _Steps | None:
    """`line <op> 0`, where the line is d or -d and a number."""
    slopes = dict(line.slopes) if line is not None else {}
    slope = slopes.get(2, 0)
    if line is None or abs(slope) != 1 or slopes != {2: slope, 1: -slope}:
        return None
    turn = -slope * line.offset  # where the line is 0
    starts = (-math.inf, float(turn), float(turn + 1))
    return _Steps(starts, tuple(torch.tensor(compare(slope * side, 0)) for side in (-1, 0, 1)))


def _moved(line: _Line, before: Tensor, after: Tensor, node: fx.Node, op: str) -> _Line | None:
    """Positions along one axis after a reshape that keeps their order: the axis is the one that is not 1 long."""
    if op == "getitem" and not _is_plain_index(node.args[1]):
        return None
    long = [tuple(i for i, size in enumerate(reversed(t.shape), 1) if not _is_one(size)) for t in (before, after)]
    if op == "expand" and len(long[0]) == 1 and before.shape[-long[0][0]] == after.shape[-long[0][0]]:
        return line  # along other axes
    if len(line.slopes) != 1 or any(len(axes) != 1 for axes in long) or long[0][0] != line.slopes[0][0]:
        return None
    if before.shape[-long[0][0]] != after.shape[-long[1][0]]:
        return None
    return _Line(((long[1][0], line.slopes[0][1]),), line.offset)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _is_plain_index(index: Any) -> bool:
    """Whether an index adds axes and takes all of the others."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or part == slice(None) for part in parts)


def _keeps_last_axes(node: fx.Node, op: str) -> bool:
    before, after = value_of(node.args[0]), value_of(node)
    if op == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if not _is_plain_index(index) or (None in index[-2:] and not _ends_whole(index)):
            return False
    if op == "unsqueeze" and (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % after.dim() > (
        after.dim() - 3
    ):
        return False
    if op in ("view", "reshape") and any(not _is_one(size) for size in (*before.shape[:-2], *after.shape[:-2])):
        return False
    return before.dim() >= 2 and tuple(before.shape[-2:]) == tuple(after.shape[-2:])


def _ends_whole(index: tuple[Any, ...]) -> bool:
    """Whether new axes of an index stand in front: `mask[None]`, `mask[None, None]`."""
    last = max(i for i, part in enumerate(index) if part is None)
    return all(part is None for part in index[: last + 1]) and all(part is not None for part in index[last + 1 :])


def _triangle(steps: _Steps, op: str, diagonal: int) -> _Steps:
    """`tril` keeps d >= -diagonal, `triu` d <= -diagonal; the rest is 0."""
    edge = -diagonal if op == "tril" else 1 - diagonal
    below = torch.tensor(op == "triu")
    kept = _Steps((-math.inf, float(edge)), (below, ~below))
    return _by_pieces([steps, kept], lambda value, keep: value if keep else torch.zeros_like(value))


def _elementwise(node: fx.Node, known: Mapping[fx.Node, Any]) -> _Steps | None:
    nodes = [parent for parent in node.all_input_nodes if not _is_size(parent)]
    if len(nodes) != len(node.all_input_nodes):
        return None

    def run(*values: Tensor) -> Any:
        given = dict(zip(nodes, values, strict=True))
        return run_node(node, given)

    made = _by_pieces([known[parent] for parent in nodes], run)
    dtype = value_of(node).dtype
    is_tensor = all(isinstance(value, Tensor) and value.dim() == 0 for value in made.values)
    return _Steps(made.starts, tuple(value.to("cpu", dtype) for value in made.values)) if is_tensor else None


def _by_pieces(parts: list[_Steps], run: Callable[..., Any]) -> _Steps:
    starts = tuple(sorted({start for steps in parts for start in steps.starts}))
    return _Steps(starts, tuple(run(*(steps.at(start) for steps in parts)) for start in starts))
