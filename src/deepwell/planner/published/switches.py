"""The software of a published run: which stack, and which of its switches the row's texts turn on. Pure.

Sources write their switches into `notes`, `version`, `precision`, `dp_kind` and `recompute`. Every rule here is a
phrase that several sources use; none names a row. What a source leaves open is the stack's habit, and marked so.
"""

import re
from dataclasses import dataclass

from deepwell.hardware.codec import packaged_json
from deepwell.planner.layout import Overlap, Recompute
from deepwell.planner.published.record import Record

_WORDS = packaged_json("deepwell.planner", "data", "published_words.json")
MEGATRON_FAMILY = frozenset({"megatron", "megatron-bridge", "nemo", "mlperf", "megatron-deepspeed", "megascale"})
# Stacks whose tensor parallelism shards the sequence between the parallel regions unless a row says otherwise.
_SEQUENCE_PARALLEL = frozenset(
    {"megatron", "megatron-bridge", "nemo", "mlperf", "torchtitan", "nanotron", "megascale", "deepseek"}
)
_MODULES = ("core_attn", "layernorm", "moe_act", "moe", "mlp", "mla_up_proj")
_FULL_PRECISION_SHARDS = frozenset({"llm-foundry", "torchtitan", "fms-fsdp", "maxtext", "paxml"})


def stack_name(record: Record) -> str:
    """The training framework of the row; a source that no phrase names is its own, with generic constants."""
    source = record.text("source").lower()
    texts = (f"{source} | {record.text('dp_kind').lower()}", record.notes.lower())
    if "megascale" in source and texts[1].startswith("megatron-lm"):
        return "megatron"  # the baseline of that paper
    if "dgx cloud" in source and "megatron-fsdp" in texts[0]:
        return "megatron-bridge"
    named = [name for phrase, name in _WORDS["stacks"] if phrase in texts[0]]
    for text in (texts[1], record.text("url").lower()):
        # Not inside another word: a Nemotron is no NeMo.
        named += [name for phrase, name in _WORDS["stacks"] if phrase in _WORDS["engines"]
                  and re.search(rf"(?<![a-z]){re.escape(phrase)}(?![a-z])", text)]  # fmt: skip
    return str(named[0]) if named else re.sub(r"[^a-z0-9]+", "-", source).strip("-")


def is_before_flash(record: Record) -> bool:
    """Megatron's runs up to 2022 computed attention as separate GEMMs around a fused softmax."""
    year = re.search(r"\b(20[12]\d)", f"{record.text('version')} {record.text('source')}")
    return year is not None and int(year[1]) <= 2022


def attention_kernel(record: Record, stack: str) -> str:
    """How attention is computed: unfused, fused_softmax, flash1, flash2, flash3 or cudnn."""
    notes = record.notes.lower()
    named = re.search(r"kernel=([\w .+]+)", notes)
    if named:
        word = named[1].strip()
        if "flash" in word:
            return "flash1" if re.search(r"flash_attentionv?1|flash_attention$", word) else "flash2"
        return {"torch": "unfused", "fused": "fused_softmax"}.get(word, "flash2")
    if "flashattention-3" in notes or "fa3" in notes:
        return "flash3"
    if stack in MEGATRON_FAMILY and is_before_flash(record):
        return "fused_softmax"
    gpu = record.text("gpu")
    if gpu.startswith("A"):
        return "flash2"
    if stack == "deepseek":
        return "flash3"  # their kernels for Hopper
    if stack in ("megatron", "megatron-bridge", "mlperf", "nemo", "maxtext", "paxml") or gpu.startswith(("B", "GB")):
        return "cudnn"
    return "flash2"


def norm_kernel(record: Record, stack: str) -> str:
    """fused or unfused norms: Aleph Alpha's sheets name the RMSNorm kernel; others fuse, except eager FSDP code."""
    notes = record.notes.lower()
    if "kernel=" in notes:
        return "fused" if "rms kernel" in notes else "unfused"
    if stack not in MEGATRON_FAMILY and "eager" in notes:
        return "unfused"
    return "fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """What Megatron-Bridge's performance configs of a release set for a MoE model, where a row does not say it."""

    graphs: str = "off"
    dispatcher: str = "alltoall"
    ep_overlap: bool | None = None
    recompute: tuple[str, ...] = ()
    is_recompute_known: bool = False


def release(record: Record) -> tuple[int, int] | None:
    """(year, month) of "NeMo 26.04.01" or "2026-08-14": (26, 4), (26, 8)."""
    found = re.search(r"NeMo (\d\d)\.(\d\d)|\b20(\d\d)-(\d\d)", record.text("version"))
    if found is None:
        return None
    return (int(found[1]), int(found[2])) if found[1] else (int(found[3]), int(found[4]))


def habit(record: Record, stack: str) -> Habit:
    """Megatron-Bridge's usual switches of that release and GPU; none for other stacks, dense models and untuned runs.

    From scripts/performance/configs at v0.2.0 to v0.5.1 and perf_recipes at v0.6.0: HybridEP since 26.02, graphs of
    attention, router and preprocessing on Blackwell since then, whole-iteration graphs with overlapped all-to-all for
    MXFP8 since 26.06, never for hybrids. DeepSeek-V3 recomputes its up-projections, on an H100 its MLPs too.
    """
    model, when = record.text("model").lower(), release(record)
    is_hybrid = model.startswith("nemotron-3")
    is_known = stack == "megatron-bridge" and when is not None and (record.count("experts") or is_hybrid)
    if not is_known or when is None or "not perf-tuned" in record.notes:
        return Habit()
    gpu = record.text("gpu")
    again: tuple[str, ...] = ()
    if model.startswith(("deepseek-v3", "kimi")):
        again = ("mla_up_proj", "mlp") if gpu == "H100" else ("mla_up_proj",)
    if when < (26, 2):
        return Habit(recompute=again)
    graphs = "off" if gpu in ("H100", "B200") else "attn+moe_router+moe_preprocess"
    if is_hybrid:
        graphs = "attn+mamba+moe_router+moe_preprocess" if gpu != "H100" else "mamba"
    is_full = when >= (26, 6) and gpu in ("GB200", "GB300", "B300") and "mx" in record.text("precision").lower()
    if is_full and not is_hybrid:
        rest = again if gpu != "GB300" else ()
        return Habit(graphs="full", dispatcher="hybridep", ep_overlap=True, recompute=rest, is_recompute_known=True)
    return Habit(graphs=graphs, dispatcher="hybridep", recompute=again, is_recompute_known=is_hybrid)


def is_matched(record: Record) -> bool:
    """Whether the row was matched to a published configuration, so that what it does not name is off."""
    return bool(re.search(r"\bcfg \w+@", record.notes)) and "nearest" not in record.notes


def cuda_graphs(record: Record, stack: str) -> str:
    """off, full (the whole iteration), or the captured parts joined by +."""
    said = _named_graphs(record)
    if said == "off" and not is_matched(record) and not re.search(r"eager execution|mem\w*-boundary", record.notes):
        return habit(record, stack).graphs
    return said


def _named_graphs(record: Record) -> str:
    notes = record.notes
    if re.search(r"full[_ -]iteration|full CG", notes):
        return "full"
    captured = re.search(r"cuda_graph=transformer_engine:\[?([^\];]*)|TE (?:CUDA )?graphs ([\w+]+)", notes)
    if captured is None and "router/preprocess CG" in notes:
        return "moe_router+moe_preprocess"
    captured = captured or re.search(r"Transformer Engine CUDA graph scopes ([\w, ]+)", notes)
    if captured:
        words = re.findall(r"\w+", "".join(group or "" for group in captured.groups()))
        return "+".join(word for word in words if word != "and") or "off"
    if re.search(r"partial CG|[Tt]ransformer E\w* CUDA graph", notes):
        return "attn+moe_router+moe_preprocess"
    if re.search(r"layer CUDA graphs|CUDA graphs|_cg\b|_cg_", notes):
        return "layers"
    return "off"


def dispatcher(record: Record, stack: str) -> str:
    """How tokens reach their experts: alltoall, deepep or hybridep."""
    notes = record.notes.lower()
    for word, name in (("hybridep", "hybridep"), ("deepep", "deepep"), ("alltoall", "alltoall")):
        if word in notes:
            return name
    if stack == "deepseek":
        return "deepep"  # their own library
    return "alltoall" if is_matched(record) else habit(record, stack).dispatcher


def overlap(record: Record, stack: str) -> Overlap:
    """The overlap switches that the row names; None leaves the stack's habit."""
    notes = record.notes
    ep: bool | None = None
    if re.search(r"EP overlap off|no overlap", notes):
        ep = False
    elif re.search(r"DualPipe|EP a2a overlap|EP overlap|expert-parallel com\w* overlap", notes):
        ep = True
    elif is_matched(record):
        ep = False  # the matched configuration sets none
    else:
        ep = habit(record, stack).ep_overlap
    tp = True if re.search(r"tp-comm-overlap|TP comm overlap|[Aa]sync ?TP", notes) else None
    if stack == "megatron-bridge" and "nvfp4" in record.text("precision").lower():
        tp = False  # scripts/performance/configs/llama at v0.2.0 to v0.5.0 turn it off for NVFP4
    named = bool(re.search(r"overlap-grad-reduce", notes))
    return Overlap(tp=tp, ep=ep, grad_reduce=True if named else None, param_gather=True if named else None)


def recompute(record: Record, layers_per_stage: int) -> tuple[Recompute, bool]:
    """What the backward computes again, and whether the row says so."""
    half = Recompute(kind="block", layers=max(1, layers_per_stage // 2))
    text = record.text("recompute").strip()
    low = text.lower()
    if not low and "selective layernorm and MoE activation recompute" in record.notes:
        return Recompute(kind="selective", modules=("layernorm", "moe_act")), True
    listed = re.search(r"selective recompute of ([\w, ]+)", record.notes)
    if not low and listed:
        words = [word for word in re.findall(r"\w+", listed[1]) if word in _MODULES]
        if is_super_on_h100(record):
            words = ["layernorm", "moe_act", "moe", "core_attn"]  # the card is cut off in the middle of this list
        return Recompute(kind="selective", modules=tuple(words)), True
    if not low:
        return Recompute(), False
    if low.startswith("none"):
        return Recompute(), True
    if low.startswith("full"):
        return Recompute(kind="full"), True
    if low.startswith(("remat", "minimal")):
        # MaxText's "minimal" policies keep the outputs of the projections and compute the rest again.
        return Recompute(kind="selective", modules=("core_attn", "layernorm", "mlp_act")), True
    if "mla" in low and "rmsnorm" in low:
        return Recompute(kind="selective", modules=("layernorm", "mla_up_proj")), True
    modules = re.findall(r"[a-z_]+", low.partition(":")[2])
    if modules:
        return Recompute(kind="selective", modules=tuple(modules)), True
    if "layer" in low:
        # torchtitan's "selective layer" checkpoints every second layer.
        return half, True
    if "sac" in low or " op" in low or "torchtitan" in low:
        # torchtitan's per-op policy keeps attention and every second matmul, and computes the rest again.
        return Recompute(kind="selective", modules=("layernorm", "mlp_act", "half_matmuls")), True
    if record.text("source").lower().startswith("ibm"):
        return half, True  # fms-fsdp checkpoints a share of the blocks; how large is not said
    return Recompute(kind="selective", modules=("core_attn",)), True


def is_sequence_parallel(record: Record, stack: str) -> bool:
    """Megatron's sequence parallelism: said by the row, or the stack's habit where TP is used."""
    if (record.count("tp") or 1) == 1:
        return False
    said = re.search(r"sequence_parallel=(\w+)", record.notes)
    if said:
        return said[1].lower() in ("true", "1", "yes", "on")
    if re.search(r"\bSP off\b", record.notes):
        return False
    if "sequence parallel" in record.text("recompute").lower():
        return True
    if stack == "megatron" and is_before_flash(record):
        return False
    return stack in _SEQUENCE_PARALLEL


def is_super_on_h100(record: Record) -> bool:
    """Nemotron-3 Super's H100 recipe saves memory: it recomputes whole experts and keeps gradients and moments in bf16
    (recipes/nemotronh/h100/nemotron_3_super.py of Megatron-Bridge v0.6.0)."""
    return record.text("model").lower().startswith("nemotron-3-super") and record.text("gpu") == "H100"


def optimizer(record: Record, stack: str) -> str:
    """The optimizer's state: Megatron keeps bf16 weights and an fp32 master copy, FSDP code keeps fp32 shards."""
    if "muon" in record.notes.lower():
        return "muon"
    if stack == "megatron-bridge" and is_super_on_h100(record):
        return "adamw_bf16_moments"
    return "adamw_fp32" if stack in _FULL_PRECISION_SHARDS else "adamw"


def fp8_scaling(record: Record) -> str:
    """delayed, tensor (current scaling), blockwise, mx or nv; "" for bf16 and fp16."""
    text = record.text("precision").lower()
    if "nvfp4" in text:
        return "nv"
    if "mx" in text:
        return "mx"
    if "fp8" not in text:
        return ""
    if "block" in text:
        return "blockwise"
    return "tensor" if "-cs" in text or "tensorwise" in text or "torchao" in text else "delayed"


def switches(record: Record, stack: str) -> dict[str, str]:
    """Everything else a row turns on, as pairs for the stack."""
    notes = record.notes
    found = {
        "attention": attention_kernel(record, stack),
        "norms": norm_kernel(record, stack),
        "cuda_graphs": cuda_graphs(record, stack),
        "fp8_scaling": fp8_scaling(record),
    }
    is_own = record.text("source").lower().startswith("megatron-lm")
    if stack == "megatron" and is_own and not is_before_flash(record):
        # Megatron-LM's own recipes from 2024 on: bf16 gradients, FP8 weights where the GEMMs are FP8. Others who run it
        # have its defaults, and --bf16 turns gradients in fp32 on.
        found.update(grad_dtype="bf16", reduce_dtype="bf16", fp8_params="on")
    if stack == "megatron" and is_before_flash(record):
        found["dropout"] = "on"  # Megatron's GPT default of that time, 0.1; its masks are kept and its passes cost
    if stack == "torchtitan" and "2024" in record.text("source") + record.text("version"):
        found["loss"] = "unfused"  # the loss was compiled from 2025 on
    if record.count("experts") or "moe" in notes.lower() or record.text("model").lower().startswith("nemotron-3"):
        found["dispatcher"] = dispatcher(record, stack)
        found["permute_fusion"] = "off" if "moe_permute_fusion disabled" in notes else "on"
    if stack == "megatron-bridge" and found["cuda_graphs"] == "full" and "dispatcher" in found:
        found["fused_grouped_mlp"] = "on"  # those of full-iteration graphs fuse the experts' GEMMs (v0.5.0)
    texts = f"{notes} | {record.text('precision')} | {record.text('version')}"
    for name, value, pattern in _WORDS["switches"]:
        if re.search(pattern, texts):
            found[name] = value
    if stack == "megatron-bridge" and is_super_on_h100(record):
        found["grad_dtype"] = "bf16"
    if "fp8 all-gather" in record.text("precision"):
        found["fp8_all_gather"] = "on"
    per_param = re.search(r"\((\d+) B/param", notes)
    if per_param:
        found["state_bytes_per_param"] = per_param[1]
    return {key: value for key, value in found.items() if value}


def capacity_factor(record: Record) -> float | None:
    """Rows per expert over the even share that are kept, where tokens are dropped or padded to a fixed capacity."""
    fixed = re.search(r"(\d+\.\d+)x fixed expert capacity", record.notes)
    if fixed:
        return float(fixed[1])
    return 1.0 if re.search(r"token-?drop", record.notes.replace(" ", ""), re.IGNORECASE) else None


def is_balanced(record: Record) -> bool:
    """Benchmarks override the router; runs with natural routing have busier and idler experts."""
    return not re.search(r"natural (MoE )?routing|memory-boundary", record.notes)
