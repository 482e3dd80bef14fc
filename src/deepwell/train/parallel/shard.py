"""Data parallelism: DDP, and ZeRO-1, 2, 3 and HSDP by FSDP2's `fully_shard`.

    zero3    weights are gathered for a layer's turn, in the forward and again in the backward
    zero2    weights stay gathered until the step's last backward; each micro-batch's gradients are reduced and sharded
    zero1    as zero2, and gradients are added up whole and reduced at the last micro-batch alone
    ddp      every rank holds everything; gradients are summed while the backward runs

Each layer is a group of its own, the rest of the model another. Gradients are sums over ranks: a rank's loss is its
tokens' sum over the number of all ranks' tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepwell.engine.engine import Engine
from deepwell.engine.regions import Regions
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.planner.layout import Layout
from deepwell.train.feed import Feed
from deepwell.train.parallel.fp8_gather import Fp8Gather
from deepwell.train.parallel.mesh import Meshes
from deepwell.train.parallel.runner import DistributedRunner

# Its name in torch 2.13 and later, and before.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


def check_shardable(engine: Engine, layout: Layout, fp8_all_gather: bool = False) -> None:
    """Raise UnsupportedError where this engine cannot run in this layout."""
    options, name = engine.deepwell.options, engine.deepwell.ir.name
    gathers = "fp8_all_gather: " if fp8_all_gather else ""
    reasons = (
        (options.cuda_graphs, "cuda_graphs=True goes with one process; compile the engine without it"),
        (
            options.cache_weights and layout.sharding == "zero3",
            "cache_weights=True keeps FP8 copies of whole weights on every rank, which zero3 avoids; compile "
            "the engine without it, or take zero2",
        ),
        (layout.etp > 1, f"etp {layout.etp} is not executed: experts are not split inside; ep= spreads them"),
        (gathers and layout.sharding == "ddp", f"{gathers}ddp gathers no weights; take zero2 or zero3"),
        (
            gathers and layout.pp > 1,
            f"{gathers}stages of pp {layout.pp} gather their weights once a step, as they are; leave pp at 1",
        ),
        (
            gathers and layout.offload.optimizer > 0,
            f"{gathers}weights in host memory travel as they are; leave them on the GPU",
        ),
        (
            gathers and options.cache_weights,
            f"{gathers}cache_weights=True keeps other FP8 values; compile the engine without it",
        ),
        (
            gathers and not engine.deepwell.ir.layers,
            f"{gathers}{name} has no repeated layers that are gathered one by one",
        ),
    )
    for is_so, reason in reasons:
        if is_so:
            raise UnsupportedError(reason)


@torch.no_grad()
def sync_weights(model: nn.Module) -> None:
    """Give every rank the weights and buffers of rank 0."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.device.type == "meta":
            raise ConfigError(f"{name} is on the meta device; give the model real weights before it is sharded")
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor.data)
    group: Any = dist.group.WORLD
    for same in by_kind.values():
        dist._broadcast_coalesced(group, same, 64 * 2**20, 0)


# ---- DDP ----


class ReplicatedRunner(DistributedRunner):
    """DDP: every rank holds the whole model."""

    def __init__(self, engine: Engine, feed: Feed, device: torch.device, meshes: Meshes, bucket_mib: float) -> None:
        super().__init__(engine, feed, device, meshes)
        how: dict[str, Any] = {_SYNC_BUFFERS: False, "init_sync": False, "gradient_as_bucket_view": True}
        self._ddp = DistributedDataParallel(engine, bucket_cap_mb=bucket_mib, **how)
        self.averages_over = self.world

    @property
    def called(self) -> nn.Module:
        return self._ddp

    def micro_batch(self, index: int, count: int) -> AbstractContextManager[object]:
        return nullcontext() if index == count - 1 else self._ddp.no_sync()


# ---- FSDP2 ----


class ShardedRunner(DistributedRunner):
    """FSDP2: parameters, gradients and optimizer states are sharded, as the layout's ZeRO says."""

    def __init__(
        self, engine: Engine, feed: Feed, device: torch.device, meshes: Meshes, fp8_all_gather: bool = False
    ) -> None:
        super().__init__(engine, feed, device, meshes)
        self._groups = [module for module in engine.deepwell.model.modules() if isinstance(module, FSDPModule)]
        self._zero = meshes.layout.sharding
        self.fp8_gather = Fp8Gather(engine) if fp8_all_gather else None
        if self.fp8_gather is not None:
            self.fp8_gather.follow()
            self.notes.append(self.fp8_gather.note())

    def begin(self) -> None:
        if self.fp8_gather is not None:
            self.fp8_gather.follow()

    def micro_batch(self, index: int, count: int) -> AbstractContextManager[object]:
        is_last = index == count - 1
        if count > 1:
            for group in self._groups:
                group.set_is_last_backward(is_last)
                group.set_requires_all_reduce(is_last, recurse=False)
                if self._zero in ("zero1", "ddp"):
                    group.set_requires_gradient_sync(is_last, recurse=False)
                if self._zero != "zero3":
                    group.set_reshard_after_backward(is_last, recurse=False)
        return nullcontext()


def shard(
    engine: Engine, meshes: Meshes, others: Sequence[tuple[str, Any]] = (), root: nn.Module | None = None
) -> None:
    """Shard an engine's model in place, or a stage of it: its layers each, then the rest.

    `others` are (path, mesh) of inner groups. FSDP2's hooks are around a module's call, a region is inside of it.
    """
    regions: Regions | None = engine.deepwell.regions
    layout, model = meshes.layout, engine.deepwell.model
    root = model if root is None else root
    inside, how = set(root.modules()), fsdp_options(meshes)
    found = [(model.get_submodule(path), mesh) for path, mesh in others]
    for module, mesh in found:
        if module in inside:
            fully_shard(module, mesh=mesh, **how)
    layers = [model.get_submodule(path) for path in (regions.layers if regions is not None else ())]
    layers = [layer for layer in layers if layer in inside]
    for layer in layers:
        fully_shard(layer, mesh=meshes.layers, **how)
    # The rest is needed at both ends: it stays gathered from the embedding to the head's backward.
    fully_shard(root, mesh=meshes.rest, **{**how, "reshard_after_forward": False})
    sum_gradients(root)
    if meshes.device_type == "cuda" and layout.overlap.param_gather is not False and layout.pp == 1:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])


def fsdp_options(meshes: Meshes) -> dict[str, Any]:
    """Arguments of `fully_shard` for one layer."""
    layout = meshes.layout
    offload = CPUOffloadPolicy(pin_memory=meshes.device_type == "cuda") if layout.offload.optimizer else OffloadPolicy()
    return {"reshard_after_forward": layout.sharding == "zero3", "offload_policy": offload}


def sum_gradients(model: nn.Module) -> None:
    """Not the mean: a rank's loss is its part of a sum. Sums are what every backend can do.

    A single rank is left as it is: there FSDP2 divides by any factor that is set, also by 1, in a pass of its own.
    """
    if dist.get_world_size() == 1:
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
