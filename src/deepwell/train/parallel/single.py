"""The runner of one process: the whole model is one graph, nothing is sharded."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.engine.engine import Engine
from deepwell.moe.statistics import Routers, StepLoads
from deepwell.train.feed import Batch, Feed, count_items, to_device


class Runner:
    """Runs the micro-batches of one step. What several processes do otherwise, they override.

    `dp` ranks read different samples, `dp_rank` is this one's number among them.
    """

    rank = 0
    dp = 1
    dp_rank = 0
    # Gradients are summed over ranks as they are; where they are averaged, the loss is scaled up by as much.
    averages_over = 1
    # Whether other ranks wait for this one in every micro-batch, also where none of its tokens is predicted.
    is_awaited = False

    def __init__(self, engine: Engine, feed: Feed, device: torch.device) -> None:
        self.engine, self.feed, self.device = engine, feed, device
        self.notes: list[str] = []  # what the run's reader should know

    @property
    def model(self) -> nn.Module:
        """What holds the parameters."""
        return self.engine.deepwell.model

    @property
    def is_main(self) -> bool:
        """Whether this process writes the log and says what is said once."""
        return self.rank == 0

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    @functools.cached_property
    def routers(self) -> Routers:
        """The routers of DeepwellMoE in the model, with the ranks that read other tokens."""
        found = Routers(self.model)
        found.set_group(self.token_group if found.by_path else None)
        return found

    @property
    def token_group(self) -> Any:
        """The process group of the ranks that read other tokens; None where this is the only one."""
        return None

    def end_step(self) -> StepLoads:
        """After an optimizer step: the load of experts, over all ranks, on the device."""
        return self.routers.end_step(self.token_group if self.routers.by_path else None)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    @property
    def called(self) -> nn.Module:
        """What is called with a batch."""
        return self.engine

    def begin(self) -> None:
        """Before a step, and before any other call of the model."""

    def counted(self, batch: Batch) -> tuple[Batch, int]:
        """What this rank reads of its samples, and how many of the tokens are predicted."""
        return batch, count_items(batch)

    def micro_batch(self, index: int, count: int) -> AbstractContextManager[object]:
        """Around forward and backward of one of `count` micro-batches: say what of their gradients travels."""
        return nullcontext()

    def run(self, batches: Sequence[Batch], *, num_items: float) -> Tensor:
        """Forward and backward of a step's micro-batches; the step's loss, over all ranks, on the device.

        Gradients are added to those that are there: those of the sum over all ranks' tokens, divided by `num_items`.
        """
        self.begin()
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            part, items = self.counted(batch)
            if not items and not self.is_awaited:
                continue  # nothing is predicted: the mean of nothing would be NaN
            share = items / num_items
            scale = share * self.averages_over
            self.routers.set_loss_scale(scale)
            with self.micro_batch(index, len(batches)):
                loss = self.feed(self.called, to_device(part, self.device))
                (loss if scale == 1.0 else loss * scale).backward()
            self.routers.end_micro_batch()
            total += loss.detach().float() * share
        return self.all_reduce(total)

    def sample(self, batch: Batch) -> Tensor:
        """The mean loss of a few tokens, for who looks at single layers; runs as one call of the engine."""
        self.begin()
        return self.feed(self.engine, to_device(self.counted(batch)[0], self.device))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of predicted tokens) of a batch, over all ranks."""
        self.begin()
        part, items = self.counted(batch)
        total = torch.zeros(2, device=self.device)
        if items or self.is_awaited:
            loss = self.feed(self.engine, to_device(part, self.device)).detach().float()
            total = self.all_reduce(torch.stack((loss * items, torch.tensor(float(items), device=self.device))))
        return total[0], total[1]

    def grad_norm(self, max_norm: float | None = None) -> Tensor:
        """The norm of all gradients; they are scaled down to `max_norm` in place where that is given."""
        return clip_gradients(self.parameters(), max_norm)

    def all_reduce(self, value: Tensor, op: str = "sum") -> Tensor:
        """`value` summed ("sum") or its largest ("max") over all ranks."""
        return value


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """torch's own clip_grad_norm_, or the norm alone."""
    found = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in found])  # type: ignore[misc]
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(found, max_norm, norm)
    return norm
