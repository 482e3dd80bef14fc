"""The formats and options of an engine as a file keeps them, and the engine that they give again.

A policy says what was asked for; an engine may run less of it: a GEMM that was found fragile, one that the guard took
back, a linear that FP8 would not speed up. What it runs now is pinned, module path by module path, so that the loaded
engine runs the same. It measures nothing: a linear whose codes are in the file is multiplied by them at every size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepwell.engine.compile import compile as compile_engine
from deepwell.engine.engine import Engine
from deepwell.graph.ir import IR
from deepwell.precision.policy import PrecisionPolicy

_RECOMPUTE = ("hidden", "copies", "nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What one GEMM of one linear runs in where the policy says otherwise."""

    path: str
    gemm: str
    format: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of `dw.compile` that change what is computed, or how fast."""

    inductor: bool = False
    cuda_graphs: bool = False
    fuse_head: bool = True
    cache_weights: bool = False
    recompute: str = "hidden"

    @classmethod
    def of(cls, engine: Engine) -> EngineOptions:
        own = engine.deepwell.options
        return cls(
            inductor=own.use_inductor,
            cuda_graphs=bool(own.cuda_graphs),
            fuse_head=own.fuse_head,
            cache_weights=own.cache_weights,
            recompute=own.recompute if own.recompute in _RECOMPUTE else "hidden",
        )

    @classmethod
    def from_dict(cls, data: Any) -> EngineOptions | None:
        """None where these are no options."""
        if not isinstance(data, dict) or set(data) != set(cls.__dataclass_fields__):
            return None
        flags = all(isinstance(value, bool) for name, value in data.items() if name != "recompute")
        return cls(**data) if flags and data["recompute"] in _RECOMPUTE else None


def pins_of(engine: Engine) -> tuple[Pin, ...]:
    """What the engine runs now that its policy does not say."""
    resolution = engine.deepwell.policy.resolve(engine.deepwell.ir, engine.deepwell.step)
    slower = {path: gain.reason for path, gain in engine.deepwell.options.gains.items() if not gain.gains}
    found = []
    for row in engine.deepwell.bound.bindings:
        asked = resolution[row.path][row.gemm].precision
        runs = "bf16" if row.scheme == "bf16" or row.path in slower else row.format
        if asked.is_low and runs != asked.format:
            reason = slower.get(row.path, row.reason)
            found.append(Pin(path=row.path, gemm=row.gemm, format=runs, reason=reason))
    return tuple(found)


def rebuilt(
    ir: IR, policy: PrecisionPolicy, pins: tuple[Pin, ...], options: EngineOptions, *, step: int, is_cuda: bool
) -> Engine:
    """The engine of a captured model with these formats. Inductor and CUDA graphs where the device has them."""
    own = policy.copy()
    for pin in pins:
        own.set_layer_precision(pin.path, pin.format, gemms=pin.gemm)
    engine = compile_engine(
        ir,
        precision_policy=own,
        inductor=options.inductor if is_cuda else None,
        cuda_graphs=options.cuda_graphs and is_cuda,
        fuse_head=options.fuse_head,
        cache_weights=options.cache_weights and is_cuda,
        recompute=options.recompute,
        measure=False,
    )
    return engine.deepwell.at_step(step)
