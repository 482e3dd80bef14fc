"""What goes into a checkpoint, and what is said about a save."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(kw_only=True)
class TrainState:
    """What a run needs to go on: the model and optimizer as they live, facts as JSON, and each rank's own tensors.

    Tensors of the model and the optimizer may be plain or DTensors; names are the model's own. `meta` holds at least
    "step". A finite "loss" there is asked for before anything is written. Loading fills `rank_state` in place.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    rank_state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvent:
    """One save: how long training stood still, how long it took in all, and whether there is a checkpoint now.

    `committed` is False and `error` empty as long as the save is under way.
    """

    step: int
    path: str
    stall_s: float
    seconds: float = 0.0
    bytes: int = 0
    committed: bool = False
    error: str = ""
