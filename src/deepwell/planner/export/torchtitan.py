"""A plan as a torchtitan config: a Python module with one function, as torchtitan reads them since 2026. Pure.

    torchrun ... -m torchtitan.train --module planned --config planned        # with the text saved as planned.py

torchtitan builds models from its own registry; a model that is not there is refused.
"""

import json
from typing import NamedTuple

from deepwell.errors import UnsupportedError
from deepwell.hardware.codec import packaged_json
from deepwell.planner.export.low_layers import low_layers
from deepwell.planner.plan_values import PlanValues

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
# FSDP2 keeps gathered weights between forward and backward (ZeRO-2) or frees them (ZeRO-3).
_RESHARD = {"zero2": "never", "zero3": "always"}
_CONVERTERS = {
    "fp8": ("Float8LinearConverter", "Float8GroupedExpertsConverter"),
    "mxfp8": ("MXFP8LinearConverter", "MXFP8GroupedExpertsConverter"),
    "nvfp4": ("NVFP4LinearConverter",),
}


class _Known(NamedTuple):
    module: str
    base: str  # the config function that the plan starts from
    flavor: str


_NAMES = packaged_json("deepwell.planner", "export_names.json")["torchtitan"]["known"]
MODELS = {model: _Known(*names) for model, names in _NAMES.items()}


def torchtitan_config(plan: PlanValues) -> str:
    """The module's text. Raises UnsupportedError for what torchtitan cannot run."""
    known = MODELS.get(plan.model.lower())
    if known is None:
        raise UnsupportedError(
            f"{plan.model}: torchtitan's registry has no such model; known here: {', '.join(MODELS)}"
        )
    _check(plan)
    converters = _converters(plan)
    lines = [
        f'"""{plan.model} on {plan.machine}: {plan.layout.describe()}."""',
        "",
        *_imports(plan, known, converters),
        "",
        "",
        "def planned():",
        f"    config = {known.base}()",
        *_model_lines(plan, known, converters),
        f"    config.training.max_context_length = {plan.workload.seq_len}",
        "    config.training.num_tokens_per_microbatch_per_dp_rank = "
        f"{plan.layout.micro_batch * plan.workload.seq_len}",
        f"    config.training.num_tokens_per_train_step = {plan.workload.tokens_per_step}",
    ]
    if plan.layout.pp > 1 or plan.layout.ep > 1:
        # It captures no CUDA graphs of pipelines, nor of the expert dispatch that asks the host for sizes.
        lines.append("    config.training.disable_cuda_graphs = True")
    if plan.layout.offload.optimizer:
        lines.append("    config.training.enable_cpu_offload = True")
    lines += [
        "    config.parallelism = ParallelismConfig(",
        *(f"        {line}," for line in _parallelism(plan)),
        "    )",
    ]
    kinds = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}
    lines += [f"    config.activation_checkpoint = {kinds[plan.layout.recompute.kind]}", "    return config", ""]
    return "\n".join(lines)


def _check(plan: PlanValues) -> None:
    layout = plan.layout
    if layout.sharding not in _RESHARD and layout.dp * layout.cp > 1 and layout.sharding != "ddp":
        raise UnsupportedError(
            f"sharding {layout.sharding}: torchtitan shards by FSDP2; plan with stack='torchtitan' or "
            "sharding=('zero2', 'zero3')"
        )
    if plan.workload.optimizer not in ("adamw", "adamw_fp32"):
        raise UnsupportedError(
            f"optimizer {plan.workload.optimizer}: torchtitan's AdamW keeps fp32 state; plan with optimizer='adamw'"
        )
    if layout.offload.activations:
        raise UnsupportedError("activations in host memory: not written for torchtitan; plan with offload='optimizer'")
    if layout.etp > 1:
        raise UnsupportedError(f"ETP {layout.etp}: torchtitan splits no experts; plan with etp=1")
    if layout.recompute.kind == "block":
        raise UnsupportedError("recompute block: torchtitan has full and selective; plan with stack='torchtitan'")
    if layout.schedule == "zero_bubble" and layout.virtual_stages < 2:
        raise UnsupportedError(
            "schedule zero_bubble: torch runs it with two stages per rank and more; virtual_stages=2"
        )


def _converters(plan: PlanValues) -> list[str]:
    low = low_layers(plan).format
    names = _CONVERTERS.get(low, ())
    is_moe = plan.workload.ir.num_experts > 0
    if names and is_moe and not any("Experts" in name for name in names):
        raise UnsupportedError(
            f"precision {low}: torchtitan has no converter for experts in it; plan with precision='mxfp8'"
        )
    return [name for name in names if is_moe or "Experts" not in name]


def _imports(plan: PlanValues, known: _Known, converters: list[str]) -> list[str]:
    lines = [f"from torchtitan.components.quantization import {', '.join(converters)}"] if converters else []
    lines.append("from torchtitan.config import ParallelismConfig")
    kind = plan.layout.recompute.kind
    if kind != "none":
        lines.append(
            f"from torchtitan.distributed.activation_checkpoint import {'FullAC' if kind == 'full' else 'SelectiveAC'}"
        )
    if converters:
        lines.append(f"from torchtitan.models.{known.module} import model_registry")
    lines.append(f"from torchtitan.models.{known.module}.config_registry import {known.base}")
    return lines


def _model_lines(plan: PlanValues, known: _Known, converters: list[str]) -> list[str]:
    if not converters:
        return []
    return [
        '    is_compiled = config.compile.enable and "model" in config.compile.components',
        "    config.model_spec = model_registry(",
        f'        "{known.flavor}",',
        "        converters=[",
        *(f"            {name}.Config(model_compile_enabled=is_compiled{_chosen(plan, name)})," for name in converters),
        "        ],",
        "    )",
    ]


def _chosen(plan: PlanValues, converter: str) -> str:
    """Which linear layers a converter takes: head and router stay in bf16, and so do a recipe's ends.

    Without a list it would take every one. A name is matched anywhere in a module's path, so the dot behind tells
    layers.2 from layers.20.
    """
    if "Experts" in converter:
        return ""  # experts are converted all or none
    low, is_moe = low_layers(plan), plan.workload.ir.num_experts > 0
    if converter.startswith("Float8"):
        return f", filter_fqns={json.dumps(['lm_head', *(['router.gate'] if is_moe else [])])}"
    if low.has_bf16_ends:
        return f", fqns={json.dumps([f'layers.{i}.' for i in range(low.first, low.last + 1)])}"
    return f", fqns={json.dumps(['attention', 'feed_forward', 'shared_experts'])}"


def _parallelism(plan: PlanValues) -> list[str]:
    layout = plan.layout
    is_ddp = layout.sharding == "ddp"
    replicate = layout.dp if is_ddp else layout.dp_replicate
    lines = [
        f"data_parallel_replicate_degree={replicate}",
        f"data_parallel_shard_degree={1 if is_ddp else layout.dp // layout.dp_replicate}",
        f"tensor_parallel_degree={layout.tp}",
        f"enable_sequence_parallel={layout.sequence_parallel or layout.tp == 1}",
        f"context_parallel_degree={layout.cp}",
        f"expert_parallel_degree={layout.ep}",
        f"pipeline_parallel_degree={layout.pp}",
    ]
    if not is_ddp and layout.dp > 1:
        lines.append(f'fsdp_reshard_after_forward="{_RESHARD[layout.sharding]}"')
    if layout.pp > 1:
        lines.append(f'pipeline_parallel_schedule="{SCHEDULES[layout.schedule]}"')
        lines.append(f"num_pp_microbatches={plan.accumulation}")
        lines.append(f"module_fqns_per_model_part={_parts(plan)}")
    return lines


def _parts(plan: PlanValues) -> list[list[str]]:
    parts, start = [], 0
    for count in plan.stage_layers:
        parts.append([f"layers.{i}" for i in range(start, start + count)])
        start += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts
