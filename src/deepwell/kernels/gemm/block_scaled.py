"""MXFP8 and NVFP4 matrix products of quantized operands, as Blackwell's tensor cores compute them.

    C[m, n] = sum_k (A[m, k] * scale_a[m, k // block] * global_a) * (B[n, k] * scale_b[n, k // block] * global_b)

    mxfp8   E4M3 or E5M2, E8M0 scales per 32, no global scale
    nvfp4   packed E2M1, E4M3 scales per 16, an fp32 scale per tensor

Both operands lie along the contraction; scales are bytes in the 128x4 tile order of `deepwell.formats.layout`.
Candidates: "vendor" (cuBLASLt through torch.nn.functional.scaled_mm), "triton" (tl.dot_scaled: tcgen05 block_scale MMAs
on sm_100; on sm_90 Triton multiplies in bf16, exact for MXFP8's operands), "cutlass" (`deepwell build`).
Numerics: products and block scales are exact; sums in fp32; one rounding to the output. On a CPU the reference: bit for
    bit the emulation of `deepwell.formats` on the same operands.
Cost: 2*M*N*K flops; bytes (M + N) * K * 1.03 (mxfp8) or * 0.56 (nvfp4), and the output.
"""

# Shapes: M rows of the result, N columns, K contraction, R rows of one operand.

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import ConfigError, DeepwellError, UnsupportedError
from deepwell.formats import layout
from deepwell.formats.elements import decode, decode_e8m0, unpack_codes
from deepwell.formats.spec import E2M1, E4M3, E5M2, ElementFormat
from deepwell.kernels.cutlass import library as cutlass_library
from deepwell.kernels.device.triton_support import (
    LAUNCH_ERRORS,
    block_descriptor,
    cdiv,
    launch,
    on_device,
    runs_kernel,
    tl,
    triton,
)
from deepwell.kernels.tune.out_of_memory import is_shortage

_ELEMENTS: dict[torch.dtype, ElementFormat] = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.uint8: E2M1}
_BLOCKS = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}
CANDIDATES = ("vendor", "triton", "cutlass")
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# What cuBLASLt wants: rows of the packed operands in whole 16-byte lines, N in steps of 16.
_N_ALIGNMENT = 16
_K_ALIGNMENT = 32


class ScaledOperand(NamedTuple):
    """One side: codes (R, K), or packed E2M1 (R, K / 2) as uint8; scales in tile order; NVFP4's fp32 global scale."""

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None = None

    @property
    def length(self) -> int:
        """Elements along the contraction; packed ones come in pairs."""
        return self.data.shape[1] * (2 if self.data.dtype == torch.uint8 else 1)

    @property
    def block(self) -> int:
        return _BLOCKS[self.scale.dtype]


# ---- reference: what the kernels must compute, in the plainest torch ----


def dequantize_operand(x: ScaledOperand) -> Tensor:
    """The fp32 numbers (R, K) that an operand stands for, in the order of operations of `formats.dequantize`."""
    rows, length = x.data.shape[0], x.length
    values = decode(unpack_codes(x.data, _ELEMENTS[x.data.dtype], length), _ELEMENTS[x.data.dtype])
    plain = layout.unswizzle(x.scale, rows, -(-length // x.block))
    scales = decode_e8m0(plain) if x.scale.dtype == torch.float8_e8m0fnu else plain.float()
    values = values * scales.repeat_interleave(x.block, dim=1)[:, :length]
    return values if x.global_scale is None else values * x.global_scale


def block_scaled_gemm_ref(a: ScaledOperand, b: ScaledOperand, *, out_dtype: torch.dtype) -> Tensor:
    """Reference for `block_scaled_gemm`: the fp32 product of the dequantized operands, rounded once."""
    return (dequantize_operand(a) @ dequantize_operand(b).T).to(out_dtype)


# ---- configs: what the tuner may choose from ----


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig:
    """The tile of one program of the Triton kernel. Rows are whole scale tiles (128), K at least four blocks."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int = 4


MX_CONFIGS = (
    BlockConfig(block_m=128, block_n=256, block_k=128, num_stages=4),
    BlockConfig(block_m=128, block_n=128, block_k=128, num_stages=5),
)
NV_CONFIGS = (
    BlockConfig(block_m=128, block_n=256, block_k=256, num_stages=4),
    BlockConfig(block_m=128, block_n=128, block_k=256, num_stages=5),
)
# Hopper multiplies in bf16: operands are widened into shared memory, so fewer and smaller tiles fit.
HOPPER_CONFIG = BlockConfig(block_m=128, block_n=128, block_k=128, num_stages=2, num_warps=8)


# ---- kernel ----


@triton.jit
def _load_scales(desc, row, k_tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) scales from tile order: within 512 bytes the axes are (32 rows, 4 x 32 rows, 4 columns)."""
    tiles = desc.load([0, row // 128, k_tile * (COLUMNS // 4), 0, 0])
    split = tl.reshape(tiles, [ROWS // 128, COLUMNS // 4, 32, 4, 4])
    return tl.reshape(tl.trans(split, 0, 3, 2, 1, 4), [ROWS, COLUMNS])


@triton.jit
def _block_scaled_kernel(
    a_desc,
    scale_a_desc,
    b_desc,
    scale_b_desc,
    c_desc,
    global_a_ptr,
    global_b_ptr,
    M,
    N,
    K,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    PACK: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that run at the same time share rows of A and columns of B in L2: groups of GROUP row tiles.
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    first = pid // (GROUP * tiles_n) * GROUP
    high = tl.minimum(tiles_m - first, GROUP)
    m = (first + pid % (GROUP * tiles_n) % high) * BLOCK_M
    n = (pid % (GROUP * tiles_n) // high) * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for i in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=NUM_STAGES):
        a = a_desc.load([m, i * (BLOCK_K // PACK)])
        b = b_desc.load([n, i * (BLOCK_K // PACK)])
        scale_a = _load_scales(scale_a_desc, m, i, BLOCK_M, BLOCK_K // VECTOR)
        scale_b = _load_scales(scale_b_desc, n, i, BLOCK_N, BLOCK_K // VECTOR)
        acc = tl.dot_scaled(a, scale_a, FORMAT_A, tl.trans(b), scale_b, FORMAT_B, acc)
    if global_a_ptr is not None:
        acc *= tl.load(global_a_ptr) * tl.load(global_b_ptr)
    c_desc.store([m, n], acc.to(c_desc.dtype))


# ---- candidates ----


def _vendor(a: ScaledOperand, b: ScaledOperand, out_dtype: torch.dtype) -> Tensor:
    recipes, swizzles = _recipes(a)
    scale_a: Any = a.scale if a.global_scale is None else [a.scale, a.global_scale.reshape(1)]
    scale_b: Any = b.scale if b.global_scale is None else [b.scale, b.global_scale.reshape(1)]
    return F.scaled_mm(
        _for_torch(a.data),
        _for_torch(b.data).t(),
        scale_a,
        recipes,
        scale_b,
        recipes,
        swizzle_a=swizzles,
        swizzle_b=swizzles,
        output_dtype=out_dtype,
    )


def _recipes(a: ScaledOperand) -> tuple[Any, Any]:
    """scaled_mm's names for an operand's scales and for how they lie in memory."""
    kind, order = F.ScalingType, F.SwizzleType
    if a.global_scale is None:
        return kind.BlockWise1x32, order.SWIZZLE_32_4_4
    return [kind.BlockWise1x16, kind.TensorWise], [order.SWIZZLE_32_4_4, order.NO_SWIZZLE]


def _for_torch(data: Tensor) -> Tensor:
    return data.view(torch.float4_e2m1fn_x2) if data.dtype == torch.uint8 else data


def _cutlass(a: ScaledOperand, b: ScaledOperand, out_dtype: torch.dtype) -> Tensor:
    if out_dtype != torch.bfloat16 or torch.float8_e5m2 in (a.data.dtype, b.data.dtype):
        raise UnsupportedError(f"the CUTLASS kernels multiply E4M3 or E2M1 and write bf16, not {out_dtype} or E5M2")
    alpha: Tensor | float = 1.0
    if a.global_scale is not None:
        assert b.global_scale is not None
        alpha = a.global_scale * b.global_scale
    epilogue = cutlass_library.Epilogue(alpha=alpha)
    return cutlass_library.gemm_block_scaled(a.data, a.scale, b.data, b.scale, epilogue=epilogue)


def _triton(a: ScaledOperand, b: ScaledOperand, out_dtype: torch.dtype, config: BlockConfig | None = None) -> Tensor:
    if a.global_scale is not None and a.data.is_cuda and torch.cuda.get_device_capability(a.data.device)[0] < 10:
        # Not an error message but the end of the process: Triton 3.6's compiler crashes on it.
        raise UnsupportedError("Triton compiles NVFP4 products for Blackwell only")
    config = config or _default_config(a)
    m, n, k = a.data.shape[0], b.data.shape[0], a.length
    pack = 2 if a.data.dtype == torch.uint8 else 1
    out = torch.empty((m, n), dtype=out_dtype, device=a.data.device)
    grid = (cdiv(m, config.block_m) * cdiv(n, config.block_n),)
    with on_device(a.data):
        launch(_block_scaled_kernel, grid)(
            block_descriptor(a.data, config.block_m, config.block_k // pack),
            _scale_descriptor(a, config.block_m, config.block_k),
            block_descriptor(b.data, config.block_n, config.block_k // pack),
            _scale_descriptor(b, config.block_n, config.block_k),
            block_descriptor(out, config.block_m, config.block_n),
            a.global_scale,
            b.global_scale,
            m,
            n,
            k,
            FORMAT_A=_ELEMENTS[a.data.dtype].name,
            FORMAT_B=_ELEMENTS[b.data.dtype].name,
            PACK=pack,
            VECTOR=a.block,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            NUM_STAGES=config.num_stages,
            GROUP=8,
            num_warps=config.num_warps,
        )
    return out


def _default_config(a: ScaledOperand) -> BlockConfig:
    if a.data.is_cuda and torch.cuda.get_device_capability(a.data.device)[0] < 10:
        return HOPPER_CONFIG
    return (NV_CONFIGS if a.data.dtype == torch.uint8 else MX_CONFIGS)[0]


def _scale_descriptor(x: ScaledOperand, rows: int, length: int) -> Any:
    """Tiles of 512 bytes as (1, row tiles, column tiles, 2, 256): the rank and inner size that TMA takes."""
    high, wide = layout.padded_shape(x.data.shape[0], -(-x.length // x.block))
    raw = x.scale.view(torch.uint8) if x.scale.dtype == torch.float8_e8m0fnu else x.scale
    tiles = raw.view(1, high // layout.TILE_ROWS, wide // layout.TILE_COLUMNS, 2, 256)
    columns = length // x.block // layout.TILE_COLUMNS
    return block_descriptor(tiles, 1, rows // layout.TILE_ROWS, columns, 2, 256)


# ---- public wrapper ----


def block_scaled_gemm(
    a: ScaledOperand,
    b: ScaledOperand,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    candidate: str = "vendor",
    config: BlockConfig | None = None,
) -> Tensor:
    """`a @ b.T` of two MXFP8 or two NVFP4 operands; CPU tensors go to the reference. `config` is Triton's.

    Lengths and N are padded inside to what the kernels take. Raises ConfigError on operands that do not fit each
    other, UnsupportedError where the device or the candidate cannot run it.
    """
    _check(a, b, out_dtype)
    if candidate not in CANDIDATES:
        raise ConfigError(f"candidate is {candidate!r}; block_scaled_gemm has {', '.join(CANDIDATES)}")
    m, n = a.data.shape[0], b.data.shape[0]
    if not (candidate == "triton" and runs_kernel(a.data, _block_scaled_kernel)) and not a.data.is_cuda:
        return block_scaled_gemm_ref(a, b, out_dtype=out_dtype)
    if m == 0 or n == 0 or a.length == 0:
        return torch.zeros((m, n), dtype=out_dtype, device=a.data.device)
    a, b = _filled(a, 1), _filled(b, _N_ALIGNMENT)
    try:
        if candidate == "vendor":
            out = _vendor(a, b, out_dtype)
        elif candidate == "triton":
            out = _triton(a, b, out_dtype, config)
        else:
            out = _cutlass(a, b, out_dtype)
    except LAUNCH_ERRORS as error:
        # torch has no check of the architecture here: cuBLASLt says no in its own words.
        if isinstance(error, DeepwellError) or is_shortage(error):
            raise
        raise UnsupportedError(f"block_scaled_gemm ({candidate}) on {a.data.device}: {error}") from error
    return out if out.shape[1] == n else out[:, :n].contiguous()


def _filled(x: ScaledOperand, rows: int) -> ScaledOperand:
    """Zero values up to whole lines along K and a multiple of `rows`; the scales' tiles are padded further already."""
    pack = 2 if x.data.dtype == torch.uint8 else 1
    right, below = -x.length % _K_ALIGNMENT // pack, -x.data.shape[0] % rows
    if not right and not below and x.data.is_contiguous():
        return x
    data = F.pad(x.data.contiguous().view(torch.uint8), (0, right, 0, below)).view(x.data.dtype)
    return x._replace(data=data)


def _check(a: ScaledOperand, b: ScaledOperand, out_dtype: torch.dtype) -> None:
    if out_dtype not in OUT_DTYPES:
        raise ConfigError(f"out_dtype is {out_dtype}; a product is written as {', '.join(map(str, OUT_DTYPES))}")
    for name, x in (("a", a), ("b", b)):
        if x.data.ndim != 2 or x.data.dtype not in _ELEMENTS:
            got = f"{x.data.dtype} with {x.data.ndim} dimensions"
            raise ConfigError(f"{name}.data is {got}; it must be a matrix of E4M3, E5M2, or packed E2M1 (uint8)")
        is_packed = x.data.dtype == torch.uint8
        wanted = torch.float8_e4m3fn if is_packed else torch.float8_e8m0fnu
        high, wide = layout.padded_shape(x.data.shape[0], -(-x.length // (16 if is_packed else 32)))
        if x.scale.dtype != wanted or x.scale.numel() != high * wide or not x.scale.is_contiguous():
            got = f"{x.scale.numel()} x {x.scale.dtype}"
            raise ConfigError(f"{name}.scale is {got}; in tile order it has {high * wide} x {wanted}")
        if is_packed != (x.global_scale is not None):
            raise ConfigError(f"{name}.global_scale: NVFP4 operands have one, MXFP8 operands have none")
        if x.data.device != a.data.device or x.scale.device != a.data.device:
            raise ConfigError(f"{name} lies on {x.data.device}, a.data on {a.data.device}; move one of them")
    if a.length != b.length or (a.global_scale is None) != (b.global_scale is None):
        raise ConfigError(
            f"a is {a.data.dtype} with K={a.length}, b {b.data.dtype} with K={b.length}; "
            "both must be MXFP8 or both NVFP4, with the same contraction"
        )
