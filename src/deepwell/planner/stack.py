"""A software stack: the training framework a step runs on, as switches and a handful of fitted constants. Pure.

Constants live in `stacks/NAME.json`, each with the rows it was fitted on; a name that has no file gets the generic
stack, and says so. Switches are what a run turned on or off (attention kernel, dispatcher, gradient dtype ...); their
effect is physics, not a fit.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from typing import Any

from deepwell.errors import ConfigError
from deepwell.hardware.codec import packaged_json

GENERIC = "generic"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConstants:
    """The fitted numbers of a stack; what each means stands in docs/planner.md."""

    pointwise_passes: float = 1.3  # bytes that norms, activations, residuals and rope move, over the least possible
    gemm_scale: float = 1.03  # GEMM and attention time over what the GPU's curve says
    host_us: float = 6.0  # host time to launch one kernel, framework included
    comm_scale: float = 1.0  # time of collectives inside NVLink over what the fabric's curve says
    network_scale: float = 1.0  # the same across the network of the clusters that this stack was measured on
    holes: float = 0.05  # memory reserved over allocated, as a share of what comes and goes in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    name: str
    version: str = ""
    constants: StackConstants = field(default=StackConstants())
    switches: tuple[tuple[str, str], ...] = ()  # sorted pairs
    fitted_on: str = ""
    notes: tuple[str, ...] = ()
    # Real over predicted seconds of steps that were measured on the GPU that is planned for; None: none were.
    measured: float | None = None

    def switch(self, name: str, default: str = "") -> str:
        """The value of a switch, or `default` where the stack is silent."""
        return dict(self.switches).get(name, default)

    def with_switches(self, **changes: str | bool | None) -> Stack:
        """The same stack with switches changed; None leaves one alone, True and False are written on and off."""
        merged = dict(self.switches)
        for key, value in changes.items():
            if value is not None:
                merged[key] = value if isinstance(value, str) else ("on" if value else "off")
        return replace(self, switches=tuple(sorted(merged.items())))

    def to_dict(self) -> dict[str, Any]:
        found = {**asdict(self), "switches": dict(self.switches), "notes": list(self.notes)}
        return {name: value for name, value in found.items() if name != "measured" or value is not None}

    @classmethod
    def from_dict(cls, data: Any) -> Stack:
        try:
            return cls(
                name=data["name"],
                version=data.get("version", ""),
                constants=StackConstants(**{key: float(value) for key, value in data["constants"].items()}),
                switches=tuple(sorted((str(k), str(v)) for k, v in data.get("switches", {}).items())),
                fitted_on=data.get("fitted_on", ""),
                notes=tuple(data.get("notes", ())),
                measured=None if data.get("measured") is None else float(data["measured"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"data: not a software stack: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        shown = ", ".join(f"{key} {value}" for key, value in self.switches)
        return f"{self.name} {self.version}".strip() + (f" ({shown})" if shown else "")


def known_stacks() -> tuple[str, ...]:
    folder = resources.files("deepwell.planner") / "stacks"
    return tuple(sorted(entry.name[: -len(".json")] for entry in folder.iterdir() if entry.name.endswith(".json")))


@functools.lru_cache(maxsize=64)
def _load(name: str) -> Stack:
    return Stack.from_dict(packaged_json("deepwell.planner", "stacks", f"{name}.json"))


def get_stack(name: str, *, version: str = "", **switches: str | bool | None) -> Stack:
    """The stack of that name; an unknown name gets the generic constants and a note that says so."""
    wanted = name.strip().lower()
    if wanted in known_stacks():
        found = _load(wanted)
    else:
        note = f"stack {name!r} has no fitted constants: the generic ones stand in"
        found = replace(_load(GENERIC), name=wanted, notes=(note,))
    return replace(found, version=version).with_switches(**switches)


def deepwell_stack() -> Stack:
    return get_stack("deepwell")
