"""Kernels of Blackwell's block-scaled formats as candidates: products, quantizers, and chains of both.

MXFP8: E8M0 scales per 32 of both. NVFP4: 1x16 blocks for a, 16x16 for b. On a CPU they run by their references, which
is how they are tested without a Blackwell; there, and on older GPUs, the chains do not compete.

The engine takes the first product that passes its cases on the device (`native_kernel`), and only where the quantizer
does. Rows and blocks of the cases' operands differ in size, so that a scale read from the wrong place cannot hide.
"""

import math
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.formats.metrics import sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels.cutlass.library import why_unavailable
from deepwell.kernels.gemm import block_scaled
from deepwell.kernels.gemm.block_scaled import CANDIDATES, ScaledOperand, block_scaled_gemm, block_scaled_gemm_ref
from deepwell.kernels.quantize import microscaled as quantize_mx
from deepwell.kernels.quantize.microscaled import quantize_mxfp8, quantize_nvfp4
from deepwell.kernels.tune.candidate import Candidate, Verdict
from deepwell.kernels.tune.choose import check, first_right
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.verify import BITWISE, Case

FORMATS = ("mxfp8", "nvfp4")
_BLACKWELL = (10, 0)
# Candidates of block_scaled_gemm: the name here, its origin, and whether it is tried in this process. What no Blackwell
# has run yet is tried in one of its own.
_WAYS = {
    "vendor": ("cublaslt", "vendor", True),
    "triton": ("triton", "triton", False),
    "cutlass": ("cutlass", "cutlass", False),
}
# Whole tiles of every kernel; then sizes that are no multiple of anything, one of them smaller than a tile.
SHAPES = ((256, 512, 512), (200, 272, 320), (33, 48, 96))
# fp32 results: DESIGN's floor for the product of the same operands. bf16 results: twice the rounding's own error.
_FP32_DB = 60.0
_TWICE_DB = 20 * math.log10(2)


# ---- chains for the registry ----


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
    operand: ScaledOperand


def _rows(x: Tensor, fmt: str, *, square: bool) -> ScaledOperand:
    if fmt == "mxfp8":
        made = quantize_mxfp8(x, columns=False)
        assert made.q_TK is not None and made.scale is not None
        return ScaledOperand(made.q_TK, made.scale)
    return ScaledOperand(*quantize_nvfp4(x, square=square))


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


# ---- products and quantizers, each by itself ----


@lru_cache(maxsize=4)
def built_in(op: str) -> tuple[Candidate, ...]:
    """The products in the order in which they are tried, or the quantizer, of each format."""
    sources = sources_hash(sys.modules[__name__])
    if op == "block_scaled_quantize":
        kinds = [("quantize", "triton", True, fmt, partial(_quantize, fmt=fmt)) for fmt in FORMATS]
    else:
        kinds = [(way, *_WAYS[way][1:], fmt, partial(_product, way=way)) for fmt in FORMATS for way in CANDIDATES]
    return tuple(
        Candidate(name=name, op=op, precision=fmt, fn=fn, origin=origin, trusted=trusted, fingerprint=sources)
        for name, origin, trusted, fmt, fn in kinds
    )


def native_kernel(fmt: str, device: torch.device) -> tuple[str | None, str]:
    """(the first product that is right on `device` or None, the reason). Those behind it are not tried."""
    quantizer, reason = first_right("block_scaled_quantize", fmt, str(device))
    if not quantizer:
        return None, reason
    kernel, reason = first_right("block_scaled_gemm", fmt, str(device))
    return (kernel, f"{kernel} passed its self-check ({reason})") if kernel else (None, reason)


def self_check(fmt: str, device: torch.device) -> tuple[Verdict, ...]:
    """All of one format on one device, checked anew: the quantizer, then each product; none stops the next."""
    found = []
    for op in ("block_scaled_quantize", "block_scaled_gemm"):
        for candidate in built_in(op):
            if candidate.precision == fmt:
                proof = check(candidate, Problem(op=op, precision=fmt, device=str(device)))
                found.append(candidate.verdict(reason=proof.reason, sqnr_db=proof.sqnr_db))
    return tuple(found)


def _product(a: ScaledOperand, b: ScaledOperand, out_dtype: torch.dtype, *, way: str) -> Tensor:
    return block_scaled_gemm(a, b, out_dtype=out_dtype, candidate=way)


def _quantize(x: Tensor, axis: int, *, fmt: str) -> Tensor:
    """Values and scales as bytes, one after the other."""
    if fmt == "mxfp8":
        made = quantize_mxfp8(x)
        found = (made.q_TK, made.scale) if axis == 1 else (made.q_KT, made.scale_t)
    else:
        found = quantize_nvfp4(x)[:2]
    return _as_bytes(*found)


def _as_bytes(*parts: Tensor | None) -> Tensor:
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts if part is not None])


def cases(candidate: Candidate, problem: Problem) -> Iterator[Case]:
    """All that a product or a quantizer must compute on the problem's device."""
    generator = torch.Generator().manual_seed(20250611)
    for m, n, k in SHAPES:
        x, w = (_uneven(rows, k, problem.device, generator) for rows in (m, n))
        if candidate.op == "block_scaled_quantize":
            yield from _quantizer_cases(candidate.precision, x)
        else:
            yield from _product_cases(candidate, x, w)


def _uneven(rows: int, columns: int, device: str, generator: torch.Generator) -> Tensor:
    """Gaussian numbers whose rows and blocks of 16 differ in size: a scale from the wrong place is seen."""
    x = torch.randn(rows, columns, generator=generator)
    by_row = torch.exp2(torch.randint(-4, 4, (rows, 1), generator=generator).float())
    by_block = torch.exp2(torch.randint(-3, 3, (rows, -(-columns // 16)), generator=generator).float())
    return (x * by_row * by_block.repeat_interleave(16, dim=1)[:, :columns]).to(device, torch.bfloat16)


def _product_cases(candidate: Candidate, x: Tensor, w: Tensor) -> Iterator[Case]:
    fmt, label = candidate.precision, f"{x.shape[0]}x{w.shape[0]}x{x.shape[1]}"
    b = _rows(w, fmt, square=False)
    spoiled = x.clone()
    spoiled[0, 0] = math.nan
    for values in (x, spoiled):
        a = _rows(values, fmt, square=False)
        wanted = block_scaled_gemm_ref(a, b, out_dtype=torch.float32)
        finite = wanted[wanted.isfinite()]
        for dtype in (torch.bfloat16,) if candidate.name == "cutlass" else (torch.float32, torch.bfloat16):
            rounding = sqnr_db(finite, finite.to(dtype).float())
            yield Case(
                label=label,
                operands=(a, b, dtype),
                names=("a", "b"),
                wanted=wanted,
                floor_db=_FP32_DB if dtype == torch.float32 else rounding - _TWICE_DB,
                dtype=dtype,
                only_spoiled=not finite.numel(),  # NVFP4: one NaN, and the scale of all is NaN
            )


def _quantizer_cases(fmt: str, x: Tensor) -> Iterator[Case]:
    """Bit for bit the format's; of MXFP8 both copies, with a NaN."""
    if fmt == "mxfp8":
        x[0, 0] = math.nan
    for axis in (1, 0) if fmt == "mxfp8" else (1,):
        made = quantize(x, fmt, axis=axis)
        yield Case(
            label=f"{x.shape[0]}x{x.shape[1]} along axis {axis}",
            operands=(x, axis),
            names=("x",),
            wanted=_as_bytes(made.data, made.scale_swizzled()),
            floor_db=BITWISE,
        )
