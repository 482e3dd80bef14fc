"""Rows of tokens laid out by expert, each expert's group padded to whole lines of 16 rows, and back again.

    layout    every expert gets max(16, its rows rounded up to 16) rows, the last one all that is left of P; padded row
              p holds slot[p] = t * top_k + j (choice j of token t) or -1; place[slot[p]] = p, -1 for dropped choices
    gather    FP8 row and scale of token slot[p] // top_k; where slot[p] = -1: zeros with the smallest scale
    copy      x[slot[p] // top_k] as it is; where slot[p] = -1: zeros
    combine   y[t] = sum_j w[t, j] x[place[t * top_k + j]]                  without w the transpose of gather

Grouped FP8 products want groups of whole 16-byte lines along the contraction of a wgrad, and no group without rows.
P is known on the host (no waiting for counts): ceil(S / 16) * 16 + 16 E rows for S choices, under 1% more from 1600
choices an expert on. Since the last group reaches to the end, every row belongs to a group and nothing stays unwritten.

Numerics: gather moves FP8 values as they are. combine adds in fp32 in the order j = 0, 1 ... and rounds once.
Cost: memory bound. Bytes per element: gather 1 + 1 (the quantization before it, once per token, 2 + 1); copy by token
    2 + 2 / top_k (by row each token is read top_k times); combine 2 + 2 / top_k. Qwen3-30B-A3B, 32768 tokens, width
    2048, top 8, at 4.25 TB/s: gather 254 + 47 us against 380 us quantized on the way; combine 286 us.
"""

# Shapes: T tokens, S = T * top_k choices, P padded rows, E experts, K or D width of a row.

from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.quantize import ZERO_ROW_MULTIPLIER
from deepwell.kernels.checks import check_matrix, check_shape, check_vector
from deepwell.kernels.device.fp8 import ELEMENTS
from deepwell.kernels.device.triton_support import (
    TileConfig,
    cdiv,
    launch,
    next_power_of_2,
    on_device,
    runs_kernel,
    tl,
    triton,
)

# Rows that a group is padded to: 16 bytes of FP8 along the contraction of a wgrad.
GROUP_ALIGNMENT = 16
# Columns that a group's transposed rows are padded to: a step of a wgrad's kernel.
COLUMN_ALIGNMENT = 128
MAX_EXPERTS = 1024
# The scale of a row of zeros (`ZERO_ROW_MULTIPLIER`): no other row's is smaller, so it never is a group's largest.
_ZERO_SCALE = 1.0 / ZERO_ROW_MULTIPLIER


class RowGroups(NamedTuple):
    """Where rows go: `ends` [E] of the padded groups, `slot` [P] of each padded row, `place` [S] of each choice."""

    ends: Tensor
    slot: Tensor
    place: Tensor


class GroupColumns(NamedTuple):
    """Columns of transposed rows, groups padded to whole blocks of `COLUMN_ALIGNMENT`: `ends` [E], and of every 16
    columns which 16 rows they are; -1 of columns that are zeros."""

    ends: Tensor
    blocks: Tensor


def padded_columns(rows: int, experts: int) -> int:
    """Columns that hold any groups of so many rows, each of whole lines of 16."""
    return cdiv(rows + (COLUMN_ALIGNMENT - GROUP_ALIGNMENT) * experts, COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT


def padded_rows(choices: int, experts: int) -> int:
    """P: rows that hold any distribution of so many choices over so many experts."""
    return (choices + GROUP_ALIGNMENT - 1) // GROUP_ALIGNMENT * GROUP_ALIGNMENT + GROUP_ALIGNMENT * experts


# ---- reference: what the kernels must compute, in the plainest torch ----


def group_layout_ref(offs_E: Tensor, order_S: Tensor | None, choices: int) -> RowGroups:
    experts = offs_E.shape[0]
    rows = padded_rows(choices, experts)
    slot = torch.full((rows,), -1, dtype=torch.int32)
    place = torch.full((choices,), -1, dtype=torch.int32)
    order = torch.arange(choices) if order_S is None else order_S.cpu()
    ends, begin, start = [], 0, 0
    for end in offs_E.tolist():
        slots = order[begin:end]
        slot[start : start + end - begin] = slots.int()
        place[slots] = torch.arange(start, start + end - begin, dtype=torch.int32)
        start += max(GROUP_ALIGNMENT, -(-(end - begin) // GROUP_ALIGNMENT) * GROUP_ALIGNMENT)
        begin = end
        ends.append(start)
    ends[-1] = rows
    made = (torch.tensor(ends, dtype=torch.int32), slot, place)
    return RowGroups(*(part.to(offs_E.device) for part in made))


def choice_layout_ref(index_S: Tensor, experts: int) -> RowGroups:
    ids, order = index_S.where((index_S >= 0) & (index_S < experts), experts).sort(stable=True)
    offs = torch.searchsorted(ids, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    return group_layout_ref(offs, order, index_S.shape[0])


def group_columns_ref(ends_E: Tensor, rows: int) -> GroupColumns:
    blocks = torch.full((padded_columns(rows, ends_E.shape[0]) // GROUP_ALIGNMENT,), -1, dtype=torch.int32)
    ends, start, begin = [], 0, 0
    for end in ends_E.tolist():
        here = torch.arange(begin, end, GROUP_ALIGNMENT) // GROUP_ALIGNMENT
        blocks[start // GROUP_ALIGNMENT : start // GROUP_ALIGNMENT + here.shape[0]] = here.int()
        start += cdiv(end - begin, COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
        begin = end
        ends.append(start)
    return GroupColumns(*(part.to(ends_E.device) for part in (torch.tensor(ends, dtype=torch.int32), blocks)))


def gather_rows_ref(q_TK: Tensor, scale_T: Tensor, slot_P: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    is_live, token = slot_P >= 0, slot_P.clamp(min=0).long() // top_k
    if not q_TK.shape[0]:
        zeros = torch.zeros((slot_P.shape[0], q_TK.shape[1]), dtype=torch.uint8, device=q_TK.device)
        return zeros.view(q_TK.dtype), torch.full_like(slot_P, _ZERO_SCALE, dtype=torch.float32)
    codes = torch.where(is_live[:, None], q_TK.view(torch.uint8)[token], 0)
    return codes.to(torch.uint8).view(q_TK.dtype), torch.where(is_live, scale_T[token], _ZERO_SCALE)


def copy_rows_ref(x_TK: Tensor, slot_P: Tensor, top_k: int) -> Tensor:
    if not x_TK.shape[0]:
        return x_TK.new_zeros((slot_P.shape[0], x_TK.shape[1]))
    return x_TK[slot_P.clamp(min=0).long() // top_k].masked_fill((slot_P < 0)[:, None], 0)


def combine_rows_ref(x_PD: Tensor, place_S: Tensor, top_k: int, weight_S: Tensor | None = None) -> Tensor:
    rows = x_PD.float()[place_S.clamp(min=0).long()]
    if weight_S is not None:
        rows = rows * weight_S.float()[:, None]
    rows = torch.where(place_S[:, None] >= 0, rows, 0.0)
    total = rows.new_zeros((place_S.shape[0] // top_k, x_PD.shape[1]))
    for part in rows.view(-1, top_k, x_PD.shape[1]).unbind(1):
        total = total + part
    return total.to(x_PD.dtype)


# ---- configs: what the tuner may choose from ----

GATHER_CONFIGS = (TileConfig(rows=4, columns=2048, num_warps=4), TileConfig(rows=1, columns=4096, num_warps=4))
COMBINE_CONFIGS = (TileConfig(rows=1, columns=2048, num_warps=4), TileConfig(rows=4, columns=512, num_warps=4))
_LAYOUT_BLOCK = 128
# Of a row that is copied, numbers at a time; rows that a program looks at for some of nobody.
_ROW_BLOCK, _DEAD_ROWS = 2048, 32
# Choices by experts that a program compares at a time, and blocks of choices that are summed at a time.
_CHOICE_TILE, _MAX_CHOICES, _SUM_BLOCKS, _SUM_EXPERTS = 16384, 512, 256, 16

# ---- kernels ----


@triton.jit
def _layout_kernel(
    offs_ptr,
    order_ptr,
    ends_ptr,
    slot_ptr,
    place_ptr,
    P,
    E,
    ALIGNMENT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # Every program computes the whole table of groups (a few hundred numbers) and fills its own rows.
    e = tl.arange(0, BLOCK_E)
    end = tl.load(offs_ptr + e, mask=e < E, other=0)
    begin = tl.load(offs_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    count = end - begin
    filled = tl.where(e < E, tl.maximum(ALIGNMENT, (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT), 0)
    padded_end = tl.cumsum(filled, axis=0)
    padded_begin = padded_end - filled
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    holds = (p[:, None] >= padded_begin[None, :]) & (p[:, None] < (padded_begin + count)[None, :]) & (e[None, :] < E)
    live = tl.sum(holds.to(tl.int32), axis=1) > 0
    s = p + tl.sum(tl.where(holds, (begin - padded_begin)[None, :], 0), axis=1)
    slot = s
    if order_ptr is not None:
        slot = tl.load(order_ptr + s, mask=live, other=0).to(tl.int32)
    tl.store(slot_ptr + p, tl.where(live, slot, -1), mask=p < P)
    tl.store(place_ptr + slot, p, mask=live & (p < P))
    if tl.program_id(0) == 0:
        tl.store(ends_ptr + e, tl.where(e == E - 1, P, padded_end), mask=e < E)


@triton.jit
def _is_choice(index_ptr, S, E, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """(choices of this program, whether each is of an expert, whether choice i is of expert e)."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index_ptr + s, mask=s < S, other=-1)
    live = (expert >= 0) & (expert < E)
    expert = tl.where(live, expert, -1).to(tl.int32)
    return s, live, expert[:, None] == tl.arange(0, BLOCK_E)[None, :]


@triton.jit
def _count_choices_kernel(index_ptr, counts_ptr, S, E, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    _, _, chosen = _is_choice(index_ptr, S, E, BLOCK, BLOCK_E)
    counts = tl.sum(chosen.to(tl.int32), axis=0)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit
def _sum_choices_kernel(
    counts_ptr, totals_ptr, BLOCKS, STRIDE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr
):
    # Of some experts: how many of their choices lie before each block, in the place of its count; and how many in all.
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    before = tl.zeros([BLOCK_E], dtype=tl.int32)
    for start in range(0, BLOCKS, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        at = counts_ptr + b[:, None] * STRIDE + e[None, :]
        counts = tl.load(at, mask=(b < BLOCKS)[:, None], other=0)
        tl.store(at, before[None, :] + tl.cumsum(counts, axis=0) - counts, mask=(b < BLOCKS)[:, None])
        before += tl.sum(counts, axis=0)
    tl.store(totals_ptr + e, before)


@triton.jit
def _place_choices_kernel(
    index_ptr, counts_ptr, totals_ptr, ends_ptr, slot_ptr, place_ptr, S, P, E,
    ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    s, live, chosen = _is_choice(index_ptr, S, E, BLOCK, BLOCK_E)
    e = tl.arange(0, BLOCK_E)
    total = tl.load(totals_ptr + e)
    padded = tl.where(e < E, tl.maximum(ALIGNMENT, (total + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT), 0)
    end = tl.cumsum(padded, axis=0)
    first = end - padded + tl.load(counts_ptr + tl.program_id(0) * BLOCK_E + e)
    rank = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    p = tl.sum(tl.where(chosen, first[None, :] + rank, 0), axis=1)
    tl.store(place_ptr + s, tl.where(live, p, -1), mask=s < S)
    tl.store(slot_ptr + p, s, mask=live)
    if tl.program_id(0) == 0:
        tl.store(ends_ptr + e, tl.where(e == E - 1, P, end), mask=e < E)


@triton.jit
def _columns_kernel(
    ends_ptr, column_ends_ptr, blocks_ptr, BLOCKS, E,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Every program computes the table of groups, as above; ROWS rows are one block, COLUMNS what a group is padded to.
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends_ptr + e, mask=e < E, other=0)
    begin = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    padded = tl.where(e < E, (end - begin + COLUMNS - 1) // COLUMNS * COLUMNS, 0)
    column_end = tl.cumsum(padded, axis=0)
    first = (column_end - padded) // ROWS
    count = tl.where(e < E, (end - begin) // ROWS, 0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    holds = (i[:, None] >= first[None, :]) & (i[:, None] < (first + count)[None, :])
    live = tl.sum(holds.to(tl.int32), axis=1) > 0
    block = i + tl.sum(tl.where(holds, (begin // ROWS - first)[None, :], 0), axis=1)
    tl.store(blocks_ptr + i, tl.where(live, block, -1), mask=i < BLOCKS)
    if tl.program_id(0) == 0:
        tl.store(column_ends_ptr + e, column_end, mask=e < E)


@triton.jit
def _gather_kernel(
    x_ptr,
    scale_t_ptr,
    slot_ptr,
    q_ptr,
    scale_ptr,
    P,
    K,
    stride_xt,
    top_k,
    ZERO_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_ptr + p, mask=p < P, other=-1)
    live = slot >= 0
    t = (tl.where(live, slot, 0) // top_k).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    x_row = x_ptr + t[:, None] * stride_xt
    q_row = q_ptr + p[:, None] * K
    # Bytes: a code is a code, whatever it means.
    for start in range(0, K, BLOCK):
        k = start + columns
        codes = tl.load(x_row + k, mask=live[:, None] & (k < K), other=0)
        tl.store(q_row + k, codes, mask=(p < P)[:, None] & (k < K))
    scale = tl.load(scale_t_ptr + t, mask=live, other=ZERO_SCALE)
    tl.store(scale_ptr + p, scale, mask=p < P)


@triton.jit
def _spread_kernel(
    x_ptr,
    place_ptr,
    slot_ptr,
    out_ptr,
    T,
    P,
    K,
    stride_xt,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEAD: tl.constexpr,
):
    # One program a token, which is read once and written to all of its places; those behind them look for rows of
    # nobody, DEAD rows each, and make them zeros.
    k = tl.arange(0, BLOCK)
    t = tl.program_id(0).to(tl.int64)
    if t < T:
        for start in range(0, K, BLOCK):
            inside = start + k < K
            row = tl.load(x_ptr + t * stride_xt + start + k, mask=inside)
            for j in tl.static_range(TOP_K):
                p = tl.load(place_ptr + t * TOP_K + j).to(tl.int64)
                tl.store(out_ptr + p * K + start + k, row, mask=inside & (p >= 0))
    else:
        p = (t - T) * DEAD + tl.arange(0, DEAD)
        is_dead = tl.load(slot_ptr + p, mask=p < P, other=0) < 0
        if tl.max(is_dead.to(tl.int32), axis=0) > 0:
            for start in range(0, K, BLOCK):
                at = out_ptr + p[:, None] * K + start + k[None, :]
                zeros = tl.zeros((DEAD, BLOCK), dtype=out_ptr.dtype.element_ty)
                tl.store(at, zeros, mask=is_dead[:, None] & (start + k < K)[None, :])


@triton.jit
def _combine_kernel(
    x_ptr,
    place_ptr,
    weight_ptr,
    y_ptr,
    T,
    D,
    stride_xp,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (t < T)[:, None] & (d < D)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        p = tl.load(place_ptr + t * TOP_K + j, mask=t < T, other=-1)
        row = x_ptr + tl.where(p >= 0, p, 0).to(tl.int64)[:, None] * stride_xp
        part = tl.load(row + d, mask=inside & (p >= 0)[:, None], other=0.0).to(tl.float32)
        if weight_ptr is not None:
            w = tl.load(weight_ptr + t * TOP_K + j, mask=p >= 0, other=0.0).to(tl.float32)
            part *= w[:, None]
        total += part
    tl.store(y_ptr + t[:, None] * D + d, total.to(y_ptr.dtype.element_ty), mask=inside)


# ---- public wrappers: check, allocate, launch ----


def group_layout(offs_E: Tensor, order_S: Tensor | None, choices: int) -> RowGroups:
    """Where the rows of each expert go. `offs_E` (int32) are the ends of the groups in the sorted order `order_S`.

    Sorted choice s is choice `order_S[s]` of all (t * top_k + j), or s itself where None. Choices past the last end go
    nowhere. Raises ConfigError on a wrong argument, UnsupportedError past 1024 experts.
    """
    if offs_E.dim() != 1 or offs_E.dtype != torch.int32 or not offs_E.shape[0]:
        raise ConfigError(f"offs_E must be a vector of int32, got {offs_E.dtype} {tuple(offs_E.shape)}")
    if offs_E.shape[0] > MAX_EXPERTS:
        raise UnsupportedError(f"offs_E has {offs_E.shape[0]} experts; the layout takes at most {MAX_EXPERTS}")
    if order_S is not None:
        check_vector("order_S", order_S, choices, offs_E)
    if not runs_kernel(offs_E, _layout_kernel):
        return group_layout_ref(offs_E, order_S, choices)
    experts, device = offs_E.shape[0], offs_E.device
    rows = padded_rows(choices, experts)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    slot = torch.empty(rows, dtype=torch.int32, device=device)
    place = torch.full((choices,), -1, dtype=torch.int32, device=device)
    with on_device(offs_E):
        launch(_layout_kernel, (cdiv(rows, _LAYOUT_BLOCK),))(
            offs_E.contiguous(),
            order_S,
            ends,
            slot,
            place,
            rows,
            experts,
            ALIGNMENT=GROUP_ALIGNMENT,
            BLOCK_E=max(16, next_power_of_2(experts)),
            BLOCK_P=_LAYOUT_BLOCK,
            num_warps=4,
        )
    return RowGroups(ends, slot, place)


def choice_layout(index_S: Tensor, experts: int) -> RowGroups:
    """The layout of choices by expert, in their order; `index_S` names each choice's expert.

    Choices that name none, below 0 or past the last, go nowhere. Nothing is sorted: experts are counted block by block.
    Raises ConfigError on a wrong argument.
    """
    if index_S.dim() != 1 or index_S.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"index_S must be a vector of integers, got {index_S.dtype} {tuple(index_S.shape)}")
    if not 0 < experts <= MAX_EXPERTS:
        raise ConfigError(f"experts is {experts}; it must be between 1 and {MAX_EXPERTS}")
    if not runs_kernel(index_S, _place_choices_kernel):
        return choice_layout_ref(index_S, experts)
    choices, width = index_S.shape[0], max(16, next_power_of_2(experts))
    block = max(16, min(_MAX_CHOICES, _CHOICE_TILE // width))
    blocks, rows = max(1, cdiv(choices, block)), padded_rows(choices, experts)
    counts, totals, ends, place = (
        torch.empty(size, dtype=torch.int32, device=index_S.device)
        for size in (blocks * width, width, experts, choices)
    )
    slot = torch.full((rows,), -1, dtype=torch.int32, device=index_S.device)
    tile = {"BLOCK": block, "BLOCK_E": width, "num_warps": 8}
    with on_device(index_S):
        launch(_count_choices_kernel, (blocks,))(index_S, counts, choices, experts, **tile)
        launch(_sum_choices_kernel, (width // _SUM_EXPERTS,))(
            counts, totals, blocks, STRIDE=width, BLOCK_B=_SUM_BLOCKS, BLOCK_E=_SUM_EXPERTS, num_warps=8
        )
        launch(_place_choices_kernel, (blocks,))(
            index_S, counts, totals, ends, slot, place, choices, rows, experts, ALIGNMENT=GROUP_ALIGNMENT, **tile
        )
    return RowGroups(ends, slot, place)


def group_columns(ends_E: Tensor, rows: int) -> GroupColumns:
    """Where the transposed rows of groups lie whose ends are `ends_E`: those of `group_layout`, which cover all rows.

    Raises ConfigError on a wrong argument.
    """
    if ends_E.dim() != 1 or ends_E.dtype != torch.int32 or rows % GROUP_ALIGNMENT:
        raise ConfigError(
            f"ends_E is {ends_E.dtype} {tuple(ends_E.shape)} of {rows} rows; it must be a vector of int32 as "
            f"group_layout gives it, and rows a multiple of {GROUP_ALIGNMENT}"
        )
    if not runs_kernel(ends_E, _columns_kernel):
        return group_columns_ref(ends_E, rows)
    experts = ends_E.shape[0]
    blocks = ends_E.new_empty(padded_columns(rows, experts) // GROUP_ALIGNMENT)
    made = GroupColumns(torch.empty_like(ends_E), blocks)
    with on_device(ends_E):
        launch(_columns_kernel, (cdiv(blocks.shape[0], _LAYOUT_BLOCK),))(
            ends_E, *made, blocks.shape[0], experts, ROWS=GROUP_ALIGNMENT, COLUMNS=COLUMN_ALIGNMENT,
            BLOCK_E=max(16, next_power_of_2(experts)), BLOCK=_LAYOUT_BLOCK, num_warps=4,
        )  # fmt: skip
    return made


def gather_rows(
    q_TK: Tensor, scale_T: Tensor, slot_P: Tensor, top_k: int, *, config: TileConfig | None = None
) -> tuple[Tensor, Tensor]:
    """`(q_PK, scale_P)`: the FP8 row of each padded row's token. Raises ConfigError on a wrong argument."""
    check_matrix("q_TK", q_TK, tuple(ELEMENTS))
    _check_choices("slot_P", slot_P, q_TK)
    check_vector("scale_T", scale_T, q_TK.shape[0], q_TK)
    if top_k < 1:
        raise ConfigError(f"top_k is {top_k}; it must be at least 1")
    p, k = slot_P.shape[0], q_TK.shape[1]
    if not runs_kernel(q_TK, _gather_kernel):
        return gather_rows_ref(q_TK, scale_T, slot_P, top_k)
    codes = torch.empty((p, k), dtype=q_TK.dtype, device=q_TK.device)
    scale = torch.empty(p, dtype=torch.float32, device=q_TK.device)
    config = config or default_gather_config(k)
    if p:
        with on_device(q_TK):
            launch(_gather_kernel, (cdiv(p, config.rows),))(
                q_TK.view(torch.uint8),
                scale_T,
                slot_P,
                codes.view(torch.uint8),
                scale,
                p,
                k,
                q_TK.stride(0),
                top_k,
                ZERO_SCALE=_ZERO_SCALE,
                ROWS=config.rows,
                BLOCK=min(config.columns, next_power_of_2(k)),
                num_warps=config.num_warps,
            )
    return codes, scale


def copy_rows(x_TK: Tensor, slot_P: Tensor, place_S: Tensor, top_k: int) -> Tensor:
    """`x_PK`: the row of each padded row's token, numbers as they are; zeros without one. Raises as `gather_rows`."""
    check_matrix("x_TK", x_TK)
    _check_choices("slot_P", slot_P, x_TK)
    _check_choices("place_S", place_S, x_TK)
    t, k = x_TK.shape
    if place_S.shape[0] != t * top_k:
        raise ConfigError(f"place_S has {place_S.shape[0]} choices of {t} tokens; there must be {top_k} of each")
    if not runs_kernel(x_TK, _spread_kernel):
        return copy_rows_ref(x_TK, slot_P, top_k)
    p = slot_P.shape[0]
    rows_PK = x_TK.new_empty((p, k))
    if p:
        with on_device(x_TK):
            launch(_spread_kernel, (t + cdiv(p, _DEAD_ROWS),))(
                x_TK, place_S, slot_P, rows_PK, t, p, k, x_TK.stride(0),
                TOP_K=top_k, BLOCK=min(_ROW_BLOCK, max(16, next_power_of_2(k))), DEAD=_DEAD_ROWS, num_warps=4,
            )  # fmt: skip
    return rows_PK


def default_gather_config(columns: int) -> TileConfig:
    """Some 8 KiB a program, in rows of at most 4 KiB; not measured yet (benchmarks/bench_moe.py)."""
    return GATHER_CONFIGS[1] if columns > 2048 else GATHER_CONFIGS[0]


def combine_rows(
    x_PD: Tensor, place_S: Tensor, top_k: int, weight_S: Tensor | None = None, *, config: TileConfig | None = None
) -> Tensor:
    """`y_TD`: each token's sum over the rows of its choices, weighted where weights are given."""
    check_matrix("x_PD", x_PD)
    if weight_S is not None:
        check_vector("weight_S", weight_S, place_S.shape[0], x_PD)
    _check_choices("place_S", place_S, x_PD)
    if top_k < 1 or place_S.shape[0] % top_k:
        raise ConfigError(f"top_k is {top_k}; it must divide the {place_S.shape[0]} choices of place_S")
    if not runs_kernel(x_PD, _combine_kernel):
        return combine_rows_ref(x_PD, place_S, top_k, weight_S)
    t, d = place_S.shape[0] // top_k, x_PD.shape[1]
    y_TD = torch.empty((t, d), dtype=x_PD.dtype, device=x_PD.device)
    config = config or COMBINE_CONFIGS[0]
    block = min(config.columns, max(128, next_power_of_2(d)))
    if t and d:
        with on_device(x_PD):
            launch(_combine_kernel, (cdiv(t, config.rows), cdiv(d, block)))(
                x_PD,
                place_S,
                weight_S,
                y_TD,
                t,
                d,
                x_PD.stride(0),
                TOP_K=top_k,
                ROWS=config.rows,
                BLOCK=block,
                num_warps=config.num_warps,
            )
    return y_TD


def _check_choices(name: str, x: Tensor, like: Tensor) -> None:
    if x.dim() != 1 or x.dtype != torch.int32:
        raise ConfigError(f"{name} must be a vector of int32, got {x.dtype} {tuple(x.shape)}; see group_layout")
    check_shape(name, x, tuple(x.shape), like)
