"""Plans in other engines' words: what they are called, which are known, and the names that may be used. Pure."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.planner.layout import Overlap
from deepwell.precision.policy import PrecisionPolicy
from deepwell.precision.recipes import RECIPES

if TYPE_CHECKING:
    from deepwell.planner.plan import Plan

TARGETS = ("deepwell", "megatron", "megatron-bridge", "torchtitan")


@functools.cache
def published_names() -> dict[str, Any]:
    """The argument names that each engine publishes, with source and commit."""
    text = (resources.files("deepwell.planner") / "export_names.json").read_text(encoding="utf-8")
    names: dict[str, Any] = json.loads(text)
    return names


def export(plan: Plan, target: str) -> str:
    """The plan as text for `target`. Raises ConfigError for an unknown one, UnsupportedError for what it cannot run."""
    if target == "deepwell":
        return plan.to_json(indent=1)
    if target in TARGETS:
        _refuse_what_would_be_dropped(plan, target)
    if target == "megatron":
        from deepwell.planner.export.megatron import megatron_arguments

        return " \\\n".join(megatron_arguments(plan))
    if target == "megatron-bridge":
        from deepwell.planner.export.megatron import bridge_overrides

        return " \\\n".join(bridge_overrides(plan))
    if target == "torchtitan":
        from deepwell.planner.export.torchtitan import torchtitan_config

        return torchtitan_config(plan)
    raise ConfigError(f"target: got {target!r}; accepted: {', '.join(TARGETS)}")


def _refuse_what_would_be_dropped(plan: Plan, target: str) -> None:
    """What Deepwell plans and no other engine's export has words for; in silence it would run as something else."""
    policy = plan.workload.precision_policy
    if all(policy != PrecisionPolicy.recipe(name) for name in RECIPES):
        raise UnsupportedError(
            f"precision: {target} gets one format for all layers but the ends, and this policy has rules of its own; "
            f"plan with one of {', '.join(RECIPES)}"
        )
    if plan.layout.cuda_graphs:
        raise UnsupportedError(f"cuda_graphs: not written for {target}; plan without, and switch them on there")
    # What of the overlap Megatron has words for is written or refused there, switch by switch.
    if target == "torchtitan" and plan.layout.overlap != Overlap():
        raise UnsupportedError(f"overlap: not written for {target}; plan with the engine's own, without overlap=")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLayers:
    """The low format of a plan and the run of layers that have it; those before and behind stay in bf16."""

    format: str  # "bf16" where no layer is low
    first: int
    last: int
    num_layers: int

    @property
    def at_start(self) -> int:
        return self.first

    @property
    def at_end(self) -> int:
        return self.num_layers - 1 - self.last

    @property
    def has_bf16_ends(self) -> bool:
        return self.format != "bf16" and bool(self.at_start or self.at_end)


def low_layers(plan: Plan) -> LowLayers:
    """Which layers leave bf16. Raises UnsupportedError where they are no single run of one format."""
    formats: dict[int, set[str]] = {}
    for variant in plan.workload.variants():
        low = {each[0] for _, each in variant.formats} - {"bf16"}
        if variant.formats:
            formats |= dict.fromkeys(variant.layers, low)
    count = plan.workload.ir.num_layers
    names = {name for low in formats.values() for name in low}
    if not names:
        return LowLayers(format="bf16", first=0, last=count - 1, num_layers=count)
    layers = sorted(layer for layer, low in formats.items() if low)
    first, last = layers[0], layers[-1]
    kept = [layer for layer in range(first, last + 1) if layer in formats and not formats[layer]]
    if kept or len(names) > 1:
        what = f"layer {kept[0]} stays in bf16 between lower ones" if kept else f"layers in {', '.join(sorted(names))}"
        raise UnsupportedError(f"precision: {what}; other engines get one format and bf16 at the ends alone")
    return LowLayers(format=names.pop(), first=first, last=last, num_layers=count)
