"""The journal of a run's starts: which there were, how their processes ended, and when to give up.

`starts.jsonl` in the run's folder has a line for every start, written by its first rank, and one for every process that
could say how it ended. A process that was killed says nothing, which is how it is found out. torchrun counts restarts
too, but each of its agents for itself, and from zero again where the agent itself is started anew.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepwell.errors import DeepwellError
from deepwell.train.log import end_torn_line

FILE = "starts.jsonl"
ORDERLY = ("done", "paused", "signal")
# What a process says when another one that it talks to is gone: an effect, not the cause.
_PEER_IS_GONE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|connectfullmesh|socket|gloo|nccl|timed out|timeout|"
    r"dist(network|backend|store)error",
    re.IGNORECASE,
)
_LONGEST = 300  # characters of an error that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run: which it is, from which step, on how many processes."""

    generation: int
    step: int
    world: int
    t: float


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one process of a start ended: `what` is "done", "paused", "signal", "error" or "hung"."""

    generation: int
    rank: int
    what: str
    error: str
    t: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """Starts and ends of a run, in the order in which they were written."""

    starts: list[Start]
    ends: list[End]

    @classmethod
    def read(cls, run_dir: Path) -> Journal:
        """Of a run's folder; a torn line, left by a process that was killed, counts for nothing."""
        starts, ends = [], []
        try:
            text = (run_dir / FILE).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            text = ""
        for line in text.splitlines():
            try:
                fields = json.loads(line)
                if "rank" in fields:
                    ends.append(End(**fields))
                else:
                    starts.append(Start(**fields))
            except (ValueError, TypeError):
                continue
        return cls(starts=starts, ends=ends)

    def ends_of(self, generation: int) -> list[End]:
        return [end for end in self.ends if end.generation == generation]

    def fruitless(self, step: int) -> int:
        """How many starts in a row before now began at `step` and ended without a checkpoint, and not in order."""
        count = 0
        for start in reversed(self.starts):
            if start.step != step or any(end.what in ORDERLY for end in self.ends_of(start.generation)):
                break
            count += 1
        return count

    def cause(self, world: int) -> str:
        """Why the last start ended, as far as it is known, for a start on `world` processes that follows it."""
        if not self.starts:
            return ""
        last = self.starts[-1]
        reason = _cause(last, self.ends_of(last.generation))
        if last.world == world:
            return reason
        return f"world changed from {last.world} to {world}: {reason}"


def _cause(start: Start, ends: list[End]) -> str:
    """Of what the processes of a start said when they ended, the cause."""
    said = {end.rank for end in ends}
    silent = sorted(set(range(start.world)) - said)
    errors = sorted((end for end in ends if end.what == "error"), key=lambda end: end.t)
    for end in errors:
        if not _PEER_IS_GONE.search(end.error):
            return f"rank {end.rank} failed: {end.error}"
    hung = [end for end in ends if end.what == "hung"]
    if hung:
        return f"{_ranks(silent)} hung: {hung[0].error}" if silent else f"hung: {hung[0].error}"
    orderly = [end for end in ends if end.what in ORDERLY]
    if orderly and not errors:
        return {"signal": "stopped by SIGTERM", "paused": "paused", "done": "done before"}[orderly[0].what]
    if silent:
        return f"{_ranks(silent)} ended without a word (killed?)"
    return f"rank {errors[0].rank} failed: {errors[0].error}" if errors else "unknown"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def note_start(run_dir: Path, step: int, world: int, give_up_after: int) -> tuple[Start, str, float]:
    """Write down that the run starts from `step`; the start, why the one before it ended, when the first was.

    Raises DeepwellError after too many starts without progress.

    Progress is a checkpoint that was committed since: the run then starts from a later step. A run that was stopped or
    paused in order is not counted.
    """
    journal = Journal.read(run_dir)
    fruitless = journal.fruitless(step)
    if fruitless > give_up_after:
        raise DeepwellError(
            f"{run_dir}: {fruitless} starts in a row from step {step} brought no new checkpoint; the last one: "
            f"{journal.cause(world)}. Read {run_dir / 'events.jsonl'}; mend it, then remove {run_dir / FILE}"
        )
    generation = 1 + max((start.generation for start in journal.starts), default=-1)
    start = Start(generation=generation, step=step, world=world, t=round(time.time(), 3))
    run_dir.mkdir(parents=True, exist_ok=True)
    _append(run_dir / FILE, asdict(start))
    return start, journal.cause(world), journal.starts[0].t if journal.starts else start.t


def note_end(run_dir: Path, generation: int, rank: int, what: str, error: str = "") -> None:
    """Write down how this process ended. Called by all ranks, each for itself; what cannot be written is left out."""
    text = " ".join(error.split())
    end = End(generation=generation, rank=rank, what=what, error=text[:_LONGEST], t=round(time.time(), 3))
    try:
        _append(run_dir / FILE, asdict(end))
    except OSError:
        return  # a full disk: the process ends all the same, and the next start takes it for killed


def _append(path: Path, fields: dict[str, Any]) -> None:
    """One line in one write: lines of several processes do not mix, and one after a torn line stands alone."""
    end_torn_line(path)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(fields).encode() + b"\n")


class Fence:
    """Tells a process whose run was started again elsewhere, e.g. after a partition of the network, to stop."""

    def __init__(self, run_dir: Path, generation: int) -> None:
        self.run_dir, self.generation = run_dir, generation
        self._size = -1

    def check(self) -> None:
        """Raise DeepwellError where a later start is in the journal. Costs one look at a file's size."""
        try:
            size = (self.run_dir / FILE).stat().st_size
        except OSError:
            return
        if size == self._size:
            return
        self._size = size
        later = [start for start in Journal.read(self.run_dir).starts if start.generation > self.generation]
        if later:
            raise DeepwellError(
                f"{self.run_dir}: the run was started again (start {later[-1].generation}) while this one, start "
                f"{self.generation}, was going on: this one stops. Give each run a folder of its own"
            )


def last_events(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The end of an event file, back to the last event that is `wanted`; not the whole of what may be gigabytes."""
    try:
        size = path.stat().st_size
    except OSError:
        return []
    reach = 1 << 18
    while True:
        with path.open("rb") as file:
            file.seek(max(0, size - reach))
            lines = file.read().splitlines()
        events = []
        for line in lines[0 if reach >= size else 1 :]:
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
        found = [number for number, event in enumerate(events) if wanted(event)]
        if found or reach >= size:
            return events[found[-1] :] if found else events
        reach *= 8
