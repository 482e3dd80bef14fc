"""The largest k numbers of each row, in falling order, and where they are: the choices of a router.

    value[t, j], index[t, j]       the j-th largest of x[t, :]

Numerics: values bit for bit. NaN counts as the largest, as in torch; of equal numbers the first one comes first, where
    torch.topk leaves the order open.
Cost: a row is read once and held in registers; k passes over it there. torch's kernel reads it several times: 0.2 ms
    for 32,768 rows of 128 (one H200, 2026-11-18, a profile of Qwen3-30B-A3B's block).
"""

# Shapes: T rows, N numbers of a row.

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.checks import check_matrix
from deepwell.kernels.device.triton_support import (
    cdiv,
    constant,
    launch,
    next_power_of_2,
    on_device,
    runs_kernel,
    tl,
    triton,
)

# What rows the kernel takes, and choices of one.
MAX_COLUMNS, MAX_CHOICES = 1024, 16
_TILE, _WARPS = 2048, 4
_NAN, _NONE = constant(0x7FFFFFFF), constant(-(1 << 63))

# ---- reference: what the kernel must compute, in the plainest torch ----


def top_k_ref(x_TN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    index = x_TN.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()
    return x_TN.gather(1, index), index


# ---- kernel ----


@triton.jit
def _top_k_kernel(
    x_ptr, value_ptr, index_ptr, T, N, stride_x, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK)
    inside = (t < T)[:, None] & (n < N)[None, :]
    row = x_ptr + t * stride_x
    x = tl.load(row[:, None] + n[None, :], mask=inside, other=0.0).to(tl.float32)
    # Whole numbers in the order of the floats; both zeros are one.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(x != x, _NAN, bits ^ ((bits >> 31) & _NAN))  # noqa: PLR0124 (a NaN)
    # With the column below it, the first one largest: one maximum finds both.
    both = (key.to(tl.int64) << 32) | (BLOCK - 1 - n)[None, :].to(tl.int64)
    both = tl.where(inside, both, _NONE)
    for j in tl.static_range(K):
        best = tl.max(both, axis=1)
        index = BLOCK - 1 - (best & 0xFFFFFFFF)
        tl.store(index_ptr + t * K + j, index, mask=t < T)
        tl.store(value_ptr + t * K + j, tl.load(row + index, mask=t < T), mask=t < T)
        both = tl.where(both == best[:, None], _NONE, both)


# ---- public wrapper: check, allocate, launch ----


def takes(columns: int, k: int) -> bool:
    """Whether the kernel finds so many choices of a row."""
    return 0 < k <= min(columns, MAX_CHOICES) and columns <= MAX_COLUMNS


def top_k(x_TN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`(value_TK, index_TK)`, int64 indices. Raises ConfigError on a wrong argument."""
    check_matrix("x_TN", x_TN)
    t, n = x_TN.shape
    if not takes(n, k):
        raise ConfigError(f"k is {k} of {n} columns; it must be 1 to {MAX_CHOICES}, of at most {MAX_COLUMNS} columns")
    if not runs_kernel(x_TN, _top_k_kernel):
        return top_k_ref(x_TN, k)
    value = x_TN.new_empty((t, k))
    index = torch.empty((t, k), dtype=torch.int64, device=x_TN.device)
    block = max(16, next_power_of_2(n))
    rows = max(1, _TILE // block)
    if t:
        with on_device(x_TN):
            launch(_top_k_kernel, (cdiv(t, rows),))(
                x_TN, value, index, t, n, x_TN.stride(0), K=k, ROWS=rows, BLOCK=block, num_warps=_WARPS
            )
    return value, index
