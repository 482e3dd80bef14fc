"""A plan's step as a timeline and as a Chrome trace (chrome://tracing, Perfetto). Simulated, and marked so. Pure.

One process per pipeline rank: a track of forwards and backwards as the schedule runs them, a track of what they are
made of for the first microbatches, and what follows the pipeline (exposed data parallelism, optimizer, overhead).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from deepwell.planner.comm import Network
from deepwell.planner.cost import BlockTime
from deepwell.planner.efficiency import device
from deepwell.planner.job import read_job
from deepwell.planner.schedule.simulate import Timeline, simulate
from deepwell.planner.schedule.stages import message_s, pair_savings_s
from deepwell.planner.schedule.stages import stage_times as priced_stages

if TYPE_CHECKING:
    from deepwell.planner.plan import Plan

DETAILED = 2  # microbatches whose actions are split into their parts
_KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


class PlanStages(NamedTuple):
    stages: list[BlockTime]  # in model order
    message: float
    pair_savings: list[float]  # by rank


def stage_times(plan: Plan) -> PlanStages:
    """What the estimate was made of, for one microbatch: stages, messages between them, what a DualPipeV pair saves."""
    job = read_job(plan.workload, plan.layout, plan.stack)
    dev = device(plan.hardware.gpus[0])
    constants = plan.stack.constants
    net = Network.of(plan.hardware, dev.constants, constants.comm_scale, constants.network_scale)
    stages = priced_stages(job, dev, net)
    return PlanStages(stages, message_s(job, net), pair_savings_s(job, stages))


def plan_timeline(plan: Plan, times: PlanStages | None = None) -> Timeline:
    """The pipeline of one step with every action and its times."""
    times = times or stage_times(plan)
    layout = plan.layout
    return simulate(
        layout.runs_as if layout.pp > 1 else "1f1b",
        layout.pp,
        plan.accumulation,
        layout.virtual_stages,
        f=[stage.f for stage in times.stages],
        b=[stage.b for stage in times.stages],
        w=[stage.w for stage in times.stages],
        p2p=times.message,
        pair_saving=times.pair_savings,
        events=True,
    )


def chrome_trace(plan: Plan) -> dict[str, Any]:
    """The trace as the JSON object that the viewers read."""
    times = stage_times(plan)
    timeline = plan_timeline(plan, times)
    events = [*_names(plan), *_actions(timeline), *_parts(timeline, times), *_after(plan, timeline)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "what": "simulated step of a Deepwell plan, not a measurement",
            "model": plan.model,
            "machine": plan.machine,
            "layout": plan.layout.describe(),
            "tier": plan.estimate.tier,
        },
        "traceEvents": events,
    }


def chrome_trace_json(plan: Plan) -> str:
    return json.dumps(chrome_trace(plan))


def _slice(name: str, rank: int, track: int, start: float, end: float, **args: Any) -> dict[str, Any]:
    # Viewers count in microseconds.
    span = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"name": name, "ph": "X", "pid": rank, "tid": track, **span, "args": args}


def _names(plan: Plan) -> Iterator[dict[str, Any]]:
    tracks = ("pipeline", "parts", "after the pipeline")
    for rank in range(plan.layout.pp):
        title = f"pipeline rank {rank} (simulated)"
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": title}}
        for track, name in enumerate(tracks):
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def _actions(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for event in timeline.events:
        label = f"{event.kind}{event.microbatch}"
        what = {"stage": event.stage, "microbatch": event.microbatch, "what": _KINDS[event.kind]}
        yield _slice(label, event.rank, 0, event.start, event.end, **what)


def _parts(timeline: Timeline, times: PlanStages) -> Iterator[dict[str, Any]]:
    for event in timeline.events:
        if event.microbatch >= DETAILED or event.kind not in "FB":
            continue
        stage, start = times.stages[event.stage], event.start
        parts, total = (stage.forward, stage.f) if event.kind == "F" else (stage.backward, stage.b)
        for name, seconds in parts.items():
            if seconds > 0:
                end = start + seconds / total * (event.end - event.start)
                yield _slice(name, event.rank, 1, start, end, stage=event.stage, microbatch=event.microbatch)
                start = end


def _after(plan: Plan, timeline: Timeline) -> Iterator[dict[str, Any]]:
    seconds = plan.estimate.seconds
    for rank in range(plan.layout.pp):
        start = timeline.makespan
        for name in ("dp", "optimizer", "host", "straggler"):
            if seconds.get(name, 0.0) > 0:
                yield _slice(name, rank, 2, start, start + seconds[name])
                start += seconds[name]
