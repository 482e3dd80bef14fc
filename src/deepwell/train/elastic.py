"""What a run needs to outlive its machines: process groups, signals, hung ranks, agents that die.

torchrun starts the processes again when one dies; each finds the last committed checkpoint of the run's folder and goes
on from there (docs/reliability.md). Here is the rest: a SIGTERM becomes a save at the next step's end, a rank that
finishes no step for too long is dumped and ended so that torchrun can act, processes end with the agent that started
them, and restarts that bring nothing are counted until the run gives up with a reason (train/starts.py).
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepwell.errors import ConfigError, DeepwellError
from deepwell.train.starts import last_events, note_start

# A rank that hangs ends with this status; torchrun starts the others again with it.
HUNG = 75
# What the agent must have. Without the first, restarts after a crash meet the addresses of the processes before them;
# the second is how long processes may take to save after a SIGTERM to the agent (30 s if it is not set).
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
AGENT_ENVIRONMENT = {_OWN_STORE: "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
_TIMEOUT = timedelta(minutes=10)
_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


@dataclass(slots=True, kw_only=True)
class World:
    """The processes of a run, this one's place among them, and the one small exchange between all before each step."""

    size: int = 1
    rank: int = 0
    # NCCL would order the exchange after the step that is still running; gloo is the host's own.
    group: Any = None
    places: list[list[int]] = field(default_factory=list)  # of each rank, see `_place`

    @property
    def is_elastic(self) -> bool:
        """Whether torchrun started this process and would start it again."""
        return "TORCHELASTIC_RUN_ID" in os.environ

    def note(self, elastic: bool) -> str:
        """What is wrong with how torchrun was started, for a run that should live through crashes."""
        if not elastic or not self.is_elastic or self.size == 1 or os.environ.get(_OWN_STORE) == "1":
            return ""
        return (
            f"{_OWN_STORE}=1 is not set where torchrun was started: restarts after a crash may fail, or take minutes. "
            "Set it, or start with `deepwell train --nproc`"
        )

    def total(self, values: list[float]) -> list[float]:
        """Each value summed over all ranks."""
        if self.group is None:
            return values
        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed, group=self.group)
        return [float(value) for value in packed]

    def first(self, value: Any) -> Any:
        """What rank 0 says, on every rank. `value` must be JSON."""
        if self.group is None:
            return value
        text = json.dumps(value).encode()
        size = torch.tensor([len(text)])
        dist.broadcast(size, src=0, group=self.group)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.rank == 0 else None
        buffer = torch.empty(int(size), dtype=torch.uint8) if data is None else data
        dist.broadcast(buffer, src=0, group=self.group)
        return json.loads(bytes(buffer.tolist()))

    def end_silent(self, said: Callable[[], Collection[int]], patience_s: float = 2.0) -> None:
        """Kill the ranks of this agent that do not say how they ended: a stopped process does not answer a SIGTERM.

        `said` gives the ranks that did. torchrun would kill them too, 30 seconds later.
        """
        deadline = time.monotonic() + patience_s
        while len(said()) < self.size and time.monotonic() < deadline:
            time.sleep(0.1)
        heard = said()
        machine, parent, own = _place()
        for rank, (where, its_parent, pid) in enumerate(self.places):
            if rank in heard or (where, its_parent) != (machine, parent) or pid == own or _parent_of(pid) != parent:
                continue
            print(f"deepwell: rank {rank} does not answer: killed", file=sys.stderr, flush=True)
            os.kill(pid, signal.SIGKILL)


def join(device_type: str, timeout: timedelta = _TIMEOUT) -> World:
    """Join the process group that torchrun described, if it did; a group that is there already is used as it is."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGKILL)
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return World()
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"WORLD_SIZE is set and {missing[0]} is not: start the processes with torchrun")
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    world = World(size=dist.get_world_size(), rank=dist.get_rank())
    if world.size > 1:
        world.group = dist.new_group(backend="gloo", timeout=timeout)
        mine = torch.tensor(_place(), dtype=torch.int64)
        places = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(places, mine, group=world.group)
        world.places = [place.tolist() for place in places]
    return world


def end_with_parent(number: int) -> None:
    """Get a signal when the process that started this one dies, however it dies. Linux only; elsewhere nothing.

    Workers of an agent that was killed would otherwise train on, beside those of the agent that takes its place.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0)


class StopSignal:
    """Notes a SIGTERM; the trainer saves at the end of its step and ends with status 0.

    More of them change nothing: a scheduler may signal the processes and their agent, which then signals them again.
    """

    def __init__(self) -> None:
        self.name = ""
        self._before: Any = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, number: int, _frame: Any) -> None:
        self.name = signal.Signals(number).name

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None


class Watchdog:
    """Ends this process where no step was finished for `seconds`, with the stacks of all threads on stderr.

    The first step, which compiles, has ten minutes at least.
    """

    def __init__(
        self, seconds: float, before_end: Callable[[float], None] | None = None, first_s: float = 600.0
    ) -> None:
        self.seconds = seconds
        self._before_end = before_end
        self._patience = max(seconds, first_s)
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
        self._last, self._patience = time.monotonic(), self.seconds

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.seconds / 4.0)):
            silent = time.monotonic() - self._last
            if silent > self._patience:
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


def _place() -> tuple[int, int, int]:
    """Which machine this process is on, which process started it, and which one it is."""
    space = Path("/proc/self/ns/pid")
    name = socket.gethostname() + (str(space.readlink()) if space.is_symlink() else "")
    return zlib.crc32(name.encode()), os.getppid(), os.getpid()


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


# ---- starts and ends ----


def begin(world: World, run_dir: Path, step: int, give_up_after: int) -> tuple[int, str, float]:
    """Write down, once for all ranks, that the run starts: (its number, why the last one ended, when the first began).

    Raises DeepwellError on every rank after too many starts without progress; torchrun's agents end too.
    """
    said: dict[str, Any] = {}
    if world.rank == 0:
        try:
            start, cause, first = note_start(run_dir, step, world.size, give_up_after)
            said = {"generation": start.generation, "cause": cause, "first": first}
        except DeepwellError as error:
            said = {"error": str(error)}
    said = world.first(said)
    if "error" in said:
        if world.is_elastic:
            # Stop the agent that started this process: it would only start it again. It passes the signal on, and the
            # reason is still to be written.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.kill(os.getppid(), signal.SIGTERM)
        raise DeepwellError(said["error"])
    return said["generation"], said["cause"], said["first"]


def run_agent(command: Sequence[str], run_dir: Path) -> int:
    """Run torchrun, hand it the signals that arrive here, and return its status: 0 where a SIGTERM led to a save.

    torchrun itself ends with 1 after every signal, also where all its processes saved and ended in order.
    """
    asked: list[int] = []

    def prepare() -> None:
        if os.getppid() != parent:
            os._exit(1)
        end_with_parent(signal.SIGTERM)

    parent, began = os.getpid(), time.time()
    agent = subprocess.Popen(list(command), env={**os.environ, **AGENT_ENVIRONMENT}, preexec_fn=prepare)  # noqa: PLW1509 - one thread

    def forward(number: int, _frame: Any) -> None:
        asked.append(number)
        agent.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        status = agent.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status and signal.SIGTERM in asked:
        ends = [
            e for e in last_events(run_dir / "events.jsonl", lambda e: e.get("kind") == "run") if e["kind"] == "end"
        ]
        if ends and ends[-1]["t"] >= began and ends[-1].get("exit") == 0:
            return 0
    return status if status >= 0 else 128 - status
