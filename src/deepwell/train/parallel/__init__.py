"""How a step runs on a layout: one process, data, tensor, pipeline, context and expert parallelism.

runner = parallelize(engine, plan.layout, feed=Feed(engine.deepwell.model), device=device)
loss = runner.run(batches, num_items=n)          # forward and backward of this rank's micro-batches
norm = runner.grad_norm(1.0)                     # over all ranks, and clipped
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from deepwell.engine.engine import Engine
from deepwell.errors import UnsupportedError
from deepwell.planner.executable import why_not_in_host_memory
from deepwell.planner.layout import Layout
from deepwell.train.feed import Feed
from deepwell.train.parallel.mesh import Meshes, check_world, make_meshes
from deepwell.train.parallel.runner import Runner
from deepwell.train.parallel.shard import ReplicatedRunner, ShardedRunner, check_shardable, shard, sync_weights


def parallelize(
    engine: Engine,
    layout: Layout,
    *,
    feed: Feed,
    device: torch.device,
    fp8_all_gather: bool = False,
    bucket_mib: float = 25.0,
) -> Runner:
    """Spread an engine over the running processes, in place, and return what runs its steps.

    `fp8_all_gather`: weights travel in FP8 where they may (`fp8_gather.py`). `bucket_mib` is the size of DDP's buckets.

    Call it before the engine's first call and before the optimizer is made. Raises ConfigError where the layout is of
    another number of processes, UnsupportedError, with the reason, where it cannot be executed.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    check_world(layout, world)
    if reason := why_not_in_host_memory(layout):
        raise UnsupportedError(f"layout {layout} cannot be executed: {reason}")
    runner = Runner(engine, feed, device)
    if world > 1:
        runner = _spread(engine, layout, feed, device, fp8_all_gather, bucket_mib)
    elif fp8_all_gather:
        runner.notes.append("fp8_all_gather: one process has nothing to gather")
    if layout.offload.activations:
        (engine.deepwell.regions or engine.deepwell.use_regions()).offload()
    return runner


def _spread(
    engine: Engine, layout: Layout, feed: Feed, device: torch.device, fp8_all_gather: bool, bucket_mib: float
) -> Runner:
    check_shardable(engine, layout, fp8_all_gather)
    meshes = make_meshes(layout, device.type)
    sync_weights(engine.deepwell.model)
    if layout.pp > 1:
        from deepwell.train.parallel.pipeline import PipelineRunner

        return PipelineRunner(engine, feed, device, meshes)
    notes: list[str] = []
    inner: list[tuple[str, DeviceMesh]] = []
    is_inside = layout.tp > 1 or layout.cp > 1 or layout.ep > 1
    if is_inside:
        from deepwell.train.parallel.context import spread_attention
        from deepwell.train.parallel.experts import spread_experts
        from deepwell.train.parallel.tensor import split_tokens, split_weights

        split = split_weights(engine, meshes, notes) if layout.tp > 1 else None
        if layout.cp > 1:
            spread_attention(engine, meshes, notes)
        inner = spread_experts(engine, meshes)
        if split is not None:
            split_tokens(engine, meshes, split, [engine.deepwell.ir.layers[0].path])
    elif engine.deepwell.ir.layers:
        engine.deepwell.use_regions()
    if layout.sharding == "ddp" and not is_inside:
        return ReplicatedRunner(engine, feed, device, meshes, bucket_mib)
    shard(engine, meshes, inner)
    runner = ShardedRunner(engine, feed, device, meshes, fp8_all_gather)
    runner.notes += notes
    return runner


__all__ = ["Meshes", "Runner", "check_world", "make_meshes", "parallelize"]
