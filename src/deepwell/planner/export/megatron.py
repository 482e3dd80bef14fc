"""A plan as Megatron-LM arguments and as Megatron-Bridge overrides. Pure.

Names are those of `export_names.json`; values follow the two projects' own meaning of them. What they cannot run
(zero-bubble schedules, weights in formats they lack) is refused with what to plan instead.
"""

from collections.abc import Iterator

from deepwell.errors import UnsupportedError
from deepwell.graph.ops import Activation, Attention, Embedding, GroupedLinear, Linear, Norm, Op, TopK
from deepwell.planner.export.low_layers import low_layers
from deepwell.planner.plan_values import PlanValues

SCHEDULES = ("1f1b", "interleaved")
_SHARDING = {"zero2": "optim_grads", "zero3": "optim_grads_params"}
_CP = {"ring": "p2p", "ulysses": "a2a", "allgather": "all_gather"}
# Our formats in Transformer Engine's words. Deepwell's fp8 has one scale per tensor and E5M2 gradients: its hybrid.
_PRECISION = {
    "bf16": (),
    "fp8": ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "mxfp8": ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
    "nvfp4": ("--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"),
}
# What the optimizer keeps, in Megatron's words: its precision-aware Adam has a dtype for each moment.
_MOMENTS = {"adamw": None, "adamw_bf16_moments": "bf16", "adamw_8bit": "fp8"}
_BRIDGE_PRECISION = {
    "bf16": "bf16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}


def megatron_arguments(plan: PlanValues) -> list[str]:
    """One argument with its value per entry, for `pretrain_gpt.py`; data, tokenizer, learning rate are the user's."""
    _check(plan)
    return [*_model(plan), *_parallel(plan), *_batch(plan), *_precision(plan), *_memory(plan), *_optimizer(plan)]


def bridge_overrides(plan: PlanValues) -> list[str]:
    """Overrides `section.name=value` for a Megatron-Bridge recipe of the same model."""
    _check(plan)
    if plan.workload.optimizer != "adamw":
        raise UnsupportedError(
            f"optimizer {plan.workload.optimizer}: overrides of a Megatron-Bridge recipe are written for adamw alone; "
            "export 'megatron' instead"
        )
    layout = plan.layout
    pairs: dict[str, object] = {
        "model.tensor_model_parallel_size": layout.tp,
        "model.pipeline_model_parallel_size": layout.pp,
        "model.context_parallel_size": layout.cp,
        "model.expert_model_parallel_size": layout.ep,
        "model.sequence_parallel": layout.sequence_parallel,
        "model.seq_length": plan.workload.seq_len,
        "dataset.seq_length": plan.workload.seq_len,
        "train.micro_batch_size": layout.micro_batch,
        "train.global_batch_size": plan.workload.global_batch,
        "mixed_precision": _bridge_precision(plan),
        "ddp.use_distributed_optimizer": layout.sharding != "ddp",
        "ddp.overlap_grad_reduce": layout.overlap.grad_reduce is not False,
        "ddp.overlap_param_gather": layout.sharding != "ddp" and layout.overlap.param_gather is not False,
    }
    if layout.ep > 1 or layout.etp > 1:
        pairs["model.expert_tensor_parallel_size"] = layout.etp
    if _is_uneven(plan):
        pairs["model.pipeline_model_parallel_layout"] = f"'{stage_string(plan)}'"
    elif layout.virtual_stages > 1:
        pairs["model.virtual_pipeline_model_parallel_size"] = layout.virtual_stages
    if layout.cp > 1:
        pairs["model.cp_comm_type"] = _CP[layout.context_parallel_kind]
    if layout.sharding in _SHARDING:
        pairs |= {
            "dist.use_megatron_fsdp": True,
            "ddp.use_megatron_fsdp": True,
            "ddp.data_parallel_sharding_strategy": _SHARDING[layout.sharding],
        }
    if layout.dp_replicate > 1:
        pairs["ddp.num_distributed_optimizer_instances"] = layout.dp_replicate
    for name, value in _recompute(plan):
        pairs[f"model.{name}"] = f"[{','.join(value)}]" if isinstance(value, tuple) else value
    if layout.offload.optimizer:
        pairs |= {
            "optimizer.optimizer_cpu_offload": True,
            "optimizer.optimizer_offload_fraction": layout.offload.optimizer,
        }
    if plan.workload.capacity_factor is not None:
        pairs["model.moe_expert_capacity_factor"] = plan.workload.capacity_factor
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in pairs.items()]


def _check(plan: PlanValues) -> None:
    layout = plan.layout
    if layout.pp > 1 and layout.schedule not in SCHEDULES:
        raise UnsupportedError(
            f"schedule {layout.schedule}: Megatron runs 1f1b and interleaved; plan with stack='megatron' or "
            "schedule=('1f1b', 'interleaved')"
        )
    low = low_layers(plan).format
    if low not in _PRECISION:
        raise UnsupportedError(f"precision {low}: Megatron has {', '.join(_PRECISION)}")
    _check_overlap(plan)
    if plan.workload.optimizer not in _MOMENTS or (plan.workload.optimizer != "adamw" and layout.sharding == "ddp"):
        raise UnsupportedError(
            f"optimizer {plan.workload.optimizer} with sharding {layout.sharding}: Megatron has {', '.join(_MOMENTS)}, "
            "the smaller moments with a distributed optimizer (sharding='zero1') alone"
        )
    if layout.offload.activations:
        raise UnsupportedError("activations in host memory: not written for Megatron; plan with offload='optimizer'")
    if layout.sharding in _SHARDING and layout.pp > 1:
        raise UnsupportedError(
            f"sharding {layout.sharding} with PP {layout.pp}: Megatron-FSDP runs without pipeline stages; plan with "
            "stack='megatron' or sharding=('ddp', 'zero1')"
        )


def _check_overlap(plan: PlanValues) -> None:
    """Gradient reduction and weight gathering are switches of both projects; the rest they tie to much else."""
    overlap, layout = plan.layout.overlap, plan.layout
    for name in ("tp", "ep", "pp"):
        # Off is what they do where the option is not written; messages are hidden by the interleaved schedule alone.
        is_default = getattr(overlap, name) is (layout.virtual_stages > 1 if name == "pp" else False)
        if getattr(overlap, name) is not None and not is_default:
            raise UnsupportedError(
                f"overlap of {name}: not written for Megatron; plan without it and switch it on or off there"
            )
    gathers = layout.sharding != "ddp" and overlap.param_gather is not False
    if gathers and overlap.grad_reduce is False:
        raise UnsupportedError(
            "overlap of param_gather without grad_reduce: Megatron hides gathers only beside hidden reductions; plan "
            "with overlap={'param_gather': False, 'grad_reduce': False}"
        )


def _bridge_precision(plan: PlanValues) -> str:
    low = low_layers(plan)
    if low.has_bf16_ends:
        # A recipe is named by one word, and what it says of the ends overwrites the model's own settings.
        raise UnsupportedError(
            f"precision {low.format} with {low.at_start} layers in bf16 at the start and {low.at_end} at the end: "
            "overrides of a Megatron-Bridge recipe name one precision for all layers; export 'megatron' instead"
        )
    return _BRIDGE_PRECISION[low.format]


# ---- the parts ----


def _parallel(plan: PlanValues) -> Iterator[str]:
    layout = plan.layout
    yield f"--tensor-model-parallel-size {layout.tp}"
    yield f"--pipeline-model-parallel-size {layout.pp}"
    if _is_uneven(plan):
        yield f"--pipeline-model-parallel-layout '{stage_string(plan)}'"
    elif layout.virtual_stages > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {layout.virtual_stages}"
    yield f"--context-parallel-size {layout.cp}"
    if layout.cp > 1:
        yield f"--cp-comm-type {_CP[layout.context_parallel_kind]}"
    if layout.ep > 1 or layout.etp > 1:
        yield f"--expert-model-parallel-size {layout.ep}"
        yield f"--expert-tensor-parallel-size {layout.etp}"
    if layout.sequence_parallel:
        yield "--sequence-parallel"
    if layout.sharding != "ddp":
        yield "--use-distributed-optimizer"
        if layout.overlap.param_gather is not False:
            yield "--overlap-param-gather"
    if layout.overlap.grad_reduce is not False:
        yield "--overlap-grad-reduce"
    if layout.sharding in _SHARDING:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {_SHARDING[layout.sharding]}"
        yield "--ckpt-format fsdp_dtensor"  # Megatron-FSDP writes no other
    if layout.dp_replicate > 1:
        yield f"--num-distributed-optimizer-instances {layout.dp_replicate}"


def _is_uneven(plan: PlanValues) -> bool:
    return len(set(plan.stage_layers)) > 1


def stage_string(plan: PlanValues) -> str:
    """Layers of each stage as Megatron writes them: "Et*7|t*8|t*8|t*7L" (embedding, transformer layers, loss)."""
    stages = [f"t*{count}" for count in plan.stage_layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)


def _batch(plan: PlanValues) -> Iterator[str]:
    yield f"--micro-batch-size {plan.layout.micro_batch}"
    yield f"--global-batch-size {plan.workload.global_batch}"
    yield f"--seq-length {plan.workload.seq_len}"
    yield f"--max-position-embeddings {max(plan.workload.ir.max_positions or 0, plan.workload.seq_len)}"


def _precision(plan: PlanValues) -> Iterator[str]:
    yield "--bf16"
    low = low_layers(plan)
    words = _PRECISION[low.format]
    yield from (f"{name} {value}" for name, value in zip(words[::2], words[1::2], strict=True))
    if low.has_bf16_ends:
        yield "--first-last-layers-bf16"
        yield f"--num-layers-at-start-in-bf16 {low.at_start}"
        yield f"--num-layers-at-end-in-bf16 {low.at_end}"


def _recompute(plan: PlanValues) -> Iterator[tuple[str, str | int | tuple[str, ...]]]:
    recompute = plan.layout.recompute
    if recompute.kind == "full":
        yield from (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
    elif recompute.kind == "block":
        yield from (("recompute_granularity", "full"), ("recompute_method", "block"))
        yield "recompute_num_layers", recompute.layers or 1
    elif recompute.kind == "selective":
        yield "recompute_granularity", "selective"
        yield "recompute_modules", recompute.modules or ("core_attn",)


def _memory(plan: PlanValues) -> Iterator[str]:
    for name, value in _recompute(plan):
        words = " ".join(value) if isinstance(value, tuple) else str(value)
        yield f"--{name.replace('_', '-')} {words}"
    if plan.layout.offload.optimizer:
        yield "--optimizer-cpu-offload"
        yield f"--optimizer-offload-fraction {plan.layout.offload.optimizer:g}"


def _optimizer(plan: PlanValues) -> Iterator[str]:
    moments = _MOMENTS[plan.workload.optimizer]
    if moments:
        yield "--use-precision-aware-optimizer"
        yield f"--exp-avg-dtype {moments}"
        yield f"--exp-avg-sq-dtype {moments}"


# ---- the model's shape ----


def _first(ops: tuple[Op, ...], kind: type, **attributes: str) -> Op | None:
    return next(
        (op for op in ops if isinstance(op, kind) and all(getattr(op, k) == v for k, v in attributes.items())), None
    )


def _model(plan: PlanValues) -> Iterator[str]:
    ir = plan.workload.ir
    ops = tuple(op for block in ir.blocks for op in block.ops)
    attention = _first(ops, Attention)
    embedding = _first(ir.stem, Embedding)
    if not isinstance(attention, Attention) or not isinstance(embedding, Embedding):
        raise UnsupportedError(
            f"{plan.model} has no token embedding or no attention; Megatron's GPT arguments need both"
        )
    yield "--use-mcore-models"
    yield "--transformer-impl transformer_engine"
    yield f"--num-layers {ir.num_layers}"
    yield f"--hidden-size {embedding.width}"
    yield f"--num-attention-heads {attention.q_heads}"
    down = _first(ops, Linear, role="mlp", part="down")
    if isinstance(down, Linear):
        yield f"--ffn-hidden-size {down.k}"
    if any(isinstance(op, Linear) and op.part == "kv_b" for op in ops):
        yield from _latent(ops, attention)
    else:
        yield f"--kv-channels {attention.qk_dim}"
        if attention.kv_heads != attention.q_heads:
            yield "--group-query-attention"
            yield f"--num-query-groups {attention.kv_heads}"
    yield from _style(plan, ops)
    yield from _experts(plan, ops)


def _latent(ops: tuple[Op, ...], attention: Attention) -> Iterator[str]:
    """Multi-head latent attention: ranks and head widths from the projections' own shapes."""
    parts = {op.part: op for op in ops if isinstance(op, Linear) and op.role == "attention"}
    nope = parts["kv_b"].n // attention.q_heads - attention.v_dim
    yield "--multi-latent-attention"
    if "q_b" in parts:
        yield f"--q-lora-rank {parts['q_b'].k}"
    yield f"--kv-lora-rank {parts['kv_b'].k}"
    yield f"--qk-head-dim {nope}"
    yield f"--qk-pos-emb-head-dim {attention.qk_dim - nope}"
    yield f"--v-head-dim {attention.v_dim}"


def _style(plan: PlanValues, ops: tuple[Op, ...]) -> Iterator[str]:
    ir = plan.workload.ir
    norm, activation = _first(ops, Norm), _first(ops, Activation)
    if isinstance(norm, Norm) and norm.norm == "rms":
        yield "--normalization RMSNorm"
    if isinstance(activation, Activation) and activation.gated and activation.function == "silu":
        yield "--swiglu"
    if any(op.kind == "rope" for op in ops):
        yield "--position-embedding-type rope"
    else:
        yield "--position-embedding-type learned_absolute"
    if not any(isinstance(op, Linear) and op.bias for op in ops):
        yield "--disable-bias-linear"
    if any(isinstance(op, Norm) and op.name.endswith(("q_norm", "k_norm")) for op in ops):
        yield "--qk-layernorm"
    head = _first(ir.tail, Linear)
    if head is not None and all(p.tied_to is None for p in head.params):
        yield "--untie-embeddings-and-output-weights"


def _experts(plan: PlanValues, ops: tuple[Op, ...]) -> Iterator[str]:
    ir = plan.workload.ir
    grouped, topk = _first(ops, GroupedLinear, part="down"), _first(ops, TopK)
    if not isinstance(grouped, GroupedLinear) or not isinstance(topk, TopK):
        return
    yield f"--num-experts {grouped.experts}"
    yield f"--moe-ffn-hidden-size {grouped.k}"
    yield f"--moe-router-topk {topk.top_k}"
    yield f"--moe-router-score-function {topk.scoring}"
    yield "--moe-grouped-gemm"
    yield "--moe-token-dispatcher-type alltoall"
    has_experts = [any(isinstance(op, GroupedLinear) for op in ir.blocks[layer.block].ops) for layer in ir.layers]
    if not all(has_experts):
        yield f"--moe-layer-freq '([{','.join(str(int(has)) for has in has_experts)}])'"
    shared = _first(ops, Linear, role="shared_experts", part="down")
    if isinstance(shared, Linear):
        yield f"--moe-shared-expert-intermediate-size {shared.k}"
    if plan.workload.capacity_factor is not None:
        yield f"--moe-expert-capacity-factor {plan.workload.capacity_factor:g}"
