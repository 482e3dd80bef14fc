"""A plan as Megatron-LM arguments and as Megatron-Bridge overrides. Pure.

Names are those of `export_names.json`; values follow the two projects' own meaning of them. What they cannot run
(zero-bubble schedules, weights in formats they lack) is refused with what to plan instead.
"""

from typing import Any

from deepwell.errors import UnsupportedError
from deepwell.graph.ops import Activation, Attention, Embedding, GroupedLinear, Linear, Norm, TopK
from deepwell.planner.export.low_layers import low_layers
from deepwell.planner.plan_values import PlanValues

SCHEDULES = ("1f1b", "interleaved")
_SHARDING = {"zero2": "optim_grads", "zero3": "optim_grads_params"}
_CP = {"ring": "p2p", "ulysses": "a2a", "allgather": "all_gather"}
# Our formats in Transformer Engine's words. Deepwell's fp8 has one scale per tensor and E5M2 gradients: its hybrid.
_PRECISION = {
    "bf16": {},
    "fp8": {"--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "mxfp8": {"--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
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
    given = {**_model(plan), **_parallel(plan), **_training(plan)}
    # What is False or None is not written, and what is True has no value.
    written = {name: value for name, value in given.items() if value is not False and value is not None}
    return [name if value is True else f"{name} {value}" for name, value in written.items()]


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
    for name, value in _recompute(plan).items():
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


def _parallel(plan: PlanValues) -> dict[str, Any]:
    layout, virtual = plan.layout, plan.layout.virtual_stages > 1 and plan.layout.virtual_stages
    has_experts = layout.ep > 1 or layout.etp > 1
    return {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--pipeline-model-parallel-layout": _is_uneven(plan) and f"'{stage_string(plan)}'",
        "--num-virtual-stages-per-pipeline-rank": not _is_uneven(plan) and virtual,
        "--context-parallel-size": layout.cp,
        "--cp-comm-type": layout.cp > 1 and _CP[layout.context_parallel_kind],
        "--expert-model-parallel-size": has_experts and layout.ep,
        "--expert-tensor-parallel-size": has_experts and layout.etp,
        "--sequence-parallel": layout.sequence_parallel,
        "--use-distributed-optimizer": layout.sharding != "ddp",
        "--overlap-param-gather": layout.sharding != "ddp" and layout.overlap.param_gather is not False,
        "--overlap-grad-reduce": layout.overlap.grad_reduce is not False,
        "--use-megatron-fsdp": layout.sharding in _SHARDING,
        "--data-parallel-sharding-strategy": _SHARDING.get(layout.sharding),
        "--ckpt-format": layout.sharding in _SHARDING and "fsdp_dtensor",  # Megatron-FSDP writes no other
        "--num-distributed-optimizer-instances": layout.dp_replicate > 1 and layout.dp_replicate,
    }


def _is_uneven(plan: PlanValues) -> bool:
    return len(set(plan.stage_layers)) > 1


def stage_string(plan: PlanValues) -> str:
    """Layers of each stage as Megatron writes them: "Et*7|t*8|t*8|t*7L" (embedding, transformer layers, loss)."""
    return f"E{'|'.join(f't*{count}' for count in plan.stage_layers)}L"


def _recompute(plan: PlanValues) -> dict[str, Any]:
    recompute = plan.layout.recompute
    if recompute.kind == "none":
        return {}
    if recompute.kind == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": recompute.modules or ("core_attn",)}
    how, layers = ("uniform", 1) if recompute.kind == "full" else ("block", recompute.layers or 1)
    return {"recompute_granularity": "full", "recompute_method": how, "recompute_num_layers": layers}


def _training(plan: PlanValues) -> dict[str, Any]:
    """Batch, formats, memory and optimizer."""
    work, low, moments = plan.workload, low_layers(plan), _MOMENTS[plan.workload.optimizer]
    again = {f"--{name.replace('_', '-')}": " ".join(value) if isinstance(value, tuple) else value
             for name, value in _recompute(plan).items()}  # fmt: skip
    return {
        "--micro-batch-size": plan.layout.micro_batch,
        "--global-batch-size": work.global_batch,
        "--seq-length": work.seq_len,
        "--max-position-embeddings": max(work.ir.max_positions or 0, work.seq_len),
        "--bf16": True,
        **_PRECISION[low.format],
        "--first-last-layers-bf16": low.has_bf16_ends,
        "--num-layers-at-start-in-bf16": low.has_bf16_ends and str(low.at_start),
        "--num-layers-at-end-in-bf16": low.has_bf16_ends and str(low.at_end),
        **again,
        "--optimizer-cpu-offload": plan.layout.offload.optimizer > 0,
        "--optimizer-offload-fraction": plan.layout.offload.optimizer > 0 and f"{plan.layout.offload.optimizer:g}",
        "--use-precision-aware-optimizer": moments is not None,
        "--exp-avg-dtype": moments,
        "--exp-avg-sq-dtype": moments,
    }


# ---- the model's shape ----


def _first(ops: tuple[Any, ...], kind: type, **attributes: str) -> Any:
    alike = (op for op in ops if isinstance(op, kind))
    return next((op for op in alike if all(getattr(op, k) == v for k, v in attributes.items())), None)


def _model(plan: PlanValues) -> dict[str, Any]:
    ir = plan.workload.ir
    ops = tuple(op for block in ir.blocks for op in block.ops)
    attention, embedding = _first(ops, Attention), _first(ir.stem, Embedding)
    if attention is None or embedding is None:
        raise UnsupportedError(
            f"{plan.model} has no token embedding or no attention; Megatron's GPT arguments need both"
        )
    down, norm, activation = _first(ops, Linear, role="mlp", part="down"), _first(ops, Norm), _first(ops, Activation)
    head = _first(ir.tail, Linear)
    is_grouped = attention.kv_heads != attention.q_heads
    heads = {
        "--kv-channels": attention.qk_dim,
        "--group-query-attention": is_grouped,
        "--num-query-groups": is_grouped and attention.kv_heads,
    }
    return {
        "--use-mcore-models": True,
        "--transformer-impl": "transformer_engine",
        "--num-layers": ir.num_layers,
        "--hidden-size": embedding.width,
        "--num-attention-heads": attention.q_heads,
        "--ffn-hidden-size": down and down.k,
        **(_latent(ops, attention) or heads),
        "--normalization": norm is not None and norm.norm == "rms" and "RMSNorm",
        "--swiglu": activation is not None and activation.gated and activation.function == "silu",
        "--position-embedding-type": "rope" if any(op.kind == "rope" for op in ops) else "learned_absolute",
        "--disable-bias-linear": not any(isinstance(op, Linear) and op.bias for op in ops),
        "--qk-layernorm": any(isinstance(op, Norm) and op.name.endswith(("q_norm", "k_norm")) for op in ops),
        "--untie-embeddings-and-output-weights": head is not None and all(p.tied_to is None for p in head.params),
        **_experts(plan, ops),
    }


def _latent(ops: tuple[Any, ...], attention: Attention) -> dict[str, Any]:
    """Multi-head latent attention: ranks and head widths from the projections' own shapes."""
    parts = {op.part: op for op in ops if isinstance(op, Linear)}
    if "kv_b" not in parts:
        return {}
    nope = parts["kv_b"].n // attention.q_heads - attention.v_dim
    return {
        "--multi-latent-attention": True,
        "--q-lora-rank": "q_b" in parts and parts["q_b"].k,
        "--kv-lora-rank": parts["kv_b"].k,
        "--qk-head-dim": nope,
        "--qk-pos-emb-head-dim": attention.qk_dim - nope,
        "--v-head-dim": attention.v_dim,
    }


def _experts(plan: PlanValues, ops: tuple[Any, ...]) -> dict[str, Any]:
    ir = plan.workload.ir
    grouped, topk = _first(ops, GroupedLinear, part="down"), _first(ops, TopK)
    if grouped is None or topk is None:
        return {}
    has_experts = [any(isinstance(op, GroupedLinear) for op in ir.blocks[layer.block].ops) for layer in ir.layers]
    shared, factor = _first(ops, Linear, role="shared_experts", part="down"), plan.workload.capacity_factor
    pattern = ",".join(str(int(has)) for has in has_experts)
    return {
        "--num-experts": grouped.experts,
        "--moe-ffn-hidden-size": grouped.k,
        "--moe-router-topk": topk.top_k,
        "--moe-router-score-function": topk.scoring,
        "--moe-grouped-gemm": True,
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-layer-freq": not all(has_experts) and f"'([{pattern}])'",
        "--moe-shared-expert-intermediate-size": shared and shared.k,
        "--moe-expert-capacity-factor": None if factor is None else f"{factor:g}",
    }
