"""A Plan: how one training job runs on one machine, what it will cost, and what was not chosen and why. Pure, frozen.

    plan = dw.autoplan(ir, hw="8x8xB200", seq_len=8192, global_batch=1024)
    print(plan); plan.explain(); plan.diff(other); plan.sensitivity(); plan.to_json()

A plan holds its whole problem (model, machine, formats), so a file of it can be explained, varied and run elsewhere.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields

from deepwell.graph.table import WIDTH, short_count, text_table
from deepwell.planner.estimate_values import GIB, Estimate
from deepwell.planner.export.targets import export
from deepwell.planner.layout import Layout
from deepwell.planner.plan_values import Alternative, PlanValues
from deepwell.planner.search.explore import WORDS
from deepwell.planner.search.sensitivity import Sensitivity, overlap_effects, sensitivity

_SHOWN_RANKS = 8
_SHOWN_REJECTED = 12
_SHOWN_CHANGES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanValues):
    """The answer of `autoplan`. Equal plans solve the same problem the same way."""

    def __str__(self) -> str:
        parts = (_verdict, _ranked, _memory, _time, _kernels, _rejected, _remarks)
        texts = ("\n".join(line.rstrip() for line in part(self)) for part in parts)
        return "\n\n".join(text for text in texts if text)

    def explain(self) -> str:
        """Why this layout: what each degree buys, what one step of it would cost, what was rejected."""
        return "\n".join(line.rstrip() for line in _explanation(self))

    def diff(self, other: Plan) -> str:
        """What differs between two plans, field by field."""
        mine, theirs = _fields(self), _fields(other)
        rows = [(name, text, theirs[name]) for name, text in mine.items() if text != theirs[name]]
        if not rows:
            return "the plans are equal"
        figures = _figures(self, other)
        return "\n".join(line.rstrip() for line in text_table([("", "this", "other"), *rows, *figures]))

    def sensitivity(self) -> Sensitivity:
        """One step of each degree, less memory, a slower network: what happens to time and memory."""
        return sensitivity(self)

    def export(self, target: str) -> str:
        """The plan in another engine's words: "megatron" (arguments), "torchtitan" (TOML) or "deepwell" (JSON)."""
        return export(self, target)


# ---- the table ----


def _verdict(plan: Plan) -> list[str]:
    found, ir = plan.estimate, plan.workload.ir
    limit = f" of {plan.limit_gib:.1f}" if plan.limit_gib is not None else ""
    policy = plan.workload.policy if isinstance(plan.workload.policy, str) else plan.workload.main_format
    unit = ("CPU" if plan.hardware.kind == "cpu" else "GPU") + ("" if plan.machine_gpus == 1 else "s")
    used = (
        f"{plan.gpus:,} of {plan.machine_gpus:,} {unit}" if plan.gpus != plan.machine_gpus else f"{plan.gpus:,} {unit}"
    )
    return [
        f"plan for {plan.model} ({short_count(ir.num_params)} parameters, {ir.num_layers} layers) on {plan.machine}, "
        f"{used}, {plan.goal}",
        f"  {plan.workload.global_batch:,} x {plan.workload.seq_len:,} tokens per step, {policy}, "
        f"{plan.workload.optimizer}, stack {plan.stack.name}",
        f"  {plan.layout.describe()}, schedule {plan.layout.schedule}, {plan.accumulation} micro-batches"
        + (f", layers {_layers(plan)}" if plan.layout.pp > 1 else ""),
        f"  predicted step {found.step_s:.3f} s +-{found.error_band:.0%} ({found.tier} tier), "
        f"{found.tokens_per_s_per_gpu:,.0f} tokens/s/{unit[:3]}, MFU {found.mfu_bf16:.1%} of the bf16 peak, "
        f"{found.mfu_weighted:.1%} of the formats' own",
        f"  peak {found.peak_gib:.1f}{limit} GiB on the fullest rank, bubble {plan.bubble:.1%}, exposed communication "
        f"{sum(plan.exposed.values()) / plan.step_s:.1%}",
    ]


def _layers(plan: Plan) -> str:
    """Stage sizes, runs folded: "4, 14 x 8, 6"."""
    runs = [(count, len(list(alike))) for count, alike in itertools.groupby(plan.stage_layers)]
    return ", ".join(str(count) if times == 1 else f"{times} x {count}" for count, times in runs)


def _ranked(plan: Plan) -> list[str]:
    found = plan.estimate
    header = ("", "layout", "schedule", "step s", "tok/s/GPU", "MFU", "GiB", "bubble", "exposed", "why not")
    exposed = sum(plan.exposed.values()) / plan.step_s
    rows = [_ranked_row(1, plan.layout, found, (plan.bubble, exposed), "the plan")]
    for place, one in enumerate(plan.runners_up, start=2):
        rows.append(_ranked_row(place, one.layout, one, (one.bubble, one.exposed), one.why_not))
    return ["ranked", *text_table([header, *rows], right=range(3, 9))]


def _ranked_row(
    place: int, layout: Layout, found: Estimate | Alternative, shares: tuple[float, float], why_not: str
) -> tuple[str, ...]:
    return (
        str(place), layout.describe(), layout.schedule, f"{found.step_s:.3f}", f"{found.tokens_per_s_per_gpu:,.0f}",
        f"{found.mfu_bf16:.1%}", f"{found.peak_gib:.1f}", *(f"{share:.1%}" for share in shares), why_not,
    )  # fmt: skip


_MEMORY = (
    ("weights", lambda s: s.params),
    ("master", lambda s: s.master),
    ("moments", lambda s: s.moments),
    ("grads", lambda s: s.grads),
    ("copies", lambda s: s.quantized_copies),
    ("activations", lambda s: s.activation_bytes),
    ("logits", lambda s: s.logits),
    ("buffers", lambda s: s.comm_buffers + s.workspace),
    ("context", lambda s: s.context),
    ("margin", lambda s: s.fragmentation),
    ("device", lambda s: s.device),
)


def _memory(plan: Plan) -> list[str]:
    stages = plan.estimate.memory
    shown = stages if len(stages) <= _SHOWN_RANKS else (*stages[: _SHOWN_RANKS - 1], stages[-1])
    rows = [(str(stage.stage), *(f"{size(stage) / GIB:.1f}" for _, size in _MEMORY)) for stage in shown]
    left_out = f", {len(stages) - len(shown)} between not shown" if len(shown) < len(stages) else ""
    header = ("rank", *(name for name, _ in _MEMORY))
    unit = "one CPU" if plan.hardware.kind == "cpu" else "one GPU"
    return [f"GiB of {unit} per pipeline rank{left_out}", *text_table([header, *rows], right=range(1, 12))]


def _time(plan: Plan) -> list[str]:
    shown = [(name, s) for name, s in plan.estimate.breakdown if s > 0.0005 * plan.step_s]
    words = [f"{name} {1000 * s:,.0f} ms ({s / plan.step_s:.1%})" for name, s in shown]
    wrapped = textwrap.wrap(", ".join(words), WIDTH - 2, break_on_hyphens=False)
    return ["time of a step", *(f"  {line}" for line in wrapped)]


def _kernels(plan: Plan) -> list[str]:
    names: dict[str, list[str]] = {}
    for choice in plan.kernels:
        names.setdefault(f"{choice.kernel} ({choice.format})", []).append(choice.layer.rpartition(".")[2])
    lines = [f"{kernel}: {', '.join(dict.fromkeys(layers))}" for kernel, layers in names.items()]
    return (
        ["kernels (proposed; the registry measures on the device)", *(f"  {line}" for line in lines)] if lines else []
    )


def _rejected(plan: Plan) -> list[str]:
    hidden = len(plan.rejected) - _SHOWN_REJECTED
    shown = [f"  {one}" for one in plan.rejected[:_SHOWN_REJECTED]]
    more = [f"  and {hidden} more (plan.rejected)"] if hidden > 0 else []
    return ["rejected", *shown, *more] if shown else []


def _remarks(plan: Plan) -> list[str]:
    return [*(f"warning: {w}" for w in plan.warnings), *(f"note: {n}" for n in plan.notes)]


# ---- explain ----


def _explanation(plan: Plan) -> Iterator[str]:
    found = plan.estimate
    yield (
        f"{plan.layout.describe()} was chosen as the {plan.goal} of {plan.searched.layouts:,} layouts in "
        f"{plan.searched.families:,} families (constraints: {plan.constraints})."
    )
    yield ""
    yield "Where the time goes:"
    for name, seconds in sorted(found.breakdown, key=lambda item: -item[1]):
        if seconds > 0.005 * found.step_s:
            yield f"  {seconds / found.step_s:6.1%}  {WORDS.get(name, name)}"
    fullest = max(found.memory, key=lambda stage: stage.device)
    yield ""
    yield f"What fills the fullest GPU (pipeline rank {fullest.stage}, {fullest.device / GIB:.1f} GiB):"
    for name, size in sorted(((n, s(fullest)) for n, s in _MEMORY[:-1]), key=lambda item: -item[1]):
        if size > 0.01 * fullest.device:
            yield f"  {size / GIB:6.1f}  {name}"
    hidden = overlap_effects(plan)
    if hidden:
        yield ""
        yield "What runs beside computation:"
        yield from (f"  {one}" for one in hidden)
    yield ""
    yield "One step away from it:"
    for change in plan.sensitivity().changes[:_SHOWN_CHANGES]:
        time = "" if change.slower is None else f"step {change.slower:+.1%}, {change.peak_gib:.1f} GiB"
        verdict = f" ({change.note})" if change.note else ""
        yield f"  {change.what}: {time}{verdict}" if time else f"  {change.what}: {change.note}"
    kinds = {"rule": "Not possible:", "memory": "Does not fit:", "slower": "Possible, but slower at best:"}
    for kind, title in kinds.items():
        mine = [one for one in plan.rejected if one.kind == kind]
        if mine:
            yield ""
            yield title
            yield from (f"  {one}" for one in mine[:_SHOWN_REJECTED])
            if len(mine) > _SHOWN_REJECTED:
                yield f"  and {len(mine) - _SHOWN_REJECTED} more"
    if plan.warnings or plan.notes:
        yield from ("", *_remarks(plan))


# ---- diff ----


def _fields(plan: Plan) -> dict[str, str]:
    work, policy = plan.workload, plan.workload.policy
    found = {
        "model": plan.model,
        "machine": plan.machine,
        "goal": plan.goal,
        "constraints": plan.constraints,
        "sequence": work.seq_len,
        "global batch": work.global_batch,
        "precision": policy if isinstance(policy, str) else "; ".join(map(str, policy.rules)),
        "optimizer": work.optimizer,
        "routing imbalance": 1.0 if work.forced_balance else work.imbalance,
        "capacity factor": work.capacity_factor,
        "stack": plan.stack.name,
        "GPUs": plan.gpus,
        **{one.name: getattr(plan.layout, one.name) for one in fields(Layout) if one.name != "stage_layers"},
        "stage layers": _layers(plan),
        "kernels": ", ".join(dict.fromkeys(choice.kernel for choice in plan.kernels)),
        "step s": f"{plan.step_s:.4f}",
        "peak GiB": f"{plan.peak_gib:.2f}",
    }
    return {name: str(value) for name, value in found.items()}


def _figures(plan: Plan, other: Plan) -> Iterator[tuple[str, str, str]]:
    yield "tokens/s/GPU", f"{plan.tokens_per_s_per_gpu:,.0f}", f"{other.tokens_per_s_per_gpu:,.0f}"
    yield "GPU-seconds per step", f"{plan.gpu_seconds:,.0f}", f"{other.gpu_seconds:,.0f}"
    for name, seconds in plan.estimate.breakdown:
        theirs = other.estimate.seconds.get(name, 0.0)
        if max(seconds, theirs) > 0.01 * plan.step_s:
            yield f"  {name} ms", f"{1000 * seconds:,.1f}", f"{1000 * theirs:,.1f}"
