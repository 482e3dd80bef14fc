"""Trains a tiny model twice, once undisturbed and once under fire, and compares."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from deepwell.bench.faults.checks import check_all, children, costs
from deepwell.bench.faults.result import KILLS, FaultSetup, Result, Strike
from deepwell.errors import ConfigError, DeepwellError
from deepwell.hardware.amx import bf16_fault
from deepwell.hardware.host import read_host
from deepwell.hardware.progress import bar

Say = Callable[[str], None]
# A run that makes no step for so long is not recovering any more; and how long a write is waited for.
_STUCK_S, _WRITE_S = 300.0, 3.0
# Shares of the kills, by kind; the rest are of one worker.
_SHARES = {"agent": 0.12, "all": 0.06, "start": 0.12}
_IN_WRITE = 0.5


def run_faults(setup: FaultSetup, folder: Path, say: Say = lambda _line: None) -> Result:
    """Train undisturbed, train under fire, compare. What was in `folder` of an earlier call is removed."""
    if not sys.platform.startswith("linux"):
        raise ConfigError("validate faults needs Linux: it reads /proc to find the processes to kill")
    for name in ("undisturbed", "disturbed"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name / "pids").mkdir(parents=True)
    with AgentHost(folder / "host.log") as host:
        calm = AgentRun(setup, folder / "undisturbed", host)
        began = time.monotonic()
        with bar("undisturbed", setup.steps) as advance:
            calm.finish(advance)
        undisturbed_s = time.monotonic() - began
        say(f"undisturbed: {setup.steps} steps in {undisturbed_s:.0f} s")
        run = AgentRun(setup, folder / "disturbed", host)
        strikes = Siege(setup, run, say).fire()
        with bar("to the end", setup.steps) as advance:
            run.finish(advance)
        checks = check_all(setup, calm.folder, run.folder, strikes, host.pid)
    found = costs(run.folder)
    return Result(setup=setup, strikes=tuple(strikes), checks=checks, undisturbed_s=undisturbed_s, **found)


class AgentHost:
    """The process that agents are forked from, at the other end of two pipes."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._unread = b""
        self.ended: dict[int, int] = {}  # agents that ended, with their status

    def __enter__(self) -> AgentHost:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if "ONEDNN_MAX_CPU_ISA" not in environment and bf16_fault(read_host().instruction_sets):
            environment["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deepwell.bench.faults.host"], env=environment, text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self.pid = self._process.pid
        if self._line(_STUCK_S) != "ready":
            raise DeepwellError(f"the process that starts agents did not start; read {self._log}")
        return self

    def start(self, job: dict[str, Any], processes: int, **nodes: Any) -> int:
        """Start an agent with so many workers, alone or as one of several (`host.run_agent`); its process number."""
        given = {"job": job, "processes": processes, **nodes}
        _pipe(self._process.stdin).write(f"start {json.dumps(given)}\n")
        while True:
            words = self._line(_STUCK_S).split()
            if not words:
                raise DeepwellError(f"the process that starts agents ended; read {self._log}")
            if words[0] == "started":
                return int(words[1])
            self._note(words)

    def poll(self) -> None:
        while line := self._line(0.0):
            self._note(line.split())

    def _note(self, words: list[str]) -> None:
        self.ended[int(words[1])] = int(words[2])

    def _line(self, seconds: float) -> str:
        # Not with readline(): of two lines at once it keeps the second to itself, and select() waits for a third.
        out, deadline = _pipe(self._process.stdout).fileno(), time.monotonic() + seconds
        while b"\n" not in self._unread:
            ready, _, _ = select.select([out], [], [], max(0.0, deadline - time.monotonic()))
            if not ready or not (data := os.read(out, 4096)):
                return ""
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def __exit__(self, *_: object) -> None:
        try:
            _pipe(self._process.stdin).write("quit\n")
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()
        _pipe(self._process.stdin).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


class AgentRun:
    """One run, seen from outside: its agent, which is started again when it ends too early, and its events."""

    def __init__(self, setup: FaultSetup, folder: Path, host: AgentHost) -> None:
        self.folder, self.host = folder, host
        self._job: dict[str, Any] = {
            "folder": str(folder), "steps": setup.steps, "world": setup.world, "seed": setup.seed,
            "save_every": setup.save_every, "hang_after_s": setup.hang_after_s,
        }  # fmt: skip
        self.step, self.step_t = 0, 0.0  # the last step that was logged, and when
        self.is_done = False
        self._read = 0
        self._moved = time.monotonic()
        self.agent = host.start(self._job, self._job["world"])
        self.agents = 1

    def look(self) -> None:
        """Read new events; start the agent again where it ended. Raises DeepwellError where nothing moves any more."""
        self.host.poll()
        path = self.folder / "events.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.splitlines():
                self._take(line)
        if self.agent in self.host.ended and not self.is_done:
            self.agent = self.host.start(self._job, self._job["world"])
            self.agents += 1
        if time.monotonic() - self._moved > _STUCK_S:
            raise DeepwellError(f"no step for {_STUCK_S:.0f} s: read {self.folder}/agent.log and logs")

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return
        if event["kind"] == "step":
            self.step, self.step_t = event["step"], event["t"]
            self._moved = time.monotonic()
        elif event["kind"] == "end" and event["reason"] == "done":
            self.is_done = True

    def workers(self) -> list[int]:
        """The workers of the agent that runs now, those that have said who they are."""
        return [pid for pid in children(self.agent) if (self.folder / "pids" / str(pid)).exists()]

    def is_writing(self, since: float) -> str:
        """The name of a checkpoint that is just being written, else ""; what was left before `since` is none."""
        folder = self.folder / "checkpoints"
        names = os.listdir(folder) if folder.exists() else []  # noqa: PTH208 - a thousand times a second
        for name in names:
            try:
                if name.endswith(".tmp") and (folder / name).stat().st_mtime > since:
                    return name
            except FileNotFoundError:
                continue  # it has its proper name now
        return ""

    def finish(self, advance: Callable[[float], None]) -> None:
        shown = 0
        while not self.is_done or self.agent not in self.host.ended:
            self.look()
            advance(max(0, self.step - shown))
            shown = max(shown, self.step)
            time.sleep(0.02)


class Siege:
    """Strikes a run at random moments that a seed decides, as far as a busy machine lets it."""

    def __init__(self, setup: FaultSetup, run: AgentRun, say: Say) -> None:
        self._setup, self._run, self._say = setup, run, say
        self._random = random.Random(setup.seed)
        self._last = 0.0

    def plan(self) -> list[str]:
        setup = self._setup
        kinds = ["term"] * setup.terms + ["stop"] * setup.hangs
        for kind, share in _SHARES.items():
            kinds += [kind] * round(setup.kills * share)
        kinds += ["worker"] * (setup.kills - sum(kind in KILLS for kind in kinds))
        self._random.shuffle(kinds)
        return kinds

    def fire(self) -> list[Strike]:
        """Strike again and again, each time in another part of the run; what was done."""
        strikes: list[Strike] = []
        deadline = time.monotonic() + 60.0 * self._setup.minutes
        kinds = self.plan()
        with bar("under fire", len(kinds)) as advance:
            for number, kind in enumerate(kinds):
                if time.monotonic() > deadline or self._run.is_done:
                    break
                part = self._setup.steps_per_kill
                strikes.append(self._strike(kind, part * number + self._random.randrange(1, part)))
                advance(1)
                if (number + 1) % 10 == 0:
                    self._say(f"{number + 1} of {len(kinds)} strikes; step {self._run.step}")
        return strikes

    def _strike(self, kind: str, step: int) -> Strike:
        run, draw = self._run, self._random
        wants_write = kind in ("worker", "agent", "all") and draw.random() < _IN_WRITE
        delay, choice = draw.random(), draw.random()
        if kind == "start":  # right after the strike before it, while processes come up
            self._await(lambda: bool(run.workers()) and run.step_t <= self._last, 10.0)
            time.sleep(1.5 * delay)
        else:
            self._await(lambda: run.step >= step and run.step_t > self._last and bool(run.workers()), _STUCK_S)
            time.sleep(0.1 * delay)
        if wants_write:
            self._await(lambda: bool(run.is_writing(self._last)), _WRITE_S, pause=0.0005)
        return self._do(kind, choice)

    def _do(self, kind: str, choice: float) -> Strike:
        run = self._run
        self._await(lambda: bool(run.workers()), _STUCK_S)
        workers, writing = run.workers(), run.is_writing(self._last)
        chosen = workers[int(choice * len(workers))] if workers else run.agent
        number = {"term": signal.SIGTERM, "stop": signal.SIGSTOP}.get(kind, signal.SIGKILL)
        targets = {"agent": [run.agent], "term": [run.agent], "all": workers}.get(kind, [chosen])
        for pid in targets:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # it ended by itself, a moment ago
        # The name is still there after the strike: it fell into the write.
        in_write = bool(writing) and (run.folder / "checkpoints" / writing).exists()
        self._last = time.time()
        return Strike(kind, self._last, run.step, in_write)

    def _await(self, found: Callable[[], bool], seconds: float, pause: float = 0.005) -> bool:
        deadline, looked = time.monotonic() + seconds, 0.0
        while not found():
            if time.monotonic() > deadline or self._run.is_done:
                return False
            if time.monotonic() - looked > 0.02:
                self._run.look()
                looked = time.monotonic()
            time.sleep(pause)
        return True
