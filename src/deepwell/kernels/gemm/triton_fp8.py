"""A persistent Triton kernel for FP8 products, with scales, bias and activation in its epilogue.

    C[m, n] = act((A[m, k] @ B[n, k]^T) * scale_a[m] * scale_b[n] + bias[n])       act: none, gelu (erf), silu, relu

Each program stays on its SM and takes tile after tile; operands come and results go through TMA descriptors.
Numerics: products of FP8 values are exact. `promote=False` adds them in the tensor cores' accumulator (Hopper: about
    14 bits), `promote=True` adds every step of K (128) into fp32 registers. Scales, bias and activation in fp32, one
    rounding at the end. NaN stays: in a code, in a scale, under every activation.
Cost: 2*M*N*K flops; bytes M*K + N*K + 2*M*N.
    One prototype of the 128x256x128 tile reached 1271-1341 TFLOP/s on one H200 where cuBLASLt gave 1326-1371, and 920
    to 1090 with promotion.
"""

# Shapes: M rows of the result, N columns, K contraction; both operands lie along K.

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.checks import check_vector
from deepwell.kernels.device.triton_support import (
    block_descriptor,
    cdiv,
    launch,
    num_sms,
    on_device,
    runs_kernel,
    tl,
    triton,
)
from deepwell.kernels.gemm.fp8 import ALIGNMENT, check_operands, fp8_gemm_ref

ACTIVATIONS = ("gelu", "silu", "relu")
# TMA and fp8 wgmma: Hopper and later.
_MIN_CAPABILITY = (9, 0)

# ---- reference: what the kernel must compute, in the plainest torch ----


def activate_ref(x: Tensor, activation: str | None) -> Tensor:
    """The activation of that name; `None` leaves x alone."""
    if activation is None:
        return x
    if activation == "gelu":
        return F.gelu(x)
    return F.silu(x) if activation == "silu" else F.relu(x)


def fp8_gemm_epilogue_ref(
    a_MK: Tensor,
    scale_a: Tensor,
    b_NK: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Reference for `fp8_gemm_triton`: everything in fp32, rounded once."""
    c_MN = fp8_gemm_ref(a_MK, scale_a, b_NK, scale_b, out_dtype=torch.float32)
    if bias is not None:
        c_MN = c_MN + bias.float()
    return activate_ref(c_MN, activation).to(out_dtype)


# ---- configs: what the tuner may choose from ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8GemmConfig:
    """One tile and how it is pipelined. `promote` adds up in fp32 registers after every step of K."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    promote: bool = False
    # Rows of tiles that are walked together, so that their operands meet in L2.
    group_m: int = 8

    @property
    def writes_halves(self) -> bool:
        """Whether the epilogue takes the tile's columns in two halves: 256 columns and an activation spill."""
        return self.block_n > 128

    @property
    def name(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{tile}-s{self.num_stages}-w{self.num_warps}" + ("-promote" if self.promote else "")


CONFIGS = (
    Fp8GemmConfig(block_m=128, block_n=256, block_k=128, num_stages=3, num_warps=8),
    Fp8GemmConfig(block_m=128, block_n=128, block_k=128, num_stages=4, num_warps=8),
    Fp8GemmConfig(block_m=64, block_n=128, block_k=128, num_stages=4, num_warps=4),
    Fp8GemmConfig(block_m=128, block_n=128, block_k=128, num_stages=4, num_warps=8, promote=True),
)


def default_config(m: int, n: int) -> Fp8GemmConfig:
    """The tile for a shape nobody tuned: the large one where it fills the machine, small ones for few rows."""
    if m <= 64:
        return CONFIGS[2]
    return CONFIGS[0] if m * n >= 128 * 256 * 132 else CONFIGS[1]


# ---- kernel ----


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu":
        # A plain maximum would turn NaN into 0.
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _finish(c, scale_ptr, bias_ptr, n, N, ROWS_B: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Column scales, bias and activation of the columns from n on."""
    ns = n + tl.arange(0, c.shape[1])
    if ROWS_B:
        c = c * tl.load(scale_ptr + ns, mask=ns < N, other=0.0)[None, :]
    else:
        c = c * tl.load(scale_ptr)
    if HAS_BIAS:
        c = c + tl.load(bias_ptr + ns, mask=ns < N, other=0.0).to(tl.float32)[None, :]
    return _activate(c, ACTIVATION)


@triton.jit
def _tile_place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile: GROUP_M rows of tiles at a time, down before across."""
    per_group = GROUP_M * tiles_n
    group = tile // per_group
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = tile % per_group
    return group * GROUP_M + inside % height, inside // height


@triton.jit
def _fp8_gemm_kernel(
    a_desc,
    b_desc,
    c_desc,
    scale_a_ptr,
    scale_b_ptr,
    bias_ptr,
    M,
    N,
    K,
    PROGRAMS,
    ROWS_A: tl.constexpr,
    ROWS_B: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PROMOTE: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # PROGRAMS programs share all tiles. Rows past M and columns past N are zeros on their way in and not written out.
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        row, column = _tile_place(tile, tiles_m, tiles_n, GROUP_M)
        m = row * BLOCK_M
        n = column * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(tiles_k):
            a = a_desc.load([m, k * BLOCK_K])
            b = b_desc.load([n, k * BLOCK_K])
            # Not named, Triton's limit is 2^30 on Hopper: never promoted.
            if PROMOTE:
                acc = tl.dot(a, b.T, acc, max_num_imprecise_acc=BLOCK_K)
            else:
                acc = tl.dot(a, b.T, acc)
        ms = m + tl.arange(0, BLOCK_M)
        if ROWS_A:
            acc = acc * tl.load(scale_a_ptr + ms, mask=ms < M, other=0.0)[:, None]
        else:
            acc = acc * tl.load(scale_a_ptr)
        if HALVES:
            # One half of the columns after the other: the whole of a large tile and its epilogue do not fit registers.
            pair = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(pair)
            left = _finish(left, scale_b_ptr, bias_ptr, n, N, ROWS_B, HAS_BIAS, ACTIVATION)
            c_desc.store([m, n], left.to(c_desc.dtype))
            n += BLOCK_N // 2
            right = _finish(right, scale_b_ptr, bias_ptr, n, N, ROWS_B, HAS_BIAS, ACTIVATION)
            c_desc.store([m, n], right.to(c_desc.dtype))
        else:
            acc = _finish(acc, scale_b_ptr, bias_ptr, n, N, ROWS_B, HAS_BIAS, ACTIVATION)
            c_desc.store([m, n], acc.to(c_desc.dtype))


# ---- public wrapper: check, allocate, launch ----


def fp8_gemm_triton(
    a_MK: Tensor,
    scale_a: Tensor,
    b_NK: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: Fp8GemmConfig | None = None,
) -> Tensor:
    """`act(a @ b.T * scales + bias)` of FP8 values; fp32 scales, one per tensor or per row of either operand.

    Raises ConfigError on operands that do not fit, UnsupportedError where K or N is no multiple of 16, an operand's
    rows are not whole 16-byte lines, or the GPU is older than Hopper.
    """
    check_operands(a_MK, scale_a, b_NK, scale_b)
    check_epilogue(bias, activation, b_NK.shape[0], like=a_MK)
    if not runs_kernel(a_MK, _fp8_gemm_kernel):
        return fp8_gemm_epilogue_ref(
            a_MK, scale_a, b_NK, scale_b, bias=bias, activation=activation, out_dtype=out_dtype
        )
    m, k = a_MK.shape
    n = b_NK.shape[0]
    _check_shape(a_MK, b_NK)
    c_MN = torch.empty((m, n), dtype=out_dtype, device=a_MK.device)
    if m == 0:
        return c_MN
    config = config or default_config(m, n)
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    programs = min(tiles, num_sms(a_MK))
    halves = config.writes_halves
    with on_device(a_MK):
        launch(_fp8_gemm_kernel, (programs,))(
            block_descriptor(a_MK, config.block_m, config.block_k),
            block_descriptor(b_NK, config.block_n, config.block_k),
            block_descriptor(c_MN, config.block_m, config.block_n // 2 if halves else config.block_n),
            scale_a,
            scale_b,
            bias,
            m,
            n,
            k,
            programs,
            ROWS_A=scale_a.numel() > 1,
            ROWS_B=scale_b.numel() > 1,
            HAS_BIAS=bias is not None,
            ACTIVATION=activation or "",
            PROMOTE=config.promote,
            HALVES=halves,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return c_MN


def check_epilogue(bias: Tensor | None, activation: str | None, n: int, *, like: Tensor) -> None:
    """Raise ConfigError unless bias is a vector of n numbers beside `like` and the activation is a known one."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ConfigError(f"activation is {activation!r}; it takes {', '.join(ACTIVATIONS)} or None")
    if bias is not None:
        check_vector("bias", bias, n, like)


def _check_shape(a_MK: Tensor, b_NK: Tensor) -> None:
    k, n = a_MK.shape[1], b_NK.shape[0]
    if not k or not n or k % ALIGNMENT or n % ALIGNMENT:
        raise UnsupportedError(f"fp8_gemm_triton: K={k} and N={n} must be multiples of {ALIGNMENT}; pad the operands")
    if a_MK.dtype != b_NK.dtype:
        raise UnsupportedError(f"fp8_gemm_triton: a_MK is {a_MK.dtype} and b_NK {b_NK.dtype}; give both one dtype")
    for name, operand in (("a_MK", a_MK), ("b_NK", b_NK)):
        if operand.stride(1) != 1 or operand.stride(0) % ALIGNMENT or operand.data_ptr() % ALIGNMENT:
            raise UnsupportedError(
                f"fp8_gemm_triton: the rows of {name} are no whole 16-byte lines; make it contiguous"
            )
    if a_MK.is_cuda:
        capability = torch.cuda.get_device_capability(a_MK.device)
        if capability < _MIN_CAPABILITY:
            raise UnsupportedError(f"fp8_gemm_triton needs compute capability 9.0, the GPU has {capability}")
