"""FP8 products with a scale per 128 of the contraction: `C[m, n] = sum_b (A_b[m] . B_b[n]) * scale_a[b, m] * scale_b`.

    square       scale_b of each 128 x 128 square of B: forward and dgrad, where B is a weight
    not square   scale_b of each 128 numbers of a row of B: wgrad, where both lie along the tokens

Both operands lie along the contraction, E4M3, whole blocks of it. Scales lie as `quantize_blocks` writes them: 1x128
with the blocks outermost, [B, M]; squares with the blocks of the contraction innermost, [N / 128, B in lines of 4].
Numerics: products of FP8 values are exact; cuBLASLt promotes its sums to fp32 every 128, there is no fast accumulation.
Cost: 2*M*N*K flops; bytes M*K + N*K + 2*M*N. cuBLASLt has these products on Hopper alone (CUDA 12.9 and later).
"""

# Shapes: M rows of the result, N columns, K contraction, B = K / 128 blocks.

import sys
from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.gemm.fp8 import ALIGNMENT, padded_codes
from deepwell.kernels.quantize.fp8_blocks import BLOCK, SCALE_LINE, quantize_1x128_both_ref, quantize_128x128_ref
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.verify import Case

_FP8 = torch.float8_e4m3fn
# Against the product of the same values in fp32, both rounded to bf16. Hopper keeps 14 bits inside a block of 128: sums
# that are promoted after each have 69 to 78 dB, a wrong scale or one of another block leaves less than 20.
_FLOOR_DB = 50.0

# ---- reference: what the kernel must compute, in the plainest torch ----


def fp8_gemm_blocks_ref(a_MK: Tensor, scale_a: Tensor, b_NK: Tensor, scale_b: Tensor, *, square: bool) -> Tensor:
    """Reference for `fp8_gemm_blocks`: fp32 products of the dequantized operands, rounded once."""
    a = a_MK.float() * _by_element(scale_a.T)
    if square:
        scale_b = scale_b[:, : b_NK.shape[1] // BLOCK].repeat_interleave(BLOCK, 0)[: b_NK.shape[0]]
    else:
        scale_b = scale_b.T
    return (a @ (b_NK.float() * _by_element(scale_b)).T).to(torch.bfloat16)


def _by_element(scale_RB: Tensor) -> Tensor:
    return scale_RB.repeat_interleave(BLOCK, 1)


# ---- public wrapper ----


def fp8_gemm_blocks(a_MK: Tensor, scale_a: Tensor, b_NK: Tensor, scale_b: Tensor, *, square: bool) -> Tensor:
    """`a @ b.T` of E4M3 values in bf16; any M and N: they are padded to whole lines of 16 inside.

    Raises ConfigError on shapes or dtypes that do not fit, and torch's error where the GPU has no such product.
    """
    _check(a_MK, scale_a, b_NK, scale_b, square)
    m, k = a_MK.shape
    n = b_NK.shape[0]
    if not a_MK.is_cuda:
        return fp8_gemm_blocks_ref(a_MK, scale_a, b_NK, scale_b, square=square)
    if 0 in (m, n, k):
        return torch.zeros((m, n), dtype=torch.bfloat16, device=a_MK.device)
    more_m, more_n = -m % ALIGNMENT, -n % ALIGNMENT
    if more_m:
        a_MK, scale_a = padded_codes(a_MK, more_m), F.pad(scale_a, (0, more_m), value=1.0)
    if more_n:
        b_NK = padded_codes(b_NK, more_n)
        scale_b = scale_b if square else F.pad(scale_b, (0, more_n), value=1.0)
    kinds = F.ScalingType
    # torch takes a's scales as [M, B] and those of b as [N, B] or [B, N / 128]: the first two are views of [B, .].
    c_MN = F.scaled_mm(
        a_MK,
        b_NK.T,
        scale_a.contiguous().T,
        kinds.BlockWise1x128,
        scale_b.contiguous().T,
        kinds.BlockWise128x128 if square else kinds.BlockWise1x128,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return c_MN[:m, :n].contiguous() if more_m or more_n else c_MN


def _check(a_MK: Tensor, scale_a: Tensor, b_NK: Tensor, scale_b: Tensor, square: bool) -> None:
    for name, codes in (("a_MK", a_MK), ("b_NK", b_NK)):
        if codes.dim() != 2 or codes.dtype != _FP8 or codes.shape[1] % BLOCK:
            got = f"{codes.dtype} {tuple(codes.shape)}"
            raise ConfigError(f"{name} is {got}; it must be an E4M3 matrix of whole blocks of {BLOCK} columns")
    (m, k), (n, other_k) = a_MK.shape, b_NK.shape
    if k != other_k:
        raise ConfigError(f"a_MK has K={k} and b_NK has K={other_k}; they must be equal")
    blocks = k // BLOCK
    lines = -(-blocks // SCALE_LINE) * SCALE_LINE
    of_b = (-(-n // BLOCK), lines) if square else (blocks, n)
    for name, scale, shape in (("scale_a", scale_a, (blocks, m)), ("scale_b", scale_b, of_b)):
        if scale.dtype != torch.float32 or tuple(scale.shape) != shape:
            raise ConfigError(f"{name} is {scale.dtype} {tuple(scale.shape)}; it must be fp32 {shape}")


# ---- the candidate, and the cases that it must pass on a device ----


@lru_cache(maxsize=1)
def built_in(op: str) -> tuple[Candidate, ...]:
    """cuBLASLt's own."""
    return (
        Candidate(
            name="cublaslt",
            op=op,
            precision="fp8",
            fn=lambda *operands: fp8_gemm_blocks(*operands[:4], square=operands[4]),
            origin="vendor",
            trusted=True,
            fingerprint=sources_hash(sys.modules[__name__]),
        ),
    )


def cases(candidate: Candidate, problem: Problem) -> Iterator[Case]:
    """Both kinds at sizes that end inside a tile, with scales that differ by octaves; a NaN must come out."""
    generator = torch.Generator().manual_seed(0)

    def numbers(rows: int, columns: int) -> Tensor:
        loud = torch.exp2(torch.randint(-3, 4, (rows, -(-columns // BLOCK)), generator=generator).float())
        return torch.randn(rows, columns, generator=generator) * loud.repeat_interleave(BLOCK, 1)[:, :columns]

    t, n, k = 296, 208, 400
    x, w, dy = numbers(t, k), numbers(n, k), numbers(t, n)
    of_x, of_w, of_dy = quantize_1x128_both_ref(x), quantize_128x128_ref(w), quantize_1x128_both_ref(dy)
    products = (
        ("forward", True, (of_x.q, of_x.scale, of_w.q, of_w.scale)),
        ("dgrad", True, (of_dy.q, of_dy.scale, of_w.q_t, of_w.scale_t)),
        ("wgrad", False, (of_dy.q_t, of_dy.scale_t, of_x.q_t, of_x.scale_t)),
    )
    for name, square, given in products:
        operands = [tensor for tensor in given if tensor is not None]
        spoiled = [operands[0], operands[1].index_fill(1, torch.tensor([70]), float("nan")), *operands[2:]]
        for numbered in (operands, spoiled):
            yield Case(
                label=name,
                operands=(*(tensor.to(problem.device) for tensor in numbered), square),
                names=("a", "scale_a", "b", "scale_b"),
                wanted=fp8_gemm_blocks_ref(*numbered, square=square).to(problem.device),
                floor_db=_FLOOR_DB,
                only_spoiled=numbered is spoiled,
            )
