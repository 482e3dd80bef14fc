"""A layout: how one training step is spread over GPUs. Pure, no torch.

    gpus = dp * tp * pp * cp        ranks: tp innermost, then cp, dp, and pp outermost (Megatron's order)

Experts live in their own mesh over the same GPUs of a stage: ep * etp divides dp * cp * tp, and what is left over
replicates the experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from deepwell.errors import ConfigError
from deepwell.hardware.codec import JsonValue

Sharding = Literal["ddp", "zero1", "zero2", "zero3"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
SHARDINGS: tuple[str, ...] = get_args(Sharding)
SCHEDULES: tuple[str, ...] = get_args(Schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What the backward computes again.

    `full` keeps only each layer's input, `block` does so for the first `layers` of every stage, `selective` drops the
    named `modules` (core_attn, layernorm, moe_act, mlp, moe, mla_up_proj; none named: core_attn).
    """

    kind: Literal["none", "selective", "full", "block"] = "none"
    modules: tuple[str, ...] = ()
    layers: int | None = None

    def __str__(self) -> str:
        if self.kind == "selective":
            return "selective:" + "+".join(self.modules or ("core_attn",))
        return f"{self.kind}:{self.layers}" if self.kind == "block" else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Share of the optimizer state and of the activations that is kept in host memory, 0 to 1."""

    optimizer: float = 0.0
    activations: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Which communication runs beside computation. None: as the software stack does by default."""

    tp: bool | None = None
    grad_reduce: bool | None = None
    param_gather: bool | None = None
    ep: bool | None = None
    pp: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(JsonValue):
    """Degrees, schedule, micro-batch and recomputation of one training step."""

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp_replicate: int = 1  # the outer, replicated part of dp (HSDP)
    sharding: Sharding = "zero1"
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1  # per rank
    stage_layers: tuple[int, ...] | None = None  # of each of pp * virtual_stages stages, in model order
    micro_batch: int = 1
    recompute: Recompute = field(default=Recompute())
    offload: Offload = field(default=Offload())
    overlap: Overlap = field(default=Overlap())
    context_parallel_kind: Literal["ring", "ulysses", "allgather"] = "ring"
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "etp", "dp_replicate", "virtual_stages", "micro_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        for name, known in (("sharding", SHARDINGS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(known)}")
        if self.schedule in ("zbv", "dualpipev") and self.pp > 1 and self.virtual_stages != 2:
            raise ConfigError(
                f"schedule {self.schedule} has 2 stages per rank; virtual_stages is {self.virtual_stages}"
            )
        if self.dp % self.dp_replicate:
            raise ConfigError(f"dp_replicate {self.dp_replicate} does not divide dp {self.dp}")
        if (self.dp * self.cp * self.tp) % (self.ep * self.etp):
            raise ConfigError(
                f"ep {self.ep} x etp {self.etp} does not divide the {self.dp * self.cp * self.tp} GPUs of a stage "
                f"(dp {self.dp} x cp {self.cp} x tp {self.tp})"
            )
        if self.stage_layers is not None and len(self.stage_layers) != self.num_stages:
            raise ConfigError(
                f"stage_layers has {len(self.stage_layers)} entries; pp {self.pp} x virtual_stages "
                f"{self.virtual_stages} needs {self.num_stages}"
            )

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual_stages

    @property
    def runs_as(self) -> Schedule:
        """The schedule that runs: 1F1B over several stages per rank is the interleaved one."""
        return "interleaved" if self.schedule == "1f1b" and self.virtual_stages > 1 else self.schedule

    @property
    def expert_dp(self) -> int:
        """Copies of each expert inside one pipeline stage."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    def accumulation(self, global_batch: int) -> int:
        """Micro-batches of one rank in one step. Raises ConfigError where the batch does not divide."""
        count, rest = divmod(global_batch, self.dp * self.micro_batch)
        if rest or not count:
            raise ConfigError(
                f"global_batch {global_batch} is no multiple of dp {self.dp} x micro_batch {self.micro_batch}"
            )
        return count

    def layers_of_stages(self, num_layers: int) -> tuple[int, ...]:
        """Layers of every stage in model order; an uneven rest goes to the stages in the middle first."""
        if self.stage_layers is not None:
            if sum(self.stage_layers) != num_layers:
                raise ConfigError(f"stage_layers adds up to {sum(self.stage_layers)}; the model has {num_layers}")
            return self.stage_layers
        stages = self.num_stages
        if stages > max(1, num_layers):  # a model without repeated layers is one stage
            raise ConfigError(f"pp {self.pp} x virtual_stages {self.virtual_stages} is more than {num_layers} layers")
        each, rest = divmod(num_layers, stages)
        counts = [each] * stages
        # Embedding and head make the ends heavy, so they get the smaller share.
        order = sorted(range(stages), key=lambda i: abs(2 * i - (stages - 1)))
        for index in order[:rest]:
            counts[index] += 1
        return tuple(counts)

    def describe(self) -> str:
        """One line as people write it: "TP8 PP4 VPP2 DP16 MBS1"."""
        words = [f"TP{self.tp}" + ("+SP" if self.sequence_parallel else "")]
        degrees = {"PP": self.pp, "VPP": self.virtual_stages, "CP": self.cp, "EP": self.ep, "ETP": self.etp}
        words += [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
        words += [f"DP{self.dp}" + (f"({self.dp_replicate} copies)" if self.dp_replicate > 1 else "")]
        words += [self.sharding] if self.sharding != "zero1" else []
        words += [f"MBS{self.micro_batch}"]
        words += [f"recompute {self.recompute}"] if self.recompute.kind != "none" else []
        return " ".join(words)

    __str__ = describe
