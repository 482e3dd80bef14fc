"""The record of a run: events as JSON lines, one line a step for people, TensorBoard where asked for.

`events.jsonl` in the run's folder is the record: every line is one event (docs/training.md lists them) and is whole on
disk before the next begins, so that a run that was killed can be read to its last step.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from deepwell.errors import ConfigError

SCHEMA = 1
FILE = "events.jsonl"


class EventLog:
    """Appends events to a run's file; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / FILE
        self._file: FileIO | None = None
        self._unwritten = b""
        self._is_stuck = False
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                end_torn_line(self.path)
                self._file = self.path.open("ab", buffering=0)
            except OSError as error:
                raise ConfigError(f"run_dir: {self.path} cannot be written: {error.strerror}") from error

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """One event, now. A disk that is full ends no run: what it does not take is written when it does."""
        event = {"t": round(time.time(), 3), "kind": kind, **{k: _plain(v) for k, v in fields.items()}}
        if self._file is None:
            return event
        self._unwritten += json.dumps(event).encode() + b"\n"
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._is_stuck = False
        except OSError as error:
            if not self._is_stuck:
                print(f"deepwell: {self.path} cannot be written: {error.strerror}; training goes on", file=sys.stderr)
            self._is_stuck = True
        return event

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def end_torn_line(path: Path) -> None:
    """A killed writer may leave half a line: end it, so that the next event is a line of its own."""
    with path.open("ab+") as file:
        if file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN: "nan", "inf"
    if isinstance(value, Path):
        return str(value)
    return value


def step_line(event: Mapping[str, Any], steps: int) -> str:
    """One step for people, in the words that trainers print."""
    words = [f"step {event['step']:>{len(str(steps))}}/{steps}", f"loss {_short(event['loss'], 4)}"]
    words.append(f"gnorm {_short(event['grad_norm'], 3)}")
    words.append(f"lr {event['lr']:.2e}")
    limit = event.get("memory_limit_gib")
    if event.get("memory_gib"):
        share = f"/{limit:.0f} GiB ({100 * event['memory_gib'] / limit:.0f}%)" if limit else " GiB"
        words.append(f"{event['memory_gib']:.1f}{share}")
    if event.get("tokens_per_s_per_gpu"):
        words.append(f"{event['tokens_per_s_per_gpu']:,.0f} tok/s/gpu")
    if event.get("tflops"):
        words.append(f"{_short(event['tflops'], 3)} TFLOP/s")
    if event.get("mfu") is not None:
        words.append(f"mfu {100 * event['mfu']:.1f}% (w {100 * event['mfu_weighted']:.1f}%)")
    words.append(f"{event['seconds']:.3f} s")
    if event.get("ratio") is not None:
        words.append(f"pred/real {event['ratio']:.2f}")
    if event.get("guard"):
        words.append(f"guard {event['guard']}")
    if event.get("skipped"):
        words.append("SKIPPED")
    words.append(f"goodput {100 * event['goodput']:.1f}%")
    return " | ".join(words)


def _short(value: Any, digits: int) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) and math.isfinite(value) else str(value)


class Console:
    """Lines on stdout; on a terminal with a bar below them that says how far and how long."""

    def __init__(self, steps: int, start: int, *, quiet: bool = False) -> None:
        self.quiet, self._steps = quiet, steps
        self._progress: Any = None
        if not quiet and sys.stdout.isatty():
            from rich import progress as rich

            columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn())
            times = (rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
            self._progress = rich.Progress(*columns, *times, transient=True)
            self._task = self._progress.add_task("train", total=steps, completed=start)
            self._progress.start()

    def say(self, text: str) -> None:
        if self.quiet:
            return
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def at(self, step: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Scalars:
    """TensorBoard's view of the events; nothing where it was not asked for."""

    def __init__(self, folder: Path | None, wanted: bool) -> None:
        self._writer: Any = None
        if not wanted:
            return
        if folder is None:
            raise ConfigError("tensorboard=True needs run_dir, the folder that it writes to")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("tensorboard=True needs the package: pip install 'deepwell[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def step(self, event: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        for name, value in event.items():
            if name not in ("t", "kind", "step") and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(f"train/{name}", value, event["step"])

    def evaluation(self, step: int, loss: float) -> None:
        if self._writer is not None:
            self._writer.add_scalar("eval/loss", loss, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
