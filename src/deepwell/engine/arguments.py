"""What `dw.compile` takes, looked at before anything is captured or compiled.

Each function returns what the engine works with, or raises ConfigError with the argument's name, what it got and what
is wanted there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from deepwell.engine.binding import Target
from deepwell.engine.engine import Engine
from deepwell.engine.passes.recompute import WHAT
from deepwell.errors import ConfigError
from deepwell.graph.capture import capture
from deepwell.graph.ir import IR
from deepwell.hardware.model import Hardware
from deepwell.hardware.probe import probe
from deepwell.moe.block import DeepwellMoE
from deepwell.planner.plan import Plan
from deepwell.precision.policy import PrecisionPolicy


def captured(ir: IR | nn.Module) -> IR:
    """The IR itself, or that of a model. An engine, or a model with one inside, has been compiled already."""
    _check_no_engine(ir)
    if isinstance(ir, nn.Module):
        ir = capture(ir)
    if not isinstance(ir, IR):
        raise ConfigError(f"ir is a {type(ir).__name__}; pass dw.capture(model) or the model itself")
    _check_no_engine(ir.require_module())
    return ir


def _check_no_engine(model: object) -> None:
    if isinstance(model, Engine):
        raise ConfigError("ir is already an Engine; engine.deepwell.model is the model, to compile it anew")
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, Engine):
            raise ConfigError(
                f"ir holds an Engine at {path!r}; put its model there ({path}.deepwell.model) and compile the whole"
            )


def policy_of(plan: Plan | None, precision: str | None, policy: PrecisionPolicy | str | None) -> PrecisionPolicy:
    """What was asked for by name or as a policy, else the plan's, else MXFP8's recipe."""
    if isinstance(policy, PrecisionPolicy):
        return policy
    if isinstance(policy, str):
        return _recipe("precision_policy", policy)
    if policy is not None:
        raise ConfigError(
            f"precision_policy is a {type(policy).__name__}; pass a PrecisionPolicy (PrecisionPolicy.recipe('mxfp8') "
            "is one, PrecisionPolicy.from_dict reads one) or a recipe's name"
        )
    if precision is None and plan is not None:
        return plan.workload.precision_policy
    return _recipe("precision", "mxfp8" if precision is None else precision)


def _recipe(argument: str, name: str) -> PrecisionPolicy:
    try:
        return PrecisionPolicy.recipe(name)
    except (ConfigError, TypeError) as error:  # a list is no name, and has no hash
        raise ConfigError(f"{argument} is {name!r}: {error}") from error


def notes_on_hardware(hw: Hardware | str | None, device: Target) -> list[str]:
    """A note where `hw`, described or by its name, is another machine than the device that the model is on."""
    if isinstance(hw, str):
        try:
            hw = probe(hw)
        except ConfigError as error:
            raise ConfigError(f"hw: {error}") from error
    if hw is None:
        return []
    if not isinstance(hw, Hardware):
        hint = "; a plan is passed as plan=..." if isinstance(hw, Plan) else ""
        raise ConfigError(f"hw is a {type(hw).__name__}; pass dw.probe(...), a machine's name or None{hint}")
    capability = hw.gpus[0].compute_capability
    is_same = hw.kind == device.kind and (hw.kind == "cpu" or capability in (None, device.capability))
    if is_same:
        return []
    native = ", ".join(hw.native_formats) or "nothing that is known"
    return [
        f"hw is {hw.name}; the engine is bound to the device that the model is on, {device}, and not to that; "
        f"native there would be {native}"
    ]


def check_flags(**flags: Any) -> None:
    """Raise ConfigError where one is neither True nor False nor None: a word such as "no" would count as True."""
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it takes True or False")


def check_sizes(**sizes: Any) -> None:
    """Raise ConfigError where one that was given is no whole number of at least 1; True is none."""
    for name, value in sizes.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")


def check_recompute(recompute: bool | str) -> bool:
    """Whether whole layers are computed again. Raises ConfigError on a word that is not known."""
    if not isinstance(recompute, bool) and recompute not in WHAT:
        raise ConfigError(f"recompute is {recompute!r}; it takes True (whole layers), False, {', '.join(WHAT)}")
    return recompute is True


def limit_experts(model: nn.Module, plan: Plan | None) -> list[str]:
    """Give blocks of experts the capacity that a plan reckons with, where they have none; a note says so."""
    factor = None if plan is None else plan.workload.capacity_factor
    if factor is None:
        return []
    blocks = [module for module in model.modules() if isinstance(module, DeepwellMoE)]
    for block in blocks:
        if block.config.capacity_factor is None:
            block.config = replace(block.config, capacity_factor=factor)
    if not blocks:
        return [f"the plan has capacity_factor {factor:g}; only DeepwellMoE drops tokens, and the model has none"]
    found = sorted({block.config.capacity_factor or 0.0 for block in blocks})
    shown = ", ".join(f"{each:g}" for each in found)
    return [f"capacity_factor {shown} of {len(blocks)} blocks of experts: what is above is dropped"]
