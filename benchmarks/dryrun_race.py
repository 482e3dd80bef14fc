"""Predicted against measured: step time and peak memory of Deepwell's FP8 engine on the GPU that is here.

    PYTHONPATH=src python3 benchmarks/dryrun_race.py --json OUT.json
    PYTHONPATH=src python3 benchmarks/dryrun_race.py --models tiny --device cpu     # tries the script out

For each model the prediction is made and printed before its first step runs. The bars: step time within 10%, peak
memory within 5%. Predictions come from the "deepwell" stack and this machine's own description, with measured GEMM
curves where `deepwell probe --measure` left some.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepwell.bench.environment import environment, one_line
from deepwell.bench.llama import LlamaConfig
from deepwell.bench.models import MODELS, RaceModel
from deepwell.bench.variants import Variant
from deepwell.engine.dryrun.dry_run import dryrun
from deepwell.engine.dryrun.plan import predict
from deepwell.engine.dryrun.risks import MEMORY_BAR, TIME_BAR
from deepwell.graph.capture import capture
from deepwell.graph.table import text_table


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the race and the way it runs: CUDA graphs where kernels are shorter than their launches."""

    model: RaceModel
    variant: str = "fp8"


_LONG = replace(
    MODELS["1b-16l"],
    name="1b-16l-16k",
    batch=1,
    seq_len=16384,
    config=replace(MODELS["1b-16l"].config, max_positions=16384),
)
# Of a shape that no constant was fitted on: Llama-3.2-3B's layers.
_3B = replace(
    MODELS["1b-16l"],
    name="3b-8l",
    batch=2,
    seq_len=4096,
    config=LlamaConfig(width=3072, num_heads=24, num_kv_heads=8, hidden=8192, num_layers=8, vocab=128256),
)
ENTRIES = {
    entry.model.name: entry
    for entry in (
        Entry(model=MODELS["8b-4l"]),
        Entry(model=MODELS["768-12l"], variant="fp8_cg"),
        Entry(model=MODELS["1b-16l"]),
        Entry(model=MODELS["hf-8b-4l"]),
        Entry(model=_LONG),
        Entry(model=_3B),
        Entry(model=MODELS["tiny"]),
        Entry(model=MODELS["hf-tiny"]),
    )
}
# The one with CUDA graphs last: their memory pools go late.
DEFAULT = ("8b-4l", "1b-16l", "hf-8b-4l", "1b-16l-16k", "3b-8l", "768-12l")
HEADER = ("model", "variant", "predicted ms", "measured ms", "error", "predicted GB", "measured GB", "error", "tier")


def race(entry: Entry, device: str, steps: int) -> dict[str, Any]:
    """One model: the prediction, then the measurement."""
    model = entry.model
    net = model.build(device)
    example = model.capture_inputs(model.example(device))
    engine = Variant.parse(entry.variant).engine_of(capture(net, example))
    before = predict(engine, model.batch, model.seq_len)
    say(f"{model.name}: predicted {1e3 * before.step_s:.1f} ms, {before.peak_bytes / 1e9:.2f} GB ({before.tier} tier)")
    trial = dryrun(engine, steps=steps, batch=example, measure=True).trial
    assert trial is not None
    # The report's own prediction is the one above: neither has seen a step.
    assert (trial.predicted_s, trial.predicted_bytes) == (before.step_s, before.peak_bytes)
    row = {
        "model": model.name, "variant": entry.variant, "batch": model.batch, "seq_len": model.seq_len,
        "tier": before.tier, "predicted_s": before.step_s, "predicted_bytes": before.peak_bytes,
        "step_s": trial.step_s, "fastest_s": trial.fastest_s, "slowest_s": trial.slowest_s,
        "first_s": trial.first_s, "peak_bytes": trial.peak_bytes, "losses": list(trial.losses),
        "time_error": None if trial.time_ratio is None else trial.time_ratio - 1,
        "memory_error": None if trial.memory_ratio is None else trial.memory_ratio - 1,
        "problem": trial.problem,
        "parts": {name: value for name, value in before.plan.estimate.breakdown if value > 0},
        "runs_as": _ways(engine),
    }  # fmt: skip
    if not trial.problem:
        say(f"{model.name}: measured {1e3 * row['step_s']:.1f} ms, {row['peak_bytes'] / 1e9:.2f} GB")
    return row


def _ways(engine: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in engine.deepwell.report().bindings:
        label = f"{row.format} as {row.scheme}"
        found[label] = found.get(label, 0) + 1
    return found


def table(rows: list[dict[str, Any]]) -> str:
    cells: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        head = (row["model"], row["variant"])
        if row.get("problem"):
            cells.append((*head, row["problem"][:60], *("",) * (len(HEADER) - 3)))
            continue
        cells.append(
            (
                *head, f"{1e3 * row['predicted_s']:.1f}", f"{1e3 * row['step_s']:.1f}", f"{row['time_error']:+.1%}",
                f"{row['predicted_bytes'] / 1e9:.2f}", f"{row['peak_bytes'] / 1e9:.2f}", f"{row['memory_error']:+.1%}",
                row["tier"],
            )
        )  # fmt: skip
    return "\n".join(text_table(cells, right=range(2, 8)))


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many models are inside both bars."""
    ran = [row for row in rows if row.get("step_s")]
    return {
        "models": len(rows),
        "ran": len(ran),
        "time_within_bar": sum(abs(row["time_error"]) <= TIME_BAR for row in ran),
        "memory_within_bar": sum(abs(row["memory_error"]) <= MEMORY_BAR for row in ran),
        "time_bar": TIME_BAR,
        "memory_bar": MEMORY_BAR,
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(DEFAULT), help=f"of {', '.join(ENTRIES)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each model")
    parser.add_argument("--limit", type=float, default=140.0, help="seconds after which no further model is begun")
    parser.add_argument("--json", type=Path, help="write rows and verdict here")
    options = parser.parse_args()
    names = [name.strip() for name in options.models.split(",") if name.strip()]
    unknown = [name for name in names if name not in ENTRIES]
    if unknown:
        parser.error(f"--models: {unknown[0]!r}; the race has {', '.join(ENTRIES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: no CUDA GPU here; --device cpu --models tiny tries the script out")
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    longest = 0.0
    for name in names:
        begun = time.perf_counter()
        if begun - started + longest > options.limit:
            rows.append({"model": name, "variant": ENTRIES[name].variant, "problem": "not begun: time was up"})
            continue
        rows.append(race(ENTRIES[name], options.device, options.steps))
        torch._dynamo.reset()  # compiled code holds on to the model
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        longest = max(longest, time.perf_counter() - begun)
        if options.json is not None:
            # After every model: a run that is cut short keeps what it has.
            result = {"bench": "dryrun", "environment": environment(), "rows": rows, "verdict": verdict(rows)}
            options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(one_line(environment()))
    print(table(rows))
    print(json.dumps(verdict(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
