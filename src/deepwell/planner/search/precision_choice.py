"""Which formats are worth their cost: recipes tried one by one, then single layers that bf16 makes faster. Pure.

`precision="auto"` tries bf16 and the native 8-bit recipe, a list its own entries. Accuracy is not judged here: fewer
than 8 bits are only tried where the user lists them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from deepwell.errors import ConfigError, PlanError
from deepwell.hardware.model import Hardware
from deepwell.planner.estimate import estimate
from deepwell.planner.plan import Plan
from deepwell.precision.policy import PrecisionPolicy

AUTO = "auto"
Policy = str | PrecisionPolicy
PlanFor = Callable[[Policy], Plan]


def is_choice(precision: Any) -> TypeGuard[str | Sequence[Policy]]:
    """Whether formats are left to the planner: "auto", or a list to choose from."""
    return isinstance(precision, (list, tuple)) or precision == AUTO


def choose_precision(plan_for: PlanFor, precision: str | Sequence[Policy], hw: Hardware, goal: str) -> Plan:
    """The best plan over the recipes, with bf16 for the layers that it makes faster. Raises PlanError if none fits."""
    wanted = _recipes(precision, hw)
    plans: list[Plan] = []
    miss: PlanError | None = None
    for one in wanted:
        try:
            plans.append(plan_for(one))
        except PlanError as error:
            miss = error
    if not plans:
        assert miss is not None
        raise miss
    best = min(plans, key=lambda plan: _cost(plan, goal))
    works = [plan.workload for plan in plans]
    names = [work.policy if isinstance(work.policy, str) else work.main_format for work in works]
    tried = ", ".join(f"{name} {plan.step_s:.4g} s" for name, plan in zip(names, plans, strict=True))
    notes = [f"precision was chosen for speed among {tried}"]
    if "bf16" in wanted:
        policy, layers = _with_bf16_layers(best)
        again = plan_for(policy) if layers else best
        if _cost(again, goal) < _cost(best, goal):
            notes.append(f"bf16 is faster for {', '.join(layers)}: step {best.step_s:.4g} -> {again.step_s:.4g} s")
            best = again
    return replace(best, notes=(*best.notes, *notes))


def _recipes(precision: str | Sequence[Policy], hw: Hardware) -> list[Policy]:
    if isinstance(precision, str):
        eight_bits = next((name for name in ("mxfp8", "fp8") if hw.supports(name)), None)
        return ["bf16"] if eight_bits is None else ["bf16", eight_bits]
    if not precision:
        raise ConfigError("precision: got an empty list; name recipes to choose from, or 'auto'")
    return list(precision)


def _cost(plan: Plan, goal: str) -> tuple[float, float]:
    # By the model alone: one format's steps may have been measured and the other's not.
    step_s = plan.estimate.uncorrected_s
    if goal == "smallest":
        return (plan.gpus, step_s)
    return (plan.gpus * step_s if goal == "cheapest" else step_s, plan.gpus)


def _with_bf16_layers(plan: Plan) -> tuple[PrecisionPolicy, list[str]]:
    """The plan's policy with bf16 for each kind of linear layer whose low precision costs more than it gains."""
    policy, layers, step_s = plan.workload.precision_policy.copy(), [], plan.step_s
    formats = [pair for variant in plan.workload.variants() for pair in variant.formats]
    for name in dict.fromkeys(op for op, each in formats if set(each) != {"bf16"}):
        tried = policy.copy()
        tried.set_layer_precision(f"*.{name}", "bf16")
        workload = replace(plan.workload, policy=tried.copy().freeze())
        found = estimate(workload, plan.hardware, plan.layout, plan.stack)
        fits = plan.limit_gib is None or found.peak_gib <= plan.limit_gib
        if fits and found.step_s < step_s * (1 - 1e-6):
            policy, step_s = tried, found.step_s
            layers.append(name)
    return policy, layers
