"""Grouped FP8 products: one GEMM for each expert over the rows that were routed to it, in one launch.

    fwd, dgrad   C[p, n] = sum_k A[p, k] B[e(p), n, k] * scale_a[p] * scale_b[e, n]
    wgrad        C[e, n, k] = sum_p A[n, p] B[k, p] * scale_a[e] * scale_b[e]        over the rows p of group e

Rows lie as `group_rows.group_layout` puts them: groups of whole lines of 16, none without rows, the last one up to the
end. Both operands lie along the contraction; values are E4M3, scales fp32.
Numerics: products of FP8 values are exact; with `fast` the tensor cores add in their own shorter accumulator.
Cost: 2*P*N*K flops each; bytes P*K + E*N*K + 2*P*N (wgrad: P*N + P*K + 2*E*N*K).
"""

# Shapes: P padded rows, E experts, K and N the widths of an expert's linear.

import sys
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.experts.group_rows import GROUP_ALIGNMENT
from deepwell.kernels.experts.row_tiles import groups
from deepwell.kernels.gemm.fp8 import ALIGNMENT
from deepwell.kernels.quantize.fp8 import quantize_rows_ref
from deepwell.kernels.quantize.wgrad_operands import wgrad_operands
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.verify import Case

_FP8 = torch.float8_e4m3fn
# Against the product of the values in fp32, after rounding to bf16: the floor of sums in Hopper's short accumulator
# (docs/numerics.md); a wrong scale or a row of another group falls far below.
_FLOOR_DB = 40.0

# ---- reference: what the kernels must compute, in the plainest torch ----


def grouped_gemm_ref(a_PK: Tensor, scale_P: Tensor, b_ENK: Tensor, scale_EN: Tensor, ends_E: Tensor) -> Tensor:
    """Reference for `grouped_gemm`: a loop over the groups, fp32 products of the dequantized operands, rounded once."""
    out = []
    for e, part in groups(ends_E):
        a, b = a_PK[part].float() * scale_P[part, None], b_ENK[e].float() * scale_EN[e][:, None]
        out.append(a @ b.T)
    return torch.cat(out).to(torch.bfloat16)


def grouped_wgrad_ref(a_NP: Tensor, scale_a_E: Tensor, b_KP: Tensor, scale_b_E: Tensor, ends_E: Tensor) -> Tensor:
    out = []
    for e, part in groups(ends_E):
        a, b = a_NP[:, part].float() * scale_a_E[e], b_KP[:, part].float() * scale_b_E[e]
        out.append(a @ b.T)
    return torch.stack(out).to(torch.bfloat16)


# ---- public wrappers ----


def grouped_gemm(
    a_PK: Tensor, scale_P: Tensor, b_ENK: Tensor, scale_EN: Tensor, ends_E: Tensor, *, fast: bool = True
) -> Tensor:
    """`C_PN` in bf16. Raises ConfigError on shapes that do not fit, UnsupportedError on sizes no kernel takes."""
    p, k = a_PK.shape
    experts, n, other_k = b_ENK.shape
    if k != other_k or ends_E.shape != (experts,):
        raise ConfigError(
            f"a_PK is {tuple(a_PK.shape)}, b_ENK {tuple(b_ENK.shape)} and ends_E {tuple(ends_E.shape)}; "
            "K and E must agree"
        )
    _check_operand("a_PK", a_PK, scale_P, (p,))
    _check_operand("b_ENK", b_ENK, scale_EN, (experts, n))
    if not a_PK.is_cuda:
        return grouped_gemm_ref(a_PK, scale_P, b_ENK, scale_EN, ends_E)
    _check_sizes(n, k, p)
    return torch._scaled_grouped_mm(
        a_PK,
        b_ENK.transpose(-2, -1),
        scale_P,
        scale_EN.contiguous(),
        offs=ends_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def grouped_wgrad(
    a_NP: Tensor, scale_a_E: Tensor, b_KP: Tensor, scale_b_E: Tensor, ends_E: Tensor, *, fast: bool = False
) -> Tensor:
    """`C_ENK` in bf16, of operands transposed by `wgrad_operands`. Raises as `grouped_gemm` does."""
    check_wgrad(a_NP, scale_a_E, b_KP, scale_b_E, ends_E)
    if not a_NP.is_cuda:
        return grouped_wgrad_ref(a_NP, scale_a_E, b_KP, scale_b_E, ends_E)
    n, k = a_NP.shape[0], b_KP.shape[0]
    return torch._scaled_grouped_mm(
        a_NP,
        b_KP.transpose(-2, -1),
        scale_a_E.repeat_interleave(n),
        scale_b_E.repeat_interleave(k),
        offs=ends_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def check_wgrad(a_NP: Tensor, scale_a_E: Tensor, b_KP: Tensor, scale_b_E: Tensor, ends_E: Tensor) -> None:
    """Raise ConfigError on operands that do not fit, UnsupportedError on sizes that no kernel takes."""
    if a_NP.shape[1] != b_KP.shape[1]:
        raise ConfigError(f"a_NP has {a_NP.shape[1]} rows of tokens and b_KP {b_KP.shape[1]}; they must be equal")
    _check_operand("a_NP", a_NP, scale_a_E, ends_E.shape)
    _check_operand("b_KP", b_KP, scale_b_E, ends_E.shape)
    if a_NP.is_cuda:
        _check_sizes(a_NP.shape[0], b_KP.shape[0], a_NP.shape[1])


def _check_operand(name: str, codes: Tensor, scale: Tensor, shape: tuple[int, ...]) -> None:
    if codes.dtype != _FP8:
        raise ConfigError(f"{name} has dtype {codes.dtype}; grouped products take {_FP8}")
    if scale.dtype != torch.float32 or tuple(scale.shape) != tuple(shape):
        raise ConfigError(f"the scale of {name} is {scale.dtype} {tuple(scale.shape)}; it must be fp32 {tuple(shape)}")


def _check_sizes(n: int, k: int, p: int) -> None:
    for name, size, unit in (("N", n, ALIGNMENT), ("K", k, ALIGNMENT), ("P", p, GROUP_ALIGNMENT)):
        if size % unit or not size:
            raise UnsupportedError(f"grouped FP8 products need {name} to be a multiple of {unit}; it is {size}")


# ---- the candidate, and the cases that it must pass on a device ----


@lru_cache(maxsize=1)
def built_in(op: str) -> tuple[Candidate, ...]:
    """torch's own, both products."""
    return (
        Candidate(
            name="torch_grouped",
            op=op,
            precision="fp8",
            fn=lambda wgrad, *operands: grouped_wgrad(*operands) if wgrad else grouped_gemm(*operands),
            origin="vendor",
            trusted=True,
            fingerprint=sources_hash(sys.modules[__name__]),
        ),
    )


def cases(candidate: Candidate, problem: Problem) -> Iterator[Case]:
    """Ragged groups with scales that differ by octaves, at realistic magnitudes; a NaN must come out."""
    ends = torch.tensor([48, 64, 208, 256], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    n, k, p = 96, 160, 256

    def rows(*shape: int) -> tuple[Tensor, Tensor]:
        loud = torch.exp2(torch.randint(-3, 4, (shape[0], 1), generator=generator).float())
        return quantize_rows_ref(torch.randn(shape, generator=generator) * loud)

    (q_x, s_x), (q_w, s_w), (q_dy, s_dy) = rows(p, k), rows(4 * n, k), rows(p, n)
    q_w, s_w = q_w.view(4, n, k), s_w.view(4, n)
    spoiled = torch.where(torch.arange(p) == 70, float("nan"), s_x)
    products = (
        ("product", grouped_gemm_ref, (q_x, s_x, q_w, s_w, ends)),
        ("wgrad", grouped_wgrad_ref, (*wgrad_operands(q_dy, s_dy, q_x, s_x, ends), ends)),
        ("product", grouped_gemm_ref, (q_x, spoiled, q_w, s_w, ends)),
    )
    for name, reference, given in products:
        yield Case(
            label=name,
            operands=(name == "wgrad", *(tensor.to(problem.device) for tensor in given)),
            names=("wgrad", "a", "scale_a", "b", "scale_b", "ends"),
            wanted=reference(*given).to(problem.device),
            floor_db=_FLOOR_DB,
            only_spoiled=given[1] is spoiled,
        )
