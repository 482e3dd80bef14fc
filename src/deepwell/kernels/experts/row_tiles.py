"""Tiles over the rows of the experts: which there are, where their rows come from, and how their operands are loaded.

Rows lie as `group_rows.group_layout` puts them. How many tiles there are is known on the device alone, at most
ceil(P / block_m) + E: a small kernel writes a table of them, so that nothing waits for the host. Tiles are walked
`group_m` rows of tiles at a time: these share an expert's weight in L2.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

# Shapes: P padded rows, E experts, N and K the widths of a product.

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.device.ragged_rows import ragged_descriptor
from deepwell.kernels.device.triton_support import block_descriptor, cdiv, launch, next_power_of_2, num_sms, tl, triton

_LINE_BYTES = 16
_TABLE_BLOCK = 64


class Rows(NamedTuple):
    """Where rows come from: `ends` [E] of the groups, and with `slot` [P] row p is that of token slot[p] // top_k."""

    ends: Tensor
    slot: Tensor | None = None
    top_k: int = 1

    def count(self, a: Tensor) -> int:
        return a.shape[0] if self.slot is None else self.slot.shape[0]

    def gathered(self, a: Tensor) -> Tensor:
        """The rows of `a` as they lie by expert; those without a choice are some row of it."""
        if self.slot is None:
            return a
        if not a.shape[0]:
            return a.new_zeros((self.slot.shape[0], a.shape[1]))
        return a[self.slot.clamp(min=0) // self.top_k]


def groups(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert with its rows; waits for the device."""
    return enumerate(slice(*bounds) for bounds in itertools.pairwise((0, *ends_E.tolist())))


def expert_of_rows(ends_E: Tensor, rows: int) -> Tensor:
    """The expert of each padded row, counted on the device."""
    places = torch.arange(rows, device=ends_E.device, dtype=torch.int32)
    return torch.searchsorted(ends_E, places, right=True).clamp(max=ends_E.shape[0] - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTile:
    """One tile and how it is pipelined; of a gated product `block_n` columns of the gate and as many of up.

    `stores` is how results leave: "masked", by their addresses; "tma", out of shared memory while the next tile is
    summed; "halves", so by halves, which take turns there; "late", the right half kept in registers until the next
    tile's first product runs.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    group_m: int = 8
    persistent: bool = True
    per_sm: int = 1  # programs that fit one SM, where they stay
    stores: str = "masked"

    @property
    def name(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        stores = "" if self.stores == "masked" else f"-{self.stores}"
        return f"{tile}-s{self.num_stages}-w{self.num_warps}" + ("" if self.persistent else "-each") + stores


# ---- in Triton ----


@triton.jit
def _table_kernel(ends_ptr, table_ptr, TILES, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr):
    # [how many tiles, then (expert, first row, end of the expert's rows) of each]; every program computes the table of
    # groups.
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends_ptr + e, mask=e < E, other=0)
    begin = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = tl.where(e < E, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    last = tl.cumsum(tiles, axis=0)
    first = last - tiles
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    holds = (t[:, None] >= first[None, :]) & (t[:, None] < last[None, :])
    expert = tl.sum(tl.where(holds, e[None, :], 0), axis=1)
    row = t * BLOCK_M + tl.sum(tl.where(holds, (begin - first * BLOCK_M)[None, :], 0), axis=1)
    tl.store(table_ptr + 1 + 3 * t, expert, mask=t < TILES)
    tl.store(table_ptr + 2 + 3 * t, row, mask=t < TILES)
    tl.store(table_ptr + 3 + 3 * t, tl.sum(tl.where(holds, end[None, :], 0), axis=1), mask=t < TILES)
    if tl.program_id(0) == 0:
        tl.store(table_ptr, tl.sum(tiles, axis=0))


@triton.jit
def tile_of(tile, table_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(expert, first row, end of the expert's rows, column of tiles)."""
    per_group = GROUP_M * tiles_n
    group = tile // per_group
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = tile % per_group
    t = group * GROUP_M + inside % height
    place = table_ptr + 1 + 3 * t
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), inside // height


@triton.jit
def sources_of(slot_ptr, p, end, TOP_K: tl.constexpr):
    """(the row of A that each row reads, whether it reads one)."""
    live = p < end
    source = p
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + p, mask=live, other=-1)
        live = slot >= 0
        source = slot // TOP_K
    return tl.where(live, source, 0).to(tl.int64), live


@triton.jit
def a_tile(a_rows, live, k, K, BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr):
    ks = k + tl.arange(0, BLOCK_K)
    if WHOLE_K:
        return tl.load(a_rows + ks[None, :], mask=live[:, None], other=0.0)
    else:
        return tl.load(a_rows + ks[None, :], mask=live[:, None] & (ks < K)[None, :], other=0.0)


@triton.jit
def w_tile(w_desc, e, n, k, N, K, W_KN: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of an expert's weight, stored [N, K] or [K, N]."""
    if W_KN:
        return w_desc.load([e * K + k, n])
    else:
        return w_desc.load([e * N + n, k]).T


@triton.jit
def halves(x):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


# ---- what a launch needs ----


def is_kn(w_ENK: Tensor) -> bool:
    """Whether the weight is stored [E, K, N]."""
    return w_ENK.stride(2) != 1


def tile_constants(w_ENK: Tensor, rows: Rows, tile: RowTile) -> dict[str, Any]:
    return {
        "TOP_K": rows.top_k,
        "WHOLE_K": w_ENK.shape[2] % tile.block_k == 0,
        "W_KN": is_kn(w_ENK),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "PERSISTENT": tile.persistent,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _tiles(rows: Rows, count: int, tile: RowTile) -> int:
    """As many row tiles as any distribution has at most: each group wastes less than one."""
    return cdiv(count, tile.block_m) + rows.ends.shape[0]


def programs(a: Tensor, rows: Rows, columns: int, tile: RowTile) -> int:
    tiles = _tiles(rows, rows.count(a), tile) * cdiv(columns, tile.block_n)
    return min(tiles, num_sms(a) * tile.per_sm) if tile.persistent else tiles


def table(a: Tensor, rows: Rows, tile: RowTile) -> Tensor:
    tiles, experts = _tiles(rows, rows.count(a), tile), rows.ends.shape[0]
    table = torch.empty(1 + 3 * tiles, dtype=torch.int32, device=a.device)
    launch(_table_kernel, (cdiv(tiles, _TABLE_BLOCK),))(
        rows.ends, table, tiles, experts,
        BLOCK_M=tile.block_m, BLOCK_E=max(16, next_power_of_2(experts)), BLOCK_T=_TABLE_BLOCK,
    )  # fmt: skip
    return table


def descriptor(w_ENK: Tensor, block_n: int, block_k: int) -> Any:
    """Of all experts' weights one below the other, as they are stored."""
    if is_kn(w_ENK):
        return block_descriptor(w_ENK.transpose(1, 2).reshape(-1, w_ENK.shape[1]), block_k, block_n)
    return block_descriptor(w_ENK.reshape(-1, w_ENK.shape[2]), block_n, block_k)


def stored_rows(x: Tensor, tile: RowTile, columns: int) -> Any:
    """The descriptor through which a tile's rows are stored, so many columns at a time; None by their addresses."""
    if tile.stores == "masked":
        return None
    if x.stride(0) * x.element_size() % _LINE_BYTES or x.data_ptr() % _LINE_BYTES:
        raise UnsupportedError(
            f"TMA stores rows of whole 16-byte lines, and results have {x.shape[1]} of {x.stride(0)} columns"
        )
    return ragged_descriptor(x, tile.block_m, columns)


def check_operands(a: Tensor, w_ENK: Tensor, rows: Rows, bias_EN: Tensor | None) -> None:
    if a.dim() != 2 or w_ENK.dim() != 3 or a.shape[1] != w_ENK.shape[2] or rows.ends.shape != w_ENK.shape[:1]:
        raise ConfigError(
            f"a is {tuple(a.shape)}, w_ENK {tuple(w_ENK.shape)} and rows.ends {tuple(rows.ends.shape)}; "
            "K and E must agree"
        )
    if bias_EN is not None and bias_EN.shape != w_ENK.shape[:2]:
        raise ConfigError(f"bias_EN is {tuple(bias_EN.shape)}; it must be {tuple(w_ENK.shape[:2])}")
    if a.dtype != w_ENK.dtype or not a.is_cuda:
        return
    stored = w_ENK.transpose(1, 2) if is_kn(w_ENK) else w_ENK
    lines = (a.stride(0), stored.stride(1))
    if a.stride(1) != 1 or not stored.is_contiguous() or any(n * a.element_size() % _LINE_BYTES for n in lines):
        raise UnsupportedError(
            f"a {tuple(a.shape)} and w_ENK {tuple(w_ENK.shape)} must have rows of whole 16-byte lines; "
            "make them contiguous"
        )
