"""The record of a run, read back: events.jsonl as it was written, and the steps that count.

    run = read_run("runs/llama")        # also while the run is still writing
    run.steps["loss"], run.lost["step"], run.attempts

Each start of the run (a `run` event) begins an attempt. An attempt that goes back to a checkpoint logs steps again: the
later one counts, what it replaced is lost work.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepwell.errors import ConfigError

EVENTS = "events.jsonl"
SCHEMA = 1
LATEST = 1e11  # seconds: what lies beyond is no time
# Numbers of a step that become columns; `t` is the second at which it was logged.
COLUMNS = (
    "t", "loss", "grad_norm", "lr", "seconds", "tokens", "tokens_per_s_per_gpu", "tflops", "mfu", "mfu_weighted",
    "memory_gib", "memory_limit_gib", "predicted_s", "ratio", "goodput",
)  # fmt: skip
_LISTED = ("eval", "save", "guard", "formats", "experts", "restart", "note")
Event = dict[str, Any]
Columns = dict[str, np.ndarray]


# ---- reading the file ----


def read_events(run_dir: str | Path) -> list[Event]:
    """The events of a run, in order. A line that cannot be read becomes an event of kind "damaged" with its `line`.

    The last line is left out while it is being written. Raises ConfigError if there is no file or nothing in it.
    """
    return list(iter_events(run_dir))


def iter_events(run_dir: str | Path) -> Iterator[Event]:
    """As `read_events`, one at a time."""
    path = events_path(run_dir)
    time, count = 0.0, 0
    try:
        with path.open("rb") as file:
            for place, line in enumerate(file, start=1):
                event = _event(line)
                if event is None:
                    if not line.strip() or not line.endswith(b"\n"):
                        continue
                    event = {"kind": "damaged", "line": place}
                logged = number(event.get("t"))
                time = event["t"] = logged if abs(logged) < LATEST else time
                count += 1
                yield event
    except OSError as error:
        raise ConfigError(f"RUN_DIR: cannot read {path}: {error}") from error
    if not count:
        raise ConfigError(f"RUN_DIR: {path} holds no event yet; wait for the run's first line")


def events_path(run_dir: str | Path) -> Path:
    """The file of a run's events; `run_dir` may be that file. Raises ConfigError if it is not there."""
    given = Path(run_dir)
    if given.is_file():
        return given
    path = given if given.suffix == ".jsonl" and not given.is_dir() else given / EVENTS
    if not path.is_file():
        raise ConfigError(f"RUN_DIR: there is no {path}; give the folder that a run writes to")
    return path


def _event(line: bytes) -> Event | None:
    """The event of a line, or None. A torn line that a restarted run wrote on holds that run's first event."""
    text = line.decode("utf-8", errors="replace")
    at = text.rfind('{"t"')
    return _parsed(text) or (_parsed(text[at:]) if at > 0 else None)


def _parsed(text: str) -> Event | None:
    try:
        event = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


def number(value: Any) -> float:
    """A number of the record; NaN for what is none (null, a text)."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def step_of(event: Mapping[str, Any]) -> int | None:
    """The step of an event, or None where it has none."""
    step = number(event.get("step"))
    return int(step) if math.isfinite(step) and step >= 0 else None


# ---- the run ----


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """One start of the run, until it ended or the next one began. Times are Unix seconds."""

    header: Event  # its `run` event; empty where the log has none
    began: float
    ended: float  # its last event
    first_step: int | None  # that it logged
    last_step: int | None
    first_step_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """A run as its events tell it. `steps` and `lost` hold COLUMNS and `step`, `attempt`, `skipped`, `weight`.

    `weight` is the number of steps that a row stands for: 1 unless the run logged every n-th step only.
    """

    name: str
    path: str
    attempts: tuple[RunStart, ...]
    steps: Columns  # those that count, in order
    lost: Columns  # those that a later attempt did again
    events: Mapping[str, tuple[Event, ...]]  # by kind; those of lost steps have "lost": True
    end: Event | None  # of the last attempt
    began: float
    last: float  # time of the last event
    damaged: tuple[int, ...]  # numbers of lines that cannot be read

    @property
    def header(self) -> Event:
        """The newest `run` event."""
        return self.attempts[-1].header

    def kept(self, kind: str) -> tuple[Event, ...]:
        """The events of a kind that no later attempt replaced."""
        return tuple(event for event in self.events.get(kind, ()) if not event.get("lost"))


def read_run(run_dir: str | Path, name: str | None = None) -> RunHistory:
    """Read one run. Raises ConfigError if there is no record."""
    path = events_path(run_dir)
    return run_of(iter_events(path), name=name or _folder_name(path), path=str(path.parent))


def read_runs(run_dirs: Iterable[str | Path]) -> list[RunHistory]:
    """Read several runs; equal names of folders get their parent's before them."""
    paths = [events_path(run_dir).resolve() for run_dir in run_dirs]
    names = [_folder_name(path) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parents[1].name}/{name}" for path, name in zip(paths, names, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{i}: {name}" for i, name in enumerate(names, start=1)]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _folder_name(path: Path) -> str:
    folder = path.resolve().parent
    return folder.name or str(folder)


def run_of(events: Iterable[Event], *, name: str = "run", path: str = "") -> RunHistory:
    """The run that the events tell."""
    reader = _EventReader()
    for event in events:
        reader.take(event)
    return reader.run(name, path)


@dataclass(slots=True)
class _Segment:
    """What lies between two goings back; the first one of an attempt has its header."""

    header: Event | None = None
    first: int | None = None  # step
    ended: float = -math.inf

    @property
    def start(self) -> int | None:
        return step_of({"step": (self.header or {}).get("start_step")})


class _EventReader:
    """Takes events in order."""

    def __init__(self) -> None:
        self.segments = [_Segment()]
        self.rows: list[tuple[float, ...]] = []  # step, segment, skipped, then COLUMNS
        self.listed: dict[str, list[tuple[int, Event]]] = {kind: [] for kind in _LISTED}
        self.end: Event | None = None
        self.times = (math.inf, -math.inf)
        self.damaged: list[int] = []

    def take(self, event: Event) -> None:
        kind, time = event["kind"], float(event["t"])
        self.times = (min(self.times[0], time), max(self.times[1], time))
        if kind == "damaged":
            self.damaged.append(int(event["line"]))
            return
        if kind == "run":
            if self.rows or any(segment.header is not None for segment in self.segments):
                self.segments.append(_Segment())
            self.segments[-1].header, self.end = event, None
        elif kind == "end":
            self.end = event
        elif kind == "step":
            self._step(event)
        elif kind in self.listed:
            self.listed[kind].append((len(self.segments) - 1, event))
        if kind != "restart":  # which may be written when the next attempt is ready
            self.segments[-1].ended = max(self.segments[-1].ended, time)

    def _step(self, event: Event) -> None:
        step = step_of(event)
        if step is None:
            return
        if self.rows and self.rows[-1][1] == len(self.segments) - 1 and step <= self.rows[-1][0]:
            self.segments.append(_Segment())
        if self.segments[-1].first is None:
            self.segments[-1].first = step
        skipped = float(event.get("skipped") is True)
        # A long record has millions of these: what is a float already is not asked twice.
        values = [value if type(value := event.get(name)) is float else number(value) for name in COLUMNS]
        self.rows.append((step, len(self.segments) - 1, skipped, *values))

    def _borders(self) -> list[float]:
        """For each segment the step from which on later segments replace what it logged."""
        borders = [math.inf]
        for segment in self.segments[:0:-1]:
            resumed = math.inf if segment.start is None else segment.start + 1
            borders.append(min(borders[-1], resumed if segment.first is None else segment.first))
        return borders[::-1]

    def run(self, name: str, path: str) -> RunHistory:
        borders = self._borders()
        table = np.asarray(self.rows, dtype=np.float64).reshape(len(self.rows), 3 + len(COLUMNS))
        columns: Columns = {"step": table[:, 0], "segment": table[:, 1], "skipped": table[:, 2] > 0}
        columns.update({column: table[:, 3 + i] for i, column in enumerate(COLUMNS)})
        starts = [i for i, segment in enumerate(self.segments) if segment.header is not None] or [0]
        columns["attempt"] = np.maximum(np.searchsorted(starts, columns["segment"], side="right") - 1, 0)
        columns["weight"] = self._weights(columns)
        kept = columns["step"] < np.asarray(borders)[columns["segment"].astype(int)]
        events = {
            kind: tuple({**e, "lost": True} if _is_lost(e, borders[segment]) else e for segment, e in found)
            for kind, found in self.listed.items()
        }
        return RunHistory(
            name=name,
            path=path,
            attempts=self._attempts(columns, starts),
            steps={column: values[kept] for column, values in columns.items()},
            lost={column: values[~kept] for column, values in columns.items()},
            events=events,
            end=self.end,
            began=self.times[0],
            last=self.times[1],
            damaged=tuple(self.damaged),
        )

    def _weights(self, columns: Columns) -> np.ndarray:
        """How many steps each row stands for: those since the row before it in its segment."""
        steps, segments = columns["step"], columns["segment"]
        weights = np.ones(len(steps))
        if len(steps) > 1:
            same = segments[1:] == segments[:-1]
            weights[1:][same] = (steps[1:] - steps[:-1])[same]
        for place, segment in enumerate(self.segments):
            at, start = np.flatnonzero(segments == place), segment.start
            if len(at) and start is not None:
                weights[at[0]] = max(1.0, steps[at[0]] - start)
        return weights

    def _attempts(self, columns: Columns, starts: list[int]) -> tuple[RunStart, ...]:
        found = []
        for i, (start, following) in enumerate(itertools.pairwise([*starts, len(self.segments)])):
            rows = columns["attempt"] == i
            steps, times = columns["step"][rows], columns["t"][rows]
            header = self.segments[start].header or {}
            began = float(header.get("t", self.times[0]))
            found.append(
                RunStart(
                    header=header,
                    began=began,
                    ended=max(began, *(segment.ended for segment in self.segments[start:following])),
                    first_step=int(steps[0]) if len(steps) else None,
                    last_step=int(steps.max()) if len(steps) else None,
                    first_step_at=float(times[0]) if len(steps) else None,
                )
            )
        return tuple(found)


def _is_lost(event: Event, border: float) -> bool:
    step = step_of(event)
    return step is not None and step >= border
