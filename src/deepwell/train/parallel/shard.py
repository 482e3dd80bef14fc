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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from deepwell.engine.engine import Engine
from deepwell.engine.regions import Regions
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.planner.layout import Layout
from deepwell.train.feed import Feed
from deepwell.train.parallel.fp8_gather import Fp8Gather
from deepwell.train.parallel.mesh import Meshes
from deepwell.train.parallel.runner import DistributedRunner, named_tensors

# Its name in torch 2.13 and later, and before.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """What a layout leaves open.

    `param_dtype` is what FSDP2 gathers and computes in, `reduce_dtype` what it sums gradients in ("fp32", "bf16",
    "fp16"; None: the parameters' own). `bucket_mib` is the size of DDP's buckets. `sync_weights` has all ranks start
    from rank 0's weights. `fp8_all_gather` has weights that are rounded to MXFP8 anyway travel so (`fp8_gather.py`).
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    bucket_mib: float = 25.0
    sync_weights: bool = True
    fp8_all_gather: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and value not in _DTYPES:
                raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(_DTYPES)}, or leave it out")
        if not self.bucket_mib > 0:
            raise ConfigError(f"bucket_mib is {self.bucket_mib!r}; it must be above 0")

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """FSDP2's."""
        param = None if self.param_dtype is None else _DTYPES[self.param_dtype]
        return MixedPrecisionPolicy(
            param_dtype=param, reduce_dtype=None if self.reduce_dtype is None else _DTYPES[self.reduce_dtype]
        )


def check_shardable(engine: Engine, layout: Layout, settings: ParallelSettings) -> None:
    """Raise UnsupportedError where this engine cannot run in this layout."""
    if engine.deepwell.options.cuda_graphs:
        raise UnsupportedError("cuda_graphs=True goes with one process; compile the engine without it")
    if engine.deepwell.options.cache_weights and layout.sharding == "zero3":
        raise UnsupportedError(
            "cache_weights=True keeps the codes of whole weights on every rank, which zero3 is there to avoid; compile "
            "the engine without it, or take zero2"
        )
    if layout.etp > 1:
        raise UnsupportedError(f"etp {layout.etp} is not executed: experts are not split inside; ep= spreads them")
    if settings.fp8_all_gather:
        _check_fp8_gather(engine, layout)
    is_ddp = layout.sharding == "ddp" and layout.tp == 1
    if is_ddp and (settings.param_dtype or settings.reduce_dtype):
        raise UnsupportedError("param_dtype and reduce_dtype are FSDP2's; take zero1, 2 or 3, or cast the model")


def _check_fp8_gather(engine: Engine, layout: Layout) -> None:
    reasons = (
        (layout.sharding == "ddp", "ddp gathers no weights; take zero2 or zero3"),
        (layout.pp > 1, f"stages of pp {layout.pp} gather their weights once a step, as they are; leave pp at 1"),
        (layout.offload.optimizer > 0, "weights in host memory travel as they are; leave them on the GPU"),
        (engine.deepwell.options.cache_weights, "cache_weights=True keeps other codes; compile the engine without it"),
        (
            not engine.deepwell.ir.layers,
            f"{engine.deepwell.ir.name} has no repeated layers that are gathered one by one",
        ),
    )
    for is_so, reason in reasons:
        if is_so:
            raise UnsupportedError(f"fp8_all_gather: {reason}")


@torch.no_grad()
def sync_weights(model: nn.Module) -> None:
    """Give every rank the weights and buffers of rank 0."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for name, tensor in named_tensors(model):
        if tensor.device.type == "meta":
            raise ConfigError(f"{name} is on the meta device; give the model real weights before it is sharded")
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor.data)
    group: Any = dist.group.WORLD
    for same in by_kind.values():
        dist._broadcast_coalesced(group, same, 64 * 2**20, 0)


# ---- DDP ----


class ReplicatedRunner(DistributedRunner):
    """DDP: every rank holds the whole model."""

    def __init__(
        self, engine: Engine, feed: Feed, device: torch.device, meshes: Meshes, settings: ParallelSettings
    ) -> None:
        super().__init__(engine, feed, device, meshes)
        how: dict[str, Any] = {_SYNC_BUFFERS: False, "init_sync": False, "gradient_as_bucket_view": True}
        self._ddp = DistributedDataParallel(engine, bucket_cap_mb=settings.bucket_mib, **how)
        self.averages_over = self.world

    @property
    def called(self) -> nn.Module:
        return self._ddp

    def micro_batch(self, index: int, count: int) -> AbstractContextManager[object]:
        return nullcontext() if index == count - 1 else self._ddp.no_sync()


# ---- FSDP2 ----


class ShardedRunner(DistributedRunner):
    """FSDP2: parameters, gradients and optimizer states are sharded, as the layout's ZeRO says."""

    def __init__(self, engine: Engine, feed: Feed, device: torch.device, meshes: Meshes) -> None:
        super().__init__(engine, feed, device, meshes)
        self._groups = [module for module in engine.deepwell.model.modules() if isinstance(module, FSDPModule)]
        self._zero = meshes.layout.sharding
        self.fp8_gather: Fp8Gather | None = None

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


def shard(engine: Engine, meshes: Meshes, settings: ParallelSettings, others: Sequence[tuple[str, Any]] = ()) -> None:
    """Shard an engine's model in place: its layers each, then the rest. `others` are (path, mesh) of inner groups.

    FSDP2's hooks are around a module's call, a region is inside of it.
    """
    regions: Regions | None = engine.deepwell.regions
    layout, model = meshes.layout, engine.deepwell.model
    how = fsdp_options(meshes, settings)
    for path, mesh in others:
        fully_shard(model.get_submodule(path), mesh=mesh, **how)
    layers = [model.get_submodule(path) for path in (regions.layers if regions is not None else ())]
    for layer in layers:
        fully_shard(layer, mesh=meshes.layers, **how)
    # The rest is needed at both ends: it stays gathered from the embedding to the head's backward.
    fully_shard(model, mesh=meshes.rest, **{**how, "reshard_after_forward": False})
    sum_gradients(model)
    if meshes.device_type == "cuda" and layout.overlap.param_gather is not False:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])


def fsdp_options(meshes: Meshes, settings: ParallelSettings) -> dict[str, Any]:
    """Arguments of `fully_shard` for one layer."""
    layout = meshes.layout
    offload = CPUOffloadPolicy(pin_memory=meshes.device_type == "cuda") if layout.offload.optimizer else OffloadPolicy()
    return {
        "reshard_after_forward": layout.sharding == "zero3",
        "mp_policy": settings.mixed_precision,
        "offload_policy": offload,
    }


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
