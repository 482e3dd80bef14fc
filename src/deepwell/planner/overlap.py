"""Which communication runs beside computation: a stack's defaults, a layout's own word, and what each is worth. Pure.

A layout that says nothing runs as its stack does. The search may switch off what is on: communication beside
computation holds SMs and bandwidth, so hiding it has a price. It switches nothing on, for a stack that hides nothing by
default may have no code for it; `overlap=` is where a user says that it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from deepwell.planner.layout import Layout, Overlap
from deepwell.planner.stack import Stack

if TYPE_CHECKING:
    from deepwell.planner.plan import Plan

OVERLAPS = tuple(one.name for one in fields(Overlap))
WORDS = {
    "tp": "tensor-parallel collectives",
    "grad_reduce": "gradient reduction",
    "param_gather": "weight gathering",
    "ep": "expert dispatch and combine",
    "pp": "pipeline messages",
}
# The stacks' switches and what holds where one is silent; pipeline messages follow the schedule instead.
_SWITCHES = {
    "tp": ("tp_overlap", "off"),
    "grad_reduce": ("overlap_grads", "on"),
    "param_gather": ("overlap_params", "on"),
    "ep": ("ep_overlap", "off"),
}


def hides(layout: Layout, stack: Stack, name: str) -> bool:
    """Whether this communication runs beside computation: as the layout says, else as the stack does."""
    given: bool | None = getattr(layout.overlap, name)
    if given is not None:
        return given
    if name == "pp":
        return layout.virtual_stages > 1
    switch, default = _SWITCHES[name]
    return stack.switch(switch, default) == "on"


def in_use(layout: Layout) -> tuple[str, ...]:
    """The kinds of communication that a layout has at all."""
    has_data = layout.dp * layout.cp > 1
    there = {
        "tp": layout.tp > 1,
        "grad_reduce": has_data,
        "param_gather": has_data and layout.sharding != "ddp",
        "ep": layout.ep * layout.etp > 1,
        "pp": layout.pp > 1,
    }
    return tuple(name for name in OVERLAPS if there[name])


def switched(layout: Layout, name: str, is_on: bool) -> Layout:
    """The same layout with one kind of communication hidden or not."""
    return replace(layout, overlap=replace(layout.overlap, **{name: is_on}))


def may_switch_off(layout: Layout, stack: Stack, asked: Overlap | None) -> Iterator[str]:
    """What is hidden by default and was not asked for: the search may try it without."""
    for name in in_use(layout):
        is_open = asked is None or getattr(asked, name) is None
        if is_open and hides(layout, stack, name):
            yield name


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
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


def effects(plan: Plan) -> tuple[Effect, ...]:
    """What each overlap of a plan gains or costs, by the same estimate that chose it."""
    from deepwell.planner.estimate import estimate

    found = []
    asked = plan.limits.overlap
    for name in in_use(plan.layout):
        is_on = hides(plan.layout, plan.stack, name)
        by = f"as {plan.stack.name} does"
        if getattr(plan.layout.overlap, name) is not None:
            is_asked = asked is not None and getattr(asked, name) is not None
            by = "overlap= asks for it" if is_asked else "found faster by the search"
        other = estimate(plan.workload, plan.hardware, switched(plan.layout, name, not is_on), plan.stack)
        found.append(Effect(name=name, is_on=is_on, decided_by=by, other_s=other.step_s, step_s=plan.step_s))
    return tuple(found)
