"""The load of a model's experts over a step, and what is done with it at the step's end.

Routers count in the backward (losses.py): once for each micro-batch, whatever is recomputed. `end_step` adds the counts
up over ranks, moves the biases of routers that balance by them, and begins anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepwell.moe.router import EXTRA_STATISTICS, Router


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """One layer's step. Losses are means over its tokens, without coefficients. `entropy` is that of the router's
    probabilities as a share of its maximum: 1 means undecided, 0 sure of one expert."""

    tokens_per_expert: tuple[int, ...]
    dropped: int
    tokens: int
    entropy: float
    balance_loss: float
    z_loss: float

    @property
    def imbalance(self) -> float:
        """The busiest expert over the mean; 1 is even."""
        total = sum(self.tokens_per_expert)
        return max(self.tokens_per_expert) * len(self.tokens_per_expert) / total if total else 1.0


class StepLoads:
    """The loads of a step, on the device until they are read."""

    def __init__(self, rows: dict[str, Tensor]) -> None:
        self._rows = rows

    def read(self) -> dict[str, ExpertLoad]:
        """By the path of the router. Waits for the device."""
        return {path: _load_of(row.tolist()) for path, row in self._rows.items()}


def routers(model: nn.Module) -> dict[str, Router]:
    """The model's routers by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Router)}


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """What the model's loss is multiplied by before its backward, so that the routers' losses are too."""
    for router in routers(model).values():
        router.loss_scale.fill_(scale)


@torch.no_grad()
def end_micro_batch(model: nn.Module) -> None:
    """Keep what was counted for the losses of global scope; needed between micro-batches only where there are some."""
    for router in routers(model).values():
        if router.load.grad is not None and "global" in router.config.router.balance_loss:
            router.seen.copy_(router.load.grad)


@torch.no_grad()
def end_step(model: nn.Module, group: Any = None) -> StepLoads:
    """Call once an optimizer step: adds loads up over the ranks of `group`, moves biases, forgets the counts.

    `group` are the ranks that saw other tokens; None: this one alone.
    """
    found = {path: router for path, router in routers(model).items() if router.load.grad is not None}
    if not found:
        return StepLoads({})
    counts = [router.load.grad for router in found.values()]
    flat = torch.cat([count for count in counts if count is not None])
    if group is not None:
        dist.all_reduce(flat, group=group)
    rows = dict(zip(found, flat.split([router.load.numel() for router in found.values()]), strict=True))
    for path, router in found.items():
        how = router.config.router
        if how.bias_rate:
            counts_E = rows[path][: router.config.experts]
            router.e_score_correction_bias += how.bias_rate * (counts_E.mean() - counts_E).sign()
        router.load.grad = None
        router.seen.zero_()
    return StepLoads(rows)


def _load_of(row: list[float]) -> ExpertLoad:
    experts = len(row) - len(EXTRA_STATISTICS)
    extra = dict(zip(EXTRA_STATISTICS, row[experts:], strict=True))
    tokens = extra["tokens"] or 1.0
    return ExpertLoad(
        tokens_per_expert=tuple(round(count) for count in row[:experts]),
        dropped=round(extra["dropped"]),
        tokens=round(extra["tokens"]),
        entropy=extra["entropy"] / tokens / math.log(experts) if experts > 1 else 0.0,
        balance_loss=extra["balance_loss"] / tokens,
        z_loss=extra["z_loss"] / tokens,
    )
