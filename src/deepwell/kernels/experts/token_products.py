"""Gradients of the experts' weights in FP8: a product over the rows of each expert, of operands transposed before.

    dW[e, n, k] = scale_a[e] scale_b[e] sum_c A[n, c] B[k, c]              over the columns c of expert e

Operands are those of `wgrad_operands`: an expert's columns are padded with zeros to whole blocks of 128, so that no
block holds columns of two experts and nothing is masked. Programs stay on their SM and take tile after tile
(`persistent`), the next tile's operands on their way while one is stored, or each takes one. Tiles leave through TMA,
which clips what lies past N and K.
Numerics: FP8 products of 128 columns summed in the tensor cores' accumulator, those sums in fp32, always in the same
    order, rounded to bf16 once. torch's own kernel without fast accumulation does the same.
Cost: 2*C*N*K flops; bytes C*(N + K) for each pass over the other side's tiles, out of L2 for the most part, + 2*E*N*K.
"""

# Shapes: C columns (tokens by expert, padded), E experts, N and K the widths of a weight as stored.

from dataclasses import dataclass

import torch
from torch import Tensor

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

# ---- configs: what the tuner may choose from ----


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTile:
    """A tile of the weight; every step reads `COLUMN_ALIGNMENT` columns."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    persistent: bool = True
    per_sm: int = 1  # programs that fit one SM, where they stay

    @property
    def name(self) -> str:
        tile = f"{self.block_n}x{self.block_k}"
        return f"{tile}-s{self.num_stages}-w{self.num_warps}" + ("" if self.persistent else "-each")


WEIGHT_TILES = (
    WeightTile(block_n=256, block_k=128, num_stages=3, num_warps=8),
    WeightTile(block_n=256, block_k=128, num_stages=4, num_warps=8, persistent=False),
    WeightTile(block_n=64, block_k=128, num_stages=3, num_warps=4, per_sm=2),
    WeightTile(block_n=64, block_k=128, num_stages=2, num_warps=4, persistent=False),  # three an SM
)

_GROUP_N = 12

# ---- kernel ----


@triton.jit
def _store_tile(out_desc, tile, e, n, k):
    out_desc.store([e, n, k], tl.reshape(tile.to(out_desc.dtype), (1, tile.shape[0], tile.shape[1])))


@triton.jit
def _token_product_kernel(
    a_desc, b_desc, scale_a_ptr, scale_b_ptr, ends_ptr, out_desc, N, K, E, PROGRAMS,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, GROUP_N: tl.constexpr, HALVES: tl.constexpr,
    PERSISTENT: tl.constexpr,
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
        tl.assume(end > begin)  # no group is empty; without it the compiler leaves the loops as they are, one by one
        for c in range(begin, end, BLOCK_C):
            b = b_desc.load([k, c]).T
            acc = tl.dot(a_desc.load([n, c]), b, acc, max_num_imprecise_acc=BLOCK_C)
            if HALVES == 2:  # one after the other: the sums of one step then need the registers of one half
                low = tl.dot(a_desc.load([n + HALF, c]), b, low, max_num_imprecise_acc=BLOCK_C)
        scale = tl.load(scale_a_ptr + e) * tl.load(scale_b_ptr + e)
        _store_tile(out_desc, acc * scale, e, n, k)
        if HALVES == 2:
            _store_tile(out_desc, low * scale, e, n + HALF, k)


# ---- public wrapper: check, allocate, launch ----


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
    experts, n, k = ends_E.shape[0], a_NC.shape[0], b_KC.shape[0]
    out_ENK = torch.empty((experts, n, k), dtype=torch.bfloat16, device=a_NC.device)
    tiles = experts * cdiv(n, tile.block_n) * cdiv(k, tile.block_k)
    programs = min(tiles, num_sms(a_NC) * tile.per_sm) if tile.persistent else tiles
    halves = 2 if tile.block_n > 128 else 1
    with on_device(a_NC):
        launch(_token_product_kernel, (programs,))(
            block_descriptor(a_NC, tile.block_n // halves, COLUMN_ALIGNMENT),
            block_descriptor(b_KC, tile.block_k, COLUMN_ALIGNMENT),
            scale_a_E, scale_b_E, ends_E, block_descriptor(out_ENK, 1, tile.block_n // halves, tile.block_k),
            n, k, experts, programs,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_C=COLUMN_ALIGNMENT, GROUP_N=_GROUP_N, HALVES=halves,
            PERSISTENT=tile.persistent, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out_ENK
