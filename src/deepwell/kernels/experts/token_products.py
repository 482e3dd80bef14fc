"""Gradients of the experts' weights: a product over the rows of each expert, rows gathered on the way in.

    dW[e, n, k] = sum_p L[r(p), n] R[r(p), k]           over the rows p of group e; r as in `row_products`, of one side

A program sums one tile of one expert's weight over all of its rows; where many experts differ in length, the hardware
hands out tiles as SMs come free (`persistent=False`), else programs stay and take tile after tile.
Numerics: bf16 products summed in fp32, always in the same order, rounded once. Rows of other groups are not read, so a
    NaN stays in its expert.
Cost: 2*P*N*K flops; bytes P*(N + K) for each pass over the other side's tiles, out of L2 for the most part, + E*N*K.
"""

# Shapes: P padded rows, E experts, N and K the widths of a weight as stored.

from dataclasses import dataclass

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.device.triton_support import cdiv, launch, num_sms, on_device, runs_kernel, tl, triton
from deepwell.kernels.experts.row_tiles import Rows, groups

# ---- reference: what the kernel must compute, in the plainest torch ----


def token_product_ref(
    left: Tensor, right: Tensor, rows: Rows, gathers: str, dtype: torch.dtype | None = None
) -> Tensor:
    """Reference for `token_product`."""
    wide = torch.float64 if left.dtype == torch.float64 else torch.float32
    sides = [side.to(wide) for side in (left, right)]
    i = ("left", "right").index(gathers)
    assert rows.slot is not None
    sides[i] = rows.gathered(sides[i]).masked_fill((rows.slot < 0)[:, None], 0.0)
    out = [sides[0][part].T @ sides[1][part] for _, part in groups(rows.ends)]
    return torch.stack(out).to(dtype or left.dtype)


# ---- configs: what the tuner may choose from ----


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTile:
    """A tile of the weight, and how many tokens are read at a time."""

    block_n: int
    block_k: int
    block_t: int
    num_stages: int
    num_warps: int
    persistent: bool = False

    @property
    def name(self) -> str:
        tile = f"{self.block_n}x{self.block_k}x{self.block_t}"
        return f"{tile}-s{self.num_stages}-w{self.num_warps}" + ("" if self.persistent else "-each")


WEIGHT_TILES = (
    # Rows are found through their slots, so that Triton keeps half as many buffers as stages, and one more.
    WeightTile(block_n=128, block_k=256, block_t=64, num_stages=5, num_warps=8),
    WeightTile(block_n=128, block_k=256, block_t=64, num_stages=5, num_warps=8, persistent=True),
    WeightTile(block_n=128, block_k=128, block_t=64, num_stages=7, num_warps=8),
    WeightTile(block_n=128, block_k=128, block_t=64, num_stages=5, num_warps=4),
)

_GROUP_N = 12

# ---- kernel ----


@triton.jit
def _token_product_kernel(
    left_ptr, right_ptr, slot_ptr, ends_ptr, out_ptr, N, K, E, stride_left, stride_right, PROGRAMS,
    TOP_K: tl.constexpr, GATHERS_LEFT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), E * tiles_n * tiles_k, PROGRAMS):
        # One expert after the other, and of a wide one blocks of tiles whose sides are alike: those that run at the
        # same time read the same rows, out of L2.
        e = tile // (tiles_n * tiles_k)
        inside = tile % (tiles_n * tiles_k)
        group = inside // (GROUP_N * tiles_k)
        height = tl.minimum(tiles_n - group * GROUP_N, GROUP_N)
        inside = inside % (GROUP_N * tiles_k)
        ns = (group * GROUP_N + inside % height) * BLOCK_N + tl.arange(0, BLOCK_N)
        ks = (inside // height) * BLOCK_K + tl.arange(0, BLOCK_K)
        begin = tl.load(ends_ptr + e - 1, mask=e > 0, other=0)
        end = tl.load(ends_ptr + e)
        acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        for start in range(begin, end, BLOCK_T):
            p = start + tl.arange(0, BLOCK_T)
            slot = tl.load(slot_ptr + p, mask=p < end, other=-1)
            live = slot >= 0
            token = tl.where(live, slot // TOP_K, 0).to(tl.int64)
            row = tl.where(live, p, 0).to(tl.int64)
            lines = (token if GATHERS_LEFT else row) * stride_left
            others = (row if GATHERS_LEFT else token) * stride_right
            left = tl.load(left_ptr + lines[:, None] + ns[None, :], mask=live[:, None] & (ns < N)[None, :], other=0.0)
            right = tl.load(
                right_ptr + others[:, None] + ks[None, :], mask=live[:, None] & (ks < K)[None, :], other=0.0
            )
            acc = tl.dot(tl.trans(left), right, acc)
        out = out_ptr + (e.to(tl.int64) * N + ns)[:, None] * K + ks[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(ns < N)[:, None] & (ks < K)[None, :])


# ---- public wrapper: check, allocate, launch ----


def token_product(left: Tensor, right: Tensor, rows: Rows, gathers: str, *, tile: WeightTile | None = None) -> Tensor:
    """`dw_ENK` of `left` [., N] and `right` [., K]; the side that `gathers` names lies by token, the other by row.

    Raises ConfigError on operands that do not fit.
    """
    if gathers not in ("left", "right") or rows.slot is None:
        raise ConfigError(f'gathers is {gathers!r}; it must be "left" or "right", with rows.slot')
    by_row = right if gathers == "left" else left
    if by_row.shape[0] != rows.slot.shape[0] or left.dtype != right.dtype:
        raise ConfigError(
            f"left is {left.dtype} {tuple(left.shape)} and right {right.dtype} {tuple(right.shape)}; the one by row "
            f"must have {rows.slot.shape[0]} rows, and both one dtype"
        )
    if not runs_kernel(left, _token_product_kernel):
        return token_product_ref(left, right, rows, gathers)
    left, right = (side if side.stride(1) == 1 else side.contiguous() for side in (left, right))
    tile = tile or WEIGHT_TILES[0]
    experts, n, k = rows.ends.shape[0], left.shape[1], right.shape[1]
    out_ENK = torch.empty((experts, n, k), dtype=left.dtype, device=left.device)
    tiles = experts * cdiv(n, tile.block_n) * cdiv(k, tile.block_k)
    programs = min(tiles, num_sms(left)) if tile.persistent else tiles
    with on_device(left):
        launch(_token_product_kernel, (programs,))(
            left, right, rows.slot, rows.ends, out_ENK, n, k, experts, left.stride(0), right.stride(0), programs,
            TOP_K=rows.top_k, GATHERS_LEFT=gathers == "left", BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            BLOCK_T=tile.block_t, GROUP_N=_GROUP_N, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out_ENK
