"""What `autoplan` was asked for, read and checked: model, machine, engine, formats and MoE settings. Pure."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deepwell.errors import ConfigError
from deepwell.graph.configs import published_config, published_name
from deepwell.graph.ir import IR
from deepwell.hardware.model import Hardware
from deepwell.hardware.probe import probe
from deepwell.planner.stack import Stack, get_stack
from deepwell.planner.validity import model_facts
from deepwell.precision.policy import PrecisionPolicy

_ARCHITECTURES = {"blackwell": (10, 11, 12), "hopper": (9,), "ada": (8,), "ampere": (8,), "cpu": ()}
_MOE_KEYS = ("experts", "top_k", "capacity_factor", "imbalance")


def read_model(ir: IR | str | Mapping[str, Any]) -> IR:
    """The model: an IR, the name of a published one, or a Hugging Face config."""
    if isinstance(ir, IR):
        return ir
    if isinstance(ir, str):
        name = published_name(ir)
        return replace(IR.from_config(published_config(name)), name=name)
    if isinstance(ir, Mapping):
        return IR.from_config(ir)
    raise ConfigError(
        f"ir: got {type(ir).__name__}; pass what dw.capture returned, a published model's name or a config dict"
    )


def read_machine(hw: Hardware | str | None) -> Hardware:
    """The machine: as it is, by name, or this one."""
    if isinstance(hw, Hardware):
        return hw
    if hw is None or isinstance(hw, str):
        return probe(hw)
    raise ConfigError(f"hw: got {type(hw).__name__}; pass what dw.probe returned or a name such as '8x8xB200'")


def read_stack(stack: Stack | str | None) -> Stack:
    """The engine that will run the plan, Deepwell unless another is named."""
    if stack is not None and not isinstance(stack, (Stack, str)):
        raise ConfigError(f"stack: got {stack!r}; the name of an engine, e.g. 'deepwell' or 'megatron', or a Stack")
    return stack if isinstance(stack, Stack) else get_stack(stack or "deepwell")


def read_policy(precision: str | PrecisionPolicy | None, hw: Hardware) -> tuple[str | PrecisionPolicy, str]:
    """The recipe or policy, and a note where the machine decided it."""
    if isinstance(precision, PrecisionPolicy):
        return precision.copy().freeze(), ""
    if precision is not None:
        PrecisionPolicy.recipe(precision)  # a name that is no recipe is refused here
        return precision, ""
    for name in ("mxfp8", "fp8"):
        if hw.supports(name):
            return name, f"precision was not given: {name}, the lowest that {hw.gpus[0].name} runs natively at 8 bits"
    return "bf16", f"precision was not given: bf16, for {hw.gpus[0].name} runs no 8-bit format natively"


def arch_notes(arch: str | None, hw: Hardware) -> list[str]:
    """A note where the machine is of another architecture than was asked for."""
    if arch is None:
        return []
    wanted = _ARCHITECTURES.get(arch.lower()) if isinstance(arch, str) else None
    if wanted is None:
        raise ConfigError(f"arch: got {arch!r}; accepted: {', '.join(_ARCHITECTURES)}")
    capability = hw.gpus[0].compute_capability
    is_it = hw.kind == "cpu" if arch.lower() == "cpu" else capability is not None and capability[0] in wanted
    return (
        [] if is_it else [f"arch {arch!r} was asked for; {hw.gpus[0].name} is not, and the plan is for what is there"]
    )


def moe_settings(ir: IR, moe: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """Settings of the workload and notes. Raises ConfigError where the model's experts are others."""
    if moe is None:
        return {}, []
    if not isinstance(moe, Mapping):
        raise ConfigError(f"moe: got {moe!r}; a mapping with any of {', '.join(_MOE_KEYS)}")
    unknown = sorted(set(moe) - set(_MOE_KEYS))
    if unknown:
        raise ConfigError(f"moe: no setting {unknown[0]!r}; accepted: {', '.join(_MOE_KEYS)}")
    facts = model_facts(ir)
    if not facts.is_moe:
        return {}, [] if not moe else [f"moe={dict(moe)} changes nothing: {ir.name} has no experts"]
    for key, have in (("experts", facts.experts), ("top_k", facts.top_k)):
        if key in moe and set(have) != {moe[key]}:
            raise ConfigError(
                f"moe: {key} is {moe[key]!r}; the MoE blocks of {ir.name} have {' and '.join(map(str, have))}"
            )
    settings: dict[str, Any] = {}
    for key in ("capacity_factor", "imbalance"):
        if moe.get(key) is not None:
            value = moe[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"moe: {key} is {value!r}; a number above 0")
            settings[key] = float(value)
    if "imbalance" in settings:
        settings["forced_balance"] = False
    capacity = settings.get("capacity_factor", 0.0)
    if capacity >= settings.get("imbalance", 1.0):
        return settings, [f"capacity_factor {capacity:g} drops nothing at an imbalance of "
                          f"{settings.get('imbalance', 1.0):g}; moe's imbalance says what to expect"]  # fmt: skip
    return settings, []
