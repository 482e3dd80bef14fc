"""Which number formats the tensor cores of each compute capability multiply natively, and why the others are not.

Native means: one tensor-core instruction takes the format as it is stored (block scales included), and a kernel for it
is offered by cuBLASLt, CUTLASS or Triton. A format that is not native can still run as a substitute or by emulation.

Sources: fp8 from 8.9, 1x128 blocks on 9.0 only, row scales on 8.9 and later through CUTLASS: torch's scaled_mm checks
(aten/src/ATen/native/cuda/ScaledBlas.cpp at 0174dfab; what its CUTLASS kernels write: pull requests 166744 and
187569). Block-scaled MMA kinds: CUTLASS media/docs/cpp/
blackwell_functionality.md and the PTX ISA (tcgen05.mma for 10.x and 11.0, mma.sync block_scale for 12.x).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepwell.hardware.codec import decode, packaged_json

ComputeCapability = tuple[int, int]

# Finest names first: what a GEMM can be asked to run in. `fp8` and `fp4` are aliases, resolved by `canonical_format`.
FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
ALIASES = {
    "fp8": "fp8_tensor", "fp8_128x128": "fp8_1x128", "fp4": "nvfp4", "bfloat16": "bf16", "float16": "fp16",
    "float32": "fp32",
}  # fmt: skip
# Names of `deepwell.formats` say more than a tensor core cares about: element, power-of-two scales, the weight's block.
_DETAIL = re.compile(r"(?<=fp[468])(_e\dm\d|_pow2|_1x16|_16x16)|_pow2$")

# Formats that share one tensor-core rate, and so one entry of a machine's table of peaks.
PEAK_CLASS = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "bf16", "mxfp6": "fp6"}
PEAK_CLASS |= dict.fromkeys(("fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8"), "fp8")
PEAK_CLASS |= dict.fromkeys(("mxfp4", "nvfp4"), "fp4")

_BASE = ("fp32", "tf32", "bf16", "fp16")
_BLOCK_SCALED = ("mxfp8", "mxfp6", "mxfp4", "nvfp4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """What one compute capability can do: native formats and a remark that a reader of the table needs."""

    architecture: str
    native_formats: tuple[str, ...]
    has_tcgen05: bool = False
    note: str = ""


def _capabilities() -> Iterator[tuple[ComputeCapability, Capability]]:
    for name, row in packaged_json("deepwell.hardware", "capabilities.json").items():
        major, minor = map(int, name.split("."))
        yield (major, minor), decode(Capability, row, f"capabilities.json[{name}]")


CAPABILITIES = dict(_capabilities())


def canonical_format(name: str) -> str | None:
    """The name here of any format name of Deepwell, or None: `fp8_e5m2_row` -> `fp8_row`, `FP4` -> `nvfp4`."""
    lowered = _DETAIL.sub("", name.lower())
    lowered = ALIASES.get(lowered, lowered)
    return lowered if lowered in FORMATS else None


def capability_of(compute_capability: ComputeCapability) -> Capability:
    """What `compute_capability` can do; one that is not in the table gets the nearest older one of its major version.

    A major version that is not in the table at all gets the plain formats only: promising block scales blindly would
    make a plan that fails in the kernel, promising too little only makes it slower.
    """
    known = CAPABILITIES.get(compute_capability)
    if known is not None:
        return known
    major, minor = compute_capability
    older = [cc for cc in CAPABILITIES if cc[0] == major and cc[1] < minor]
    if older:
        base = max(older)
        note = f"{major}.{minor} is not in the table: taken as {base[0]}.{base[1]}"
        return replace(CAPABILITIES[base], note=note)
    if major < 8:
        formats: tuple[str, ...] = ("fp32", "fp16") if major == 7 else ("fp32",)
        return Capability(architecture="before Ampere", native_formats=formats, note="too old for bf16 tensor cores")
    return Capability(
        architecture="unknown",
        native_formats=_BASE,
        note=f"{major}.{minor} is not in the table: only bf16 is taken as native",
    )


def fp8_row_results(compute_capability: ComputeCapability, cuda: str | None = None) -> tuple[str, ...]:
    """The formats in which torch writes FP8 products with row scales; `cuda` is torch's version, None the current one.

    cuBLASLt has row scales on 9.x from CUDA 12.9 on and writes them all. Elsewhere torch runs CUTLASS, which can be
    relied on for bf16 alone: torch 2.11 refuses fp32 there and fills fp16 with the bits of bf16 (until 187569).
    """
    is_old = cuda is not None and tuple(int(part) for part in cuda.split(".")[:2]) < (12, 9)
    return ("bf16",) if compute_capability[0] != 9 or is_old else ("bf16", "fp16", "fp32")


def reason_not_native(format_name: str, compute_capability: ComputeCapability) -> str:
    """Why `format_name` is not native at `compute_capability`, in a few words; empty where it is native."""
    capability = capability_of(compute_capability)
    if format_name in capability.native_formats:
        return ""
    label = f"sm_{compute_capability[0]}{compute_capability[1]}"
    if format_name == "fp8_1x128" and compute_capability >= (10, 0):
        return f"{label}: 1x128 scales are Hopper's; mxfp8 is the native block format here"
    if format_name.startswith("fp8") and compute_capability < (8, 9):
        return f"{label} has no fp8 tensor cores (they came with 8.9)"
    if format_name in _BLOCK_SCALED and compute_capability < (10, 0):
        return f"{label} has no block-scaled MMA (it came with 10.0)"
    return f"{label}: {capability.note}"
