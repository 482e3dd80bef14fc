"""What an estimate says: step time with its parts, memory of every pipeline rank, and how far to trust it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepwell.errors import ConfigError
from deepwell.hardware.codec import JsonValue

GIB = 1 << 30

# What validation on published runs found for step time: half-width that holds for about nine rows in ten.
BANDS = {"measured": 0.10, "table": 0.15, "spec": 0.40}

# Parts of a step in the order they are shown; an estimate's breakdown has exactly these and they add up to step_s.
PARTS = (
    "gemm_fwd", "gemm_dgrad", "gemm_wgrad", "attention", "pointwise", "quantize", "recompute", "loss",
    "tp", "cp", "ep", "pp", "dp", "bubble", "optimizer", "host", "straggler",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one GPU of pipeline rank `stage` at the step's peak, by what they hold."""

    stage: int
    params: float
    master: float
    moments: float
    grads: float
    quantized_copies: float
    activations: tuple[tuple[str, float], ...]  # by kind: attention, mlp, norm, experts, ...
    logits: float
    comm_buffers: float
    workspace: float
    context: float  # CUDA context and NCCL: on the device, not in the allocator
    fragmentation: float  # reserved by the allocator, not allocated

    @property
    def activation_bytes(self) -> float:
        return sum(size for _, size in self.activations)

    @property
    def allocated(self) -> float:
        return (
            self.params + self.master + self.moments + self.grads + self.quantized_copies + self.activation_bytes
            + self.logits + self.comm_buffers + self.workspace
        )  # fmt: skip

    @property
    def reserved(self) -> float:
        return self.allocated + self.fragmentation

    @property
    def device(self) -> float:
        return self.reserved + self.context

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "activations": dict(self.activations)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StageMemory:
        return cls(**{**data, "activations": tuple((str(k), float(v)) for k, v in data["activations"].items())})


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(JsonValue):
    """A predicted training step. Fractions are fractions, times seconds, memory bytes unless the name says GiB."""

    step_s: float
    breakdown: tuple[tuple[str, float], ...]  # seconds on the critical rank, the names of PARTS; they add up to step_s
    tokens_per_s_per_gpu: float
    mfu_bf16: float
    mfu_weighted: float
    model_flops_per_token: float
    memory: tuple[StageMemory, ...]
    limit_gib: float
    tier: str  # "spec", "table" or "measured": the weakest figure that carries weight
    error_band: float  # half-width as a fraction: what validation on published runs found for this tier
    notes: tuple[str, ...] = ()
    correction: float = 1.0  # step_s over what the model says: real over predicted of steps measured on this GPU

    @property
    def uncorrected_s(self) -> float:
        """The step by the model alone: what a measured step is compared with, so that no correction feeds on itself."""
        return self.step_s / self.correction

    def corrected(self, factor: float) -> Estimate:
        """The estimate with its seconds times `factor`, which measured steps gave; its tier is "measured"."""
        return replace(
            self,
            step_s=self.step_s * factor,
            breakdown=tuple((part, seconds * factor) for part, seconds in self.breakdown),
            tokens_per_s_per_gpu=self.tokens_per_s_per_gpu / factor,
            mfu_bf16=self.mfu_bf16 / factor,
            mfu_weighted=self.mfu_weighted / factor,
            tier="measured",
            error_band=BANDS["measured"],
            correction=self.correction * factor,
        )

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self.breakdown)

    @property
    def peak_gib(self) -> float:
        return max(stage.device for stage in self.memory) / GIB

    @property
    def fits(self) -> bool:
        return self.peak_gib <= self.limit_gib

    def to_dict(self) -> dict[str, Any]:
        memory = [stage.to_dict() for stage in self.memory]
        return {**asdict(self), "breakdown": dict(self.breakdown), "memory": memory, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Estimate:
        try:
            rest = {k: v for k, v in data.items() if k not in ("breakdown", "memory", "notes")}
            return cls(
                breakdown=tuple((str(k), float(v)) for k, v in data["breakdown"].items()),
                memory=tuple(StageMemory.from_dict(stage) for stage in data["memory"]),
                notes=tuple(data["notes"]),
                **rest,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"data: not an estimate: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        lines = [
            f"step {self.step_s:.3f} s +-{100 * self.error_band:.0f}% ({self.tier}), "
            f"{self.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {100 * self.mfu_bf16:.1f}% of the bf16 peak, "
            f"{100 * self.mfu_weighted:.1f}% of the formats' own",
            f"memory {self.peak_gib:.1f} of {self.limit_gib:.1f} GiB on the fullest rank"
            + ("" if self.fits else ": does not fit"),
        ]
        shown = [(name, value) for name, value in self.breakdown if value > 0.0005 * self.step_s]
        lines.append("  " + ", ".join(f"{name} {1000 * value:,.1f} ms" for name, value in shown))
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])
