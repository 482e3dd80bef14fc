"""Writes the ops of a decoder from the fields of its config: what every family of configs uses. Pure, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepwell.errors import ConfigError
from deepwell.graph.ops import TOKENS, Add, Linear, Loss, Norm, Op, Param


@dataclass(slots=True)
class ConfigWriter:
    """Collects the ops of one block in execution order."""

    dtype: str
    ops: list[Op] = field(default_factory=list)

    def emit(self, op: Op) -> str:
        self.ops.append(op)
        return op.name

    def param(self, name: str, *shape: int, tied_to: str | None = None) -> Param:
        return Param(name=name, shape=shape, dtype=self.dtype, tied_to=tied_to)

    def norm(self, name: str, source: str, width: int, *, per_token: int = 1, norm: str = "rms") -> str:
        params = [self.param(f"{name}.weight", width)]
        if norm == "layer":
            params.append(self.param(f"{name}.bias", width))
        rows = TOKENS.times(per_token)
        return self.emit(
            Norm(
                name=name, role="norm", inputs=(source,), params=tuple(params), dtype=self.dtype,
                norm=norm, width=width, rows=rows,
            )
        )  # fmt: skip

    def linear(
        self, name: str, place: str, source: str, k: int, n: int, *, bias: bool = False, conv1d: bool = False
    ) -> str:
        role, _, part = place.partition(".")
        params = [self.param(f"{name}.weight", *((k, n) if conv1d else (n, k)))]
        if bias:
            params.append(self.param(f"{name}.bias", n))
        return self.emit(
            Linear(
                name=name, role=role, part=part, inputs=(source,), params=tuple(params), dtype=self.dtype,
                k=k, n=n, bias=bias,
            )
        )  # fmt: skip

    def add(self, name: str, role: str, *sources: str, width: int) -> str:
        return self.emit(Add(name=name, role=role, inputs=sources, dtype=self.dtype, width=width))


def need(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            value = config[name]
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"config field {name} is {value!r}; it must be a whole number of at least 1")
            return value
    raise ConfigError(f"config of model_type {config.get('model_type')!r} lacks {' / '.join(names)}")


def class_name(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return names[0] if names else str(config.get("model_type") or "decoder")


def in_order(w: ConfigWriter, *names: str) -> tuple[str, ...]:
    """Producers without repeats in the order they run, the block's input first: one spelling for one set of edges."""
    position = {op.name: i for i, op in enumerate(w.ops)}
    return tuple(sorted(dict.fromkeys(names), key=lambda name: position.get(name, -1)))


def head_and_loss(w: ConfigWriter, source: str, hidden: int, vocab: int, tied_to: str | None) -> None:
    head = w.emit(
        Linear(
            name="lm_head", role="head", inputs=(source,), dtype=w.dtype, k=hidden, n=vocab,
            params=(w.param("lm_head.weight", vocab, hidden, tied_to=tied_to),),
        )
    )  # fmt: skip
    w.emit(Loss(name="loss", role="loss", inputs=(head,), dtype=w.dtype, vocab=vocab))
