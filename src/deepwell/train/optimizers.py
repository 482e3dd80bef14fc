"""Which optimizer a run has: adamw_dw by name, torch's own by name, one that is there, or a function of parameters."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepwell.engine.dryrun.plan import OPTIMIZERS as KEPT
from deepwell.engine.dryrun.plan import optimizer_of
from deepwell.engine.engine import Engine
from deepwell.errors import ConfigError
from deepwell.train.adamw.optimizer import OPTIMIZERS, AdamWDW
from deepwell.train.settings import TrainSettings

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
_TORCH = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
}


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms, biases) and frozen parameters do not, or are not there."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for _, parameter in named:
        if parameter.requires_grad:
            (decayed if parameter.dim() >= 2 else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(
    optimizer: str | torch.optim.Optimizer | MakeOptimizer,
    engine: Engine,
    named: Iterable[tuple[str, nn.Parameter]],
    settings: TrainSettings,
    *,
    is_sharded: bool,
    options: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of a run. `options` are the optimizer's own keyword arguments and go before the settings.

    adamw_dw in one process clips by itself and skips steps whose gradients are not finite, without waiting for the
    device. Raises ConfigError for names that are none, and for an optimizer of parameters that sharding has replaced.
    """
    named = list(named)
    if isinstance(optimizer, torch.optim.Optimizer):
        known = {id(parameter) for _, parameter in named}
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if foreign:
            raise ConfigError(
                f"optimizer: {len(foreign)} of its parameters are not the model's any more (sharding replaces them); "
                "pass its name, or a function: optimizer=lambda parameters: torch.optim.AdamW(parameters, ...)"
            )
        return optimizer
    groups = parameter_groups(named, settings.weight_decay)
    if not groups:
        raise ConfigError("the model has no parameter that requires a gradient; nothing can be trained")
    if not isinstance(optimizer, str):
        if not callable(optimizer):
            raise ConfigError(f"optimizer is a {type(optimizer).__name__}; pass a name, an optimizer or a function")
        made = optimizer(groups)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"optimizer: the function returned a {type(made).__name__}, not an optimizer")
        return made
    name, given = optimizer.lower(), dict(options or {})
    kind = AdamWDW if name in OPTIMIZERS else _TORCH.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, [*OPTIMIZERS, *_TORCH], n=2)
        raise ConfigError(f"optimizer is {optimizer!r}; did you mean {' or '.join(near) or 'adamw_dw, adamw or sgd'}?")
    takes = inspect.signature(kind).parameters
    for key in sorted(set(given) - set(takes)):
        raise ConfigError(f"optimizer: {kind.__name__} takes no {key}; it takes {', '.join(list(takes)[1:])}")
    values = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    # Adafactor's eps is a pair of its own meaning.
    own: dict[str, Any] = {k: v for k, v in values.items() if k in takes and type(v) is type(takes[k].default)}
    if kind is AdamWDW:
        own |= {"seed": settings.seed, **KEPT[optimizer_of(engine, engine.deepwell.plan)]}
        if not is_sharded:
            own |= {"clip_norm": settings.clip_norm, "skip_nonfinite": True}
        return AdamWDW(groups, **{**own, **given})
    if "weight_decay" not in takes:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    try:
        return kind(groups, **{**own, **given})
    except (TypeError, ValueError) as error:  # Muon takes matrices only, LBFGS no groups
        raise ConfigError(f"optimizer: {kind.__name__} cannot be made for this model: {error}") from error


def check_same_optimizer(saved: str | None, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError where a checkpoint's optimizer is of another kind: its states would mean nothing here."""
    own = type(optimizer).__name__
    # adamw_dw takes over the moments of torch's Adam.
    if saved in (None, own) or (isinstance(optimizer, AdamWDW) and saved in ("Adam", "AdamW")):
        return
    raise ConfigError(
        f"optimizer: the checkpoint is of {saved} and this run has {own}: resume with {saved}, or start a new run from "
        "its weights: dw.load(path).restore(model), then a trainer with another run_dir"
    )


# Of an optimizer's options those that come from settings, which are noted there, and those of where it runs.
_NOT_NOTED = {
    "params", "lr", "initial_lr", "weight_decay", "betas", "eps", "clip_norm", "skip_nonfinite", "foreach", "fused",
    "capturable",
}  # fmt: skip


def keep_options(optimizer: torch.optim.Optimizer, own: Iterable[Mapping[str, Any]]) -> list[str]:
    """After a load: the options of this run stand, not those of the run that was saved; what differs as notes.

    The saved ones may be of another number of processes, where somebody else clips.
    """
    notes: dict[str, None] = {}
    for group, options in zip(optimizer.param_groups, own, strict=True):
        for key, value in options.items():
            if key == "params" or isinstance(value, torch.Tensor):
                continue
            if key not in _NOT_NOTED and group.get(key) != value:
                notes[f"optimizer: {key} was {group.get(key)!r} in the checkpoint and is {value!r} from here on"] = None
            group[key] = value
    return list(notes)


class LearningRate:
    """Sets each group's rate before a step: its own peak times the schedule's factor."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: TrainSettings) -> None:
        self.schedule = settings.learning_rate()
        self._optimizer = optimizer  # its groups are other objects after a load
        self._peaks = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.factor = 1.0  # a repair after trouble may lower it for a while

    def set(self, step: int) -> float:
        """The rate of the first group for the step that comes after `step` steps."""
        factor = self.schedule(step) * self.factor
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            value = peak * factor
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value
        return self._peaks[0] * factor
