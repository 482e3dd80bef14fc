"""Bytes of one rank over a training step: what must be there at the peak, by what it holds. Pure.

    allocated = weights + master + moments + gradients + copies + activations(in flight) + logits + buffers + workspace

Activations of a layer follow from the IR's edges: a tensor stays if a backward reads it (a linear layer its input, a
norm its input, a gated activation both inputs, attention q, k, v and its output). For GPT with dropout this gives the
34 s b h of Korthikanti et al. (arXiv 2205.05198), 10 + 24/t under tensor parallelism.
"""

from dataclasses import dataclass

from deepwell.planner.efficiency import UNFUSED_BYTES
from deepwell.planner.layout import Layout, Recompute
from deepwell.planner.shard import HALF, LocalBlock

# Groups that recomputing a module frees; see Saved.group.
_FREED = {
    "core_attn": {"scores"},
    "layernorm": {"layernorm"},
    "mlp": {"mlp"},
    "moe_act": {"moe_act"},
    "moe": {"moe", "moe_act"},
    "mla_up_proj": {"mla_up_proj"},
    "shared_experts": {"mlp"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerParam:
    """Bytes that one parameter costs: the weight, its gradient, and what the optimizer keeps."""

    weight: float
    grad: float
    master: float
    moments: float


def saved_bytes(block: LocalBlock, recompute: Recompute, kernel: str, dropout: bool) -> dict[str, float]:
    """What one layer keeps of one micro-batch, by kind."""
    if recompute.kind in ("full", "block"):
        return {"stream": block.input_bytes}
    modules = recompute.modules or (("core_attn",) if recompute.kind == "selective" else ())
    freed: set[str] = set()
    if recompute.kind == "selective":
        for module in modules:
            freed |= _FREED.get(module, set())
    if "half_matmuls" in modules:
        # torchtitan's per-op policy: the layer's input, attention's output and every second product stay.
        products = HALF * sum(g.m * g.n * g.groups for g in block.gemms)
        attention = sum(HALF * a.batch * a.heads * a.q_len * a.v_dim for a in block.attention)
        return {"stream": block.input_bytes, "attention": attention, "products": 0.5 * products}
    kept: dict[str, float] = {}
    for tensor in block.saved:
        if tensor.group not in freed:
            kept[tensor.kind] = kept.get(tensor.kind, 0.0) + tensor.nbytes
    if kernel == "flash1" and "qkv" not in freed:
        # FlashAttention 1 takes q, k and v packed: a copy beside what rotation and projection left.
        packed = sum(a.batch * a.q_len * a.qk_dim * (a.heads + 2 * a.kv_heads) for a in block.attention)
        kept["attention"] = kept.get("attention", 0.0) + 0.5 * HALF * packed
    if kernel in UNFUSED_BYTES and "scores" not in freed:
        # Softmax's result, dropout's mask and its result (they are there at probability 0 too); a softmax in fp32 keeps
        # its own copy besides.
        each = 9.0 if kernel == "unfused" else 5.0
        scores = sum(att.scores for att in block.attention)
        kept["scores"] = kept.get("scores", 0.0) + each * scores
    return kept


def backward_bytes(block: LocalBlock, recompute: Recompute, kernel: str, dropout: bool) -> float:
    """The working set of one layer's backward: two gradients of its widest tensor, and what it recomputes."""
    working = 2 * HALF * block.widest
    if recompute.kind in ("full", "block"):
        working += sum(saved_bytes(block, Recompute(), kernel, dropout).values())
    elif recompute.kind == "selective":
        everything = sum(saved_bytes(block, Recompute(), kernel, dropout).values())
        working += everything - sum(saved_bytes(block, recompute, kernel, dropout).values())
    if kernel in UNFUSED_BYTES:
        working += 2 * HALF * sum(att.scores for att in block.attention)
    return working


def in_flight(layout: Layout, micro_batches: int, rank: int) -> float:
    """Micro-batches whose activations pipeline rank `rank` holds at its peak, one of v virtual stages counting 1/v."""
    pp, v = layout.pp, layout.virtual_stages
    if layout.schedule == "gpipe":
        return float(micro_batches)
    if layout.schedule in ("zero_bubble", "zbv"):
        return float(min(micro_batches, pp))
    if layout.schedule == "dualpipev":
        return float(min(micro_batches, pp + 0.5))
    if v > 1:
        return min(float(micro_batches), ((v - 1) * pp + 2 * (pp - rank - 1) + 1) / v)
    return float(min(micro_batches, pp - rank))
