"""What a training run does: steps, batch, learning rate, what is saved and logged when. One frozen value."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from deepwell.errors import ConfigError
from deepwell.train.schedules import Schedule

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
# Settings that change what is trained. Not `steps`, which `fit` may still be given.
_TRAINS = (
    "global_batch", "lr", "weight_decay", "beta1", "beta2", "eps", "schedule", "warmup", "lr_floor", "decay",
    "clip_norm",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Settings of a run; each may be given to `Trainer.from_engine`, in a recipe's [train] or on the command line.

    `global_batch` counts sequences of a step over all ranks, `micro_batch` those of one forward on one rank; what a
    plan says stands in where they are None, else a step is one micro-batch a rank. `save_every` and `eval_every` count
    steps, or are a time ("30m"); 0 switches them off.
    """

    steps: int = 1000
    global_batch: int | None = None
    micro_batch: int | None = None
    seq_len: int | None = None
    lr: float = 3e-4
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    schedule: str = "cosine"
    warmup: int | None = None  # None: a fiftieth of the run, 2,000 steps at most
    lr_floor: float = 0.1  # share of lr at the end
    decay: int | None = None  # steps of the last part of "wsd"
    clip_norm: float | None = 1.0
    seed: int = 0
    log_every: int = 1
    eval_every: int | str = 0
    eval_batches: int = 16
    save_every: int | str = "30m"
    save_at_end: bool = True
    keep_last: int = 3
    keep_every: int | None = None  # steps: checkpoints at its multiples stay for good
    async_save: bool = True
    tensorboard: bool = False
    fp8_all_gather: bool = False  # zero1, 2, 3: weights that are rounded to MXFP8 travel so
    hang_after: str = "30m"  # a rank that finishes no step for so long is dumped and ended; "0" never
    give_up_after: int = 5  # restarts in a row without a new checkpoint

    def __post_init__(self) -> None:
        counts = ("steps", "log_every", "keep_last", "eval_batches", "give_up_after")
        for name in (*counts, "global_batch", "micro_batch", "seq_len", "keep_every"):
            value = getattr(self, name)
            is_unset = value is None and name not in counts
            if not is_unset and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if not 0.0 < self.lr < math.inf:
            raise ConfigError(f"lr is {self.lr!r}; it must be positive and finite")
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise ConfigError(f"clip_norm is {self.clip_norm!r}; it must be positive, or None (in a recipe: 0)")
        for name in ("save_every", "eval_every", "hang_after"):
            Every.read(name, getattr(self, name))
        if Every.read("hang_after", self.hang_after).steps:
            raise ConfigError(f'hang_after is {self.hang_after!r}; it takes a time such as "90s" or "30m", or "0"')
        self.learning_rate()  # wrong combinations of its fields are errors now

    def learning_rate(self) -> Schedule:
        """The factor of `lr` at each step."""
        warmup = min(2000, self.steps // 50) if self.warmup is None else self.warmup
        return Schedule(kind=self.schedule, steps=self.steps, warmup=warmup, floor=self.lr_floor, decay=self.decay)

    def changed(self, **changes: Any) -> TrainSettings:
        """The same with some fields changed. Raises ConfigError on a name that is none, with the nearest one."""
        known = {field.name for field in fields(self)}
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; settings are {', '.join(sorted(known))}"
                raise ConfigError(f"{name} is no setting of a run{hint}")
        return replace(self, **{name: _typed(name, value) for name, value in changes.items()})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def changes_since(self, saved: Mapping[str, Any]) -> list[str]:
        """A note where a resumed run trains otherwise than the one that was saved (`to_dict`); [] where it does not."""
        own = self.to_dict()
        found = [
            f"{name} was {saved[name]}, is {own[name]}" for name in _TRAINS if saved.get(name, own[name]) != own[name]
        ]
        return [f"resumed with other settings: {'; '.join(found)}"] if found else []

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainSettings:
        return cls().changed(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """Every so many steps, or every so many seconds; neither: never."""

    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def read(cls, name: str, value: int | str) -> Every:
        """Of a number of steps, or of a time such as "90s", "30m", "2h". Raises ConfigError naming the setting."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(steps=value)
        text = str(value).strip()
        if text.isdigit():
            return cls(steps=int(text))
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text)
        if match is None:
            raise ConfigError(f'{name} is {value!r}; it takes a number of steps, or a time such as "90s", "30m", "2h"')
        return cls(seconds=float(match[1]) * _UNITS[match[2]])

    def is_due(self, step: int, seconds: float) -> bool:
        """Whether it is time after `step` steps, `seconds` after the last."""
        if self.steps:
            return step % self.steps == 0
        return bool(self.seconds) and seconds >= self.seconds


_FLAGS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
_KINDS = {f.name: str(f.type) for f in fields(TrainSettings)}


def _typed(name: str, value: Any) -> Any:
    """A value of a recipe or of the command line, where all are text, in the field's own type."""
    kind = _KINDS[name]
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
        if "None" not in kind:
            raise ConfigError(f"{name} is None; it must be {kind}")
        return None
    try:
        if name == "clip_norm" and float(value) == 0.0:
            return None
        if kind.startswith("bool"):
            return value if isinstance(value, bool) else _FLAGS[str(value).lower()]
        if kind.startswith("float"):
            return float(value)
        if kind in ("int", "int | None"):
            number = float(value) if isinstance(value, str) else value
            if number != int(number):
                raise ValueError
            return int(number)
    except KeyError as error:
        raise ConfigError(f"{name} is {value!r}; it takes true or false") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is {value!r}; it must be {kind.replace(' | None', '')}") from error
    return value
