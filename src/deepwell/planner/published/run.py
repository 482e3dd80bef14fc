"""One published run as planner inputs and measured outputs, or the reason why it cannot be predicted. Pure.

for run in read_runs("published_runs.csv"):
    if run.reason is None:
        estimate(run.workload, run.hardware, run.layout, run.stack)
"""

import functools
import re
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import deepwell.planner.published.switches as software
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.graph.ir import IR
from deepwell.hardware.model import Hardware
from deepwell.planner.estimate_values import GIB
from deepwell.planner.layout import Layout, Offload, Recompute, Sharding
from deepwell.planner.published.cluster import hardware_of, is_nvidia
from deepwell.planner.published.models import build_ir
from deepwell.planner.published.record import Record, parse_records, read_records
from deepwell.planner.stack import Stack, get_stack
from deepwell.planner.workload import Lora, Workload
from deepwell.precision.policy import PrecisionPolicy

_UNITS = {"tib": 1024.0 * GIB, "gib": float(GIB), "mib": 1024.0**2, "kib": 1024.0, "b": 1.0}
_UNITS |= {"tb": 1e12, "gb": 1e9, "mb": 1e6, "kb": 1e3}
MemoryKind = Literal["allocated", "rank0", "nvidia-smi"]
Outcome = Literal["ok", "oom", "memory", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the source measured. `outcome` is ok, oom, memory (a memory figure without a run) or other."""

    outcome: Outcome
    step_s: float | None = None
    ranking_s: float | None = None  # step_s, or a time behind the published TFLOP/s that only orders layouts
    memory_bytes: float | None = None
    memory_kind: MemoryKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A row of the file: who published it, what was run, what came out. `reason` says why it cannot be predicted."""

    row_id: str
    line: int
    source: str
    version: str
    model: str
    gpu: str
    num_gpus: int
    tier: str
    measured: Measured
    workload: Workload | None = None
    hardware: Hardware | None = None
    layout: Layout | None = None
    stack: Stack | None = None
    reason: str | None = None
    assumptions: tuple[str, ...] = ()
    group: tuple[str, ...] = ()  # rows of one group differ in their layout only
    is_recompute_known: bool = True

    @property
    def is_nvidia(self) -> bool:
        return is_nvidia(self.gpu)

    def __str__(self) -> str:
        what = self.reason if self.layout is None else f"{self.layout}, {self.stack}"
        return f"row {self.row_id}: {self.source}, {self.model} on {self.num_gpus} {self.gpu}: {what}"


def packaged_runs() -> tuple[RunRow, ...]:
    """The runs that ship with Deepwell."""
    name = "published_runs.csv"
    text = resources.files("deepwell.planner").joinpath("data", name).read_text(encoding="utf-8")
    return tuple(build_run(record) for record in parse_records(text, name))


def read_runs(path: str | Path) -> tuple[RunRow, ...]:
    """The runs of a CSV file with the columns of published_runs.csv. Raises ConfigError where it is malformed."""
    return tuple(build_run(record) for record in read_records(path))


def build_run(record: Record) -> RunRow:
    """A row as a run; what is missing or unknown becomes its reason."""
    run = RunRow(
        row_id=record.text("row_id") or str(record.line),
        line=record.line,
        source=record.text("source"),
        version=record.text("version"),
        model=record.text("model"),
        gpu=record.text("gpu"),
        num_gpus=record.count("num_gpus") or 0,
        tier=record.text("tier")[:1],  # "A+" is an A
        measured=_measured(record),
    )
    try:
        return _with_inputs(run, record)
    except (ConfigError, UnsupportedError) as error:
        return replace(run, reason=str(error))


def _with_inputs(run: RunRow, record: Record) -> RunRow:
    if run.measured.outcome == "other":
        raise ConfigError(f"status {record.text('status')!r}: nothing was measured")
    stack = software.stack_name(record)
    hardware = hardware_of(record)
    assumptions: list[str] = []
    sizes = _sizes(record, assumptions)
    pad = 128 * sizes["tp"] if stack in ("megatron", "megatron-bridge", "nemo", "mlperf") else 1
    ir = build_ir(record, pad)
    layout = _layout(record, stack, sizes, ir, assumptions)
    layout.accumulation(sizes["global_batch"])
    layout.layers_of_stages(ir.num_layers)
    workload = Workload(
        ir=ir,
        seq_len=sizes["seq_len"],
        global_batch=sizes["global_batch"],
        policy=_policy(record, assumptions),
        optimizer=software.optimizer(record, stack),
        attention_kernel=software.attention_kernel(record, stack),
        capacity_factor=software.capacity_factor(record),
        forced_balance=software.is_balanced(record),
        lora=Lora() if "task=LoRA" in record.notes else None,
    )
    if "task=SFT" in record.notes or "task=LoRA" in record.notes:
        assumptions.append("sequences taken as full; the source packs instruction data")
    measured, tokens = run.measured, record.number("tokens_per_s_per_gpu")
    if measured.outcome == "ok" and measured.step_s is None and tokens is not None:
        measured = replace(measured, step_s=workload.tokens_per_step / tokens / run.num_gpus)
    return replace(
        run,
        measured=replace(measured, ranking_s=measured.step_s or _step_from_tflops(record, workload)),
        workload=workload,
        hardware=hardware,
        layout=layout,
        stack=get_stack(stack, version=record.text("version"), **software.switches(record, stack)),
        assumptions=tuple(assumptions),
        group=_group(record, stack, sizes),
        is_recompute_known=software.recompute(record, 1)[1] or software.habit(record, stack).is_recompute_known,
    )


def recompute_candidates(run: RunRow) -> tuple[RunRow, ...]:
    """The run as read and, where its recomputation is not published, with more and more of it.

    Benchmarks recompute no more than they must, so the first of these that fits is what was run most likely.
    """
    if run.is_recompute_known or run.layout is None:
        return (run,)
    layout = run.layout
    choices = [layout]
    if layout.recompute.kind == "none":
        light = Recompute(kind="selective", modules=("layernorm", "mlp_act", "moe_act"))
        choices.append(replace(layout, recompute=light))
    if run.stack is not None and run.stack.name == "megatron-bridge" and layout.sharding == "zero3":
        # Its FSDP configs send the activations of half to three quarters of the layers to the host instead
        # (cpu_offloading_num_layers 40 of 80 and 95 of 126 at v0.1.0).
        choices[1:] = [replace(layout, offload=Offload(activations=share)) for share in (0.5, 0.75)]
    choices.append(replace(layout, recompute=Recompute(kind="full")))
    found = []
    for choice in choices:
        share = choice.offload.activations
        away = f" and {share:.0%} of the activations offloaded" if share else ""
        said = f"recompute {choice.recompute}{away}: not published"
        found.append(replace(run, layout=choice, assumptions=(*run.assumptions, said)))
    return tuple(found)


# ---- what was measured ----


def _measured(record: Record) -> Measured:
    status = record.text("status").lower()
    if status.startswith("memory"):
        outcome: Outcome = "memory"
    elif re.search(r"\boom\b|out[ -]of[ -]memory", status):
        outcome = "oom"
    else:
        outcome = "ok" if re.match(r"(ok|success|succeeded|completed?)\b", status) else "other"
    step = record.number("step_time_s") if outcome == "ok" else None  # from tokens a second once the batch is known
    size, kind = _memory(record)
    return Measured(outcome=outcome, step_s=step, memory_bytes=size, memory_kind=kind)


def _step_from_tflops(record: Record, workload: Workload) -> float | None:
    """A step time where only model TFLOP/s are published, counted as Megatron does now: causal attention, one head.

    Good enough to rank layouts of one group, where a constant factor cancels; not to score a prediction.
    """
    speed, convention = record.number("model_tflops_per_gpu"), record.text("flops_convention").lower()
    counts_as_we_do = not convention or "causal" in convention or "megatron-core" in convention
    if speed is None or not counts_as_we_do or _measured(record).outcome != "ok":
        return None
    flops = workload.ir.train_flops(workload.global_batch, workload.seq_len)
    return flops / (speed * 1e12 * (record.count("num_gpus") or 1))


def _memory(record: Record) -> tuple[float | None, MemoryKind | None]:
    """Bytes and what they count; a unit that is no number of bytes (a share of the GPU, a blank) is none of ours."""
    size, unit = record.number("peak_mem_gb"), record.text("mem_unit").lower()
    named = re.search(r"\b([tgmk]?i?b)\b", unit)
    if size is None or named is None or named[1] not in _UNITS:
        return None, None
    size *= _UNITS[named[1]]
    if "nvidia-smi" in unit:
        return size, "nvidia-smi"
    is_first = "rank-0" in unit or "first-stage" in record.notes
    return size, "rank0" if is_first else "allocated"


# ---- degrees and sizes ----


def _sizes(record: Record, assumptions: list[str]) -> dict[str, int]:
    sizes = {name: record.count(name) for name in ("seq_len", "global_batch", "tp", "pp", "cp", "dp", "micro_batch")}
    gpus = record.count("num_gpus") or 0
    if sizes["tp"] is None and sizes["pp"] is None and sizes["dp"] is None:
        raise ConfigError("tp, pp, dp: the source does not publish the layout")
    tp, pp, cp = (sizes[name] or 1 for name in ("tp", "pp", "cp"))
    dp, rest = divmod(gpus, tp * pp * cp)
    if rest or not dp:
        raise ConfigError(f"num_gpus {gpus} is no multiple of tp {tp} x pp {pp} x cp {cp}")
    seq_len = sizes["seq_len"]
    if seq_len is None:
        found = re.search(r"seq_len not restated \((\d+) default", record.notes)
        if not found:
            raise ConfigError("seq_len: is blank")
        seq_len = int(found[1])
        assumptions.append(f"sequence length {seq_len}, the recipe's default")
    micro, batch = sizes["micro_batch"], sizes["global_batch"]
    rounds = re.search(r"micro_num (\d+)", record.notes)
    if batch is None and micro is not None and rounds:
        batch = micro * int(rounds[1]) * dp
        assumptions.append("global batch from the micro-batches that the source gives")
    ramp = re.search(r"batch \d+->(\d+)", record.notes)
    if batch is None and ramp:
        batch = int(ramp[1])
        assumptions.append(f"global batch {batch}, at the end of its ramp")
    if batch is None and _measured(record).outcome == "oom":
        batch = dp * (micro or 1)
        assumptions.append(f"global batch {batch}: the smallest, as it ran out of memory")
    if batch is None:
        raise ConfigError("global_batch: is blank")
    if micro is None:
        micro = _assumed_micro_batch(record, batch, dp, pp, seq_len)
        assumptions.append(f"micro-batch {micro}: not published")
    return {
        "seq_len": seq_len, "global_batch": batch, "micro_batch": micro, "tp": tp, "pp": pp, "cp": cp, "dp": dp
    }  # fmt: skip


def _assumed_micro_batch(record: Record, batch: int, dp: int, pp: int, seq_len: int) -> int:
    """A usual micro-batch where none is published: 1 in a pipeline that keeps activations, else up to 8,192 tokens
    while four micro-batches for every stage are left (one, without a pipeline)."""
    each, rest = divmod(batch, dp)
    if rest or not each:
        raise ConfigError(f"global_batch {batch} is no multiple of dp {dp}")
    is_full = record.text("recompute").lower().startswith("full")
    most = 1 if pp > 1 and not is_full else max(1, 8192 // seq_len)
    fewest = 4 * pp if pp > 1 else 1
    return max(m for m in range(1, most + 1) if m == 1 or (each % m == 0 and each // m >= fewest))


def _layout(record: Record, stack: str, sizes: dict[str, int], ir: IR, assumptions: list[str]) -> Layout:
    tp, pp, cp, dp = (sizes[name] for name in ("tp", "pp", "cp", "dp"))
    sharding, replicas = _sharding(record, stack, dp)
    is_dual = pp > 1 and "DualPipe" in record.notes  # every rank holds a chunk of the way in and one of the way back
    virtual = 2 if is_dual else _virtual_stages(record, pp, ir.num_layers, assumptions)
    per_stage = max(1, ir.num_layers // pp)
    again, is_said = software.recompute(record, per_stage)
    if not is_said:
        again = _habitual_recompute(record, stack)
    ep = record.count("ep") or 1
    # Where a NeMo row is silent experts are cut as the dense layers are.
    is_cut = stack == "nemo" and record.count("experts") is not None and (dp * cp) % ep == 0
    graphs = software.cuda_graphs(record, stack)
    offloaded = re.search(r"activation CPU offload (\d+) layers", record.notes)
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=record.count("etp") or (tp if is_cut else 1),
        dp_replicate=replicas,
        sharding=sharding,
        sequence_parallel=software.is_sequence_parallel(record, stack),
        schedule="dualpipev" if is_dual else "interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        stage_layers=_stage_layers(record, pp * virtual, ir.num_layers),
        micro_batch=sizes["micro_batch"],
        recompute=again,
        offload=Offload(activations=min(1.0, int(offloaded[1]) / per_stage) if offloaded else 0.0),
        overlap=software.overlap(record, stack),
        context_parallel_kind="allgather" if stack in ("maxtext", "paxml", "meta") else "ring",
        cuda_graphs=graphs != "off",
    )


def _habitual_recompute(record: Record, stack: str) -> Recompute:
    """What a stack does where the source is silent: published benchmarks recompute nothing unless memory asks for it.

    JAX stacks rematerialize by default, Megatron-Bridge has its habits.
    """
    modules = software.habit(record, stack).recompute
    if modules:
        return Recompute(kind="selective", modules=modules)
    if stack == "maxtext":
        return Recompute(kind="full")  # its default policy; the 70B models do not fit with less
    if stack == "paxml":
        return Recompute(kind="selective", modules=("core_attn", "layernorm", "mlp_act"))
    return Recompute()


def _sharding(record: Record, stack: str, dp: int) -> tuple[Sharding, int]:
    """ZeRO stage and how many copies of the shards there are."""
    kind = record.text("dp_kind").lower()
    within = re.search(r"within (\d+) gpus", kind)
    if within:
        return "zero1", max(1, dp // int(within[1]))
    if "shard_grad_op" in kind or "zero-2" in kind:
        return "zero2", 1
    if "hsdp" in kind:
        return "zero3", max(1, dp // 8)
    if "fsdp" in kind or "zero-3" in kind or "fully-sharded" in kind:
        degree = record.count("dp")
        replicas = dp // degree if degree and degree < dp and dp % degree == 0 else 1
        return "zero3", replicas
    if record.text("model").lower().startswith("nemotron-3-ultra") and stack == "megatron-bridge":
        # Its recipes run Megatron-FSDP, sharded inside NVLink domains of 64 (perf_recipes/nemotronh at v0.6.0).
        return "zero3", max(1, dp * (record.count("tp") or 1) // 64)
    if kind.startswith("none") or "no zero" in kind or "zero-0" in kind:
        return "ddp", 1
    return "zero1", 1


def _virtual_stages(record: Record, pp: int, layers: int, assumptions: list[str]) -> int:
    said = record.count("vpp")
    if pp == 1:
        return 1
    if said is not None:
        return said
    if "interleaved schedule" in record.notes and layers % (2 * pp) == 0:
        assumptions.append("interleaved with 2 chunks per rank: the number is not published")
        return 2
    return 1


def _stage_layers(record: Record, stages: int, layers: int) -> tuple[int, ...] | None:
    """Layers of every stage where the row's layout or the usual trick says so: embedding and head as a layer each."""
    written = re.search(r"pp_layout=([^;\s]+)", record.notes)
    if written:
        counts = parse_pp_layout(written[1])
        if len(counts) == stages and sum(counts) == layers:
            return counts
    if stages == 1 or layers % stages == 0:
        return None
    model = record.text("model").lower()
    if re.match(r"deepseek-v3|kimi", model):
        # Megatron-Bridge fills its layouts of DeepSeek-V3 from the front and leaves the rest to head and prediction
        # layer (recipes/deepseek/deepseek_v3.py at v0.5.0).
        each = -(-layers // stages)
        rest = layers - each * (stages - 1)
        return (*([each] * (stages - 1)), rest) if rest > 0 else None
    each, rest = divmod(layers + 2, stages)
    if rest == 0 and each >= 1:
        return (each - 1, *([each] * (stages - 2)), each - 1)
    return None


def parse_pp_layout(text: str) -> tuple[int, ...]:
    """Layers of every stage of a Megatron layout: E embedding, t layer, m prediction layer, L loss, | between stages.

    `x*n` and `(...)*n` repeat; "Et*4|(t*4|)*14tmL" has 16 stages. Raises ConfigError for anything else.
    """
    expanded = text.replace(" ", "")
    for _ in range(8):
        done = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), expanded)
        done = re.sub(r"([EtmL|])\*(\d+)", lambda m: m[1] * int(m[2]), done)
        if done == expanded:
            break
        expanded = done
    if re.search(r"[^EtmL|]", expanded):
        raise ConfigError(f"pp_layout {text!r}: written with E, t, m, L, |, and repeats as t*4 or (t|)*14")
    return tuple(stage.count("t") + stage.count("m") for stage in expanded.split("|"))


# ---- formats and groups ----


@functools.lru_cache(maxsize=16)
def _policy_named(name: str) -> PrecisionPolicy | str:
    if name == "blockwise":
        return PrecisionPolicy.recipe("fp8", scaling="1x128").freeze()
    if name == "nvfp4":
        # Benchmarks run every layer in NVFP4; the recipe that trains well keeps the ends in bf16.
        return PrecisionPolicy("nvfp4").freeze()
    if name == "nvfp4 of nemotron-3-super":
        # scripts/performance/configs/nemotronh/te_quant.cfg of Megatron-Bridge v0.5.0
        policy = PrecisionPolicy("nvfp4")
        for pattern in ("attention", "path:*_latent_proj", "path:mtp.*"):
            policy.set_layer_precision(pattern, "bf16")
        policy.set_layer_precision("path:*mixer.out_proj", "mxfp8")
        return policy.freeze()
    return name


def _policy(record: Record, assumptions: list[str]) -> PrecisionPolicy | str:
    text = record.text("precision").lower()
    if "fp4" in text:
        is_mixed = record.text("model").lower().startswith("nemotron-3-super")
        return _policy_named("nvfp4 of nemotron-3-super" if is_mixed else "nvfp4")
    if "mxfp8" in text or "fp8-mx" in text:
        return _policy_named("mxfp8")
    if "fp8" in text and not text.startswith(("bf16", "fp16")):
        return _policy_named("blockwise" if "block" in text else "fp8")
    if not text or "not stated" in text:
        assumptions.append("16-bit training: the precision is not published")
    elif not re.search(r"bf16|fp16", text):
        raise ConfigError(f"precision {record.text('precision')!r} is not known here")
    return _policy_named("bf16")


def _group(record: Record, stack: str, sizes: dict[str, int]) -> tuple[str, ...]:
    """What rows of one group share: source, model, GPU, count, sequence, batch, precision, version and kernels."""
    parts: tuple[Any, ...] = (
        record.text("source"), record.text("model"), record.count("heads"), record.text("gpu"),
        record.count("num_gpus"), sizes["seq_len"], sizes["global_batch"], record.text("precision"),
        record.text("version"),
        software.attention_kernel(record, stack), software.norm_kernel(record, stack),
    )  # fmt: skip
    return tuple(str(part) for part in parts)
