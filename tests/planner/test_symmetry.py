"""What must not matter does not: units of time, mirrored pipelines, names, the order of lists, more equal ranks."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepwell.graph.configs import published_config
from deepwell.graph.ir import IR
from deepwell.hardware.probe import probe
from deepwell.planner.estimate import estimate
from deepwell.planner.layout import SCHEDULES, Layout
from deepwell.planner.schedule.simulate import simulate
from deepwell.planner.search.autoplan import autoplan
from deepwell.planner.stack import get_stack
from deepwell.planner.workload import Workload

STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 2, "dualpipev": 2}
LLAMA = IR.from_config(published_config("llama3-8b"))

seconds = st.floats(min_value=0.01, max_value=10.0, allow_nan=False)


@given(times=st.lists(st.tuples(seconds, seconds), min_size=4, max_size=4), scale=st.sampled_from([0.5, 2.0, 1024.0]))
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(deadline=None, max_examples=10)
def test_a_schedule_has_no_unit_of_time(schedule: str, times: list[tuple[float, float]], scale: float) -> None:
    # Powers of two scale without rounding, so the two runs decide every tie alike.
    v = STAGES[schedule]
    f, b = ([pair[side] for pair in times] * v for side in (0, 1))
    once = simulate(schedule, 4, 8, v, f=f, b=b, w=[x / 2 for x in b])
    again = simulate(
        schedule, 4, 8, v, f=[scale * x for x in f], b=[scale * x for x in b], w=[scale * x / 2 for x in b]
    )
    assert again.makespan == pytest.approx(scale * once.makespan, rel=1e-12)
    assert again.bubble == pytest.approx(once.bubble, abs=1e-12)


@given(times=st.lists(seconds, min_size=2, max_size=6), microbatches=st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_a_mirrored_pipeline_takes_the_same_time(times: list[float], microbatches: int) -> None:
    # All forwards through machines in a row take as long as through the same machines in the opposite order; GPipe is
    # two such passes with a turn between them.
    pp = len(times)
    straight = simulate("gpipe", pp, microbatches, 1, f=times, b=times)
    mirrored = simulate("gpipe", pp, microbatches, 1, f=times[::-1], b=times[::-1])
    assert mirrored.makespan == pytest.approx(straight.makespan, rel=1e-9)


def test_ranks_with_equal_work_are_equally_busy() -> None:
    for schedule in SCHEDULES:
        line = simulate(schedule, 4, 8, STAGES[schedule])
        assert max(line.busy) == pytest.approx(min(line.busy))


def test_names_decide_nothing() -> None:
    hw, stack, layout = probe("8xH100"), get_stack("deepwell"), Layout(dp=4, tp=2, micro_batch=2)
    first, other = (
        estimate(Workload(ir=ir, seq_len=2048, global_batch=64, policy="fp8"), hw, layout, stack)
        for ir in (LLAMA, replace(LLAMA, name="another"))
    )
    assert first == other


@pytest.mark.parametrize("name", ["generic", "deepwell"])
def test_twice_the_ranks_with_twice_the_batch_compute_the_same_each(name: str) -> None:
    stack = get_stack(name)
    one, two = (
        estimate(
            Workload(ir=LLAMA, seq_len=2048, global_batch=64 * n, policy="fp8"), probe(f"{n}x8xH100"),
            Layout(dp=4 * n, tp=2, micro_batch=2), stack,
        )
        for n in (1, 2)
    )  # fmt: skip
    for part in ("gemm_fwd", "gemm_dgrad", "gemm_wgrad", "attention", "pointwise", "quantize", "tp"):
        assert two.seconds[part] == pytest.approx(one.seconds[part], rel=1e-12)
    assert two.model_flops_per_token == one.model_flops_per_token


def test_the_order_of_what_is_allowed_does_not_matter() -> None:
    request: dict[str, Any] = {"hw": "8xH100", "seq_len": 2048, "global_batch": 64, "precision": "fp8"}
    one = autoplan(LLAMA, tp=[1, 2, 4], sharding=["zero1", "zero3"], recompute=["none", "full"], **request)
    two = autoplan(LLAMA, tp=[4, 2, 1], sharding=["zero3", "zero1"], recompute=["full", "none"], **request)
    assert (one.layout, one.estimate, one.runners_up) == (two.layout, two.estimate, two.runners_up)
