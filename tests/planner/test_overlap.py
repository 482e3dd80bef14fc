"""What runs beside computation is part of the search, is explained, and is the user's where the user says so."""

import importlib
from dataclasses import replace
from typing import Any

import pytest

from deepwell.errors import UnsupportedError
from deepwell.planner.estimate import estimate
from deepwell.planner.layout import Layout, Overlap
from deepwell.planner.overlap import OVERLAPS, hides, in_use, switched
from deepwell.planner.plan import Plan
from deepwell.planner.search.autoplan import autoplan
from deepwell.planner.search.sensitivity import overlap_effects
from deepwell.planner.stack import get_stack


def planned(**changes: Any) -> Plan:
    request: dict[str, Any] = {"seq_len": 4096, "global_batch": 64, "precision": "bf16", "stack": "megatron"}
    return autoplan("llama3-8b", "2x8xH100", **{**request, **changes})


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which computation loses more to what runs beside it than waiting would take."""
    monkeypatch.setattr(importlib.import_module("deepwell.planner.data_parallel"), "_THEFT", 1.5)


def test_a_layout_that_is_silent_runs_as_its_stack_does() -> None:
    layout = Layout(dp=2, tp=2, pp=2, virtual_stages=1)
    names = {name for name in OVERLAPS if hides(layout, get_stack("megatron"), name)}
    assert names == {"grad_reduce", "param_gather"}
    assert hides(layout, get_stack("megatron-bridge"), "tp")
    assert not hides(layout, get_stack("aleph-alpha"), "grad_reduce")
    assert hides(replace(layout, virtual_stages=2), get_stack("megatron"), "pp")  # the schedule decides, not the stack
    for name in OVERLAPS:
        assert hides(switched(layout, name, True), get_stack("aleph-alpha"), name)
        assert not hides(switched(layout, name, False), get_stack("megatron-bridge"), name)


def test_only_communication_that_is_there_can_be_hidden() -> None:
    assert in_use(Layout(dp=1)) == ()
    assert in_use(Layout(dp=2, sharding="ddp")) == ("grad_reduce",)  # nothing is gathered back
    assert set(in_use(Layout(dp=2, tp=2, pp=2, ep=2))) == set(OVERLAPS)


def test_hiding_that_pays_is_kept() -> None:
    plan = planned()
    assert plan.layout.overlap == Overlap()
    assert all(one.other_s >= one.step_s for one in overlap_effects(plan) if one.is_on)


@pytest.mark.usefixtures("costly")
def test_hiding_that_costs_more_than_it_saves_is_switched_off_by_the_search() -> None:
    plan = planned()
    assert plan.layout.overlap.grad_reduce is False
    hidden = estimate(plan.workload, plan.hardware, replace(plan.layout, overlap=Overlap()), plan.stack)
    assert plan.step_s < hidden.step_s
    assert any("not beside computation: gradient reduction" in note for note in plan.notes)
    assert "gradient reduction: waited for (found faster by the search); hiding it would make" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.usefixtures("costly")
def test_what_the_user_says_of_overlap_wins_over_the_search() -> None:
    asked = planned(overlap={"grad_reduce": True})
    assert asked.layout.overlap.grad_reduce is True
    assert asked.layout.overlap.param_gather is False  # the rest stays open
    assert "gradient reduction: beside computation (overlap= asks for it)" in asked.explain()
    assert planned(overlap=True).layout.overlap == Overlap(**dict.fromkeys(OVERLAPS, True))


def test_explain_says_what_each_overlap_is_worth() -> None:
    plan = planned(tp=2, pp=2, sharding="zero1", stack="generic")
    for one in overlap_effects(plan):
        layout = switched(plan.layout, one.name, not one.is_on)
        assert one.other_s == estimate(plan.workload, plan.hardware, layout, plan.stack).step_s
        assert f"  {one}" in plan.explain().splitlines()
    assert {one.name for one in overlap_effects(plan)} == {"tp", "grad_reduce", "param_gather", "pp"}
    waits = next(one for one in overlap_effects(plan) if one.name == "tp")
    assert not waits.is_on and "hiding it would make the step" in str(waits) and "shorter" in str(waits)


# ---- exports ----


def test_megatron_gets_what_not_to_hide() -> None:
    plan = planned(sharding="zero1", pp=1)
    words = plan.export("megatron")
    assert "--overlap-grad-reduce" in words and "--overlap-param-gather" in words
    off = replace(plan, layout=replace(plan.layout, overlap=Overlap(grad_reduce=False, param_gather=False)))
    assert "--overlap" not in off.export("megatron")
    assert "ddp.overlap_grad_reduce=false" in off.export("megatron-bridge")
    assert "ddp.overlap_param_gather=false" in off.export("megatron-bridge")
    with pytest.raises(UnsupportedError, match="overlap"):
        off.export("torchtitan")


def test_megatron_hides_gathers_only_beside_hidden_reductions() -> None:
    plan = planned(sharding="zero1", pp=1, overlap={"grad_reduce": False, "param_gather": True})
    for target in ("megatron", "megatron-bridge"):
        with pytest.raises(UnsupportedError, match="param_gather without grad_reduce"):
            plan.export(target)
