"""`dw.save` and `dw.load`: a checkpoint as a value."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepwell.artifacts.checkpoint.hf import find_checkpoint
from deepwell.artifacts.checkpoint.manifest import open_documents, verify
from deepwell.artifacts.checkpoint.reader import Reader, Tensors
from deepwell.artifacts.checkpoint.restore import load_checkpoint
from deepwell.artifacts.checkpoint.saver import save_checkpoint
from deepwell.artifacts.checkpoint.state import TrainState
from deepwell.errors import CheckpointError, ConfigError
from deepwell.planner.plan import Plan
from deepwell.precision.policy import PrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What `dw.load` returns: the facts of a checkpoint, its tensors when they are asked for."""

    path: Path
    step: int
    meta: dict[str, Any] = field(repr=False)
    world: int
    bytes: int
    versions: dict[str, str] = field(repr=False)

    @property
    def plan(self) -> Plan | None:
        """The plan that the run followed, if there was one."""
        data = self.meta.get("plan")
        return None if data is None else Plan.from_dict(data)

    @property
    def policy(self) -> PrecisionPolicy | None:
        """The precision policy of the run."""
        data = self.meta.get("policy")
        return None if data is None else PrecisionPolicy.from_dict(data)

    def weights(self) -> Tensors:
        """The model's tensors by name, whole and plain; each is read when it is taken."""
        return Tensors(self.path)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state by parameter name, whole and plain, and its groups of options."""
        reader = Reader(self.path)
        state: dict[str, dict[str, Any]] = {}
        for name in (name for name in reader.optimizer if name in reader.model):
            state[name] = dict(reader.values.get(name, {}))
            for key, entry in reader.optimizer[name].items():
                read = reader.read_scales if entry.block else reader.read
                value = state[name][key] = read(entry, entry.whole)
                if value is None:
                    raise CheckpointError(f"{self.path}: {entry.name} has other blocks than the whole tensor's")
        return {"state": state, "param_groups": reader.groups}

    def restore(self, target: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """Load into a trainer, or into a model and an optimizer; returns the meta.

        A trainer goes on from there: step, data position, guard and random states too.
        """
        if isinstance(target, nn.Module):
            return load_checkpoint(self.path, TrainState(model=target, optimizer=optimizer))
        if isinstance(target, TrainState):
            return load_checkpoint(self.path, target)
        if not callable(getattr(target, "load", None)):
            raise ConfigError(f"cannot restore a {type(target).__name__}; pass a Trainer, an engine or an nn.Module")
        target.load(self.path)
        return self.meta

    def verify(self) -> int:
        """Compare the hashes of all files; returns the bytes read. Raises CheckpointError."""
        return verify(self.path)

    def __str__(self) -> str:
        plan = self.meta.get("plan")
        layout = f", planned for {plan.get('machine')}" if isinstance(plan, dict) else ""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        ranks = f"{self.world} rank{'s' if self.world > 1 else ''}"
        size = f"{self.bytes / 2**20:.1f} MiB of {ranks}"
        return f"checkpoint of step {self.step}: {self.path}, {size}{layout} ({versions})"


def save(target: Any, path: Path | str) -> Path:
    """Save a trainer, or the weights of an engine or model, into path/step-NNNNNNNN and return that folder.

    `path` is the folder of a run: it may hold checkpoints of other steps. All ranks call it.
    """
    return save_checkpoint(_folder(path), state_of(target))


def load(path: Path | str) -> Checkpoint:
    """Open a checkpoint's folder, or the last committed checkpoint of a run's folder.

    Reads the small files; `.weights()`, `.optimizer_state()` and `.restore(...)` read the rest.
    """
    found = find_checkpoint(_folder(path))
    opened = open_documents(found)
    manifest = opened.manifest
    return Checkpoint(
        path=found,
        step=manifest["step"],
        meta=opened.state,
        world=manifest["world"],
        bytes=sum(record["size"] for record in opened.files.values()),
        versions=manifest["versions"],
    )


def _folder(path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"path is {path!r}; give a folder: of a run or of a checkpoint, as str or Path")
    return Path(path)


def state_of(target: Any) -> TrainState:
    """What is saved of a trainer, an engine or a model. Raises ConfigError for anything else."""
    if isinstance(target, TrainState):
        return target
    if isinstance(target, nn.Module):
        runtime: Any = target.__dict__.get("deepwell")  # of an engine
        if not isinstance(getattr(runtime, "policy", None), PrecisionPolicy):
            return TrainState(model=target, meta={"step": 0})
        plan = runtime.plan and runtime.plan.to_dict()
        return TrainState(model=target, meta={"step": runtime.step, "plan": plan, "policy": runtime.policy.to_dict()})
    train_state = getattr(target, "train_state", None)
    state = train_state() if callable(train_state) else None
    if not isinstance(state, TrainState):
        raise ConfigError(f"cannot save a {type(target).__name__}; pass a Trainer, an engine or an nn.Module")
    return state
