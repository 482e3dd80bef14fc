"""What of a layout Deepwell's own trainer executes, each refusal with its reason. Pure.

    why_not_executable(layout, workload, stack)    ->  "" or "schedule zbv: the compiled backward is one graph, ..."

The trainer asks before a run, the search for every layout, and `autoplan` of the constraints: what nobody asked for is
left out with its reason among the rejected, what was asked for is refused by name. Other stacks have other limits, and
no reason here: those of Megatron and torchtitan stand in `space.py` and in the exports.
"""

from __future__ import annotations

from deepwell.errors import ConfigError
from deepwell.graph.ops import Linear
from deepwell.planner.actions import SPLIT_BACKWARD
from deepwell.planner.constraints import OFFLOADS, Constraints
from deepwell.planner.layout import Layout, Offload, Recompute
from deepwell.planner.shard import split_of
from deepwell.planner.stack import Stack
from deepwell.planner.validity import ModelFacts, model_facts, why_not_cp
from deepwell.planner.workload import Workload
from deepwell.precision.gemm_format import Precision

CONTEXT_KINDS = ("ulysses", "allgather")
RECOMPUTED_MODULES = ("core_attn",)

# Elements that share a scale along the axis that is multiplied away; FP8 with other scales wants whole 16 bytes.
_BLOCKS = {"mxfp8": 32, "mxfp6": 32, "mxfp4": 32, "nvfp4": 16, "fp8": 16}
_FP8_BLOCKS = {"1x128": 128}


def is_executed_here(stack: Stack) -> bool:
    """Whether plans of this stack are run by Deepwell's trainer, so that its limits bind."""
    return stack.name == "deepwell"


def why_not_executable(layout: Layout, workload: Workload, stack: Stack) -> str:
    """Why Deepwell's trainer cannot execute the layout; "" where it can, and for other stacks."""
    if not is_executed_here(stack):
        return ""
    facts = facts_of(workload)
    return (
        (why_not_schedule(layout.schedule) if layout.pp > 1 else "")
        or why_not_split(workload, facts, layout.tp)
        or why_not_sequence(workload, layout.tp, layout.cp, is_split=layout.sequence_parallel)
        or why_not_context(facts, layout.cp, layout.tp, workload.seq_len, layout.context_parallel_kind)
        or why_not_etp(layout.etp)
        or why_not_recompute(layout.recompute)
        or why_not_offload(layout.offload)
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


def why_not_split(workload: Workload, facts: ModelFacts, tp: int) -> str:
    """Heads and blocks of scales against tensor parallelism: every rank must have whole ones."""
    if tp == 1:
        return ""
    for heads in (*facts.heads, *facts.kv_heads):
        if heads % tp:
            kind = "heads" if heads in facts.heads else "KV heads"
            return f"TP {tp}: {heads} {kind}"
    for name, size, block, fmt in _split_sizes(workload):
        if size % (tp * block):
            return f"TP {tp}: {size} {name} in {tp} parts are no whole blocks of {block} ({fmt})"
    return ""


def _split_sizes(workload: Workload) -> tuple[tuple[str, int, int, str], ...]:
    """What tensor parallelism cuts: (words, size, block of the format, format), each once."""
    if "split sizes" not in workload._resolved:
        resolution = workload.precision_policy.resolve(workload.ir)
        found: dict[tuple[str, int, int, str], None] = {}
        for layer in workload.ir.layers:
            for op in workload.ir.blocks[layer.block].ops:
                split = split_of(op) if isinstance(op, Linear) else "none"
                if not isinstance(op, Linear) or split == "none":
                    continue
                size, word = (op.n, "columns") if split == "column" else (op.k, "rows")
                for decision in resolution[f"{layer.path}.{op.name}"].values():
                    block = _block(decision.precision)
                    found[f"{word} of {op.name}", size, block, decision.precision.format] = None
        workload._resolved["split sizes"] = tuple(found)
    sizes: tuple[tuple[str, int, int, str], ...] = workload._resolved["split sizes"]
    return sizes


def _block(precision: Precision) -> int:
    scaling = dict(precision.options).get("scaling")
    return _FP8_BLOCKS.get(str(scaling), _BLOCKS.get(precision.format, 1))


def why_not_sequence(workload: Workload, tp: int, cp: int, *, is_split: bool) -> str:
    """Tensor parallelism splits tokens too, and so do embedding and head."""
    if tp == 1:
        return ""
    if workload.seq_len % (tp * cp):
        return f"TP {tp}: a sequence of {workload.seq_len:,} does not divide by TP {tp} x CP {cp}"
    return "" if is_split else f"TP {tp}: only with sequence parallelism"


def why_not_context(facts: ModelFacts, cp: int, tp: int, seq_len: int, kind: str) -> str:
    """The kind of context parallelism, and heads against all ranks that share them."""
    if cp == 1:
        return ""
    if kind not in CONTEXT_KINDS:
        return f"CP {cp}: kind {kind} is not executed, {' and '.join(CONTEXT_KINDS)} are"
    if kind == "ulysses":
        for heads in (*facts.heads, *facts.kv_heads):
            if heads % (cp * tp):
                word = "heads" if heads in facts.heads else "KV heads"
                return f"CP {cp}: {heads} {word} do not divide by CP {cp} x TP {tp} (ulysses)"
    return why_not_cp(facts, cp, seq_len, kind)


def why_not_etp(etp: int) -> str:
    return f"ETP {etp}: experts are not split inside; ep= spreads them" if etp > 1 else ""


def why_not_recompute(recompute: Recompute) -> str:
    others = [name for name in recompute.modules if name not in RECOMPUTED_MODULES]
    if recompute.kind == "selective" and others:
        return f"recompute {recompute}: of a layer's modules only {', '.join(RECOMPUTED_MODULES)} is recomputed alone"
    return ""


def why_not_offload(offload: Offload) -> str:
    if offload.activations:
        return "offload activations: they stay on the GPU; recompute= frees them"
    if offload.optimizer not in (0.0, 1.0):
        return f"offload optimizer {offload.optimizer:g}: all of its state or none"
    return ""


# ---- what a user asked for ----


def check_constraints(constraints: Constraints, stack: Stack) -> None:
    """Refuse constraints that leave nothing to execute. Raises ConfigError that names the constraint."""
    if not is_executed_here(stack):
        return
    asked = (
        ("schedule", [why_not_schedule(name) for name in constraints.allowed("schedule") or ()]),
        ("etp", [why_not_etp(count) for count in constraints.allowed("etp") or ()]),
        ("offload", [why_not_offload(OFFLOADS[constraints.offload])] if constraints.offload else []),
        ("context_parallel_kind", _kind_reasons(constraints.context_parallel_kind)),
    )
    for name, reasons in asked:
        if reasons and all(reasons):
            raise ConfigError(f"{name}: Deepwell's trainer does not execute this: {reasons[0]}; stack= names another")


def _kind_reasons(kind: str | None) -> list[str]:
    if kind is None:
        return []
    return [] if kind in CONTEXT_KINDS else [f"context parallelism by {kind}; {' and '.join(CONTEXT_KINDS)} are"]
