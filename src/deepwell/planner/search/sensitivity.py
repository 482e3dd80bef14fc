"""What a plan hangs on: one step of each degree, less memory, a slower network, another overlap. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepwell.errors import ConfigError, DeepwellError
from deepwell.graph.table import text_table
from deepwell.hardware.codec import JsonValue
from deepwell.hardware.model import Hardware
from deepwell.planner.estimate import estimate
from deepwell.planner.executable import why_not_executable
from deepwell.planner.layout import SHARDINGS, Layout, Recompute
from deepwell.planner.overlap import WORDS, hides, in_use, switched
from deepwell.planner.plan_values import PlanValues
from deepwell.planner.search.explore import Explorer
from deepwell.planner.search.space import divisors, make_space
from deepwell.planner.validity import REPLICATES_KV, model_facts, why_not_cp, why_not_ep, why_not_layout, why_not_tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing changed: the new step and memory, or why it cannot be."""

    what: str
    kind: str  # "degree" or "machine"
    step_s: float | None = None
    slower: float | None = None  # share of the plan's step; below 0: faster
    peak_gib: float | None = None
    fits: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity(JsonValue):
    """The changes that were tried."""

    step_s: float
    peak_gib: float
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        rows = []
        for c in self.changes:
            time = "" if c.slower is None else f"{c.slower:+.1%}"
            memory = "" if c.peak_gib is None else f"{c.peak_gib:.1f} GiB"
            rows.append((c.what, time, memory, "yes" if c.fits else "no", c.note))
        header = ("change", "step", "peak", "fits", "")
        return "\n".join(line.rstrip() for line in text_table([header, *rows], right=(1, 2)))


def sensitivity(plan: PlanValues) -> Sensitivity:
    """Every change that is one step away from the plan."""
    changes = [*_degrees(plan), *_machine(plan)]
    return Sensitivity(step_s=plan.step_s, peak_gib=plan.peak_gib, changes=tuple(changes))


def _degrees(plan: PlanValues) -> Iterator[Change]:
    seen = {plan.layout}
    for what, changes in _neighbours(plan):
        try:
            layout = changes if isinstance(changes, str) else replace(plan.layout, **changes)
        except ConfigError as error:  # the rule that refuses it
            layout = str(error)
        if isinstance(layout, str):
            yield Change(what=what, kind="degree", note=layout)
        elif layout not in seen:
            seen.add(layout)
            yield _changed(plan, what, layout, plan.hardware)


def _changed(plan: PlanValues, what: str, layout: Layout, hw: Hardware, kind: str = "degree") -> Change:
    reason = _why_not(plan, layout)
    if reason:
        return Change(what=what, kind=kind, note=reason)
    try:
        found = estimate(plan.workload, hw, layout, plan.stack)
    except ConfigError as error:
        return Change(what=what, kind=kind, note=str(error))
    limit = plan.limit_gib if plan.limit_gib is not None else float("inf")
    over = found.peak_gib - limit
    return Change(
        what=what,
        kind=kind,
        step_s=found.step_s,
        slower=found.step_s / plan.step_s - 1,
        peak_gib=found.peak_gib,
        fits=over <= 0,
        note=f"{over:.1f} GiB over" if over > 0 else "",
    )


def _why_not(plan: PlanValues, layout: Layout) -> str:
    facts, work = model_facts(plan.workload.ir), plan.workload
    replicates = plan.stack.name in REPLICATES_KV
    return (
        why_not_tp(facts, layout.tp, plan.hardware, replicates_kv=replicates)
        or why_not_cp(facts, layout.cp, work.seq_len, layout.context_parallel_kind)
        or why_not_ep(facts, layout.ep, layout.etp)
        or why_not_layout(facts, layout, work.seq_len, work.global_batch)
        or why_not_executable(layout, work, plan.stack)
    )


def _neighbours(plan: PlanValues) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """The changes that lie one step away, or why one cannot be. Data parallelism takes up what a degree gives."""
    layout = plan.layout
    for name in ("tp", "pp", "cp"):
        for value in _steps(getattr(layout, name), layout.gpus):
            what = f"{name.upper()} {getattr(layout, name)} -> {value}"
            others = layout.gpus // layout.dp // getattr(layout, name) * value
            dp, rest = divmod(layout.gpus, others)
            yield what, f"{layout.gpus} GPUs do not divide" if rest else _with_degree(layout, name, value, dp)
    if model_facts(plan.workload.ir).is_moe:
        for value in _steps(layout.ep, layout.dp * layout.cp * layout.tp):
            yield f"EP {layout.ep} -> {value}", {"ep": value}
        for value in _steps(layout.etp, layout.tp if layout.tp > 1 else layout.dp * layout.cp):
            yield f"ETP {layout.etp} -> {value}", {"etp": value}
    for value in (layout.micro_batch * 2, layout.micro_batch // 2):
        if value:
            yield f"MBS {layout.micro_batch} -> {value}", {"micro_batch": value}
    for value in (layout.virtual_stages + 1, layout.virtual_stages - 1):
        if layout.pp > 1 and layout.schedule in ("1f1b", "interleaved") and value > 0:
            schedule = "interleaved" if value > 1 else "1f1b"
            changed = {"virtual_stages": value, "schedule": schedule, "stage_layers": None}
            yield f"VPP {layout.virtual_stages} -> {value}", changed
    if layout.sharding != "ddp":
        for value in _steps(layout.dp_replicate, layout.dp):
            yield f"HSDP {layout.dp_replicate} -> {value}", {"dp_replicate": value}
    if layout.pp > 1 and layout.schedule != "1f1b":
        plain = {"schedule": "1f1b", "virtual_stages": 1, "stage_layers": None}
        yield f"schedule {layout.schedule} -> 1f1b", plain
    for recompute in (Recompute(), Recompute(kind="selective", modules=("layernorm",)), Recompute(kind="full")):
        if recompute.kind != layout.recompute.kind:
            yield f"recompute {layout.recompute} -> {recompute}", {"recompute": recompute}
    if layout.dp * layout.cp > 1:
        place = SHARDINGS.index(layout.sharding)
        for kind in (*SHARDINGS[:place][-1:], *SHARDINGS[place + 1 :][:1]):
            yield f"sharding {layout.sharding} -> {kind}", {"sharding": kind, "dp_replicate": 1}


def _steps(value: int, total: int) -> list[int]:
    """The next smaller and larger divisor of what there is."""
    all_of_them = divisors(total)
    smaller = [d for d in all_of_them if d < value and value % d == 0]
    larger = [d for d in all_of_them if d > value and d % value == 0]
    return smaller[-1:] + larger[:1]


def _with_degree(layout: Layout, name: str, value: int, dp: int) -> dict[str, Any]:
    changes: dict[str, Any] = {name: value, "dp": dp}
    if name == "pp":
        changes["stage_layers"] = None
        if value == 1:
            changes |= {"schedule": "1f1b", "virtual_stages": 1}
    if name == "tp":
        changes["sequence_parallel"] = value > 1
        changes["etp"] = value if layout.etp > 1 else 1
    if dp % layout.dp_replicate:
        changes["dp_replicate"] = 1
    return changes


def _machine(plan: PlanValues) -> Iterator[Change]:
    limit = plan.limit_gib
    if limit is not None:
        yield _less_memory(plan, limit)
    fabric = plan.hardware.fabric
    for field, word in (("nic_gb_per_s", "network"), ("nvlink_gb_per_s", "NVLink")):
        value = getattr(fabric, field)
        if value and plan.hardware.num_gpus > 1:
            slow: dict[str, Any] = {field: 0.8 * value}
            if field == "nvlink_gb_per_s" and fabric.allreduce_gb_per_s:
                slow["allreduce_gb_per_s"] = 0.8 * fabric.allreduce_gb_per_s
            hw = replace(plan.hardware, fabric=replace(fabric, **slow))
            yield _changed(plan, f"{word} -20%", plan.layout, hw, "machine")


def _less_memory(plan: PlanValues, limit: float) -> Change:
    """HBM -10%: the plan itself where it still fits, else a new search under the same constraints."""
    less = 0.9 * limit
    change = partial(Change, what="HBM -10%", kind="machine")
    if plan.peak_gib <= less:
        return change(step_s=plan.step_s, slower=0.0, peak_gib=plan.peak_gib, fits=True, note="the plan still fits")
    try:
        space = make_space(plan.workload, plan.hardware, plan.stack, replace(plan.limits, max_memory=less))
        ranked = Explorer(space).run().ranked
    except DeepwellError as error:
        return change(note=str(error))
    if not ranked:
        given = "" if plan.constraints == "none" else f" with {plan.constraints}"
        return change(peak_gib=plan.peak_gib, note=f"nothing fits any more{given}")
    found, best = ranked[0].estimate, ranked[0].layout.describe()
    slower, note = found.step_s / plan.step_s - 1, f"the plan no longer fits; best then: {best}"
    return change(step_s=found.step_s, slower=slower, peak_gib=found.peak_gib, fits=True, note=note)


# ---- communication beside computation ----


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapEffect:
    """One kind of communication in a plan: whether it is hidden, who decided, and the step if it were the other way."""

    name: str
    is_on: bool
    decided_by: str
    other_s: float
    step_s: float

    def __str__(self) -> str:
        change = self.other_s / self.step_s - 1
        words = "would change nothing" if abs(change) < 5e-5 else f"would make the step {abs(change):.2%} "
        words += "" if abs(change) < 5e-5 else ("longer" if change > 0 else "shorter")
        now, other = ("beside computation", "waiting for it") if self.is_on else ("waited for", "hiding it")
        return f"{WORDS[self.name]}: {now} ({self.decided_by}); {other} {words}"


def overlap_effects(plan: PlanValues) -> tuple[OverlapEffect, ...]:
    """What each overlap of a plan gains or costs, by the same estimate that chose it."""
    found = []
    asked = plan.limits.overlap
    for name in in_use(plan.layout):
        is_on = hides(plan.layout, plan.stack, name)
        by = f"as {plan.stack.name} does"
        if getattr(plan.layout.overlap, name) is not None:
            is_asked = asked is not None and getattr(asked, name) is not None
            by = "overlap= asks for it" if is_asked else "found faster by the search"
        other = estimate(plan.workload, plan.hardware, switched(plan.layout, name, not is_on), plan.stack)
        found.append(OverlapEffect(name=name, is_on=is_on, decided_by=by, other_s=other.step_s, step_s=plan.step_s))
    return tuple(found)
