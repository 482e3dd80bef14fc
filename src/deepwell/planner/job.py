"""A workload on a layout with every switch read: what time and memory of a step are computed from. Pure."""

from dataclasses import dataclass, field, replace
from typing import Any

from deepwell.errors import ConfigError
from deepwell.planner.layout import Layout
from deepwell.planner.memory import BytesPerParam
from deepwell.planner.schedule.actions import rank_stages
from deepwell.planner.shard import LocalBlock, RankSizes, local_block
from deepwell.planner.sharding import splits_ends
from deepwell.planner.stack import Stack
from deepwell.planner.workload import OPTIMIZERS, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """One virtual stage: how many layers of each variant, and whether the ends of the model are in it."""

    counts: tuple[int, ...]  # by variant
    recomputed: tuple[int, ...]  # of them, layers that recompute (block recomputation)
    has_stem: bool
    has_tail: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob:
    """A workload on a layout with all switches read: what time and memory are computed from."""

    workload: Workload
    layout: Layout
    stack: Stack
    micro_batches: int
    stages: tuple[StageLayers, ...]
    blocks: tuple[LocalBlock, ...]  # by variant
    stem: LocalBlock
    tail: LocalBlock
    per_param: BytesPerParam
    kernel: str
    dropout: bool
    loss: str
    # Answers found once for all ranks; not an argument, so that `replace` starts afresh.
    known: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def rank_stages(self, rank: int) -> tuple[int, ...]:
        """Virtual stages of a pipeline rank: looped, or folded in a V."""
        return rank_stages(self.layout.schedule, self.layout.pp, self.layout.virtual_stages, rank)


def read_job(workload: Workload, layout: Layout, stack: Stack) -> StepJob:
    """Shapes of every block on one rank, and the switches that the layout leaves to the stack."""
    micro_batches = layout.accumulation(workload.global_batch)
    _check(workload, layout)
    dropout = stack.switch("dropout", "off") == "on"
    load = 1.0 if workload.forced_balance else max(workload.imbalance, 1.0)
    if workload.capacity_factor is not None:
        load = min(load, workload.capacity_factor) if workload.capacity_factor >= 1 else workload.capacity_factor
    # What context parallelism makes of keys and values, where the engine keeps the result for the backward.
    is_kept = layout.cp > 1 and stack.switch("gathered_kv", "again") == "kept"
    kinds = {"allgather": "gathered", "ulysses": "repeated"} if is_kept else {}
    sizes = RankSizes(
        micro_batch=layout.micro_batch, seq_len=workload.seq_len, tp=layout.tp, cp=layout.cp, ep=layout.ep,
        etp=layout.etp, sequence_parallel=layout.sequence_parallel and layout.tp > 1, expert_load=load,
        dropout=dropout, keeps_fp8=stack.switch("keeps_fp8", "on") == "on",
        eager_norms=stack.switch("norms", "fused") == "unfused",
        recomputes_pointwise=stack.switch("compile", "off") == "on",
        keeps_inputs=stack.switch("keeps_inputs", "off") == "on",
        gathers_inputs=stack.switch("sp_inputs", "sharded") == "gathered",
        eager_gates=stack.switch("swiglu", "fused") == "unfused",
        kv_exchange=kinds.get(layout.context_parallel_kind, ""),
    )  # fmt: skip
    ir = workload.ir
    ends = tuple((op.name, workload.end_formats(op)) for op in (*ir.stem, *ir.tail) if op.kind == "linear")
    end_sizes = sizes
    if splits_ends(layout, stack):
        end_sizes = replace(sizes, tp=1, cp=layout.cp * layout.tp, sequence_parallel=False)
    return StepJob(
        workload=workload,
        layout=layout,
        stack=stack,
        micro_batches=micro_batches,
        stages=_stages(workload, layout),
        blocks=tuple(local_block(ir.blocks[v.block].ops, v.formats, sizes) for v in workload.variants()),
        stem=local_block(ir.stem, ends, end_sizes),
        tail=local_block(ir.tail, ends, end_sizes),
        per_param=_per_param(workload, stack),
        kernel=workload.attention_kernel or stack.switch("attention", "best"),
        dropout=dropout,
        loss=stack.switch("loss", "fused"),
    )


def _check(workload: Workload, layout: Layout) -> None:
    if workload.seq_len % layout.cp:
        raise ConfigError(f"seq_len {workload.seq_len} is no multiple of cp {layout.cp}")
    experts = workload.ir.num_experts
    if experts and experts % layout.ep:
        raise ConfigError(f"ep {layout.ep} does not divide the model's {experts} experts")
    if layout.ep > 1 and not experts:
        raise ConfigError(f"ep is {layout.ep}, but {workload.ir.name} has no experts")


def _per_param(workload: Workload, stack: Stack) -> BytesPerParam:
    state = OPTIMIZERS[workload.optimizer]
    moments = state.moments
    if stack.switch("latent_attention_moments") == "bf16" and workload.optimizer == "adamw":
        # Megatron-Bridge's recipes of DeepSeek-V3 and Moonlight keep both moments in bf16 (precision-aware optimizer).
        is_latent = any(op.part == "kv_b" for block in workload.ir.blocks for op in block.ops)
        moments = 4.0 if is_latent else moments
    total = stack.switch("state_bytes_per_param")
    grad = {"fp32": 4.0, "bf16": 2.0, "both": 6.0}[stack.switch("grad_dtype", "fp32")]
    if total:
        grad = max(0.0, float(total) - 2.0 - state.master - moments)
    return BytesPerParam(
        weight=4.0 if workload.optimizer == "adamw_fp32" else 2.0,
        grad=grad,
        master=state.master,
        moments=moments,
    )


def _stages(workload: Workload, layout: Layout) -> tuple[StageLayers, ...]:
    variants = workload.variants()
    variant_of = [0] * workload.ir.num_layers
    for index, variant in enumerate(variants):
        for layer in variant.layers:
            variant_of[layer] = index
    stages, start = [], 0
    sizes = layout.layers_of_stages(workload.ir.num_layers)
    chosen = layout.recompute
    for number, size in enumerate(sizes):
        counts, again = [0] * len(variants), [0] * len(variants)
        for place, layer in enumerate(range(start, start + size)):
            counts[variant_of[layer]] += 1
            is_again = chosen.kind == "full" or (chosen.kind == "block" and place < (chosen.layers or 0))
            again[variant_of[layer]] += is_again
        ends = {"has_stem": number == 0, "has_tail": number == len(sizes) - 1}
        stages.append(StageLayers(counts=tuple(counts), recomputed=tuple(again), **ends))
        start += size
    return tuple(stages)
