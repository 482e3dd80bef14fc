"""One training step's time and memory on one layout: the planner's answer to "how fast, and does it fit?". Pure.

estimate(workload, hw, layout, stack) -> Estimate
"""

from __future__ import annotations

from deepwell.errors import ConfigError
from deepwell.hardware.model import Hardware
from deepwell.planner.estimate_values import GIB, PARTS, Estimate, StageMemory
from deepwell.planner.layout import Layout
from deepwell.planner.stack import Stack, deepwell_stack
from deepwell.planner.workload import OPTIMIZERS, Workload

__all__ = ["GIB", "PARTS", "Estimate", "StageMemory", "estimate"]


def estimate(
    workload: Workload, hw: Hardware, layout: Layout, stack: Stack | None = None, *, simulate: bool = True
) -> Estimate:
    """Predict one step. Raises ConfigError where the layout cannot run this workload on this machine."""
    stack = stack or deepwell_stack()
    if layout.gpus != hw.num_gpus:
        raise ConfigError(f"layout needs {layout.gpus} GPUs ({layout}); {hw.name} has {hw.num_gpus}")
    micro_batches = layout.accumulation(workload.global_batch)
    layers = layout.layers_of_stages(workload.ir.num_layers)
    ir, gpu = workload.ir, hw.gpus[0]
    peak = gpu.peak_tflops("bf16")
    if peak is None:
        raise ConfigError(f"{gpu.name} has no known bf16 peak; name a machine that has one, or probe --measure")
    own = gpu.peak_tflops(workload.main_format) or peak
    flops = ir.train_flops(workload.global_batch, workload.seq_len)
    compute = flops / layout.gpus / (0.5 * own.value * 1e12)
    again = compute / 3 if layout.recompute.kind == "full" else 0.0
    bubble = (compute + again) * (layout.pp - 1) / (micro_batches * layout.virtual_stages)
    seconds = dict.fromkeys(PARTS, 0.0)
    seconds.update(gemm_fwd=compute / 3, gemm_dgrad=compute / 3, gemm_wgrad=compute / 3, recompute=again, bubble=bubble)
    step = sum(seconds.values())
    tokens = workload.tokens_per_step
    memory = _first_memory(workload, layout, max(layers) * layout.virtual_stages / ir.num_layers)
    return Estimate(
        step_s=step,
        breakdown=tuple(seconds.items()),
        tokens_per_s_per_gpu=tokens / step / layout.gpus,
        mfu_bf16=flops / layout.gpus / step / (peak.value * 1e12),
        mfu_weighted=flops / layout.gpus / step / (own.value * 1e12),
        model_flops_per_token=flops / tokens,
        memory=memory,
        limit_gib=(hw.memory_bytes or 0) / GIB,
        tier="spec",
        error_band=0.5,
        notes=stack.notes,
    )


def _first_memory(workload: Workload, layout: Layout, share: float) -> tuple[StageMemory, ...]:
    state = OPTIMIZERS[workload.optimizer]
    params = workload.ir.num_params * share / layout.tp
    shard = layout.dp // layout.dp_replicate * layout.cp
    opt = 1 if layout.sharding == "ddp" else shard
    hidden = max(op.width for op in workload.ir.stem if op.kind == "embedding")  # type: ignore[attr-defined]
    per_layer = (2 if layout.recompute.kind == "full" else 34) * hidden * workload.seq_len * layout.micro_batch
    stages = []
    for stage in range(layout.pp):
        in_flight = layout.pp - stage
        acts = per_layer * share * workload.ir.num_layers * in_flight / layout.tp / layout.cp
        stages.append(
            StageMemory(
                stage=stage,
                params=2 * params / (shard if layout.sharding == "zero3" else 1),
                master=state.master * params / opt,
                moments=state.moments * params / opt,
                grads=4 * params / (shard if layout.sharding in ("zero2", "zero3") else 1),
                quantized_copies=0.0,
                activations=(("layers", acts),),
                logits=0.0,
                comm_buffers=0.5 * GIB,
                workspace=0.25 * GIB,
                context=1.5 * GIB,
                fragmentation=0.0,
            )
        )
    return tuple(stages)
