"""Seconds of one block for one micro-batch on one rank, forward and backward, by what they are spent on. Pure.

Communication here is what a block waits for: tensor, context and expert parallelism. Data and pipeline parallelism
belong to the step (`estimate.py`).
"""

import math
from dataclasses import dataclass

from deepwell.planner.comm import Network, all_reduce_s, all_to_all_s, gather_s, send_s
from deepwell.planner.efficiency import DeviceSpeed, attention_s, bytes_s, linear_s
from deepwell.planner.job import StepJob
from deepwell.planner.layout import Layout, Recompute
from deepwell.planner.overlap import hides
from deepwell.planner.shard import HALF, LocalAttention, LocalBlock, LocalGemm
from deepwell.planner.stack import Stack

# Bytes per element of a tensor that is quantized, for both its row and its column copy: read it and write two copies;
# a current scale reads it once more for its maximum, NVFP4 does so too and rotates one copy (Hadamard).
_QUANTIZE_BYTES = {"fp8": 4.0, "fp8_current": 6.0, "mxfp8": 4.1, "mxfp6": 4.1, "nvfp4": 6.2, "mxfp4": 6.2}

# Bytes per logit of cross entropy, forward and backward: in one pass each over bf16 logits; what a compiler makes of
# it; Transformer Engine's and Megatron's vocabulary-parallel losses; or in fp32 with a pass for each of maximum,
# difference, exponential, sum and division.
LOSS_BYTES = {
    "fused": (4.0, 4.0), "compiled": (8.0, 6.0), "te": (8.0, 6.0), "megatron": (14.0, 8.0), "unfused": (30.0, 14.0)
}  # fmt: skip

# Times that routed rows are copied on each side of the experts: the plain dispatcher sorts by rank, exchanges, sorts by
# expert and pads; the fused ones write rows to their place once and pad.
_PERMUTES = {"alltoall": 3.5, "deepep": 2.5, "hybridep": 1.75}

# Share of the bf16 GEMM rate that chunked state-space scans reach: small products between scans, always in bf16.
# Their Triton kernels do without Blackwell's tensor memory, so the share is far lower there.
_SCAN = {8: 0.25, 9: 0.25}
_SCAN_LATER = 0.05

# Share of tensor- or expert-parallel communication that stays visible when it is overlapped with GEMMs (first and last
# chunk of a pipelined collective), and the slow-down of what runs beside it: NCCL holds 16 to 24 of 132 SMs.
OVERLAPPED = 0.30
_COLLECTIVE_LAUNCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Everything that turns shapes into seconds."""

    job: StepJob
    device: DeviceSpeed
    network: Network
    recompute: Recompute

    @property
    def stack(self) -> Stack:
        return self.job.stack

    @property
    def layout(self) -> Layout:
        return self.job.layout

    def hides(self, name: str) -> bool:
        return hides(self.job.layout, self.job.stack, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTime:
    """Seconds of a block or a stage and a micro-batch; the parts' names are those of an estimate's breakdown."""

    forward: dict[str, float]
    backward: dict[str, float]
    wgrad: float  # the part of the backward that only the weights need

    @property
    def f(self) -> float:
        return sum(self.forward.values())

    @property
    def b(self) -> float:
        return sum(self.backward.values())

    @property
    def w(self) -> float:
        """What a schedule that splits the backward may put off."""
        return min(self.wgrad, self.b)


def price_block(block: LocalBlock, p: Pricing) -> BlockTime:
    constants = p.stack.constants
    scale = constants.gemm_scale
    gemm_f = gemm_d = gemm_w = 0.0
    each: list[tuple[LocalGemm, float]] = []
    for gemm in block.gemms:
        fwd, dgrad, wgrad = linear_s(p.device, gemm)
        if p.job.workload.lora is not None:
            wgrad = 0.0  # the weights are frozen, and the adapters' own products are thin
        gemm_f, gemm_d, gemm_w = gemm_f + scale * fwd, gemm_d + scale * dgrad, gemm_w + scale * wgrad
        each.append((gemm, scale * fwd))
    attention = [attention_s(p.device, a, p.job.kernel, p.job.dropout) for a in block.attention]
    squares = [_square(p, a) for a in block.attention]
    att_f, att_b = (
        scale * sum(square * each[i] for square, each in zip(squares, attention, strict=True)) for i in (0, 1)
    )
    mixer = block.matmul_flops / (_SCAN.get(p.device.generation, _SCAN_LATER) * p.device.rate("bf16"))
    point_f, point_b, loss_f, loss_b = _passes(block, p)
    quant_f, quant_b = _quantize(block, p)
    tp_f, tp_b = _tensor_parallel(block, p, gemm_f)
    cp_f, cp_b = _context_parallel(block, p, att_f, att_b)
    ep_f, ep_b = _expert_parallel(block, p)
    forward = {
        "gemm_fwd": gemm_f + mixer, "attention": att_f, "pointwise": point_f, "quantize": quant_f, "loss": loss_f,
        "tp": tp_f, "cp": cp_f, "ep": ep_f,
    }  # fmt: skip
    backward = {
        "gemm_dgrad": gemm_d + 2 * mixer, "gemm_wgrad": gemm_w, "attention": att_b, "pointwise": point_b,
        "quantize": quant_b, "loss": loss_b, "tp": tp_b, "cp": cp_b, "ep": ep_b,
        "recompute": _recompute(p, each, att_f, point_f, forward, block),
    }  # fmt: skip
    if block.attention or block.gemms:
        host_f, host_b = _host_s(block, p)
        if backward["recompute"]:
            host_b += host_f
        blocking = p.stack.switch("launch_blocking") == "on"  # every launch waits for its kernel: nothing runs ahead
        forward["host"] = host_f if blocking else _waits(sum(forward.values()), host_f)
        backward["host"] = host_b if blocking else _waits(sum(backward.values()), host_b)
    return BlockTime(forward=forward, backward=backward, wgrad=gemm_w)


def _square(p: Pricing, a: LocalAttention) -> float:
    """Pairs that are computed over those that the mask leaves: a mask that is a tensor skips nothing."""
    has_mask = p.layout.cp > 1 and p.layout.context_parallel_kind == "allgather"
    is_skipped = not has_mask or p.stack.switch("gathered_kv", "again") != "kept"
    return 1.0 if is_skipped else a.q_len * a.kv_len / a.pairs


def _waits(gpu: float, host: float) -> float:
    """What the GPU waits for a host that runs ahead when it can: a smooth maximum, for layers differ in their ops."""
    return float((gpu**4 + host**4) ** 0.25 - gpu)


# Kernels that a captured graph still costs the host, and what routing adds to a layer: sorting, counting, splits of the
# all-to-all, and with the plain dispatcher a wait for the counts on the host.
_GRAPH_SHARE = 0.03
_EAGER_OPS = 8
_ROUTING_KERNELS = {"alltoall": 40, "deepep": 20, "hybridep": 12}


def _host_s(block: LocalBlock, p: Pricing) -> tuple[float, float]:
    """Host time to launch the block forward and backward: kernels times the stack's time for each."""
    graphs = p.stack.switch("cuda_graphs", "layers" if p.layout.cuda_graphs else "off")
    parts = set(graphs.split("+"))
    # Experts are looped over below Python, which costs a fraction of a framework op for each.
    experts = sum((2 if g.is_low else 1) * (1 + 0.15 * g.groups) for g in block.gemms if g.role == "experts")
    dense = float(sum(2 if g.is_low else 1 for g in block.gemms if g.role != "experts"))
    # Eager code runs a norm or a rotation as many small ops.
    dense += sum(_EAGER_OPS if one.is_eager else 1 for one in block.passes)
    dense += len(block.attention) + block.gathers + block.reduces
    routing = float(_ROUTING_KERNELS.get(p.stack.switch("dispatcher", "alltoall"), 40) if block.routed_bytes else 0)
    if p.stack.switch("grouped_gemm", "looped") == "fused":
        experts = min(experts, 8)
    if parts & {"full", "layers"}:
        dense, experts, routing = (_GRAPH_SHARE * x for x in (dense, experts, routing))
    if "attn" in parts:
        dense = (0.3 if block.routed_bytes else _GRAPH_SHARE) * dense
    if parts & {"moe_router", "moe_preprocess"}:
        routing *= 0.5
    each = p.stack.constants.host_us * 1e-6
    return each * (dense + experts + routing), each * (2 * dense + 2 * experts + routing)


def _passes(block: LocalBlock, p: Pricing) -> tuple[float, float, float, float]:
    scale = p.stack.constants.pointwise_passes
    loss_bytes = LOSS_BYTES[p.job.loss]
    # Without a vocabulary-parallel loss every rank gathers the logits and works on all of them.
    copies = p.layout.tp if p.stack.switch("logits", "sharded") == "gathered" else 1
    fwd = bwd = loss_f = loss_b = 0.0
    moves = _PERMUTES.get(p.stack.switch("dispatcher", "alltoall"), 3.0)
    fused_experts = p.stack.switch("fused_grouped_mlp") == "on"
    for one in block.passes:
        if fused_experts and one.role == "experts" and one.kind == "activation":
            continue  # in the grouped GEMM's epilogue
        if one.kind == "loss":
            loss_f += bytes_s(p.device, copies * one.forward * loss_bytes[0])
            if copies > 1:
                loss_f += gather_s(p.network, HALF * copies * one.forward, copies)
            loss_b += bytes_s(p.device, copies * one.backward * loss_bytes[1])
        elif one.kind == "permute":
            fwd += bytes_s(p.device, moves * one.forward)
            bwd += bytes_s(p.device, moves * one.backward)
        else:
            fwd += bytes_s(p.device, scale * one.forward)
            bwd += bytes_s(p.device, scale * one.backward)
    return fwd, bwd, loss_f, loss_b


def _quantize(block: LocalBlock, p: Pricing) -> tuple[float, float]:
    fwd = bwd = 0.0
    fused_experts = p.stack.switch("fused_grouped_mlp") == "on"
    for gemm in block.gemms:
        if not gemm.is_low or (gemm.role == "experts" and fused_experts):
            continue
        name = (
            "fp8_current"
            if gemm.formats[0] == "fp8" and p.stack.switch("fp8_scaling", "delayed") == "tensor"
            else gemm.formats[0]
        )
        size = _QUANTIZE_BYTES.get(name, 4.0)
        rows = gemm.m * gemm.groups
        if gemm.quantizes_input:
            fwd += bytes_s(p.device, size * rows * gemm.k)
        bwd += bytes_s(p.device, size * rows * gemm.n)
    return fwd, bwd


def _tensor_parallel(block: LocalBlock, p: Pricing, gemm: float) -> tuple[float, float]:
    tp = p.layout.tp
    if tp == 1:
        return 0.0, 0.0
    size = block.boundary_bytes
    # A collective that nothing overlaps starts after the host has seen to its streams and events.
    launch = 0.0 if p.hides("tp") else _COLLECTIVE_LAUNCHES * p.stack.constants.host_us * 1e-6
    if p.layout.sequence_parallel:
        one = gather_s(p.network, size, tp) + launch
        fwd = bwd = (block.gathers + block.reduces) * one
    else:
        one = all_reduce_s(p.network, size, tp) + launch
        fwd, bwd = block.reduces * one, block.gathers * one
    if p.hides("tp"):
        hidden = min((1 - OVERLAPPED) * fwd, 0.7 * gemm)
        fwd, bwd = fwd - hidden, max(bwd - 2 * hidden, OVERLAPPED * bwd)
    return fwd, bwd


def _context_parallel(block: LocalBlock, p: Pricing, att_f: float, att_b: float) -> tuple[float, float]:
    cp = p.layout.cp
    if cp == 1 or not block.kv_bytes:
        return 0.0, 0.0
    if p.layout.context_parallel_kind == "allgather":
        one = gather_s(p.network, block.kv_bytes * cp, cp, p.layout.tp)
        # The backward gathers again unless the forward's result was kept, and scatters the gradients in any case.
        return one, (1 if p.stack.switch("gathered_kv", "again") == "kept" else 2) * one
    if p.layout.context_parallel_kind == "ulysses":
        # Tokens are exchanged for heads: q, k and v before attention, its result after it.
        one = 0.0
        for a in block.attention:
            keys = math.lcm(round(a.kv_heads), cp)  # fewer heads than ranks are repeated
            for width in (a.heads * a.qk_dim, keys * a.qk_dim, keys * a.v_dim, a.heads * a.v_dim):
                one += all_to_all_s(p.network, HALF * a.batch * a.q_len * width, cp, p.layout.tp)
        return one, one
    # Ring: each of cp-1 hops runs beside the attention of the block that arrived before it.
    is_local = p.network.local(cp, p.layout.tp) >= cp
    hop = send_s(p.network, block.kv_bytes, 1 if is_local else p.network.domain)
    fwd = (cp - 1) * max(0.0, hop - att_f / cp) + cp * p.network.latency_s
    bwd = (cp - 1) * max(0.0, 2 * hop - att_b / cp) + cp * p.network.latency_s
    return fwd, bwd


def _expert_parallel(block: LocalBlock, p: Pricing) -> tuple[float, float]:
    lay = p.layout
    if not block.routed_bytes:
        return 0.0, 0.0
    total = 0.0
    if lay.ep > 1:
        local = p.network.local(lay.ep, lay.etp)
        domains = max(1.0, lay.ep / local)
        # A dispatcher that knows of nodes sends one copy per node and lets NVLink spread it.
        merged = domains * (1 - (1 - 1 / domains) ** block.top_k) / block.top_k * domains / max(domains - 1, 1)
        aware = p.stack.switch("dispatcher", "alltoall") in ("deepep", "hybridep")
        per_node = min(1.0, merged) if aware and domains > 1 else 1.0
        total += 2 * all_to_all_s(p.network, block.routed_bytes, lay.ep, lay.etp, per_node)
    if lay.etp > 1:
        total += 2 * gather_s(p.network, block.routed_bytes * lay.etp, lay.etp)
    if p.hides("ep"):
        total *= OVERLAPPED
    return total, total


def _recompute(
    p: Pricing,
    gemms: list[tuple[LocalGemm, float]],
    att_f: float,
    point_f: float,
    forward: dict[str, float],
    block: LocalBlock,
) -> float:
    chosen = p.recompute
    if chosen.kind == "none" or not (block.attention or block.gemms):
        return 0.0
    if chosen.kind in ("full", "block"):
        # The last product of a layer is not needed again, but frameworks rerun the whole layer.
        return sum(forward.values())
    mlps = (t for g, t in gemms if g.role in ("mlp", "shared_experts") and g.part != "down")
    seconds = {
        "core_attn": att_f,
        "layernorm": 0.3 * point_f,
        "mlp": sum(mlps) + 0.3 * point_f,
        "moe_act": 0.2 * point_f,
        "moe": sum(t for g, t in gemms if g.role == "experts") + forward["ep"] + 0.3 * point_f,
        "mla_up_proj": sum(t for g, t in gemms if g.part in ("q_b", "kv_b")),
        "shared_experts": sum(t for g, t in gemms if g.role == "shared_experts"),
        "mlp_act": 0.3 * point_f,
        # torchtitan's per-op policy keeps attention and every second product.
        "half_matmuls": 0.5 * sum(t for _, t in gemms),
    }
    return sum(spent for module, spent in seconds.items() if module in (chosen.modules or ("core_attn",)))


def optimizer_s(dev: DeviceSpeed, params: float, state_bytes: float) -> float:
    """One AdamW step over this rank's shard: reads gradient and state, writes state and weight, and the norm before."""
    return params * (2 * state_bytes + 4 + 4 + HALF) / dev.bytes_per_s
