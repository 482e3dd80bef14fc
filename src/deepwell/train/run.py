"""One call of `fit` as the log sees it: events, lines for people, saves, and how it ended."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from deepwell import __version__
from deepwell.artifacts.checkpoint.state import SaveEvent
from deepwell.engine.dryrun.plan import optimizer_of, predict
from deepwell.errors import CheckpointError, DeepwellError
from deepwell.precision.guard import GuardEvent, GuardStop
from deepwell.train.elastic import HUNG, Watchdog, begin
from deepwell.train.figures import Figures
from deepwell.train.log import SCHEMA, Console, EventLog, Scalars, step_line
from deepwell.train.readback import Finished
from deepwell.train.settings import Every
from deepwell.train.starts import Fence, Journal, last_events, note_end

if TYPE_CHECKING:
    from deepwell.train.trainer import Trainer

CHECKPOINTS = "checkpoints"


class Callback:
    """What users may do between steps; override what is wanted. Called on every rank."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step."""

    def on_step(self, trainer: Trainer, event: Mapping[str, Any]) -> None:
        """A step is over; `event` is what the log says of it, one step late on a GPU."""

    def on_evaluate(self, trainer: Trainer, event: Mapping[str, Any]) -> None:
        """The held-out loss was computed."""

    def on_save(self, trainer: Trainer, event: Mapping[str, Any]) -> None:
        """A checkpoint was begun or has been committed."""

    def on_repair(self, trainer: Trainer, events: Sequence[GuardEvent]) -> None:
        """The guard begins a repair (`repair_steps`): the learning rate is lower for a while."""

    def on_end(self, trainer: Trainer, reason: str) -> None:
        """No step follows."""


class FitRun:
    """Writes down what a trainer does. Of several ranks the first writes; all of them count."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.reason = ""
        settings = trainer.settings
        self._save_every = Every.read("save_every", settings.save_every)
        self._evaluate_every = Every.read("eval_every", settings.eval_every)
        self._last_save = self._last_evaluation = time.monotonic()
        self._saved_step = trainer.step if trainer.resumed_from is not None else -1
        self._is_due = False  # a checkpoint
        self._unsaved: SaveEvent | None = None  # the last save, where it failed
        self._figures: Figures | None = None
        self._is_first = True
        self._bound: Any = None  # what `_formats` are of
        self._formats: dict[str, str] = {}
        self.generation: int | None = None  # which start of the run this is; None without a folder
        self._fence: Fence | None = None
        self._restart: dict[str, Any] | None = None  # written when the first step is over
        self.watchdog: Watchdog | None = None

    def __enter__(self) -> FitRun:
        trainer = self.trainer
        folder = trainer.run_dir if trainer.runner.is_main else None
        self.log = EventLog(folder)
        self.console = Console(trainer.settings.steps, trainer.step, quiet=trainer.quiet)
        self.scalars = Scalars(folder, trainer.settings.tensorboard and trainer.runner.is_main)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        trainer = self.trainer
        if kind is not None and not self.reason:
            assert error is not None
            self._failed(error)
        if trainer.saver is not None and kind is not None and trainer.world.size > 1:
            trainer.saver.hurry()  # a rank that is gone will not write its part
        self._poll(wait=True)
        for record in (self.console, self.scalars, self.log):
            record.close()

    # ---- the beginning ----

    def begin(self) -> None:
        """The run's first lines: what runs where, and whether it goes on from somewhere."""
        trainer = self.trainer
        cause = ""
        if trainer.run_dir is not None:
            limit = trainer.settings.give_up_after
            self.generation, cause, trainer.started = begin(trainer.world, trainer.run_dir, trainer.step, limit)
            if trainer.runner.is_main:
                self._fence = Fence(trainer.run_dir, self.generation)
        generation = self.generation or 0
        if generation and (trainer.resumed_from is not None or not trainer.step):
            self._restarted(generation, cause)
        plan, runtime = trainer.plan, trainer.engine.deepwell
        planned = plan and {
            "gpus": plan.gpus, "step_s": plan.step_s, "tier": plan.estimate.tier, "peak_gib": plan.peak_gib,
        }  # fmt: skip
        formats = [row.format for row in runtime.bound.bindings]  # `precision` is what most GEMMs of linears have
        self.log.write(
            "run", schema=SCHEMA, version=__version__, generation=generation, world=trainer.world.size,
            device=runtime.device_name, model=runtime.ir.name, layout=str(trainer.layout), plan=planned,
            precision=max(set(formats), key=formats.count) if formats else runtime.ir.dtype,
            seq_len=trainer.settings.seq_len, global_batch=trainer.sizes.global_batch, steps=trainer.settings.steps,
            start_step=trainer.step, settings=trainer.settings.to_dict(), host=platform.node(),
        )  # fmt: skip
        for text in filter(None, [trainer.plan_note, *trainer.notes, trainer.loader.note]):
            self.note(text)
        self._tell("on_start")
        trainer.engine.train()
        trainer.readback.start()

    def _restarted(self, generation: int, cause: str) -> None:
        """A restart: how many steps were lost, and since when nothing was trained. Read before this start is logged."""
        trainer = self.trainer
        if not trainer.runner.is_main or self.log.path is None:
            return
        before = last_events(self.log.path, lambda event: event.get("kind") == "step")
        steps = [event for event in before if event.get("kind") == "step"]
        is_counted = any(event.get("kind") == "run" for event in before)  # a start that finished no step lost none
        lost = max(0, steps[-1]["step"] - trainer.step) if steps and not is_counted else 0
        self._restart = {
            "generation": generation, "step": trainer.step, "reason": cause, "lost_steps": lost,
            "since": steps[-1]["t"] if steps else trainer.started, "world": trainer.world.size,
        }  # fmt: skip
        where = "from the beginning" if trainer.resumed_from is None else f"from {trainer.resumed_from}"
        self.console.say(f"start {generation}: {where} at step {trainer.step}, {lost} steps lost; before: {cause}")

    def formats(self) -> None:
        """Where it changed, what each linear's GEMMs run in from now on."""
        bound = self.trainer.engine.deepwell.bound
        if bound is self._bound:
            return
        self._bound, before, self._formats = bound, self._formats, self.trainer.watch.formats()
        if self._formats != before:
            self.log.write("formats", step=self.trainer.step, formats=self._formats)

    def _tell(self, what: str, *facts: Any) -> None:
        for callback in self.trainer.callbacks:
            getattr(callback, what)(self.trainer, *facts)

    def _note_end(self, what: str, error: str = "") -> None:
        trainer = self.trainer
        if trainer.run_dir is not None and self.generation is not None:
            note_end(trainer.run_dir, self.generation, trainer.world.rank, what, error)

    def note(self, text: str) -> None:
        self.log.write("note", text=text)
        self.console.say(f"note: {text}")

    # ---- steps ----

    def finished(self, done: Finished) -> None:
        """A step is over: write it down, and tell who asked."""
        trainer = self.trainer
        loss, norm = done.values
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        trainer.last_loss = loss
        trainer.skipped += skipped
        figures = self._figures or self._make_figures(done.facts["tokens"])
        if not self._is_first and not skipped:
            trainer.useful_s += done.seconds
        self._is_first = False
        stop: GuardStop | None = None
        try:
            events = trainer.watch.end_step(done.step, loss, norm)
        except GuardStop as error:
            stop, events = error, list(error.events)
        if self._fence is not None:
            self._fence.check()
        if self._restart is not None:  # the first step after it is over: that is how long it took
            fields, self._restart = self._restart, None
            self.log.write("restart", recovery_s=round(time.time() - fields.pop("since"), 3), **fields)
        event = self.log.write(
            "step", step=done.step, loss=loss, grad_norm=norm, lr=done.facts["lr"],
            **figures.of_step(done.seconds, done.facts["tokens"]), skipped=skipped, guard=len(events),
            goodput=round(min(1.0, trainer.useful_s / max(1e-9, time.time() - trainer.started)), 5),
        )  # fmt: skip
        if done.step % trainer.settings.log_every == 0 or skipped or events:
            self.console.say(step_line(event, trainer.settings.steps))
        self._experts(done)
        for found in events:
            self.log.write("guard", **found.to_dict())
            self.console.say(f"guard: {found}")
        self.formats()
        self.console.at(done.step)
        self.scalars.step(event)
        self._poll()
        if stop is not None:
            raise stop
        self._tell("on_step", event)

    def _experts(self, done: Finished) -> None:
        """The load of experts: what the routers of DeepwellMoE counted, of others what a sample saw."""
        trainer = self.trainer
        is_due = done.step % trainer.settings.log_every == 0
        loads = done.facts["loads"].read() if is_due and "loads" in done.facts else {}
        of = {f"{path.rpartition('.')[0]}.experts".removeprefix("."): load for path, load in loads.items()}
        layers = {**trainer.watch.expert_loads, **{path: list(load.tokens_per_expert) for path, load in of.items()}}
        counted: dict[str, Any] = {}
        if of:
            counted["dropped"] = {path: load.dropped for path, load in of.items()}
            for name in ("entropy", "balance_loss", "z_loss"):
                counted[name] = {path: round(getattr(load, name), 5) for path, load in of.items()}
        if layers:
            self.log.write("experts", step=done.step, layers=layers, **counted)

    def _make_figures(self, tokens: int) -> Figures:
        """What is predicted of a step, once its size is known."""
        trainer, sizes, plan = self.trainer, self.trainer.sizes, self.trainer.plan
        step_s = 0.0 if plan is None else plan.step_s
        if plan is None and trainer.world.size == 1:
            seq_len, optimizer = max(1, tokens // sizes.global_batch), optimizer_of(trainer.engine)
            with suppress(DeepwellError):  # a machine that cannot be described
                found = predict(trainer.engine, sizes.micro_batch, seq_len, sizes.accumulation, optimizer)
                plan, step_s = found.plan, found.step_s
        self._figures = Figures(plan, step_s, trainer.world.size, trainer.device)
        return self._figures

    def evaluation_is_due(self, step: int) -> bool:
        """Whether this rank wants an evaluation after `step`; of clocks the first rank's counts."""
        trainer = self.trainer
        if trainer.eval_loader is None or (self._evaluate_every.seconds and not trainer.runner.is_main):
            return False
        return self._evaluate_every.is_due(step, time.monotonic() - self._last_evaluation)

    def evaluated(self, fields: Mapping[str, Any]) -> None:
        self._last_evaluation = time.monotonic()
        event = self.log.write("eval", **fields)
        self.console.say(f"eval at step {fields['step']}: loss {fields['loss']:.4f}, {fields['seconds']:.2f} s")
        self.scalars.evaluation(fields["step"], fields["loss"])
        self._tell("on_evaluate", event)

    # ---- saves ----

    def save_is_due(self, step: int) -> bool:
        """Whether this rank wants a checkpoint after `step`; of clocks the first rank's counts.

        One that was due while another was written stays due.
        """
        trainer = self.trainer
        if trainer.saver is None or (self._save_every.seconds and not trainer.runner.is_main):
            return False
        self._is_due = self._is_due or self._save_every.is_due(step, time.monotonic() - self._last_save)
        return self._is_due

    def save(self, why: str) -> None:
        """Begin a checkpoint of the steps that are finished; a state that is not sound is not written."""
        trainer = self.trainer
        self._last_save, self._is_due = time.monotonic(), False
        if trainer.saver is None or self._saved_step == trainer.step:
            return
        if not math.isfinite(trainer.last_loss) or not trainer.watch.healthy:
            self.note(f"step {trainer.step} is not saved: loss {trainer.last_loss}; the last good checkpoint stays")
            return
        trainer.saver.save(trainer.train_state())
        self._saved_step = trainer.step
        trainer.readback.start()

    def _poll(self, *, wait: bool = False) -> None:
        """Write down the checkpoints that were committed, or failed, since."""
        saver = self.trainer.saver
        if saver is None:
            return
        if wait:
            saver.wait()
        for found in saver.poll():
            event = self.log.write(
                "save", step=found.step, path=str(found.path), stall_s=round(found.stall_s, 6),
                seconds=round(found.seconds, 4), bytes=found.bytes, committed=found.committed, error=found.error,
            )  # fmt: skip
            self._unsaved = None if found.committed else found
            if not found.committed:
                self.note(f"the checkpoint of step {found.step} failed: {found.error}; the previous one is still valid")
            self._tell("on_save", event)

    # ---- the end ----

    def hung(self, silent: float) -> None:
        """No step was finished for too long; called by the watchdog before it ends this process."""
        trainer, error = self.trainer, f"no step finished for {silent:.0f} s"
        self.log.write("end", step=trainer.step, reason="error", exit=HUNG, error=error)
        self._note_end("hung", error)
        if (folder := trainer.run_dir) is not None and (generation := self.generation) is not None:
            trainer.world.end_silent(lambda: {end.rank for end in Journal.read(folder).ends_of(generation)})

    def _failed(self, error: BaseException) -> None:
        """The run ends with an error: say so where the next start, and torchrun, look for it."""
        trainer, text = self.trainer, f"{type(error).__name__}: {error}"
        self._note_end("error", text)
        what = "gave up" if isinstance(error, DeepwellError) else "error"
        self.log.write("end", step=trainer.step, reason=what, exit=1, error=text)
        if trainer.world.is_elastic and isinstance(error, Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)

    def finish(self, reason: str) -> None:
        """All steps are read back, the last one is saved, and the end is written down.

        Raises CheckpointError where the last save failed: what follows a run must not take it for finished.
        """
        trainer = self.trainer
        trainer._finished(self)
        if trainer.settings.save_at_end and trainer.step:
            self.save("end")
        self._poll(wait=True)
        if (lost := self._unsaved) is not None:
            self.reason = ""  # an error, whatever was to be the end
            raise CheckpointError(
                f"the run ended at step {trainer.step}, but the checkpoint of step {lost.step} failed: {lost.error}. "
                "Make room and start it again: it goes on from the last checkpoint that is whole"
            )
        self.reason = reason
        if trainer.runner.is_main and self._figures is not None:
            if problem := self._figures.keep_measured():
                self.note(f"the step's time was not kept for the planner: {problem}")
        self._tell("on_end", reason)
        self.log.write("end", step=trainer.step, reason=reason, exit=0)
        self._note_end(reason)
