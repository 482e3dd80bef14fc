"""What a dry run says: figures that each tell where they come from, memory over the step, overlap, risks. JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from deepwell.engine.report import EngineReport
from deepwell.errors import ConfigError
from deepwell.hardware.codec import decode, encode
from deepwell.planner.plan import Plan
from deepwell.planner.step_memory import RankTimeline

SCHEMA = 1

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
class Findings:
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
        from deepwell.engine.dryrun.text import dryrun_text

        return dryrun_text(self)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **{f.name: encode(getattr(self, f.name)) for f in fields(Findings)},
            "plan": self.plan.to_dict(),
            "report": None if self.report is None else self.report.to_dict(),
        }

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DryRun:
        """The value behind `to_dict`. Raises ConfigError for anything else."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ConfigError(f"dry run has schema {got!r}; this Deepwell reads schema {SCHEMA}")
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

    @classmethod
    def from_json(cls, text: str) -> DryRun:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"text: not JSON ({error}); pass what DryRun.to_json returned") from error
        return cls.from_dict(data)
