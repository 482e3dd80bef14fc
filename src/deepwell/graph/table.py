"""Tables of text: aligned columns, counts to read, and the ops of a model as `print(ir)` shows them. Pure, no torch."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepwell.graph.fusion import FusionSite
from deepwell.graph.ops import (
    Activation,
    Attention,
    Conv,
    Embedding,
    GroupedLinear,
    InputSizes,
    Linear,
    Matmul,
    Norm,
    Op,
    Other,
    Rope,
    TopK,
)

WIDTH = 120
_COLUMNS = ("op", "kind", "weight or shape", "reads", "params", "flops", "share")
_NUMERIC = ("params", "flops", "share")
# What gives way first where a row is wider than the page, and how narrow it may get.
_SHRINK = (("reads", 14), ("weight or shape", 18), ("op", 24))


def layer_ranges(indices: Iterable[int]) -> str:
    """Sorted layer numbers, runs folded: "0-2", "0-34 step 2", "0, 3, 7-9"."""
    left = sorted(set(indices))
    parts: list[str] = []
    while left:
        run, step = 1, left[1] - left[0] if len(left) > 1 else 1
        while run < len(left) and left[run] - left[run - 1] == step:
            run += 1
        if step > 1 and run < 3:
            run = 1  # two numbers apart are two numbers, not a run
        if run == 1:
            parts.append(str(left[0]))
        else:
            parts.append(f"{left[0]}-{left[run - 1]}" + (f" step {step}" if step > 1 else ""))
        left = left[run:]
    return ", ".join(parts)


def layers_label(indices: Sequence[int]) -> str:
    """ "layer 7" or "layers 0-2 (3x)"."""
    if len(indices) == 1:
        return f"layer {indices[0]}"
    return f"layers {layer_ranges(indices)} ({len(indices)}x)"


def short_count(count: float) -> str:
    """A count to read: 8.03B, 117.4M, 4096."""
    if count < 10_000:
        return f"{count:g}"
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.2f}{unit}" if count < 10 * size else f"{count / size:.1f}{unit}"
    raise AssertionError("unreachable: every count of 10,000 and more has a unit")


def text_table(rows: Sequence[Sequence[str]], right: Iterable[int] = (), indent: str = "  ") -> list[str]:
    """Rows of cells as aligned lines without trailing blanks; the columns in `right` are flush right."""
    if not rows:
        return []
    flush_right = set(right)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            c.rjust(w) if i in flush_right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """A group of ops with its heading: the stem, one block, or the tail."""

    title: str
    ops: tuple[Op, ...]
    count: int


def op_table(groups: Sequence[OpGroup], seq_len: int, total: int) -> list[str]:
    """The columns of every op, a heading before each group. Flops are the forward's, per token of a sequence of that
    length, since attention's share depends on it; `total` are those of the whole model."""
    work, total = InputSizes(seq_len=seq_len), max(total, 1)
    most = max((op.flops(work) for group in groups for op in group.ops), default=0) / work.tokens
    unit, size = ("MFLOP", 1e6) if most >= 1e6 else ("kFLOP", 1e3)
    tables = [[_row(op, group, work, total, size) for op in group.ops] for group in groups]
    head = [f"{unit}/token" if name == "flops" else name for name in _COLUMNS]
    cells = _fit([head, *(row for table in tables for row in table)])
    lines = text_table(cells, right=[_COLUMNS.index(name) for name in _NUMERIC])
    # The columns line up through all groups; the headings go between.
    out = [lines.pop(0)]
    for group, table in zip(groups, tables, strict=True):
        out += [_heading(group, work, total), *lines[: len(table)]]
        del lines[: len(table)]
    return out


def _heading(group: OpGroup, work: InputSizes, total: int) -> str:
    params = sum(op.num_params for op in group.ops)
    flops = sum(op.flops(work) for op in group.ops)
    each = " each" if group.count > 1 else ""
    share = f", {100 * flops * group.count / total:.1f}% of the flops" if flops else ""
    return f"{group.title}  [{short_count(params)} parameters{each}{share}]"


def _row(op: Op, group: OpGroup, work: InputSizes, total: int, unit: float) -> list[str]:
    flops = op.flops(work)
    return [
        op.name,
        op.kind,
        _dimensions(op),
        ", ".join(_short_names(op.inputs, group.ops)),
        short_count(op.num_params) if op.num_params else ("tied" if op.params else ""),
        f"{flops / work.tokens / unit:,.1f}" if flops else "",
        f"{100 * flops * group.count / total:.1f}%" if flops else "",
    ]


def _dimensions(op: Op) -> str:
    """The sizes that tell one op from another of its kind, without the rows."""
    if isinstance(op, GroupedLinear):
        return f"{op.experts} x ({op.k} -> {op.n})" + (" + bias" if op.bias else "")
    if isinstance(op, Linear):
        return f"{op.k} -> {op.n}" + (" + bias" if op.bias else "")
    if isinstance(op, Attention):
        heads = f"{op.q_heads} heads" if op.q_heads == op.kv_heads else f"{op.q_heads}/{op.kv_heads} heads"
        dims = f"{op.qk_dim}" if op.qk_dim == op.v_dim else f"{op.qk_dim}/{op.v_dim}"
        mask = f", window {op.window}" if op.window else ("" if op.causal else ", no mask")
        return f"{heads} x {dims}{mask}"
    if isinstance(op, Embedding):
        return f"{op.vocab} x {op.width}"
    if isinstance(op, Norm):
        return f"{op.norm} {op.width}" + (f", {op.rows.factor} heads" if op.rows.factor > 1 else "")
    if isinstance(op, Rope):
        return f"{op.q_heads} + {op.kv_heads} heads x {op.rotary_dim}"
    if isinstance(op, Activation):
        return f"{op.function}{' gated' if op.gated else ''} {op.width}"
    if isinstance(op, TopK):
        return f"{op.top_k} of {op.experts}, {op.scoring}"
    if isinstance(op, Other):
        return f"{op.function} {op.width}"
    if isinstance(op, Conv):
        return f"{op.k} -> {op.n}"
    if isinstance(op, Matmul):
        return " x ".join(str(size) for size in (op.m, op.k, op.n))
    return " x ".join(str(size) for size in op.shape)


def _short_names(names: Iterable[str], ops: Iterable[Op]) -> list[str]:
    """Each name cut to its shortest ending that no other op of the group has."""
    known = [op.name for op in ops]
    short = []
    for name in names:
        pieces = name.split(".")
        endings = (".".join(pieces[-n:]) for n in range(1, len(pieces) + 1))
        short.append(next((e for e in endings if sum(k == e or k.endswith("." + e) for k in known) <= 1), name))
    return short


def _fit(rows: list[list[str]]) -> list[list[str]]:
    """Shorten the wide columns until a row fits the page; what was cut ends in "..."."""
    for name, least in _SHRINK:
        column = _COLUMNS.index(name)
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        excess = 2 + sum(widths) + 2 * (len(widths) - 1) - WIDTH
        if excess > 0:
            limit = max(least, widths[column] - excess)
            for row in rows:
                row[column] = _cut(row[column], limit, from_left=name == "op")
    return rows


def _cut(text: str, limit: int, *, from_left: bool) -> str:
    if len(text) <= limit:
        return text
    return "..." + text[3 - limit :] if from_left else text[: limit - 3] + "..."


def wrapped(lines: Iterable[str]) -> str:
    """The lines as text, over-long headings and notes broken at a blank; a table row is cut to fit before."""
    out: list[str] = []
    for line in lines:
        fits = len(line) <= WIDTH
        out += (
            [line]
            if fits
            else textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        )
    return "\n".join(out)


def fusion_summary(sites: Sequence[FusionSite], ops: Mapping[int | None, Iterable[Op]]) -> list[str]:
    """One line per kind with its distinct sites; a site is named by its ops' own short names. `ops` are by block."""
    if not sites:
        return []
    groups: dict[str, dict[tuple[str, ...], int]] = {}
    for site in sites:
        names = tuple(_short_names(site.ops, ops[site.block]))
        by_ops = groups.setdefault(site.kind, {})
        by_ops[names] = by_ops.get(names, 0) + site.count
    lines = []
    for kind, by_ops in groups.items():
        total = sum(by_ops.values())
        found = "; ".join(" + ".join(names) for names in by_ops)
        for i, piece in enumerate(textwrap.wrap(found, WIDTH - 30)):
            lines.append([kind, f"{total}x", piece] if i == 0 else ["", "", piece])
    return ["fusion sites", *text_table(lines, right=[1])]
