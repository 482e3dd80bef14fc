"""Memory of one pipeline rank of a job at the step's peak. Pure."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from deepwell.planner.estimate_values import GIB, StageMemory
from deepwell.planner.job import StageLayers, StepJob
from deepwell.planner.keeps import LIBRARIES, Keeps, head_bytes, working_bytes
from deepwell.planner.layout import Recompute
from deepwell.planner.memory import backward_bytes, in_flight, saved_bytes
from deepwell.planner.schedule.actions import SPLIT_BACKWARD, V_SHAPED, why_not
from deepwell.planner.schedule.simulate import peak_live
from deepwell.planner.shard import HALF
from deepwell.planner.sharding import REDUCE_BYTES, Parts, StateRules, is_fsdp2, shards, state_rules

# CUDA context, cuBLAS and cuDNN handles; NCCL keeps buffers for each communicator of a rank.
_CONTEXT = 0.9 * GIB
_NCCL_PER_GROUP = 0.25 * GIB
_WORKSPACE = 0.25 * GIB

# Bytes per logit at the loss's peak: bf16 logits (a fused loss writes their gradient over them), and an fp32 copy, its
# softmax and its gradient where each is a tensor.
LOGIT_BYTES = {"fused": 2.0, "compiled": 6.0, "te": 8.0, "megatron": 14.0, "unfused": 14.0}


def rank_memory(job: StepJob, rank: int, keeps: Keeps | None = None) -> StageMemory:
    """What one GPU of pipeline rank `rank` holds at its peak; with an engine's habits, at the moment they make one."""
    layout = job.layout
    stages = job.rank_stages(rank)
    params = rank_params(job, stages)
    over = shards(layout, job.stack)
    rules = state_rules(layout, job.stack)
    per = job.per_param
    whole, state = sum(params), sharded(params, over)
    beside = state if rules.keeps_shards else 0.0  # whole weights are gathered from shards that stay
    trained = trained_share(job)
    kept = layout.offload.optimizer
    activations, transient = _activations(job, rank)
    logits = _logits(job) if any(job.stages[i].has_tail for i in stages) else 0.0
    buffers = _buffers(job, rules)
    copies = 0.0
    has_copies = job.stack.switch("weight_copies", "on") == "on" and job.stack.switch("fp8_params", "off") == "off"
    if has_copies and rules.whole_weights and any(g.is_low for block in job.blocks for g in block.gemms):
        # Row and column copies beside the bf16 weights; where the weights themselves are FP8 these are the weights.
        copies = 2.0 * whole
    groups = sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.dp * layout.cp, layout.ep))
    # Long-lived buffers pack well; activations come and go in many sizes and leave holes.
    on_device = on_device_share(job, rank)
    held = sum(activations.values()) * on_device
    fragmentation = job.stack.constants.holes * held
    found = StageMemory(
        stage=rank,
        params=(whole + beside if rules.whole_weights else state) * per.weight,
        master=trained * state * per.master * (1 - kept),
        moments=trained * state * per.moments * (1 - kept),
        grads=trained * (whole if rules.whole_grads else state) * per.grad,
        quantized_copies=copies,
        activations=tuple((kind, size * on_device) for kind, size in activations.items()),
        logits=logits,
        comm_buffers=buffers,
        workspace=_WORKSPACE + transient,
        context=_CONTEXT + _NCCL_PER_GROUP * groups,
        fragmentation=fragmentation,
    )
    return found if keeps is None or not keeps.fuses_head else _at_its_peak(job, found, keeps)


def _at_its_peak(job: StepJob, memory: StageMemory, keeps: Keeps) -> StageMemory:
    """The same where head and loss run in chunks and gradients come late: the fullest of a step's moments."""
    stages = job.rank_stages(memory.stage)
    head = head_bytes(job, keeps, memory.logits)
    working = max(_working(job, number, keeps) for number in stages)
    # The fused head makes its weight's gradient whole, however the others are sharded.
    whole = head.weight_gradient if memory.logits else 0.0
    each = memory.grads / max(1.0, sum(rank_params(job, stages)))
    memory = replace(memory, grads=memory.grads + max(0.0, whole - each * job.tail.dense_params))
    # GPipe alone has the heads of all micro-batches wait for their backwards; elsewhere each is followed by its own.
    waits = job.layout.pp > 1 and job.layout.schedule == "gpipe" and memory.logits
    others = (job.micro_batches - 1) * head.between if waits else 0.0
    # A later micro-batch's gradient of the head's weight stands beside the sum that it is added to.
    is_added = job.micro_batches > 1 or not keeps.late_gradients
    moments = [(others, working, whole)]
    if memory.logits:
        backward = others + head.between + head.backward + is_added * whole
        moments += [(others + head.forward, 0.0, 0.0), (backward, 0.0, whole)]
    logits, work, early = max(moments, key=lambda moment: moment[0] + moment[1])
    if is_added or job.layout.pp > 1:
        return replace(memory, logits=logits, workspace=work + LIBRARIES)
    # One micro-batch: nearly no gradients while its activations stand, and nearly no activations with all gradients.
    logits, work, early = max(moments, key=sum)
    if memory.activation_bytes + logits + work + early > memory.grads + working:
        return replace(memory, logits=logits, workspace=work + LIBRARIES, grads=early)
    layers = max(1, job.workload.ir.num_layers)
    last = tuple((kind, size / layers) for kind, size in memory.activations)
    return replace(memory, activations=last, logits=0.0, workspace=working + LIBRARIES)


def _working(job: StepJob, number: int, keeps: Keeps) -> float:
    stage = job.stages[number]
    if ("working", stage) not in job.known:
        sizes = [working_bytes(job.blocks[i], again, job, keeps) for i, again, _ in counted(job, stage)]
        job.known["working", stage] = max(sizes, default=0.0)
    return float(job.known["working", stage])


def rank_params(job: StepJob, stages: tuple[int, ...]) -> Parts:
    """Parameters of one rank before sharding over data parallelism."""
    dense = expert = ends = 0.0
    for index in stages:
        stage = job.stages[index]
        for count, block in zip(stage.counts, job.blocks, strict=True):
            dense += count * block.dense_params
            expert += count * block.expert_params
        ends += job.stem.dense_params * stage.has_stem + job.tail.dense_params * stage.has_tail
    return Parts(dense, expert, ends) if is_fsdp2(job.stack) else Parts(dense + ends, expert)


def sharded(params: Parts, over: Parts) -> float:
    """Parameters of one rank's shards."""
    return sum(count / ranks for count, ranks in zip(params, over, strict=True))


def trained_share(job: StepJob) -> float:
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


def _activations(job: StepJob, rank: int) -> tuple[dict[str, float], float]:
    """Bytes kept by kind at the rank's peak, and the backward's working set."""
    held = [_held(job, number) for number in job.rank_stages(rank)]
    sizes = [one.total for one in held]
    live = max(_live(job, rank), key=lambda counts: sum(n * size for n, size in zip(counts, sizes, strict=True)))
    total: dict[str, float] = {}
    for count, one in zip(live, held, strict=True):
        for kind, size in one.kept.items():
            total[kind] = total.get(kind, 0.0) + count * size
    return total, max(one.transient for one in held)


def on_device_share(job: StepJob, rank: int) -> float:
    """The share of a rank's activations that is on the GPU. Two layers' stay: one runs while another's are copied."""
    away = job.layout.offload.activations
    if not away:
        return 1.0
    layers = [index for number in job.rank_stages(rank) for index, _, _ in counted(job, job.stages[number])]
    blocks = [job.blocks[index] for index in layers]
    largest = max(sum(saved_bytes(b, job.layout.recompute, job.kernel, job.dropout).values()) for b in blocks)
    return 1 - away * max(0.0, 1 - 2 * largest / sum(_activations(job, rank)[0].values()))


class _Held(NamedTuple):
    """What one stage keeps of one micro-batch, and the most that one of its backwards needs besides."""

    kept: dict[str, float]
    total: float
    transient: float


def _held(job: StepJob, number: int) -> _Held:
    stage = job.stages[number]
    if ("held", stage) not in job.known:
        kept: dict[str, float] = {}
        transient = 0.0
        for index, choice, count in counted(job, stage):
            block = job.blocks[index]
            for kind, size in saved_bytes(block, choice, job.kernel, job.dropout).items():
                kept[kind] = kept.get(kind, 0.0) + count * size
            transient = max(transient, backward_bytes(block, choice, job.kernel, job.dropout))
        job.known["held", stage] = _Held(kept, sum(kept.values()), transient)
    found: _Held = job.known["held", stage]
    return found


def counted(job: StepJob, stage: StageLayers) -> Iterator[tuple[int, Recompute, int]]:
    """The stage's layers by block and by what they recompute."""
    chosen = job.layout.recompute
    light = Recompute() if chosen.kind == "block" else chosen
    for index, (count, again) in enumerate(zip(stage.counts, stage.recomputed, strict=True)):
        for choice, layers in ((chosen, again), (light, count - again)):
            if layers:
                yield index, choice, layers


def _live(job: StepJob, rank: int) -> tuple[tuple[float, ...], ...]:
    """Micro-batches that each of the rank's stages holds in its heaviest moments."""
    layout, m = job.layout, job.micro_batches
    splits = layout.runs_as in SPLIT_BACKWARD or layout.runs_as in V_SHAPED
    if layout.pp > 1 and splits and not why_not(layout.runs_as, layout.pp, m, layout.virtual_stages):
        # Their stages hold different numbers, and nobody gives a formula: the actions are counted.
        return peak_live(layout.runs_as, layout.pp, m, layout.virtual_stages)[rank]
    return ((in_flight(layout, m, rank),) * layout.virtual_stages,)


def _logits(job: StepJob) -> float:
    """Logits of one micro-batch on the last stage with the copies that the loss makes."""
    per = LOGIT_BYTES[job.loss]
    if job.stack.switch("logits", "sharded") == "gathered" and job.layout.tp > 1:
        # Every rank gathers the whole vocabulary: the pieces, their concatenation and its gradient are tensors too.
        per = (per + 12.0) * job.layout.tp
    # Heads that predict further tokens have their losses one after the other.
    return per * max((one.forward for one in job.tail.passes if one.kind == "loss"), default=0.0)


def _buffers(job: StepJob, rules: StateRules) -> float:
    """Weights and gradients on their way: of two layers at a time, the one that runs and the one before or after."""
    largest = max((block.dense_params + block.expert_params for block in job.blocks), default=0.0)
    if not is_fsdp2(job.stack):
        ends = max(job.stem.dense_params, job.tail.dense_params)
        return 0.0 if rules.whole_weights else HALF * (2 * largest + ends) + 4.0 * largest
    if not rules.keeps_shards:
        return 0.0
    # A layer's gradient is copied into the buffer that is reduced, while the one before is still under way.
    reduced = 2.0 * REDUCE_BYTES[job.stack.switch("reduce_dtype", "fp32")] * largest
    if rules.whole_weights:
        return reduced
    # Embedding and head are the root's: whole from the forward's begin to the backward's end.
    return HALF * (2 * largest + job.stem.dense_params + job.tail.dense_params) + reduced
