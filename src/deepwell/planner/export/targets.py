"""Plans in other engines' words: what they are called and which are known. Pure.

The names that each engine publishes stand in `export_names.json`; the tests hold the exports to them.
"""

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.planner.export.megatron import bridge_overrides, megatron_arguments
from deepwell.planner.export.torchtitan import torchtitan_config
from deepwell.planner.layout import Overlap
from deepwell.planner.plan_values import PlanValues
from deepwell.precision.policy import PrecisionPolicy
from deepwell.precision.recipes import RECIPES

TARGETS = ("deepwell", "megatron", "megatron-bridge", "torchtitan")


def export(plan: PlanValues, target: str) -> str:
    """The plan as text for `target`. Raises ConfigError for an unknown one, UnsupportedError for what it cannot run."""
    if target == "deepwell":
        return plan.to_json(indent=1)
    if target in TARGETS:
        _refuse_what_would_be_dropped(plan, target)
    if target == "megatron":
        return " \\\n".join(megatron_arguments(plan))
    if target == "megatron-bridge":
        return " \\\n".join(bridge_overrides(plan))
    if target == "torchtitan":
        return torchtitan_config(plan)
    raise ConfigError(f"target: got {target!r}; accepted: {', '.join(TARGETS)}")


def _refuse_what_would_be_dropped(plan: PlanValues, target: str) -> None:
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
