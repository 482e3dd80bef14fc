"""Quantize the weights of all experts in one launch: along their rows, or transposed for the other direction's GEMM.

    rows          values [E, R, C] with one power-of-two scale per row of an expert, as `quantize_rows` of [E * R, C]
    scales        those of the rows, without FP8 values: what a weight that is transposed first needs
    transposed    values [E, C, R] with one scale per expert, its rows' largest: q[e, c, r] = RNE(w[e, r, c] / scale[e])

A weight stored [E, N, K] is read along its rows by the forward, transposed by dgrad; [E, K, N] the other way.
Numerics: bit for bit `deepwell.formats` ("fp8_e4m3_row_pow2", and "fp8_e4m3_tensor_pow2" of each expert). An expert
    that holds inf or NaN gets a NaN scale and NaN FP8 values, transposed; the others stay as they are.
Cost: memory bound, 2 + 1 bytes an element each (bf16), 2 of scales alone. Qwen3-30B-A3B's gate and up
    (128 x 1536 x 2048) at 4.25 TB/s: 284 us; Mixtral's (8 x 28672 x 4096) 663 us.
"""

# Shapes: E experts, R rows and C columns of an expert's weight as stored.

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.formats.elements import encode
from deepwell.kernels.checks import check_vector
from deepwell.kernels.device.fp8 import ELEMENTS, word_of_codes
from deepwell.kernels.device.triton_support import cdiv, is_interpreted, launch, on_device, runs_kernel, tl, triton
from deepwell.kernels.quantize.fp8 import quantize_rows, row_scales

_FP8 = torch.float8_e4m3fn
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# ---- reference: what the kernel must compute, in the plainest torch ----


def quantize_experts_transposed_ref(w_ERC: Tensor, scale_E: Tensor) -> Tensor:
    """Reference for `quantize_experts_transposed`, given the experts' scales."""
    transposed = w_ERC.float().transpose(1, 2) * scale_E.reciprocal()[:, None, None]
    return encode(transposed.contiguous(), ELEMENTS[_FP8]).view(_FP8)


# A side of the tiles that are transposed.
_TILE = 64

# ---- kernel ----


@triton.jit
def _turn_experts_kernel(
    w_ptr,
    scale_ptr,
    out_ptr,
    R4,
    C,
    stride_we,
    stride_wr,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    PACKING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # Four rows of a column are one word of the transposed copy: out_ptr and R4 count words.
    e = tl.program_id(2).to(tl.int64)
    i = tl.program_id(1) * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (i[:, None] < R4) & (c[None, :] < C)
    enc = tl.div_rn(1.0, tl.load(scale_ptr + e))
    tile = w_ptr + e * stride_we + (i.to(tl.int64) * 4)[:, None] * stride_wr + c[None, :]
    a = tl.load(tile, mask=mask, other=0.0).to(tl.float32) * enc
    b = tl.load(tile + stride_wr, mask=mask, other=0.0).to(tl.float32) * enc
    d = tl.load(tile + 2 * stride_wr, mask=mask, other=0.0).to(tl.float32) * enc
    f = tl.load(tile + 3 * stride_wr, mask=mask, other=0.0).to(tl.float32) * enc
    word = word_of_codes(a, b, d, f, FP8, FP8_MAX, PACKING)
    out = out_ptr + e * C * R4 + c.to(tl.int64)[:, None] * R4 + i[None, :]
    tl.store(out, tl.trans(word), mask=tl.trans(mask))


# ---- public wrappers: check, allocate, launch ----


def quantize_experts(w_ERC: Tensor) -> tuple[Tensor, Tensor]:
    """`(q_ERC, scale_ER)`: each row of each expert with its own scale. Raises ConfigError on a wrong argument."""
    _check(w_ERC)
    experts, rows, columns = w_ERC.shape
    q, scale = quantize_rows(w_ERC.reshape(experts * rows, columns))
    return q.view(experts, rows, columns), scale.view(experts, rows)


def expert_scales(w_ERC: Tensor) -> Tensor:
    """`scale_ER` of `quantize_experts`, alone. Raises ConfigError on a wrong argument."""
    _check(w_ERC)
    experts, rows, columns = w_ERC.shape
    return row_scales(w_ERC.reshape(experts * rows, columns)).view(experts, rows)


def quantize_experts_transposed(w_ERC: Tensor, scale_E: Tensor) -> Tensor:
    """`q_ECR`: the transposed FP8 values, with the power-of-two scale given for each expert; what exceeds it saturates.

    Raises ConfigError on a wrong argument; R must be a multiple of 4.
    """
    _check(w_ERC)
    experts, rows, columns = w_ERC.shape
    check_vector("scale_E", scale_E, experts, w_ERC)
    if scale_E.dtype != torch.float32 or rows % 4:
        raise ConfigError(f"scale_E must be float32 and the {rows} rows a multiple of 4; scale_E is {scale_E.dtype}")
    if not runs_kernel(w_ERC, _turn_experts_kernel):
        return quantize_experts_transposed_ref(w_ERC, scale_E)
    packing = "words" if is_interpreted(_turn_experts_kernel) else "asm"
    q_ECR = torch.empty((experts, columns, rows), dtype=_FP8, device=w_ERC.device)
    if q_ECR.numel():
        grid = (cdiv(columns, _TILE), cdiv(rows, _TILE), experts)
        with on_device(w_ERC):
            launch(_turn_experts_kernel, grid)(
                w_ERC,
                scale_E,
                q_ECR.view(torch.int32),
                rows // 4,
                columns,
                w_ERC.stride(0),
                w_ERC.stride(1),
                FP8=tl.float8e4nv,
                FP8_MAX=448.0,
                PACKING=packing,
                BLOCK_R=_TILE,
                BLOCK_C=_TILE,
                num_warps=4,
            )
    return q_ECR


def _check(w_ERC: Tensor) -> None:
    if w_ERC.dim() != 3 or w_ERC.dtype not in _FLOATS:
        raise ConfigError(f"w_ERC is {w_ERC.dtype} with shape {tuple(w_ERC.shape)}; pass a float tensor [E, R, C]")
    if w_ERC.stride(2) != 1 and w_ERC.shape[2] > 1:
        raise ConfigError(f"w_ERC has stride {w_ERC.stride(2)} along its rows; call .contiguous() first")
