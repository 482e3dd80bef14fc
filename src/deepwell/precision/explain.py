"""A policy on a model as a table to read: layer by GEMM by format, with the rule that decided. Pure, no torch.

Layers whose linear layers got the same decisions are folded into one group. Shares are of the linear layers' training
flops (forward and backward); softmax attention is no part of them.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deepwell.graph.ops import InputSizes
from deepwell.graph.table import WIDTH, layers_label, text_table
from deepwell.hardware.codec import JsonValue
from deepwell.precision.gemm_format import GEMMS
from deepwell.precision.resolve import Decision, Resolver
from deepwell.precision.rules import ALWAYS, Rule, Steps, change_steps, steps_text

if TYPE_CHECKING:
    from deepwell.graph.ir import IR, Site

# Shares of flops between linear layers hardly depend on the length: only padding and rounding of expert rows would.
_WORK = InputSizes(seq_len=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One linear layer of a group: its three formats and what decided them."""

    op: str
    fwd: str
    dgrad: str
    wgrad: str
    decided_by: tuple[str, ...]  # one text where one rule decided all three


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers with the same decisions. `layers` is empty in stem and tail, whose rows carry full paths."""

    where: str
    layers: tuple[int, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """Steps between two changes."""

    steps: Steps
    groups: tuple[Group, ...]
    shares: tuple[tuple[str, float], ...]  # format -> share of the linear layers' training flops

    @property
    def label(self) -> str:
        start, stop = self.steps
        if self.steps == ALWAYS:
            return "all steps"
        return f"step {start}" if stop == start + 1 else f"steps {steps_text(self.steps)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(JsonValue):
    """What a policy does to a model. Frozen, printable, JSON."""

    model: str
    num_layers: int
    spans: tuple[StepSpan, ...]
    formats: tuple[str, ...]  # what each low-precision format in use means for each GEMM
    notes: tuple[str, ...]

    def __str__(self) -> str:
        out = [f"precision of {self.model}, {self.num_layers} layers"]
        for span in self.spans:
            shares = ", ".join(f"{100 * share:.1f}% {name}" for name, share in span.shares)
            out += ["", f"{span.label}  (linear layers' training flops: {shares or 'none'})", *_span_lines(span)]
        if self.formats:
            out += ["", "formats", *(f"  {line}" for line in self.formats)]
        if self.notes:
            out += ["", "notes"]
            for note in self.notes:
                out += textwrap.wrap(f"  - {note}", WIDTH, subsequent_indent="    ", break_long_words=False)
        return "\n".join(out)


_OP_WIDTH = 44  # the four projections of an attention on one line


def _span_lines(span: StepSpan) -> list[str]:
    """The table of one span, the groups' headings between its rows."""
    cells = [["linear layers", *GEMMS, "decided by"]]
    headings: dict[int, str] = {}
    for group in span.groups:
        headings[len(cells)] = group.where
        # Neighbours in one module with the same decisions are one row.
        for _, rows in itertools.groupby(group.rows, lambda row: (row.op.rpartition(".")[0], replace(row, op=""))):
            cells += _cells(list(rows))
    lines = []
    for number, line in enumerate(text_table(cells, indent="    ")):
        if number in headings:
            lines.append(f"  {headings[number]}")
        lines.append(line)
    return lines


def _cells(rows: list[Row]) -> list[list[str]]:
    """One printed row, over as many lines as its names and its rules need."""
    first = rows[0]
    parent = first.op.rpartition(".")[0]
    if len(rows) == 1 or not parent:
        names = ", ".join(row.op for row in rows)
    else:
        names = f"{parent}: " + ", ".join(row.op[len(parent) + 1 :] for row in rows)
    formats = [first.fwd, first.dgrad, first.wgrad]
    room = WIDTH - 4 - _OP_WIDTH - 2 - sum(max(5, len(text)) + 2 for text in formats)
    left = textwrap.wrap(names, _OP_WIDTH, subsequent_indent="  ", break_long_words=False)
    right = [line for text in first.decided_by for line in textwrap.wrap(text, room, subsequent_indent="  ")]
    lines = list(itertools.zip_longest(left, right, fillvalue=""))
    return [[op, *(formats if i == 0 else ("", "", "")), why] for i, (op, why) in enumerate(lines)]


def explain(rules: Sequence[Rule], ir: IR, step: int | None = None) -> Explanation:
    """Explain a policy's rules at one step, or for every span of steps between its changes."""
    resolver = Resolver(rules, ir)
    ends = [0, *change_steps(rules)] if step is None else [step]
    tables: dict[int, dict[str, dict[str, Decision]]] = {}
    before = None
    for start in ends:
        table = resolver.at(start)
        if table != before:  # a rule may begin or end without deciding anything
            tables[start] = before = table
    starts = list(tables)
    stops = [*starts[1:], None] if step is None else [step + 1]
    spans = tuple(
        StepSpan(steps=(start, stop), groups=_groups(resolver, tables[start]), shares=_shares(resolver, tables[start]))
        for start, stop in zip(starts, stops, strict=True)
    )
    notes = [*resolver.notes, *_notes_on_use(rules, resolver, spans, is_whole_run=step is None)]
    return Explanation(
        model=ir.name,
        num_layers=ir.num_layers,
        spans=spans,
        formats=_formats_in_use(tables.values()),
        notes=(*notes, *_standing_notes(ir)),
    )


# ---- folding ----


def _groups(resolver: Resolver, table: Mapping[str, Mapping[str, Decision]]) -> tuple[Group, ...]:
    """Stem, then layers folded by equal decisions in the order of their first, then tail."""
    stem_paths = {op.name for op in resolver.ir.stem}
    stem: list[Row] = []
    tail: list[Row] = []
    layers: dict[int, list[Row]] = {}
    for site in resolver.sites:
        row = _row(site, table[site.path])
        if site.layer is not None:
            layers.setdefault(site.layer, []).append(row)
        else:
            (stem if site.path in stem_paths else tail).append(row)
    folded: dict[tuple[Row, ...], list[int]] = {}
    for layer, rows in layers.items():
        folded.setdefault(tuple(rows), []).append(layer)
    groups = [Group(where=layers_label(where), layers=tuple(where), rows=rows) for rows, where in folded.items()]
    if stem:
        groups.insert(0, Group(where="stem", layers=(), rows=tuple(stem)))
    if tail:
        groups.append(Group(where="tail", layers=(), rows=tuple(tail)))
    return tuple(groups)


def _row(site: Site, decisions: Mapping[str, Decision]) -> Row:
    by_text: dict[str, list[str]] = {}
    for gemm in GEMMS:
        by_text.setdefault(_cited(decisions[gemm]), []).append(gemm)
    # Which GEMMs a text holds for goes unsaid where it is all three.
    decided_by = (text if len(gemms) == 3 else f"{'+'.join(gemms)}: {text}" for text, gemms in by_text.items())
    formats = {gemm: decisions[gemm].format for gemm in GEMMS}
    return Row(op=site.path if site.layer is None else site.op.name, decided_by=tuple(decided_by), **formats)


def _cited(decision: Decision) -> str:
    options = ", ".join(f"{name}={value}" for name, value in decision.precision.options)
    with_options = f" with {options}" if options else ""
    return f"{decision.rule}{with_options}" + (f", {decision.reason}" if decision.reason else "")


def _shares(resolver: Resolver, table: Mapping[str, Mapping[str, Decision]]) -> tuple[tuple[str, float], ...]:
    flops: dict[int, dict[str, int]] = {}  # per op, since layers share their ops
    totals: dict[str, int] = {}
    for site in resolver.sites:
        by_gemm = flops.get(id(site.op))
        if by_gemm is None:
            by_gemm = flops[id(site.op)] = dict.fromkeys(GEMMS, 0)
            for one in site.op.gemms(_WORK):
                by_gemm[one.step] += one.flops
        for gemm, count in by_gemm.items():
            name = table[site.path][gemm].format
            totals[name] = totals.get(name, 0) + count
    whole = sum(totals.values())
    ranked = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    return tuple((name, count / whole) for name, count in ranked) if whole else ()


# ---- what else to say ----


def _formats_in_use(tables: Iterable[Mapping[str, Mapping[str, Decision]]]) -> tuple[str, ...]:
    decisions = (one for table in tables for row in table.values() for one in row.values())
    used = {(one.precision, one.gemm) for one in decisions if one.precision.is_low}
    ordered = sorted(used, key=lambda item: (str(item[0]), GEMMS.index(item[1])))
    return tuple(f"{asked} {asked.gemm(gemm)}" for asked, gemm in ordered)


def _notes_on_use(
    rules: Sequence[Rule], resolver: Resolver, spans: tuple[StepSpan, ...], *, is_whole_run: bool
) -> list[str]:
    """Rules that never decide, and a low default that reaches nothing."""
    notes = []
    if is_whole_run:
        for index, rule in enumerate(rules):
            said = any(note.startswith(f"{rule.label}: ") for note in resolver.notes)
            if index not in resolver.deciding and not said:
                notes.append(f"{rule.label}: decides nothing, for rules that win over it cover all it names")
    asked = {rule.precision.format for rule in rules if rule.precision.is_low}
    used = {name for span in spans for name, _ in span.shares}
    if asked and resolver.sites and not asked & used:
        when = "at any step" if is_whole_run else "at this step"
        notes.append(f"no GEMM of this model is in {' or '.join(sorted(asked))} {when}")
    return notes


def _standing_notes(ir: IR) -> list[str]:
    """What a policy never touches, in this model."""
    kinds = {site_op.kind for ops, _ in ir.parts() for site_op in ops}
    names = {"attention": "softmax attention", "norm": "norms", "embedding": "embeddings", "matmul": "other products"}
    kept = [word for kind, word in names.items() if kind in kinds]
    return [f"{', '.join(kept)} stay {ir.dtype}: a policy decides linear layers"] if kept else []
