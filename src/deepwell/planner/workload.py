"""What is trained: a model, its sequence length and batch, its number formats and optimizer. Pure, no torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from deepwell.errors import ConfigError
from deepwell.graph.ir import IR
from deepwell.graph.ops import GEMM_KINDS, Op
from deepwell.precision.policy import PrecisionPolicy

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """Bytes per parameter that an optimizer keeps besides the weights themselves and their gradients."""

    master: float
    moments: float


# Master weights in fp32 beside bf16 ones, and two fp32 moments, are what mixed-precision training keeps.
OPTIMIZERS: dict[str, OptimizerState] = {
    "adamw": OptimizerState(master=4, moments=8),
    "adamw_fp32": OptimizerState(master=0, moments=8),  # the weights themselves are fp32
    "adamw_bf16_moments": OptimizerState(master=4, moments=4),
    "adamw_pure_bf16": OptimizerState(master=0, moments=4),
    "adamw_8bit": OptimizerState(master=4, moments=2),
    "muon": OptimizerState(master=4, moments=4),
    "sgd": OptimizerState(master=4, moments=0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters on a frozen model: only they have gradients and optimizer state."""

    rank: int = 16
    targets: tuple[str, ...] = ("attention", "mlp")  # roles whose linear layers carry an adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockVariant:
    """A block of the IR in one assignment of formats, with the layers that are it."""

    block: int
    formats: tuple[tuple[str, tuple[str, str, str]], ...]  # op name -> formats of fwd, dgrad, wgrad
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training job, apart from the machine and the layout."""

    ir: IR
    seq_len: int
    global_batch: int
    policy: PrecisionPolicy | str = "bf16"
    optimizer: str = "adamw"
    attention_kernel: str | None = None  # None: the stack's own
    capacity_factor: float | None = None  # MoE: rows per expert over the even share that are kept; None drops nothing
    imbalance: float = 1.0  # MoE: rows of the busiest rank over the mean
    forced_balance: bool = True  # MoE: the router is overridden to spread evenly, as benchmarks do
    lora: Lora | None = None
    # Answers found once; not an argument, so that `replace` starts afresh.
    _resolved: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("seq_len", "global_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer is {self.optimizer!r}; the planner knows {', '.join(OPTIMIZERS)}")
        if self.imbalance < 1:
            raise ConfigError(f"imbalance is {self.imbalance!r}; the busiest rank over the mean is at least 1")

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch

    @property
    def precision_policy(self) -> PrecisionPolicy:
        return PrecisionPolicy.recipe(self.policy) if isinstance(self.policy, str) else self.policy

    @property
    def main_format(self) -> str:
        """The lowest format that most linear layers use."""
        counts: dict[str, int] = {}
        for variant in self.variants():
            for _, formats in variant.formats:
                counts[formats[0]] = counts.get(formats[0], 0) + len(variant.layers)
        return max(counts, key=lambda name: counts[name]) if counts else "bf16"

    @property
    def flops_per_sequence(self) -> float:
        if "flops" not in self._resolved:
            self._resolved["flops"] = self.ir.train_flops(1, self.seq_len)
        return float(self._resolved["flops"])

    def variants(self) -> tuple[BlockVariant, ...]:
        """The IR's blocks split by the formats that the policy gives them at step 0; equal layers together."""
        return self._formats()[0]

    def end_formats(self, op: Op) -> tuple[str, str, str]:
        return self._formats()[1].get(op.name, ("bf16", "bf16", "bf16"))

    def _formats(self) -> tuple[tuple[BlockVariant, ...], dict[str, tuple[str, str, str]]]:
        if "formats" not in self._resolved:
            key = self.policy if isinstance(self.policy, str) else self.policy.to_json()
            self._resolved["formats"] = _resolve(key, ById(self.ir))
        found: tuple[tuple[BlockVariant, ...], dict[str, tuple[str, str, str]]] = self._resolved["formats"]
        return found

    def to_dict(self) -> dict[str, Any]:
        policy = self.policy if isinstance(self.policy, str) else self.policy.to_dict()
        lora = None if self.lora is None else {"rank": self.lora.rank, "targets": list(self.lora.targets)}
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {"schema": SCHEMA, **plain, "ir": self.ir.to_dict(), "policy": policy, "lora": lora}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Workload:
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise ConfigError(f"data: expected a planner workload of schema {SCHEMA}")
        rest = {key: value for key, value in data.items() if key not in ("schema", "ir", "policy", "lora")}
        policy, lora = data["policy"], data["lora"]
        try:
            return cls(
                ir=IR.from_dict(data["ir"]),
                policy=policy if isinstance(policy, str) else PrecisionPolicy.from_dict(policy),
                lora=None if lora is None else Lora(rank=lora["rank"], targets=tuple(lora["targets"])),
                **rest,
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"data: not a planner workload: {error}") from error

    def __str__(self) -> str:
        policy = self.policy if isinstance(self.policy, str) else self.main_format
        return f"{self.ir.name}, {policy}, {self.global_batch} x {self.seq_len:,} tokens, {self.optimizer}"


class ById:
    """A cache key by identity, which keeps its value alive: hashing hundreds of ops would cost more than the answer."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@functools.lru_cache(maxsize=512)
def _resolve(key: str, by_id: ById) -> tuple[tuple[BlockVariant, ...], dict[str, tuple[str, str, str]]]:
    """The blocks' variants and the formats of stem and tail under a recipe's name or a policy's JSON."""
    ir: IR = by_id.value
    policy = PrecisionPolicy.from_dict(json.loads(key)) if key.startswith("{") else PrecisionPolicy.recipe(key)
    resolution = policy.resolve(ir)

    def formats_of(path: str) -> tuple[str, str, str]:
        row = resolution[path]
        return (row["fwd"].format, row["dgrad"].format, row["wgrad"].format)

    groups: dict[tuple[int, tuple[tuple[str, tuple[str, str, str]], ...]], list[int]] = {}
    for index, layer in enumerate(ir.layers):
        ops = [op for op in ir.blocks[layer.block].ops if op.kind in GEMM_KINDS]
        formats = tuple((op.name, formats_of(f"{layer.path}.{op.name}")) for op in ops)
        groups.setdefault((layer.block, formats), []).append(index)
    variants = tuple(BlockVariant(block=b, formats=f, layers=tuple(where)) for (b, f), where in groups.items())
    ends = {op.name: formats_of(op.name) for op in (*ir.stem, *ir.tail) if op.kind in GEMM_KINDS}
    return variants, ends
