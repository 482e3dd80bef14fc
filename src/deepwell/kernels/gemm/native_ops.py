"""The block-scaled formats of Blackwell as torch ops: quantizers and products, with the shapes that tracing needs.

On a CPU each is the reference of `deepwell.formats`, so that a graph with native formats can be tried anywhere. On a
GPU the product runs the candidate that passed its self-check on that device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import UnsupportedError
from deepwell.formats.hadamard import DEFAULT_SIGNS, hadamard16
from deepwell.formats.layout import padded_shape
from deepwell.formats.quantize import quantize
from deepwell.formats.spec import get_format
from deepwell.kernels import library
from deepwell.kernels.gemm.block_scaled import Operand, block_scaled_gemm
from deepwell.kernels.gemm.native_candidates import native_kernel
from deepwell.kernels.quantize.microscaled import quantize_mxfp8, quantize_nvfp4

_MX_DTYPES = {"mxfp8": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}

# ---- MXFP8 ----


def _mx_rows(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    made = quantize_mxfp8(library._dense(x), columns=False, dtype=_MX_DTYPES[fmt])
    assert made.q_TK is not None and made.scale is not None
    return made.q_TK, made.scale


def _mx_both(x: Tensor, fmt: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, scale, q_t, scale_t = quantize_mxfp8(library._dense(x), dtype=_MX_DTYPES[fmt])
    assert q is not None and scale is not None and q_t is not None and scale_t is not None
    return q, scale, q_t, scale_t


def _fake_mx(x: Tensor, rows: int, length: int, fmt: str) -> tuple[Tensor, Tensor]:
    high, wide = padded_shape(rows, (length + 31) // 32)
    codes = x.new_empty((rows, length), dtype=_MX_DTYPES[fmt])
    return codes, x.new_empty(high * wide, dtype=torch.float8_e8m0fnu)


library._register(
    "mx_quantize_rows(Tensor x, str fmt) -> (Tensor, Tensor)",
    _mx_rows,
    lambda x, fmt: _fake_mx(x, x.shape[0], x.shape[1], fmt),
)
library._register(
    "mx_quantize_both(Tensor x, str fmt) -> (Tensor, Tensor, Tensor, Tensor)",
    _mx_both,
    lambda x, fmt: (*_fake_mx(x, x.shape[0], x.shape[1], fmt), *_fake_mx(x, x.shape[1], x.shape[0], fmt)),
)

# ---- NVFP4 ----


def _nv_rows(x: Tensor, fmt: str, rounding: str, hadamard: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x in NVFP4; zeros fill up the last run of the Hadamard transform, as in the emulation."""
    if hadamard:
        x = hadamard16(F.pad(x, (0, -x.shape[-1] % len(DEFAULT_SIGNS))).contiguous(), DEFAULT_SIGNS)
    x = library._dense(x)
    if not x.is_cuda and rounding == "stochastic":
        # The emulation's own draws: the same generator in the same order gives the same codes.
        q = quantize(x, fmt, rounding=rounding)
        assert q.global_scale is not None
        return q.data, q.scale_swizzled(), q.global_scale
    bits = torch.randint(0, 256, x.shape, dtype=torch.uint8, device=x.device) if rounding == "stochastic" else None
    return quantize_nvfp4(x, square=get_format(fmt).is_transposable, random_bits=bits)


def _fake_nv(x: Tensor, fmt: str, rounding: str, hadamard: bool) -> tuple[Tensor, Tensor, Tensor]:
    length = (x.shape[1] + 15) // 16 * 16 if hadamard else x.shape[1]
    high, wide = padded_shape(x.shape[0], (length + 15) // 16)
    codes = x.new_empty((x.shape[0], (length + 1) // 2), dtype=torch.uint8)
    return codes, x.new_empty(high * wide, dtype=torch.float8_e4m3fn), x.new_empty((), dtype=torch.float32)


library._register(
    "nv_quantize_rows(Tensor x, str fmt, str rounding, bool hadamard) -> (Tensor, Tensor, Tensor)", _nv_rows, _fake_nv
)

# ---- product ----


def _gemm(
    a: Tensor,
    scale_a: Tensor,
    global_a: Tensor | None,
    b: Tensor,
    scale_b: Tensor,
    global_b: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    left, right = Operand(a, scale_a, global_a), Operand(b, scale_b, global_b)
    if not a.is_cuda:
        return block_scaled_gemm(left, right, out_dtype=dtype)
    fmt = "mxfp8" if global_a is None else "nvfp4"
    kernel, reason = native_kernel(fmt, a.device)
    if kernel is None:
        raise UnsupportedError(f"no {fmt} kernel passed its self-check on {a.device}: {reason}")
    return block_scaled_gemm(left, right, out_dtype=dtype, candidate=kernel)


library._register(
    "block_scaled_gemm(Tensor a, Tensor scale_a, Tensor? global_a, Tensor b, Tensor scale_b, Tensor? global_b, "
    "ScalarType dtype) -> Tensor",
    _gemm,
    lambda a, scale_a, global_a, b, scale_b, global_b, dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype),
)
