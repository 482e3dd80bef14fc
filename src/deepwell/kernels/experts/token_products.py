"""Gradients of the experts' weights: a product over the rows of each expert.

    bf16   dW[e, n, k] = sum_p A[p, n] B[p, k]                             over the rows p of expert e
    FP8    dW[e, n, k] = scale_a[e] scale_b[e] sum_c A[n, c] B[k, c]       over the columns c of expert e

Rows in bf16 are read as they lie, by TMA that gives zeros past an expert's last row. FP8 products want both operands
along the contraction: they are those of `wgrad_operands`, an expert's columns padded with zeros to whole blocks of 128,
so that no block holds columns of two experts and nothing is masked. Programs stay on their SM and take tile after tile
(`persistent`), the next tile's operands on their way while one is stored, or each takes one. Tiles leave through TMA,
which clips what lies past N and K.
Numerics: bf16 in fp32 sums; FP8 products of 128 columns summed in the tensor cores' accumulator, those sums in fp32;
    always in the same order, rounded to bf16 once. torch's own kernels (FP8: without fast accumulation) do the same.
Cost: 2*C*N*K flops; of each operand C*(N + K) values for each pass over the other side's tiles, out of L2 for the most
    part, + 2*E*N*K bytes.
"""

# Shapes: P rows or C columns (tokens by expert, padded), E experts, N and K the widths of a weight as stored.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.device.ragged_rows import load_rows, ragged_descriptor
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
from deepwell.kernels.experts.group_rows import COLUMN_ALIGNMENT
from deepwell.kernels.experts.grouped_gemm import check_wgrad, grouped_wgrad_ref
from deepwell.kernels.experts.row_tiles import groups

# ---- configs: what the tuner may choose from ----


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTile:
    """A tile of the weight; every step reads `block_c` rows or columns of tokens."""

    block_n: int
    block_k: int
    block_c: int = COLUMN_ALIGNMENT
    num_stages: int
    num_warps: int
    persistent: bool = True
    per_sm: int = 1  # programs that fit one SM, where they stay

    @property
    def halves(self) -> int:
        """Of a tall tile the products are made one after the other: a step then needs the registers of one."""
        return 2 if self.block_n > 128 else 1

    @property
    def name(self) -> str:
        tile = f"{self.block_n}x{self.block_k}x{self.block_c}"
        return f"{tile}-s{self.num_stages}-w{self.num_warps}" + ("" if self.persistent else "-each")


WEIGHT_TILES = (
    WeightTile(block_n=256, block_k=128, num_stages=3, num_warps=8),
    WeightTile(block_n=256, block_k=128, num_stages=4, num_warps=8, persistent=False),
    WeightTile(block_n=64, block_k=128, num_stages=3, num_warps=4, per_sm=2),
    WeightTile(block_n=64, block_k=128, num_stages=2, num_warps=4, persistent=False),  # three an SM
)
ROW_TILES = (
    WeightTile(block_n=128, block_k=256, block_c=64, num_stages=3, num_warps=8),
    WeightTile(block_n=256, block_k=128, block_c=64, num_stages=4, num_warps=8, persistent=False),
    WeightTile(block_n=128, block_k=128, block_c=64, num_stages=2, num_warps=4, per_sm=2),
)

_GROUP_N = 12

# ---- reference: what the kernel must compute, in the plainest torch ----


def wgrad_of_rows_ref(a_PN: Tensor, b_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Reference for `wgrad_of_rows`: a loop over the experts, sums in fp32 or wider, rounded once."""
    wide = torch.promote_types(a_PN.dtype, torch.float32)
    return torch.stack([a_PN[part].to(wide).T @ b_PK[part].to(wide) for _, part in groups(ends_E)]).to(a_PN.dtype)


# ---- kernel ----


@triton.jit
def _store_tile(out_desc, tile, e, n, k):
    out_desc.store([e, n, k], tl.reshape(tile.to(out_desc.dtype), (1, tile.shape[0], tile.shape[1])))


@triton.jit
def _side(desc, n, c, end, BY_ROW: tl.constexpr):
    """A block [n, c] of one side."""
    if BY_ROW:
        block = load_rows(desc, c, end, n).T
    else:
        block = desc.load([n, c])
    return block


@triton.jit
def _token_product_kernel(
    a_desc, b_desc, scale_a_ptr, scale_b_ptr, ends_ptr, out_desc, N, K, E, PROGRAMS,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, GROUP_N: tl.constexpr, HALVES: tl.constexpr,
    BY_ROW: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), E * tiles_n * tiles_k, PROGRAMS, flatten=PERSISTENT):
        # One expert after the other, and of a wide one blocks of tiles whose sides are alike: those that run at the
        # same time read the same columns, out of L2.
        e = tile // (tiles_n * tiles_k)
        inside = tile % (tiles_n * tiles_k)
        group = inside // (GROUP_N * tiles_k)
        height = tl.minimum(tiles_n - group * GROUP_N, GROUP_N)
        inside = inside % (GROUP_N * tiles_k)
        n = (group * GROUP_N + inside % height) * BLOCK_N
        k = (inside // height) * BLOCK_K
        begin = tl.load(ends_ptr + e - 1, mask=e > 0, other=0)
        end = tl.load(ends_ptr + e)
        HALF: tl.constexpr = BLOCK_N // HALVES
        acc = tl.zeros((HALF, BLOCK_K), dtype=tl.float32)
        low = tl.zeros((HALF, BLOCK_K), dtype=tl.float32)
        last = tl.maximum(end, begin + 1)  # of an empty group one step of zeros
        tl.assume(last > begin)  # without it the compiler leaves the loops as they are, one by one
        for c in range(begin, last, BLOCK_C):
            b = _side(b_desc, k, c, end, BY_ROW).T
            acc = tl.dot(_side(a_desc, n, c, end, BY_ROW), b, acc, max_num_imprecise_acc=BLOCK_C)
            if HALVES == 2:
                low = tl.dot(_side(a_desc, n + HALF, c, end, BY_ROW), b, low, max_num_imprecise_acc=BLOCK_C)
        if scale_a_ptr is not None:
            scale = tl.load(scale_a_ptr + e) * tl.load(scale_b_ptr + e)
            acc, low = acc * scale, low * scale
        _store_tile(out_desc, acc, e, n, k)
        if HALVES == 2:
            _store_tile(out_desc, low, e, n + HALF, k)


# ---- public wrappers: check, allocate, launch ----


def token_product(
    a_NC: Tensor,
    scale_a_E: Tensor,
    b_KC: Tensor,
    scale_b_E: Tensor,
    ends_E: Tensor,
    *,
    tile: WeightTile | None = None,
) -> Tensor:
    """`dw_ENK` in bf16. `ends_E` are those of `group_columns`: multiples of 128, no group empty.

    Raises as `grouped_wgrad` does.
    """
    check_wgrad(a_NC, scale_a_E, b_KC, scale_b_E, ends_E)
    if not runs_kernel(a_NC, _token_product_kernel):
        return grouped_wgrad_ref(a_NC, scale_a_E, b_KC, scale_b_E, ends_E)
    tile = tile or WEIGHT_TILES[0]
    a = block_descriptor(a_NC, tile.block_n // tile.halves, tile.block_c)
    b = block_descriptor(b_KC, tile.block_k, tile.block_c)
    return _launched(a, b, (a_NC.shape[0], b_KC.shape[0]), ends_E, (scale_a_E, scale_b_E), tile)


def wgrad_of_rows(a_PN: Tensor, b_PK: Tensor, ends_E: Tensor, *, tile: WeightTile | None = None) -> Tensor:
    """`dw_ENK` of rows that lie by expert; a group may be empty. Raises ConfigError on sides that do not fit.

    On a GPU: bf16, widths that are multiples of 8.
    """
    if a_PN.shape[0] != b_PK.shape[0] or a_PN.dtype != b_PK.dtype:
        raise ConfigError(
            f"a_PN is {a_PN.dtype} {tuple(a_PN.shape)} and b_PK {b_PK.dtype} {tuple(b_PK.shape)}; "
            "dtypes and P must agree"
        )
    if not runs_kernel(a_PN, _token_product_kernel):
        return wgrad_of_rows_ref(a_PN, b_PK, ends_E)
    if not a_PN.shape[0]:  # lies nowhere, and TMA takes an address
        return a_PN.new_zeros((ends_E.shape[0], a_PN.shape[1], b_PK.shape[1]))
    tile = tile or ROW_TILES[0]
    a = ragged_descriptor(a_PN, tile.block_c, tile.block_n // tile.halves)
    b = ragged_descriptor(b_PK, tile.block_c, tile.block_k)
    return _launched(a, b, (a_PN.shape[1], b_PK.shape[1]), ends_E, (None, None), tile)


def _launched(
    a: Any, b: Any, shape: tuple[int, int], ends_E: Tensor, scales: tuple[Tensor | None, ...], tile: WeightTile
) -> Tensor:
    (n, k), experts = shape, ends_E.shape[0]
    out_ENK = torch.empty((experts, n, k), dtype=torch.bfloat16, device=ends_E.device)
    tiles = experts * cdiv(n, tile.block_n) * cdiv(k, tile.block_k)
    programs = min(tiles, num_sms(ends_E) * tile.per_sm) if tile.persistent else tiles
    with on_device(ends_E):
        launch(_token_product_kernel, (programs,))(
            a, b, *scales, ends_E, block_descriptor(out_ENK, 1, tile.block_n // tile.halves, tile.block_k),
            n, k, experts, programs,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_C=tile.block_c, GROUP_N=_GROUP_N, HALVES=tile.halves,
            BY_ROW=scales[0] is None, PERSISTENT=tile.persistent, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out_ENK
