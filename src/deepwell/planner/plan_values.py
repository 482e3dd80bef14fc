"""What a plan holds: its whole problem, the layout, the estimate, what was not chosen; its figures and JSON. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from deepwell.errors import ConfigError
from deepwell.hardware.codec import JsonValue, check_schema, decode_value, encode
from deepwell.hardware.model import Hardware
from deepwell.planner.catalog import KernelChoice
from deepwell.planner.estimate_values import Estimate, StageMemory
from deepwell.planner.layout import Layout
from deepwell.planner.search.constraints import Constraints, read_constraints
from deepwell.planner.stack import Stack
from deepwell.planner.workload import Workload
from deepwell.precision.explain import Explanation

SCHEMA = 1
COMMUNICATION = ("tp", "cp", "ep", "pp", "dp")
# Of a plan's fields, those that the codec reads and writes, and those that do so by themselves.
_ENCODED = (
    *("model", "goal", "machine", "machine_gpus", "constraints", "limit_gib", "kernels", "runners_up", "rejected"),
    *("searched", "warnings", "notes"),
)
_VALUES = ("layout", "estimate", "stack", "hardware", "workload")
_Self = TypeVar("_Self", bound="PlanValues")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A layout that fits and is slower (or, by the goal, worse) than the plan: its numbers and why not."""

    layout: Layout
    gpus: int
    step_s: float
    tokens_per_s_per_gpu: float
    mfu_bf16: float
    peak_gib: float
    bubble: float  # share of the step
    exposed: float  # share of the step that waits for communication
    why_not: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A family of layouts that is out, with the constraint that binds."""

    family: str
    kind: str  # "rule", "memory" or "slower"
    reason: str

    def __str__(self) -> str:
        return f"{self.family}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Searched:
    families: int
    layouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanValues(JsonValue):
    """The fields of a `Plan`. Equal ones solve the same problem the same way."""

    model: str
    goal: str
    machine: str  # as it was named; `hardware` is the part of it that is used
    machine_gpus: int
    constraints: str
    workload: Workload
    hardware: Hardware
    stack: Stack
    layout: Layout
    estimate: Estimate
    kernels: tuple[KernelChoice, ...]
    runners_up: tuple[Alternative, ...]
    rejected: tuple[Rejected, ...]
    searched: Searched
    limit_gib: float | None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    limits: Constraints = field(default=Constraints())  # what `constraints` says, as a value

    # ---- figures ----

    @property
    def gpus(self) -> int:
        return self.layout.gpus

    @property
    def step_s(self) -> float:
        return self.estimate.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.estimate.tokens_per_s_per_gpu

    @property
    def mfu(self) -> float:
        """Model flops over the bf16 peak; `estimate.mfu_weighted` is over each format's own."""
        return self.estimate.mfu_bf16

    @property
    def peak_gib(self) -> float:
        return self.estimate.peak_gib

    @property
    def degrees(self) -> dict[str, int]:
        """How many ways each axis splits: dp, tp, pp, cp, ep, etp, and dp_replicate, the copies inside dp."""
        names = ("dp", "tp", "pp", "cp", "ep", "etp", "dp_replicate")
        return {name: getattr(self.layout, name) for name in names}

    @property
    def memory(self) -> tuple[StageMemory, ...]:
        """Bytes of one GPU of every pipeline rank at its peak, by what they hold."""
        return self.estimate.memory

    @property
    def precision(self) -> Explanation:
        """The format of every GEMM of every layer at the first step, with the rule that decided."""
        return self.workload.precision_policy.explain(self.workload.ir, 0)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage in model order."""
        return self.layout.layers_of_stages(self.workload.ir.num_layers)

    @property
    def accumulation(self) -> int:
        """Micro-batches that each rank runs in one step."""
        return self.layout.accumulation(self.workload.global_batch)

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of a step that wait for communication, by axis."""
        return {axis: self.estimate.seconds.get(axis, 0.0) for axis in COMMUNICATION}

    @property
    def bubble(self) -> float:
        """Share of the step in which the busiest pipeline rank has nothing to do."""
        return self.estimate.seconds.get("bubble", 0.0) / self.estimate.step_s

    @property
    def gpu_seconds(self) -> float:
        """What a step costs: GPUs times seconds."""
        return self.gpus * self.step_s

    # ---- JSON ----

    def to_dict(self) -> dict[str, Any]:
        found = {name: encode(getattr(self, name)) for name in (*_ENCODED, "stage_layers", "accumulation")}
        found |= {name: getattr(self, name).to_dict() for name in _VALUES}
        figures = {"exposed": self.exposed, "bubble": self.bubble}
        return {"schema": SCHEMA, **found, **figures, "limits": self.limits.keywords()}

    @classmethod
    def from_dict(cls: type[_Self], data: Mapping[str, Any]) -> _Self:
        """The plan behind `to_dict`. Raises ConfigError for anything else."""
        check_schema(data, SCHEMA, "plan")
        hints, limits = get_type_hints(cls), data.get("limits", {})
        if not isinstance(limits, Mapping):
            raise ConfigError(f"plan.limits: expected an object of constraints, got {type(limits).__name__}")
        try:
            return cls(
                **{name: decode_value(hints[name], data[name], f"plan.{name}") for name in _ENCODED},
                **{name: hints[name].from_dict(data[name]) for name in _VALUES},
                limits=read_constraints(limits),
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not a plan: {type(error).__name__}: {error}") from error
