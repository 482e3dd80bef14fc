"""ProductionKernelManager: matrix products by the fastest kernel that proved itself on this machine.

A thin front of the registry: `manager.gemm(a, b, activation="gelu")` runs whole chains (quantization, product, bias,
activation) on a GPU, and the same formats by exact emulation on a CPU.
"""

from typing import Any

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.gemm.dispatch import gemm
from deepwell.kernels.gemm.triton_fp8 import ACTIVATIONS
from deepwell.kernels.registry import KernelRegistry


class ProductionKernelManager:
    """Products through one registry: Deepwell's own candidates and, where one is passed, a user's."""

    def __init__(self, registry: KernelRegistry | None = None) -> None:
        if registry is not None and not isinstance(registry, KernelRegistry):
            raise ConfigError(f"registry is a {type(registry).__name__}; pass a deepwell.kernels.KernelRegistry")
        self.registry = registry if registry is not None else KernelRegistry()

    def gemm(
        self,
        a: Tensor,
        b: Tensor,
        activation: str | None = None,
        bias: Tensor | None = None,
        precision: str = "auto",
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`act(a @ b + bias)` for a [..., K] and b [K, N] in bf16, fp16 or fp32; forward only.

        `activation` is gelu (erf), silu, relu or None. `precision` names a format (bf16, fp8, mxfp8, nvfp4 ...);
        "auto" takes FP8 where it is the faster chain on this GPU, else the operands' own dtype.
        """
        return gemm(self.registry, a, b, precision=precision, bias=bias, activation=activation, out_dtype=out_dtype)

    def info(self) -> dict[str, Any]:
        """What may compete, on which device, and what was decided so far; made of plain values."""
        return {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "activations": list(ACTIVATIONS),
            "candidates": [
                {"name": c.name, "op": c.op, "precision": c.precision, "origin": c.origin} for c in self.registry
            ],
            **self.registry.to_dict(),
        }

    def __repr__(self) -> str:
        return f"ProductionKernelManager({self.registry!r})"
