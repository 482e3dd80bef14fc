"""Trains 10,000 tiny steps on a CPU, with saves, evaluations and kills, and looks for what grows. No GPU.

PYTHONPATH=src python3 benchmarks/soak.py [--steps 10000] [--kills 4] [--keep DIR] [--json FILE]

One process trains; it is killed with SIGKILL in the first third of the run, `kills` times, and started again, so that
the last process does at least two thirds of all steps. It writes down its resident memory, open files, threads and
Python objects every `--every` steps. After a warm-up, the trend over its life (the median slope of all pairs of
samples) must stay below 1% of its memory for 10,000 steps, and there may be no more open files or threads at the end
than at the beginning. Exit status 1 where something grows, or where the run's folder is not as it should be.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepwell.bench.faults.result import FaultClaim
from deepwell.bench.faults.worker import VOCAB, WorkerJob, make_trainer
from deepwell.hardware.progress import bar
from deepwell.report.run.data import read_events
from deepwell.train.run import Callback
from deepwell.train.starts import Journal

_PAGE = os.sysconf("SC_PAGESIZE")
_WARM_UP = 0.15  # of a process's life: pools fill, the allocator finds its size
_GROWTH = 0.01  # of the memory, in 10,000 steps


class Sampler(Callback):
    """Writes down what this process holds."""

    def __init__(self, folder: Path, every: int) -> None:
        self._path, self._every = folder / "samples.jsonl", every

    def on_step(self, trainer: Any, event: Mapping[str, Any]) -> None:
        if event["step"] % self._every:
            return
        gc.collect()
        line = {
            "pid": os.getpid(),
            "step": event["step"],
            "rss": int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE,
            "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names only
            "threads": threading.active_count(),
            "objects": len(gc.get_objects()),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def child(folder: Path, steps: int, every: int) -> None:
    """The process that trains, and is killed."""
    job = WorkerJob(folder=str(folder), steps=steps, world=1, seed=0, save_every=25, hang_after_s=120.0)
    options = {"eval_every": 100, "eval_batches": 2, "eval_dataloader": f"synthetic:{VOCAB}"}
    with make_trainer(job, [Sampler(folder, every)], **options) as trainer:
        trainer.fit()


def train(folder: Path, steps: int, kills: int, every: int) -> None:
    """Start the child, kill it, start it again, until the run is done."""
    when = [round(steps / 3 * (number + 1) / (kills + 1)) for number in range(kills)]
    command = [sys.executable, __file__, "--child", str(folder), "--steps", str(steps), "--every", str(every)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    shown = 0
    with bar("soak", steps) as advance:
        while True:
            process = subprocess.Popen(command, env=environment)
            while process.poll() is None:
                time.sleep(0.25)
                done = _step(folder)
                advance(max(0, done - shown))
                shown = max(done, shown)
                if when and done >= when[0]:
                    when.pop(0)
                    process.send_signal(signal.SIGKILL)
                    process.wait()
            if process.returncode == 0:
                return
            if process.returncode != -signal.SIGKILL:
                sys.exit(f"soak: the process that trains ended with {process.returncode}")


def _step(folder: Path) -> int:
    path = folder / "samples.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def trend(points: list[tuple[float, float]]) -> float:
    """The median slope of all pairs: a step up or a single peak does not make one, growth does."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0


def judged(folder: Path, steps: int, kills: int) -> tuple[list[FaultClaim], list[dict[str, Any]]]:
    """All checks, and the samples of the last process."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if line["pid"] == lines[-1]["pid"]]
    lived = last[-1]["step"] - last[0]["step"]
    warm = [line for line in last if line["step"] >= last[0]["step"] + _WARM_UP * lived]
    third = max(1, len(warm) // 3)
    checks = []
    for name, unit in (("rss", "MiB"), ("objects", "")):
        size = statistics.median(line[name] for line in warm)
        grows = 10_000 * trend([(line["step"], line[name]) for line in warm]) / size
        scale = 2**20 if unit else 1
        detail = f"{size / scale:,.0f} {unit}".strip() + f", {100 * grows:+.2f}% in 10,000 steps"
        checks.append(FaultClaim(name=name, ok=grows <= _GROWTH, detail=detail))
    for name in ("files", "threads"):
        first, end = (max(line[name] for line in part) for part in (warm[:third], warm[-third:]))
        checks.append(
            FaultClaim(name=name, ok=end <= first, detail=f"at most {first} in the first third, {end} in the last")
        )
    events = read_events(folder)
    starts = len(Journal.read(folder).starts)
    done = events[-1].get("reason") == "done" and events[-1]["step"] == steps
    detail = f"{steps:,} steps, {starts - 1} restarts after {kills} kills; the last process did {lived:,}"
    checks.append(FaultClaim(name="run", ok=done and starts == kills + 1, detail=detail))
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    checks.append(FaultClaim(name="folder", ok=len(names) == 3, detail=f"{', '.join(names)}"))
    return checks, warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--keep", type=Path, help="folder of the run; a temporary one without it")
    parser.add_argument("--json", type=Path, dest="out")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(given.child, given.steps, given.every)
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="deepwell-soak-") as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        train(folder, given.steps, given.kills, given.every)
        checks, samples = judged(folder, given.steps, given.kills)
    seconds = time.monotonic() - began
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<8} {check.detail}")
    print(f"{seconds:.0f} s")
    if given.out is not None:
        rows = [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in checks]
        text = json.dumps({"steps": given.steps, "kills": given.kills, "checks": rows, "samples": samples}, indent=1)
        given.out.write_text(text + "\n", encoding="utf-8")
    if not all(check.ok for check in checks):
        sys.exit(1)


if __name__ == "__main__":
    main()
