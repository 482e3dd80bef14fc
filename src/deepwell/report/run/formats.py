"""The precision map over time: which layers ran in which formats during which steps."""

import re
from collections.abc import Mapping
from typing import Any

from deepwell.report.run.data import RunHistory, step_of

MAX_CHANGES = 300  # moments that are drawn
MAX_GROUPS = 300  # rows that are drawn
_Spans = list[tuple[int, str]]  # from this step on, fwd|dgrad|wgrad


def precision_panel(run: RunHistory) -> dict[str, Any]:
    """Rows of layers with one history; layers that differ only in their number share a row."""
    history = _history(run)
    if not history:
        return {"why": "No `formats` event was logged, so the formats of the layers are not known.", "rows": []}
    last = int(run.steps["step"][-1]) if len(run.steps["step"]) else 0
    end = max([last, *(spans[-1][0] for spans in history.values())]) + 1
    groups: dict[tuple[str, tuple[tuple[int, str], ...]], list[str]] = {}
    for path, spans in history.items():
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path, count=1), tuple(spans)), []).append(path)
    rows: list[dict[str, Any]] = [
        {
            "name": _label(pattern, paths),
            "layers": len(paths),
            "spans": [
                [start, spans[i + 1][0] if i + 1 < len(spans) else end, *_three(formats)]
                for i, (start, formats) in enumerate(spans)
            ],
        }
        for (pattern, spans), paths in groups.items()
    ]
    # Rows that changed are kept first where there are too many to draw.
    rows = sorted(rows, key=lambda row: len(row["spans"]) == 1)[:MAX_GROUPS] if len(rows) > MAX_GROUPS else rows
    return {
        "why": None,
        "end": end,
        "layers": len(history),
        "changed": sum(len(spans) > 1 for spans in history.values()),
        "now": _shares(history),
        "rows": rows,
        "left_out": len(groups) - len(rows),
    }


def _history(run: RunHistory) -> dict[str, _Spans]:
    """For each module the steps at which its formats changed. An event may name all modules or the changed ones."""
    events = [(step, event["formats"]) for event in run.kept("formats") if isinstance(event.get("formats"), dict)
              and (step := step_of(event)) is not None]  # fmt: skip
    every = max(1, -(-len(events) // MAX_CHANGES))
    history: dict[str, _Spans] = {}
    for number, (step, formats) in enumerate(events):
        # Where there are too many changes to draw, several share the moment of the first of them.
        moment = events[number - number % every][0] if number and number < len(events) - 1 else step
        for path, text in formats.items():
            spans = history.setdefault(str(path), [])
            while spans and spans[-1][0] >= moment:
                spans.pop()
            if not spans or spans[-1][1] != str(text):
                spans.append((moment, str(text)))
    return history


def _three(formats: str) -> list[str]:
    """The formats of fwd, dgrad and wgrad; one name stands for all three."""
    parts = [part.strip() or "?" for part in formats.split("|")]
    return [parts[i] if i < len(parts) else parts[0] for i in range(3)]


def _label(pattern: str, paths: list[str]) -> str:
    """`model.layers.[0-5,7].mlp.up_proj`: the numbers that share a row."""
    if len(paths) == 1 or "*" not in pattern:
        return paths[0]
    head, tail = pattern.split("*", 1)
    numbers = sorted(int(path[len(head) : len(path) - len(tail)]) for path in paths)
    ranges: list[list[int]] = []
    for one in numbers:
        if ranges and one == ranges[-1][1] + 1:
            ranges[-1][1] = one
        else:
            ranges.append([one, one])
    return f"{head}[{','.join(f'{a}-{b}' if b > a else str(a) for a, b in ranges)}]{tail}"


def _shares(history: Mapping[str, _Spans]) -> dict[str, float]:
    """The share of the GEMMs in each format at the end."""
    found: dict[str, float] = {}
    for spans in history.values():
        for name in _three(spans[-1][1]):
            found[name] = found.get(name, 0.0) + 1 / (3 * len(history))
    return {name: round(share, 4) for name, share in sorted(found.items(), key=lambda item: -item[1])}
