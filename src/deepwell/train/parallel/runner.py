"""The runner of several processes: each reads its samples, and gradients are those of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepwell.engine.engine import Engine
from deepwell.train.feed import IGNORED, Batch, Feed, count_items
from deepwell.train.parallel.batches import part_of
from deepwell.train.parallel.mesh import Meshes
from deepwell.train.parallel.single import Runner


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

    def part(self, batch: Batch) -> Batch:
        """What this rank reads of its samples."""
        return part_of(batch, self.meshes, self.model)

    def counted(self, batch: Batch) -> tuple[Batch, int]:
        return predictable(self.part(batch))

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


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()
