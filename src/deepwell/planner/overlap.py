"""Which communication runs beside computation: a stack's defaults, a layout's own word, and what each is worth. Pure.

A layout that says nothing runs as its stack does. The search may switch off what is on: communication beside
computation holds SMs and bandwidth, so hiding it has a price. It switches nothing on, for a stack that hides nothing by
default may have no code for it; `overlap=` is where a user says that it has.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

from deepwell.hardware.codec import packaged_json
from deepwell.planner.layout import Layout, Overlap
from deepwell.planner.stack import Stack

OVERLAPS = tuple(one.name for one in fields(Overlap))
WORDS: dict[str, str] = packaged_json("deepwell.planner", "words.json")["overlaps"]
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
    return replace(layout, overlap=replace(layout.overlap, **{name: is_on}))


def may_switch_off(layout: Layout, stack: Stack, asked: Overlap | None) -> Iterator[str]:
    """What is hidden by default and was not asked for: the search may try it without."""
    for name in in_use(layout):
        is_open = asked is None or getattr(asked, name) is None
        if is_open and hides(layout, stack, name):
            yield name
