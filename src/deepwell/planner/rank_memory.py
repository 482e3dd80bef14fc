"""Memory of one pipeline rank of a job at the step's peak. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepwell.planner.estimate_values import GIB, StageMemory
from deepwell.planner.layout import Recompute
from deepwell.planner.memory import backward_bytes, in_flight, saved_bytes
from deepwell.planner.shard import HALF

if TYPE_CHECKING:
    from deepwell.planner.estimate import Job

# CUDA context, cuBLAS and cuDNN handles; NCCL keeps buffers for each communicator of a rank.
_CONTEXT = 0.9 * GIB
_NCCL_PER_GROUP = 0.25 * GIB
_WORKSPACE = 0.25 * GIB

# Bytes per logit at the loss's peak: bf16 logits (a fused loss writes their gradient over them), and an fp32 copy, its
# softmax and its gradient where each is a tensor.
LOGIT_BYTES = {"fused": 2.0, "compiled": 6.0, "te": 8.0, "megatron": 14.0, "unfused": 14.0}


def rank_memory(job: Job, rank: int) -> StageMemory:
    """What one GPU of pipeline rank `rank` holds."""
    layout = job.layout
    stages = job.rank_stages(rank)
    dense, expert = rank_params(job, stages)
    shard_d, shard_e = shards(job)
    per = job.per_param
    weights_split = layout.sharding == "zero3"
    grads_split = layout.sharding in ("zero2", "zero3")
    state = dense / shard_d + expert / shard_e
    trained = trained_share(job)
    kept = layout.offload.optimizer
    activations, transient = _activations(job, rank)
    logits = _logits(job) if any(job.stages[i].has_tail for i in stages) else 0.0
    buffers = _gathered(job) if weights_split else 0.0
    is_low = any(g.is_low for block in job.blocks for g in block.gemms)
    copies = 0.0
    has_copies = job.stack.switch("weight_copies", "on") == "on" and job.stack.switch("fp8_params", "off") == "off"
    if is_low and not weights_split and has_copies:
        # Row and column copies beside the bf16 weights; where the weights themselves are FP8 these are the weights.
        copies = 2.0 * (dense + expert)
    groups = sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.dp * layout.cp, layout.ep))
    # Long-lived buffers pack well; activations come and go in many sizes and leave holes.
    held = sum(activations.values()) * (1 - layout.offload.activations)
    fragmentation = job.stack.constants.holes * held
    return StageMemory(
        stage=rank,
        params=(state if weights_split else dense + expert) * per.weight,
        master=trained * state * per.master * (1 - kept),
        moments=trained * state * per.moments * (1 - kept),
        grads=trained * (state if grads_split else dense + expert) * per.grad,
        quantized_copies=copies,
        activations=tuple((kind, size * (1 - layout.offload.activations)) for kind, size in activations.items()),
        logits=logits,
        comm_buffers=buffers,
        workspace=_WORKSPACE + transient,
        context=_CONTEXT + _NCCL_PER_GROUP * groups,
        fragmentation=fragmentation,
    )


def rank_params(job: Job, stages: list[int]) -> tuple[float, float]:
    """Dense and expert parameters of one rank before sharding over data parallelism."""
    dense = expert = 0.0
    for index in stages:
        stage = job.stages[index]
        for count, block in zip(stage.counts, job.blocks, strict=True):
            dense += count * block.dense_params
            expert += count * block.expert_params
        dense += job.stem.dense_params * stage.has_stem + job.tail.dense_params * stage.has_tail
    return dense, expert


def trained_share(job: Job) -> float:
    """Share of the weights that have gradients and optimizer state: all, or LoRA's adapters, rank (k + n) of k n."""
    lora = job.workload.lora
    if lora is None:
        return 1.0
    whole = adapters = 0.0
    for block in job.blocks:
        for gemm in block.gemms:
            whole += gemm.k * gemm.n * gemm.groups
            adapters += lora.rank * (gemm.k + gemm.n) * gemm.groups if gemm.role in lora.targets else 0.0
    return min(1.0, adapters / max(whole, 1.0))


def shards(job: Job) -> tuple[int, int]:
    """Ranks over which optimizer state of dense and of expert weights is spread."""
    layout = job.layout
    if layout.sharding == "ddp":
        return 1, 1
    copies = layout.dp_replicate
    expert = layout.expert_dp // copies if layout.expert_dp % copies == 0 else layout.expert_dp
    return layout.dp * layout.cp // copies, max(1, expert)


def _activations(job: Job, rank: int) -> tuple[dict[str, float], float]:
    """Bytes kept by kind at the rank's peak, and the backward's working set."""
    layout = job.layout
    flight = in_flight(layout, job.micro_batches, rank) * layout.virtual_stages
    stages = job.rank_stages(rank)
    kept: dict[str, float] = {}
    transient = 0.0
    chosen = layout.recompute
    light = Recompute() if chosen.kind == "block" else chosen
    for index, block in enumerate(job.blocks):
        redone = sum(job.stages[s].recomputed[index] for s in stages)
        plain = sum(job.stages[s].counts[index] for s in stages) - redone
        if redone + plain == 0:
            continue
        for choice, count in ((chosen, redone), (light, plain)):
            if count:
                # Virtual stages of a rank are equal up to a layer: each in-flight unit holds the mean of them.
                share = count * flight / layout.virtual_stages
                for kind, size in saved_bytes(block, choice, job.kernel, job.dropout).items():
                    kept[kind] = kept.get(kind, 0.0) + size * share
                transient = max(transient, backward_bytes(block, choice, job.kernel, job.dropout))
    return kept, transient


def _logits(job: Job) -> float:
    """Logits of one micro-batch on the last stage with the copies that the loss makes."""
    per = LOGIT_BYTES[job.loss]
    if job.stack.switch("logits", "sharded") == "gathered" and job.layout.tp > 1:
        # Every rank gathers the whole vocabulary: the pieces, their concatenation and its gradient are tensors too.
        per = (per + 12.0) * job.layout.tp
    # Heads that predict further tokens have their losses one after the other.
    return per * max((one.forward for one in job.tail.passes if one.kind == "loss"), default=0.0)


def _gathered(job: Job) -> float:
    """Fully sharded weights: two layers are whole at a time, the one that runs and the one being gathered."""
    largest = max((block.dense_params + block.expert_params for block in job.blocks), default=0.0)
    ends = max(job.stem.dense_params, job.tail.dense_params)
    return HALF * (2 * largest + ends) + 4.0 * largest
