"""What the run's page shows, as plain data: one object per panel. An empty panel holds the reason, `why`."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepwell.report.run.data import SCHEMA, RunHistory, number, step_of
from deepwell.report.run.experts import expert_panel
from deepwell.report.run.formats import precision_panel
from deepwell.report.run.series import picked, rounded, smoothed, thinned
from deepwell.report.run.summary import duration, summary, text_of, throughput, time_shares, tokens_seen

MAX_POINTS = 2400  # of a series, over all runs of the page together, but at least
MIN_POINTS = 480  # of each run
SPANS = (20, 100, 500)  # steps of the smoothing
MAX_MARKS = 400  # of one kind on the timeline
MAX_ROWS = 1000  # of a table
MAX_CELLS = 150_000  # of the experts' pictures, over all runs of the page together
_OF_A_START = ("generation", "start_step", "host")  # differ between any two runs
_SERIES = ("grad_norm", "lr", "mfu", "mfu_weighted", "memory_gib", "memory_limit_gib", "seconds", "predicted_s",
           "ratio", "tflops", "goodput")  # fmt: skip


def page_data(runs: Sequence[RunHistory], now: float | None = None) -> dict[str, Any]:
    """Everything on the page; numbers are finite or None."""
    now = time.time() if now is None else now
    limit = max(MIN_POINTS, MAX_POINTS // len(runs))
    found = [_run(run, now, limit, MAX_CELLS // len(runs)) for run in runs]
    return {"as_of": rounded(now, 12), "runs": found, "compare": _compare(found) if len(found) > 1 else None}


def _run(run: RunHistory, now: float, limit: int, cells: int) -> dict[str, Any]:
    table, series = _series(run, limit)
    clock = _Clock(run)
    return {
        "summary": summary(run, now),
        "notes": _notes(run),
        "x": table,
        "series": series,
        "loss": _loss(run, series, clock, limit),
        "guard": _guard(run, clock),
        "precision": precision_panel(run),
        "experts": expert_panel(run, cells),
        "checkpoints": _checkpoints(run, clock),
        "goodput": _goodput(run, clock),
        "settings": _settings(run),
    }


class _Clock:
    """Where an event stands on the page's three axes: step, tokens, seconds since the run began."""

    def __init__(self, run: RunHistory) -> None:
        self._run = run
        self._step = np.concatenate([[0.0], run.steps["step"]])
        self._tokens = np.concatenate([[0.0], tokens_seen(run)])
        self._loss = np.isfinite(run.steps["loss"])

    def at(self, step: float, t: float) -> list[float | None]:
        tokens = float(np.interp(step, self._step, self._tokens))
        return [rounded(step, 12), rounded(tokens, 12), rounded(t - self._run.began, 9)]

    def loss(self, step: float) -> float | None:
        """The loss near a step, to hang a mark on."""
        steps = self._run.steps
        if not self._loss.any():
            return None
        return rounded(float(np.interp(step, steps["step"][self._loss], steps["loss"][self._loss])))


# ---- curves ----


def _series(run: RunHistory, limit: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the table of x, the series)."""
    steps = run.steps
    usable = np.where(steps["skipped"], math.nan, steps["loss"])
    spans = [s for s in SPANS if np.isfinite(usable).any() and (s == SPANS[0] or len(usable) >= 2 * s)]
    x = {"step": steps["step"], "tokens": tokens_seen(run), "seconds": steps["t"] - run.began}
    values = {name: steps[name] for name in _SERIES} | {"throughput": throughput(run), "loss": steps["loss"]}
    table, found = thinned(x, {**values, **{str(span): smoothed(usable, span) for span in spans}}, limit)
    return table, {**{name: found[name] for name in values}, "smooth": {str(span): found[str(span)] for span in spans}}


def _loss(run: RunHistory, series: Mapping[str, Any], clock: _Clock, limit: int) -> dict[str, Any]:
    steps = run.steps
    bad = np.flatnonzero(~np.isfinite(steps["loss"]))
    evals = [
        [*clock.at(step, event["t"]), loss]
        for event in run.kept("eval")
        if (step := step_of(event)) is not None and (loss := rounded(number(event.get("loss")))) is not None
    ]
    if len(evals) > limit:
        evals = [evals[i] for i in picked(np.asarray([point[3] for point in evals], dtype=float), limit)]
    marks = bad[_spread(len(bad), MAX_MARKS)]
    return {
        "why": None if series["loss"] or evals else _no_step(run),
        "evals": evals,
        "nonfinite": [clock.at(steps["step"][i], steps["t"][i]) for i in marks],
        "nonfinite_count": len(bad),
        "lost": _lost(run, clock, limit),
    }


def _lost(run: RunHistory, clock: _Clock, limit: int) -> list[list[float | None]]:
    """The losses of lost steps, a gap between those of different attempts."""
    lost = run.lost
    found: list[list[float | None]] = []
    before = None
    for i in picked(lost["loss"], limit) if len(lost["step"]) else ():
        if before is not None and lost["segment"][i] != before:
            found.append([None, None, None, None])
        before = lost["segment"][i]
        found.append([*clock.at(lost["step"][i], lost["t"][i]), rounded(lost["loss"][i])])
    return found


def _spread(count: int, limit: int) -> list[int]:
    """At most `limit` places of `count`, evenly spread, both ends among them."""
    return np.linspace(0, count - 1, min(count, limit)).astype(int).tolist() if count else []


# ---- events ----


def _guard(run: RunHistory, clock: _Clock) -> dict[str, Any]:
    events = run.events["guard"]
    counts: Counter[str] = Counter()
    places: dict[str, set[tuple[int, float]]] = {}
    for event in events:
        what, step = text_of(event.get("what")) or "?", step_of(event)
        counts[what] += 1
        own = places.setdefault(what, set())
        if step is not None and not event.get("lost"):
            own.add((step, event["t"]))
    marks: dict[str, list[list[float | None]]] = {}
    for what, found in places.items():
        steps = sorted(found)
        marks[what] = [[*clock.at(*steps[i]), clock.loss(steps[i][0])] for i in _spread(len(steps), MAX_MARKS)]
    # A long list is cut in its middle: how it began and how it stands now matter most.
    rows = events if len(events) <= MAX_ROWS else (*events[: MAX_ROWS // 4], *events[-(MAX_ROWS - MAX_ROWS // 4) :])
    keys = ("what", "path", "gemm", "from", "to", "reason", "rank")
    return {
        "why": None if events else "No guard event was logged: nothing was skipped and no layer fell back.",
        "counts": dict(counts.most_common()),
        "marks": marks,
        "rows": [{"step": step_of(event), **_texts(event, *keys), "lost": bool(event.get("lost"))} for event in rows],
        "left_out": len(events) - len(rows),
    }


def _checkpoints(run: RunHistory, clock: _Clock) -> dict[str, Any]:
    rows = [
        {
            "step": step_of(event), "x": clock.at(step_of(event) or 0, event["t"]), **_texts(event, "path"),
            **_numbers(event, "stall_s", "seconds"), "bytes": rounded(number(event.get("bytes")), 12),
            "committed": event.get("committed") is not False, "lost": bool(event.get("lost")), **_texts(event, "error"),
        }
        for event in run.events["save"][-MAX_ROWS:]
    ]  # fmt: skip
    return {
        "why": None if rows else "No checkpoint was saved so far.",
        "rows": rows,
        "left_out": len(run.events["save"]) - len(rows),
    }


def _goodput(run: RunHistory, clock: _Clock) -> dict[str, Any]:
    attempts = [
        {
            "began": rounded(attempt.began - run.began, 9), "ended": rounded(attempt.ended - run.began, 9),
            "ready": None if attempt.first_step_at is None else rounded(attempt.first_step_at - run.began, 9),
            "x": clock.at((attempt.first_step or 1) - 1, attempt.began),
            "first_step": attempt.first_step, "last_step": attempt.last_step,
            **_numbers(attempt.header, "world", "generation"),
            "lost": int(run.lost["weight"][run.lost["attempt"] == i].sum()),
        }
        for i, attempt in enumerate(run.attempts)
    ]  # fmt: skip
    restarts = [
        {
            **_numbers(event, "generation"), "step": step_of(event), **_texts(event, "reason"),
            **_numbers(event, "lost_steps", "recovery_s", "world"),
        }
        for event in run.events["restart"][-MAX_ROWS:]
    ]  # fmt: skip
    shares = time_shares(run)
    return {
        "why": None if sum(shares.values()) > 0 else "The record is one moment long: there is no time to divide yet.",
        "shares": {name: rounded(seconds) for name, seconds in shares.items() if seconds > 0},
        "attempts": attempts[-MAX_ROWS:],
        "restarts": restarts,
    }


def _texts(event: Mapping[str, Any], *names: str) -> dict[str, str]:
    return {name: text_of(event.get(name)) for name in names}


def _numbers(event: Mapping[str, Any], *names: str) -> dict[str, float | None]:
    return {name: rounded(number(event.get(name))) for name in names}


# ---- words ----


def _settings(run: RunHistory) -> dict[str, Any]:
    rows: dict[str, str] = {}
    for key, value in run.header.items():
        if key not in ("t", "kind", "schema"):
            _flatten(rows, value, () if key == "settings" and isinstance(value, dict) else (key,))
    why = None if rows else "The record has no `run` event, which holds the settings."
    return {"why": why, "rows": rows}


def _flatten(rows: dict[str, str], value: Any, names: tuple[str, ...]) -> None:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            _flatten(rows, part, (*names, str(key)))
        return
    name = ".".join(names) or "settings"
    text = ", ".join(str(part) for part in value) if isinstance(value, list | tuple) else text_of(value)
    rows[name if name not in rows else f"settings.{name}"] = text[:500]


def _notes(run: RunHistory) -> dict[str, list[str]]:
    warnings = []
    if run.damaged:
        shown = ", ".join(str(line) for line in run.damaged[:5]) + (" ..." if len(run.damaged) > 5 else "")
        warnings.append(f"Lines that cannot be read: {shown}. A run that is killed may leave half a line.")
    schema = number(run.header.get("schema", SCHEMA))
    if schema > SCHEMA:
        warnings.append(f"The record has schema {schema:g}, newer than this page's {SCHEMA}; parts may be missing")
    if any(a.header.get("generation") == 0 and a.header.get("start_step") == 0 for a in run.attempts[1:]):
        warnings.append("The run was begun from step 0 again in the same folder; what was there before counts as lost")
    texts = [text_of(event.get("text")) for event in run.events["note"]]
    notes = list(dict.fromkeys(text for text in texts if text))
    return {"warnings": warnings, "notes": notes[-20:]}


def _no_step(run: RunHistory) -> str:
    waited = run.last - run.began
    return "No step was logged yet." + (f" The record is {duration(waited)} long." if waited > 0 else "")


# ---- several runs ----


def _compare(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings in which the runs differ; their figures and curves are in the runs themselves."""
    rows = [run["settings"]["rows"] for run in runs]
    names = dict.fromkeys(name for own in rows for name in own if name not in _OF_A_START)
    values = {name: [own.get(name, "") for own in rows] for name in names}
    return {"differences": {name: each for name, each in values.items() if len(set(each)) > 1}}
