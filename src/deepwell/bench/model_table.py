"""The table of Hugging Face families: each row a race of `bench step` in a process of its own, kept as it ends.

A row is `dw.compile(model)` with AdamWDW, no options, beside torch.compile with torch's fused AdamW. With `resume` rows
that are kept already are not run again.
"""

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepwell.bench.environment import child_environment, environment
from deepwell.bench.families import PREFIX, family_model
from deepwell.bench.step import StepOptions
from deepwell.hardware.progress import bar

PEER, OURS = "torch", "default"
# Of the losses before the first update: the same weights and tokens, FP8 and another order of sums. After updates two
# correct engines drift apart.
_MAX_LOSS_GAP = 0.02


def run_models(
    names: Sequence[str], folder: Path, options: StepOptions, *, resume: bool = False, timeout: float = 1800.0
) -> dict[str, Any]:
    """Race every family, `NAME[:layers]` as `hf:` takes it, and keep each row's result in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    models = [family_model(PREFIX + name).name for name in names]  # a name that is none is an error now
    rows = []
    with bar("models", len(names)) as advance:
        for name, model in zip(names, models, strict=True):
            path = folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', model.removeprefix(PREFIX))}.json"
            kept = _kept(path, model, options) if resume else None
            note = "" if kept else _run(name, path, options, timeout)
            kept = kept or _kept(path, model, options)
            lost: dict[str, Any] = {"model": model, "note": note, "problems": [note]}
            rows.append(_row(model, kept) if kept else lost)
            advance(1)
    speeds: list[float] = [row["speed"] for row in rows if "speed" in row]
    mean = statistics.geometric_mean(speeds) if speeds else None
    shown = f"geometric mean of {len(speeds)} rows {mean:.3f}" if mean else "no row ran"
    title = f"dw.compile(model) + AdamWDW beside torch.compile + fused AdamW, forward + backward + optimizer; {shown}"
    return {"bench": "models", "title": title, "geometric_mean": mean, "environment": environment(), "rows": rows}


def _run(name: str, path: Path, options: StepOptions, timeout: float) -> str:
    """Race one family in a process of its own, which writes the path; else why it did not."""
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "deepwell", "bench", "step", "--model", PREFIX + name, "--device", options.device]
    command += ["--peers", PEER, "--variants", OURS, "--gradients", "--json", str(path)]
    command += ["--rounds", str(options.rounds), "--burst", str(options.burst)]
    try:
        done = subprocess.run(
            command, env=child_environment(), capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done after {timeout:.0f} s"
    return f"failed: {(done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1][:200]}"


def _kept(path: Path, model: str, options: StepOptions) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    wanted = {"bench": "step", "model": model, "samples": options.rounds * options.burst, "device": options.device}
    return found if all(found.get(key) == value for key, value in wanted.items()) else None


def _row(model: str, result: dict[str, Any]) -> dict[str, Any]:
    """A line of the table: both times, memory, losses, gradients, and what is wrong."""
    peer, ours = ({row["name"]: row for row in result["rows"]}[name] for name in (PEER, OURS))
    row: dict[str, Any] = {"model": model, "batch": result["batch"]}
    problems = list(ours["problems"])
    for name, found in ((PEER, peer), (OURS, ours)):
        if found["ms"] is None:
            problems.append(f"{name}: {found['note']}")
            continue
        row |= {f"{name} ms": found["ms"], f"{name} GB": found["peak_gb"], f"{name} loss": found["losses"][0]}
    if peer["ms"] and ours["ms"]:
        row["speed"] = peer["ms"] / ours["ms"]
        if peer["peak_gb"]:
            row["memory"] = ours["peak_gb"] / peer["peak_gb"]
        gap = row[f"{OURS} loss"] / row[f"{PEER} loss"] - 1
        if not abs(gap) <= _MAX_LOSS_GAP:
            problems.append(f"the first losses differ by {gap:.2%}")
    if ours["gradients"]:
        row["cosine"] = ours["gradients"]["cosine"]
    return row | {"problems": problems}
