"""One call of `fit` as the log sees it: events, lines for people, saves, and how it ended."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deepwell import __version__
from deepwell.engine.dryrun.plan import optimizer_of
from deepwell.engine.engine import Engine
from deepwell.errors import DeepwellError
from deepwell.precision.guard import GuardEvent, GuardStop
from deepwell.train.elastic import HUNG, Watchdog, begin
from deepwell.train.figures import Figures, StepPrediction, predicted
from deepwell.train.log import SCHEMA, Console, EventLog, Scalars, step_line
from deepwell.train.readback import Finished
from deepwell.train.settings import Every
from deepwell.train.starts import Fence, Journal, Start, last_events, note_end

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
        self._figures: Figures | None = None
        self._is_first = True
        self._bound: Any = None  # what `_formats` are of
        self._formats: dict[str, str] = {}
        self.start: Start | None = None
        self._fence: Fence | None = None
        self._restart: dict[str, Any] | None = None  # written when the first step is over
        self.watchdog: Watchdog | None = None

    @property
    def is_over(self) -> bool:
        return bool(self.reason)

    def __enter__(self) -> FitRun:
        trainer = self.trainer
        folder = trainer.run_dir if trainer.runner.is_main else None
        self.log = EventLog(folder)
        self.console = Console(trainer.settings.steps, trainer.step, quiet=trainer.quiet)
        self.scalars = Scalars(folder, trainer.settings.tensorboard and trainer.runner.is_main)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        trainer = self.trainer
        if kind is not None and not self.reason:
            assert error is not None
            self._failed(error)
        if trainer.saver is not None:
            if kind is not None and trainer.world.size > 1:
                trainer.saver.hurry()  # a rank that is gone will not write its part
            trainer.saver.wait()
            self._poll()
        self.console.close()
        self.scalars.close()
        self.log.close()

    # ---- the beginning ----

    def begin(self) -> None:
        """The run's first lines: what runs where, and whether it goes on from somewhere."""
        trainer = self.trainer
        cause = ""
        if trainer.run_dir is not None:
            limit = trainer.settings.give_up_after
            self.start, cause, first = begin(trainer.control, trainer.world, trainer.run_dir, trainer.step, limit)
            trainer.goodput.started = first
            if trainer.runner.is_main:
                self._fence = Fence(trainer.run_dir, self.start.generation)
        generation = 0 if self.start is None else self.start.generation
        if generation and (trainer.resumed_from is not None or not trainer.step):
            self._restarted(generation, cause)
        plan, runtime = trainer.plan, trainer.engine.deepwell
        planned = None
        if plan is not None:
            planned = {
                "gpus": plan.gpus, "step_s": plan.step_s, "tier": plan.estimate.tier, "peak_gib": plan.peak_gib,
            }  # fmt: skip
        self.log.write(
            "run", schema=SCHEMA, version=__version__, generation=generation, world=trainer.world.size,
            device=runtime.device_name, model=runtime.ir.name, layout=str(trainer.layout), plan=planned,
            precision=precision_of(trainer.engine), seq_len=trainer.settings.seq_len,
            global_batch=trainer.sizes.global_batch, steps=trainer.settings.steps, start_step=trainer.step,
            settings=trainer.settings.to_dict(), host=platform.node(),
        )  # fmt: skip
        notes = [trainer.plan_note, *trainer.notes]
        notes.append(trainer.loader.note)
        for text in filter(None, notes):
            self.note(text)
        for callback in trainer.callbacks:
            callback.on_start(trainer)
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
            "since": steps[-1]["t"] if steps else trainer.goodput.started, "world": trainer.world.size,
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
            trainer.goodput.add(done.seconds)
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
            goodput=round(trainer.goodput.share, 5),
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
        for callback in trainer.callbacks:
            callback.on_step(trainer, event)

    def _experts(self, done: Finished) -> None:
        """The load of experts: what the routers of DeepwellMoE counted, of others what a sample saw."""
        trainer = self.trainer
        is_due = done.step % trainer.settings.log_every == 0
        loads = done.facts["loads"].read() if is_due and "loads" in done.facts else {}
        of = {f"{path.rpartition('.')[0]}.experts".removeprefix("."): load for path, load in loads.items()}
        layers = {**trainer.watch.expert_loads, **{path: list(load.tokens_per_expert) for path, load in of.items()}}
        if not layers:
            return
        counted = {
            "dropped": {path: load.dropped for path, load in of.items()},
            "entropy": {path: round(load.entropy, 5) for path, load in of.items()},
            "balance_loss": {path: round(load.balance_loss, 5) for path, load in of.items()},
            "z_loss": {path: round(load.z_loss, 5) for path, load in of.items()},
        }
        self.log.write("experts", step=done.step, layers=layers, **(counted if of else {}))

    def _make_figures(self, tokens: int) -> Figures:
        """What is predicted of a step, once its size is known."""
        trainer = self.trainer
        prediction = None
        if trainer.plan is not None:
            prediction = StepPrediction(trainer.plan, trainer.plan.step_s)
        elif trainer.world.size == 1:
            sizes = trainer.sizes
            seq_len = max(1, tokens // sizes.global_batch)
            optimizer = optimizer_of(trainer.engine)
            prediction = predicted(trainer.engine, sizes.micro_batch, seq_len, sizes.accumulation, optimizer)
        self._figures = Figures(prediction, trainer.world.size, trainer.device)
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
        for callback in self.trainer.callbacks:
            callback.on_evaluate(self.trainer, event)

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

    def _poll(self) -> None:
        """Write down the checkpoints that were committed, or failed, since."""
        trainer = self.trainer
        if trainer.saver is None:
            return
        for found in trainer.saver.poll():
            event = self.log.write(
                "save", step=found.step, path=str(found.path), stall_s=round(found.stall_s, 6),
                seconds=round(found.seconds, 4), bytes=found.bytes, committed=found.committed, error=found.error,
            )  # fmt: skip
            if not found.committed:
                self.note(f"the checkpoint of step {found.step} failed: {found.error}; the one before it stands")
            for callback in trainer.callbacks:
                callback.on_save(trainer, event)

    # ---- the end ----

    def hung(self, silent: float) -> None:
        """No step was finished for too long; called by the watchdog before it ends this process."""
        trainer, error = self.trainer, f"no step finished for {silent:.0f} s"
        self.log.write("end", step=trainer.step, reason="error", exit=HUNG, error=error)
        if trainer.run_dir is None or self.start is None:
            return
        folder, generation = trainer.run_dir, self.start.generation
        note_end(folder, generation, trainer.world.rank, "hung", error)
        trainer.control.end_silent(lambda: {end.rank for end in Journal.read(folder).ends_of(generation)})

    def _failed(self, error: BaseException) -> None:
        """The run ends with an error: say so where the next start, and torchrun, look for it."""
        trainer, text = self.trainer, f"{type(error).__name__}: {error}"
        if trainer.run_dir is not None and self.start is not None:
            note_end(trainer.run_dir, self.start.generation, trainer.world.rank, "error", text)
        what = "gave up" if isinstance(error, DeepwellError) else "error"
        self.log.write("end", step=trainer.step, reason=what, exit=1, error=text)
        if trainer.world.is_elastic and isinstance(error, Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)

    def finish(self, reason: str) -> None:
        """All steps are read back, the last one is saved, and the end is written down."""
        trainer = self.trainer
        trainer._finished(self)
        self.reason = reason
        if trainer.settings.save_at_end and trainer.step:
            self.save("end")
        if trainer.saver is not None:
            trainer.saver.wait()
            self._poll()
        if trainer.runner.is_main and self._figures is not None:
            if problem := self._figures.keep_measured():
                self.note(f"the step's time was not kept for the planner: {problem}")
        for callback in trainer.callbacks:
            callback.on_end(trainer, reason)
        self.log.write("end", step=trainer.step, reason=reason, exit=0)
        if trainer.run_dir is not None and self.start is not None:
            note_end(trainer.run_dir, self.start.generation, trainer.world.rank, reason)


def precision_of(engine: Engine) -> str:
    """The format that most GEMMs of the engine's linears have."""
    formats = [row.format for row in engine.deepwell.bound.bindings]
    return max(set(formats), key=formats.count) if formats else engine.deepwell.ir.dtype
