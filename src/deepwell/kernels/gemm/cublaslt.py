"""Products by an algorithm of cuBLASLt that is chosen by its rank: torch always takes the heuristic's first.

    C[m, n] = (A[m, k] @ B[n, k]^T) * scale_a * scale_b, rounded to bf16          FP8 values
    C[m, n] = A[m, k] @ B[k, n], or C += that                                     bf16, either may be transposed

The heuristic orders what it knows by an estimate. Of weight gradients, with one scale a tensor and sums in fp32, it
knows eight, and another than the first is up to 8 % faster (4096 x 4096 x 16384, one H200, 2026-11-15,
`benchmarks/bench_algorithms.py`); with a scale per row it knows one. "Static" algorithms need no workspace: tiles are
dealt out beforehand, so that no counter has to be cleared by a launch of its own before every product.
Numerics: as torch's own products: `gemm.fp8_gemm_ref`, and `mm_ref` here.
Cost:     2*M*N*K flops; some ten microseconds of the host a call.
"""

# Shapes: M rows of the result, N columns, K contraction. cuBLASLt counts columns first: its A is our B, its D our C.T.

import ctypes
import math
import threading
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p, sizeof
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deepwell.errors import UnsupportedError
from deepwell.kernels.gemm.fp8 import ALIGNMENT, check_operands, one_on

MAX_ALGORITHMS = 8
_WORKSPACE_BYTES = 32 << 20

# Numbers of cublasLt.h, library_types.h and cublas_api.h (CUDA 12.9 and 13).
_TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29, torch.bfloat16: 14}
_COMPUTE_FP32, _SCALE_FP32 = 68, 0
_DESC_TRANSPOSE_A, _DESC_TRANSPOSE_B, _DESC_FAST_SUMS = 3, 4, 25
_DESC_SCALE_A, _DESC_SCALE_B, _DESC_SCALE_MODE_A, _DESC_SCALE_MODE_B = 17, 18, 31, 32
_SCALE_PER_ROW = 3
_PREFER_WORKSPACE = 1


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _FoundAlgorithm(ctypes.Structure):
    """An algorithm as the heuristic names it, and the workspace it needs."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    )


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """The cuBLASLt that torch has loaded. Raises UnsupportedError where there is none."""
    cuda = torch.version.cuda
    if cuda is None:
        raise UnsupportedError("this torch was built without CUDA, so there is no cuBLASLt")
    name = f"libcublasLt.so.{cuda.partition('.')[0]}"
    torch.cuda.current_blas_handle()  # loads it where torch does so late
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise UnsupportedError(f"{name} cannot be loaded: {error}") from error
    library.cublasLtMatmulDescCreate.argtypes = (c_void_p, c_int, c_int)
    library.cublasLtMatmulDescSetAttribute.argtypes = (c_void_p, c_int, c_void_p, c_size_t)
    library.cublasLtMatrixLayoutCreate.argtypes = (c_void_p, c_int, c_uint64, c_uint64, ctypes.c_int64)
    library.cublasLtMatmulPreferenceCreate.argtypes = (c_void_p,)
    library.cublasLtMatmulPreferenceSetAttribute.argtypes = (c_void_p, c_int, c_void_p, c_size_t)
    library.cublasLtMatmulPreferenceDestroy.argtypes = (c_void_p,)
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = (*[c_void_p] * 7, c_int, c_void_p, c_void_p)
    library.cublasLtMatmul.argtypes = (*[c_void_p] * 14, c_size_t, c_void_p)
    return library


def _call(what: str, status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt's {what} failed with status {status}")


# ---- reference: what the kernels must compute, in the plainest torch ----


def mm_ref(a_MK: Tensor, b_KN: Tensor, before_MN: Tensor | None = None) -> Tensor:
    """Reference for `mm_ranked`: sums in fp32, rounded once."""
    c_MN = a_MK.float() @ b_KN.float()
    return (c_MN if before_MN is None else c_MN + before_MN.float()).to(a_MK.dtype)


# ---- plans: one per shape ----


@dataclass(slots=True, eq=False)
class _Plan:
    """A product's descriptors and the algorithms that the heuristic names for it; they live as long as the process."""

    m: int
    n: int
    description: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]
    found: list[_FoundAlgorithm]
    # The description holds the addresses of the scales from when they are set to when the product is launched.
    lock: Any = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class LtProduct:
    """What cuBLASLt is asked for. `scales` is "row", "tensor" or "none"; `along_k` says of A and B whether numbers of
    one sum lie side by side; `is_static`: without workspace."""

    m: int
    n: int
    k: int
    types: tuple[torch.dtype, torch.dtype] = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    along_k: tuple[bool, bool] = (True, True)
    scales: str
    fast: bool = False
    is_static: bool = False
    device: int


@lru_cache(maxsize=1024)
def _plan(product: LtProduct) -> _Plan:
    library = _library()
    m, n, k = product.m, product.n, product.k
    description = c_void_p()
    _call("MatmulDescCreate", library.cublasLtMatmulDescCreate(byref(description), _COMPUTE_FP32, _SCALE_FP32))
    a_along_k, b_along_k = product.along_k
    _describe(description, _DESC_TRANSPOSE_A, c_int(b_along_k))
    _describe(description, _DESC_TRANSPOSE_B, c_int(not a_along_k))
    if product.scales != "none":
        _describe(description, _DESC_FAST_SUMS, ctypes.c_int8(product.fast))
        # The heuristic wants to see addresses; those of the scales come with each call.
        for address in (_DESC_SCALE_A, _DESC_SCALE_B):
            _describe(description, address, c_void_p(ALIGNMENT))
    if product.scales == "row":
        _describe(description, _DESC_SCALE_MODE_A, c_int(_SCALE_PER_ROW))
        _describe(description, _DESC_SCALE_MODE_B, c_int(_SCALE_PER_ROW))
    type_a, type_b = product.types
    layouts = (
        _layout(type_b, *((k, n) if b_along_k else (n, k))),
        _layout(type_a, *((k, m) if a_along_k else (m, k))),
        _layout(torch.bfloat16, n, m),
    )
    return _Plan(m, n, description, layouts, _algorithms(description, layouts, product.is_static))


def _describe(description: c_void_p, attribute: int, value: Any) -> None:
    status = _library().cublasLtMatmulDescSetAttribute(description, attribute, byref(value), sizeof(value))
    _call(f"attribute {attribute}", status)


def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    _call(
        "MatrixLayoutCreate", _library().cublasLtMatrixLayoutCreate(byref(layout), _TYPES[dtype], rows, columns, rows)
    )
    return layout


def _algorithms(description: c_void_p, layouts: tuple[c_void_p, ...], is_static: bool) -> list[_FoundAlgorithm]:
    library, a, b, d = _library(), *layouts
    preference, workspace = c_void_p(), c_size_t(0 if is_static else _WORKSPACE_BYTES)
    _call("MatmulPreferenceCreate", library.cublasLtMatmulPreferenceCreate(byref(preference)))
    found, count = (_FoundAlgorithm * MAX_ALGORITHMS)(), c_int()
    try:
        asked = (preference, _PREFER_WORKSPACE, byref(workspace), sizeof(workspace))
        _call("preference", library.cublasLtMatmulPreferenceSetAttribute(*asked))
        handle = torch.cuda.current_blas_handle()
        status = library.cublasLtMatmulAlgoGetHeuristic(
            handle, description, a, b, d, d, preference, MAX_ALGORITHMS, found, byref(count)
        )
    finally:
        library.cublasLtMatmulPreferenceDestroy(preference)
    # It says "not supported" where it knows none.
    return [] if status else [one for one in found[: count.value] if one.state == 0]


def num_algorithms(product: LtProduct) -> int:
    """How many algorithms the heuristic names for a product. Raises UnsupportedError where there is no cuBLASLt."""
    with torch.cuda.device(product.device):
        return len(_plan(product).found)


# ---- public wrappers ----


def fp8_gemm_ranked(
    a_MK: Tensor,
    scale_a: Tensor | None,
    b_NK: Tensor,
    scale_b: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
    rank: int = 0,
    is_static: bool = False,
) -> Tensor:
    """`a @ b.T` of FP8 values with fp32 scales, one per tensor or row; no `scale_a` is 1.

    A rank beyond the last algorithm is the last. Raises ConfigError on operands that do not fit, UnsupportedError on
    those that cuBLASLt does not take.
    """
    check_operands(a_MK, scale_a, b_NK, scale_b)
    (m, k), n = a_MK.shape, b_NK.shape[0]
    if not a_MK.is_cuda or out_dtype != torch.bfloat16 or 0 in (m, n, k) or k % ALIGNMENT or n % ALIGNMENT:
        raise UnsupportedError(
            f"cuBLASLt's ranked algorithms take K and N in multiples of {ALIGNMENT} on a GPU and write bfloat16; "
            f"got {m}x{n}x{k} on {a_MK.device}, {out_dtype}"
        )
    scale_a = one_on(a_MK.device) if scale_a is None else scale_a
    product = product_of_codes(a_MK, scale_a, b_NK, scale_b, fast=fast, device=a_MK.device)
    if product.scales == "row":
        scale_a, scale_b = (s.reshape(-1).expand(size) for s, size in ((scale_a, m), (scale_b, n)))
    a, b, scale_a, scale_b = (t.contiguous() for t in (a_MK, b_NK, scale_a, scale_b))
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    _launch(replace(product, is_static=is_static), rank, (a, b), out, scales=(scale_a, scale_b))
    return out


def product_of_codes(
    a_MK: Any, scale_a: Any, b_NK: Any, scale_b: Any, *, fast: bool, device: torch.device
) -> LtProduct:
    """What a product of FP8 values is to cuBLASLt, of tensors or of what has their shape and dtype."""
    has_rows = max(1 if scale is None else math.prod(scale.shape) for scale in (scale_a, scale_b)) > 1
    return LtProduct(
        m=a_MK.shape[0],
        n=b_NK.shape[0],
        k=a_MK.shape[1],
        types=(a_MK.dtype, b_NK.dtype),
        scales="row" if has_rows else "tensor",
        fast=fast,
        device=device.index or 0,
    )


def mm_ranked(
    a_MK: Tensor, b_KN: Tensor, *, out: Tensor, accumulate: bool = False, rank: int = 0, is_static: bool = False
) -> Tensor:
    """`out = a @ b`, or `out += a @ b`, in bf16. Operands are matrices without gaps, as they are or transposed.

    Raises UnsupportedError on any others. A rank beyond the last algorithm is the last.
    """
    product = product_of(a_MK, b_KN, out, is_static=is_static)
    if product is None:
        raise UnsupportedError(
            "cuBLASLt's ranked algorithms take whole bf16 matrices on a GPU and write one; "
            f"got {tuple(a_MK.shape)} and {tuple(b_KN.shape)} for {tuple(out.shape)}, {a_MK.dtype} on {a_MK.device}"
        )
    _launch(product, rank, (a_MK, b_KN), out, accumulate=accumulate)
    return out


def product_of(a_MK: Tensor, b_KN: Tensor, out: Tensor, *, is_static: bool = False) -> LtProduct | None:
    """What a product in bf16 is to cuBLASLt, None where it is none for `mm_ranked`."""
    along_k = _along(a_MK, 1), _along(b_KN, 0)
    operands = (a_MK, b_KN, out)
    fits = all(t.is_cuda and t.dtype == torch.bfloat16 and t.data_ptr() % ALIGNMENT == 0 for t in operands)
    sizes = (a_MK.shape[0], b_KN.shape[1], a_MK.shape[1])
    if not fits or None in along_k or not out.is_contiguous() or any(size % 8 for size in sizes) or 0 in sizes:
        return None
    m, n, k = sizes
    return LtProduct(
        m=m,
        n=n,
        k=k,
        types=(torch.bfloat16, torch.bfloat16),
        along_k=(bool(along_k[0]), bool(along_k[1])),
        scales="none",
        is_static=is_static,
        device=out.device.index,
    )


def _along(x: Tensor, dim: int) -> bool | None:
    """Whether a matrix without gaps lies along that dimension; None where it has gaps."""
    if x.is_contiguous():
        return dim == 1
    return dim == 0 if x.T.is_contiguous() else None


def _launch(
    product: LtProduct,
    rank: int,
    operands: tuple[Tensor, Tensor],
    out: Tensor,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    accumulate: bool = False,
) -> None:
    with torch.cuda.device(out.device):
        plan = _plan(product)
        if not plan.found:
            raise UnsupportedError(f"cuBLASLt has no algorithm for {product.m}x{product.n}x{product.k}")
        chosen = plan.found[min(rank, len(plan.found) - 1)]
        layout_a, layout_b, layout_d = plan.layouts
        # From torch's allocator, which knows of streams and graphs.
        workspace = torch.empty(chosen.workspace, dtype=torch.uint8, device=out.device)
        one, before = ctypes.c_float(1.0), ctypes.c_float(1.0 if accumulate else 0.0)
        with plan.lock:
            if scales is not None:
                _describe(plan.description, _DESC_SCALE_A, c_void_p(scales[1].data_ptr()))
                _describe(plan.description, _DESC_SCALE_B, c_void_p(scales[0].data_ptr()))
            status = _library().cublasLtMatmul(
                torch.cuda.current_blas_handle(),
                plan.description,
                byref(one),
                operands[1].data_ptr(),
                layout_a,
                operands[0].data_ptr(),
                layout_b,
                byref(before),
                out.data_ptr(),
                layout_d,
                out.data_ptr(),
                layout_d,
                byref(chosen.algorithm),
                workspace.data_ptr() if chosen.workspace else None,
                chosen.workspace,
                torch.cuda.current_stream(out.device).cuda_stream,
            )
        _call("Matmul", status)
