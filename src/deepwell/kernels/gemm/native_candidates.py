"""Chains of Blackwell's block-scaled formats for the registry: quantize both operands, multiply as they are stored.

MXFP8: E8M0 scales per 32 of both. NVFP4: 1x16 blocks for a, 16x16 for b. On a CPU they run by their references, which
is how they are tested without a Blackwell; there, and on older GPUs, they do not compete.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.kernels.cutlass.library import why_unavailable
from deepwell.kernels.gemm import block_scaled
from deepwell.kernels.gemm.block_scaled import Operand, block_scaled_gemm
from deepwell.kernels.quantize import microscaled as quantize_mx
from deepwell.kernels.quantize.microscaled import quantize_mxfp8, quantize_nvfp4
from deepwell.kernels.registry import Candidate, Problem

FORMATS = ("mxfp8", "nvfp4")
_BLACKWELL = (10, 0)
# Candidates of block_scaled_gemm: the name here, its origin, and whether it is tried in this process. What no Blackwell
# has run yet is tried in one of its own.
_WAYS = {
    "vendor": ("cublaslt", "vendor", True),
    "triton": ("triton", "triton", False),
    "cutlass": ("cutlass", "cutlass", False),
}


def native_chains(sources: Callable[..., str]) -> list[Candidate]:
    """Candidates for "gemm" in mxfp8 and nvfp4. `sources` hashes modules."""
    return [
        Candidate(
            name=f"{label}_{fmt}",
            op="gemm",
            precision=fmt,
            fn=partial(_chain, fmt=fmt, way=way),
            prepare=partial(_prepare, fmt=fmt),
            origin=origin,
            trusted=trusted,
            refuses=partial(_needs_blackwell, way=way),
            fingerprint=sources(block_scaled, quantize_mx),
        )
        for fmt in FORMATS
        for way, (label, origin, trusted) in _WAYS.items()
    ]


class _Weight(NamedTuple):
    operand: Operand


def _rows(x: Tensor, fmt: str, *, square: bool) -> Operand:
    if fmt == "mxfp8":
        made = quantize_mxfp8(x, columns=False)
        assert made.q_TK is not None and made.scale is not None
        return Operand(made.q_TK, made.scale)
    return Operand(*quantize_nvfp4(x, square=square))


def _prepare(b_KN: Tensor, *, fmt: str) -> _Weight:
    b_NK = b_KN.T
    return _Weight(_rows(b_NK if b_NK.stride(1) == 1 else b_NK.contiguous(), fmt, square=True))


def _chain(a_MK: Tensor, b: _Weight, *, fmt: str, way: str) -> Tensor:
    a = a_MK if a_MK.stride(1) == 1 or a_MK.shape[1] <= 1 else a_MK.contiguous()
    written = a.dtype if way != "cutlass" else torch.bfloat16
    out = block_scaled_gemm(_rows(a, fmt, square=False), b.operand, out_dtype=written, candidate=way)
    return out.to(a_MK.dtype)


def _needs_blackwell(problem: Problem, *, way: str) -> str:
    device = torch.device(problem.device)
    if device.type != "cuda":
        return f"it needs a Blackwell GPU; this is a {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _BLACKWELL:
        return f"it needs compute capability 10.0, the GPU has {capability[0]}.{capability[1]}"
    return why_unavailable(device) if way == "cutlass" else ""
