"""What a run needs to outlive its machines: process groups, signals, hung ranks, restarts that are counted.

torchrun starts the processes again when one dies; each finds the last committed checkpoint of the run's folder and goes
on from there (docs/reliability.md). Here is the rest: a SIGTERM becomes a save at the next step's end, a rank that
finishes no step for too long is dumped and ended so that torchrun can act, and restarts that bring nothing are counted
until the run gives up with a reason.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepwell.errors import ConfigError, DeepwellError

# A rank that hangs ends with this status; torchrun starts the others again with it.
HUNG = 75
# What the agent must have, or restarts after a crash meet the addresses of the processes before them.
AGENT_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The processes of a run and this one's place among them."""

    size: int = 1
    rank: int = 0
    local_rank: int = 0
    attempt: int = 0  # how often torchrun's agent of this node has started the processes again

    @property
    def is_elastic(self) -> bool:
        """Whether torchrun started this process and would start it again."""
        return "TORCHELASTIC_RUN_ID" in os.environ


def join(device_type: str, timeout: timedelta = _TIMEOUT) -> World:
    """Join the process group that torchrun described, if it did; a group that is there already is used as it is."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return World()
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"WORLD_SIZE is set and {missing[0]} is not: start the processes with torchrun")
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        torch.cuda.set_device(local % torch.cuda.device_count())
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return World(size=dist.get_world_size(), rank=dist.get_rank(), local_rank=local, attempt=attempt)


class StopSignal:
    """Notes a SIGTERM; the trainer saves at the end of its step and ends with status 0. A second one ends at once."""

    def __init__(self) -> None:
        self.name = ""
        self._before: Any = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, number: int, _frame: Any) -> None:
        self.name = signal.Signals(number).name
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None


class Watchdog:
    """Ends this process where no step was finished for `seconds`, with the stacks of all threads on stderr."""

    def __init__(self, seconds: float, before_end: Callable[[float], None] | None = None) -> None:
        self.seconds = seconds
        self._before_end = before_end
        self._last = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self.seconds > 0.0:
            self._last = time.monotonic()
            self._thread = threading.Thread(target=self._watch, name="deepwell-watchdog", daemon=True)
            self._thread.start()
        return self

    def alive(self) -> None:
        """A step was finished."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.seconds / 4.0)):
            silent = time.monotonic() - self._last
            if silent > self.seconds:
                print(f"deepwell: no step finished for {silent:.0f} s: this rank hangs", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
                if self._before_end is not None:
                    self._before_end(silent)
                os._exit(HUNG)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


# ---- restarts ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run: which it is, from which step, on how many processes."""

    generation: int
    step: int
    world: int
    t: float

    @classmethod
    def read_all(cls, run_dir: Path) -> list[Start]:
        """The starts of a run so far; a torn line, left by a process that was killed, is no start."""
        path = run_dir / "starts.jsonl"
        if not path.exists():
            return []
        found = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(cls(**json.loads(line)))
            except (ValueError, TypeError):
                continue
        return found


def note_start(run_dir: Path, step: int, world: int, give_up_after: int) -> Start:
    """Write down that the run starts from `step`. Raises DeepwellError after too many starts without progress.

    Progress is a checkpoint that was committed since: the run then starts from a later step.
    """
    starts = Start.read_all(run_dir)
    start = Start(generation=len(starts), step=step, world=world, t=time.time())
    fruitless = 0
    for earlier in reversed(starts):
        if earlier.step != step:
            break
        fruitless += 1
    if fruitless > give_up_after:
        raise DeepwellError(
            f"{run_dir}: {fruitless} starts in a row from step {step} brought no new checkpoint: something fails "
            f"before the next one is written. Read {run_dir / 'events.jsonl'}; mend it, then remove "
            f"{run_dir / 'starts.jsonl'}"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "starts.jsonl").open("a", encoding="utf-8") as file:
        fields = {"generation": start.generation, "step": step, "world": world, "t": round(start.t, 3)}
        file.write(json.dumps(fields) + "\n")
    return start


# ---- what ranks agree on once a step ----


class Control:
    """One small exchange between all ranks before each step, over gloo: nothing waits for a GPU."""

    def __init__(self, world: World) -> None:
        self._group: Any = None
        if world.size > 1:
            # NCCL would order it after the step that is still running; gloo is the host's own.
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def total(self, values: list[float]) -> list[float]:
        """Each value summed over all ranks."""
        if self._group is None:
            return values
        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed, group=self._group)
        return [float(value) for value in packed]

    def first(self, value: Any) -> Any:
        """What rank 0 says, on every rank. `value` must be JSON."""
        if self._group is None:
            return value
        text = json.dumps(value).encode()
        size = torch.tensor([len(text)])
        dist.broadcast(size, src=0, group=self._group)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if dist.get_rank() == 0 else None
        buffer = torch.empty(int(size), dtype=torch.uint8) if data is None else data
        dist.broadcast(buffer, src=0, group=self._group)
        return json.loads(bytes(buffer.tolist()))
