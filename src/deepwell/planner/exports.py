"""Plans in other engines' words: what they are called, which are known, and the names that may be used. Pure."""

from __future__ import annotations

import functools
import json
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
        from deepwell.planner.export_megatron import megatron_arguments

        return " \\\n".join(megatron_arguments(plan))
    if target == "megatron-bridge":
        from deepwell.planner.export_megatron import bridge_overrides

        return " \\\n".join(bridge_overrides(plan))
    if target == "torchtitan":
        from deepwell.planner.export_torchtitan import torchtitan_config

        return torchtitan_config(plan)
    raise ConfigError(f"target: got {target!r}; accepted: {', '.join(TARGETS)}")


def _refuse_what_would_be_dropped(plan: Plan, target: str) -> None:
    """What Deepwell plans and no other engine's export has words for; in silence it would run as something else."""
    policy = plan.workload.precision_policy
    if all(policy != PrecisionPolicy.recipe(name) for name in RECIPES):
        raise UnsupportedError(
            f"precision: {target} gets one format for all layers, and this policy has rules of its own; plan with "
            f"one of {', '.join(RECIPES)}"
        )
    if plan.layout.cuda_graphs:
        raise UnsupportedError(f"cuda_graphs: not written for {target}; plan without, and switch them on there")
    if plan.layout.overlap != Overlap():
        raise UnsupportedError(f"overlap: not written for {target}; plan with the engine's own, without overlap=")
