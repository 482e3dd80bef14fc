"""The runners of a step: of one process, whose model is one graph, and of several.

Of several each reads its samples, or its part of them, and gradients are those of all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepwell.engine.engine import Engine
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.moe.statistics import Routers, StepLoads
from deepwell.train.feed import IGNORED, Batch, Feed, count_items, targets_of, to_device
from deepwell.train.parallel.mesh import Meshes


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
        found = [parameter for parameter in self.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in found])  # type: ignore[misc]
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(found, max_norm, norm)
        return norm

    def all_reduce(self, value: Tensor, op: str = "sum") -> Tensor:
        """`value` summed ("sum") or its largest ("max") over all ranks."""
        return value


class DistributedRunner(Runner):
    """Runs the micro-batches of one rank. What calls the model and when gradients travel, kinds of sharding override.

    Every rank runs every micro-batch, also one in which none of its tokens is predicted: the others wait for it.
    """

    is_awaited = True

    def __init__(self, engine: Engine, feed: Feed, device: torch.device, meshes: Meshes) -> None:
        super().__init__(engine, feed, device)
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.meshes = meshes
        self.dp, self.dp_rank = meshes.layout.dp, meshes.dp_rank
        if feed.own_loss is not None and meshes.layout.tp > 1:
            self.notes.append("tensor parallelism gives the loss function shift_labels of this rank's tokens")

    @property
    def token_group(self) -> dist.ProcessGroup | None:
        mesh = self.meshes.tokens
        return mesh.get_group() if mesh.size() > 1 else None

    def counted(self, batch: Batch) -> tuple[Batch, int]:
        return predictable(part_of(batch, self.meshes, self.model))

    def grad_norm(self, max_norm: float | None = None) -> Tensor:
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norm = self.all_reduce(squares(self.once(grads), self.world // self.meshes.layout.pp, self.device)).sqrt()
        if max_norm is not None:
            clip(grads, max_norm, norm)
        return norm

    def once(self, grads: list[Tensor]) -> list[Tensor]:
        """Those of its gradients that no other stage counts in the norm."""
        return grads

    def all_reduce(self, value: Tensor, op: str = "sum") -> Tensor:
        out = value.detach().clone()
        dist.all_reduce(out, getattr(dist.ReduceOp, op.upper()))
        return out


def predictable(batch: Batch) -> tuple[Batch, int]:
    """A batch and its number of predicted tokens. Where that is none, one label is put in: its loss counts nothing.

    The mean of nothing is NaN, and a rank that leaves a micro-batch out would leave the others waiting.
    """
    items = count_items(batch)
    if items:
        return batch, items
    key = "shift_labels" if "shift_labels" in batch else "labels"
    labels = batch.get(key)
    if labels is None:
        return batch, items
    labels = torch.where(labels == IGNORED, IGNORED, labels)  # a copy: the loader may hand out the same one again
    if key == "labels":
        labels[:, 1] = 0
    else:
        labels[:, 0] = 0
    return {**batch, key: labels}, 0


# ---- what a rank reads ----


def part_of(batch: Batch, meshes: Meshes, model: nn.Module) -> Batch:
    """This rank's part: of cp, a part of every sequence; of tp, all its tokens and a part of their labels. Labels are
    shifted before they are split: the last token of one part predicts the first of the next.

    Raises ConfigError and UnsupportedError where it cannot be split for the model.
    """
    layout, ranks = meshes.layout, meshes.ranks
    has_router_loss = getattr(getattr(model, "config", None), "output_router_logits", False)
    if layout.tp > 1 and has_router_loss and "attention_mask" in batch:
        raise UnsupportedError(
            "tp: the batch has an attention_mask, and output_router_logits=True adds a loss of routers that masks "
            "whole sequences, of which a rank of tp routes a part; leave out the mask (pack the sequences), or the loss"
        )
    if layout.cp > 1:
        batch = split_context(batch, layout.cp, ranks.get_local_rank("cp"))
    return split_labels(batch, layout.tp, ranks.get_local_rank("tp")) if layout.tp > 1 else batch


def split_context(batch: Batch, cp: int, rank: int) -> dict[str, Tensor]:
    """The part of a batch that one of `cp` ranks reads: input_ids, position_ids, shift_labels.

    Raises ConfigError where sequences do not divide, UnsupportedError where a batch has a mask of its own.
    """
    if "input_ids" not in batch:
        raise ConfigError(f"cp: the batch has {', '.join(batch)} and no input_ids")
    tokens = batch["input_ids"]
    length = tokens.shape[1]
    if length % cp:
        raise ConfigError(f"sequences of {length} tokens cannot be split over cp {cp}; their length must divide")
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and not bool(mask.all()):
        raise UnsupportedError("cp: the batch has an attention_mask with padding; pack the sequences, or leave cp at 1")
    whole = torch.arange(length, device=tokens.device).expand_as(tokens)
    if positions is not None and not torch.equal(positions.expand_as(tokens), whole):
        raise UnsupportedError("cp: position_ids restart at documents, and masks of documents are not split; "
                               "leave cp at 1, or the documents unmasked")  # fmt: skip
    given = {"input_ids": tokens, "position_ids": whole, "shift_labels": targets_of(batch)}
    return {name: value.chunk(cp, dim=1)[rank].contiguous() for name, value in given.items()}


def split_labels(batch: Batch, tp: int, rank: int) -> Batch:
    """The part of a batch's labels that one of `tp` ranks predicts; every rank reads all tokens."""
    labels = targets_of(batch)
    if labels.shape[1] % tp:
        raise ConfigError(
            f"the batch has {labels.shape[1]} tokens a row, which tp {tp} does not divide; take another seq_len"
        )
    mine = labels.chunk(tp, 1)[rank].contiguous()
    return {**{key: value for key, value in batch.items() if key != "labels"}, "shift_labels": mine}


# ---- the norm of gradients ----


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def squares(grads: Iterable[Tensor], ranks: int, device: torch.device) -> Tensor:
    """This rank's share of the sum of squares, of gradients on any mix of meshes: a sum over all ranks gives the whole.

    A shard that several of the `ranks` of a stage hold counts on each of them by its part.
    """
    found: dict[tuple[int, torch.device], list[Tensor]] = {}
    for grad in grads:
        found.setdefault((ranks // num_shards(grad), grad.device), []).append(local(grad))
    total = torch.zeros((), device=device)
    for (copies, _), same in found.items():
        norms = torch.stack(torch._foreach_norm(same, 2, dtype=torch.float32))
        total += (norms.square().sum() / copies).to(device)
    return total


def num_shards(tensor: Tensor) -> int:
    """Among how many ranks a tensor is divided."""
    placements = getattr(tensor, "placements", ())
    sizes = tensor.device_mesh.shape if placements else ()  # type: ignore[attr-defined]
    # Experts that FSDP2 shards once more have a placement that is no `Shard` by name.
    return math.prod(size for size, placement in zip(sizes, placements, strict=True) if not placement.is_replicate())


@torch.no_grad()
def clip(grads: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients down to a norm, as torch.nn.utils.clip_grad_norm_ does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # In the gradients' own dtype: a factor of another one would be multiplied tensor by tensor.
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(local(grad))
    for (device, dtype), same in alike.items():
        torch._foreach_mul_(same, factor.to(device, dtype))
