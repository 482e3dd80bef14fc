"""Products of the rows of each expert with its weight, rows gathered on the way in and activations on the way out.

    product   C[p] = A[r(p)] W[e(p)]^T * scales + bias[e(p)]
    up        H[p] = A[r(p)] W[e(p)]^T + bias[e(p)],  h[p] = act(H[p])

r(p) is slot[p] // top_k, or p itself; rows lie as `group_rows.group_layout` puts them, those without a choice read
zeros. Gathered rows are loaded by their addresses, others and weights through TMA. Programs stay on their SM and take
tile after tile (`persistent`), or each takes one; `row_tiles` says which there are and how they store.
Numerics: bf16 products summed in fp32; FP8 in the tensor cores' own accumulator. H is rounded once and h made of what
    was rounded, so that the backward finds the same h.
Cost: 2*P*N*K flops. Nothing of P rows is written but the results.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

# Shapes: T tokens, S choices, P padded rows, E experts, N and K the widths of a product, F hidden width of an expert,
# G = 2F where experts are gated, else F, D width of a token.

from typing import Any

import torch
from torch import Tensor

from deepwell.errors import UnsupportedError
from deepwell.kernels.device.ragged_rows import store_rows
from deepwell.kernels.device.triton_support import block_descriptor, launch, on_device, runs_kernel, tl, triton
from deepwell.kernels.experts.activation import (
    ExpertActivation,
    constants,
    gated_hidden,
    hidden_and_slopes_ref,
    plain_hidden,
)
from deepwell.kernels.experts.row_tiles import (
    Rows,
    RowTile,
    a_tile,
    check_operands,
    descriptor,
    groups,
    halves,
    is_kn,
    programs,
    sources_of,
    stored_rows,
    table,
    tile_constants,
    tile_of,
    w_tile,
)

# ---- reference: what the kernels must compute, in the plainest torch ----


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
    out = []
    for e, part in groups(rows.ends):
        c = a_PK[part] @ w[e].T
        out.append(c if bias_EN is None else c + bias_EN[e].to(wide))
    return torch.cat(out).to(dtype or a.dtype)


def up_product_ref(
    x: Tensor, w_EGD: Tensor, rows: Rows, how: ExpertActivation, *, bias_EG: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    gate_up = row_product_ref(x, w_EGD, rows, bias_EN=bias_EG)
    return gate_up, hidden_and_slopes_ref(gate_up, how)[0].to(x.dtype)


# ---- configs: what the tuner may choose from ----


PRODUCT_TILES = (
    RowTile(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8),
    RowTile(block_m=128, block_n=256, block_k=64, num_stages=4, num_warps=8, persistent=False),
    RowTile(block_m=128, block_n=128, block_k=64, num_stages=3, num_warps=4, persistent=False),  # two an SM
    RowTile(block_m=64, block_n=128, block_k=64, num_stages=4, num_warps=4, per_sm=2),
    RowTile(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, stores="tma"),
    RowTile(block_m=128, block_n=256, block_k=64, num_stages=4, num_warps=8, stores="late"),
    RowTile(block_m=128, block_n=128, block_k=64, num_stages=3, num_warps=4, stores="halves", per_sm=2),
)
FP8_TILES = (
    RowTile(block_m=128, block_n=256, block_k=128, num_stages=3, num_warps=8),
    RowTile(block_m=128, block_n=256, block_k=128, num_stages=4, num_warps=8, persistent=False),
    RowTile(block_m=128, block_n=128, block_k=128, num_stages=3, num_warps=4, persistent=False),
    RowTile(block_m=64, block_n=128, block_k=128, num_stages=4, num_warps=4, per_sm=2),
    RowTile(block_m=128, block_n=256, block_k=128, num_stages=3, num_warps=8, stores="tma"),
    RowTile(block_m=128, block_n=256, block_k=128, num_stages=4, num_warps=8, stores="late"),
    RowTile(block_m=128, block_n=128, block_k=128, num_stages=3, num_warps=4, stores="halves", per_sm=2),
)
UP_TILES = (
    RowTile(block_m=128, block_n=128, block_k=64, num_stages=3, num_warps=8),
    RowTile(block_m=128, block_n=128, block_k=64, num_stages=4, num_warps=8, persistent=False),
    RowTile(block_m=64, block_n=64, block_k=64, num_stages=4, num_warps=4, per_sm=2),
    RowTile(block_m=128, block_n=128, block_k=64, num_stages=3, num_warps=8, stores="tma"),
    RowTile(block_m=128, block_n=64, block_k=64, num_stages=3, num_warps=4, stores="tma", per_sm=2),
)

# ---- kernels ----


@triton.jit
def _both_tiles(w_desc, e, f, k, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, W_KN: tl.constexpr):
    """[BLOCK_K, 2 BLOCK_N]: columns f of the gate, then of up, of weights seen as [E, 2, F, K] or [E, K, 2, F]."""
    if W_KN:
        return tl.reshape(w_desc.load([e * K + k, 0, f]), (BLOCK_K, 2 * BLOCK_N))
    else:
        return tl.reshape(w_desc.load([2 * e, f, k]), (2 * BLOCK_N, BLOCK_K)).T


@triton.jit
def _with_bias(acc, bias_ptr, e, ns, N, stride):
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + e * stride + ns, mask=ns < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _store(ptr, desc, tile, p, row, end, n, N, stride):
    """Store rows p, which are those from `row` on, up to `end`, and columns from n on up to N."""
    if desc is None:
        ns = n + tl.arange(0, tile.shape[1])
        at = ptr + p.to(tl.int64)[:, None] * stride + ns[None, :]
        tl.store(at, tile, mask=(p < end)[:, None] & (ns < N)[None, :])
    else:
        store_rows(desc, tile, row, end, n)


@triton.jit
def _finished(acc, scale_a_ptr, scale_w_ptr, bias_ptr, source, live, e, n, N, DTYPE: tl.constexpr):
    """Sums of columns from n on, with their scales and bias, rounded."""
    ns = n + tl.arange(0, acc.shape[1])
    if scale_a_ptr is not None:
        acc = acc * tl.load(scale_a_ptr + source, mask=live, other=0.0)[:, None]
        acc = acc * tl.load(scale_w_ptr + e * N + ns, mask=ns < N, other=0.0)[None, :]
    return _with_bias(acc, bias_ptr, e, ns, N, N).to(DTYPE)


@triton.jit
def _row_product_kernel(
    a_ptr, w_desc, scale_a_ptr, scale_w_ptr, bias_ptr, slot_ptr, table_ptr, c_ptr, c_desc,
    N, K, stride_a, PROGRAMS,
    TOP_K: tl.constexpr, W_KN: tl.constexpr, WHOLE_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PERSISTENT: tl.constexpr, HALVES: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = c_ptr.dtype.element_ty
    HALF: tl.constexpr = BLOCK_N // 2
    tiles_m = tl.load(table_ptr)
    tiles_n, steps = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    if LATE:
        late, late_row, late_end, late_n = tl.zeros((BLOCK_M, HALF), dtype=DTYPE), 0, 0, 0
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=PERSISTENT):
        e, row, end, column = tile_of(tile, table_ptr, tiles_m, tiles_n, GROUP_M)
        p = row + tl.arange(0, BLOCK_M)
        source, live = sources_of(slot_ptr, p, end, TOP_K)
        if slot_ptr is not None:
            a_rows = a_ptr + source[:, None] * stride_a
        n = column * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        tl.assume(steps > 0)  # without it there is a second version of the loops, for products of no columns
        for k in range(0, steps):
            if slot_ptr is None:
                a = a_ptr.load([row, k * BLOCK_K])  # rows of the next group give rows that are not stored
            else:
                a = a_tile(a_rows, live, k * BLOCK_K, K, BLOCK_K, WHOLE_K)
            acc = tl.dot(a, w_tile(w_desc, e, n, k * BLOCK_K, N, K, W_KN), acc)
            if LATE:
                if k == 0:
                    store_rows(c_desc, late, late_row, late_end, late_n)
        if HALVES:
            left, right = halves(acc)
            left = _finished(left, scale_a_ptr, scale_w_ptr, bias_ptr, source, live, e, n, N, DTYPE)
            store_rows(c_desc, left, row, end, n)
            right = _finished(right, scale_a_ptr, scale_w_ptr, bias_ptr, source, live, e, n + HALF, N, DTYPE)
            if LATE:
                late, late_row, late_end, late_n = right, row, end, n + HALF
            else:
                store_rows(c_desc, right, row, end, n + HALF)
        else:
            c = _finished(acc, scale_a_ptr, scale_w_ptr, bias_ptr, source, live, e, n, N, DTYPE)
            _store(c_ptr, c_desc, c, p, row, end, n, N, N)
    if LATE:
        store_rows(c_desc, late, late_row, late_end, late_n)


@triton.jit
def _up_kernel(
    a_ptr, w_desc, bias_ptr, slot_ptr, table_ptr, h_ptr, out_ptr, h_desc, second_desc, out_desc,
    F, K, stride_a, PROGRAMS,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOP_K: tl.constexpr, W_KN: tl.constexpr, WHOLE_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    G = 2 * F if GATED else F
    tiles_m = tl.load(table_ptr)
    tiles_n, steps = tl.cdiv(F, BLOCK_N), tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=PERSISTENT):
        e, row, end, column = tile_of(tile, table_ptr, tiles_m, tiles_n, GROUP_M)
        p = row + tl.arange(0, BLOCK_M)
        source, live = sources_of(slot_ptr, p, end, TOP_K)
        a_rows = a_ptr + source[:, None] * stride_a
        f = column * BLOCK_N
        # One sum for gate and up: with two of them a persistent kernel's products wait for each other.
        acc = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
        tl.assume(steps > 0)
        for k in range(0, steps):
            a = a_tile(a_rows, live, k * BLOCK_K, K, BLOCK_K, WHOLE_K)
            if GATED and not INTERLEAVED:
                w = _both_tiles(w_desc, e, f, k * BLOCK_K, K, BLOCK_N, BLOCK_K, W_KN)
            else:
                w = w_tile(w_desc, e, column * WIDTH, k * BLOCK_K, G, K, W_KN)
            acc = tl.dot(a, w, acc)
        fs = f + tl.arange(0, BLOCK_N)
        if GATED and not INTERLEAVED:
            first, second = halves(acc)
            first = _with_bias(first, bias_ptr, e, fs, F, G).to(DTYPE)
            second = _with_bias(second, bias_ptr + F if bias_ptr is not None else None, e, fs, F, G).to(DTYPE)
            _store(h_ptr, h_desc, first, p, row, end, f, F, G)
            _store(h_ptr + F, second_desc, second, p, row, end, f, F, G)
            hidden = gated_hidden(first.to(tl.float32), second.to(tl.float32), ACT, ALPHA, LIMIT, SHIFT)
        else:
            n = column * WIDTH
            both = _with_bias(acc, bias_ptr, e, n + tl.arange(0, WIDTH), G, G).to(DTYPE)
            if GATED and h_desc is not None:  # all that is stored then has one shape, and takes turns in a buffer
                first, second = halves(both)
                store_rows(h_desc, first, row, end, n)
                store_rows(h_desc, second, row, end, n + BLOCK_N)
            else:
                _store(h_ptr, h_desc, both, p, row, end, n, G, G)
            if GATED:
                gate, up = tl.split(tl.reshape(both.to(tl.float32), (BLOCK_M, BLOCK_N, 2)))
                hidden = gated_hidden(gate, up, ACT, ALPHA, LIMIT, SHIFT)
            else:
                hidden, _ = plain_hidden(both.to(tl.float32), ACT, ALPHA)
        _store(out_ptr, out_desc, hidden.to(DTYPE), p, row, end, f, F, F)


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
    """`c_PN`, bf16 of FP8 values with `scales` (of a's rows and [E, N]), else a's dtype; w is a view [E, N, K].

    Raises ConfigError on operands that do not fit, UnsupportedError where rows are not whole lines of 16 bytes.
    """
    check_operands(a, w_ENK, rows, bias_EN)
    if scales is not None and w_ENK.stride(2) != 1:
        raise UnsupportedError("FP8 products need weights that lie along the contraction; transpose their FP8 values")
    dtype = a.dtype if scales is None else torch.bfloat16
    if not runs_kernel(a, _row_product_kernel):
        return row_product_ref(a, w_ENK, rows, scales=scales, bias_EN=bias_EN, dtype=dtype)
    n, p = w_ENK.shape[1], rows.count(a)
    tile = tile or (PRODUCT_TILES if scales is None else FP8_TILES)[0]
    c_PN = torch.empty((p, n), dtype=dtype, device=a.device)
    scale_a, scale_w = (None, None) if scales is None else scales
    if p:
        in_halves = tile.stores in ("halves", "late")
        with on_device(a):
            launch(_row_product_kernel, (programs(a, rows, n, tile),))(
                a if rows.slot is not None else block_descriptor(a, tile.block_m, tile.block_k),
                descriptor(w_ENK, tile.block_n, tile.block_k), scale_a, scale_w, _dense(bias_EN),
                rows.slot, table(a, rows, tile), c_PN, stored_rows(c_PN, tile, tile.block_n // (1 + in_halves)),
                n, w_ENK.shape[2], a.stride(0), programs(a, rows, n, tile),
                HALVES=in_halves, LATE=tile.stores == "late", **tile_constants(w_ENK, rows, tile),
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
    check_operands(x, w_EGD, rows, bias_EG)
    if not runs_kernel(x, _up_kernel):
        return up_product_ref(x, w_EGD, rows, how, bias_EG=bias_EG)
    g, p = w_EGD.shape[1], rows.count(x)
    f = g // (1 + how.gated)
    tile = tile or UP_TILES[0]
    gate_up = torch.empty((p, g), dtype=x.dtype, device=x.device)
    hidden = torch.empty((p, f), dtype=x.dtype, device=x.device)
    if p:
        with on_device(x):
            launch(_up_kernel, (programs(x, rows, f, tile),))(
                x, _up_descriptor(w_EGD, tile, how), _dense(bias_EG),
                rows.slot, table(x, rows, tile), gate_up, hidden,
                *_up_stored(gate_up, hidden, tile, how),
                f, w_EGD.shape[2], x.stride(0), programs(x, rows, f, tile),
                **constants(how), **tile_constants(w_EGD, rows, tile),
            )  # fmt: skip
    return gate_up, hidden


def _up_descriptor(w_EGD: Tensor, tile: RowTile, how: ExpertActivation) -> Any:
    """Of the first projection; where gates come first, a block has the same columns of the gate and of up."""
    if not how.gated or how.interleaved:
        return descriptor(w_EGD, tile.block_n * (1 + how.interleaved), tile.block_k)
    e, g, d = w_EGD.shape
    if is_kn(w_EGD):
        return block_descriptor(w_EGD.transpose(1, 2).reshape(e * d, 2, g // 2), tile.block_k, 2, tile.block_n)
    return block_descriptor(w_EGD.reshape(2 * e, g // 2, d), 2, tile.block_n, tile.block_k)


def _dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _up_stored(gate_up: Tensor, hidden: Tensor, tile: RowTile, how: ExpertActivation) -> tuple[Any, Any, Any]:
    """What the three stores of a tile go through: gate, up, hidden rows."""
    out = stored_rows(hidden, tile, tile.block_n)
    if not how.gated or how.interleaved:
        return stored_rows(gate_up, tile, tile.block_n), None, out
    gate, up = gate_up.chunk(2, dim=1)
    return stored_rows(gate, tile, tile.block_n), stored_rows(up, tile, tile.block_n), out
