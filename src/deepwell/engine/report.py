"""What an engine runs and why: every GEMM's format, binding and reason, and how often each pass fired.

Printed, layers whose linears are bound alike are folded into one group; JSON keeps every row.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepwell.engine.binding import Binding
from deepwell.errors import ConfigError
from deepwell.graph.table import WIDTH, layers_label, text_table
from deepwell.hardware.codec import JsonValue
from deepwell.kernels.tune.table import KernelRow, kernel_table, wrapped
from deepwell.precision.gemm_format import GEMMS

# How the note begins that a called model was compiled nowhere.
NOTHING_COMPILED = "nothing was compiled"
_OP_WIDTH = 40
_HEADER = ("linear layers", "gemms", "format", "binding", "runs as", "us", "why")

# How some GEMMs of a linear run: gemms, format, binding, scheme, microseconds of each, reason.
_How = tuple[str, str, str, str, str, str]
# A linear and how its GEMMs run, one entry where all three run alike.
_Line = tuple[str, tuple[_How, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport(JsonValue):
    """What was bound to what and why, which passes fired how often, and what did not go as asked."""

    model: str
    device: str
    bindings: tuple[Binding, ...]
    passes: Mapping[str, int]
    graphs: int = 0
    notes: tuple[str, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    step: int = 0  # the first training step of those whose formats are bound
    plan: str = ""  # the layout of the plan it was compiled for

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # tuples as JSON has them
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineReport:
        try:
            return cls(
                model=data["model"],
                device=data["device"],
                bindings=tuple(Binding(**row) for row in data["bindings"]),
                passes=dict(data["passes"]),
                graphs=data["graphs"],
                notes=tuple(data["notes"]),
                kernels=tuple(_kernel_row(row) for row in data.get("kernels", ())),
                step=data.get("step", 0),
                plan=data.get("plan", ""),
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not the report of an engine: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        since = f", from step {self.step} on" if self.step else ""
        out = [f"engine of {self.model} on {self.device}{since}", *([f"plan {self.plan}"] if self.plan else [])]
        out += ["", *_table(self.bindings)]
        if self.graphs:
            fired = ", ".join(f"{name} {count}" for name, count in self.passes.items() if count) or "none"
            out += ["", *wrapped(f"passes in {self.graphs} compiled graph{'s' * (self.graphs > 1)}: {fired}")]
        elif not any(note.startswith(NOTHING_COMPILED) for note in self.notes):
            out += ["", "passes: none yet: call the engine once"]
        else:
            out += ["", "passes: none"]
        if self.kernels:
            out += ["", *kernel_table(self.kernels)]
        for note in self.notes:
            out += wrapped(f"note: {note}")
        return "\n".join(out)


def _kernel_row(row: Mapping[str, Any]) -> KernelRow:
    return KernelRow(**{**row, "set_aside": tuple((name, reason) for name, reason in row["set_aside"])})


def _table(bindings: Sequence[Binding]) -> list[str]:
    """The rows under their headings: stem, folded layers, tail."""
    cells: list[Sequence[str]] = [_HEADER]
    headings: dict[int, str] = {}
    groups = list(_folded(bindings))
    middles = [how[:-1] for _, lines in groups for _, hows in lines for how in hows]
    taken = sum(max(5, *map(len, column)) for column in zip(*middles, strict=True) if any(column))
    room = max(24, WIDTH - 4 - _OP_WIDTH - 10 - taken)
    for where, lines in groups:
        headings[len(cells)] = where
        for same in _neighbours(lines):
            cells += _cells(same, room)
    if not any(row.us for row in bindings):  # nothing was measured: no empty column
        cells = [[*row[:5], *row[6:]] for row in cells]
    out = []
    for number, line in enumerate(text_table(cells, indent="    ")):
        if number in headings:
            out.append(f"  {headings[number]}")
        out.append(line)
    return out


def _folded(bindings: Sequence[Binding]) -> Iterator[tuple[str, tuple[_Line, ...]]]:
    """Groups of layers that are bound alike, in the order of their first; what lies outside layers keeps its place."""
    by_layer: dict[int | None, list[Binding]] = {}
    for row in bindings:
        by_layer.setdefault(row.layer, []).append(row)
    outside = _lines(by_layer.pop(None, []))
    folded: dict[tuple[_Line, ...], list[int]] = {}
    for layer, rows in by_layer.items():
        assert layer is not None
        folded.setdefault(_lines(rows), []).append(layer)
    for lines, layers in folded.items():
        yield layers_label(layers), lines
    if outside:
        yield "outside the layers", outside


def _lines(rows: Sequence[Binding]) -> tuple[_Line, ...]:
    """Each linear with how its GEMMs run."""
    lines: list[_Line] = []
    for op, group in itertools.groupby(rows, key=lambda row: row.op):
        by_how: dict[tuple[str, str, str, str], list[Binding]] = {}
        for row in group:
            by_how.setdefault((row.format, row.binding, row.scheme, row.reason), []).append(row)
        lines.append((op, tuple(_how(rows_alike) for rows_alike in by_how.values())))
    return tuple(lines)


def _how(rows: Sequence[Binding]) -> _How:
    """One entry for GEMMs of a linear that are bound alike; their times in the order of the GEMMs."""
    first = rows[0]
    gemms = "all" if len(rows) == len(GEMMS) else " ".join(row.gemm for row in rows)
    times = " ".join("-" if row.us is None else f"{row.us:.1f}" for row in rows) if any(row.us for row in rows) else ""
    return gemms, first.format, first.binding, first.scheme, times, first.reason


def _neighbours(lines: Sequence[_Line]) -> Iterator[list[_Line]]:
    """Linears side by side in one module that are bound alike, to be printed together."""
    for _, together in itertools.groupby(lines, key=lambda line: (line[0].rpartition(".")[0], line[1])):
        yield list(together)


def _cells(lines: list[_Line], room: int) -> list[list[str]]:
    """The printed lines of linears that are bound alike: their names beside how their GEMMs run, and why."""
    parent = lines[0][0].rpartition(".")[0]
    names = ", ".join(line[0].rpartition(".")[2] for line in lines)
    left = textwrap.wrap(f"{parent}: {names}" if parent else names, _OP_WIDTH, subsequent_indent="  ")
    right: list[tuple[str, ...]] = []
    for *middle, why in lines[0][1]:
        parts = textwrap.wrap(why, room, break_long_words=False)
        right += [(*(middle if i == 0 else ("",) * 5), text) for i, text in enumerate(parts)]
    return [[op, *(rest or ("",) * 6)] for op, rest in itertools.zip_longest(left, right, fillvalue="")]
