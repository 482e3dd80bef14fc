"""The runner of one process: the whole model is one graph, nothing is sharded."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.engine.engine import Engine
from deepwell.moe.statistics import Routers, StepLoads
from deepwell.train.feed import Feed, count_items, to_device


class Runner:
    """Runs the micro-batches of one step on one process. What several processes do otherwise, they override.

    `dp` ranks read different samples, `dp_rank` is this one's number among them.
    """

    world = 1
    rank = 0
    dp = 1
    dp_rank = 0
    mesh: Any = None

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

    def run(self, batches: Sequence[Mapping[str, Tensor]], *, num_items: float) -> Tensor:
        """Forward and backward of a step's micro-batches; the step's loss, on the device.

        Gradients are added to those that are there: those of the sum over all tokens, divided by `num_items`.
        """
        total: Tensor | None = None
        for batch in batches:
            share = count_items(batch) / num_items
            if not share:
                continue  # nothing is predicted: the mean of nothing would be NaN
            self.routers.set_loss_scale(share)
            loss = self.feed(self.engine, to_device(batch, self.device))
            loss = loss if share == 1.0 else loss * share
            loss.backward()
            self.routers.end_micro_batch()
            total = loss.detach() if total is None else total + loss.detach()
        return torch.zeros((), device=self.device) if total is None else total.float()

    def sample(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean loss of a few tokens, for who looks at single layers; runs as one call of the engine."""
        return self.feed(self.engine, to_device(batch, self.device))

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of predicted tokens) of a batch, over all ranks."""
        items = torch.tensor(float(count_items(batch)), device=self.device)
        if not items:
            return torch.zeros((), device=self.device), items
        return self.feed(self.engine, to_device(batch, self.device)).detach().float() * items, items

    def grad_norm(self, max_norm: float | None = None) -> Tensor:
        """The norm of all gradients; they are scaled down to `max_norm` in place where that is given."""
        return clip_gradients(self.parameters(), max_norm)

    def all_reduce(self, value: Tensor, op: str = "sum") -> Tensor:
        """`value` summed ("sum") or its largest ("max") over all ranks."""
        return value

    def barrier(self) -> None:
        """Wait for all ranks."""

    def close(self) -> None:
        """Leave the process group."""


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """torch's own clip_grad_norm_, or the norm alone."""
    found = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in found])  # type: ignore[misc]
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(found, max_norm, norm)
    return norm
