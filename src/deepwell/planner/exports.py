"""Plans in other engines' words: what they are called, which are known, and the names that may be used. Pure."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from deepwell.errors import ConfigError

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
