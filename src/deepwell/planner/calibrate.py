"""A GPU's constants from the GEMM curves that were measured on it, where there are any. Pure.

`gpus.json` holds what a GPU of this kind reached in published runs. `deepwell probe --measure` times GEMMs on the very
device; their median over what the model says of the same shapes corrects the rate of their format.
"""

import statistics
from dataclasses import replace

from deepwell.hardware.parts import Curve, Gpu
from deepwell.planner.efficiency import GpuConstants, device, gemm_s

# Curves -> the format that the planner prices by them; row scales are what Deepwell's FP8 has.
_FORMATS = {"bf16": "bf16", "fp8_row": "fp8", "fp8": "fp8", "fp8_tensor": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4"}
_FIELDS = {"bf16": "gemm_bf16", "fp8": "gemm_fp8", "nvfp4": "gemm_fp4"}


def measured_constants(gpu: Gpu) -> GpuConstants | None:
    """The GPU's constants with GEMM rates as measured on it, or None where nothing was."""
    curves = [curve for curve in gpu.curves if curve.tier == "measured" and curve.points]
    base = device(gpu)
    rates: dict[str, float] = {}
    for name, fmt in _FORMATS.items():
        curve = next((curve for curve in curves if curve.format == name), None)
        if curve is not None and _FIELDS[fmt] not in rates:
            share = getattr(base.constants, _FIELDS[fmt])
            rates[_FIELDS[fmt]] = share / _slower(gpu, curve, fmt)
    return replace(base.constants, **rates) if rates else None


def _slower(gpu: Gpu, curve: Curve, fmt: str) -> float:
    """Median of measured over modelled time, on shapes large enough to tell of the rate."""
    dev = device(gpu)
    ratios = [
        2e-12 * p.m * p.n * p.k / p.tflops / gemm_s(dev, fmt, p.m, p.n, p.k)
        for p in curve.points
        if min(p.m, p.n, p.k) >= 512
    ]
    return statistics.median(ratios) if ratios else 1.0
