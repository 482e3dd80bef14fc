"""What of a layout Deepwell's own trainer executes, each refusal with its reason. Pure.

    why_not_executable(layout, workload, stack)    ->  "" or "schedule zbv: the compiled backward is one graph, ..."

The trainer asks before a run, the search for every layout, and `autoplan` of the constraints: what nobody asked for is
left out with its reason among the rejected, what was asked for is refused by name. Other stacks have other limits, and
no reason here: those of Megatron and torchtitan stand in `space.py` and in the exports.
"""

from __future__ import annotations

import math

from deepwell.errors import ConfigError
from deepwell.graph.ops import Attention, Linear, Op
from deepwell.planner.layout import Layout, Offload, Recompute
from deepwell.planner.schedule.actions import SPLIT_BACKWARD
from deepwell.planner.search.constraints import OFFLOADS, Constraints
from deepwell.planner.shard import split_of
from deepwell.planner.stack import Stack
from deepwell.planner.validity import ModelFacts, model_facts
from deepwell.planner.workload import Workload

CONTEXT_KINDS = ("ulysses", "allgather")
SPLIT_PARTS = ("q", "k", "v", "o", "gate", "up", "down")
RECOMPUTED_MODULES = ("core_attn",)

# Elements that share a scale along the axis that is multiplied away; FP8 with other scales wants whole 16 bytes.
_BLOCKS = {"mxfp8": 32, "mxfp6": 32, "mxfp4": 32, "nvfp4": 16, "fp8": 16}
_FP8_BLOCKS = {"1x128": 128}


def is_executed_here(stack: Stack) -> bool:
    """Whether plans of this stack are run by Deepwell's trainer, so that its limits bind."""
    return stack.name == "deepwell"


def why_not_executable(layout: Layout, workload: Workload, stack: Stack) -> str:
    if not is_executed_here(stack):
        return ""
    facts = facts_of(workload)
    count = workload.global_batch // (layout.dp * layout.micro_batch)
    return (
        (why_not_schedule(layout.runs_as) or why_not_count(layout.runs_as, layout.pp, count) if layout.pp > 1 else "")
        or why_not_split(workload, facts, layout.tp)
        or why_not_sequence(workload, layout.tp, is_split=layout.sequence_parallel)
        or why_not_context(workload, facts, layout.cp, layout.context_parallel_kind, layout.tp)
        or why_not_etp(layout.etp)
        or why_not_recompute(layout.recompute)
        or why_not_in_host_memory(layout)
        or why_not_graphs(layout.cuda_graphs, layout.gpus)
    )


def facts_of(workload: Workload) -> ModelFacts:
    """The model's facts, found once for a workload."""
    if "facts" not in workload._resolved:
        workload._resolved["facts"] = model_facts(workload.ir)
    found: ModelFacts = workload._resolved["facts"]
    return found


# ---- one rule each ----


def why_not_schedule(schedule: str) -> str:
    if schedule in SPLIT_BACKWARD:
        return f"schedule {schedule}: the compiled backward is one graph; split in two, each half would run all of it"
    return ""


def why_not_count(schedule: str, pp: int, count: int) -> str:
    """Micro-batches of a step against the pipeline's ranks."""
    is_short = pp > 1 and schedule == "1f1b" and count < pp
    return f"PP {pp}: 1F1B with {count} micro-batches, one for each rank at least" if is_short else ""


def why_not_split(workload: Workload, facts: ModelFacts, tp: int) -> str:
    """Layers, heads and blocks of scales against tensor parallelism: every rank must have whole ones."""
    if tp == 1:
        return ""
    for heads in (*facts.heads, *facts.kv_heads):
        if heads % tp:
            kind = "heads" if heads in facts.heads else "KV heads"
            return f"TP {tp}: {heads} {kind}"
    if not workload.ir.layers:
        return f"TP {tp}: no repeated layers to split"
    for op in (op for block in workload.ir.blocks for op in block.ops):
        if _why_not_split_op(op):
            return f"TP {tp}: {_why_not_split_op(op)}"
    for name, size, granule, fmt in _split_sizes(workload):
        if size % (tp * granule):
            return f"TP {tp}: {size} {name} in {tp} parts are no whole blocks of {granule} ({fmt})"
    return ""


def _why_not_split_op(op: Op) -> str:
    """What tensor parallelism has no rule for; the trainer looks at the model itself besides."""
    if isinstance(op, Attention) and op.params:
        return "attention with sinks"
    is_single = op.role in ("attention", "mlp", "shared_experts") and isinstance(op, Linear) and op.part in SPLIT_PARTS
    if isinstance(op, Linear) and not (is_single or is_whole(op)):
        return f"{op.name} is no single projection of attention or MLP"
    return ""


def is_whole(op: Op) -> bool:
    """A linear that tensor-parallel ranks run whole on their tokens: the router, the gate of all shared experts."""
    return isinstance(op, Linear) and (op.role == "router" or (op.role == "shared_experts" and op.n == 1))


def _split_sizes(workload: Workload) -> tuple[tuple[str, int, int, str], ...]:
    """What tensor parallelism cuts: (words, size, block of the format, format), each once."""
    if "split sizes" not in workload._resolved:
        resolution = workload.precision_policy.resolve(workload.ir)
        found: dict[tuple[str, int, int, str], None] = {}
        for layer in workload.ir.layers:
            for op in workload.ir.blocks[layer.block].ops:
                split = split_of(op) if isinstance(op, Linear) else "none"
                if not isinstance(op, Linear) or split == "none" or is_whole(op):
                    continue
                size, word = (op.n, "columns") if split == "column" else (op.k, "rows")
                for decision in resolution[f"{layer.path}.{op.name}"].values():
                    asked = decision.precision
                    scaling = str(dict(asked.options).get("scaling"))
                    block = _FP8_BLOCKS.get(scaling, _BLOCKS.get(asked.format, 1))
                    found[f"{word} of {op.name}", size, block, asked.format] = None
        workload._resolved["split sizes"] = tuple(found)
    sizes: tuple[tuple[str, int, int, str], ...] = workload._resolved["split sizes"]
    return sizes


def why_not_sequence(workload: Workload, tp: int, *, is_split: bool) -> str:
    """Tensor parallelism splits tokens too, and so do embedding and head."""
    if tp == 1:
        return ""
    if workload.seq_len % tp:
        return f"TP {tp}: a sequence of {workload.seq_len:,} does not divide"
    return "" if is_split else f"TP {tp}: only with sequence parallelism"


def why_not_context(workload: Workload, facts: ModelFacts, cp: int, kind: str, tp: int = 1) -> str:
    """The kind of context parallelism, the sequence, and what attention must be like on each of `tp` ranks."""
    if cp == 1:
        return ""
    if kind not in CONTEXT_KINDS:
        return f"CP {cp}: kind {kind} is not executed, {' and '.join(CONTEXT_KINDS)} are"
    if workload.seq_len % cp:
        return f"CP {cp}: a sequence of {workload.seq_len:,} does not divide"
    if workload.seq_len % (cp * tp):
        return f"CP {cp} x TP {tp}: a sequence of {workload.seq_len:,} does not divide"
    sites = [op for ops, _ in workload.ir.parts() for op in ops if op.role == "mixer" or isinstance(op, Attention)]
    if not facts.heads or any(not isinstance(op, Attention) for op in sites):
        return f"CP {cp}: only layers whose tokens meet in attention"
    for op in sites:
        if isinstance(op, Attention) and (op.params or not op.causal):
            return f"CP {cp}: attention with sinks or without a causal mask"
        if isinstance(op, Attention) and kind == "ulysses":
            # Key and value heads are repeated until every rank has some.
            heads, kv_heads = op.q_heads // tp, max(1, op.kv_heads // tp)
            if heads % cp or heads % math.lcm(kv_heads, cp):
                of_rank = f" on each of TP {tp}" if tp > 1 else ""
                return f"CP {cp}: {heads} heads and {kv_heads} KV heads{of_rank} (ulysses)"
    return ""


def why_not_etp(etp: int) -> str:
    return f"ETP {etp}: experts are not split inside; ep= spreads them" if etp > 1 else ""


def why_not_recompute(recompute: Recompute) -> str:
    others = [name for name in recompute.modules if name not in RECOMPUTED_MODULES]
    if recompute.kind == "selective" and others:
        return f"recompute {recompute}: of a layer's modules only {', '.join(RECOMPUTED_MODULES)} is recomputed alone"
    return ""


def why_not_offload(offload: Offload) -> str:
    shares = {"activations": offload.activations, "optimizer": offload.optimizer}
    parts = (
        f"offload {name} {share:g}: all of them or none" for name, share in shares.items() if share not in (0.0, 1.0)
    )
    return next(parts, "")


def why_not_in_host_memory(layout: Layout) -> str:
    """Optimizer state in host memory is FSDP2's: there must be shards. Activations go there layer by layer."""
    is_sharded = layout.tp > 1 or (layout.dp * layout.cp > 1 and layout.sharding != "ddp")
    if layout.offload.optimizer and not is_sharded:
        return "offload optimizer: only where states are sharded (zero1, 2 or 3 over several GPUs)"
    if layout.offload.activations and layout.cuda_graphs:
        return "offload activations with cuda_graphs: copies to the host run between layers"
    return why_not_away(layout.offload, layout.recompute) or why_not_offload(layout.offload)


def why_not_away(offload: Offload, recompute: Recompute) -> str:
    if offload.activations and recompute.kind in ("full", "block"):
        return f"offload activations with recompute {recompute}: such layers keep their input alone, on the GPU"
    return ""


def why_not_graphs(cuda_graphs: bool, gpus: int) -> str:
    return f"cuda_graphs on {gpus} GPUs: one process only" if cuda_graphs and gpus > 1 else ""


# ---- what a user asked for ----


def check_constraints(constraints: Constraints, stack: Stack) -> None:
    """Refuse constraints that leave nothing to execute. Raises ConfigError that names the constraint."""
    if not is_executed_here(stack):
        return
    kind = constraints.context_parallel_kind
    others = "" if kind is None or kind in CONTEXT_KINDS else f"{' and '.join(CONTEXT_KINDS)} are"
    asked = (
        ("schedule", [why_not_schedule(name) for name in constraints.allowed("schedule") or ()]),
        ("etp", [why_not_etp(count) for count in constraints.allowed("etp") or ()]),
        ("offload", [why_not_offload(OFFLOADS[constraints.offload])] if constraints.offload else []),
        ("context_parallel_kind", [f"context parallelism by {kind}; {others}"] if others else []),
    )
    for name, reasons in asked:
        if reasons and all(reasons):
            raise ConfigError(f"{name}: Deepwell's trainer does not execute this: {reasons[0]}; stack= names another")
