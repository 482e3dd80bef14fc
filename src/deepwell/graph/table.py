"""The IR as a table that a person wants to read: what `print(ir)` shows. Pure, no torch.

Every distinct block is printed once with the layers it stands for. Flops are the forward's, per token of a sequence of
the length that the header names, because attention's share depends on it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepwell.graph.fusion import FusionSite, fusion_sites
from deepwell.graph.ir import IR
from deepwell.graph.ops import (
    Activation,
    Attention,
    Conv,
    Embedding,
    GroupedLinear,
    Linear,
    Matmul,
    Norm,
    Op,
    Other,
    Rope,
    TopK,
    Workload,
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
class _Section:
    """A group of ops with its heading: the stem, one block, or the tail."""

    title: str
    ops: tuple[Op, ...]
    count: int


def ir_table(ir: IR, seq_len: int | None = None) -> str:
    """The whole IR as text, at most 120 columns wide. `seq_len` is the length that flops are shown for."""
    if seq_len is None:
        seq_len = min(4096, ir.max_positions or 4096)
    work = Workload(seq_len=seq_len)
    total = max(ir.flops(1, seq_len), 1)
    sections = _sections(ir)
    most = max((op.flops(work) for section in sections for op in section.ops), default=0) / work.tokens
    unit, size = ("MFLOP", 1e6) if most >= 1e6 else ("kFLOP", 1e3)
    tables = [[_row(op, section, work, total, size) for op in section.ops] for section in sections]
    head = [f"{unit}/token" if name == "flops" else name for name in _COLUMNS]
    cells = _fit([head, *(row for table in tables for row in table)])
    lines = text_table(cells, right=[_COLUMNS.index(name) for name in _NUMERIC])
    # The columns line up through all sections; the headings go between.
    out = [*_header(ir, seq_len), "", lines.pop(0)]
    for section, table in zip(sections, tables, strict=True):
        out += [_heading(section, work, total), *lines[: len(table)]]
        del lines[: len(table)]
    out += ["", *_fusion_summary(fusion_sites(ir), ir)]
    if ir.notes:
        out += ["", "notes", *(f"  - {note}" for note in ir.notes)]
    return "\n".join(line for text in out for line in _wrap(text))


def _sections(ir: IR) -> list[_Section]:
    sections = [_Section(title="stem", ops=ir.stem, count=1)]
    for index, block in enumerate(ir.blocks):
        where = [i for i, layer in enumerate(ir.layers) if layer.block == index]
        if where:
            title = f"{layers_label(where)}: {block.label}"
            sections.append(_Section(title=title, ops=block.ops, count=len(where)))
    sections.append(_Section(title="tail", ops=ir.tail, count=1))
    return [section for section in sections if section.ops]


def _header(ir: IR, seq_len: int) -> list[str]:
    total, active = ir.num_params, ir.active_params
    size = f"{short_count(total)} parameters ({total:,})"
    if active != total:
        size += f", {short_count(active)} active per token ({active:,})"
    facts = [ir.dtype, f"{ir.num_layers} layers"]
    if ir.num_experts:
        facts.append(f"{ir.num_experts} experts")
    if ir.max_positions:
        facts.append(f"up to {ir.max_positions:,} positions")
    facts.append(f"read from {ir.source}")
    per_token = ir.flops_per_token(seq_len)
    speed = f"{per_token / 1e9:.2f} GFLOP" if per_token >= 1e7 else f"{per_token / 1e3:.1f} kFLOP"
    return [f"{ir.name}: {size}", ", ".join(facts), f"forward {speed}/token at {seq_len:,} tokens"]


def _heading(section: _Section, work: Workload, total: int) -> str:
    params = sum(op.num_params for op in section.ops)
    flops = sum(op.flops(work) for op in section.ops)
    each = " each" if section.count > 1 else ""
    share = f", {100 * flops * section.count / total:.1f}% of the flops" if flops else ""
    return f"{section.title}  [{short_count(params)} parameters{each}{share}]"


def _row(op: Op, section: _Section, work: Workload, total: int, unit: float) -> list[str]:
    flops = op.flops(work)
    return [
        op.name,
        op.kind,
        _dimensions(op),
        ", ".join(_short_names(op.inputs, section.ops)),
        short_count(op.num_params) if op.num_params else ("tied" if op.params else ""),
        f"{flops / work.tokens / unit:,.1f}" if flops else "",
        f"{100 * flops * section.count / total:.1f}%" if flops else "",
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


def _wrap(line: str) -> list[str]:
    """Break an over-long heading or note at a blank; a table row is cut to fit before it comes here."""
    if len(line) <= WIDTH:
        return [line]
    return textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _fusion_summary(sites: Sequence[FusionSite], ir: IR) -> list[str]:
    """One line per kind with its distinct sites; a site is named by its ops' own short names."""
    if not sites:
        return []
    groups: dict[str, dict[tuple[str, ...], int]] = {}
    for site in sites:
        names = tuple(_short_names(site.ops, _siblings(ir, site)))
        by_ops = groups.setdefault(site.kind, {})
        by_ops[names] = by_ops.get(names, 0) + site.count
    lines = []
    for kind, by_ops in groups.items():
        total = sum(by_ops.values())
        found = "; ".join(" + ".join(names) for names in by_ops)
        for i, piece in enumerate(textwrap.wrap(found, WIDTH - 30)):
            lines.append([kind, f"{total}x", piece] if i == 0 else ["", "", piece])
    return ["fusion sites", *text_table(lines, right=[1])]


def _siblings(ir: IR, site: FusionSite) -> tuple[Op, ...]:
    return ir.stem + ir.tail if site.block is None else ir.blocks[site.block].ops
