"""Saves a run again and again: in the background, one at a time, keeping what should be kept."""

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepwell.artifacts.checkpoint.keep import check_keep, prune, tidy
from deepwell.artifacts.checkpoint.manifest import folder_name
from deepwell.artifacts.checkpoint.pieces import units_of
from deepwell.artifacts.checkpoint.staging import Staging
from deepwell.artifacts.checkpoint.state import SaveEvent, TrainState
from deepwell.artifacts.checkpoint.team import Team, agree
from deepwell.artifacts.checkpoint.writer import WriteJob, failed_job, prepare, run_job
from deepwell.errors import CheckpointError, DeepwellError, NumericsError

TIMEOUT_S = 600.0


def save_checkpoint(
    folder: Path | str,
    state: TrainState,
    *,
    healthy: bool = True,
    process_group: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> Path:
    """Write folder/step-NNNNNNNN completely or not at all, and return it. All ranks of the group call it.

    Raises NumericsError for a state that is not healthy or whose last loss is not finite, CheckpointError where the
    checkpoint could not be written (the message says why; what was there before is untouched).
    """
    reason = _refused(state.meta, healthy)
    if reason:
        raise NumericsError(f"not saved: {reason}")
    folder_name(state.meta.get("step"))
    team = agree(units_of(state), process_group)
    staging = Staging()
    job = prepare(Path(folder), state, team, f"{team.token}-0", staging)
    run_job(job, staging, timeout_s)
    return job.path


def _refused(meta: dict[str, Any], healthy: bool) -> str:
    """Why a state must not be saved; "" where it may."""
    if not healthy:
        return "the run is not healthy (non-finite numbers); the last good checkpoint stays"
    loss = meta.get("loss")
    if isinstance(loss, int | float) and not math.isfinite(loss):
        return f"the last loss is {loss}; the last good checkpoint stays"
    return ""


class Saver:
    """Saves states into one folder; with `asynchronous`, training goes on while the files are written.

        saver = Saver("runs/a/checkpoints", keep_last=3, keep_every=1000)
        ...
        loss.backward()
        saver.before_update()      # the update waits for copies that are still under way
        optimizer.step()
        saver.save(state)          # copies the state and returns
        for event in saver.poll(): ...

    `keep_last` checkpoints stay, and those whose step is a multiple of `keep_every`. A save that fails is an event with
    its error; it never raises, leaves the checkpoints before it as they are and no folder that looks like one. All
    ranks call `save` at the same steps; the first call is a collective of `process_group`, the others are not. Only
    that first call raises, UnsupportedError or ConfigError, for a state that no checkpoint can hold.
    """

    def __init__(
        self,
        folder: Path | str,
        keep_last: int = 3,
        keep_every: int | None = None,
        asynchronous: bool = True,
        *,
        process_group: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        check_keep(keep_last, keep_every)
        self.folder = Path(folder)
        self._keep = (keep_last, keep_every)
        self._asynchronous = asynchronous
        self._group, self._timeout_s = process_group, timeout_s
        self._team: Team | None = None
        self._staging = Staging()
        self._last: tuple[int, int] = (-1, 0)  # the step of the last save, and how often it was saved in a row
        self._is_tidy = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deepwell-save")
        # What the save under way will be, when it began, and (bytes, when it ended, what did not work).
        self._running: tuple[SaveEvent, float, Future[tuple[int, float, str]]] | None = None
        self._finished: list[SaveEvent] = []

    def save(self, state: TrainState, healthy: bool = True) -> SaveEvent:
        """Save a state; waits for the save before it. The event says how long training stood still.

        A state that is not `healthy`, or whose meta["loss"] is not finite, is not written.
        """
        began = time.perf_counter()
        self.wait()
        folder_name(state.meta.get("step"))  # raises for anything but a step
        if self._team is None:
            self._team = agree(units_of(state), self._group)
        job = self._prepare(state, self._team, _refused(state.meta, healthy))
        future = self._pool.submit(self._run, job)
        event = SaveEvent(step=job.step, path=str(job.path), stall_s=time.perf_counter() - began)
        self._running = (event, began, future)
        if not self._asynchronous:
            self.wait()
            event = replace(self._finished[-1], stall_s=time.perf_counter() - began)
            self._finished[-1] = event
        return event

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way: the next one would wait for it."""
        return self._running is not None and not self._running[2].done()

    def before_update(self) -> None:
        """Call right before optimizer.step(): the update then waits for the copy of the state, on the device."""
        self._staging.before_update()

    def poll(self) -> list[SaveEvent]:
        """The saves that ended since the last call, each once; does not wait."""
        if not self.is_busy:
            self.wait()
        finished, self._finished = self._finished, []
        return finished

    def wait(self) -> None:
        """Wait until no save is under way."""
        if self._running is None:
            return
        event, began, future = self._running
        error = future.exception()
        self._running = None  # only now: who is interrupted above has not waited
        if error is not None:
            event = replace(event, seconds=time.perf_counter() - began, error=str(error) or type(error).__name__)
        else:
            size, ended, note = future.result()
            event = replace(event, seconds=ended - began, bytes=size, committed=True, error=note)
        self._finished.append(event)

    def hurry(self) -> None:
        """Other ranks may be gone: a save that is under way waits for them a second, not minutes."""
        if self._team is not None:
            self._team.in_a_hurry.set()

    def close(self) -> None:
        """Wait for the last save and free the buffers. Events can still be polled."""
        self.wait()
        self._pool.shutdown()
        self._staging.free()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, state: TrainState, team: Team, reason: str) -> WriteJob:
        # By step, not by number: a rank that missed a save is with the others again at the next.
        step = int(state.meta["step"])
        self._last = (step, self._last[1] + 1 if self._last[0] == step else 0)
        save_id = f"{team.token}-{step}-{self._last[1]}"
        if not reason:
            try:
                return prepare(self.folder, state, team, save_id, self._staging)
            except (DeepwellError, RuntimeError) as error:
                reason = str(error)
        return failed_job(self.folder, step, team, save_id, reason)

    def _run(self, job: WriteJob) -> tuple[int, float, str]:
        """In the background: write, commit, delete what need not stay; bytes, when it ended, what did not work."""
        if job.report["error"] and job.team.world == 1:
            raise CheckpointError(job.report["error"])
        if job.team.is_main and not self._is_tidy:
            tidy(self.folder, job.team.token)
            self._is_tidy = True
        size = run_job(job, self._staging, self._timeout_s)
        note = ""
        if job.team.is_main:
            try:
                prune(self.folder, job.path, job.save_id, *self._keep)
            except OSError as error:
                note = f"old checkpoints cannot be removed: {error}"
        return size, time.perf_counter(), note
