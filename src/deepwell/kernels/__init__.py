"""One room an op: its reference in plain torch, configurations, kernel, wrapper, torch op and autograd function.

The names that users need are loaded on first use: importing this package loads no torch.
"""

import importlib
from typing import TYPE_CHECKING

_PUBLIC = {
    "KernelRegistry": "deepwell.kernels.registry",
    "Candidate": "deepwell.kernels.registry",
    "Problem": "deepwell.kernels.registry",
    "ProductionKernelManager": "deepwell.kernels.production_kernels",
}

__all__ = ["Candidate", "KernelRegistry", "Problem", "ProductionKernelManager"]

if TYPE_CHECKING:
    from deepwell.kernels.production_kernels import ProductionKernelManager
    from deepwell.kernels.registry import Candidate, KernelRegistry, Problem


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'deepwell.kernels' has no attribute {name!r}; public names: {', '.join(_PUBLIC)}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
