"""Products of the rows of each expert with its weight, rows gathered on the way in and activations on the way out.

    product   C[p] = A[r(p)] W[e(p)]^T * scales + bias[e(p)]
    up        H[p] = A[r(p)] W[e(p)]^T + bias[e(p)],  h[p] = act(H[p])
    grads     dh[p] = dy[r(p)] W[e(p)],  dH[p] = w[p] dh[p] act'(H[p])
              h'[p] = w[p] act(H[p]),  dw[p] = <dh[p], act(H[p])>

r(p) is slot[p] // top_k, or p itself; rows lie as `group_rows.group_layout` puts them, those without a choice read
zeros. Gathered rows are loaded by their addresses, weights through TMA. Programs stay on their SM and take tile after
tile (`persistent`), or each takes one; how many tiles there are is known on the device alone, at most
ceil(P / block_m) + E, so nothing waits for the host. Tiles are walked `group_m` rows of tiles at a time: these share an
expert's weight in L2.
Numerics: bf16 products summed in fp32; FP8 in the tensor cores' own accumulator. H is rounded once and h made of what
    was rounded, so that the backward finds the same h. dw is summed in fp32, tile by tile, always in the same order.
Cost: 2*P*N*K flops. Nothing of P rows is written but the results: no gathered copy of the tokens; the output rows of
    the down projection are needed neither by `grads` nor by the router's gradient.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

# Shapes: T tokens, S choices, P padded rows, E experts, N and K the widths of a product, F hidden width of an expert,
# G = 2F where experts are gated, else F, D width of a token.

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.device.triton_support import launch, num_sms, on_device, runs_kernel, tl, triton
from deepwell.kernels.experts.activation import (
    ExpertActivation,
    constants,
    gated_hidden,
    gated_slopes,
    hidden_and_slopes_ref,
    plain_hidden,
)
from deepwell.kernels.experts.swiglu import weights_of_rows

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


class HiddenGrads(NamedTuple):
    """Gradients of gate and up, the weighted hidden rows again, and the gradient of each row's router weight."""

    d_gate_up_PG: Tensor
    hidden_PF: Tensor
    dw_P: Tensor


# ---- reference: what the kernels must compute, in the plainest torch ----


def expert_of_rows(ends_E: Tensor, rows: int) -> Tensor:
    """The expert of each padded row, counted on the device."""
    places = torch.arange(rows, device=ends_E.device, dtype=torch.int32)
    return torch.searchsorted(ends_E, places, right=True).clamp(max=ends_E.shape[0] - 1)


def row_product_ref(
    a: Tensor,
    w_ENK: Tensor,
    rows: Rows,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    bias_EN: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Reference for `row_product`: a loop over the groups in fp32 (fp64 where given), rounded once."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    a_PK = rows.gathered(a.to(wide) if scales is None else a.to(wide) * scales[0][:, None])
    if rows.slot is not None:
        a_PK = a_PK.masked_fill((rows.slot < 0)[:, None], 0.0)
    w = w_ENK.to(wide) if scales is None else w_ENK.to(wide) * scales[1][:, :, None]
    out, begin = [], 0
    for e, end in enumerate(rows.ends.tolist()):
        part = a_PK[begin:end] @ w[e].T
        out.append(part if bias_EN is None else part + bias_EN[e].to(wide))
        begin = end
    return torch.cat(out).to(dtype or a.dtype)


def up_product_ref(
    x: Tensor, w_EGD: Tensor, rows: Rows, how: ExpertActivation, *, bias_EG: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Reference for `up_product`."""
    gate_up = row_product_ref(x, w_EGD, rows, bias_EN=bias_EG)
    return gate_up, hidden_and_slopes_ref(gate_up, how)[0].to(x.dtype)


def hidden_grads_ref(
    dy: Tensor, w_EFD: Tensor, gate_up_PG: Tensor, weight_S: Tensor, rows: Rows, how: ExpertActivation
) -> HiddenGrads:
    """Reference for `hidden_grads`."""
    assert rows.slot is not None
    dh = row_product_ref(dy, w_EFD, rows, dtype=torch.float32)
    return weighted_grads_ref(dh, gate_up_PG, weights_of_rows(weight_S, rows.slot), how)


def weighted_grads_ref(dh_PF: Tensor, gate_up_PG: Tensor, weight_P: Tensor, how: ExpertActivation) -> HiddenGrads:
    """What `hidden_grads` makes of dh; in fp32, rounded once."""
    h, slopes = hidden_and_slopes_ref(gate_up_PG, how)
    dh, w = dh_PF.float(), weight_P[:, None]
    both = dh * w
    if how.gated:
        both = both.repeat_interleave(2, 1) if how.interleaved else torch.cat([both, both], 1)
    dtype = gate_up_PG.dtype
    return HiddenGrads((both * slopes).to(dtype), (h * w).to(dtype), (dh * h).sum(1))


# ---- configs: what the tuner may choose from ----


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTile:
    """One tile and how it is pipelined; of a gated product `block_n` columns of the gate and as many of up."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    group_m: int = 8
    persistent: bool = True

    @property
    def name(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{tile}-s{self.num_stages}-w{self.num_warps}" + ("" if self.persistent else "-each")


PRODUCT_TILES = (
    RowTile(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8),
    RowTile(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, persistent=False),
    RowTile(block_m=128, block_n=128, block_k=64, num_stages=4, num_warps=8),
    RowTile(block_m=64, block_n=128, block_k=64, num_stages=4, num_warps=4),
)
FP8_TILES = (
    RowTile(block_m=128, block_n=256, block_k=128, num_stages=3, num_warps=8),
    RowTile(block_m=128, block_n=256, block_k=128, num_stages=3, num_warps=8, persistent=False),
    RowTile(block_m=128, block_n=128, block_k=128, num_stages=4, num_warps=8),
    RowTile(block_m=64, block_n=128, block_k=128, num_stages=4, num_warps=4),
)
UP_TILES = (
    RowTile(block_m=128, block_n=128, block_k=64, num_stages=3, num_warps=8),
    RowTile(block_m=128, block_n=128, block_k=64, num_stages=3, num_warps=8, persistent=False),
    RowTile(block_m=64, block_n=64, block_k=64, num_stages=4, num_warps=4),
)
GRADS_TILES = (
    RowTile(block_m=128, block_n=128, block_k=64, num_stages=3, num_warps=8),
    RowTile(block_m=128, block_n=128, block_k=64, num_stages=3, num_warps=8, persistent=False),
    RowTile(block_m=64, block_n=128, block_k=64, num_stages=4, num_warps=4),
)

# ---- kernels ----


@triton.jit
def _table_kernel(ends_ptr, table_ptr, TILES, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr):
    # [how many tiles, then (expert, first row) of each]; every program computes the table of groups.
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
    tl.store(table_ptr + 1 + 2 * t, expert, mask=t < TILES)
    tl.store(table_ptr + 2 + 2 * t, row, mask=t < TILES)
    if tl.program_id(0) == 0:
        tl.store(table_ptr, tl.sum(tiles, axis=0))


@triton.jit
def _tile_of(tile, table_ptr, ends_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(expert, first row, end of the expert's rows, column of tiles)."""
    per_group = GROUP_M * tiles_n
    group = tile // per_group
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = tile % per_group
    t = group * GROUP_M + inside % height
    e = tl.load(table_ptr + 1 + 2 * t)
    return e, tl.load(table_ptr + 2 + 2 * t), tl.load(ends_ptr + e), inside // height


@triton.jit
def _sources(slot_ptr, p, end, TOP_K: tl.constexpr):
    """(the row of A that each row reads, whether it reads one)."""
    live = p < end
    source = p
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + p, mask=live, other=-1)
        live = slot >= 0
        source = slot // TOP_K
    return tl.where(live, source, 0).to(tl.int64), live


@triton.jit
def _a_tile(a_rows, live, k, K, BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr):
    ks = k + tl.arange(0, BLOCK_K)
    if WHOLE_K:
        return tl.load(a_rows + ks[None, :], mask=live[:, None], other=0.0)
    else:
        return tl.load(a_rows + ks[None, :], mask=live[:, None] & (ks < K)[None, :], other=0.0)


@triton.jit
def _w_tile(w_desc, e, n, k, N, K, W_KN: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of an expert's weight, stored [N, K] or [K, N]."""
    if W_KN:
        return w_desc.load([e * K + k, n])
    else:
        return w_desc.load([e * N + n, k]).T


@triton.jit
def _with_bias(acc, bias_ptr, e, ns, N):
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + e * N + ns, mask=ns < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _row_product_kernel(
    a_ptr, w_desc, scale_a_ptr, scale_w_ptr, bias_ptr, slot_ptr, table_ptr, ends_ptr, c_ptr,
    N, K, stride_a, PROGRAMS,
    TOP_K: tl.constexpr, W_KN: tl.constexpr, WHOLE_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.load(table_ptr)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=PERSISTENT):
        e, row, end, column = _tile_of(tile, table_ptr, ends_ptr, tiles_m, tiles_n, GROUP_M)
        p = row + tl.arange(0, BLOCK_M)
        source, live = _sources(slot_ptr, p, end, TOP_K)
        a_rows = a_ptr + source[:, None] * stride_a
        n = column * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            a = _a_tile(a_rows, live, k * BLOCK_K, K, BLOCK_K, WHOLE_K)
            acc = tl.dot(a, _w_tile(w_desc, e, n, k * BLOCK_K, N, K, W_KN), acc)
        ns = n + tl.arange(0, BLOCK_N)
        if scale_a_ptr is not None:
            acc = acc * tl.load(scale_a_ptr + source, mask=live, other=0.0)[:, None]
            acc = acc * tl.load(scale_w_ptr + e * N + ns, mask=ns < N, other=0.0)[None, :]
        acc = _with_bias(acc, bias_ptr, e, ns, N)
        c = c_ptr + p.to(tl.int64)[:, None] * N + ns[None, :]
        tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(p < end)[:, None] & (ns < N)[None, :])


@triton.jit
def _up_kernel(
    a_ptr, w_desc, bias_ptr, slot_ptr, table_ptr, ends_ptr, h_ptr, out_ptr,
    F, K, stride_a, PROGRAMS,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOP_K: tl.constexpr, W_KN: tl.constexpr, WHOLE_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    BOTH: tl.constexpr = GATED and not INTERLEAVED  # a tile of the gate and one of up
    WIDTH: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    G = 2 * F if GATED else F
    tiles_m = tl.load(table_ptr)
    tiles_n = tl.cdiv(F, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=PERSISTENT):
        e, row, end, column = _tile_of(tile, table_ptr, ends_ptr, tiles_m, tiles_n, GROUP_M)
        p = row + tl.arange(0, BLOCK_M)
        source, live = _sources(slot_ptr, p, end, TOP_K)
        a_rows = a_ptr + source[:, None] * stride_a
        n = column * WIDTH
        first = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
        second = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            a = _a_tile(a_rows, live, k * BLOCK_K, K, BLOCK_K, WHOLE_K)
            first = tl.dot(a, _w_tile(w_desc, e, n, k * BLOCK_K, G, K, W_KN), first)
            if BOTH:
                second = tl.dot(a, _w_tile(w_desc, e, F + n, k * BLOCK_K, G, K, W_KN), second)
        ns = n + tl.arange(0, WIDTH)
        width = F if BOTH else G
        h_row = h_ptr + p.to(tl.int64)[:, None] * G
        inside = (p < end)[:, None] & (ns < width)[None, :]
        first = _with_bias(first, bias_ptr, e, ns, G).to(DTYPE)
        tl.store(h_row + ns[None, :], first, mask=inside)
        fs = column * BLOCK_N + tl.arange(0, BLOCK_N)
        if BOTH:
            second = _with_bias(second, bias_ptr, e, F + ns, G).to(DTYPE)
            tl.store(h_row + F + ns[None, :], second, mask=inside)
            hidden = gated_hidden(first.to(tl.float32), second.to(tl.float32), ACT, ALPHA, LIMIT, SHIFT)
        elif INTERLEAVED:
            gate, up = tl.split(tl.reshape(first.to(tl.float32), (BLOCK_M, BLOCK_N, 2)))
            hidden = gated_hidden(gate, up, ACT, ALPHA, LIMIT, SHIFT)
        else:
            hidden, _ = plain_hidden(first.to(tl.float32), ACT, ALPHA)
        out = out_ptr + p.to(tl.int64)[:, None] * F + fs[None, :]
        tl.store(out, hidden.to(DTYPE), mask=(p < end)[:, None] & (fs < F)[None, :])


@triton.jit
def _store_grads(
    dh, gu_desc, dgu_ptr, hidden_ptr, row, end, w, f, F,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Everything that follows from a tile of dh, from column f on; returns its part of each row's dw."""
    DTYPE: tl.constexpr = dgu_ptr.dtype.element_ty
    BLOCK_M: tl.constexpr = dh.shape[0]
    WIDTH: tl.constexpr = dh.shape[1]
    p = row + tl.arange(0, BLOCK_M)
    fs = f + tl.arange(0, WIDTH)
    inside = (p < end)[:, None] & (fs < F)[None, :]
    line = p.to(tl.int64)[:, None] * (2 * F if GATED else F)
    # What is read past the group or the width is neither stored nor summed.
    if INTERLEAVED:
        cs = 2 * f + tl.arange(0, 2 * WIDTH)
        both_inside = (p < end)[:, None] & (cs < 2 * F)[None, :]
        gate, up = tl.split(tl.reshape(gu_desc.load([row, 2 * f]).to(tl.float32), (BLOCK_M, WIDTH, 2)))
        h, slope_gate, slope_up = gated_slopes(gate, up, ACT, ALPHA, LIMIT, SHIFT)
        grads = tl.join(dh * w[:, None] * slope_gate, dh * w[:, None] * slope_up)
        tl.store(dgu_ptr + line + cs[None, :], tl.reshape(grads, (BLOCK_M, 2 * WIDTH)).to(DTYPE), mask=both_inside)
    elif GATED:
        gate = gu_desc.load([row, f]).to(tl.float32)
        up = gu_desc.load([row, F + f]).to(tl.float32)
        h, slope_gate, slope_up = gated_slopes(gate, up, ACT, ALPHA, LIMIT, SHIFT)
        tl.store(dgu_ptr + line + fs[None, :], (dh * w[:, None] * slope_gate).to(DTYPE), mask=inside)
        tl.store(dgu_ptr + line + F + fs[None, :], (dh * w[:, None] * slope_up).to(DTYPE), mask=inside)
    else:
        h, slope = plain_hidden(gu_desc.load([row, f]).to(tl.float32), ACT, ALPHA)
        tl.store(dgu_ptr + line + fs[None, :], (dh * w[:, None] * slope).to(DTYPE), mask=inside)
    hidden = hidden_ptr + p.to(tl.int64)[:, None] * F + fs[None, :]
    tl.store(hidden, (h * w[:, None]).to(DTYPE), mask=inside)
    return tl.sum(tl.where(fs[None, :] < F, dh * h, 0.0), axis=1)


@triton.jit
def _halves(x):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _grads_kernel(
    dy_ptr, w_desc, gu_desc, weight_ptr, slot_ptr, table_ptr, ends_ptr, dgu_ptr, hidden_ptr, dw_ptr,
    F, K, P, stride_dy, PROGRAMS,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOP_K: tl.constexpr, W_KN: tl.constexpr, WHOLE_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.load(table_ptr)
    tiles_n = tl.cdiv(F, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=PERSISTENT):
        e, row, end, column = _tile_of(tile, table_ptr, ends_ptr, tiles_m, tiles_n, GROUP_M)
        p = row + tl.arange(0, BLOCK_M)
        source, live = _sources(slot_ptr, p, end, TOP_K)
        dy_rows = dy_ptr + source[:, None] * stride_dy
        f = column * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            dy = _a_tile(dy_rows, live, k * BLOCK_K, K, BLOCK_K, WHOLE_K)
            acc = tl.dot(dy, _w_tile(w_desc, e, f, k * BLOCK_K, F, K, W_KN), acc)
        slot = tl.load(slot_ptr + p, mask=p < end, other=-1)
        w = tl.load(weight_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
        # Some columns after the others: the tile, gate, up and their gradients do not fit registers at once.
        dw = tl.zeros((BLOCK_M,), dtype=tl.float32)
        QUARTER: tl.constexpr = BLOCK_N // 4
        left, right = _halves(acc)
        for half in tl.static_range(2):
            one, other = _halves(left if half == 0 else right)
            for quarter in tl.static_range(2):
                dw += _store_grads(
                    one if quarter == 0 else other, gu_desc, dgu_ptr, hidden_ptr, row, end, w,
                    f + (2 * half + quarter) * QUARTER, F, ACT, ALPHA, LIMIT, SHIFT, GATED, INTERLEAVED,
                )  # fmt: skip
        tl.store(dw_ptr + column.to(tl.int64) * P + p, dw, mask=p < end)


# ---- public wrappers: check, allocate, launch ----


def row_product(
    a: Tensor,
    w_ENK: Tensor,
    rows: Rows,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    bias_EN: Tensor | None = None,
    tile: RowTile | None = None,
) -> Tensor:
    """`c_PN`, bf16 of FP8 codes with `scales` (of a's rows and [E, N]), else a's dtype; w is a view [E, N, K].

    Raises ConfigError on operands that do not fit, UnsupportedError where rows are not whole lines of 16 bytes.
    """
    _check(a, w_ENK, rows, bias_EN)
    if scales is not None and w_ENK.stride(2) != 1:
        raise UnsupportedError("FP8 products need weights that lie along the contraction; transpose their codes")
    dtype = a.dtype if scales is None else torch.bfloat16
    if not runs_kernel(a, _row_product_kernel):
        return row_product_ref(a, w_ENK, rows, scales=scales, bias_EN=bias_EN, dtype=dtype)
    n, p = w_ENK.shape[1], rows.count(a)
    tile = tile or (PRODUCT_TILES if scales is None else FP8_TILES)[0]
    c_PN = torch.empty((p, n), dtype=dtype, device=a.device)
    scale_a, scale_w = (None, None) if scales is None else scales
    if p:
        with on_device(a):
            launch(_row_product_kernel, (_programs(a, rows, n, tile),))(
                a, _descriptor(w_ENK, tile.block_n, tile.block_k), scale_a, scale_w, _dense(bias_EN),
                rows.slot, _table(a, rows, tile), rows.ends, c_PN,
                n, w_ENK.shape[2], a.stride(0), _programs(a, rows, n, tile),
                **_common(w_ENK, rows, tile),
            )  # fmt: skip
    return c_PN


def up_product(
    x: Tensor,
    w_EGD: Tensor,
    rows: Rows,
    how: ExpertActivation,
    *,
    bias_EG: Tensor | None = None,
    tile: RowTile | None = None,
) -> tuple[Tensor, Tensor]:
    """`(gate_up_PG, hidden_PF)`: the first product as the backward needs it, and its activation. Raises as above."""
    _check(x, w_EGD, rows, bias_EG)
    if not runs_kernel(x, _up_kernel):
        return up_product_ref(x, w_EGD, rows, how, bias_EG=bias_EG)
    g, p = w_EGD.shape[1], rows.count(x)
    f = g // (1 + how.gated)
    tile = tile or UP_TILES[0]
    gate_up = torch.empty((p, g), dtype=x.dtype, device=x.device)
    hidden = torch.empty((p, f), dtype=x.dtype, device=x.device)
    if p:
        with on_device(x):
            launch(_up_kernel, (_programs(x, rows, f, tile),))(
                x, _descriptor(w_EGD, tile.block_n * (1 + how.interleaved), tile.block_k), _dense(bias_EG),
                rows.slot, _table(x, rows, tile), rows.ends, gate_up, hidden,
                f, w_EGD.shape[2], x.stride(0), _programs(x, rows, f, tile),
                GATED=how.gated, INTERLEAVED=how.interleaved, **constants(how), **_common(w_EGD, rows, tile),
            )  # fmt: skip
    return gate_up, hidden


def hidden_grads(
    dy: Tensor,
    w_EFD: Tensor,
    gate_up_PG: Tensor,
    weight_S: Tensor,
    rows: Rows,
    how: ExpertActivation,
    *,
    tile: RowTile | None = None,
) -> HiddenGrads:
    """What the backward needs of the rows between the products; `w_EFD` is a view of the down projection.

    Raises as above.
    """
    _check(dy, w_EFD, rows, None)
    if rows.slot is None:
        raise ConfigError("rows.slot is None; gradients of hidden rows need the choice of each row")
    if not runs_kernel(dy, _grads_kernel):
        return hidden_grads_ref(dy, w_EFD, gate_up_PG, weight_S, rows, how)
    f, p = w_EFD.shape[1], rows.count(dy)
    tile = tile or GRADS_TILES[0]
    grads, hidden = torch.empty_like(gate_up_PG), gate_up_PG.new_empty((p, f))
    parts = torch.empty((triton.cdiv(f, tile.block_n), p), dtype=torch.float32, device=dy.device)
    if p:
        with on_device(dy):
            launch(_grads_kernel, (_programs(dy, rows, f, tile),))(
                dy, _descriptor(w_EFD, tile.block_n, tile.block_k),
                _block_descriptor(gate_up_PG, tile.block_m, tile.block_n // 4 * (1 + how.interleaved)),
                weight_S, rows.slot, _table(dy, rows, tile), rows.ends, grads, hidden, parts,
                f, w_EFD.shape[2], p, dy.stride(0), _programs(dy, rows, f, tile),
                GATED=how.gated, INTERLEAVED=how.interleaved, **constants(how), **_common(w_EFD, rows, tile),
            )  # fmt: skip
    return HiddenGrads(grads, hidden, parts.sum(0))


def is_kn(w_ENK: Tensor) -> bool:
    """Whether the weight is stored [E, K, N]."""
    return w_ENK.stride(2) != 1


def _common(w_ENK: Tensor, rows: Rows, tile: RowTile) -> dict[str, Any]:
    return {
        "TOP_K": rows.top_k,
        "W_KN": is_kn(w_ENK),
        "WHOLE_K": w_ENK.shape[2] % tile.block_k == 0,
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
    return triton.cdiv(count, tile.block_m) + rows.ends.shape[0]


def _programs(a: Tensor, rows: Rows, columns: int, tile: RowTile) -> int:
    tiles = _tiles(rows, rows.count(a), tile) * triton.cdiv(columns, tile.block_n)
    return min(tiles, num_sms(a)) if tile.persistent else tiles


def _table(a: Tensor, rows: Rows, tile: RowTile) -> Tensor:
    tiles, experts = _tiles(rows, rows.count(a), tile), rows.ends.shape[0]
    table = torch.empty(1 + 2 * tiles, dtype=torch.int32, device=a.device)
    launch(_table_kernel, (triton.cdiv(tiles, _TABLE_BLOCK),))(
        rows.ends, table, tiles, experts,
        BLOCK_M=tile.block_m, BLOCK_E=max(16, triton.next_power_of_2(experts)), BLOCK_T=_TABLE_BLOCK,
    )  # fmt: skip
    return table


def _descriptor(w_ENK: Tensor, block_n: int, block_k: int) -> Any:
    """Of all experts' weights one below the other, as they are stored."""
    if is_kn(w_ENK):
        return _block_descriptor(w_ENK.transpose(1, 2).reshape(-1, w_ENK.shape[1]), block_k, block_n)
    return _block_descriptor(w_ENK.reshape(-1, w_ENK.shape[2]), block_n, block_k)


def _block_descriptor(x: Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, [rows, columns])


def _dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _check(a: Tensor, w_ENK: Tensor, rows: Rows, bias_EN: Tensor | None) -> None:
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
