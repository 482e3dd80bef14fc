"""Deepwell trains transformer and MoE models at the speed of the hardware, in low precision, without losing accuracy.

The public names are loaded on first use: `import deepwell` loads no torch and takes milliseconds.
"""

import importlib
from typing import TYPE_CHECKING

from deepwell.engine.entry_point import announce

__version__ = "0.1.0"

# Public name -> the module that defines it. The one list of what `deepwell` exports.
_PUBLIC = {
    "probe": "deepwell.hardware.probe",
    "Hardware": "deepwell.hardware.probe",
    "capture": "deepwell.graph.capture",
    "IR": "deepwell.graph.ir",
    "PrecisionPolicy": "deepwell.precision.policy",
    "autoplan": "deepwell.planner.search.autoplan",
    "Plan": "deepwell.planner.search.autoplan",
    "compile": "deepwell.engine.compile",
    "optimize_for_blackwell": "deepwell.engine.compile",
    "Engine": "deepwell.engine.compile",
    "dryrun": "deepwell.engine.dryrun.dry_run",
    "DryRun": "deepwell.engine.dryrun.values",
    "Trainer": "deepwell.train.trainer",
    "TrainSettings": "deepwell.train.settings",
    "Callback": "deepwell.train.run",
    "AdamWDW": "deepwell.train.adamw.optimizer",
    "DeepwellMoE": "deepwell.moe.block",
    "GuardSettings": "deepwell.precision.guard",
    "save": "deepwell.artifacts.checkpoint",
    "load": "deepwell.artifacts.checkpoint",
    "export": "deepwell.artifacts.export.write",
    "load_engine": "deepwell.artifacts.export.read",
    "QuantizedTensor": "deepwell.formats.quantize",
    "quantize": "deepwell.formats.quantize",
    "DeepwellError": "deepwell.errors",
    "ConfigError": "deepwell.errors",
    "UnsupportedError": "deepwell.errors",
    "CaptureError": "deepwell.errors",
    "PlanError": "deepwell.errors",
    "NumericsError": "deepwell.errors",
    "CheckpointError": "deepwell.errors",
}

# Names of the original documents, as "module" or "module:attribute". They work and are not listed.
_COMPAT = {
    "cutlass_kernels": "deepwell.compat.cutlass_kernels",
    "BlackwellGraphOptimizer": "deepwell.compat.graph_optimizer:BlackwellGraphOptimizer",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from deepwell.artifacts.checkpoint import load, save
    from deepwell.artifacts.export.read import load_engine
    from deepwell.artifacts.export.write import export
    from deepwell.engine.compile import Engine, compile, optimize_for_blackwell  # noqa: A004 - the public name
    from deepwell.engine.dryrun.dry_run import dryrun
    from deepwell.engine.dryrun.values import DryRun
    from deepwell.errors import (
        CaptureError,
        CheckpointError,
        ConfigError,
        DeepwellError,
        NumericsError,
        PlanError,
        UnsupportedError,
    )
    from deepwell.formats.quantize import QuantizedTensor, quantize
    from deepwell.graph.capture import capture
    from deepwell.graph.ir import IR
    from deepwell.hardware.probe import Hardware, probe
    from deepwell.moe.block import DeepwellMoE
    from deepwell.planner.search.autoplan import Plan, autoplan
    from deepwell.precision.guard import GuardSettings
    from deepwell.precision.policy import PrecisionPolicy
    from deepwell.train.adamw.optimizer import AdamWDW
    from deepwell.train.run import Callback
    from deepwell.train.settings import TrainSettings
    from deepwell.train.trainer import Trainer


def __getattr__(name: str) -> object:
    if name in _COMPAT:
        module, _, attribute = _COMPAT[name].partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found
    if name not in _PUBLIC:
        raise AttributeError(f"module 'deepwell' has no attribute {name!r}; public names: {', '.join(_PUBLIC)}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


# torch.compile(model, backend="deepwell") works from here on, whether torch is loaded yet or not.
announce()
