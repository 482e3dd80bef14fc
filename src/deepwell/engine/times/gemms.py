"""How long each GEMM of each linear takes here, by the shape it has in the compiled graphs.

    fwd    T x N x K       dgrad    T x K x N       wgrad    N x K x T       (M x N x K, contracted last)

While a graph is rewritten only the sizes of its linears are written down; linears that were merged are one product, and
each of them shows that product's time and shape. When a report is asked for times, FP8 GEMMs take those of the
kernels that run them (`times/ops.py`, or those of a registry); products in the model's dtype, and on a CPU emulated
ones, which are torch's own, are timed here. The time is the product's alone: quantizations are rows of the kernels'
table.
"""

# Shapes: T tokens, K and N the widths of a linear.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from deepwell.engine.binding import Binding
from deepwell.engine.passes.choose_kernels import KernelRow, size_of
from deepwell.graph.fx import linear_parts, value_of
from deepwell.kernels.gemm.linear import low_precision_linear
from deepwell.kernels.tune.timing import median_us
from deepwell.kernels.tune.verify import FAILURES

# What linears run as that were not met; bf16 stands for the model's own dtype.
_NOT_MET = {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSizes:
    """The sizes of a linear as it last ran; `n` of all linears that are one product."""

    tokens: int
    n: int
    k: int

    def shape(self, gemm: str) -> tuple[int, int, int]:
        """(M, N, K) of one of its three GEMMs."""
        t, n, k = self.tokens, self.n, self.k
        return {"fwd": (t, n, k), "dgrad": (t, k, n), "wgrad": (n, k, t)}[gemm]


def find_products(graph: fx.Graph, weights: Mapping[str, tuple[str, ...]]) -> dict[str, LinearSizes]:
    """The linears of a graph by path, rewritten ones and others. `weights` maps placeholders to parameters' names."""
    found: dict[str, LinearSizes] = {}
    for node in graph.nodes:
        if node.target is low_precision_linear:
            x, parts = node.args[0], [_placeholder(weight) for weight in node.args[1]]
        else:
            linear = linear_parts(node)
            if linear is None or not isinstance(linear[1], fx.Node):
                continue
            x, parts = linear[0], [_placeholder(linear[1])]
        value = value_of(x) if isinstance(x, fx.Node) else None
        if value is None or any(part.name not in weights or value_of(part).dim() != 2 for part in parts):
            continue
        k = size_of(value.shape[-1])
        n = sum(value_of(part).numel() for part in parts) // max(k, 1)
        product = LinearSizes(tokens=math.prod(size_of(size) for size in value.shape[:-1]), n=n, k=k)
        found |= {name.removesuffix(".weight"): product for part in parts for name in weights[part.name]}
    return found


def _placeholder(weight: fx.Node) -> fx.Node:
    """The parameter behind a weight that is read as it is or transposed."""
    while weight.op != "placeholder" and weight.args and isinstance(weight.args[0], fx.Node):
        weight = weight.args[0]
    return weight


def with_times(
    bindings: Sequence[Binding],
    products: Mapping[str, LinearSizes],
    rows: Sequence[KernelRow],
    *,
    device: str,
    dtype: torch.dtype,
) -> tuple[Binding, ...]:
    """Bindings with the shape and the microseconds of their products; what did not run, or is fused, has none."""
    known: dict[tuple[int, int, int, str], float | None] = {}
    timed = []
    for row in bindings:
        product = products.get(row.path)
        if product is None or not product.tokens:
            timed.append(row)
            continue
        shape = product.shape(row.gemm)
        key = (*shape, f"{row.scheme} {row.gemm == 'wgrad'}")
        if key not in known:
            known[key] = _microseconds(row, shape, rows, device, dtype)
        timed.append(replace(row, shape="x".join(map(str, shape)), us=known[key]))
    return tuple(timed)


def _microseconds(
    row: Binding, shape: tuple[int, int, int], rows: Sequence[KernelRow], device: str, dtype: torch.dtype
) -> float | None:
    text = "x".join(map(str, shape))
    wanted = ("fp8_gemm", "fp8_gemm_bias", "fp8_gemm_blocks") if row.scheme.startswith("fp8_") else ("gemm",)
    found = [each for each in rows if each.op in wanted and each.shape == text and each.us is not None]
    # A wgrad is summed in fp32 throughout; the others may take the fast accumulator.
    found.sort(key=lambda each: each.kernel.endswith("_fast") == (row.gemm == "wgrad"))
    if found:
        return found[0].us
    if row.scheme == "bf16":
        return _torch_us(shape, device, dtype)
    if row.scheme in _NOT_MET:
        return _torch_us(shape, device, _NOT_MET[row.scheme])
    # On a CPU what is rounded to a format is multiplied in fp32; a GPU has a kernel of its own for it, in the kernels'
    # table.
    is_plain = row.scheme.startswith("emulate") and torch.device(device).type == "cpu"
    return _torch_us(shape, device, torch.float32) if is_plain else None


def _torch_us(shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> float | None:
    m, n, k = shape
    try:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        return median_us(lambda: a @ b.T, device, budget_s=0.02)
    except FAILURES:  # too large to be run beside the model: there is no time for it
        return None
