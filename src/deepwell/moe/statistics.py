"""The load of a model's experts over a step, and what is done with it at the step's end.

Routers count in the backward (losses.py): once for each micro-batch, whatever is recomputed. `end_step` adds the counts
up over ranks, moves the biases of routers that balance by them, and begins anew. The trainer calls all of this.
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


class Routers:
    """A model's routers by their paths: what is done to all of them around micro-batches and steps."""

    def __init__(self, model: nn.Module) -> None:
        self.by_path = {path: module for path, module in model.named_modules() if isinstance(module, Router)}

    def set_group(self, group: Any) -> None:
        """The ranks whose tokens are one batch to the losses of global scope."""
        for router in self.by_path.values():
            router.group = None if group is None else group.group_name

    def set_loss_scale(self, scale: float) -> None:
        """What the model's loss is multiplied by before its backward, so that the routers' losses are too."""
        for router in self.by_path.values():
            router.loss_scale.fill_(scale)

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Keep what was counted for losses of global scope; needed between micro-batches only where there are some."""
        for router in self.by_path.values():
            if router.load.grad is not None and "global" in router.config.router.balance_loss:
                router.seen.copy_(router.load.grad)

    @torch.no_grad()
    def end_step(self, group: Any = None) -> StepLoads:
        """Call once an optimizer step: adds loads up over the ranks of `group`, moves biases, forgets the counts.

        `group` are the ranks that saw other tokens; None: this one alone. A router that met no token on this rank
        counts nothing, and the others' counts reach it.
        """
        loads = [router.load for router in self.by_path.values()]
        if not loads or (group is None and all(load.grad is None for load in loads)):
            return StepLoads({})
        counted = [torch.zeros_like(load) if load.grad is None else load.grad for load in loads]
        flat = torch.cat(counted)
        if group is not None:
            dist.all_reduce(flat, group=group)
        rows = dict(zip(self.by_path, flat.split([count.numel() for count in counted]), strict=True))
        for path, router in self.by_path.items():
            how = router.config.router
            if how.bias_rate:
                counts_E = rows[path][: router.config.experts]
                router.e_score_correction_bias += how.bias_rate * (counts_E.mean() - counts_E).sign()
            router.load.grad = None
            router.seen.zero_()
        return StepLoads(rows)


def end_step(model: nn.Module, group: Any = None) -> StepLoads:
    """`Routers(model).end_step(group)`, for a training loop of one's own."""
    return Routers(model).end_step(group)


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
