"""A run in figures: how it stands, how fast it is, where its time went."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from deepwell.report.run.data import SCHEMA, Columns, RunHistory, number, step_of
from deepwell.report.run.series import rounded

RECENT = 100  # steps behind the figures of "now"
STALE_S = 300.0  # least silence that counts as stale once a step was logged, and
STALE_STEPS = 20  # so many steps' time
STALE_START_S = 1800.0  # before the first step: a large model compiles for long
_ENDED = {"done": "finished", "signal": "stopped", "error": "failed", "gave up": "gave up"}


def summary(run: RunHistory, now: float | None = None) -> dict[str, Any]:
    """The run's figures as JSON: numbers are finite or None; those of "now" are medians over the last steps."""
    now = time.time() if now is None else now
    steps, header, plan = run.steps, run.header, run.header.get("plan")
    state, why = _state(run, now)
    recent = {name: _recent(steps, name) for name in ("seconds", "predicted_s", "tflops", "mfu", "mfu_weighted")}
    predicted, seconds = recent["predicted_s"], recent["seconds"]
    if math.isnan(predicted) and isinstance(plan, dict):
        predicted = number(plan.get("step_s"))
    planned = step_of({"step": header.get("steps")})
    done = int(steps["step"][-1]) if len(steps["step"]) else step_of({"step": header.get("start_step")}) or 0
    shares = time_shares(run)
    total = sum(shares.values())
    return {
        "schema": SCHEMA, "name": run.name, "path": run.path, "state": state, "why": why,
        "began": rounded(run.began, 12), "last": rounded(run.last, 12), "as_of": rounded(now, 12),
        **{name: text_of(header.get(name)) for name in ("model", "device", "layout", "precision")},
        "world": rounded(number(header.get("world"))), "version": text_of(header.get("version")),
        "step": done, "steps": planned, "eta_s": rounded(_eta(run, done, planned)) if state == "running" else None,
        "tokens": rounded(float(tokens_seen(run)[-1]) if len(steps["step"]) else math.nan, 15),
        **_losses(run),
        "lr": rounded(_last(steps["lr"])), "grad_norm": rounded(_last(steps["grad_norm"])),
        "tokens_per_s_per_gpu": rounded(_median(throughput(run)[_recent_rows(steps)])),
        **{name: rounded(recent[name]) for name in ("tflops", "mfu", "mfu_weighted")},
        "peak_gib": rounded(_of_finite(np.concatenate([steps["memory_gib"], run.lost["memory_gib"]]), np.max)),
        "limit_gib": rounded(_last(steps["memory_limit_gib"])),
        "step_s": rounded(seconds), "predicted_s": rounded(predicted),
        "predicted_over_real": rounded(predicted / seconds if seconds > 0 else math.nan),
        "goodput": rounded(_last(steps["goodput"])),
        "training_share": rounded(shares["training"] / total if total > 0 else math.nan),
        "restarts": restarts(run), "lost_steps": int(run.lost["weight"].sum()),
        "skipped_steps": int(steps["skipped"].sum()),
        "guard": dict(Counter(text_of(event.get("what")) or "?" for event in run.events["guard"])),
        **_saves(run),
        "wall_s": rounded(run.last - run.began), "time_s": {name: rounded(s) for name, s in shares.items()},
        "damaged_lines": len(run.damaged),
    }  # fmt: skip


def summary_text(found: dict[str, Any]) -> str:
    """The figures in a few lines for a terminal."""

    def shown(form: str, value: float | None) -> str:
        return "-" if value is None else form.format(value)

    of = f" of {found['steps']:,}" if found["steps"] is not None else ""
    eta = f", {duration(found['eta_s'])} left" if found["eta_s"] is not None else ""
    goodput = found["goodput"] if found["goodput"] is not None else found["training_share"]
    guard = ", ".join(f"{n} {what}" for what, n in sorted(found["guard"].items())) or "none"
    return (
        f"{found['name']}: {found['state']}, step {found['step']:,}{of}{eta}; {found['why']}\n"
        f"  loss {shown('{:.4g}', found['loss'])}, eval {shown('{:.4g}', found['eval_loss'])}; "
        f"{shown('{:,.0f}', found['tokens_per_s_per_gpu'])} tokens/s/GPU, MFU {shown('{:.1%}', found['mfu'])}, "
        f"peak {shown('{:.1f}', found['peak_gib'])} GiB, goodput {shown('{:.1%}', goodput)}\n"
        f"  restarts {found['restarts']}, lost steps {found['lost_steps']}, guard events: {guard}"
    )


def duration(seconds: float) -> str:
    """Seconds in words: 42 s, 3 min 20 s, 5 h 12 min, 2 d 4 h."""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    size, word, part, less = next(unit for unit in units if seconds >= unit[0])
    whole, rest = divmod(round(seconds / part), size // part)
    return f"{whole} {word} {rest} {less}" if rest else f"{whole} {word}"


def tokens_seen(run: RunHistory) -> np.ndarray:
    """Tokens of the stream after each step that counts, those before the log began included."""
    steps = run.steps
    per_step = np.where(np.isfinite(steps["tokens"]), steps["tokens"], _median(steps["tokens"]))
    if not np.isfinite(per_step).all():
        per_step = np.zeros(len(per_step))
    with np.errstate(over="ignore"):
        return np.cumsum(per_step * np.diff(steps["step"], prepend=0.0))


def throughput(run: RunHistory) -> np.ndarray:
    """Tokens/s/GPU of each step: as logged, or from tokens, seconds and GPUs."""
    steps = run.steps
    worlds = np.asarray([number(attempt.header.get("world")) for attempt in run.attempts])
    with np.errstate(divide="ignore", invalid="ignore"):
        own = steps["tokens"] / steps["seconds"] / worlds[steps["attempt"]]
    return np.where(np.isfinite(steps["tokens_per_s_per_gpu"]), steps["tokens_per_s_per_gpu"], own)


def restarts(run: RunHistory) -> int:
    """How often the run began again, by whichever of its events says most."""
    generations = [number(attempt.header.get("generation")) for attempt in run.attempts]
    greatest = max((int(g) for g in generations if math.isfinite(g)), default=0)
    return max(len(run.attempts) - 1, greatest, len(run.events["restart"]))


def time_shares(run: RunHistory) -> dict[str, float]:
    """Where the wall time went, in seconds. The parts add up to the time between the first event and the last.

    A first step is counted as an ordinary one; what it and the way to it took beyond that is `starting`.
    """
    steps, lost = run.steps, run.lost
    typical = _median(np.concatenate([steps["seconds"], lost["seconds"]]))
    typical = 0.0 if math.isnan(typical) else typical
    first = np.asarray([-1 if attempt.first_step is None else attempt.first_step for attempt in run.attempts])

    def spent(columns: Columns, rows: np.ndarray) -> float:
        seconds = np.where(np.isfinite(columns["seconds"]), columns["seconds"], typical)
        seconds = np.where(columns["step"] == first[columns["attempt"]], np.minimum(seconds, typical), seconds)
        return float((seconds * columns["weight"])[rows].sum())

    pairs = itertools.pairwise(run.attempts)
    parts = {
        "training": spent(steps, ~steps["skipped"]),
        "starting": sum(
            a.ended - a.began if a.first_step_at is None else max(0.0, a.first_step_at - a.began - typical)
            for a in run.attempts
        ),
        "evaluation": _sum(run.events["eval"], "seconds"),
        "saving": _sum(run.events["save"], "stall_s"),
        "skipped steps": spent(steps, steps["skipped"]),
        "lost steps": spent(lost, np.ones(len(lost["step"]), dtype=bool)),
        "down": sum(max(0.0, after.began - before.ended) for before, after in pairs),
    }
    rest = (run.last - run.began) - sum(parts.values())
    if rest < 0:  # a stall may be inside a step's seconds: it is counted once
        parts["training"] = max(0.0, parts["training"] + rest)
    return {**parts, "other": max(0.0, rest)}


# ---- parts ----


def _state(run: RunHistory, now: float) -> tuple[str, str]:
    """One word for how the run stands, and the reason."""
    silence = max(0.0, now - run.last)
    if run.end is not None:
        reason = text_of(run.end.get("reason"))
        code = run.end.get("exit")
        ended = f"ended: {reason or 'no reason given'}" + ("" if code is None else f", exit status {text_of(code)}")
        error = text_of(run.end.get("error"))
        return _ENDED.get(reason, "stopped"), f"{ended}, {duration(silence)} ago" + (f": {error}" if error else "")
    started = run.attempts[-1].first_step is not None
    typical = _recent(run.steps, "seconds")
    limit = max(STALE_S, STALE_STEPS * (0.0 if math.isnan(typical) else typical)) if started else STALE_START_S
    said = f"last event {duration(silence)} ago"
    if silence > limit:
        return "stale", f"{said} and no end was logged"
    return ("running" if started else "starting"), said


def _eta(run: RunHistory, done: int, planned: int | None) -> float:
    """Seconds left at the pace of the last steps, pauses included."""
    rows = np.flatnonzero(run.steps["attempt"] == len(run.attempts) - 1)[-RECENT:]
    if planned is None or planned <= done or not len(rows):
        return math.nan
    t, step = run.steps["t"][rows], run.steps["step"][rows]
    pace = (t[-1] - t[0]) / (step[-1] - step[0]) if len(rows) > 1 else _last(run.steps["seconds"])
    return float(pace * (planned - done))


def _losses(run: RunHistory) -> dict[str, Any]:
    loss = run.steps["loss"]
    good = loss[np.isfinite(loss) & ~run.steps["skipped"]]
    read = [(number(event.get("loss")), step_of(event)) for event in run.kept("eval")]
    evals = [(math.nan, None), *((value, step) for value, step in read if math.isfinite(value))]
    return {
        "loss": rounded(_last(good)),
        "loss_mean": rounded(float(good[-RECENT:].mean()) if len(good) else math.nan),
        "nonfinite_losses": int((~np.isfinite(loss)).sum()),
        "eval_loss": rounded(evals[-1][0]),
        "eval_step": evals[-1][1],
        "best_eval_loss": rounded(min((value for value, _ in evals[1:]), default=math.nan)),
    }


def _saves(run: RunHistory) -> dict[str, Any]:
    saves = run.events["save"]
    good = [step_of(event) for event in saves if event.get("committed") is not False]
    stalls = [stall for event in saves if math.isfinite(stall := number(event.get("stall_s")))]
    return {
        "saves": len(saves),
        "last_save_step": good[-1] if good else None,
        "stall_s": rounded(sum(stalls)),
        "longest_stall_s": rounded(max(stalls, default=math.nan)),
    }


def _recent_rows(steps: Columns) -> np.ndarray:
    """Rows of the last steps, first ones of an attempt left out where there are others."""
    attempts = steps["attempt"]
    firsts = np.diff(attempts, prepend=-1.0) != 0
    rows = np.flatnonzero(~firsts)
    return (rows if len(rows) else np.arange(len(attempts)))[-RECENT:]


def _recent(steps: Columns, name: str) -> float:
    return _median(steps[name][_recent_rows(steps)])


def _median(values: np.ndarray) -> float:
    return _of_finite(values, np.median)


def _last(values: np.ndarray) -> float:
    return _of_finite(values, lambda finite: finite[-1])


def _of_finite(values: np.ndarray, choose: Callable[[np.ndarray], Any]) -> float:
    finite = values[np.isfinite(values)]
    return float(choose(finite)) if len(finite) else math.nan


def _sum(events: tuple[dict[str, Any], ...], name: str) -> float:
    return sum(value for event in events if math.isfinite(value := number(event.get(name))))


def text_of(value: Any) -> str:
    return "" if value is None else str(value)
