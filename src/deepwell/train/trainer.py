"""The Trainer: runs an engine's plan, step after step, and survives what happens meanwhile.

    trainer = dw.Trainer.from_engine(engine, optimizer="adamw_dw", dataloader=loader, elastic=True)
    trainer.fit(steps=1000)

The same script runs on one CPU, one GPU or, started by torchrun, on many. What happens is written to `events.jsonl` in
the run's folder; checkpoints lie beside it, and a run that is started again goes on from the last of them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepwell import __version__
from deepwell.artifacts.checkpoint import (
    Saver,
    TrainState,
    latest,
    list_checkpoints,
    load,
    load_checkpoint,
    save,
)
from deepwell.engine.dryrun.plan import engine_device
from deepwell.engine.engine import Engine
from deepwell.errors import CheckpointError, ConfigError
from deepwell.planner.layout import Layout
from deepwell.planner.plan import Plan
from deepwell.precision.guard import GuardEvent, GuardSettings
from deepwell.train.adamw.optimizer import AdamWDW
from deepwell.train.data.loader import Loader, check_same_data
from deepwell.train.data.make import make_held_out_loader, make_loader
from deepwell.train.elastic import StopSignal, Watchdog, join
from deepwell.train.feed import Feed, LossFunction, check_tokens, count_items, count_tokens, vocabulary_of
from deepwell.train.optimizers import LearningRate, MakeOptimizer, check_same_optimizer, keep_options, make_optimizer
from deepwell.train.parallel import parallelize
from deepwell.train.random_state import random_state, seed_all, set_random_state
from deepwell.train.readback import Readback
from deepwell.train.run import CHECKPOINTS, Callback, FitRun
from deepwell.train.settings import Every, TrainSettings
from deepwell.train.sizes import batch_sizes, layout_for
from deepwell.train.watch import Watch, guarded_step


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """How a call of `fit` ended: "done" or "paused", the last step and its loss."""

    reason: str
    step: int
    loss: float
    seconds: float
    run_dir: Path | None


class Trainer:
    """Trains an engine. Make one with `from_engine`, then call `fit`."""

    def __init__(
        self,
        engine: Engine,
        optimizer: str | torch.optim.Optimizer | MakeOptimizer,
        dataloader: Any,
        *,
        settings: TrainSettings,
        elastic: bool,
        run_dir: Path | None,
        resume: str | bool | Path,
        eval_data: Any = None,
        optimizer_options: Mapping[str, Any] | None = None,
        callbacks: tuple[Callback, ...] = (),
        loss: LossFunction | None = None,
        layout: Layout | Mapping[str, Any] | None = None,
        guard: Any = None,
        quiet: bool = False,
    ) -> None:
        self.engine, self.settings, self.elastic = engine, settings, elastic
        self.device = engine_device(engine)
        patience = timedelta(seconds=max(600.0, Every.read("hang_after", settings.hang_after).seconds))
        self.world = join(self.device.type, patience)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        seed_all(settings.seed, self.world.rank)
        self.layout, self.plan, self.plan_note = layout_for(engine, self.world.size, elastic, layout)
        is_named = isinstance(layout, Mapping) and "micro_batch" in layout  # a Layout has 1 where nobody named it
        if settings.micro_batch is None and layout is not None and (is_named or self.layout.micro_batch > 1):
            self.settings = settings = settings.changed(micro_batch=self.layout.micro_batch)
        self.notes: list[str] = [self.world.note(elastic)]
        feed = Feed(engine.deepwell.model, loss)
        self._vocabulary = vocabulary_of(engine.deepwell.model)
        fp8 = settings.fp8_all_gather
        self.runner = parallelize(engine, self.layout, feed=feed, device=self.device, fp8_all_gather=fp8)
        self.notes += self.runner.notes
        self.loader = _loader(dataloader, settings, self.plan)
        self.eval_loader = None if eval_data is None else _loader(eval_data, settings, self.plan, held_out=True)
        if self.eval_loader is None and Every.read("eval_every", settings.eval_every) != Every():
            raise ConfigError(
                f"eval_every is {settings.eval_every!r} and there is no held-out data: give eval_dataloader"
            )
        self.sizes = batch_sizes(settings, self.plan, self.runner.dp, self.loader.rows)
        self.optimizer = make_optimizer(
            optimizer, engine, self.runner.named_parameters(), settings,
            is_sharded=self.world.size > 1, options=optimizer_options,
        )  # fmt: skip
        self.rate = LearningRate(self.optimizer, settings)
        self.callbacks = callbacks
        self.step = 0  # finished steps
        self.cursor = 0  # samples that were read
        self.tokens = 0  # tokens that were trained on
        self.last_loss = math.nan
        self.skipped = 0
        self.quiet = quiet or not self.runner.is_main
        self.run_dir = self._folder(run_dir)
        # Goodput: the share of the run's wall-clock time, restarts included, that went into steps that count.
        self.useful_s, self.started = 0.0, time.time()
        reduce = self.runner.all_reduce if self.world.size > 1 else None
        if not isinstance(guard, GuardSettings):
            given = guard if isinstance(guard, Mapping) else {}
            guard = GuardSettings.off() if guard is False else GuardSettings.from_dict(given)
        self.watch = Watch(engine, guard, reduce, rank=self.world.rank, dp=self.runner.dp, repair=self._repair)
        self.readback = Readback(self.device)
        self.saver = None
        if self.run_dir is not None:
            self.saver = Saver(
                self.run_dir / CHECKPOINTS, keep_last=settings.keep_last, keep_every=settings.keep_every,
                asynchronous=settings.async_save,
            )  # fmt: skip
        self.resumed_from = self._resume(resume)

    @classmethod
    def from_engine(
        cls,
        engine: Engine,
        optimizer: str | torch.optim.Optimizer | MakeOptimizer = "adamw_dw",
        dataloader: Any = None,
        *,
        elastic: bool = False,
        run_dir: str | Path | None = None,
        eval_dataloader: Any = None,
        resume: str | bool | Path = "auto",
        settings: TrainSettings | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        callbacks: Iterable[Callback] = (),
        loss: LossFunction | None = None,
        layout: Layout | Mapping[str, Any] | None = None,
        guard: GuardSettings | Mapping[str, Any] | bool | None = None,
        quiet: bool = False,
        **changes: Any,
    ) -> Trainer:
        """A trainer of an engine.

        `optimizer` is "adamw_dw", the name of one of torch's, an optimizer of the model's parameters, or a function of
        parameter groups. `dataloader` is anything `deepwell.train.data.make_loader` takes: a folder of token files, a
        dataset, an iterable of batches, "synthetic". `elastic=True` plans anew where the number of processes is not
        the plan's, and goes on where an earlier start of the same run stopped. `run_dir` gets events and checkpoints;
        without it a folder under `runs/` is made. `resume` is "auto" (the last checkpoint of run_dir, if any), False,
        or the path of a checkpoint. `loss` replaces the model's own: a function of (engine, batch) that returns the
        mean over the predicted tokens. `layout` replaces the plan's: a Layout, or some of its fields. `guard` is a
        GuardSettings, or False. Other keywords are settings of the run, see `TrainSettings`: steps, lr, global_batch,
        save_every ... Raises ConfigError where something is wrong.
        """
        if not isinstance(engine, Engine):
            raise ConfigError(f"engine is a {type(engine).__name__}; pass what dw.compile(...) returned")
        if dataloader is None:
            raise ConfigError("dataloader is None; pass a folder of tokens, a dataset, batches, or 'synthetic'")
        callbacks = tuple(callbacks) if isinstance(callbacks, Iterable) else (callbacks,)
        checked: tuple[tuple[str, Any, Any], ...] = (
            *(("callbacks", callback, Callback) for callback in callbacks),
            ("loss", loss, Callable), ("layout", layout, (Layout, Mapping)), ("settings", settings, TrainSettings),
            ("run_dir", run_dir, (str, Path)), ("optimizer_options", optimizer_options, Mapping),
            ("guard", guard, (GuardSettings, Mapping, bool)),
        )  # fmt: skip
        for name, value, kind in checked:
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name} is a {type(value).__name__}; see the help of Trainer.from_engine")
        return cls(
            engine, optimizer, dataloader, settings=(settings or TrainSettings()).changed(**changes), elastic=elastic,
            run_dir=None if run_dir is None else Path(run_dir), resume=resume, eval_data=eval_dataloader,
            optimizer_options=optimizer_options, callbacks=callbacks, loss=loss, layout=layout, guard=guard,
            quiet=quiet,
        )  # fmt: skip

    # ---- training ----

    def fit(self, steps: int | None = None, *, stop_at: int | None = None) -> FitResult:
        """Train until `steps` steps are done in all, or up to `stop_at` of them, and save.

        A SIGTERM saves and ends the process with status 0. Raises NumericsError where the run cannot go on.
        """
        if steps is not None and steps != self.settings.steps:
            self.settings = self.settings.changed(steps=steps)
            self.rate.schedule = self.settings.learning_rate()
        last = self.settings.steps if stop_at is None else min(self.settings.steps, stop_at)
        began = time.perf_counter()
        hang = Every.read("hang_after", self.settings.hang_after).seconds
        with StopSignal() as stop, FitRun(self) as run, Watchdog(hang, run.hung) as watchdog:
            run.watchdog = watchdog
            run.begin()
            while self.step < last and not run.reason:
                self._train_step(run, stop)
                watchdog.alive()
            run.finish("paused" if last < self.settings.steps and not run.reason else run.reason or "done")
        if run.reason == "signal":
            raise SystemExit(0)
        seconds = time.perf_counter() - began
        return FitResult(reason=run.reason, step=self.step, loss=self.last_loss, seconds=seconds, run_dir=self.run_dir)

    def _train_step(self, run: FitRun, stop: StopSignal) -> None:
        step = self.step
        self.engine.deepwell.at_step(step)
        run.formats()
        self.rate.factor = self.watch.lr_scale
        lr = self.rate.set(step)
        batches = [self._batch(self.loader, self.cursor, micro) for micro in range(self.sizes.accumulation)]
        items, tokens = sum(map(count_items, batches)), sum(map(count_tokens, batches))
        is_busy = self.saver is not None and self.saver.is_busy  # a save that is under way is not waited for
        flags = (bool(stop.name), run.save_is_due(step + 1), is_busy, run.evaluation_is_due(step + 1))
        wants = [float(value) for value in (items, tokens, *flags)]
        all_items, all_tokens, stopping, due, busy, evaluates = self.world.total(wants)
        copies = self.world.size / self.runner.dp  # ranks that read the same samples
        num_items, num_tokens = all_items / copies, int(all_tokens / copies)
        if not num_items:
            raise ConfigError(f"step {step + 1}: no token of the batch is predicted; all its labels are -100")
        # A pipeline's ranks hold stages: there is no call of the whole model to look into.
        self.watch.begin_step(step + 1, batches, None if self.layout.pp > 1 else self.runner.sample)
        loss = self.runner.run(batches, num_items=num_items)
        norm = self._update(loss)
        loads = self.runner.end_step()
        self.step, self.cursor, self.tokens = step + 1, self.cursor + self.sizes.global_batch, self.tokens + num_tokens
        for micro in range(self.sizes.accumulation):
            self.loader.prefetch(self.cursor, self.sizes.indices(self.runner.dp_rank, micro))
        self.readback.push(step + 1, [loss, norm], lr=lr, tokens=num_tokens, loads=loads)
        self._finished(run, keep=0 if self.device.type == "cpu" else 1)
        if evaluates:
            self._finished(run)
            self.evaluate(run)
        if stopping or (due and not busy):
            self._finished(run)
            run.save("signal" if stopping else "due")
        if stopping:
            run.reason = "signal"

    def _update(self, loss: Tensor) -> Tensor:
        """Clip, and step the optimizer unless loss or gradients are not finite; the gradients' norm."""
        if self.saver is not None:
            self.saver.before_update()
        self.watch.before_clip()
        if isinstance(self.optimizer, AdamWDW) and self.optimizer.clips_by_itself:
            guarded_step(self.optimizer, loss.isfinite())  # of gradients it sees by itself, on the device
            norm = self.optimizer.grad_norm
            assert norm is not None
            self.watch.after_backward(loss, norm)
        else:
            norm = self.runner.grad_norm(self.settings.clip_norm)
            ok = self.watch.after_backward(loss, norm) & norm.isfinite()
            guarded_step(self.optimizer, ok)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _repair(self, events: Sequence[GuardEvent]) -> None:
        for callback in self.callbacks:
            callback.on_repair(self, events)

    def _batch(self, loader: Loader, cursor: int, micro: int = 0) -> Mapping[str, Tensor]:
        """This rank's samples of a micro-batch."""
        batch = loader.batch(cursor, self.sizes.indices(self.runner.dp_rank, micro))
        check_tokens(batch, self._vocabulary)
        return batch

    def _finished(self, run: FitRun, keep: int = 0) -> None:
        for done in self.readback.pop(keep):
            run.finished(done)

    # ---- evaluating ----

    def evaluate(self, run: FitRun | None = None) -> float:
        """The mean loss over `eval_batches` batches of the held-out data, the same ones every time."""
        if self.eval_loader is None:
            raise ConfigError("there is no held-out data: pass eval_dataloader")
        began, was_training = time.perf_counter(), self.engine.training
        self.engine.eval()
        total, items = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        try:
            for number in range(self.settings.eval_batches):
                first = number * self.sizes.micro_batch * self.runner.dp
                loss, count = self.runner.evaluate(self._batch(self.eval_loader, first))
                total, items = total + loss, items + count
                if run is not None and run.watchdog is not None:
                    run.watchdog.alive()
        finally:
            self.engine.train(was_training)
        if not items:
            raise ConfigError(f"eval_dataloader: no token of its {self.settings.eval_batches} batches is predicted")
        mean = float(total / items)
        if run is not None:
            seconds = time.perf_counter() - began
            run.evaluated({"step": self.step, "loss": mean, "tokens": int(items), "seconds": round(seconds, 4)})
        self.readback.start()
        return mean

    # ---- saving ----

    def train_state(self) -> TrainState:
        """All that a checkpoint holds of this rank."""
        meta = {
            "step": self.step,
            "cursor": self.cursor,
            "tokens": self.tokens,
            "loss": self.last_loss if self.step else None,  # one that is not finite is refused by who saves
            "skipped": self.skipped,
            "useful_s": self.useful_s,
            "settings": self.settings.to_dict(),
            "optimizer": type(self.optimizer).__name__,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "layout": self.layout.to_dict(),
            "policy": self.engine.deepwell.policy.to_dict(),
            "precision": self.watch.state_dict(),
            "data": self.loader.fingerprint(),
            "data_state": self.loader.state_dict(self.cursor),
            "model": model_facts(self.engine),
            "versions": {"deepwell": __version__, "torch": torch.__version__},
        }
        return TrainState(
            model=self.runner.model, optimizer=self.optimizer, meta=meta, rank_state=random_state(self.device)
        )

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint to a folder and wait until it is committed; `dw.save(trainer, path)` is the same."""
        return save(self, path)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, whatever world, plan or precision it was written with."""
        state, saved = self.train_state(), load(path)
        check_same_optimizer(saved.meta.get("optimizer"), self.optimizer)
        own = [dict(group) for group in self.optimizer.param_groups]
        # FP8 moments have scales of blocks, which shards of another number of ranks may cut: those are rounded anew.
        is_elsewhere = self.elastic and saved.world != self.world.size
        meta = load_checkpoint(saved.path, state, round_moments=is_elsewhere)
        self.notes += self.settings.changes_since(meta.get("settings", {})) + keep_options(self.optimizer, own)
        if meta.get("policy") not in (None, self.engine.deepwell.policy.to_dict()):
            self.notes.append("resumed with another precision policy than the checkpoint's")
        self.step, self.cursor, self.tokens = meta["step"], meta["cursor"], meta["tokens"]
        self.skipped = meta.get("skipped", 0)
        self.last_loss = math.nan if meta.get("loss") is None else meta["loss"]
        self.useful_s = meta.get("useful_s", 0.0)
        self.notes += check_same_data(meta.get("data", {}), self.loader.fingerprint())
        self.loader.load_state_dict(meta.get("data_state", {}))
        self.watch.load_state_dict(meta.get("precision", {}))
        if state.rank_state:
            set_random_state(state.rank_state, self.device)
        else:
            seed_all(self.settings.seed, self.world.rank, self.step)

    def _resume(self, resume: str | bool | Path) -> Path | None:
        """Load what is to be gone on from; where there is nothing, None."""
        if resume is False or (resume == "auto" and self.run_dir is None):
            return None
        if resume not in ("auto", True):
            path = latest(Path(str(resume))) or Path(str(resume))
            self.load(path)
            return path
        assert self.run_dir is not None
        found = list_checkpoints(self.run_dir / CHECKPOINTS) if self.runner.is_main else []
        names = self.world.first([str(path) for path in reversed(found)])
        failed: CheckpointError | None = None
        for name in names:
            try:
                self.load(name)
                return Path(name)
            except CheckpointError as error:  # on all ranks, and nothing was changed
                failed = failed or error
                self.notes.append(f"{error}; the checkpoint before it is tried")
        if failed is not None:
            raise failed
        return None

    def _folder(self, given: Path | None) -> Path | None:
        """The run's folder: as given, else one under `runs/`, for an elastic run always the same."""
        if given is not None:
            if given.exists() and not given.is_dir():
                raise ConfigError(f"run_dir: {given} is a file; give a folder")
            return given
        name = "".join(c if c.isalnum() else "-" for c in self.engine.deepwell.ir.name.lower()).strip("-") or "model"
        if not self.elastic:
            name += time.strftime("-%Y%m%d-%H%M%S")
        return Path(str(self.world.first(str(Path("runs") / name))))

    def close(self) -> None:
        """End the threads of data and checkpoints; a trainer that is not used again may also just be dropped."""
        for closed in (self.loader, self.eval_loader, self.saver):
            if closed is not None:
                closed.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _loader(data: Any, settings: TrainSettings, plan: Plan | None, *, held_out: bool = False) -> Loader:
    seq_len = settings.seq_len or (None if plan is None else plan.workload.seq_len)
    make = make_held_out_loader if held_out else make_loader
    return make(data, seq_len=seq_len, seed=settings.seed)


def model_facts(engine: Engine) -> dict[str, Any]:
    """What is needed to build the model again: of a Hugging Face one its class and config."""
    model = engine.deepwell.model
    config: Any = getattr(model, "config", None)
    facts: dict[str, Any] = {"name": engine.deepwell.ir.name, "class": type(model).__name__.removeprefix("FSDP")}
    if hasattr(config, "to_dict") and hasattr(config, "model_type"):
        facts["config"] = json.loads(json.dumps(config.to_dict(), default=str))
    return facts
