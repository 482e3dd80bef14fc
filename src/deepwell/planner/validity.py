"""Which layouts a model and a machine allow at all, each refusal with its reason. Pure.

    facts = model_facts(ir)
    why_not_tp(facts, 16, hw, replicates_kv=False)  ->  "TP 16: 8 KV heads"

A reason is one line that starts with the degree it refuses; empty where nothing speaks against it.
"""

from dataclasses import dataclass

from deepwell.graph.ir import IR
from deepwell.graph.ops import Attention, GroupedLinear, Linear, TopK
from deepwell.hardware.model import Hardware
from deepwell.planner.layout import Layout
from deepwell.planner.schedule.actions import why_not

# Stacks that copy a KV head to several tensor-parallel ranks where there are fewer heads than ranks (Megatron-Core
# does; DTensor, which Deepwell and torchtitan use, splits and cannot).
REPLICATES_KV = ("megatron", "nemo", "megatron-bridge")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the rules ask of a model. Distinct values in the order of the blocks."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    widths: tuple[int, ...]  # of the MLPs that tensor parallelism splits
    experts: tuple[int, ...]
    top_k: tuple[int, ...]
    expert_widths: tuple[int, ...]
    num_layers: int
    is_latent: bool  # multi-head latent attention: keys and values come from one compressed vector
    max_positions: int | None

    @property
    def is_moe(self) -> bool:
        return bool(self.experts)


def model_facts(ir: IR) -> ModelFacts:
    ops = [op for ops, _ in ir.parts() for op in ops]
    attention = [op for op in ops if isinstance(op, Attention)]
    grouped = [op for op in ops if isinstance(op, GroupedLinear)]
    rows = ("down", "out")
    mlps = [op for op in ops if isinstance(op, Linear) and op.role in ("mlp", "shared_experts") and op.part in rows]
    return ModelFacts(
        heads=_distinct(op.q_heads for op in attention),
        kv_heads=_distinct(op.kv_heads for op in attention),
        widths=_distinct(op.k for op in mlps),
        experts=_distinct(op.experts for op in grouped),
        top_k=_distinct(op.top_k for op in ops if isinstance(op, TopK)),
        expert_widths=_distinct(op.k for op in grouped if op.part == "down"),
        num_layers=ir.num_layers,
        is_latent=any(isinstance(op, Linear) and op.part == "kv_b" for op in ops),
        max_positions=ir.max_positions,
    )


def _distinct(values: object) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))  # type: ignore[call-overload]


def why_not_tp(facts: ModelFacts, tp: int, hw: Hardware, *, replicates_kv: bool) -> str:
    """Heads, widths and the NVLink domain against a tensor-parallel degree."""
    for heads in facts.heads:
        if heads % tp:
            return f"TP {tp}: {heads} heads"
    for heads in facts.kv_heads:
        if heads % tp and not (replicates_kv and tp % heads == 0):
            return f"TP {tp}: {heads} KV heads"
    for width in facts.widths:
        if width % tp:
            return f"TP {tp}: MLP width {width:,}"
    if tp > hw.nvlink_domain and hw.num_gpus > 1:
        return f"TP {tp}: NVLink joins {hw.nvlink_domain} GPUs"
    return ""


def why_not_cp(facts: ModelFacts, cp: int, seq_len: int, kind: str = "ring") -> str:
    """The sequence against a context-parallel degree. Rings give each rank an early and a late piece: 2 cp pieces."""
    if cp == 1:
        return ""
    if kind == "ulysses":
        return next((f"CP {cp}: {heads} heads" for heads in facts.heads if heads % cp), "")
    if seq_len % (2 * cp):
        return f"CP {cp}: a sequence of {seq_len:,} has no {2 * cp} equal pieces"
    return "" if facts.heads else f"CP {cp}: no attention to split the sequence over"


def why_not_ep(facts: ModelFacts, ep: int, etp: int) -> str:
    if ep == etp == 1:
        return ""
    if not facts.is_moe:
        return f"EP {ep}: the model has no experts" if ep > 1 else f"ETP {etp}: the model has no experts"
    for experts in facts.experts:
        if experts % ep:
            return f"EP {ep}: {experts} experts"
    for width in facts.expert_widths:
        if width % etp:
            return f"ETP {etp}: expert width {width:,}"
    return ""


def why_not_layout(facts: ModelFacts, layout: Layout, seq_len: int, global_batch: int) -> str:
    """What speaks against a whole layout besides its single degrees: batch, stages, schedule, the sequence's pieces."""
    rest = global_batch % (layout.dp * layout.micro_batch)
    if rest or global_batch < layout.dp * layout.micro_batch:
        return f"DP {layout.dp} x MBS {layout.micro_batch}: a global batch of {global_batch:,} does not divide"
    if layout.num_stages > max(1, facts.num_layers):
        return f"PP {layout.pp} x VPP {layout.virtual_stages}: {facts.num_layers} layers"
    if layout.sequence_parallel and seq_len % (layout.tp * layout.cp):
        return f"SP {layout.tp}: a sequence of {seq_len:,} does not divide by TP {layout.tp} x CP {layout.cp}"
    reason = why_not(layout.schedule, layout.pp, layout.accumulation(global_batch), layout.virtual_stages)
    return f"PP {layout.pp} {layout.schedule}: {reason}" if reason and layout.pp > 1 else ""
