"""What doctor says of native kernels: the library of `deepwell build`, and the on-device self-check of Blackwell.

The self-check runs every quantizer and every block-scaled GEMM candidate on the GPU against its reference, as the
engine does before it binds one: what passes here is bound there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepwell.compat.sources import SOURCES
from deepwell.doctor.check import Check
from deepwell.errors import UnsupportedError
from deepwell.hardware.capability import capability_of
from deepwell.hardware.model import Hardware
from deepwell.kernels.cutlass.build import ARCHS, arch_of, read_manifest

LIBRARY = "native library"
SELF_CHECK = "self-check"


def library_finding(hw: Hardware, environ: Mapping[str, str] | None = None) -> Check:
    capability = hw.gpus[0].compute_capability if hw.kind != "cpu" else None
    try:
        archs: Sequence[str] = [arch_of(capability)] if capability else ARCHS
    except UnsupportedError as error:
        return Check(LIBRARY, "absent", str(error))
    found, missing = [], []
    for arch in archs:
        try:
            built = read_manifest(arch, environ)
            found.append(f"{arch} (nvcc {built.nvcc}, CUTLASS {built.cutlass}: {', '.join(built.sources[1:])})")
        except UnsupportedError as error:
            missing.append(str(error))
    if found:
        return Check(LIBRARY, "ok", "; ".join(found))
    # A build that is there and broken is worth a look; one that was never made is not.
    damaged = [reason for reason in missing if not reason.startswith("no library was built")]
    if damaged:
        return Check(LIBRARY, "warn", damaged[0], "build it again: deepwell build")
    return Check(LIBRARY, "absent", "not built: kernels of torch and Triton are used; `deepwell build` adds CUTLASS")


def sources_finding() -> Check:
    """Where the CUDA sources that the original documents name have gone."""
    moved = "; ".join(f"{old} is now {', '.join(new)}" for old, new in SOURCES.items())
    return Check("native sources", "ok", moved)


# fmt -> the verdicts on its quantizer and on each product
Prove = Callable[[str], Sequence[Any]]


def self_check_findings(hw: Hardware, prove: Prove | None = None) -> list[Check]:
    """One line for each block-scaled format: which kernels are right on this GPU, which did not and why."""
    capability = hw.gpus[0].compute_capability if hw.kind != "cpu" else None
    native = capability_of(capability).native_formats if capability else ()
    formats = [fmt for fmt in ("mxfp8", "nvfp4") if fmt in native]
    if not formats:
        return [Check(SELF_CHECK, "absent", "no block-scaled tensor cores here to check")]
    if prove is None:
        prove = _on_device
    return [_judged(fmt, prove(fmt)) for fmt in formats]


def _on_device(fmt: str) -> Sequence[Any]:
    import torch

    from deepwell.kernels.gemm.native_candidates import self_check

    return self_check(fmt, torch.device("cuda", torch.cuda.current_device()))


def _judged(fmt: str, verdicts: Sequence[Any]) -> Check:
    detail = "; ".join(f"{v.name} FAILED: {v.reason}" if v.reason else f"{v.name} passed{_figure(v)}" for v in verdicts)
    quantizer, *gemms = verdicts
    if not quantizer.reason and any(not v.reason for v in gemms):
        return Check(f"{SELF_CHECK} {fmt}", "ok", detail)
    remedy = f"{fmt} is not bound natively here; training goes on with a substitute or by emulation"
    return Check(f"{SELF_CHECK} {fmt}", "warn", detail, remedy)


def _figure(verdict: Any) -> str:
    return "" if verdict.sqnr_db is None else f": at least {verdict.sqnr_db:.0f} dB against the reference"
