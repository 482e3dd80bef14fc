"""The simulated step as a Chrome trace: whole, in order, and marked as simulated."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from deepwell.planner.comm import Network
from deepwell.planner.efficiency import device
from deepwell.planner.job import read_job
from deepwell.planner.plan import Plan
from deepwell.planner.schedule.stages import message_s
from deepwell.planner.schedule.stages import stage_times as priced_stages
from deepwell.planner.schedule.trace import chrome_trace, chrome_trace_json, plan_timeline, stage_times
from deepwell.planner.search.autoplan import autoplan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autoplan("llama3-8b", "8xH100", seq_len=4096, global_batch=64, pp=4, tp=1)


def test_the_trace_holds_every_action_of_every_rank(plan: Plan) -> None:
    trace = json.loads(chrome_trace_json(plan))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == 0]
    assert {e["pid"] for e in slices} == set(range(plan.layout.pp))
    forwards = [e for e in slices if e["name"].startswith("F")]
    assert len(forwards) == plan.accumulation * plan.layout.num_stages
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in slices)
    assert "simulated" in trace["otherData"]["what"]
    assert all("simulated" in e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name")


def test_slices_of_one_track_do_not_overlap(plan: Plan) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in chrome_trace(plan)["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 1e-3  # a nanosecond of rounding


def test_the_timeline_is_what_the_estimate_was_made_of(plan: Plan) -> None:
    timeline, times = plan_timeline(plan), stage_times(plan)
    busiest = max(timeline.busy)
    seconds = plan.estimate.seconds
    after = sum(seconds[name] for name in ("dp", "optimizer", "host", "straggler"))
    # The estimate counts host time per layer inside the stages and once per step outside; within 2% they agree.
    assert timeline.makespan == pytest.approx(plan.step_s - after, rel=0.03)
    assert busiest <= timeline.makespan
    assert len(times.stages) == plan.layout.num_stages


def test_one_stage_has_a_timeline_too() -> None:
    plan = autoplan("llama3-8b", "8xH100", seq_len=4096, global_batch=64, pp=1)
    timeline = plan_timeline(plan)
    assert timeline.bubble == pytest.approx(0.0, abs=1e-9)
    assert len(timeline.events) == 2 * plan.accumulation


def test_the_trace_prices_stages_and_messages_as_the_estimate_does(plan: Plan) -> None:
    # Both read the same values; a stack whose network is slow would show a difference in the messages first.
    slow = replace(plan.stack, constants=replace(plan.stack.constants, network_scale=7.0))
    job = read_job(plan.workload, plan.layout, slow)
    dev = device(plan.hardware.gpus[0])
    net = Network.of(plan.hardware, dev.constants, slow.constants.comm_scale, 7.0)
    times = stage_times(replace(plan, stack=slow))
    assert times.message == message_s(job, net) > 0
    priced = priced_stages(job, dev, net)
    assert times.stages == priced


def test_a_trace_of_dualpipev_shows_what_its_pairs_save() -> None:
    request: dict[str, Any] = {"seq_len": 4096, "global_batch": 256, "pp": 2, "ep": 8, "schedule": "dualpipev"}
    plan = autoplan("qwen3-30b-a3b", "2x8xH100", stack="generic", **request)
    times = stage_times(plan)
    assert len(times.pair_savings) == 2 and min(times.pair_savings) > 0
    apart = plan_timeline(plan, times._replace(pair_savings=(0.0, 0.0)))
    assert plan_timeline(plan).makespan < apart.makespan
