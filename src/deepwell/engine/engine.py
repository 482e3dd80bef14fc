"""The engine: a model with its kernels bound. Called, trained, saved and loaded like the model it came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.binding import Bound
from deepwell.graph.ir import IR
from deepwell.graph.table import text_table
from deepwell.precision.policy import PrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What was bound to what and why, and which passes fired how often."""

    model: str
    device: str
    bindings: tuple[dict[str, Any], ...]
    passes: Mapping[str, int]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        keys = ("path", "gemm", "format", "binding", "scheme", "reason")
        rows: list[tuple[str, ...]] = [("layer", "gemm", "format", "binding", "runs as", "why")]
        rows += [tuple(str(row[key]) for key in keys) for row in self.bindings]
        lines = [f"engine of {self.model} on {self.device}", "", *text_table(rows)]
        fired = ", ".join(f"{name} {count}" for name, count in self.passes.items()) or "none yet: call the engine once"
        return "\n".join([*lines, "", f"passes: {fired}", *(f"note: {note}" for note in self.notes)])


class Engine(nn.Module):
    """A drop-in for the model: the same call, outputs, parameters and state_dict keys.

    It shares the model's modules, parameters and buffers, so either can be trained, saved or moved; attributes it does
    not have are the model's.
    """

    def __init__(self, ir: IR, bound: Bound, policy: PrecisionPolicy, *, use_inductor: bool, device: str) -> None:
        super().__init__()
        model = ir.require_module()
        self.__dict__["model"] = model
        # The very dicts, not copies: what is registered on one is registered on both, under the same names.
        self.__dict__["_modules"] = model._modules
        self.__dict__["_parameters"] = model._parameters
        self.__dict__["_buffers"] = model._buffers
        self.__dict__["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        self.__dict__["ir"], self.__dict__["policy"], self.__dict__["bound"] = ir, policy, bound
        self.__dict__["device_name"] = device
        options = BackendOptions(schemes=bound.schemes, use_inductor=use_inductor)
        self.__dict__["options"] = options
        self.__dict__["_compiled"] = torch.compile(model, backend=_backend(options))
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def train(self, mode: bool = True) -> Engine:
        self.model.train(mode)
        self.training = mode
        return self

    def report(self) -> EngineReport:
        """Every GEMM's format, binding and reason, and how often each pass fired so far."""
        return EngineReport(
            model=self.ir.name,
            device=self.device_name,
            bindings=tuple(asdict(b) for b in self.bound.bindings),
            passes=dict(self.options.counts),
            notes=self.ir.notes,
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["model"], name)


def _backend(options: BackendOptions) -> Callable[..., Any]:
    def deepwell(graph_module: Any, example_inputs: Any) -> Callable[..., Any]:
        return compile_graph(graph_module, example_inputs, options)

    return deepwell


__all__ = ["Engine", "EngineReport"]
