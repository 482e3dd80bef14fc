"""`dw.dryrun`: the last look before a run. Does it fit, how fast, what is bound, what may go wrong.

    report = dw.dryrun(engine)              # a few real steps where the engine's device is here, else simulated
    print(report); report.trace_json(); report.to_json()

The plan's step is simulated action by action. Where the device is here, real steps of the plan's shape run as well;
what they will take is predicted first and shown beside it. Nothing of the user's changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from deepwell.engine.compile import check_plan
from deepwell.engine.dryrun.plan import Prediction, engine_device, engine_keeps, optimizer_of, predict, shape_of
from deepwell.engine.dryrun.risks import risks
from deepwell.engine.dryrun.steps import run_trial
from deepwell.engine.dryrun.values import AxisOverlap, DryRun, FormatRow, How, Marked, RankBubble, Trial, size_text
from deepwell.engine.engine import Engine
from deepwell.engine.report import EngineReport
from deepwell.errors import ConfigError, DeepwellError, UnsupportedError
from deepwell.graph.example_inputs import ExampleInputs, resolve_inputs
from deepwell.graph.table import layers_label
from deepwell.planner.estimate import estimate
from deepwell.planner.estimate_values import GIB
from deepwell.planner.layout import Overlap
from deepwell.planner.plan import Plan
from deepwell.planner.plan_values import COMMUNICATION
from deepwell.planner.schedule.trace import plan_timeline
from deepwell.planner.step_memory import Keeps, RankTimeline, memory_timeline

# More training flops than this in one step, and a CPU runs it only on request: half a second a core.
_CPU_FLOPS = 5e10
_MOST_MICRO_BATCHES = 4


def dryrun(
    engine: Engine, *, plan: Plan | None = None, steps: int = 3, batch: Any = None, measure: bool | None = None
) -> DryRun:
    """Simulate the step of a plan, and run `steps` real ones where the engine's device is here.

    `plan` is the engine's own unless given; without one, a step of one batch on this device. `batch` is what the engine
    is called with (a tensor, a tuple or a dict); synthetic tokens of the plan's shape unless given. `measure` forces or
    forbids the real steps; by default they run on a GPU, and on a CPU where the model is small. Weights, gradients,
    buffers and random states are the same afterwards. Raises ConfigError where the plan is of another model.
    """
    if not isinstance(engine, Engine):
        raise ConfigError(f"engine is a {type(engine).__name__}; pass what dw.compile(...) returned")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"steps is {steps!r}; it must be a whole number of at least 1")
    plan = plan if plan is not None else engine.deepwell.plan
    if plan is not None:
        check_plan(plan, engine.deepwell.ir)
    inputs = _inputs(engine, plan, batch)
    size, length = _shape(inputs, plan, engine)
    before = predict(engine, size, length, _micro_batches(plan), optimizer_of(engine, plan))
    whole = plan or before.plan
    is_own = _is_same_step(whole, before)
    notes = _notes(whole, before, is_own)
    trial, why_not = _try(engine, inputs, before, steps, measure)
    notes += [f"no real steps: {why_not}"] if why_not else []
    keeps = engine_keeps(engine) if is_own else None
    return _assembled(
        whole, keeps, engine.deepwell.report(), trial, _Shown(is_own=is_own, before=before, notes=tuple(notes))
    )


def simulated(plan: Plan) -> DryRun:
    """The dry run of a plan alone, for a machine and a model that are not here."""
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan is a {type(plan).__name__}; pass what dw.autoplan(...) returned")
    note = "no engine: kernels are the plan's proposals, formats the policy's"
    return _assembled(plan, None, None, None, _Shown(is_own=False, before=None, notes=(note,)))


# ---- what is run ----


def _inputs(engine: Engine, plan: Plan | None, batch: Any) -> ExampleInputs | None:
    """The call to train on; None where nothing was given and nothing can be guessed."""
    size, length = shape_of(plan, engine.deepwell.ir)
    if batch is not None:
        return resolve_inputs(engine.deepwell.model, batch, size, length)
    if engine_device(engine).type == "meta":
        return None
    try:
        return resolve_inputs(engine.deepwell.model, None, size, length)
    except DeepwellError:
        return None  # _why_not says so; the simulation needs no batch


def _shape(inputs: ExampleInputs | None, plan: Plan | None, engine: Engine) -> tuple[int, int]:
    size, length = shape_of(plan, engine.deepwell.ir)
    if inputs is None:
        return size, length
    return inputs.batch or size, inputs.seq_len or (1 if not inputs.guessed else length)


def _micro_batches(plan: Plan | None) -> int:
    """A plan of one device accumulates as planned, up to a few; of a larger one, one micro-batch is tried."""
    return min(plan.accumulation, _MOST_MICRO_BATCHES) if plan is not None and plan.gpus == 1 else 1


def _is_same_step(plan: Plan, before: Prediction) -> bool:
    """Whether the trial is the very step that the plan speaks of."""
    mine = before.plan
    same_gpu = plan.hardware.gpus[0].name == mine.hardware.gpus[0].name
    sizes = [
        (p.workload.global_batch, p.workload.seq_len, p.layout.micro_batch, p.workload.optimizer) for p in (plan, mine)
    ]
    return plan is mine or (plan.gpus == 1 and same_gpu and sizes[0] == sizes[1])


def _notes(plan: Plan, before: Prediction, is_own: bool) -> list[str]:
    if is_own:
        return []
    mine, work = before.plan.workload, plan.workload
    return [
        f"the plan is of {plan.gpus} x {plan.hardware.gpus[0].name}, {work.global_batch:,} x {work.seq_len:,} tokens, "
        f"{work.optimizer}: its figures are simulated; what can be tried here is one device with "
        f"{mine.global_batch:,} x {mine.seq_len:,} tokens, {mine.optimizer}"
    ]


def _try(
    engine: Engine, inputs: ExampleInputs | None, before: Prediction, steps: int, measure: bool | None
) -> tuple[Trial | None, str]:
    """The trial, or why there is none. Raises UnsupportedError where one was demanded and cannot be."""
    why_not = _why_not(engine, inputs, before, measure)
    if why_not:
        if measure:
            raise UnsupportedError(f"measure=True: {why_not}")
        return None, why_not
    assert inputs is not None
    try:
        return run_trial(engine, inputs, before, steps), ""
    except (UnsupportedError, ConfigError) as error:
        if measure:
            raise
        return None, str(error)


def _why_not(engine: Engine, inputs: ExampleInputs | None, before: Prediction, measure: bool | None) -> str:
    kind = engine_device(engine).type
    if measure is False:
        return "measure=False"
    if kind == "meta":
        return "the model has no weights (meta device)"
    if inputs is None:
        return "no batch was given and none can be guessed for this model; pass batch="
    work = before.plan.workload
    flops = work.ir.train_flops(1, work.seq_len) * work.global_batch
    if kind == "cpu" and measure is None and flops > _CPU_FLOPS:
        return f"{flops / 1e12:.2f} TFLOP a step are many for a CPU; measure=True runs them all the same"
    return ""


# ---- what is said ----


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    is_own: bool  # the trial is the plan's step
    before: Prediction | None
    notes: tuple[str, ...]


def _assembled(
    plan: Plan, keeps: Keeps | None, report: EngineReport | None, trial: Trial | None, shown: _Shown
) -> DryRun:
    memory = memory_timeline(plan, keeps)
    worst = max(memory, key=lambda rank: rank.device_bytes)
    limit = plan.estimate.limit_gib * GIB
    ran_out = trial is not None and trial.problem.startswith("out of memory") and shown.is_own
    fits = not ran_out and (worst.device_bytes <= limit or not limit)
    timeline = plan_timeline(plan)
    bubbles = tuple(
        RankBubble(rank=rank, busy_s=busy, idle=1 - busy / timeline.makespan, in_flight=timeline.in_flight[rank])
        for rank, busy in enumerate(timeline.busy)
    )
    return DryRun(
        model=plan.model,
        machine=plan.machine,
        layout=plan.layout.describe(),
        fits=fits,
        verdict=_verdict(fits, worst, limit, trial, shown),
        figures=tuple(_figures(plan, worst, trial if shown.is_own else None, shown.before)),
        memory=memory,
        limit_bytes=limit,
        overlap=_overlap(plan),
        bubbles=bubbles,
        parts=tuple((name, value) for name, value in plan.estimate.breakdown if value > 0),
        precision=tuple(_precision(plan, report)),
        kernels=tuple(_kernels(plan, report)),
        risks=risks(plan, memory, report, trial),
        trial=trial,
        notes=(*shown.notes, *plan.notes),
        plan=plan,
        report=report,
    )


def _verdict(fits: bool, worst: RankTimeline, limit: float, trial: Trial | None, shown: _Shown) -> str:
    room = f"{size_text(worst.device_bytes)} of {limit / GIB:.1f} GiB on rank {worst.rank}, simulated"
    if trial is not None and trial.peak_bytes is not None and shown.is_own:
        return f"fits: it ran, {size_text(trial.peak_bytes)} allocated at the peak, measured ({room})"
    return f"{'fits' if fits else 'does not fit'}: {room}"


def _figures(plan: Plan, worst: RankTimeline, trial: Trial | None, before: Prediction | None) -> Iterator[Marked]:
    """Step time, speed, memory and waiting; measured where the trial was this very step."""
    found = plan.estimate
    step, how, tier = found.step_s, "simulated", found.tier
    if before is not None and before.plan is plan:
        step, tier = before.step_s, before.tier
    if trial is not None and trial.step_s is not None:
        step, how, tier = trial.step_s, "measured", "measured"
    mark: Any = how

    def figure(name: str, value: float, unit: str, how: How = "simulated", tier: str = found.tier) -> Marked:
        return Marked(name=name, value=value, unit=unit, how=how, tier=tier)

    yield figure("step", step, "s", mark, tier)
    yield figure("tokens", plan.workload.tokens_per_step / step / plan.gpus, "tokens/s/GPU", mark, tier)
    yield figure("mfu", found.mfu_bf16 * found.step_s / step, "of the bf16 peak", mark, tier)
    if trial is not None and trial.peak_bytes is not None:
        yield figure("peak_allocated", trial.peak_bytes / GIB, "GiB", "measured", "measured")
    else:
        yield figure("peak_allocated", worst.peak.allocated / GIB, "GiB")
    yield figure("peak_device", worst.device_bytes / GIB, "GiB")
    yield figure("bubble", plan.bubble, "of the step")
    yield figure("exposed", sum(plan.exposed.values()) / found.step_s, "of the step")


def _overlap(plan: Plan) -> tuple[AxisOverlap, ...]:
    """Communication with and without hiding: the same step, once with every overlap turned off."""
    bare = Overlap(tp=False, grad_reduce=False, param_gather=False, ep=False, pp=False)
    open_ = estimate(plan.workload, plan.hardware, replace(plan.layout, overlap=bare), plan.stack).seconds
    rows = []
    for axis in COMMUNICATION:
        exposed = plan.estimate.seconds.get(axis, 0.0)
        total = max(exposed, open_.get(axis, 0.0))
        if total > 0:
            rows.append(AxisOverlap(axis=axis, total_s=total, exposed_s=exposed))
    return tuple(rows)


def _precision(plan: Plan, report: EngineReport | None) -> Iterator[FormatRow]:
    """Linear layers by their formats and how they run; equal layers together."""
    folded: dict[tuple[str, str, str], list[int | None]] = {}
    for layer, op, formats, runs_as in _bound(plan) if report is None else _bindings(report):
        folded.setdefault((op, formats, runs_as), []).append(layer)
    for (op, formats, runs_as), layers in folded.items():
        inside = [layer for layer in layers if layer is not None]
        where = layers_label(inside) if inside else "outside the layers"
        yield FormatRow(where=where, op=op, formats=formats, runs_as=runs_as)


def _bound(plan: Plan) -> Iterator[tuple[int | None, str, str, str]]:
    work = plan.workload
    for variant in work.variants():
        for op, formats in variant.formats:
            for layer in variant.layers:
                yield layer, op, _merged(formats), "planned"
    for end in (*work.ir.stem, *work.ir.tail):
        if end.kind == "linear":
            yield None, end.name, _merged(work.end_formats(end)), "planned"


def _bindings(report: EngineReport) -> Iterator[tuple[int | None, str, str, str]]:
    rows: dict[str, list[Any]] = {}
    for row in report.bindings:
        rows.setdefault(row.path, []).append(row)
    for same in rows.values():
        how = _merged(tuple(f"{row.binding} {row.scheme}" for row in same))
        yield same[0].layer, same[0].op, _merged(tuple(row.format for row in same)), how


def _merged(values: Iterable[str]) -> str:
    found = list(values)
    return found[0] if len(set(found)) == 1 else " / ".join(found)


def _kernels(plan: Plan, report: EngineReport | None) -> Iterator[str]:
    """What the engine bound, or what the plan proposes where there is none."""
    if report is None:
        yield from (str(choice) for choice in plan.kernels)
        return
    for row in report.kernels:
        time = "" if row.us is None else f", {row.us:.1f} us"
        yield f"{row.op} {row.shape} x{row.count}: {row.kernel}{time}"
    if report.graphs:
        fired = ", ".join(f"{name} {count}" for name, count in report.passes.items() if count)
        yield f"passes in {report.graphs} compiled graph{'s' * (report.graphs > 1)}: {fired or 'none'}"


__all__ = ["DryRun", "dryrun", "simulated"]
