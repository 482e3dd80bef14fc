"""How one linear's three GEMMs run on this machine: a short string that a graph node can carry.

    "bf16"                      the product as the model wrote it
    "fp8_row"                   Hopper: E4M3, one power-of-two scale per row (fwd, dgrad) or tensor (wgrad); all three
                                summed in fp32 as "fp8_row,sums=fp32"
    "fp8_tensor"                any FP8 GPU: E4M3, one power-of-two scale per tensor; gradients in E5M2 as
                                "fp8_tensor,gradients=e5m2"
    "fp8_1x128"                 Hopper: E4M3, a power-of-two scale per 128 of the contraction, weights per 128 x 128
    "grouped_fp8"               the same for experts' grouped GEMMs; wgrad: one scale for each expert's rows
    "mxfp8_native"              Blackwell: both operands in the policy's format, multiplied by block-scaled tensor cores
    "nvfp4_native"              the same; options follow as in "nvfp4_native,hadamard=False"
    "emulate:<format>"          both operands rounded exactly to the policy's format, the product in fp32

A scheme is the three joined by "|" in the order fwd, dgrad, wgrad.
"""

from dataclasses import dataclass
from functools import lru_cache

from deepwell.errors import ConfigError
from deepwell.precision.gemm_format import GemmFormat, precision

STEPS = ("fwd", "dgrad", "wgrad")
# FP8 with other scales than those of rows, and what the policy calls the scaling.
SCALED = {"fp8_tensor": "tensor", "fp8_1x128": "1x128"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmScheme:
    """How one GEMM runs: `method` is bf16, fp8_row, fp8_tensor, fp8_1x128, grouped_fp8, native or emulate.

    `format` is what operands are rounded to; None of bf16, fp8_row and grouped_fp8. `fast` lets fp8_row sum in the
    tensor cores' short accumulator: never in a wgrad, whose sums over tokens drift (docs/numerics.md).
    """

    method: str
    format: GemmFormat | None = None
    fast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScheme:
    fwd: GemmScheme
    dgrad: GemmScheme
    wgrad: GemmScheme


@lru_cache(maxsize=1024)
def parse_scheme(text: str) -> LinearScheme:
    """The scheme that a node's string names."""
    parts = text.split("|")
    if len(parts) != len(STEPS):
        raise ConfigError(f"scheme {text!r} has {len(parts)} parts; it takes fwd|dgrad|wgrad")
    return LinearScheme(**{step: _parse_gemm(part, step) for step, part in zip(STEPS, parts, strict=True)})


def _parse_gemm(text: str, step: str) -> GemmScheme:
    method, _, rest = text.partition(":")
    if text in ("fp8_row", "fp8_row,sums=fp32"):
        return GemmScheme(method="fp8_row", fast=text == "fp8_row" and step != "wgrad")
    if method in ("bf16", "grouped_fp8") and not rest:
        return GemmScheme(method=method)
    if method == "emulate" and rest:
        return GemmScheme(method="emulate", format=_gemm_format(rest, step))
    name, _, options = text.partition(",")
    if name in SCALED:
        # E4M3 unless the scheme says otherwise: the policy's own default for tensors is E5M2 gradients.
        described = f"fp8,scaling={SCALED[name]}," + (options or "gradients=e4m3")
        return GemmScheme(method=name, format=_gemm_format(described, step))
    if name in ("mxfp8_native", "nvfp4_native"):
        described = name.removesuffix("_native") + ("," + options if options else "")
        return GemmScheme(method="native", format=_gemm_format(described, step))
    known = f"grouped_fp8, {', '.join(SCALED)}, bf16, fp8_row, <format>_native or emulate:<format>"
    raise ConfigError(f"gemm scheme {text!r} is not known; it is {known}")


def _gemm_format(text: str, step: str) -> GemmFormat:
    """What `nvfp4,hadamard=False` does in one GEMM."""
    name, *options = text.split(",")
    pairs = dict(option.split("=", maxsplit=1) for option in options)
    chosen = {key: {"True": True, "False": False}.get(value, value) for key, value in pairs.items()}
    return precision(name, chosen).gemm(step)
