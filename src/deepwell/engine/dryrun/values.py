"""What a dry run says, as values, JSON and text: figures with their origin, memory over the step, overlap, risks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from deepwell.engine.report import EngineReport
from deepwell.errors import ConfigError
from deepwell.graph.table import WIDTH, text_table
from deepwell.hardware.codec import JsonValue, check_schema, decode, encode
from deepwell.planner.estimate_values import GIB
from deepwell.planner.plan import Plan
from deepwell.planner.step_memory import KINDS, Moment, RankTimeline

SCHEMA = 1
_SHOWN_RANKS = 8
_SHOWN_MOMENTS = 8
_SHOWN_ROWS = 24
_BAR = 40
MIB = 1 << 20

How = Literal["measured", "simulated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A figure, its unit, and whether it was measured here or simulated, from figures of which tier."""

    name: str
    value: float
    unit: str
    how: How
    tier: str  # "measured", "table" or "spec"; of a simulated figure: what it was simulated from

    @property
    def mark(self) -> str:
        return self.how if self.how == "measured" else f"simulated, {self.tier} tier"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisOverlap:
    """Seconds of one axis's communication in a step: all of it, and what the step waits for. Simulated."""

    axis: str
    total_s: float
    exposed_s: float

    @property
    def hidden(self) -> float:
        """Share that runs beside computation."""
        return 1 - self.exposed_s / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBubble:
    """A pipeline rank's time at work and its idle share of the pipeline. Simulated."""

    rank: int
    busy_s: float
    idle: float
    in_flight: float  # micro-batches whose activations it holds at its peak


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRow:
    """Linear layers that run in the same formats, and how."""

    where: str
    op: str
    formats: str  # of fwd, dgrad and wgrad
    runs_as: str  # "native", "substitute", "emulated", or "planned" where no engine has bound it


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """Something that may go otherwise than planned; 0 is the gravest weight."""

    weight: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Real steps on this device beside the prediction that was made before them."""

    what: str  # "2 x 8,192 tokens, 1 micro-batch, adamw_pure_bf16"
    device: str
    steps: int
    predicted_s: float
    predicted_bytes: float
    tier: str  # of the prediction
    step_s: float | None = None  # median
    fastest_s: float | None = None
    slowest_s: float | None = None
    first_s: float | None = None  # the first step, with compilation
    peak_bytes: float | None = None
    memory_by: str = ""  # who counted the bytes
    losses: tuple[float, ...] = ()
    problem: str = ""  # why there is no measurement

    @property
    def time_ratio(self) -> float | None:
        """Predicted over measured."""
        return None if not self.step_s else self.predicted_s / self.step_s

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over measured."""
        return None if not self.peak_bytes else self.predicted_bytes / self.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings(JsonValue):
    """The part of a dry run that is plain values, which the codec reads and writes by itself."""

    model: str
    machine: str
    layout: str
    fits: bool
    verdict: str
    figures: tuple[Marked, ...]
    memory: tuple[RankTimeline, ...]
    limit_bytes: float
    overlap: tuple[AxisOverlap, ...]
    bubbles: tuple[RankBubble, ...]
    parts: tuple[tuple[str, float], ...]  # seconds of the step by part, simulated
    precision: tuple[FormatRow, ...]
    kernels: tuple[str, ...]
    risks: tuple[Risk, ...]
    trial: Trial | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun(Findings):
    """The answer of `dw.dryrun`: frozen, printable, JSON. Every figure says whether it was measured or simulated."""

    plan: Plan
    report: EngineReport | None = None  # None where no engine was bound

    def figure(self, name: str) -> Marked:
        """The figure of that name. Raises ConfigError where there is none."""
        for one in self.figures:
            if one.name == name:
                return one
        raise ConfigError(f"name: no figure {name!r}; there are {', '.join(one.name for one in self.figures)}")

    def trace_json(self) -> str:
        """The simulated step as a Chrome/Perfetto trace."""
        from deepwell.planner.schedule.trace import chrome_trace_json

        return chrome_trace_json(self.plan)

    def __str__(self) -> str:
        return _text(self)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **{f.name: encode(getattr(self, f.name)) for f in fields(Findings)},
            "plan": self.plan.to_dict(),
            "report": None if self.report is None else self.report.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DryRun:
        """The value behind `to_dict`. Raises ConfigError for anything else."""
        check_schema(data, SCHEMA, "dry run")
        names = [f.name for f in fields(Findings)]
        found = decode(Findings, {name: data[name] for name in names if name in data}, "dry run")
        if not isinstance(data.get("plan"), Mapping):
            raise ConfigError("dry run: plan is missing; pass what DryRun.to_json returned")
        report = data.get("report")
        return cls(
            **{name: getattr(found, name) for name in names},
            plan=Plan.from_dict(data["plan"]),
            report=None if report is None else EngineReport.from_dict(report),
        )


# ---- as text ----


def _text(run: DryRun) -> str:
    """What `print(report)` shows."""
    sections = [
        [f"dry run of {run.model} on {run.machine}, {run.layout}", f"  {run.verdict}"],
        ["figures", *text_table([_figure(one) for one in run.figures], right=(1,))],
        _trial(run.trial) if run.trial is not None else [],
        _memory(run),
        _time(run),
        _precision(run),
        _kernels(run),
        ["risks, gravest first", *_wrapped(f"{risk.weight}  {risk.text}" for risk in run.risks)] if run.risks else [],
        _wrapped((f"note: {note}" for note in run.notes), indent=""),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in sections if part)


def size_text(nbytes: float) -> str:
    """Bytes to read: GiB, and MiB where that would be nothing."""
    return f"{nbytes / GIB:,.2f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / MIB:,.1f} MiB"


def _figure(one: Marked) -> tuple[str, str, str, str]:
    if one.unit.startswith("of "):
        return one.name, f"{one.value:.1%}", one.unit, one.mark
    if one.unit == "s":
        return one.name, f"{1e3 * one.value:,.1f}", "ms", one.mark
    if one.unit == "GiB":
        value, _, unit = size_text(one.value * GIB).partition(" ")
        return one.name, value, unit, one.mark
    return one.name, f"{one.value:,.0f}", one.unit, one.mark


def _trial(trial: Trial) -> list[str]:
    out = [f"real steps on {trial.device}: {trial.what}"]
    if trial.problem:
        return [*out, f"  {trial.problem}"]
    assert trial.step_s is not None and trial.peak_bytes is not None
    rows = [
        ("", "predicted before", "measured", "ratio"),
        ("step", f"{1e3 * trial.predicted_s:,.1f} ms", f"{1e3 * trial.step_s:,.1f} ms", f"{trial.time_ratio:.3f}"),
        (
            "peak memory", size_text(trial.predicted_bytes), size_text(trial.peak_bytes),
            f"{trial.memory_ratio:.3f}",
        ),
    ]  # fmt: skip
    out += text_table(rows, right=(1, 2, 3))
    assert trial.fastest_s is not None and trial.slowest_s is not None and trial.first_s is not None
    out.append(
        f"  median of {trial.steps} ({1e3 * trial.fastest_s:,.1f} to {1e3 * trial.slowest_s:,.1f} ms), the first with "
        f"compilation {trial.first_s:.1f} s; the prediction is of the {trial.tier} tier"
    )
    return [*out, f"  memory: {trial.memory_by}"]


def _memory(run: DryRun) -> list[str]:
    """Ranks at their peak, and the fullest rank over the step."""
    worst = max(run.memory, key=lambda rank: rank.device_bytes)
    unit, name = (GIB, "GiB") if worst.device_bytes >= GIB else (MIB, "MiB")
    kinds = [k for k in KINDS if any(k == kind for rank in run.memory for kind, _ in rank.peak.nbytes)]
    rows = [("rank", *kinds, "allocated", "device", "peak in")]
    shown = _few(run.memory)
    for rank in shown:
        sizes = dict(rank.peak.nbytes)
        cells = [f"{sizes.get(kind, 0.0) / unit:,.2f}" for kind in kinds]
        total = (f"{rank.peak.allocated / unit:,.2f}", f"{rank.device_bytes / unit:,.2f}")
        rows.append((str(rank.rank), *cells, *total, rank.peak.phase))
    out = [f"memory at each rank's peak, {name} of {run.limit_bytes / unit:,.1f} (simulated)"]
    out += text_table(rows, right=range(1, len(kinds) + 3))
    if len(shown) < len(run.memory):
        out.append(f"  {len(run.memory) - len(shown)} ranks between them are left out here; the JSON has all")
    out += ["", f"rank {worst.rank} over the step, {name} (simulated)"]
    lines = []
    for moment in _sampled(worst):
        bar = "#" * max(1, round(_BAR * moment.allocated / max(worst.peak.allocated, 1.0)))
        lines.append((f"{1e3 * moment.time_s:,.1f} ms", moment.phase, f"{moment.allocated / unit:,.2f}", bar))
    return [*out, *text_table(lines, right=(0, 2))]


def _few(memory: tuple[RankTimeline, ...]) -> list[RankTimeline]:
    if len(memory) <= _SHOWN_RANKS:
        return list(memory)
    worst = max(memory, key=lambda rank: rank.device_bytes)
    ends = [*memory[: _SHOWN_RANKS - 2], memory[-1]]
    return sorted({rank.rank: rank for rank in (*ends, worst)}.values(), key=lambda rank: rank.rank)


def _sampled(rank: RankTimeline) -> list[Moment]:
    """Evenly spaced moments, the peak among them."""
    moments = rank.moments
    each = max(1, len(moments) // _SHOWN_MOMENTS)
    kept = {id(m): m for m in (*moments[::each], rank.peak, moments[-1])}
    return [moment for moment in moments if id(moment) in kept]


def _time(run: DryRun) -> list[str]:
    step = sum(value for _, value in run.parts)
    parts = sorted(run.parts, key=lambda part: -part[1])
    shown = ", ".join(f"{name} {1e3 * value:,.1f} ms" for name, value in parts if value > 0.002 * step)
    out = ["time by part (simulated)", *_wrapped([shown])]
    for axis in run.overlap:
        out.append(
            f"  {axis.axis} communication {1e3 * axis.total_s:,.1f} ms, {axis.hidden:.0%} hidden beside computation"
        )
    if len(run.bubbles) > 1:
        idle = [bubble.idle for bubble in run.bubbles]
        flight = [bubble.in_flight for bubble in run.bubbles]
        out.append(
            f"  ranks idle {min(idle):.1%} to {max(idle):.1%} of the pipeline, holding up to "
            f"{max(flight):g} micro-batches"
        )
    elif not run.overlap:
        out.append("  one rank: no communication, no bubbles")
    return out


def _precision(run: DryRun) -> list[str]:
    if not run.precision:
        return []
    rows = [("layers", "linear", "formats", "runs as")]
    rows += [(row.where, row.op, row.formats, row.runs_as) for row in run.precision[:_SHOWN_ROWS]]
    left = len(run.precision) - _SHOWN_ROWS
    return ["precision", *text_table(rows), *([f"  and {left} more rows in the JSON"] if left > 0 else [])]


def _kernels(run: DryRun) -> list[str]:
    if not run.kernels:
        return []
    title = "kernels proposed" if run.report is None else "kernels bound"
    left = len(run.kernels) - _SHOWN_ROWS
    more = [f"  and {left} more in the JSON"] if left > 0 else []
    return [title, *_wrapped(run.kernels[:_SHOWN_ROWS]), *more]


def _wrapped(lines: Iterable[str], indent: str = "  ") -> list[str]:
    out: list[str] = []
    for line in lines:
        out += textwrap.wrap(
            line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
    return out
