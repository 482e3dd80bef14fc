"""What must hold at the end of a run that was killed again and again."""

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepwell.artifacts.checkpoint import latest, list_checkpoints, verify
from deepwell.bench.faults.result import KILLS, FaultClaim, FaultSetup, Strike
from deepwell.errors import CheckpointError
from deepwell.report.run.data import read_events
from deepwell.train.starts import Journal

# Sample number -> checksum of its tokens, for each step.
Stream = dict[int, dict[int, int]]


def check_all(setup: FaultSetup, calm: Path, run: Path, strikes: Sequence[Strike], host: int) -> tuple[FaultClaim, ...]:
    kills = sum(strike.kind in KILLS for strike in strikes)
    return (
        FaultClaim("kills", kills == setup.kills, f"{kills} of {setup.kills}"),
        _finished(setup, run),
        _tokens(setup, calm, run),
        _weights(calm, run),
        _checkpoints(run),
        _leftovers(run),
        _processes(run, host),
    )


def _finished(setup: FaultSetup, run: Path) -> FaultClaim:
    events = read_events(run)
    ends = [event for event in events if event["kind"] == "end"]
    last = ends[-1] if ends else {"reason": "nothing", "step": 0}
    ok = last["reason"] == "done" and last["step"] == setup.steps and events[-1]["kind"] == "end"
    return FaultClaim("run finished", ok, f"{last['reason']} at step {last['step']} of {setup.steps}")


def read_stream(folder: Path) -> tuple[Stream, int]:
    """What each step of the final stream was computed from, and how often a step was written in all.

    A step that was computed again, because it was lost, replaces what was written of it before: last writer wins.
    """
    stream: Stream = {}
    written = 0
    for path in sorted(folder.glob("tokens-*.jsonl")):
        own: Stream = {}
        for line in path.read_bytes().splitlines():
            try:
                fields = json.loads(line)
            except ValueError:
                continue  # torn by a kill; the step is computed again
            own[fields["step"]] = {int(sample): crc for sample, crc in fields["samples"]}
            written += 1
        for step, samples in own.items():
            stream.setdefault(step, {}).update(samples)
    return stream, written


def _tokens(setup: FaultSetup, calm: Path, run: Path) -> FaultClaim:
    """The stream is the undisturbed one's; each sample is used once, each step is there once."""
    (expected, _), (found, written) = read_stream(calm), read_stream(run)
    wrong = [step for step in sorted(expected.keys() | found.keys()) if expected.get(step) != found.get(step)]
    if wrong:
        return FaultClaim("token stream", False, f"{len(wrong)} steps differ, the first is {wrong[0]}")
    samples = [sample for step in sorted(found) for sample in sorted(found[step])]
    ok = sorted(found) == list(range(1, setup.steps + 1)) and samples == list(range(len(samples)))
    again = written // setup.world - setup.steps
    detail = f"{len(found)} steps, {len(samples)} samples, none skipped or repeated; {again} steps computed again"
    return FaultClaim("token stream", ok, detail if ok else "steps or samples are missing or used twice")


def _weights(calm: Path, run: Path) -> FaultClaim:
    """Weights, optimizer and random states of the last checkpoint, as bytes."""
    expected, found = (_hashes(latest(folder / "checkpoints")) for folder in (calm, run))
    differ = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    ok = bool(expected) and not differ
    detail = f"{len(expected)} files of weights, optimizer and random states are equal, bit for bit"
    return FaultClaim("final state", ok, detail if ok else f"differ: {', '.join(differ) or 'no checkpoint'}")


def _hashes(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    files = json.loads((path / "manifest.json").read_bytes())["files"]
    return {item["name"]: item["sha256"] for item in files if item["name"].endswith(".safetensors")}


def _checkpoints(run: Path) -> FaultClaim:
    found, broken = list_checkpoints(run / "checkpoints"), []
    for path in found:
        try:
            verify(path)
        except CheckpointError as error:
            broken.append(str(error))
    said = {event["path"] for event in read_events(run) if event["kind"] == "save" and event["committed"]}
    ok = bool(found) and not broken
    detail = f"{len(said)} were committed, all {len(found)} that are kept verify"
    return FaultClaim("checkpoints", ok, detail if ok else "; ".join(broken) or "there are none")


def _leftovers(run: Path) -> FaultClaim:
    """Nothing that a killed save left is there after the saves that followed it."""
    left = sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("."))
    left += [str(path.name) for path in (run / "checkpoints").glob("*/*.part")]
    detail = "nothing temporary is left" if not left else f"left: {', '.join(left[:5])}"
    return FaultClaim("leftovers", not left, detail)


def _processes(run: Path, host: int, patience_s: float = 10.0) -> FaultClaim:
    """No process of the run is alive or a zombie."""
    ours = [int(path.name) for path in (run / "pids").iterdir()]
    deadline = time.monotonic() + patience_s
    while (left := children(host)) and time.monotonic() < deadline:
        time.sleep(0.1)
    strays = [pid for pid in ours if _is_of(pid, run)]
    ok = not left and not strays
    detail = f"{len(ours)} workers came and went, none is left" if ok else f"left: {sorted({*left, *strays})}"
    return FaultClaim("processes", ok, detail)


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _is_of(pid: int, run: Path) -> bool:
    """Whether a process is alive and a worker of the run, not another one that got its number."""
    try:
        handles = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - names only
        return any(str(run) in os.readlink(f"/proc/{pid}/fd/{name}") for name in handles)  # noqa: PTH115
    except OSError:
        return False


def costs(run: Path) -> dict[str, Any]:
    """What the strikes cost, from the run's own events: fields of a Result."""
    events = read_events(run)
    restarts = [event for event in events if event["kind"] == "restart"]
    steps = [event for event in events if event["kind"] == "step"]
    starts = Journal.read(run).starts
    reasons = Counter(_short(event["reason"]) for event in restarts)
    return {
        "starts": len(starts),
        "recoveries": tuple(event["recovery_s"] for event in restarts),
        "lost_steps": sum(event["lost_steps"] for event in restarts),
        "goodput": steps[-1]["goodput"] if steps else 0.0,
        "seconds": events[-1]["t"] - starts[0].t if starts else 0.0,
        "reasons": dict(reasons.most_common()),
    }


def _short(reason: str) -> str:
    """A reason without the numbers of ranks, to count."""
    for words in ("ended without a word", "hung", "stopped by SIGTERM", "failed"):
        if words in reason:
            return words
    return reason
