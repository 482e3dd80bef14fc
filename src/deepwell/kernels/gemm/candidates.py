"""Deepwell's own candidates for "gemm" (whole chains) and "fp8_gemm" (values and scales): vendor, Triton, CUTLASS, TE.

A chain is: quantize both operands, multiply, bias, activation. Weights that many products share are quantized by
`prepare`, apart from the chain. Operands whose K or N is no multiple of 16 are padded with zeros inside.
"""

# Shapes: M rows of the result, N columns, K contraction. Chains take b as [K, N], FP8 GEMMs as [N, K] FP8 values.

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import UnsupportedError
from deepwell.formats import quantize as formats_quantize
from deepwell.formats.quantize import quantize
from deepwell.kernels.cutlass.library import load_library, rowwise_gemms
from deepwell.kernels.device.triton_support import triton
from deepwell.kernels.gemm import fp8 as gemm
from deepwell.kernels.gemm import native_candidates
from deepwell.kernels.gemm import triton_fp8 as gemm_triton
from deepwell.kernels.gemm.fp8 import ALIGNMENT, fp8_gemm, fp8_gemm_ref
from deepwell.kernels.gemm.native_candidates import native_chains
from deepwell.kernels.gemm.triton_fp8 import CONFIGS, activate_ref, fp8_gemm_triton
from deepwell.kernels.quantize import fp8 as quantizers
from deepwell.kernels.quantize import fp8_blocks as quantize_blocks
from deepwell.kernels.quantize.fp8 import quantize_rows, quantize_weight
from deepwell.kernels.registry import KernelRegistry
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import file_hash, sources_hash
from deepwell.precision.gemm_format import precision as parse_precision

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FP8_CAPABILITY = (8, 9)
_BLOCK = quantize_blocks.BLOCK
# What FP8 GEMMs write; cuBLASLt knows nothing else where rows have scales of their own.
_WRITTEN = torch.bfloat16
# The formats that a policy may ask for and that have an exact emulation on any device.
EMULATED = ("fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4")


# ---- reference: what every chain must compute ----


def gemm_ref(
    a_MK: Tensor,
    b_KN: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`act(a @ b + bias)` in fp32, rounded once: what a chain of any precision comes close to."""
    c_MN = a_MK.float() @ b_KN.float()
    if bias is not None:
        c_MN = c_MN + bias.float()
    return activate_ref(c_MN, activation).to(out_dtype or a_MK.dtype)


def emulated_gemm(a_MK: Tensor, b_KN: Tensor, *, precision: str) -> Tensor:
    """Both operands rounded exactly as a forward GEMM of that format says, the product in fp32; on any device."""
    how = parse_precision(precision).gemm("fwd")
    a = quantize(a_MK.contiguous(), how.lhs.format).dequantize()
    b = quantize(b_KN.T.contiguous(), how.rhs.format).dequantize()
    return (a @ b.T).to(a_MK.dtype)


# ---- chains ----


def _torch_gemm(
    a_MK: Tensor,
    b_KN: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """cuBLASLt in the operands' own dtype."""
    c_MN = a_MK @ b_KN if bias is None else torch.addmm(bias.to(a_MK.dtype), a_MK, b_KN)
    return activate_ref(c_MN, activation).to(out_dtype or a_MK.dtype)


class _Codes(NamedTuple):
    """A weight as FP8 codes [N, K] with its scales, and its N before filling up."""

    codes: Tensor
    scale: Tensor
    n: int


def _fill(x: Tensor, multiple: int, *, rows: bool) -> Tensor:
    more_rows = -x.shape[0] % multiple if rows else 0
    more = -x.shape[1] % multiple
    return F.pad(x, (0, more, 0, more_rows)) if more or more_rows else x


def _rows_nk(b_KN: Tensor, multiple: int = ALIGNMENT) -> Tensor:
    """b as rows along the contraction, padded; a transposed weight is read where it lies."""
    b_NK = b_KN.T
    return _fill(b_NK if b_NK.stride(1) == 1 else b_NK.contiguous(), multiple, rows=True)


def _finish(c_MN: Tensor, n: int, bias: Tensor | None, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
    c_MN = c_MN if c_MN.shape[1] == n else c_MN[:, :n].contiguous()
    if bias is not None:
        c_MN = c_MN + bias.to(c_MN.dtype)
    return activate_ref(c_MN, activation).to(out_dtype or c_MN.dtype)


def _prepare_rows(b_KN: Tensor) -> _Codes:
    return _Codes(*quantize_rows(_rows_nk(b_KN)), b_KN.shape[1])


def _prepare_tensor(b_KN: Tensor) -> _Codes:
    return _Codes(*_quantize_tensor(_rows_nk(b_KN)), b_KN.shape[1])


def _prepare_128x128(b_KN: Tensor) -> _Codes:
    n, k = b_KN.shape[1], b_KN.shape[0]
    made = quantize(_rows_nk(b_KN, _BLOCK), "fp8_e4m3_128x128_pow2")
    assert made.scales is not None
    # cuBLASLt reads them with K's blocks fastest, padded to a multiple of four.
    blocks = -(-k // _BLOCK)
    scale = F.pad(made.scales, (0, -blocks % 4)).contiguous()
    return _Codes(made.data, scale.T, n)


def _chain(
    a_MK: Tensor,
    b: _Codes,
    *,
    quantize_a: Callable[[Tensor], tuple[Tensor, Tensor]] = quantize_rows,
    multiply: Callable[..., Tensor] = fp8_gemm,
    multiple: int = ALIGNMENT,
    fused: bool = False,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Quantize a, `multiply`; bias and activation after it or, where they are `fused`, in the GEMM's own epilogue."""
    codes, scale = quantize_a(_fill(_dense(a_MK), multiple, rows=False))
    epilogue: dict[str, Any] = {}
    if fused:
        padded = None if bias is None else F.pad(bias.to(_WRITTEN), (0, b.codes.shape[0] - b.n))
        epilogue, bias, activation = {"bias": padded, "activation": activation}, None, None
    c_MN = multiply(codes, scale, b.codes, b.scale, out_dtype=_WRITTEN, **epilogue)
    return _finish(c_MN, b.n, bias, activation, out_dtype or a_MK.dtype)


def _quantize_tensor(a_MK: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for a: its largest magnitude first, then the FP8 values."""
    codes, _, scale = quantize_weight(a_MK, write="rows")
    assert codes is not None
    return codes, scale


def _quantize_blocks(a_MK: Tensor) -> tuple[Tensor, Tensor]:
    if a_MK.shape[0] % 4:
        raise UnsupportedError(
            f"cuBLASLt reads 1x128 scales in lines of 16 bytes; M={a_MK.shape[0]} is no multiple of 4"
        )
    return quantize_blocks.quantize_1x128(a_MK)


def _multiply_blocks(a_MK: Tensor, scale_a: Tensor, b_NK: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """1x128 scales for a, 128x128 for b, sums promoted to fp32 every 128."""
    kinds = (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    return F.scaled_mm(a_MK, b_NK.T, scale_a, kinds[0], scale_b, kinds[1], output_dtype=out_dtype, use_fast_accum=False)


def _dense(a_MK: Tensor) -> Tensor:
    return a_MK if a_MK.stride(1) == 1 or a_MK.shape[1] <= 1 else a_MK.contiguous()


# ---- Transformer Engine, where it is installed ----


class _TransformerEngineWeight:
    def __init__(self, b_KN: Tensor) -> None:
        te = importlib.import_module("transformer_engine.pytorch")
        k, n = b_KN.shape
        self.linear = te.Linear(k, n, bias=False, params_dtype=b_KN.dtype, device=b_KN.device)
        with torch.no_grad():
            self.linear.weight.copy_(b_KN.T)


def _transformer_engine_chain(a_MK: Tensor, b: _TransformerEngineWeight, *, bias: Tensor | None = None) -> Tensor:
    """TE's Linear with current scaling: its own quantization and cuBLASLt."""
    te = importlib.import_module("transformer_engine.pytorch")
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8CurrentScaling()
    with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        c_MN = b.linear(a_MK)
    return c_MN if bias is None else c_MN + bias.to(c_MN.dtype)


# ---- who does not take what ----


def _needs_fp8_gpu(problem: Problem) -> str:
    device = torch.device(problem.device)
    if device.type != "cuda":
        return f"it needs an FP8 GPU; this is a {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        return f"it needs compute capability 8.9, the GPU has {capability[0]}.{capability[1]}"
    return ""


def _needs_hopper(problem: Problem) -> str:
    reason = _needs_fp8_gpu(problem)
    if not reason and torch.cuda.get_device_capability(torch.device(problem.device)) < (9, 0):
        return "it needs Hopper or later"
    return reason


def _needs_hopper_alone(problem: Problem) -> str:
    reason = _needs_hopper(problem)
    if not reason and torch.cuda.get_device_capability(torch.device(problem.device)) >= (10, 0):
        return "cuBLASLt has 1x128 scales on Hopper only"
    return reason


def _needs_dtype(name: str) -> Callable[[Problem], str]:
    wanted = str(_DTYPES[name]).removeprefix("torch.")
    return lambda problem: "" if problem.dtype == wanted else f"the operands are {problem.dtype}"


# ---- the lists ----


def _sources(*modules: ModuleType) -> str:
    """Hash of what a candidate runs: this file, the modules of its kernels, and what these import from Deepwell.

    What this file imports is not followed as a whole: it knows every candidate, and each would change with any other.
    """
    return file_hash(Path(__file__))[:8] + sources_hash(*modules, formats_quantize, gemm_triton)


@lru_cache(maxsize=8)
def built_in(op: str) -> tuple[Candidate, ...]:
    """Deepwell's own candidates of an op: the references last, so that ties go to a kernel."""
    return _chains() if op == "gemm" else _fp8_gemms()


def _chains() -> tuple[Candidate, ...]:
    sources = _sources(gemm, quantizers)

    def chain(name: str, fn: Callable[..., Any], **how: Any) -> Candidate:
        return Candidate(name=name, op="gemm", fn=fn, **{"precision": "fp8", "fingerprint": sources, **how})

    fp8 = {"origin": "vendor", "trusted": True, "fast": True, "refuses": _needs_fp8_gpu}
    of_blocks = {"fast": False, "refuses": _needs_hopper_alone, "fingerprint": _sources(quantize_blocks)}
    by_blocks = partial(_chain, quantize_a=_quantize_blocks, multiply=_multiply_blocks, multiple=_BLOCK)
    by_tensor = partial(_chain, quantize_a=_quantize_tensor)
    found = [
        chain("cublaslt_fp8_row", _chain, prepare=_prepare_rows, **fp8),
        chain("cublaslt_fp8_tensor", by_tensor, prepare=_prepare_tensor, **fp8),
        chain("cublaslt_fp8_1x128", by_blocks, prepare=_prepare_128x128, **{**fp8, **of_blocks}),
    ]
    for name, multiply, how in _own_gemms("triton_fp8_row", _sources(gemm_triton, quantizers), sources):
        found.append(chain(name, partial(_chain, multiply=multiply, fused=True), prepare=_prepare_rows, **how))
    if importlib.util.find_spec("transformer_engine") is not None:
        found.append(
            chain(
                "transformer_engine_fp8",
                _transformer_engine_chain,
                prepare=_TransformerEngineWeight,
                origin="transformer_engine",
                fast=True,
                refuses=_needs_fp8_gpu,
            )
        )
    found += native_chains(partial(_sources, native_candidates))
    for name in _DTYPES:
        found.append(
            chain(
                f"torch_{name}", _torch_gemm, precision=name, origin="vendor", trusted=True, refuses=_needs_dtype(name)
            )
        )
    for name in EMULATED:
        emulated = partial(emulated_gemm, precision=name)
        found.append(chain(f"emulated_{name}", emulated, precision=name, origin="reference", trusted=True))
    return tuple(found)


def _fp8_gemms() -> tuple[Candidate, ...]:
    def of(name: str, fn: Callable[..., Any], **how: Any) -> Candidate:
        return Candidate(name=name, op="fp8_gemm", precision="fp8", fn=fn, **{"fingerprint": _sources(gemm), **how})

    from deepwell.kernels.gemm import cublaslt
    from deepwell.kernels.tune import fastest  # it keeps what it chose among the choices that begin here

    sources = _sources(gemm, cublaslt, fastest)
    vendor = {"origin": "vendor", "trusted": True, "refuses": _needs_fp8_gpu, "fingerprint": sources}
    found = [
        of("cublaslt_fast", partial(fastest.fastest_fp8_gemm, fast=True), fast=True, **vendor),
        of("cublaslt", partial(fastest.fastest_fp8_gemm, fast=False), **vendor),
    ]
    found += [of(name, fn, **how) for name, fn, how in _own_gemms("triton", _sources(gemm_triton), _sources(gemm))]
    found.append(of("fp8_gemm_ref", fp8_gemm_ref, origin="reference", trusted=True))
    return tuple(found)


def _own_gemms(
    prefix: str, of_triton: str, of_cutlass: str
) -> Iterator[tuple[str, Callable[..., Tensor], dict[str, Any]]]:
    """(name, GEMM of rows, the rest of a candidate) of each configuration of Triton and of CUTLASS that is here."""
    for config in CONFIGS if isinstance(triton, ModuleType) else ():  # it may be absent
        how = {"origin": "triton", "fast": not config.promote, "fingerprint": of_triton + config.name}
        yield f"{prefix}:{config.name}", partial(fp8_gemm_triton, config=config), {**how, "refuses": _needs_hopper}
    for name, multiply, digest in rowwise_gemms():
        how = {"origin": "cutlass", "fast": not name.endswith("_exact"), "fingerprint": of_cutlass + digest}
        yield name, multiply, {**how, "refuses": _needs_hopper}


def register_library(registry: KernelRegistry, path: str) -> None:
    """Let the configurations of a CUTLASS library compete that lies elsewhere than `deepwell build` puts it."""
    for name, multiply, _ in rowwise_gemms(load_library(path)):
        how: dict[str, Any] = {"precision": "fp8", "trusted": True, "fast": not name.endswith("_exact")}
        registry.register(f"{name} (file)", multiply, op="fp8_gemm", **how)
        chain = partial(_chain, multiply=multiply, fused=True)
        registry.register(f"{name} (file)", chain, op="gemm", prepare=_prepare_rows, **how)
