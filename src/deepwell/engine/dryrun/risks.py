"""What may go otherwise than a dry run says, as ranked sentences that each say what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from deepwell.engine.dryrun.values import Risk, Trial
from deepwell.engine.report import EngineReport
from deepwell.errors import ConfigError
from deepwell.planner.estimate import estimate
from deepwell.planner.estimate_values import GIB
from deepwell.planner.plan import Plan
from deepwell.planner.step_memory import RankTimeline

# Room that a run needs beyond its predicted peak, and how far a prediction may be off before it is a risk.
MARGIN = 0.05
TIME_BAR, MEMORY_BAR = 0.10, 0.05
# Rows of the busiest rank over the mean, as routers without a strong balancing loss show them early in training.
_IMBALANCE = 1.3
_EXPOSED, _BUBBLE = 0.20, 0.15
_WORRYING_NOTES = ("Dynamo broke", "rejected", "not met as a product", "all its logits are held")


def risks(
    plan: Plan, memory: Sequence[RankTimeline], report: EngineReport | None, trial: Trial | None
) -> tuple[Risk, ...]:
    """The gravest first; equal ones in the order they are found."""
    found = [*_memory(plan, memory), *_trial(trial), *_model(plan), *_fabric(plan), *_time(plan), *_routing(plan)]
    found += _kernels(plan, report)
    found += _trust(plan)
    return tuple(sorted(found, key=lambda risk: risk.weight))


def _memory(plan: Plan, memory: Sequence[RankTimeline]) -> Iterator[Risk]:
    limit = plan.estimate.limit_gib * GIB
    if not limit:
        yield Risk(weight=1, text=f"the memory of {plan.hardware.gpus[0].name} is not known: nothing says that it fits")
        return
    worst = max(memory, key=lambda rank: rank.device_bytes)
    spare = limit - worst.device_bytes
    where = f"on pipeline rank {worst.rank} in {worst.peak.phase}"
    if spare < 0:
        text = f"{-spare / GIB:.1f} GiB over {where}: recompute, shard more, or take a smaller micro-batch"
        yield Risk(weight=0, text=text)
    elif spare < MARGIN * limit:
        left = f"only {spare / GIB:.1f} GiB ({spare / limit:.1%}) are left {where}"
        yield Risk(weight=1, text=f"{left}: a longer batch or a fragment may end it")


def _trial(trial: Trial | None) -> Iterator[Risk]:
    if trial is None:
        return
    if trial.problem:
        yield Risk(weight=0, text=f"the real steps did not run: {trial.problem}")
    for what, ratio, bar in (("step time", trial.time_ratio, TIME_BAR), ("memory", trial.memory_ratio, MEMORY_BAR)):
        if ratio is not None and abs(ratio - 1) > bar:
            off = f"{what} was predicted {ratio - 1:+.0%} off what was measured here"
            yield Risk(weight=2, text=f"{off}: trust the plan's {what} that much less")


def _model(plan: Plan) -> Iterator[Risk]:
    positions, seq_len = plan.workload.ir.max_positions, plan.workload.seq_len
    if positions and seq_len > positions:
        text = f"seq_len {seq_len:,} is over the model's {positions:,} positions: extend them before training"
        yield Risk(weight=1, text=text)


def _fabric(plan: Plan) -> Iterator[Risk]:
    layout, hw = plan.layout, plan.hardware
    domain, fabric = hw.nvlink_domain, hw.fabric
    spans = (
        ("TP", layout.tp, layout.tp),
        ("CP", layout.cp, layout.tp * layout.cp),
        ("EP", layout.ep, layout.ep * layout.etp),
    )
    for name, degree, span in spans:
        if degree > 1 and span > domain:
            text = f"{name} {degree} reaches over NVLink domains of {domain}"
            yield Risk(weight=1 if name == "TP" else 2, text=f"{text}: its traffic in every layer crosses the network")
    if hw.num_nodes > 1:
        if fabric.nic_gb_per_s is None:
            yield Risk(weight=2, text="the network's speed is not known: 100 Gb/s per GPU stands in")
        ports = len(fabric.nics)
        if 0 < ports < hw.gpus_per_node:
            text = (
                f"{hw.gpus_per_node} GPUs of a node share {ports} network port{'s' * (ports > 1)}: crossings queue up"
            )
            yield Risk(weight=2, text=text)


def _time(plan: Plan) -> Iterator[Risk]:
    exposed = sum(plan.exposed.values()) / plan.step_s
    if exposed > _EXPOSED:
        axis = max(plan.exposed, key=lambda name: plan.exposed[name])
        yield Risk(weight=3, text=f"{exposed:.0%} of the step waits for communication, most of it {axis.upper()}")
    if plan.bubble > _BUBBLE:
        text = f"pipeline bubbles take {plan.bubble:.0%} of the step: more micro-batches or virtual stages fill them"
        yield Risk(weight=3, text=text)


def _routing(plan: Plan) -> Iterator[Risk]:
    workload = plan.workload
    if not workload.ir.num_experts or not workload.forced_balance:
        return
    try:
        other = estimate(
            replace(workload, imbalance=_IMBALANCE, forced_balance=False), plan.hardware, plan.layout, plan.stack
        )
    except ConfigError as error:
        yield Risk(weight=3, text=f"uneven routing was not looked at: {error}")
        return
    slower = other.step_s / plan.step_s - 1
    room = "" if other.fits else f" and {other.peak_gib - other.limit_gib:.1f} GiB too much memory"
    yield Risk(
        weight=2 if other.fits else 1,
        text=f"the plan counts on even routing; {_IMBALANCE - 1:.0%} more rows on the busiest rank mean {slower:+.0%} "
        f"step time{room}",
    )


def _kernels(plan: Plan, report: EngineReport | None) -> Iterator[Risk]:
    if report is None:
        missing = [choice for choice in plan.kernels if "no configuration of the catalog" in choice.note]
        if missing:
            names = ", ".join(dict.fromkeys(choice.format for choice in missing))
            yield Risk(weight=2, text=f"the catalog has no {names} kernel for {plan.hardware.gpus[0].name}")
        return
    emulated = {row.path for row in report.bindings if row.binding == "emulated"}
    if emulated:
        text = f"{len(emulated)} linear layers are emulated on {report.device}: exact numbers, not the target's speed"
        yield Risk(weight=2, text=text)
    stayed = {row.path for row in report.bindings if "would not gain" in row.reason}
    if stayed:
        yield Risk(
            weight=3, text=f"{len(stayed)} linear layers stay in bf16: FP8 would not gain there, and was planned to"
        )
    failed = [row for row in report.bindings if "self-check" in row.reason]
    if failed:
        yield Risk(
            weight=2, text=f"{len({row.path for row in failed})} linear layers miss their kernel: {failed[0].reason}"
        )
    for note in report.notes:
        if any(words in note for words in _WORRYING_NOTES):
            yield Risk(weight=3, text=note)


def _trust(plan: Plan) -> Iterator[Risk]:
    gpu = plan.hardware.gpus[0]
    if not any(curve.tier == "measured" for curve in gpu.curves):
        tiers = f"{plan.estimate.tier} tier, +-{plan.estimate.error_band:.0%}"
        text = f"nothing was measured on {gpu.name} ({tiers}): run `deepwell probe --measure` there"
        yield Risk(weight=4, text=text)
    if plan.stack.fitted_on.startswith("no "):
        yield Risk(weight=4, text=f"the constants of stack {plan.stack.name} are fitted on {plan.stack.fitted_on}")
