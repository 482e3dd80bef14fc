"""How long each kernel of the compiled graphs takes here: measured on demand, with inputs of the very shapes they have.

While a graph is compiled the calls of Deepwell's ops in it are only written down, equal ones once with a count. When a
report is asked for times, each is run on random numbers of its shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from deepwell.engine.passes.choose_kernels import KernelRow, size_of
from deepwell.kernels.experts.group_rows import COLUMN_ALIGNMENT, GROUP_ALIGNMENT
from deepwell.kernels.gemm.cublaslt import product_of_codes
from deepwell.kernels.tune.fastest import TORCH, algorithm_of
from deepwell.kernels.tune.timing import median_us
from deepwell.kernels.tune.verify import FAILURES

_NAMESPACE = "deepwell"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that an op was given."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))


@dataclass(frozen=True, slots=True)
class OpCall:
    """One op with its arguments; tensors as their specs, so that equal calls are equal."""

    target: Any
    args: tuple[Any, ...]
    device: str

    @property
    def name(self) -> str:
        return self.target._schema.name.partition("::")[2]

    @property
    def kernel(self) -> str:
        """What computes it on its device."""
        if torch.device(self.device).type == "cpu":
            return "reference"
        vendors = {
            "fp8_gemm": "cublaslt_fast" if self.args[-1] is True else "cublaslt",
            "fp8_gemm_bias": "cublaslt_fast" if self.args[-1] is True else "cublaslt",
            "fp8_gemm_blocks": "cublaslt",
            "grouped_gemm": "torch_grouped",
        }
        return vendors.get(self.name, "deepwell")

    @property
    def shape(self) -> str:
        """MxNxK of a product; else the first tensor's."""
        specs: list[TensorSpec] = []
        map_aggregate(self.args, lambda arg: specs.append(arg) if isinstance(arg, TensorSpec) else None)
        if self.name in ("fp8_gemm", "fp8_gemm_bias", "fp8_gemm_blocks"):
            codes = [spec for spec in specs if spec.dtype.itemsize == 1]
            return f"{codes[0].shape[0]}x{codes[1].shape[0]}x{codes[0].shape[1]}"
        return str(specs[0]) if specs else ""


def record_calls(graph: fx.Graph, calls: dict[OpCall, int]) -> None:
    """Count the calls of Deepwell's ops in a graph."""
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != _NAMESPACE:
            continue
        if "chosen" in target._schema.name:
            continue  # its registry timed it when it chose
        values = [value for value in _values(node.args) if isinstance(value, torch.Tensor)]
        if not values:
            continue
        call = OpCall(target, _hashable(map_aggregate(node.args, _spec)), str(values[0].device))
        calls[call] = calls.get(call, 0) + 1


def measure_calls(calls: Mapping[OpCall, int]) -> list[KernelRow]:
    """A row with the median microseconds of each call; where one cannot be run by itself, the reason instead."""
    rows = []
    for call, count in calls.items():
        row = KernelRow(op=call.name, shape=call.shape, format="", count=count, kernel=call.kernel)
        try:
            rows.append(replace(row, us=_measure(call), how=f"measured{_algorithm(call)}"))
        except FAILURES as error:
            rows.append(replace(row, how=f"not measured: {type(error).__name__}: {str(error)[:120]}"))
    return rows


def _algorithm(call: OpCall) -> str:
    """Which of cuBLASLt's algorithms runs an FP8 GEMM, where it is not the one that torch takes."""
    if call.name != "fp8_gemm" or torch.device(call.device).type != "cuda":
        return ""
    *operands, fast = call.args
    algorithm = algorithm_of(product_of_codes(*operands, fast=fast, device=torch.device(call.device)))
    return "" if algorithm == TORCH else f", cuBLASLt's algorithm {algorithm}"


def _measure(call: OpCall) -> float:
    given: Any = map_aggregate(_plain(call.args), lambda arg: _random(arg, call.device))
    given = _with_choices(call, _with_words(call, _with_groups(call, given)))
    return median_us(lambda: call.target(*given), call.device, budget_s=0.02)


def _with_groups(call: OpCall, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with the ends of groups (`offs`) that rise evenly: a grouped product trusts them."""
    names = [argument.name for argument in call.target._schema.arguments]
    where = names.index("offs") if "offs" in names else len(given)
    if where >= len(given) or given[where] is None:
        return given
    experts = given[where].shape[0]
    named, is_wgrad = dict(zip(names, given, strict=False)), call.name == "grouped_wgrad"
    slot = named.get("slot")
    rows = given[0].shape[is_wgrad] if slot is None else slot.shape[0]
    rows = named.get("choices", named.get("rows", rows))
    lines = COLUMN_ALIGNMENT if is_wgrad else GROUP_ALIGNMENT
    each = rows // experts // lines * lines
    ends = torch.arange(1, experts + 1, device=call.device) * each
    ends[-1] = rows
    return (*given[:where], ends.to(given[where].dtype), *given[where + 1 :])


def _with_words(call: OpCall, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with words from all over the vocabulary: a gradient's time depends on how often each occurs."""
    if call.name != "embedding_backward":
        return given
    grad, index, num_weights, padding_idx = given
    words = torch.randint(0, max(num_weights, 1), index.shape, device=call.device).to(index.dtype)
    return grad, words, num_weights, padding_idx


def _with_choices(call: OpCall, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with choices of all experts alike."""
    if call.name != "choice_layout":
        return given
    index, experts = given
    return torch.randint(0, experts, index.shape, device=call.device).to(index.dtype), experts


def _values(args: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(args, lambda arg: found.append(arg.meta.get("val")) if isinstance(arg, fx.Node) else None)
    return found


def _spec(arg: Any) -> Any:
    value = arg.meta.get("val") if isinstance(arg, fx.Node) else arg
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(size_of(size) for size in value.shape), value.dtype)
    return size_of(value) if isinstance(value, torch.SymInt) else value


def _hashable(args: Any) -> Any:
    return tuple(_hashable(arg) for arg in args) if isinstance(args, list | tuple) else args


def _plain(args: Any) -> Any:
    """Tuples inside an argument list as the lists that an op takes."""
    return tuple([*arg] if isinstance(arg, tuple) else arg for arg in args)


def _random(arg: Any, device: str) -> Any:
    if not isinstance(arg, TensorSpec):
        return arg
    if not arg.dtype.is_floating_point:
        # Targets, positions, quantized values: small whole numbers are valid as any of them.
        return torch.randint(0, 2, arg.shape, device=device).to(arg.dtype)
    if arg.dtype is torch.float32:
        return torch.rand(arg.shape, device=device) + 0.5  # scales and statistics are positive
    return torch.randn(arg.shape, device=device).to(arg.dtype)
